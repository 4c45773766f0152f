"""Examples: as long as asked for, the same for the same seed, and with what they ask for in them."""

import copy
import gzip
import json
import re
from itertools import pairwise

import pytest
from tokenizers import processors

from kvstrata.core import InputError, SpecError
from kvstrata.evaluate import TASKS, Settings
from kvstrata.evaluate.task import choose
from kvstrata.evaluate.tasks.ruler import MAKERS, SPLITS
from kvstrata.evaluate.texts import novel, sentences
from kvstrata.evaluate.words import ADJECTIVES, NOUNS
from kvstrata.hf.framing import beginning, encode, frame_of, pieces

from .conftest import byte_tokenizer

LENGTHS = {"niah": 2048, "agent": 2048, "ruler-cwe": 8192, "ruler-fwe": 2048}


def made(task, tokenizer, length=None, **options):
    source = TASKS[task].source
    length = length or LENGTHS.get(task, 1536)
    settings = Settings(options.pop("contexts", 2), length, **options)
    return source.make(tokenizer, settings.contexts, length, settings)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_same_seed_gives_the_same_examples(task, tokenizer, data):
    seeds = (0, 0, 1) if task != "agent" else (0, 0)
    options = {"contexts": 1} if task == "niah" else {}
    first, second, *other = (made(task, tokenizer, data=data, seed=seed, **options) for seed in seeds)
    assert first == second
    assert not other or other[0] != first
    assert len({example.name for example in first}) == len(first)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_context_is_at_most_as_long_as_asked_for(task, tokenizer, data):
    length = LENGTHS.get(task, 1536)
    for example in made(task, tokenizer, data=data, **({"contexts": 1} if task == "niah" else {})):
        assert 0 < len(example.context) <= length
        if task.startswith("ruler"):
            assert example.tokens + TASKS[task].source.new_tokens <= length
            assert example.tokens > length / 2


@pytest.mark.parametrize("task", ["needle", "words"])
def test_needles_stand_at_their_depths_and_every_kind_comes_to_every_depth(task, tokenizer):
    found = set()
    for example in made(task, tokenizer, length=3000, contexts=4):
        text = tokenizer.decode(example.context)
        for probe in example.probes:
            value = tokenizer.decode(probe.answer).strip()
            place = text.index(value) / len(text)
            assert probe.tags["depth"] - 0.12 < place < probe.tags["depth"] + 0.17
            assert text.count(value) == 1
            assert value not in tokenizer.decode(probe.question)
            found.add((probe.tags["kind"], probe.tags["depth"]))
    assert len(found) == 8


def test_niah_counts_depth_from_the_question(tokenizer):
    for example in made("niah", tokenizer, length=4096, contexts=1):
        (probe,) = example.probes
        place = tokenizer.decode(example.context).index(tokenizer.decode(probe.answer).strip())
        if probe.tags["length"] == 4096:
            assert 1 - place / 4096 == pytest.approx(probe.tags["depth"], abs=0.12)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_what_ruler_asks_for_is_in_the_context_and_not_in_the_question(name, tokenizer):
    for example in made(f"ruler-{name}", tokenizer):
        (probe,) = example.probes
        text, question = tokenizer.decode(example.context), tokenizer.decode(probe.question)
        for reference in probe.references:
            assert reference in text
            assert reference not in question
        assert SPLITS[name.split("_")[0]].search(text + question)


def test_common_words_are_the_most_common(tokenizer):
    (example, _) = made("ruler-cwe", tokenizer, length=8192)
    words = [w for w in tokenizer.decode(example.context).split() if w.isalpha()]
    counts = sorted({w: words.count(w) for w in set(words)}.items(), key=lambda item: -item[1])
    assert {w for w, n in counts if n >= counts[9][1]} >= set(example.probes[0].references)


def test_the_three_most_frequent_words_stand_apart(tokenizer):
    for length in (2048, 4096):
        for example in made("ruler-fwe", tokenizer, length=length):
            words = tokenizer.decode(example.context).partition("words.\n")[2].split()
            counts = sorted((words.count(word) for word in set(words)), reverse=True)
            assert [words.count(word) for word in example.probes[0].references] == counts[:3]
            assert counts[2] > counts[3]


def test_no_word_of_ours_is_inside_another():
    words = [*ADJECTIVES, *NOUNS]
    assert not [(a, b) for a in words for b in words if a != b and a in b]


def test_keys_in_the_filling_are_never_the_one_asked_for(tokenizer):
    for example in made("ruler-niah_multikey_2", tokenizer, length=8192):
        keys = re.findall(r"numbers for (\S+) is", tokenizer.decode(example.context))
        assert len(keys) == len(set(keys))


def test_documents_do_not_overlap(tokenizer):
    for seed in (0, 1):
        found = made("ppl", tokenizer, length=1000, contexts=40, seed=seed)
        assert len({tuple(e.context + e.continuation) for e in found}) == 40
        text = encode(tokenizer, novel())
        places = [range(n * (len(text) // 40), len(text)) for n in range(40)]
        pairs = zip(places, found, strict=True)
        starts = [next(i for i in place if text[i : i + 99] == e.context[:99]) for place, e in pairs]
        assert all(b - a >= 1250 for a, b in pairwise(starts))


def test_a_text_begins_as_the_tokenizer_lets_texts_begin(tokenizer):
    assert beginning(tokenizer) == []
    first = copy.deepcopy(tokenizer)
    first.bos_token = "<|user|>"
    assert beginning(first) == [], "it has such a token, but does not put it there by itself"
    ids = [("<|user|>", first.bos_token_id)]
    first.backend_tokenizer.post_processor = processors.TemplateProcessing("<|user|> $A", special_tokens=ids)
    plain, found = made("ppl", tokenizer, length=100), made("ppl", first, length=100)
    for a, b in zip(plain, found, strict=True):
        assert b.context == [first.bos_token_id, *a.context[:99]]
        assert b.continuation == [a.context[99], *a.continuation[:24]]


def test_a_haystack_without_words_says_so(tokenizer, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n\n ")
    with pytest.raises(InputError, match="no sentences"):
        made("needle", tokenizer, haystack=tmp_path / "empty.txt")


def test_the_answer_of_two_hops_is_the_friends_town(tokenizer):
    (example, _) = made("ruler-qa_2", tokenizer)
    text, question = tokenizer.decode(example.context), tokenizer.decode(example.probes[0].question)
    person = question.partition("best friend of ")[2].partition(" live?")[0]
    friend = text.partition(f"The best friend of {person} is ")[2].partition(".")[0]
    assert f"{friend} lives in {example.probes[0].references[0]} " in text


def test_published_ruler_files_are_read_instead(tokenizer, tmp_path):
    (tmp_path / "ruler").mkdir()
    text = "Memorize it.\nOne of the special magic uuids for a-b is: c-d.\nWhat is the special magic uuid for a-b "
    text += "mentioned in the provided text? The special magic uuid for a-b mentioned in the provided text is"
    with gzip.open(tmp_path / "ruler" / "niah_multikey_3_1024.jsonl.gz", "wt") as file:
        file.write(json.dumps({"input": text, "outputs": ["c-d"]}) + "\n")
    (example,) = made("ruler-niah_multikey_3", tokenizer, length=1024, contexts=1, data=tmp_path)
    question = tokenizer.decode(example.probes[0].question)
    assert tokenizer.decode(example.context).endswith("is: c-d.")
    assert question.startswith("\nWhat is")
    assert question.endswith("<|assistant|>The special magic uuid for a-b mentioned in the provided text is")
    with pytest.raises(InputError, match="has 1 examples"):
        made("ruler-niah_multikey_3", tokenizer, length=1024, contexts=2, data=tmp_path)


def test_traces_are_of_the_evaluation_side_and_late_words_are_far_from_where_they_were_said(tokenizer, data):
    examples = made("agent", tokenizer, data=data)
    assert [example.name for example in examples] == ["30-0", "31-0"]
    for example in examples:
        turns = example.turns
        assert [turn.scored for turn in turns] == [True, False, True, False]
        assert tokenizer.decode(example.context).endswith("<|end|><|assistant|>")
        assert not any(turns[0].late)
        marked = [token for token, late in zip(turns[2].ids, turns[2].late, strict=True) if late]
        assert tokenizer.decode(marked) == f"mia_{example.name[:2]}77"


def test_a_copied_line_is_the_line_of_the_context(tokenizer):
    for example in made("copy", tokenizer):
        text = tokenizer.decode(example.context)
        for probe in example.probes:
            answer = tokenizer.decode(probe.answer)
            assert (f"\n{answer}\n" if probe.tags["kind"] == "json" else f'"{answer}"') in text


def test_a_model_without_a_chat_template_gets_plain_text():
    plain = byte_tokenizer(chat=None)
    assert frame_of(plain).before == ""
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    assert pieces(plain, messages) == [("user: ", "Hi.\n\n"), ("assistant: ", "Yes?\n\n")]
    assert made("needle", plain)[0].probes


def test_pieces_put_together_are_the_whole_chat(tokenizer):
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "So."},
    ]
    joined = "".join(before + content for before, content in pieces(tokenizer, messages))
    assert joined == tokenizer.apply_chat_template(messages, tokenize=False)


def test_the_shipped_novel_is_the_evaluation_side_without_a_header():
    assert novel().startswith("Chapter 41")
    assert "Gutenberg" not in novel()
    assert "Chapter 40" not in novel()
    assert len(sentences(novel())) > 2000


def test_names_of_tasks_may_end_in_a_star():
    assert len(choose(["ruler-*"])) == 13
    assert list(choose(["ppl", "needle", "ppl"])) == ["ppl", "needle"]
    with pytest.raises(SpecError, match="Did you mean 'needle'"):
        choose(["needel"])


REFUSED = {
    "too few words": ("ppl", {"length": 150_000}, "need 375000"),
    "no room for needles": ("needle", {"length": 256}, "give a larger --length"),
    "no room for items": ("copy", {"length": 128}, "give a larger --length"),
    "no data": ("agent", {}, "needs --data DIR with agent/taubench"),
    "data elsewhere": ("agent", {"data": "empty"}, "which is not there"),
    "too short": ("ruler-cwe", {"length": 128}, "does not fit into --length 128"),
    "too many": ("agent", {"data": "data", "contexts": 5}, "has 2 traces for evaluation"),
}


@pytest.mark.parametrize(("task", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_made_says_why(task, options, message, tokenizer, data, tmp_path):
    places = {"empty": tmp_path, "data": data}
    options = {key: places[value] if key == "data" else value for key, value in options.items()}
    with pytest.raises(InputError, match=message):
        made(task, tokenizer, **options)

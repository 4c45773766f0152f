"""Training of the surrogate: what is fitted, what is judged, and what a stopped run leaves."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvstrata
from kvstrata.calibrate import kvzap
from kvstrata.calibrate.corpus import library, novel, wikipedia
from kvstrata.core import InputError, SpecError
from kvstrata.policy.surrogate import read_surrogate, write_surrogate

from ..contract.runs import kv, prompt, tiny
from ..contract.test_kvzap import Tokenizer


def test_the_ridge_is_the_solution_of_its_normal_equations():
    x, true = torch.randn(400, 5), torch.randn(2, 5)
    w, b = kvzap.ridge(x, x @ true.T + 3 + 0.01 * torch.randn(400, 2))
    assert torch.allclose(w, true, atol=0.02)
    assert torch.allclose(b, torch.full((2,), 3.0), atol=0.02)
    weak, _ = kvzap.ridge(x[:3], x[:3] @ true.T)  # fewer tokens than numbers: the penalty decides
    assert weak.isfinite().all()


def test_an_mlp_learns_what_no_line_can_and_speaks_in_the_targets_own_units():
    torch.manual_seed(0)
    x = 5 * torch.randn(31000, 32)
    y = torch.stack([x[:, 0].abs() * 10 - 100, -x[:, 1].abs()], dim=1)
    line = kvzap.predicted(kvzap.ridge(x[:30000], y[:30000]), x[30000:])
    bent = kvzap.predicted(kvzap.mlp(x[:30000], y[:30000], 0), x[30000:])
    r2 = [[float(kvzap.correlation(guess[:, i], y[30000:, i]) ** 2) for i in (0, 1)] for guess in (line, bent)]
    assert max(r2[0]) < 0.05
    assert min(r2[1]) > 0.8
    assert abs(float(bent[:, 0].mean() - y[30000:, 0].mean())) < 5


def test_auc_by_counting_pairs():
    said, true = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.3]), torch.tensor([1.0, 5.0, 2.0, 3.0, 4.0])
    upper, lower = [said[i] for i in (1, 4)], [said[i] for i in (0, 2, 3)]
    pairs = [float(a > b) for a in upper for b in lower]
    assert kvzap.auc(said, true) == pytest.approx(sum(pairs) / len(pairs))


def test_documents_are_split_whole_and_from_every_text(tmp_path):
    files = [tmp_path / str(i) for i in range(40)]
    trained, judged = kvzap.split(files)
    assert sorted(trained + judged) == sorted(files)
    assert len(judged) == 4
    assert len({files.index(file) // 10 for file in judged}) == 4
    with pytest.raises(InputError, match="give more --documents"):
        kvzap.split(files[:1])


def test_a_stopped_collection_goes_on_and_training_reads_it(tmp_path):
    documents = [prompt(60, seed=seed)[0].tolist() for seed in range(4)]
    calls = []
    with pytest.raises(KeyboardInterrupt):
        kvzap.collect(
            tiny(), Tokenizer(), documents, tmp_path, 30, tick=lambda: calls.append(1) or _stop(len(calls) == 2)
        )
    left = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(left) == 2
    files = kvzap.collect(tiny(), Tokenizer(), documents, tmp_path, 30)
    assert len(files) == 4
    assert all(file.stat().st_mtime_ns == left[file.name] for file in files if file.name in left), "not made again"
    found = load_file(files[0])
    assert found["hidden"].shape == (3, 30, 64)
    assert found["scores"].shape == (3, 2, 30)
    assert found["scores"].isfinite().all()
    again = tmp_path / "again"
    kvzap.collect(tiny(), Tokenizer(), documents[:1], again, 30)
    assert torch.equal(load_file(again / files[0].name)["scores"], found["scores"])
    for kind, parts in (("linear", 2), ("mlp", 4)):
        weights, fit = kvzap.train(files, kind)
        assert [len(layer) for layer in weights] == [parts] * 3
        assert len(fit.r2) == 3
        assert 0 <= fit.auc <= 1
        assert fit.thresholds["0.3"] <= fit.thresholds["0.5"] <= fit.thresholds["0.9"]
        write_surrogate(tmp_path / kind, weights, {"thresholds": fit.thresholds})
        read = read_surrogate(tmp_path / kind)
        x = torch.randn(1, 7, 64)
        assert torch.allclose(read(1, x)[0].T, kvzap.predicted(weights[1], x[0]), atol=1e-5)
        assert read.threshold(0.5) == fit.thresholds["0.5"]
        with pytest.raises(SpecError, match=r"no threshold for 0\.42"):
            read.threshold(0.42)


def _stop(now):
    if now:
        raise KeyboardInterrupt


def test_files_in_the_published_layout_load(tmp_path):
    """Names and config keys of the checkpoints on the hub; 0.1 for a model of two layers."""
    tensors = {f"layers.{i}.{part}.{name}": torch.randn(shape) for i in range(2) for part, name, shape in (
        (0, "weight", (4, 8)), (0, "bias", (4,)), (2, "weight", (3, 4)), (2, "bias", (3,)))}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "kvzap", "input_dim": 8, "output_dim": 3, "hidden_dim": 4, "n_modules": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["KVzapModel"], "dtype": "bfloat16"}))
    found, x = read_surrogate(tmp_path), torch.randn(2, 5, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU(), torch.nn.Linear(4, 3))
    module.load_state_dict({key.removeprefix("layers.1."): value for key, value in tensors.items() if ".1." in key[:9]})
    assert torch.allclose(found(1, x), module(x).transpose(1, 2), atol=1e-6)
    (tmp_path / "config.json").write_text(json.dumps({**config, "output_dim": 8}))
    with pytest.raises(SpecError, match="shapes"):
        read_surrogate(tmp_path)


def test_the_training_side_ends_where_evaluation_begins():
    text = "head\nChapter 1\nfirst\nChapter 40\nlast\nChapter 41\nnot this\n"
    assert novel(text).endswith("last\n")
    assert "head" not in novel(text)
    with pytest.raises(InputError, match="Chapter 41"):
        novel("nothing")
    assert wikipedia("aaaa\nbbbb\ncccc\n") == "aaaa\nbbbb\n"
    assert "argparse" in library()
    assert "class Unpickler" not in library(), "pickle is after m"


@torch.no_grad()
@pytest.mark.parametrize("target", ["kvzip", "echo"])
def test_other_oracles_can_be_learned(target, tmp_path):
    ids = prompt(80, seed=3)[0].tolist()
    (file,) = kvzap.collect(tiny(), Tokenizer(), [ids], tmp_path, 200, target=target)
    found = load_file(file)
    assert found["hidden"].shape[1] == (80 - 4 - (8 if target == "echo" else 0))
    assert found["scores"].isfinite().all(), "every entry was asked for"
    with kvstrata.compress(tiny(), f"{target}:budget=100%", tokenizer=Tokenizer()) as cache:
        tiny()(torch.tensor([ids]), **kv(cache))
        column = kvzap.COLUMNS[target].name
        asked = [layer.store.column(column)[0, :, 4:] for layer in cache.strata.values()]
    assert torch.allclose(found["scores"], torch.stack(asked).log()[..., : found["scores"].shape[2]], atol=1e-5)

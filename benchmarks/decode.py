"""The figures of docs/results.md on kernels and decoding, one after another: each is one `kvstrata bench`.

    python benchmarks/decode.py FOLDER [NAME ...]

Writes FOLDER/NAME.json and what was printed to FOLDER/NAME.txt. Without names, all that need no other engine installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEXT = Path(__file__).parent.parent / "examples" / "pride-and-prejudice-41.txt"
DECODE = ("--decode-only", "--rounds", "5", "--limit", "400")
BF16 = (*DECODE, "--dtype", "bfloat16")
BF16_8K = (*BF16, "--context", "8k")
MANY = "h2o:budget=25%,room=16,snapkv:budget=25%,codec=int8,full:codec=int8,full:codec=int4"
FIGURES: dict[str, tuple[str, ...]] = {
    # GB/s and share of the read bandwidth, with one thread and with all; writes FOLDER/kernels.png too
    "kernels": ("--kernels-only",),
    # tokens/s against stock and repaired transformers; a stock step takes seconds here
    "batch-8": (*BF16_8K, "--batch", "8", "--steps", "2", "--policy", MANY),
    "batch-1": (*BF16_8K, "--steps", "4", "--policy", MANY),
    "float32": (*DECODE, "--context", "2k,4k", "--batch", "1,8", "--steps", "4"),
    # other caches and engines, in environments of their own that are made the first time, all in one run
    "peers": (
        *(*DECODE, "--context", "4k", "--policy", "h2o:budget=25%,room=16,snapkv:budget=25%", "--peers"),
        "hf,repaired,quantized,quantized:backend=hqq,kvpress,llamacpp,openvino,openvino:cache=u4,openvino:evict=25%",
    ),
    # where the prompt fills the model, llama.cpp has no room for a token more than it was trained for
    "llamacpp": (*BF16, "--context", "7k", "--peers", "repaired,llamacpp,llamacpp:weights=own"),
}
ALONE = ("kernels", "batch-8", "batch-1", "float32")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or ALONE
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        options = [*FIGURES[name], "--out", str(folder / f"{name}.json")]
        options += (
            ["--picture", str(folder / f"{name}.png")] if name == "kernels" else ["--prompt-file", str(text(folder))]
        )
        with (folder / f"{name}.txt").open("w") as printed:
            command = [sys.executable, "-c", "from kvstrata.cli import main; main()", "bench", *options]
            print("kvstrata", *command[3:])
            code = subprocess.run(command, check=False, stdout=printed).returncode
        print((folder / f"{name}.txt").read_text(), f"exit code {code}", sep="\n")


def text(folder: Path) -> Path:
    """The chapter three times, which is enough for 8,192 tokens."""
    path = folder / "text.txt"
    path.write_text(TEXT.read_text(encoding="utf-8") * 3, encoding="utf-8")
    return path


if __name__ == "__main__":
    main()

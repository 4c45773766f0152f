"""OpenVINO GenAI, continuous batching with paged attention, on the same weights converted by optimum-intel."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from protocol import read_job, serve  # pyright: ignore[reportMissingImports]

BLOCK = 32  # tokens of a page of OpenVINO's on a CPU


class OpenVino:
    """One request per row; a step of the pipeline makes a token in each."""

    def __init__(self, job: dict[str, Any]) -> None:
        genai: Any = import_module("openvino_genai")
        openvino: Any = import_module("openvino")
        numpy: Any = import_module("numpy")
        folder = _converted(Path(job["model"]), Path(job["folder"]), job["dtype"])
        self._job, length = job, len(job["ids"])
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # rows would share their pages
        scheduler.max_num_batched_tokens = max(256, length)
        scheduler.max_num_seqs = job["batch"]
        scheduler.num_kv_blocks = job["batch"] * (-(-(length + job["steps"]) // BLOCK) + 1)
        if job["evict"]:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = _eviction(genai, length, job["evict"])
        self.settings = {
            "KV_CACHE_PRECISION": job["cache"],
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[job["dtype"]],
            "INFERENCE_NUM_THREADS": job["threads"],
        }
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", self.settings)
        config = genai.GenerationConfig(max_new_tokens=job["steps"] + 8, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(numpy.array([job["ids"]], dtype=numpy.int64))
        self._handles = [self._pipeline.add_request(row, ids, config) for row in range(job["batch"])]
        self.tokens: list[int] = []
        self._made = [0] * job["batch"]
        while not all(self._made):
            self.step()

    def step(self) -> None:
        """One step of the pipeline."""
        self._pipeline.step()
        for row, handle in enumerate(self._handles):
            while handle.can_read():
                for output in handle.read().values():
                    self._made[row] += len(output.generated_ids)
                    if row == 0:
                        self.tokens += [int(token) for token in output.generated_ids]

    def about(self) -> dict[str, Any]:
        """Bytes of the pages in use, by the pipeline's own measure."""
        taken = _bytes_in_use(self._pipeline.get_metrics(), self._job["cache"])
        return {"cache_bytes": taken, "settings": {**self.settings, "evict": self._job["evict"]}}


def _bytes_in_use(metrics: Any, cache: str) -> int:
    """Of the pages taken. A byte is counted for a number of 4 bits, which takes half by the process's own memory."""
    counted = metrics.kv_cache_size_in_bytes * metrics.cache_usage / 100
    return round(counted / 2 if cache == "u4" else counted)


def _eviction(genai: Any, length: int, share: float) -> Any:
    """Keep `share` of the prompt: a block of first tokens, a quarter of the budget recent, the rest by attention."""
    blocks = max(4, round(length * share / BLOCK))
    recent = max(1, blocks // 4)
    return genai.CacheEvictionConfig(BLOCK, recent * BLOCK, blocks * BLOCK, genai.AggregationMode.NORM_SUM)


def _converted(model: Path, folder: Path, dtype: str) -> Path:
    """The model in OpenVINO's format, converted once; weights in fp16, or fp32 where the model runs in that."""
    weights = "fp32" if dtype == "float32" else "fp16"
    made = folder / f"{model.name}-{weights}"
    if not made.is_dir():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", str(model)]
        scratch = made.with_suffix(".part")
        options = ["--task", "text-generation-with-past", "--weight-format", weights, str(scratch)]
        subprocess.run(command + options, check=True, stdout=sys.stderr)
        scratch.rename(made)
    return made


if __name__ == "__main__":
    serve(OpenVino, read_job(), ["openvino", "openvino-genai", "optimum-intel"])

"""How near attention comes to what memory gives: read bandwidth first, then every kernel on every shape.

A kernel is first compared with float64 on the stored values; one that is wrong gets no speed. Then the kernels of a
shape take turns with the bandwidth probe: the median of a kernel is compared with the probe's best. Bytes are what a
call must read: pages of keys and values with their grids.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvstrata.bench.kernels import (
    FORMATS,
    Call,
    Errors,
    Shape,
    Variant,
    errors,
    make_call,
    random_queries,
    random_tiers,
    variants,
)
from kvstrata.core import KvstrataError
from kvstrata.files import whole
from kvstrata.kernels import dispatch
from kvstrata.kernels.pages import PAGE

MIB = 1 << 20
SHAPES = (Shape(1, 3, 3, 64), Shape(1, 8, 4, 128))  # of SmolLM2-135M and of Llama-3-8B
LEAST_PROBE = 256 * MIB  # far beyond what processor caches hold


@dataclass(frozen=True, slots=True)
class Figure:
    """One kernel on one shape; speeds are None where its errors are not allowed."""

    shape: str
    format: str
    kernel: str
    mass: bool
    threads: int
    entries: int  # per segment
    bytes: int
    flops: int
    errors: Errors
    gb_s: float | None
    share: float | None  # of the best bandwidth in the same rounds
    ns_per_key: float | None  # and key-value head


@dataclass(frozen=True, slots=True)
class Roofline:
    """GB/s (1e9 bytes) that memory gives, by threads; GFLOP/s of a matrix product; the kernels."""

    bandwidth: dict[int, float]
    gflops: float
    figures: list[Figure]

    @property
    def passed(self) -> bool:
        """Whether every kernel does."""
        return all(figure.errors.passed for figure in self.figures)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A kernel over so many pages, checked."""

    variant: Variant
    shape: Shape
    entries: int
    bytes: int
    errors: Errors
    call: Call


@torch.no_grad()
def measure(
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    formats: Sequence[str] = FORMATS,
    *,
    threads: Sequence[int] = (1,),
    mib: int = 128,
    rounds: int = 7,
    tick: Callable[[str], object] = lambda _: None,
) -> Roofline:
    """Check and time every kernel that serves on this device, each over about `mib` MiB of pages."""
    probe = _probe(device, max(mib * MIB, LEAST_PROBE))
    figures: list[Figure] = []
    reads: dict[int, list[float]] = {n: [] for n in threads}
    for shape in shapes:
        tick(f"checking {shape}")
        cases = [_case(variant, shape, device, mib * MIB) for variant in variants(formats, device)]
        for n in threads:
            tick(f"{shape}, {n} thread{'s' * (n > 1)}")
            with torch_threads(n):
                figures += _race(cases, n, rounds, device, lambda n=n: probe(n), reads[n])
    tick("matrix product")
    with torch_threads(max(threads)):
        gflops = _gflops(device)
    return Roofline({n: max(found) for n, found in reads.items()}, gflops, figures)


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Let torch and native kernels use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _probe(device: torch.device, size: int) -> Callable[[int], float]:
    """What gives the GB/s of reading memory with n threads; on a GPU of copying, bytes read and written."""
    buffer = torch.ones(size // 4, device=device)
    if device.type == "cuda":
        other = torch.empty_like(buffer)
        return lambda n: 2 * buffer.nbytes / seconds(lambda: other.copy_(buffer), device) / 1e9
    native = dispatch.native_module()
    if native is None:
        return lambda n: buffer.nbytes / seconds(buffer.sum, device) / 1e9
    return lambda n: buffer.nbytes / seconds(lambda: native.read(buffer, n), device) / 1e9


def _gflops(device: torch.device) -> float:
    """GFLOP/s of a matrix product, in fp32 on a CPU and in bf16 on a GPU."""
    n, dtype = (1024, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    x = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / min(seconds(lambda: x @ x, device) for _ in range(5)) / 1e9


def _case(variant: Variant, shape: Shape, device: torch.device, size: int) -> _Case:
    """A kernel over `size` bytes; one that is wrong gets no pages, since it will not be timed."""
    found, format = errors(variant, shape, device), variant.of(shape.dim)
    per_segment = max(1, round(size / format.page_bytes / shape.segments))
    entries, pages = per_segment * PAGE, per_segment * shape.segments
    call: Call = _nothing
    if found.passed:
        tiers = random_tiers(format, [entries] * shape.segments, device, variant.kernel == "native")
        call = make_call(variant, shape, random_queries(variant, shape, device), tiers)
    return _Case(variant, shape, entries, pages * format.page_bytes, found, call)


def _nothing() -> tuple[torch.Tensor, None]:
    raise AssertionError("a kernel that is wrong is not timed")


def _race(
    cases: list[_Case],
    threads: int,
    rounds: int,
    device: torch.device,
    probe: Callable[[], float],
    reads: list[float],
) -> list[Figure]:
    """Let the probe and all right kernels take turns; the first round warms up."""
    times: dict[int, list[float]] = {i: [] for i, case in enumerate(cases) if case.errors.passed}
    here: list[float] = []
    for turn in range(rounds + 1):
        gb_s = probe()
        taken = {i: seconds(cases[i].call, device) for i in times}
        if turn:
            here.append(gb_s)
            for i, took in taken.items():
                times[i].append(took)
    reads += here
    bandwidth = max(here)
    return [
        _figure(case, threads, statistics.median(times[i]) if i in times else None, bandwidth)
        for i, case in enumerate(cases)
    ]


def _figure(case: _Case, threads: int, took: float | None, bandwidth: float) -> Figure:
    variant, shape = case.variant, case.shape
    keys = case.entries * shape.segments
    gb_s = None if took is None else case.bytes / took / 1e9
    return Figure(
        shape=str(shape),
        format=variant.format,
        kernel=variant.kernel,
        mass=variant.mass,
        threads=threads,
        entries=case.entries,
        bytes=case.bytes,
        flops=4 * keys * shape.group * shape.dim,
        errors=case.errors,
        gb_s=gb_s,
        share=None if gb_s is None else gb_s / bandwidth,
        ns_per_key=None if took is None else took * 1e9 / keys,
    )


def draw(found: Roofline, path: Path) -> Path:
    """Draw GFLOP/s over FLOP per byte with what memory and a matrix product allow; PNG or SVG by the suffix.

    Raises `KvstrataError` when matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise KvstrataError("a picture needs matplotlib: pip install 'kvstrata[demo]'") from error
    threads = max(found.bandwidth)
    figures = [f for f in found.figures if f.threads == threads and f.gb_s is not None and not f.mass]
    fig = Picture(figsize=(9, 6), layout="constrained")
    axes = fig.subplots()
    ridge = found.gflops / found.bandwidth[threads]
    axes.plot([0.25, ridge, 512], [0.25 * found.bandwidth[threads], found.gflops, found.gflops], "k-", lw=1)
    for marker, kernel in zip("osv^", dict.fromkeys(f.kernel for f in figures), strict=False):
        here = [f for f in figures if f.kernel == kernel]
        x = [f.flops / f.bytes for f in here]
        y = [intensity * (f.gb_s or 0) for intensity, f in zip(x, here, strict=True)]
        axes.scatter(x, y, marker=marker, label=kernel)
        for f, at in zip(here, zip(x, y, strict=True), strict=True):
            axes.annotate(
                f"{f.format} {f.shape.split()[-1]}", at, fontsize=7, xytext=(4, 3), textcoords="offset points"
            )
    rate = f"{found.bandwidth[threads]:.0f} GB/s read, {found.gflops:.0f} GFLOP/s in a matrix product"
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s", title=f"Threads: {threads}; {rate}")
    axes.legend()
    with whole(path) as scratch:
        fig.savefig(scratch, dpi=130, format=path.suffix.lstrip(".") or "png")
    return path

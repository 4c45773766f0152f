"""The CPU kernels, compiled. Shapes use the letters of `kvstrata.core`; arrays are CPU tensors (or what speaks DLPack).

Wrong arguments raise `ValueError` or `TypeError` and change nothing. Calls release the GIL while they compute and may
come from several threads, though not two at once that write the same pages.
"""

from collections.abc import Sequence

from torch import Tensor

PAGE: int

def isa() -> str:
    """Name of the instruction set in use: the best of `isas()`, or what the environment's KVSTRATA_ISA names."""

def isas() -> list[str]:
    """Instruction sets that this build has and this CPU runs, best first: "avx512", "avx2", "portable"."""

def _force_isa(name: str) -> None:
    """Use another of `isas()` from now on; for tests."""

class Arena:
    """Pages of one format, in blocks. `codec`: k_bits, v_bits, symmetric, v axis is token, window; None for exact."""

    def __init__(self, dtype: str, codec: tuple[int, int, bool, bool, int] | None, k_dim: int, v_dim: int) -> None: ...
    def add(self, first: int, k: Tensor, v: Tensor, grid: Tensor | None = None) -> None:
        """Take the memory of pages first .. first+n-1, laid out as `kvstrata.kernels.pages.Block` says, and keep it."""

    def remove(self, first: int) -> None:
        """Let go of a block; its pages are refused from then on."""

class Pages:
    """Views of table [S, P], lengths [S] and, of coded pages, fills [S, P], all int32 and read anew at every call.

    Page j of segment s holds fills[s, j] entries in its first slots; without fills as many as lengths[s] leaves it.
    """

    def __init__(self, arena: Arena, table: Tensor, lengths: Tensor, fills: Tensor | None = None) -> None: ...

def attend(
    q: Tensor,
    tiers: Sequence[Pages],
    out: Tensor,
    scale: float,
    *,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    tokens: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    weights: Sequence[float] = ...,
    counts: bool = False,
    mass: Tensor | None = None,
    offsets: Sequence[int] = ...,
    lse: Tensor | None = None,
    positions: Tensor | None = None,
    window: int = 0,
    threads: int = 1,
) -> None:
    """Attention of q [B, H*G, Q, D] over the entries of all tiers into out [B, H*G, Q, Dv], both in the cache's dtype.

    tiers: of S = B*H segments each; the first is exact and holds the queries' own entries as its newest, among which
    attention is causal.
    new_k [B, H, Q, D], new_v [B, H, Q, Dv]: first appended to the first tier, whose lengths are updated.
    tokens [B] int32: only the last tokens[b] queries of row b are real; out of the others is 0, lse -inf.
    softcap c: scores become c * tanh(score / c). sinks [H*G] fp32: one more score per head, without a value.
    mass [B, H, N] fp32: entry t of tier i gets, at offsets[i] + t, the sum over real queries (age 0 is the newest) of
    weights[age] * the mean over the group of its probability; with `counts` weights[age] where that mean is more than
    an even share of what the query saw. The rest of mass is set to 0.
    lse [B, H*G, Q] fp32: natural log of the sum of exponentials, sinks included.
    window w: a query at position p sees entries at positions above p - w. positions [B, 1|H, N] int32, as mass is laid
    out; the queries' own entries are in the first tier then.
    The result depends on `threads`, not on how they take turns.
    """

def append(pages: Pages, new_k: Tensor, new_v: Tensor, tokens: Tensor | None = None) -> None:
    """Write the last tokens[b] rows of new_k [B, H, Q, D] and new_v [B, H, Q, Dv] behind what segments hold."""

def move(source: Pages, target: Pages, order: Tensor, threads: int = 1) -> None:
    """Make slot j of segment s of `target` what slot order[s, j] of `source` is, where order [S, M] int32 is >= 0.

    Both may be the same if no entry moves to a slot that a later one comes from. Lengths are not touched.
    """

def gather(pages: Pages, segment: Tensor, slot: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """Copy the entries at slot [n] int32 of segment [n] int32 of exact pages to k_out [n, D] and v_out [n, Dv]."""

def pack(arena: Arena, k: Tensor, v: Tensor, k_codes: Tensor, v_codes: Tensor, grid: Tensor) -> int:
    """Code whole pages k [n, 64, D] and v [n, 64, Dv] into arrays like a Block's; how many numbers are not finite."""

def unpack(arena: Arena, k_codes: Tensor, v_codes: Tensor, grid: Tensor, k_out: Tensor, v_out: Tensor) -> None:
    """Write what coded pages stand for to k_out [n, 64, D] and v_out [n, 64, Dv], fp32."""

def column_lse(
    q: Tensor,
    k: Tensor,
    lse_out: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    threads: int = 1,
) -> None:
    """Log-sum-exp of the last R queries q [B, H*G, R, D] over keys k [B, H, N, D], to lse_out [B, H*G, R] fp32."""

def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mass_out: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    decay: float = 1.0,
    counts: bool = False,
    threads: int = 1,
) -> None:
    """What R queries give each key, from their lse [B, H*G, R], to mass_out [B, H, N] fp32; see `kernels.mass`."""

def echo(
    q: Tensor,
    k: Tensor,
    sinks: Tensor,
    lse: Tensor,
    less: Tensor,
    cos: Tensor,
    sin: Tensor,
    best_out: Tensor,
    scale: float,
    *,
    neighbours: bool,
    first: int,
    low: int,
    high: int,
    before: int,
    skip: int = 0,
    softcap: float = 0.0,
    threads: int = 1,
) -> None:
    """What a repetition's queries give each key at most, to best_out [B, H*G, S] fp32; see `kernels.echo`."""

def output_norms(outputs: Tensor, v: Tensor, norms_out: Tensor, *, threads: int = 1) -> None:
    """Norms of values v [B, H, S, D] times outputs [H*G, D, D], to norms_out [B, H, G, S]; see `kernels.norms`."""

def read(buffer: Tensor, threads: int = 1) -> int:
    """Read every byte of a contiguous array and return a sum: what memory can deliver, for benchmarks."""

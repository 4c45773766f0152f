from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvstrata.kernels.attention import DENSE, Softmax, attend, ref
from kvstrata.kernels.mass import ALL_ROWS, Reduction
from kvstrata.kernels.mass import ref as mass_ref

from .. import oracle

SCALE = 0.3  # not a power of two, so that scaling rounds
LOGITS = Softmax(SCALE)
SIZES = [
    (q, n)
    for n in (1, 7, 63, 64, 129, 513)
    for q in sorted({q for q in (1, 3, 17, 64) if q <= n} | {n})  # Q = N is a prompt
]
MASS_ROWS = [0, 1, 5, ALL_ROWS]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
groups = pytest.mark.parametrize("group", [1, 3], ids=["mha", "gqa3"])
sizes = pytest.mark.parametrize(("queries", "keys"), SIZES, ids=[f"q{q}-n{n}" for q, n in SIZES])
kernels = pytest.mark.parametrize("kernels", DENSE)


def case(queries, keys, group, dtype, batch=2, heads=2, dim=16):
    """q is scaled up so that a few keys take most of the mass, as in a trained model."""
    q = 2 * torch.randn(batch, heads * group, queries, dim)
    k, v = torch.randn(batch, heads, keys, dim), torch.randn(batch, heads, keys, dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def in_capacity_buffer(t, slack=13):
    """The same [B, H, N, D] as a view into a larger buffer whose free slots are NaN."""
    batch, heads, n, dim = t.shape
    buffer = torch.full((batch, heads, n + slack, dim), math.nan, dtype=t.dtype)
    buffer[:, :, :n] = t
    return buffer[:, :, :n]


def reduce(mass_rows):
    return Reduction(mass_rows) if mass_rows else None


def rows_asked(mass_rows, queries):
    return queries if mass_rows == ALL_ROWS else min(mass_rows, queries)


def largest_error(value, truth):
    return (value.double() - truth).abs().max().item()


def ulp_bf16(value):
    return 2.0 ** (math.floor(math.log2(value)) - 7)


def stock(q, k, v):
    """torch's own sdpa, called as transformers calls it."""
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if queries in (1, k.shape[2]):
        return scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=SCALE)
    return scaled_dot_product_attention(q, k, v, attn_mask=oracle.causal(queries, k.shape[2]), scale=SCALE)


def allowed(q, k, v, truth):
    """The largest error an output may have: in bf16 measured by what torch's own sdpa does on the same input."""
    largest = truth.abs().max().item()
    if q.dtype == torch.float32:
        return 1e-5 * largest
    return 1.5 * largest_error(stock(q, k, v), truth) + ulp_bf16(largest)


class Solved(NamedTuple):
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    allowed: float
    lse: torch.Tensor
    mass: dict[int, torch.Tensor]  # by rows


@cache
def solved(queries, keys, group, dtype):
    """One input per size with the oracle's answer, shared by all kernels and numbers of mass rows."""
    torch.manual_seed(0)
    q, k, v = case(queries, keys, group, dtype)
    p, lse = oracle.probabilities(q, k, oracle.causal(queries, keys), scale=SCALE)
    mass = {rows: oracle.received(p, 2, rows) for rows in {rows_asked(n, queries) for n in MASS_ROWS}}
    out = p @ v.double().repeat_interleave(group, 1)
    return Solved((q, k, v), out, allowed(q, k, v, out), lse, mass)


@kernels
@dtypes
@groups
@sizes
@pytest.mark.parametrize("mass_rows", MASS_ROWS, ids=["mass0", "mass1", "mass5", "mass-all"])
@pytest.mark.thin(2)
def test_agrees_with_the_oracle(kernels, dtype, group, queries, keys, mass_rows):
    (q, k, v), out, error, lse, mass = solved(queries, keys, group, dtype)
    done = attend(q, k, v, softmax=LOGITS, reduction=reduce(mass_rows), kernels=kernels)
    rows = rows_asked(mass_rows, queries)
    assert done.out.dtype == dtype
    assert done.out.shape == q.shape
    assert largest_error(done.out, out) <= error
    assert (done.mass is None) == (rows == 0)
    if done.lse is not None:
        assert done.lse.dtype == torch.float32
        assert largest_error(done.lse, lse) <= 1e-4
    if rows:
        assert done.mass.dtype == torch.float32
        assert done.mass.shape == mass[rows].shape
        assert (done.mass.sum(dim=-1) - rows).abs().max() <= 1e-4 * rows
        # relative to the largest sum: for 16-bit keys the flash operator's lse is good to 6e-5 a row
        assert largest_error(done.mass, mass[rows]) <= 1e-4 * mass[rows].max().clamp_min(1)


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("mass_rows", MASS_ROWS, ids=["mass0", "mass1", "mass5", "mass-all"])
def test_prompts_bring_the_lse_of_every_query(kernels, mass_rows):
    q, k, v = case(9, 9, 3, torch.float32)
    assert attend(q, k, v, softmax=LOGITS, reduction=reduce(mass_rows), kernels=kernels).lse.shape == q.shape[:3]


@kernels
@dtypes
@groups
@pytest.mark.parametrize(("queries", "keys"), [(1, 129), (17, 129), (129, 129)], ids=["decode", "chunk", "prompt"])
@pytest.mark.parametrize("mass_rows", [0, ALL_ROWS], ids=["mass0", "mass-all"])
def test_keys_in_a_capacity_buffer_give_the_same_bits(kernels, dtype, group, queries, keys, mass_rows):
    q, k, v = case(queries, keys, group, dtype)
    plain = attend(q, k, v, softmax=LOGITS, reduction=reduce(mass_rows), kernels=kernels)
    strided = attend(
        q, in_capacity_buffer(k), in_capacity_buffer(v), softmax=LOGITS, reduction=reduce(mass_rows), kernels=kernels
    )
    assert torch.equal(plain.out, strided.out)
    if mass_rows:
        assert torch.equal(plain.mass, strided.mass)
    if plain.lse is not None:
        assert torch.equal(plain.lse, strided.lse)


@kernels
@groups
@pytest.mark.parametrize("queries", [1, 5, 21], ids=["decode", "chunk", "prompt"])
def test_queries_as_the_model_lays_them_out(kernels, group, queries):
    """Models give [B, Q, H*G, D] transposed; ragged batches give a slice of the newest queries of one row."""
    q, k, v = case(queries, 21, group, torch.float32)
    truth = oracle.attend(q, k, v, scale=SCALE, mass_rows=queries)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.cat([torch.full_like(q, math.nan), q], dim=2)[:, :, -queries:]
    for view in (transposed, sliced):
        done = attend(view, k, v, softmax=LOGITS, reduction=reduce(ALL_ROWS), kernels=kernels)
        assert largest_error(done.out, truth.out) <= allowed(q, k, v, truth.out)
        assert largest_error(done.mass, truth.mass) <= 1e-4


@kernels
@dtypes
@pytest.mark.parametrize("queries", [1, 5, 21], ids=["decode", "chunk", "prompt"])
def test_inputs_are_not_modified(kernels, dtype, queries):
    given = case(queries, 21, 3, dtype)
    before = [t.clone() for t in given]
    attend(*given, softmax=LOGITS, reduction=reduce(ALL_ROWS), kernels=kernels)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@kernels
def test_more_mass_rows_than_queries_means_all(kernels):
    q, k, v = case(3, 9, 1, torch.float32)
    more, every = (attend(q, k, v, softmax=LOGITS, reduction=reduce(n), kernels=kernels).mass for n in (100, ALL_ROWS))
    assert torch.equal(more, every)


@groups
@pytest.mark.parametrize(("queries", "keys"), [(64, 129), (129, 129)], ids=["chunk", "prompt"])
@pytest.mark.parametrize("block", [1, 1000, 5000], ids=["a-query-a-block", "few-a-block", "uneven-last-block"])
def test_seams_between_blocks_do_not_show(monkeypatch, group, queries, keys, block):
    monkeypatch.setattr(mass_ref, "BLOCK_ELEMENTS", block)
    q, k, v = case(queries, keys, group, torch.float32)
    truth = oracle.attend(q, k, v, scale=SCALE, mass_rows=queries)
    done = attend(q, k, v, softmax=LOGITS, reduction=reduce(ALL_ROWS))
    assert largest_error(done.out, truth.out) <= allowed(q, k, v, truth.out)
    assert largest_error(done.lse, truth.lse) <= 1e-4
    assert largest_error(done.mass, truth.mass) <= 1e-4


@dtypes
@groups
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (17, 64), (64, 64), (17, 513)], ids=lambda n: str(n))
def test_the_path_for_other_devices_agrees_with_the_one_for_cpu(dtype, group, queries, keys):
    q, k, v = case(queries, keys, group, dtype)
    mask = ref._mask(0, queries, keys - queries, q.device)
    assert torch.equal(mask == 0, oracle.causal(queries, keys))
    plain, plain_lse = ref._plain(q, k, v, keys - queries, LOGITS)
    flash, flash_lse = ref._flash_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=SCALE)
    truth = oracle.attend(q, k, v, scale=SCALE, mass_rows=0)
    assert plain.dtype == dtype
    assert largest_error(plain, truth.out) <= allowed(q, k, v, truth.out)
    assert largest_error(flash, truth.out) <= allowed(q, k, v, truth.out)
    assert plain_lse.shape == flash_lse.shape
    assert largest_error(plain_lse, truth.lse) <= 1e-4
    assert largest_error(flash_lse, truth.lse) <= 1e-4


@dtypes
@groups
@pytest.mark.parametrize("fold_from", [1, 1 << 30], ids=["folded", "apart"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "capacity-buffer"])
def test_one_query_folded_into_its_group_or_not(monkeypatch, dtype, group, fold_from, strided):
    monkeypatch.setattr(ref, "FOLD_FROM", fold_from)
    q, k, v = case(1, 129, group, dtype, batch=3)
    truth = oracle.attend(q, k, v, scale=SCALE, mass_rows=0)
    if strided:
        k, v = in_capacity_buffer(k), in_capacity_buffer(v)
    out = attend(q, k, v, softmax=LOGITS).out
    assert out.shape == q.shape
    assert largest_error(out, truth.out) <= allowed(q, k, v, truth.out)


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operator produced."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return out


@kernels
@pytest.mark.parametrize("group", [1, 2], ids=["mha", "gqa2"])
def test_a_prompt_never_makes_the_attention_matrix(kernels, group):
    q, k, v = case(2048, 2048, group, torch.float32, batch=1, heads=4 // group)
    with LargestTensor() as largest:
        attend(q, k, v, softmax=LOGITS, reduction=reduce(ALL_ROWS), kernels=kernels)
    assert largest.elements >= q.numel()
    assert largest.elements < 2048 * 2048 * 4
    assert largest.elements <= 1.01 * mass_ref.BLOCK_ELEMENTS


def test_a_chunk_after_stored_entries_makes_neither_matrix_nor_mask(monkeypatch):
    monkeypatch.setattr(mass_ref, "BLOCK_ELEMENTS", 1 << 16)
    q, k, v = case(256, 512, 1, torch.float32, batch=1, heads=4, dim=8)
    with LargestTensor() as largest:
        attend(q, k, v, softmax=LOGITS, reduction=reduce(ALL_ROWS))
    assert largest.elements < 256 * 512
    assert largest.elements <= 1.01 * mass_ref.BLOCK_ELEMENTS

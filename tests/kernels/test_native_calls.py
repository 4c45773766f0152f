"""The native module as callers meet it: entries appended and moved, errors that name what is wrong, threads, forks."""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .paging import INT2, INT4, INT8, Tier

_native = pytest.importorskip("kvstrata._native")

isas = pytest.mark.parametrize("isa", _native.isas())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def as_before():
    before = _native.isa()
    yield
    _native._force_isa(before)


@dtypes
@pytest.mark.parametrize("threads", [1, 2])
def test_move_within_and_between(dtype, threads):
    source, target = (Tier(dtype, None, n, 16, 24) for n in ([130, 64, 0, 3], [70, 128, 64, 9]))
    source_k, source_v = source.read(130)
    before_k, before_v = target.read(128)
    order = torch.full((4, 64), -1, dtype=torch.int32)
    order[0, :64] = torch.randperm(130)[:64]
    order[1, 3:10] = torch.arange(20, 27)
    order[3, 8] = 2
    _native.move(source.pages, target.pages, order, threads=threads)
    after_k, after_v = target.read(128)
    for s, row in enumerate(order.tolist()):
        for j, slot in enumerate(row):
            k, v = (before_k[s, j], before_v[s, j]) if slot < 0 else (source_k[s, slot], source_v[s, slot])
            assert torch.equal(after_k[s, j].nan_to_num(), k.nan_to_num())
            assert torch.equal(after_v[s, j].nan_to_num(), v.nan_to_num())
    kept = [sorted(torch.randperm(n)[: n // 2].tolist()) for n in (130, 64, 0, 3)]
    order = torch.full((4, 65), -1, dtype=torch.int32)
    for row, slots in zip(order, kept, strict=True):
        row[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    _native.move(source.pages, source.pages, order, threads=threads)
    after_k, _ = source.read(130)
    for s, slots in enumerate(kept):
        assert torch.equal(after_k[s, : len(slots)], source_k[s, slots])


@dtypes
def test_gather(dtype):
    tier = Tier(dtype, None, [130, 64, 0, 3], 16, 24)
    k, v = tier.read(130)
    segment, slot = torch.tensor([0, 3, 0, 1, 0]), torch.tensor([129, 2, 0, 63, 64])
    out = torch.empty(5, 16, dtype=dtype), torch.empty(5, 24, dtype=dtype)
    _native.gather(tier.pages, segment.int(), slot.int(), *out)
    assert torch.equal(out[0], k[segment, slot])
    assert torch.equal(out[1], v[segment, slot])
    for wrong in ((4, 0), (-1, 0), (0, 64 * 99), (0, -1)):
        with pytest.raises(ValueError, match="has no slot"):
            _native.gather(tier.pages, *(torch.full((5,), n, dtype=torch.int32) for n in wrong), *out)


def test_append_alone():
    tier = Tier(torch.float16, None, [0, 63, 64, 1], 16, 8, room=4)
    k, v = torch.randn(2, 2, 4, 16).half(), torch.randn(2, 2, 4, 8).half()
    _native.append(tier.pages, k, v, torch.tensor([4, 1], dtype=torch.int32))
    assert tier.counts.tolist() == [4, 67, 65, 2]
    stored_k, stored_v = tier.read(67)
    assert torch.equal(stored_k[0, :4], k[0, 0].double())
    assert torch.equal(stored_v[2, 64], v[1, 0, 3].double())
    _native.append(tier.pages, k[:, :, :1], v[:, :, :1])
    assert tier.counts.tolist() == [5, 68, 66, 3]


@isas
@pytest.mark.parametrize("n", [0, 1, 7, 8, 1000, 3_000_001])
def test_read_sums_words_and_last_bytes(isa, n):
    _native._force_isa(isa)
    buffer = torch.randint(0, 256, (n,), dtype=torch.uint8)
    words = buffer[: n // 8 * 8].view(torch.int64)
    expected = (int(words.sum()) + int(buffer[n // 8 * 8 :].sum())) % 2**64
    assert _native.read(buffer, 1) == expected
    assert _native.read(buffer, 2) == expected


def one_tier(codec=None, lengths=(3, 70), room=2):
    return Tier(torch.float32, codec, list(lengths), 16, 16, room=room)


def run(*tiers, **options):
    """A call for B=1, H=2, G=2, Q=2 with some arguments replaced."""
    q = options.pop("q", torch.randn(1, 4, 2, 16))
    out = options.pop("out", torch.zeros(1, 4, 2, 16))
    _native.attend(q, [tier.pages for tier in tiers], out, options.pop("scale", 0.5), **options)


WRONG = {
    "q must be": {"q": torch.randn(1, 4, 2, 8)},
    "q is empty": {"q": torch.zeros(1, 4, 0, 16), "out": torch.zeros(1, 4, 0, 16)},
    "heads": {"q": torch.randn(1, 3, 2, 16), "out": torch.zeros(1, 3, 2, 16)},
    "rows of q": {"q": torch.randn(3, 4, 2, 16), "out": torch.zeros(3, 4, 2, 16)},
    "out must be": {"out": torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)},
    "out must be dense": {"out": torch.zeros(1, 4, 16, 2).mT},
    "new_k and new_v": {"new_k": torch.zeros(1, 2, 2, 16)},
    "new_k must be": {"new_k": torch.zeros(1, 2, 3, 16), "new_v": torch.zeros(1, 2, 3, 16)},
    "tokens must be": {"tokens": torch.tensor([3], dtype=torch.int32)},
    "tokens must be int32": {"tokens": torch.tensor([1])},
    "sinks": {"sinks": torch.zeros(3)},
    "softcap": {"softcap": -1.0},
    "scale": {"scale": math.nan},
    "no mass": {"weights": [1.0]},
    "mass must be": {"mass": torch.zeros(1, 2, 90, dtype=torch.float64), "offsets": [0]},
    "offsets": {"mass": torch.zeros(1, 2, 90)},
    "needs 110": {"mass": torch.zeros(1, 2, 90), "offsets": [40]},
    "window needs positions": {"window": 3},
    "positions must have": {"window": 3, "positions": torch.zeros(1, 3, 90, dtype=torch.int32), "offsets": [0]},
    "lse must be": {"lse": torch.zeros(1, 4, 3)},
    "threads": {"threads": 0},
    "on the CPU|memory": {"q": torch.randn(1, 4, 2, 16, device="meta")},
}


@pytest.mark.parametrize(("message", "options"), WRONG.items(), ids=list(WRONG))
def test_wrong_arguments_are_named(message, options):
    tier = one_tier()
    with pytest.raises(ValueError, match=message):
        run(tier, **options)
    assert tier.counts.tolist() == [3, 70]


def test_what_tables_and_lengths_may_not_say():
    tier = one_tier()
    for entry, value, message in ((0, 10_000, "no block has page"), (0, -1, "no block has page")):
        before = int(tier.table[1, entry])
        tier.table[1, entry] = value
        with pytest.raises(ValueError, match=message):
            run(tier)
        tier.table[1, entry] = before
    for value in (-1, 129, 2**31 - 1):
        tier.counts[1] = value
        with pytest.raises(ValueError, match="segment 1"):
            run(tier)
    tier.counts[1] = 127
    new = torch.zeros(1, 2, 2, 16)
    with pytest.raises(ValueError, match="room for 128"):
        run(tier, new_k=new, new_v=new)
    with pytest.raises(ValueError, match="room for 128"):
        _native.append(tier.pages, new, new)
    assert tier.counts.tolist() == [3, 127]
    tier.arena.remove(tier.blocks[0][0])
    with pytest.raises(ValueError, match="no block has page"):
        run(tier)


def test_tiers_must_fit_together():
    tier = one_tier()
    with pytest.raises(ValueError, match="tiers"):
        run()
    with pytest.raises(ValueError, match="exact"):
        run(one_tier(INT8), tier)
    with pytest.raises(ValueError, match="equally many segments"):
        run(tier, one_tier(INT8, [3, 4, 5]))
    with pytest.raises(ValueError, match="one dtype"):
        run(tier, Tier(torch.bfloat16, INT4, [3, 4], 16, 16))
    with pytest.raises(ValueError, match="overlap"):
        run(tier, one_tier(INT8), mass=torch.zeros(1, 2, 200), offsets=[0, 69])
    with pytest.raises(ValueError, match="exact"):
        _native.append(one_tier(INT2).pages, torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))


def test_blocks_are_checked():
    arena = _native.Arena("bfloat16", None, 16, 8)
    k, v = torch.zeros(2, 64, 16, dtype=torch.bfloat16), torch.zeros(2, 64, 8, dtype=torch.bfloat16)
    arena.add(4, k, v)
    for first in (3, 4, 5):
        with pytest.raises(ValueError, match="another block"):
            arena.add(first, k, v)
    arena.add(2, k, v)
    arena.add(6, k, v, torch.zeros(2, 0))
    for args, message in {
        (k.float(), v): "k must be bfloat16",
        (k[:, :32], v): "bytes a page",
        (k, v[:1]): "equally many",
        (k.mT, v): "contiguous",
        (k, v, torch.zeros(2, 1)): "no grid",
    }.items():
        with pytest.raises(ValueError, match=message):
            arena.add(100, *args)
    with pytest.raises(ValueError, match="range"):
        arena.add(2**31 - 1, k, v)
    with pytest.raises(ValueError, match="no block begins"):
        arena.remove(3)
    for codec in ((3, 4, False, True, 64), (4, 4, True, True, 64), (4, 4, False, False, 64), (4, 4, False, True, 7)):
        with pytest.raises(ValueError):
            _native.Arena("bfloat16", codec, 16, 16)
    with pytest.raises(ValueError, match="multiples of 16"):
        _native.Arena("bfloat16", INT8, 16, 24)
    with pytest.raises(ValueError, match="dtype"):
        _native.Arena("float64", None, 16, 16)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not Path("/proc/self/smaps").exists(),
    reason="a system without huge pages",
)
def test_large_blocks_ask_for_huge_pages():
    arena = _native.Arena("bfloat16", None, 64, 64)
    k, v = (torch.empty(1024, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    assert not has_asked(k)
    assert not has_asked(v)
    arena.add(0, k, v)
    assert has_asked(k)
    assert has_asked(v)


def has_asked(block):
    """Whether the middle of a block lies in memory with the flag of MADV_HUGEPAGE."""
    middle = block.data_ptr() + block.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("the block is not mapped")


def test_memory_lives_as_long_as_its_block():
    arena = _native.Arena("float32", None, 8, 8)
    arena.add(0, torch.ones(1, 64, 8), torch.ones(1, 64, 8))
    pages = _native.Pages(arena, torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 64, dtype=torch.int32))
    del arena
    gc.collect()
    [torch.zeros(1, 64, 8) for _ in range(10)]
    out = torch.zeros(1, 1, 1, 8)
    _native.attend(torch.ones(1, 1, 1, 8), [pages], out, 1.0)
    assert torch.allclose(out, torch.ones_like(out))


def test_several_python_threads_at_once():
    tiers = [Tier(torch.float32, None, [700, 300], 16, 16) for _ in range(4)]
    q = torch.randn(1, 4, 1, 16)
    expected = [torch.zeros_like(q) for _ in tiers]
    for tier, out in zip(tiers, expected, strict=True):
        _native.attend(q, [tier.pages], out, 0.5, threads=2)

    def work(tier):
        out = torch.zeros_like(q)
        for _ in range(50):
            _native.attend(q, [tier.pages], out, 0.5, threads=2)
        return out

    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(work, tiers), expected))


LOADS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_native", {_native.__file__!r})
_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_native)
"""  # without the package, whose imports take seconds
FORKS = """
import os
import numpy as np
buffer = np.arange(3_000_000)
total = _native.read(buffer, 2)
child = os.fork()
if child == 0:
    os._exit(_native.read(buffer, 2) != total)
assert os.waitpid(child, 0)[1] == 0
assert _native.read(buffer, 2) == total
"""


def python(code, **environment):
    code = LOADS + code
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_a_child_after_fork_has_threads_of_its_own():
    done = python(FORKS)
    assert done.returncode == 0, done.stderr


def test_the_environment_chooses_the_instruction_set():
    done = python("print(_native.isa())", KVSTRATA_ISA="portable")
    assert done.stdout.split() == ["portable"], done.stderr
    done = python("", KVSTRATA_ISA="z80")
    assert "no instruction set" in done.stderr
    with pytest.raises(ValueError, match="no instruction set"):
        _native._force_isa("z80")

"""What Triton's interpreter cannot show, without a GPU: that kernels compile for one, and how many of them."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec import INT4, INT8
from kvstrata.kernels.mass import Reduction

from .random_pages import make_pages

attention = pytest.importorskip("kvstrata.kernels.attention.triton", exc_type=ImportError)
mass = pytest.importorskip("kvstrata.kernels.mass.triton", exc_type=ImportError)
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
KERNELS = {
    "attend_split": attention,
    "merge_splits": attention,
    "reduce_scores": attention,
    "append_entries": attention,
    "lse_of_rows": mass,
    "mass_of_keys": mass,
}
SHARED = 99 << 10  # bytes that every card since the RTX 30 series has for a program


class Hopper:
    """A driver for a card that is not there."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Launches compile only, and are kept by the kernel's name."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else it warns that this will not stay the default
    kept = {name: [] for name in KERNELS}
    for name, module in KERNELS.items():
        kernel = getattr(module, name)

        def compile_only(*args, grid, warmup, run=kernel.run, kept=kept[name], **options):
            kept.append(run(*args, grid=grid, warmup=True, **options))

        monkeypatch.setattr(kernel, "run", compile_only)
    return kept


@pytest.mark.parametrize("codec", [None, INT8, INT4], ids=["exact", "int8", "int4"])
def test_pages_are_loaded_16_bytes_at_once(compiled, codec):
    tiers = [make_pages(codec, torch.bfloat16, [70], 128)] * (2 if codec is None else 1)
    if codec:
        tiers.insert(0, make_pages(None, torch.bfloat16, [0], 128))
    q = torch.zeros(1, 4, 1, 128, dtype=torch.bfloat16)
    attention.attend_pages(q, tiers, softmax=Softmax(0.1), reduction=Reduction(1, counts=True))
    kernel = compiled["attend_split"][1]
    assert kernel.asm["ptx"].count("cp.async.cg.shared.global" if codec is None else "ld.global.v4.b32") >= 4
    assert "st.shared.b16" not in kernel.asm["ptx"] or codec  # exact pages are not taken apart
    assert all(one.metadata.shared <= SHARED for made in compiled.values() for one in made)


def test_kernels_are_compiled_once_whatever_the_numbers(compiled):
    for segments, columns, queries, width in ((1, 1, 1, 64), (2, 16, 2, 1024), (16, 3, 16, 150)):
        tiers = [make_pages(None, torch.bfloat16, [64 * columns] * segments, 16)]
        q = torch.zeros(segments, 1, queries, 16, dtype=torch.bfloat16)
        options = {"softmax": Softmax(0.1), "reduction": Reduction(queries), "tokens": [1] * segments}
        attention.attend_pages(q, tiers, widths=[width], tuning=attention.Tuning(pages=columns), **options)
        attention.append(tiers[0], q, q, tokens=[1] * segments)
        k = torch.zeros(segments, 1, 64 * columns, 16, dtype=torch.bfloat16)
        lse = mass.column_lse(q, k, scale=0.1)
        mass.column_mass(q, k, lse, scale=0.1)
    assert {name: len(set(map(id, kernels))) for name, kernels in compiled.items()} == dict.fromkeys(KERNELS, 1)

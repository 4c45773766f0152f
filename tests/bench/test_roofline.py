"""Kernels are checked before they are timed, and one that is wrong gets no speed."""

import pytest
import torch

from kvstrata.bench import kernels, roofline
from kvstrata.bench.kernels import EXACT, FORMATS, Shape, Variant, errors, random_tiers, variants
from kvstrata.kernels.attention import ref

CPU = torch.device("cpu")
SHAPES = [Shape(1, 3, 3, 64), Shape(2, 2, 1, 32), Shape(1, 1, 4, 128)]
SMALL = (Shape(1, 2, 3, 32),)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", variants(FORMATS, CPU), ids=str)
def test_every_kernel_is_as_near_to_float64_as_it_should_be(variant, shape):
    found = errors(variant, shape, CPU)
    assert found.passed, found
    assert (found.mass is not None) == variant.mass


def test_every_format_has_a_kernel_with_and_without_mass():
    found = variants(FORMATS, CPU)
    assert {v.format for v in found} >= set(EXACT)
    assert {(v.kernel, v.mass) for v in found} >= {("reference", False), ("reference", True), ("sdpa", False)}


@pytest.mark.parametrize(("format", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 4), ("int2", 2)])
def test_bytes_of_a_page_are_those_of_its_block(format, bits):
    made = Variant("native", format).of(64)
    (block,) = random_tiers(made, [64], CPU, native=False)[-1].blocks
    assert made.page_bytes == sum(part.nbytes for part in block[1:])
    assert made.page_bytes >= 2 * 64 * 64 * bits // 8


def test_speeds_are_measured_and_compared_with_the_probe():
    told = []
    found = roofline.measure(CPU, SMALL, ["float32", "bfloat16"], threads=(1,), mib=1, rounds=1, tick=told.append)
    assert found.passed
    assert set(found.bandwidth) == {1}
    assert min(found.bandwidth[1], found.gflops) > 0
    for figure in found.figures:
        assert figure.gb_s / found.bandwidth[1] == pytest.approx(figure.share)
        assert figure.bytes == pytest.approx(1 << 20, rel=0.05)
        assert figure.flops == 4 * 3 * 32 * 2 * figure.entries
    assert "B1 H2 G3 D32, 1 thread" in told


def test_a_kernel_that_is_wrong_gets_no_speed(monkeypatch):
    decode = ref._decode

    def slightly_wrong(q, k, v, *rest):
        return decode(q, k, v * 1.02, *rest)

    monkeypatch.setattr(ref, "_decode", slightly_wrong)
    found = roofline.measure(CPU, SMALL, ["float32"], mib=1, rounds=1)
    assert not found.passed
    for figure in found.figures:
        assert (figure.kernel == "reference") == (figure.gb_s is None)
        assert (figure.kernel == "reference") == (not figure.errors.passed)
        assert (figure.share is None) == (figure.ns_per_key is None) == (figure.gb_s is None)


def test_mass_that_is_wrong_is_found(monkeypatch):
    call = kernels.make_call

    def wrong(*arguments):
        out, mass = call(*arguments)()
        return lambda: (out, None if mass is None else mass * 1.1)

    monkeypatch.setattr(kernels, "make_call", wrong)
    found = errors(Variant("reference", "float32", mass=True), SHAPES[0], CPU)
    assert found.out <= found.out_allowed
    assert not found.passed


def test_nan_is_never_right(monkeypatch):
    call = kernels.make_call
    monkeypatch.setattr(kernels, "make_call", lambda *a: lambda: (call(*a)()[0] * torch.nan, None))
    assert not errors(Variant("reference", "float32"), SHAPES[0], CPU).passed


def test_threads_are_put_back():
    with roofline.torch_threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = roofline.measure(CPU, SMALL, ["float32"], mib=1, rounds=1)
    path = roofline.draw(found, tmp_path / "roof.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["roof.png"]

"""What tests of kernels share."""

import pytest

try:
    from kvstrata import _native
except ImportError:
    _native = None


@pytest.fixture(params=["reference", *([] if _native is None else _native.isas())])
def kernels(request):
    """The reference, then the native kernels under each instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    before = _native.isa()
    _native._force_isa(request.param)
    yield "native"
    _native._force_isa(before)

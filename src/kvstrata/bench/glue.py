"""Share of a decode step that kvstrata spends outside attention: what its Python and its bookkeeping cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from transformers import AttentionInterface, AttentionMaskInterface

from kvstrata.cache import stored
from kvstrata.hf.attention import NAME, attention_function, mask_function
from kvstrata.hf.cache import StrataLayer
from kvstrata.kernels import dispatch


class _Clock:
    """Seconds spent inside some functions, nested calls counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return call


def share_of_glue(step: Callable[[], object], steps: int) -> float:
    """Run further steps of a cache of ours; the first warms up.

    Ours are the cache's update, the mask and the attention function, less the kernel: the compiled one's call, which
    appends too, or torch's attention over what is stored.
    """
    step()
    inside, kernel = _Clock(), _Clock()
    with ExitStack() as stack:
        for interface, function in ((AttentionInterface, attention_function), (AttentionMaskInterface, mask_function)):
            cast(Any, interface).register(NAME, inside.timed(function))
            stack.callback(cast(Any, interface).register, NAME, function)
        stack.enter_context(_replaced(StrataLayer, "update", inside.timed))
        stack.enter_context(_replaced(stored, "attend", kernel.timed))
        if (native := dispatch.native_module()) is not None:
            stack.enter_context(_replaced(native, "attend", kernel.timed))
        start = time.perf_counter()
        for _ in range(steps):
            step()
        whole = time.perf_counter() - start
    return (inside.seconds - kernel.seconds) / whole


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)

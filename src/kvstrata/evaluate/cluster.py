"""The same units over a Ray cluster: a unit whose worker dies is given to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstrata.core import KvstrataError
from kvstrata.evaluate.grid import Job, Unit
from kvstrata.evaluate.run import Runner
from kvstrata.evaluate.worker import Line, run_unit

RETRIES = 5  # of a unit whose worker died


def cluster(address: str | None) -> Runner:
    """Run units on the cluster at this address, "auto" for the one that this machine is part of, None for a new one.

    Every node needs kvstrata, and the model and data under the same names. Raises `KvstrataError` without Ray.
    """
    try:
        import ray as _ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise KvstrataError("--ray needs Ray: pip install 'kvstrata[ray]'") from error
    ray: Any = _ray

    def run(job: Job, units: list[Unit]) -> Iterator[tuple[Unit, list[Line]]]:
        started = not ray.is_initialized()
        if started:
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                raise KvstrataError(f"no Ray cluster at {address!r}: start one, or give --ray local") from error
        gpus = int(job.device.startswith("cuda"))
        remote = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(run_unit)
        waiting = {remote.remote(job, unit): unit for unit in units}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                yield waiting.pop(done), ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise KvstrataError(f"a unit failed {RETRIES + 1} times ({error}); what was finished is kept") from error
        finally:
            for left in waiting:
                ray.cancel(left)
            if started:
                ray.shutdown()

    return run

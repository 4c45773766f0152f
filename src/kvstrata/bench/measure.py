"""What the machine and the process say of themselves."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from kvstrata._version import __version__

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def restart_process_peak() -> None:
    """Forget the process's peak memory so far, where the system can (Linux, CUDA)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return  # then the peak counts from the start of the process


def process_peak(device: torch.device) -> int:
    """Peak bytes of the process since the last restart: allocated on the GPU for CUDA, resident memory otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def provenance() -> dict[str, str | int]:
    """Versions and machine, for every file of figures."""
    return {
        "kvstrata": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()

"""Settings of vLLM that suit two cores, before anything imports it; random tests that are the same every time."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same-every-time", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-every-time")


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch.set_num_threads(1)

"""kvstrata's policies inside vLLM: blocks of the key-value cache go back to the pool while their request runs.

Give vLLM `--additional-config '{"kvstrata": "h2o:budget=25%"}'`; docs/vllm.md says what it can do.
"""

from __future__ import annotations

__all__ = ["register"]

_registered = False


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every process of vLLM, maybe more than once.

    Outside the tested versions it only sees to it that asking for kvstrata is refused.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from kvstrata_vllm.configure import CONNECTOR, TRITON, complete_configurations
    from kvstrata_vllm.versions import VersionError, check_version

    complete_configurations()
    try:
        check_version()
    except VersionError:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kvstrata_vllm.spec import register_specs

    register_specs()
    KVConnectorFactory.register_connector(CONNECTOR, "kvstrata_vllm.connector", "KvstrataConnector")
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvstrata_vllm.cpu.StrataCPUBackend")
    register_backend(AttentionBackendEnum.CUSTOM, "kvstrata_vllm.gpu.StrataFlashBackend")
    register_backend(TRITON, "kvstrata_vllm.gpu.StrataTritonBackend")

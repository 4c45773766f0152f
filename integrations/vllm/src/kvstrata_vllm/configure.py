"""From the one option that a user gives to all that vLLM needs, and refusals of what cannot run with it.

vLLM has no public place where a plug-in may complete a configuration, so one public method is wrapped:
`EngineArgs.create_engine_config`. It is the only thing of vLLM that is replaced.
"""

from __future__ import annotations

import functools
from typing import Any

from kvstrata.core import SpecError
from kvstrata_vllm.blocks import read_policy
from kvstrata_vllm.settings import Settings, read_settings
from kvstrata_vllm.versions import check_version

CONNECTOR = "KvstrataConnector"
CONFIDENCE = "kvstrata_vllm.confident:ConfidenceProcessor"
TRITON = "KVSTRATA_TRITON"  # our backend over Triton's, which alone has caches with a scale for each token and head
CPU_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")


def complete_configurations() -> None:
    """Let `EngineArgs` of this process understand the key "kvstrata". A second call does nothing."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, "completes_kvstrata", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *given: Any, **options: Any) -> Any:
        if (settings := read_settings(self.additional_config)) is None:
            return original(self, *given, **options)
        check_version()
        complete(self, settings)
        config = original(self, *given, **options)
        if (found := config.kv_transfer_config.kv_connector) != CONNECTOR:  # vLLM puts others in its place by itself
            raise SpecError(f"kvstrata needs the place of the KV connector, which {found} took: leave out its options")
        return config

    create_engine_config.completes_kvstrata = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def complete(args: Any, settings: Settings) -> None:
    """Fill in what the policy needs in vLLM's `EngineArgs`. Raises `SpecError` for what cannot run with it."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    _, policy = read_policy(settings)
    refuse(args, current_platform.is_cpu())
    if args.kv_transfer_config is None:
        args.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    if policy.surrogates:
        _refuse_hidden(args)
    if policy.needs & {"logits", "processed-logits"}:
        given = list(args.logits_processors or [])
        args.logits_processors = given if CONFIDENCE in given else [*given, CONFIDENCE]
    if not current_platform.is_cpu():
        _choose_backend(args)


def _choose_backend(args: Any) -> None:
    """Ours, over the kernels that can read the cache's dtype."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name = TRITON if "per_token_head" in args.kv_cache_dtype else "CUSTOM"
    ours = AttentionBackendEnum[name]
    if args.attention_backend not in (None, ours):
        raise SpecError(
            f"--attention-backend {args.attention_backend} would read blocks that are gone: leave it out, and kvstrata "
            f"takes its own ({name})"
        )
    args.attention_backend = ours


def refuse(args: Any, cpu: bool) -> None:
    """Raise `SpecError` for what of vLLM cannot run with compression, each with the way out."""
    other = args.kv_transfer_config
    if other is not None and other.kv_connector != CONNECTOR:
        raise SpecError(f"kvstrata is a KV connector itself and cannot run beside {other.kv_connector}: leave one out")
    if (size := getattr(args, "kv_offloading_size", None)) is not None:
        raise SpecError(f"kvstrata is a KV connector itself and cannot offload: leave out --kv-offloading-size {size}")
    if getattr(args, "enable_dbo", False) or getattr(args, "ubatch_size", 0) > 1:
        raise SpecError("kvstrata cannot tell rows of micro-batches apart: leave out --enable-dbo and --ubatch-size")
    if args.speculative_config:
        raise SpecError("kvstrata cannot take back rejected drafts: start without --speculative-config")
    kinds = ("pipeline", "data", "decode_context", "prefill_context")
    for name in (f"{kind}_parallel_size" for kind in kinds):
        if (size := getattr(args, name, 1)) > 1:
            option = "--" + name.replace("_", "-")
            raise SpecError(f"kvstrata runs with tensor parallelism only: leave out {option} {size}")
    if cpu and args.kv_cache_dtype not in CPU_DTYPES:
        raise SpecError(
            f"--kv-cache-dtype {args.kv_cache_dtype} needs a GPU (vLLM's CPU build accepts it and generates garbage): "
            "use auto or fp8"
        )
    if not cpu:
        _refuse_second_runner()


def _refuse_hidden(args: Any) -> None:
    if not args.enforce_eager:
        raise SpecError("kvzap reads hidden states, which a compiled model does not show: start with --enforce-eager")
    if args.enable_prefix_caching is not False:
        raise SpecError(
            "kvzap reads the hidden state of every token, and tokens out of the prefix cache have none: start with "
            "--no-enable-prefix-caching"
        )


def _refuse_second_runner() -> None:
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        raise SpecError(
            "vLLM's model runner V2 builds attention's metadata before workers hear which blocks are gone: start with "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )

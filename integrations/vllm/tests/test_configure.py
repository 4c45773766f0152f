"""One option that becomes a whole configuration, and what is refused beside it."""

from types import SimpleNamespace

import pytest
from kvstrata_vllm import configure, versions
from kvstrata_vllm.configure import CONFIDENCE, CONNECTOR, complete
from kvstrata_vllm.settings import Settings
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvstrata.core import SpecError

from . import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder)
    return str(folder)


def arguments(**more):
    given = {
        "kv_transfer_config": None,
        "speculative_config": None,
        "kv_cache_dtype": "auto",
        "logits_processors": None,
        "attention_backend": None,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**{**given, **more})


def test_the_option_alone_is_enough(model):
    args = EngineArgs(model, additional_config={"kvstrata": "h2o:budget=25%"}, skip_tokenizer_init=True)
    config = args.create_engine_config()
    assert config.kv_transfer_config.kv_connector == CONNECTOR
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    assert not config.model_config.logits_processors


def test_without_the_option_nothing_changes(model):
    config = EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
    assert config.kv_transfer_config is None


def test_confidence_brings_a_logits_processor_once():
    args = arguments(logits_processors=["mine:Own"])
    complete(args, Settings("confkv"))
    complete(args, Settings("confkv"))
    assert args.logits_processors == ["mine:Own", CONFIDENCE]
    other = arguments()
    complete(other, Settings("h2o"))
    assert other.logits_processors is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kv_transfer_config": KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")},
            "cannot run beside NixlConnector",
        ),
        ({"speculative_config": {"method": "ngram"}}, "start without --speculative-config"),
        ({"pipeline_parallel_size": 2}, "leave out --pipeline-parallel-size 2"),
        ({"data_parallel_size": 2}, "leave out --data-parallel-size 2"),
        ({"kv_offloading_size": 4.0}, "leave out --kv-offloading-size"),
        ({"enable_dbo": True}, "rows of micro-batches"),
        ({"decode_context_parallel_size": 2}, "leave out --decode-context-parallel-size 2"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "needs a GPU"),
    ],
)
def test_what_cannot_run_with_it_is_refused(given, message):
    with pytest.raises(SpecError, match=message):
        complete(arguments(**given), Settings("h2o"))


def test_a_policy_that_cannot_be_had_is_refused_before_a_model_is_loaded(model):
    args = EngineArgs(model, additional_config={"kvstrata": "qevict:window=8"}, skip_tokenizer_init=True)
    with pytest.raises(SpecError, match="qevict cannot have window="):
        args.create_engine_config()


@pytest.mark.parametrize(("runner", "allowed"), [(None, False), (True, False), (False, True)])
def test_a_gpu_needs_the_first_model_runner_and_our_backend(monkeypatch, runner, allowed):
    from vllm import envs
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(envs, "VLLM_USE_V2_MODEL_RUNNER", runner, raising=False)
    args = arguments()
    if not allowed:
        with pytest.raises(SpecError, match="start with VLLM_USE_V2_MODEL_RUNNER=0"):
            complete(args, Settings("h2o"))
        return
    complete(args, Settings("h2o"))
    assert args.attention_backend.name == "CUSTOM"
    with pytest.raises(SpecError, match="--attention-backend FLASH_ATTN would read blocks that are gone: leave it out"):
        complete(arguments(attention_backend="FLASH_ATTN"), Settings("h2o"))
    eight_bits = arguments(kv_cache_dtype="int8_per_token_head")
    complete(eight_bits, Settings("streaming"))
    assert eight_bits.attention_backend.name == "KVSTRATA_TRITON"


def test_the_method_is_wrapped_once():
    before = EngineArgs.create_engine_config
    configure.complete_configurations()
    assert EngineArgs.create_engine_config is before


@pytest.mark.parametrize(
    ("found", "accepted"), [("0.32.0", True), ("0.32.7+cpu", True), ("0.33.0", False), ("0.3.2", False)]
)
def test_only_tested_versions_are_accepted(monkeypatch, found, accepted):
    monkeypatch.setattr(versions, "installed", lambda: found)
    if accepted:
        versions.check_version()
        return
    with pytest.raises(versions.VersionError, match=rf"tested with vLLM 0\.32\.\*, and this is {found}"):
        versions.check_version()


def test_another_version_refuses_only_who_asks_for_kvstrata(monkeypatch, model):
    monkeypatch.setattr(versions, "installed", lambda: "0.40.0")
    assert EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
    asks = EngineArgs(model, additional_config={"kvstrata": "h2o"}, skip_tokenizer_init=True)
    with pytest.raises(versions.VersionError, match="leave kvstrata out of the configuration"):
        asks.create_engine_config()


def test_no_vllm_at_all_is_said_so(monkeypatch):
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(versions.VersionError, match=r"needs vLLM 0\.32: pip install"):
        versions.check_version()

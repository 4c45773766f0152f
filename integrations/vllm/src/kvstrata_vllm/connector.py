"""The channel between scheduler and workers, as vLLM's KV connector: nothing is transferred, only told.

Every step the scheduler's side tells which blocks go, and asks for measurements; the workers' side answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.utils.math_utils import cdiv

from kvstrata.core import SpecError, UnsupportedModelError
from kvstrata_vllm.announce import start_line
from kvstrata_vllm.droplog import DropLog
from kvstrata_vllm.hidden import load_surrogate, worth_of_tokens
from kvstrata_vllm.layers import Asked
from kvstrata_vllm.ledger import Ledger
from kvstrata_vllm.messages import Ask, Report, Step
from kvstrata_vllm.metrics import StrataMetrics, StrataStats
from kvstrata_vllm.settings import read_settings
from kvstrata_vllm.spec import StrataManager, StrataSpec
from kvstrata_vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvstrataConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides; `role` says which one this is."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config.additional_config)
        if settings is None:
            raise SpecError('kvstrata needs a policy: --additional-config \'{"kvstrata": "h2o:budget=25%"}\'')
        self.settings = settings
        self.worker: Worker | None = None
        self.group_of_layer: dict[str, int] = {}
        groups = enumerate(kv_cache_config.kv_cache_groups)
        specs = {number: group.kv_cache_spec for number, group in groups}
        self.specs = {number: spec for number, spec in specs.items() if isinstance(spec, StrataSpec)}
        if not self.specs:
            raise UnsupportedModelError(
                "no layer of this model has plain full attention, so kvstrata has nothing to do"
            )
        if role == KVConnectorRole.WORKER:
            asked = Asked(vllm_config)
            self._names = asked.names
            for number, spec in self.specs.items():
                names = kv_cache_config.kv_cache_groups[number].layer_names
                asked.check(spec, names)
                self.group_of_layer |= dict.fromkeys(names, number)
        else:
            self._scheduler = SchedulerSide(self, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for blocks of a request that ended."""
        return False

    # -- the workers' side --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make room for what is kept of every request."""
        config = self._vllm_config
        width = cdiv(config.model_config.max_model_len, next(iter(self.specs.values())).block_size)
        classes = {number: spec.layer_class for number, spec in self.specs.items()}
        device = next(iter(kv_caches.values())).device
        pool = self._kv_cache_config.num_blocks
        self.worker = Worker(classes, width, pool, self.settings.lag, device)
        rules = (rule for layer_class in classes.values() for rule in layer_class.measured)
        file = next((rule.scorer.surrogate for rule in rules if rule.scorer.surrogate), None)
        size = len(self._names), config.model_config.get_total_num_kv_heads(), config.model_config.get_hidden_size()
        self._surrogate = load_surrogate(file, *size) if file else None

    def saw_hidden(self, layer_name: str, hidden: torch.Tensor) -> None:
        """Let the surrogate judge the tokens of a step, hidden [tokens, width], from one layer's view.

        Blocks get the mean over the layers that share them. Every rank sees all, so each adds its part of the sum.
        """
        number = self.group_of_layer.get(layer_name)
        if self.worker is None or self._surrogate is None or number is None:
            return
        worth = worth_of_tokens(self._surrogate, self._names.index(layer_name), hidden)
        layers = list(self.group_of_layer.values()).count(number)
        self.worker.add_worth(number, worth / (layers * self._vllm_config.parallel_config.tensor_parallel_size))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's message: vLLM calls this first of all, before it builds the step's metadata."""
        if self.worker is not None and isinstance(kv_connector_metadata, Step):
            self.worker.begin(kv_connector_metadata)

    def build_connector_worker_meta(self) -> Report | None:
        """Answer."""
        return self.worker.end() if self.worker is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    # -- the scheduler's side -----------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Let all groups share one ledger."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """Nothing is known of it yet."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """No tokens come from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """No tokens come from elsewhere."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """Tell the workers what goes with this step."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' answer."""
        if isinstance(report := connector_output.kv_connector_worker_meta, Report):
            self._scheduler.take(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Count it; its blocks may go at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Count it; its blocks may go at once."""
        self._scheduler.finish(request.request_id)
        return False, None

    def get_kv_connector_stats(self) -> StrataStats | None:
        """What was evicted since the last call; workers have nothing to add."""
        return self._scheduler.stats() if self._role == KVConnectorRole.SCHEDULER else None

    def shutdown(self) -> None:
        """Close the drop log."""
        if self._role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StrataStats:
        """A report out of what another process sent."""
        return StrataStats(data) if data else StrataStats.of(0, 0, 0, [])

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StrataMetrics:
        """Metrics of the server."""
        return StrataMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class SchedulerSide:
    """What the connector does in the scheduler's process."""

    def __init__(self, connector: KvstrataConnector, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.settings, self.specs = connector.settings, connector.specs
        self.ledger = Ledger(self.settings.lag)
        self._managers: Mapping[int, StrataManager] = {}
        self._pool: Any = None
        self._ended: list[tuple[int, float]] = []
        self._reported = 0  # evicted blocks that the last report counted
        self._log = DropLog(Path(self.settings.log)) if self.settings.log else None
        start_line(self.settings, self.specs, vllm_config, kv_cache_config)
        if self._log:
            layers = [spec.layer_class.layers for spec in self.specs.values()]
            sizes = [spec.block_size for spec in self.specs.values()]
            self._log.write(
                {
                    "kvstrata": 1,
                    "policy": self.settings.policy,
                    "lag": self.settings.lag,
                    "groups": list(self.specs),
                    "layers": layers,
                    "block_size": sizes,
                }
            )

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Let all groups share one ledger. Raises `UnsupportedModelError` where others would publish our blocks."""
        managers = kv_cache_manager.coordinator.single_type_managers
        self._managers = {n: m for n, m in enumerate(managers) if isinstance(m, StrataManager)}
        if kv_cache_manager.enable_caching and len(self._managers) < len(managers):
            raise UnsupportedModelError(
                "this model has other layers beside those with full attention, whose blocks would be shared with other "
                "requests although they were computed after an eviction: start with --no-enable-prefix-caching"
            )
        for manager in self._managers.values():
            manager.ledger = self.ledger
        self._pool = kv_cache_manager.block_pool
        self._groups = len(managers)

    def step(self, output: SchedulerOutput) -> Step:
        """The message of this step."""
        again = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        fresh = [*computed, *again.resumed_req_ids]
        computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        step = Step(
            tails=[{} for _ in range(self._groups)],
            fresh=fresh,
            finished=list(output.finished_req_ids),
            width=[0] * self._groups,
        )
        for request, before in computed.items():
            after = before + output.num_scheduled_tokens[request]
            for number, manager in self._managers.items():
                self._announce(step, number, manager, request, after)
        if self._log:
            self._log.write(self._line(step, computed, output.num_scheduled_tokens))
        self.ledger.step += 1
        return step

    def _announce(self, step: Step, number: int, manager: StrataManager, request: str, after: int) -> None:
        blocks = manager.req_to_blocks[request]
        step.tails[number][request] = blocks[(after - 1) // manager.block_size].block_id
        step.width[number] = max(step.width[number], manager.held(request)[0])
        if going := self.ledger.announce(number, request):
            step.drops.append((number, request, going))
        if (scorer := manager.wanted(request, after)) is not None:
            step.asks.append(Ask(number, request, scorer, cdiv(after, manager.block_size)))

    def _line(self, step: Step, computed: Mapping[str, int], scheduled: Mapping[str, int]) -> dict[str, Any]:
        held = {request: [manager.held(request) for manager in self._managers.values()] for request in computed}
        return {
            "step": self.ledger.step,
            "free": self._pool.get_num_free_blocks(),
            "requests": {request: [before, scheduled[request]] for request, before in computed.items()},
            "blocks": held,
            "fresh": step.fresh,
            "drops": step.drops,
        }

    def take(self, report: Report) -> None:
        """Note what the workers measured."""
        for (number, request, scorer), measured in report.measured.items():
            self.ledger.note(number, request, scorer, measured)
        if report.confidence:
            steadied = self._steadied
            for request, c in report.confidence.items():
                if self.ledger.knows(request):  # vLLM frees a request that ended before it hands over the report
                    self.ledger.note_confidence(request, c, steadied)

    @property
    def _steadied(self) -> Any:
        rules = (rule for spec in self.specs.values() for rule in spec.layer_class.rules)
        return next((rule.rule.budget.steadied for rule in rules if rule.confident), None)

    def finish(self, request: str) -> None:
        """Count a request that ended, whose blocks are still there."""
        held = [manager.held(request) for manager in self._managers.values()]
        live, logical = (sum(part) for part in zip(*held, strict=True))
        self._ended.append((self.ledger.evicted(request), live / logical if logical else 1.0))
        self.ledger.finish(request)

    def stats(self) -> StrataStats:
        """What happened since the last report."""
        held = [manager.held(request) for manager in self._managers.values() for request in manager.req_to_blocks]
        evicted, self._reported = self.ledger.totals.evicted - self._reported, self.ledger.totals.evicted
        ended, self._ended = self._ended, []
        return StrataStats.of(evicted, sum(n for n, _ in held), sum(n for _, n in held), ended)

    def close(self) -> None:
        """Let the drop log appear."""
        if self._log:
            self._log.close()


def this_worker() -> KvstrataConnector | None:
    """The connector of this process, if it is a worker of an engine that kvstrata compresses."""
    if not has_kv_transfer_group():
        return None
    found = get_kv_transfer_group()
    return found if isinstance(found, KvstrataConnector) else None

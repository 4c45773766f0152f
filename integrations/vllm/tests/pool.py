"""vLLM's own block pool and cache manager under a scheduler of a few lines, without a model."""

from __future__ import annotations

import torch
from kvstrata_vllm import register
from kvstrata_vllm.ledger import Ledger
from kvstrata_vllm.settings import Settings
from kvstrata_vllm.spec import StrataManager, strata_spec
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

BLOCK, CHUNK = 16, 48


class Pool:
    """Requests that share a pool. What a step does is `schedule`, then `announce`, as vLLM's scheduler and ours do."""

    def __init__(self, policy, blocks, lag=1, classes=1, caching=False, layers=4, longest=4096):
        register()
        init_none_hash(sha256)
        settings = Settings(policy, classes=classes, lag=lag)
        base = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        specs = list(dict.fromkeys(strata_spec(base, settings, layer, layers, 1, CHUNK) for layer in range(layers)))
        groups = [KVCacheGroupSpec([f"layers.{i}" for i in s.layer_class.layers], s) for s in specs]
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.kv = KVCacheManager(config, longest, BLOCK, BLOCK, enable_caching=caching, max_in_flight_tokens=CHUNK)
        self.managers: tuple[StrataManager, ...] = self.kv.coordinator.single_type_managers
        self.ledger = Ledger(lag)
        for manager in self.managers:
            manager.ledger = self.ledger
        self.blocks, self.caching = self.kv.block_pool, caching
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.measure = lambda request, blocks: [0.0] * blocks
        self.freed: list[int] = []

    def add(self, name, tokens):
        request = Request(name, tokens, SamplingParams(max_tokens=10_000), None, block_hasher=self.hasher)
        self.requests[name] = request
        self.waiting.append(request)

    def step(self):
        """Schedule one step, tell the workers, and take what they measured."""
        scheduled = {}
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(CHUNK, request.num_tokens - request.num_computed_tokens)
            while self.kv.allocate_slots(request, count) is None:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = count
        scheduled = {name: n for name, n in scheduled.items() if self.requests[name] in self.running}
        while self.waiting and self._admit(self.waiting[0], scheduled):
            self.running.append(self.waiting.pop(0))
        self._announce(scheduled)
        for name, count in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([7])
        return scheduled

    def _admit(self, request, scheduled):
        hits, known, _ = self.kv.get_computed_blocks(request)
        count = min(CHUNK, request.num_tokens - known)
        given = self.kv.allocate_slots(request, count, known, hits, full_sequence_must_fit=True)
        if given is None:
            return False
        request.num_computed_tokens, request.status = known, RequestStatus.RUNNING
        scheduled[request.request_id] = count
        return True

    def _announce(self, scheduled):
        for name, count in scheduled.items():
            after = self.requests[name].num_computed_tokens + count
            for number, manager in enumerate(self.managers):
                self.ledger.announce(number, name)
                if (scorer := manager.wanted(name, after)) is not None:
                    self.ledger.note(number, name, scorer, self.measure(name, -(-after // BLOCK)))
        self.ledger.step += 1

    def preempt(self, request):
        self.running.remove(request)
        self.kv.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.waiting.insert(0, request)

    def finish(self, name):
        request = self.requests.pop(name)
        (self.running if request in self.running else self.waiting).remove(request)
        self.ledger.finish(name)
        self.kv.free(request)

    def check(self):
        """Logical = physical + evicted; every block has as many owners as it counts; none is lost, none held twice."""
        owners: dict[int, int] = {}
        for number, manager in enumerate(self.managers):
            for name, table in manager.req_to_blocks.items():
                live = [block for block in table if not block.is_null]
                state = self.ledger.eviction(number, name)
                assert len(table) == len(live) + state.evicted
                assert len({block.block_id for block in live}) == len(live)
                for block in live:
                    owners[block.block_id] = owners.get(block.block_id, 0) + 1
                assert all(not table[i].is_null for i in state.announced) or not self.ledger.lag
        for block in self.blocks.blocks:
            if not block.is_null:
                assert block.ref_cnt == owners.get(block.block_id, 0)
        assert self.blocks.get_num_free_blocks() == self.blocks.num_gpu_blocks - 1 - len(owners)

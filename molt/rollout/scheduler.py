"""The engine's scheduler: lets the probe run while everything else is frozen (invariant I3).

Between a refit and the resume the engine must show that it computes with the published weights,
before any rollout samples a token from them. vLLM's `pause_generation(mode="keep")` freezes every
request; the schedulers here keep that and exempt requests whose id starts with `PROBE_PREFIX`.

They also see to the KV of the frozen requests: dropped, it is counted and timed when it is computed
again; kept (`engine.kv`), no other request is given it, since their spans would name weights that
it does not come from.

vLLM loads one of these classes by its qualified name in the EngineCore process.
"""

import sys
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from molt.rollout.vllm_calls import ASK_SCHEDULER, PROBE_PREFIX, ROUTING_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def _is_probe(request: "Request") -> bool:
    return request.request_id.startswith(PROBE_PREFIX)


def _ask(core: Any, method: str) -> Any:
    """A utility call of EngineCore: what its scheduler answers."""
    return getattr(core.scheduler, method)()


class _Probing(Scheduler):
    """Schedules probes, and only probes, while the pause state is PAUSED_ALL."""

    _pause_state: PauseState
    running: "list[Request]"
    waiting: Any
    requests: "dict[str, Request]"
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lost: dict[str, int] = {}
        """Request -> tokens whose KV a pause dropped, until it has been computed again."""
        self._recomputing: set[int] = set()
        """Steps under way that compute such tokens, by the identity of their output."""
        self._since = 0.0
        self._recomputed, self._recompute_s = 0, 0.0
        setattr(EngineCore, ASK_SCHEDULER, _ask)

    def get_num_unfinished_requests(self) -> int:
        """Unfinished requests that may run now; while paused, those are the probes.

        vLLM's engine loop steps as long as this is not zero. A probe never outlives the call that
        made it, so a pause still ends with an idle engine.
        """
        if self._pause_state != PauseState.PAUSED_ALL:
            return super().get_num_unfinished_requests()
        return sum(map(_is_probe, self.running)) + sum(map(_is_probe, self.waiting))

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """One scheduling step; while paused, of the probes alone."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return self._schedule_probes(throttle_prefills)
        began = time.perf_counter()
        output = super().schedule(throttle_prefills)
        scheduled = output.num_scheduled_tokens.items() if self._lost else ()
        n_again = sum(self._computed_again(name, n) for name, n in scheduled)
        if n_again:
            self._since = self._since if self._recomputing else began
            self._recomputing.add(id(output))
            self._recomputed += n_again
        return output

    def _schedule_probes(self, throttle_prefills: bool) -> "SchedulerOutput":
        """The frozen requests are taken out of both queues for the duration of vLLM's own
        `schedule()`, so it can neither advance nor preempt them, and put back in their order.

        Frozen requests that keep their KV may leave no room for a probe: then one loses it.
        """
        running, waiting = self.running, self.waiting
        frozen = [request for request in running if not _is_probe(request)]
        self.running = [request for request in running if _is_probe(request)]
        self.waiting = create_request_queue(self.policy)
        for request in filter(_is_probe, waiting):
            self.waiting.add_request(request)
        self._pause_state = PauseState.UNPAUSED
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            is_stuck = bool(self.waiting) and not self.running
            self.running = frozen + self.running
            for request in waiting:
                if not _is_probe(request):
                    self.waiting.add_request(request)
        if is_stuck and frozen:
            self.running.remove(frozen[-1])
            self._preempt_request(frozen[-1], time.monotonic())
        return output

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Also while requests hold KV: they go on with it, and no other request is given it.

        vLLM refuses that. Here no block can be found any more, nor can those that these requests
        go on to fill: what they compute from now on rests on KV of older weights.
        """
        if reset_running_requests or not self.running:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager.num_cached_block |= dict.fromkeys(self.holding_kv(), sys.maxsize)
        return True

    def holding_kv(self) -> list[str]:
        """Ids of the requests that have KV."""
        return [request.request_id for request in self.running]

    def recomputed(self) -> tuple[int, float]:
        """Tokens whose KV a pause had dropped and that were computed again since the last call, and
        the wall seconds of the steps that did it (whole steps: they may have sampled as well).
        """
        found = self._recomputed, self._recompute_s
        self._recomputed, self._recompute_s = 0, 0.0
        self._lost = {name: n for name, n in self._lost.items() if name in self.requests}
        return found

    def _preempt_request(self, request: "Request", *args: Any, **kwargs: Any) -> None:
        if self._pause_state == PauseState.PAUSED_ALL:
            had = self._lost.get(request.request_id, 0)
            self._lost[request.request_id] = max(had, request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)

    def _computed_again(self, name: str, n_scheduled: int) -> int:
        """How many of a request's tokens in this step had their KV before."""
        if name not in self._lost:
            return 0
        had, end = self._lost[name], self.requests[name].num_computed_tokens
        if end >= had:
            del self._lost[name]
        return max(min(end, had) - (end - n_scheduled), 0)

    def update_from_output(self, scheduler_output: "SchedulerOutput", *args: Any) -> Any:
        """The end of a step."""
        if id(scheduler_output) in self._recomputing:
            self._recomputing.remove(id(scheduler_output))
            now = time.perf_counter()
            self._recompute_s, self._since = self._recompute_s + now - self._since, now
        return super().update_from_output(scheduler_output, *args)


class ProbeScheduler(_Probing):
    """For platforms where vLLM schedules synchronously (CPU).

    vLLM refuses to return expert choices there for want of a worker that captures them;
    `molt.rollout.routing` is one, and asks for the scheduler's half through `additional_config`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if ROUTING_KEY in self.vllm_config.additional_config:
            self.aux_output_connector = AuxOutputSchedulerConnector()


class AsyncProbeScheduler(_Probing, AsyncScheduler):
    """For platforms where vLLM schedules the next step before the last one is read (GPU)."""

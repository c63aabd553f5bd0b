"""The engine's scheduler: lets the probe run while everything else is frozen (invariant I3).

Between a refit and the resume the engine must show that it computes with the published weights,
before any rollout samples a token from them. vLLM's `pause_generation(mode="keep")` freezes every
request; the schedulers here keep that and exempt requests whose id starts with `PROBE_PREFIX`.

vLLM loads one of these classes by its qualified name in the EngineCore process.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from molt.rollout.vllm_calls import PROBE_PREFIX, ROUTING_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def _is_probe(request: "Request") -> bool:
    return request.request_id.startswith(PROBE_PREFIX)


class _Probing(Scheduler):
    """Schedules probes, and only probes, while the pause state is PAUSED_ALL."""

    _pause_state: PauseState
    running: "list[Request]"
    waiting: Any

    def get_num_unfinished_requests(self) -> int:
        """Unfinished requests that may run now; while paused, those are the probes.

        vLLM's engine loop steps as long as this is not zero. A probe never outlives the call that
        made it, so a pause still ends with an idle engine.
        """
        if self._pause_state != PauseState.PAUSED_ALL:
            return super().get_num_unfinished_requests()
        return sum(map(_is_probe, self.running)) + sum(map(_is_probe, self.waiting))

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """One scheduling step; while paused, of the probes alone.

        The frozen requests are taken out of both queues for the duration of vLLM's own
        `schedule()`, so it can neither advance nor preempt them, and put back in their order.
        """
        if self._pause_state != PauseState.PAUSED_ALL:
            return super().schedule(throttle_prefills)
        running, waiting = self.running, self.waiting
        self.running = [request for request in running if _is_probe(request)]
        self.waiting = create_request_queue(self.policy)
        for request in filter(_is_probe, waiting):
            self.waiting.add_request(request)
        self._pause_state = PauseState.UNPAUSED
        try:
            return super().schedule(throttle_prefills)
        finally:
            self._pause_state = PauseState.PAUSED_ALL
            self.running = [r for r in running if not _is_probe(r)] + self.running
            for request in waiting:
                if not _is_probe(request):
                    self.waiting.add_request(request)


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

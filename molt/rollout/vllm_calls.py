"""How vLLM is called: its arguments, its sampling parameters, its weight update.

Everything that depends on vLLM's version stands here and in its two plug-ins, `scheduler` and
`weight_transfer`; `engine` decides when it is called. vLLM is imported inside the functions, after
`set_environment`.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.rollout.routing import RoutingRuns, RoutingShape, completion_routing
from molt.rollout.types import Completion, EngineSettings
from molt.schemas.errors import ConfigError, EngineError
from molt.schemas.records import Sampling, Version

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

PROBE_PREFIX = "probe-"
"""Ids of the requests that run while the engine is paused; see `molt.rollout.scheduler`."""

ASK_SCHEDULER = "molt_ask_scheduler"
"""The utility call that `molt.rollout.scheduler` adds to vLLM's EngineCore."""

ROUTING_KEY = "molt_routing"
"""In vLLM's `additional_config`: the CPU scheduler passes expert choices on."""

ManifestEntry = tuple[str, str, Sequence[int]]
"""Name, dtype ("float32") and shape of one checkpoint tensor."""


def set_environment(settings: EngineSettings) -> None:
    """What vLLM and OpenMP read at import, here and in the processes started from here.

    Passive waiting lets the trainer use the same cores in turn; spinning costs a third.
    """
    os.environ.update(
        MOLT_ENGINE="1",
        OMP_NUM_THREADS=str(settings.threads),
        OMP_WAIT_POLICY="PASSIVE",
        KMP_BLOCKTIME="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
    )


def build(settings: EngineSettings) -> "AsyncLLM":
    """Start vLLM's processes; must be called on the event loop that will use the engine."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    # On a CPU compiling takes a minute at every start and was not faster at this block size, the
    # smallest one, which lets the rollouts of a group share their short prompt.
    platform: dict[str, Any] = {"enforce_eager": True, "block_size": 32} if on_cpu else {}
    if settings.routing and on_cpu:
        platform["additional_config"] = {ROUTING_KEY: True}
    elif settings.routing:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that returns them
        platform["enable_return_routed_experts"] = True
    scheduler = "ProbeScheduler" if on_cpu else "AsyncProbeScheduler"
    dtype: Any = settings.dtype
    backend = "molt_nccl" if settings.weight_transfer == "nccl" else settings.weight_transfer
    arguments = AsyncEngineArgs(
        model=settings.model,
        dtype=dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * 2**30),
        seed=settings.seed,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=backend),
        worker_extension_cls="molt.rollout.weight_transfer.WorkerExtension",
        scheduler_cls=f"molt.rollout.scheduler.{scheduler}",
        disable_log_stats=True,
        **platform,
    )
    return AsyncLLM.from_engine_args(arguments)


def sampling_params(
    sampling: Sampling,
    max_tokens: int,
    every: int = 0,
    grammar: Any = None,
    routing_start: int = 0,
) -> "SamplingParams":
    """Every field that shapes the distribution is set, so no default of a model folder applies.

    every: an output after this many tokens; 0 = one at the end. grammar: a
    StructuredOutputsParams or None.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    fields = {**asdict(sampling), "stop": list(sampling.stop), "max_tokens": max_tokens}
    return SamplingParams(
        **fields,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA if every else RequestOutputKind.FINAL_ONLY,
        stream_interval=every or None,
        structured_outputs=grammar,
        skip_clone=True,
        routed_experts_prompt_start=routing_start,
    )


async def capture_routing(llm: "AsyncLLM") -> RoutingShape:
    """Let the workers capture expert choices; ConfigError for a model without experts."""
    shapes = await llm.collective_rpc("molt_capture_routing")
    if shapes[0] is None:
        raise ConfigError("train.routing needs a model with experts; set train.routing = 'off'")
    return RoutingShape(**(shapes[0] | {"layers": tuple(shapes[0]["layers"])}))


def scoring_params() -> "SamplingParams":
    """One greedy token, whose only purpose is the log-probabilities of the prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_logprobs(ids: list[int], output: Any) -> np.ndarray:
    """float32 [len - 1]: vLLM reports nothing for the first position, one value for each other."""
    flat = output.prompt_logprobs
    if flat is None or list(flat.token_ids) != list(ids[1:]):
        raise EngineError(f"the engine scored other tokens than it was given: {output.request_id}")
    return np.array(flat.logprobs, np.float32)


class Request:
    """One request in vLLM, read in pieces. `take` gives what was sampled since the last call.

    vLLM hands out version spans with the last output only, so a piece in between is read from
    its record of the request, which knows at which token each label began.
    """

    def __init__(
        self, llm: "AsyncLLM", queue: Any, routing: RoutingShape | None = None, start: int = 0
    ) -> None:
        """routing: of the experts that vLLM returns, whose first row is position `start`."""
        self.queue, self.cut = queue, False
        self._routing, self._routed, self._chunks = routing, start, 0
        self._states = llm.output_processor.request_states
        self._state = self._states.get(queue.request_id)
        self._taken = 0
        self._kept_from: int | None = None

    def interrupt(self) -> None:
        """Wake the reader, which then takes what there is as a "partial" piece."""
        from vllm import RequestOutput

        self.cut = True
        self.queue.put(RequestOutput(self.queue.request_id, None, None, None, [], False))

    def keep_kv(self) -> None:
        """The weights changed under the KV that this request has: what comes now rests on both."""
        if self._kept_from is None:
            self._kept_from = self._taken + self.n_new

    def fail(self, error: Exception) -> None:
        """Let the reader raise `error`."""
        self.queue.put(error)

    @property
    def is_running(self) -> bool:
        return self.queue.request_id in self._states

    @property
    def n_new(self) -> int:
        """Tokens sampled and not taken."""
        return self._state.detokenizer.num_output_tokens() - self._taken if self._state else 0

    def take(self, final: "RequestOutput | None" = None) -> Completion:
        """The new tokens; with vLLM's last output also how the request ended."""
        last = final.outputs[0] if final is not None else None
        if self._state is not None:
            ids = self._state.detokenizer.output_token_ids
            logprobs = self._state.logprobs_processor.logprobs
            starts, n_cached = self._state.weight_version_starts, self._state.num_cached_tokens
        else:  # it was over before its first output could be asked for
            assert last is not None and final is not None
            ids, logprobs = last.token_ids, last.logprobs
            starts = [(span.version, span.start) for span in last.weight_versions or ()]
            n_cached = final.num_cached_tokens
        first, end = self._taken, len(ids)
        self._taken = end
        stopped = last is not None and last.finish_reason == "stop"
        by_token = stopped and not isinstance(last.stop_reason, str)  # type: ignore[union-attr]
        return Completion(
            token_ids=np.array(ids[first:end], np.int32),
            logprobs=np.array(logprobs.logprobs[first:end] if logprobs else [], np.float32),
            version_runs=version_runs(starts, first, end),
            finish_reason=last.finish_reason if last else "partial" if self.cut else "",
            stop_token=int(ids[-1]) if by_token else None,
            n_cached=n_cached or 0,
            routing=self._take_routing(last),
            kept_kv=self._kept_from is not None and end > self._kept_from,
        )

    def _take_routing(self, last: Any) -> RoutingRuns:
        """The rows that came since the last call; vLLM keeps them in the chunks they came in."""
        if self._routing is None:
            return ()
        chunks = self._state.routed_experts_chunks[self._chunks :] if self._state else []
        if self._state is None and last.routed_experts is not None:
            chunks = [last.routed_experts]
        if not chunks:
            return ()
        rows, start = np.concatenate(chunks), self._routed
        self._chunks, self._routed = self._chunks + len(chunks), start + len(rows)
        return completion_routing(rows, start, self._routing)


def version_runs(
    starts: Sequence[tuple[str, int]], first: int, end: int
) -> tuple[tuple[int, int, int], ...]:
    """(epoch, version, tokens) over the tokens [first, end) of a request.

    `starts`: label "<epoch>.<version>" and first token of each span, ascending.

    >>> version_runs([("1.3", 0), ("1.4", 5)], 2, 9)
    ((1, 3, 3), (1, 4, 4))
    """
    ends = [start for _, start in starts[1:]] + [end]
    runs = []
    for (label, start), stop in zip(starts, ends, strict=True):
        n = min(stop, end) - max(start, first)
        if n > 0:
            version = Version.parse(label)
            runs.append((version.epoch, version.version, n))
    return tuple(runs)


async def ask_scheduler(llm: "AsyncLLM", method: str) -> Any:
    """What a method of `molt.rollout.scheduler` answers."""
    core: Any = llm.engine_core
    return await core.call_utility_async(ASK_SCHEDULER, method)


async def transfer(
    llm: "AsyncLLM", manifest: Sequence[ManifestEntry], label: str
) -> list[dict[str, Any]]:
    """vLLM's three calls of a weight update; returns what each worker received."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    info = {
        "names": [name for name, _, _ in manifest],
        "dtype_names": [dtype for _, dtype, _ in manifest],
        "shapes": [list(shape) for _, _, shape in manifest],
    }
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
    await llm.finish_weight_update(label)
    # A probe between two updates of one pause leaves KV of the first one behind.
    if not await llm.reset_prefix_cache():
        raise EngineError("the prefix cache could not be cleared after the weight update")
    received: list[dict[str, Any]] = await llm.collective_rpc("molt_received")
    return received

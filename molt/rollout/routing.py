"""Which experts served each token in the engine: captured per request, handed over as log rows.

Stands between vLLM's routers and the `routing` stream. One interface, two sources: vLLM hands a
request's choices over with its tokens (`CompletionOutput.routed_experts`), filled by its own
capture on GPUs and by `RoutingCapture` here on CPU, where vLLM 0.32 has none. Either way a position
is reported once, by the forward that computed its KV for the running request: neither chunked
prefill, preemption nor a pause that drops all KV reports it again. The last sampled token was never
forwarded, so it has no row until the next turn asks for it. Unknown positions are absent from the
log: no expert id stands for "unknown" (the minus one used here never leaves the engine).

Letters: N tokens, L layers with experts in model order, K choices per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from molt.schemas.check import routing_columns
from molt.schemas.errors import ConfigError, EngineError
from molt.schemas.records import RoutingRow
from molt.schemas.streams import routing_metadata

UNKNOWN = -1

RoutingRuns = tuple[tuple[int, np.ndarray], ...]
"""(first position in the chain, expert ids [n, L, K]) of each run of known positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """What a model's expert choices look like; fixed for a run."""

    layers: tuple[int, ...]
    """Numbers of the decoder layers that have experts."""
    top_k: int
    n_experts: int

    def metadata(self) -> dict[str, str]:
        """What the writer of `routing` rows is opened with."""
        return routing_metadata(layers=len(self.layers), top_k=self.top_k, n_experts=self.n_experts)


class SlotRouting:
    """Expert choices kept beside the KV cache: one row per KV slot.

    A token's row lies where its KV lies, so whoever shares the KV (a prefix-cache hit) shares the
    row, and whoever recomputes the KV (preemption, a refit) recomputes the row.
    """

    def __init__(self, *, n_blocks: int, block_size: int, layers: int, top_k: int) -> None:
        """Memory: n_blocks x block_size x layers x top_k x 2 bytes."""
        self.block_size = block_size
        self._rows = np.full((n_blocks * block_size, layers, top_k), UNKNOWN, np.int16)

    def write(self, slots_N: np.ndarray, experts_NLK: np.ndarray) -> None:
        """The choices of the tokens that one forward computed, with the KV slots it wrote."""
        self._rows[slots_N] = experts_NLK

    def read(self, block_ids: np.ndarray, start: int, end: int) -> np.ndarray:
        """Rows of positions [start, end) of the request that owns these blocks: int16 [n, L, K]."""
        positions_N = np.arange(start, end)
        blocks_N = block_ids[positions_N // self.block_size].astype(np.int64)
        return self._rows[blocks_N * self.block_size + positions_N % self.block_size]


class RoutingCapture:
    """Part of the worker extension: taps the routers of one vLLM worker."""

    model_runner: Any
    vllm_config: Any

    def molt_capture_routing(self) -> dict[str, Any] | None:
        """Start to capture; the fields of `RoutingShape`, or None for a model without experts.

        On GPUs nothing is tapped: vLLM captures by itself.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner, config = self.model_runner, self.vllm_config.model_config
        routed = {m.layer_id: m for m in runner.model.modules() if isinstance(m, MoERunner)}
        if not routed:
            return None
        shape = RoutingShape(
            layers=tuple(sorted(routed)),
            top_k=config.get_num_experts_per_tok(),
            n_experts=config.get_num_experts(),
        )
        if runner.device.type == "cpu":
            _tap(runner, [routed[layer].router for layer in shape.layers], shape)
        return asdict(shape)


def _tap(runner: Any, routers: Sequence[Any], shape: RoutingShape) -> None:
    """Let every forward of a CPU runner write its choices, and every step hand them over.

    The step's metadata and output are those of vLLM's auxiliary-output connector, whose scheduler
    half `molt.rollout.scheduler` installs; its worker half exists for GPUs only.
    """
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or shape.n_experts > np.iinfo(np.int16).max:
        raise ConfigError(
            f"routing capture on CPU: {len(groups)} KV cache groups and {shape.n_experts} experts; "
            "it needs one group and at most 32767 experts. Set train.routing = 'off'"
        )
    step: dict[int, np.ndarray] = {}
    scheduled: list[Any] = []
    store: SlotRouting | None = None
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def table() -> Any:
        return runner.input_batch.block_table.block_tables[0]

    def keep(layer: int, topk_ids: Any) -> None:
        step[layer] = topk_ids.detach().numpy().copy()

    def executed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal store
        step.clear()
        out = execute_model(scheduler_output, *args, **kwargs)
        scheduled[:] = [scheduler_output]
        n = scheduler_output.total_num_scheduled_tokens
        if n:
            assert len(step) == len(routers), f"{len(step)} of {len(routers)} routers were seen"
            if store is None:
                store = SlotRouting(
                    n_blocks=runner.kv_cache_config.num_blocks,
                    block_size=table().block_size,
                    layers=len(routers),
                    top_k=shape.top_k,
                )
            experts_NLK = np.stack([step[layer][:n] for layer in range(len(routers))], 1)
            store.write(table().slot_mapping.np[:n], experts_NLK)
        return out

    def sampled(*args: Any, **kwargs: Any) -> Any:
        out = sample_tokens(*args, **kwargs)
        (scheduler_output,) = scheduled
        wanted = scheduler_output.aux_output_connector_metadata
        if wanted is not None and store is not None:
            batch, blocks = runner.input_batch, table().get_numpy_array()
            rows = {}
            for request_id, start in wanted.requests.items():
                i = batch.req_id_to_index[request_id]
                n_done = int(batch.num_computed_tokens_cpu[i])
                end = n_done + scheduler_output.num_scheduled_tokens[request_id]
                rows[request_id] = AuxRequestOutput(start, store.read(blocks[i], start, end))
            out.aux_output_connector_output = rows
        return out

    for layer, router in enumerate(routers):
        router.set_capture_fn(partial(keep, layer))
    runner.execute_model, runner.sample_tokens = executed, sampled


def completion_routing(routed: np.ndarray | None, start: int, shape: RoutingShape) -> RoutingRuns:
    """The known runs of a vLLM output whose first row is position `start`.

    `routed` is [n, layers, K] over the layers with experts, or over all layers of the model.
    """
    if routed is None:
        return ()
    if routed.shape[1] != len(shape.layers):
        routed = routed[:, list(shape.layers)]
    if routed.shape[2] != shape.top_k:
        raise EngineError(f"{routed.shape[2]} experts per token, the model declares {shape.top_k}")
    return tuple((start + first, routed[first:end]) for first, end in _known(routed))


def _known(routed_NLK: np.ndarray) -> Iterator[tuple[int, int]]:
    """[first, end) of each run of rows without an unknown choice."""
    known = np.zeros(len(routed_NLK) + 2, np.int8)
    known[1:-1] = (routed_NLK.astype(np.int32) != UNKNOWN).all((1, 2))
    edges = np.flatnonzero(np.diff(known))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def merge_runs(runs: Sequence[tuple[int, np.ndarray]]) -> RoutingRuns:
    """Runs of consecutive pieces of one call; what touches becomes one run."""
    out: list[tuple[int, list[np.ndarray]]] = []
    for start, experts_NLK in runs:
        if out and out[-1][0] + sum(map(len, out[-1][1])) == start:
            out[-1][1].append(experts_NLK)
        else:
            out.append((start, [experts_NLK]))
    return tuple((start, np.concatenate(parts)) for start, parts in out)


def routing_rows(
    runs: RoutingRuns, *, rollout_id: str, attempt: int, segment: int, n_experts: int
) -> list[RoutingRow]:
    """The `routing` rows of one segment; ids that the run cannot hold are SegmentRejected."""
    return [
        RoutingRow(
            rollout_id=rollout_id,
            attempt=attempt,
            segment=segment,
            start=start,
            **routing_columns(experts_NLK, n_experts),
        )
        for start, experts_NLK in runs
    ]

"""The inference engine as an actor: generate, score, pause, refit, resume.

Stands between the agents, who ask for completions, and vLLM. Keeps I2 (every sampled token carries
the version of the weights that sampled it, from vLLM's own spans), I7 (the digest of the received
weights is handed back by every refit) and the fencing of drivers: each call names its epoch.

A plain class with async methods: `ray.remote(Engine)` makes the actor, tests use it directly.
vLLM is imported by `start()`, after the environment that it reads at import is set.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.model import resolve_model
from molt.process import reap, redirect_output
from molt.rollout import vllm_calls
from molt.rollout.routing import RoutingShape
from molt.rollout.types import Completion, EngineSettings, join
from molt.schemas.errors import (
    EngineError,
    Fenced,
    ModelIdentityError,
    MoltError,
    RequestRefused,
)
from molt.schemas.records import Sampling

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


WATCH_S = 0.5
"""How often an engine looks whether vLLM's processes are alive."""


class Engine:
    """One vLLM engine (AsyncLLM and its processes) under the control of the newest epoch."""

    def __init__(
        self, engine_id: str, settings: EngineSettings, epoch: int, log_path: str | None
    ) -> None:
        """Nothing is started yet. `log_path`: file for the output of this process and vLLM's."""
        self._id, self._settings, self._epoch = engine_id, settings, epoch
        self._llm: AsyncLLM | None = None
        self._paused = False
        self._published = False  # by the present epoch
        self._whole = True  # False from the begin of a transfer until its success
        self._in_flight: dict[str, vllm_calls.Request] = {}
        self._probes = 0
        self._routing: RoutingShape | None = None
        self._children: list[Any] = []
        self._death: asyncio.Task[None]
        self._log = log_path or "the output of its process"
        if log_path is not None:
            redirect_output(log_path)

    async def start(self) -> dict[str, Any]:
        """Load the model and start vLLM's processes; 10 to 25 s on two cores.

        Returns child_pids, max_model_len, vocab_size, seconds, and routing: the RoutingShape
        of the experts that completions name, None if it captures none. Raises ConfigError for a
        folder without a model, EngineError for everything vLLM itself refuses.
        """
        started = time.perf_counter()
        resolve_model(self._settings.model)
        vllm_calls.set_environment(self._settings)
        import psutil

        others = psutil.Process().children(recursive=True)
        with self._mapped("start"):
            self._llm = vllm_calls.build(self._settings)
            if self._settings.routing:
                self._routing = await vllm_calls.capture_routing(self._llm)
        mine = psutil.Process().children(recursive=True)
        self._children = [c for c in mine if c not in others and not _is_tracker(c)]
        self._death = asyncio.create_task(self._watch())
        config = self._llm.model_config
        return {
            "child_pids": [child.pid for child in self._children],
            "max_model_len": config.max_model_len,
            "vocab_size": config.get_vocab_size(),
            "routing": self._routing,
            "seconds": time.perf_counter() - started,
        }

    async def generate(
        self,
        epoch: int,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        routing_start: int = 0,
    ) -> Completion:
        """`pieces`, joined: one whole completion."""
        pieces = self.pieces(epoch, request_id, prompt_ids, sampling, routing_start=routing_start)
        return join([piece async for piece in pieces])

    async def pieces(
        self,
        epoch: int,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        every: int = 0,
        grammar: Any = None,
        routing_start: int = 0,
    ) -> AsyncIterator[Completion]:
        """Sample one completion, handed out as it grows; waits while the engine is paused.

        A piece comes at every pause, after `every` new tokens (0 = never), and at the end; the
        last one, and no other, says how it ended. grammar: vLLM's StructuredOutputsParams.
        When the generator is closed the request is aborted.

        `routing_start`: first position whose experts are wanted, if the engine captures them.

        Raises RequestRefused for a request that cannot be served (a prompt that leaves no room in
        the window, ids outside the vocabulary), EngineError if no weights were published yet or
        the engine died, Fenced if a newer epoch took over, also in mid-generation.
        """
        llm = await self._admit(epoch)
        ids = np.asarray(prompt_ids).tolist()
        room = self._check_request(epoch, request_id, ids)
        params = vllm_calls.sampling_params(
            sampling, min(sampling.max_tokens, room), every, grammar, routing_start
        )
        with self._mapped(f"request {request_id}"):
            request = await self._add(llm, request_id, ids, params)
            try:
                async for piece in self._grow(request, every):
                    self._refuse_older(epoch)
                    yield piece
            finally:
                self._in_flight.pop(request_id, None)
                if request.is_running and not self._death.done():
                    await llm.abort(request.queue.request_id, internal=True)

    def _check_request(self, epoch: int, request_id: str, prompt_ids: list[int]) -> int:
        """Tokens that may be sampled after this prompt."""
        room = self._settings.max_model_len - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise RequestRefused(
                f"engine {self._id}, request {request_id}: a prompt of {len(prompt_ids)} tokens "
                f"in a window of {self._settings.max_model_len}; shorten it or raise max_model_len"
            )
        if not self._published:
            raise EngineError(
                f"engine {self._id}, request {request_id}: no weights were published by epoch "
                f"{epoch} yet; call receive_weights first"
            )
        if request_id.startswith(vllm_calls.PROBE_PREFIX):
            raise RequestRefused(
                f"request id {request_id!r}: {vllm_calls.PROBE_PREFIX!r} is kept for the probe"
            )
        if request_id in self._in_flight:
            raise RequestRefused(f"request id {request_id!r} is in flight; use another")
        return room

    async def _add(
        self, llm: "AsyncLLM", request_id: str, ids: list[int], params: "SamplingParams"
    ) -> vllm_calls.Request:
        async def add() -> Any:
            with self._refusing(request_id):
                return await llm.add_request(request_id, {"prompt_token_ids": ids}, params)

        request = vllm_calls.Request(
            llm,
            await self._call(f"request {request_id}", add()),
            self._routing,
            params.routed_experts_prompt_start,
        )
        self._in_flight[request_id] = request
        if self._death.done():
            request.fail(self._died(f"request {request_id}"))
        return request

    async def _grow(self, request: vllm_calls.Request, every: int) -> AsyncIterator[Completion]:
        """Pieces of a request until it ends; what a dying engine had delivered comes first."""
        while True:
            try:
                output = request.queue.get_nowait() or await request.queue.get()
            except Exception:
                if request.is_running and request.n_new:
                    yield request.take()
                raise
            if output.finished:
                piece = request.take(output)
                if piece.finish_reason not in ("stop", "length", "abort"):
                    raise EngineError(
                        f"engine {self._id}: a request finished with {piece.finish_reason!r}; "
                        f"see {self._log}"
                    )
                yield piece
                return
            if request.n_new and (request.cut or 0 < every <= request.n_new):
                yield request.take()
            request.cut = False

    async def score(self, epoch: int, sequences: list[list[int]]) -> list[np.ndarray]:
        """log p(token[i] | tokens[:i]) for i >= 1, temperature 1: float32 [len - 1] each.

        Teacher-forced, never from cached KV, and works while the engine is paused: between a refit
        and the resume it is the only thing that runs.
        """
        llm = await self._admit(epoch)
        longest = max(map(len, sequences), default=0)
        if longest >= self._settings.max_model_len:
            raise RequestRefused(
                f"engine {self._id}: cannot score {longest} tokens in a window of "
                f"{self._settings.max_model_len} (one position is needed for the next token)"
            )
        params = vllm_calls.scoring_params()
        first, self._probes = self._probes, self._probes + len(sequences)
        outputs = await asyncio.gather(
            *(
                self._final(llm, ids, params, f"{vllm_calls.PROBE_PREFIX}{first + i}")
                for i, ids in enumerate(sequences)
            )
        )
        return [
            vllm_calls.prompt_logprobs(ids, out)
            for ids, out in zip(sequences, outputs, strict=True)
        ]

    async def pause(self, epoch: int) -> int:
        """Freeze every request where it stands; unless `kv` is "kept", drop all KV, which is then
        recomputed on resume.

        Returns the number of tokens whose KV was dropped.
        """
        llm = await self._admit(epoch)
        drop = self._settings.kv != "kept"
        await self._call("pause", llm.pause_generation(mode="keep", clear_cache=drop))
        self._paused = True
        for request in self._in_flight.values():
            request.interrupt()
        return self.tokens_in_flight() if drop else 0

    def tokens_in_flight(self) -> int:
        """Prompt and sampled tokens of the sequences that have begun to sample."""
        if self._llm is None:
            return 0
        states = self._llm.output_processor.request_states.values()
        begun = [s for s in states if not s.is_prefilling and s.detokenizer is not None]
        return sum(s.prompt_len + s.detokenizer.num_output_tokens() for s in begun)

    async def recomputed(self, epoch: int) -> tuple[int, float]:
        """Tokens whose KV was computed again after a pause, and the seconds of the steps that did
        it, both since the last call; see `molt.rollout.scheduler`."""
        llm = await self._admit(epoch)
        asked = vllm_calls.ask_scheduler(llm, "recomputed")
        tokens, seconds = await self._call("recomputed", asked)
        return tokens, seconds

    async def resume(self, epoch: int) -> None:
        """Let the frozen requests go on, under the weights received since.

        Raises EngineError after a transfer that failed: the weights are then a mixture.
        """
        llm = await self._admit(epoch)
        if not self._whole:
            raise EngineError(
                f"engine {self._id}: the last weight transfer did not succeed; send again first"
            )
        await self._call("resume", llm.resume_generation())
        self._paused = False

    async def init_transfer(
        self, epoch: int, host: str, port: int, world_size: int, rank_offset: int
    ) -> None:
        """Join the sender's group; returns once all of its members have joined."""
        llm = await self._admit(epoch)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"host": host, "port": port, "world_size": world_size, "rank_offset": rank_offset}
        request = WeightTransferInitRequest(init_info=info)
        await self._call("init_transfer", llm.init_weight_transfer_engine(request))

    async def receive_weights(
        self, epoch: int, manifest: Sequence[vllm_calls.ManifestEntry], version: int
    ) -> dict[str, Any]:
        """Receive the tensors of `manifest` from the sender and label them `(epoch, version)`.

        Only while paused. Returns digest (16 hex digits, of the bytes as received), bytes and
        seconds. After an error the engine stays paused under its old label with weights that are
        neither the old nor the new ones: form a new group and send again.
        """
        llm = await self._admit(epoch)
        if not self._paused:
            raise EngineError(f"engine {self._id}: receive_weights needs a paused engine")
        started = time.perf_counter()
        self._whole = False
        transfer = vllm_calls.transfer(llm, manifest, f"{epoch}.{version}")
        received = await self._call(f"receive_weights of version {version}", transfer)
        if len({entry["digest"] for entry in received}) != 1:
            raise ModelIdentityError(
                f"engine {self._id}: its workers received different weights: {received}; send again"
            )
        if self._settings.kv == "kept":
            holding = await self._call("holding_kv", vllm_calls.ask_scheduler(llm, "holding_kv"))
            for request in self._in_flight.values():
                if request.queue.request_id in holding:
                    request.keep_kv()
        self._published = self._whole = True
        return {**received[0], "seconds": time.perf_counter() - started}

    async def died(self) -> None:
        """Returns when one of vLLM's processes is gone."""
        await asyncio.shield(self._death)

    async def shutdown(self) -> None:
        """Stop vLLM and every process it started; may be called twice."""
        if self._llm is not None:
            self._death.cancel()
            for request_id, request in self._in_flight.items():
                request.fail(EngineError(f"engine {self._id} was shut down in {request_id}"))
            self._llm.shutdown()
            self._llm = None
        reap(self._children)
        self._children = []

    async def _admit(self, epoch: int) -> "AsyncLLM":
        """Refuse older epochs, adopt newer ones: their weights must be published anew."""
        self._refuse_older(epoch)
        if self._llm is None:
            raise EngineError(f"engine {self._id} is not running; call start() first")
        if epoch > self._epoch:
            self._epoch, self._published = epoch, False
            await self._llm.abort(list(self._in_flight))
        return self._llm

    def _refuse_older(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Fenced(f"engine {self._id} belongs to epoch {self._epoch}, not to epoch {epoch}")

    async def _final(
        self, llm: "AsyncLLM", ids: list[int], params: "SamplingParams", request_id: str
    ) -> "RequestOutput":
        async def last_output() -> "RequestOutput | None":
            final = None
            with self._refusing(request_id):
                async for output in llm.generate({"prompt_token_ids": ids}, params, request_id):
                    final = output
            return final

        final: RequestOutput | None = await self._call(f"request {request_id}", last_output())
        if final is None:
            raise EngineError(f"engine {self._id}, request {request_id}: ended without an output")
        return final

    async def _call(self, what: str, call: Coroutine[Any, Any, Any]) -> Any:
        """Await vLLM. Its errors become EngineError, and so does the death of one of its processes:
        some of vLLM's own futures stay open for ever when the process behind them was killed.
        """
        task = asyncio.ensure_future(call)
        try:
            with self._mapped(what):
                await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise self._died(what)
                return task.result()
        finally:
            task.cancel()

    async def _watch(self) -> None:
        """Ends when one of vLLM's processes is gone, and every request with it."""
        import psutil

        def lives(child: Any) -> bool:
            try:
                return bool(child.status() != psutil.STATUS_ZOMBIE)
            except psutil.NoSuchProcess:
                return False

        while all(map(lives, self._children)):
            await asyncio.sleep(WATCH_S)
        for request_id, request in self._in_flight.items():
            request.fail(self._died(f"request {request_id}"))

    def _died(self, what: str) -> EngineError:
        return EngineError(
            f"engine {self._id}: a vLLM process died during {what}; its last words are in "
            f"{self._log}"
        )

    @contextlib.contextmanager
    def _refusing(self, request_id: str) -> Iterator[None]:
        """Turn vLLM's complaints about a request into RequestRefused."""
        from vllm.exceptions import VLLMClientError

        try:
            yield
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(
                f"engine {self._id}, request {request_id}: {error}; correct the request"
            ) from error

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """Turn vLLM's errors into EngineError, naming engine, request and log."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineError(
                f"engine {self._id} died during {what}; start a new one. Its last words are in "
                f"{self._log}"
            ) from error
        except MoltError:
            raise
        except Exception as error:
            raise EngineError(
                f"engine {self._id}, {what}: {type(error).__name__}: {error}; see {self._log}"
            ) from error


def _is_tracker(process: Any) -> bool:
    """Python's resource tracker: shared by all engines of a process, ends with that process."""
    return any("resource_tracker" in word for word in process.cmdline())

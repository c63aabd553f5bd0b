"""Publishing weights: pause, refit, prove, record, resume (invariants I3 and I7).

Bytes received are not weights computed: after every refit the digest of what the engines received
must equal the trainer's, *and* both sides must agree on the logprobs of a fixed probe. Before the
first step the same is shown with perturbed weights, which a stale tensor cannot pass.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from molt.config import LimitsConfig
from molt.process import timed
from molt.schemas.errors import EngineError, ModelIdentityError

PROBE_PROMPTS = 8
PROBE_TOKENS = 32
RETRIES = 2
PARTS = ("score_s", "pause_s", "gather_s", "hash_s", "send_s", "transfer_s", "load_s", "probe_s")
"""Of a refit. `score_s`, the trainer's side of the probe, comes before the pause. The sender's
gathering and hashing are inside `send_s`, which also waits while an engine loads; `transfer_s` is
the engine's receiving and hashing, `load_s` its loading, `probe_s` its side of the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Differences of log p between engine and trainer over the probe's recorded tokens."""

    mean_gap: float
    p999_gap: float
    max_gap: float
    k3: float
    """Mean of exp(d) - 1 - d with d = trainer - engine: Schulman's low-variance KL estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Token sequences that are scored on both sides; the first `n_context[i]` are not compared."""

    sequences: list[list[int]]
    n_context: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the `policy` record says of one refit."""

    version: int
    weights_digest: str
    bytes: int
    seconds: float
    """Of the transfer: from the first tensor gathered until the last engine had received and hashed
    all of them, without loading; `Publisher.parts` has the rest."""
    recompute_tokens: int
    """Tokens of sequences in flight whose KV was dropped and is computed again on resume."""
    engines: tuple[str, ...]
    """Those that received the version, each with this digest."""
    probe: Gap


def gap(engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> Gap:
    """Compare log p of the same tokens; arrays are float32 [n], one per sequence."""
    a, b = (np.concatenate(side).astype(np.float64) for side in (engine, trainer))
    d = b - a
    return Gap(
        mean_gap=float(np.abs(d).mean()),
        p999_gap=float(np.quantile(np.abs(d), 0.999)),
        max_gap=float(np.abs(d).max()),
        k3=float((np.exp(d) - 1 - d).mean()),
    )


def worst(gaps: Sequence[Gap]) -> Gap:
    """The largest of each number, so that no engine hides behind another; NaN is infinite."""
    rows = [asdict(g) for g in gaps]
    names = rows[0]
    return Gap(**{n: max(math.inf if math.isnan(r[n]) else r[n] for r in rows) for n in names})


class Publisher:
    """Sends the trainer's weights to the engines and proves that they arrived.

    `call(actor, method, *args)` awaits one remote call; it is the only thing that knows of Ray.
    """

    def __init__(
        self,
        trainers: Sequence[Any],
        engines: Mapping[str, Any],
        epoch: int,
        dtype: str,
        limits: LimitsConfig,
        call: Callable[..., Awaitable[Any]],
        lost: Callable[[str, Any], None] | None = None,
    ) -> None:
        """`lost(name, engine)` is told of an engine that failed: it is left out from then on."""
        self.trainers, self.engines, self.epoch = trainers, dict(engines), epoch
        self.dtype, self.limits, self.call, self.lost = dtype, limits, call, lost
        self.probe: Probe | None = None
        self.baseline: Gap | None = None
        self._backend = "gloo"
        self._connected: list[Any] = []
        self._manifest: Any = None
        self.parts: dict[str, float] = {}
        """Seconds of the last refit's parts, of the engine that took longest: see `PARTS`."""

    async def connect(self, backend: str) -> None:
        """Form the transfer group: trainer rank 0, then one rank per engine."""
        self._backend, engines = backend, list(self.engines.values())
        rank0 = self.trainers[0]
        host, port = await self.call(rank0, "open_sender", backend, len(engines))
        self._manifest = await self._on_trainers("manifest")
        await asyncio.gather(
            self.call(rank0, "connect_sender"),
            *(
                self.call(e, "init_transfer", self.epoch, host, port, len(engines) + 1, i + 1)
                for i, e in enumerate(engines)
            ),
        )
        self._connected = engines

    async def transfer_unproven(self, version: int) -> None:
        """Weights that nothing is trained on: the probe itself is sampled with them."""
        await self._pause()
        await self._transfer(version)
        await self.resume()

    async def refit(self, version: int) -> Published:
        """Pause, transfer, compare digests, probe. Generation stays paused: the caller records
        the policy and resumes. The trainer scores the probe before the pause, not within it.

        An engine that fails is left out and the group formed anew with the others. Raises
        ModelIdentityError if digests still differ after `RETRIES` more attempts, EngineError if no
        engine is left.
        """
        dropped, why, parts = 0, "", dict.fromkeys(PARTS, 0.0)
        with timed(parts, "score_s"):
            expected = await self._expected()
        for _ in range(1 + RETRIES):
            self.parts = dict(parts)
            with timed(self.parts, "pause_s"):
                dropped = max(dropped, await self._pause())
            try:
                if list(self.engines.values()) != self._connected:
                    await self.connect(self._backend)
                sent, received = await self._transfer(version)
                why = f"engines received {[r['digest'] for r in received]}"
                if any(r["digest"] != sent["digest"] for r in received):
                    continue
                with timed(self.parts, "probe_s"):
                    found = await self._compare(expected)
            except ModelIdentityError:
                raise
            except EngineError as error:  # the next pause finds out whose it was
                why, self._connected = str(error), []
                continue
            self._judge(version, found)
            return Published(
                version=version,
                weights_digest=sent["digest"],
                bytes=sent["bytes"],
                seconds=self.parts["transfer_s"],
                recompute_tokens=dropped,
                engines=tuple(self.engines),
                probe=found,
            )
        raise ModelIdentityError(
            f"version {version} could not be published in {1 + RETRIES} attempts: {why}; "
            "generation stays paused"
        )

    async def resume(self) -> None:
        """Let the engines sample; one that is gone meanwhile is left out."""
        await self._on_engines("resume")

    async def recomputed(self) -> dict[str, float]:
        """What resumed engines computed again since the last call: "tokens" of all of them, and
        "seconds" of the one that took longest. A dead engine is the next pause's concern.
        """
        calls = (self.call(e, "recomputed", self.epoch) for e in self.engines.values())
        tokens, seconds = 0, 0.0
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, EngineError):
                continue
            if isinstance(answer, BaseException):
                raise answer
            tokens, seconds = tokens + answer[0], max(seconds, answer[1])
        return {"tokens": tokens, "seconds": seconds}

    async def self_test(self, version: int, seed: int) -> Gap:
        """I3 (a): publish perturbed weights, probe, restore, probe. Raises ModelIdentityError.

        The perturbed probe must agree on both sides *and* differ from the unperturbed one.
        """
        await self._pause()
        before = await self._expected()
        await self._on_trainers("perturb", self.limits.noise, seed)
        await self._transfer(version)
        after = await self._expected()
        found = await self._compare(after)
        self._check_perturbed(found, gap(before, after))
        await self._on_trainers("restore")
        await self._transfer(version)
        restored = await self._compare(before)
        self._check_absolute("restored weights", restored)
        return restored

    async def _expected(self) -> list[np.ndarray]:
        """The trainer's log p of the probe's recorded tokens: float32 [n] of each sequence."""
        wanted = [
            (ids, range(n, len(ids)), 1.0)
            for ids, n in zip(self._probe.sequences, self._probe.n_context, strict=True)
        ]
        return cast(list[np.ndarray], await self._on_trainers("logprobs", wanted))

    async def _compare(self, expected: Sequence[np.ndarray]) -> Gap:
        """Score the probe on every engine; the worst of their gaps to the trainer's own values."""
        scores = await asyncio.gather(
            *(
                self.call(e, "score", self.epoch, self._probe.sequences)
                for e in self.engines.values()
            )
        )
        skip = [n - 1 for n in self._probe.n_context]
        found = ([s[k:] for s, k in zip(own, skip, strict=True)] for own in scores)
        return worst([gap(own, expected) for own in found])

    @property
    def _probe(self) -> Probe:
        assert self.probe is not None, "the probe is recorded before the first refit is judged"
        return self.probe

    async def _transfer(self, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What was sent and what every engine received; EngineError if one of them failed."""
        calls = [
            asyncio.ensure_future(self._send()),
            *(
                asyncio.ensure_future(
                    self.call(e, "receive_weights", self.epoch, self._manifest, version)
                )
                for e in self.engines.values()
            ),
        ]
        try:
            sent, *received = await asyncio.gather(*calls)
        except EngineError:
            # Whoever waits for the one that is gone notices when the group is closed.
            await asyncio.gather(calls[0], return_exceptions=True)
            await self.call(self.trainers[0], "close_sender")
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        for name in PARTS:
            if name in sent | received[0]:
                self.parts[name] = max(r[name] for r in [sent, *received] if name in r)
        return sent, received

    async def _send(self) -> dict[str, Any]:
        """Every rank takes part in gathering full tensors; rank 0 sends them."""
        rank0, *others = self.trainers
        done = await asyncio.gather(
            self.call(rank0, "send_weights"), *(self.call(t, "gather_weights") for t in others)
        )
        sent: dict[str, Any] = done[0]
        return sent

    async def _on_trainers(self, method: str, *args: Any) -> Any:
        """The same call on every rank; returns rank 0's answer."""
        return (await asyncio.gather(*(self.call(t, method, *args) for t in self.trainers)))[0]

    async def _pause(self) -> int:
        """Pause every engine that lives; tokens whose KV that dropped."""
        return sum(await self._on_engines("pause"))

    async def _on_engines(self, method: str) -> list[Any]:
        """The answers of those that live; EngineError if none does."""
        names = list(self.engines)
        answers = await asyncio.gather(
            *(self.call(self.engines[n], method, self.epoch) for n in names),
            return_exceptions=True,
        )
        last: Exception | None = None
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, BaseException):
                continue
            if not isinstance(answer, EngineError) or self.lost is None:
                raise answer
            last = answer
            self.lost(name, self.engines.pop(name))
        if not self.engines:
            raise EngineError(f"no engine is left: {last}") from last
        return [a for a in answers if not isinstance(a, BaseException)]

    def _check_perturbed(self, found: Gap, moved: Gap) -> None:
        self._check_absolute(
            f"weights changed by {self.limits.noise:.0%} noise (their logprobs moved by "
            f"{moved.mean_gap:.3g} on average)",
            found,
        )
        if moved.mean_gap <= 10 * max(found.mean_gap, 1e-6):
            raise ModelIdentityError(
                f"self-test: noise of {self.limits.noise:.0%} moved the trainer's logprobs by only "
                f"{moved.mean_gap:.3g}; the probe cannot tell stale weights. Raise limits.noise"
            )

    def _check_absolute(self, what: str, found: Gap) -> None:
        lim = self.limits
        if self.dtype == "float32":
            ok, limit = found.max_gap <= lim.float32_gap_max, f"max gap {lim.float32_gap_max}"
        else:
            ok = found.mean_gap <= lim.bf16_gap_mean and found.k3 <= lim.bf16_k3
            limit = f"mean gap {lim.bf16_gap_mean}, k3 {lim.bf16_k3}"
        if not ok:
            raise ModelIdentityError(
                f"self-test with {what}: engine and trainer disagree, {found}, limit {limit}. "
                "The engine does not compute with the weights it was sent (a stale tied lm_head, "
                "or experts that were not repacked) or in another dtype; training would be wrong, "
                "so it does not start"
            )

    def _judge(self, version: int, found: Gap) -> None:
        if self.baseline is None:
            self._check_absolute("the first weights", found)
            self.baseline = found
            return
        lim = self.limits
        floor = lim.float32_gap_floor if self.dtype == "float32" else lim.bf16_gap_floor
        limit = max(lim.baseline_factor * self.baseline.mean_gap, floor)
        if not found.mean_gap <= limit:
            raise ModelIdentityError(
                f"probe after the refit to version {version}: mean gap {found.mean_gap:.3g}, limit "
                f"{limit:.3g} (first probe {self.baseline.mean_gap:.3g}); generation stays paused"
            )

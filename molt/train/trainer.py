"""The FSDP2 actor: executes one plan at a time and turns it into new weights.

Last stop of the data path: checked batch -> prepare (old and reference logprobs) -> token losses ->
updates -> `state_digest`. One instance per rank, run as a Ray actor; methods marked collective must
be called on all ranks. Invariants: a step is a function of (state, plan, settings), every random
choice comes from H(seed, step, rank); on any error before an update the weights are untouched.

Suffix: N trained tokens of this rank.
"""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from molt import digests
from molt.process import redirect_output, timed
from molt.schemas.errors import ConfigError, TrainerError
from molt.train import checkpoint, metrics
from molt.train.algo import LOSSES, LossInputs
from molt.train.batch import Batch, make_batch, mini_batches
from molt.train.digest import local_shard, shard_offset, sketch, state_digest
from molt.train.metrics import Tally
from molt.train.model import ShardedModel, build, join_ranks
from molt.train.packing import Recorded, Row, Wanted, idle_row, pack
from molt.train.routing import RoutingReplay
from molt.train.settings import StepResult, TrainerSettings

if TYPE_CHECKING:
    from molt.replay.assemble import TrainSequence


OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay")


class Trainer:
    """One rank of the trainer.

    `init_method` is torch's, of where the ranks meet (on one machine `molt.process.rendezvous()`);
    with `log_path` the process's stdout and stderr go to that file. Nothing heavy happens before
    `start()`.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        rank: int,
        world_size: int,
        init_method: str,
        log_path: str | None = None,
    ) -> None:
        if settings.loss not in LOSSES:
            raise ConfigError(f"loss {settings.loss!r} is unknown; choose one of {sorted(LOSSES)}")
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self._init_method = init_method
        self.routing: RoutingReplay | None = None
        self._step = torch.zeros((), dtype=torch.int64)
        self._kl_coef = torch.tensor(settings.kl_coef, dtype=torch.float64)
        self._saved: dict[str, torch.Tensor] = {}
        self._reference: dict[str, torch.Tensor] = {}
        if log_path is not None:
            redirect_output(log_path)

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Join the other ranks, load and shard the model, make the optimizer. Collective.

        Returns seconds, n_parameters, device, dp_size and dp_rank (ranks of one dp_rank are
        tensor- or context-parallel peers: the same sequences).
        """
        started = time.perf_counter()
        torch.set_num_threads(self.settings.threads)
        join_ranks(self._init_method, self.rank, self.world_size)
        self.model: ShardedModel = build(self.settings, self.world_size)
        if self.settings.routing != "off":
            self.routing = RoutingReplay(
                self.model.module,
                self.settings.routing,
                mismatch_max=self.settings.routing_mismatch,
                coverage_min=self.settings.routing_coverage,
            )
        self.parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            **{name: getattr(self.settings, name) for name in OPTIMIZER_SETTINGS},
            fused=True,
        )
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }
        if self.settings.kl_coef > 0.0 or self.settings.kl_target is not None:
            self._reference = copied(self.parameters)
        return {
            "seconds": time.perf_counter() - started,
            "n_parameters": sum(p.numel() for p in self.parameters.values()),
            "device": self.model.device.type,
            "dp_size": self.model.dp_size,
            "dp_rank": self.rank // self._copies,
        }

    def configure(self, settings: TrainerSettings) -> None:
        """Take other settings of loss and optimizer; those of the model need a new trainer."""
        if settings.kl_coef > 0.0 and not self._reference:
            raise TrainerError(
                "these steps were trained with algo.kl_coef, this trainer was started without: "
                "resume with the old settings up to a checkpoint, then switch it off"
            )
        if settings.kl_target is None or self.settings.kl_target is None:
            self._kl_coef.fill_(settings.kl_coef)
        self.settings = settings
        for group in self.optimizer.param_groups:
            group |= {name: getattr(settings, name) for name in OPTIMIZER_SETTINGS}

    def close(self) -> None:
        """Leave the process group; the instance is of no use afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- one plan --------------------------------------------------------------------------------

    def execute(
        self,
        step: int,
        sequences: "Sequence[TrainSequence] | Exception",
        recorded: Sequence[Recorded] | None = None,
    ) -> StepResult:
        """Run one plan: prepare, losses, updates. Collective; every rank passes its own sequences
        and, unless `routing` is "off", the recorded experts of each.

        A rank that could not read its rows passes the exception instead: all ranks then raise.
        Raises TrainerError for such a rank, for bad sequences, and for a loss or gradient that is
        not finite; the weights are then those before the update that failed.
        """
        started = time.perf_counter()
        seed = _random_seed(self.settings.seed, step, self.rank)
        torch.manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        batch = self._agree(step, sequences, recorded)
        n_global = self._count(len(batch.sequence_N))
        tally = Tally(batch)
        if self.routing is not None:
            self.routing.begin_step()
        kl_coef = float(self._kl_coef)
        if n_global:
            self._train(step, batch, tally)
        self._adapt_kl(tally, len(set(batch.rollout_ids)))
        self._step.fill_(step)
        with timed(tally.seconds, "digest"):
            digest = self.state_digest()
            found = self.sketch() if self.settings.sketch else None
        seconds = time.perf_counter() - started
        routing = {}
        if self.routing is not None:
            routing = {"routing": self.routing.metrics(batch, tally.prepared_N)}
        return StepResult(
            updates=tally.updates,
            loss=tally.loss / max(tally.updates, 1),
            grad_norm=tally.grad_norm,
            n_tokens=n_global,
            state_digest=digest,
            sketch=found,
            metrics={
                **metrics.clip_fractions(tally),
                "kl": tally.kl,
                "kl_coef": kl_coef,
                **metrics.policy_gaps(batch, tally.prepared_N, self.settings.is_cap),
                **routing,
                "offset": metrics.offset(batch, tally.prepared_N),
                "empty_steps": int(n_global == 0),
                "tokens": n_global,
                "packed_tokens": self._count(tally.packed_tokens),
                "input_tokens": self._count(sum(int(w.targets[-1]) for w in batch.wanted)),
                "seconds": {name: round(value, 4) for name, value in tally.seconds.items()},
                "tokens_per_s": n_global / seconds,
                "grad_norm": tally.grad_norm,
                "lr": self.settings.lr,
                "rss_bytes_peak": metrics.rss_peak_bytes(),
            },
            seconds=seconds,
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Teacher-forced log p of tokens 1.. of each sequence, float32 [len - 1], temperature 1.

        Collective; all ranks pass the same sequences. An empty or one-token one gives [0].
        """
        return self.logprobs([(ids, np.arange(1, len(ids)), 1.0) for ids in sequences])

    def logprobs(self, wanted: Sequence[tuple[Any, Any, float]]) -> list[np.ndarray]:
        """log pi of chosen tokens: (token_ids [T], indices >= 1, temperature) -> float32 [n].

        Collective; all ranks pass the same.
        """
        items = [
            Wanted(token_ids=np.asarray(ids, np.int32), targets=np.asarray(at), temperature=temp)
            for ids, at, temp in wanted
            if len(at)
        ]
        counts = [len(at) for _, at, _ in wanted]
        flat = self._forward(self._pack(items), sum(counts)).numpy()
        return [part.copy() for part in np.split(flat, np.cumsum(counts)[:-1])]

    # -- weights ---------------------------------------------------------------------------------

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, full tensor in the engine's dtype), tied ones once. Collective."""
        return self.model.export()

    def manifest(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of the tensors that `export` yields, in its order."""
        return self.model.manifest()

    def weights_digest(self) -> str:
        """Digest of what `export` yields, 16 hex digits (invariant I7). Collective."""
        return digests.weights_digest(self.export())

    def perturb(self, scale: float, seed: int) -> None:
        """Multiply every weight by 1 + scale x N(0, 1), for the start-up self-test."""
        if not self._saved:
            self._saved = copied(self.parameters)
        for name, parameter in self.parameters.items():
            shard = local_shard(parameter.detach())
            key = _random_seed(seed, name, *shard_offset(parameter))
            generator = torch.Generator(shard.device).manual_seed(key)
            noise = torch.randn(shard.shape, generator=generator, device=shard.device)
            shard.mul_(noise.mul_(scale).add_(1.0))

    def restore(self) -> None:
        """Bring back the bits from before the first `perturb`; without one, nothing happens."""
        if self._saved:
            put_back(self.parameters, self._saved)
        self._saved = {}

    # -- state -----------------------------------------------------------------------------------

    def save(self, folder: str) -> list[tuple[str, int]]:
        """Write parameters, optimizer and step into `folder`, durable on return. Collective.

        Returns (relative file, bytes). The marker that makes a checkpoint count is the driver's.
        """
        return checkpoint.save(Path(folder), self._state())

    def load(self, folder: str) -> int:
        """Take the state of a checkpoint; returns its step. Collective."""
        checkpoint.load(Path(folder), self._state())
        return int(self._step)

    def state_digest(self) -> str:
        """Digest over parameters, optimizer and counters of all ranks, 16 hex. Collective."""
        return state_digest(self._state().items())

    def sketch(self) -> dict[str, list[float]]:
        """Norm and projections of every parameter, whatever the sharding. Collective."""
        return sketch(self.parameters)

    # -- inside ----------------------------------------------------------------------------------

    def _state(self) -> dict[str, torch.Tensor]:
        state = checkpoint.trainer_state(self.parameters, self.optimizer, self._step)
        if self.settings.kl_target is not None:
            state["trainer.kl_coef"] = self._kl_coef
        return state

    def _agree(
        self,
        step: int,
        sequences: "Sequence[TrainSequence] | Exception",
        recorded: Sequence[Recorded] | None,
    ) -> Batch:
        """Check this rank's rows, then ask whether every rank's are good, before any forward."""
        error, batch = sequences if isinstance(sequences, Exception) else None, make_batch([])
        if error is None:
            try:
                batch = make_batch(sequences, recorded)  # type: ignore[arg-type]
                if self.routing is not None:
                    self.routing.check_coverage(batch)
            except TrainerError as found:
                error = found
        n_bad = int(self._reduce(1 if error else 0, dist.ReduceOp.SUM))
        if error is not None:
            raise TrainerError(f"step {step}, rank {self.rank}: {error}") from error
        if n_bad:
            raise TrainerError(f"step {step}: {n_bad} other rank(s) could not read their rows")
        return batch

    def _train(self, step: int, batch: Batch, tally: Tally) -> None:
        """Prepare, then all updates of the step."""
        passes, parts = self.settings.update_passes, self.settings.mini_batches
        n, started = len(batch.sequence_N), time.perf_counter()
        tally.is_single = passes * parts == 1
        if self.routing is not None and (step - 1) % self.settings.routing_sample_every == 0:
            row = self._pack(batch.wanted)[0]
            self.routing.tally.live = (row.slot_N, self._forward([row], n)[row.slot_N])
        if not tally.is_single:
            tally.prepared_N = self._forward(self._pack(batch.wanted), n, batch)
            self._check_routing(step)
        if self._reference:
            current = copied(self.parameters)
            put_back(self.parameters, self._reference)
            tally.reference_N = self._forward(self._pack(batch.wanted), n)
            put_back(self.parameters, current)
        tally.seconds["prepare"] = time.perf_counter() - started
        for _ in range(passes):
            for members in mini_batches(batch, parts, self._rng):
                self._update(step, batch, members, tally)

    def _update(self, step: int, batch: Batch, members: list[int], tally: Tally) -> None:
        """One optimizer update on the given sequences, normalised by the tokens of all ranks."""
        wanted, flat = batch.take(members)
        rows, n_global = self._pack(wanted), self._count(len(flat))
        if not n_global:
            return
        self.optimizer.zero_grad(set_to_none=True)  # of an update that was refused
        loss_N = torch.zeros(len(flat))
        for row, is_last in zip(rows, [False] * (len(rows) - 1) + [True], strict=True):
            self.model.begin_backward(is_last=is_last)
            slot_N = torch.from_numpy(row.slot_N)
            with self._replaying(row):
                loss_N[slot_N] = self._backward(batch, row, flat[row.slot_N], n_global, tally)
        if tally.is_single:
            self._check_routing(step)
        with timed(tally.seconds, "optimizer"):
            tally.grad_norm = self.model.clip_gradients(self.settings.grad_clip)
            n_bad = self._reduce(int((~loss_N.isfinite()).sum()), dist.ReduceOp.SUM)
            if n_bad or not np.isfinite(tally.grad_norm):
                self._refuse(step, batch, loss_N, flat, tally)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        tally.loss += self._reduce(float(loss_N.double().sum()), dist.ReduceOp.SUM) / (
            n_global * self._copies
        )
        tally.updates += 1

    def _backward(
        self, batch: Batch, row: Row, flat_N: np.ndarray, n_global: int, tally: Tally
    ) -> torch.Tensor:
        """Forward and backward of one row; returns its detached token losses [N of the row]."""
        started = time.perf_counter()
        device = self.model.device
        new_N = self.model.logprobs(row)
        if tally.is_single:
            self._observe(batch, row)
            tally.prepared_N[flat_N] = new_N.detach().cpu()
        old_N = new_N.detach() if tally.is_single else tally.prepared_N[flat_N].to(device)
        reference_N = tally.reference_N
        inputs = LossInputs(
            new_N=new_N,
            old_N=old_N,
            behaviour_N=torch.from_numpy(batch.behaviour_N[flat_N]).to(device),
            advantage_N=torch.from_numpy(batch.advantage_N[flat_N]).to(device),
            reference_N=None if reference_N is None else reference_N[flat_N].to(device),
        )
        algo = dataclasses.replace(self.settings, kl_coef=float(self._kl_coef))
        loss_N = LOSSES[algo.loss](inputs, algo)
        tally.count_clipped(inputs, algo)
        # FSDP2 averages over the data-parallel ranks; the normaliser already spans all of them.
        loss = loss_N.sum() * (self.model.dp_size / n_global)
        forward_done = time.perf_counter()
        torch.autograd.backward(loss)
        tally.seconds["forward"] += forward_done - started
        tally.seconds["backward"] += time.perf_counter() - forward_done
        tally.packed_tokens += len(row.input_ids_T)
        return loss_N.detach().cpu()

    def _pack(self, wanted: list[Wanted]) -> list[Row]:
        """This rank's rows, padded with idle ones to the longest rank's number. Collective."""
        settings = self.settings
        limit = settings.microbatch_tokens
        rows = pack(wanted, max_tokens=limit, share=settings.share_prefixes)
        n_rows = int(self._reduce(len(rows), dist.ReduceOp.MAX))
        return rows + [idle_row()] * (n_rows - len(rows))

    @torch.no_grad()
    def _forward(self, rows: list[Row], n: int, batch: Batch | None = None) -> torch.Tensor:
        """Logprobs of all targets of `rows` without gradient, float32 [n] on the CPU.

        With `batch` under the recorded routing, otherwise under the live one.
        """
        out_N = torch.zeros(n)
        for row in rows:
            with self._replaying(row if batch else None):
                out_N[torch.from_numpy(row.slot_N)] = self.model.logprobs(row).cpu()
                if batch is not None:
                    self._observe(batch, row)
        self.model.reshard()
        return out_N

    def _replaying(self, row: Row | None) -> contextlib.AbstractContextManager[None]:
        if self.routing is None or row is None:
            return contextlib.nullcontext()
        return self.routing.row(row)

    def _observe(self, batch: Batch, row: Row) -> None:
        if self.routing is not None:
            self.routing.observe(row, batch.rollout_ids)

    def _check_routing(self, step: int) -> None:
        if self.routing is not None:
            try:
                self.routing.check(step)
            except TrainerError:
                self.optimizer.zero_grad(set_to_none=True)
                raise

    def _adapt_kl(self, tally: Tally, n_rollouts: int) -> None:
        """Measure the step's KL; move the coefficient towards the target (Ziegler et al. 2019)."""
        if tally.reference_N is not None:
            log_ratio_N = metrics.gather((tally.reference_N - tally.prepared_N).double().numpy())
            tally.kl = metrics.gap_summary(log_ratio_N)["k3"]
        target = self.settings.kl_target
        n = self._count(n_rollouts)
        if target is not None and tally.reference_N is not None:
            error = min(max(tally.kl / target - 1.0, -0.2), 0.2)
            self._kl_coef.mul_(1.0 + error * n / self.settings.kl_horizon)

    def _refuse(
        self, step: int, batch: Batch, loss_N: torch.Tensor, flat: np.ndarray, tally: Tally
    ) -> None:
        """Raise for a loss or gradient that is not finite, naming this rank's worst rollout."""
        bad, worst = torch.nonzero(~loss_N.isfinite()), "none on this rank"
        if len(loss_N):
            at = flat[int(bad[0]) if len(bad) else int(loss_N.abs().argmax())]
            worst = f"{batch.rollout_ids[batch.sequence_N[at]]} (advantage {batch.advantage_N[at]})"
        raise TrainerError(
            f"step {step}, update {tally.updates + 1}: loss or gradient is not finite "
            f"(gradient norm {tally.grad_norm}, worst rollout {worst}); no optimizer step was "
            f"taken, {tally.updates} update(s) of this step were; look at that rollout's logprobs "
            "and reward, then resume from the last checkpoint without it"
        )

    @property
    def _copies(self) -> int:
        """Ranks that hold the same data (tensor- and context-parallel peers)."""
        return self.world_size // self.model.dp_size

    def _count(self, n_local: int) -> int:
        return int(self._reduce(n_local, dist.ReduceOp.SUM)) // self._copies

    def _reduce(self, value: float, op: Any) -> float:
        reduced = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(reduced, op)
        return float(reduced)


def copied(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of this rank's part of each tensor."""
    return {n: local_shard(t.detach()).clone() for n, t in named.items()}


def put_back(named: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the tensors with what `copied` made of them."""
    for name, tensor in named.items():
        local_shard(tensor.detach()).copy_(kept[name])


def _random_seed(*parts: object) -> int:
    """H(parts): 63 bits that depend on every part."""
    raw = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1

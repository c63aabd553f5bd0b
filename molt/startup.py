"""Everything before the first step: the model's folder, the epoch record, processes, self-test."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.cluster import Cluster
from molt.config import Config, changes, epoch_fields
from molt.issuing import heldout, new_group
from molt.model import folder_digests
from molt.publish import PROBE_PROMPTS, PROBE_TOKENS, Gap, Probe
from molt.recovery import Start, check_drops, cut, issued, open_fold
from molt.replay.folders import sweep
from molt.replay.replay import history
from molt.rollout.types import Completion
from molt.rollout.worker import encode_prompt, judge_segment
from molt.schemas.errors import ConfigError, LogCorrupt, ModelIdentityError
from molt.schemas.records import Sampling
from molt.screen import Screen
from molt.store import Log
from molt.store.control import Record, lineage_of
from molt.store.fold import Fold

if TYPE_CHECKING:
    from molt.loop import Run

PROMPTS_TRIED_MAX = 64
"""Prompts that are tried until the probe has its eight."""

PROCESS_GIB = 2.0
"""What a process needs besides weights and caches."""
DISK_MARGIN = 1.1

FREE_TO_CHANGE = (
    *("run.dir", "run.name", "run.steps", "run.eval_every", "run.drops_in_a_row_max"),
    *("run.stuck_s", "run.restarts_max", "run.sinks", "checkpoint.", "limits.", "log."),
    *("agent.workers", "agent.deadline_s", "agent.engine_wait_s", "agent.partial_tokens"),
    *("engine.count", "engine.kv_cache_gib", "train.world_size", "train.routing_sample_every"),
)
"""Settings that do not change what is learned; all others need `--accept-changes` on resume."""


def check_room(config: Config, model_folder: str, screen: Screen) -> None:
    """Say before anything starts that memory is short; ConfigError if a checkpoint will not fit.

    Per parameter the trainer holds weight, gradient and two moments in float32, a checkpoint all
    but the gradient; `algo.kl_coef` adds a copy.
    """
    import psutil

    files = sorted(Path(model_folder).glob("*.safetensors"))
    n_parameters = sum(f.stat().st_size // _bytes_per_weight(files[0]) for f in files)
    weight = 4 if config.engine.dtype == "float32" else 2
    trainer = n_parameters * (20 if config.algo.kl_coef > 0 else 16) / 2**30
    engine = n_parameters * weight / 2**30 + config.engine.kv_cache_gib
    processes = config.train.world_size + config.engine.count + config.agent.workers
    need = trainer + config.engine.count * engine + PROCESS_GIB * processes
    free = psutil.virtual_memory().available / 2**30
    if need > free:
        screen.say(
            f"memory may run out: about {need:.1f} GiB are needed ({trainer:.1f} trainer, "
            f"{config.engine.count} x {engine:.1f} engine, {PROCESS_GIB} per process), "
            f"{free:.1f} are free"
        )
    folder = Path(config.run.dir).absolute()
    while not folder.exists():
        folder = folder.parent
    disk, checkpoint = shutil.disk_usage(folder).free / 2**30, n_parameters * 12 / 2**30
    if disk < checkpoint * DISK_MARGIN:
        raise ConfigError(
            f"{folder} has {disk:.1f} GiB free, one checkpoint needs {checkpoint:.1f}; free some "
            "space, or choose another place with --set run.dir=..."
        )
    if disk < checkpoint * (config.checkpoint.keep + 1):
        screen.say(
            f"disk may run out: {config.checkpoint.keep} kept checkpoints and the one being "
            f"written need {checkpoint * (config.checkpoint.keep + 1):.1f} GiB, {disk:.1f} are free"
        )


def _bytes_per_weight(file: Path) -> int:
    """Of a stored checkpoint, from the header of one of its files."""
    from safetensors import safe_open

    with safe_open(str(file), framework="numpy") as tensors:
        return 4 if tensors.get_slice(next(iter(tensors.keys()))).get_dtype() == "F32" else 2


def open_log(config: Config, model_folder: str, start: Start, screen: Screen) -> tuple[Log, int]:
    """Create or take over the log: the first act of a driver is its epoch record."""
    log = Log.create(config.run.dir)
    records = log.records()
    digests = folder_digests(model_folder)
    epochs = [r for r in records if r.kind == "epoch"]
    check_drops(log, start.drop)
    if epochs and _has_begun(log, records):
        _compare(epochs[-1].rows[0], config, digests, start.accept_changes, screen)
    parent, last = cut(records, start)
    record = log.control.open_epoch(
        parent_epoch=parent,
        cut=last,
        **epoch_fields(config, digests, world_size=config.train.world_size),
    )
    if epochs:
        screen.say(f"resuming {log.path} as epoch {record.epoch}")
    if last is not None:
        screen.say(f"records {last + 1} to {record.n - 1} are abandoned; audits still see them")
    checkpoints = [r.rows[0]["path"] for r in records if r.kind == "checkpoint"]
    for left in sweep(log.path, set(checkpoints)):
        screen.say(f"removed checkpoints/{left}: it was never completed")
    return log, record.epoch


def _has_begun(log: Log, records: Sequence[Record]) -> bool:
    """True if the lineage has anything that depends on settings: policies, plans, prompts."""
    lineage = lineage_of(records)
    kinds = {r.kind for r in records if lineage.holds(r.n)}
    return not kinds.isdisjoint({"policy", "plan"}) or any(
        not group_id.startswith("judge-") for group_id in issued(log)
    )


def _compare(
    old: dict[str, Any],
    config: Config,
    digests: dict[str, str | None],
    accept_changes: bool,
    screen: Screen,
) -> None:
    changed = changes(old, config)
    for part, after in digests.items():
        if (before := old["digests"][part]) != after:
            changed[f"files of the {part}"] = (before, after)
    for key, (before, after) in changed.items():
        screen.say(f"configuration changed: {key} = {before!r} -> {after!r}")
    matters = [k for k in changed if not k.startswith(FREE_TO_CHANGE)]
    if matters and not accept_changes:
        raise ConfigError(
            f"this log was made with other settings: {', '.join(matters)}. Go on with "
            "--accept-changes, or start in another folder with --set run.dir=..."
        )


def is_complete(config: Config) -> bool:
    """True if the log holds all steps of this configuration, their checkpoint and evaluation."""
    if not (Path(config.run.dir) / "format.json").exists():
        return False
    log = Log.open(config.run.dir)
    found = history(log)
    step = max(found.steps, default=0)
    if step < config.run.steps or step not in found.checkpoints:
        return False
    fold = open_fold(log, Start(), print)
    last = [g for g in fold.open_groups("eval") if g.dataset == heldout(config.run.steps)]
    evaluated = not config.data.eval or (bool(last) and all(map(fold.is_closed, last)))
    return evaluated


async def start_processes(cluster: Cluster, screen: Screen) -> None:
    """Ray, then engine and trainer side by side (each waits for the other's imports)."""
    with screen.phase("starting Ray"):
        await asyncio.to_thread(cluster.start_ray)
    with screen.phase("starting the vLLM engine and the FSDP2 trainer"):
        engine, trainer = await asyncio.gather(cluster.start_engines(), cluster.start_trainer())
    screen.say(
        f"engine: window {engine['max_model_len']}, {engine['seconds']:.1f} s; trainer: "
        f"{trainer['n_parameters'] / 1e6:.0f} M parameters, {trainer['seconds']:.1f} s"
    )


async def prove_engines(run: "Run", screen: Screen) -> None:
    """Connect trainer and engines, record or recall the probe, run the start-up self-test (I3)."""
    publisher = run.publisher
    with screen.phase("connecting trainer and engine, recording the probe"):
        await publisher.connect(run.config.engine.weight_transfer)
        await publisher.transfer_unproven(run.step)
        publisher.probe = recall_probe(run.log, run.fold) or await _record_probe(run)
    with screen.phase("self-test: perturbed weights must arrive, and the real ones after them"):
        found = await publisher.self_test(run.step, run.config.run.seed)
    screen.say(
        f"self-test passed: engine and trainer agree to {found.max_gap:.2g} (max), "
        f"{found.mean_gap:.2g} (mean)"
    )
    if run.fold.first_probe is not None:
        publisher.baseline = Gap(**run.fold.first_probe)


def recall_probe(log: Log, fold: Fold) -> Probe | None:
    """The probe that an earlier epoch recorded; None if there is none."""
    sequences, n_context = [], []
    for group in fold.open_groups("judge"):
        for attempts in group.attempts.values():
            for attempt in attempts.values():
                row = log.row(attempt.segments[0].ref)
                sequences.append([int(i) for i in row["token_ids"]])
                n_context.append(int(np.count_nonzero(row["sampled"] == 0)))
    if not sequences:
        return None
    if len(sequences) != PROBE_PROMPTS:
        raise LogCorrupt(f"{len(sequences)} probe sequences in the log instead of {PROBE_PROMPTS}")
    return Probe(sequences=sequences, n_context=n_context)


async def _record_probe(run: "Run") -> Probe:
    """Let the engine continue the first prompts by 32 tokens each, and keep them in the log."""
    opened = await _openings(run)
    segments = await asyncio.gather(*(_continue(run, k, ids) for k, (_, ids) in enumerate(opened)))
    for k, ((prompt, _), segment) in enumerate(zip(opened, segments, strict=True)):
        run.writer.append("prompts", new_group("judge", "probe", k, prompt, 1))
        run.writer.append("segments", segment)
    run.writer.flush()
    return Probe(
        sequences=[[int(i) for i in s.token_ids] for s in segments],
        n_context=[len(ids) for _, ids in opened],
    )


async def _openings(run: "Run") -> list[tuple[dict[str, Any], list[int]]]:
    """The first prompts that the agent can open, with their ids; the others fail as rollouts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run.cluster.model_folder)
    room = run.config.engine.max_model_len - PROBE_TOKENS - 1
    found: list[tuple[dict[str, Any], list[int]]] = []
    last: ConfigError | None = None
    for k in range(PROMPTS_TRIED_MAX):
        prompt = run.prompts.train(k)
        try:
            ids = await encode_prompt(run.config, tokenizer, prompt)
        except ConfigError as error:
            last = error
            continue
        found.append((prompt, ids[-room:]))
        if len(found) == PROBE_PROMPTS:
            return found
    raise ConfigError(
        f"the agent opened only {len(found)} of the first {PROMPTS_TRIED_MAX} prompts; last: {last}"
    )


async def _continue(run: "Run", k: int, context: list[int]) -> Any:
    """`PROBE_TOKENS` ids sampled after `context`; an early stop is simply continued."""
    engine, ids = run.cluster.engines[0], list(context)
    pieces: list[Completion] = []
    while len(ids) < len(context) + PROBE_TOKENS:
        left = len(context) + PROBE_TOKENS - len(ids)
        sampling = Sampling(temperature=1.0, max_tokens=left)
        piece = await run.cluster.call(
            engine, "generate", run.epoch, f"judge-{k}.{len(pieces)}", ids, sampling
        )
        if not len(piece.token_ids):
            raise ModelIdentityError("the engine returned an empty completion to the probe")
        pieces.append(piece)
        ids += [int(i) for i in piece.token_ids]
    return judge_segment(k, context, pieces)

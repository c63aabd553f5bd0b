"""What routing costs: bytes per token, append, tail, a step with replay beside one without.

The stream has the shape of a real model, 48 layers with 8 of 128 experts per token; the step is
that of the tiny Qwen3-MoE on one rank, both kinds in pairs. Ratios within one run are what counts;
absolute times want a quiet machine.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import factories as make
import numpy as np

from molt.replay.sources import Sources
from molt.rollout.routing import RoutingShape, routing_rows
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS
from molt.train.recorded import RoutingReader

ROUNDS = 5
STEP_ROUNDS, WARM_UP = 20, 3
TOKENS, SEGMENTS = 985, 32
SHAPE = RoutingShape(layers=tuple(range(48)), top_k=8, n_experts=128)


def workload() -> list[tuple[dict[str, Any], np.ndarray]]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(SEGMENTS):
        ids = rng.zipf(1.3, TOKENS).clip(0, 49_151).tolist()
        segment = make.segment(rollout_id=f"train-{i}/0", ids=ids)
        experts = rng.random((TOKENS - 1, 48, 128), np.float32).argpartition(8, -1)[..., :8]
        out.append((segment, experts.astype(np.uint8)))
    return out


def append(folder: Path, rows: list[tuple[dict[str, Any], np.ndarray]], routed: bool) -> Log:
    log = Log.create(folder)
    with log.writer(epoch=1, linger_s=60, routing=SHAPE.metadata()) as w:
        for segment, experts in rows:
            w.append("segments", segment)
            if routed:
                names = {"rollout_id": segment["rollout_id"], "attempt": 0, "segment": 0}
                for row in routing_rows(((0, experts),), n_experts=128, **names):
                    w.append("routing", row)
        w.flush()
    return log


def store() -> None:
    rows, seconds, tail = workload(), {False: [], True: []}, {False: [], True: []}
    for _ in range(ROUNDS):
        for routed in (False, True):
            with tempfile.TemporaryDirectory(dir=os.environ.get("MOLT_BENCH_DIR")) as folder:
                started = time.perf_counter()
                log = append(Path(folder) / "log", rows, routed)
                seconds[routed].append(time.perf_counter() - started)
                started = time.perf_counter()
                log.tail(streams=STREAMS, columns=COLUMNS).poll()
                tail[routed].append(time.perf_counter() - started)
                sizes = {
                    stream: sum(
                        f.stat().st_size for f in log.path.glob(f"data/*/*/*.{stream}.arrow")
                    )
                    for stream in ("segments", "routing")
                }
                if routed:
                    read = read_some(log)
    n = SEGMENTS * TOKENS
    print(f"routing: {sizes['routing'] / n:.1f} bytes per token, of which 384 are experts")
    print(f"segments: {sizes['segments'] / n:.1f} bytes per token (synthetic ids)")
    for name, times in (("append, 32 segments", seconds), ("tail and fold columns", tail)):
        off, on = (statistics.median(times[k]) for k in (False, True))
        print(f"{name}: {off * 1e3:.0f} ms without routing, {on * 1e3:.0f} ms with")
    print(
        f"one rollout of 32 read by a rank: {read[0]} of {sizes['routing']} bytes, {read[1]:.1f} ms"
    )


def read_some(log: Log) -> tuple[int, float]:
    """The first half of one rollout, as a rank that trains it reads it."""
    from molt.replay.assemble import TrainSequence

    sequence = TrainSequence(
        group_id="train-7",
        rollout_id="train-7/0",
        attempt=0,
        tip=0,
        token_ids=np.zeros(TOKENS, np.int32),
        mask=np.arange(TOKENS) == TOKENS // 2,
        logprobs=np.zeros(TOKENS, np.float32),
        lag=np.zeros(TOKENS, np.int64),
        advantage=1.0,
        temperature=1.0,
        chain=((0, TOKENS),),
    )
    query = "select writer, seq, row from routing where rollout_id = 'train-7/0'"
    ((writer, seq, row),) = log.sql(query).fetchall()
    source = Sources(log, 1)
    reader = RoutingReader(source, layers=48, top_k=8, n_experts=128)
    started = time.perf_counter()
    reader.of(sequence, [{"log": 0, "writer": writer, "seq": seq, "row": row}])
    return source.bytes_read, (time.perf_counter() - started) * 1e3


def steps() -> None:
    """Whole steps of 16 groups x 4 rollouts, replayed and not, in turns."""
    import moe

    from molt.recipes.moe import save_qwen3_moe
    from molt.train.routing import gates

    with tempfile.TemporaryDirectory() as folder:
        model = save_qwen3_moe(Path(folder) / "model")
        options = {"threads": 2, "microbatch_tokens": 1024, "routing_mismatch": 1.0, "lr": 0.0}
        trainer = moe.started(moe.settings(model, routing_sample_every=10**6, **options))
        sequences, recorded = moe.plan(trainer, 1, groups=16, members=4)
        routing, routers = trainer.routing, [gate for _, gate in gates(trainer.model.module)]
        seconds: dict[str, list[tuple[float, float]]] = {"off": [], "replay": []}
        for n in range(2 * (STEP_ROUNDS + WARM_UP)):
            mode = ("off", "replay", "replay", "off")[n % 4]
            trainer.routing = routing if mode == "replay" else None
            for gate, router in zip(routers, routing.routers, strict=True):
                gate.router_replay = router if mode == "replay" else None
            started = time.perf_counter(), time.process_time()
            trainer.execute(n + 2, sequences, recorded if mode == "replay" else None)
            if n >= 2 * WARM_UP:
                ended = time.perf_counter(), time.process_time()
                seconds[mode].append((ended[0] - started[0], ended[1] - started[1]))
        trainer.close()
    off, on = np.array(seconds["off"]), np.array(seconds["replay"])
    for i, clock in enumerate(("wall", "processor")):
        low, ratio, high = np.percentile(on[:, i] / off[:, i], (25, 50, 75))
        print(
            f"step, {clock}: {np.median(off[:, i]) * 1e3:.0f} ms without replay; with it x "
            f"{ratio:.3f} (quartiles {low:.3f} to {high:.3f} of {STEP_ROUNDS} pairs; limit 1.10)"
        )


if __name__ == "__main__":
    store()
    steps()

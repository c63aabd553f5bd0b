"""Benchmarks beside their peers, in one process and one run; prints tables for README.

Nothing here asserts a time:
ratios between rows of one run are what counts, absolute figures change with the machine.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))

import factories as make

from molt.schemas.check import check_row
from molt.schemas.columns import to_table
from molt.schemas.streams import STREAMS, schema_id
from molt.store import Log
from molt.store.commit import decode, encode
from molt.store.files import publish

ROUNDS = 5
BATCH = 64


def segments(n: int, tokens: int = 985) -> list[dict[str, Any]]:
    """The reference workload: multi-turn segments of about 985 tokens, 40 % of them sampled."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        sampled = (rng.random(tokens) < 0.4).astype(np.uint8)
        logprobs = np.where(sampled, -rng.exponential(0.5, tokens), 0.0).astype(np.float32)
        row = make.segment(
            rollout_id=f"train-{i}/0",
            ids=rng.zipf(1.3, tokens).clip(0, 49_151).astype(np.int32).tolist(),
            sampled=sampled.tolist(),
            logprobs=logprobs.tolist(),
        )
        rows.append({**row, "at": make.NOW})
    return [check_row("segments", STREAMS["segments"], row) for row in rows]


def raw_bytes(row: dict[str, Any]) -> bytes:
    """The unencoded token columns of a segment, 10 bytes per token."""
    return b"".join(row[k].tobytes() for k in ("token_ids", "sampled", "train", "logprobs"))


def write_fsync(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def encoded(rows: list[dict[str, Any]], seq: int) -> bytearray:
    table = to_table(STREAMS["segments"], rows)
    text = schema_id("segments", STREAMS["segments"], "1.0")
    return encode(table, stream="segments", writer="w", seq=seq, schema_text=text)


def json_zstd(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    for row in rows:
        names = ("token_ids", "sampled", "train", "logprobs")
        plain = {k: row[k].tolist() for k in names}
        plain |= {"rollout_id": row["rollout_id"], "version_runs": row["version_runs"]}
        out.write(json.dumps(plain) + "\n")
    return zstandard.compress(out.getvalue().encode(), 1)


def median_rate(work: dict[str, Callable[[int], int]], n: int) -> dict[str, float]:
    """Bytes/s of each row, median of `ROUNDS` interleaved rounds; `work[name](i)` returns bytes."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, call in work.items():
            start = time.perf_counter()
            total = sum(call(i) for i in range(n))
            rates[name].append(total / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def bench_append(folder: Path, batch: int) -> None:
    """Durable append: encode, checksum, dot-file, fsync, link, unlink, fsync of the directory."""
    n = 640 // batch if batch > 1 else 200
    rows = segments(n * batch)
    chunks = [rows[i * batch : (i + 1) * batch] for i in range(n)]
    raw = [b"".join(map(raw_bytes, c)) for c in chunks]
    count = iter(range(10**9))

    def ours(i: int) -> int:
        publish(folder / f"{next(count):010d}.arrow", encoded(chunks[i], i))
        return len(raw[i])

    def plain(i: int) -> int:
        write_fsync(folder / f"raw-{next(count)}", raw[i])
        return len(raw[i])

    def jsonl(i: int) -> int:
        write_fsync(folder / f"json-{next(count)}", json_zstd(chunks[i]))
        return len(raw[i])

    rates = median_rate({"raw write + fsync": plain, "commit": ours, "JSONL + zstd": jsonl}, n)
    size = sum(len(encoded(c, 0)) for c in chunks) / sum(len(r["token_ids"]) for r in rows)
    print(f"\ndurable append, {batch} segment(s) per commit ({size:.2f} bytes per token on disk)")
    print("| what | MB/s | segments/s | ratio to raw |\n| --- | --- | --- | --- |")
    per_segment = sum(map(len, raw)) / len(rows)
    for name, rate in rates.items():
        ratio = rate / rates["raw write + fsync"]
        print(f"| {name} | {rate / 1e6:.1f} | {rate / per_segment:.0f} | {ratio:.2f} |")


def bench_read() -> None:
    """Verified read of a 64-segment commit into numpy columns."""
    rows = segments(BATCH)
    ours, peer = bytes(encoded(rows, 0)), json_zstd(rows)
    raw = sum(len(raw_bytes(r)) for r in rows)

    def read(i: int) -> int:
        table = decode(ours, stream="segments", writer="w", seq=0).table
        for name in ("token_ids", "sampled", "train", "logprobs"):
            table.column(name).combine_chunks().values.to_numpy()
        return raw

    def read_json(i: int) -> int:
        for line in zstandard.decompress(peer).decode().splitlines():
            row = json.loads(line)
            np.array(row["token_ids"], np.int32), np.array(row["logprobs"], np.float32)
        return raw

    rates = median_rate({"verified commit": read, "JSONL + zstd": read_json}, 10)
    print("\nread into numpy\n| what | GB/s |\n| --- | --- |")
    for name, rate in rates.items():
        print(f"| {name} | {rate / 1e9:.3f} |")


def bench_tail(folder: Path) -> None:
    """Publish -> delivered through the writer's own thread and a polling tail, hints off."""
    log = Log.create(folder / "log")
    make.open_epoch(log)
    rows = [{k: v for k, v in r.items() if k != "at"} for r in segments(200)]
    tail, delays = log.tail(streams={"segments"}), []
    with log.writer(linger_s=0.001) as w:
        for row in rows:
            start = time.perf_counter()
            w.append("segments", row)
            while not tail.poll()[1]:
                pass
            delays.append((time.perf_counter() - start) * 1e3)
    p50, p99 = np.percentile(delays, [50, 99])
    print(f"\nappend -> delivered to a tail: p50 {p50:.1f} ms, p99 {p99:.1f} ms (linger 1 ms)")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--dir", default=".", help="folder on the disk to measure")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for batch in (1, BATCH):
            bench_append(Path(folder), batch)
        bench_read()
        bench_tail(Path(folder))


if __name__ == "__main__":
    main()

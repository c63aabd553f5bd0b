"""Damaged files, read in child processes: every flip, zeroed range and cut is told; none crashes.

A trial damages one file of a small log with hot and cold commits and reads it in three ways:
the tail, rows by address, and SQL. A child goes through many trials; one that dies, or is silent
for too long, counts as a crash or a hang, and the next child goes on behind that trial.
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import children
import factories as make
import numpy as np
import pytest

from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.store import Log
from molt.store.compact import compact

SILENT_S_MAX = 60.0
TRIALS_PER_CHILD = 250
CONTROL_VIEWS = {"epoch": "epochs", "policy": "policies", "plan": "plans", "drop": "drops"}
Damage = Callable[[bytearray, random.Random], bytearray]


def flip(raw: bytearray, rng: random.Random) -> bytearray:
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return raw


def zero(raw: bytearray, rng: random.Random) -> bytearray:
    first = rng.randrange(len(raw))
    end = min(len(raw), first + rng.choice((1, 16, 512, 4096)))
    raw[first:end] = bytes(end - first)
    return raw


def cut(raw: bytearray, rng: random.Random) -> bytearray:
    return raw[: rng.randrange(len(raw))]


DAMAGES: dict[str, Damage] = {"flip": flip, "zero": zero, "cut": cut}


def build(path: Path) -> Log:
    """Compressed, uncompressed and routing commits: the first half cold, the second hot."""
    log = Log.create(path, run_id="run")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    _write(log, range(0, 3))
    compact(log, everything=True)
    _write(log, range(3, 6))
    log.control.put("plan", [make.plan_row("train-0/0", [])], make.plan_header(1))
    log.control.put("drop", [make.drop_row("train-1")], {})
    return log


def _write(log: Log, groups: range) -> None:
    rng = np.random.default_rng(groups.start)
    shape = {"molt.layers": "2", "molt.top_k": "2", "molt.experts": "8", "molt.dtype": "uint8"}
    with log.writer(linger_s=60, routing=shape) as w:
        for i in groups:
            name = f"train-{i}/0"
            n = 2000 if i % 3 == 0 else 40
            values = -rng.exponential(1, n).astype(np.float32)
            row = make.segment(rollout_id=name, ids=rng.integers(0, 50_000, n), logprobs=values)
            w.append("prompts", make.prompt(i, n=1))
            w.append("segments", row)
            w.append("routing", make.routing(name, n=8))
            w.append("rewards", make.reward(name))
            w.append("rollouts", make.rollout(name, digests=[row["digest"]]))
            w.flush()


def files(log: Log) -> list[Path]:
    found = [p for p in log.path.rglob("*") if p.suffix in (".arrow", ".parquet")]
    return sorted(p.relative_to(log.path) for p in found if ".end." not in p.name)


def stream_of(path: Path) -> str:
    return path.parent.name if path.suffix == ".parquet" else path.name.split(".")[1]


def reads(log: Log, file: Path, kinds: dict[str, str], places: list[Ref]) -> Iterator[Any]:
    """What each way to read gives: the rows, as Arrow or Python has them, or the error."""
    view = CONTROL_VIEWS[kinds[file.name]] if file.parts[0] == "train" else stream_of(file)
    ways: dict[str, Callable[[], Any]] = {
        "tail": lambda: log.tail().poll()[1],
        "sql": lambda: log.sql(f"select * from {view}").to_arrow_table(),
    }
    if places:
        ways["row"] = lambda: [log.row(ref) for ref in places]
    for name, way in ways.items():
        try:
            yield name, way()
        except Exception as error:
            yield name, error


def facts(log: Log) -> tuple[dict[str, str], dict[str, list[Ref]]]:
    """(kind of each control file, row addresses in each data file)."""
    kinds = {f"{r.n:010d}.arrow": r.kind for r in log.records()}
    places: dict[str, list[Ref]] = {}
    hot = {(p.parts[1], int(p.name[:10])): p for p in files(log) if p.parts[0] == "data"}
    for commit in log.tail().poll()[1]:
        cold = Path("cold", commit.stream, "0000000000.parquet")
        path = hot.get((commit.writer, commit.seq), cold)
        refs = [Ref(writer=commit.writer, seq=commit.seq, row=i) for i in range(len(commit.table))]
        places.setdefault(str(path), []).extend(refs)
    return kinds, places


def trials(conn: Connection, source: str, folder: str, seed: int, first: int, last: int) -> None:
    """Sends (trial, damage, place, {way: verdict}) of each trial, and before it (trial, ...)."""
    log = Log.open(source)
    kinds, places = facts(log)
    everything = files(log)
    copy = Path(folder, f"from-{first}")
    shutil.copytree(source, copy, copy_function=os.link)
    for trial in range(first, last):
        rng = random.Random(f"{seed}-{trial}")
        file = everything[trial % len(everything)]
        kind = rng.choice(sorted(DAMAGES))
        raw = (log.path / file).read_bytes()
        damaged = DAMAGES[kind](bytearray(raw), rng)
        while damaged == raw:  # zeros over zeros
            damaged = DAMAGES[kind](bytearray(raw), rng)
        conn.send((trial, kind, str(file), None))
        new = copy / "new"
        new.write_bytes(damaged)
        # What a process has verified it knows by name, inode, size and time: no two are equal.
        os.utime(new, ns=(0, trial + 1))
        os.replace(new, copy / file)
        found = reads(Log.open(copy), file, kinds, places.get(str(file), []))
        verdicts = {way: verdict(result) for way, result in found}
        os.link(log.path / file, new)
        os.replace(new, copy / file)
        conn.send((trial, kind, str(file), verdicts))


def verdict(result: Any) -> str:
    if isinstance(result, LogCorrupt):
        return "detected"
    if isinstance(result, Exception):
        return f"another error: {type(result).__name__}: {result}"[:500]
    return "UNDETECTED"


def run_trials(folder: Path, n: int, seed: int) -> tuple[Counter[str], list[Any]]:
    """(reads by verdict and place, what is not "detected")."""
    source = build(folder / "source")
    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    done = 0
    while done < n:
        last = min(n, done + TRIALS_PER_CHILD)
        args = (str(source.path), str(folder), seed, done, last)
        child, receiver = children.start(trials, *args)
        open_trial: Any = None
        while receiver.poll(SILENT_S_MAX):
            try:
                trial, kind, file, verdicts = receiver.recv()
            except EOFError:
                break
            open_trial = (trial, kind, file)
            if verdicts is None:
                continue
            done, open_trial = trial + 1, None
            place = {"data": "hot", "train": "control", "cold": "cold"}[file.split("/")[0]]
            counts["trials", place] += 1
            for way, found in verdicts.items():
                counts[way, found if found == "detected" else "wrong"] += 1
                if found != "detected":
                    wrong.append((trial, kind, file, way, found))
        if done < last:
            child.join(1)
            what = "hang" if child.is_alive() else f"exit {child.exitcode}"
            assert open_trial is not None, f"a child ended outside a trial: {what}"
            child.kill()
            wrong.append((*open_trial, "-", what))
            done = open_trial[0] + 1
        child.join(60)
    return counts, wrong


def test_undamaged_files_are_read_in_all_ways(tmp_path: Path) -> None:
    log = build(tmp_path / "log")
    kinds, places = facts(log)
    for file in files(log):
        found = dict(reads(log, file, kinds, places.get(str(file), [])))
        assert not any(isinstance(result, Exception) for result in found.values()), found
        assert len(found["sql"]) and len(found["tail"])
        assert ("row" in found) == (file.parts[0] != "train")
    assert {p.parts[0] for p in files(log)} == {"data", "train", "cold"}


def test_some_damage_is_always_told(tmp_path: Path) -> None:
    counts, wrong = run_trials(tmp_path, 90, seed=1)
    assert not wrong
    assert counts["tail", "detected"] == counts["sql", "detected"] == 90


@pytest.mark.slow
def test_damage_is_always_told(tmp_path: Path, report: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    counts, wrong = run_trials(tmp_path, 6000, seed)
    assert not wrong, wrong[:10]
    told = {" ".join(key): n for key, n in sorted(counts.items())}
    report(**told, undetected=0, crashes=0, hangs=0, seed=seed)

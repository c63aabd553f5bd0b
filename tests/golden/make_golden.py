"""Adds golden files for schema versions that have none. An existing file is never written again.

    python tests/golden/make_golden.py

For each stream and record at its current version: `<name>-<version>.arrow`, a commit as this
program writes it, and `<name>-<version>.json`, the rows that every later program must read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import molt.schemas
from molt.schemas.check import check_row, routing_columns
from molt.schemas.columns import normalise, to_rows, to_table
from molt.schemas.control import CONTROL, CONTROL_VERSIONS
from molt.schemas.streams import STREAMS, VERSIONS, routing_metadata, schema_id
from molt.store.commit import decode, encode

sys.path.insert(0, str(Path(__file__).parents[1]))
import factories as make

GOLDEN = Path(molt.schemas.__file__).parent / "golden"
WRITER = "1-golden-1-000000"
EXPERTS = np.arange(2 * 3 * 2).reshape(2, 3, 2) % 8


def rows_of(name: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Two different rows where a kind has several, and the header."""
    at = {"at": make.NOW}
    root = make.segment(ids=[5, 6, 7], sampled=[0, 1, 1], runs=[(1, 0, 1), (1, 1, 1)])
    child = make.segment(
        segment=1, parent=0, keep=2, parent_digest=root["digest"], ids=[8, 9], train=[1, 0]
    )
    ref = {"log": 0, "writer": WRITER, "seq": 0, "row": 0}
    score = {"rollout_id": "train-0/0", "attempt": 0, "segment": 0, "kind": "ref", "model": "m"}
    one = {
        "epoch": {
            "epoch": 1,
            "parent_epoch": None,
            "cut": None,
            "closed": [{"writer": WRITER, "last_seq": 3}],
            "sources": [{"log": 1, "run_id": "other", "path": "../other"}],
            "config": "{}",
            "digests": {"model": "m", "tokenizer": "t", "template": "p"},
            "packages": "{}",
            "world_size": 1,
            "threads": 2,
        },
        "step": make.step_row(1, 1, sketch=[{"name": "w", "values": [1.0, -0.5]}]),
        "policy": make.policy(1, 0),
        "checkpoint": {
            "epoch": 1,
            "step": 1,
            "path": "checkpoints/1-1",
            "bytes": 7,
            "files": [{"name": "state.bin", "bytes": 7}],
            "state_digest": "0" * 16,
        },
    }
    many = {
        "prompts": [make.prompt(0), make.prompt(1, prompt='{"text":"a\x00b\ud800"}')],
        "segments": [root, child],
        "routing": [
            {
                **make.routing(),
                **routing_columns(EXPERTS, 8),
            }
        ],
        "rollouts": [
            make.rollout(digests=[root["digest"], child["digest"]]),
            make.rollout("train-0/1", status="failed", reason="timeout"),
        ],
        "rewards": [make.reward(), make.reward("train-0/1", None, segment=0, token=3)],
        "scores": [{**score, "epoch": 1, "version": 0, "values": [-0.5, -1.0, 0.0]}],
        "plan": [
            make.plan_row("train-0/0", [], chain_digest=root["digest"])
            | {"branches": [{"tip": 0, "refs": [ref]}]},
            make.plan_row("train-0/1", []) | {"branches": [], "lag_max": None, "reward": None},
        ],
        "drop": [make.drop_row("train-1"), make.drop_row("train-2", "conflict", "train-2/0")],
    }
    rows = [one[name]] if name in one else many[name]
    headers = {"plan": {"epoch": 1, **make.plan_header(1)}, "drop": {"epoch": 1}}
    return [{**row, **at} for row in rows], headers.get(name)


def encode_golden(name: str) -> bytes:
    rows, header = rows_of(name)
    if name in STREAMS:
        schema, version, writer = STREAMS[name], VERSIONS[name], WRITER
        # The child's parent is not at hand here: its digest is checked by the tests.
        checked = [check_row(name, schema, row) for row in rows]
    else:
        schema, version, writer = CONTROL[name], CONTROL_VERSIONS[name], "control"
        checked = [normalise(name, schema, row) for row in rows]
    shape = routing_metadata(layers=3, top_k=2, n_experts=8) if name == "routing" else None
    raw = encode(
        to_table(schema, checked),
        stream=name,
        writer=writer,
        seq=0,
        schema_text=schema_id(name, schema, version),
        header=header,
        extra=shape,
    )
    return bytes(raw)


def plain_rows(raw: bytes, name: str) -> list[Any]:
    """The rows of a golden commit as JSON values, through the same reader as every commit."""
    writer = WRITER if name in STREAMS else "control"
    commit = decode(raw, stream=name, writer=writer, seq=0)
    return json.loads(json.dumps(to_rows(commit.table), default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return value.tolist() if isinstance(value, np.ndarray) else value.isoformat()


def add_missing(folder: Path = GOLDEN) -> list[str]:
    """Write what is missing; returns the names of the added files."""
    added = []
    folder.mkdir(exist_ok=True)
    for name, version in {**VERSIONS, **CONTROL_VERSIONS}.items():
        path = folder / f"{name}-{version}.arrow"
        if path.exists():
            continue
        raw = encode_golden(name)
        with open(path, "xb") as f:
            f.write(raw)
        text = json.dumps(plain_rows(raw, name), indent=1, sort_keys=True) + "\n"
        with open(path.with_suffix(".json"), "x") as f:
            f.write(text)
        added.append(path.name)
    return added


if __name__ == "__main__":
    print("added:", ", ".join(add_missing()) or "nothing; every current version has its file")

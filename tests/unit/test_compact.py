"""Compacted logs say what they said before: through the reader, the tail, SQL and the doctor."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import factories as make
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from molt import cli
from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.schemas.streams import STREAMS, routing_metadata
from molt.store import Log
from molt.store import files as files_module
from molt.store.commit import encode
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.reader import RowReader, read_commit, writer_files, writer_names
from molt.store.sql import connect, run_sql


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in ("reader", "tail", "compact", "doctor"):
        monkeypatch.setattr(f"molt.store.{module}.BUCKET", 4)
    return 4


def tailed(log: Log) -> list[tuple]:
    return [(c.writer, c.seq, c.stream, str(c.table.to_pylist())) for c in log.tail().poll()[1]]


def by_address(log: Log) -> dict[tuple, str]:
    """Every visible row as the reader of addresses gives it."""
    reader = RowReader(log.path)
    commits = log.tail().poll()[1]
    refs = [
        Ref(writer=c.writer, seq=c.seq, row=i) for c in commits for i in range(c.table.num_rows)
    ]
    return {(r.writer, r.seq, r.row): str(reader.row(r)) for r in refs}


def in_sql(log: Log) -> dict[tuple, list[str]]:
    found = {}
    for epoch in (None, "all"):
        con = connect([log], epoch)
        for view in con.execute("show tables").fetchall():
            found[epoch, *view] = sorted(map(str, con.execute(f"from {view[0]}").fetchall()))
    assert len(found) > 20
    return found


def told(log: Log) -> dict:
    report = doctor(log.path)
    assert report["ok"], report["problems"]
    counts = {s: (x["commits"], x["rows"]) for s, x in report["by_stream"].items()}
    return {"counts": counts, "rows": report["rows"], "invisible": report["invisible"]}


def state(log: Log) -> tuple:
    return tailed(log), by_address(log), in_sql(log), told(log)


def cold(log: Log, stream: str = "*") -> list[Path]:
    return sorted((log.path / "cold").glob(f"{stream}/*.parquet"))


def hot(log: Log) -> list[str]:
    return [p.name.split(".")[1] for p in make.data_commits(log.path)]


def test_a_compacted_log_says_what_it_said(tiny: Log) -> None:
    make.open_epoch(tiny)
    before = state(tiny)
    seen = []
    done = compact(tiny, everything=True, progress=lambda n, total: seen.append((n, total)))
    assert done["commits"] == 24 and done["rows"] == 29 and done["kept_hot"] == []
    assert seen[-1] == (24, 24)
    assert state(tiny) == before
    # What a fenced worker left behind its writer's end is no part of the log, and `end` stays.
    assert sorted(hot(tiny)) == ["end", "end", "rewards", "rollouts", "segments"]
    assert compact(tiny, everything=True)["commits"] == 0


def test_the_file_is_as_the_contract_says(tiny: Log) -> None:
    rows = tiny.sql("select writer, seq, row from segments", epoch="all").fetchall()
    compact(tiny, everything=True)
    (path,) = cold(tiny, "segments")[:1]
    assert path.name == "0000000000.parquet"
    file = pq.ParquetFile(path, page_checksum_verification=True)
    text = json.loads(file.metadata.metadata[b"molt.covers"])
    covered = {(w, seq) for w, first, last in text for seq in range(first, last + 1)}
    table = pq.read_table(path)
    addresses = list(
        zip(*(table.column(c).to_pylist() for c in ("writer", "seq", "row")), strict=True)
    )
    assert {a[:2] for a in addresses} == covered and set(addresses) <= set(rows)
    columns = [file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)]
    encodings = {c.path_in_schema.split(".")[0]: c.encodings for c in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["logprobs"]
    assert table.schema.field("token_ids").type == STREAMS["segments"].field("token_ids").type


def put(w, stream: str, *rows: dict) -> None:
    for row in rows:
        w.append(stream, row)
    w.flush()


def test_full_buckets_go_and_tokens_wait_until_their_groups_are_settled(
    log: Log, small_buckets: int
) -> None:
    with log.writer(linger_s=60) as w:
        for i in range(3):
            put(w, "rewards", make.reward(f"train-{i}/0"))
            put(w, "segments", make.segment(rollout_id=f"train-{i}/0"))
        put(w, "segments", make.segment(rollout_id="eval-0/0"))
        assert compact(log)["commits"] == 2, "the rewards of bucket 0; bucket 1 is not full"
        assert hot(log) == ["segments", "segments", "rewards", "segments", "segments"]
        log.control.put("drop", [make.drop_row("train-0")], {})
        assert compact(log)["commits"] == 0, "train-1 has a row in bucket 0 too"
        log.control.put("drop", [make.drop_row("train-1")], {})
        assert compact(log)["commits"] == 2
        put(w, "rewards", make.reward("train-9/0"))
        assert compact(log)["commits"] == 2, "both rewards of bucket 1"
        log.control.put("drop", [make.drop_row("train-2")], {})
        assert compact(log)["commits"] == 2, "an evaluation is settled by no record"
        put(w, "rewards", make.reward("train-9/1"))
        assert compact(log, everything=True)["commits"] == 0, "this writer is open"
    assert compact(log, everything=True)["commits"] == 1
    assert hot(log) == ["end"] and len(tailed(log)) == 9


def test_a_tail_that_is_behind_gets_each_commit_once(log: Log, small_buckets: int) -> None:
    early, late = log.tail(), log.tail()
    seen: dict[str, list[int]] = {"early": [], "late": []}

    def poll(name: str, tail) -> None:
        seen[name] += [r for c in tail.poll()[1] for r in c.table["revision"].to_pylist()]

    with log.writer(linger_s=60) as w:
        for i in range(19):
            put(w, "rewards", make.reward(revision=i))
            if i % 3 == 0:
                poll("early", early)
            if i % 5 == 0:
                compact(log)
            if i == 9:
                poll("late", late)
        poll("early", early)
        poll("late", late)
        assert seen == {"early": list(range(19)), "late": list(range(19))}
        assert early.poll() == late.poll() == ([], [])
        put(w, "rewards", make.reward(revision=19))
        poll("late", late)
        assert seen["late"][-1] == 19


def test_a_query_and_a_listing_of_before_go_on_after_compaction(tiny: Log) -> None:
    query = "select rollout_id, attempt, token_ids from segments order by all"
    expected = run_sql([tiny], query)[1]
    con = connect([tiny], query=query)
    listed = [f for w in writer_names(tiny.path) for f in writer_files(tiny.path, w)]
    tables = [read_commit(f).table for f in listed]
    compact(tiny, everything=True)
    assert sum(not f.path.exists() for f in listed) == 24
    assert [list(row) for row in con.execute(query).fetchall()] == expected
    assert all(read_commit(f).table.equals(t) for f, t in zip(listed, tables, strict=True))


def test_a_new_epoch_closes_writers_at_what_cold_covers(log: Log, small_buckets: int) -> None:
    with log.writer(linger_s=60) as w:
        for i in range(8):
            put(w, "rewards", make.reward(revision=i))
        assert compact(log)["commits"] == 8 and hot(log) == []
        record = make.open_epoch(log)
        assert record.rows[0]["closed"] == [{"writer": w.name, "last_seq": 7}]
        put(w, "rewards", make.reward(revision=8))
    assert len(tailed(log)) == 8 and told(log)["invisible"] == 2


def test_leftovers_are_subtracted_told_and_swept(tiny: Log, tmp_path: Path) -> None:
    shutil.copytree(tiny.path / "data", tmp_path / "kept")
    before = state(tiny)
    compact(tiny, everything=True)
    shutil.copytree(tmp_path / "kept", tiny.path / "data", dirs_exist_ok=True)
    assert state(tiny) == before
    assert len(doctor(tiny.path)["leftovers"]) == 24
    assert compact(tiny)["leftovers"] == 24
    assert state(tiny) == before and doctor(tiny.path)["leftovers"] == []


def test_a_leftover_that_differs_is_kept_and_named(tiny: Log, tmp_path: Path) -> None:
    victim = make.data_commits(tiny.path, "rewards")[0]
    other = make.data_commits(tiny.path, "rewards")[1]
    table = pa.ipc.open_file(other).read_all()
    compact(tiny, everything=True)
    seq, writer = int(victim.name[:10]), victim.parts[-3]
    text = "rewards 1.0 " + "0" * 16
    victim.write_bytes(encode(table, stream="rewards", writer=writer, seq=seq, schema_text=text))
    with pytest.raises(LogCorrupt, match=rf"rewards/.*commit {writer}/{seq} differs"):
        compact(tiny)
    assert victim.exists()


def test_damage_anywhere_in_a_cold_file_is_named_by_every_reader(tiny: Log) -> None:
    compact(tiny, everything=True)
    rng = np.random.default_rng(5)
    for stream in ("segments", "rewards"):
        path = cold(tiny, stream)[0]
        raw = path.read_bytes()
        where = f"cold/{stream}/{path.name}"
        changed = [raw[:n] for n in rng.integers(0, len(raw), 6).tolist()]
        changed += [raw[:n] + bytes(64) + raw[n + 64 :] for n in range(0, len(raw) - 64, 997)]
        for at in (0, *rng.integers(0, len(raw), 30).tolist(), len(raw) - 1):
            changed.append(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        query = f"select * from {stream}"
        for other in (c for c in changed if c != raw):
            path.write_bytes(other)
            with pytest.raises(LogCorrupt, match=where):
                run_sql([tiny], query, "all")
            with pytest.raises(LogCorrupt, match=where):
                Log.open(tiny.path).tail().poll()
            assert where in {p["file"] for p in doctor(tiny.path)["problems"]}
        path.write_bytes(raw)
    assert doctor(tiny.path)["ok"]


def test_a_forged_address_and_a_stranger_are_found(tiny: Log) -> None:
    compact(tiny, everything=True)
    path = cold(tiny, "rewards")[0]
    raw = path.read_bytes()
    path.rename(path.with_name("0000000009.parquet"))
    assert doctor(tiny.path)["ok"], "a number that is missing is no damage: files are exclusive"
    (path.parent / "notes.txt").write_text("hello")
    (tiny.path / "cold" / "scores").mkdir()
    (tiny.path / "cold" / "scores" / path.name).write_bytes(raw)
    whys = {p["file"]: p["why"] for p in doctor(tiny.path)["problems"]}
    assert whys["cold/rewards/notes.txt"] == "not the name of a cold file"
    assert "it says it is rewards" in whys[f"cold/scores/{path.name}"]


def test_another_log_at_the_same_path_is_read_as_what_it_is(tmp_path: Path) -> None:
    for n in (2, 3):
        made = Log.create(tmp_path / f"made{n}", run_id="run")
        make.open_epoch(made)
        with made.writer(linger_s=60) as w:
            for i in range(n):
                w.append("rewards", make.reward(revision=i))
        compact(made, everything=True)
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        made.path.rename(tmp_path / "log")
        log = Log.open(tmp_path / "log")
        assert run_sql([log], "select count(*) from rewards")[1] == [[n]]
        assert sum(c.table.num_rows for c in log.tail().poll()[1]) == n


def test_the_slower_of_two_compactors_moves_only_what_is_left(
    tiny: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(tiny)
    real, once = files_module.publish, []

    def slow(path: Path, raw: bytes) -> None:
        if not once:
            once.append(path)
            monkeypatch.setattr(files_module, "publish", real)
            compact(tiny, everything=True, file_bytes=1)
        real(path, raw)

    monkeypatch.setattr(files_module, "publish", slow)
    compact(tiny, everything=True)
    assert state(tiny) == before
    covers = [json.loads(pq.read_metadata(p).metadata[b"molt.covers"]) for p in cold(tiny)]
    places = [(w, s) for c in covers for w, a, b in c for s in range(a, b + 1)]
    assert len(places) == len(set(places)) == 24


def test_users_streams_keep_types_nan_and_both_schemas(log: Log) -> None:
    first = pa.schema([pa.field("seq", pa.string()), pa.field("x", pa.large_list(pa.float64()))])
    for i, schema in enumerate((first, first.append(pa.field("more", pa.int8())))):
        with log.writer(user_schemas={"x_mood": schema}) as w:
            more = {"more": 3} if i else {}
            w.append("x_mood", {"seq": "mine", "x": [float("nan"), 1.5], **more})
    before = state(log)
    assert compact(log, everything=True)["files"] == 2
    assert state(log) == before


def test_a_stream_that_parquet_cannot_hold_stays_hot(log: Log) -> None:
    odd = pa.schema([pa.field("x", pa.large_list(pa.month_day_nano_interval()))])
    with log.writer(user_schemas={"x_mood": odd}) as w:
        w.append("rewards", make.reward())
        w.flush()
        table = pa.table({"x": pa.array([[]], odd.field(0).type), "at": pa.array([make.NOW])})
        w._publish_commit("x_mood", table.cast(pa.schema([*odd, ("at", pa.timestamp("us"))])))
    done = compact(log, everything=True)
    assert [k["stream"] for k in done["kept_hot"]] == ["x_mood"] and done["commits"] == 1
    assert hot(log) == ["x_mood", "end"]


def test_routing_keeps_its_shape_and_is_not_compressed(log: Log) -> None:
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    with log.writer(routing=shape) as w:
        put(w, "segments", make.segment(ids=[1, 2, 3]))
        put(w, "routing", make.routing(n=2), make.routing(start=2, n=1))
    before = state(log)
    compact(log, everything=True)
    assert state(log) == before, "the doctor checks the shape from the metadata"
    (path,) = cold(log, "routing")
    meta = pq.read_metadata(path).row_group(0)
    assert {meta.column(i).compression for i in range(meta.num_columns)} == {"UNCOMPRESSED"}


def test_a_commit_is_read_without_the_rest_of_its_file(log: Log, monkeypatch) -> None:
    monkeypatch.setattr("molt.store.cold.GROUP_BYTES", 1)
    with log.writer() as w:
        for i in range(5):
            put(w, "rewards", make.reward(revision=i), make.reward(revision=10 + i))
    before = state(log)
    compact(log, everything=True)
    assert pq.read_metadata(cold(log)[0]).num_row_groups == 5
    assert state(log) == before


def test_the_command(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compact", str(tiny.path), "--all", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["commits"] == 24
    assert cli.main(["doctor", str(tiny.path)]) == 0
    assert cli.main(["compact", str(tiny.path)]) == 0
    assert "commits" in capsys.readouterr().out


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(st.sampled_from(["close", "compact", "compact all", "poll", "epoch"])),
        st.tuples(st.just("settle"), st.integers(0, 5)),
    ),
    min_size=6,
    max_size=30,
)


@given(ops=OPS, file_bytes=st.sampled_from([1, 3000, 1 << 20]))
@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_random_log_compacted_anywhere_equals_the_uncompacted_one(
    tmp_path_factory: pytest.TempPathFactory, ops: list[tuple], file_bytes: int
) -> None:
    root = tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("reader", "tail", "compact", "doctor"):
            patch.setattr(f"molt.store.{module}.BUCKET", 4)
        log = Log.create(root / "log", run_id="run")
        make.open_epoch(log)
        log.control.put("policy", [make.policy(1, 0)])
        delivered = list(played(log, root / "shadow", ops, file_bytes))
        shutil.copytree(log.path / "data", root / "shadow" / "data", dirs_exist_ok=True)
        for name in ("train", "format.json", "checkpoints"):
            copy = shutil.copytree if (log.path / name).is_dir() else shutil.copy
            copy(log.path / name, root / "shadow" / name)
        shadow = Log.open(root / "shadow")
        assert state(log) == state(shadow)
        assert len(delivered) == len(set(delivered))
        for writer in {w for w, _ in delivered}:
            own = [seq for w, seq in delivered if w == writer]
            assert own == list(range(len(own)))
        assert {(w, seq) for w, seq, *_ in tailed(log)} <= set(delivered)


def played(log: Log, shadow: Path, ops: list[tuple], file_bytes: int) -> Iterator[tuple]:
    """Carry the operations out; yields what one long tail delivers."""
    tail = log.tail()
    writers = {i: log.writer(linger_s=60) for i in (0, 1)}
    for n, (op, *args) in enumerate([*ops, ("compact all",), ("poll",)]):
        if op == "write":
            who = f"train-{args[1]}/{n}"
            make.append_rollout(writers[args[0]], who)
            put(writers[args[0]], "prompts", make.prompt(args[1], n=50))
        elif op == "close":
            writers[n % 2].close()
            writers[n % 2] = log.writer(linger_s=60)
        elif op == "epoch":
            make.open_epoch(log)
        elif op == "settle":
            log.control.put("drop", [make.drop_row(f"train-{args[0]}")], {})
        elif op == "poll":
            yield from ((c.writer, c.seq) for c in tail.poll()[1])
        else:
            shutil.copytree(log.path / "data", shadow / "data", dirs_exist_ok=True)
            compact(log, everything=op == "compact all", file_bytes=file_bytes)
    for w in writers.values():
        w.close()
    yield from ((c.writer, c.seq) for c in tail.poll()[1])

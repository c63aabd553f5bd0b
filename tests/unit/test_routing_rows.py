"""Capture bookkeeping, routing rows, their ranges and their packing, without an engine."""

from typing import Any

import factories as make
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.replay.sources import Sources
from molt.rollout.routing import RoutingShape, SlotRouting, completion_routing, routing_rows
from molt.schemas.check import repeated_rows
from molt.schemas.errors import EngineError, LogCorrupt, SegmentRejected
from molt.store import Log
from molt.train.packing import Recorded, Wanted, pack
from molt.train.recorded import RoutingReader

SHAPE = RoutingShape(layers=(0, 1), top_k=2, n_experts=8)
MODEL = {"layers": 2, "top_k": 2, "n_experts": 8}


def experts_of(ids: tuple[int, ...], weights: int) -> np.ndarray:
    """What a "model" chooses for the last of `ids`: a function of the whole prefix."""
    rng = np.random.default_rng([weights, *ids])
    return np.stack([rng.permutation(8)[:2] for _ in range(2)])


# -- capture ---------------------------------------------------------------------------------------


class Engine:
    """A scheduler with paged KV, prefix cache, chunks and preemption, as simple as can be.

    Its own record is the straightforward model: a dictionary from (request, position) to what the
    first forward of that position chose. The KV of a block is stood in for by the ids and weights
    that it was computed with.
    """

    BLOCK, BLOCKS = 4, 24

    def __init__(self) -> None:
        self.slots = SlotRouting(n_blocks=self.BLOCKS, block_size=self.BLOCK, layers=2, top_k=2)
        self.free, self.cache = list(range(self.BLOCKS)), {}
        self.held: dict[int, int] = {}
        self.weights = 0
        self.kv: dict[int, np.ndarray] = {}
        """slot -> experts that its KV was computed with"""

    def forward(self, request: "Request", n: int) -> int:
        """Compute up to `n` more positions of a request; returns how many."""
        if not request.blocks:
            self._hit_cache(request)
        n = min(n, len(request.ids) - request.done)
        for position in range(request.done, request.done + n):
            if position // self.BLOCK == len(request.blocks):
                if not self.free:
                    return position - request.done
                request.blocks.append(self._take(self.free.pop(0)))
            slot = request.blocks[position // self.BLOCK] * self.BLOCK + position % self.BLOCK
            chosen = experts_of(tuple(request.ids[: position + 1]), self.weights)
            self.slots.write(np.array([slot]), chosen[None])
            self.kv[slot] = chosen
            request.done = position + 1
            if request.done % self.BLOCK == 0:
                prefix = tuple(request.ids[: request.done])
                self.cache.setdefault(prefix, request.blocks[position // self.BLOCK])
        return n

    def _take(self, block: int) -> int:
        self.held[block] = self.held.get(block, 0) + 1
        self.cache = {p: b for p, b in self.cache.items() if b != block or self.held[block] > 1}
        return block

    def _hit_cache(self, request: "Request") -> None:
        """Whole cached blocks, but never the last token."""
        for end in range(self.BLOCK, len(request.ids), self.BLOCK):
            block = self.cache.get(tuple(request.ids[:end]))
            if block is None:
                break
            if block in self.free:
                self.free.remove(block)
            self.held[block] = self.held.get(block, 0) + 1
            request.blocks.append(block)
            request.done = end

    def release(self, request: "Request") -> None:
        for block in request.blocks:
            self.held[block] -= 1
            if not self.held[block]:
                self.free.append(block)
        request.blocks, request.done = [], 0

    def refit(self, requests: list["Request"]) -> None:
        """Pause with all KV dropped, new weights."""
        for request in requests:
            self.release(request)
        self.cache, self.weights = {}, self.weights + 1


class Request:
    def __init__(self, ids: list[int]) -> None:
        self.ids, self.n_prompt = list(ids), len(ids)
        self.blocks: list[int] = []
        self.done = 0
        self.reported: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []

    def report(self, engine: Engine) -> None:
        """All positions are computed: hand over what was not handed over, as vLLM does."""
        start, blocks = len(self.reported), np.array(self.blocks, np.int32)
        rows = engine.slots.read(blocks, start, self.done)
        for position in range(start, self.done):
            slot = self.blocks[position // engine.BLOCK] * engine.BLOCK + position % engine.BLOCK
            self.expected.append(engine.kv[slot])
        self.reported += list(rows)


@given(st.data())
def test_capture_is_the_plain_record(data: st.DataObject) -> None:
    """Random chunks, preemptions, cache hits and refits; few ids, so that prefixes are shared."""
    engine, requests, finished = Engine(), [], []
    for _ in range(data.draw(st.integers(5, 30))):
        act = data.draw(st.sampled_from(["add", "step", "step", "step", "preempt", "refit"]))
        if act == "add" and len(requests) < 4:
            ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
            requests.append(Request([7, 7, 7, *ids]))
        elif act == "preempt" and requests:
            engine.release(data.draw(st.sampled_from(requests)))
        elif act == "refit":
            engine.refit(requests)
        elif act == "step":
            for request in list(requests):
                engine.forward(request, data.draw(st.integers(1, 9)))
                if request.done < len(request.ids):
                    continue
                request.report(engine)
                if data.draw(st.booleans()) and len(request.ids) < 22:
                    request.ids.append(data.draw(st.integers(0, 1)))
                else:
                    request.ids.append(9)  # the last token is sampled and never computed
                    engine.release(request)
                    requests.remove(request)
                    finished.append(request)
    for request in finished:
        ((start, experts),) = completion_routing(np.array(request.reported), 0, SHAPE)
        assert (start, len(experts)) == (0, len(request.ids) - 1)
        assert (experts == np.array(request.expected)).all()


def test_unknown_positions_split_the_runs_and_are_absent() -> None:
    routed = np.zeros((6, 2, 2), np.int16)
    routed[:, :, 1] = 1
    routed[2, 1, 0] = routed[5] = -1
    runs = completion_routing(routed, 10, SHAPE)
    assert [(start, len(experts)) for start, experts in runs] == [(10, 2), (13, 2)]
    rows = routing_rows(runs, rollout_id="train-0/0", attempt=0, segment=1, n_experts=8)
    assert [(r.segment, r.start, r.n, len(r.experts)) for r in rows] == [
        (1, 10, 2, 8),
        (1, 13, 2, 8),
    ]
    assert completion_routing(None, 0, SHAPE) == ()


def test_layers_without_experts_are_left_out() -> None:
    """vLLM's own capture has a row for every layer of the model."""
    shape = RoutingShape(layers=(1, 3), top_k=2, n_experts=8)
    routed = np.arange(2 * 4 * 2).reshape(2, 4, 2).astype(np.uint8) % 8
    ((_, experts),) = completion_routing(routed, 0, shape)
    assert (experts == routed[:, [1, 3]]).all()
    with pytest.raises(EngineError, match="1 experts per token, the model declares 2"):
        completion_routing(routed[..., :1], 0, shape)


def test_uint16_has_no_unknown() -> None:
    """65535 is an expert of a large model, not a minus one."""
    shape = RoutingShape(layers=(0,), top_k=2, n_experts=65_536)
    ((_, experts),) = completion_routing(np.array([[[65_535, 1]]], np.uint16), 0, shape)
    assert experts.tolist() == [[[65_535, 1]]]


def test_the_longest_run_of_equal_rows_is_reported() -> None:
    rows = np.array([0, 1, 1, 1, 2, 1])[:, None, None] + np.zeros((1, 2, 2), int)
    assert repeated_rows(rows) == 3 and repeated_rows(rows[:0]) == 0


# -- the stream ------------------------------------------------------------------------------------


def drawn(n: int, seed: int = 0) -> np.ndarray:
    """Experts of `n` tokens: [n, 2, 2]."""
    return np.random.default_rng(seed).random((n, 2, 8)).argsort(-1)[..., :2].astype(np.uint8)


def rows_of(start: int, experts: np.ndarray, **more: Any) -> dict[str, Any]:
    (row,) = routing_rows(
        ((start, experts),),
        **{"rollout_id": "train-0/0", "attempt": 0, "segment": 0, "n_experts": 8, **more},
    )
    return {name: getattr(row, name) for name in row.__slots__}


def test_an_expert_serves_a_token_once(log: Log) -> None:
    experts = drawn(3)
    experts[2, 1] = [5, 5]
    message = r"position 4, layer 1: experts \[5, 5\] are not"
    with log.writer(routing=SHAPE.metadata()) as w, pytest.raises(SegmentRejected, match=message):
        w.append("routing", rows_of(2, experts))


def refs_of(log: Log, *rows: dict[str, Any], per_commit: bool = True) -> list[dict[str, Any]]:
    tickets = []
    with log.writer(linger_s=60, routing=SHAPE.metadata()) as w:
        for row in rows:
            tickets.append(w.append("routing", row))
            if per_commit:
                w.flush()
    return [
        {"log": 0, "writer": t.result().writer, "seq": t.result().seq, "row": t.result().row}
        for t in tickets
    ]


def test_a_row_beyond_its_chain_is_refused(log: Log) -> None:
    refs = refs_of(log, rows_of(3, drawn(9)))
    with pytest.raises(LogCorrupt, match="positions 3 to 11 in a chain of 9 tokens"):
        RoutingReader(log, **MODEL).of(make.sequence(9), refs)


def test_a_chain_takes_each_position_from_the_segment_that_computed_it_first(log: Log) -> None:
    """Turns of five and four tokens: row 4 comes with the second; what it repeats is ignored."""
    first, again = drawn(4, 1), drawn(8, 2)
    refs = refs_of(log, rows_of(0, again, segment=1), rows_of(0, first))
    found = RoutingReader(log, **MODEL).of(make.sequence(9, chain=((0, 5), (1, 9)), tip=1), refs)
    assert found.known_T.tolist() == [True] * 8
    assert (found.experts_TLK == np.concatenate([first, again[4:]])).all()
    cut = make.sequence(
        9, chain=((0, 2), (2, 9)), tip=2
    )  # a sibling's turn is no part of this branch
    found = RoutingReader(log, **MODEL).of(cut, refs)
    assert found.known_T.tolist() == [True] * 2 + [False] * 6
    assert (found.experts_TLK[:2] == first[:2]).all()


def test_only_the_needed_positions_are_read_and_each_is_verified(log: Log) -> None:
    """One commit with three rollouts: the others' rows, and what follows the last target, stay."""
    refs = refs_of(
        log,
        rows_of(0, drawn(5000, 1), rollout_id="train-0/1"),
        rows_of(0, drawn(9)),
        rows_of(0, drawn(5000, 2), rollout_id="train-0/2"),
        per_commit=False,
    )
    fresh = Sources(log, 1)
    wanted = make.sequence(9, mask=np.arange(9) == 6)
    found = RoutingReader(fresh, **MODEL).of(wanted, [refs[1]])
    assert (found.experts_TLK == drawn(9)[:6]).all() and found.known_T.all()
    (path,) = (log.path / "data").glob("*/*/*.routing.arrow")
    assert 6 * (4 + 8) <= fresh.bytes_read < path.stat().st_size / 4
    other = RoutingReader(log, layers=4, top_k=2, n_experts=8)
    with pytest.raises(LogCorrupt, match="4 bytes of experts per token were .* 4 MoE layers with"):
        other.of(wanted, [refs[1]])
    fewer = RoutingReader(log, layers=2, top_k=2, n_experts=4)
    with pytest.raises(
        LogCorrupt, match=r"train-0/0 .* token \d, MoE layer \d: recorded expert [4-7]"
    ):
        fewer.of(wanted, [refs[1]])
    raw = bytearray(path.read_bytes())
    at = raw.index(drawn(9).tobytes())
    raw[at + 5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(LogCorrupt, match="row 1: position 1 has another hash than its own"):
        RoutingReader(log, **MODEL).of(wanted, [refs[1]])


def test_damage_outside_the_experts_is_loud_too(log: Log) -> None:
    """Bits flipped anywhere in a routing commit: refused, or what is used did not change."""
    refs = refs_of(log, rows_of(0, drawn(9)))
    (path,) = (log.path / "data").glob("*/*/*.routing.arrow")
    raw, wanted, refused = path.read_bytes(), make.sequence(10), 0
    rng = np.random.default_rng(3)
    for at in rng.choice(len(raw), 400, replace=False).tolist():
        path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])
        try:
            found = RoutingReader(Log.open(log.path), **MODEL).of(wanted, refs)
        except LogCorrupt:
            refused += 1
            continue
        assert found.known_T.all() and (found.experts_TLK == drawn(9)).all(), at
    assert refused > 20
    path.write_bytes(raw)


def test_compacted_rows_are_the_same_rows(log: Log) -> None:
    from molt.store.compact import compact

    refs = refs_of(log, rows_of(0, drawn(9)))
    before = RoutingReader(log, **MODEL).of(make.sequence(10), refs)
    assert compact(log, everything=True)
    assert not list((log.path / "data").glob("*/*/*.routing.arrow"))
    after = RoutingReader(log, **MODEL).of(make.sequence(10), refs)
    assert (before.experts_TLK == after.experts_TLK).all() and after.known_T.all()


# -- packing ---------------------------------------------------------------------------------------


@given(st.data())
def test_packed_rows_carry_the_experts_of_their_tokens(data: st.DataObject) -> None:
    """Every sequence finds its own experts along its path through the row, shared or not."""
    items = []
    for _ in range(data.draw(st.integers(1, 6))):
        ids = np.array([9, 9, *data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=6))])
        flavour = data.draw(st.integers(0, 1))
        rows = [
            experts_of(tuple(ids[: t + 1].tolist()), flavour * (t > 2)) for t in range(len(ids) - 1)
        ]
        known_T = np.array([data.draw(st.integers(0, 9)) > 0 for _ in rows])
        experts = np.where(known_T[:, None, None], np.array(rows), 0).astype(np.uint8)
        recorded = Recorded(experts_TLK=experts, known_T=known_T)
        targets = np.array([len(ids) - 1])
        items.append(Wanted(token_ids=ids, targets=targets, temperature=1.0, recorded=recorded))
    packed = pack(items, max_tokens=data.draw(st.integers(1, 40)))
    seen = set()
    for row in packed:
        assert row.recorded is not None
        for n, slot in enumerate(row.slot_N.tolist()):
            item, last = items[slot], int(row.keep_R[row.logits_N[n]])
            mask_TT = (
                row.mask_TT if row.mask_TT is not None else np.tri(len(row.input_ids_T), dtype=bool)
            )
            path = np.flatnonzero(mask_TT[last])
            assert row.input_ids_T[path].tolist() == item.token_ids[:-1].tolist()
            assert (row.recorded.experts_TLK[path] == item.recorded.experts_TLK).all()
            assert (row.recorded.known_T[path] == item.recorded.known_T).all()
            seen.add(slot)
    assert seen == set(range(len(items)))

"""Replayed experts in the FSDP2 actor: exact, in every layout, with a gradient, and checked."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe
import numpy as np
import pytest
import torch
from moe import LAYERS, agree, known, plan, settings, started
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

from molt.process import rendezvous
from molt.recipes.moe import save_qwen3_moe
from molt.schemas.errors import ConfigError, TrainerError
from molt.train.packing import Recorded, Wanted, pack
from molt.train.trainer import Trainer

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    save_qwen3_moe(path / "model")
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Trainer]:
    trainer = started(settings(folder / "model"))
    trainer.save(str(folder / "start"))
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(shared: Trainer, folder: Path) -> Trainer:
    """The one-rank trainer in its first state."""
    shared.settings = settings(folder / "model")
    shared.load(str(folder / "start"))
    return shared


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ProcessPoolExecutor]]:
    """Two processes that live through all trainers of this file."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as one, ProcessPoolExecutor(1, spawn) as other:
        yield [one, other]


def plain_choices(model: Qwen3MoeForCausalLM, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return np.stack([layer.topk(2, -1).indices.numpy() for layer in logits], 1)


def test_the_trainer_is_the_model_of_transformers(trainer: Trainer, folder: Path) -> None:
    """Same logprobs, same experts in the same layers, same names of the checkpoint."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    for ids, _ in moe.token_lists(1).values():
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        assert np.abs(trainer.score([ids])[0] - expected).max() < 1e-5
        assert agree(trainer, ids, known(plain_choices(model, ids)[:-1])).all()
    on_disk = load_file(folder / "model" / "model.safetensors")
    exported = dict(trainer.export())
    assert exported.keys() == on_disk.keys()
    assert all(torch.equal(exported[name], on_disk[name]) for name in on_disk)
    assert trainer.manifest() == [(n, "float32", tuple(t.shape)) for n, t in exported.items()]


def forced(model: Qwen3MoeForCausalLM, ids: list[int], recorded: Recorded) -> torch.Tensor:
    """A plain forward of one sequence under given experts, unknown tokens as the model likes."""

    def force(gate: Any, args: Any, output: Any, layer: int = 0) -> Any:
        probabilities, _, live = output
        experts = torch.from_numpy(recorded.experts_TLK[:, layer].astype(np.int64))
        experts = torch.where(torch.from_numpy(recorded.known_T)[:, None], experts, live)
        full = torch.nn.functional.linear(args[0].reshape(-1, 128), gate.weight).softmax(-1)
        weights = full.gather(1, experts)
        return probabilities, weights / weights.sum(-1, keepdim=True), experts

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, args, out, i=i: force(gate, args, out, i))
        for i, layer in enumerate(model.model.layers)
    ]
    try:
        inputs = torch.tensor([ids[:-1]])
        logits = model(inputs, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def with_unknown(recorded: list[Recorded]) -> list[Recorded]:
    """Every third token unknown, with an id in its place that must not be taken."""
    out = []
    for r in recorded:
        known_T = np.arange(len(r.known_T)) % 3 != 1
        experts = np.where(known_T[:, None, None], r.experts_TLK, 0).astype(np.uint8)
        out.append(Recorded(experts_TLK=experts, known_T=known_T))
    return out


@pytest.mark.parametrize("limit", [1, 60, 1000])
@pytest.mark.parametrize("unknown", [False, True])
def test_replay_equals_a_forward_with_those_experts(
    trainer: Trainer, folder: Path, limit: int, unknown: bool
) -> None:
    """Values and gradients, the router's too, however the sequences are packed."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sequences, own = plan(trainer, 2)
    recorded = moe.other_choices(own, seed=3)
    recorded[1] = own[1]  # a shared prompt whose recorded experts differ within the group
    recorded = with_unknown(recorded) if unknown else recorded
    expected = torch.cat(
        [
            forced(model, s.token_ids.tolist(), r)[s.mask[1:]]
            for s, r in zip(sequences, recorded, strict=True)
        ]
    )
    factor = torch.linspace(-1, 1, len(expected))
    (factor * expected).sum().backward()
    items = [
        Wanted(token_ids=s.token_ids, targets=np.flatnonzero(s.mask), temperature=1.0, recorded=r)
        for s, r in zip(sequences, recorded, strict=True)
    ]
    rows, found = pack(items, max_tokens=limit), torch.zeros(len(expected))
    for n, row in enumerate(rows):
        trainer.model.begin_backward(is_last=n == len(rows) - 1)
        slot_N = torch.from_numpy(row.slot_N)
        with trainer.routing.row(row):
            logprobs_N = trainer.model.logprobs(row)
            found[slot_N] = logprobs_N.detach()
            (factor[slot_N] * logprobs_N).sum().backward()
    assert (found - expected).abs().max() < 2e-5
    for layer in range(LAYERS):
        plain = model.model.layers[layer].mlp.gate.weight.grad
        gradient = trainer.parameters[f"model.layers.{layer}.mlp.gate.weight"].grad.full_tensor()
        assert plain.abs().max() > 1e-4
        assert (gradient - plain).abs().max() < 1e-4 * max(1.0, float(plain.abs().max()))
    trainer.optimizer.zero_grad()


def test_a_step_with_its_own_recordings_agrees_and_says_so(trainer: Trainer) -> None:
    sequences, recorded = plan(trainer, 4)
    result = trainer.execute(1, sequences, recorded)
    found = result.metrics["routing"]
    assert found["coverage"] == 1.0
    assert found["mismatch"] < 2e-3 and found["mismatch_max"] < 1e-2  # packed otherwise: a tie
    assert found["gap_live"] < 1e-5 > found["gap_replayed"]
    assert result.metrics["mismatch"]["all"]["max"] < 1e-5
    again = trainer.execute(2, sequences, recorded).metrics["routing"]
    assert "gap_live" not in again and 0.0 < again["mismatch"] < 0.3  # the weights have moved


def shifted(recorded: list[Recorded]) -> list[Recorded]:
    rolled = np.roll(recorded[4].experts_TLK, 1, axis=0)
    return [*recorded[:4], known(rolled), *recorded[5:]]


def swapped(recorded: list[Recorded]) -> list[Recorded]:
    return [known(r.experts_TLK[:, [0, 2, 1, 3]]) for r in recorded]


def foreign(recorded: list[Recorded]) -> list[Recorded]:
    other = moe.other_choices(recorded[4:5], seed=5)
    return [*recorded[:4], *other, *recorded[5:]]


def exchanged(recorded: list[Recorded]) -> list[Recorded]:
    """Two rollouts of a group have each other's routing behind their common prompt of 14."""
    one, between, other = (r.experts_TLK for r in recorded[:3])
    assert one.shape == other.shape
    a, b = (np.concatenate(parts) for parts in ((one[:14], other[14:]), (other[:14], one[14:])))
    return [known(a), known(between), known(b), *recorded[3:]]


def missing(recorded: list[Recorded]) -> list[Recorded]:
    known_T = np.arange(len(recorded[4].known_T)) < 9
    return [*recorded[:4], replace(recorded[4], known_T=known_T), *recorded[5:]]


@pytest.mark.parametrize(
    ("mutate", "changes", "message"),
    [
        (
            shifted,
            {},
            r"one sequence.*train-1/1, token \d+, layer model.layers.\d.mlp.gate: record",
        ),
        (
            swapped,
            {},
            r"in layer model.layers.[12].mlp.gate.*token \d+.*recorded experts \[.*choose",
        ),
        (foreign, {}, r"of one sequence or.*, limit 30%.*train-1/1, token \d+.*chooses \["),
        (foreign, {"update_passes": 2}, r"of one sequence or.*train-1/1, token \d+.*chooses \["),
        (
            exchanged,
            {"share_prefixes": False},
            r"differ in [6-9]\d% .*trained part.*train-0/[02], token \d+.*chooses \[",
        ),
        (missing, {}, r"rollout train-1/1: experts are recorded for 9 of \d+ tokens, .* one is 9"),
    ],
)
def test_routing_of_something_else_stops_the_first_batch(
    trainer: Trainer,
    folder: Path,
    mutate: Callable[[list[Recorded]], list[Recorded]],
    changes: dict[str, Any],
    message: str,
) -> None:
    """With the place in the message, and no update made."""
    trainer.settings = settings(folder / "model", **changes)
    before = trainer.state_digest()
    sequences, recorded = plan(trainer, 6)
    with pytest.raises(TrainerError, match=message):
        trainer.execute(1, sequences, mutate(recorded))
    assert trainer.state_digest() == before
    with pytest.raises(TrainerError, match="experts are recorded for 0 of"):
        trainer.execute(1, sequences, None)
    trainer.settings = settings(folder / "model")
    assert trainer.execute(1, sequences, recorded).updates == 1


# -- other layouts ---------------------------------------------------------------------------------


def step_of(folder: Path, rank: int, ranks: int, meeting: str, changes: dict[str, Any]) -> Any:
    """One step under strange experts; the result, and all weights before and after it."""
    options = settings(
        folder / "model", routing_coverage=0.5, **({"routing_mismatch": 1.0} | changes)
    )
    trainer = started(options, rank, ranks, meeting)
    mine = {f"train-{g}" for g in range(5) if ranks == 1 or g % trainer.model.dp_size == rank}
    dense = torch.load(folder / "plan.pt", weights_only=False)
    pairs = [(s, r) for s, r in zip(*dense, strict=True) if s.group_id in mine]
    before = {n: t.clone() for n, t in trainer.export()}
    result = trainer.execute(1, [s for s, _ in pairs], [r for _, r in pairs])
    after = {n: t.clone() for n, t in trainer.export()}
    manifest = trainer.manifest()
    trainer.perturb(0.05, seed=1)
    perturbed = {n for n, t in trainer.export() if not torch.equal(t, after[n])}
    trainer.close()
    return {
        "result": result,
        "before": before,
        "after": after,
        "manifest": [name for name, _, _ in manifest],
        "perturbed": perturbed,
    }


def run(
    processes: list[ProcessPoolExecutor], folder: Path, ranks: int, **changes: Any
) -> list[dict[str, Any]]:
    """Rank n in process n."""
    meeting = rendezvous()
    futures = [
        processes[rank].submit(step_of, folder, rank, ranks, meeting, changes)
        for rank in range(ranks)
    ]
    return [future.result(timeout=180) for future in futures]


@pytest.fixture(scope="module")
def alone(processes: list[ProcessPoolExecutor], folder: Path, shared: Trainer) -> dict[str, Any]:
    """What one rank makes of a plan of five groups under experts that no router would take."""
    shared.load(str(folder / "start"))
    sequences, own = plan(shared, 8, groups=5)
    recorded = with_unknown(moe.other_choices(own, seed=9))
    torch.save((sequences, recorded), folder / "plan.pt")
    return run(processes, folder, 1)[0]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {"activation_checkpointing": True, "microbatch_tokens": 1000}),
        (2, {"microbatch_tokens": 40}),
        (2, {"activation_checkpointing": True}),
        (2, {"ep_size": 2}),
        (2, {"ep_size": 2, "activation_checkpointing": True}),
        (2, {"ep_size": 2, "activation_checkpointing": True, "microbatch_tokens": 40}),
    ],
)
def test_every_layout_makes_the_same_step(
    alone: dict[str, Any],
    processes: list[ProcessPoolExecutor],
    folder: Path,
    ranks: int,
    changes: dict[str, Any],
) -> None:
    """Checkpointing, other rows, DP=2, EP=2: same loss, gradient norm, weights and routing.

    Rank 1 has fewer micro-batches. Again with the ranks in each other's process: torch remembers
    the place of an earlier trainer's rank there.
    """
    outs = run(processes, folder, ranks, **changes)
    if ranks == 2:
        outs += run(processes[::-1], folder, ranks, **changes)
    for out in outs:
        result, expected = out["result"], alone["result"]
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert result.n_tokens == expected.n_tokens
        for name in ("coverage", "mismatch"):
            found = result.metrics["routing"][name]
            assert found == pytest.approx(expected.metrics["routing"][name], abs=0.02), name
        assert out["after"].keys() == alone["after"].keys()
        assert out["manifest"] == alone["manifest"]
        for name, tensor in alone["after"].items():
            assert torch.equal(out["before"][name], alone["before"][name]), name
            far = ((out["after"][name] - tensor).abs() > 1e-5).float().mean()
            assert far < 2e-3, name  # Adam's first step divides by |g|: few may go either way


def test_freeze_leaves_the_routers_alone(
    alone: dict[str, Any], processes: list[ProcessPoolExecutor], folder: Path
) -> None:
    """Out of the optimizer, the refit and the self-test's noise; everything else is trained."""
    (out,) = run(processes, folder, 1, routing="freeze")
    routers = {name for name in alone["after"] if name.endswith("mlp.gate.weight")}
    assert len(routers) == LAYERS
    assert out["after"].keys() == set(out["manifest"]) == alone["after"].keys() - routers
    moved = {n for n, t in out["after"].items() if not torch.equal(t, out["before"][n])}
    assert moved == out["after"].keys()
    assert out["perturbed"] == moved
    assert all(not torch.equal(alone["after"][n], alone["before"][n]) for n in routers)


def refused(folder: Path) -> str:
    trainer = Trainer(settings(folder), 0, 1, rendezvous())
    try:
        trainer.start()
    except ConfigError as error:
        return str(error)
    finally:
        trainer.close()
    return "started"


def test_a_dense_model_has_no_routing_to_replay(
    tmp_path: Path, processes: list[ProcessPoolExecutor]
) -> None:
    from tiny import tiny_tied_llama

    tiny_tied_llama(tmp_path)
    message = processes[0].submit(refused, tmp_path).result(timeout=120)
    assert "needs a model with experts" in message

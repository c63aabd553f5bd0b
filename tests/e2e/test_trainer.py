"""The FSDP2 actor on NeMo AutoModel and gloo: exact packing, sharding, updates, checkpoints."""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, tiny_tied_llama
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from molt.process import rendezvous
from molt.replay.assemble import TrainSequence
from molt.schemas.errors import ConfigError, TrainerError
from molt.train.packing import Wanted, pack
from molt.train.trainer import Trainer, TrainerSettings

pytestmark = pytest.mark.e2e
P12 = json.loads((Path(__file__).parents[1] / "cases" / "P12.json").read_text())


def settings(folder: Path, **changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        "model": str(folder / "model"),
        "lr": 1e-3,
        "seed": 7,
        "microbatch_tokens": 64,
    }
    return TrainerSettings(**(values | {"threads": 1} | changes))


def sequence(group: int, member: int, ids: list[int], start: int, **changes: Any) -> TrainSequence:
    """Tokens from `start` on are trained, with logprobs in the range of the random model's."""
    mask = np.arange(len(ids)) >= start
    rng = np.random.default_rng(member)
    values: dict[str, Any] = {
        "group_id": f"train-{group}",
        "rollout_id": f"train-{group}/{member}",
        "attempt": 0,
        "tip": 0,
        "token_ids": np.array(ids, np.int32),
        "mask": mask,
        "logprobs": np.where(mask, -rng.uniform(4, 12, len(ids)), 0.0).astype(np.float32),
        "lag": np.where(mask, member % 2, 0),
        "advantage": 1.0 - 0.6 * member,
        "temperature": 1.0,
    }
    return TrainSequence(**(values | changes))


def plan(seed: int, groups: int = 3, members: int = 4) -> list[TrainSequence]:
    """Groups with a common prompt; replies of unequal length over few ids, so that they fork."""
    rng, out = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = [1, 2, 3, *rng.integers(10, VOCAB_SIZE, 9).tolist()]
        for member in range(members):
            reply = rng.integers(4, 7, int(rng.integers(2, 7))).tolist()
            out.append(sequence(group, member, prompt + reply, len(prompt)))
    return out


def started(options: TrainerSettings, rank: int = 0, ranks: int = 1, meeting: str = "") -> Trainer:
    trainer = Trainer(options, rank, ranks, meeting or rendezvous())
    trainer.start()
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def rewind(trainer: Trainer, folder: Path) -> None:
    trainer.load(str(folder / "start"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer")
    tiny_tied_llama(path / "model")
    return path


@pytest.fixture(scope="module")
def shared_trainer(folder: Path) -> Iterator[Trainer]:
    trainer = started(settings(folder))
    trainer.save(str(folder / "start"))
    yield trainer
    trainer.close()


@pytest.fixture
def trainer(shared_trainer: Trainer, folder: Path) -> Trainer:
    """The one-rank trainer in its first state."""
    shared_trainer.settings = settings(folder)
    rewind(shared_trainer, folder)
    return shared_trainer


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Two fresh processes, one per rank."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        yield pool


@pytest.fixture(scope="module")
def plain(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def plain_logprobs(model: LlamaForCausalLM, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """log p of tokens 1.. by a forward of this sequence alone."""
    input_ids = torch.tensor(ids.astype(np.int64))
    logits_TV = model(input_ids[None], use_cache=False).logits[0, :-1] / temperature
    return logits_TV.log_softmax(-1).gather(1, input_ids[1:, None])[:, 0]


# -- the forward pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_packed_equals_plain_in_values_and_gradients(
    trainer: Trainer, plain: LlamaForCausalLM, share: bool, limit: int
) -> None:
    sequences = [replace(s, temperature=0.5 if i % 5 == 0 else 1.0) for i, s in enumerate(plan(1))]
    items = [
        Wanted(token_ids=s.token_ids, targets=np.flatnonzero(s.mask), temperature=s.temperature)
        for s in sequences
    ]
    plain.zero_grad()
    expected = torch.cat(
        [plain_logprobs(plain, s.token_ids, s.temperature)[s.mask[1:]] for s in sequences]
    )
    factor = torch.linspace(-1, 1, len(expected))
    (factor * expected).sum().backward()
    found = torch.zeros(len(expected))
    rows = pack(items, max_tokens=limit, share=share)
    for n, row in enumerate(rows):
        trainer.model.begin_backward(is_last=n == len(rows) - 1)
        slot_N = torch.from_numpy(row.slot_N)
        logprobs_N = trainer.model.logprobs(row)
        found[slot_N] = logprobs_N.detach()
        (factor[slot_N] * logprobs_N).sum().backward()
    assert (found - expected).abs().max() < 2e-5
    for name, parameter in plain.named_parameters():
        gradient = trainer.parameters[name].grad.full_tensor()
        scale = parameter.grad.abs().max()
        assert (gradient - parameter.grad).abs().max() < 1e-5 * max(1.0, float(scale)), name
    trainer.optimizer.zero_grad()


def test_score_is_the_plain_forward_and_sees_new_weights(
    trainer: Trainer, plain: LlamaForCausalLM
) -> None:
    sequences = [s.token_ids.tolist() for s in plan(2)] + [[5], []]
    scores = trainer.score(sequences)
    assert [len(s) for s in scores] == [max(len(ids) - 1, 0) for ids in sequences]
    for ids, score in zip(sequences[:-2], scores, strict=False):
        expected = plain_logprobs(plain, np.array(ids), 1.0).detach().numpy()
        assert score.dtype == np.float32
        assert np.abs(score - expected).max() < 1e-5
    trainer.perturb(0.05, seed=1)
    changed = trainer.score(sequences)
    assert max(np.abs(a - b).max() for a, b in zip(scores, changed, strict=True) if len(a)) > 1e-2
    trainer.restore()
    assert all((a == b).all() for a, b in zip(scores, trainer.score(sequences), strict=True))


def test_one_rank_is_sharded_by_fsdp2(trainer: Trainer) -> None:
    assert all(isinstance(p, DTensor) for p in trainer.parameters.values())
    sharded = [m for m in trainer.model.module.modules() if isinstance(m, FSDPModule)]
    assert len(sharded) == 2 + 1


# -- weights ---------------------------------------------------------------------------------------


def test_export_has_the_names_of_the_checkpoint_and_loads_into_transformers(
    trainer: Trainer, folder: Path
) -> None:
    trainer.execute(1, plan(3))
    exported = weights(trainer)
    on_disk = load_file(folder / "model" / "model.safetensors")
    assert exported.keys() == on_disk.keys()
    assert trainer.manifest() == [(n, "float32", tuple(t.shape)) for n, t in exported.items()]
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.load_state_dict(exported, strict=False)
    ids = plan(4)[0].token_ids
    expected = plain_logprobs(model, ids, 1.0).detach().numpy()
    assert np.abs(trainer.score([ids.tolist()])[0] - expected).max() < 1e-5
    assert not all(torch.equal(exported[name], on_disk[name]) for name in on_disk)


def test_perturb_and_restore_are_exact(trainer: Trainer) -> None:
    state, published = trainer.state_digest(), trainer.weights_digest()
    trainer.perturb(0.05, seed=3)
    once = trainer.weights_digest()
    trainer.perturb(0.05, seed=4)
    assert len({published, once, trainer.weights_digest()}) == 3
    trainer.restore()
    assert (trainer.state_digest(), trainer.weights_digest()) == (state, published)
    trainer.perturb(0.05, seed=3)
    assert trainer.weights_digest() == once
    trainer.restore()


# -- steps -----------------------------------------------------------------------------------------


def test_the_loss_is_the_formula_of_grpo(trainer: Trainer, plain: LlamaForCausalLM) -> None:
    sequences, losses, gaps = plan(5), [], []
    for s in sequences:
        new = plain_logprobs(plain, s.token_ids, 1.0).detach().numpy()[s.mask[1:]]
        gaps.append(new - s.logprobs[s.mask])
        losses.append(-np.minimum(np.exp(gaps[-1]), 2.0) * s.advantage)
    result = trainer.execute(1, sequences)
    assert result.loss == pytest.approx(float(np.concatenate(losses).mean()), abs=1e-5)
    assert (result.updates, result.n_tokens) == (1, len(np.concatenate(losses)))
    found = result.metrics["mismatch"]
    assert set(found) == {"all", "0", "1"}
    assert found["all"]["mean"] == pytest.approx(float(np.abs(np.concatenate(gaps)).mean()), 1e-4)
    assert result.metrics["packed_tokens"] < result.metrics["input_tokens"]
    ratios = np.exp(np.concatenate(gaps))
    assert result.metrics["is_clip_frac"] == pytest.approx(float((ratios > 2.0).mean()))
    assert result.metrics["ratio_mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)


def test_microbatches_and_sharing_do_not_change_the_update(trainer: Trainer, folder: Path) -> None:
    results, updated = [], []
    for changes in ({}, {"microbatch_tokens": 2000}, {"share_prefixes": False}):
        trainer.settings = settings(folder, **changes)
        rewind(trainer, folder)
        results.append(trainer.execute(1, plan(6)))
        updated.append(weights(trainer))
    for result, after in zip(results[1:], updated[1:], strict=True):
        assert result.loss == pytest.approx(results[0].loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
        assert_same_update(after, updated[0])


def assert_same_update(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Adam's first step divides by |g|, so an entry with g near 0 may go either way: count them."""
    for name in one:
        far = ((one[name] - other[name]).abs() > 1e-5).float().mean()
        assert far < 1e-3, name


def test_several_updates_use_the_logprobs_of_the_start(trainer: Trainer, folder: Path) -> None:
    changes = {"update_passes": 2, "mini_batches": 2, "clip_low": 0.2, "clip_high": 0.3}
    digests = []
    for _ in range(2):
        trainer.settings = settings(folder, **changes)
        rewind(trainer, folder)
        result = trainer.execute(1, plan(7))
        digests.append(result.state_digest)
    assert result.updates == 4
    rewind(trainer, folder)
    trainer.settings = settings(folder)
    single = trainer.execute(1, plan(7))
    found, expected = (r.metrics["mismatch"]["all"]["mean"] for r in (result, single))
    assert found == pytest.approx(expected, rel=1e-5)
    assert digests[0] == digests[1] != single.state_digest


def test_p12_no_trained_token_takes_no_step(trainer: Trainer) -> None:
    masks = [np.array([0, *row], bool) for row in P12["given"]["mask"]]
    sequences = [sequence(0, i, [4, 5, 6], 0, mask=mask) for i, mask in enumerate(masks)]
    before = trainer.weights_digest()
    for rows in (sequences, []):
        result = trainer.execute(1, rows)
        assert result.loss == P12["expected"]["loss"]
        assert (result.updates > 0) == P12["expected"]["step_taken"]
        assert (result.grad_norm, result.n_tokens) == (0.0, 0)
        assert result.metrics["empty_steps"] == 1
        json.dumps(result.metrics, allow_nan=False)
    assert trainer.weights_digest() == before


def test_a_loss_that_is_not_finite_takes_no_step(trainer: Trainer) -> None:
    before, sequences = trainer.state_digest(), plan(8)
    sequences[5] = replace(sequences[5], advantage=3e38, logprobs=sequences[5].logprobs * 9)
    name = sequences[5].rollout_id
    with pytest.raises(TrainerError, match=f"step 3, update 1: .*worst rollout {name}"):
        trainer.execute(3, sequences)
    assert trainer.state_digest() == before
    sequences[5] = replace(sequences[5], logprobs=np.full_like(sequences[5].logprobs, np.nan))
    with pytest.raises(TrainerError, match=f"step 3, rank 0: rollout {name} .* is nan"):
        trainer.execute(3, sequences)
    assert trainer.state_digest() == before
    assert trainer.execute(3, plan(8)).updates == 1


def test_what_cannot_run_is_refused_with_its_reason(folder: Path, trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="loss 'ppo'"):
        Trainer(settings(folder, loss="ppo"), 0, 1, "tcp://127.0.0.1:1")
    with pytest.raises(TrainerError, match="no .metadata; start from an older"):
        trainer.load(str(folder / "nothing"))
    trainer.save(str(folder / "torn"))
    with (folder / "torn" / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TrainerError, match="torn cannot be loaded: .*; start from an older"):
        trainer.load(str(folder / "torn"))


# -- other processes -------------------------------------------------------------------------------


def continue_alone(folder: Path) -> tuple[int, str, str]:
    """Resume from the checkpoint after step 2, execute step 3."""
    trainer = started(settings(folder))
    first = trainer.execute(1, plan(11)).state_digest
    step = trainer.load(str(folder / "step-2"))
    third = trainer.execute(3, plan(13)).state_digest
    trainer.close()
    return step, first, third


def test_a_fresh_process_reproduces_and_resumes_bit_for_bit(
    trainer: Trainer, folder: Path, processes: ProcessPoolExecutor
) -> None:
    first = trainer.execute(1, plan(11)).state_digest
    second = trainer.execute(2, plan(12)).state_digest
    files = trainer.save(str(folder / "step-2"))
    assert all((folder / "step-2" / name).stat().st_size == size for name, size in files)
    third = trainer.execute(3, plan(13)).state_digest
    assert trainer.load(str(folder / "step-2")) == 2
    assert trainer.state_digest() == second
    other = processes.submit(continue_alone, folder)
    assert other.result(timeout=120) == (2, first, third)


def two_ranks(rank: int, folder: Path, meeting: str, changes: dict[str, Any]) -> dict[str, Any]:
    """What one of two ranks sees: a step, P12 with an idle rank, a read error, a checkpoint."""
    options = settings(folder, **changes)
    trainer = started(options, rank, 2, meeting)
    mine = plan(6)[rank::2] if trainer.model.dp_size == 2 else plan(6)
    out: dict[str, Any] = {"result": trainer.execute(1, mine), "weights": weights(trainer)}
    out["manifest"] = trainer.manifest()
    out["all_sharded"] = all(isinstance(p, DTensor) for p in trainer.parameters.values())
    target = folder / f"two-{options.tp_size}-{options.dtype}"
    trainer.save(str(target))
    mask = np.array([0, *P12["given"]["ranks"][str(rank)][0]], bool)
    out["p12"] = trainer.execute(2, [sequence(0, 0, [4, 5, 6], 0, mask=mask)])
    try:
        trainer.execute(3, OSError("commit 17 is torn") if rank == 1 else mine)
    except TrainerError as error:
        out["error"] = str(error)
    out["restored"] = trainer.load(str(target)), trainer.state_digest()
    trainer.close()
    return out


def run_two(pool: ProcessPoolExecutor, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    meeting = rendezvous()
    futures = [pool.submit(two_ranks, rank, folder, meeting, changes) for rank in (0, 1)]
    return [future.result(timeout=120) for future in futures]


@pytest.fixture(scope="module")
def pair(processes: ProcessPoolExecutor, folder: Path) -> list[dict[str, Any]]:
    return run_two(processes, folder)


def test_two_ranks_make_the_update_of_one(trainer: Trainer, pair: list[dict[str, Any]]) -> None:
    alone = trainer.execute(1, plan(6))
    for out in pair:
        result = out["result"]
        assert result.loss == pytest.approx(alone.loss, abs=1e-6)
        assert result.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert result.n_tokens == alone.n_tokens
        assert_same_update(out["weights"], weights(trainer))
        assert out["all_sharded"]
        assert out["manifest"] == trainer.manifest()
    assert pair[0]["result"].state_digest == pair[1]["result"].state_digest != alone.state_digest
    assert pair[0]["restored"] == pair[1]["restored"] == (1, pair[0]["result"].state_digest)


def test_p12_a_rank_without_tokens_takes_part(pair: list[dict[str, Any]]) -> None:
    assert P12["expected"]["two_ranks"] == {
        "loss": "mean over the 1 trainable token",
        "hang": False,
    }
    one, other = (out["p12"] for out in pair)
    assert (one.loss, one.n_tokens, one.updates) == (other.loss, 1, 1)
    assert one.loss < 0.0


def test_a_rank_that_cannot_read_stops_all_before_the_forward(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["error"] == "step 3: 1 other rank(s) could not read their rows"
    assert pair[1]["error"] == "step 3, rank 1: commit 17 is torn"


def test_tensor_parallel_with_checkpointing_makes_the_same_update(
    trainer: Trainer, folder: Path, processes: ProcessPoolExecutor
) -> None:
    alone = trainer.execute(1, plan(6))
    outs = run_two(processes, folder, tp_size=2, activation_checkpointing=True)
    for out in outs:
        assert out["result"].loss == pytest.approx(alone.loss, abs=1e-5)
        assert out["result"].grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
        assert out["result"].n_tokens == alone.n_tokens
        assert_same_update(out["weights"], weights(trainer))


def options_alone(folder: Path) -> dict[str, Any]:
    """bfloat16 over float32 masters with everything that saves memory, and a KL penalty."""
    options = settings(
        folder,
        dtype="bfloat16",
        activation_checkpointing=True,
        cpu_offload=True,
        reshard_after_forward=True,
        kl_coef=0.1,
    )
    trainer = started(options)
    results = [trainer.execute(step, plan(6)) for step in (1, 2)]
    masters = {str(p.dtype) for p in trainer.parameters.values()}
    manifest = trainer.manifest()
    exported = {
        (n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in trainer.export()
    }
    trainer.close()
    return {
        "results": results,
        "masters": masters,
        "manifest": manifest,
        "exported": exported,
    }


def test_bfloat16_keeps_float32_masters_and_all_memory_options_run(
    trainer: Trainer, folder: Path, processes: ProcessPoolExecutor
) -> None:
    alone = trainer.execute(1, plan(6))
    out = processes.submit(options_alone, folder).result(timeout=120)
    first, second = out["results"]
    assert first.loss == pytest.approx(alone.loss, abs=0.05)
    assert second.updates == 1
    assert out["masters"] == {"torch.float32"}
    assert {dtype for _, dtype, _ in out["manifest"]} == {"bfloat16"}
    assert set(out["manifest"]) == out["exported"]


def refused(folder: Path, changes: dict[str, Any]) -> str:
    trainer = Trainer(settings(folder, **changes), 0, 1, rendezvous())
    try:
        trainer.start()
    except (ConfigError, TrainerError) as error:
        return str(error)
    finally:
        trainer.close()
    return "started"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_size": 2}, "cp_size=2: context parallelism needs"),
        ({"tp_size": 3}, "tp_size=3 does not divide the 1 trainer ranks"),
        ({"dtype": "float16"}, "dtype 'float16' is unknown"),
        ({"model": "missing/model"}, "model 'missing/model' cannot be loaded"),
    ],
)
def test_a_start_that_cannot_work_says_why(
    folder: Path, processes: ProcessPoolExecutor, changes: dict[str, Any], message: str
) -> None:
    found = processes.submit(refused, folder, changes).result(timeout=120)
    assert message in found

"""Configuration: defaults, overrides, and every kind of mistake named."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from molt.agents.env import resolve
from molt.config import LOSS_NAMES, changes, load, recorded_config, refuse_secrets
from molt.data import Prompts
from molt.model import resolve_model
from molt.schemas.errors import ConfigError
from molt.schemas.text import canonical_json

DEMO = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"


def test_the_demo_loads_and_overrides_apply() -> None:
    config = load(DEMO, ["train.lr=1e-6", "model=owner/name", "algo.max_lag=0", "run.dir=runs/x"])
    assert (config.train.lr, config.model, config.algo.max_lag) == (1e-6, "owner/name", 0)
    assert config.run.dir == "runs/x" and config.train.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "unknown configuration key 'train.learning_rate'"),
        ("algo.max_lagg=1", "did you mean 'max_lag'"),
        ("trian.lr=1", "did you mean 'train'"),
        ("run.steps=many", "'run.steps': Expected `int`, got `str`: 'many'"),
        ("run.steps=0", "at least 1"),
        ("train.dtype=bfloat16", "mixture"),
        ("run.steps", "expected a.b=value"),
        ("model.x=1", "is not a section"),
        ("algo.drop_equal=1", "'algo.drop_equal': Expected `bool`, got `int`"),
        ("sampling.temperature=0.001", "temperature"),
        ("sampling.max_tokens=0", "max_tokens"),
        ('train.betas=["a", 1]', "'train.betas\\[0\\]': Expected `float`"),
        ("train.betas=[0.9]", "'train.betas': Expected `array` of length 2"),
        ('reward.weights={score="much"}', "'reward.weights"),
        ("data=3", "'data' must be a section, got 3"),
        ("algo.loss=ppo", "algo.loss is 'ppo'"),
        ("engine.kv=keep", "engine.kv is 'keep'"),
        ("algo.advantage=gae", "algo.advantage is 'gae'"),
        ("agent.env=no_such_module:X", "agent.env"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(DEMO, [override])


OUT_OF_RANGE = """
train.grad_clip=inf train.lr=nan algo.kl_coef=inf train.betas=[0.9,nan] train.betas=[1.5,2.0]
train.betas=[0.9,1.0] train.eps=0 train.microbatch_tokens=0 train.world_size=0 train.tp_size=0
train.threads=0 engine.threads=0 engine.max_model_len=0 engine.max_num_seqs=0 run.stuck_s=0
run.stuck_s=-1 run.restarts_max=-1 agent.deadline_s=0 algo.kl_horizon=0 algo.clip_low=2
algo.clip_low=-0.1 algo.clip_high=-1 algo.is_cap=0 algo.is_cap=-1 sampling.top_p=0 sampling.top_p=2
sampling.top_k=-5 log.linger_s=-1 limits.noise=0
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *((text, rf"{text.split('=')[0]} is .*; must be") for text in OUT_OF_RANGE.split()),
        ("reward.weights={score=nan}", r"reward\.weights\.score is nan; must be a finite number"),
        ("data.train={'a:b'=inf}", r"data\.train\.a:b is inf"),
        ("engine.weight_transfer=mpi", "one of .*'gloo', 'nccl'"),
        ("agent.deadline_s=1800", "run.stuck_s 1800.*before a hung agent"),
        ("run.stuck_s=60", "agent.deadline_s is 120"),
        ("sampling.temperature=0", r"\[sampling\] has greedy: .*no token would be trained"),
        ("sampling.top_p=0.9", "has top_p"),
        ("sampling.top_k=20", "has top_k"),
        ("sampling.min_p=0.1", "has min_p"),
    ],
)
def test_values_that_cannot_work_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(DEMO, [override])


@pytest.mark.parametrize("override", [*OUT_OF_RANGE.split(), "algo.loss=ppo", "algo={is_cap=-1}"])
def test_what_is_set_over_a_recorded_configuration_is_checked_too(override: str) -> None:
    epoch = {"config": canonical_json(asdict(load(DEMO)))}
    with pytest.raises(ConfigError, match="must be|one of"):
        recorded_config(epoch, [override])


def test_what_a_log_has_recorded_is_taken_as_it_is() -> None:
    """An older version may have allowed more; only what is set anew is refused."""
    recorded = json.loads(canonical_json(asdict(load(DEMO))))
    recorded["agent"]["deadline_s"], recorded["train"]["lr"] = -1, -1e-5
    found = recorded_config({"config": canonical_json(recorded)}, ["algo.loss=cispo"])
    assert found.agent.deadline_s == -1 and found.algo.loss == "cispo"


@pytest.mark.parametrize("recipe", sorted(DEMO.parent.glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_is_valid(recipe: Path) -> None:
    load(recipe, ["algo.clip_low=1", "algo.clip_high=0.2", "train.weight_decay=0", "train.lr=0"])


def test_kept_kv_and_recorded_experts_exclude_each_other() -> None:
    assert load(DEMO, ["engine.kv=kept"]).engine.kv == "kept"
    with pytest.raises(ConfigError, match=r"engine\.kv .*train\.routing is 'freeze'"):
        load(DEMO, ["engine.kv=kept", "train.routing=freeze"])


def test_none_is_a_value_only_where_a_number_may_be_missing() -> None:
    config = load(DEMO, ["algo.is_cap=none", "log.retire=none"])
    assert config.algo.is_cap is None and config.log.retire == "none"


def test_the_names_of_losses_are_those_that_exist() -> None:
    algo = pytest.importorskip("molt.train.algo", reason="needs torch")
    assert set(algo.LOSSES) == LOSS_NAMES


def test_a_missing_file_and_bad_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(tmp_path / "bad.toml")
    (tmp_path / "part.toml").write_text('model = "x"')
    with pytest.raises(ConfigError, match=r"'run\.dir'"):
        load(tmp_path / "part.toml")


def test_prompts_are_a_function_of_seed_and_ordinal() -> None:
    data = load(DEMO).data
    a, b = Prompts(data, seed=1), Prompts(data, seed=1)
    ordinals = [0, 5, a.size - 1, a.size, 3 * a.size + 2]
    assert [a.train(k) for k in ordinals] == [b.train(k) for k in reversed(ordinals)][::-1]
    one_pass = [a.train(k) for k in range(a.size)]
    assert sorted(map(str, one_pass)) == sorted(str(a.train(a.size + k)) for k in range(a.size))
    assert one_pass != [Prompts(data, seed=2).train(k) for k in range(a.size)]


def test_held_out_pairs_are_held_out_in_both_orders() -> None:
    prompts = Prompts(load(DEMO).data, seed=0)
    trained = {frozenset((p["x"], p["y"])) for p in map(prompts.train, range(prompts.size))}
    held_out = {frozenset((p["x"], p["y"])) for p in prompts.heldout}
    assert len(prompts.heldout) > 100 and not trained & held_out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_colon", "expected 'package.module:name'"),
        ("no_such_module:x", "No module named"),
        ("molt.recipes.addition:Nope", "has no 'Nope'"),
        ("molt.recipes.addition:LOW", "cannot be called"),
    ],
)
def test_unresolvable_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, "agent.env")


@pytest.mark.parametrize("spec", ["/no/such/folder", "./nowhere", "not-a-model"])
def test_a_missing_model_is_named(spec: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(spec)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_secrets_are_refused_whatever_the_key_is_called(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        DEMO.read_text() + '\n[reward.weights]\napi_key = "sk-plain"\n'
    )
    with pytest.raises(ConfigError, match=r"reward\.weights\.api_key: a secret") as error:
        load(tmp_path / "run.toml")
    assert "sk-plain" not in str(error.value)
    with pytest.raises(ConfigError, match=r"agent\.auth_token: a secret"):
        load(DEMO, ["agent.auth_token=abc"])
    refuse_secrets({"max_tokens": "5", "tokenizer": "x"})


def test_a_key_younger_than_the_log_had_its_default() -> None:
    tree = asdict(load(DEMO))
    del tree["train"]["routing"]
    old = {"config": canonical_json(tree)}
    assert changes(old, load(DEMO)) == {}
    assert changes(old, load(DEMO, ["train.routing=replay", "train.lr=1"])) == {
        "train.lr": (2e-5, 1.0),
        "train.routing": ("off", "replay"),
    }

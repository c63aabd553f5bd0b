"""Groups to plans: membership, rewards, baseline, lag. Pure functions of the fold and the config.

A closed group becomes rows of one plan, or is dropped with a reason; nothing is decided twice (I4).
Group statistics are over rollouts, whatever the number of their branches.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from molt.config import AlgoConfig, Config, RewardConfig
from molt.replay.lag import decide
from molt.replay.select import REWARD_MAX
from molt.schemas.columns import Row
from molt.schemas.records import PlanBranch, PlanRow, Ref
from molt.store.fold import Attempt, Fold, Group
from molt.train.advantages import advantages, zero_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A group that is settled without a step."""

    group_id: str
    rollout_id: str | None
    reason: str


def groups_to_issue(*, planned: int, version: int, unsettled: int, config: Config) -> int:
    """How many more groups may be played without exceeding `max_lag` (backpressure).

    A group issued now trains at the earliest in step `planned + 1 + unsettled // groups_per_step`
    on tokens of `version`; its lag then is that step - 1 - version. Drops settle at once, so what
    filters take away is asked for again.
    """
    per_step = config.data.groups_per_step
    steps_ahead = version + config.algo.max_lag - planned + 1
    remaining = (config.run.steps - planned) * per_step
    return max(0, min(steps_ahead * per_step, remaining) - unsettled)


def reward_of(attempt: Attempt, config: RewardConfig) -> tuple[float | None, tuple[Ref, ...]]:
    """The rollout's scalar and the rows it was made of; None if a part cannot be scored.

    A part that counts nothing need not be scored; a scalar above `REWARD_MAX` cannot be trained on.
    """
    total, refs = 0.0, []
    for (segment, token, name), (_, value, ref) in sorted(
        attempt.rewards.items(), key=lambda item: str(item[0])
    ):
        if (segment is not None or token is not None) and not config.sum_turns:
            continue
        weight = config.weights.get(name, 1.0)
        if value is None and weight == 0.0:
            continue
        refs.append(ref)
        if value is None:
            return None, tuple(refs)
        total += weight * value
    return (total if refs and abs(total) <= REWARD_MAX else None), tuple(refs)


def lag_max(attempt: Attempt, step: int) -> int | None:
    """Largest lag of a sampled token of this attempt at `step`; None without sampled tokens."""
    versions = [v.version for v in attempt.versions()]
    return (step - 1) - min(versions) if versions else None


def finished(fold: Fold, group: Group) -> list[Attempt]:
    """The attempts that count, of the group's rollouts that are finished."""
    found = (fold.finished(group, rollout_id) for rollout_id in group.rollout_ids())
    return [attempt for attempt in found if attempt is not None]


def oldest_version(fold: Fold, group: Group, default: int) -> int:
    """The oldest version that sampled a token of this group: of each rollout the attempt that
    counts, or until there is one the newest of the lineage, whose tokens a resumed one begins with.
    One that waits for its reward alone is no reason for others to wait.
    """
    found = finished(fold, group)
    for rollout_id in {*group.rollout_ids()} - {a.rollout_id for a in found}:
        known = group.attempts.get(rollout_id, {})
        newest = [a for _, a in sorted(known.items()) if fold.in_lineage(a)][-1:]
        found += [a for a in newest if not a.is_unscored()]
    return min((v.version for a in found for v in a.versions()), default=default)


def progress(fold: Fold, group: Group, max_tokens: int) -> float:
    """Share of the group's token budget that is sampled; a finished rollout has used all of its."""
    done = 0.0
    for rollout_id in group.rollout_ids():
        if fold.finished(group, rollout_id) is not None:
            done += 1.0
        elif attempts := group.attempts.get(rollout_id):
            done += min(1.0, attempts[max(attempts)].n_sampled / max_tokens)
    return done / group.n


def plan_group(fold: Fold, group: Group, step: int, config: Config) -> list[PlanRow] | Drop:
    """The plan rows of a closed group, or the one drop that settles it."""
    attempts = finished(fold, group)
    assert len(attempts) == group.n, f"{group.group_id} is not closed"
    scored = [reward_of(a, config.reward) for a in attempts]
    rewards = [
        None if excluded(a) else reward for a, (reward, _) in zip(attempts, scored, strict=True)
    ]
    reason = _drop_reason(attempts, rewards, step, config.algo)
    if reason:
        return Drop(group_id=group.group_id, rollout_id=None, reason=reason)
    in_baseline = [r is not None for r in rewards]
    values = advantages(
        rewards, in_baseline, config.algo.advantage, std_normalize=config.algo.std_normalize
    )
    return [
        _plan_row(group, a, step, reward, refs, member, value, config.algo)
        for a, reward, (_, refs), member, value in zip(
            attempts, rewards, scored, in_baseline, values, strict=True
        )
    ]


def waiting_for_rewards(fold: Fold, group: Group) -> list[Attempt]:
    """The attempts of a group that waits for nothing but rewards; [] of any other one."""
    found = []
    for rollout_id in group.rollout_ids():
        attempt = fold.finished(group, rollout_id)
        if attempt is None and (own := group.attempts.get(rollout_id)):
            newest = own[max(own)]
            attempt = newest if newest.is_unscored() and fold.in_lineage(newest) else None
        if attempt is None:
            return []
        found.append(attempt)
    return found


def too_old(attempts: Sequence[Attempt], step: int, algo: AlgoConfig) -> bool:
    """True if the lag of one of a group's attempts rules the group out at `step`."""
    return any(decide(lag_max(a, step), algo.max_lag, algo.lag) == "drop" for a in attempts)


def excluded(attempt: Attempt) -> str | None:
    """Why a rollout that has ended is not in the baseline, whatever its rewards; None if it is."""
    if attempt.dropped is not None:
        return f"dropped: {attempt.dropped}"
    if attempt.conflict or attempt.outcome is None:
        return "conflict"
    if attempt.outcome["status"] in ("failed", "aborted"):
        return str(attempt.outcome["reason"])
    return None if attempt.is_whole() else "the segments are not those of the outcome"


def _drop_reason(
    attempts: Sequence[Attempt], rewards: Sequence[float | None], step: int, algo: AlgoConfig
) -> str | None:
    known = [r for r in rewards if r is not None]
    if not known:
        unscored = f"a part is missing, null or above {REWARD_MAX:g}"
        reasons = Counter(
            excluded(a) or (a.outcome or {}).get("reason") or unscored for a in attempts
        )
        return f"no reward: {reasons.most_common(1)[0][0]}"
    if too_old(attempts, step, algo):
        return "lag"
    if algo.drop_equal and zero_variance(known):
        return f"equal rewards: {known[0]:g}"
    return None


def _plan_row(
    group: Group,
    attempt: Attempt,
    step: int,
    reward: float | None,
    reward_refs: tuple[Ref, ...],
    in_baseline: bool,
    advantage: float,
    algo: AlgoConfig,
) -> PlanRow:
    trains = in_baseline and attempt.n_train > 0
    lag = lag_max(attempt, step)
    branches = (
        PlanBranch(
            tip=b.tip,
            refs=(*(attempt.segments[p.segment].ref for p in b.pieces), *attempt.routing),
        )
        for b in attempt.branches()
    )
    return PlanRow(
        group_id=group.group_id,
        rollout_id=attempt.rollout_id,
        attempt=attempt.attempt,
        branches=tuple(branches) if attempt.n_sampled else (),
        reward=reward,
        reward_refs=reward_refs,
        in_baseline=in_baseline,
        advantage=advantage if in_baseline else 0.0,
        lag_max=lag,
        decision=decide(lag, algo.max_lag, algo.lag) if trains else "baseline_only",
        chain_digest=attempt.chain_digest(),
    )


def algorithm_header(config: Config) -> Row:
    """The keys of a plan's header that follow from the algorithm's settings."""
    algo = config.algo
    return {
        "seed": config.run.seed,
        "algorithm": f"{algo.advantage}/{algo.loss}",
        "update_passes": algo.update_passes,
        "mini_batches": algo.mini_batches,
    }


def plan_header(config: Config, step: int) -> Row:
    """A plan's header, but for its epoch."""
    own = {"step": step, "data_pass": 0, **algorithm_header(config)}
    return {**own, "max_lag": config.algo.max_lag}

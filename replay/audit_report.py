"""What an audit has found so far: counts of what was checked, and every violation by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from molt.schemas.columns import Row

VIOLATIONS_KEPT = 1000
"""Violations beyond this number are counted, not listed."""


@dataclass(slots=True)
class Report:
    """What an audit has found so far."""

    progress: Callable[[int, int, str], None]
    checked: dict[str, int] = field(default_factory=lambda: {f"I{i}": 0 for i in range(1, 8)})
    """By invariant: I1 segments, I2 sampled tokens, I3 measured gaps, I4 settled rollouts,
    I5 ordinals, I6 commits, I7 policies."""
    violations: list[Row] = field(default_factory=list)
    n_violations: int = 0
    retired: int = 0
    """Rows and commits that retention removed: they cannot be checked, and that is no violation."""
    invisible: int = 0
    tokens: int = 0

    def violation(
        self,
        invariant: str,
        why: str,
        *,
        rollout: str | None = None,
        segment: int | None = None,
        token: int | None = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        self.n_violations += 1
        if len(self.violations) < VIOLATIONS_KEPT:
            named = {"rollout": rollout, "segment": segment, "token": token}
            values = {"expected": plain(expected), "found": plain(found)}
            self.violations.append({"invariant": invariant, **named, **values, "why": why})

    def differ(self, invariant: str, why: str, expected: Any, found: Any, **named: Any) -> bool:
        """Report unless both are equal (floats: to rounding); True if they differ."""
        same = expected == found
        if isinstance(expected, float) and isinstance(found, float):
            same = math.isclose(expected, found, rel_tol=1e-9, abs_tol=1e-12)
        if not same:
            self.violation(invariant, why, expected=expected, found=found, **named)
        return not same

    def to_json(self) -> Row:
        names = ("checked", "violations", "n_violations", "retired", "invisible", "tokens")
        return {"ok": not self.n_violations, **{name: getattr(self, name) for name in names}}


def plain(value: Any) -> Any:
    """A JSON value: bytes as hex, numpy scalars as numbers."""
    if isinstance(value, bytes):
        return value.hex()
    return value.item() if hasattr(value, "item") else value

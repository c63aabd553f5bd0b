"""Markdown tables, and the list of targets that are met or not."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(map(text, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def text(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


@dataclass
class Report:
    parts: list[str] = field(default_factory=list)
    targets: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, title: str, body: str, *notes: str) -> None:
        self.parts += [f"## {title}\n", body, *(f"{note}\n" for note in notes)]
        print(f"\n{title}\n\n{body}", file=sys.stderr, flush=True)

    def target(self, what: str, measured: float, limit: float, *, most: bool = False) -> None:
        """`most`: the limit is an upper one."""
        met = measured <= limit if most else measured >= limit
        sign = "<=" if most else ">="
        self.targets.append(
            (what, text(measured), f"{sign} {limit:g}", "met" if met else "not met")
        )

    def markdown(self, head: str) -> str:
        targets = table(["what", "measured", "target", ""], self.targets)
        return "\n".join([head, "## Targets\n", targets, *self.parts])

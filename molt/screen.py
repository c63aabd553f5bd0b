"""What the person at the terminal sees: phases with elapsed time, one bar for the steps.

Everything goes to stderr. On a terminal the running phase has a spinner and steps move a bar; in a
file or CI each is a line, and a heartbeat line comes when nothing was printed for a while.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

QUIET_S_MAX = 8.0
"""No silence longer than this, give or take a tick."""


class Screen:
    """Prints what happens; use as a context manager so that the bar is taken down again."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.started = time.monotonic()
        self._last_print = self.started
        self._doing = "starting"
        self._over = threading.Event()
        self._bar: Progress | None = None
        self._task: Any = None
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Screen":
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line, with the time since the start."""
        self._last_print = time.monotonic()
        self.console.print(f"[{self._last_print - self.started:6.1f} s] {text}", markup=False)

    def finish(self) -> None:
        """Take the bar down: what follows is the end's table."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def doing(self, text: str) -> None:
        """What the heartbeat says from now on."""
        self._doing = text

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Announce a phase, and its duration when it ends well."""
        outer, self._doing = self._doing, text
        started = time.monotonic()
        self.say(f"{text} ...")
        try:
            yield
            self.say(f"{text}: done in {time.monotonic() - started:.1f} s")
        finally:
            self._doing = outer

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """One finished step: reward, lag, trained tokens per second of the whole loop."""
        reward = metrics["reward"]
        whole = sum(s for s in metrics["seconds"].values() if not isinstance(s, dict))
        tokens_per_s = metrics["tokens"] / max(whole, 1e-9)
        text = (
            f"reward {'-' if reward is None else format(reward, '.3f')}  "
            f"lag {'-' if metrics['lag_max'] is None else metrics['lag_max']}  "
            f"{tokens_per_s:.0f} tokens/s"
        )
        if not self.console.is_terminal:
            self.say(f"step {step}/{steps}  {text}")
            return
        if self._bar is None:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task("steps", total=steps, text=text)
            self._bar.start()
        self._bar.update(self._task, completed=step, text=text)

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            quiet = time.monotonic() - self._last_print
            if quiet >= QUIET_S_MAX and (self._bar is None or not self.console.is_terminal):
                self.say(f"  still at: {self._doing}")


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
    )

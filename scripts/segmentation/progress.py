"""How far the demo is: a bar on a terminal, and lines elsewhere."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

INTERVAL = 10.0
"""Seconds between lines. A line also waits for the end of a step, so somebody may have to wait twice as long."""


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


class Progress:
    """Tells about the steps of several nets, whose steps take different times.

    ``expected`` is the seconds that all steps will take, as far as is known before them. Only one of several processes
    is ``shown``.
    """

    def __init__(
        self,
        steps: int,
        expected: float,
        shown: bool,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._expected, self._done = expected, 0.0
        self._shown, self._interval, self._clock = shown, interval, clock
        self._began = self._told = clock()
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        # tqdm's own estimate takes all steps for equally long. The text comes last, where a narrow terminal cuts it.
        self._bar = tqdm(
            total=steps, disable=not (shown and terminal), bar_format="{percentage:3.0f}%|{bar:10}| {desc}"
        )

    @property
    def left(self) -> float:
        """The seconds that the steps to come will take, if they are as much slower than expected as those so far."""
        pace = (self._clock() - self._began) / self._done if self._done else 1.0
        return pace * (self._expected - self._done)

    def step(self, expected: float, text: str) -> None:
        """Counts a step that was expected to take so many seconds. ``text`` says which it was, and what came of it."""
        self._done += expected
        text = f"about {duration(self.left)} left: {text}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update()
        now = self._clock()
        if self._bar.disable and now - self._told >= self._interval:
            self.write(text)
            self._told = now

    def write(self, text: str) -> None:
        """Prints a line at once, above the bar if there is one."""
        if self._shown:
            self._bar.write(text)
            # What goes to a file or a pipe would wait for more.
            sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()

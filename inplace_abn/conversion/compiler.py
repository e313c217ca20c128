"""Pauses compilers while a model is watched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch


class _Compiler:
    """Makes compiled code of all threads run as it is written while any thread watches, so that the watch sees it.

    Compilers do nothing under a dispatch mode, which is an error where a full graph is asked for.
    """

    def __init__(self) -> None:
        self._lock, self._watches, self._stance = threading.Lock(), 0, ExitStack()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.go_on()

    def pause(self) -> None:
        with self._lock:
            self._watches += 1
            if self._watches == 1 and "torch._dynamo" in sys.modules:
                # Between two compiled graphs the compiler is at work, and cannot be paused.
                with suppress(RuntimeError):
                    self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def go_on(self) -> None:
        with self._lock:
            self._watches -= 1
            if self._watches == 0:
                self._stance.close()


_compiler = _Compiler()
pause, go_on, paused = _compiler.pause, _compiler.go_on, _compiler.paused

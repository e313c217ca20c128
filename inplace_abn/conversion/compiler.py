"""Pauses compilers while a model is watched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

_lock, _stance = threading.Lock(), ExitStack()
_watches = 0


@contextmanager
def paused() -> Iterator[None]:
    """Makes compiled code of all threads run as it is written while any thread watches, so that the watch sees it.

    Compilers do nothing under a dispatch mode, which is an error where a full graph is asked for.
    """
    global _watches
    with _lock:
        _watches += 1
        if _watches == 1 and "torch._dynamo" in sys.modules:
            # Between two compiled graphs the compiler is at work, and cannot be paused.
            with suppress(RuntimeError):
                _stance.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _watches -= 1
            if _watches == 0:
                _stance.close()

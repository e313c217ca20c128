"""What is the same in a checkpoint's recomputation as in its forward pass, so that both save the same tensors.

These are checkpoints that are not reentrant. A reentrant one saves nothing in its forward pass.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from inplace_abn import _torch

_T = TypeVar("_T")

_known: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""What was true in the forward pass of each checkpoint."""


def _of_this() -> dict[str, Any] | None:
    """What was known of the checkpoint whose forward pass or recomputation runs; None outside of checkpoints."""
    hooks = _torch.top_saved_tensors_hooks(True)
    checkpoint = None if hooks is None else _torch.checkpoint_of(hooks)
    return None if checkpoint is None else _known.setdefault(checkpoint, {})


def of_forward_pass(name: str, value: _T) -> _T:
    """What is true now; in a checkpoint what was true at the first question of its forward pass."""
    known = _of_this()
    found: _T = value if known is None else known.setdefault(name, value)
    return found


def happened_in_forward_pass(name: str) -> bool:
    """Whether this, which happens now, has happened in the forward pass, if a checkpoint computes it again."""
    known = _of_this()
    return known is None or bool(known.setdefault(name, not _torch.in_backward()))


def are_selective() -> bool:
    """Whether selective checkpointing keeps results of ops. Checkpoints within it are recomputed outside of it."""
    return of_forward_pass("selective", _torch.count_dispatch_modes() > 0 and _torch.is_checkpointed_selectively())


def are_seen() -> bool:
    """Whether a foreign dispatch mode, a tracer or a transform sees the ops that run.

    A mode may be active in the forward pass of a checkpoint, and not in its recomputation, or the other way around.
    """
    return of_forward_pass("seen", _torch.is_in_foreign_mode()) or _torch.is_transformed()

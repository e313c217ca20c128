"""The optional graph node in C++. It does the same as the node in Python, in less time per call.

A build from source makes the module ``_node`` for its own torch and Python. The wheel has a library of torch ops for
each release of torch, which serves every Python. ``INPLACE_ABN_NODE=0`` in the environment turns the node off.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inplace_abn import _torch

_FOLDER = Path(__file__).parents[1]
_MODULE = "inplace_abn._node"
_UNSEEN = ("activation_alone", "norm", "norm_rows", "activate")
"""Those that take calls over, and return None if the call needs Python."""

Counts = tuple[int, int]
"""References to a gradient that Python has seen, from Python and from C++."""


class Node(NamedTuple):
    """The functions of the node. Those that take a call over return None or False, and have done nothing, if the call
    needs Python."""

    inplace_abn: Callable[..., Any]
    """`nodes.in_cpp`. It does not check whether the op that made ``x`` needs its result."""
    attached: Callable[..., Any]
    """`nodes.attached`."""
    activation_alone: Callable[..., Any]
    """The call of `conversion.activations`."""
    norm: Callable[..., Any]
    """A converted norm's call (``src/node/norm.h``)."""
    norm_rows: Callable[..., Any]
    """The same for a layer norm."""
    attach_norm: Callable[..., bool]
    """`native.attached`."""
    keep: Callable[..., bool]
    """Makes the node of a norm's output keep the output, or a sum."""
    keep_as: Callable[..., None]
    """The same for a call that Python has decided about."""
    activate: Callable[..., Any]
    """The activation of a norm's output, or of a sum."""
    parts: Callable[..., Any]
    """What the norm was called with that made an output."""
    set_sole_holders: Callable[[Counts | None, int | None], None]
    """Sets the counts at which backward is the only holder of a gradient, and of a saved output's storage. Until they
    are set, no graph is built."""
    last_counts: Callable[[], tuple[Counts | None, int | None]]
    """The counts that the calling thread's last backward saw; None for a gradient that only the engine refers to."""


def load() -> Node | None:
    """The node; None if there is none for this torch, which is logged."""
    if os.environ.get("INPLACE_ABN_NODE") == "0":
        return None
    try:
        return _of_source() if importlib.util.find_spec(_MODULE) is not None else _of_wheel()
    except (ImportError, OSError) as error:
        logging.getLogger("inplace_abn").info(
            "graph nodes are made in Python: the C++ node cannot be loaded (%s)", error
        )
        return None


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _of_source() -> Node:
    module = importlib.import_module(_MODULE)
    # Another release's node would load, and then do anything.
    if _release(module.torch_version) != _release(torch.__version__):
        raise ImportError(f"it was built for torch {module.torch_version}, this is {torch.__version__}")
    return Node(**{name: getattr(module, name) for name in Node._fields})


def _of_wheel() -> Node:
    library = _FOLDER / f"_node_{'_'.join(_release(torch.__version__))}.so"
    if not library.exists():
        there = [".".join(path.stem.split("_")[2:]) for path in sorted(_FOLDER.glob("_node_*.so"))]
        raise ImportError(f"there is none for torch {torch.__version__}, but for {', '.join(there) or 'no other'}")
    torch.ops.load_library(str(library))
    ops = torch.ops.inplace_abn_node

    def set_sole_holders(gradient: Counts | None, output: int | None) -> None:
        ops.set_sole_holders(list(gradient or ()), output)

    def last_counts() -> tuple[Counts | None, int | None]:
        gradient, output = ops.last_counts()
        return (gradient[0], gradient[1]) if gradient else None, output

    made: dict[str, Any] = {"set_sole_holders": set_sole_holders, "last_counts": last_counts}
    # The others are torch ops of the same signature.
    called = {name: _torch.builtin_of(getattr(ops, name).default) for name in Node._fields if name not in made}
    for name in _UNSEEN:
        called[name] = _unless_traced(called[name])
    return Node(**called, **made)


def _unless_traced(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op; it refuses where torch.jit.trace would record this one, and not what it does.

    Modes and transforms do not see the op, which itself refuses there.
    """
    tracing_state = _torch.tracing_state

    def call(*args: Any) -> Any:
        return op(*args) if tracing_state() is None else None

    return call

"""The optional graph node in C++. It does the same as the node in Python, in less time per call.

``INPLACE_ABN_NODE=0`` in the environment turns it off.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType

import torch


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def load() -> ModuleType | None:
    """The compiled module; None if there is none for this torch, which is logged."""
    if os.environ.get("INPLACE_ABN_NODE") == "0":
        return None
    logger = logging.getLogger("inplace_abn")
    try:
        _node = importlib.import_module("inplace_abn._node")
    except ImportError as error:
        logger.info("graph nodes are made in Python: the C++ node cannot be loaded (%s)", error)
        return None
    if _release(_node.torch_version) != _release(torch.__version__):
        logger.info(
            "graph nodes are made in Python: the C++ node was built for torch %s, this is %s",
            _node.torch_version,
            torch.__version__,
        )
        return None
    return _node

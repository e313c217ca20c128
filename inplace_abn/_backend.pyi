"""Autograd in C++, above the ops ``torch.ops.inplace_abn.*`` (see ``ops.py``)."""

from typing import ClassVar

from torch import Tensor

torch_version: str
"""The torch it was built for."""

class Activation:
    __members__: ClassVar[dict[str, Activation]]
    name: str
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...

class Watch:
    """Watches an output of the in-place op for later writes to it."""

    def __init__(self) -> None: ...
    def start(self, output: Tensor) -> None:
        """To be called once ``output`` is in the graph."""
    def check_unmodified(self, unpacked: Tensor | None) -> None:
        """Raises RuntimeError if the output was written to. ``unpacked`` is what saved-tensor hooks made of it, which
        may be a copy made in time, or the output itself."""

def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    momentum_tensor: Tensor | None,
    eps: float,
    signed_weight: bool,
    activation: int,
    activation_param: float,
) -> Tensor:
    """`functions.inplace_abn` in eager mode. Without running statistics it is training."""

def check_producer(x: Tensor) -> None:
    """Raises RuntimeError if the node that made ``x``, or what it is a view of, saved its result."""

def set_sole_holders(gradients: list[tuple[int, int, int]], output_storage: int | None) -> None:
    """The `holders` of gradients, and the references to a saved output's storage, that leave C++'s backward alone with
    them."""

def last_observed() -> tuple[tuple[int, int, int] | None, int | None]:
    """What the calling thread's last backward in C++ saw of both."""

def observe_gradient(output: Tensor) -> None:
    """Has the node of ``output`` observe the holders of its gradient. Before anyone else can hook the node."""

def holders(tensor: Tensor) -> tuple[int, int, int] | None:
    """References to ``tensor`` from Python (0: it has never been there, 1: none is left, 2: there are some), from C++,
    and to its storage. None where the memory cannot have one owner."""

def gradient_holders(gradient: Tensor) -> tuple[int, int, int] | None:
    """The `holders` that ``gradient`` had just before the calling backward was given it."""

def check_transforms(tensor: Tensor | None) -> None:
    """Raises ValueError for a tensor under vmap or forward-mode differentiation."""

def check_call(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    requires_grad: bool,
) -> None:
    """Raises ValueError or TypeError for tensors that do not fit, or an ``x`` that must not be overwritten."""

def set_input_edge(tensor: Tensor, output: Tensor) -> None:
    """Gives ``tensor`` the graph edge of the first input of the node that made ``output``."""

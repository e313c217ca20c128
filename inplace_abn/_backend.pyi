"""The compiled module. Importing it registers the ops ``torch.ops.inplace_abn.*`` (see ``ops.py``)."""

from typing import ClassVar

from torch import Tensor

torch_version: str
"""The torch it was built for."""
with_cuda: bool
"""Whether it holds the CUDA backend."""

class Activation:
    __members__: ClassVar[dict[str, Activation]]
    def __int__(self) -> int: ...

class Version:
    """The state of a tensor's content."""

    def __init__(self, tensor: Tensor) -> None: ...
    then: int
    def changed(self) -> bool:
        """Whether the tensor has been written to since."""

def check_transforms(tensor: Tensor | None) -> None:
    """Raises ValueError for a tensor under vmap or forward-mode differentiation."""

def holders(tensor: Tensor) -> tuple[int, int, int]:
    """References to ``tensor`` from Python, from C++, and from C++ to its storage; zeros where they mean nothing."""

def is_sole_owner(tensor: Tensor, sole: tuple[int, int, int] | None) -> bool:
    """Whether ``tensor`` is dense and has just the holders ``sole``, as observed on a tensor nobody else held."""

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

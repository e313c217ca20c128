"""The compiled module. Importing it registers the ops ``torch.ops.inplace_abn.*`` (see ``ops.py``)."""

from typing import ClassVar

from torch import Tensor

torch_version: str
"""The torch it was built for."""
with_openmp: bool
"""Whether CPU kernels use torch's threads."""
with_cuda: bool
"""Whether it holds the CUDA backend."""

class Activation:
    __members__: ClassVar[dict[str, Activation]]
    def __int__(self) -> int: ...

class Watch:
    """Watches an output of the in-place op: later writes to it, and the holders of the gradient that comes back."""

    def __init__(self) -> None: ...
    def start(self, output: Tensor) -> None:
        """To be called once ``output`` is in the graph, before anyone else can hook it."""
    def is_modified(self) -> bool:
        """Whether the output has been written to since."""
    version: int
    """The output's version at the start."""

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

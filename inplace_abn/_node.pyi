"""The graph node of the local in-place op in C++ (``src/node``)."""

from torch import Tensor

torch_version: str
"""The torch it was built for."""

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
    """`functions.inplace_abn` of tensors that autograd lets be overwritten."""

def set_sole_output(references: int | None) -> None:
    """The references to a saved output's storage that leave backward alone with it. Until they are set, no output is
    reused."""

def observed_output() -> int:
    """The references that the calling thread's last backward saw."""

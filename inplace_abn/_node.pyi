"""The graph node of the local in-place op in C++ (``src/node``)."""

from torch import Tensor

torch_version: str
"""The version of torch that the module was built for."""

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
    per_instance: bool,
) -> Tensor | None:
    """`functions.local`. Returns None, and does nothing, if the call needs Python.

    It does not check whether the op that made ``x`` needs its result.
    """

def attached(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    training: bool,
    eps: float,
    signed_weight: bool,
    activation: int,
    activation_param: float,
    per_instance: bool,
    stand_in: Tensor | None,
) -> Tensor | None:
    """`functions.attached`. Returns None, and does nothing, if the call needs Python."""

def set_sole_holders(gradient: tuple[int, int, int] | None, output: int | None) -> None:
    """Sets the counts at which backward is the only holder of a gradient, and of a saved output.

    Until they are set, no graph is built.

    Args:
        gradient: references to a gradient that Python has seen: from Python, from C++ before a reference from Python
            was made to count them, and from C++ after that.
        output: references to a saved output's storage.
    """

def last_counts() -> tuple[tuple[int, int, int] | None, int]:
    """The counts that the calling thread's last backward saw; None for a gradient that only the engine refers to."""

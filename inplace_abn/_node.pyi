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
    per_instance: bool,
) -> Tensor | None:
    """`functions.local`, or None, with nothing done, where the call is one that Python has to look at. Whether
    the producer of ``x`` needs its result is not looked at."""

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
    """`functions.attached`, or None, with nothing done, where the call is one that Python has to look at."""

def set_sole_holders(gradient: tuple[int, int, int] | None, output: int | None) -> None:
    """The references to a gradient that Python has seen (from Python; from C++, before and after one from Python was
    made to ask), and those to a saved output's storage, that leave backward alone with them. Until they are set,
    no graph is built."""

def last_observed() -> tuple[tuple[int, int, int] | None, int]:
    """What the calling thread's last backward saw: None for a gradient that nothing but the engine refers to."""

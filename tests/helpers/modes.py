"""Modes of the guard, for tests: looked at, set, and changed as an optimizer changes them."""

import torch

from inplace_abn import guard
from inplace_abn.guard.modes import State


def the_mode(module):
    """What the guard knows of a module that was called with one dtype."""
    (mode,) = module._guard.modes.values()
    return mode


def distrust(module, *dtypes):
    """Makes a module keep its input, as if the guard had found that it is not recoverable."""
    guard.forget(module)
    state = module.__dict__["_guard"] = State()
    for dtype in dtypes:
        mode = state.mode(dtype)
        mode.measured_at = guard.generations.current
        mode.change(trusted=False)


def optimize(value, *modules):
    """Gives weights a value in the step of an optimizer."""
    weights = [module.weight for module in modules]
    for weight in weights:
        weight.grad = weight.detach() - value
    torch.optim.SGD(weights, lr=1.0).step()
    for weight in weights:
        weight.grad = None

"""A layer that is guarded, and modes of the guard: looked at, set, and changed as an optimizer changes them."""

import itertools

import torch
from cases import param_of
from torch import nn

from inplace_abn import ABN, InPlaceABN, guard
from inplace_abn.activations import IDENTITY, TYPICAL
from inplace_abn.guard import generations
from inplace_abn.guard.modes import State

FOLLOWS = [(), *((*what, added) for what in (IDENTITY, *TYPICAL) for added in (False, True))]
"""What may follow a converted norm; nothing for a layer that knows what follows."""


def start_over():
    """Sets the generation to zero, with nothing that has changed: steps after the first are then not watched."""
    generations.current, generations.changed_at = 0, -1
    generations._changed.clear()


def layer(activation="relu", gamma=1.0, beta=0.0, channels=8, **options):
    module = InPlaceABN(
        channels, activation=activation, activation_param=param_of(activation, 1.0), signed_weight=True, **options
    )
    nn.init.constant_(module.weight, gamma)
    nn.init.constant_(module.bias, beta)
    return module


def error_of_dx(module, x, residual=None):
    """The error of dx against float64, for a gradient that is correlated with x."""
    exact = ABN(module.num_features, module.eps, activation=module.activation, activation_param=module.activation_param)
    exact.load_state_dict(module.state_dict())
    exact.double().train(module.training)
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    found = []
    for twin, dtype in ((module, x.dtype), (exact, torch.float64)):
        leaf = x.to(dtype).clone().requires_grad_()
        twin(leaf * 1, None if residual is None else residual.to(dtype)).backward(dz.to(dtype))
        found.append(leaf.grad.double())
    return ((found[0] - found[1]).norm() / found[1].norm()).item()


def is_trusted(module):
    """Whether the module is trusted with all dtypes that it was called with."""
    modes = {} if module._guard is None else module._guard.modes
    return all(mode.decisions[-1].trusted for mode in modes.values())


def the_mode(module):
    """What the guard knows of a module that was called with one dtype."""
    (mode,) = module._guard.modes.values()
    return mode


def end_beginning(model):
    """Makes layers that ran measure in every interval only, as they do when they have trained for long."""
    for module in model.modules():
        state = module.__dict__.get("_guard")
        for mode in state.modes.values() if state is not None else ():
            mode.gap = module.guard_interval


def distrust(module, *dtypes):
    """Makes a module keep its input, as if the guard had found that it is not recoverable, whatever usual follows."""
    guard.forget(module)
    state = module.__dict__["_guard"] = State()
    for what in itertools.product(dtypes, FOLLOWS, (True, False)):
        mode = state.mode(*what)
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

"""Nets and wirings to compile, transform or export, and the functions to compare them with."""

import maths
import torch
from cases import parameters
from torch import nn

from inplace_abn import InPlaceABN, inplace_abn

SHAPE = (4, 6, 5, 7)


class Block(nn.Module):
    """A residual block with every kind of use: a chain, an add, the residual argument."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.a = InPlaceABN(6, activation="elu", **options)
        self.b = InPlaceABN(6, activation="identity", **options)
        self.c = InPlaceABN(6, activation="relu", signed_weight=True, **options)

    def forward(self, r):
        z = self.b(self.second(self.a(self.first(r))))
        return self.c(self.second(z + r), residual=r) + z


def net(device, **options):
    torch.manual_seed(1)
    layers = [nn.Conv2d(6, 6, 3, padding=1), InPlaceABN(6, **options), Block(**options), nn.Conv2d(6, 2, 1)]
    return nn.Sequential(*layers).to(device, torch.float64)


def drawn(device):
    torch.manual_seed(2)
    return [torch.randn(SHAPE, dtype=torch.float64, device=device), *parameters(SHAPE[1], torch.float64, device)[:2]]


def gradients(function, device):
    """What ``function`` of x, weight and bias returns, and their gradients."""
    leaves = [t.requires_grad_() for t in drawn(device)]
    y = function(*leaves)
    (y * y.detach().cos()).sum().backward()
    return [y, *(t.grad for t in leaves)]


def step(function, module, x):
    """What a training step gives: outputs, gradients and buffers. ``function`` is the module or calls it."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    if y.requires_grad:
        (y * y.detach().cos()).sum().backward()
    gradients = [None if t.grad is None else t.grad.clone() for t in (x, *module.parameters())]
    return [y.detach(), *gradients, *(b.clone() for b in module.buffers())]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# --- Wirings, with the layer in two versions: eager allows some of them and refuses others ---------------------------


def abn(x, weight, bias, **options):
    return inplace_abn(x, weight, bias, None, None, activation="elu", **options)


def expected_abn(x, weight, bias, **options):
    return maths.forward(x, weight, bias, None, None, activation="elu", activation_param=0.01, **options)


def modified_afterwards(abn, x, *affine):
    z = abn(x * 2, *affine)
    z += 1
    return z.mul_(2)


def modified_through_a_view(abn, x, *affine):
    z = abn(x * 2, *affine)
    z[1:].mul_(3)
    return z


def used_after_being_overwritten(abn, x, *affine):
    h = x * 2
    z = abn(h, *affine)
    return z + (h if abn is not expected_abn else z)


def twice(abn, x, *affine):
    return abn(abn(x * 2, *affine), *affine)


def needed_by_the_producer(abn, x, *affine):
    return abn(torch.sigmoid(x), *affine)


def needed_by_another(abn, x, *affine):
    h = x * 2
    return h * h + abn(h, *affine)


def part(abn, x, *affine):
    return abn((x * 2)[1:], *affine)


def chunks(abn, x, *affine):
    return torch.cat([abn(part, *affine) for part in (x * 2).chunk(2)])


def leaf(abn, x, *affine):
    return abn(x, *affine)


def view_of_leaf(abn, x, *affine):
    return abn(x.flatten(2), *affine)


def with_residual(abn, x, *affine):
    return abn(x * 2, *affine, residual=x)


WIRINGS = {
    f.__name__: f
    for f in (
        modified_afterwards,
        modified_through_a_view,
        used_after_being_overwritten,
        twice,
        needed_by_the_producer,
        needed_by_another,
        part,
        chunks,
        leaf,
        view_of_leaf,
        with_residual,
    )
}

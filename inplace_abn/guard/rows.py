"""How exactly backward recovers the xhat of a norm of rows (`inplace_abn.reference`) from its rounded output.

The figures are those of `inplace_abn.guard.recovery`, with these differences. A row is what shares statistics, and a
channel is a value of each row. Nothing but the output is recovered, because no activation is inverted. And xhat comes
from x by the formula, so the figures also tell whether the output is that of the norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inplace_abn.guard.figures import packed
from inplace_abn.guard.recovery import SAMPLE, Errors
from inplace_abn.reference import LEAST_WEIGHT, indices, inverse_std_of_rows, recovered_rows, standardised_rows
from inplace_abn.settings import Settings


@torch.no_grad()
def figures(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, values: Tensor | None, settings: Settings
) -> Tensor:
    """The `Figures` of a call in one tensor, on x's device. The host does not wait for them.

    Args:
        x, y: the call's input, and the output as it is kept; of shape (\\*, channel).
        weight, bias: what y was computed with.
        values: xhat of the channels of ``settings.verbatim``.
    """
    places = _places(x)
    x, y = x.flatten(0, -2)[places].double(), y.flatten(0, -2)[places]
    values = None if values is None else values.flatten(0, -2)[places]
    recovered = recovered_rows(y, weight, bias, (settings.verbatim, values), y.dtype).double()
    rstd = inverse_std_of_rows(x, settings.rows, settings.eps)
    xhat = standardised_rows(x, rstd, settings.rows, tuple(range(x.shape[-1])))
    gamma = torch.ones_like(xhat[0]) if weight is None else weight.double()

    # The gradients of xhat, for dy that follows xhat, and y.
    gradients = torch.stack([gamma * xhat, gamma.abs() * xhat])
    error = recovered * (gradients * recovered).mean(dim=-1, keepdim=True)
    error -= xhat * (gradients * xhat).mean(dim=-1, keepdim=True)
    # A row of large variance has a small share in dx, unless its dy is larger by the same factor.
    shares = torch.stack([rstd.square(), torch.ones_like(rstd)]).unsqueeze(1)
    errors, sizes = ((t.square() * shares).sum(dim=(-1, -2)) for t in (error, gradients))
    of_dx = torch.sqrt(torch.where(errors == 0, 0.0, errors / sizes).max())
    # Where eps is most of the variance, xhat is small as a whole.
    error = (recovered - xhat).square().mean(dim=0)
    of_weight = torch.where(error == 0, 0.0, error / xhat.square().mean()).sqrt().nan_to_num(math.inf, math.inf)
    # A weight next to zero says nothing of xhat, whatever xhat is in these rows.
    is_lost = gamma.abs() < max(torch.finfo(y.dtype).tiny, LEAST_WEIGHT)
    if settings.verbatim:
        is_lost[indices(settings.verbatim, x.device)] = False
    of_weight = torch.where(is_lost, math.inf, of_weight)
    is_unknown = ~x.isfinite().all()
    of_dx = torch.where(is_unknown, math.nan, of_dx.nan_to_num(math.inf, math.inf))
    return packed(Errors(of_dx, of_weight), weight, settings)


def _places(x: Tensor) -> Tensor:
    """Some of the rows, which do not all lie at one place of each sample."""
    count, size = x[..., 0].numel(), x.shape[-2]
    step = max(1, count * x.shape[-1] // SAMPLE)
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return torch.arange(0, count, step, device=x.device)

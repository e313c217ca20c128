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
from inplace_abn.guard.recovery import PIECE, SAMPLE, Errors
from inplace_abn.reference import LEAST_WEIGHT, inverse_std_of_rows, recovered_rows, standardised_rows
from inplace_abn.settings import Settings


@torch.no_grad()
def figures(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
    """What `guard.figures.packed` returns, on x's device. The host does not wait for it.

    Args:
        x, y: the call's input, and the output as it is kept; of shape (\\*, channel).
        weight, bias: what y was computed with.
    """
    places, channels, (x, y) = _places(x), x.shape[-1], (t.flatten(0, -2) for t in (x, y))
    gamma = x.new_ones(channels, dtype=torch.float64) if weight is None else weight.double()
    sums, is_unknown = gamma.new_zeros(8, channels), torch.zeros((), dtype=torch.bool, device=x.device)
    piece = PIECE if x.is_cpu else SAMPLE
    for rows in places.split(max(1, piece // channels)):
        own = x[rows].double()
        is_unknown |= ~own.isfinite().all()
        recovered = recovered_rows(y[rows], weight, bias, None, y.dtype).double()
        rstd = inverse_std_of_rows(own, settings.rows, settings.eps)
        xhat = standardised_rows(own, rstd, settings.rows, slice(None))
        sums += _sums(xhat, recovered, rstd, gamma)
    errors, sizes, off, size = sums.split((4, 2, 1, 1))
    errors, sizes = errors.view(2, 2, -1), sizes.sum(dim=-1).view(2, 1, 1)
    of_dx, of_weight = (torch.where(t == 0, 0.0, t / of_all) for t, of_all in ((errors, sizes), (off[0], size.mean())))
    of_dx = of_dx.nan_to_num(math.inf, math.inf).masked_fill(is_unknown, math.nan).flatten(0, 1)
    # Where eps is most of the variance, xhat is small as a whole.
    of_weight = of_weight.sqrt().nan_to_num(math.inf, math.inf)
    # A weight next to zero says nothing of xhat, whatever xhat is in these rows.
    is_lost = gamma.abs() < max(torch.finfo(y.dtype).tiny, LEAST_WEIGHT)
    return packed(Errors(of_weight.masked_fill(is_lost, math.inf), of_dx), weight, bias, settings)


def _sums(xhat: Tensor, recovered: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    """Sums over the rows, of shape (8, channel): the squared errors of dx for each share and dy, the squares of the
    gradients of xhat for each share, and the squares of the errors of xhat and of xhat."""
    # A row of large variance has a small share in dx, unless its dy is larger by the same factor.
    shares = rstd.square(), torch.ones_like(rstd)
    # For dy that follow xhat, and y.
    gradients = torch.stack([gamma * xhat, gamma.abs() * xhat])
    error = recovered * (gradients * recovered).mean(dim=-1, keepdim=True)
    error.sub_(xhat * (gradients * xhat).mean(dim=-1, keepdim=True)).square_()
    sizes = gradients[:1].square_()
    of_dx = [(t * share).sum(dim=-2) for t in (error, sizes) for share in shares]
    return torch.cat([*of_dx, *((t.square().sum(dim=0, keepdim=True)) for t in (recovered - xhat, xhat))])


def _places(x: Tensor) -> Tensor:
    """Some of the rows, which do not all lie at one place of each sample."""
    count, size = x[..., 0].numel(), x.shape[-2]
    step = max(1, count * x.shape[-1] // SAMPLE)
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return torch.arange(0, count, step, device=x.device)

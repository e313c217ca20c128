"""How exactly backward recovers the xhat of a norm of rows (`inplace_abn.autograd.rows`) from its rounded output.

The figures are those of `inplace_abn.guard.recovery`, with these differences. A row is what shares statistics, and a
channel is a value of each row. Nothing but the output is recovered, because no activation is inverted. And xhat comes
from x by the formula, so the figures also tell whether the output is that of the norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inplace_abn.autograd import rows
from inplace_abn.autograd.backward import Saved
from inplace_abn.guard.figures import packed
from inplace_abn.guard.recovery import SAMPLE, Errors
from inplace_abn.reference import indices
from inplace_abn.settings import Settings


@torch.no_grad()
def figures(x: Tensor, saved: Saved, settings: Settings) -> Tensor:
    """The `Figures` of a call in one tensor, on x's device. The host does not wait for them.

    Args:
        x: the call's input; of shape (\\*, channel).
        saved: what backward has of the call.
    """
    places = _places(x)
    x = x.flatten(0, -2)[places].double()
    values = None if saved.verbatim is None else saved.verbatim.flatten(0, -2)[places]
    saved = saved._replace(z=saved.z.flatten(0, -2)[places], verbatim=values)
    recovered = rows.recovered(saved, settings, saved.z.dtype).double()
    rstd = rows.inverse_std(x, settings.rows, settings.eps)
    xhat = rows.standardised(x, rstd, settings.rows, tuple(range(x.shape[-1])))
    gamma = torch.ones_like(xhat[0]) if saved.weight is None else saved.weight.double()

    # The gradients of xhat, for dy that follows xhat, and y.
    gradients = torch.stack([gamma * xhat, gamma.abs() * xhat])
    error = recovered * (gradients * recovered).mean(dim=-1, keepdim=True)
    error -= xhat * (gradients * xhat).mean(dim=-1, keepdim=True)
    # A row of large variance has a small share in dx, unless its dy is larger by the same factor.
    shares = torch.stack([rstd.square(), torch.ones_like(rstd)]).unsqueeze(1)
    errors, sizes = ((t.square() * shares).sum(dim=(-1, -2)) for t in (error, gradients))
    of_dx = torch.sqrt(torch.where(errors == 0, 0.0, errors / sizes).max())
    # Where eps is most of the variance, xhat is small as a whole.
    of_weight = ((recovered - xhat).square().mean(dim=0) / xhat.square().mean()).nan_to_num(0.0, math.inf).sqrt()
    # A weight of zero says nothing of xhat, whatever xhat is in these rows.
    is_lost = gamma.abs() < torch.finfo(saved.z.dtype).tiny
    if settings.verbatim:
        is_lost[indices(settings.verbatim, x.device)] = False
    of_weight = torch.where(is_lost, math.inf, of_weight)
    is_unknown = ~x.isfinite().all()
    of_dx = torch.where(is_unknown, math.nan, of_dx.nan_to_num(math.inf, math.inf))
    return packed(Errors(of_dx, of_weight), saved.weight, settings)


def _places(x: Tensor) -> Tensor:
    """Some of the rows, which do not all lie at one place of each sample."""
    count, size = x[..., 0].numel(), x.shape[-2]
    step = max(1, count * x.shape[-1] // SAMPLE)
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return torch.arange(0, count, step, device=x.device)

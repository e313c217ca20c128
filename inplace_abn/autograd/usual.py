"""The call as it mostly is: training by statistics of the batch, plain tensors, and no mode, hook or transform.

Where there is no node in C++, these functions make such calls without looking at all that may be special.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from inplace_abn import _torch
from inplace_abn.autograd import forward, nodes
from inplace_abn.autograd.backward import Values, input_edge
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings

_KINDS = (Tensor, torch.nn.Parameter)


def are_usual(x: Tensor, *vectors: Tensor | None) -> bool:
    """Whether these are plain tensors on one device, a graph is recorded, and nothing is active that the node would
    have to know of. The op itself looks at the layout of vectors."""
    if type(x) is not Tensor or not torch.is_grad_enabled() or _torch.top_saved_tensors_hooks(True) is not None:
        return False
    if _torch.in_forward_mode() or _torch.count_dispatch_modes() or _torch.is_watched() or not _torch.is_plain(x):
        return False
    device = x.device
    for t in vectors:
        if t is not None and (type(t) not in _KINDS or t.device != device or t.is_inference() or t.is_neg()):
            return False
    return True


def is_usual(x: Tensor, operands: Operands) -> bool:
    """Whether a call in training may be made by `inplace_abn`."""
    weight, bias, residual, running_mean, running_var, momentum = operands
    producer = x.grad_fn
    return (
        producer is not None
        and x.dim() > 1
        and x.numel() != x.shape[1]
        and not _torch.is_view(x)
        and not isinstance(momentum, Tensor)
        and (running_mean is None) == (running_var is None)
        and (residual is None or (type(residual) is Tensor and _torch.is_plain(residual)))
        and are_usual(x, weight, bias, residual, running_mean, running_var)
        and not nodes.is_ours(producer)
    )


def written(x: Tensor, z: Tensor, operands: Operands, settings: Settings) -> Values | None:
    """Writes the result to z, which may be x, and returns what backward needs. Nothing gets a new version.

    Returns None, and does nothing, if the call is not valid.
    """
    weight, bias, residual, running_mean, running_var, momentum = operands
    what = momentum, None, *settings.arithmetic(), True, 0
    given = x, weight, bias, residual, running_mean, running_var, *what
    try:
        with _torch.BelowAutograd():
            copies = None if weight is None else weight.clone(), None if bias is None else bias.clone()
            if z is x:
                _, var = _torch.builtin_of(ops.local_forward)(*given)
            else:
                _, var = _torch.builtin_of(ops.local_forward_out)(*given, z=z)
    except (TypeError, ValueError, RuntimeError):
        # The general path says what is wrong.
        return None
    return Values(*copies, var)


def inplace_abn(x: Tensor, operands: Operands, settings: Settings) -> Tensor | None:
    """`functions.local` for usual calls. Returns None, and does nothing, if the call is not valid."""
    edge = input_edge(x)
    values = written(x, x, operands, settings)
    if values is None:
        return None
    increment_version(forward.present(x, operands.running_mean, operands.running_var))
    return nodes.attached(x, nodes.Result(x), operands, values, settings, edge)

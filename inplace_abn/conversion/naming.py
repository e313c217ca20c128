"""What becomes of a norm's output once it is known what follows: a node that keeps the output, or torch's norm."""

from __future__ import annotations

from torch import Tensor

from inplace_abn import _torch, functions
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd import nodes
from inplace_abn.conversion import watch
from inplace_abn.conversion.waiting import NormCall, PendingState, stand


def made(state: PendingState, is_kept: bool, reader: str) -> Tensor | None:
    """The norm's output with a node of its own; None if there is no need for one, or no place.

    If the output is kept for backward anyway, the node keeps it instead of x. If its memory is taken, torch computes it
    again from x.
    """
    norm = state.norm
    if state.narrow is not None:
        state.narrow = norm.module._past.narrow = None
    # A mode or a tracer that watches the ops would miss a node that is made here.
    may_be_made = state.has_its_residual() and norm.is_unchanged() and not _torch.is_watched()
    if not is_kept and norm.trusted:
        record_plain(norm, reader, "what follows does not keep its output for backward")
    if (state.memory is not None and not is_kept) or not may_be_made or norm.why_gone():
        return None
    if state.memory is not None:
        norm.record_consumer("kept")
        return attached(state, IDENTITY, None, follows=reader)
    return state.native()


def record_plain(norm: NormCall, reader: str, why: str) -> None:
    """Remembers that the norm is torch's in this call, because of ``reader``."""
    norm.record_consumer("plain")
    norm.note(reader, why)


def attached(
    state: PendingState,
    activation: tuple[str, float],
    stand_in: Tensor | None,
    *,
    follows: str = "",
    in_place: bool = False,
    is_residual: bool = False,
) -> Tensor | None:
    """The activated memory, with a node of its own; None if the guard does not trust the layer.

    Args:
        stand_in: a pending tensor that comes right after the result in the graph, with the same values.
        follows: what follows, in words; by default the activation.
        in_place: whether the activation is to be in place.
        is_residual: whether another norm's node keeps the result as well.
    """
    norm, residual = state.norm, state.residual
    follows = follows or ("add, " if residual is not None else "") + activation[0]
    if not norm.is_trusted(activation, residual):
        norm.note(follows, norm.module.why_untrusted or "it is measured first with what follows")
        return None
    norm.note(follows)
    memory = state.take_back() if activation == IDENTITY else state.activate(activation)
    settings = norm.settings.activating(activation)
    observer = norm.module.observer()
    writable = watch.is_writable(activation[0], in_place)
    saved = None if observer is None else observer.saved(memory, activation, writable)
    of_residual = None if observer is None or residual is None else observer.of_residual(residual)
    result, operands = nodes.Result(memory, saved, of_residual), norm.operands._replace(residual=residual)
    z = functions.attached(norm.x, result, operands, norm.values, settings)
    if stand_in is not None:
        stand(z, (stand_in,))
    state.memory = None
    if observer is None:
        # Nobody watched this call, so later calls may do the same.
        past = norm.module._past
        if past.plan is not None:
            past.plan.approve(norm.look, activation, residual is not None, past.note)
    else:
        noted = watch.Result(norm.module, *activation, writable, is_residual, saved=saved, of_residual=of_residual)
        observer.note(noted, norm.x, z, residual)
    return z


def attached_narrowly(state: PendingState) -> Tensor | None:
    """The activated output in 16 bits, with a node of its own; None if the guard does not trust the layer."""
    norm, z, activation = state.norm, state.narrow, state.applied
    assert z is not None
    state.narrow = None
    norm.record_consumer(*activation, False)
    if not norm.is_trusted(activation, None):
        norm.module._past.narrow = None
        return None
    norm.note(activation[0])
    settings = norm.settings.activating(activation)
    return functions.attached(norm.x, nodes.Result(z), norm.operands, norm.values, settings)

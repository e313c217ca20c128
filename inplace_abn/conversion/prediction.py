"""Predicts what autograd will hold of a recorded forward pass once norms are in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inplace_abn.conversion.findings import Activation, Finding
from inplace_abn.recording import Recording, Save


class Planned(NamedTuple):
    """A call of a norm that is to be in place."""

    name: str
    finding: Finding
    mode: str
    """"activation", "residual" or "identity"."""


def saved(recording: Recording, planned: Sequence[Planned]) -> dict[str, int]:
    """The bytes that each norm saves, by name; negative if more is held than before. Their sum is what all norms save.

    Some memory is free only after several norms have released it, such as an input that two norms read. These norms
    share its bytes.
    """
    by_storage: dict[int, list[int]] = {}
    for i, save in enumerate(recording.saves):
        if save.held:
            by_storage.setdefault(save.storage, []).append(i)
    released: dict[int, str] = {}
    added: dict[int, str] = {}
    for name, finding, mode in planned:
        for storage in _natively_kept(finding, mode):
            for i in by_storage.get(storage, []):
                if _is_released(recording.saves[i], name, finding, mode):
                    released.setdefault(i, name)
        added.update(dict.fromkeys(_kept(finding, mode), name))
    # These storages are alive anyway.
    elsewhere = recording.inputs | recording.state | (recording.alive - recording.outputs)
    bytes_saved = {name: 0 for name, _, _ in planned}
    for storage, saves in by_storage.items():
        if storage not in added and storage not in elsewhere and all(i in released for i in saves):
            names = list(dict.fromkeys(released[i] for i in saves))
            share, rest = divmod(recording.sizes[storage], len(names))
            for i, name in enumerate(names):
                bytes_saved[name] += share + (i < rest)
    for storage, name in added.items():
        if storage not in by_storage and storage not in elsewhere:
            bytes_saved[name] -= recording.sizes[storage]
    return bytes_saved


def _activation(finding: Finding, mode: str) -> Activation | None:
    if mode == "identity":
        return None
    return finding.residual.activation if mode == "residual" and finding.residual else finding.activation


def _sums(finding: Finding, mode: str) -> set[int]:
    return {finding.output, finding.residual.total} if mode == "residual" and finding.residual else {finding.output}


def _natively_kept(finding: Finding, mode: str) -> set[int]:
    """Storages that autograd keeps natively, and that can be released in place."""
    activation = _activation(finding, mode)
    copies = activation.copies if activation else ()
    return {finding.input, *finding.copied, *_sums(finding, mode), *copies}


def _is_released(save: Save, name: str, finding: Finding, mode: str) -> bool:
    if save.storage in (finding.input, *finding.copied) and name in save.modules:
        return finding.call.start <= save.before <= finding.call.stop
    activation = _activation(finding, mode)
    if activation is None:
        return False
    if save.storage in activation.copies:
        return True
    # An op saves its input before it runs, and its result after.
    return save.storage in _sums(finding, mode) and abs(save.before - activation.op) <= 1


def _kept(finding: Finding, mode: str) -> list[int]:
    if mode == "identity":
        return [finding.output]
    if mode == "residual" and finding.residual is not None:
        return [finding.residual.activation.result, finding.residual.storage]
    assert finding.activation is not None
    return [finding.activation.result]

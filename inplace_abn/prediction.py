"""What autograd will hold of a recorded forward pass once norms are in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inplace_abn.findings import Finding
from inplace_abn.recording import Recording


class Planned(NamedTuple):
    """A call of a norm that is to be in place."""

    name: str
    finding: Finding
    mode: str
    """"activation", "residual" or "identity"."""


def saved(recording: Recording, planned: Sequence[Planned]) -> dict[str, int]:
    """Bytes that each norm saves, by name; negative if it has more held than before. Their sum is what all save."""
    released: dict[int, str] = {}
    added: dict[int, str] = {}
    for name, finding, mode in planned:
        for i in range(len(recording.saves)):
            if _is_released(recording, name, finding, mode, i):
                released.setdefault(i, name)
        added.update(dict.fromkeys(_kept(finding, mode), name))
    held = [i for i, save in enumerate(recording.saves) if save.held]
    before = {recording.saves[i].storage for i in held}
    after = {recording.saves[i].storage for i in held if i not in released} | added.keys()
    # These are there anyway.
    elsewhere = recording.inputs | recording.state | (recording.alive - recording.outputs)
    bytes_saved = {name: 0 for name, _, _ in planned}
    for storage in before - after - elsewhere:
        owner = next(released[i] for i in held if recording.saves[i].storage == storage)
        bytes_saved[owner] += recording.sizes[storage]
    for storage in after - before - elsewhere:
        bytes_saved[added[storage]] -= recording.sizes[storage]
    return bytes_saved


def _is_released(recording: Recording, name: str, finding: Finding, mode: str, i: int) -> bool:
    save = recording.saves[i]
    if save.storage == finding.input and name in save.modules and save.before <= finding.call.stop:
        return save.before >= finding.call.start
    activation = finding.residual.activation if mode == "residual" and finding.residual else finding.activation
    if mode == "identity" or activation is None:
        return False
    if save.storage in activation.copies:
        return True
    sums = {finding.output, finding.residual.total} if mode == "residual" and finding.residual else {finding.output}
    # An op saves its input before it runs, and its result after.
    return save.storage in sums and abs(save.before - activation.op) <= 1


def _kept(finding: Finding, mode: str) -> list[int]:
    if mode == "identity":
        return [finding.output]
    if mode == "residual" and finding.residual is not None:
        return [finding.residual.activation.result, finding.residual.storage]
    assert finding.activation is not None
    return [finding.activation.result]

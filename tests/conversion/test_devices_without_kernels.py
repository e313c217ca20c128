"""Where there are no kernels for a device, converted layers are torch's. Modules that were built in place say so."""

import pytest
import torch
from torch import nn
from training import check_training

from inplace_abn import ABN, InPlaceABN, functions, inplace_abn, report
from inplace_abn.kernels import ops

NETS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Linear(8, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
    "activation": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)),
}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(ops, "run_on", lambda device: False)


@pytest.mark.parametrize("name", NETS)
def test_converted_layers_are_torchs(name):
    trained = check_training(NETS[name](), torch.randn(5, 6))
    for layer in report(trained).layers:
        assert not layer.in_place
        assert "not supported" in layer.why


def test_modules_that_were_built_in_place_say_what_to_do():
    # The node in C++ is used once counts of holders are known.
    functions.calibrate()
    x = torch.randn(4, 3, 2, requires_grad=True)
    for call in (InPlaceABN(3), lambda t: inplace_abn(t, None, None, None, None)):
        with pytest.raises(ValueError, match=r"kernels for, got cpu.* Use ABN, which works everywhere"):
            call(x * 1)
    ABN(3)(x * 1).sum().backward()

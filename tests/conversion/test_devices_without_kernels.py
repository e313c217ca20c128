"""Where there are no kernels for a device, converted layers are torch's. Modules that were built in place say so."""

import pytest
import torch
from torch import nn
from training import check_training

from inplace_abn import ABN, InPlaceABN, inplace_abn, report
from inplace_abn.autograd import nodes
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
        assert layer.why.startswith("no kernels for cpu, ")


def test_modules_that_were_built_in_place_say_what_to_do():
    # The node in C++ is used once counts of holders are known.
    nodes.calibrate()
    x = torch.randn(4, 3, 2, requires_grad=True)
    for call in (InPlaceABN(3), lambda t: inplace_abn(t, None, None, None, None)):
        with pytest.raises(ValueError, match=r"no kernels for cpu, .* ABN.*run torch's own ops there"):
            call(x * 1)
    ABN(3)(x * 1).sum().backward()


@pytest.mark.parametrize(
    ("hip", "kind", "told"),
    [
        (None, "cuda", "this build has those for the CPU only: install the wheel with CUDA, or build"),
        ("6.4", "cuda", "there are none for ROCm"),
        (None, "mps", "there are kernels for the CPU and CUDA only"),
    ],
)
def test_what_to_do_without_kernels_is_said_in_a_sentence(hip, kind, told, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert told in ops.why_not_on(kind)
    assert ops.why_not_on(kind).count("\n") == 0


@pytest.mark.skipif(ops._has_cuda_kernels, reason="built with CUDA")
@pytest.mark.parametrize("name", ops.NAMES)
def test_an_op_that_is_called_on_a_gpu_without_kernels_says_what_to_install(name):
    """torch said that it could not run the op with arguments from the CUDA backend."""
    op, values = getattr(ops, name), {"Tensor": torch.ones(2, 3), "float": 1e-5, "bool": True, "int": 0}
    given = {a.name: values.get(str(a.type)) for a in op._schema.arguments}
    named = {a.name: given.pop(a.name) for a in op._schema.arguments if a.kwarg_only}
    on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(ValueError, match="install the wheel with CUDA"):
        op.redispatch(on_cuda, *given.values(), **named)

"""Compiled norms of channels that save xhat of some channels, as their weights come and go."""

import copy

import pytest
import torch
from cases import INDUCTOR
from compiled_converted_nets import held
from compiled_nets import assert_same, step
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from inplace_abn import InPlaceABN, convert

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
CHANNELS = 16
NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(4, channels),
}


def net(norm, activation):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, bias=False), NORMS[norm](CHANNELS), activation, nn.Conv2d(CHANNELS, 2, 1)
    )
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    nn.init.normal_(model[1].bias)
    return model.double()


def kill(*models, channels):
    for model in models:
        with torch.no_grad():
            model[1].weight[channels] = 0.0


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU()], ids=["relu", "silu"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_compiled_norm_saves_channels_whose_weights_are_zero(norm, activation, backend):
    """One channel whose weight was zero made a compiled norm torch's."""
    if backend == "inductor" and norm != "batch":
        pytest.skip("compiling takes long, and the graph is that of aot_eager")
    native = net(norm, activation)
    kill(native, channels=[1, 5])
    module, x = convert(copy.deepcopy(native)), torch.randn(4, 3, 9, 10, dtype=torch.float64)
    compiled, natively = (torch.compile(m, backend=backend, fullgraph=True) for m in (module, copy.deepcopy(native)))
    for _ in range(2):
        assert_same(step(compiled, module, x), step(native, native, x))
    assert held(compiled, x) < held(natively, x)


def test_more_channels_take_a_new_program_twice_at_most():
    native = net("batch", nn.ReLU())
    module, x = convert(copy.deepcopy(native)), torch.randn(4, 3, 9, 10, dtype=torch.float64)
    programs = []

    def backend(graph, inputs):
        programs.append(graph)
        return graph

    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (native, module)]
    for dead in ([], [3], [3, 4], [3, 4, 9], [1, 3, 4, 9], [2, 3], [0, 1, 2, 3, 4, 5, 6]):
        kill(native, module, channels=dead)
        step(compiled, module, x)
        step(native, native, x)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(step(compiled, module, x), step(native, native, x))
    assert len(programs) <= 2 * 3


def test_a_built_module_with_such_channels_is_torchs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), InPlaceABN(8, activation="silu", signed_weight=True), nn.Conv2d(8, 2, 1))
    model = model.double()
    with torch.no_grad():
        model[1].weight[2] = 1e-9
        model[1].bias.normal_()
    native = nn.Sequential(model[0], nn.BatchNorm2d(8), nn.SiLU(), model[2]).double()
    native.load_state_dict(
        model.state_dict() | {f"3.{name}": t for name, t in model[2].state_dict().items()}, strict=False
    )
    native = copy.deepcopy(native)
    x = torch.randn(4, 3, 9, 10, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_same(step(compiled, model, x), step(native, native, x))

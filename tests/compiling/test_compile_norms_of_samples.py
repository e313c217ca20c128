"""Compiled instance norms and group norms have the results of eager mode."""

import copy

import compiled_nets
import pytest
import torch
from cases import needs_compiler
from compiled_nets import assert_same, gradients, step
from sample_norms import KINDS

from inplace_abn import InPlaceInstanceNorm

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
# The other wirings are right or refused.
RIGHT = ["modified_afterwards", "modified_through_a_view", "used_after_being_overwritten", "twice", "part"]
RIGHT += ["with_residual"]
NETS = {
    "instance": lambda: KINDS["instance"].net(blocks=2),
    "instance, running statistics": lambda: KINDS["instance"].net(blocks=2, track_running_stats=True),
    "group": lambda: KINDS["group"].net(blocks=2),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("aot_eager", name) for name in NETS),
        ("eager", "instance, running statistics"),
        *(pytest.param("inductor", name, marks=needs_compiler) for name in ("instance, running statistics", "group")),
    ],
)
def test_a_net_compiles_in_one_graph_and_trains_as_in_eager(backend, name, device):
    eager = NETS[name]().to(device, torch.float64)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, device=device)
    assert_same(step(compiled, module, x), step(eager, eager, x))
    module.eval()
    torch.testing.assert_close(compiled(x), eager.eval()(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wiring", RIGHT)
def test_compiled_wirings_are_right(wiring, kind, device):
    norms = KINDS[kind]

    def run(norm):
        def called(x, weight, bias, **options):
            return norm(x, weight, bias, None, None, activation="elu", activation_param=0.01, **options)

        def wired(*leaves):
            if wiring != "used_after_being_overwritten":
                return compiled_nets.WIRINGS[wiring](called, *leaves)
            z = called(h := leaves[0] * 2, *leaves[1:])
            return z + (h if norm is norms.function else z)

        return wired

    compiled = torch.compile(run(norms.function), backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, device), gradients(run(norms.oracle), device))


@pytest.mark.parametrize("shape", [(3, 5, 12), (3, 5, 4, 6), (2, 5, 3, 4, 5)], ids=str)
def test_tracers_record_torchs_own_ops(shape):
    module = InPlaceInstanceNorm(5, affine=True)
    exported = torch.export.export(module, (torch.randn(shape),))
    assert not any("inplace_abn" in str(node.target) for node in exported.graph.nodes)
    x = torch.randn(shape)
    torch.testing.assert_close(exported.module()(x), module(x.clone()))

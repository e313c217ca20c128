"""InPlaceInstanceNorm and InPlaceGroupNorm in nets: wirings, the guard, autocast, checkpoints and copies."""

import copy
import logging
import pickle
import re
import types

import pytest
import torch
import torch.nn.functional as F
import wired_nets
from cases import covering, relative_error
from compiled_nets import assert_same, step
from evaluation import CONTEXTS, evaluate
from sample_norms import KINDS, correlated
from torch.utils.checkpoint import checkpoint
from wired_nets import Row
from wirings import WIRINGS

from inplace_abn import guard, set_guard

pytestmark = pytest.mark.usefixtures("one_thread")
FORMATS = [torch.contiguous_format, torch.channels_last_3d]


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def check_wiring(row, kind, monkeypatch, device):
    monkeypatch.setattr(wired_nets, "inplace_abn", kind.function)
    monkeypatch.setattr(wired_nets, "maths", types.SimpleNamespace(forward=kind.oracle))
    expected, actual = evaluate(row, False, device), evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("loss", "layout"), [("weighted", "contiguous"), ("sum", "channels_last")])
@pytest.mark.parametrize("wiring", [wiring for wiring in WIRINGS if wiring != "two-dimensional x"])
def test_however_it_is_wired_gradients_are_right(wiring, loss, layout, kind, monkeypatch, device):
    check_wiring(Row(wiring, loss=loss, layout=layout), kind, monkeypatch, device)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wiring", ["chain", "residual block", "abn(a) + abn(b)", "z + z"])
def test_in_whatever_context_it_is_wired_gradients_are_right(wiring, context, kind, monkeypatch, device):
    check_wiring(Row(wiring, context=context), kind, monkeypatch, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_net_trains_under_autocast(dtype, kind, device):
    torch.manual_seed(0)
    module = kind.net(activation="relu").to(device)
    x = torch.randn(2, 2, 6, 6, 6, device=device)
    double = copy.deepcopy(module).double()
    exact = step(double, double, x.double())

    def autocast(module):
        with torch.autocast(device.type, dtype):
            y = module(x)
        assert y.dtype == dtype
        return y.float()

    def errors(module):
        found = step(lambda _: autocast(module), module, x)
        return [relative_error(t, e) for t, e in zip(found[2:], exact[2:], strict=True) if e.norm() > 1e-9]

    # The two nets round in different places, so a few values are on the other side of a kink.
    for ours, torchs in zip(errors(module), errors(kind.native_net(copy.deepcopy(module))), strict=True):
        assert ours < 1.3 * torchs + 0.03


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_it_again(reentrant, kind, device):
    module = kind.net().to(device, torch.float64)
    x = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, device=device)
    actual = step(lambda x: checkpoint(module, x, use_reentrant=reentrant), module, x)
    assert_same(actual, step(module, module, x))


def test_copies_and_pickles_train_as_the_module_does(kind, device):
    module = kind.net().to(device, torch.float64)
    x = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, device=device)
    expected = step(module, module, x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.zero_grad()
        assert_same(step(other, other, x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("why", ["small weights", "saturated"])
def test_while_the_output_does_not_tell_the_input_it_is_torchs(why, layout, dtype, kind, logged, device):
    records = logged(logging.INFO)
    saturated = why == "saturated"
    options = {"activation": "elu", "activation_param": 1.0} if saturated else {}
    module, twin = kind.module(8, device=device, **options), kind.native(8, device=device)
    with torch.no_grad():
        module.weight.fill_(30.0 if saturated else 0.0)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 8, 5, 6, 7, device=device).to(dtype).contiguous(memory_format=layout).requires_grad_()
    own = x.detach().clone().requires_grad_()
    given = own * 1
    z = module(given)
    assert z.data_ptr() != given.data_ptr()
    said = f"{kind.layer.__name__}.*: its input is not recoverable from its output"
    assert any(re.search(said, record.getMessage()) for record in records)
    assert module.shares_saved() == {dtype: 1.0}
    # On CUDA torch takes no parameters of another dtype.
    y = twin(x.float()).to(dtype)
    expected = F.elu(y) if saturated else F.leaky_relu(y, 0.01)
    dz = correlated(x.detach())
    z.backward(dz)
    expected.backward(dz)
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    for a, e in ((z, expected.detach()), (own.grad, x.grad), (module.weight.grad, twin.weight.grad)):
        assert torch.equal(a, e) if not e.any() else relative_error(a, e.double()) < allowed
    set_guard(module, interval=0)
    assert (module(again := own * 1) is again) == (saturated or not again.is_cpu)


@covering(2, small=[0.0, 1e-6, 3e-5], layout=FORMATS, dtype=[torch.float32, torch.bfloat16])
def test_where_the_output_does_not_tell_some_channels_these_are_saved(small, layout, dtype, kind, logged, device):
    """One channel of a small weight would spoil the gradients of its whole group."""
    records = logged(logging.INFO)
    module = kind.module(8, device=device)
    with torch.no_grad():
        module.weight[2], module.bias[2] = small, 0.5
    twin = kind.native(8, device=device, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    with torch.no_grad():
        # In place the magnitude is at least eps.
        twin.weight[2] = max(small, module.eps)
    x = torch.randn(2, 8, 5, 6, 7, device=device).to(dtype).contiguous(memory_format=layout).requires_grad_()
    own, exact = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    given = own * 1
    z = module(given)
    assert z is given
    assert module.shares_saved() == {dtype: 0.125}
    assert guard.mode_of(module, dtype).decisions[-1].verbatim.numbers == (2,)
    assert not records
    expected = F.leaky_relu(twin(exact), 0.01)
    kept, dz = z.detach().clone(), correlated(x.detach())
    z.backward(dz)
    expected.backward(dz.double())
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative_error(kept, expected.detach()) < allowed
    for actual, theirs in ((own, exact), (module.weight, twin.weight), (module.bias, twin.bias)):
        assert relative_error(actual.grad, theirs.grad) < allowed
    for part in (slice(0, 4), slice(2, 3)):
        assert relative_error(own.grad[:, part], exact.grad[:, part]) < allowed
    assert relative_error(module.weight.grad[2:3], twin.weight.grad[2:3]) < allowed

"""Mixed precision: autocast with float32 parameters, gradient scaling, whole modules in 16 bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, convert, report

DTYPES = [torch.bfloat16, torch.float16]
# The largest relative error of a gradient in the 2-norm. The net has two layers, whose kinks amplify rounding.
TOLERANCE = {torch.bfloat16: 0.12, torch.float16: 0.08}
ACTIVATIONS = ["leaky_relu", "relu", "elu", "identity"]

pytestmark = pytest.mark.filterwarnings("ignore:.*not initialised")


def net(norm, device, **options):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8, **options),
        nn.Conv2d(8, 8, 3, padding=1),
        norm(8, **options),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ]
    return nn.Sequential(*layers).to(device)


def batch(device, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(16, 3, 6, 6, device=device).to(dtype), torch.randint(5, (16,), device=device)


def error(actual, expected):
    return ((actual.detach().double() - expected.detach().double()).norm() / expected.double().norm()).item()


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def double_gradients(norm, device, **options):
    module = net(norm, device, **options).double()
    x, labels = batch(device, torch.float64)
    F.cross_entropy(module(x), labels).backward()
    return module, gradients(module)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync])
def test_autocast_with_float32_parameters(module, dtype, activation, device):
    expected_net, expected = double_gradients(InPlaceABN, device, activation=activation)
    ours = net(module, device, activation=activation)
    x, labels = batch(device)
    seen = []
    ours[1].register_forward_hook(lambda m, args, z: seen.append((args[0], z)))
    with torch.autocast(device.type, dtype):
        loss = F.cross_entropy(ours(x), labels)
    loss.backward()
    ((x1, z1),) = seen
    assert z1 is x1
    assert z1.dtype == dtype
    for name, g in gradients(ours).items():
        assert g.dtype == torch.float32
        if name != "2.bias":  # the norm cancels this bias, so its gradient is zero up to rounding
            assert error(g, expected[name]) < TOLERANCE[dtype], name
    for name, buffer in ours.named_buffers():
        if not name.endswith("tracked"):
            assert buffer.dtype == torch.float32
            assert error(buffer, expected_net.get_buffer(name)) < TOLERANCE[dtype], name


FOLLOWING = {"leaky_relu": nn.LeakyReLU(0.01), "relu": nn.ReLU(), "elu": nn.ELU(0.01), "identity": nn.Identity()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_is_as_near_to_double_as_batch_norm_is(dtype, activation, device):
    def native_norm(channels, activation):
        return nn.Sequential(nn.BatchNorm2d(channels), FOLLOWING[activation])

    errors = {}
    for name, norm in (("ours", InPlaceABN), ("native", native_norm)):
        exact, low = net(norm, device, activation=activation).double(), net(norm, device, activation=activation)
        x, labels = batch(device)
        F.cross_entropy(exact(x.double()), labels).backward()
        with torch.autocast(device.type, dtype):
            loss = F.cross_entropy(low(x), labels)
        loss.backward()
        errors[name] = [
            error(p.grad, q.grad)
            for (key, p), q in zip(low.named_parameters(), exact.parameters(), strict=True)
            if key != "2.bias"
        ]
    for ours, native in zip(errors["ours"], errors["native"], strict=True):
        assert ours < 3 * native + 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_around_a_layer_that_meets_float32_keeps_float32(dtype, device):
    x, norm = batch(device)[0], InPlaceABN(3).to(device)
    with torch.autocast(device.type, dtype):
        z = norm(x)
    assert z is x
    assert z.dtype == torch.float32


def test_autocast_in_eval(device):
    ours = net(InPlaceABN, device).eval()
    x, _ = batch(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        low = ours(x)
    assert error(low, ours.double()(x.double())) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
def test_backward_may_run_inside_or_outside_autocast(within, device):
    x, labels = batch(device)
    results = []
    for inside in (False, within):
        ours = net(InPlaceABN, device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(ours(x), labels)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append(gradients(ours))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def train(module, device, dtype, scaler, steps=5):
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    x, labels = batch(device)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(module(x), labels)
        if scaler is None:
            loss.backward()
            optimiser.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(module.parameters(), 10.0)
            scaler.step(optimiser)
            scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_training_with_grad_scaler_follows_float32(activation, device):
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    expected = train(net(InPlaceABN, device, activation=activation), device, torch.float32, None)
    actual = train(net(InPlaceABN, device, activation=activation), device, torch.float16, scaler)
    assert actual == pytest.approx(expected, rel=0.03, abs=0.01)
    assert actual[-1] < actual[0]
    assert scaler.get_scale() == 2.0**10


def test_grad_scaler_skips_a_step_that_overflows_and_recovers(device):
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40, growth_interval=1000)
    module = net(InPlaceABN, device)
    before = copy.deepcopy(module.state_dict())
    train(module, device, torch.float16, scaler, steps=1)
    assert scaler.get_scale() == 2.0**39
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
    for name, b in module.named_buffers():
        assert b.isfinite().all(), name
    losses = train(module, device, torch.float16, scaler, steps=40)
    assert scaler.get_scale() < 2.0**39
    assert losses[-1] < losses[0]


def test_infinite_gradients_reach_the_parameters(device):
    """A gradient scaler looks for infinities in the gradients of the parameters. They must not be lost on the way
    there."""
    for bad in (float("inf"), float("nan")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            norm = InPlaceABN(4).to(device)
            a = torch.randn(3, 4, 5, 5, device=device, dtype=dtype, requires_grad=True)
            g = torch.zeros_like(a)
            g[0, 1, 2, 3] = bad
            norm(a * 1).backward(g)
            assert not norm.bias.grad[1].isfinite()
            assert not a.grad[:, 1].isfinite().all()
            assert a.grad[:, [0, 2, 3]].isfinite().all()
            assert norm.bias.grad[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync, ABN])
def test_whole_modules_in_16_bits(module, dtype, activation, device):
    if device.type == "cpu" and dtype == torch.float16 and module is ABN:
        pytest.skip("torch has no batch norm for float16 on the CPU")
    _, expected = double_gradients(InPlaceABN, device, activation=activation)
    ours = net(module, device, activation=activation).to(dtype)
    x, labels = batch(device, dtype)
    assert ours[1].running_var.dtype == ours[1].weight.dtype == dtype
    out = ours(x)
    assert out.dtype == dtype
    F.cross_entropy(out.float(), labels).backward()
    for name, g in gradients(ours).items():
        assert g.dtype == dtype
        if name != "2.bias":
            assert error(g, expected[name]) < TOLERANCE[dtype], name
    assert ours[1].num_batches_tracked.dtype == torch.int64


def test_half_and_bfloat16_methods(device):
    for method, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        norm = getattr(InPlaceABN(4).to(device), method)()
        assert {t.dtype for t in norm.parameters()} == {dtype}
        a = torch.randn(6, 4, 5, device=device, dtype=dtype, requires_grad=True)
        x = a * 1
        z = norm(x)
        z.sum().backward()
        assert z is x
        assert z.dtype == a.grad.dtype == norm.weight.grad.dtype == dtype
        norm.eval()
        assert norm(a.detach().clone()).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_kept_in_float32_in_a_16_bit_net(dtype, device):
    _, expected = double_gradients(InPlaceABN, device)
    ours = net(InPlaceABN, device).to(dtype)
    for module in ours:
        if isinstance(module, ABN):
            module.float()
    x, labels = batch(device, dtype)
    F.cross_entropy(ours(x).float(), labels).backward()
    for name, g in gradients(ours).items():
        if name != "2.bias":
            assert error(g, expected[name]) < TOLERANCE[dtype], name
    assert ours[1].weight.grad.dtype == ours[1].running_mean.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_an_input_of_other_16_bits_than_those_of_autocast_trains(activation, dtype, device):
    other = DTYPES[1 - DTYPES.index(dtype)]
    module, (x, _) = InPlaceABN(3, activation=activation).to(device), batch(device, other)
    native = nn.Sequential(nn.BatchNorm2d(3), {"relu": nn.ReLU, "silu": nn.SiLU}[activation]()).to(device).double()
    found = []
    for net, values, enabled in ((module, x.clone(), True), (native, x.double(), False)):
        leaf = values.clone().requires_grad_()
        with torch.autocast(device.type, dtype, enabled=enabled):
            z = net(leaf.clone())
        z.double().square().sum().backward()
        found.append(next(net.parameters()).grad)
    assert error(*found) < TOLERANCE[other]


CURVED = {"silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu, "mish": F.mish}


@pytest.mark.parametrize(("gamma", "beta"), [(1.0, 0.0), (1.0, -1.0), (20.0, -20.0)])
@pytest.mark.parametrize("activation", CURVED)
def test_errors_of_many_elements_cancel_in_sums_over_a_channel(activation, gamma, beta, device):
    """The layer before sums dx times inputs that may all be positive: an error with a mean is not averaged out there,
    nor one that goes with x."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, 16, 16, device=device).to(torch.bfloat16)
    layer = InPlaceABN(4, activation=activation).to(device)
    torch.nn.init.constant_(layer.weight, gamma)
    torch.nn.init.constant_(layer.bias, beta)
    direction = torch.randn(4, device=device).view(-1, 1, 1)

    def expected(x):
        return CURVED[activation](F.batch_norm(x, None, None, layer.weight.double(), layer.bias.double(), True))

    def dx_of(x, forward):
        x.requires_grad_()
        (forward(x.clone()).square() * direction).sum().backward()
        return x.grad.double()

    dx, right = dx_of(x.clone(), layer), dx_of(x.double(), expected)
    size = right.square().mean((0, 2, 3)).sqrt()
    for error in (dx - right, (dx - right) * x.double()):
        assert (error.mean((0, 2, 3)).abs() < 1e-3 * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [0.0, 6.0])
@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.GELU])
def test_two_roundings_of_a_converted_norm_and_its_activation_have_no_direction(activation, residual, dtype, device):
    """The activations are nearly the identity here, so that y and z lie on one grid."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.last = nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 4, 1)

        def forward(self, x, r):
            y = self.norm(x)
            return self.last(self.act(y if not residual else y + r))

    torch.manual_seed(0)
    net, x = Net().to(device), torch.randn(16, 8, 16, 16, device=device).to(dtype)
    nn.init.constant_(net.norm.weight, 1.0 if residual else 0.5)
    nn.init.constant_(net.norm.bias, 0.0 if residual else 4.0)
    r, dz = (residual + torch.rand_like(x), torch.randn(16, 4, 16, 16, device=device) + 1)
    exact, ours = copy.deepcopy(net).double(), convert(copy.deepcopy(net))
    exact(x.double(), r.double()).backward(dz.double())
    with torch.autocast(device.type, dtype):
        z = ours(x, r)
    z.backward(dz.to(z.dtype))
    assert report(ours).layers[0].in_place
    assert error(ours.norm.weight.grad, exact.norm.weight.grad) < (0.05 if dtype == torch.bfloat16 else 0.006)

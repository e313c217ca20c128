"""Nets for medical images are converted as they are written. Gradients are equal, and memory is less."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import covering, relative_error
from foreign_nets import spread
from torch import nn
from training import check_training

from inplace_abn import InPlaceInstanceNorm, convert, report, revert, verify
from inplace_abn.conversion.classes import InPlaceInstanceNorm2d, InPlaceInstanceNorm3d
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.memory import measure

KINDS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def chain(dims=3, activation=lambda: nn.LeakyReLU(inplace=True), **options):
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 6), (6, 6), (6, 8)):
        norm = KINDS[dims](outputs, **({"affine": True} | options))
        layers += [CONVS[dims](inputs, outputs, 3, padding=1), norm, activation()]
    return spread(nn.Sequential(*layers, CONVS[dims](8, 2, 1)))


def example(dims=3, batch=2):
    torch.manual_seed(3)
    return torch.randn(batch, 1, *[10] * dims)


class ResidualBlock(nn.Module):
    """A residual block as in nnU-Net and MONAI: norm, addition, activation."""

    def __init__(self, inputs, outputs, activation=nn.LeakyReLU):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True)
        self.conv2, self.norm2 = nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True)
        self.skip = None
        if inputs != outputs:
            self.skip = nn.Sequential(nn.Conv3d(inputs, outputs, 1), nn.InstanceNorm3d(outputs, affine=True))
        self.activation = activation()

    def forward(self, x):
        y = self.activation(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x if self.skip is None else self.skip(x)
        return self.activation(y)


class PreActivation(nn.Module):
    """A block as in MONAI's SegResNet. The addition at its end needs the input of its first norm."""

    def __init__(self, channels):
        super().__init__()
        self.norms = nn.ModuleList(nn.InstanceNorm3d(channels, affine=True) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv3d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.relu(norm(y), inplace=True))
        return x + y


class UNet(nn.Module):
    """A U-Net with a skip, a transposed convolution and an output at each depth."""

    def __init__(self, dims=3):
        super().__init__()

        def block(inputs, outputs, stride=1):
            conv = CONVS[dims](inputs, outputs, 3, stride, 1)
            return nn.Sequential(conv, KINDS[dims](outputs, affine=True), nn.LeakyReLU(inplace=True))

        self.down, self.bottom, self.last = block(1, 6), block(6, 8, 2), block(12, 6)
        up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.up = up(8, 6, 2, 2)
        self.heads = nn.ModuleList([CONVS[dims](6, 2, 1), CONVS[dims](8, 2, 1)])

    def forward(self, x):
        skip = self.down(x)
        bottom = self.bottom(skip)
        return self.heads[0](self.last(torch.cat([self.up(bottom), skip], 1))), self.heads[1](bottom)


# For each net: the model, its example, and the largest part of the memory that may still be held after conversion.
NETS = {
    "chain": (chain, example, 0.51),
    "chain 2d": (lambda: chain(2), lambda: example(2), 0.52),
    "chain 1d": (lambda: chain(1), lambda: example(1), 0.66),
    "without parameters": (lambda: chain(affine=False), example, 0.51),
    "with running statistics": (lambda: chain(track_running_stats=True), example, 0.51),
    "relu": (lambda: chain(activation=nn.ReLU), example, 0.51),
    "silu": (lambda: chain(activation=nn.SiLU), example, 0.35),
    "a dropout of nothing": (
        lambda: chain(activation=lambda: nn.Sequential(nn.Dropout(0.0), nn.ReLU())),
        example,
        0.51,
    ),
    "dropout in training": (
        lambda: chain(activation=lambda: nn.Sequential(nn.ReLU(), nn.Dropout3d(0.5))),
        example,
        0.8,
    ),
    "prelu": (lambda: chain(activation=nn.PReLU), example, 0.68),
    "one sample": (chain, lambda: example(batch=1), 0.51),
    "u-net": (UNet, example, 0.67),
    "u-net 2d": (lambda: UNet(2), lambda: example(2), 0.67),
    "residual blocks": (lambda: nn.Sequential(ResidualBlock(1, 6), ResidualBlock(6, 6)), example, 0.56),
    "pre-activation": (
        lambda: nn.Sequential(nn.Conv3d(1, 6, 1), PreActivation(6), PreActivation(6)),
        example,
        0.56,
    ),
}


@covering(2, name=NETS, channels_last=[False, True])
def test_a_converted_net_trains_as_the_original_does_and_holds_less(name, channels_last):
    make, inputs, most = NETS[name]
    torch.manual_seed(1)
    model, x = spread(make()), inputs()
    if channels_last and x.dim() > 3:
        format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=format), x.contiguous(memory_format=format)
    check_training(model, x, tolerance=1e-7)
    converted = convert(copy.deepcopy(model))
    found = verify(model, converted, x)
    assert found, str(found)
    assert measure(converted, x).held <= most * measure(copy.deepcopy(model), x).held


def test_a_converted_norm_is_what_it_was():
    model = chain()
    state, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    assert isinstance(model[1], nn.InstanceNorm3d)
    assert type(model[1]) is InPlaceInstanceNorm3d
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    model(example()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, state["1.weight"])
    revert(model)
    assert type(model[1]) is nn.InstanceNorm3d
    assert not any(name.startswith(("_guard", "_seen", "_expected")) for name in vars(model[1]))


def test_lazy_norms_are_converted_once_they_know_their_channels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyInstanceNorm2d(), nn.ReLU())
    assert report(convert(model[:2])).layers[0].why == "LazyInstanceNorm2d is a subclass whose forward pass is unknown"
    model(example(2))
    convert(model)
    assert type(model[1]) is InPlaceInstanceNorm2d


@pytest.mark.parametrize(
    ("shape", "words"),
    [((4, 6, 6), None), ((2, 4, 1, 1), "more than 1 spatial element"), ((2, 4), "expected 3D or 4D input")],
)
def test_calls_that_are_none_of_a_batch_are_torchs(shape, words):
    norm = nn.InstanceNorm2d(4, affine=True)
    converted = convert(copy.deepcopy(norm))
    x = torch.randn(shape, requires_grad=True)
    if words is None:
        torch.testing.assert_close(F.relu(converted(x)), F.relu(norm(x)))
        return
    for module in (norm, converted):
        with pytest.raises(ValueError, match=words):
            module(x)


def test_an_unbatched_image_of_as_many_rows_as_channels_is_no_batch():
    norm = nn.InstanceNorm2d(4, affine=True)
    x = torch.randn(4, 4, 6, requires_grad=True)
    torch.testing.assert_close(F.relu(convert(copy.deepcopy(norm))(x)), F.relu(norm(x)))


def test_another_number_of_channels_is_torchs_warning_or_error():
    x = torch.randn(2, 5, 6, 6, requires_grad=True)
    with pytest.warns(UserWarning, match="does not match num_features"):
        convert(nn.InstanceNorm2d(4))(x)
    with pytest.raises(ValueError, match="num_features"):
        convert(nn.InstanceNorm2d(4, affine=True))(x)


def test_running_statistics_follow_torchs_through_training_and_are_used_in_evaluation():
    model = chain(track_running_stats=True).double()
    converted = convert(copy.deepcopy(model))
    for _ in range(3):
        x = torch.randn(2, 1, 10, 10, 10, dtype=torch.float64)
        for m in (model, converted):
            m(x).square().sum().backward()
    assert all(m.num_batches_tracked == 0 for m in converted.modules() if isinstance(m, InPlaceNorm))
    torch.testing.assert_close(converted.state_dict(), model.state_dict(), rtol=1e-10, atol=1e-10)
    # Evaluation has gradients, too, as in a frozen encoder.
    x = example().double()
    for m in (model, converted):
        m.zero_grad()
        m.eval()(x).square().sum().backward()
    for p, other in zip(converted.parameters(), model.parameters(), strict=True):
        assert relative_error(p.grad, other.grad) < 1e-9


def test_statistics_of_samples_are_not_synchronised():
    model = convert(chain(), sync=True)
    assert model[1]._participating() is None
    assert model(example()).isfinite().all()


def test_training_goes_on_as_before():
    torch.manual_seed(0)
    model = UNet()
    converted = convert(copy.deepcopy(model))
    losses = []
    for m in (model, converted):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
        own = []
        for _ in range(12):
            x = torch.randn(2, 1, 10, 10, 10)
            labels = (x[:, 0] > 0).long()
            first, second = m(x)
            loss = F.cross_entropy(first, labels) + 0.5 * F.cross_entropy(second, labels[:, ::2, ::2, ::2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own.append(loss.detach())
        losses.append(torch.stack(own))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_a_norm_whose_output_nobody_activates_is_torchs():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Sigmoid(), nn.Conv2d(4, 2, 1))
    converted = convert(copy.deepcopy(model))
    assert verify(model, converted, example(2))


def test_compiled_and_under_autocast_a_converted_net_is_right():
    torch._dynamo.reset()
    model = chain(2).double()
    converted = convert(copy.deepcopy(model))
    x = example(2).double()
    expected = model(x)
    torch.testing.assert_close(torch.compile(converted, backend="aot_eager")(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y, other = converted.float()(x.float()), model.float()(x.float())
    assert y.dtype == other.dtype
    assert relative_error(y, other.double()) < 2e-2
    torch._dynamo.reset()


@pytest.mark.parametrize("activation", ["identity", "leaky_relu"])
def test_a_module_that_was_built_in_place_is_reverted_to_torchs_norm_and_activation(activation):
    model = nn.Sequential(nn.Conv3d(1, 4, 3), InPlaceInstanceNorm(4, affine=True, activation=activation))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    x = example()
    expected = model(x)
    reverted = revert(model, instance_norm=nn.InstanceNorm3d)
    assert type(reverted[1] if activation == "identity" else reverted[1].norm) is nn.InstanceNorm3d
    torch.testing.assert_close(reverted(x), expected)

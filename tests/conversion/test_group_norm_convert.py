"""Nets with group norms are converted as they are written: ResNets, nets for diffusion and for detection."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import covering, relative_error
from foreign_nets import GroupNormAct, spread
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training, differences, trained

from inplace_abn import analyze, convert, report, revert, verify
from inplace_abn.autograd import nodes
from inplace_abn.conversion.classes import ConvertedGroupNorm
from inplace_abn.memory import measure

CHANNELS = 8


def conv(inputs=CHANNELS, outputs=CHANNELS, size=3):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


def chain(groups=2, activation=nn.SiLU, **options):
    layers = []
    for inputs in (3, CHANNELS, CHANNELS):
        layers += [conv(inputs), nn.GroupNorm(groups, CHANNELS, **options), activation()]
    return nn.Sequential(*layers, conv(outputs=2))


class DiffusionBlock(nn.Module):
    """A block as in diffusers' UNets: norm, SiLU and convolution twice, with the time between them, and a skip."""

    def __init__(self, groups=4):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, CHANNELS, eps=1e-6), conv()
        self.time = nn.Linear(4, CHANNELS)
        self.norm2, self.conv2 = nn.GroupNorm(groups, CHANNELS, eps=1e-6), conv()
        self.dropout, self.nonlinearity = nn.Dropout(0.0), nn.SiLU()

    def forward(self, x):
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        time = torch.linspace(-1, 1, 4 * len(x), dtype=x.dtype, device=x.device).view(-1, 4)
        h = h + self.time(self.nonlinearity(time))[:, :, None, None]
        return x + self.conv2(self.dropout(self.nonlinearity(self.norm2(h))))


class Bottleneck(nn.Module):
    """A residual block: the sum is in place, and so is the activation that follows it."""

    def __init__(self, groups=2):
        super().__init__()
        self.conv1, self.norm1 = conv(size=1), nn.GroupNorm(groups, CHANNELS)
        self.conv2, self.norm2 = conv(), nn.GroupNorm(groups, CHANNELS)
        self.down = nn.Sequential(conv(size=1), nn.GroupNorm(groups, CHANNELS))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.down(x)
        return self.relu(y)


class Attention(nn.Module):
    """A block of attention: a norm of a view, and nothing but linear layers behind it."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(2, CHANNELS), *(nn.Linear(CHANNELS, n) for n in (24, CHANNELS))

    def forward(self, x):
        h = self.norm(x.flatten(2)).transpose(1, 2)
        h = F.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1))
        return x + self.out(h).transpose(1, 2).view(x.shape)


# For each net, the largest part of the memory that may still be held after conversion.
NETS = {
    "silu": (chain, 0.4),
    "relu": (lambda: chain(activation=nn.ReLU), 0.53),
    "relu in place": (lambda: chain(activation=lambda: nn.ReLU(inplace=True)), 0.53),
    "gelu": (lambda: chain(activation=nn.GELU), 0.4),
    "mish": (lambda: chain(activation=lambda: nn.Mish(inplace=True)), 0.53),
    "sigmoid": (lambda: chain(activation=nn.Sigmoid), 1.01),
    "one group": (lambda: chain(1), 0.4),
    "as many groups as channels": (lambda: chain(CHANNELS), 0.4),
    "without parameters": (lambda: chain(affine=False), 0.4),
    "norms alone": (lambda: nn.Sequential(conv(3), nn.GroupNorm(2, CHANNELS), conv()), 0.6),
    "diffusion": (lambda: nn.Sequential(conv(3), DiffusionBlock(), DiffusionBlock(8)), 0.5),
    "bottlenecks": (lambda: nn.Sequential(conv(3), Bottleneck(), Bottleneck(4)), 0.7),
    "attention": (lambda: nn.Sequential(conv(3), DiffusionBlock(), Attention()), 0.9),
    "norms with activations": (
        lambda: nn.Sequential(conv(3), GroupNormAct(CHANNELS, 2), conv(), GroupNormAct(CHANNELS, 4, nn.SiLU), conv()),
        0.53,
    ),
}


@covering(2, name=NETS, batch=[1, 3], channels_last=[False, True])
def test_a_converted_net_trains_as_the_original_does_and_holds_less(name, batch, channels_last):
    make, most = NETS[name]
    torch.manual_seed(1)
    model, x = spread(make()), torch.randn(batch, 3, 12, 12)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    check_training(model, x, tolerance=1e-7)
    converted = convert(copy.deepcopy(model))
    found = verify(model, converted, x)
    assert found, str(found)
    assert measure(converted, x).held <= most * measure(copy.deepcopy(model), x).held
    reverted = revert(converted)
    assert not any(type(module).__name__.startswith(("InPlace", "Converted")) for module in reverted.modules())
    assert verify(model, reverted, x)


@pytest.mark.parametrize("name", ["silu", "diffusion", "bottlenecks", "norms with activations"])
def test_without_the_node_in_cpp_it_trains_as_the_original_does(name, monkeypatch):
    monkeypatch.setattr(nodes, "cpp", None)
    torch.manual_seed(1)
    check_training(spread(NETS[name][0]()), torch.randn(2, 3, 12, 12), tolerance=1e-7)


def test_a_converted_norm_is_what_it_was():
    model = chain()
    state, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    assert isinstance(model[1], nn.GroupNorm)
    assert type(model[1]) is ConvertedGroupNorm
    assert "GroupNorm(2, 8, eps=1e-05, affine=True" in repr(model[1])
    model.load_state_dict(state)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, state["1.weight"])
    revert(model)
    assert vars(model[1]).keys() == vars(nn.GroupNorm(2, CHANNELS)).keys()


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_of_a_converted_net_train_as_it_does(way):
    torch.manual_seed(2)
    model = convert(spread(nn.Sequential(conv(3), DiffusionBlock(), GroupNormAct(CHANNELS, 2), conv()))).double()
    x = torch.randn(2, 3, 8, 8)
    other = way(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert max(differences(trained(other, x), trained(model, x)).values()) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoints_it_trains_as_the_original_does(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = conv(3), DiffusionBlock(), chain()[1:]

        def forward(self, x):
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=reentrant))

    torch.manual_seed(1)
    check_training(spread(Net()), torch.randn(2, 3, 12, 12), tolerance=1e-7)


@pytest.mark.parametrize(
    "hook",
    [
        lambda norm: norm.register_forward_hook(lambda module, args, y: y * 1.5),
        lambda norm: norm.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
        lambda norm: norm.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.5,)),
    ],
    ids=["forward", "before forward", "backward"],
)
def test_hooks_of_norms_do_what_they_did(hook):
    torch.manual_seed(1)
    model = spread(chain())
    hook(model[1])
    check_training(model, torch.randn(2, 3, 12, 12), tolerance=1e-7)


@pytest.mark.parametrize(
    "shape",
    [(2, CHANNELS), (2, CHANNELS, 5), (2, CHANNELS, 3, 4, 5), (0, CHANNELS, 4, 4), (2, CHANNELS, 1, 1)],
    ids=str,
)
def test_inputs_of_all_shapes_are_normalised_as_torch_does(shape):
    torch.manual_seed(1)
    norm = spread(nn.GroupNorm(2, CHANNELS)).double()
    converted = convert(copy.deepcopy(norm))
    gradients = []
    for module in (norm, converted):
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin().requires_grad_()
        z = F.silu(module(x * 1))
        (z * z.detach().cos()).sum().backward()
        gradients.append([z.detach(), x.grad, module.weight.grad, module.bias.grad])
    torch.testing.assert_close(*gradients)


def test_what_is_an_error_of_torch_stays_one():
    x = torch.randn(2, 6, 4, 4, requires_grad=True)
    for module in (nn.GroupNorm(2, CHANNELS), convert(nn.GroupNorm(2, CHANNELS))):
        with pytest.raises(RuntimeError, match="Expected weight to be a vector"):
            module(x)
    one = torch.randn(1, 2, requires_grad=True)
    for module in (nn.GroupNorm(2, 2), convert(nn.GroupNorm(2, 2))):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
def test_16_bits_are_as_exact_as_the_originals(dtype, channels_last):
    torch.manual_seed(1)
    model, x = spread(chain(activation=nn.ReLU)), torch.randn(2, 3, 16, 16)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)

    def gradients(model, x):
        z = model(x)
        (z * (z.detach() + 1)).mean().backward()
        return [p.grad for p in model.parameters()]

    exact = gradients(copy.deepcopy(model).double(), x.double())
    own = gradients(convert(copy.deepcopy(model)).to(dtype), x.to(dtype))
    torchs = gradients(copy.deepcopy(model).to(dtype), x.to(dtype))
    for a, b, e in zip(own, torchs, exact, strict=True):
        assert relative_error(a, e) < 1.5 * relative_error(b, e) + 0.03


def test_under_autocast_it_is_torchs():
    torch.manual_seed(1)
    model = spread(chain())
    converted, exact = convert(copy.deepcopy(model)), copy.deepcopy(model).double()
    x, results = torch.randn(2, 3, 16, 16), []
    for net in (model, converted, exact):
        with torch.autocast("cpu", torch.bfloat16, net is not exact):
            z = net(x.to(next(net.parameters()).dtype))
        (z.double() * (z.detach().double() + 1)).mean().backward()
        results.append([z.detach(), *(p.grad for p in net.parameters())])
    assert results[0][0].dtype == results[1][0].dtype == torch.bfloat16
    for torchs, own, expected in zip(*results, strict=True):
        assert relative_error(own, expected) < 1.5 * relative_error(torchs, expected) + 0.03
    assert all(layer.in_place for layer in report(converted).layers)


def test_where_weights_are_next_to_zero_their_channels_are_saved_and_the_report_says_so():
    model = spread(chain())
    with torch.no_grad():
        model[1].weight[3] = 1e-6
        model[4].weight[0], model[4].bias[0] = 3e-5, 3.0
    converted, x = convert(copy.deepcopy(model)), torch.randn(2, 3, 12, 12)
    assert verify(model, converted, x)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.0)
    for _ in range(3):
        converted(x).square().sum().backward()
        optimizer.step()
    layers = {layer.name: layer for layer in report(converted).layers}
    assert all(layers[name].in_place for name in ("1", "4", "7"))
    saved = [round(8 * layers[name].channels_saved["float32"]) for name in ("1", "4", "7")]
    assert saved[:2] == [1, 1]


def test_a_report_and_an_analysis_tell_kind_activation_and_memory():
    model, x = convert(chain()), torch.randn(2, 3, 16, 16)
    for _ in range(2):
        model(x).sum().backward()
    found = report(model)
    assert [(layer.kind, layer.follows) for layer in found.layers] == [("GroupNorm", "silu")] * 3
    size = 2 * CHANNELS * 16 * 16 * 4
    assert all(0.9 * size < layer.bytes_saved <= 2 * size for layer in found.layers)
    assert "3 of 3 norms are in place" in str(analyze(chain(), x))


def test_a_subclass_whose_forward_pass_is_unknown_is_left_alone():
    class Scaled(nn.GroupNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = convert(nn.Sequential(conv(3), Scaled(2, CHANNELS), nn.SiLU()))
    assert type(model[1]) is Scaled
    assert report(model).layers[0].why == "Scaled is a subclass whose forward pass is unknown"


def test_compiled_a_converted_net_is_right():
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = spread(nn.Sequential(conv(3), DiffusionBlock(), conv())).double()
    converted, x = convert(copy.deepcopy(model)), torch.randn(2, 3, 8, 8).double()
    z = torch.compile(converted, backend="aot_eager")(x)
    z.square().sum().backward()
    expected = model(x)
    expected.square().sum().backward()
    torch.testing.assert_close(z, expected)
    for p, other in zip(converted.parameters(), model.parameters(), strict=True):
        assert relative_error(p.grad, other.grad) < 1e-9 or other.grad.norm() < 1e-9
    torch._dynamo.reset()

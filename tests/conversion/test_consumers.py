"""What saves its input for backward: the table of functions, and what norms before them do."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from one_norm import OneNorm, plain
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from training import check_training

from inplace_abn import analyze, convert
from inplace_abn.conversion.consumers import KEEPING, kept
from inplace_abn.memory import measure


def values(*shape):
    """A tensor that is no leaf, as a norm's output is none."""
    return torch.rand(shape).requires_grad_() + 0.5


def image(dims=2, channels=4):
    return values(2, channels, *[6] * dims)


MATRICES = [values(5, 5), values(5, 5)]
STACKS = [values(2, 5, 5), values(2, 5, 5)]
IMAGES = [image(), image()]
# Functions, and positional and named arguments of their calls. Other functions of the table take one image.
CALLS = [
    *(((getattr(F, f"conv{d}d"),), [((image(d), values(4, 4, *[3] * d)), {"padding": 1})]) for d in (1, 2, 3)),
    *(((getattr(F, f"conv_transpose{d}d"),), [((image(d), values(4, 4, *[3] * d)), {})]) for d in (1, 2, 3)),
    ((F.linear,), [(MATRICES, {}), (MATRICES[:1], {"weight": MATRICES[1], "bias": values(5)})]),
    ((torch.mm, Tensor.mm, torch.matmul, Tensor.matmul, Tensor.__matmul__), [(MATRICES, {})]),
    ((torch.bmm, Tensor.bmm), [(STACKS, {})]),
    (
        (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply),
        [(IMAGES, {}), ((image(), 2.0), {})],
    ),
    ((F.prelu, Tensor.prelu), [((image(), values(4)), {}), ((image(),), {"weight": values(1)})]),
    ((F.threshold,), [((image(), 0.7, 0.1), {})]),
    ((F.hardtanh,), [((image(), -1.0, 0.9), {}), ((), {"input": image()})]),
    ((torch.clamp, Tensor.clamp), [((image(),), {"min": 0.7}), ((image(), 0.6, 0.9), {})]),
    ((torch.max_pool2d, F.max_pool2d, F.avg_pool2d), [((image(), 2), {})]),
    ((torch.max_pool3d, F.max_pool3d, F.avg_pool3d), [((image(3), 2), {})]),
    ((torch.max_pool1d, F.max_pool1d, F.avg_pool1d, F.adaptive_max_pool1d), [((image(1), 2), {})]),
    ((F.adaptive_max_pool2d,), [((image(), 2), {})]),
    ((F.layer_norm,), [((image(), (6, 6)), {}), ((image(), (6, 6), values(6, 6)), {})]),
    ((F.group_norm,), [((image(), 2), {})]),
    ((F.batch_norm,), [((image(), None, None), {"training": True})]),
]
CALLS_OF = {function: calls for functions, calls in CALLS for function in functions}


def saved_by(function, args, kwargs):
    """The addresses of what autograd saves in a call."""
    found = set()
    with saved_tensors_hooks(lambda t: found.add(t.data_ptr()), lambda t: t):
        function(*args, **kwargs)
    return found


@pytest.mark.parametrize(
    "precision", ["float32", "float64 and autocast", "float32 and autocast", "bfloat16 and autocast"]
)
@pytest.mark.parametrize("function", KEEPING, ids=lambda f: getattr(f, "__qualname__", str(f)))
def test_the_table_of_functions_is_what_autograd_saves(function, precision):
    """What autocast leaves in 16 bits, such as the input of a pooling or of a product, was said not to be kept."""
    dtype = getattr(torch, precision.split()[0])
    for args, kwargs in CALLS_OF.get(function, [((image(),), {})]):
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        for needed in itertools.product([True, False], repeat=len(tensors) - 1):
            # The first is a norm's output, which requires grad.
            flags = dict(zip(map(id, tensors), (True, *needed), strict=True))
            given = {id(t): (t if flags[id(t)] else t.detach()).to(dtype) for t in tensors}
            call = [given.get(id(t), t) for t in args], {name: given.get(id(t), t) for name, t in kwargs.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in precision):
                told = {t.data_ptr() for t in kept(KEEPING[function], *call)}
                saved = saved_by(function, *call)
            first = given[id(tensors[0])].data_ptr()
            assert (first in told) == (first in saved), (args, kwargs, needed)
            assert told <= saved


@pytest.mark.parametrize("function", [F.relu6, F.hardtanh, F.celu, F.selu, F.hardsigmoid])
def test_a_function_that_writes_over_its_input_keeps_nothing(function):
    assert not [*kept(KEEPING[function], (image(),), {"inplace": True})]


FOLLOWS = {
    "convolution": lambda: conv(8, 8),
    "transposed convolution": lambda: nn.ConvTranspose2d(8, 8, 3, padding=1),
    "linear": lambda: nn.Linear(16, 16),
    "prelu": lambda: nn.PReLU(8),
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "softplus": nn.Softplus,
    "layer norm": lambda: nn.LayerNorm(16),
    "pooling": lambda: nn.MaxPool2d(2),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_norm_before_what_keeps_its_input_keeps_its_output_only(name):
    model, x = spread(OneNorm(plain, FOLLOWS[name](), channels=8)), torch.randn(4, 3, 16, 16)
    converted = check_training(model, x, tolerance=1e-7)
    layer = analyze(model, x).layers[0]
    assert layer.in_place, layer.why
    assert layer.follows
    size = 4 * 8 * 16 * 16 * 4
    saved = measure(model, x).held - measure(convert(model), x).held
    assert saved >= 0.98 * size
    assert "in place" in repr(converted.bn)


PASSES = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "softmax": lambda: nn.Softmax(1), "flatten": lambda: nn.Flatten(2, 3)}


@pytest.mark.parametrize("name", PASSES)
def test_a_norm_before_what_keeps_nothing_of_its_input_is_torchs(name):
    model = spread(OneNorm(lambda m, x: m.act(m.bn(m.conv(x))), PASSES[name](), channels=8))
    x = torch.randn(4, 3, 16, 16)
    converted = check_training(model, x)
    (layer,) = analyze(model, x).layers
    assert (layer.in_place, layer.why) == (False, "what follows does not keep the norm's output for backward")
    assert "not in place: what follows does not keep the norm's output" in repr(converted.bn)
    assert measure(convert(model), x).held <= 1.01 * measure(model, x).held

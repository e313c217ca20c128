"""Which ops notice that a zero is a tiny number, directly and behind others, and which do not. Those that do get zeros
in the first step, and the layer is torch's from the second step on."""

import copy

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import spread
from one_norm import OneNorm, images
from torch import nn
from training import check_training

from inplace_abn import convert, report


def reading(read):
    """A forward pass. ``read`` gets the activated tensor, and its result is a part of the net's output."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        return m.last(h), read(h) * 1.0

    return run


def trained_alike(read, activation=None, tolerance=1e-9):
    """What the norm's report says after four steps, which must be those of the original."""
    (layer,) = report(check_training(spread(OneNorm(reading(read), activation)), images(), tolerance=tolerance)).layers
    return layer


ZERO, CHOICE, OTHERS = "tells zeros from other numbers", "chooses by them", "compares them with other values"
READERS = {
    "threshold": (lambda h: F.threshold(-h.detach(), 0, 5.0), ZERO),
    "h != 0": (lambda h: (h != 0).sum(), "ne compares them with zero"),
    "h == 0": (lambda h: h == 0, "eq compares them with zero"),
    "h >= 0": (lambda h: h >= 0, "ge compares them with zero"),
    "-h > 0": (lambda h: -h > 0, "gt compares them with zero"),
    "h * w > 0": (lambda h: h * -torch.ones_like(h) > 0, "gt compares them with zero"),
    "equal": (lambda h: torch.tensor(float(torch.equal(h, F.relu(h)))), ZERO),
    "h < 0": (lambda h: h < 0, "lt compares them with zero"),
    "0 <= h": (lambda h: 0 <= h, "ge compares them with zero"),  # noqa: SIM300
    "h >= another": (lambda h: h >= torch.zeros_like(h), OTHERS),
    "another > h": (lambda h: h.mean() > h, OTHERS),
    "sign": (torch.sign, ZERO),
    "signbit": (torch.signbit, ZERO),
    "heaviside": (lambda h: torch.heaviside(h.detach(), h.new_ones(1)), ZERO),
    "count_nonzero": (torch.count_nonzero, ZERO),
    "bool": (lambda h: h.bool(), ZERO),
    "to bool": (lambda h: h.to(torch.bool), ZERO),
    "any": (lambda h: h.any(), ZERO),
    "logical_not": (torch.logical_not, ZERO),
    "norm 0": (lambda h: torch.linalg.vector_norm(h, 0), ZERO),
    "nonzero": (lambda h: torch.tensor(float(len(h.nonzero()))), ZERO),
    "topk": (lambda h: h.flatten(1).topk(3)[1], "orders values"),
    "sort": (lambda h: h.flatten(1).sort(stable=True)[1], "orders values"),
    "argsort": (lambda h: h.flatten(1).argsort(stable=True), "orders values"),
    "argmax": (lambda h: h.argmax(1), "orders values"),
    "argmin": (lambda h: h.argmin(1), "orders values"),
    "max of a dimension": (lambda h: h.max(1)[1], CHOICE),
    "median of a dimension": (lambda h: h.median(1)[1], CHOICE),
    "unique": (lambda h: torch.tensor(float(len(h.unique()))), "orders values"),
    "adaptive_max_pool2d": (lambda h: F.adaptive_max_pool2d(h, 2, return_indices=True)[1], CHOICE),
    "fractional_max_pool2d": (
        lambda h: F.fractional_max_pool2d(h, 2, output_size=4, return_indices=True)[1],
        CHOICE,
    ),
    "sqrt": (lambda h: torch.sqrt(h.detach()), "takes a root or logarithm"),
    "rsqrt": (lambda h: torch.rsqrt(h.detach()).clamp(-9, 9), "takes a root or logarithm"),
    "log": (lambda h: torch.log(h.detach()).clamp(-9, 9), "takes a root or logarithm"),
    "h ** 1.5": (lambda h: h**1.5, "takes a power that is no whole number"),
    "h ** 0.5": (lambda h: h.detach() ** 0.5, "takes"),
    "h ** tensor": (lambda h: h ** torch.tensor(2.5), "takes a power that is no whole number"),
    "h ** -1": (lambda h: (h.detach() ** -1).clamp(-9, 9), ""),
    "entropy": (lambda h: torch.special.entr(h.detach()), "takes a root or logarithm"),
    "xlogy": (lambda h: torch.xlogy(h.detach(), h.detach()), "takes a root or logarithm"),
    "1 / h": (lambda h: (1 / h.detach()).clamp(-9, 9), "divides"),
    "x / h": (lambda h: (torch.ones_like(h) / h.detach()).clamp(-9, 9), "divides by them"),
    "floor": (torch.floor, "rounds"),
    "remainder": (lambda h: h % 1, "rounds"),
    "floor division": (lambda h: h.detach() // 1, "rounds"),
    "histc": (lambda h: torch.histc(h.detach(), 4, 0, 4), "orders values"),
    "bucketize": (lambda h: torch.bucketize(h.detach(), torch.tensor([0.0, 1.0])), "orders values"),
    "isin": (lambda h: torch.isin(h.detach(), h.new_zeros(1)), ZERO),
    "angle": (lambda h: h.detach().angle(), ZERO),
    "digamma": (lambda h: torch.digamma(h.detach()).clamp(-9, 9), "takes a root or logarithm"),
    "abs > 0": (lambda h: h.abs() > 0, "gt compares them with zero"),
    "a mask of padding": (lambda h: h.abs().sum(1) > 0, "gt compares them with zero"),
    "sum of squares > 0": (lambda h: (h**2).sum(1) > 0, "gt compares them with zero"),
    "if": (lambda h: torch.tensor(2.0 if h.amin() else 1.0), "reads a zero"),
    "item": (lambda h: torch.tensor(float(h.amin().item() == 0)), "reads a zero"),
}


SIGNED = ["signbit", "angle", "digamma", "rsqrt", "h ** -1", "1 / h", "x / h"]
"""What tells zeros of either sign apart."""


@pytest.mark.parametrize("name", READERS)
def test_whoever_tells_a_tiny_number_from_zero_gets_zeros_and_is_named(name):
    read, words = READERS[name]
    # A zero of torch's leaky ReLU is negative.
    for activation in (nn.ReLU(), *([] if name in SIGNED else [nn.LeakyReLU(0.0)])):
        layer = trained_alike(read, activation)
        assert not layer.in_place
        assert "its zeros are tiny numbers in training" in layer.why
        assert words in layer.why


@pytest.mark.parametrize("name", ["h == 0", "count_nonzero", "argmax", "max of a dimension", "floor"])
def test_who_reads_activations_without_zeros_is_no_reader(name):
    read, _ = READERS[name]
    assert trained_alike(read, nn.LeakyReLU(0.1)).in_place
    assert trained_alike(read, nn.SiLU(), tolerance=1e-6).in_place


WAYS = {
    "cat": lambda h: torch.cat([h, torch.ones_like(h)], 1),
    "pad": lambda h: F.pad(h, (1, 1)),
    "reflection pad": lambda h: F.pad(h, (1, 1, 1, 1), mode="reflect"),
    "slice": lambda h: h[:, 1:3, ::2],
    "index": lambda h: h[:, [0, 2]],
    "gather": lambda h: h.gather(1, torch.zeros(2, 4, 8, 8, dtype=torch.long)),
    "reshape": lambda h: h.permute(0, 2, 3, 1).reshape(2, -1),
    "view": lambda h: h.flatten(1),
    "clone": lambda h: h.clone(),
    "detach": lambda h: h.detach(),
    "contiguous": lambda h: h.transpose(1, 2).contiguous(),
    "to": lambda h: h.float(),
    "flip": lambda h: h.flip(3),
    "max_pool2d": lambda h: F.max_pool2d(h, 2),
    "max_pool1d": lambda h: F.max_pool1d(h.flatten(2), 2),
    "max_pool3d": lambda h: F.max_pool3d(h[:, None], 2),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h, 2),
    "amax": lambda h: h.amax((2, 3)),
    "max of a dimension": lambda h: h.max(1)[0],
    "mean": lambda h: h.mean((2, 3)),
    "average pooling": lambda h: F.avg_pool2d(h, 2),
    "nearest": lambda h: F.interpolate(h, scale_factor=2),
    "bilinear": lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
    "times": lambda h: h * 0.5,
    "gated": lambda h: h * h.mean((2, 3), keepdim=True).sigmoid(),
    "minus": lambda h: -h,
    "dropout": lambda h: F.dropout(h, 0.5),
    "stack": lambda h: torch.stack([h, h]),
    "twice": lambda h: h + h,
    "pixel_shuffle": lambda h: F.pixel_shuffle(h, 2),
    "unfold": lambda h: F.unfold(h, 2),
    "copied into": lambda h: torch.ones_like(h).copy_(h),
    "put into": lambda h: torch.ones(2, 8, 8, 8, dtype=h.dtype).index_copy(1, torch.arange(4), h),
    "where": lambda h: torch.where(torch.ones_like(h) > 0, h, torch.ones_like(h)),
    "chunks": lambda h: h.chunk(2, 1)[1],
    "clamp": lambda h: h.clamp(max=0.5),
    "minimum": lambda h: torch.minimum(h, torch.ones_like(h)),
    "norm": lambda h: h.norm(dim=1),
    "deviation": lambda h: h.detach().std((0, 2, 3), correction=0),
    "power": lambda h: h**3,
    "nansum": lambda h: h.nansum(1),
    "nan_to_num": torch.nan_to_num,
    "bicubic": lambda h: F.interpolate(h, scale_factor=2, mode="bicubic"),
    "put into segments": lambda h: h.new_zeros(2, 1, 8, 8).index_add(1, torch.zeros(4, dtype=torch.long), h),
    "several": lambda h: F.max_pool2d(F.pad(torch.cat([h, h], 1), (1, 1))[:, :3], 2).flatten(1),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_reader_behind_what_hands_values_on_gets_zeros_and_is_named(name):
    layer = trained_alike(lambda h: WAYS[name](h) != 0)
    assert not layer.in_place
    assert "ne compares them with zero" in layer.why


HARMLESS = {
    "max-pooling": lambda h: F.max_pool2d(h, 2),
    "max-pooling of the rest": lambda h: F.max_pool1d(h.flatten(2), 2).sum() + F.adaptive_max_pool2d(h, 2).sum(),
    "indices that nobody reads": lambda h: F.max_pool2d(h, 2, return_indices=True)[0],
    "largest value": lambda h: h.max(1)[0] + h.amax(1),
    "h > 0": lambda h: h * (h > 0),
    "h <= 0": lambda h: h.masked_fill(h <= 0, 1.0),
    "h > 0.5": lambda h: h > 0.5,
    "h == 0.5": lambda h: h == 0.5,
    "square": lambda h: h**2,
    "root of what is added to": lambda h: (h + 1e-5).sqrt(),
    "root of what is next to zero": lambda h: (h + 1e-12).clamp(min=1e-12).log(),
    "clamped": lambda h: h.clamp(min=0) == 0,
    "activated again": lambda h: F.relu(h) == 0,
    "calculated": lambda h: (h @ h.transpose(2, 3) + 1).sqrt(),
    "convolution": lambda h: F.conv2d(h, h.new_ones(1, 4, 1, 1), h.new_ones(1)).argmax(1),
    "softmax": lambda h: h.softmax(1).argmax(1),
    "not its own": lambda h: torch.zeros_like(h).index_fill(1, torch.tensor([0]), 1.0) == 0,
    "a power of a base": lambda h: 2.0**h,
    "its shape": lambda h: h.new_ones(h.shape) == 0,
    "a number for a log": lambda h: torch.tensor(h.mean().item()),
    "is it NaN": lambda h: h.isnan() | h.isinf(),
    "cut off": lambda h: F.relu6(h) == 0,
    "random": lambda h: F.dropout(h) * (torch.rand_like(h) > 0.5),
    "normalised": lambda h: h / (h.norm(dim=1, keepdim=True) + 1e-5),
    "frequencies": lambda h: torch.fft.rfft2(h).abs() > 0.5,
    "memory of what was freed": lambda h: sum((torch.zeros_like(h) == 0).sum() for _ in range(9)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_calculates_is_no_reason(name):
    layer = trained_alike(HARMLESS[name])
    assert layer.in_place, layer.why


DIVIDED = {
    "normalize": lambda h: F.normalize(h, dim=1),
    "by a sum": lambda h: h / (h.sum(1, keepdim=True) + 1e-12),
    "by a norm": lambda h: h / (1e-10 + h.norm(dim=1, keepdim=True)),
    "by the largest": lambda h: h / h.amax(1, keepdim=True).clamp(min=1e-12),
    "similarity": lambda h: F.cosine_similarity(h, torch.ones_like(h), dim=1),
}


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_divided_by_next_to_nothing_is_torchs_where_all_are_zero(dtype, name):
    """Pixels that are zero in every channel became numbers of the size of all others, in silence."""

    def run(m, x):
        h = DIVIDED[name](m.act(m.bn(m.conv(x))))
        seen.append(h.detach().double())
        return h

    torch.manual_seed(0)
    model = OneNorm(run)
    with torch.no_grad():
        model.bn.weight.fill_(30)
        model.bn.bias.fill_(-30)
    model, seen = model.to(dtype), []
    converted = convert(copy.deepcopy(model))
    optimizer = torch.optim.SGD(converted.parameters(), 0.0)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8).to(dtype)
        for each in (model, converted):
            each(x).square().mean().backward()
        optimizer.step()
        expected, found = seen[-2:]
        assert (expected == 0).any()
        assert (found[expected == 0] == 0).all()
    (layer,) = report(converted).layers
    assert "div divides by them" in layer.why


@pytest.mark.parametrize("module", [nn.Hardswish(), nn.GELU()], ids=str)
def test_hardswish_and_gelu_have_zeros_too_and_they_are_positive(module):
    def told(read):
        model = spread(OneNorm(reading(read), module))
        with torch.no_grad():
            # Some values lie in the flat part, or far in the tail.
            model.bn.weight.mul_(8)
        (layer,) = report(check_training(model, images(), tolerance=1e-6)).layers
        return layer

    for read in (lambda h: h == 0, lambda h: h > 0, lambda h: h <= 0, torch.count_nonzero, lambda h: h.argmax(1)):
        assert "its zeros are tiny numbers in training" in told(read).why
    for read in (lambda h: h.abs().amax(1), lambda h: F.max_pool2d(h, 2)):
        assert told(read).in_place

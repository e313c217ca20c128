"""Code that would notice that a relu's zero is a tiny number in training gets zeros in the first step, and the layer is
torch's from the second step on."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import BatchNormAct2d, conv, spread
from one_norm import OneNorm, images
from test_watch_readers import ZERO, reading, trained_alike
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import analyze, convert, report, verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_what_follows_has_the_dtype_and_memory_format_that_it_has_with_torch(format, dtype):
    """Values that lose their tags were contiguous, and of float32 in 16 bits."""

    def run(m, x):
        h = m.act(m.bn(x))
        return F.dropout(h, 0.0), F.max_pool2d(h, 2), h.clone(), h * 2.0, h == 0

    seen = []
    for made in (OneNorm(run), convert(OneNorm(run))):
        x = torch.randn(2, 4, 8, 8, dtype=dtype).contiguous(memory_format=format).requires_grad_()
        seen.append([(t.dtype, t.stride()) for t in made(x)])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("site", ["shared", "call", "residual", "own"])
def test_readers_are_found_wherever_the_activation_is(site):
    class Sites(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last, self.act = conv(4, 4), conv(4, 4), nn.ReLU()
            self.first = nn.Sequential(conv(3, 4), nn.ReLU())
            self.bn = BatchNormAct2d(4) if site == "own" else nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.first(x)
            h = self.bn(self.conv(x))
            if site == "residual":
                h = h + x
            if site == "call" or site == "residual":
                h = F.relu(h)
            elif site == "shared":
                h = self.act(h)
            mask = (h != 0).to(h.dtype)
            return self.act(self.last(h) * mask)

    (layer,) = report(check_training(spread(Sites()), images())).layers
    assert "ne compares them with zero" in layer.why


class SegNet(nn.Module):
    """An encoder, and a decoder that places its values by the encoder's pooling indices."""

    def __init__(self, width=8):
        super().__init__()
        self.encoders = nn.ModuleList(
            nn.Sequential(conv(i, o), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
            for i, o in ((3, width), (width, width), (width, width))
        )
        self.decoders = nn.ModuleList(
            nn.Sequential(conv(width, width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        chosen = []
        for encoder in self.encoders:
            x, indices = self.pool(encoder(x))
            chosen.append(indices)
        for decoder in self.decoders:
            x = decoder(self.unpool(x, chosen.pop()))
        return x


def segnet():
    model = spread(SegNet())
    with torch.no_grad():
        for encoder in model.encoders:
            encoder[1].bias -= 1.5  # makes windows of zeros only, as in trained nets
    return model


def test_a_segnet_trains_as_torchs_whose_pooling_indices_place_values():
    """Ties between tiny numbers are broken otherwise than ties between zeros, so the pooling indices would change."""
    model, x = segnet(), torch.randn(2, 3, 32, 32)
    layers = {layer.name: layer for layer in report(check_training(model, x)).layers}
    for i in range(3):
        assert not layers[f"encoders.{i}.1"].in_place
        assert "max_pool2d_with_indices chooses by them" in layers[f"encoders.{i}.1"].why
        assert layers[f"decoders.{i}.1"].in_place
    # verify would tell.
    assert verify(model, convert(copy.deepcopy(model)), x)


def test_a_step_is_enough_to_report_who_reads():
    found = analyze(segnet(), torch.randn(2, 3, 32, 32))
    assert [layer.name for layer in found.in_place] == [f"decoders.{i}.1" for i in range(3)]
    assert "max_unpool2d reads its choice" in found.layers[0].why


def test_a_reader_is_told_once_with_its_name_and_the_layers(logged):
    records = logged(logging.INFO)
    check_training(spread(OneNorm(reading(lambda h: h == 0))), images())
    told = [record.getMessage() for record in records if record.getMessage().startswith("bn: ")]
    assert len(told) == 1
    assert "eq compares them with zero" in told[0]


class AffineAndPadded(nn.Module):
    """A net like HGNetV2's stem. One bias is added to all values of an activated tensor, which is then padded with
    zeros and pooled."""

    def __init__(self, bias):
        super().__init__()
        self.conv, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.full((1,), bias))

    def forward(self, x):
        h = self.scale * F.relu(self.bn(self.conv(x))) + self.bias
        return F.max_pool2d(F.pad(h, (0, 1, 0, 1)), 2, 1)


@pytest.mark.parametrize("bias", [0.0, 1e-30, -1e-30, 0.1])
def test_a_tie_with_padding_is_broken_otherwise_only_while_a_bias_is_exactly_zero(bias):
    """The gradient of a bias that is exactly zero differs, because padding takes a part of it. No other gradient may
    differ."""
    model, x = spread(AffineAndPadded(bias)), images()
    with torch.no_grad():
        model.bias.fill_(bias)
    found = verify(model, convert(copy.deepcopy(model)), x)
    wrong = {name for name in found.errors if found.errors[name] > found.accepted(name)}
    assert wrong <= ({"gradient of bias"} if bias == 0 else set()), str(found)


@pytest.mark.parametrize(
    "read",
    [lambda h: h.amin((2, 3)), lambda h: torch.aminmax(h)[0], torch.min, torch.max, torch.median, lambda h: h.prod(1)],
    ids=["amin", "aminmax", "min", "max", "median", "prod"],
)
def test_gradients_of_the_smallest_values_are_torchs(read):
    """Backward looked for a zero among tags, found none, and divided by their number: all gradients were NaN."""
    try:
        read(torch.ones(1, 1, 1, 1, requires_grad=True)).sum().backward()
    except RuntimeError as error:
        pytest.skip(str(error))
    trained_alike(read)


@pytest.mark.parametrize(
    "read", [lambda h, p: h**p, lambda h, p: h.clamp_min(0.0) ** p * (h == 0)], ids=["pow", "comparison behind"]
)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_readers_that_read_again_in_backward_get_zeros(is_checkpointed, read):
    """Backward, or what a checkpoint repeats, saw the tags: the exponent's gradient was NaN in the first step."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        power = checkpoint(read, h, m.exponent, use_reentrant=False) if is_checkpointed else read(h, m.exponent)
        return m.last(h), power

    model = OneNorm(run)
    model.exponent = nn.Parameter(torch.full((4, 1, 1), 1.5))
    (layer,) = report(check_training(spread(model), images())).layers
    assert not layer.in_place


@torch.library.custom_op("inplace_abn_tests::is_zero", mutates_args=())
def is_zero(h: torch.Tensor) -> torch.Tensor:
    return (h == 0).to(h.dtype)


OUT_OF_SIGHT = {
    "op of another library": (lambda h: is_zero(h.detach()), "inplace_abn_tests::is_zero may tell them from zeros"),
    "list": (lambda h: torch._foreach_sqrt([h.detach()])[0], "sqrt takes a root or logarithm"),
    "sign of a list": (lambda h: torch._foreach_sign([h.detach(), h.detach()])[1], ZERO),
    "bits": (lambda h: (h.detach().view(torch.int64) == 0).double(), "view reads their bits"),
    "data": (lambda h: h.data.sign(), ZERO),
}


@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_ops_that_are_not_torchs_usual_ones_get_zeros(name):
    """These read tags in silence."""
    read, words = OUT_OF_SIGHT[name]
    layer = trained_alike(read)
    assert not layer.in_place
    assert words in layer.why


def test_more_micro_batches_than_are_watched_do_as_torch_once_a_reader_was_seen():
    """From the ninth micro-batch of a step on, nobody watched, and the reader saw tags."""

    def steps(model):
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            for batch in range(12):
                torch.manual_seed(batch)
                y, read = model(images().double())
                (y.sum() + y.square().mean() * read).backward()
                seen.append(read.item())
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return seen

    model = spread(OneNorm(reading(lambda h: (h != 0).double().mean()))).double()
    torch.testing.assert_close(steps(convert(copy.deepcopy(model))), steps(model))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_after_a_norm_are_no_error(layout):
    """The watched step failed in every net that multiplies by a sparse matrix, as graph convolutions do."""
    adjacency = torch.eye(64, dtype=torch.float64).to_sparse(layout=layout)
    trained_alike(lambda h: torch.sparse.mm(adjacency, h.permute(2, 3, 0, 1).reshape(64, -1)))


def test_what_becomes_sparse_reads_tags():
    assert trained_alike(lambda h: h.detach().to_sparse().values().numel() * h.mean()).why

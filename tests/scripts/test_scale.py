"""The predictions of scripts/scale.py."""

import scale
from foreign_nets import conv
from torch import nn


def net():
    layers = [nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8)) for _ in range(6)]
    return nn.Sequential(conv(3, 8), *layers)


TINY = scale.Net("torch", lambda package: net(), (3, 32, 32), ((4, 3, 32, 32), (8, 3, 32, 32)))


def test_a_row_tells_what_a_sample_holds_and_how_many_fit():
    cells = dict(enumerate(scale.row("tiny", TINY)))
    assert cells[0] == "tiny, 3x32x32"
    activation = 8 * 32 * 32 * 2
    model = net().bfloat16()
    native = scale.held_per_sample(model, TINY)
    ours = scale.held_per_sample(scale.convert(model), TINY)
    # Each norm keeps its input, and each convolution what ReLU made of the norm's output.
    assert 12 * activation <= native <= 13 * activation
    assert 6 * activation <= ours <= 7 * activation
    assert float(cells[5].partition("**")[2].removesuffix(" times**")) > 1.8
    # All but 0.05 of what weights, gradients and moments leave of 80 GiB.
    assert scale.largest_batch(scale.GIB, 2**20) == int(0.95 * (80 - 12) * 1024)


def test_the_traffic_of_norms_is_that_of_their_channels():
    norms, traffic = scale.traffic_of_norms(net())
    # Of seven other ranks mean, variance and count, and a ring's two passes over two sums and a count.
    assert norms == 6
    assert traffic == int(6 * 4 * (7 * 17 + 2 * 7 / 8 * 17))

"""Offsets and counts that do not fit into 32 bits, in memory that exists only where it is written."""

import mmap

import pytest
import torch
from cases import needs_kernels, parameters, relative_error

from emulation import emulated
from inplace_abn.activations import find
from inplace_abn.kernels import ops

pytestmark = [pytest.mark.emulated, *needs_kernels]

FAR = 2**31 + 64
# Truncated to 32 bits, this is less than the index of the element at which a block starts.
MANY = 2**32 + 2**10 + 3
TAIL = (1e-5, False, find("leaky_relu").code, 0.2)


@pytest.fixture
def emulator():
    loaded = emulated.load()
    yield loaded
    loaded.set()


@pytest.fixture
def memory():
    """A function that makes tensors of zeros, however large."""
    maps = []

    def make(elements, dtype=torch.bfloat16):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        maps.append(mmap.mmap(-1, dtype.itemsize * elements, flags=flags))
        return torch.frombuffer(maps[-1], dtype=dtype)

    return make


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("shape", [(3, 8, 45), (3, 3, 5), (3, 24), (3, 5)], ids=str)
def test_batches_may_be_further_apart_than_32_bits_count(shape, number, emulator, memory):
    emulator.set(device=number)
    inner = [45, 1] if shape[2:] == (45,) else [5, 1] if len(shape) == 3 else [1]

    def far(values):
        return memory(3 * FAR).as_strided(shape, (FAR, *inner)).copy_(values)

    values = [torch.randn(shape).bfloat16() for _ in range(3)]
    weight, bias, *_ = parameters(shape[1], torch.float32)
    results = []
    for run, place in ((vars(ops), torch.clone), (emulator.ops, far)):
        x, dz, residual = (place(t) for t in values)
        mean, var = run["local_forward"](x, weight, bias, residual, None, None, 0.1, None, *TAIL, True)
        dx, dresidual = place(values[0]), place(values[0])
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        outputs = {"dx": dx, "dweight": dweight, "dbias": dbias, "dresidual": dresidual}
        run["local_backward"](x, dz, var, weight, bias, residual, *TAIL, True, **outputs)
        results.append([x.clone(), mean, var, *outputs.values()])
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected.double()) < 3e-2


@pytest.mark.parametrize("shape", [(1, 1, MANY), (MANY, 1)], ids=["one plane", "many rows"])
@pytest.mark.parametrize("late", [0, 1], ids=["vectors", "one by one"])
def test_there_may_be_more_elements_than_32_bits_count(late, shape, emulator, memory):
    """Some blocks run, the first and the last among them. None of them may leave the tensors."""
    emulator.set(seed=late, device=3, sample=3)
    # The strides of axes of one element mean nothing, and must not matter.
    strides = (7, 7, 1) if len(shape) == 3 else (1, 1)
    x, residual = (memory(MANY + 16).as_strided(shape, strides, start) for start in (0, late))
    mean, var = emulator.ops["statistics"](x)
    assert mean.item() == var.item() == 0
    bias = torch.full((1,), 3.0)
    emulator.ops["forward"](x, mean, var + 1, None, bias, residual, *TAIL, True)
    # The kernel decides at which end its first block is.
    assert 3 in (x.view(-1)[0].item(), x.view(-1)[-1].item())


def test_there_may_be_more_blocks_than_a_grid_has(emulator, memory):
    emulator.set(sample=3)
    channels = 2**31 + 8
    x, mean, var = memory(2 * channels).view(1, channels, 2), *(memory(channels, torch.float32) for _ in range(2))
    mean[0] = mean[-1] = -3
    emulator.ops["forward"](x, mean, var, None, None, None, *TAIL, True)
    assert (x[0, 0] > 0).all()
    assert (x[0, -1] > 0).all()


@pytest.mark.parametrize("shape", [(2**16 + 3, 1, 1), (2, 2**14 + 3, 1)], ids=["rows", "channels"])
def test_a_device_with_few_multiprocessors_and_one_with_many_do_all_of_a_long_axis(shape, emulator):
    x = torch.ones(shape, dtype=torch.bfloat16)
    for device in range(4):
        emulator.set(device=device, orders=1)
        mean, var = emulator.ops["statistics"](x)
        assert torch.equal(mean, torch.ones_like(mean))
        assert not var.any()

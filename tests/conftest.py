"""What tests share: the devices there are, a fixed seed, and on request one thread or a fresh compiler."""

import os

import pytest
import torch
from cases import needs_kernels

from inplace_abn import functions


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "huge: takes most of a device's memory, and so runs alone")
    config.addinivalue_line("markers", "emulated: runs the CUDA kernels on the CPU")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        # Processes side by side that all use every processor wait for each other.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


# What holds of the graph node in C++ holds without it. Compilers trace Python's in any case.
BOTH_NODES = {
    "test_allocations",
    "test_calibration",
    "test_double_backward",
    "test_holders",
    "test_hooks",
    "test_instance_norm_modules",
    "test_keep_input",
    "test_modified",
    "test_ownership",
    "test_reuse",
    "test_threads",
}


# What the kernels compute and write is tested on the emulated device, too (tests/emulation).
EMULATED = {
    "test_activations",
    "test_dead_positions",
    "test_functions",
    "test_instance_norm",
    "test_ops",
    "test_residual",
}

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
EMULATION = pytest.param("emulated", marks=[pytest.mark.emulated, *needs_kernels])


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=1, help="how many times as many random cases on the emulated device")


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        emulation = [EMULATION] if metafunc.module.__name__.split(".")[-1] in EMULATED else []
        metafunc.parametrize("device", [*DEVICES, *emulation], indirect=True)
    if metafunc.module.__name__.split(".")[-1] in BOTH_NODES:
        compiled = ["C++ node"] if functions._node is not None else []
        metafunc.parametrize("node", [*compiled, "Python node"], indirect=True)


# Of all tests, because pytest sets up none that is only added to a test's names.
@pytest.fixture(autouse=True)
def node(request, monkeypatch):
    if getattr(request, "param", "") == "Python node":
        monkeypatch.setattr(functions, "_node", None)


@pytest.fixture(autouse=True, scope="session")
def full_precision():
    """Convolutions and matrix products of float32 on CUDA are compared with the CPU's."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """Tensors this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler(one_thread):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "emulated":
        from emulation import emulated

        emulated.install(monkeypatch, request.node.nodeid)
        return torch.device("cpu")
    return torch.device(request.param)

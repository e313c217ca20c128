"""Fixtures that tests share: the available devices, a fixed seed, and on request log records, one thread or a fresh
compiler."""

import gc
import logging
import os

import pytest
import torch
from cases import needs_kernels

from inplace_abn.autograd import nodes


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "huge: takes most of a device's memory, and so runs alone")
    config.addinivalue_line("markers", "emulated: runs the CUDA kernels on the CPU")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        # Several processes that each use every processor would wait for each other. Tests start further processes.
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


# These tests run with the graph node in C++ and with the one in Python. Compilers trace the one in Python in any case.
BOTH_NODES = {
    "test_allocations",
    "test_by_value",
    "test_calibration",
    "test_double_backward",
    "test_holders",
    "test_hooks",
    "test_instance_norm_modules",
    "test_late_writes",
    "test_lossy_hooks",
    "test_modified",
    "test_norms_of_samples",
    "test_overwrite_input",
    "test_ownership",
    "test_results",
    "test_reuse",
    "test_threads",
}


# These tests check what the kernels compute and write. They run on the emulated device, too (tests/emulation).
EMULATED = {
    "test_activations",
    "test_dead_positions",
    "test_functions",
    "test_written_results",
    "test_infinities",
    "test_instance_norm",
    "test_norms_of_rows",
    "test_ops",
    "test_residual",
    "test_schemas",
    "test_shared_statistics",
    "test_verbatim",
}

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
EMULATION = pytest.param("emulated", marks=[pytest.mark.emulated, *needs_kernels])


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=1, help="how many times as many random cases on the emulated device")


def pytest_collection_modifyitems(items):
    # If the longest tests came last, one process would run them while the others have nothing left to do.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        emulation = [EMULATION] if metafunc.module.__name__.split(".")[-1] in EMULATED else []
        metafunc.parametrize("device", [*DEVICES, *emulation], indirect=True)
    if metafunc.module.__name__.split(".")[-1] in BOTH_NODES:
        compiled = ["C++ node"] if nodes.cpp is not None else []
        metafunc.parametrize("node", [*compiled, "Python node"], indirect=True)


# This fixture is for all tests, because pytest does not set up a fixture that a test does not name.
@pytest.fixture(autouse=True)
def node(request, monkeypatch):
    if getattr(request, "param", "") == "Python node":
        # This happens once in a process. Without the node in C++ that node would build no graph in any later test.
        nodes.calibrate()
        monkeypatch.setattr(nodes, "cpp", None)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Many tests and measurements collect garbage. They do not look through what exists before a module's tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def full_precision():
    """Turns TF32 off, because convolutions and matrix products of float32 on CUDA are compared with those on the
    CPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


# torch.manual_seed also formats the stack, and keeps it, for every kind of device that is not there.
manual_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def seed():
    manual_seed(0)


@pytest.fixture
def logged():
    """A function of a level. It returns the list of the package's log records, which grows by all from this level
    on."""
    logger, handler, records = logging.getLogger("inplace_abn"), logging.Handler(), []
    handler.emit = records.append
    before = logger.level
    logger.addHandler(handler)

    def at(level):
        logger.setLevel(level)
        return records

    yield at
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def one_thread():
    """Runs on one thread. Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler(one_thread, monkeypatch):
    # Dynamo times the guards of each frame once, and empties the processor's caches before that. It only logs the time.
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
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

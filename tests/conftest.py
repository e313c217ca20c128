"""What tests share: the devices there are, a fixed seed, and on request one thread or a fresh compiler."""

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


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


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ]
)
def device(request):
    return torch.device(request.param)

"""A model is watched right in several threads and processes, beside compilers, and after it was interrupted."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv
from one_norm import images
from ranks import on_each_rank
from test_watch_wrappers import CHECKPOINTS, check_given_up, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import check_training, differences

from inplace_abn import _torch, convert, guard, report
from inplace_abn.conversion import watch


def test_threads_watch_models_of_their_own():
    expected = report(check_training(net(), images(), tolerance=1e-6)).to_dict()
    found = []

    def run():
        model = convert(net())
        model(images()).sum().backward()
        found.append(report(model).to_dict())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whys = [[layer["why"] for layer in told["layers"]] for told in [expected, *found]]
    assert whys == [whys[0]] * 5


def seeded():
    torch.manual_seed(0)
    return net().double()


@pytest.mark.parametrize("wrapper", ["ddp", "find_unused_parameters", "static_graph", "fsdp", "fsdp of blocks"])
@pytest.mark.parametrize("checkpointed", [False, True])
@on_each_rank(2)
def test_data_parallel_wrappers(wrapper, checkpointed):
    def wrapped(model):
        if checkpointed:
            model.run = CHECKPOINTS["plain"]
        if wrapper.startswith("fsdp"):
            for block in (model.first, model.second) if wrapper != "fsdp" else ():
                fully_shard(block)
            return fully_shard(model)
        options = {wrapper: True} if wrapper != "ddp" else {}
        return DistributedDataParallel(model, **options)

    def losses(model):
        guard.generations.current += 198 - guard.generations.current % 100
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), {}
        for step in range(4):
            torch.manual_seed(10 * step + torch.distributed.get_rank())
            optimizer.zero_grad()
            y = model(images().double())
            y.square().mean().backward()
            optimizer.step()
            grads = {name: p.grad for name, p in model.named_parameters()}
            full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}
            found |= {f"step {step}, gradient of {name}": g for name, g in full.items()} | {
                f"output {step}": y.detach()
            }
        return found

    model = seeded()
    converted = convert(copy.deepcopy(model))
    errors = differences(losses(wrapped(converted)), losses(wrapped(model)))
    assert max(errors.values()) < 1e-6, errors
    check_given_up(converted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_functions_run_in_watched_steps(fullgraph):
    """A function that was compiled as a full graph was torch's error in the first step."""
    compiled = torch.compile(lambda h: h.tanh() * 2, backend="eager", fullgraph=fullgraph)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4)

        def forward(self, x):
            return compiled(self.last(F.relu(self.norm(self.conv(x)))))

    (layer,) = report(check_training(Net(), images())).layers
    assert layer.in_place
    # The compiler is at work again.
    torch._dynamo.utils.counters.clear()
    compiled(torch.randn([2] * (5 + fullgraph)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class CompiledBlocks(nn.Module):
    """Blocks that are compiled, each of which is checkpointed in eager code."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(conv(3, 3), nn.BatchNorm2d(3), nn.ReLU(), conv(3, 3), nn.GELU()) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            # A copy of a compiled module is not compiled.
            if block._compiled_call_impl is None:
                block.compile(backend="aot_eager")
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_the_recomputation_of_a_compiled_block_does_what_its_watched_forward_pass_did():
    """The forward pass ran as it is written, and the recomputation was compiled, which was torch's CheckpointError."""
    check_training(CompiledBlocks(), torch.randn(2, 3, 8, 8))


def test_a_watch_whose_forward_pass_was_interrupted_ends_with_the_next_call():
    """torch calls no hooks after a KeyboardInterrupt. The watch went on for all that came afterwards."""

    class Interrupted(nn.Module):
        def __init__(self, interrupts):
            super().__init__()
            self.conv, self.norm, self.interrupts = conv(3, 4), nn.BatchNorm2d(4), interrupts

        def forward(self, x):
            if self.interrupts:
                raise KeyboardInterrupt
            return self.conv(x)

    with pytest.raises(KeyboardInterrupt):
        convert(Interrupted(True))(images())
    assert watch.current() is not None
    convert(Interrupted(False))(images())
    assert watch.current() is None
    assert _torch.count_dispatch_modes() == 0


def test_compilers_go_on_after_threads_have_watched_at_the_same_time():
    """The thread that ended last restored what the other one had set, for good."""
    both = threading.Barrier(2, timeout=30)
    first_ended = threading.Event()

    class Net(nn.Module):
        def __init__(self, is_first):
            super().__init__()
            self.conv, self.norm, self.is_first = conv(3, 4), nn.BatchNorm2d(4), is_first

        def forward(self, x):
            both.wait()
            if not self.is_first:
                assert first_ended.wait(30)
            return self.norm(self.conv(x))

    def run(is_first):
        convert(Net(is_first))(images())
        if is_first:
            first_ended.set()

    compiled = torch.compile(lambda t: t.sin(), backend="eager")
    threads = [threading.Thread(target=run, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._dynamo.utils.counters.clear()
    compiled(torch.randn(3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

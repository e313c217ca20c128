"""Ways of running a wiring and of calling backward, and everything that a user can see afterwards."""

import gc
import itertools
from contextlib import nullcontext

import torch
from buffers import identity_hooks
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from wired_nets import Retained, Unchanged, WiredNet, ramp
from wirings import WIRINGS

# --- Losses and ways of calling backward: (net, run) -> gradients beside the leaves' .grad ---------------------------


def weighted(y):
    return (y * ramp(y)).sum()


def simple(loss):
    def backward(n, run):
        y = run()
        value = loss(y)
        del y
        value.backward()
        return [value]

    return backward


def gradient_by_the_caller(n, run):
    y = run()
    g = ramp(y)
    n.kept.append(g)
    y.backward(g)
    return [y]


def gradient_by_the_caller_and_forgotten(n, run):
    y = run()
    torch.autograd.backward([y], [ramp(y)])
    return []


def retained(times):
    def backward(n, run):
        loss = weighted(run())
        for _ in range(times):
            loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    return backward


def by_autograd_grad(n, run):
    return torch.autograd.grad(weighted(run()), list(n.leaves.values()), allow_unused=True)


def by_autograd_grad_of_some(n, run):
    loss = weighted(run())
    leaves = list(n.leaves.values())
    some = [
        torch.autograd.grad(loss, leaves[::step][:3], retain_graph=step != 1, allow_unused=True) for step in (3, 2, 1)
    ]
    return list(itertools.chain(*some))


def two_losses(n, run):
    y = run()
    first, second = weighted(y), y.square().sum()
    del y
    first.backward(retain_graph=True)
    second.backward()
    return []


def two_losses_at_once(n, run):
    y = run()
    torch.autograd.backward([weighted(y), y.square().sum()])
    return []


def micro_batches(n, run):
    for _ in range(3):
        weighted(run()).backward()
    return []


def two_graphs_alive(n, run):
    first, second = weighted(run()), run().square().sum()
    second.backward()
    first.backward()
    return []


def anomaly_mode(n, run):
    with torch.autograd.set_detect_anomaly(True):
        weighted(run()).backward()
    return []


def double_differentiable(n, run):
    return torch.autograd.grad(weighted(run()), list(n.leaves.values()), create_graph=True, allow_unused=True)


LOSSES = {
    "weighted": simple(weighted),
    "sum": simple(torch.sum),
    "mean": simple(torch.mean),
    "square": simple(lambda y: y.square().sum()),
    "norm": simple(torch.linalg.vector_norm),
    "gradient by the caller": gradient_by_the_caller,
    "gradient by the caller, forgotten": gradient_by_the_caller_and_forgotten,
    "retained once": retained(1),
    "retained twice": retained(2),
    "autograd.grad": by_autograd_grad,
    "autograd.grad of some": by_autograd_grad_of_some,
    "two losses": two_losses,
    "two losses at once": two_losses_at_once,
    "micro-batches": micro_batches,
    "two graphs alive": two_graphs_alive,
    "anomaly mode": anomaly_mode,
    "create_graph": double_differentiable,
}


# --- Contexts: how the wiring is run ---------------------------------------------------------------------------------


def checkpointed(reentrant, nested=False):
    def run(n, wiring):
        n.watched = False

        def function(_):
            if nested:
                return checkpoint(lambda _: wiring(n), n.a, use_reentrant=reentrant)
            return wiring(n)

        return lambda: checkpoint(function, n.a, use_reentrant=reentrant)

    return run


def under(context):
    def run(n, wiring):
        def function():
            with context():
                return wiring(n)

        return function

    return run


def without_grad_before(n, wiring):
    def run():
        with torch.no_grad():
            wiring(n)
        n.kept.clear()
        return wiring(n)

    return run


def kept_in_hooks():
    kept = []

    def pack(t):
        kept.append(t)
        return len(kept) - 1

    return saved_tensors_hooks(pack, lambda i: kept[i].view_as(kept[i]))


CONTEXTS = {
    "plain": under(nullcontext),
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "nested checkpoint": checkpointed(False, nested=True),
    "nested reentrant checkpoint": checkpointed(True, nested=True),
    "identity hooks": under(identity_hooks),
    "hooks that keep": under(kept_in_hooks),
    "save_on_cpu": under(save_on_cpu),
    "after a run without grad": without_grad_before,
}


# --- What a user can see ---------------------------------------------------------------------------------------------


def evaluate(row, inplace, device):
    """Everything a user can see after backward: loss and gradients returned, .grad of leaves, and what was kept."""
    n = WiredNet(row, inplace, device)
    results = LOSSES[row.loss](n, CONTEXTS[row.context](n, WIRINGS[row.wiring]))
    gc.collect(0)
    return {
        "results": values(list(results)),
        "gradients": {name: values(leaf.grad) for name, leaf in n.leaves.items()},
        "kept": values(n.kept),
    }


def values(held):
    if isinstance(held, Retained):
        return values([held.of, held.of.grad])
    if isinstance(held, (list, tuple)):
        for h in held:
            if isinstance(h, Unchanged):
                torch.testing.assert_close(h.now, h.then, rtol=0, atol=0)
        return [values(h) for h in held if not isinstance(h, Unchanged)]
    return None if held is None else torch.as_tensor(held).detach().clone().cpu()

"""Backward in several threads, through graphs of their own or through one that is retained."""

import threading

import pytest
import torch
from evaluation import evaluate, values, weighted
from wired_nets import Row, WiredNet
from wirings import WIRINGS

pytestmark = pytest.mark.usefixtures("one_thread")


def in_threads(functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("wiring", ["deep chain", "residual block", "conv(abn(x)) + x", "same module twice"])
def test_graphs_in_several_threads_do_not_disturb_each_other(wiring, device):
    row = Row(wiring)
    expected = evaluate(row, False, device)["gradients"]
    nets = [WiredNet(row, True, device) for _ in range(8)]

    def step(n):
        for _ in range(10):
            for leaf in n.leaves.values():
                leaf.grad = None
            weighted(WIRINGS[wiring](n)).backward()

    in_threads([lambda n=n: step(n) for n in nets])
    for n in nets:
        actual = {name: values(leaf.grad) for name, leaf in n.leaves.items()}
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_threads_may_run_backward_through_one_retained_graph(device):
    def losses(n):
        z = n.unit(1, n.unit(0))
        return [weighted(n.conv(z, i) * (i + 1)) for i in range(4) for _ in range(2)]

    expected, actual = WiredNet(Row("chain"), False, device), WiredNet(Row("chain"), True, device)
    for loss in losses(expected):
        loss.backward(retain_graph=True)
    in_threads([lambda loss=loss: loss.backward(retain_graph=True) for loss in losses(actual)])
    for name, leaf in expected.leaves.items():
        torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)

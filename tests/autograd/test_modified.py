"""Backward raises if a saved tensor was modified: the output or an operand of an ABN, or a tensor that another op saved
and an ABN overwrote."""

import re
from contextlib import nullcontext

import maths
import pytest
import torch
import torch.nn.functional as F
from evaluation import CONTEXTS, weighted
from torch.utils.checkpoint import checkpoint
from wired_nets import Row, WiredNet, leaf_input, parameters, ramp

from inplace_abn import inplace_abn

pytestmark = pytest.mark.usefixtures("one_thread")

MODIFIED = "inplace operation|modified in place"

CHANGES = {
    "mul_": lambda z: z.mul_(2),
    "+=": lambda z: z.__iadd__(1),
    "relu_": lambda z: F.relu_(z),
    "one value": lambda z: z.__setitem__((0, 0, 0, 0), 5.0),
    "zero_ of detach": lambda z: z.detach().zero_(),
    "through a view": lambda z: z[1:].mul_(3),
    "through a view of detach": lambda z: z.detach().flatten()[3:5].fill_(7),
    "out=": lambda z: torch.mul(z.detach(), 2, out=z.detach()),
    "copy_": lambda z: z.copy_(torch.ones_like(z)),
    "dropout in place": lambda z: F.dropout(z, 0.5, inplace=True),
    "another ABN": lambda z: inplace_abn(z.detach(), None, None, None, None),
}


HOOKED = ["identity hooks", "hooks that keep", "save_on_cpu", "checkpoint", "nested checkpoint"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("context", ["plain", "reentrant checkpoint", *HOOKED])
@pytest.mark.parametrize("consumer", ["nothing saved", "conv", "exp"])
def test_output_modified_afterwards_is_an_error_unless_hooks_saved_it_in_time(change, context, consumer, device):
    def wiring(n):
        z = n.unit()
        y = {"nothing saved": torch.neg, "conv": lambda z: n.conv(z, 1), "exp": torch.exp}[consumer](z)
        changed = z if n.inplace else z.clone()
        torch.manual_seed(5)
        CHANGES[change](changed)
        return y + changed.neg()

    expected, actual = (WiredNet(Row("chain"), inplace, device) for inplace in (False, True))
    weighted(CONTEXTS[context](expected, wiring)()).backward()
    loss = weighted(CONTEXTS[context](actual, wiring)())
    with pytest.raises(RuntimeError, match=MODIFIED) if context not in HOOKED else nullcontext():
        try:
            loss.backward()
        except RuntimeError as error:
            if context in HOOKED and re.search(MODIFIED, str(error)):
                return
            raise
        for name, leaf in expected.leaves.items():
            torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "context", ["plain", "identity hooks", "hooks that keep", "checkpoint", "reentrant checkpoint"]
)
def test_message_about_a_modified_output_names_the_package_and_the_remedy(context, device):
    n = WiredNet(Row("chain"), True, device)

    def wiring(n):
        r = n.unit(0)
        y = n.unit(1, r)
        y += r
        return n.abn(n.stem(2, y), 2)

    loss = weighted(CONTEXTS[context](n, wiring)())
    with pytest.raises(RuntimeError, match=r"inplace_abn.*modified in place.*z = z \+ y"):
        loss.backward()


def test_a_backward_within_that_frees_the_graph_is_what_the_outer_one_tells(device):
    """The message must not say that the output was modified in place, because nobody has done that."""
    z = inplace_abn(leaf_input(device) * 1, None, None, None, None)
    loss = z.square().sum()
    runs = []

    def run_once(gradient):
        if not runs:
            runs.append(1)
            loss.backward()

    z.register_hook(run_once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_residual_modified_between_forward_and_backward_is_an_error(device):
    residual = leaf_input(device) * 2
    z = inplace_abn(leaf_input(device) * 1, *parameters(device), None, None, residual=residual)
    with torch.no_grad():
        residual.add_(0.1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()


def test_training_between_evaluation_and_its_backward_leaves_its_gradients_right(device):
    weight, bias = parameters(device)
    mean, var = parameters(device, requires_grad=False)
    var.abs_().add_(0.5)
    kept = mean.clone(), var.clone()
    a, b = leaf_input(device), leaf_input(device)
    z = inplace_abn(a * 1, weight, bias, mean, var, training=False)
    inplace_abn(leaf_input(device) * 3, weight, bias, mean, var)
    assert not torch.equal(var, kept[1])
    weighted(z).backward()
    weighted(maths.forward(b, weight, bias, *kept, training=False)).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_running_statistics_of_training_may_change_between_forward_and_backward(device):
    weight, bias = parameters(device)
    mean, var = parameters(device, requires_grad=False)
    a = leaf_input(device)
    losses = [inplace_abn(a * k, weight, bias, mean, var).square().sum() for k in (1, 2)]
    sum(losses).backward()
    b = a.detach().clone().requires_grad_()
    sum(maths.forward(b * k, weight, bias, None, None).square().sum() for k in (1, 2)).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_other_memory_put_under_the_output_leaves_backward_right(device):
    weight, bias = parameters(device)
    a, b = leaf_input(device), leaf_input(device)
    z = inplace_abn(a * 1, weight, bias, None, None)
    loss = (z * ramp(z)).sum()
    z.data = torch.zeros_like(z)
    loss.backward()
    weighted(maths.forward(b, weight, bias, None, None)).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


NEEDS_OUTPUT_LATE = {
    "attention": lambda a: F.scaled_dot_product_attention(a, a, a),
    "inverse": lambda a: torch.linalg.inv(a @ a.transpose(2, 3) + torch.eye(5, dtype=a.dtype, device=a.device)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(5, dtype=a.dtype, device=a.device)),
    "another operation that saved x": lambda a: saved_elsewhere(a),
}


def saved_elsewhere(a):
    x = a * 1
    x.other = x * x
    return x


@pytest.mark.parametrize("producer", NEEDS_OUTPUT_LATE)
def test_whatever_else_saved_x_is_an_error_in_backward(producer, device):
    a, b = leaf_input(device), leaf_input(device)
    x, native = NEEDS_OUTPUT_LATE[producer](a), NEEDS_OUTPUT_LATE[producer](b)
    z = inplace_abn(x, None, None, None, None)
    loss = weighted(z) + getattr(x, "other", z).sum()
    if producer == "attention" and not keeps_output(native):
        loss.backward()
        y = maths.forward(native, None, None, None, None)
        (weighted(y) + y.sum()).backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)
        return
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def keeps_output(attended):
    """Whether the kernel of attention that was chosen keeps its output, as fused ones do."""
    return hasattr(attended.grad_fn, "_saved_output")


def test_x_overwritten_without_grad_is_noticed_by_what_saved_it(device):
    a = leaf_input(device)
    x = torch.sigmoid(a)
    with torch.no_grad():
        inplace_abn(x, None, None, None, None)
    with pytest.raises(RuntimeError, match=MODIFIED):
        x.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_a_function_that_overwrites_its_argument_is_an_error(reentrant, device):
    n = WiredNet(Row("chain"), True, device)
    loss = checkpoint(lambda x: n.conv(n.abn(x), 1), n.stem(), use_reentrant=reentrant).sum()
    with pytest.raises((RuntimeError, ValueError), match=f"{MODIFIED}|overwritten"):
        loss.backward()


def test_parts_of_one_tensor_that_know_of_each_other_are_an_error(device):
    n = WiredNet(Row("chain"), True, device)
    x = n.stem()
    z = n.abn(x[:2]) + n.abn(x[2:])
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()

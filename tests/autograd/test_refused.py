"""A call that cannot be right is refused with a message, before anything is modified."""

import pytest
import torch
import torch.nn.functional as F
from evaluation import CONTEXTS, weighted
from torch import nn
from wired_nets import SHAPE, C, Row, WiredNet, leaf_input, parameters
from wirings import chain

from inplace_abn import InPlaceABN, InPlaceABNSync, inplace_abn

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_second_backward_without_retain_graph_is_an_error(device):
    n = WiredNet(Row("chain"), True, device)
    loss = weighted(chain(n))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def of_node_in_python(a):
    """The output of an ABN whose node saved-tensor hooks, or a process's first call, have left to Python."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return inplace_abn(a * 1, None, None, None, None)


NEEDS_OUTPUT = {
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "relu_": lambda a: F.relu_(a * 1),
    "leaky_relu_": lambda a: F.leaky_relu_(a * 1),
    "elu_": lambda a: F.elu_(a * 1),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sqrt": lambda a: (a * a + 1).sqrt(),
    "rsqrt": lambda a: (a * a + 1).rsqrt(),
    "reciprocal": lambda a: (a * a + 1).reciprocal(),
    "softmax": lambda a: a.softmax(1),
    "log_softmax": lambda a: a.log_softmax(1),
    "cumprod": lambda a: a.cumprod(2),
    "tan": torch.tan,
    "norm": lambda a: a.norm(dim=3),
    "view of sigmoid": lambda a: torch.sigmoid(a).view(SHAPE[0], C, -1),
    "part of sigmoid": lambda a: torch.sigmoid(a)[1:],
    "ABN": lambda a: inplace_abn(a * 1, None, None, None, None),
    "ABN in Python": of_node_in_python,
    "view of ABN": lambda a: inplace_abn(a * 1, None, None, None, None).flatten(2),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("producer", NEEDS_OUTPUT)
def test_a_producer_that_needs_its_output_is_an_error_before_anything_is_modified(producer, context, device):
    n = WiredNet(Row("chain"), True, device)
    inputs = []

    def wiring(n):
        x = NEEDS_OUTPUT[producer](n.a)
        inputs.append((x, x.detach().clone(), x._version))
        return n.abn(x)

    if context == "after a run without grad":
        context = "plain"
    with pytest.raises(RuntimeError, match=r"inplace_abn: x is the output of .*overwrite_input=False"):
        CONTEXTS[context](n, wiring)().sum().backward()
    # A reentrant checkpoint overwrites its first x without grad, which is allowed. Only the last x is checked.
    x, before, version = inputs[-1]
    assert torch.equal(x.detach(), before)
    assert x._version == version


def dual(function):
    def call(module, device):
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(leaf_input(device).detach(), torch.ones(SHAPE).to(device).double())
            return function(module, x)

    return call


def plain_x(make):
    return lambda module, device: module(make(leaf_input(device)))


def no_grad_view(a):
    x = a * 1
    with torch.no_grad():
        return x[1:]


def inference_tensor(a):
    with torch.inference_mode():
        return a * 1


def hooked(module, device):
    module.register_full_backward_hook(lambda *a: None)
    return module(leaf_input(device) * 1)


def before_hooked(module, device):
    module.register_full_backward_pre_hook(lambda *a: None)
    return module(leaf_input(device) * 1)


def after_hooked(module, device):
    before = nn.Identity()
    before.register_full_backward_hook(lambda *a: None)
    return module(before(leaf_input(device) * 1))


def with_residual(make):
    def call(module, device):
        x = leaf_input(device) * 1
        return module(x, make(x))

    return call


def batched_weight(module, device):
    weights = torch.ones(3, C, dtype=torch.float64, device=device)
    x = leaf_input(device) * 1
    return torch.func.vmap(lambda w: inplace_abn(x, w, None, None, None))(weights)


def functional(transform, *more):
    return lambda module, device: transform(lambda x: module(x * 1).square().sum(), *more)(leaf_input(device).detach())


def jvp(module, device):
    a = leaf_input(device).detach()
    return torch.func.jvp(lambda x: module(x * 1), (a,), (torch.ones_like(a),))


OVERWRITE = "cannot be overwritten|let x be overwritten"
REFUSED = {
    "leaf": (plain_x(lambda a: a), ValueError, OVERWRITE),
    "view of a leaf": (plain_x(lambda a: a.flatten(2)), ValueError, OVERWRITE),
    "chunk": (plain_x(lambda a: (a * 1).chunk(2)[0]), ValueError, "several views"),
    "split of channels": (plain_x(lambda a: torch.cat([a, a], 1).split(C, 1)[0]), ValueError, "several views"),
    "unbind": (plain_x(lambda a: torch.stack([a, a]).unbind(0)[0]), ValueError, "several views"),
    "view without grad": (plain_x(no_grad_view), ValueError, OVERWRITE),
    "expanded": (plain_x(lambda a: (a[:1] * 1).expand(SHAPE)), ValueError, "overlap"),
    "windows": (plain_x(lambda a: (a * 1).flatten().unfold(0, C, 1).T[None]), ValueError, "overlap"),
    "inference tensor": (plain_x(inference_tensor), ValueError, "inference_mode"),
    "module's full backward hook": (hooked, ValueError, "module's backward hook"),
    "module's full backward pre-hook": (before_hooked, ValueError, "module's backward hook"),
    "full backward hook of the module before": (after_hooked, ValueError, "module's backward hook"),
    "sigmoid": (plain_x(torch.sigmoid), RuntimeError, "SigmoidBackward"),
    "one value per channel": (plain_x(lambda a: a[:1, :, :1, :1] * 1), ValueError, "more than 1 value"),
    "wrong channels": (plain_x(lambda a: a[:, 1:] * 1), ValueError, "of shape"),
    "wrong dtype": (plain_x(lambda a: a.bfloat16()), TypeError, "dtype"),
    "residual is x": (with_residual(lambda x: x), (ValueError, RuntimeError), "overlap|memory"),
    "residual is a view of x": (with_residual(lambda x: x.detach()), (ValueError, RuntimeError), "overlap|memory"),
    "residual of another shape": (with_residual(lambda x: x[:1] * 1), ValueError, "residual"),
    "dual number": (dual(lambda module, x: module(x * 1)), ValueError, "forward-mode"),
    "dual number without grad": (dual(lambda m, x: torch.no_grad()(m)(x * 1)), ValueError, "forward-mode"),
    "jvp": (jvp, ValueError, "forward-mode"),
    "jacfwd": (functional(torch.func.jacfwd), ValueError, "forward-mode"),
    "hessian": (functional(torch.func.hessian), ValueError, "forward-mode"),
    "vmap": (functional(torch.func.vmap), ValueError, "vmap is not supported"),
    "vmap of grad": (lambda m, d: functional(lambda f: torch.func.vmap(torch.func.grad(f)))(m, d), ValueError, "vmap"),
    "vmap over weights": (batched_weight, ValueError, "vmap is not supported"),
}


@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*not initialised", "ignore:.*torch.jit")
def test_refused_with_a_message_and_nothing_modified(case, module, device):
    call, error, message = REFUSED[case]
    norm = module(C).to(device, torch.float64)
    seen = []
    norm.register_forward_pre_hook(
        lambda _, args: seen.extend((x, x.detach().clone(), x._version) for x in unwrap(args))
    )
    state = {name: (t, t.detach().clone(), t._version) for name, t in norm.state_dict(keep_vars=True).items()}
    with pytest.raises(error, match=message):
        call(norm, device)
    for t, before, version in [*state.values(), *seen]:
        assert torch.equal(t.detach(), before)
        assert t._version == version


def unwrap(args):
    return [x for x in args if not torch._C._functorch.is_functorch_wrapped_tensor(x) and not x.is_inference()]


def test_gradients_in_batches_are_an_error(device):
    weight, bias = parameters(device)
    a = leaf_input(device)
    z = inplace_abn(a * 1, weight, bias, None, None) * 1
    with pytest.raises(RuntimeError, match="inplace_abn"):
        torch.autograd.grad(z, [a], torch.ones(2, *SHAPE).to(z), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="inplace_abn"):
        torch.func.jacrev(lambda x: inplace_abn(x * 1, None, None, None, None))(a.detach())

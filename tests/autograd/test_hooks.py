"""Hooks on modules see and keep what they would see out of place. After a hook has raised, the graph is right or
refuses."""

import maths
import pytest
import torch
from evaluation import values, weighted
from torch import nn
from wired_nets import SHAPE, C, Row, WiredNet

from inplace_abn import InPlaceABN

pytestmark = pytest.mark.usefixtures("one_thread")


# --- Modules and their hooks -----------------------------------------------------------------------------------------


class Twin(InPlaceABN):
    """An out-of-place module that scales by the weight as the in-place module does."""

    def forward(self, x):
        return maths.forward(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            self.momentum,
            self.eps,
            self.activation,
            self.activation_param,
        )


def conv_net(norm, device):
    torch.manual_seed(2)
    layers = [nn.Conv2d(C, C, 3), norm(C), nn.Conv2d(C, C, 3), nn.Conv2d(C, C, 1), norm(C, activation="elu")]
    return nn.Sequential(*layers).to(device, torch.float64)


def keep_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: kept.append(output))


def keep_detached_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: kept.append(output.detach()))


def replace_output(net, kept):
    net[1].register_forward_hook(lambda module, args, output: output * 2)


def clone_input(net, kept):
    net[1].register_forward_pre_hook(lambda module, args: (args[0].clone(),))


def full_backward_hook_around(net, kept):
    net.register_full_backward_hook(lambda module, grad_input, grad_output: kept.extend([*grad_input, *grad_output]))


def full_backward_pre_hook_around(net, kept):
    net.register_full_backward_pre_hook(lambda module, grad_output: kept.extend(grad_output))


def full_backward_hook_on_conv(net, kept):
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: kept.extend([*grad_input, *grad_output]))


def full_backward_hook_on_conv_replaces(net, kept):
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: tuple(g * 2 for g in grad_input))


def post_accumulate_hook(net, kept):
    net[1].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))


@pytest.mark.parametrize(
    "hook",
    [
        keep_output,
        keep_detached_output,
        replace_output,
        clone_input,
        full_backward_hook_around,
        full_backward_pre_hook_around,
        full_backward_hook_on_conv,
        full_backward_hook_on_conv_replaces,
        post_accumulate_hook,
    ],
)
def test_module_hooks_see_and_keep_what_they_would_out_of_place(hook, device):
    a = torch.randn(SHAPE, dtype=torch.float64, device=device)

    def run(norm):
        net, kept = conv_net(norm, device), []
        hook(net, kept)
        x = a.clone().requires_grad_()
        for _ in range(2):
            weighted(net(x)).backward()
        return {
            "x": values(x.grad),
            "parameters": {name: values(p.grad) for name, p in net.named_parameters()},
            "kept": values(kept),
            "buffers": {name: values(b) for name, b in net.named_buffers() if not name.endswith("tracked")},
        }

    torch.testing.assert_close(run(InPlaceABN), run(Twin), rtol=1e-9, atol=1e-9)


# --- Exceptions ------------------------------------------------------------------------------------------------------


class Interruption(Exception):
    pass


def raise_once(armed, *_):
    if armed:
        armed.pop()
        raise Interruption


PLACES = {
    "gradient of z": lambda x, z, hook: z.register_hook(hook),
    "gradient of x": lambda x, z, hook: x.register_hook(hook),
    "before the node": lambda x, z, hook: z.grad_fn.register_prehook(hook),
    "after the node": lambda x, z, hook: z.grad_fn.register_hook(hook),
}


@pytest.mark.parametrize("consumer", [lambda n, z: z.sum(), lambda n, z: -z, lambda n, z: n.conv(z, 1)])
@pytest.mark.parametrize("place", PLACES)
def test_after_an_exception_in_backward_the_graph_is_right_or_refuses(place, consumer, device):
    def forward(n, armed):
        x = n.stem()
        late = PLACES[place] is not PLACES["gradient of x"]
        if not late:
            PLACES[place](x, None, lambda *a: raise_once(armed))
        z = n.abn(x)
        if late:
            PLACES[place](x, z, lambda *a: raise_once(armed))
        return weighted(consumer(n, z))

    expected, actual = (WiredNet(Row("chain"), inplace, device) for inplace in (False, True))
    forward(expected, []).backward()
    loss = forward(actual, [True])
    with pytest.raises(Interruption):
        loss.backward()
    assert actual.a.grad is None
    for leaf in actual.leaves.values():
        leaf.grad = None
    try:
        loss.backward()
    except RuntimeError:
        for leaf in actual.leaves.values():
            leaf.grad = None
        forward(actual, []).backward()
    for name, leaf in expected.leaves.items():
        torch.testing.assert_close(actual.leaves[name].grad, leaf.grad, rtol=1e-9, atol=1e-9)

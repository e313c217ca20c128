"""A linear layer whose output is multiplied by a vector does not keep it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from scaled_layers import SIZE, Net, hooked, one_layer_twice, permuted, scales, times, tokens, twice
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, guard, report, revert
from inplace_abn.autograd.scale import Exchange
from inplace_abn.memory import measure, memory_report


def last_step(model, x=None):
    model(tokens() if x is None else x).square().sum().backward()
    guard.generations.advance()
    return model


def gamma_first(m, x):
    return x + m.gamma * m.fc1(x)


def method(m, x):
    return x + m.fc1(x).mul(m.gamma)


def after_dropout(m, x):
    return x + m.drop(m.fc1(x)) * m.gamma


def of_three_dimensions(m, x):
    return x + m.fc1(x) * m.gamma.view(1, 1, -1)


def permuted_twice(m, x):
    return x + (m.fc1(x).permute(2, 0, 1).permute((1, 0, 2)) * m.gamma[:, None]).permute(0, 2, 1)


def one_vector_twice(m, x):
    x = x + m.fc1(x) * m.gamma
    return x + m.fc2(x) * m.gamma


@pytest.mark.parametrize(
    ("run", "names"),
    [
        *((run, ["fc1"]) for run in (times, gamma_first, method, after_dropout, of_three_dimensions)),
        *((run, ["fc1"]) for run in (permuted, permuted_twice, one_layer_twice)),
        *((run, ["fc1", "fc2"]) for run in (twice, one_vector_twice)),
    ],
)
def test_it_trains_as_torchs_and_saves_the_output(run, names):
    trained = check_training(Net(run), tokens())
    assert scales(trained) == names
    layer = next(layer for layer in report(trained).layers if layer.name == "fc1")
    assert layer.bytes_saved == (2 if run is one_layer_twice else 1) * 2 * 7 * SIZE * 8


def test_what_is_held_is_less_by_the_output():
    x = torch.randn(64, 7, SIZE)
    model = Net(lambda m, x: times(m, m.last(x)))
    native = measure(model, x).held
    converted = convert(model)
    for _ in range(3):
        last_step(converted, x)
    assert native - measure(converted, x).held > 0.95 * x.nbytes


def test_the_product_for_the_weight_is_exchanged_only_if_it_is_that_of_the_whole_gradient():
    exchange = Exchange()
    du, dweight = torch.ones(1, 2), torch.ones(3)
    exchange.give(du, dweight)
    assert exchange.take(du) is dweight
    assert exchange.take(du) is None
    exchange.give(du, dweight)
    assert exchange.take(du.clone()) is None
    exchange.give(du, dweight)
    du.mul_(2)
    assert exchange.take(du) is None


@pytest.mark.parametrize("part", ["gamma", "fc1.weight", "fc1.bias", "x"])
def test_each_gradient_may_be_asked_for_alone_and_again(part):
    native = Net(times).double()
    converted = last_step(last_step(convert(copy.deepcopy(native)), tokens().double()), tokens().double())
    x = tokens().detach().double().requires_grad_()
    found = []
    for model in (native, converted):
        z = model(x).square().sum()
        of = x if part == "x" else model.get_parameter(part)
        found.append([torch.autograd.grad(z, of, retain_graph=True)[0] for _ in range(2)])
        found[-1] += torch.autograd.grad(z, [p for p in model.parameters() if p is not model.other], allow_unused=True)
    for torchs, own in zip(*found, strict=True):
        assert (torchs is None) == (own is None)
        if own is not None:
            torch.testing.assert_close(own, torchs)


def doubled(module, _, output):
    return output * 2


@pytest.mark.parametrize("hook", ["forward", "backward", "global"])
def test_hooks_of_the_layer_and_of_all_modules_see_what_they_see_with_torch(hook):
    seen, found = [], []
    native = Net(times).double()
    converted = last_step(convert(copy.deepcopy(native)), tokens().double())
    x = tokens().detach().double()
    for model in (native, converted):
        model.zero_grad()
        if hook == "forward":
            handle = model.fc1.register_forward_hook(doubled)
        elif hook == "backward":
            handle = model.fc1.register_full_backward_hook(lambda m, i, o: seen.append((i[0], o[0])))
        else:
            handle = nn.modules.module.register_module_forward_hook(
                lambda m, i, o: o * 2 if type(m) is nn.Linear else None
            )
        x_ = x.clone().requires_grad_()
        model(x_).square().sum().backward()
        found.append([x_.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        handle.remove()
    for torchs, own in zip(*found, strict=True):
        torch.testing.assert_close(own, torchs)
    if seen:
        for torchs, own in zip(*seen, strict=True):
            torch.testing.assert_close(own, torchs)


def test_what_was_not_seen_in_a_checkpoint_is_not_seen_when_it_is_computed_again():
    """Between a forward pass and its backward pass the model may be watched."""
    for name in ("gelu", "scale"):

        def run(m, x, name=name):
            function = torch.sin if not m.changed else F.gelu if name == "gelu" else lambda u: u * m.gamma
            return checkpoint(lambda t: function(m.fc1(t)), x, use_reentrant=False)

        native = Net(run)
        native.changed = False
        converted = last_step(convert(copy.deepcopy(native)))
        results, x = [], tokens()
        for _ in range(4):
            results.append([model(x) for model in (native, converted)])
            native.changed = converted.changed = True
            guard.generations.current += 100
        for torchs, own in results:
            native.zero_grad()
            converted.zero_grad()
            torchs.sum().backward()
            own.sum().backward()
            torch.testing.assert_close(converted.fc1.weight.grad, native.fc1.weight.grad)


def test_a_weight_that_is_computed_is_computed_as_often_as_with_torch():
    calls = []

    class Noisy(nn.Module):
        def forward(self, weight):
            calls.append(1)
            return weight + torch.randn_like(weight)

    net = Net(times)
    nn.utils.parametrize.register_parametrization(net.fc1, "weight", Noisy())
    converted = convert(net)
    calls.clear()
    for step in range(3):
        last_step(converted)
        assert len(calls) == step + 1


def hooked_and_written_to(m, x):
    u = m.fc1(x)
    hooked(u)
    u = F.silu(u, inplace=True)
    return m.fc1(u) * m.gamma


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_hook_on_an_output_that_is_written_to_is_left_behind_where_torch_leaves_it(is_transposed):
    """It is, if the output is a view. That depends on the release of torch, and on the input's layout."""

    def use(m, x):
        return hooked_and_written_to(m, x.transpose(0, 1).contiguous().transpose(0, 1) if is_transposed else x)

    check_training(Net(use), tokens())


def test_reverted_it_is_as_before():
    model = last_step(last_step(convert(Net(times))))
    assert model.fc1._forward_hooks
    revert(model)
    assert not model.fc1._forward_hooks
    assert "_follows" not in vars(model.fc1)
    last_step(model)


def test_the_memory_report_shows_what_is_saved():
    """It has hooks of its own on each layer."""
    found = memory_report(Net(lambda m, x: times(m, m.last(x))), torch.randn(64, 7, SIZE))
    assert found.before.held - found.after.held > 0.95 * 64 * 7 * SIZE * 4


def test_an_input_that_is_not_contiguous_may_be_written_to():
    """torch's linear layer keeps a copy of it. The product kept the input itself, and backward raised."""

    def run(m, x):
        t = x * 1.5
        z = m.fc1(t.transpose(1, 2)) * m.gamma
        t.mul_(0.5)
        return z

    check_training(Net(run), torch.randn(2, SIZE, SIZE))


def names_in_graph(t):
    found, nodes = set(), [t.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [each for each, _ in node.next_functions]
    return {node.name() for node in found}


def test_a_scaled_layer_behind_an_activation_keeps_no_more_between_two_watched_steps():
    """Between two watched steps the activation's result is of a class of its own, which the linear layer did not take
    for a tensor: from the ninth step on ConvNeXt and DeiT3 kept what they scale."""
    original = Net(lambda m, x: x + m.fc2(F.gelu(m.fc1(x))) * m.gamma).double()
    model = convert(copy.deepcopy(original))
    for step in range(12):
        x = torch.randn(2, 7, SIZE, dtype=torch.double)
        y = model(x)
        assert "ScaleFunctionBackward" in names_in_graph(y), step
        assert "MulBackward0" not in names_in_graph(y), step
        for net, result in ((model, y), (original, original(x))):
            net.zero_grad()
            result.square().sum().backward()
        for (name, p), q in zip(original.named_parameters(), model.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10, msg=name)
        guard.generations.advance()

"""Whatever is done with the output of a linear layer that is scaled, it trains as in torch."""

import pytest
import torch
import torch.nn.functional as F
from scaled_layers import SIZE, Net, hooked, one_layer_twice, permuted, times, tokens, twice
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training


def also_used(m, x):
    u = m.fc1(x)
    return u * m.gamma + m.last(u)


def used_before(m, x):
    u = m.fc1(x)
    y = u.exp()
    return u * m.gamma + y


def squared(m, x):
    u = m.fc1(x) * m.fc1(x)
    return u * m.gamma


def two_products(m, x):
    u = m.fc1(x)
    return u * m.gamma + u * m.other


def hooked_before(m, x):
    u = m.fc1(x)
    hooked(u)
    return u * m.gamma


def hooked_after(m, x):
    u = m.fc1(x)
    z = u * m.gamma
    hooked(u)
    return z


def gradient_of_output(m, x):
    u = m.fc1(x)
    z = (u * m.gamma).square().sum()
    return torch.autograd.grad(z, u, create_graph=True)[0]


def scalar(m, x):
    return m.fc1(x) * m.gamma[:1]


def along_tokens(m, x):
    return m.fc1(x) * m.gamma[:7].unsqueeze(1)


def constant(m, x):
    return m.fc1(x) * m.gamma.detach()


def a_sum(m, x):
    return (m.fc1(x) + x) * m.gamma


def computed(m, x):
    return m.fc1(x) * (m.gamma * m.other).exp()


def chosen(m, x):
    return x + m.fc1(x) * m.gamma[torch.arange(SIZE).flip(0)]


def transposed(m, x):
    return (m.fc1(x).transpose(1, 2) * m.gamma[:, None]).transpose(1, 2)


def of_a_square(m, x):
    x = x[:1, :1].expand(SIZE, SIZE, SIZE) + 0
    return (m.fc1(x) * m.gamma[:, None]).sum(0) + (m.fc1(x) * m.gamma[:, None, None]).sum(1)


def permuted_without_gradients(m, x):
    u = m.fc1(x)
    with torch.no_grad():
        p = u.permute(2, 0, 1)
    return (p * m.gamma.reshape(-1, 1, 1)).permute(1, 2, 0) + x


def changed_after_the_permutation(m, x):
    u = m.fc1(x)
    p = u.permute(2, 0, 1)
    u.mul_(2)
    return (p * m.gamma.reshape(-1, 1, 1)).permute(1, 2, 0)


def hook_on_the_permutation(m, x):
    p = m.fc1(x).permute(2, 0, 1)
    hooked(p)
    return (p * m.gamma.reshape(-1, 1, 1)).permute(1, 2, 0)


@torch.jit.script
def scripted_write(t):
    return t.add_(1.0)


def changed_unseen(m, x):
    u = m.fc1(x)
    scripted_write(u)
    return u * m.gamma


def bias_changed_unseen(m, x):
    z = m.fc1(x) * m.gamma
    with torch.no_grad():
        m.fc1.bias.data.add_(0.1)
    return z


def frozen_matrix(m, x):
    m.fc1.weight.requires_grad_(False)
    h = x * 1
    z = m.fc1(h) * m.gamma
    h += 1
    return z + h


def matrix_computed_by_the_class(m, x):
    m.fc1.__class__ = Doubling
    return m.fc1(x) * m.gamma


class Doubling(nn.Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return 2 * found if name == "weight" else found


def second_order(m, x):
    u = m.fc1(x)
    hooked(u)
    z = (u * m.gamma).sin().sum()
    return torch.autograd.grad(z, m.gamma, create_graph=True)[0]


def second_order_without_graph(m, x):
    with torch.no_grad():
        u = m.fc1(x)
    z = (u * m.gamma).sin().sum()
    return torch.autograd.grad(z, m.gamma, create_graph=True)[0] + m.fc2(x).sum()


def with_a_bias_of_its_own(m, x):
    m.fc1.bias = None if m.fc1.bias is None else m.fc1.bias
    return F.linear(x, m.fc1.weight, None) * m.gamma + m.fc1(x) * m.other


PROGRAMS = [also_used, used_before, squared, two_products, hooked_before, hooked_after]
PROGRAMS += [gradient_of_output, scalar, along_tokens, constant, a_sum, computed, chosen, transposed, of_a_square]
PROGRAMS += [permuted_without_gradients, changed_after_the_permutation, hook_on_the_permutation, changed_unseen]
PROGRAMS += [frozen_matrix, matrix_computed_by_the_class, second_order, second_order_without_graph]
PROGRAMS += [bias_changed_unseen, with_a_bias_of_its_own, *(times, permuted, twice, one_layer_twice)]
NOT_UNDER_CHECKPOINTS = [gradient_of_output, second_order, second_order_without_graph, bias_changed_unseen]


@pytest.mark.parametrize("run", PROGRAMS)
def test_whatever_is_done_with_the_output_it_trains_as_torchs(run):
    check_training(Net(run), tokens())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [p for p in PROGRAMS if p not in NOT_UNDER_CHECKPOINTS])
def test_under_checkpoints_it_trains_as_torchs(run, reentrant):
    check_training(Net(lambda m, x: checkpoint(lambda t: run(m, t), x * 1, use_reentrant=reentrant)), tokens())

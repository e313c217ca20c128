"""Synchronised statistics: every rank gets what one process computes from the whole batch."""

import copy
import math

import maths
import pytest
import torch
import torch.distributed as dist
from cases import INDUCTOR
from ranks import check_same_on_all_ranks, on_each_rank
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_batch import (
    ACTIVATIONS,
    CHANNELS,
    SHAPES,
    batches,
    check,
    over_ranks,
    own,
    own_share,
    parameters,
    rows,
    running_statistics,
    single_process,
    synchronised,
)

from inplace_abn import InPlaceABN, InPlaceABNSync, _torch, distributed
from inplace_abn import inplace_abn_sync as abn_sync


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@on_each_rank(2, 3)
def test_equals_one_process_on_the_whole_batch(shapes, activation):
    drawn, affine, running, expected_running = batches(shapes), parameters(), running_statistics(), running_statistics()
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation], "eps": 1e-3, "momentum": 0.3}
    actual = synchronised(*own(drawn), *affine, running, **options)
    check(actual, single_process(drawn, *affine, expected_running, **options))
    check(running, expected_running)
    check_same_on_all_ranks(*running)


@pytest.mark.parametrize("keeps_input", [True, False, "one rank does"])
@on_each_rank(2)
def test_a_write_to_a_parameter_before_backward_does_not_matter(keeps_input):
    """``bias.data.add_`` between forward and backward made gradients wrong."""
    drawn, keeps = batches(SHAPES["equal"]), keeps_input
    x, dz = own(drawn)
    if keeps_input == "one rank does":
        keeps = dist.get_rank() == 1
    options = {"activation": "elu", "activation_param": 1.0}

    def gradients(writes):
        leaves = [x.clone().requires_grad_(), *parameters()]
        given = leaves[0] * 1
        z = abn_sync(given, *leaves[1:], None, None, keeps_input=keeps, **options)
        assert (z is given) != keeps
        if writes:
            leaves[1].data.mul_(2)
            leaves[2].data.add_(1)
        return torch.autograd.grad(z, leaves, dz)

    found = gradients(True)
    torch.testing.assert_close(found, gradients(False), rtol=0, atol=0)
    _, *expected = single_process(drawn, *parameters(), **options)
    check((found[0], *map(over_ranks, found[1:])), expected)


def check_residual(shapes, activation, tolerance=1e-12):
    drawn = batches(shapes)
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation]}
    x, dz = own(drawn)
    residual = x.cos().requires_grad_()
    whole = torch.cat([rows(x.cos()) for x, _ in drawn]).requires_grad_()
    actual = synchronised(x, dz, *parameters(), residual=residual, **options)
    check(actual, single_process(drawn, *parameters(), residual=whole, **options), tolerance)
    check((residual.grad,), (own_share(whole.grad, drawn),), tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", ["equal", "spatial sizes differ", "other ranks are empty"])
@on_each_rank(2)
def test_residual_is_added_before_the_activation(shapes, activation):
    check_residual(SHAPES[shapes], activation)


@pytest.mark.parametrize("signed_weight", [False, True])
@pytest.mark.parametrize("affine", [(True, False), (False, True), (False, False)], ids=["weight", "bias", "neither"])
@on_each_rank(2)
def test_weight_and_bias_are_optional(affine, signed_weight):
    drawn = batches(SHAPES["batch sizes differ"])
    affine = [t if present else None for t, present in zip(parameters(), affine, strict=True)]
    actual = synchronised(*own(drawn), *affine, signed_weight=signed_weight)
    check(actual, single_process(drawn, *affine, signed_weight=signed_weight))


@on_each_rank(2)
def test_signed_weight_keeps_its_sign():
    drawn = batches(SHAPES["batch sizes differ"])
    actual = synchronised(*own(drawn), *parameters(), signed_weight=True)
    check(actual, single_process(drawn, *parameters(), signed_weight=True))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one rank", "both ranks"])
@on_each_rank(2)
def test_channels_last_is_kept(ranks):
    drawn = batches(SHAPES["spatial sizes differ"])
    x, dz = own(drawn)
    if dist.get_rank() in ranks:
        x, dz = x.to(memory_format=torch.channels_last), dz.to(memory_format=torch.channels_last)
    strides = x.stride()
    z, dx, *gradients = synchronised(x, dz, *parameters())
    assert z.stride() == dx.stride() == strides
    check((z, dx, *gradients), single_process(drawn, *parameters()))


@on_each_rank(2)
def test_strided_input_and_gradient():
    drawn = batches([(3, CHANNELS, 4, 8), (2, CHANNELS, 6, 2)])
    x, dz = own(drawn)
    wide = torch.zeros(x.shape[0], CHANNELS, *(2 * s for s in x.shape[2:]), dtype=torch.float64)
    wide[:, :, ::2, ::2] = x
    leaf = wide.requires_grad_()
    weight, bias = parameters()
    z = abn_sync(leaf.clone()[:, :, ::2, ::2], weight, bias, None, None)
    kept = z.detach().clone()
    z.backward(dz.transpose(2, 3).contiguous().transpose(2, 3))
    expected = single_process(drawn, *parameters())
    check((kept, leaf.grad[:, :, ::2, ::2], over_ranks(weight.grad), over_ranks(bias.grad)), expected)
    assert leaf.grad.count_nonzero() == leaf.grad[:, :, ::2, ::2].count_nonzero()


@on_each_rank(2)
def test_result_is_written_over_the_input():
    x, _ = own(batches(SHAPES["equal"]))
    for data in (x.clone(), x.requires_grad_().clone()):
        z = abn_sync(data, *parameters(), *running_statistics())
        assert z.data_ptr() == data.data_ptr()
        check((data,), (z,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_each_rank(2)
def test_lower_precision(dtype):
    drawn = batches(SHAPES["spatial sizes differ"], dtype)
    affine, running = parameters(torch.float32), running_statistics(torch.float32)
    expected_running = running_statistics()
    z, dx, dweight, dbias = synchronised(*own(drawn), *affine, running)
    expected = single_process(drawn, *(t.double() for t in affine), expected_running)
    assert z.dtype == dx.dtype == dtype
    assert dweight.dtype == dbias.dtype == torch.float32
    check((z, dx, dweight, dbias), expected, 1e-5 if dtype == torch.float32 else 5 * torch.finfo(dtype).eps)
    check(running, expected_running, 1e-5)
    check_same_on_all_ranks(*running)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_each_rank(2)
def test_module_in_lower_precision(dtype):
    drawn = batches(SHAPES["equal"], dtype)
    module = InPlaceABNSync(CHANNELS, dtype=dtype)
    x, dz = own(drawn)
    z = module(x.requires_grad_().clone())
    kept = z.detach().clone()
    z.backward(dz)
    ones, zeros = torch.ones(CHANNELS).double(), torch.zeros(CHANNELS).double()
    running = zeros.clone(), ones.clone()
    expected = single_process(drawn, ones, zeros, running)
    gradients = over_ranks(module.weight.grad.float()), over_ranks(module.bias.grad.float())
    check((kept, x.grad, *gradients), expected, 8 * torch.finfo(dtype).eps)
    check((module.running_mean, module.running_var), running, 2 * torch.finfo(dtype).eps)


@on_each_rank(2, 3)
def test_large_offset_loses_no_precision():
    drawn = [(x + 1e8, dz) for x, dz in batches(SHAPES["batch sizes differ"])]
    actual = synchronised(*own(drawn), *parameters())
    check(actual, single_process(drawn, *parameters()), 1e-7)


@pytest.mark.parametrize("momentum", [0.25, None])
@on_each_rank(2)
def test_module_equals_one_process_over_several_steps(momentum):
    options = {"momentum": momentum, "activation": "elu", "activation_param": 0.8, "dtype": torch.float64}
    module, twin = InPlaceABNSync(CHANNELS, **options), InPlaceABN(CHANNELS, **options)
    for step in range(3):
        drawn = [(x * (step + 1) + step, dz) for x, dz in batches(SHAPES["batch sizes differ"])]
        module(own(drawn)[0])
        twin(torch.cat([rows(x) for x, _ in drawn]))
    check(module.state_dict().values(), twin.state_dict().values())
    assert module.num_batches_tracked == 3


@on_each_rank(2)
def test_module_without_running_statistics_synchronises_in_evaluation_too():
    drawn = batches(SHAPES["batch sizes differ"])
    module = InPlaceABNSync(CHANNELS, track_running_stats=False, dtype=torch.float64).eval()
    check((module(own(drawn)[0]),), single_process(drawn, module.weight, module.bias)[:1])


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, CHANNELS), (0, CHANNELS), (0, CHANNELS)],
        [(0, CHANNELS, 3), (1, CHANNELS, 1), (2, CHANNELS, 0)],
    ],
)
@on_each_rank(2, 3)
def test_all_ranks_raise_together_and_nothing_is_modified(shapes):
    module = InPlaceABNSync(CHANNELS, momentum=None, dtype=torch.float64)
    module(own(batches(SHAPES["batch sizes differ"]))[0])
    before = copy.deepcopy(module.state_dict())
    x, _ = own(batches(shapes))
    data = x.requires_grad_().clone()
    with pytest.raises(ValueError, match="more than 1 value per channel when training, got input size"):
        module(data)
    assert torch.equal(data, x)
    assert data._version == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    drawn = [(x + 1, dz) for x, dz in batches(SHAPES["spatial sizes differ"])]
    check(synchronised(*own(drawn), *parameters()), single_process(drawn, *parameters()))


@on_each_rank(2, 3)
def test_a_batch_that_is_empty_on_all_ranks_is_accepted_and_leaves_the_statistics_alone():
    module = InPlaceABNSync(CHANNELS, dtype=torch.float64)
    module(own(batches(SHAPES["batch sizes differ"]))[0])
    before = copy.deepcopy(module.state_dict())
    x = torch.empty(0, CHANNELS, 2, dtype=torch.float64, requires_grad=True)
    module(x * 1).sum().backward()
    assert x.grad.shape == x.shape
    assert not module.weight.grad.any()
    assert not module.bias.grad.any()
    for name in ("running_mean", "running_var"):
        assert torch.equal(module.state_dict()[name], before[name])


@on_each_rank(2)
def test_several_layers_share_a_process_group():
    torch.manual_seed(0)
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 1, dtype=torch.float64) for _ in range(3)]
    norms = [InPlaceABNSync(CHANNELS, activation=a, dtype=torch.float64) for a in ("leaky_relu", "elu", "identity")]
    twins = [InPlaceABN(CHANNELS, activation=a, dtype=torch.float64) for a in ("leaky_relu", "elu", "identity")]

    def residual(x, norms):
        first = norms[0](layers[0](x))
        second = norms[1](layers[1](first)) + first
        return norms[2](layers[2](second) + x), first

    drawn = batches(SHAPES["equal"])
    rank = dist.get_rank()
    whole = torch.cat([x for x, _ in drawn]).requires_grad_()
    expected, expected_kept = residual(whole, twins)
    expected.backward(torch.cat([dz for _, dz in drawn]))
    x, dz = own(drawn)
    z, kept = residual(x.requires_grad_(), norms)
    dz_before = dz.clone()
    z.backward(dz)
    assert torch.equal(dz, dz_before)
    check((z, kept, x.grad), [t.chunk(2)[rank] for t in (expected, expected_kept, whole.grad)])
    for norm, twin in zip(norms, twins, strict=True):
        check([over_ranks(p.grad) for p in norm.parameters()], [p.grad for p in twin.parameters()])
        check(norm.buffers(), twin.buffers())


@on_each_rank(2)
def test_backward_twice_with_retained_graph():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *affine, None, None)
    z.backward(dz, retain_graph=True)
    z.backward(dz)
    z_expected, *expected = single_process(drawn, *affine)
    actual = x.grad, *(over_ranks(t.grad) for t in affine)
    check((z, *actual), (z_expected, *(2 * t for t in expected)))


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_each_rank(2)
def test_checkpoint_recomputes_with_all_ranks(use_reentrant):
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = checkpoint(lambda x: abn_sync(x.clone(), *affine, None, None), x, use_reentrant=use_reentrant)
    kept = z.detach().clone()
    z.backward(dz)
    check((kept, x.grad, *(over_ranks(t.grad) for t in affine)), single_process(drawn, *affine))


@on_each_rank(2)
def test_create_graph_is_refused_and_the_graph_stays_usable():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *affine, None, None)
    with pytest.raises(RuntimeError, match="inplace_abn: create_graph=True is not supported by synchronised statist"):
        torch.autograd.grad(z, x, dz, create_graph=True)
    kept = z.detach().clone()
    z.backward(dz)
    check((kept, x.grad, *(over_ranks(t.grad) for t in affine)), single_process(drawn, *affine))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@on_each_rank(2)
def test_compiled_with_fullgraph_equals_eager(backend):
    torch.compiler.reset()
    eager = InPlaceABNSync(CHANNELS, activation="elu", dtype=torch.float64)
    module = copy.deepcopy(eager)
    compiled = torch.compile(lambda x: module(2 * x) + 1, backend=backend, fullgraph=True, dynamic=True)
    for shapes in ([(3, CHANNELS, 4, 6)] * 2, [(2, CHANNELS, 3, 5), (4, CHANNELS, 2, 3)]):
        results = []
        for call in (lambda x: eager(2 * x) + 1, compiled):
            x, dz = own(batches(shapes))
            z = call(x.requires_grad_())
            z.backward(dz)
            results.append((z.detach(), x.grad))
        check(*results)
    check([p.grad for p in module.parameters()], [p.grad for p in eager.parameters()])
    check(module.buffers(), eager.buffers())
    check_same_on_all_ranks(module.running_mean, module.running_var)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_equals_one_process_on_the_whole_batch(shapes, activation):
    drawn, affine, running, expected_running = batches(shapes), parameters(), running_statistics(), running_statistics()
    options = {"activation": activation, "activation_param": ACTIVATIONS[activation], "momentum": 0.3}
    actual = synchronised(*own(drawn), *affine, running, **options)
    check(actual, single_process(drawn, *affine, expected_running, **options), 1e-10)
    check(running, expected_running, 1e-10)
    check_same_on_all_ranks(*running)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_residual():
    check_residual(SHAPES["batch sizes differ"], "elu", 1e-10)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_leaves_the_input_alone():
    for shapes in (SHAPES["equal"], SHAPES["one rank has a single value"]):
        x, _ = own(batches(shapes))
        before = x.clone()
        z = abn_sync(x, *parameters(), *running_statistics())
        assert z.data_ptr() != x.data_ptr()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_module_with_cumulative_average(dtype):
    drawn = batches(SHAPES["batch sizes differ"], dtype)
    module = InPlaceABNSync(CHANNELS, momentum=None, dtype=torch.promote_types(dtype, torch.float32))
    running = torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()
    for step in range(2):
        module(own(drawn)[0])
        single_process(drawn, None, None, running, momentum=1 / (step + 1))
    check((module.running_mean, module.running_var), running, 1e-10 if dtype == torch.float64 else 1e-5)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_raises_on_all_ranks_together():
    x, _ = own(batches([(1, CHANNELS), (0, CHANNELS)]))
    running = running_statistics()
    with pytest.raises(ValueError, match="more than 1 value per channel when training"):
        abn_sync(x, *parameters(), *running)
    check(running, running_statistics(), 0)


@on_each_rank(2, INPLACE_ABN_DISABLE="1")
def test_out_of_place_has_second_derivatives():
    drawn, affine, twin_affine = batches(SHAPES["equal"]), parameters(), parameters()
    whole = torch.cat([x for x, _ in drawn]).requires_grad_()
    z = maths.forward(whole, *twin_affine, None, None, activation="elu", activation_param=1.0)
    (dx,) = torch.autograd.grad(z, whole, torch.cat([dz for _, dz in drawn]), create_graph=True)
    dx.square().sum().backward()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x, *affine, None, None, activation="elu", activation_param=1.0)
    (dx,) = torch.autograd.grad(z, x, dz, create_graph=True)
    dx.square().sum().backward()
    check((x.grad, over_ranks(affine[0].grad)), (whole.grad.chunk(2)[dist.get_rank()], twin_affine[0].grad), 1e-10)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_each_rank(2, 3)
def test_gloo_sums_what_it_cannot_gather(compiled):
    """A group of gloo read memory of the GPU as if it was the host's, which ended the process."""
    torch.compiler.reset()
    place, group = distributed._place_in_gloo, dist.group.WORLD
    t = torch.tensor([1.0, math.inf, -math.inf, math.nan, 1e-300], dtype=torch.float64) + dist.get_rank()
    expected = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(expected, t)
    distributed._place_in_gloo = _torch.read_while_tracing(lambda _, name: place("cuda", name))
    try:
        for given in (group, group.group_name):

            def gather(t, given=given):
                return distributed.all_gather(t, given)

            function = torch.compile(gather, backend="aot_eager", fullgraph=True) if compiled else gather
            torch.testing.assert_close(function(t), torch.stack(expected), rtol=0, atol=0, equal_nan=True)
    finally:
        distributed._place_in_gloo = place

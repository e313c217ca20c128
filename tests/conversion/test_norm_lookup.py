"""Code that looks for the BatchNorms of a model does the same to a converted model as to the original.

A converted norm is a subclass of its original class, and activations stay where they are.
"""

import copy

import pytest
import torch
from cases import relative_error
from convertible_nets import make
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel, update_bn

from inplace_abn import convert


def images():
    return torch.randn(4, 3, 32, 32)


@pytest.fixture
def models():
    """The original and a converted copy."""
    model = make("resnet")
    return model, convert(copy.deepcopy(model))


def norms(model):
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def test_norms_are_found_by_class(models):
    assert norms(models[1]) == norms(models[0])


def test_update_bn_averages_running_statistics(models):
    batches = [images() * 3 + 1 for _ in range(3)]
    for model in models:
        update_bn(batches, model)
    assert relative_error(models[1].bn1.running_mean, models[0].bn1.running_mean.double()) < 1e-5


def test_an_averaged_model_gets_statistics_of_its_own(models):
    averaged = [AveragedModel(model) for model in models]
    for model in averaged:
        model.module.train()(images())
        update_bn([images(), images()], model)
    assert averaged[1].module.bn1.num_batches_tracked == averaged[0].module.bn1.num_batches_tracked == 2


def test_parameters_of_norms_get_a_group_without_weight_decay(models):
    without = [
        {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
        for model in models
    ]
    sizes = [sum(p.numel() for p in m.parameters() if id(p) in own) for m, own in zip(models, without, strict=True)]
    assert sizes[1] == sizes[0] == 240


def test_norms_are_frozen_by_class(models):
    for model in models:
        model.train()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        model(images())
        assert model.bn1.num_batches_tracked == 0


def frozen(module):
    """Replaces each BatchNorm that it finds by another module, as timm's freeze_batch_norm_2d does."""
    if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):
        return nn.Identity()
    for name, child in module.named_children():
        setattr(module, name, frozen(child))
    return module


def test_norms_are_replaced_by_class(models):
    count = [sum(type(m).__name__ in ("BatchNorm2d", "InPlaceABN") for m in frozen(m).modules()) for m in models]
    assert count == [0, 0]


def test_norms_are_made_synchronised(models):
    made = [nn.SyncBatchNorm.convert_sync_batchnorm(model) for model in models]
    counts = [sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) for model in made]
    assert counts == [10, 10]


def test_a_norm_fused_into_its_convolution_leaves_its_activation(models):
    x, outputs = images(), []
    with torch.no_grad():
        for model in models:
            model.eval()
            model.conv1 = fuse_conv_bn_eval(model.conv1, model.bn1)
            model.bn1 = nn.Identity()
            outputs.append(model(x))
    assert relative_error(outputs[1], outputs[0].double()) < 1e-5


def test_a_norm_that_is_taken_out_leaves_its_activation(models):
    x, outputs = images(), []
    for model in models:
        model.eval().bn1 = nn.Identity()
        outputs.append(model(x))
    assert relative_error(outputs[1], outputs[0].detach().double()) < 1e-5

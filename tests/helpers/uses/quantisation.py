"""Quantisation."""

import torch

from inplace_abn import revert
from uses.base import REVERT_FIRST, Quantisable, made, single_images, train, use


def prepared(model):
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model.train())


def quantisable():
    return made(Quantisable, dtype=torch.float32).train()


PAIRS = [["conv1", "bn1"], ["conv2", "bn2"]]


@use("`prepare_qat`, converted after it", tolerance=1e-4)
def qat_before(convert):
    found = train(convert(prepared(quantisable())), data=single_images)
    fused = torch.ao.quantization.fuse_modules_qat(quantisable(), PAIRS)
    found += train(convert(prepared(fused)), data=single_images)
    model = convert(quantisable())
    train(model, data=single_images)
    return found + train(convert(prepared(revert(model))), data=single_images)


@use("`prepare_qat` of a converted model", "error `torch.ao.quantization knows torch's own modules only`", REVERT_FIRST)
def qat(convert):
    return train(prepared(convert(quantisable())), data=single_images)


@use("`fuse_modules_qat`", "error `did not find fuser method`", REVERT_FIRST)
def qat_fused(convert):
    return train(prepared(torch.ao.quantization.fuse_modules_qat(convert(quantisable()), PAIRS)), data=single_images)


@use("`fuse_modules` in eval", "error `did not find fuser method`", REVERT_FIRST)
def fused(convert):
    return [torch.ao.quantization.fuse_modules(convert(quantisable()).eval(), PAIRS)(single_images(0))]


@use("`prepare_qat_fx`", "error `torch.ao.quantization knows torch's own modules only`", REVERT_FIRST)
def qat_fx(convert):
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping("fbgemm")
    return train(prepare_qat_fx(convert(quantisable()), mapping, (single_images(0),)), data=single_images)

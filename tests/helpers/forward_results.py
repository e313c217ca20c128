"""Operands and results of the ops that compute the forward pass."""

import torch
from cases import laid_out, parameters, stats_dtype

from inplace_abn.activations import find
from inplace_abn.kernels import ops

EPS = 1e-5


def code(activation):
    return find(activation).code


def forward_result(shape, dtype, layout, activation, param, device):
    """Returns x, z, weight, bias, mean and var."""
    x = laid_out(torch.randn(shape, dtype=torch.float64, device=device).to(dtype), layout)
    weight, bias, *_ = parameters(shape[1], stats_dtype(dtype), device)
    z = laid_out(x, layout)
    mean, var = ops.statistics(x)
    ops.forward(z, mean, var, weight, bias, None, EPS, False, code(activation), param, True)
    return x, z, weight, bias, mean, var

"""The table of scripts/memory_table.py."""

import memory_table
import pytest
import torch
from torch import nn
from trained import as_trained


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(("unit", "blocks"), [(memory_table.Unit, (2, 1)), (memory_table.BasicBlock, (4, 2))])
def test_a_unit_holds_so_many_activations(unit, blocks, converted):
    net = nn.Sequential(*[unit("relu") for _ in range(memory_table.FIRST + 1)])
    x = torch.randn(4, memory_table.CHANNELS, 16, 16)
    assert memory_table.held(net, x, converted) == pytest.approx(blocks[converted], abs=0.02)


def test_norms_of_the_residual_block_are_drawn_from_the_table():
    block = as_trained(memory_table.BasicBlock("relu"))
    assert block.second.norm.weight.abs().max() < 0.5

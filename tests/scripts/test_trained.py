"""Norms as training leaves them: scripts/trained.py and its table."""

import copy
import json

import pytest
import torch
import trained
from foreign_nets import BasicBlock, ResNet, mobilenet
from torch import nn


class PreActBottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.act = *(nn.BatchNorm2d(64) for _ in range(3)), nn.ReLU()


def pairs_of(norm):
    return {*zip(norm.weight.tolist(), norm.bias.tolist(), strict=True)}


def test_norms_of_residual_nets_are_drawn_from_the_table_by_their_kinds():
    net = trained.as_trained(ResNet(64))
    block = next(m for m in net.modules() if isinstance(m, BasicBlock) and m.downsample is not None)
    stem = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    kinds = {stem: "bn1", block.bn1: "bn1", block.bn2: "bn3", block.downsample[1]: "downsample.1"}
    for norm, kind in kinds.items():
        assert pairs_of(norm) <= {*map(tuple, trained.table()[kind].tolist())}


def test_no_norm_of_a_pre_activated_block_is_the_last():
    block = PreActBottleneck()
    assert [trained.kinds(block)[m] for m in (block.norm1, block.norm2, block.norm3)] == ["bn1", "bn2", "bn2"]


def test_the_seed_decides():
    first, same, other = (trained.as_trained(ResNet(8), seed).bn1.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("net", "smallest", "largest", "bias"),
    [(mobilenet(nn.SiLU), 0.05, 13, 8), (mobilenet(nn.Hardswish), 1e-4, 6, 5)],
)
def test_norms_of_other_families_are_in_their_ranges(net, smallest, largest, bias):
    trained.as_trained(net)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    weights, biases = (torch.cat([getattr(m, name) for m in norms]) for name in ("weight", "bias"))
    assert smallest <= weights.min() < 0.5 < 2 < weights.max() <= largest
    assert 1 < biases.abs().max() <= bias


def test_other_norms_stay_around_their_initial_weights_and_no_constant_is_left():
    net = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.GroupNorm(4, 512), nn.RMSNorm(512), nn.LayerNorm(512))
    nn.init.constant_(net[1].weight, 3)
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[4].weight)
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    linear = copy.deepcopy(net[0].state_dict())
    trained.as_trained(net)
    medians = [net[i].weight.median().item() for i in (1, 2, 3)]
    assert medians == pytest.approx([3, 1, 1], rel=0.1)
    # This weight is added to something.
    assert net[4].weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert net[1].bias.std().item() == pytest.approx(0.3, rel=0.1)
    assert net.scale != 1
    assert all(torch.equal(value, linear[name]) for name, value in net[0].state_dict().items())


def test_the_table_is_made_of_pairs(monkeypatch, tmp_path):
    kinds = ("bn1", "bn2", "bn3", "downsample.1")
    source = tmp_path / "pairs.json"
    pairs = [[0.123456, 1], [1.5e-9, -2]]
    source.write_text(json.dumps({"source": "here"} | {k: {"what": "norm", "pairs": pairs} for k in kinds}))
    monkeypatch.setattr(trained, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr("sys.argv", ["trained.py", str(source)])
    trained.main()
    made = json.loads((tmp_path / "table.json").read_text())
    assert made["source"] == "here"
    assert made["bn3"] == {"what": "norm", "weights": [0.1235, 1.5e-9], "biases": [1, -2]}

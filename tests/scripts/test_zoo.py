"""The table of scripts/zoo.py: what it says about a model, and about a package that is missing."""

import re
import sys

import pytest
import torch
import zoo
from foreign_nets import conv
from torch import nn


def block():
    model = nn.Sequential(
        conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4)
    )
    return zoo.trained(model)


def test_a_row_tells_that_gradients_are_equal_and_what_is_held():
    cells = dict(zip(zoo.COLUMNS, zoo.row("block", block(), torch.randn(4, 3, 32, 32)), strict=True))
    assert cells["model"] == "block, 4x3x32x32"
    assert re.fullmatch(r"equal, \de-1\d", cells["gradients"])
    assert cells["norms"] == "2 of 2"
    # The next convolution keeps the activated tensor, and no norm saves its input.
    assert cells["converted"] == "0.500"
    assert cells["step"] == "-"
    timed = dict(zip(zoo.COLUMNS, zoo.row("block", block(), torch.randn(4, 3, 32, 32), False, 2), strict=True))
    assert timed["gradients"] == "-"
    assert float(timed["step"]) > 0


def test_a_row_names_a_gradient_that_differs(monkeypatch):
    def spoiled(model):
        model[3].weight.data *= 1 + 1e-6
        return model

    monkeypatch.setattr(zoo, "convert", spoiled)
    text = zoo.row("block", block(), torch.randn(4, 3, 32, 32))[1]
    assert re.match(r"DIFFER: \d\.\de-\d\d \w+", text)


def test_trained_leaves_no_constant_and_no_zero():
    model = block()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    weight = model[0].weight.clone()
    for p in zoo.trained(model).parameters():
        assert (p != 0).all()
    assert model.scale != 1
    assert 0.5 <= model[1].weight.min() < model[1].weight.max() <= 1.5
    assert torch.equal(model[0].weight, weight)


def test_the_page_has_a_row_for_a_package_that_is_missing(monkeypatch, tmp_path, capsys):
    entry = zoo.Entry("no_such_package.models", "no-such-package", lambda package: block())
    monkeypatch.setattr(zoo, "ZOO", {"its model": entry, "another": entry})
    monkeypatch.setattr(sys, "argv", ["zoo.py", "its", "--write", str(tmp_path / "zoo.md")])
    zoo.main()
    page = (tmp_path / "zoo.md").read_text()
    row = page.splitlines()[-1]
    assert row.startswith("| its model | no_such_package.models cannot be imported: No module named 'no_such_package'")
    assert row.count("|") == len(zoo.COLUMNS) + 1
    assert f"torch {torch.__version__}" in page
    assert "another" not in capsys.readouterr().out


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_entry_of_an_installed_package_can_be_made(name):
    library = zoo.import_torchvision()
    package = pytest.importorskip(zoo.ZOO[name].package)
    assert isinstance(zoo.ZOO[name].make(package), nn.Module)
    del library

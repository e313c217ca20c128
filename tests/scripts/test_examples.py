"""The examples run: on a synthetic volume where their packages are there, and as a trainer of nnU-Net's."""

import importlib
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import nn

from inplace_abn.conversion.norms import InPlaceInstanceNorm3d

FOLDER = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the examples")


@pytest.fixture
def example(monkeypatch):
    """Imports one of that name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        for loaded in ("nnunet", "monai_unet"):
            sys.modules.pop(loaded, None)
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    ("name", "package", "options", "most"),
    [
        ("nnunet", "dynamic_network_architectures", ["--width", "4"], 0.65),
        ("monai_unet", "monai", [], 0.75),
        ("monai_unet", "monai", ["--act", "leakyrelu"], 0.6),
    ],
)
def test_an_example_trains_to_the_same_loss_in_less_memory(name, package, options, most, example, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "3", "--size", "16", *options])
    example(name).main()
    _, native, ours = capsys.readouterr().out.splitlines()
    losses = [[float(found) for found in re.findall(r"([\d.]+) at", line)] for line in (native, ours)]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    unit = {"KiB": 1, "MiB": 1024}
    held = [float(words[-2]) * unit[words[-1]] for line in (native, ours) for words in [line.split(";")[0].split()]]
    assert held[1] < most * held[0]


def test_nnunets_trainer_gets_its_network_with_norms_in_place(example, monkeypatch):
    def network(channels):
        layers = [nn.Conv3d(channels, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv3d(4, 2, 1))

    class Trainer:
        @staticmethod
        def build_network_architecture(plans, configuration, inputs, outputs, deep_supervision=True):
            assert (plans, outputs, deep_supervision) == ("plans", 2, False)
            return network(inputs)

        def _do_i_compile(self):
            return True

    def package(name, **members):
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    # Its search for trainers imports all that is in the folder.
    for name in ("monai", "dynamic_network_architectures"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("", ".training", ".training.nnUNetTrainer", ".utilities", ".utilities.plans_handling"):
        package("nnunetv2" + name)
    package("nnunetv2.training.nnUNetTrainer.nnUNetTrainer", nnUNetTrainer=Trainer)
    package("nnunetv2.utilities.plans_handling.plans_handler", PlansManager=object, ConfigurationManager=object)
    assert not hasattr(example("monai_unet"), "nnUNetTrainerInPlace")
    trainer = example("nnunet").nnUNetTrainerInPlace()
    configuration = types.SimpleNamespace(patch_size=(8, 8, 8))
    built = trainer.build_network_architecture("plans", configuration, 1, 2, False)
    assert type(built[1]) is InPlaceInstanceNorm3d
    assert built.state_dict().keys() == network(1).state_dict().keys()
    assert not trainer._do_i_compile()
    x = torch.randn(2, 1, 8, 8, 8)
    assert "InPlaceABNFunction" in built[:3](x).grad_fn.name()

"""Each example runs, prints what its docstring shows, and does what it claims. nnU-Net finds its trainer among the
examples."""

import ast
import importlib
import re
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision_anywhere import environment_with_torchvision

from inplace_abn.conversion.classes import InPlaceInstanceNorm3d

FOLDER = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the examples")

NEEDS = {
    "accelerate_loop": ["accelerate"],
    "diffusers_unet": ["diffusers"],
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_ddp": ["lightning"],
    "low_level_ops": [],
    "monai_unet": ["monai"],
    "nnunet": ["dynamic_network_architectures"],
    "smp_unet": ["segmentation_models_pytorch"],
    "timm_finetune": ["timm", "sklearn", "matplotlib"],
    "torchrun_sync": [],
    "ultralytics_yolo": ["ultralytics", "PIL"],
}
"""What each example imports besides torch and this package."""
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
"""Distributions whose names differ from those of their modules by more than underscores."""


def source(name):
    return ast.parse((FOLDER / f"{name}.py").read_text())


def masked(line):
    return re.sub(r"\d[\d.]*(e[-+]\d+)?", "#", line.rstrip())


def numbers(line):
    return [float(found) for found in re.findall(r"(?<![\w.])\d[\d.]*(?:e[-+]\d+)?", line)]


def lines_with(word, output):
    return [line for line in output.splitlines() if word in line]


def check_saved(output):
    """Asserts that the converted model holds less than the native one, and takes less at the peak."""
    (native, converted) = [numbers(line) for line in lines_with("MiB held", output)]
    assert converted[0] < 0.75 * native[0]
    assert converted[1] < native[1]


def check_same_losses(output, tolerance):
    native, converted = (numbers(line)[:2] for line in lines_with("at first", output))
    assert converted == pytest.approx(native, abs=tolerance)


@pytest.fixture
def run(tmp_path):
    """Runs an example and returns its output. Asserts that all lines that its docstring shows are in it, except for
    numbers. Of several texts that the docstring shows, ``after`` counts which."""

    def run(name, *options, launcher=(), after=-1):
        for package in NEEDS[name]:
            if find_spec(package) is None:
                pytest.skip(f"needs {package}")
        settings = {"OMP_NUM_THREADS": "1", "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(tmp_path)}
        environment = environment_with_torchvision() | settings
        command = [sys.executable, *launcher, str(FOLDER / f"{name}.py"), *options]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        shown = ast.get_docstring(source(name)).split(":\n\n    ")[after].partition("\n\n")[0]
        missing = {masked(line.removeprefix("    ")) for line in shown.splitlines()}
        missing -= {masked(line) for line in done.stdout.splitlines()}
        assert not missing, done.stdout
        return done.stdout

    return run


@pytest.mark.slow
def test_low_level_ops_agree_with_torch_and_hold_less(run):
    loss, errors, held = map(numbers, run("low_level_ops", "--width", "8").splitlines())
    assert loss[0] == loss[1] != loss[2]
    assert max(errors) < 1e-12
    assert held[0] < held[1]


@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")],
    ids=["alone", "torchrun"],
)
@pytest.mark.slow
def test_torchrun_sync_trains_as_one_process_with_the_whole_batch(launcher, run):
    output = run("torchrun_sync", "--steps", "4", launcher=launcher)
    *synchronised, separate = [max(numbers(line)) for line in lines_with("largest relative", output)]
    assert len(synchronised) == 2
    assert max(synchronised) < 1e-12
    assert separate > 1e-3


@pytest.mark.slow
def test_timm_finetune_trains_to_the_same_losses_in_less_memory(run, tmp_path):
    options = ["--model", "resnet10t", "--steps", "5", "--seeds", "2", "--batch", "16"]
    output = run("timm_finetune", *options, "--png", "losses.png", after=1)
    check_saved(output)
    runs = [numbers(line) for line in lines_with("seed", output)]
    assert [seed for seed, *_ in runs] == [0, 1]
    for _, first, native, converted in runs:
        assert converted == pytest.approx(native, abs=0.01)
        assert 0 < native < first
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_timm_finetune_trains_transformers_in_less_memory(run):
    options = ["--model", "vit_tiny_patch16_224", "--steps", "2", "--seeds", "1", "--batch", "8"]
    check_saved(run("timm_finetune", *options))


@pytest.mark.slow
def test_smp_unet_trains_to_the_same_loss_in_less_memory(run):
    output = run("smp_unet", "--steps", "3", "--batch", "4")
    check_saved(output)
    check_same_losses(output, 0.01)


@pytest.mark.slow
def test_hf_trainer_saves_what_an_unconverted_model_loads(run):
    output = run("hf_trainer", "--steps", "8")
    (held,) = lines_with("held for backward", output)
    native, converted = numbers(held)
    assert converted < 0.75 * native
    (trained,) = lines_with("evaluation loss", output)
    steps, before, after = numbers(trained)
    assert steps == 8
    assert after < before
    (loaded,) = lines_with("loaded into", output)
    assert numbers(loaded) == [0, 0]


@pytest.mark.parametrize("options", [[], ["--precision", "bf16"]], ids=str)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_accelerate_loop_trains_and_saves_what_an_unconverted_net_loads(processes, options, run):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
    output = run("accelerate_loop", *options, launcher=launcher)
    (norms,) = lines_with("norms in place", output)
    assert numbers(norms) == [3, 3]
    (_, *first), (_, *second) = [numbers(line) for line in lines_with("evaluation loss", output)]
    assert all(after < before for after, before in zip(second, first, strict=True))
    loaded, exported = (numbers(line)[-1] for line in lines_with("differ by", output))
    assert loaded == 0
    assert exported < 1e-5


@pytest.mark.parametrize("options", [[], ["--checkpointing"]], ids=str)
@pytest.mark.slow
def test_diffusers_unet_trains_as_the_native_one_and_is_loaded_by_diffusers(options, run):
    output = run("diffusers_unet", "--steps", "3", "--size", "16", "--batch", "2", *options)
    (held,) = lines_with("held for backward", output)
    native, converted = numbers(held)
    assert converted < (0.95 if options else 0.8) * native
    (trained,) = lines_with("steps: loss", output)
    steps, _, own, other = numbers(trained)
    assert steps == 3
    assert abs(own - other) < 1e-2 * other
    (loaded,) = lines_with("loaded into", output)
    assert numbers(loaded) == [0, 0]


@pytest.mark.slow
def test_lightning_ddp_trains_as_one_process_with_the_whole_batch(run):
    output = run("lightning_ddp", "--steps", "4")
    steps, errors, norms = output.splitlines()
    assert numbers(steps) == [4, 2]
    assert max(numbers(errors)) < 1e-12
    assert norms.split("norms: ")[1].startswith("InPlaceBatchNorm2d;")
    assert norms.endswith(" SyncBatchNorm")


@pytest.mark.slow
def test_ultralytics_yolo_is_converted_while_it_trains_and_not_in_its_checkpoint(run):
    output = run("ultralytics_yolo", "--epochs", "1", "--images", "16", "--size", "64")
    check_saved(output)
    check_same_losses(output, 0.1)
    (norms,) = lines_with("norms while training", output)
    training, checkpoint = norms.split(";")
    assert " InPlaceBatchNorm2d" in training
    assert "InPlace" not in checkpoint


@pytest.mark.parametrize("options", [[], ["--act", "leakyrelu"]])
@pytest.mark.slow
def test_monai_unet_trains_to_the_same_loss_in_less_memory(options, run):
    output = run("monai_unet", "--steps", "3", "--size", "16", *options)
    check_saved(output)
    check_same_losses(output, 1e-3)


@pytest.mark.slow
def test_nnunet_trains_to_the_same_loss_in_less_memory(run):
    output = run("nnunet", "--steps", "3", "--size", "16", "--width", "4")
    check_saved(output)
    check_same_losses(output, 1e-3)


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_tested_and_tells_what_it_needs(name):
    assert any(test.startswith(f"test_{name}_") for test in globals())
    tree, packages = source(name), set(NEEDS[name])
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    imports = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    imported = {(node.module or "").split(".")[0] for node in imports}
    imported |= {alias.name for f in functions for n in ast.walk(f) if isinstance(n, ast.Import) for alias in n.names}
    assert imported <= packages
    words = " ".join(re.findall("pip install (.*)", ast.get_docstring(tree))).split()
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"({name}.py)" in line)
    for package in packages:
        distribution = DISTRIBUTIONS.get(package, package.replace("_", "-"))
        assert distribution in words
        assert distribution in row


def test_there_is_no_other_example():
    assert {path.stem for path in FOLDER.glob("*.py")} == NEEDS.keys()


@pytest.fixture
def imported(monkeypatch):
    """A function that imports all examples without any of their packages, as nnU-Net's search for a trainer does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for package in {package for packages in NEEDS.values() for package in packages}:
        monkeypatch.setitem(sys.modules, package, None)

    def load():
        for name in NEEDS:
            monkeypatch.delitem(sys.modules, name, raising=False)
        return {path.stem: importlib.import_module(path.stem) for path in sorted(FOLDER.glob("*.py"))}

    yield load
    for name in NEEDS:
        sys.modules.pop(name, None)


def test_nnunets_trainer_gets_its_network_with_norms_in_place(imported, monkeypatch):
    def network(channels):
        layers = [nn.Conv3d(channels, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv3d(4, 2, 1))

    class Trainer:
        @staticmethod
        def build_network_architecture(plans, configuration, inputs, outputs, deep_supervision=True):
            assert (plans, outputs, deep_supervision) == ("plans", 2, False)
            return network(inputs)

    def package(name, **members):
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("", ".training", ".training.nnUNetTrainer", ".utilities", ".utilities.plans_handling"):
        package("nnunetv2" + name)
    package("nnunetv2.training.nnUNetTrainer.nnUNetTrainer", nnUNetTrainer=Trainer)
    package("nnunetv2.utilities.plans_handling.plans_handler", PlansManager=object, ConfigurationManager=object)
    found = [module for module in imported().values() if hasattr(module, "nnUNetTrainerInPlace")]
    assert [module.__name__ for module in found] == ["nnunet"]
    trainer = found[0].nnUNetTrainerInPlace()
    configuration = types.SimpleNamespace(patch_size=(8, 8, 8))
    built = trainer.build_network_architecture("plans", configuration, 1, 2, False)
    assert type(built[1]) is InPlaceInstanceNorm3d
    assert built.state_dict().keys() == network(1).state_dict().keys()
    x = torch.randn(2, 1, 8, 8, 8)
    built(x).sum().backward()
    # torch's instance norm returns a view, too, so the node is that of its base.
    z = built[:3](x)
    assert "InPlaceABNFunction" in z._base.grad_fn.name()

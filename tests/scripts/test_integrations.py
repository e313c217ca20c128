"""The files of examples/integrations do with the real libraries what they say. Absent libraries are skipped."""

import copy
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision_anywhere import environment_with_torchvision

import inplace_abn

FOLDER = Path(__file__).parents[2] / "examples" / "integrations"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the examples")


def integration(name, *packages, folder=FOLDER):
    """The module of a file, which imports the packages."""
    environment_with_torchvision()
    for package in packages:
        pytest.importorskip(package)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def images(count=32):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 4)


def norms(model):
    return {type(module) for module in model.modules() if isinstance(module, nn.BatchNorm2d)}


def check_same_states(actual, expected, tolerance=1e-4):
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=tolerance, atol=tolerance)


def classifier(**members):
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.seen = set()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            self.seen |= norms(self.net)
            self.log("loss", loss := F.cross_entropy(self(batch[0]), batch[1]))
            return loss

        def validation_step(self, batch, index):
            self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    module = Classifier()
    for name, member in members.items():
        setattr(module, name, member)
    return module


def fit(module, folder, callbacks, path=None, **options):
    from lightning.pytorch import Trainer

    settings = {"max_epochs": 2, "enable_checkpointing": False} | options
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **settings,
    )
    trainer.fit(module, DataLoader(images(), 8), DataLoader(images(8), 8), ckpt_path=path)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_lightning_trains_the_same_module_in_place_and_gives_it_back(options, tmp_path, capsys):
    callback = integration("lightning_callback", "lightning").InPlaceCallback()
    native, module = classifier(), classifier(example_input_array=images(4).tensors[0])
    fit(native, tmp_path, [], **options)
    fit(module, tmp_path, [callback], **options)
    assert native.seen == norms(module) == {nn.BatchNorm2d}
    assert module.seen.isdisjoint(native.seen)
    assert len(callback.report.in_place) == 2
    assert capsys.readouterr().out.count("2 of 2 norms are in place") == 1
    check_same_states(module, native, 1e-4 if not options.get("precision") else 2e-2)


@pytest.mark.slow
def test_lightning_resumes_from_checkpoints_of_either_kind_and_averages_weights(tmp_path):
    from_package = integration("lightning_callback", "lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    expected = classifier()
    fit(expected, tmp_path, [EMAWeightAveraging(decay=0.5)], max_epochs=4)
    callback, saved = from_package.InPlaceCallback(), ModelCheckpoint(tmp_path)
    for first, then in (([callback], []), ([], [callback])):
        fit(classifier(), tmp_path, [saved, EMAWeightAveraging(decay=0.5), *first], enable_checkpointing=True)
        module = classifier()
        fit(module, tmp_path, [EMAWeightAveraging(decay=0.5), *then], saved.best_model_path, max_epochs=4)
        check_same_states(module, expected, 1e-3)


@pytest.mark.slow
def test_lightning_stops_before_training_if_the_conversion_is_wrong(tmp_path, monkeypatch):
    """The check must see a copy that computes something else, and leave the module as it was."""
    module = integration("lightning_callback", "lightning")
    monkeypatch.setattr(module.inplace_abn, "convert", lambda model, **_: model.apply(scaled))
    net = classifier(example_input_array=images(4).tensors[0])
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match="the converted module is not the module"):
        fit(net, tmp_path, [module.InPlaceCallback()])
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


def scaled(module):
    if isinstance(module, nn.Linear):
        module.weight.data *= 2


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    )


def trainer_of(model, folder, callbacks, **options):
    from transformers import Trainer, TrainingArguments

    settings = {"max_steps": 4, "save_strategy": "no", "per_device_train_batch_size": 8} | options
    pictures, labels = images(32).tensors
    data = [
        {"pixel_values": F.interpolate(p[None], size=32)[0], "labels": t} for p, t in zip(pictures, labels, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)


OPTIONS = [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}, {"torch_compile_backend": "aot_eager"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transformers_trains_the_same_model_in_place_and_gives_it_back(options, tmp_path, capsys):
    callbacks = integration("transformers_callback", "transformers", "accelerate")
    native, model = resnet(), resnet()
    callback = callbacks.InPlaceCallback(example={"pixel_values": torch.randn(2, 3, 32, 32)})
    trainer = trainer_of(model, tmp_path, [callback], **options)
    assert nn.BatchNorm2d not in norms(model)
    trainer.train()
    trainer_of(native, tmp_path, [], **options).train()
    assert norms(model) == {nn.BatchNorm2d}
    report = callback.report
    # A compiled step tells nothing.
    assert bool(report.in_place) == ("torch_compile_backend" not in options)
    assert str(report) in capsys.readouterr().out
    check_same_states(model, native, 1e-3 if not options.get("bf16") else 2e-2)
    trainer.train()
    assert callback.report is not report
    assert norms(model) == {nn.BatchNorm2d}


@pytest.mark.slow
def test_transformers_resumes_from_checkpoints_of_either_kind(tmp_path):
    callback = integration("transformers_callback", "transformers", "accelerate").InPlaceCallback()
    expected = resnet()
    trainer_of(expected, tmp_path, []).train()
    for name, first, then in (("from ours", [callback], []), ("from theirs", [], [callback])):
        folder = tmp_path / name
        trainer_of(resnet(), folder, first, save_strategy="steps", save_steps=2).train()
        model = resnet()
        trainer_of(model, folder, then).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        check_same_states(model, expected, 1e-3)
        loaded = type(model).from_pretrained(folder / "checkpoint-4")
        assert norms(loaded) == {nn.BatchNorm2d}
        check_same_states(loaded, expected, 1e-3)


DISTRIBUTED = """
import sys
import test_integrations as tests
import transformers_callback

folder, batch, training = sys.argv[1:]
model = tests.resnet()
callback = transformers_callback.InPlaceCallback(sync=True)
options = {"per_device_train_batch_size": int(batch), "max_steps": 2}
options |= {"ddp_backend": "gloo"} if training == "in place" else {}
trainer = tests.trainer_of(model, folder, [callback] * (training == "in place"), **options)
trainer.train()
trainer.train()
assert tests.norms(model) == {tests.nn.BatchNorm2d}
trainer.save_model(folder)
"""


@pytest.mark.slow
def test_transformers_trains_on_two_processes_as_on_one_with_the_whole_batch(tmp_path):
    """The model of the second training is converted after DistributedDataParallel has wrapped it."""
    integration("transformers_callback", "transformers", "accelerate")
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    environment = environment_with_torchvision()
    folders = [str(Path(__file__).parent), *sys.path, str(FOLDER)]
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), *folders])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for arguments in (["train.py", "one", "16", "natively"], [*launcher, "train.py", "two", "8", "in place"]):
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    one, two = (type(resnet()).from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert "norms are in place" in done.stdout
    check_same_states(two, one, 1e-3)


ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "_kw_requires_import": ["conv_op", "norm_op", "nonlin"],
    "arch_kwargs": {
        "n_stages": 3,
        "features_per_stage": [4, 8, 16],
        "conv_op": "torch.nn.Conv3d",
        "kernel_sizes": [[3, 3, 3]] * 3,
        "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
        "n_conv_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1],
        "conv_bias": True,
        "norm_op": "torch.nn.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    },
}
CONFIGURATION = {
    "data_identifier": "data",
    "batch_size": 2,
    "patch_size": [16, 16, 16],
    "median_image_size_in_voxels": [16, 16, 16],
    "spacing": [1, 1, 1],
    "batch_dice": False,
    "architecture": ARCHITECTURE,
}
PLANS = {
    "dataset_name": "Dataset001_Balls",
    "plans_name": "plans",
    "label_manager": "LabelManager",
    "transpose_forward": [0, 1, 2],
    "continue_training": False,
    "configurations": {"3d_fullres": CONFIGURATION},
}
DATASET = {"channel_names": {"0": "noise"}, "labels": {"background": 0, "ball": 1}, "file_ending": ".nii.gz"}


@pytest.mark.slow
def test_nnunets_trainer_trains_its_network_in_place_and_shares_checkpoints_with_its_parent(tmp_path, monkeypatch):
    example = integration("nnunet", "nnunetv2", folder=FOLDER.parent)
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as parent

    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(tmp_path))
    data = tmp_path / "Dataset001_Balls" / "data"
    data.mkdir(parents=True)
    (data / "case.b2nd").touch()

    def trainer(kind):
        made = kind(copy.deepcopy(PLANS), "3d_fullres", 0, DATASET, device=torch.device("cpu"))
        made.initialize()
        return made

    def losses(made, steps=3):
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            x, labels = example.patches(2, 16, generator)
            target = [F.interpolate(labels[:, None].float(), scale_factor=1 / 2**depth) for depth in range(2)]
            yield made.train_step({"data": x, "target": [t.to(torch.int16) for t in target]})["loss"].item()

    ours, theirs = trainer(example.nnUNetTrainerInPlace), trainer(parent.nnUNetTrainer)
    theirs.network.load_state_dict(ours.network.state_dict())
    assert list(losses(ours)) == pytest.approx(list(losses(theirs)), rel=1e-4)
    assert len(inplace_abn.report(ours.network).in_place) == 5
    for saved, kind in ((ours, parent.nnUNetTrainer), (theirs, example.nnUNetTrainerInPlace)):
        saved.save_checkpoint(str(tmp_path / "checkpoint.pth"))
        loaded = trainer(kind)
        loaded.load_checkpoint(str(tmp_path / "checkpoint.pth"))
        assert list(losses(loaded, 1)) == pytest.approx(list(losses(saved, 1)), rel=1e-4)


TRAIN = """
import argparse
import torch
from timm.models import create_model, resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--model")
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model = create_model(args.model, num_classes=4, zero_init_last=False)
print("norms:", *sorted({type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start = resume_checkpoint(model, args.resume, optimizer=optimizer, log_info=False) if args.resume else 0
average = ModelEmaV3(model, decay=0.5)
saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=args.folder, recovery_dir=args.folder)
for epoch in range(start, start + 2):
    model.train()
    generator = torch.Generator().manual_seed(epoch)
    loss = model(torch.randn(8, 3, 32, 32, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
    model.eval()
    with torch.no_grad():
        print("loss:", loss.item(), average.module.eval()(torch.ones(1, 3, 32, 32)).square().mean().item())
    saver.save_checkpoint(epoch, metric=-epoch)
"""
"""What train.py of timm does with a model, in its order, with timm's own functions."""


@pytest.mark.slow
def test_scripts_that_make_timms_models_train_converted_ones(tmp_path):
    pytest.importorskip("timm")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))

    def run(folder, *command):
        (tmp_path / folder).mkdir(exist_ok=True)
        environment = environment_with_torchvision()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (kinds,) = [line for line in done.stdout.splitlines() if line.startswith("norms:")]
        losses = [float(n) for line in done.stdout.splitlines() if line.startswith("loss:") for n in line.split()[1:]]
        return kinds.split()[1:], losses, done.stdout

    ours, theirs = [str(FOLDER / "timm_train.py"), "train.py"], ["train.py"]
    options = ["--model", "resnet10t"]
    kinds, expected, _ = run("native", *theirs, "native", *options)
    assert kinds == ["BatchNorm2d"]
    kinds, losses, output = run("converted", *ours, "converted", *options, "--sync-bn")
    assert "BatchNorm2d" not in kinds
    assert "norms are in place and save" in output
    assert losses == pytest.approx(expected, rel=1e-3)
    for first, then, name in (("native", ours, "a"), ("converted", theirs, "b")):
        _, losses, _ = run(name, *then, name, *options, "--resume", f"{first}/last.pth.tar")
        _, expected, _ = run("both", *theirs, "both", *options, "--resume", "native/last.pth.tar")
        assert losses == pytest.approx(expected, rel=1e-3)


def test_every_integration_is_tested_and_in_the_table():
    table = (FOLDER.parent / "README.md").read_text()
    tests = Path(__file__).read_text()
    for path in FOLDER.glob("*.py"):
        assert f"(integrations/{path.name})" in table
        assert path.stem in tests


def test_nothing_of_the_package_is_kept_by_a_module_that_was_given_back():
    """A copy of a reverted model could not be pickled where the package is absent."""
    model = inplace_abn.convert(network())
    model(images(4).tensors[0]).sum().backward()
    assert all("inplace_abn" not in type(module).__module__ for module in inplace_abn.revert(model).modules())

"""The segmentation demo: its measurements, its errors, short runs, and continuing from a checkpoint."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import compare_runs
import train_segmentation
from PIL import Image
from segmentation.data import IGNORE, DigitScenes, FolderData, seeded_generator
from segmentation.measure import class_iou, confusion_matrix, mean_iou, peak_memory
from segmentation.net import ACTIVATION_PARAMS, NORMS, build_net

TINY = ["--device", "cpu", "--steps", "4", "--batch-size", "2", "--size", "48", "--checkpoint-every", "2"]


def run(out, *options):
    train_segmentation.main([*TINY, "--out", str(out), *options])
    return json.loads((out / "result.json").read_text())


@pytest.fixture
def few_val_batches(monkeypatch):
    monkeypatch.setattr(DigitScenes, "val_batches", 1)


@pytest.fixture
def folder(tmp_path):
    """Three pairs of unequal sizes, classes 0 to 2, with ignored pixels."""
    root = tmp_path / "data"
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for i, (height, width) in enumerate([(40, 50), (64, 64), (70, 33)]):
        mask = rng.integers(0, 3, (height, width), dtype=np.uint8)
        mask[:3] = IGNORE
        Image.fromarray(mask).save(root / "masks" / f"scene{i}.png")
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
            root / "images" / f"scene{i}.jpg"
        )
    return root


def test_iou_counts_labelled_pixels_only():
    label = torch.tensor([[0, 0, 1, 1], [2, 2, IGNORE, IGNORE]])
    prediction = torch.tensor([[0, 1, 1, 1], [2, 0, 3, 0]])
    iou = class_iou(confusion_matrix(prediction, label, 4))
    assert iou == [1 / 3, 2 / 3, 1 / 2, None]
    assert mean_iou(iou) == pytest.approx(0.5)
    assert mean_iou([None]) is None


def test_peak_memory_is_the_most_held_at_once():
    def step():
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first, second
        return torch.zeros(250)

    assert peak_memory(step, torch.device("cpu")) == 6000


def test_digit_scenes():
    scenes = DigitScenes(64)
    images, labels = scenes.train_batch(3, seeded_generator(0, 1, 2))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
        (3, 3, 64, 64),
        torch.float32,
        (3, 64, 64),
        torch.int64,
    )
    assert labels.min() == 0
    assert 1 <= labels.max() <= 10
    again, other = scenes.train_batch(3, seeded_generator(0, 1, 2)), scenes.train_batch(3, seeded_generator(0, 1, 3))
    assert torch.equal(again[0], images)
    assert not torch.equal(other[0], images)


def test_folder_pads_with_ignored_pixels(folder):
    data = FolderData(folder, 64, 3)
    assert data.val_batches == 1
    image, label = data.val_batch(0)
    assert (image.shape, label.shape) == ((1, 3, 48, 64), (1, 48, 64))
    assert (label[:, 40:] == IGNORE).all()
    assert (label[:, :, 50:] == IGNORE).all()
    images, labels = data.train_batch(5, seeded_generator(0))
    assert (images.shape, labels.shape) == ((5, 3, 64, 64), (5, 64, 64))


def spoil_missing_mask(root):
    (root / "masks/scene1.png").unlink()
    return "scene1.jpg: no mask"


def spoil_label(root):
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(root / "masks/scene1.png")
    return "scene1.png: label 7"


def spoil_image(root):
    (root / "images/scene1.jpg").write_bytes(b"not an image")
    return "scene1.jpg: not a readable image"


def spoil_half_an_image(root):
    path = root / "images/scene1.jpg"
    path.write_bytes(path.read_bytes()[:900])
    return "scene1.jpg: not a readable image"


def spoil_mask(root):
    (root / "masks/scene1.png").write_bytes(b"")
    return "scene1.png: not a readable image"


def spoil_size(root):
    Image.fromarray(np.zeros((64, 60), np.uint8)).save(root / "masks/scene1.png")
    return "scene1.png: 60x64 pixels, but scene1.jpg has 64x64"


def spoil_channels(root):
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(root / "masks/scene1.png")
    return "scene1.png: a mask has one channel"


def spoil_stems(root):
    (root / "images/scene1.bmp").write_bytes(b"")
    return "scene1.jpg: has the same stem as scene1.bmp"


def spoil_all_images(root):
    for path in (root / "images").iterdir():
        path.unlink()
    return "images: 0 image"


def spoil_folder(root):
    (root / "masks").rename(root / "labels")
    return "masks: no such folder"


@pytest.mark.parametrize("spoil", [f for name, f in sorted(globals().items()) if name.startswith("spoil_")])
def test_bad_data_is_an_error_that_names_the_file(folder, tmp_path, spoil):
    message = spoil(folder)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", "--norm", "native", "--data", str(folder), "--classes", "3")
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "50"],
        ["--data", "somewhere"],
        ["--classes", "3"],
        ["--steps", "0"],
        ["--norm", "other"],
        ["--activation-param", "-1"],
    ],
)
def test_bad_options(options, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, *options)
    assert options[0] in capsys.readouterr().err


def test_train_on_a_folder(folder, tmp_path):
    result = run(tmp_path / "run", "--norm", "native", "--data", str(folder), "--classes", "3")
    assert list(result["iou"]) == ["0", "1", "2"]
    assert (tmp_path / "run/predictions.png").stat().st_size > 0


def test_compared_runs(tmp_path, few_val_batches, capsys):
    runs = [tmp_path / norm for norm in ("native", "inplace")]
    options = ["--amp", "bf16", "--channels-last", "--activation", "elu", "--size", "96", "--batch-size", "8"]
    native = run(runs[0], "--norm", "native", *options)
    inplace = run(runs[1], "--norm", "inplace", *options)
    assert inplace["peak_mb"] < native["peak_mb"]
    assert native["losses"] == pytest.approx(inplace["losses"], rel=0.1)
    capsys.readouterr()
    compare_runs.main([str(runs[0]), str(runs[1] / "result.json")])
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1
    assert rows[1].startswith("| inplace | elu | bf16 | channels last | 1 |")
    with pytest.raises(SystemExit, match="nowhere"):
        compare_runs.main([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("norm", ["native", "inplace"])
def test_resume_continues_exactly(tmp_path, few_val_batches, monkeypatch, norm):
    whole = run(tmp_path / "whole", "--norm", norm)
    batch = DigitScenes.train_batch
    calls = []

    def failing_batch(*args):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("interrupted")
        return batch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DigitScenes, "train_batch", failing_batch)
        with pytest.raises(RuntimeError, match="interrupted"):
            run(tmp_path / "parts", "--norm", norm)
    checkpoint = str(tmp_path / "parts/checkpoint.pt")
    resumed = run(tmp_path / "parts", "--norm", norm, "--resume", checkpoint)
    assert resumed["losses"] == whole["losses"]
    assert resumed["iou"] == whole["iou"]
    with pytest.raises(SystemExit, match=r"checkpoint\.pt: was made with seed 0, not 1"):
        run(tmp_path / "parts", "--norm", norm, "--resume", checkpoint, "--seed", "1")


@pytest.mark.parametrize("content", [None, b"", b"text", "tensor"])
def test_bad_checkpoint(tmp_path, content):
    path = tmp_path / "bad.pt"
    if content == "tensor":
        torch.save(torch.zeros(3), path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"bad\.pt: not a checkpoint"):
        run(tmp_path / "run", "--norm", "native", "--resume", str(path))


@pytest.mark.filterwarnings("ignore:inplace_abn_sync")
@pytest.mark.parametrize("activation", ACTIVATION_PARAMS)
@pytest.mark.parametrize("norm", NORMS[1:])
def test_net_computes_the_same_with_every_norm(norm, activation):
    param = ACTIVATION_PARAMS[activation]
    images, labels = DigitScenes(64).train_batch(4, seeded_generator(0))
    native = build_net(11, "native", activation, param)
    other = build_net(11, norm, activation, param)
    other.load_state_dict(native.state_dict())
    gradients = []
    for net in (native, other):
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        gradients.append([p.grad for p in net.parameters()])
    for name, expected, actual in zip(dict(native.named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(images), native.eval()(images), rtol=1e-4, atol=1e-4)


def test_two_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [train_segmentation.__file__, *TINY, "--norm", "inplace-sync", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["world_size"] == 2
    assert len(result["losses"]) == 4
    assert done.stdout.count("written to") == 1

"""The segmentation demo: its net, its data, its errors, short runs, and what it prints."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from contextlib import closing
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import demo
from PIL import Image
from segmentation.data import IGNORE, DigitScenes, FolderData, seeded_generator
from segmentation.net import ACTIVATIONS, UNet, ViT
from segmentation.progress import Progress, duration
from segmentation.report import ENOUGH_STEPS, Comparison, Run, conclusion, mean_iou, spread

import inplace_abn
from inplace_abn.conversion.norms import InPlaceNorm

NORMS = ("native", "converted")
TINY = ["--device", "cpu", "--steps", "3", "--seeds", "1", "--batch-size", "2", "--size", "48"]


def run(out, *options):
    demo.main([*TINY, "--out", str(out), *options])
    return json.loads((out / "result.json").read_text())["comparisons"]


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


def test_iou_is_averaged_over_the_classes_that_there_are():
    # Counts of pixels by (label, prediction). The last class is neither label nor prediction.
    confusion = torch.tensor([[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    assert mean_iou(confusion) == pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3)


def test_ignored_pixels_count_neither_for_the_loss_nor_for_the_iou(few_val_batches):
    data = DigitScenes(48)
    torch.manual_seed(0)
    net = demo.Trainee(UNet(11, "relu"), False, 5e-3, 3, data.class_weights)
    images, labels = data.train_batch(2, seeded_generator(0))
    half = labels.clone()
    half[1] = IGNORE
    net.eval()
    assert net(images, half).item() == pytest.approx(net(images[:1], labels[:1]).item(), rel=1e-5)
    assert net(images, torch.full_like(labels, IGNORE)).item() == 0
    whole = net.miou(data)
    data.val_batch = lambda index: (DigitScenes.val_batch(data, index)[0], torch.full((16, 24, 24), IGNORE))
    assert math.isnan(net.miou(data))
    assert 0 <= whole <= 1


def test_digit_scenes():
    scenes = DigitScenes(64)
    images, labels = scenes.train_batch(3, seeded_generator(0, 1, 2))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
        (3, 3, 64, 64),
        torch.float32,
        (3, 32, 32),
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
    assert (image.shape, label.shape) == ((1, 3, 48, 64), (1, 24, 32))
    assert (label[:, 20:] == IGNORE).all()
    assert (label[:, :, 25:] == IGNORE).all()
    images, labels = data.train_batch(5, seeded_generator(0))
    assert (images.shape, labels.shape) == ((5, 3, 64, 64), (5, 32, 32))


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
        run(tmp_path / "run", "--data", str(folder), "--classes", "3")
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
        ["--seeds", "0"],
        ["--activation", "other"],
        ["--lr", "0"],
        ["--lr", "nan"],
        ["--device", "nowhere"],
        ["--device", "meta"],
        ["--batch-size", "1", "--size", "16"],
        ["--out", __file__],
        ["--out", f"{__file__}/below"],
    ],
)
def test_bad_options_are_errors_before_anything_else(options, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, *options)
    out, err = capsys.readouterr()
    assert options[0] in err.splitlines()[-1]
    assert not out


def test_a_net_that_cannot_be_trained_is_an_error_before_another_is_trained(tmp_path, capsys, monkeypatch):
    def broken(classes, activation):
        raise ZeroDivisionError

    monkeypatch.setitem(demo.NETS, "vit", broken)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "--net", "unet", "vit")
    assert "mIoU" not in capsys.readouterr().out


def test_off_a_terminal_a_line_comes_by_the_interval_and_tells_what_is_left_of_all_nets(capsys):
    now = 0.0
    # Ten steps of 1 s, and ten that are expected to take 4 s each. All take half as long again.
    progress = Progress(20, 50.0, True, interval=10.0, clock=lambda: now)
    assert progress.left == 50
    told = [0.0]
    for step in range(20):
        expected = 1.0 if step < 10 else 4.0
        now += 1.5 * expected
        progress.step(expected, f"step {step}")
        if out := capsys.readouterr().out:
            told.append(now)
            assert out == f"about {duration(75 - now)} left: step {step}\n"
    assert len(told) > 5
    assert max(b - a for a, b in pairwise(told)) < 10 + 1.5 * 4


def test_another_process_tells_nothing(capsys):
    progress = Progress(1, 1.0, False, interval=0.0)
    progress.step(1.0, "step")
    progress.write("line")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar_and_no_lines(capsys, monkeypatch):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with closing(Progress(1, 1.0, True, interval=0.0)) as progress:
        progress.step(1.0, "step")
    out, err = capsys.readouterr()
    assert not out
    assert "100%|" in err
    assert "about 0 s left: step" in err


def test_durations_are_told_in_seconds_and_minutes():
    assert [duration(seconds) for seconds in (0.4, 99.4, 99.5, 3060)] == ["0 s", "99 s", "2 min", "51 min"]


def test_off_a_terminal_a_run_says_what_it_does_how_long_it_takes_and_where_the_files_are(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "Progress", partial(Progress, interval=0.0))
    run(tmp_path, "--data", str(folder), "--classes", "3")
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == "unet in fp32, native and converted, on cpu: 3 steps of 2 images of 48x48, from 1 seed"
    assert re.fullmatch(r"about \d+ s, by the first steps", second)
    number = r"\d+\.\d{3}"
    for step, line in enumerate(lines[:3], 1):
        losses = f"loss {number} native, {number} converted"
        assert re.fullmatch(rf"about \d+ s left: unet, fp32, seed 0, step {step} of 3: {losses}", line)
    assert lines[3].startswith("unet, fp32, seed 0: mIoU")
    assert "±" not in "".join(lines)
    assert lines[-1].endswith(f"written to {tmp_path}: demo.png, result.json, weights.pt")
    assert all((tmp_path / name).stat().st_size for name in ("demo.png", "result.json", "weights.pt"))


def test_train_on_a_folder(folder, tmp_path):
    (result,) = run(tmp_path / "run", "--data", str(folder), "--classes", "3")
    assert all(len(one["losses"]) == 3 for one in result["runs"])
    UNet(3, "silu").load_state_dict(torch.load(tmp_path / "run/weights.pt"))


# Both nets hold autocast's copies of the weights.
@pytest.mark.parametrize(
    ("options", "held"),
    [
        ([], {("unet", "fp32"): 0.4}),
        pytest.param(
            ["--net", "unet", "vit", "--dtype", "fp32", "bf16", "--activation", "relu"],
            {("unet", "fp32"): 0.56, ("unet", "bf16"): 0.65, ("vit", "fp32"): 0.65, ("vit", "bf16"): 0.7},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["silu", "relu, and all nets and dtypes one after the other"],
)
def test_both_nets_learn_the_same_and_the_converted_one_takes_less_memory(
    options, held, tmp_path, few_val_batches, capfd
):
    results = run(tmp_path, "--seeds", "2", "--size", "64", "--batch-size", "8", *options)
    assert [(result["net"], result["dtype"]) for result in results] == [*held]
    for result, (pair, most) in zip(results, held.items(), strict=True):
        native, converted = ([one for one in result["runs"] if one["norm"] == norm] for norm in NORMS)
        assert [one["seed"] for one in native] == [one["seed"] for one in converted] == [0, 1]
        narrow = "bf16" in pair
        for one, other in zip(native, converted, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=0.1 if narrow else 1e-3)
            assert one["losses"][0] == pytest.approx(other["losses"][0], rel=1e-2 if narrow else 1e-5)
        assert native[0]["losses"] != native[1]["losses"]
        for moment in ("first", "memory"):
            before, after = (result[moment][which] for which in ("before", "after"))
            assert after["held"] < most * before["held"]
            assert after["peak"] < (most + 0.15) * before["peak"]
            assert after["first_peak"] < 1.1 * before["peak"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    out, _ = capfd.readouterr()
    rows = [line for line in out.splitlines() if line.startswith("|")]
    count = len(rows) // len(held)
    for table in (rows[i : i + count] for i in range(0, len(rows), count)):
        names = [row.split("|")[1].strip() for row in (table[0], *table[2:])]
        assert names == ["", "native", "converted", "difference"]
        assert len({len(row) for row in table}) == 1
    assert out.count(": mIoU ") == 2 * len(held)
    assert out.count("This was a smoke test") == len(held)
    titles = [f"{net}, {dtype}" for net, dtype in held]
    assert [line for line in out.splitlines() if line in titles] == (titles if len(held) > 1 else [])


def test_differences_are_told_beside_what_seeds_do():
    def comparison(*mious, steps=ENOUGH_STEPS):
        runs = [Run(i, NORMS[i % 2], miou, [1.0] * steps, []) for i, miou in enumerate(mious)]
        return Comparison("unet", "fp32", runs, None, None)

    assert conclusion(comparison(0.7, 0.71, 0.8, 0.81)) == (
        "Seeds alone move the native net's mIoU by 0.0707 (standard deviation). From the same seed, the converted "
        "net's differs by +0.0100 ± 0.0000, 0.14 of that."
    )
    assert conclusion(comparison(0.7, 0.69)) == "From the same seed, the converted net's mIoU differs by -0.0100."
    assert conclusion(comparison(0.7, 0.69, steps=ENOUGH_STEPS - 1)).startswith("This was a smoke test")


def test_spread_is_of_several_values():
    assert spread([0.5]) == "0.500"
    assert spread([0.5, 0.7]) == "0.600 ± 0.141"
    assert spread([-0.5, -0.7], "+") == "-0.600 ± 0.141"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_norm_of_the_net_converts_and_gradients_are_the_same(activation):
    torch.manual_seed(0)
    native = UNet(11, activation)
    images, _ = DigitScenes(64).train_batch(2, seeded_generator(0))
    converted = inplace_abn.convert(copy.deepcopy(native))
    norms = [m for m in native.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert sum(isinstance(m, InPlaceNorm) for m in converted.modules()) == len(norms)
    assert inplace_abn.verify(native, converted, images)


def test_the_transformer_converts_and_gradients_are_the_same():
    torch.manual_seed(0)
    native = ViT(11)
    images, _ = DigitScenes(64).train_batch(2, seeded_generator(0))
    assert native(images).shape == (2, 11, 32, 32)
    assert inplace_abn.verify(native, inplace_abn.convert(copy.deepcopy(native)), images)


@pytest.mark.slow
def test_two_processes_train_with_synchronised_statistics_and_one_of_them_prints(folder, tmp_path):
    # Validation of a folder is shorter than that of scenes. Processes of their own also tell what torch's profiler
    # prints, which it decides only once.
    data = ["--data", str(folder), "--classes", "3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [demo.__file__, *TINY, *data, "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["processes"] == 2
    assert [len(one["losses"]) for one in result["comparisons"][0]["runs"]] == [3, 3]
    for once in ("by the first steps", "from 1 seed", "seed 0: mIoU", "written to"):
        assert done.stdout.count(once) == 1

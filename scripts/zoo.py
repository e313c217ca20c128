"""Measures memory and time of public models, native and converted, and checks their gradients.

    python scripts/zoo.py                            # all models of the installed packages, as a table
    python scripts/zoo.py resnet50 dla34             # some of them
    python scripts/zoo.py --write docs/zoo.md        # the page of the documentation
    python scripts/zoo.py --readme                   # larger inputs, without gradients: the table of README.md
    python scripts/zoo.py --readme --dtype bfloat16  # the same under autocast, which is printed only

Only the models of the packages are needed, so the packages are installed without their dependencies:

    pip install --no-deps timm torchvision segmentation-models-pytorch ultralytics opencv-python-headless \\
        monai einops dynamic-network-architectures transformers diffusers

Take the torchvision that was made for this torch. Models are built from their configurations, with random weights, and
run on the CPU. The converted model is measured as initialised and with norms as `trained.as_trained` leaves
them; natively it makes no difference. When steps are timed, the native and the converted model take turns.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.metadata
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmark import steps as course
from benchmark.timing import no_garbage_collection
from torch import Tensor, nn
from trained import as_trained

from inplace_abn import Report, Verification, convert, report, verify
from inplace_abn.conversion.table import readable
from inplace_abn.trial import trainable

COLUMNS = (
    *("model", "gradients", "in place", "held", "converted, initialised", "converted, trained"),
    *("peak", "peak, initialised", "peak, trained", "step"),
)

README = Path(__file__).parents[1] / "README.md"
README_MARKERS = ("<!-- models -->\n", "<!-- /models -->")
README_COLUMNS = (
    *("", "model", "held, MiB", "as initialised", "as trained"),
    *("peak, MiB", "as initialised", "as trained", "time of a step"),
)

MEASURED_STEPS = 5
"""Norms are measured in the first, second, third and fifth step, and then not before the ninth."""


class Shown(NamedTuple):
    """A row of the table of README.md."""

    family: str
    shape: tuple[int, ...]
    """The input's, for which activations take more memory than parameters."""


README_MODELS = {
    "timm resnet50": Shown("CNN", (8, 3, 224, 224)),
    "timm efficientnet_b0": Shown("CNN", (8, 3, 224, 224)),
    "smp Unet": Shown("segmentation", (8, 3, 256, 256)),
    "HF SegFormer": Shown("segmentation", (2, 3, 512, 512)),
    "ultralytics yolo11n": Shown("detection", (8, 3, 320, 320)),
    "nnU-Net PlainConvUNet 3d": Shown("medical", (2, 1, 64, 64, 64)),
    "timm vit_small_patch16_224": Shown("transformer", (8, 3, 224, 224)),
    "timm convnext_tiny": Shown("transformer", (8, 3, 224, 224)),
    "diffusers UNet2DModel, attention": Shown("diffusion", (8, 3, 32, 32)),
}


PAGE = """# Public models

`python scripts/zoo.py --write docs/zoo.md` makes this page. Its docstring says what to install. This one was made with
{versions}.

- **gradients**: whether `inplace_abn.verify` finds all gradients, outputs and running statistics of a training step in
  float64 equal to the original's, and the largest relative difference of a gradient.
- **in place**: how many of the norms (batch, instance, group, layer or RMS norms), and of the activations without a
  norm, are in place after `convert(model)`; as initialised / as trained, where they differ.
- **held**: what the forward pass of the original holds for backward, in float32 on the CPU, with an input of the shape
  that stands beside the name. **converted** is the share of that which is held after `convert(model)`, with norms as
  initialised and as trained, in a step after those in which norms are measured.
- **peak**: the most that a training step of the original takes, and what the converted model takes, as a share of it,
  in the largest of all steps, the first with its measurements among them.
- **step**: what a training step of the converted model takes, in the original's time, as trained; {threads}, beside
  whatever else the machine was doing. Inputs are small here, so this is mostly what calls take.
  [Larger inputs](../README.md#public-models).

**As trained** means that weights and biases of batch norms of ResNets and their descendants are drawn from those of a
trained ResNet-152 (`scripts/trained_norms.json`), and those of all other norms from made-up distributions, which
`scripts/trained.py` describes. No model of this page was trained. Other parameters that initialisation sets to a
constant have normal noise of deviation 0.1 added. Gradients are compared so, because one would differ as initialised,
that of the bias in the first affine layer of HGNetV2, a single number. It is exactly zero then and added to the zeros
of a ReLU, which makes them equal to the zeros that are padded before a pooling, and there the gradient depends on which
of two equal values the pooling takes ([subgradients at ties](differences.md#who-notices)). It is equal as soon as the
bias has moved. As initialised, norms with weights of zero, such as those of timm's ResNet-50, keep their input until
the weights have grown.

"""


class Entry(NamedTuple):
    package: str
    """The Python module to import."""
    distribution: str
    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...] = (3, 64, 64)
    """The shape of one image."""

    def build(self, trained: bool = True) -> nn.Module:
        """Makes the model, with norms as trained or as initialised. Raises ImportError if the package cannot be
        imported."""
        # ultralytics looks for the internet as soon as it is imported.
        os.environ.setdefault("YOLO_OFFLINE", "true")
        import_torchvision()
        package = importlib.import_module(self.package)
        torch.manual_seed(0)
        model = self.make(package)
        return as_trained(model) if trained else model


def timm(name: str, side: int = 64, **options: Any) -> Entry:
    """An entry for a model of square images with this many pixels in a row."""
    return Entry("timm", "timm", lambda package: package.create_model(name, **options), (3, side, side))


def torchvision(name: str) -> Entry:
    return Entry("torchvision.models", "torchvision", lambda package: getattr(package, name)())


def smp(name: str) -> Entry:
    """An entry for an architecture. A hyphen and an encoder may follow in ``name``; otherwise the encoder is the
    default one."""
    architecture, _, encoder = name.partition("-")
    options = {"encoder_weights": None} | ({"encoder_name": encoder} if encoder else {})
    make = lambda package: getattr(package, architecture)(**options)  # noqa: E731
    return Entry("segmentation_models_pytorch", "segmentation-models-pytorch", make)


def ultralytics(name: str) -> Entry:
    make = lambda package: package.DetectionModel(f"{name}.yaml", verbose=False)  # noqa: E731
    return Entry("ultralytics.nn.tasks", "ultralytics", make)


def monai(name: str, **options: Any) -> Entry:
    make = lambda package: getattr(package, name)(3, in_channels=1, out_channels=2, **options)  # noqa: E731
    return Entry("monai.networks.nets", "monai", make, (1, 32, 32, 32))


def nnunet(name: str, dims: int, norm: str = "InstanceNorm", **options: Any) -> Entry:
    """A net as nnU-Net plans it, except for its width: with biases, leaky ReLU and an output at each depth."""
    settings = {
        "input_channels": 1,
        "n_stages": 4,
        "features_per_stage": (16, 32, 64, 128),
        "conv_op": getattr(nn, f"Conv{dims}d"),
        "kernel_sizes": 3,
        "strides": (1, 2, 2, 2),
        "n_conv_per_stage_decoder": 2,
        "num_classes": 2,
        "conv_bias": True,
        "norm_op": getattr(nn, f"{norm}{dims}d"),
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": nn.LeakyReLU,
        "nonlin_kwargs": {"inplace": True},
        "deep_supervision": True,
        **options,
    }
    module = "dynamic_network_architectures.architectures.unet"
    make = lambda package: getattr(package, name)(**settings)  # noqa: E731
    return Entry(module, "dynamic-network-architectures", make, (1, *[64 if dims == 2 else 32] * dims))


def hugging_face(name: str, **options: Any) -> Entry:
    make = lambda package: (kind := getattr(package, name))(kind.config_class(**options))  # noqa: E731
    return Entry("transformers", "transformers", make)


class Denoising(nn.Module):
    """A net for diffusion at a fixed time."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.net(x, 10).sample
        return noise


def unet(attention: bool) -> Entry:
    kind = "Attn" if attention else ""
    blocks = {f"{way.lower()}_block_types": (f"{kind}{way}Block2D",) * 3 for way in ("Down", "Up")}
    make = lambda package: Denoising(package.UNet2DModel(block_out_channels=(64, 128, 128), **blocks))  # noqa: E731
    return Entry("diffusers", "diffusers", make)


def diffusers(name: str) -> Entry:
    if name != "UNet2D":
        raise ValueError(f"of diffusers there is UNet2D, not {name}")
    return unet(attention=False)


def autoencoder() -> Entry:
    blocks = {
        f"{way.lower()}_block_types": (f"{way}{part}Block2D",) * 3
        for way, part in (("Down", "Encoder"), ("Up", "Decoder"))
    }
    make = lambda package: package.AutoencoderKL(block_out_channels=(64, 128, 128), **blocks)  # noqa: E731
    return Entry("diffusers", "diffusers", make)


def demo(activation: str) -> Entry:
    """The demo's segmentation net, which needs torch alone."""
    return Entry("segmentation.net", "torch", lambda package: package.UNet(11, activation))


PACKAGES = {"timm": timm, "torchvision": torchvision, "smp": smp, "ultralytics": ultralytics}
PACKAGES |= {"diffusers": diffusers, "demo": demo}


def named(name: str) -> Entry:
    """The model that a name such as ``torchvision:resnet18``, ``smp:Unet-resnet18`` or ``demo:relu`` stands for.

    Raises:
        ValueError: the package is none of `PACKAGES`.
    """
    package, _, model = name.partition(":")
    if package not in PACKAGES or not model:
        raise ValueError(f"expected one of {', '.join(PACKAGES)}, a colon and a model's name, got {name!r}")
    return PACKAGES[package](model)


TIMM = (
    *("resnet50", "dla34", "skresnet34", "regnety_002", "resnetv2_50", "dpn68"),
    *("densenet121", "efficientnet_b0", "hgnetv2_b0"),
)
TIMM_224 = (
    *("vit_small_patch16_224", "deit3_small_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny"),
    *("convnextv2_tiny", "mixer_s16_224", "resnetv2_50x1_bit"),
)
"""Models without batch norm. Some of them take images of this size only."""
NNUNET: dict[str, tuple[Any, ...]] = {"2d, BatchNorm": (2, "BatchNorm"), "2d": (2,), "3d": (3,)}
ZOO = {
    **{f"timm {name}": timm(name) for name in TIMM},
    **{f"timm {name}": timm(name, 224) for name in TIMM_224},
    "timm vit_small_patch14_dinov2": timm("vit_small_patch14_dinov2", 112, img_size=112),
    "timm eva02_small_patch14_224": timm("eva02_small_patch14_224", 112, img_size=112),
    **{f"torchvision {name}": torchvision(name) for name in ("resnet50", "densenet121", "mobilenet_v3_large")},
    **{f"smp {name}": smp(name) for name in ("Unet", "Linknet", "DeepLabV3Plus")},
    "ultralytics yolo11n": ultralytics("yolo11n"),
    "MONAI SegResNet": monai("SegResNet", norm="batch"),
    "MONAI DynUNet": monai(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
        norm_name=("BATCH", {"affine": True}),
    ),
    "MONAI SegResNet, instance norm": monai("SegResNet", norm="instance"),
    "MONAI DynUNet, instance norm": monai(
        "DynUNet",
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[8, 16, 32, 64],
        norm_name=("INSTANCE", {"affine": True}),
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    ),
    "MONAI SwinUNETR": Entry(
        "monai.networks.nets",
        "monai",
        lambda package: package.SwinUNETR(in_channels=1, out_channels=2, feature_size=12),
        (1, 64, 32, 32),
    ),
    "MONAI BasicUNet, instance norm": monai("BasicUNet", features=(8, 8, 16, 32, 64, 8)),
    "MONAI UNet, instance norm, PReLU": monai("UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
    "MONAI UNet, instance norm, leaky ReLU": monai(
        "UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2, act="leakyrelu"
    ),
    **{f"nnU-Net PlainConvUNet {of}": nnunet("PlainConvUNet", *NNUNET[of], n_conv_per_stage=2) for of in NNUNET},
    **{
        f"nnU-Net ResidualEncoderUNet {of}": nnunet("ResidualEncoderUNet", *NNUNET[of], n_blocks_per_stage=(1, 2, 2, 2))
        for of in NNUNET
    },
    "HF ResNet": hugging_face("ResNetForImageClassification"),
    "HF UperNet": hugging_face(
        "UperNetForSemanticSegmentation",
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [2, 2, 2, 2],
            "layer_type": "basic",
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        hidden_size=64,
        auxiliary_in_channels=64,
        auxiliary_channels=32,
        num_labels=5,
    ),
    "HF UperNet, ConvNeXt": hugging_face(
        "UperNetForSemanticSegmentation",
        backbone_config={
            "model_type": "convnext",
            "hidden_sizes": [32, 64, 128, 256],
            "depths": [2, 2, 4, 2],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        hidden_size=64,
        use_auxiliary_head=False,
        num_labels=5,
    ),
    "HF SegFormer": hugging_face("SegformerForSemanticSegmentation", num_labels=20),
    "HF MobileViT": hugging_face("MobileViTForImageClassification", image_size=64),
    "diffusers UNet2DModel": unet(attention=False),
    "diffusers UNet2DModel, attention": unet(attention=True),
    "diffusers AutoencoderKL": autoencoder(),
}


@functools.cache
def import_torchvision() -> torch.library.Library | None:
    """Imports torchvision if it is installed.

    If torchvision lacks its compiled part, its import asks for ops that do not exist. They are defined here, and live
    as long as the library that is returned. The cache of this function keeps the library.
    """
    library = None
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:  # An operator does not exist.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
    return library


def verdict(found: Verification) -> str:
    if found:
        return f"equal, {max(found.gradient_errors.values()):.0e}"
    name, error = found.worst
    return f"DIFFER: {error:.1e} {name}"


def time_share(net: nn.Module, x: Tensor, steps: int, dtype: torch.dtype = torch.float32) -> float:
    """The time of a training step of a converted copy, in the net's own time. It is the median over the steps, which
    autocast to ``dtype``."""
    trainings = {
        label: course.Training(model, model, torch.optim.SGD(model.parameters(), lr=1e-4), x, dtype)
        for label, model in (("native", net.train()), ("converted", convert(copy.deepcopy(net))))
    }
    for training in trainings.values():
        for _ in range(course.WARM_UP):
            training.step()
    notes: dict[str, str] = {}
    times = course.time_steps(trainings, steps, notes)
    if notes:
        raise RuntimeError(str(notes))
    return statistics.median(b / a for a, b in zip(times["native"], times["converted"], strict=True))


def shape_in_words(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


class Memory(NamedTuple):
    """The memory of training steps, in bytes above what was allocated before each."""

    held: int
    """What is held for backward in a step after those in which norms are measured."""
    peak: int
    """The most at any moment of any step, the first one among them."""


def memory(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32, steps: int = MEASURED_STEPS) -> Memory:
    """Measures so many steps and a later one, which autocast to ``dtype`` and leave all parameters as they are."""
    training = course.Training(model, model.train(), torch.optim.SGD(model.parameters(), lr=0.0), x, dtype)
    # What is freed in a later step would be subtracted from its peak.
    with no_garbage_collection():
        peaks = [peak_of_step(training) for _ in range(steps)]
    later = course.memory(training)
    return Memory(later["held"], max(*peaks, later["peak"]))


def peak_of_step(training: course.Training) -> int:
    """Takes a step. Unlike `inplace_abn.memory.measure` it takes no other step before, and norms may be measured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    training.optimizer.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
        training.loss().backward()
    training.optimizer.step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes), default=0)


class Found(NamedTuple):
    """What was measured of a model in a dtype."""

    native: Memory
    initialised: Memory
    """Of the converted model with norms as initialised."""
    trained: Memory
    """Of the converted model with norms as trained."""
    time: float | None
    """The time of a step after ``convert``, in the original's; with norms as trained."""


def found_in(
    initialised: nn.Module, trained: nn.Module, x: Tensor, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Found, list[Report]]:
    """What is found of a model, and what its norms did as initialised and as trained."""
    # Natively all steps are the same, whatever the weights are.
    native = memory(trainable(initialised), x, dtype, 1)
    nets = [convert(trainable(model)) for model in (initialised, trained)]
    first, second = (memory(net, x, dtype) for net in nets)
    time = time_share(trained, x, steps, dtype) if steps else None
    return Found(native, first, second, time), [report(net) for net in nets]


def differing(cells: Iterable[str]) -> str:
    """The cells with strokes between them; a single one if they are equal."""
    return " / ".join(dict.fromkeys(cells))


def row(
    name: str, initialised: nn.Module, trained: nn.Module, x: Tensor, verified: bool = True, steps: int = 0
) -> tuple[str, ...]:
    """The cells of `COLUMNS` for a model, which is given with norms as initialised and as trained."""
    # Two images are enough for the norms, which need more than one value per channel. More would be slow in float64.
    equal = verdict(verify(trained, convert(copy.deepcopy(trained)), x[:2])) if verified else "-"
    found, norms = found_in(initialised, trained, x, steps)
    converted = (found.initialised, found.trained)
    return (
        f"{name}, {shape_in_words(x.shape)}",
        equal,
        f"{differing(str(len(each.in_place)) for each in norms)} of {len(norms[1].layers)}",
        readable(found.native.held),
        *(f"{each.held / found.native.held:.3f}" for each in converted),
        readable(found.native.peak),
        *(f"{each.peak / found.native.peak:.3f}" for each in converted),
        "-" if found.time is None else f"{found.time:.2f}",
    )


def entry_row(name: str, entry: Entry, batch: int, verified: bool, steps: int) -> tuple[str, ...]:
    """The cells of `COLUMNS` for a model of the zoo, or the reason why it cannot be made."""
    try:
        models = [entry.build(trained) for trained in (False, True)]
    except ImportError as error:
        return (name, f"{entry.package} cannot be imported: {error}", *[""] * (len(COLUMNS) - 2))
    return row(name, models[0], models[1], torch.randn(batch, *entry.shape), verified, steps)


def measured(name: str, dtype: torch.dtype, steps: int) -> Found:
    initialised, trained = (ZOO[name].build(trained) for trained in (False, True))
    return found_in(initialised, trained, torch.randn(README_MODELS[name].shape), steps, dtype)[0]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f}"


def change(native: int, converted: int) -> str:
    return f"**{converted / native - 1:+.0%}**"


def readme_row(name: str, found: Found) -> tuple[str, ...]:
    """The cells of `README_COLUMNS` for what was measured."""

    def sizes(native: int, *converted: int) -> list[str]:
        return [mebibytes(native), *(f"{mebibytes(each)}, {change(native, each)}" for each in converted)]

    native, initialised, trained, time = found
    family, shape = README_MODELS[name]
    return (
        *(family, f"{name}, {shape_in_words(shape)}"),
        *sizes(native.held, initialised.held, trained.held),
        *sizes(native.peak, initialised.peak, trained.peak),
        "-" if time is None else f"{time:.2f}",
    )


def with_table(text: str, table: str) -> str:
    """``text`` with the table between the markers.

    Raises:
        ValueError: ``text`` does not have each marker exactly once.
    """
    begin, end = README_MARKERS
    if any(text.count(marker) != 1 for marker in README_MARKERS):
        raise ValueError(f"expected one {begin.strip()} and one {end} in {README.name}")
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def versions(entries: Iterable[Entry]) -> str:
    """The versions of torch and of the installed packages, in words."""
    found = [f"torch {torch.__version__}"]
    for distribution in dict.fromkeys(entry.distribution for entry in entries):
        try:
            found.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-verify", action="store_true", help="compare no gradients")
    parser.add_argument("--steps", type=int, default=12, help="that are timed; 0 for none")
    parser.add_argument("--write", metavar="FILE", help="write a page with the table")
    parser.add_argument("--readme", action="store_true", help="measure the table of README.md, and write it there")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of autocast, with --readme")
    args = parser.parse_args()
    if args.readme and (args.names or args.write):
        parser.error("the table of README.md has models of its own, so --readme takes neither names nor --write")
    dtype = getattr(torch, args.dtype)
    if dtype != torch.float32 and not args.readme:
        parser.error("--dtype is for --readme")
    columns = README_COLUMNS if args.readme else COLUMNS
    chosen = [*README_MODELS] if args.readme else [n for n in ZOO if not args.names or any(p in n for p in args.names)]
    lines = [line(columns), line(["---"] * len(columns))]
    print(*lines, sep="\n", flush=True)
    for name in chosen:
        if args.readme:
            cells = readme_row(name, measured(name, dtype, args.steps))
        else:
            cells = entry_row(name, ZOO[name], args.batch, not args.no_verify, args.steps)
        lines.append(line(cells))
        print(lines[-1], flush=True)
    text = versions(ZOO[name] for name in chosen)
    print(f"\n{text}", file=sys.stderr)
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    table = "\n".join(lines) + "\n"
    if args.readme and dtype == torch.float32:
        table += f"\nfloat32, CPU, {threads}, {text}.\n"
        README.write_text(with_table(README.read_text(encoding="utf-8"), table), encoding="utf-8")
    elif args.write:
        page = PAGE.format(versions=text, threads=threads)
        Path(args.write).write_text(page + table, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Held memory and gradients of public models, as they are and converted.

    python scripts/zoo.py                    # all that the installed packages have
    python scripts/zoo.py resnet50 dla34     # some

The packages are asked for the models alone: ``pip install --no-deps timm torchvision segmentation-models-pytorch``.
Per model: whether all gradients in float64 equal the original's, bytes held for backward by the original, converted
with and without an example, and the seconds that the analysis takes. Weights of norms are as after training.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from inplace_abn import analyze, convert, verify
from inplace_abn.memory import measure


class Entry(NamedTuple):
    package: str
    make: Callable[[Any], nn.Module]
    size: int = 64


def timm(name: str, **options: Any) -> Entry:
    return Entry("timm", lambda package: package.create_model(name, **options))


def torchvision(name: str, **options: Any) -> Entry:
    return Entry("torchvision.models", lambda package: getattr(package, name)(**options))


def smp(name: str) -> Entry:
    return Entry("segmentation_models_pytorch", lambda package: getattr(package, name)(encoder_weights=None))


TIMM = (
    *("resnet50", "dla34", "skresnet34", "regnety_002", "resnetv2_50", "dpn68"),
    *("densenet121", "efficientnet_b0", "hgnetv2_b0"),
)
ZOO = {
    **{f"timm {name}": timm(name) for name in TIMM},
    "torchvision resnet50": torchvision("resnet50"),
    "torchvision densenet121": torchvision("densenet121"),
    "torchvision mobilenet_v3_large": torchvision("mobilenet_v3_large"),
    "smp Unet": smp("Unet"),
    "smp Linknet": smp("Linknet"),
    "smp DeepLabV3Plus": smp("DeepLabV3Plus"),
}


def trained(model: nn.Module) -> nn.Module:
    """The model, its norms with weights as training leaves them."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, std=0.1, generator=generator)
    return model


def declare_torchvision_ops() -> torch.library.Library:
    """Without its compiled part, torchvision imports once these are known."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-verify", action="store_true", help="measure memory only")
    args = parser.parse_args()
    library = declare_torchvision_ops()
    print("| model | gradients | norms | held | example | predicted | no example | analysis |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, entry in ZOO.items():
        if args.names and not any(part in name for part in args.names):
            continue
        try:
            package = importlib.import_module(entry.package)
        except ImportError as error:
            print(f"| {name} | {entry.package} cannot be imported: {error} |")
            continue
        torch.manual_seed(0)
        model = trained(entry.make(package))
        x = torch.randn(args.batch, 3, entry.size, entry.size)
        start = time.perf_counter()
        plan = analyze(model, x)
        seconds = time.perf_counter() - start
        with_example = convert(copy.deepcopy(model), plan)
        without = convert(copy.deepcopy(model))
        verdict = "-"
        if not args.no_verify:
            found = [verify(model, m, x[:2]) for m in (with_example, without)]
            verdict = "equal" if all(found) else f"DIFFER: {found[0].worst} {found[1].worst}"
        held = [measure(m, x).held for m in (model, with_example, without)]
        predicted = held[0] - plan.bytes_saved - plan.residual_bytes_saved
        converted = len(plan.convertible) + len(plan.residuals)
        ratios = [f"{size / held[0]:.3f}" for size in (held[1], predicted, held[2])]
        size = f"{held[0] / 2**20:.1f} MiB"
        print(f"| {name} | {verdict} | {converted} of {len(plan.layers)} | {size} |", " | ".join(ratios), end=" ")
        print(f"| {seconds:.1f} s |", flush=True)
    del library


if __name__ == "__main__":
    main()

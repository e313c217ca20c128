#!/usr/bin/env python
"""Predicts what nets take on one GPU and on eight, natively and converted. The table is written to docs/scale.md.

What steps hold for backward is counted on the CPU, by the allocator's events, at two batches or image sizes; their
difference is that of a sample. Weights and activations are bfloat16, so that autocast, which differs between devices,
plays no part. Norms are as `trained.as_trained` leaves them. The traffic is counted from shapes.

    python scripts/scale.py              # all nets, about ten minutes; SDXL's takes 12 GiB
    python scripts/scale.py resnet50     # one of them, printed only
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import generated
import torch
from models import import_torchvision
from torch import Tensor, nn
from trained import as_trained
from zoo import memory, training

from inplace_abn import convert

PAGE = generated.ROOT / "docs/scale.md"
GIB = 1 << 30
GPU_BYTES = 80 * GIB
USABLE = 0.95
"""The share of what parameters leave that held tensors can have. On an H200 it was 0.95 to 0.96 (docs/gpu.md)."""
ADAMW_BYTES = 2 + 2 + 4 + 4
"""For each parameter: weight and gradient in bfloat16, two moments in float32."""
GPUS = 8
COLUMNS = (
    *("net, one sample", "parameters, M", "held per sample, MiB", "converted", "largest batch in 80 GiB", "converted"),
    *("norms that synchronise", "their traffic, MiB", "that of gradients, MiB"),
)


class ConditionedUNet(nn.Module):
    """SDXL's UNet at a fixed time, with a fixed prompt."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        prompt, pooled, size = (x.new_zeros(batch, *shape) for shape in ((77, 2048), (1280,), (6,)))
        found: Tensor = self.unet(x, 10, prompt, added_cond_kwargs={"text_embeds": pooled, "time_ids": size}).sample
        return found


def sdxl(package: Any) -> nn.Module:
    blocks = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    return ConditionedUNet(
        package.UNet2DConditionModel(
            block_out_channels=(320, 640, 1280),
            down_block_types=blocks,
            up_block_types=tuple(block.replace("Down", "Up") for block in reversed(blocks)),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
    )


class Net(NamedTuple):
    package: str
    make: Callable[[Any], nn.Module]
    shape: tuple[int, int, int]
    """That of one sample."""
    measured: tuple[tuple[int, ...], tuple[int, ...]]
    """Two inputs, of more samples or of more pixels each."""


NETS = {
    "timm resnet50": Net(
        "timm", lambda p: p.create_model("resnet50"), (3, 224, 224), ((2, 3, 224, 224), (4, 3, 224, 224))
    ),
    "smp Unet-resnet50": Net(
        "segmentation_models_pytorch",
        lambda p: p.Unet("resnet50", encoder_weights=None),
        (3, 512, 512),
        ((1, 3, 512, 512), (2, 3, 512, 512)),
    ),
    "timm vit_base_patch16_224": Net(
        "timm", lambda p: p.create_model("vit_base_patch16_224"), (3, 224, 224), ((1, 3, 224, 224), (2, 3, 224, 224))
    ),
    "diffusers SDXL UNet": Net("diffusers", sdxl, (4, 128, 128), ((1, 4, 16, 16), (1, 4, 32, 32))),
}


def held_per_sample(model: nn.Module, net: Net) -> float:
    """The bytes that a training step holds for backward, for each sample that is added."""
    found = []
    for shape in net.measured:
        samples = torch.Size(shape).numel() / torch.Size(net.shape).numel()
        found.append((samples, memory(training(model, torch.randn(shape, dtype=torch.bfloat16))).held))
    (first, held), (second, more) = found
    return (more - held) / (second - first)


def largest_batch(parameters: int, held: float) -> int:
    return max(0, int(USABLE * (GPU_BYTES - ADAMW_BYTES * parameters) / held))


def traffic_of_norms(model: nn.Module) -> tuple[int, int]:
    """How many batch norms there are, and the bytes that a rank of `GPUS` receives for them in a step: in forward mean,
    variance and count of all others, in backward a ring's sums of dy, xhat * dy and counts."""
    channels = [m.num_features for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    forward = sum((GPUS - 1) * (2 * count + 1) for count in channels)
    backward = sum(2 * (GPUS - 1) / GPUS * (2 * count + 1) for count in channels)
    return len(channels), int(4 * (forward + backward))


def row(name: str, net: Net) -> tuple[str, ...]:
    import_torchvision()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = as_trained(net.make(importlib.import_module(net.package))).bfloat16()
    torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    norms, traffic = traffic_of_norms(model)
    # Steps leave the parameters as they are.
    native = held_per_sample(model, net)
    ours = held_per_sample(convert(model), net)
    batches = [largest_batch(parameters, each) for each in (native, ours)]
    shape = "x".join(map(str, net.shape))
    return (
        f"{name}, {shape}",
        f"{parameters / 1e6:.1f}",
        f"{native / 2**20:.0f}",
        f"{ours / 2**20:.0f}, **{ours / native - 1:+.0%}**",
        str(batches[0]),
        f"{batches[1]}, **{batches[1] / batches[0]:.2f} times**" if batches[0] else str(batches[1]),
        str(norms) if norms else "none",
        f"{traffic / 2**20:.1f}" if norms else "-",
        f"{2 * (GPUS - 1) / GPUS * 2 * parameters / 2**20:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of nets' names; all without any")
    names = parser.parse_args().names
    chosen = [name for name in NETS if not names or any(part in name for part in names)]
    made_by = generated.made_by(("timm", "segmentation-models-pytorch", "diffusers"), torch.bfloat16)
    lines = [generated.table_head(COLUMNS)]
    print(*lines, sep="\n", flush=True)
    for name in chosen:
        lines.append(generated.table_line(row(name, NETS[name])))
        print(lines[-1], flush=True)
    if not names:
        generated.write(PAGE, "scale", lines, made_by)


if __name__ == "__main__":
    main()

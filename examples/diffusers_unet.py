#!/usr/bin/env python
"""Converts a U-Net of Hugging Face's diffusers, and trains it as diffusers' examples train one.

    pip install diffusers
    python examples/diffusers_unet.py

The U-Net's norms are GroupNorms, with SiLU after most of them. It learns to remove noise from pictures of discs. A
native copy sees the same batches and the same noise, so that the losses can be compared. At the end the model gets the
average of its weights, is saved by ``save_pretrained``, and diffusers loads it as a model of its own. In diffusers'
scripts call `inplace_abn.convert` before ``accelerator.prepare``. With ``--checkpointing`` blocks run again in
backward, and less is held between.

It prints:

    18 of 22 norms and activations in place
    held for backward: 66.8 MiB native, 41.8 MiB converted
    40 steps: loss 1.4029 at the beginning, 0.0529 at the end; native 0.0529
    loaded into a model with 0 converted norms: predictions differ by 0.0e+00 at most
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_abn
from inplace_abn.memory import measure


def network(size: int) -> nn.Module:
    from diffusers import UNet2DModel

    model: nn.Module = UNet2DModel(
        sample_size=size,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return model


def discs(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Pictures (batch, 1, size, size) of one disc each, with values of -1 and 1."""
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centres = torch.rand(batch, 2, 1, 1, generator=generator) * size
    radii = (0.1 + 0.2 * torch.rand(batch, 1, 1, generator=generator)) * size
    inside = (rows - centres[:, 0]).square() + (columns - centres[:, 1]).square() < radii.square()
    return (2.0 * inside - 1.0).unsqueeze(1)


def trained(model: nn.Module, steps: int, batch: int, size: int) -> Iterator[float]:
    """The loss of each step. Batches, noise and times are the same for every model. It ends with averaged weights."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    average = EMAModel(model.parameters(), decay=0.9)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        clean = discs(batch, size, generator)
        noise = torch.randn(clean.shape, generator=generator)
        times = torch.randint(scheduler.config.num_train_timesteps, (batch,), generator=generator)
        noisy = scheduler.add_noise(clean, noise, times)
        loss = F.mse_loss(model(noisy, times, return_dict=False)[0], noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.step(model.parameters())
        yield loss.item()
    average.copy_to(model.parameters())


def converted_norms(model: nn.Module) -> int:
    return sum(isinstance(m, nn.GroupNorm) and type(m) is not nn.GroupNorm for m in model.modules())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a converted U-Net of diffusers.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    options = parser.parse_args()

    torch.manual_seed(0)
    native = network(options.size)
    if options.checkpointing:
        native.enable_gradient_checkpointing()  # type: ignore[operator]
    model = inplace_abn.convert(copy.deepcopy(native))
    given = torch.randn(options.batch, 1, options.size, options.size), 10
    held = {name: measure(m, *given).held / 2**20 for name, m in (("native", native), ("converted", model))}
    report = inplace_abn.report(model)
    print(f"{len(report.in_place)} of {len(report.layers)} norms and activations in place")
    print(f"held for backward: {held['native']:.1f} MiB native, {held['converted']:.1f} MiB converted")

    losses = {m: list(trained(m, options.steps, options.batch, options.size)) for m in (native, model)}
    print(
        f"{options.steps} steps: loss {losses[model][0]:.4f} at the beginning, {losses[model][-1]:.4f} at the end; "
        f"native {losses[native][-1]:.4f}"
    )

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        loaded = type(native).from_pretrained(folder)  # type: ignore[attr-defined]
    with torch.no_grad():
        ours, theirs = (m.eval()(*given, return_dict=False)[0] for m in (model, loaded))
    print(
        f"loaded into a model with {converted_norms(loaded)} converted norms: predictions differ by "
        f"{float((ours - theirs).abs().max()):.1e} at most"
    )


if __name__ == "__main__":
    main()

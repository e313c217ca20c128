#!/usr/bin/env python
"""A training loop of Hugging Face's accelerate with a converted net: mixed precision, accumulated gradients, an average
of the weights, evaluation after each epoch, a checkpoint, and an export.

    pip install accelerate
    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --precision bf16

The net is converted before ``prepare``, which wraps it, and copied for the average before that, too, because a prepared
net cannot be copied well. ``sync=True`` makes norms share their statistics among processes. Checkpoints have the keys
and values of an unconverted net. The example loads one into an unconverted net, reverts the trained net, and exports
it.

It prints:

    3 of 3 norms in place
    epoch 1: evaluation loss 0.1360, of the average 1.1338
    epoch 2: evaluation loss 0.0250, of the average 0.1514
    checkpoint in an unconverted net: outputs differ by 0.0e+00 at most
    exported: outputs differ by 0.0e+00 at most
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import inplace_abn


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def stripes(count: int, seed: int) -> TensorDataset:
    """Images (3, 32, 32) of stripes in noise, in one of four directions, which is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    angles = labels.view(-1, 1, 1) * torch.pi / 4
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    phases = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    waves = (0.8 * (rows * angles.cos() + columns * angles.sin()) + phases).sin()
    return TensorDataset(waves[:, None] + 0.5 * torch.randn(count, 3, 32, 32, generator=generator), labels)


@torch.no_grad()
def evaluated(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    loss = F.cross_entropy(model(images).float(), labels).item()
    model.train()
    return loss


def main() -> None:
    from accelerate import Accelerator

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    args = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision=args.precision, gradient_accumulation_steps=2
    )
    net = inplace_abn.convert(network(), sync=accelerator.num_processes > 1).to(accelerator.device)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    loader = DataLoader(stripes(512, seed=0), args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    images, labels = (t.to(accelerator.device) for t in stripes(128, seed=1).tensors)
    for epoch in range(args.epochs):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update_parameters(net)
        if epoch == 0:
            report = inplace_abn.report(net)
            accelerator.print(f"{len(report.in_place)} of {len(report.layers)} norms in place")
        losses = [evaluated(each, images, labels) for each in (model, average)]
        accelerator.print(f"epoch {epoch + 1}: evaluation loss {losses[0]:.4f}, of the average {losses[1]:.4f}")

    trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        accelerator.save_model(model, folder, safe_serialization=False)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        native = network().to(accelerator.device).eval()
        native.load_state_dict(torch.load(Path(folder) / "pytorch_model.bin"))
        expected = native(images)
        difference = float((trained(images) - expected).abs().max())
        accelerator.print(f"checkpoint in an unconverted net: outputs differ by {difference:.1e} at most")
        program = torch.export.export(inplace_abn.revert(trained), (images,)).module()
        accelerator.print(f"exported: outputs differ by {float((program(images) - expected).abs().max()):.1e} at most")


if __name__ == "__main__":
    main()

"""Gives the norms of a model weights and biases as training leaves them, and holds the table they are drawn from.

    python scripts/trained.py FILE       # makes the table, trained_norms.json, from the pairs in FILE

Only the table was trained. Its "source" says what its pairs (weight, bias) are: norms of the bottlenecks of a
ResNet-152. The batch norms of ResNets and their descendants draw from it, each channel by itself. Pairs of a kind are
of all layers together, so channels that died in training, with weights of zero but for rounding, may be spread over
more layers than in a real net. All else is made up, with weights and biases independent of each other:

- batch norms beside ReLU6 or hardswish, as in MobileNetV2 and V3: weights up to 6, one in fifty below 0.1 and down to
  1e-4, biases up to 5.
- other batch norms, as in EfficientNet: weights around 1 between 0.05 and 13, biases up to 8.
- layer, RMS, group and instance norms: weights around the initial ones, with a deviation of their logarithm of 0.5,
  biases with a deviation of 0.3.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

from inplace_abn.conversion.classes import KINDS, is_norm

TABLE = Path(__file__).with_name("trained_norms.json")
FIRST, MIDDLE, LAST, SHORTCUT = "bn1", "bn2", "bn3", "downsample.1"
"""The kinds of norms in the table, by their names in torchvision's bottleneck."""

_BLOCK = re.compile(
    r"\w*bottleneck\w*|basicblockd?|resnetbasiclayer|(selectivekernel|dla|preact)basic|res(idual)?(block)?"
)
"""The names of the classes of ResNets' blocks in torchvision, timm, smp, transformers, nnU-Net, MONAI and the demo."""
_PRE_ACTIVATED = re.compile(r"preact\w*|resblock")
"""Those whose norms all stand before an activation, and none before the sum."""
_SHORTCUT = re.compile(r"(^|\.)(downsample|shortcut|proj|skip)(\.|$)")
_Net = TypeVar("_Net", bound=nn.Module)
_MOBILE = ("relu6", "hardswish")


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.lower()


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None


def kinds(model: nn.Module) -> dict[nn.Module, str]:
    """The kind of each batch norm in the blocks of a ResNet. The last one is `LAST`, in basic blocks, too."""
    found: dict[nn.Module, str] = {}
    for block in model.modules():
        # Blocks of other families have such names, too, with other activations.
        if not _BLOCK.fullmatch(_class_name(block)) or not any(
            isinstance(m, (nn.ReLU, nn.LeakyReLU)) for m in block.modules()
        ):
            continue
        norms = {m: name for name, m in block.named_modules() if _is_batch_norm(m)}
        main = [m for m, name in norms.items() if not _SHORTCUT.search(name)]
        found |= dict.fromkeys(norms, SHORTCUT) | dict.fromkeys(main, MIDDLE)
        if main:
            found[main[0]] = FIRST
            if not _PRE_ACTIVATED.fullmatch(_class_name(block)):
                found[main[-1]] = LAST
    return found


@functools.cache
def table() -> dict[str, Tensor]:
    """The pairs (weight, bias) of each kind, of shape [pairs, 2]."""
    found = json.loads(TABLE.read_text(encoding="utf-8"))
    return {kind: torch.tensor([found[kind]["weights"], found[kind]["biases"]]).T for kind in found if kind != "source"}


def _from_table(kind: str, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    pairs = table()[kind]
    weights, biases = pairs[torch.randint(len(pairs), (count,), generator=generator)].unbind(1)
    return weights, biases


def _mobile(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    weights = _around_one(count, 0.6, generator).clamp(0.1, 6)
    small = 10 ** -(1 + 3 * torch.rand(count, generator=generator))
    weights = torch.where(torch.rand(count, generator=generator) < 0.02, small, weights)
    return weights, (1.25 * torch.randn(count, generator=generator)).clamp(-5, 5)


def _other(count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    weights = _around_one(count, 0.8, generator).clamp(0.05, 13)
    return weights, (2 * torch.randn(count, generator=generator)).clamp(-8, 8)


def _around_one(count: int, deviation: float, generator: Generator) -> Tensor:
    return (deviation * torch.randn(count, generator=generator)).exp()


def as_trained(model: _Net, seed: int = 0) -> _Net:
    """Gives every norm of ``model`` a weight and a bias as training leaves them, the same ones for the same seed.

    All other parameters that initialisation has set to a constant get normal noise of deviation 0.1, so that none is
    exactly zero.

    Returns:
        ``model``, which is changed.
    """
    generator = Generator().manual_seed(seed)
    of_blocks = kinds(model)
    is_mobile = any(_class_name(m) in _MOBILE for m in model.modules())
    done: set[Any] = set()
    with torch.no_grad():
        for m in model.modules():
            weight, bias = getattr(m, "weight", None), getattr(m, "bias", None)
            if not is_norm(m) or weight is None or weight in done:
                continue
            # A weight that begins at zero is no scale, but what is added to one.
            if not isinstance(m, KINDS) and not weight.any():
                continue
            if not _is_batch_norm(m):
                around = weight.where(weight != 0, 1)
                weights = around * _around_one(weight.numel(), 0.5, generator).view_as(weight)
                biases = 0.3 * torch.randn(weight.numel(), generator=generator)
            elif of_blocks:
                # The table has none of stems and decoders. An activation follows these, as it follows the first norm.
                weights, biases = _from_table(of_blocks.get(m, FIRST), weight.numel(), generator)
            else:
                weights, biases = (_mobile if is_mobile else _other)(weight.numel(), generator)
            weight.copy_(weights.view_as(weight))
            done.add(weight)
            if bias is not None:
                bias.copy_(biases.view_as(bias))
                done.add(bias)
        for p in model.parameters():
            if p not in done and p.numel() and bool((p == p.flatten()[0]).all()):
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model


def compact(found: dict[str, Any]) -> str:
    """The table's text, with a line for each kind and numbers of four digits."""
    lines = [f'"source": {json.dumps(found["source"])}']
    for kind in (FIRST, MIDDLE, LAST, SHORTCUT):
        line = {key: value for key, value in found[kind].items() if key != "pairs"}
        columns = zip(*found[kind]["pairs"], strict=True)
        line |= {name: [float(f"{x:.4g}") for x in xs] for name, xs in zip(("weights", "biases"), columns, strict=True)}
        lines.append(f'"{kind}": {json.dumps(line, separators=(",", ":"))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the table of trained norms.")
    parser.add_argument("file", type=Path, help='JSON: "source", and the "pairs" of each kind')
    found = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))
    TABLE.write_text(compact(found), encoding="utf-8")


if __name__ == "__main__":
    main()

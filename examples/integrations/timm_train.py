#!/usr/bin/env python
"""Runs timm's train.py with converted models. It does the same for any script that calls timm's ``create_model``.

    pip install timm
    python timm_train.py train.py DATA --model resnet50 --amp --model-ema

The first argument is the script, and all others are its own. At the end the report of the first model is printed: what
each layer did in the last training step.

- Models are converted as soon as they are made, so before train.py loads a checkpoint, moves, copies (``--model-ema``),
  wraps or compiles them. Checkpoints have the keys and values of unconverted models, for ``--resume`` and validate.py.
- ``--sync-bn`` would make train.py replace converted norms by torch's. It is taken out of the arguments, and converted
  BatchNorms share their statistics among all processes.
- Leave out ``--torchscript``: TorchScript takes standard modules only.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import timm
from torch import nn

import inplace_abn


def main() -> None:
    create = timm.create_model
    sync = "--sync-bn" in sys.argv
    models: list[nn.Module] = []

    @functools.wraps(create)
    def create_converted(*args: Any, **kwargs: Any) -> nn.Module:
        model = inplace_abn.convert(create(*args, **kwargs), sync=sync)
        models.append(model)
        return model

    # Scripts import it from either place.
    timm.create_model = timm.models.create_model = create_converted
    sys.argv = [argument for argument in sys.argv[1:] if argument != "--sync-bn"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    if models and os.environ.get("RANK", "0") == "0":
        print(inplace_abn.report(models[0]))


if __name__ == "__main__":
    main()

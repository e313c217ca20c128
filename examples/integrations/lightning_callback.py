"""A callback of Lightning: converts a module before it is trained, and reverts it afterwards.

    pip install lightning

Copy this file, and give the trainer the callback:

    trainer = Trainer(callbacks=[InPlaceCallback()])
    trainer.fit(module)

If the module has an ``example_input_array``, a converted copy is compared with it in float64 first, on the CPU. After
the first batch the callback prints what each layer does.

- Layers that a module makes in ``configure_model`` do not exist yet when the callback converts. Convert them there.
- Leave out ``Trainer(sync_batchnorm=True)``: it replaces converted norms by torch's. ``InPlaceCallback(sync=True)``
  synchronises them.
- Checkpoints have the keys and values of an unconverted module, so ``ckpt_path`` may name one that was saved without
  the callback, and the other way round. Copies for weight averaging may be made before the conversion or after it.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import inplace_abn


class InPlaceCallback(Callback):
    """Trains a module with its norms and activations in place.

    Args:
        sync: whether BatchNorms share their statistics among all processes.
    """

    def __init__(self, sync: bool = False) -> None:
        self.sync = sync
        self.report: inplace_abn.Report | None = None
        """What each layer did in the first batch."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Weights are not loaded, moved or wrapped yet, and optimizers are made later.
        if stage == "fit":
            self.report = None
            if pl_module.example_input_array is not None:
                check(pl_module)
            inplace_abn.convert(pl_module, sync=self.sync)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.report is None:
            self.report = inplace_abn.report(pl_module)
            if trainer.is_global_zero:
                print(self.report)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            inplace_abn.revert(pl_module)


def check(module: LightningModule) -> None:
    """Raises RuntimeError if the gradients of a converted copy are not those of the module."""
    example = module.example_input_array
    args = example if isinstance(example, tuple) else (example,) if isinstance(example, Tensor) else ()
    kwargs = example if isinstance(example, dict) else {}
    trainer, module.trainer = module.trainer, None  # A copy of the module would have a copy of the trainer.
    try:
        found = inplace_abn.verify(module, inplace_abn.convert(copy.deepcopy(module)), *args, **kwargs)
    finally:
        module.trainer = trainer
    if not found.ok:
        raise RuntimeError(f"the converted module is not the module:\n{found}")

"""A callback of transformers' Trainer: converts a model before it is trained, and reverts it afterwards.

    pip install transformers accelerate

Copy this file, and give the trainer the callback:

    trainer = Trainer(model=model, callbacks=[InPlaceCallback()], ...)
    trainer.train()

With an example, the keyword arguments of a forward pass, a converted copy is compared with the model in float64 first.
After the first step the callback prints what each layer does (with ``torch_compile=True`` it cannot tell).

- Checkpoints have the keys and values of an unconverted model, so ``from_pretrained`` and ``resume_from_checkpoint``
  take them with or without the callback.
- After ``train`` the model is an unconverted one again, and may be exported.
- Gradient checkpointing, ``torch_compile=True``, ``bf16=True`` and ``fp16=True`` are the trainer's, as before.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import inplace_abn


class InPlaceCallback(TrainerCallback):
    """Trains a model with its norms and activations in place.

    Args:
        sync: whether BatchNorms share their statistics among all processes.
        example: keyword arguments of the model's forward pass, on the model's device. A small batch will do.
    """

    def __init__(self, sync: bool = False, example: dict[str, Any] | None = None) -> None:
        self.sync, self.example = sync, example
        self.report: inplace_abn.Report | None = None
        """What each layer did in the first step."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The model is not wrapped yet, and optimizers are made later.
        model = kwargs["model"]
        if self.example is not None:
            check(model, self.example)
        inplace_abn.convert(model, sync=self.sync)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The model was reverted if it has been trained before, and is a new one if model_init made it.
        self.report = None
        inplace_abn.convert(kwargs["model"], sync=self.sync)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.report is None:
            self.report = inplace_abn.report(kwargs["model"])
            if state.is_world_process_zero:
                print(self.report)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        inplace_abn.revert(kwargs["model"])


def check(model: nn.Module, example: dict[str, Any]) -> None:
    """Raises RuntimeError if the gradients of a converted copy are not those of the model."""
    found = inplace_abn.verify(model, inplace_abn.convert(copy.deepcopy(model)), **example)
    if not found.ok:
        raise RuntimeError(f"the converted model is not the model:\n{found}")

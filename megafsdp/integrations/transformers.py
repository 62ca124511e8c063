"""A mix-in for transformers' ``Trainer``, and for trainers made from it such as TRL's.

    class ShardedTrainer(Sharded, Trainer): ...

The trainer shards its model when it is built, clips with one collective, saves weights as
``from_pretrained`` reads them and, beside them in each of its checkpoints, a checkpoint of
megafsdp, from which any number of ranks resumes. :func:`initializer_of` is for loops without a
trainer.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import _is_peft_model

from megafsdp.checkpoint.huggingface.import_ import import_hf
from megafsdp.checkpoint.load import load
from megafsdp.checkpoint.save import save
from megafsdp.fsdp.forward_method import register_fsdp_forward_method
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.full_params import full_state_dict, summon_full_params
from megafsdp.fsdp.fully_shard import fully_shard_model
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.weight_sync import optimizers_follow
from megafsdp.integrations.refusals import check_settings
from megafsdp.optimizer.grads.clip import clip_grad_norm_

_LOGGER = logging.getLogger("megafsdp.integrations")

FOLDER = "megafsdp"

_REFUSED = ("fp16", "torch_compile", "bf16_full_eval", "fp16_full_eval", "sync_ref_model")


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return the initialiser of a model's modules, for ``megafsdp.materialize``; local.

    A model inside the model, such as a vision tower, initialises its own modules, as in
    transformers: ``model._init_weights`` alone would draw other numbers for them, or none.

    Args:
        model: A model of transformers, or one that contains such models, sharded or not. Modules
            outside of them are left as they are.
    """
    owners: dict[nn.Module, PreTrainedModel] = {}
    # Outer models come first, so the innermost owner stays.
    for owner in model.modules():
        if isinstance(owner, PreTrainedModel):
            owners.update(dict.fromkeys(owner.modules(), owner))

    def initialize(module: nn.Module) -> None:
        if module in owners:
            owners[module]._init_weights(module)

    return initialize


class Sharded(Trainer):
    """Mix-in that stands before a trainer class; arguments are the trainer's."""

    model: nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model: Any = args[0] if args else kwargs.get("model")
        flag = "_is_distributed_loading_by_transformers"
        # Trainers refuse to save the states of a model from replacing_fsdp2(); this one does.
        is_hidden = isinstance(model, FSDPModule) and getattr(model, flag, False)
        if is_hidden:
            setattr(model, flag, False)
        try:
            super().__init__(*args, **kwargs)
        finally:
            if is_hidden:
                setattr(model, flag, True)
        if is_hidden:
            self.is_distributed_loading_by_transformers = True
        # After all changes that trainers make to a model, such as adding adapters.
        given = [] if self.optimizer is None else [self.optimizer]
        self.model = self.model_wrapped = self._sharded(self.model, given)

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard a model; override it to choose units, strategy or dtypes. Called on all ranks.

        A model without ``_no_split_modules`` becomes one unit, with a warning.
        """
        units = None
        if not getattr(model, "_no_split_modules", None):
            _LOGGER.warning(
                "%s names no classes in _no_split_modules: it is one unit, whose parameters are "
                "gathered all at once. Override shard_model() of the trainer, and give classes to "
                "fully_shard_model().",
                type(model).__name__,
            )
            units = [type(model)]
        dtype = torch.bfloat16 if self.args.bf16 else None
        return fully_shard_model(model, units, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Shard the model that ``model_init`` makes anew for each training."""
        return self._sharded(super().call_model_init(trial).to(self.args.device))

    def _sharded(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> nn.Module:
        """Shard a model unless it is sharded already, and keep accelerate from wrapping it.

        Raises:
            NotImplementedError: Arguments ask for something not translated, such as a loss scale.
        """
        given = {"fsdp": self.is_fsdp_enabled, "deepspeed": self.is_deepspeed_enabled}
        # Some arguments exist in one trainer only.
        given |= {name: getattr(self.args, name, False) for name in _REFUSED}
        check_settings(given, "TrainingArguments of a sharded trainer")
        if not isinstance(model, FSDPModule):
            with optimizers_follow(model, optimizers):
                model = self.shard_model(model)
            if callable(getattr(model, "generate", None)):
                # Trainers call generate(), which runs parts of the model by themselves.
                register_fsdp_forward_method(model, "generate")
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # The trainer calls this on all ranks; one of them writes.
        state = full_state_dict(self.model) if state_dict is None else state_dict
        model: Any = self.model
        # PEFT runs the prompt encoder while it saves, on the writing rank only.
        runs = _is_peft_model(model) and model.active_peft_config.is_prompt_learning
        with summon_full_params(model) if runs else contextlib.nullcontext():
            super()._save(output_dir, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir, FOLDER)
        if self.is_world_process_zero() and folder.exists():
            # The run went back and reached this step again. Other ranks wait for this in save().
            shutil.rmtree(folder)
        save(folder, step=self.state.global_step, **self._states())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load(Path(resume_from_checkpoint, FOLDER), model=self.model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None, "the trainer has looked"
        if self.args.save_only_model and _is_peft_model(self.model):
            # Adapters alone, which PEFT loads by load_state_dict().
            super()._load_best_model()
        elif self.args.save_only_model:
            import_hf(self.model, best)
        else:
            self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(Path(checkpoint, FOLDER), **self._states())

    def _states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}

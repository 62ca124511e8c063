"""The section of a configuration for the model: a preset, or one that transformers has saved."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from megafsdp.errors import ConfigError, expected
from megafsdp.models.config import Architecture, ModelConfig, RouterBalance
from megafsdp.models.hf_config import config_from_hugging_face
from megafsdp.models.presets import presets
from megafsdp.training.config.requirement import require

_DEFAULT_PRESET = "qwen3-toy"
_CONFIG_FILE = "config.json"
# A shell expands ~ neither in a file nor within --section.field=~/path. An empty path, as an unset
# variable of a shell leaves it, would be the folder that the command is started in.
UserPath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


@dataclass(frozen=True)
class ModelSection:
    """A preset or a saved model, and the values that differ from it; null keeps its own.

    Attributes:
        preset: Name of a preset in megafsdp.models.presets.
        from_hf: Folder that save_pretrained() of transformers wrote. It gives the model, in place
            of a preset, the weights that a new run begins with, and the tokenizer.
        architecture: The kind of block.
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads.
        head_dim: Width of one head.
        ffn_hidden_size: Inner width of the MLP; mixtures of experts do not read it.
        vocab_size: Rows of the embedding, padding included.
        max_sequence_length: Longest sequence that the model takes.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the variance under each norm's root.
        tie_embeddings: Whether the output layer's weight is the word embedding's.
        init_std: Standard deviation of the initial weights.
        num_experts: Routed experts of a layer.
        num_experts_per_token: Experts that each token goes to.
        moe_ffn_hidden_size: Inner width of one expert.
        shared_expert_ffn_hidden_size: Inner width of the expert that all tokens go to; 0 for none.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
        router_balance: What balances the experts' loads: none, aux_loss (a loss added to the
            model's) or bias (added to the scores that experts are chosen by, and moved by each
            step).
        router_aux_loss_coefficient: Factor of that loss.
        router_bias_update_rate: How far a step moves the bias.
        layer_types: linear_attention or full_attention for each layer of qwen3_next.
        linear_num_key_heads: Query and key heads of linear attention.
        linear_num_value_heads: Value heads of linear attention, a multiple of its key heads.
        linear_key_head_dim: Width of one query or key head of linear attention.
        linear_value_head_dim: Width of one value head of linear attention.
        linear_conv_kernel: Tokens that its convolution sees, the current one included.
        rotary_fraction: Part of each head, from its start, that positions rotate.
    """

    preset: str = _DEFAULT_PRESET
    from_hf: UserPath | None = None
    architecture: Architecture | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    max_sequence_length: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    tie_embeddings: bool | None = None
    init_std: float | None = None
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_ffn_hidden_size: int | None = None
    shared_expert_ffn_hidden_size: int | None = None
    norm_topk_prob: bool | None = None
    router_balance: RouterBalance | None = None
    router_aux_loss_coefficient: float | None = None
    router_bias_update_rate: float | None = None
    layer_types: list[str] | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel: int | None = None
    rotary_fraction: float | None = None

    @property
    def name(self) -> str:
        """Return what the model is called: its preset, or the folder that it comes from."""
        return self.preset if self.from_hf is None else Path(self.from_hf).resolve().name

    def resolve(self) -> ModelConfig:
        """Return the preset, or the model of ``from_hf``, with the overrides applied.

        The folder of ``from_hf`` is not read where every value is given; see :meth:`filled`.

        Raises:
            ConfigError: There is no such preset or folder, its model is not one that we have, or
                the values do not make a model.
        """
        given = {f.name: getattr(self, f.name) for f in fields(ModelConfig)}
        if self.layer_types is not None:
            given["layer_types"] = tuple(self.layer_types)
        if None not in given.values():
            return ModelConfig(**given)
        overrides = {name: value for name, value in given.items() if value is not None}
        return replace(self._origin(), **overrides)

    def filled(self) -> ModelSection:
        """Return the same model with every value given, so that it needs no preset and no folder.

        Raises:
            ConfigError: As :meth:`resolve`.
        """
        values = asdict(self.resolve())
        return replace(self, **values | {"layer_types": list(values["layer_types"])})

    def _origin(self) -> ModelConfig:
        """Return what the overrides are applied to."""
        if self.from_hf is not None:
            require(
                self.preset == _DEFAULT_PRESET,
                "model",
                "either a preset or from_hf",
                f"both, {self.preset!r} and {self.from_hf!r}",
                "Leave model.preset out: the folder of from_hf says which model it is",
            )
            return _read_saved_config(Path(self.from_hf))
        require(
            self.preset in presets,
            "model.preset",
            f"one of {', '.join(presets)}",
            repr(self.preset),
            "Name one of these and override what differs",
        )
        return presets[self.preset]


def _read_saved_config(folder: Path) -> ModelConfig:
    """Return the model that the ``config.json`` of a folder describes; local.

    Raises:
        ConfigError: There is no such file, or its model is not one that we have.
    """
    path = folder / _CONFIG_FILE
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            expected(
                f"a folder with the {_CONFIG_FILE} of a model",
                f"{type(error).__name__}: {error}",
                where=f"the training configuration, model.from_hf '{folder}'",
                hint="Give a folder that save_pretrained() of transformers or export_hf() wrote;"
                " nothing is fetched from the Hub",
            )
        ) from error
    try:
        return config_from_hugging_face(found)
    except ConfigError as error:
        raise ConfigError(f"{error} It is model.from_hf of the run, '{path}'.") from error

"""Decoder-only language models in plain torch, under Megatron-core's parameter names.

Read first: language_model.py, then common.py.
"""

from megafsdp.models.activation_checkpointing import ActivationCheckpointing
from megafsdp.models.build import build_model, unit_classes
from megafsdp.models.common import TransformerLayer
from megafsdp.models.config import Architecture, ModelConfig
from megafsdp.models.flops import flops_per_token, num_idle_parameters
from megafsdp.models.hf_config import config_from_hugging_face, config_to_hugging_face
from megafsdp.models.language_model import LanguageModel
from megafsdp.models.loss import masked_cross_entropy
from megafsdp.models.presets import presets
from megafsdp.models.sampling import sample

__all__ = [
    "ActivationCheckpointing",
    "Architecture",
    "LanguageModel",
    "ModelConfig",
    "TransformerLayer",
    "build_model",
    "config_from_hugging_face",
    "config_to_hugging_face",
    "flops_per_token",
    "masked_cross_entropy",
    "num_idle_parameters",
    "presets",
    "sample",
    "unit_classes",
]

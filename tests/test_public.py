"""The public names: all there, all documented, nothing else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import megafsdp
from megafsdp import FSDPModule

PROMISED = {
    "FSDPModule",
    "FusedAdam",
    "HybridDeviceOptimizer",
    "LossScaler",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "ParallelDims",
    "ScaleRule",
    "checkpoint",
    "clip_grad_norm_",
    "full_state_dict",
    "full_tensor",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "load_full_state_dict",
    "local_parameters",
    "mark_main_weights_changed",
    "materialize",
    "microbatch",
    "num_zero_grads",
    "param_group_norms",
    "register_fsdp_forward_method",
    "summon_full_params",
}
METHODS = {
    "compile",
    "zero_grad",
    "unshard",
    "reshard",
    "no_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_unshard_in_backward",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_max_input_buffers",
    "set_post_optim_event",
    "reset_iter_state",
}
# What README, docs, examples and pyproject.toml import, beside the names of the package itself.
IMPORT_PATHS = {
    "megafsdp.__main__": {"main"},
    "megafsdp.checkpoint": {
        "PendingSave",
        "async_save",
        "export_hf",
        "export_hf_checkpoint",
        "import_hf",
        "import_hf_checkpoint",
        "inspect",
        "latest_step",
        "load",
        "release_staging_memory",
        "save",
        "wait_for_saves",
    },
    "megafsdp.checkpoint.tools.summary": {"inspect"},
    "megafsdp.checkpoint.format.manifest": {"read_manifest"},
    "megafsdp.data": {
        "DEFAULT_SEED",
        "PADDING_SAMPLE_ID",
        "Batch",
        "BlendedDataset",
        "ByteTokenizer",
        "IndexedDataset",
        "IndexedDatasetWriter",
        "JsonTokenizer",
        "Loader",
        "PrepOptions",
        "PrepRecord",
        "SampleDataset",
        "SampleSource",
        "SplitRecord",
        "Tokenizer",
        "build_blending_indices",
        "check_vocabulary",
        "load_tokenizer",
        "merge",
        "prepare",
        "samples_per_dataset",
        "split_ranges",
        "token_dtype",
        "token_range",
    },
    "megafsdp.device.memory": {"ByteLedger"},
    "megafsdp.errors": {"expected"},
    "megafsdp.fsdp": {
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "full_state_dict",
        "fully_shard",
        "fully_shard_model",
        "fully_shard_optimizer",
        "load_full_state_dict",
        "mark_main_weights_changed",
        "materialize",
        "microbatch",
        "register_fsdp_forward_method",
        "summon_full_params",
    },
    "megafsdp.mesh.annotation": {"annotate"},
    "megafsdp.mesh.fused_parts": {"FusedParts"},
    "megafsdp.models": {
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
        "presets",
        "sample",
        "unit_classes",
    },
    "megafsdp.training": {
        "Config",
        "ConfigError",
        "RunSummary",
        "config_from_dict",
        "parse_config",
        "to_yaml",
        "train",
    },
}


def test_public_names_are_the_promised_ones_and_documented() -> None:
    """Each name of the package has a docstring of its own."""
    assert set(megafsdp.__all__) == PROMISED
    for name in PROMISED:
        assert inspect.getdoc(getattr(megafsdp, name)), name


@pytest.mark.parametrize("path", sorted(IMPORT_PATHS))
def test_documented_import_paths_work(path: str) -> None:
    """What documents and examples import can be imported, whatever files lie behind it."""
    module = importlib.import_module(path)
    assert {name for name in IMPORT_PATHS[path] if not hasattr(module, name)} == set()


def test_a_unit_has_the_methods_of_torchs_and_documents_them() -> None:
    """Code written for torch's FSDPModule finds every method."""
    assert {n for n in vars(FSDPModule) if not n.startswith("_")} == METHODS
    for name in METHODS:
        assert inspect.getdoc(getattr(FSDPModule, name)), name


def test_fully_shard_has_the_promised_keywords() -> None:
    """Names and defaults of the entry point are kept stable."""
    parameters = inspect.signature(megafsdp.fully_shard).parameters
    assert list(parameters) == [
        "module",
        "mesh",
        "strategy",
        "outer_strategy",
        "reshard_after_forward",
        "shard_placement_fn",
        "mp_policy",
        "offload_policy",
        "ignored_params",
        "average",
        "prefetch",
    ]
    defaults = {n: p.default for n, p in parameters.items()}
    assert defaults["strategy"] == "optim_grads_params"
    assert defaults["outer_strategy"] == "no_shard"
    assert defaults["average"] == "rank"
    assert defaults["prefetch"] == 1


def test_an_import_brings_neither_the_compiler_nor_optional_libraries() -> None:
    """torch._dynamo takes seconds to import; the commands work without Hugging Face's libraries."""
    code = (
        "import sys, megafsdp; assert 'torch._dynamo' not in sys.modules; "
        "import megafsdp.training.cli.main; "
        "assert not {'safetensors', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

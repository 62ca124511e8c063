"""The public names: all there, all documented, nothing else."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import _fully_shard as fsdp2_package

import megafsdp
from megafsdp import FSDPModule

PROMISED = {
    "ExpertRange",
    "FSDPModule",
    "FusedAdam",
    "FusedParts",
    "GradientReductionHandle",
    "HybridDeviceOptimizer",
    "LossScaler",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "ParallelDims",
    "ScaleRule",
    "UnshardHandle",
    "annotate",
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
    "quantize_",
    "register_fsdp_forward_method",
    "requantize_",
    "summon_full_params",
}
# Methods of a unit beside those of torch's.
OWN_METHODS = {"join_hook", "no_sync", "state_dict", "zero_grad"}
# Names of torch that are no names of ours: an argument that is taken, one that is refused, and a
# function of which our units refuse the call; tests/fsdp/test_torch_callers.py calls all three.
TORCH_ALONE = {"CPUOffloadPolicy", "DataParallelMeshDims", "share_comm_ctx"}
STORED_NAMES = Path(__file__).parent / "golden" / "torch_fsdp2_names.json"
VERSIONS = ["installed", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0"]
# What README, docs, examples and pyproject.toml import, beside the names of the package itself.
IMPORT_PATHS = {
    "megafsdp.__main__": {"main"},
    "megafsdp.checkpoint": {
        "AppState",
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
        "GradientReductionHandle",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
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
    "megafsdp.megatron": {
        "DistributedDataParallelConfig",
        "MegatronKeywords",
        "MixedPrecisionPolicy",
        "ShardingStrategy",
        "fully_shard",
        "fully_shard_model",
        "fully_shard_optimizer",
    },
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
    "megafsdp.parallel": {
        "LayerNorm",
        "Linear",
        "OutputLayer",
        "ParallelModule",
        "PositionEmbedding",
        "RMSNorm",
        "VocabParallelEmbedding",
        "cross_entropy",
        "gather_vocabulary",
        "localized",
        "parallelize",
    },
    "megafsdp.parallel.context": {
        "heads_of",
        "own_part",
        "sum_over_cp",
        "tokens_of",
        "whole_logits",
        "whole_sequence",
    },
    "megafsdp.models.causal_attention": {"causal_attention"},
    "megafsdp.quantize": {"RECIPE_NAMES", "QuantizationRecipe", "recipe_of"},
    "megafsdp.training": {
        "Config",
        "ConfigError",
        "RunSummary",
        "Tracker",
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


def _signature(function: Callable[..., object]) -> str:
    """Return names, kinds and defaults of parameters, as the stored table has them."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _names_of_torch(version: str) -> dict[str, Any]:
    """Return the names and signatures of FSDP2 in the installed torch or in a stored version."""
    if version != "installed":
        stored: dict[str, Any] = json.loads(STORED_NAMES.read_text())["versions"][version]
        return stored
    methods = {
        name: _signature(value)
        for name, value in vars(torch_fsdp.FSDPModule).items()
        if callable(value) and not name.startswith("_")
    }
    keywords = list(inspect.signature(torch_fsdp.fully_shard).parameters)[1:]
    functions = [torch_fsdp.register_fsdp_forward_method]
    return {
        "exported": fsdp2_package.__all__,
        "methods": methods,
        "fully_shard": keywords,
        **{function.__name__: _signature(function) for function in functions},
    }


def _methods_of_units() -> dict[str, Any]:
    """Return what the classes of ours that are mixed into units define."""
    ours = [cls for cls in FSDPModule.__mro__ if cls.__module__.startswith("megafsdp.")]
    return {name: value for cls in reversed(ours) for name, value in vars(cls).items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_of_torchs_fsdp2_is_one_of_ours(version: str) -> None:
    """With its signature; what is not built raises NotImplementedError when it is called."""
    names = _names_of_torch(version)
    assert len(names["methods"]) >= 18
    # Of our own classes: one of torch would work on a state that our units have not.
    ours = {n: _signature(f) for n, f in _methods_of_units().items() if n in names["methods"]}
    assert ours == names["methods"]
    assert set(names["exported"]) - PROMISED <= TORCH_ALONE
    parameters = inspect.signature(megafsdp.fully_shard).parameters
    assert set(names["fully_shard"]) <= set(parameters)
    kinds = {parameters[name].kind for name in names["fully_shard"]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    register = megafsdp.register_fsdp_forward_method
    assert _signature(register) == names["register_fsdp_forward_method"]


def test_the_methods_of_a_unit_are_documented_and_no_others() -> None:
    """Each is of torch in some version, or one of the few of our own."""
    ours = {name for name in _methods_of_units() if not name.startswith("_")}
    assert ours == OWN_METHODS.union(*(_names_of_torch(v)["methods"] for v in VERSIONS))
    for name in ours:
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
        "nccl_user_buffers",
        "dp_mesh_dims",
        "expert_mesh",
        "even_shards",
    ]
    defaults = {n: p.default for n, p in parameters.items()}
    assert defaults["strategy"] == "optim_grads_params"
    assert defaults["outer_strategy"] == "no_shard"
    assert defaults["average"] == "rank"
    assert defaults["prefetch"] == 1
    assert defaults["nccl_user_buffers"] is False


def test_an_import_brings_neither_the_compiler_nor_optional_libraries() -> None:
    """torch._dynamo takes seconds to import; the commands work without Hugging Face's libraries."""
    code = (
        "import sys, megafsdp; assert 'torch._dynamo' not in sys.modules; "
        "import megafsdp.training.cli.main; "
        "assert not {'safetensors', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""Alternatives to operations that a sharded parameter refuses, by operation and by caller.

Every refusal on a sharded parameter takes its cure from here. The caller says more than the
operation: ``save_pretrained`` fails in a view, but its cure is no other view. What is refused is
decided elsewhere: a cure is looked up only once an error is certain.
"""

from __future__ import annotations

import traceback

from torch.optim import Optimizer

from megafsdp.device.torch_private import IS_DISPATCH_BYPASSED

_WHOLE = "Call full_tensor() first, or work on .local, this rank's rows"
_ELSEWHERE = "elsewhere call full_tensor() first, or work on .local, this rank's rows"
_NOT_GATHERED = (
    "The unit that owns it is not gathered: call that unit's forward, name another method by "
    "megafsdp.register_fsdp_forward_method(), or open megafsdp.summon_full_params(model); "
    f"{_ELSEWHERE}"
)
_INITIALISE = (
    "Initialise in megafsdp.materialize(model, initialize), which shows full parameters; "
    f"{_ELSEWHERE}"
)
_SAVE = (
    "Save by megafsdp.checkpoint.save(), megafsdp.checkpoint.async_save() or "
    "torch.distributed.checkpoint.save(); or pickle megafsdp.full_state_dict(model)"
)
_SAFETENSORS = (
    "Call megafsdp.checkpoint.export_hf() for a model of megafsdp or transformers. For any other, "
    "call torch's get_model_state_dict() on all ranks with StateDictOptions(full_state_dict=True, "
    "cpu_offload=True), and on rank 0 torch.distributed.checkpoint.save() of the result with "
    "no_dist=True and HuggingFaceStorageWriter(path)"
)
_BEFORE = "Do it before fully_shard()"
HINT_OF_SPLIT_BACKWARD = (
    "Import torch.distributed.pipelining before fully_shard(), or use a schedule that runs the "
    "backward of inputs and weights at once, such as ScheduleInterleaved1F1B"
)

# Cures by the name of an operator, or of another refused use.
_OPERATIONS: dict[str, str] = {
    **dict.fromkeys(("linalg_qr", "eye", "select", "index_put_", "__setitem__"), _INITIALISE),
    "within autograd": "Call it under torch.no_grad(), or on .detach(): torch 2.11 loses the cuts "
    "of gradients",
    "storage_offset": "If torch.compile() traces it: torch 2.12 and later do, 2.11 does not",
    "a draw beside an initialiser": "Draw each module's own parameters in its own initializer",
    "pickle": _SAVE,
    "HuggingFaceStorageWriter": _SAFETENSORS,
    "HuggingFaceStorageWriter by one rank": "Give the writer save_distributed=True if no rank has "
    f"two regions of a tensor. {_SAFETENSORS}",
    "assignment to .data": "Use parameter.copy_() under torch.no_grad(), then "
    "megafsdp.mark_main_weights_changed(module)",
    "assignment": "Assign it before fully_shard(); later write values, by parameter.copy_() under "
    "torch.no_grad(), load_state_dict() or megafsdp.load_full_state_dict()",
    "swap": "Swap it with a tensor made from it, such as torch.empty_like(parameter), or write "
    "values by parameter.copy_() under torch.no_grad()",
    "swap of a full parameter": "Call reshard() or leave summon_full_params() first, and swap the "
    "sharded parameter",
    "swap of a local parameter": "Write into it under torch.no_grad(), or swap the model's own "
    "parameters",
    "parametrization": _BEFORE,
    "tie": "Tie parameters before fully_shard(), and give their modules to one unit",
    "register_hook": "Call register_post_accumulate_grad_hook() and read or change .grad in it",
    "load of a full tensor": "Load a model by megafsdp.load_full_state_dict(), or after reshard() "
    "by set_model_state_dict() with full_state_dict; write full optimizer states by "
    "torch_save_to_dcp(), and load them by torch.distributed.checkpoint.load() into what "
    "get_optimizer_state_dict() returns",
    "operands of a forward": _NOT_GATHERED,
    "operands": "Use full_tensor() on both, local shards on both, or copy_from_full_()",
    "DistributedDataParallel": "Leave it out: units reduce their gradients themselves, over "
    "replicas too with strategy='no_shard' or a mesh of two axes",
}

# Cures by top-level package and function of a caller.
_CALLERS: dict[tuple[str, str], str] = {
    ("transformers", "save_pretrained"): "Call megafsdp.checkpoint.export_hf(), or "
    "save_pretrained(path, state_dict=megafsdp.full_state_dict(model)) on all ranks",
    ("transformers", "generate"): "Call megafsdp.register_fsdp_forward_method(model, 'generate'), "
    "or generate within megafsdp.summon_full_params(model)",
    ("transformers", "resize_token_embeddings"): _BEFORE,
    **dict.fromkeys(
        (("peft", "merge_and_unload"), ("peft", "merge_adapter")),
        "Merge before fully_shard(), or in a plain model with megafsdp.full_state_dict(model)",
    ),
    ("accelerate", "save_state"): _SAVE,
    ("accelerate", "save_model"): "Call megafsdp.checkpoint.export_hf(), or save "
    "megafsdp.full_state_dict(model)",
    ("accelerate", "prepare_model"): "Give prepare() the optimizer and the data loader alone, or "
    "prepare the model with FullyShardedDataParallelPlugin(fsdp_version=2), which leaves it alone",
    ("safetensors", "save_file"): "Give it megafsdp.full_state_dict(model)",
    ("safetensors", "save_model"): "Give save_file() megafsdp.full_state_dict(model)",
    ("torch", "stage_backward_input"): HINT_OF_SPLIT_BACKWARD,
    ("torch", "parameters_to_vector"): "Give it the full_tensor() of each parameter",
    ("torch", "vector_to_parameters"): "Use megafsdp.load_full_state_dict()",
}

_LOW_PRECISION = (
    "Use megafsdp.FusedAdam(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16), or "
    "HybridDeviceOptimizer for states on the host"
)
_ELEMENTWISE = (
    "Use megafsdp.FusedAdam, megafsdp.Muon, or an optimizer that steps each element by itself"
)
# Cures by top-level package and class; an empty class means the whole package.
_OPTIMIZERS: dict[tuple[str, str], str] = {
    ("torch", "Muon"): "Use megafsdp.Muon, which gathers each matrix on one rank",
    ("torch", "LBFGS"): _ELEMENTWISE,
    ("torch", "Adafactor"): _LOW_PRECISION,
    ("torch", "Rprop"): _ELEMENTWISE,
    ("transformers", "Adafactor"): _LOW_PRECISION,
    ("torchao", ""): _LOW_PRECISION,
    ("bitsandbytes", ""): _LOW_PRECISION,
    # Its optimizers cut each whole update as torch.chunk does.
    ("heavyball", ""): _ELEMENTWISE,
    ("came_pytorch", "CAME"): _LOW_PRECISION,
}
# Those that step even shards as they step FSDP2's. torchao's compiles the step of a parameter.
_STEP_EVEN_SHARDS = frozenset(
    {("torch", "Muon"), ("torch", "LBFGS"), ("heavyball", "")}
    | (set() if IS_DISPATCH_BYPASSED else {("torchao", "")})
)
_OR_EVEN = "; or fully_shard(..., even_shards=True), for which it is right"


def cure_of(operation: str, *, of_parameter: bool = False) -> str:
    """Return the alternative to a refused operation, by its callers, optimizer or name.

    Args:
        operation: The name of an operator, or another key of the table.
        of_parameter: Whether an operand is a parameter. Operators that the table does not name are
            then taken for those of a forward.
    """
    for frame, _ in traceback.walk_stack(None):
        package = _package_of(frame.f_globals.get("__name__", ""))
        cure = _CALLERS.get((package, frame.f_code.co_name))
        if cure is not None:
            return cure
    optimizer = stepping_optimizer()
    if optimizer is not None:
        return cure_of_optimizer(type(optimizer)) or _ELEMENTWISE
    return _OPERATIONS.get(operation, _NOT_GATHERED if of_parameter else _WHOLE)


def stepping_optimizer() -> Optimizer | None:
    """Return the optimizer in whose step the caller runs; None elsewhere, and in its closure.

    Methods whose names end in ``step`` count, such as ``first_step()`` of SAM. Code of other
    packages than the optimizer's is that of a closure, in which one rank may log by itself.
    """
    callers = set()
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code
        # The forward of a closure, which may stand beside the optimizer's class.
        if code.co_name == "_call_impl":
            return None
        callers.add(_package_of(frame.f_globals.get("__name__", "")))
        if code.co_name.endswith("step") and code.co_varnames[:1] == ("self",):
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                own = {_package_of(cls.__module__) for cls in type(optimizer).__mro__}
                return optimizer if callers <= {"torch", "megafsdp", *own} else None
    return None


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


def cure_of_optimizer(optimizer: type, *, are_even: bool = False) -> str | None:
    """Return the alternative to an optimizer that cannot step sharded rows; None if it can.

    Args:
        optimizer: Its class.
        are_even: Whether all parameters are cut evenly.
    """
    for cls in optimizer.__mro__:
        package = _package_of(cls.__module__)
        key = next((k for k in ((package, cls.__name__), (package, "")) if k in _OPTIMIZERS), None)
        if key in _STEP_EVEN_SHARDS:
            return None if are_even else _OPTIMIZERS[key] + _OR_EVEN
        if key is not None:
            return _OPTIMIZERS[key]
    return None

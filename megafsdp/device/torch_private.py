"""Private names of torch's core: tensors, autograd, modules, compiler, profiler.

torch may change these names without notice, so no other file uses them; those of DTensors, process
groups and checkpoints are in megafsdp/mesh/torch_private.py. Each function says what torch offers
in public instead, and the versions in which the private name was seen. The functions know nothing
of the engine: each does what torch's does.
"""

from __future__ import annotations

import functools
import inspect
import operator
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._ops import (
    OpOverload as OpOverload,  # The type of operators; public: none; 2.11 to 2.15.
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=torch.Tensor)

# torch 2.11 handles subclasses of DTensor below __torch_dispatch__; with it our rules for them
# apply one level higher, to functions by name, and no graph has them.
IS_DISPATCH_BYPASSED = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 12)

# Versions are read for each parameter in every step; attrgetter costs half of a Python function.
_read_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written, according to autograd.

    Public: none; only ``torch.autograd.graph.increment_version`` writes the count. 2.11 to 2.15.
    """
    return tensor._version


def sum_of_versions(tensors: Sequence[torch.Tensor]) -> int:
    """Return the sum of :func:`version_of` over tensors.

    Public: none. 2.11 to 2.15.
    """
    return sum(map(_read_version, tensors))


def preserving_versions(*tensors: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context that restores the tensors' versions at its end.

    Public: none. 2.11 to 2.15.
    """
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensors)
    return context


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set what :func:`version_of` returns for each tensor.

    Public: none. 2.11 to 2.15.
    """
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def base_of(view: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a view was made from; None for a tensor that is no view.

    Public: none; ``Tensor._is_view`` is private too. 2.11 to 2.15.
    """
    return view._base


def is_backward_running() -> bool:
    """Return whether the autograd engine runs on this thread, as it does in recomputation.

    Public: none. 2.11 to 2.15.
    """
    return torch._C._current_graph_task_id() >= 0


# The functions below which a module's forward runs: nn.Module's, ours and torch's for methods.
_CALLS = frozenset({"_call_impl", "run_as_forward", "wrapped_method"})


def is_called_within(module: nn.Module) -> bool:
    """Return whether the call of a module that runs now is within another one, on this thread.

    Hooks alone cannot tell: no hook sees a KeyboardInterrupt end the outer call.
    Public: none. 2.11 to 2.15.
    """
    frames = (f for f, _ in traceback.walk_stack(None) if f.f_code.co_name in _CALLS)
    called = [f.f_locals.get("module", f.f_locals.get("self")) is module for f in frames]
    return sum(called) > 1


def func_transforms() -> list[str]:
    """Return the transforms of ``torch.func`` that run on this thread, outermost first.

    The names are grad (also for vjp and Jacobians), jvp, vmap and functionalize. Public: none. 2.11
    to 2.15.
    """
    functorch = torch._C._functorch
    # Check first, since every forward calls this: get_interpreter_stack() builds the stack anew.
    if functorch.peek_interpreter_stack() is None:
        return []
    return [each.key().name.lower() for each in functorch.get_interpreter_stack() or ()]


def is_forward_mode() -> bool:
    """Return whether a ``dual_level`` of ``torch.autograd.forward_ad`` is open.

    ``torch.func.jvp`` opens one too. Public: none. 2.11 to 2.15.
    """
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0


class _AfterBackward(functools.partial[None]):
    """A callback of the autograd engine, and a function to call when the engine frees it."""

    when_freed: Callable[[], None]

    def __del__(self) -> None:
        self.when_freed()


def call_after_backward(callback: Callable[[], None], *, when_freed: Callable[[], None]) -> None:
    """Make the autograd engine call a function at the end of the backward that runs.

    A backward that fails frees the callback without calling it, before it raises; if a thread of
    the engine runs the backward, as on CUDA, possibly a little later and on that thread.

    Public: none; FSDP2 and DDP use the same. 2.11 to 2.15.

    Args:
        callback: Called after a complete backward.
        when_freed: Called after ``callback``, or after a failure; it must not raise.
    """
    after = _AfterBackward(callback)
    after.when_freed = when_freed
    torch.autograd.Variable._execution_engine.queue_callback(after)  # type: ignore[attr-defined]


def num_gradient_hooks(parameter: torch.Tensor) -> int:
    """Return how many hooks wait for a leaf's gradient.

    Public: none; hooks can be registered, not listed. 2.11 to 2.15.
    """
    hooks = getattr(parameter, "_backward_hooks", None) or ()
    return len(hooks) + len(post_accumulate_hooks(parameter))


def post_accumulate_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Return the hooks that ``register_post_accumulate_grad_hook`` has registered on a leaf.

    Public: none; hooks can be registered, not listed. 2.11 to 2.15.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return list(hooks.values()) if hooks else []


def as_subclass_with_grad(cls: type[T], tensor: torch.Tensor) -> T:
    """Make a leaf of a subclass that aliases a plain tensor and requires a gradient.

    Public: ``Tensor.as_subclass`` keeps autograd's history, hence makes no leaf. 2.11 to 2.15.
    """
    return torch.Tensor._make_subclass(cls, tensor, True)


# Splits a flat tensor into views with the shapes of other tensors, in one call into C++. Not
# wrapped in a Python function: every group calls it in every backward. Public: ``Tensor.split`` and
# a ``view`` for each, several times as slow. 2.11 to 2.15.
split_as: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
split_as = torch._utils._unflatten_dense_tensors


def wrapper_like(cls: type[T], tensor: torch.Tensor) -> T:
    """Make a tensor of a class without memory, with the shape, dtype and device of another.

    Public: none. 2.11 to 2.15.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
    )


def empty_wrapper(
    cls: type[T],
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> T:
    """Make a tensor of a class without memory; its storage has no bytes.

    Public: none. 2.11 to 2.15.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, tuple(shape), strides=tuple(stride), dtype=dtype, device=device, storage_size=0
    )


def is_replaceable(tensor: torch.Tensor) -> bool:
    """Return whether :func:`replace_tensor` works: no graph, reducer or weak reference holds it.

    Public: none; ``swap_tensors`` raises after it was called. 2.11 to 2.15.
    """
    if weakref.getweakrefs(tensor):
        return False
    count = tensor._use_count()  # type: ignore[attr-defined]
    if count == 2 and tensor.is_leaf and tensor.requires_grad:
        # One of the two uses may be the node that accumulates the gradient. If it is not, this call
        # makes the node, and the count rises.
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        return tensor._use_count() == 2 and edge.node is not None  # type: ignore[attr-defined]
    return bool(count == 1)


def replace_tensor(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap class and memory of two tensors; attributes and gradient of the first stay on it.

    Public: ``torch.utils.swap_tensors``, which swaps attributes and gradients too. 2.11 to 2.15.
    """
    written, grad = dict(vars(tensor)), tensor.grad
    torch.utils.swap_tensors(tensor, other)
    vars(tensor).update(written)
    tensor.grad = grad


# The operator that torch.nn.functional.grouped_mm calls, which overrides of tensor subclasses see.
# Public: that function, which they do not see. 2.11 to 2.15; None if torch does not have it.
grouped_product: Callable[..., torch.Tensor] | None = getattr(torch, "_grouped_mm", None)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Multiply matrices of 8-bit floats that have one scale each, on CUDA.

    It works on CPUs too, but hundreds to thousands of times slower than with decoded values.

    Public: ``torch.nn.functional.scaled_mm``, not in 2.9; this one is in all. 2.11 to 2.15.
    """
    return torch._scaled_mm(
        a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )


def unscale_and_check(
    tensors: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Multiply tensors in place, and set ``found_inf`` to 1 if an element is not finite.

    Public: ``torch.amp.GradScaler``, which does not reduce over ranks. 2.11 to 2.15.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inverse_scale)


def no_torch_function() -> object:
    """Return the value of ``__torch_function__`` with which a class overrides nothing.

    Public: none; a classmethod that passes calls on costs a Python call for each attribute. 2.11 to
    2.15.
    """
    return torch._C._disabled_torch_function_impl


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which the overrides of tensor subclasses are not called.

    Public: none. 2.11 to 2.15.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return an operator's name and arguments, in which those that it writes are marked.

    Public: none. 2.11 to 2.15.
    """
    return op._schema


# Sets how torch.compile treats frames of this thread, and returns the old setting; None runs them
# as they are. Not wrapped in a Python function, which would be such a frame. Public:
# ``torch.compiler.disable``, which covers one function but not what follows it. 2.11 to 2.15.
set_tracer: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def untraced_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` trace a function only as a part of another function's graph.

    Public: none; ``torch.compiler.disable`` keeps it out of graphs too. 2.11 to 2.15.
    """
    _skip(function, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)
    return function


def untraced_hook(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` run a function as it is, with all that it calls; costs nothing.

    For functions that torch itself calls outside of graphs: a graph that contained the call would
    trace it. Public: none; ``torch.compiler.disable`` wraps it in a function. 2.11 to 2.15.
    """
    _skip(function, torch._C._dynamo.eval_frame._FrameAction.SKIP)
    return function


def _skip(function: Callable[..., object], action_on_calls: Any) -> None:
    """Run the frames of a function as they are. Public: none. 2.11 to 2.15."""
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, action_on_calls)
    # For a wrapped function this is the code of the wrapper, which others may share.
    frames.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor only stands for one, without memory, while a graph is traced.

    Public: none. 2.11 to 2.15.
    """
    return isinstance(tensor, FakeTensor)


@untraced_frame
def end_graph(reason: Callable[[], str]) -> None:
    """End the graph if ``torch.compile`` traces the caller; the rest of it runs as it is.

    Args:
        reason: Returns the message of the error that ``fullgraph=True`` raises.

    Public: none; ``torch.compiler.disable`` takes a reason per function, not per object. 2.11 to
    2.15.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason())


def without_modes() -> AbstractContextManager[None]:
    """Return a context in which dispatch modes are off, to make tensors of some subclasses.

    Modes count, fake or record operators; selective recomputation enters one. Under a mode
    ``torch.nn.attention.bias.CausalBias`` cannot be made. Public: none. 2.11 to 2.15.
    """
    return _disable_current_modes()


def without_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that ``torch.compile`` must run as it is, with all that it calls.

    Public: ``torch.compiler.disable`` does the same, but imports the compiler at once, which takes
    seconds. 2.11 to 2.15.
    """
    why = f"{function.__qualname__}() runs outside of graphs"

    def reason() -> str:
        return why

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        end_graph(reason)
        tracer = set_tracer(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_tracer(tracer)

    return untraced_frame(run)


def is_tracing() -> bool:
    """Return whether ``torch.compile`` traces the code that runs now.

    Public: ``torch.compiler.is_compiling()``, which before 2.13 is false while operators of tensor
    subclasses are traced. 2.11 to 2.15.
    """
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def refuse_graphs(tensor: torch.Tensor, reason: str) -> None:
    """Make ``torch.compile`` end its graph before the operator that it tries on this tensor.

    For operators of tensor subclasses: the compiler runs them once without values and then puts
    them into the graph, unless this error says that this does not work. ``fullgraph=True`` raises,
    with the reason. Public: none; a graph break of ``torch.compiler`` works only in traced code.
    2.11 to 2.15.
    """
    if is_tracing() and type(tensor) is not torch.Tensor:
        # The exception only shows its argument, which need not be an operator.
        raise torch._subclasses.fake_tensor.UnsupportedOperatorException(reason)  # type: ignore[arg-type]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that state dicts leave out.

    Public: none; ``state_dict()`` runs hooks. 2.11 to 2.15.
    """
    return module._non_persistent_buffers_set


@functools.cache
def run_truncated_normal(
    run: Callable[[torch.Tensor, Callable[..., Any], torch.Generator | None], bool],
) -> None:
    """Make ``torch.nn.init.trunc_normal_`` call ``run`` first; once per process and function.

    The initialiser redraws values outside of the bounds as long as there are any, and a rank cannot
    know that of other ranks' rows. ``run(tensor, fill, generator)`` returns whether it has filled
    the tensor; ``fill(other)`` fills another tensor from the same distribution and generator.

    Public: none; torch offers an override for most other initialisers. 2.11 to 2.15.
    """
    original = nn.init._no_grad_trunc_normal_

    @functools.wraps(original)
    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = inspect.signature(original).bind(tensor, *args, **kwargs).arguments
        generator = bound.get("generator")
        if run(tensor, lambda other: original(other, *args, **kwargs), generator):
            return tensor
        return original(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = fill


def fast_profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context that profilers show under a name.

    Public: ``torch.profiler.record_function`` costs 20 times as much without a profiler. 2.11 to
    2.15.
    """
    context: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(name)
    return context


def tensor_rebuilder() -> Callable[..., torch.Tensor]:
    """Return the function by whose name files of ``torch.save`` refer to a tensor.

    Public: none; its name is a part of the file format. 2.11 to 2.15.
    """
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor_v2
    return rebuild


def record_memory_history(*, is_wanted: bool) -> None:
    """Start or stop recording the allocations on the GPU with their stacks.

    Public: none; ``torch.profiler`` records only sizes. 2.11 to 2.15.
    """
    torch.cuda.memory._record_memory_history("all" if is_wanted else None, max_entries=1_000_000)


def dump_memory_history(path: str) -> None:
    """Write the recorded history in the format that pytorch.org/memory_viz reads.

    Public: ``torch.cuda.memory_snapshot`` lacks the history. 2.11 to 2.15.
    """
    torch.cuda.memory._dump_snapshot(path)

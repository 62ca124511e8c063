"""Every operator in torch's own test table: right on unevenly sharded parameters, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megafsdp import full_tensor, fully_shard
from tests.buffer.cuts import whole_mesh
from tests.ranks import Ranks

Outcome = tuple[str, str]
_NUM_PARTS = 32
_MOST_SAMPLES = 6
# Their values are not written by them.
_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
_UNWRITTEN |= {"new_empty_strided", "resize_", "resize_as_"}


def _operators(part: int) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield name, function and samples of one part of the table, in-place forms included."""
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db[part::_NUM_PARTS]:
        if torch.float32 not in operator.dtypes or operator.name in _UNWRITTEN:
            continue
        torch.manual_seed(0)
        samples = list(operator.sample_inputs("cpu", torch.float32))[:_MOST_SAMPLES]
        for function in (operator.op, operator.inplace_variant):
            if function is not None:
                yield operator.name, function, samples


def _is_parameter(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dtype == torch.float32
        and value.dim() > 0
        and value.numel() > 0
    )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _full(value: Any) -> Any:
    """Return a whole tensor for one that is a DTensor, without what autograd knows of it."""
    if not isinstance(value, torch.Tensor):
        return value
    return full_tensor(value).detach() if hasattr(value, "placements") else value.detach()


def _difference(found: Any, wanted: Any) -> str:
    """Return what differs between the results of two calls, or an empty string."""
    pair = tree_leaves(found), tree_leaves(wanted)
    if len(pair[0]) != len(pair[1]):
        return f"{len(pair[0])} results for {len(pair[1])}"
    for ours, plain in zip(*pair, strict=True):
        try:
            torch.testing.assert_close(_full(ours), _full(plain), equal_nan=True)
        except (AssertionError, TypeError) as error:
            return str(error)
    return ""


def _outcome(
    function: Callable[..., Any], sample: Any, which: str, mesh: DeviceMesh
) -> Outcome | None:
    """Call an operator on plain and on sharded parameters; None where plain ones are refused.

    Args:
        function: The operator.
        sample: Its arguments, as torch's table has them.
        which: "first" or "all" of its tensors are sharded, or the "gradient" of the first is asked.
        mesh: All ranks.
    """
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_parameter(leaf)]
    if which != "all":
        places = places[:1]
    if not places or leaves[places[0]] is not sample.input or (which == "all" and len(places) < 2):
        return None
    plain, ours = [*map(_copy, leaves)], [*map(_copy, leaves)]
    for place in places:
        plain[place] = nn.Parameter(plain[place].contiguous())
    module = nn.Module()
    module.values = nn.ParameterList([nn.Parameter(_copy(plain[place])) for place in places])
    fully_shard(module, mesh=mesh)
    for parameter, place in zip(module.values, places, strict=True):
        ours[place] = parameter

    def call(values: list[Any]) -> Any:
        args, kwargs = tree_unflatten(values, spec)
        torch.manual_seed(5)
        if which != "gradient":
            with torch.no_grad():
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        result.square().sum().backward()
        return result, values[places[0]].grad

    try:
        wanted = call(plain)
    except Exception:
        return None
    try:
        found = call(ours)
    except Exception as error:
        return "refused", type(error).__name__
    difference = _difference(found, wanted)
    # What an operator writes in place.
    difference = difference or _difference([ours[i] for i in places], [plain[i] for i in places])
    return ("wrong", difference) if difference else ("right", "")


def _outcomes(part: int) -> list[tuple[str, str, Outcome]]:
    found = []
    mesh = whole_mesh()
    for name, function, samples in _operators(part):
        for sample in samples:
            for which in ("first", "all", "gradient"):
                outcome = _outcome(function, sample, which, mesh)
                if outcome is not None:
                    found.append((name, which, outcome))
    return found


@pytest.mark.matrix("operators")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_operators_are_right_or_refused_on_all_ranks_alike(ranks: Ranks, part: int) -> None:
    """On three ranks, for the first tensor sharded, for all, and for the gradient of the first.

    No case gives other values than a plain parameter does, and none leaves a rank waiting.
    """
    seen = ranks(3).run(_outcomes, part)
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert [case for case in seen[0] if case[2][0] == "wrong"] == []
    assert {case[2][0] for case in seen[0]} == {"right", "refused"}

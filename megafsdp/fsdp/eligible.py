"""Choose the parameters that a recipe quantizes.

These are the weights of ``nn.Linear``, and what a layer declares by ``is_linear_weight``.
The choice follows from declarations, names and the shapes of all parts that model axes make, so all
ranks make the same one, without a collective. What would fail later is refused here, before
anything is changed. How weights are quantized is in :mod:`megafsdp.fsdp.params.quantized_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from megafsdp.errors import expected, listed
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.packed import is_packed
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, OffloadPolicy, Quantization
from megafsdp.fsdp.params.wrapped import is_wrapped
from megafsdp.mesh.annotation import annotation_of
from megafsdp.quantize.recipes import QuantizationRecipe
from megafsdp.quantize.tiles import SOURCE_DTYPES

_NOT_LINEAR = "not the weight of a linear layer"


class Candidate(Protocol):
    """A parameter that a unit will own; see :class:`megafsdp.fsdp.grouping.FoundParameter`."""

    parameter: nn.Parameter
    record: ManagedParameter
    compute_dtype: torch.dtype | None
    is_kept_unquantized: bool


def quantization_of(item: Candidate, policy: MixedPrecisionPolicy) -> Quantization | None:
    """Return how a placed parameter is quantized, and record why if it is not; local."""
    recipe = policy.quantization
    if recipe is None:
        return None
    item.record.kept_because = reason = _reason_to_keep(item, recipe)
    if reason:
        return None
    # None where rounding would change nothing: it would still cost a pass.
    original, through = item.parameter.dtype, None
    if policy.quantize_from == "model_dtype":
        model_dtype = policy.compute_dtype(original)
        through = None if model_dtype == policy.main_dtype(original) else model_dtype
    part = item.record.model.part
    # Other ranks of the axis have other matrices of a stack, with scales of their own.
    has_others = len(part.shape) == 3 and part.dim == 0
    spans = recipe.weight.is_per_tensor and item.record.model.mesh is not None and not has_others
    quantization = Quantization(recipe, through, spans)
    if part.is_whole and not quantization.has_recorded_maxima:
        # All ranks of the axis have the same values, hence the same maxima.
        return Quantization(recipe, through)
    return quantization


def _reason_to_keep(item: Candidate, recipe: QuantizationRecipe) -> str:
    if is_packed(item.parameter):
        return "packed by its own class"
    # Its operations are those of its class, which know nothing of our codes.
    if is_wrapped(item.parameter):
        return "computed with by its own class"
    if not _is_linear_weight(item):
        return _NOT_LINEAR
    if item.is_kept_unquantized:
        return "named in keep_unquantized"
    if item.compute_dtype is not None:
        return "kept in a dtype by keep_fp32 or param_dtype_override_fn"
    part = item.record.model.part
    # Look at the parts of all ranks of the axis: if ranks decided differently, their groups would
    # differ.
    shapes = dict.fromkeys(part.of_rank(rank).local_shape for rank in range(part.num_ranks))
    reasons = (recipe.weight.reason_against(shape) for shape in shapes)
    return next((reason for reason in reasons if reason is not None), "")


def _is_linear_weight(item: Candidate) -> bool:
    # Every owner of a tied weight counts: an embedding reads rows of the output layer's weight.
    owners = item.record.living_owners()
    if all(isinstance(owner, nn.Linear) and name == "weight" for owner, name in owners):
        return True
    # A weight shared with another kind of layer, such as an embedding, is read by rows as well.
    is_one_kind = len({(type(owner), name) for owner, name in owners}) == 1
    return is_one_kind and annotation_of(item.parameter).is_linear_weight


def check_quantization(
    found: Sequence[Candidate], policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Check that the weights a recipe chooses can be quantized, and live on the device.

    Args:
        found: Placed parameters of one unit.
        policy: The policy with the recipe.
        offload: What lives on the host.

    Raises:
        ValueError: Weights are of dtypes that no format takes.
        NotImplementedError: The weights are to live on the host.
    """
    recipe = policy.quantization
    if recipe is None:
        return
    # An odd dtype raises instead of leaving the weight unquantized: a model in fp64 would silently
    # train without the recipe.
    chosen = [item for item in found if quantization_of(item, policy) is not None]
    odd = [item for item in chosen if not _is_quantizable(item, policy)]
    where = f"the recipe '{recipe.name}' in fully_shard()"
    if odd:
        raise ValueError(
            expected(
                "weights of fp32, bf16 or fp16 to quantize",
                listed([f"'{item.record.name}' of {item.parameter.dtype}" for item in odd]),
                where=where,
                hint="Cast them first, or name them in keep_unquantized",
            )
        )
    if chosen and offload.params:
        raise NotImplementedError(
            expected(
                "quantized weights on the device, where their codes are made",
                f"OffloadPolicy(params=True), with {listed([i.record.name for i in chosen])}",
                where=where,
                hint="Leave out the recipe or the offload_policy",
            )
        )


def _is_quantizable(item: Candidate, policy: MixedPrecisionPolicy) -> bool:
    dtype = item.parameter.dtype
    # Frozen integers, for example of another quantization library.
    if not dtype.is_floating_point:
        return False
    used = policy.main_dtype(dtype), policy.compute_dtype(dtype)
    return set(used) <= set(SOURCE_DTYPES)

"""Which parameters a recipe quantizes.

Those of linear maps: weights of ``nn.Linear``, and what a layer declares by ``is_linear_weight``.
The choice follows from declarations, names and shapes of all parts that model axes make, so all
ranks make the same one, without asking. What would fail later is refused here, before anything is
changed. How weights are quantized is in :mod:`megafsdp.fsdp.params.quantized_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from megafsdp.errors import expected, listed
from megafsdp.fsdp.params.parameter_group import ManagedParameter
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, OffloadPolicy, Quantization
from megafsdp.mesh.annotation import annotation_of
from megafsdp.quantize.recipes import QuantizationRecipe
from megafsdp.quantize.tiles import SOURCE_DTYPES

_NOT_LINEAR = "not the weight of a linear layer"


class Candidate(Protocol):
    """A parameter that a unit will own; see :class:`megafsdp.fsdp.grouping.FoundParameter`."""

    parameter: nn.Parameter
    record: ManagedParameter
    computes_in_fp32: bool
    is_kept_unquantized: bool


def quantization_of(item: Candidate, policy: MixedPrecisionPolicy) -> Quantization | None:
    """Return how a placed parameter is quantized, and record why if it is not; local."""
    recipe = policy.quantization
    if recipe is None:
        return None
    item.record.kept_because = reason = _reason_to_keep(item, recipe)
    if reason:
        return None
    # None where rounding would change nothing, which costs a pass all the same.
    original, through = item.parameter.dtype, None
    if policy.quantize_from == "model_dtype":
        model_dtype = policy.compute_dtype(original, computes_in_fp32=False)
        through = None if model_dtype == policy.main_dtype(original) else model_dtype
    part = item.record.model.part
    # Ranks of the axis have other matrices of a stack, which have scales of their own.
    has_others = len(part.shape) == 3 and part.dim == 0
    spans = recipe.weight.is_per_tensor and item.record.model.mesh is not None and not has_others
    quantization = Quantization(recipe, through, spans)
    if part.is_whole and not quantization.has_recorded_maxima:
        # All ranks of the axis have the same values, hence the same maxima.
        return Quantization(recipe, through)
    return quantization


def _reason_to_keep(item: Candidate, recipe: QuantizationRecipe) -> str:
    if not _is_linear_weight(item):
        return _NOT_LINEAR
    if item.is_kept_unquantized:
        return "named in keep_unquantized"
    if item.computes_in_fp32:
        return "named in keep_fp32"
    part = item.record.model.part
    # On every rank of the axis: ranks that differ would have other groups.
    shapes = dict.fromkeys(part.of_rank(rank).local_shape for rank in range(part.num_ranks))
    reasons = (recipe.weight.reason_against(shape) for shape in shapes)
    return next((reason for reason in reasons if reason is not None), "")


def _is_linear_weight(item: Candidate) -> bool:
    # Of a tied weight every owner counts: the embedding reads rows of the output layer's.
    owners = item.record.living_owners()
    if all(isinstance(owner, nn.Linear) and name == "weight" for owner, name in owners):
        return True
    # Shared with another kind of layer, as an embedding, it is read by rows as well.
    is_one_kind = len({(type(owner), name) for owner, name in owners}) == 1
    return is_one_kind and annotation_of(item.parameter).is_linear_weight


def check_quantization(
    found: Sequence[Candidate], policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Check that what a recipe is to quantize can be, and is on the device.

    Args:
        found: Placed parameters of one unit.
        policy: Has the recipe.
        offload: What lives on the host.

    Raises:
        ValueError: Weights are of dtypes that no format takes.
        NotImplementedError: They are to live on the host.
    """
    recipe = policy.quantization
    if recipe is None:
        return
    # A dtype is no reason to keep a weight as it is: a model in fp64 would train unquantized.
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
    # Frozen integers, as of another quantization.
    if not dtype.is_floating_point:
        return False
    used = policy.main_dtype(dtype), policy.compute_dtype(dtype, computes_in_fp32=False)
    return set(used) <= set(SOURCE_DTYPES)

"""Choices, as frozen values: how a unit is sharded, its dtypes, and what is offloaded.

:mod:`megafsdp.fsdp.fully_shard` makes them from what users give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.quantize.recipes import QuantizationRecipe, recipe_of


class Strategy(Enum):
    """What is divided over the ``dp_shard`` axis."""

    # DDP, ZeRO-0: nothing; gradients are all-reduced.
    NO_SHARD = "no_shard"
    # ZeRO-1: main weights and optimizer states.
    OPTIM = "optim"
    # ZeRO-2: main gradients too.
    OPTIM_GRADS = "optim_grads"
    # ZeRO-3: compute weights too.
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    @property
    def has_persistent_compute_weight(self) -> bool:
        """Return whether compute weights stay in full between uses."""
        return self is not Strategy.OPTIM_GRADS_PARAMS

    @property
    def defers_reduction(self) -> bool:
        """Return whether gradients wait in full for the last microbatch."""
        return self in (Strategy.NO_SHARD, Strategy.OPTIM)


class Average(Enum):
    """How gradients of the data-parallel ranks are combined."""

    # Mean over ranks: each rank's loss is a mean over its own samples.
    RANK = "rank"
    # Sum over ranks: the loss is already divided by the global number of tokens.
    TOKEN = "token"


@dataclass(frozen=True)
class Quantization:
    """How the compute weights of one group are quantized.

    Attributes:
        recipe: The formats of weights, inputs and gradients.
        through: Dtype to which main weights are rounded before they are quantized; None for no
            rounding.
        spans_model_axis: Whether one scale covers all parts that a model axis has cut a weight
            into.
    """

    recipe: QuantizationRecipe
    through: torch.dtype | None
    spans_model_axis: bool = False

    @property
    def has_recorded_maxima(self) -> bool:
        """Return whether layers record maxima of inputs and gradients for the next step."""
        return self.recipe.history > 0 and self.recipe.input is not None


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit, and which of its weights are quantized.

    Attributes:
        param_dtype: Dtype of compute weights and forward inputs; None keeps each parameter's own.
        reduce_dtype: Dtype of the sum of gradients over ranks; None means ``main_grads_dtype``
            (for torch up to 2.14, ``param_dtype``). If megafsdp itself sums (gloo), gradients
            travel in their own dtype and are summed in this dtype or a wider one; if a library
            sums (NCCL), they travel in this dtype.
        output_dtype: Dtype to which floating-point outputs of the unit are cast; None leaves them.
            ``fully_shard_model`` casts only the outputs of the whole model.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
        main_params_dtype: Dtype of main weights, which the optimizer sees; fp64 parameters keep
            fp64.
        main_grads_dtype: Dtype of main gradients; None means ``main_params_dtype``.
        keep_fp32: Parameters whose compute weights stay fp32: their names, names of modules above
            them, patterns (``fnmatch``) of either, or class names of the modules that own them.
            ``fully_shard_model`` takes names relative to the model or to its units, and refuses a
            name that matches nothing; ``fully_shard`` takes names relative to its module, and
            ignores a name that the unit does not have. The modules still get inputs in
            ``param_dtype``.
        recipe: How compute weights of linear layers are quantized: a name from
            ``megafsdp.quantize.RECIPE_NAMES`` or a recipe; None for not at all. It applies to the
            weights of ``nn.Linear`` and those that a layer declares (``is_linear_weight``), but not
            to weights tied to another kind of layer or of a shape that does not fit the format.
        keep_unquantized: Further weights to leave unquantized, by names like in ``keep_fp32``.
        quantize_activations: Whether inputs and gradients of these layers are quantized as the
            recipe says. False gathers codes, but computes with their decoded values.
        quantize_from: ``"model_dtype"`` rounds main weights to the compute dtype first, so that the
            codes are those of the weights that would be gathered without a recipe; ``"main"`` does
            not.
        param_dtype_override_fn: Called once with each parameter as it is sharded; returns the
            parameter's own dtype to compute with that and without a recipe, or ``param_dtype`` or
            None for the default. Its answers must be the same on all ranks. ``keep_fp32`` goes
            first.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype | None = None
    keep_fp32: tuple[str, ...] = ()
    recipe: str | QuantizationRecipe | None = None
    keep_unquantized: tuple[str, ...] = ()
    quantize_activations: bool = True
    quantize_from: Literal["model_dtype", "main"] = "model_dtype"
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        """Check each choice.

        Raises:
            ValueError: A dtype is not floating-point with at least 16 bits, names are not in a
                tuple, the recipe is unknown, or an option of recipes is invalid or given without a
                recipe.
            TypeError: ``param_dtype_override_fn`` cannot be called.
        """
        if not (self.param_dtype_override_fn is None or callable(self.param_dtype_override_fn)):
            raise TypeError(
                expected(
                    "a function of a parameter",
                    repr(self.param_dtype_override_fn),
                    where="MixedPrecisionPolicy.param_dtype_override_fn",
                    hint="Give one, or None",
                )
            )
        for name in ("keep_fp32", "keep_unquantized"):
            check_names(getattr(self, name), name, where=f"MixedPrecisionPolicy.{name}")
        self._check_quantization()
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_grads_dtype"):
            if getattr(self, name) is not None:
                _check_dtype(getattr(self, name), name)
        _check_dtype(self.main_params_dtype, "main_params_dtype")

    def _check_quantization(self) -> None:
        if self.quantize_from not in ("model_dtype", "main"):
            wanted, got = "'model_dtype' or 'main'", repr(self.quantize_from)
            field = "quantize_from"
            hint = "Leave it out: codes are then those of the weights in the compute dtype"
        elif self.recipe is None and (self.keep_unquantized or not self.quantize_activations):
            wanted, got, field = "a recipe beside what it is to leave out", "None", "recipe"
            hint = "Give recipe='fp8_block', or leave keep_unquantized and quantize_activations out"
        else:
            # Raises if no recipe has this name.
            _ = self.quantization
            return
        raise ValueError(expected(wanted, got, where=f"MixedPrecisionPolicy.{field}", hint=hint))

    @property
    def quantization(self) -> QuantizationRecipe | None:
        """Return the recipe as a value; None without one."""
        if self.recipe is None:
            return None
        return recipe_of(self.recipe, quantize_activations=self.quantize_activations)

    def compute_dtype(
        self, original: torch.dtype, *, named: torch.dtype | None = None
    ) -> torch.dtype:
        """Return the dtype of the compute weight of a parameter of dtype ``original``.

        Args:
            original: The parameter's dtype.
            named: The dtype that the policy chose for this parameter; None without a choice.
        """
        return named or self.param_dtype or original

    def overridden_dtype(self, parameter: nn.Parameter, fqn: str) -> torch.dtype | None:
        """Return the dtype of its own that a parameter keeps; None if it takes the default.

        Args:
            parameter: A parameter of the user's, floating-point.
            fqn: Its name, for messages.

        Raises:
            ValueError: ``param_dtype_override_fn`` returned anything but the parameter's dtype,
                ``param_dtype`` or None.
        """
        if self.param_dtype_override_fn is None:
            return None
        chosen = self.param_dtype_override_fn(parameter)
        if chosen is None or chosen == self.param_dtype:
            return None
        if chosen != parameter.dtype:
            raise ValueError(
                expected(
                    f"{parameter.dtype}, which is the parameter's own, or {self.param_dtype}",
                    repr(chosen),
                    where=f"param_dtype_override_fn of MixedPrecisionPolicy, for '{fqn}'",
                    hint="Return one of them, or None for the default",
                )
            )
        return parameter.dtype

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main weight of a parameter of dtype ``original``."""
        # A dtype with fewer bits than the user's would lose digits at the first copy.
        return torch.float64 if original == torch.float64 else self.main_params_dtype

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main gradient of a parameter of dtype ``original``."""
        return self.main_grads_dtype or self.main_dtype(original)


def check_names(names: object, keyword: str, *, where: str) -> None:
    """Check names of parameters or modules, or patterns of them.

    Raises:
        ValueError: They are not in a tuple or list, or one is empty.
    """
    # One string would be taken for the names of its characters, of which '*' matches everything.
    if (
        isinstance(names, str)
        or not isinstance(names, Iterable)
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ValueError(
            expected(
                "names in a tuple, none of them empty",
                repr(names),
                where=where,
                hint=f"Write {keyword}=('lm_head',), or leave it out",
            )
        )


def _check_dtype(dtype: object, name: str) -> None:
    # 8-bit dtypes need scales, which a cast has not.
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            expected(
                "a floating-point dtype of at least 16 bits",
                repr(dtype),
                where=f"MixedPrecisionPolicy.{name}",
                hint="Use torch.float32 or torch.bfloat16",
            )
        )


@dataclass(frozen=True)
class OffloadPolicy:
    """What lives on the host.

    Attributes:
        params: Keep sharded parameters and their gradients on the host, and with them the states of
            any optimizer. Compute weights are cast there and copied to the device at each gather;
            gradients are copied back when they are reduced.
        pin_memory: Pin that memory, so that CUDA copies run beside kernels. Without CUDA nothing is
            pinned.
    """

    params: bool = False
    pin_memory: bool = True

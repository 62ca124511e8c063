"""Linear maps cut by columns or by rows, and the map to a part of the vocabulary.

    column   tp cuts the outputs (dim 0 of the weight); every rank needs the whole input
    row      tp cuts the inputs (dim 1); every rank has an addend of the whole output

With ``sequence_parallel`` the activations outside of a column-row pair are cut along the sequence,
and the exchange is a gather and a reduce-scatter; without, they are whole on every rank, and the
exchange is an all-reduce. The gathered input of a column-parallel map is saved for backward.

Shape suffixes: B batch, T sequence, H hidden, I and O in and out features, V vocabulary. With tp, I
of a row-parallel map, O of a column-parallel one and V are this rank's part, and with
``sequence_parallel`` so is T on the other side of the map.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megafsdp.errors import expected
from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.parallel.layer import ParallelModule
from megafsdp.parallel.mappings import (
    copy_to_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
)

ParallelMode = Literal["column", "row"]

_TP_DIMS = {"column": 0, "row": 1, None: None}


class Linear(ParallelModule):
    """A linear map of the last dim.

    Args:
        in_features: Size of the last dim of the input, on all ranks of tp together.
        out_features: Size of the last dim of the output, likewise.
        bias: True if a bias is added.
        init_std: Standard deviation of the initial weight; the bias starts at 0.
        parallel_mode: ``column``, ``row``, or None for a weight that every rank has whole.
        sequence_parallel: Whether the activations on the outer side are cut along the sequence.
        fused: Logical tensors along the output dim, of weight and bias alike. If the map is
            column-parallel, each rank gets its part of each of them.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the parameters are made.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_std: float = 0.02,
        parallel_mode: ParallelMode | None = None,
        sequence_parallel: bool = False,
        fused: FusedParts | None = None,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode not in _TP_DIMS:
            raise ValueError(
                expected(
                    "parallel_mode 'column', 'row' or None",
                    repr(parallel_mode),
                    where="Linear",
                    hint="Name one of these",
                )
            )
        self.in_features = in_features
        self.out_features = out_features
        self.init_std = init_std
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel
        tp_dim = _TP_DIMS[parallel_mode]
        # Whole weights, and biases after a row-parallel map, meet a part of the sequence on each
        # rank.
        self.declarations = {
            "weight": ParameterAnnotation(
                tp_dim,
                fused=fused,
                sums_over_tp=sequence_parallel and parallel_mode is None,
                is_linear_weight=True,
            ),
            "bias": ParameterAnnotation(
                0 if tp_dim == 0 else None,
                fused=fused,
                sums_over_tp=sequence_parallel and parallel_mode != "column",
            ),
        }
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device)) if bias else None
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the weight from a normal distribution; zero the bias."""
        if name == "bias":
            nn.init.zeros_(whole)
        else:
            nn.init.normal_(whole, std=self.init_std)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, I) to (B, T, O), of the dtype of the input.

        Raises:
            ValueError: A row-parallel map has ``sequence_parallel``, and tp does not divide T.
        """
        group = self.tp_group
        weight = self._localized("weight")
        bias = None if self.bias is None else self._localized("bias")
        if group is None or self.parallel_mode is None:
            return _linear(x_BTI, weight, bias)
        if self.parallel_mode == "column":
            return _linear(_input_of_columns(x_BTI, group, self.sequence_parallel), weight, bias)
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp
        out_BTO = reduce(_linear(x_BTI, weight, None), group)
        # Added after the sum: otherwise every rank would add it once.
        return out_BTO if bias is None else out_BTO + bias.to(out_BTO.dtype)

    def extra_repr(self) -> str:
        """Describe the sizes for ``repr``."""
        mode = "" if self.parallel_mode is None else f", parallel_mode={self.parallel_mode!r}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{mode}"


class OutputLayer(ParallelModule):
    """The map from hidden states to this rank's part of the logits, cut by the vocabulary.

    :func:`megafsdp.parallel.cross_entropy` takes the part; ``gather_vocabulary`` joins the parts.

    Args:
        hidden_size: Size of the last dim of the input.
        vocab_size: Number of logits, of all ranks of tp together.
        init_std: Standard deviation of the initial weight.
        tied_weight: A Parameter to share, such as the word embedding's; also one that torch's
            ``parallelize_module`` has cut on dim 0. None makes one.
        sequence_parallel: Whether the input is cut along the sequence.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the weight is made.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        init_std: float = 0.02,
        tied_weight: nn.Parameter | None = None,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.is_tied = tied_weight is not None
        self.sequence_parallel = sequence_parallel
        self.declarations = {"weight": ParameterAnnotation(0)}
        self.weight = (
            nn.Parameter(torch.empty(vocab_size, hidden_size, device=device))
            if tied_weight is None
            else tied_weight
        )
        self._start(tp_mesh, weight_mesh)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weight from a normal distribution, unless it is another module's to draw."""
        super().reset_parameters(defer_init or self.is_tied)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the whole weight from a normal distribution."""
        nn.init.normal_(whole, std=self.init_std)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Map (B, T, H) to logits (B, T, V) of the weight's dtype; a policy may keep it in fp32."""
        group, weight = self.tp_group, self._localized("weight")
        if group is not None:
            x_BTH = _input_of_columns(x_BTH, group, self.sequence_parallel)
        return F.linear(x_BTH.to(weight.dtype), weight)

    def _is_cut_already(self, name: str, parameter: nn.Parameter, tp_mesh: DeviceMesh) -> bool:
        return (
            self.is_tied
            and isinstance(parameter, DTensor)
            and parameter.device_mesh == tp_mesh
            and parameter.placements == (Shard(0),)
        )


def _input_of_columns(x: Tensor, group: dist.ProcessGroup, is_sequence_cut: bool) -> Tensor:
    return gather_sequence(x, group) if is_sequence_cut else copy_to_tp(x, group)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # A policy may keep either of them in fp32, as it may norms.
    bias = None if bias is None else bias.to(weight.dtype)
    if x.dtype == weight.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

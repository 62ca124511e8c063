"""The experts of a layer as stacks of matrices: one product for all of them.

A stack is one parameter with the experts along dim 0. Expert parallelism gives each rank of ep an
equal number of them (``parallelize`` cuts the stack); tensor parallelism cuts none. The rows come
sorted by expert (dispatch.py), so that one call of torch's ``grouped_mm`` multiplies all of them.
If that refuses the matrices, a loop over experts does, which tests also compare it with.

Shape suffixes: R rows of all experts of this rank, E experts of this rank, I and O in and out
features, H hidden.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.mesh.fused_parts import FusedParts, gate_and_up
from megafsdp.parallel.layer import ParallelModule

_LOGGER = logging.getLogger("megafsdp.parallel")
_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
# The kernels read rows of matrices in pieces of this many bytes.
_STRIDE_NBYTES = 16


class GroupedLinear(ParallelModule):
    """A linear map of the last dim for each expert, without biases; the weight is (E, O, I).

    Args:
        num_experts: Matrices of the stack, on all ranks of ep together.
        in_features: Size of the last dim of the input.
        out_features: Size of the last dim of the output.
        init_std: Standard deviation of the initial weight.
        fused: Logical tensors along dim 1 of the stack.
        sequence_parallel: Whether the ranks of tp have different tokens.
        tp_mesh: As for ``set_device_mesh``: its ranks have all experts.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the weight is made.

    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        init_std: float = 0.02,
        fused: FusedParts | None = None,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.init_std = init_std
        self.sequence_parallel = sequence_parallel
        self.declarations = {
            "weight": ParameterAnnotation(
                is_expert=True,
                fused=fused,
                sums_over_tp=sequence_parallel,
                is_linear_weight=True,
            )
        }
        # Parts along dim 0 would leave a rank several pieces of the stack.
        assert fused is None or fused.dim != 0, "the parts lie inside of each expert"
        shape = (num_experts, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device))
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the matrices of all experts from a normal distribution."""
        nn.init.normal_(whole, std=self.init_std)

    def forward(self, x_RI: Tensor, load_E: Tensor) -> Tensor:
        """Map each row by the matrix of its expert, ``(R, O)`` in the dtype of the input.

        Args:
            x_RI: The rows of expert 0 of this rank, then those of expert 1, and so on.
            load_E: How many rows each expert has, int64; zeros are allowed.
        """
        weight_EOI = self._localized("weight")
        multiply = multiply_in_groups
        if reason := reason_for_loop(weight_EOI):
            _log_loop(reason)
            multiply = multiply_in_loop
        return multiply(x_RI.to(weight_EOI.dtype), weight_EOI, load_E).to(x_RI.dtype)

    def extra_repr(self) -> str:
        """Describe the sizes for ``repr``."""
        return f"{self.num_experts} experts, {self.in_features}, {self.out_features}"


class GroupedExperts(ParallelModule):
    """SwiGLU for each expert, of rows that are sorted by expert.

    Args:
        num_experts: Experts of the layer, on all ranks of ep together.
        hidden_size: Size of the last dim of input and output.
        ffn_hidden_size: Inner width of one expert.
        init_std: Standard deviation of the first stack's initial weight.
        output_init_std: That of the second stack; None for the same.
        sequence_parallel: Whether the ranks of tp have different tokens.
        tp_mesh: As for ``set_device_mesh``: its ranks have all experts.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the weights are made.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        init_std: float = 0.02,
        output_init_std: float | None = None,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.linear_fc1 = GroupedLinear(
            num_experts,
            hidden_size,
            2 * ffn_hidden_size,
            init_std=init_std,
            fused=gate_and_up(ffn_hidden_size, dim=1),
            sequence_parallel=sequence_parallel,
            device=device,
        )
        self.linear_fc2 = GroupedLinear(
            num_experts,
            ffn_hidden_size,
            hidden_size,
            init_std=init_std if output_init_std is None else output_init_std,
            sequence_parallel=sequence_parallel,
            device=device,
        )
        self._start(tp_mesh, weight_mesh)

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that share out the experts; None if this rank has all."""
        mesh = self.linear_fc1.ep_mesh
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()

    def forward(self, x_RH: Tensor, load_E: Tensor) -> Tensor:
        """Map the rows of this rank's experts; as for :meth:`GroupedLinear.forward`."""
        gate_RI, up_RI = self.linear_fc1(x_RH, load_E).chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate_RI) * up_RI, load_E)


def reason_for_loop(weight_EOI: Tensor) -> str | None:
    """Return why torch's grouped product does not take a stack; None if it does."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} without torch.nn.functional.grouped_mm"
    dtypes = _GROUPED_DTYPES.get(weight_EOI.device.type, ())
    if weight_EOI.dtype not in dtypes:
        return f"{weight_EOI.dtype} on {weight_EOI.device.type}"
    # Rows of the input and of the output's gradient, which are made contiguous.
    if any(size * weight_EOI.itemsize % _STRIDE_NBYTES for size in weight_EOI.shape[1:]):
        return f"matrices {tuple(weight_EOI.shape[1:])} of {weight_EOI.dtype}"
    return None


@functools.cache
def _log_loop(reason: str) -> None:
    _LOGGER.warning(
        expected(
            "experts that torch.nn.functional.grouped_mm multiplies",
            reason,
            where="GroupedLinear; a loop over experts runs instead, for which the host waits",
            hint=f"Use widths that are multiples of {_STRIDE_NBYTES} bytes, and bf16 on CUDA",
        )
    )


def _contiguous(rows: Tensor) -> Tensor:
    # Without rows, any strides are contiguous to torch, but not to the kernels.
    return rows.contiguous() if rows.numel() else rows.clone(memory_format=torch.contiguous_format)


def multiply_in_groups(x_RI: Tensor, weight_EOI: Tensor, load_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, ``(R, O)``, by torch's ``grouped_mm``."""
    ends_E = load_E.cumsum(0, dtype=torch.int32)
    out_RO = F.grouped_mm(_contiguous(x_RI), weight_EOI.transpose(1, 2), offs=ends_E)
    if out_RO.requires_grad:
        # The kernels refuse an expanded gradient, such as that of a sum.
        out_RO.register_hook(_contiguous)
    return out_RO


def multiply_in_loop(x_RI: Tensor, weight_EOI: Tensor, load_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, ``(R, O)``; the host waits for the loads."""
    parts = x_RI.split(load_E.tolist())
    products = [F.linear(part, weight) for part, weight in zip(parts, weight_EOI, strict=True)]
    return torch.cat(products)

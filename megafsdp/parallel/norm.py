"""Norms of the last dim, whose weights every rank of tp has whole.

If ranks normalise different vectors (parts of the sequence, or their own heads), the gradient of
the weight is a sum over tp. The layers declare that; ``docs/design/17-parallel-layers.md`` says who
makes the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.parallel.layer import ParallelModule


class RMSNorm(ParallelModule, nn.RMSNorm):
    """torch's RMSNorm, computed in the weight's dtype where a policy keeps norms in fp32.

    Args:
        hidden_size: Size of the last dim.
        eps: Added to the mean square under the root.
        zero_centered: True if the factor is 1 plus the weight, which starts from zeros; it is then
            computed in fp32 at least, since next to 1 a dtype of 16 bits rounds the weight away.
        sequence_parallel: Whether the ranks of tp normalise different vectors: parts of the
            sequence, or heads.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the weight is made.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        zero_centered: bool = False,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device)
        self.zero_centered = zero_centered
        self.declarations = {"weight": ParameterAnnotation(sums_over_tp=sequence_parallel)}
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Write ones, or zeros where the factor is 1 plus the weight."""
        nn.init.constant_(whole, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the result has the dtype of ``x``."""
        weight = self._localized("weight")
        if self.zero_centered:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        out = F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps)
        return out.to(x.dtype)


class LayerNorm(ParallelModule, nn.LayerNorm):
    """torch's LayerNorm, computed in the weight's dtype where a policy keeps norms in fp32.

    Args:
        hidden_size: Size of the last dim.
        eps: Added to the variance under the root.
        bias: True if a bias is added.
        sequence_parallel: Whether the ranks of tp normalise different vectors.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the parameters are made.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, bias=bias, device=device)
        declared = ParameterAnnotation(sums_over_tp=sequence_parallel)
        self.declarations = {"weight": declared, "bias": declared}
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Write ones to the weight and zeros to the bias."""
        nn.init.constant_(whole, 0.0 if name == "bias" else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the result has the dtype of ``x``."""
        weight = self._localized("weight")
        bias = None if self.bias is None else self._localized("bias").to(weight.dtype)
        out = F.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps)
        return out.to(x.dtype)

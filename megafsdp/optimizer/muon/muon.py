"""Muon for sharded matrices, with AdamW for everything else.

Weights and momentum stay in their flat buffers. In a step, each matrix of the momentum is sent to
one owner among the ranks that divide it and orthogonalised there, and the update is sent back: see
docs/design, "Muon". The arithmetic is that of ``torch.optim.Muon``. exchange.py moves matrices,
matrices.py finds them in parameters, newton_schulz.py orthogonalises them, and checks.py checks the
user's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from megafsdp.buffer.comm.collectives import all_gather_equal
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.device.torch_private import without_dynamo
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.adam.checks import check_grad
from megafsdp.optimizer.grads.norms import summed_grad
from megafsdp.optimizer.muon.checks import check_group, check_options, check_rounds
from megafsdp.optimizer.muon.exchange import CutMatrix, Round, choose_owners, choose_rounds, pieces
from megafsdp.optimizer.muon.matrices import (
    Matrix,
    flat_elements,
    is_for_muon,
    matrices_of,
    ranks_that_divide,
)
from megafsdp.optimizer.muon.newton_schulz import MUON_COEFFICIENTS, Coefficients, lr_ratio
from megafsdp.optimizer.states.loading import check_loaded_states, fill_options, with_own_cuts

_LABEL = "muon"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES = ("momentum_buffer", *_MOMENTS)


@dataclass(eq=False, slots=True)
class _Plan:
    """The matrices that one process group divides, and its rounds."""

    matrices: list[Matrix]
    rounds: list[Round]


class Muon(Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for matrices; AdamW for all other parameters.

    Takes sharded, replicated and plain parameters. A 2-D parameter is one matrix, a 3-D one a stack
    of them. Vectors, scalars, and all parameters of groups with ``use_muon=False`` (embeddings and
    output heads should be there) are stepped by AdamW. Every option below but ``ns_dtype`` and
    ``bucket_numel`` may be set by group.

    Collective: two all-to-alls per round for each process group that divides parameters, called by
    all ranks alike. Beside what orthogonalisation needs, it allocates at most three times
    ``bucket_numel`` elements in ``ns_dtype``, or three times the largest matrix if that is larger.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate of Muon and AdamW.
        weight_decay: Decoupled weight decay of Muon and AdamW.
        momentum: Weight of the old momentum in the average.
        nesterov: Orthogonalise the average of gradient and momentum instead of the momentum.
        ns_coefficients: Coefficients of the quintic.
        eps: Floor of the norm that a matrix is divided by.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: How the learning rate follows a matrix's shape: ``"original"`` (None),
            ``sqrt(max(1, rows / cols))``, or ``"match_rms_adamw"``, ``0.2 sqrt(max(rows, cols))``.
        use_muon: False steps the group's matrices by AdamW too.
        split_fused: The matrices of a fused parameter: ``"parts"``, one for each annotated part;
            ``"groups"``, one for each part of each group; ``"none"``, one.
        betas: Betas of AdamW.
        adamw_eps: Epsilon of AdamW.
        ns_dtype: Dtype in which matrices are sent and orthogonalised; None means bf16 on
            accelerators and fp32 on the CPU.
        bucket_numel: Elements of the matrices that a rank owns in a round; at least one matrix.

    Raises:
        ValueError: An option is out of range, or a parameter for Muon has more than 3 dimensions or
            is one of ``local_parameters()``.
        NotImplementedError: A parameter is a DTensor that megafsdp did not cut.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = MUON_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        split_fused: str = "parts",
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        ns_dtype: torch.dtype | None = None,
        bucket_numel: int = 1 << 26,
    ) -> None:
        check_rounds(ns_dtype, bucket_numel)
        self._ns_dtype = ns_dtype
        self._bucket_numel = bucket_numel
        self._plans: dict[tuple[object, ...], dict[dist.ProcessGroup | None, _Plan]] = {}
        # These may differ by group and are saved with it, unlike ns_dtype and bucket_numel.
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "split_fused": split_fused,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy of the optimizer; the copy makes its own plans."""
        # Plans refer to process groups, which cannot be copied.
        sizes = {"_ns_dtype": self._ns_dtype, "_bucket_numel": self._bucket_numel}
        return {**super().__getstate__(), **sizes, "_plans": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and check it; a refused group is not added."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except (ValueError, NotImplementedError):
            # The base class has appended the group before it could be checked.
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an optimizer of this class or of ``torch.optim.Muon``; local.

        Args:
            state_dict: Its states are DTensors like the parameters, or plain tensors of this
                rank's rows. DTensors that torch has cut make the call collective.

        Raises:
            ValueError: Its groups, states or shapes do not fit this optimizer.
            NotImplementedError: A DTensor has another shape than its parameter.
        """

        # Runs after other hooks, which may replace what is loaded.
        def recut_and_check(_: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
            packed = with_own_cuts(packed, self.param_groups)
            check_loaded_states(packed, self.param_groups, lambda _: ("step", *_STATES))
            return packed

        with self.register_load_state_dict_pre_hook(recut_and_check):
            super().load_state_dict(state_dict)
        # torch.optim.Muon has fewer options, and its states may be plain tensors, ours DTensors.
        fill_options(self.param_groups, self.defaults)
        for parameter, state in self.state.items():
            for name, value in state.items():
                # A copy: the caller may still use the state dict, or load it twice.
                if name in _STATES:
                    rows = local_tensor(value).reshape(local_tensor(parameter).shape)
                    state[name] = wrap_like(parameter, rows.clone())
                elif isinstance(value, torch.Tensor):
                    state[name] = value.clone()

    @torch.no_grad()
    def make_states(self) -> None:
        """Give each trainable parameter without states those of its first step; local.

        Loads that fill states in place need this: they find only existing states.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._make_state(parameter, group)

    def _make_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        # There may be states of the other algorithm, from a checkpoint or another use_muon.
        names = ("momentum_buffer",) if is_for_muon(parameter, group) else _MOMENTS
        if names[-1] in self.state[parameter]:
            return
        state = {}
        if names is _MOMENTS:
            # On the host, where adamw() reads it: a count on a device would make each step wait.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        self.state[parameter] = state | {name: torch.zeros_like(parameter) for name in names}

    @without_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that have a gradient; called by all ranks alike.

        Raises:
            ValueError: An option of a group is out of range; nothing has changed.
            RuntimeError: A gradient is sparse, or not cut like its parameter; nothing has
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Checked before anything changes: a later error would leave ranks with different weights.
        for index, group in enumerate(self.param_groups):
            check_options(group, index, is_new=False)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    check_grad(parameter, parameter.grad)
                    summed_grad(parameter, parameter.grad)
        stepped: list[tuple[torch.Tensor, dict[str, Any]]] = []
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in with_grad if is_for_muon(p, group)]
            self._step_adamw([p for p in with_grad if not is_for_muon(p, group)], group)
            for parameter in matrices:
                # Decay before the update, as in torch; the rounds below only add to weights.
                local_tensor(parameter).mul_(1 - group["lr"] * group["weight_decay"])
                self._make_state(parameter, group)
            stepped += [(p, group) for p in matrices]
        for plan in self._plans_of(stepped).values():
            for each in plan.rounds:
                self._run_round(plan.matrices, each)
        return loss

    def _plans_of(
        self, stepped: list[tuple[torch.Tensor, dict[str, Any]]]
    ) -> dict[dist.ProcessGroup | None, _Plan]:
        """Return the plan of each process group; made once for the same set of parameters."""
        # By identity, which is cheap; the plan keeps the parameters, so no id is reused.
        key = tuple((id(p), id(group), group["split_fused"]) for p, group in stepped)
        if key not in self._plans:
            by_group: dict[dist.ProcessGroup | None, list[Matrix]] = {}
            for parameter, group in stepped:
                divide = ranks_that_divide(parameter)
                by_group.setdefault(divide, []).extend(matrices_of(parameter, group))
            # One key at a time: plans refer to parameters, and would keep old ones alive.
            self._plans = {key: {g: self._plan(m, g) for g, m in by_group.items()}}
        return self._plans[key]

    def _plan(self, matrices: list[Matrix], group: dist.ProcessGroup | None) -> _Plan:
        cuts = [matrix.cut() for matrix in matrices]
        if group is not None and any(matrix.part is not None for matrix in matrices):
            cuts = _with_all_ranges(matrices, cuts, group)
        # Replicated and plain matrices go the same way, in rounds that send nothing.
        num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        owners = choose_owners(cuts, num_ranks)
        rounds = choose_rounds(cuts, owners, num_ranks, self._bucket_numel)
        return _Plan(matrices, [Round(each, cuts, owners, rank, group) for each in rounds])

    def _run_round(self, matrices: list[Matrix], each: Round) -> None:
        device = _device_of(matrices[0].parameter)
        # bf16 is precise enough for the iteration, and fast on a GPU but slow on a CPU.
        dtype = self._ns_dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        # Each rank averages its own momentum, and sends only what is to be orthogonalised.
        message = torch.empty(each.num_sent, dtype=dtype, device=device)
        for piece, segment in zip(pieces(message, each.sends), each.sends, strict=True):
            matrix = matrices[segment.matrix]
            self._average(matrix, matrix.local_range(segment.start, segment.stop), piece)
        gathered = each.gather(message, _LABEL)
        # Freed here: beside the gathered message, a round then needs room for only one matrix.
        del message
        received = list(zip(each.receives, pieces(gathered, each.receives), strict=True))
        for index in each.owned:
            whole = gathered.new_empty(matrices[index].numel)
            mine = [(s, piece) for s, piece in received if s.matrix == index]
            for segment, piece in mine:
                whole[segment.start : segment.stop] = piece
            matrices[index].orthogonalize_(whole)
            # Into the gathered message: scatter() sends it back in the order in which it came.
            for segment, piece in mine:
                piece.copy_(whole[segment.start : segment.stop])
        updates = each.scatter(gathered, _LABEL)
        for piece, segment in zip(pieces(updates, each.sends), each.sends, strict=True):
            matrix = matrices[segment.matrix]
            options = matrix.param_group
            where = matrix.local_range(segment.start, segment.stop)
            # alpha= must be a number.
            lr = float(options["lr"])
            ratio = lr_ratio(options["adjust_lr_fn"], *matrix.shape)
            with flat_elements(local_tensor(matrix.parameter)) as flat:
                # A parameter of a unit on the host is updated there.
                flat[where].add_(piece.to(flat.device), alpha=-lr * ratio)

    def _average(self, matrix: Matrix, where: slice, output: torch.Tensor) -> None:
        """Update the momentum of some elements and write what is to be orthogonalised."""
        assert matrix.parameter.grad is not None, "a stepped parameter has a gradient"
        options = matrix.param_group
        with flat_elements(local_tensor(self.state[matrix.parameter]["momentum_buffer"])) as flat:
            buffer = flat[where]
            grad = local_tensor(matrix.parameter.grad).reshape(-1)[where].to(buffer.dtype)
            buffer.lerp_(grad, 1 - options["momentum"])
            output.copy_(grad.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer)

    def _step_adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Step parameters by torch's AdamW on their local rows."""
        lists: list[list[torch.Tensor]] = [[], [], [], [], []]
        for parameter in parameters:
            self._make_state(parameter, group)
            state = self.state[parameter]
            # Local rows: the dispatch of DTensors would cost more than the step.
            local = local_tensor(parameter)
            assert parameter.grad is not None, "a stepped parameter has a gradient"
            tensors = (local_tensor(parameter.grad).to(local.dtype), state["exp_avg"])
            row = (local, *map(local_tensor, (*tensors, state["exp_avg_sq"])), state["step"])
            for column, tensor in zip(lists, row, strict=True):
                column.append(tensor)
        if not parameters:
            return
        params, grads, exp_avgs, exp_avg_sqs, steps = lists
        adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _with_all_ranges(
    matrices: list[Matrix], cuts: list[CutMatrix], group: dist.ProcessGroup
) -> list[CutMatrix]:
    """Exchange the ranges of matrices that a model axis cuts; once per plan, collective."""
    # A part's place in its buffer depends on the parts beside it, whose sizes differ between the
    # ranks of the axis: no rank can compute the others' ranges.
    own = [
        cut.ranges[0 if matrix.part is not None else group.rank()]
        for matrix, cut in zip(matrices, cuts, strict=True)
    ]
    sent = torch.tensor(own, dtype=torch.int64, device=_device_of(matrices[0].parameter)).view(-1)
    gathered = all_gather_equal(sent, group=group, label=_LABEL).view(group.size(), -1, 2).tolist()
    ranges = zip(*gathered, strict=True)
    return [
        replace(cut, ranges=tuple((start, stop) for start, stop in of_all))
        for cut, of_all in zip(cuts, ranges, strict=True)
    ]


def _device_of(parameter: torch.Tensor) -> torch.device:
    """Return the device on which ranks exchange a parameter, which may itself be on the host."""
    owner = group_of(parameter)
    return parameter.device if owner is None else owner.device

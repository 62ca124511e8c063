"""FusedAdam: Adam and AdamW in one pass over flat buffers.

Parameters of ``fully_shard`` lie in flat buffers, and so do their gradients and states. One kernel
call steps runs of neighbours; it also unscales and clips gradients and, if the weight is cast once
a step, writes the cast. Plain tensors and other DTensors are stepped one by one with the same
arithmetic (:mod:`megafsdp.optimizer.kernels.reference`), so how a parameter is stored does not
change its values.

The class has three parts in this order: construction and copies, the step, and the states as
others see them (state dicts, checkpoints), with moments in fp32 whatever their dtype here. plan.py
finds where parameters lie, a pass runs in step.py or capturable.py, and states are kept in
states/store.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from megafsdp.device.torch_private import without_dynamo
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.weight_sync import fully_shard_optimizer
from megafsdp.optimizer.adam.capturable import CapturablePass
from megafsdp.optimizer.adam.checks import (
    check_capturable,
    check_group,
    check_hyperparameters,
    check_loaded_decay,
    check_remainders,
    check_scaled_state,
)
from megafsdp.optimizer.adam.plan import (
    FoundGrads,
    GroupHyper,
    GroupPlan,
    gradients_of,
    members_by_buffer,
)
from megafsdp.optimizer.adam.step import AdamPass
from megafsdp.optimizer.grads.clip import gradient_factor
from megafsdp.optimizer.grads.norms import total_norm
from megafsdp.optimizer.kernels.cuda import usable_module
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.states.formats import check_state_dtype
from megafsdp.optimizer.states.loading import (
    check_loaded_states,
    fill_options,
    packed_parameters,
    with_own_cuts,
)
from megafsdp.optimizer.states.quantized import encode_quantized, update_main_weight
from megafsdp.optimizer.states.store import OF_WEIGHTS, STATES, StateStore

_COPIED = (
    "adam_w_mode",
    "use_decoupled_grad",
    "max_grad_norm",
    "grad_norm",
    "capturable",
    "ftz",
)
_STATE_NAMES = frozenset({"step", *STATES, *OF_WEIGHTS})
# Options in the groups of torch's AdamW, beside its hyperparameters. 2.11 to 2.15.
_TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class FusedAdam(Optimizer):
    """Adam with decoupled (AdamW) or coupled weight decay, for sharded and plain parameters.

    A drop-in for ``torch.optim.AdamW``: parameter groups, schedulers, closures, hooks, state dicts
    and ``torch.amp.GradScaler`` work as with it. Parameters of ``fully_shard``, plain tensors and
    DTensors may be mixed. State names are torch's (``step``, ``exp_avg``, ``exp_avg_sq``), so
    checkpoints of one load into the other. If several optimizers share a unit, the one with half of
    its elements or more allocates flat states for the whole unit.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; 0 by default, unlike ``torch.optim.AdamW``.
        adam_w_mode: Decoupled weight decay; False adds ``weight_decay * p`` to the gradient.
        bias_correction: Correct the moments for their start at zero.
        exp_avg_dtype: Dtype of the first moment: fp32, bf16, or fp16 or FP8 (e4m3) with a scale per
            block (:mod:`megafsdp.optimizer.states.formats`). FP8 wants a first beta of at most
            0.95: moments that decay more slowly become too small.
        exp_avg_sq_dtype: Dtype of the second moment.
        store_param_remainders: For bf16 parameters, as ``MixedPrecisionPolicy(torch.bfloat16,
            main_params_dtype=torch.bfloat16)`` makes them. An int16 state has the low half of the
            fp32 weight whose high half is the parameter, so that the parameter is both main and
            compute weight, in 2 bytes instead of 4 + 2. Checkpoints have the fp32 weight.
        use_decoupled_grad: Read ``p.decoupled_grad`` instead of ``p.grad``; it may have another
            dtype than the parameter.
        max_grad_norm: Clip by the norm of all gradients; :attr:`grad_norm` is the norm after each
            step; gradients are left as they are. ``math.inf`` never clips. Makes ``step``
            collective, or :meth:`measure_grad_norm` if that is called before it.
        capturable: Let a CUDA graph capture ``step``: counts of steps, a learning rate given as a
            tensor, the factor on gradients and their finiteness stay on the device. Needs moments
            in fp32 or bf16; many times slower if there is no kernel for the device, or the moments
            have two dtypes. A replay cannot mark the weights as changed: call
            ``mark_main_weights_changed(model)`` after it.
        ftz: Flush denormal numbers to zero inside the step: states of rows without gradients decay
            into denormals, which are many times slower.

    Raises:
        ValueError: A hyperparameter or dtype is not valid; a trainable parameter is fp64 or
            complex, or not bf16 with ``store_param_remainders``; or a parameter group asks for
            ``amsgrad``, ``maximize`` or the other kind of weight decay.
    """

    _step_supports_amp_scaling = True
    _is_copyable = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        max_grad_norm: float | None = None,
        capturable: bool = False,
        ftz: bool = True,
    ) -> None:
        check_hyperparameters(float(lr), betas, eps, weight_decay, max_grad_norm)
        check_state_dtype("exp_avg_dtype", exp_avg_dtype)
        check_state_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype)
        self.adam_w_mode = adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        # The norm of the gradients as they are, maybe still scaled, for the next step.
        self._measured: torch.Tensor | None = None
        # For step_unless(): the flag that its kernels read, and the pass that counted its steps.
        self._device_flag: torch.Tensor | None = None
        self._queued: AdamPass | None = None
        self.capturable = capturable
        self.ftz = ftz
        if capturable:
            check_capturable((exp_avg_dtype, exp_avg_sq_dtype), store_param_remainders)
        self._store = StateStore(
            dict(zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype), strict=True)),
            has_remainders=store_param_remainders,
            counts_on_device=capturable,
        )
        # By index of the parameter group; a plan is made anew when the group's list changes.
        self._plans: dict[int, GroupPlan] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        # Only if it is off: torch's AdamW and its checkpoints lack this option.
        if not bias_correction:
            defaults["bias_correction"] = False
        # Last: the base class calls add_param_group(), which uses the attributes above.
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy of the optimizer; the copy makes its own flat states.

        Raises:
            RuntimeError: The optimizer owns threads and host memory, and cannot be copied.
        """
        if not self._is_copyable:
            raise RuntimeError(
                expected(
                    "an optimizer that copy.deepcopy() and pickle can copy",
                    f"a {type(self).__name__}",
                    where="its __getstate__()",
                    hint="Build another one and give it the state_dict()",
                )
            )
        options = {name: getattr(self, name) for name in _COPIED}
        # In the form of a state dict: the copy brings them into flat buffers of its own.
        state = defaultdict(dict, {p: self._portable_state(p) for p in self.state})
        store = self._store
        stored = (store.dtypes, store.has_remainders, store.remainders())
        return {**super().__getstate__(), **options, "state": state, "_stored": stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copied optimizer, or the groups and states of a load."""
        # torch calls it for a copy, with all attributes, and for a load, with groups and states.
        own = dict(state)
        if "_stored" in own:
            dtypes, has_remainders, remainders = own.pop("_stored")
            own["_store"] = store = StateStore(
                dtypes, has_remainders=has_remainders, counts_on_device=own["capturable"]
            )
            store.add_remainders(remainders)
            own |= {"_plans": {}, "_measured": None, "_device_flag": None, "_queued": None}
        super().__setstate__(own)
        # Only now has the base class set the parameter groups.
        if "_stored" in state:
            self._store.add_parameters(p for group in self.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with hyperparameters of its own.

        Raises:
            ValueError: As for the constructor; the group is not added.
        """
        super().add_param_group(param_group)
        # The measured norm does not include the new parameters.
        self._measured = None
        try:
            check_group(self.param_groups[-1], adam_w_mode=self.adam_w_mode)
            if self._store.has_remainders:
                check_remainders(self.param_groups[-1])
        except ValueError:
            # The base class has appended the group before it could be checked.
            self.param_groups.pop()
            raise
        parameters = self.param_groups[-1]["params"]
        self._store.add_parameters(parameters)
        # Look for kernels here, not in the first step, so that a lack of them is reported early.
        for device in {parameter.device for parameter in parameters}:
            usable_module(device)

    @without_dynamo
    @torch.no_grad()
    def measure_grad_norm(self, *, loss_scale: float = 1.0) -> torch.Tensor:
        """Measure the norm of the gradients; the next ``step`` clips by it.

        The step gives the same bits as one that measures the norm itself. Gradients must not change
        in between; ``step``, ``zero_grad`` and another measurement drop the norm. Collective: one
        small all-reduce for each process group.

        Args:
            loss_scale: Factor on the loss. Only the norm is divided by it: ``step`` unscales by the
                ``grad_scale`` that ``torch.amp.GradScaler`` or the loop sets.

        Returns:
            The norm before clipping, 0-dim fp32, equal on all ranks; :attr:`grad_norm` too.

        Raises:
            ValueError: A parameter is the original that ``fully_shard`` has replaced.
        """
        # Parameters that fully_shard has replaced have no gradients: their norm would be 0.
        self._ready_plans()
        self._measured = total_norm(gradients_of(self.param_groups, self._attribute))
        self.grad_norm = (self._measured.double() * (1.0 / loss_scale)).float()
        return self.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does, and drop their measured norm.

        With ``use_decoupled_grad``, both ``decoupled_grad`` and ``grad`` are cleared.
        """
        self._measured = None
        super().zero_grad(set_to_none)
        if not self.use_decoupled_grad:
            return
        for parameter in (p for group in self.param_groups for p in group["params"]):
            grad = getattr(parameter, "decoupled_grad", None)
            if grad is not None and set_to_none:
                parameter.decoupled_grad = None
            elif grad is not None:
                grad.zero_()

    @without_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient.

        Collective only with ``max_grad_norm``, unless :meth:`measure_grad_norm` was called before,
        and if plain DTensors have addends as gradients, as under tensor parallelism alone.
        Under ``torch.compile`` it runs outside of graphs: its kernels are compiled already.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            What the closure returned; None without one.

        Raises:
            ValueError: A parameter is the original that ``fully_shard`` has replaced, or a group's
                hyperparameter is out of range; nothing is stepped.
            RuntimeError: A gradient is sparse, or not cut like its parameter.
        """
        loss = None
        measured, self._measured = self._measured, None
        if closure is not None:
            measured = None
            with torch.enable_grad():
                loss = closure()
        # The host reads the flag here and may skip the step; a capture leaves it on the device.
        found_inf = self._of_scaler("found_inf")
        if found_inf is not None and not self.capturable and bool(found_inf):
            return loss
        if not self.capturable:
            # Raises if a number is out of range, before anything is stepped.
            for group in self.param_groups:
                AdamHyper.of(group, adam_w_mode=self.adam_w_mode)
        # All gradients are found, and checked, before the first weight changes.
        plans = self._ready_plans()
        found = [plan.find(self._states_to_step(), attribute=self._attribute) for plan in plans]
        self._step_found(found, scale=self._gradient_scale(measured), found_inf=found_inf)
        return loss

    @property
    def steps_quantized_parameters(self) -> bool:
        """Return whether the optimizer steps the main weights of quantized parameters."""
        return not self.capturable and not self._store.has_remainders

    @property
    def skips_on_device(self) -> bool:
        """Return whether :meth:`step_unless` works without a host wait, and skips bit for bit.

        It needs the CUDA kernels on the device of all parameters, and moments that the kernels step
        without further encoding; a capturable step has a ``found_inf`` of its own.
        """
        devices = {p.device for group in self.param_groups for p in group["params"]}
        return (
            not self.capturable
            and set(self._store.dtypes.values()) <= {torch.float32, torch.bfloat16}
            and all(usable_module(device) is not None for device in devices)
        )

    def step_unless(self, found_inf: torch.Tensor) -> None:
        """Queue a step; the device decides whether it changes anything.

        The host reads nothing, so it counts the step in any case. When the caller learns that the
        step was skipped, it must call :meth:`take_back_step` before it steps again or saves states.
        Collective as :meth:`step`.

        Args:
            found_inf: 0-dim fp32; weights and moments change only if it is zero.
        """
        self._device_flag = found_inf
        try:
            self.step()
        finally:
            self._device_flag = None

    def take_back_step(self) -> None:
        """Take back the count of the last :meth:`step_unless`, which the device has skipped."""
        if self._queued is not None:
            self._queued.take_back()
            self._queued = None

    def _states_to_step(self) -> dict[torch.Tensor, Any]:
        """Return :attr:`state` for a step, without dropping work begun ahead of the step."""
        return self.state

    def _step_found(
        self,
        found: list[FoundGrads],
        *,
        scale: float | torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        """Step the parameters found in each group, and mark their compute weights as stale."""
        adam_pass: AdamPass | CapturablePass
        if self.capturable:
            adam_pass = CapturablePass(self._store, scale=scale, found_inf=found_inf, ftz=self.ftz)
        else:
            flag = self._device_flag
            adam_pass = AdamPass(self._store, scale=scale, ftz=self.ftz, found_inf=flag)
            self._queued = None if flag is None else adam_pass
        hypers = [
            GroupHyper.of(g, adam_w_mode=self.adam_w_mode, reads_tensors=not self.capturable)
            for g in self.param_groups
        ]
        for (states, grads), members in members_by_buffer(found, hypers).items():
            adam_pass.step_flat(states, grads, members)
        for hyper, part in zip(hypers, found, strict=True):
            for parameter, grad in part.singles:
                adam_pass.step_one(parameter, grad, self._states_to_step()[parameter], hyper)
        # All groups, with or without gradients on this rank: in ZeRO-1, ZeRO-2 and HFSDP the
        # refresh is a collective, so all ranks must agree on it.
        for plan in self._plans.values():
            for owner in plan.owners():
                owner.mark_stale(is_step=True)
        # After the marks: if a kernel has written the cast too, this removes the mark.
        adam_pass.finish()
        # Also parameters without gradients: ranks combine the maxima of all.
        encode_quantized(p for plan in self._plans.values() for p in plan.others())

    def mark_stepped(self, groups: Iterable[ParameterGroup]) -> None:
        """Do nothing: the step itself marks what it changes, considering the casts it writes."""

    @property
    def _attribute(self) -> str:
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    def _ready_plans(self) -> list[GroupPlan]:
        """Return the plans of all parameter groups; replaces originals by sharded parameters."""
        plans = [self._plan(number) for number in range(len(self.param_groups))]
        if any(plan.has_originals() for plan in plans):
            fully_shard_optimizer(self)
        return plans

    def _plan(self, number: int) -> GroupPlan:
        group = self.param_groups[number]
        plan = self._plans.get(number)
        if plan is None or not plan.is_of(group["params"]):
            names = group.get("param_names", ())
            plan = self._plans[number] = GroupPlan(group["params"], self._store, names)
        return plan

    def _of_scaler(self, name: str) -> torch.Tensor | None:
        """Return an attribute that torch.amp.GradScaler sets on the optimizer during a step."""
        return getattr(self, name, None)

    def _gradient_scale(self, norm: torch.Tensor | None) -> float | torch.Tensor:
        """Return the factor on gradients, on their device; ``norm`` is the measured one, if any."""
        loss_scale = self._of_scaler("grad_scale")
        if loss_scale is None and self.max_grad_norm is None:
            return 1.0
        grads = gradients_of(self.param_groups, self._attribute)
        factor = gradient_factor(grads, norm, self.max_grad_norm, loss_scale)
        self.grad_norm = self.grad_norm if self.max_grad_norm is None else factor.norm
        # fp64 on a CPU, where the host reads it as a number; kernels on a GPU read fp32.
        is_cpu = factor.scale.device.type == "cpu"
        return factor.scale if is_cpu and not self.capturable else factor.scale.float()

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict of torch's AdamW, with moments in fp32 whatever their dtype; local.

        Its groups have the options of torch's AdamW, so that ``torch.distributed.checkpoint`` can
        load the files of either optimizer into the other; ``bias_correction`` is included if it is
        off. With ``store_param_remainders`` the int16 remainders are included, and for quantized
        parameters the main weights, ``main_param``.

        Moments that are not kept in fp32 are copies: after ``dcp.load`` has written to them, pass
        them to :meth:`load_state_dict`.
        """

        def make_portable(_: Optimizer, packed: dict[str, Any]) -> None:
            for index, parameter in packed_parameters(packed, self.param_groups):
                if index in packed["state"]:
                    packed["state"][index] = self._portable_state(parameter)
            for group in packed["param_groups"]:
                own = {"capturable": self.capturable, "decoupled_weight_decay": self.adam_w_mode}
                group |= _TORCH_OPTIONS | own

        # As a hook of this call, since only the base class packs the states; it runs before the
        # users' hooks, which may replace what they see.
        with self.register_state_dict_post_hook(make_portable, prepend=True):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an optimizer of this class or of torch's Adam; local.

        Hooks are called as by any optimizer: pre-hooks see and may replace the whole state dict,
        post-hooks find the states loaded.

        Args:
            state_dict: Its moments are DTensors like the parameters, or plain tensors of this
                rank's rows. DTensors that torch has cut make the call collective.

        Raises:
            ValueError: Its groups, options, states or shapes do not fit this optimizer.
            NotImplementedError: A DTensor has another shape than its parameter.
        """
        packed = state_dict

        # Without states, as torch would copy all of them to the parameters' device at once, also
        # those of the host. As the last pre-hook, this one sees what other hooks have made.
        def set_states_aside(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            nonlocal packed
            packed = with_own_cuts(loaded, self.param_groups)
            check_loaded_states(packed, self.param_groups, self.canonical_names)
            check_loaded_decay(packed["param_groups"], adam_w_mode=self.adam_w_mode)
            return packed | {"state": {}}

        first = self.register_load_state_dict_pre_hook(set_states_aside)
        last = self.register_load_state_dict_post_hook(
            lambda _: self._take_over_all(packed), prepend=True
        )
        with first, last:
            super().load_state_dict(state_dict)

    def _take_over_all(self, packed: dict[str, Any]) -> None:
        """Bring the states of a state dict into the kept form; its groups are loaded already."""
        # Remainders of the old weights; a state dict without remainders means zeros.
        self._store.forget_remainders()
        fill_options(self.param_groups, self.defaults)
        for group in self.param_groups:
            for name in _TORCH_OPTIONS:
                group.pop(name, None)
        for index, parameter in packed_parameters(packed, self.param_groups):
            given = packed["state"].get(index)
            if given is None:
                continue
            # A copy: the caller may still use the state dict, or load it twice.
            self.state[parameter] = {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in given.items()
            }
            self._take_over(parameter)

    def _portable_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        update_main_weight(parameter, state)
        kept = {name: state[name] for name in OF_WEIGHTS if name in state}
        return self._store.full_precision(parameter, state) | kept

    def _take_over(self, parameter: torch.Tensor) -> None:
        """Bring a parameter's loaded states, found in :attr:`state`, into the kept form."""
        self._store.prepare(parameter, self.state[parameter])

    def make_states(self) -> None:
        """Give each trainable parameter without states those of its first step; local.

        Loads that fill states in place need this: they find only existing states.
        """
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.requires_grad:
                self._take_over(parameter)

    def canonical_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states as checkpoints store them: moments in fp32; local.

        A load assigns tensors like these to :attr:`state`, in any dtype.
        """
        return self._store.full_precision(parameter, self.state.get(parameter, {}))

    def canonical_names(self, parameter: torch.Tensor) -> frozenset[str] | None:
        """Return the names of the states that a parameter may have; None means any; local."""
        # A user's subclass may have states of its own.
        is_ours = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
        return _STATE_NAMES if is_ours else None

    def canonical_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's weight as checkpoints store it; local.

        Returns:
            The parameter; with ``store_param_remainders`` an fp32 tensor like it, a copy.
        """
        return self._store.weight(parameter, self.state.get(parameter, {}))

    @torch.no_grad()
    def load_canonical(self, parameter: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Bring a parameter's loaded states into the form in which they are kept; local.

        Args:
            parameter: One of the optimizer's parameters, whose :attr:`state` was replaced.
            weight: Its fp32 weight, a tensor like it, with ``store_param_remainders``.
        """
        if weight is not None:
            self._store.set_weight(parameter, self.state[parameter], weight)
            owner = group_of(parameter)
            if owner is not None:
                # set_weight() writes local tensors; the group does not notice that.
                owner.mark_stale()
        elif self.state.get(parameter):
            self._take_over(parameter)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state's values in fp32, as a tensor like the parameter; a copy; local.

        Args:
            parameter: One of the optimizer's parameters, which has been stepped.
            name: ``exp_avg`` or ``exp_avg_sq``.

        Raises:
            KeyError: The parameter has no such state.
        """
        return self._store.unscaled(parameter, name, self.state[parameter])

    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Set a state from fp32 values, a tensor like the parameter, which are copied; local.

        Raises:
            ValueError: The values are not fp32 or have another shape, or no state has that name.
        """
        check_scaled_state(parameter, name, values)
        self.state[parameter][name] = values.detach().clone()
        self._store.prepare(parameter, self.state[parameter])

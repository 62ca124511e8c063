"""HybridDeviceOptimizer: FusedAdam with main weights and states of chosen units on the host.

A background thread steps the units on the host, while the device steps the others and begins the
next forward; the next use of a unit waits only for that unit's step. This file has the optimizer
that users see and the order of one step. placement.py chooses the units to offload, bucket_step.py
has the step of one unit, and run_ahead.py the work in backward.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from megafsdp.device.background import BackgroundThread
from megafsdp.device.host_copies import CopyLink, link_of
from megafsdp.device.host_memory import can_be_pinned
from megafsdp.device.host_threads import check_host_threads, default_host_threads, stay_near
from megafsdp.device.memory import ByteLedger
from megafsdp.device.streams import DeviceHandle, device_handle
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.adam.plan import FoundGrads, GroupPlan
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.offload.auto_fraction import FractionMeter, agree_on_fraction
from megafsdp.optimizer.offload.bucket import Bucket, BucketListener, left_on_device
from megafsdp.optimizer.offload.bucket_step import (
    BucketStep,
    DeferredScalar,
    HostThreads,
    SegmentRun,
    segment_runs_of,
)
from megafsdp.optimizer.offload.placement import (
    check_fraction,
    groups_of,
    groups_to_offload,
    groups_to_return,
    offload,
)
from megafsdp.optimizer.offload.run_ahead import (
    OffloadCounts,
    Speculate,
    StepsAhead,
    ValidatingStep,
    check_speculate,
)
from megafsdp.optimizer.offload.torch_optimizer import (
    HostOptimizer,
    HostPlan,
    TorchBucketStep,
    check_host_optimizer,
)
from megafsdp.optimizer.states.beginning import make_states
from megafsdp.optimizer.states.flat import FlatStates
from megafsdp.optimizer.states.store import STATES

_LOGGER = logging.getLogger("megafsdp.optimizer")


class HybridDeviceOptimizer(FusedAdam):
    """Adam with part of its main weights and states on the host; it gives the bits of FusedAdam.

    Parameter groups, schedulers, closures, hooks, clipping, loss scalers, state dicts and
    checkpoints work as with :class:`FusedAdam`, whatever the fraction. Offloaded units keep a copy
    of their weights in the compute dtype on the device. What cannot be offloaded stays on the
    device whole: plain tensors, main weights that are not fp32, and parameter groups that are
    shared with another optimizer. With quantized weights the fraction must be 0.

    ``step`` reads ``.grad`` and hyperparameters when it is called. With ``overlap`` it may return
    while gradients are still being copied; only replicated (``no_shard``) parameters are stepped by
    then. Later work of the package waits (``zero_grad``, another backward, the unit's next use,
    ``state``, state dicts, checkpoints), and so do reads of parameters and states through their
    DTensors. Call :meth:`synchronize` before you change gradients by hand, or use plain tensors
    over a parameter's memory (:func:`megafsdp.local_parameters`).

    With ``max_grad_norm`` and ``microbatch(model, is_last=True)``, a loop *hands over* all that a
    step depends on. Copies, and Adam if ``speculate`` allows, then begin in backward; changes made
    before ``step`` are still noticed and respected. If Adam has run ahead, weights and states
    change places with a second slab: plain aliases of their memory, as in an earlier state dict,
    may be read until the backward before the second ``step`` after that.

    Args:
        params: Parameters or parameter groups, in forward order, as ``model.parameters()`` has
            them; the first ones stay on the device.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        offload_fraction: The part of the local elements to keep on the host, rounded to the nearest
            boundary between parameter groups of units. ``"auto"`` begins with all and, in the sixth
            step, brings back what the host is too slow for; that step is collective.
        speculate: If the loop hands over, run Adam before the norm of all gradients is known, as if
            nothing were clipped, into a second slab: 12 more bytes per element. ``"auto"`` does so
            while few steps are clipped.
        overlap: Return from ``step`` while the host is at work.
        max_grad_norm: Clip by the norm of all gradients, as :class:`FusedAdam` does.
        pin_cpu_params: Pin host weights and states; unpinned, they are copied while the calling
            thread waits. Without CUDA nothing is pinned.
        pin_cpu_grads: Pin the host's gradients.
        cpu_optimizer_cls: Another torch optimizer for the host's part; its update of an element
            must depend only on that element. None means the kernel of :class:`FusedAdam`.
        cpu_optimizer_kwargs: Its options. ``lr`` follows the parameter groups; so do ``betas``,
            ``eps`` and ``weight_decay`` unless they are given here.
        link: How bytes are copied; None means the device's default. It is closed with the
            optimizer.
        host_threads: Threads of the host's part; None means this rank's share of the machine's
            cores, or torch's number if the device is a CPU. Results do not depend on it.

    Attributes:
        host_ledger: Bytes of the main weights and states on the host.

    Raises:
        ValueError: A hyperparameter, the fraction or the number of threads is out of range.
        TypeError: ``cpu_optimizer_cls`` is not an optimizer class.
        RuntimeError: Host memory cannot be pinned.
        NotImplementedError: The fraction is not 0 and weights are quantized; or
            ``cpu_optimizer_cls`` is known not to step each element by itself.
    """

    _is_copyable = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        offload_fraction: float | Literal["auto"] = 1.0,
        overlap: bool = True,
        speculate: Speculate = "auto",
        max_grad_norm: float | None = None,
        pin_cpu_params: bool = True,
        pin_cpu_grads: bool = True,
        cpu_optimizer_cls: type[Optimizer] | None = None,
        cpu_optimizer_kwargs: dict[str, Any] | None = None,
        link: CopyLink | None = None,
        host_threads: int | None = None,
    ) -> None:
        check_host_threads(host_threads, where="host_threads of HybridDeviceOptimizer")
        check_fraction(offload_fraction, has_own_states=cpu_optimizer_cls is not None)
        check_speculate(speculate)
        check_host_optimizer(cpu_optimizer_cls, cpu_optimizer_kwargs)
        # Set before the base class's constructor, which reads them through methods of this class.
        self._host: HostOptimizer | None = None
        self._in_flight: list[BucketStep] = []
        self._buckets: dict[FlatStates, Bucket] = {}
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        self.overlap = overlap
        self.host_ledger = ByteLedger()
        fraction = 1.0 if offload_fraction == "auto" else float(offload_fraction)
        groups = groups_to_offload(self._parameters(), fraction)
        # The unit's device, not a parameter's: an offloaded parameter is on the host.
        handle = device_handle(groups[0].device.type if groups else "cpu")
        self._meter = FractionMeter(handle) if offload_fraction == "auto" and groups else None
        self._link = link or link_of(handle)
        self._host_threads = host_threads
        if groups and handle.is_asynchronous:
            self._host_threads = host_threads or default_host_threads(handle.device.type)
            _LOGGER.info("The host steps its part on %d threads.", self._host_threads)
        adopt = functools.partial(_adopt_worker, handle)
        self._worker = BackgroundThread("megafsdp-offload", begin=adopt)
        # Threads refer to jobs, not to the optimizer, so the optimizer can be collected.
        weakref.finalize(self, _close, self._worker, self._link)
        self._ahead = StepsAhead(speculate, self._worker, self._link, self.host_ledger)
        for group in groups:
            is_pinned = pin_cpu_params and can_be_pinned(group.device)
            # Another optimizer allocates its own states, so the slab needs no room for ours.
            num_states = 0 if cpu_optimizer_cls is not None else len(STATES)
            offload(group, self.host_ledger, num_states=num_states, is_pinned=is_pinned)
        if cpu_optimizer_cls is not None and groups:
            # After the move, as it takes views of the slab.
            moved = {id(p.sharded) for group in groups for p in group.parameters}
            own = [[p for p in g["params"] if id(p) in moved] for g in self.param_groups]
            self._host = HostOptimizer(cpu_optimizer_cls, cpu_optimizer_kwargs or {}, own)
        self._make_buckets(groups, pins_params=pin_cpu_params, pins_grads=pin_cpu_grads)
        # With "auto", or a limit that is set later, spares are made by a step that needs them.
        if speculate is True and overlap and self._host is None and max_grad_norm is not None:
            self._ahead.make_spares(b for b in self._buckets.values() if b.group.axes.is_sharded)

    def _make_buckets(
        self, groups: list[ParameterGroup], *, pins_params: bool, pins_grads: bool
    ) -> None:
        for position, group in enumerate(groups):
            is_pinnable = can_be_pinned(group.device)
            # If another optimizer keeps the states, FlatStates only locates parameters.
            is_ours = self._host is None
            states = self._store.flat_states(group) if is_ours else FlatStates(group, {})
            bucket = Bucket(
                states,
                self._link,
                position=position,
                is_grad_pinned=pins_grads and is_pinnable,
                is_param_pinned=pins_params and is_pinnable,
            )
            self._buckets[states] = bucket
            group.gradients.main_grad.listener = BucketListener(self, bucket)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for param_group in self.param_groups for p in param_group["params"]]

    @property
    def steps_quantized_parameters(self) -> bool:
        """Return False: quantized parameters have nothing that can be offloaded."""
        return False

    @property
    def offloaded_fraction(self) -> float:
        """Return the part of the local elements of sharded parameters that is on the host."""
        numels = {g: g.main_weight.flat.numel() for g in groups_of(self._parameters())}
        on_host = sum(numel for group, numel in numels.items() if group.host_memory is not None)
        return on_host / max(sum(numels.values()), 1)

    @property
    def host_threads(self) -> int:
        """Return the number of threads that step the host's part."""
        return self._host_threads or torch.get_num_threads()

    @property
    def host_nbytes(self) -> int:
        """Return the bytes on the host: main weights, states, gradients and casts."""
        return self.host_ledger.total + sum(bucket.nbytes for bucket in self._buckets.values())

    @property
    def pinned_nbytes(self) -> int:
        """Return the bytes of :attr:`host_nbytes` that are locked, each rounded up to 256."""
        slabs = (states.group.host_memory for states in self._buckets)
        of_slabs = sum(slab.arena.pinned_nbytes for slab in slabs if slab is not None)
        of_copies = sum(bucket.pinned_nbytes for bucket in self._buckets.values())
        return of_slabs + of_copies + self._ahead.pinned_nbytes

    @property
    def offload_counts(self) -> OffloadCounts:
        """Return how many bucket steps ran ahead of ``step()``, and how they ended."""
        return self._ahead.counts

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Return the states by parameter; waits for the step in flight."""
        self.synchronize()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state = value

    def _states_to_step(self) -> defaultdict[torch.Tensor, Any]:
        """Return the states for a step, which uses the work begun ahead of it."""
        self._wait_for_steps()
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the groups and states that ``load_state_dict`` has prepared."""
        # The base class updates __dict__, which would not reach the property's setter.
        self.state = state.pop("state", self._state)
        super().__setstate__(state)

    def synchronize(self) -> None:
        """Wait for the step in flight; afterwards all memory may be read and written; local.

        Work begun for the next step is cancelled; that step does it again.

        Raises:
            RuntimeError: The step failed on the host.
        """
        # First, as a step ahead reads memory that the caller may write after the wait.
        self._ahead.cancel_all()
        self._wait_for_steps()

    def _wait_for_steps(self) -> None:
        for step in self._in_flight:
            step.wait_for_reader()
        stepped, self._in_flight = self._in_flight, []
        if self._host is not None and stepped:
            # torch optimizers make their states in the first step: before it there are none.
            self._state.update({p: self._host.shown_state(p) for p in self._on_host()})

    def begin_ahead(self, bucket: Bucket, grads: torch.Tensor) -> None:
        """Begin work for the coming step; called when a bucket's gradients are final.

        Args:
            bucket: The bucket.
            grads: Its main gradient, 1-D.
        """
        # Replicated gradients are plain DTensors: their changes cannot be noticed. Without
        # max_grad_norm, the loop itself may still clip after this.
        if self.max_grad_norm is None or not self.overlap or not bucket.group.axes.is_sharded:
            return
        # The previous step must have written the weights that this one reads. This also cancels
        # work that was begun for gradients which were cleared since.
        bucket.group.wait_for_step()
        if self._host is not None:
            bucket.copy_grads(grads)
            return
        find = functools.partial(self._find_segment_runs, bucket, grads)
        self._ahead.begin(bucket, grads, self.max_grad_norm, self._threads(), find)

    def _find_segment_runs(self, bucket: Bucket, grads: torch.Tensor) -> list[SegmentRun] | None:
        """Return the segments of the coming step of a bucket; None if it omits elements."""
        found: list[SegmentRun] = []
        for number, param_group in enumerate(self.param_groups):
            # Not self.state: reading that cancels the work begun for other buckets.
            indices = self._plan(number).find_all(bucket.states, grads, self._state)
            if indices is None:
                return None
            if indices:
                hyper = AdamHyper.of(param_group, adam_w_mode=self.adam_w_mode)
                counts = bucket.states.upcoming(indices)
                found += segment_runs_of(bucket.states, counts, hyper)
        # Elements that are not stepped would be missing in the second slab.
        if sum(run.numel for run in found) < bucket.states.numel:
            return None
        if self._meter is not None:
            self._meter.note_grads()
        return found

    def cancel_early_step(self, bucket: Bucket) -> None:
        """Cancel work for the coming step of a bucket, before others read or write its memory."""
        self._ahead.cancel(bucket)

    def _threads(self) -> HostThreads:
        rate = self._meter.rate if self._meter is not None else None
        return HostThreads(self.host_threads, self.ftz, rate)

    def _settle_fraction(self, meter: FractionMeter) -> None:
        """Bring back to the device what the host is too slow for; collective."""
        groups = groups_of(self._parameters())
        device = next(iter(self._buckets)).group.device
        fraction = agree_on_fraction(meter, groups, device)
        returning = groups_to_return(self._parameters(), fraction)
        # _states_to_step() has waited for the previous step: the host no longer writes the states.
        for states, bucket in list(self._buckets.items()):
            if states.group in returning:
                self._ahead.cancel(bucket)
                bucket.onload(self._state)
                del self._buckets[states]
        taken = self.offloaded_fraction
        _LOGGER.info("offload_fraction 'auto' has settled on %.3f: %.3f fits", taken, fraction)

    def _on_host(self) -> list[torch.Tensor]:
        """Return the parameters that another optimizer steps on the host."""
        host = self._host
        return [] if host is None else [p for p in self._parameters() if host.steps(p)]

    def canonical_names(self, parameter: torch.Tensor) -> frozenset[str] | None:
        """Return the names of the states that a parameter may have; None means any; local."""
        is_ours = self._host is None or not self._host.steps(parameter)
        return super().canonical_names(parameter) if is_ours else None

    def make_states(self) -> None:
        """Give each trainable parameter without states those of its first step; local.

        Raises:
            NotImplementedError: Another optimizer steps the host's part, and makes states only in
                a step.
        """
        if self._host is None:
            super().make_states()
            return
        # First, as it raises if the other optimizer's class cannot make states.
        make_states(self._host.optimizer)
        for parameter in self._parameters():
            if self._host.steps(parameter):
                self._state[parameter] = self._host.shown_state(parameter)
            elif parameter.requires_grad:
                self._take_over(parameter)

    def _take_over(self, parameter: torch.Tensor) -> None:
        if self._host is None or not self._host.steps(parameter):
            super()._take_over(parameter)
            return
        self._host.take_over(parameter, self.state[parameter])
        self.state[parameter] = self._host.shown_state(parameter)

    def _plan(self, number: int) -> GroupPlan:
        parameters = self.param_groups[number]["params"]
        plan = self._plans.get(number)
        if self._host is None or (plan is not None and plan.is_of(parameters)):
            return super()._plan(number)
        self._plans[number] = HostPlan(parameters, self._store, self._host)
        return self._plans[number]

    @property
    def skips_on_device(self) -> bool:
        """Return False: the host steps its part, so it must know whether to skip."""
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; in place only after their copies to the host."""
        self._ahead.cancel_all()
        # If zeroed in place, the device writes memory that a copy may still be reading.
        for bucket in self._buckets.values():
            if set_to_none:
                bucket.release_read_grads()
            else:
                bucket.release_grads()
        super().zero_grad(set_to_none)

    def _step_found(
        self,
        found: list[FoundGrads],
        *,
        scale: float | torch.Tensor,
        found_inf: torch.Tensor | None,
    ) -> None:
        if self._meter is not None:
            self._meter.note_step_begin()
            if self._meter.is_done:
                self._settle_fraction(self._meter)
                self._meter = None
        # Uploads must wait for queued device work, which may read the weights that they replace.
        self._link.fence()
        late_scale = DeferredScalar(scale, self._link)
        collect = self._collect if self._host is None else self._collect_torch
        steps = collect(found, late_scale)
        self._ahead.take(steps, self.grad_norm, self._of_scaler("grad_scale"))
        # The host first: it works while this thread queues the device's step.
        for step in steps:
            step.start()
            self._worker.submit(step)
            self._in_flight.append(step)
        super()._step_found(left_on_device(found, self._buckets), scale=scale, found_inf=found_inf)
        # After super(), which marks all groups stale.
        for step in steps:
            step.finish()
        if self._meter is not None:
            self._meter.note_step_end()
        # Allocate while the host's steps run, before the next backward.
        self._ahead.make_spares()
        # Last, so that host and device work at the same time even without overlap.
        if not self.overlap:
            self.synchronize()

    def _collect(self, found: list[FoundGrads], scale: DeferredScalar) -> list[BucketStep]:
        """Return the steps of offloaded groups, in forward order."""
        steps: dict[FlatStates, BucketStep] = {}
        for param_group, part in zip(self.param_groups, found, strict=True):
            hyper = AdamHyper.of(param_group, adam_w_mode=self.adam_w_mode)
            for states, grads, indices in part.flat:
                if states not in self._buckets:
                    continue
                if states not in steps:
                    bucket = self._buckets[states]
                    steps[states] = ValidatingStep(
                        bucket,
                        scale,
                        self._threads(),
                        self._meter,
                        counts=self._ahead.counts,
                        states_by_parameter=self._state,
                    )
                for run in segment_runs_of(states, states.advance(indices), hyper):
                    steps[states].add(grads.flat, run)
        return [steps[states] for states in self._buckets if states in steps]

    def _collect_torch(self, found: list[FoundGrads], scale: DeferredScalar) -> list[BucketStep]:
        """Return the steps of another optimizer on the host, in forward order."""
        assert self._host is not None, "it steps the host's part"
        # Copied now: a scheduler may change them before the worker runs the step.
        values = self._host.hyperparameters(self.param_groups)
        steps: list[BucketStep] = []
        given = {id(parameter) for parameter in self._on_host()}
        for states, bucket in self._buckets.items():
            step = TorchBucketStep(
                bucket,
                scale,
                self._threads(),
                host=self._host,
                hyperparameters=values,
            )
            for parameter in (p.sharded for p in states.group.parameters):
                if id(parameter) in given and parameter.grad is not None:
                    step.add_parameter(parameter, parameter.grad)
            if step.segment_runs:
                steps.append(step)
        return steps


def _adopt_worker(handle: DeviceHandle) -> None:
    """Prepare the worker's thread; it starts the kernels' threads, which inherit its CPU cores."""
    handle.adopt_thread()
    stay_near(handle.device)


def _close(worker: BackgroundThread, link: CopyLink) -> None:
    """End the worker first, which gives work to the link's threads, then the link."""
    worker.close()
    link.close()

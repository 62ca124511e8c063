"""HybridDeviceOptimizer: FusedAdam with main weights and states of chosen units on the host.

Units on the host are stepped there by a background thread, while the device steps the others and
begins the next forward; each unit's next use waits for its own step only. This file is the
optimizer as users see it and the order of one step. Which units are offloaded is chosen in
placement.py, one unit's step is in bucket_step.py, work in backward in run_ahead.py.
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
    """Adam whose main weights and states live partly on the host, with the bits of FusedAdam.

    Parameter groups, schedulers, closures, hooks, clipping, loss scalers, state dicts and
    checkpoints are those of :class:`FusedAdam` whatever the fraction. Offloaded units keep a copy
    of their weights in the compute dtype on the device. What cannot be offloaded stays there whole:
    plain tensors, main weights that are not fp32, and parameter groups that are shared with another
    optimizer. Over quantized weights the fraction is 0.

    ``step`` reads ``.grad`` and hyperparameters as they are when it is called. With ``overlap`` it
    returns while gradients are still being copied, and replicated (``no_shard``) parameters alone
    are stepped. What the package does next waits (``zero_grad``, another backward, the unit's next
    use, ``state``, state dicts, checkpoints), and so does what reads parameters and states as the
    DTensors they are. A change of gradients by hand, and plain tensors over a parameter's memory
    (:func:`megafsdp.local_parameters`), call :meth:`synchronize` first.

    A loop *hands over* what a step depends on with ``max_grad_norm`` and
    ``microbatch(model, is_last=True)``. Copies, and Adam if ``speculate`` allows, then begin in
    backward; what is changed before ``step`` all the same is noticed and counts. Where Adam has run
    ahead, weights and states change places with a second slab: plain aliases of their memory, as an
    earlier state dict has, may be read until the backward before the second ``step`` from there.

    Args:
        params: Parameters or parameter groups, in forward order, as ``model.parameters()`` has
            them; those at the front stay on the device.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        offload_fraction: The part of the local elements to keep on the host, brought to the nearest
            boundary between parameter groups of units. ``"auto"`` begins with all and, in the sixth
            step, brings back what the host proved too slow for; that step is collective.
        speculate: Where the loop hands over, run Adam before the norm of all gradients is
            known, as if nothing were clipped, into a second slab: 12 bytes an element more.
            ``"auto"`` does while few steps are clipped.
        overlap: Return from ``step`` while the host is at work.
        max_grad_norm: Clip by the norm of all gradients, as :class:`FusedAdam` does.
        pin_cpu_params: Pin host weights and states, which otherwise are copied while the calling
            thread waits. Without CUDA nothing is pinned.
        pin_cpu_grads: Pin the host's gradients.
        cpu_optimizer_cls: Another torch optimizer for the host's part, whose update of an element
            depends on that element alone; None for the kernel of :class:`FusedAdam`.
        cpu_optimizer_kwargs: Its options. ``lr`` follows the parameter groups; ``betas``, ``eps``
            and ``weight_decay`` too unless they are given here.
        link: How bytes move; None for the device's own way. It is closed with the optimizer.
        host_threads: Threads of the host's part; None for this rank's share of the machine's cores,
            or, where the device is a CPU, for torch's number. No bit depends on it.

    Attributes:
        host_ledger: Bytes of the main weights and states on the host.

    Raises:
        ValueError: A hyperparameter, the fraction or the number of threads has no meaning.
        TypeError: ``cpu_optimizer_cls`` is no class of optimizers.
        RuntimeError: Memory of the host cannot be pinned.
        NotImplementedError: The fraction is not 0, and weights are quantized; or
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
        # Before the base class, whose constructor reads them through methods of this class.
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
        # The unit's device, not a parameter's: that of an offloaded one is the host.
        handle = device_handle(groups[0].device.type if groups else "cpu")
        self._meter = FractionMeter(handle) if offload_fraction == "auto" and groups else None
        self._link = link or link_of(handle)
        self._host_threads = host_threads
        if groups and handle.is_asynchronous:
            self._host_threads = host_threads or default_host_threads(handle.device.type)
            _LOGGER.info("The host steps its part on %d threads.", self._host_threads)
        adopt = functools.partial(_adopt_worker, handle)
        self._worker = BackgroundThread("megafsdp-offload", begin=adopt)
        # Threads refer to jobs, not to the optimizer, so they do not keep it from being collected.
        weakref.finalize(self, _close, self._worker, self._link)
        self._ahead = StepsAhead(speculate, self._worker, self._link, self.host_ledger)
        for group in groups:
            is_pinned = pin_cpu_params and can_be_pinned(group.device)
            # Another optimizer allocates its own states; room for ours would stay unused.
            num_states = 0 if cpu_optimizer_cls is not None else len(STATES)
            offload(group, self.host_ledger, num_states=num_states, is_pinned=is_pinned)
        if cpu_optimizer_cls is not None and groups:
            # After the move: it takes views of the slab.
            moved = {id(p.sharded) for group in groups for p in group.parameters}
            own = [[p for p in g["params"] if id(p) in moved] for g in self.param_groups]
            self._host = HostOptimizer(cpu_optimizer_cls, cpu_optimizer_kwargs or {}, own)
        self._make_buckets(groups, pins_params=pin_cpu_params, pins_grads=pin_cpu_grads)
        # "auto" and limits that are set later wait for a step that would have guessed.
        if speculate is True and overlap and self._host is None and max_grad_norm is not None:
            self._ahead.make_spares(b for b in self._buckets.values() if b.group.axes.is_sharded)

    def _make_buckets(
        self, groups: list[ParameterGroup], *, pins_params: bool, pins_grads: bool
    ) -> None:
        for position, group in enumerate(groups):
            is_pinnable = can_be_pinned(group.device)
            # Another optimizer keeps its own states: FlatStates then only locates parameters.
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
        """Return False: their main weights stay beside them, and so may all states."""
        return False

    @property
    def offloaded_fraction(self) -> float:
        """Return the part of the local elements of sharded parameters that is on the host."""
        numels = {g: g.main_weight.flat.numel() for g in groups_of(self._parameters())}
        on_host = sum(numel for group, numel in numels.items() if group.host_memory is not None)
        return on_host / max(sum(numels.values()), 1)

    @property
    def host_threads(self) -> int:
        """Return how many threads step the host's part."""
        return self._host_threads or torch.get_num_threads()

    @property
    def host_nbytes(self) -> int:
        """Return the bytes on the host: main weights, states, gradients, what is copied back."""
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
        """Return how many steps of buckets ran ahead of ``step()``, and what became of them."""
        return self._ahead.counts

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Return the states by parameter; waits for the step under way."""
        self.synchronize()
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state = value

    def _states_to_step(self) -> defaultdict[torch.Tensor, Any]:
        """Return the states for a step, which takes what was begun ahead of it."""
        self._wait_for_steps()
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the groups and states that ``load_state_dict`` has prepared."""
        # The base class updates __dict__, which would not reach the property's setter.
        self.state = state.pop("state", self._state)
        super().__setstate__(state)

    def synchronize(self) -> None:
        """Wait for the step under way; afterwards all memory may be read and written; local.

        Work begun for the next step is dropped; that step does it.

        Raises:
            RuntimeError: The step failed on the host.
        """
        # First: a step ahead reads what the caller may write after the wait.
        self._ahead.cancel_all()
        self._wait_for_steps()

    def _wait_for_steps(self) -> None:
        for step in self._in_flight:
            step.wait_for_reader()
        stepped, self._in_flight = self._in_flight, []
        if self._host is not None and stepped:
            # torch optimizers make their states in the first step: none can be shown before.
            self._state.update({p: self._host.shown_state(p) for p in self._on_host()})

    def begin_ahead(self, bucket: Bucket, grads: torch.Tensor) -> None:
        """Begin what can be done for the coming step; called when a bucket's gradients are there.

        Args:
            bucket: The bucket.
            grads: Its main gradient, 1-D.
        """
        # Replicated gradients are plain DTensors, whose changes cannot be noticed. Without
        # max_grad_norm the loop may clip after this.
        if self.max_grad_norm is None or not self.overlap or not bucket.group.axes.is_sharded:
            return
        # The previous step must have written the weights that this one reads.
        bucket.group.wait_for_step()
        if self._host is not None:
            bucket.copy_grads(grads)
            return
        find = functools.partial(self._find_segment_runs, bucket, grads)
        self._ahead.begin(bucket, grads, self.max_grad_norm, self._threads(), find)

    def _find_segment_runs(self, bucket: Bucket, grads: torch.Tensor) -> list[SegmentRun] | None:
        """Return what the coming step will do to a bucket; None if it leaves elements out."""
        found: list[SegmentRun] = []
        for number, param_group in enumerate(self.param_groups):
            # Not self.state: reading that cancels what was begun for other buckets.
            indices = self._plan(number).find_all(bucket.states, grads, self._state)
            if indices is None:
                return None
            if indices:
                hyper = AdamHyper.of(param_group, adam_w_mode=self.adam_w_mode)
                counts = bucket.states.upcoming(indices)
                found += segment_runs_of(bucket.states, counts, hyper)
        # What is not stepped would be missing in the second slab.
        if sum(run.numel for run in found) < bucket.states.numel:
            return None
        if self._meter is not None:
            self._meter.note_grads()
        return found

    def cancel_early_step(self, bucket: Bucket) -> None:
        """Drop what was begun for the coming step of a bucket, which others will read or write."""
        self._ahead.cancel(bucket)

    def _threads(self) -> HostThreads:
        rate = self._meter.rate if self._meter is not None else None
        return HostThreads(self.host_threads, self.ftz, rate)

    def _settle_fraction(self, meter: FractionMeter) -> None:
        """Bring what the host is too slow for back to the device; collective."""
        groups = groups_of(self._parameters())
        device = next(iter(self._buckets)).group.device
        fraction = agree_on_fraction(meter, groups, device)
        returning = groups_to_return(self._parameters(), fraction)
        # The previous step was waited for in _states_to_step(): the host writes nothing shown.
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
        """Return the names of the states that a parameter may have; None for any; local."""
        is_ours = self._host is None or not self._host.steps(parameter)
        return super().canonical_names(parameter) if is_ours else None

    def make_states(self) -> None:
        """Give each trainable parameter the states with which its first step begins; local.

        Raises:
            NotImplementedError: Another optimizer steps the host's part, and makes states only in
                a step.
        """
        if self._host is None:
            super().make_states()
            return
        # Its class decides: what it cannot do raises before any state is made.
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
        """Return False: the host steps its part, so it must know."""
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; in place only when the host has read them."""
        self._ahead.cancel_all()
        # In place, the device writes memory that the host may still be reading.
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
        # Host first: it works while this thread queues the step of the device.
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
        # While the host's steps run, and before the next backward.
        self._ahead.make_spares()
        # Here, not before the device's part: both work at the same time even so.
        if not self.overlap:
            self.synchronize()

    def _collect(self, found: list[FoundGrads], scale: DeferredScalar) -> list[BucketStep]:
        """Return the steps of offloaded groups, in the order in which forward needs them."""
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
        """Return the steps of another optimizer on the host, in the same order."""
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
    """Prepare the worker's thread; it starts those of the kernels, which run where it does."""
    handle.adopt_thread()
    stay_near(handle.device)


def _close(worker: BackgroundThread, link: CopyLink) -> None:
    """End the worker, which gives work to the threads of the link, and then those."""
    worker.close()
    link.close()

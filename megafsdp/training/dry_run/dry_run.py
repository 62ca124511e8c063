"""Say in seconds and in one process what a run would cost each rank: layouts, memory, collectives.

A dry run builds the configured model on the meta device and runs steps of the real engine on it
(:mod:`megafsdp.fsdp.estimate.footprint`), as one rank of a group whose other ranks do not exist.
It reads no data and allocates nothing of the model's size; activations are not estimated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megafsdp.device.host_threads import default_host_threads
from megafsdp.device.memory import Category
from megafsdp.errors import ConfigError, expected
from megafsdp.fsdp.estimate.footprint import Footprint, StepPlan, footprint_of
from megafsdp.fsdp.estimate.meta_engine import MetaEngine, PlannedGroup, PlannedUnit, fake_ranks
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models.build import build_model, unit_classes
from megafsdp.models.config import ModelConfig
from megafsdp.models.flops import num_idle_parameters
from megafsdp.optimizer.states.formats import PLAIN_DTYPES
from megafsdp.parallel import parallelize
from megafsdp.training.config.sections import Config
from megafsdp.training.config.validate import validate_given, validate_schedule
from megafsdp.training.dry_run.bytes import (
    MOST_OF_AUTO,
    HostFootprint,
    groups_to_offload,
    host_footprint,
    optimizer_order,
    state_nbytes,
)
from megafsdp.training.process.world import launch_number, uses_cuda

_OPTION = "--dry-run"
_JSON_OPTION, _HTML_OPTION = "--json", "--html"
# In fp64: the loss, the number of ranks, requests to stop, and ranks with gradients not finite.
_LOSS_NBYTES = 32
_FOUND_INF_NBYTES = 4  # One fp32 number.
_LOAD_NBYTES = 8  # One fp64 number for each expert of each layer.


@dataclass(frozen=True, slots=True)
class DryRunOptions:
    """What the command line says of a dry run.

    Attributes:
        world_size: Number of ranks; None takes it from the configuration or the environment.
        as_json: Whether to print JSON in place of a table.
        html_path: File to draw it in; None for none.
    """

    world_size: int | None
    as_json: bool
    html_path: str | None = None


@dataclass(frozen=True, slots=True)
class DistinctUnit:
    """Units that have the same groups.

    Attributes:
        members: Their FQNs, in order.
        groups: Their groups.
    """

    members: tuple[str, ...]
    groups: tuple[PlannedGroup, ...]

    @property
    def name(self) -> str:
        """Return the FQN of the first."""
        return self.members[0]

    @property
    def count(self) -> int:
        """Return how many there are."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """What a run would cost.

    Attributes:
        config: The run.
        dims: Degrees of parallelism.
        num_parameters: Elements of all parameters, tied ones once.
        num_microbatches: Microbatches of a step on each rank.
        units: The distinct units, the root first.
        footprint: Bytes and collectives of a step on each rank; bytes of the device.
        host: Bytes of the host for each rank.
        host_threads: Threads that step a rank's part on the host; from the cores of this machine
            if the configuration does not say it.
        duration_s: How long the dry run took.
        kept: Weights that a recipe leaves unquantized, a line for each reason.
    """

    config: Config
    dims: ParallelDims
    num_parameters: int
    num_microbatches: int
    units: tuple[DistinctUnit, ...]
    footprint: Footprint
    host: HostFootprint
    host_threads: int
    duration_s: float
    kept: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.dims.data_size * self.dims.cp * self.dims.tp

    @property
    def padding_numel(self) -> int:
        """Return the padding elements of all layouts, on all ranks of tp and ep."""
        return self._sum(lambda group: group.layout.padding_numel)

    def _sum(self, numel_of: Callable[[PlannedGroup], int]) -> int:
        """Sum over the groups of all units, each once for each of its model parts."""
        dims = self.dims
        return sum(
            unit.count * (dims.ep if group.is_expert else dims.tp) * numel_of(group)
            for unit in self.units
            for group in unit.groups
        )

    def to_json(self) -> str:
        """Return everything as JSON, sizes in elements and bytes."""
        dims, footprint, parallel = self.dims, self.footprint, self.config.parallel
        content = {
            "model": self.config.model.name,
            "num_parameters": self.num_parameters,
            "num_ranks": self.num_ranks,
            "dp_outer_size": dims.dp_outer,
            "dp_shard_size": dims.dp_shard,
            "cp_size": dims.cp,
            "tp_size": dims.tp,
            "ep_size": dims.ep,
            "strategy": parallel.strategy,
            "outer_strategy": parallel.outer_strategy,
            "num_microbatches": self.num_microbatches,
            "units": [
                {
                    "name": unit.name,
                    "count": unit.count,
                    "groups": [_group_as_dict(group, parallel.strategy) for group in unit.groups],
                }
                for unit in self.units
            ],
            "padding_numel": self.padding_numel,
            "unquantized": list(self.kept),
            "memory": {
                category.value: {
                    "resting_nbytes": footprint.resting[category],
                    "peak_nbytes": footprint.peak[category],
                }
                for category in Category
            },
            "resting_total_nbytes": sum(footprint.resting.values()),
            "peak_total_nbytes": footprint.peak_total,
            "host_memory": self.host.rows(),
            "host_total_nbytes": self.host.total,
            "host_pinned_nbytes": self.host.pinned,
            "host_threads": self.host_threads,
            "collectives": [
                {"axis": axis, "kind": kind, "calls": item.calls, "nbytes": item.nbytes}
                for (axis, kind), item in footprint.traffic.items()
            ],
            "duration_s": round(self.duration_s, 3),
        }
        return json.dumps(content, indent=2)

    def describe(self) -> str:
        """Return everything as a table for people."""
        return "\n".join(
            [
                *self.head_lines(),
                "",
                *self._unit_lines(),
                "",
                *self._memory_lines(),
                "",
                *self._host_lines(),
                *self._traffic_lines(),
                "",
                f"took {self.duration_s:.2f} s; {self.left_out} not counted",
            ]
        )

    @property
    def left_out(self) -> str:
        """Return what takes memory or time and is not counted."""
        exchange = ", Muon's all-to-alls" if self.config.optimizer.kind == "muon" else ""
        has_parts = max(self.dims.cp, self.dims.tp, self.dims.ep) > 1
        parts = ", collectives of layers that ranks share out" if has_parts else ""
        return f"activations{parts}{exchange} and buffers of the backend"

    def head_lines(self) -> list[str]:
        """Return what is trained on what, and with which batch: two lines."""
        dims, parallel = self.dims, self.config.parallel
        precision, train = self.config.precision, self.config.train
        outer = f", outer {parallel.outer_strategy}" if dims.dp_outer > 1 else ""
        shared = f" x {dims.cp:,} context-parallel" if dims.cp > 1 else ""
        shared += f" x {dims.tp:,} tensor-parallel" if dims.tp > 1 else ""
        shared += f", {dims.ep:,} to the experts of a layer" if dims.ep > 1 else ""
        num_idle = num_idle_parameters(self.config.model.resolve())
        active = f" ({self.num_parameters - num_idle:,} active)" if num_idle else ""
        return [
            f"{self.config.model.name}: {self.num_parameters:,} parameters{active} on "
            f"{_count(self.num_ranks, 'rank')} ({dims.dp_outer:,} x {dims.dp_shard:,}{shared}), "
            f"{parallel.strategy}{outer}, compute in {precision.param_dtype}",
            f"{train.global_batch_size:,} samples a step ({self.num_microbatches:,} x "
            f"{self.config.micro_batch_size(dims.data_size):,} a rank), "
            f"{self.config.optimizer.kind}, prefetch {parallel.prefetch}",
        ]

    def _unit_lines(self) -> list[str]:
        lines = ["units"]
        for unit in self.units:
            lines.append(f"  {unit.count:,} x {unit.name}")
            lines += [f"    {_describe_group(group)}" for group in unit.groups]
        # A share of these layouts, not of the model: each rank of tp has a copy of the norms.
        share = _percent(self.padding_numel, self._sum(_numel))
        lines.append(f"  padding of all units: {self.padding_numel:,} elements ({share})")
        return lines + [f"  unquantized, {line}" for line in self.kept]

    def _memory_lines(self) -> list[str]:
        resting, peak = self.footprint.resting, self.footprint.peak
        rows = [(c.value, resting[c], peak[c]) for c in Category if resting[c] or peak[c]]
        rows.append(("together", sum(resting.values()), self.footprint.peak_total))
        lines = [f"{'memory of a rank':<24}{'between steps':>16}{'peak':>16}"]
        return lines + [
            f"  {n:<22}{_size(at_rest):>16}{_size(top):>16}" for n, at_rest, top in rows
        ]

    def _host_lines(self) -> list[str]:
        fraction = self.config.optimizer.offload_fraction
        if not fraction:
            return []
        rows = [(name, nbytes) for name, nbytes in self.host.rows().items() if nbytes]
        lines = [f"{'host memory of a rank':<24}{'at most':>16}"]
        rows.append(("together", self.host.total))
        if self.host.pinned:
            rows.append(("pinned of these", self.host.pinned))
        lines += [f"  {name:<22}{_size(nbytes):>16}" for name, nbytes in rows]
        if fraction == "auto":
            lines.append(f"  offload_fraction auto is counted as {MOST_OF_AUTO:g}, its most")
        lines.append(f"  stepped by {_count(self.host_threads, 'thread')}")
        return [*lines, ""]

    def _traffic_lines(self) -> list[str]:
        lines = [f"{'collectives of a step':<40}{'calls':>16}{'full size':>16}"]
        for (axis, kind), item in self.footprint.traffic.items():
            what = f"{kind} over {axis}"
            lines.append(f"  {what:<38}{item.calls:>16,}{_size(item.nbytes):>16}")
        return lines


def split_options(words: Sequence[str]) -> tuple[DryRunOptions | None, list[str]]:
    """Take ``--dry-run [RANKS]``, its ``--json`` and its ``--html FILE`` out of a command line.

    Args:
        words: The words after ``megafsdp train``.

    Returns:
        What they say, None without ``--dry-run``, and the other words.

    Raises:
        ConfigError: The number of ranks is not a number, the file has no name, or there is another
            option of a dry run without ``--dry-run``.
    """
    is_found, ranks, rest = _take(words, _OPTION)
    if not is_found:
        _require_no_options(rest)
        return None, rest
    if ranks is not None and not (ranks.isdecimal() and int(ranks)):
        raise ConfigError(
            expected(
                "a number of ranks",
                repr(ranks),
                where=f"the option {_OPTION}",
                hint=f"Write it like {_OPTION} 1024, or leave it out",
            )
        )
    is_drawn, html_path, rest = _take(rest, _HTML_OPTION)
    if is_drawn and not html_path:
        raise ConfigError(
            expected(
                "the name of a file",
                "none",
                where=f"the option {_HTML_OPTION}",
                hint=f"Write it like {_HTML_OPTION} dry-run.html",
            )
        )
    world_size = None if ranks is None else int(ranks)
    others = [word for word in rest if word != _JSON_OPTION]
    return DryRunOptions(world_size, _JSON_OPTION in rest, html_path), others


def _require_no_options(words: Sequence[str]) -> None:
    for option in (_JSON_OPTION, _HTML_OPTION):
        if _take(words, option)[0]:
            raise ConfigError(
                expected(
                    f"{_OPTION} beside {option}",
                    "none",
                    where="the command line",
                    hint=f"Add {_OPTION}, or leave {option} out; megafsdp report draws a run",
                )
            )


def _take(words: Sequence[str], option: str) -> tuple[bool, str | None, list[str]]:
    """Return whether an option is there, its last value if it has one, and the other words."""
    rest: list[str] = []
    values: list[str | None] = []
    is_value_next = False
    for word in words:
        name, equals, value = word.partition("=")
        if name == option:
            values.append(value if equals else None)
        elif is_value_next and not word.startswith("-"):
            values[-1] = word
        else:
            rest.append(word)
        is_value_next = word == option
    return bool(values), values[-1] if values else None, rest


def dry_run(config: Config, world_size: int | None = None) -> DryRunReport:
    """Say what a configured run would cost on a number of ranks; local.

    Args:
        config: The run; data and length may be missing.
        world_size: Number of ranks; None multiplies the configured degrees, or takes torchrun's
            number where ``parallel.dp_shard`` is -1.

    Raises:
        ConfigError: The configuration cannot be run on so many ranks, as far as that shows without
            data and checkpoints.
        NotImplementedError: All parameters are on the host.
    """
    start_s = time.perf_counter()
    if config.parallel.offload_parameters:
        raise NotImplementedError(
            expected(
                "all parameters on the device",
                "parallel.offload_parameters",
                where="a dry run",
                hint="Leave it out: main weights, gradients and states then live on the host",
            )
        )
    size = _world_size(config) if world_size is None else world_size
    validate_given(config, world_size=size)
    if config.num_samples and not config.schedule.from_checkpoint:
        validate_schedule(config, num_samples=config.num_samples)
    dims, parallel = config.parallel.dims().resolve(size), config.parallel
    model_config = config.model.resolve()
    with torch.device("meta"):
        model = build_model(model_config)
    fraction = config.optimizer.offload_fraction
    order = optimizer_order(model, config.optimizer, config.muon) if fraction else {}
    share = config.train.global_batch_size // dims.data_size
    num_microbatches = share // config.micro_batch_size(dims.data_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # Plan for a GPU unless the run is on a CPU, even if this machine has no GPU.
    device_type = "cpu" if config.run.device == "cpu" else "cuda"
    with fake_ranks(size):
        meshes = dims.build("meta")
        engine = MetaEngine(
            parallelize(model, meshes),
            unit_classes(model_config),
            meshes,
            sums_in_library=uses_cuda(config.run.device),
            strategy=parallel.strategy,
            outer_strategy=parallel.outer_strategy if dims.dp_outer > 1 else "no_shard",
            mp_policy=config.precision.policy(),
            prefetch=parallel.prefetch,
            reshard_after_forward=parallel.reshard_after_forward,
            # A run on a CPU ignores it.
            nccl_user_buffers=parallel.nccl_user_buffers and device_type == "cuda",
        )
        if fraction:
            most = MOST_OF_AUTO if fraction == "auto" else fraction
            engine.offload(groups_to_offload(engine.plan(), order, most))
        units, kept = engine.plan(), engine.describe_kept()
        step = StepPlan(
            num_microbatches=num_microbatches,
            state_nbytes=state_nbytes(units, config.optimizer, config.muon),
            casts_from=_cast_by_step(config),
            loop_all_reduces=_loop_all_reduces(config, model_config, num_microbatches),
        )
        footprint = footprint_of(engine, step)
    host = host_footprint(units, config.optimizer, is_pinned=device_type == "cuda")
    host_threads = config.optimizer.host_threads or default_host_threads(device_type)
    duration_s = time.perf_counter() - start_s
    return DryRunReport(
        config,
        dims,
        num_parameters,
        num_microbatches,
        _distinct(units),
        footprint,
        host,
        host_threads,
        duration_s,
        tuple(kept),
    )


def _world_size(config: Config) -> int:
    parallel = config.parallel
    others = parallel.dp_outer * parallel.cp * parallel.tp
    if parallel.dp_shard > 0:
        return parallel.dp_shard * others
    return launch_number("WORLD_SIZE", others)


def _cast_by_step(config: Config) -> torch.dtype | None:
    """Return the dtype of main weights in flat buffers if the step casts them, else None."""
    section = config.optimizer
    # A step that a GPU may skip writes no casts; one whose part the host steps is not skipped so.
    is_skipped_on_device = uses_cuda(config.run.device) and not section.offload_fraction
    is_plain = section.is_fused_adam and set(section.state_dtypes) <= set(PLAIN_DTYPES)
    # Nor are bf16 weights with remainders cast.
    return torch.float32 if is_plain and not is_skipped_on_device else None


def _loop_all_reduces(config: Config, model: ModelConfig, num_microbatches: int) -> tuple[int, ...]:
    found = [_LOSS_NBYTES]
    if config.precision.param_dtype == "fp16" and not config.optimizer.is_fused_adam:
        found.append(_FOUND_INF_NBYTES)
    if model.has_experts and model.router_balance == "bias":
        found.append(_LOAD_NBYTES * model.num_layers * model.num_experts)
    if model.has_experts and model.router_balance == "aux_loss":
        # Backward sums the loads of each layer and microbatch over all ranks.
        found += [_LOAD_NBYTES * model.num_experts] * model.num_layers * num_microbatches
    return tuple(found)


def _distinct(units: Sequence[PlannedUnit]) -> tuple[DistinctUnit, ...]:
    members: dict[tuple[PlannedGroup, ...], list[str]] = {}
    for unit in units:
        members.setdefault(unit.groups, []).append(unit.name)
    return tuple(DistinctUnit(tuple(names), groups) for groups, names in members.items())


def _numel(group: PlannedGroup) -> int:
    return sum(slot.spec.numel for slot in group.layout.slots)


def _group_as_dict(group: PlannedGroup, strategy: str) -> dict[str, object]:
    layout, dtypes = group.layout, group.dtypes
    return {
        "num_tensors": len(layout.slots),
        "numel": _numel(group),
        "num_shards": layout.num_shards,
        "shard_numel": layout.shard_numel,
        "sub_buffer_shard_numels": [sub.shard_numel for sub in layout.sub_buffers],
        "padding_numel": layout.padding_numel,
        "strategy": strategy if group.is_sharded else "no_shard",
        "is_trainable": group.is_trainable,
        "is_expert": group.is_expert,
        "is_offloaded": group.is_offloaded,
        "recipe": group.recipe,
        "compute_dtype": _name(dtypes.compute),
        "main_dtype": _name(dtypes.main),
        "grad_dtype": _name(dtypes.grad),
        "reduce_dtype": _name(dtypes.reduce),
    }


def _describe_group(group: PlannedGroup) -> str:
    layout = group.layout
    parts = " + ".join(f"{sub.shard_numel:,}" for sub in layout.sub_buffers)
    is_split = len(layout.sub_buffers) > 1
    pieces = f" = {parts} in {len(layout.sub_buffers)} sub-buffers" if is_split else ""
    where = ", of experts" if group.is_expert else ""
    where += ", on the host" if group.is_offloaded else ""
    padding = f"{layout.padding_numel:,} ({_percent(layout.padding_numel, _numel(group))})"
    return (
        f"{_count(len(layout.slots), 'tensor')}, {_count(_numel(group), 'element')}, "
        f"{group.recipe or _name(group.dtypes.compute)}: {_count(layout.num_shards, 'shard')} of "
        f"{layout.shard_numel:,}{pieces}, padding {padding}{where}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f} %"


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes} B"

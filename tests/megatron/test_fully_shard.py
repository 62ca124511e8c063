"""Megatron-FSDP's keywords mean what those of megafsdp mean, and are checked against the mesh."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import megafsdp
from megafsdp import full_state_dict, megatron
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import FusedParts, annotate, annotation_of
from tests.fsdp.toy import Block, Net, assert_same_grads, batches, mine
from tests.ranks import Ranks

Keywords = dict[str, Any]
# What the error of fp8_param_gather says to give.
IN_8_BITS = megafsdp.MixedPrecisionPolicy(torch.bfloat16, recipe="fp8_block")
OWN_DTYPE = megatron.MixedPrecisionPolicy(None, torch.bfloat16, torch.float32)


def _facts(model: nn.Module) -> list[object]:
    """Return all that the keywords decide about the units of a model."""
    return [
        (
            unit.name,
            unit.policy,
            unit.options,
            [
                (
                    group.axes.mesh,
                    group.axes.num_shards,
                    group.axes.is_divided,
                    group.axes.is_expert,
                    group.gradients.scale,
                    group.gradients.defers,
                    bool(group.compute_weight.gathered_storages),
                    [(p.sharded.dtype, tuple(p.sharded.shape)) for p in group.parameters],
                )
                for group in unit.groups
            ],
        )
        for unit in units_below([model]).values()
    ]


def _net(expert_mesh: DeviceMesh | None = None) -> Net:
    """Return a net with experts' rows, cut over the axis "ep" of a mesh that has one."""
    net = Net()
    if expert_mesh is not None and "ep" in expert_mesh.mesh_dim_names:
        rows = net.blocks[0].up.weight.detach()[:30]
        part = DTensor.from_local(rows, expert_mesh["ep"], [Shard(0)])
        net.blocks[0].up.weight = nn.Parameter(part)
    return net


def _cases(mesh: DeviceMesh) -> list[tuple[Keywords, Keywords]]:
    """Return keywords of Megatron-FSDP, and what they are here."""
    inner, both = mesh["inner"], mesh["outer", "inner"]
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    hybrid = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    strategies = [
        ({"zero_dp_strategy": value}, {"strategy": name})
        for stage, name in enumerate(names)
        for value in (stage, name, megatron.ShardingStrategy(stage))
    ]
    policies = [
        (megatron.MixedPrecisionPolicy(), megafsdp.MixedPrecisionPolicy()),
        (
            megatron.MixedPrecisionPolicy(torch.float64, torch.float32, torch.bfloat16),
            megafsdp.MixedPrecisionPolicy(
                reduce_dtype=torch.bfloat16,
                main_params_dtype=torch.float64,
                main_grads_dtype=torch.float32,
            ),
        ),
        (
            OWN_DTYPE,
            megafsdp.MixedPrecisionPolicy(
                reduce_dtype=torch.float32,
                main_params_dtype=torch.float32,
                main_grads_dtype=torch.bfloat16,
            ),
        ),
        (TorchMixedPrecisionPolicy(torch.bfloat16), TorchMixedPrecisionPolicy(torch.bfloat16)),
        (IN_8_BITS, IN_8_BITS),
    ]
    return [
        ({}, {}),
        *strategies,
        *[({"mixed_precision_policy": a}, {"mp_policy": b}) for a, b in policies],
        ({"device_mesh": inner}, {"mesh": inner}),
        ({"device_mesh": mesh, "dp_shard_dim": "inner"}, {"mesh": inner}),
        ({"dp_shard_dim": "fsdp", "tp_dim": "tp"}, {}),
        (hybrid, {"mesh": both}),
        (hybrid | {"outer_dp_sharding_strategy": 0}, {"mesh": both}),
        (
            hybrid | {"outer_dp_sharding_strategy": 1} | {"hybrid_fsdp_group": dist.group.WORLD},
            {"mesh": both, "outer_strategy": "optim"},
        ),
        (
            hybrid | {"expt_device_mesh": mesh, "hybrid_fsdp_expt_group": dist.group.WORLD},
            {"mesh": both, "expert_mesh": both},
        ),
        (
            {"device_mesh": mesh, "dp_shard_dim": "inner", "expt_device_mesh": mesh["inner"]},
            {"mesh": inner, "expert_mesh": inner},
        ),
        (
            {"device_mesh": whole, "dp_shard_dim": "dp", "expt_device_mesh": experts},
            {"mesh": whole, "expert_mesh": experts["dp"]},
        ),
        ({"calculate_per_token_loss": True}, {"average": "token"}),
        ({"overlap_param_gather": False}, {"prefetch": 0}),
        ({"nccl_ub": True, "fsdp_double_buffer": True}, {"nccl_user_buffers": True}),
        ({"nccl_ub": True, "maxpool_double_buffer": True}, {"nccl_user_buffers": True}),
        ({"device": torch.device("cpu"), "average_in_collective": True}, {}),
        ({"preproc_state_dict_for_dcp_ckpt": False, "disable_symmetric_registration": True}, {}),
        (
            megatron.DistributedDataParallelConfig(
                data_parallel_sharding_strategy="optim_grads_params",
                overlap_param_gather=False,
                overlap_grad_reduce=True,
                megatron_fsdp_main_grads_dtype=torch.bfloat16,
                megatron_fsdp_max_pool_double_buffer=True,
                nccl_ub=True,
            ).keywords(),
            {
                "prefetch": 0,
                "nccl_user_buffers": True,
                "mp_policy": megafsdp.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16),
            },
        ),
        (megatron.DistributedDataParallelConfig().keywords(), {"strategy": "no_shard"}),
    ]


def _translated() -> int:
    # Registered memory needs NCCL, and its absence is a warning for both.
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cases = _cases(mesh)
    for theirs, ours in cases:
        units = {"fsdp_unit_modules": [Block]}
        net, own = (_net(theirs.get("expt_device_mesh")) for _ in range(2))
        # As Megatron-core marks experts' parameters.
        net.blocks[0].up.weight.allreduce = False
        megafsdp.annotate(own.blocks[0].up.weight, is_expert=True)
        translated = megatron.fully_shard_model(module=net, **theirs, **units)
        own = megafsdp.fully_shard_model(own, [Block], **ours)
        assert _facts(translated) == _facts(own), theirs
        assert isinstance(translated, megafsdp.FSDPModule)
    return len(cases)


def test_every_keyword_is_translated(ranks: Ranks) -> None:
    """Policies, options, meshes, shards and factors of all units are those of our own keywords."""
    assert ranks(4).run(_translated)[0] > 20


_FUSED = FusedParts(("gate", "up"), (2, 2), dim=1)


class _Expert(nn.Module):
    """A block whose rows are named as an expert's; a shared one's are not."""

    def __init__(self, expert_mesh: DeviceMesh) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.shared_experts = nn.Linear(4, 4, bias=False)
        rows = torch.full((4, 4), float(dist.get_rank()))
        part = DTensor.from_local(rows, expert_mesh["ep"], [Shard(0)])
        self.experts[0].weight = nn.Parameter(part)
        annotate(self.experts[0].weight, fused=_FUSED)


def _group_of_other_ranks() -> None:
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("outer", "inner"))
    # All ranks make all groups.
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 2])]
    rank = dist.get_rank()
    if rank == 2:
        return
    with pytest.raises(
        ValueError, match=rf"ranks \[{rank}, 2\], where the axes have ranks \[0, 1\]"
    ):
        megatron.fully_shard_model(
            Net(),
            mesh,
            dp_shard_dim="inner",
            dp_outer_dim="outer",
            hybrid_fsdp_group=groups[rank],
        )


def test_a_group_of_as_many_other_ranks_is_refused(ranks: Ranks) -> None:
    """Its ranks count, not its size."""
    ranks(3).run(_group_of_other_ranks)


def _experts_by_name() -> list[bool]:
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    whole = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    keywords: Keywords = {"device_mesh": whole, "dp_shard_dim": "dp", "expt_device_mesh": experts}
    model = megatron.fully_shard_model(_Expert(experts), **keywords)
    rows = model.experts[0].weight.detach().to_local()
    assert torch.equal(rows, torch.full((4, 4), float(dist.get_rank())))
    assert annotation_of(model.experts[0].weight).fused == _FUSED
    return [group.axes.is_expert for unit in units_below([model]).values() for group in unit.groups]


def test_experts_are_known_by_their_names(ranks: Ranks) -> None:
    """With a mesh of experts: each rank keeps its own, and no marks are needed; others stay."""
    assert [sorted(found) for found in ranks(2).run(_experts_by_name)] == [[False, True]] * 2


def _main_weights_in_the_models_dtype() -> list[torch.dtype]:
    policy = OWN_DTYPE
    net = Net().bfloat16()
    net.table = nn.Parameter(torch.arange(3), requires_grad=False)
    model = megatron.fully_shard_model(net, mixed_precision_policy=policy)
    # Without classes of units the model is one.
    assert len(units_below([model])) == 1
    return sorted({p.dtype for p in model.parameters()}, key=str)


def test_main_weights_may_have_the_models_dtype(ranks: Ranks) -> None:
    """None as main_params_dtype means it."""
    found = ranks(2).run(_main_weights_in_the_models_dtype)
    assert found == [[torch.bfloat16, torch.int64]] * 2


def _meta() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    torch.manual_seed(3)
    return full_state_dict(
        megatron.fully_shard_model(
            model, init_model_with_meta_device=True, device=torch.device("cpu")
        )
    )


def test_a_model_on_meta_is_initialised_as_by_one_process(ranks: Ranks) -> None:
    """By reset_parameters(), with the seed of the call."""
    with torch.device("meta"):
        expected = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    torch.manual_seed(3)
    expected.to_empty(device="cpu")
    for layer in expected:
        layer.reset_parameters()
    for state in ranks(2).run(_meta):
        for name, tensor in expected.state_dict().items():
            assert torch.equal(state[name], tensor), name


def _both_at_once() -> None:
    reference, net = Net(), Net()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    given = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, weight_decay=0.1)
    model, optimizer = megatron.fully_shard(net, given, fsdp_unit_modules=["Block"])
    assert model is net and optimizer is given
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(decayed),
        len(others),
    ]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    sharded = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == sharded
    batch = batches(1)[0]
    reference(*batch).backward()
    model(*mine(batch)).backward()
    assert_same_grads(model, reference)
    before = full_state_dict(model)
    optimizer.step()
    after = full_state_dict(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_gets_the_sharded_parameters_in_its_groups(ranks: Ranks) -> None:
    """fully_shard() shards both; groups and their options stay."""
    ranks(2).run(_both_at_once)


def _states_before_a_step(kind: Any, prepares: bool) -> tuple[bool, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, net = logging.getLogger("megafsdp.megatron"), Net()
    logger.addHandler(handler)
    try:
        _, optimizer = megatron.fully_shard(
            net, kind(net.parameters()), preproc_state_dict_for_dcp_ckpt=prepares
        )
    finally:
        logger.removeHandler(handler)
    assert len(optimizer.state) in (0, len(list(net.parameters())))
    return bool(optimizer.state), lines


def test_an_optimizer_gets_the_states_of_its_first_step(ranks: Ranks) -> None:
    """Unless it shall not; where they are not known, a warning says so."""
    pool = ranks(1)
    assert pool.run(_states_before_a_step, torch.optim.AdamW, True) == [(True, [])]
    assert pool.run(_states_before_a_step, torch.optim.AdamW, False) == [(False, [])]
    ((has_states, (line,)),) = pool.run(_states_before_a_step, torch.optim.ASGD, True)
    assert not has_states and "torch.optim.asgd.ASGD" in line


def _bad_optimizers() -> None:
    net = Net()
    stepped = torch.optim.AdamW(net.parameters())
    net(*batches(1)[0]).backward()
    stepped.step()
    with pytest.raises(ValueError, match="states of steps"):
        megatron.fully_shard(net, stepped)
    with pytest.raises(ValueError, match="another model"):
        megatron.fully_shard(net, torch.optim.AdamW(Net().parameters()))
    # Refused calls changed nothing.
    assert not isinstance(net, megafsdp.FSDPModule)
    late = torch.optim.AdamW(net.parameters())
    megatron.fully_shard_model(net)
    with pytest.raises(ValueError, match="an original parameter"):
        megatron.fully_shard_optimizer(late)


def test_optimizers_of_other_parameters_are_refused(ranks: Ranks) -> None:
    """One that has stepped, one of another model, one of replaced parameters."""
    ranks(1).run(_bad_optimizers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_parallel_sharding_strategy", "optim_grad"),
        ("data_parallel_sharding_strategy", 4),
        ("outer_dp_sharding_strategy", "optim_grads"),
    ],
)
def test_a_configuration_knows_the_strategies(field: str, value: str | int) -> None:
    """An unknown one is refused by the field's name when the configuration is made."""
    with pytest.raises(ValueError, match=f"got {value!r}. In {field}"):
        megatron.DistributedDataParallelConfig(**{field: value})


def _bad_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    alone = mesh["inner"].get_group()
    hybrid = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    cases: list[tuple[Keywords, type[Exception], str]] = [
        ({"dp_outer_dim": "outer"}, ValueError, "device_mesh of .* Name the axes"),
        ({"device_mesh": mesh}, ValueError, r"dp_shard_dim=None.*\('outer', 'inner'\)"),
        ({"device_mesh": mesh, "dp_outer_dim": "outer"}, ValueError, "dp_shard_dim=None"),
        ({"device_mesh": mesh, "dp_shard_dim": "dp"}, KeyError, "dp"),
        (hybrid | {"expt_device_mesh": mesh["outer"]}, KeyError, "inner"),
        (hybrid | {"hybrid_fsdp_group": alone}, ValueError, "hybrid_fsdp_group .*Leave it out"),
        ({"hybrid_fsdp_group": alone}, ValueError, "of no mesh"),
        (hybrid | {"hybrid_fsdp_expt_group": alone}, ValueError, "hybrid_fsdp_expt_group"),
        (hybrid | {"outer_dp_sharding_strategy": 2}, ValueError, "'no_shard' or 'optim'"),
        (hybrid | {"tp_dim": "inner"}, ValueError, "beside those of data.*tp_dim='inner'"),
        (hybrid | {"tp_dim": "tp"}, ValueError, "an axis of device_mesh.*'outer', 'inner'"),
        (hybrid | {"device": "meta"}, ValueError, "of the mesh's type, cpu, got meta"),
        ({"zero_dp_strategy": "zero"}, ValueError, "optim_grads_params"),
        ({"nccl_ub": True, "zero_dp_strategy": 1}, ValueError, "nccl_user_buffers"),
        ({"mixed_precision_policy": None}, TypeError, "MixedPrecisionPolicy"),
    ]
    for keywords, error, text in cases:
        net = Net()
        with pytest.raises(error, match=text):
            megatron.fully_shard_model(net, **keywords)
        assert not isinstance(net, megafsdp.FSDPModule)
    mixed = Net()
    mixed.head.half()
    with pytest.raises(ValueError, match=r"torch\.float16', 'torch\.float32"):
        megatron.fully_shard_model(mixed, mixed_precision_policy=OWN_DTYPE)
    cut = Net()
    cut.blocks[1].up.weight.tensor_model_parallel = True
    shared = Net()
    shared.blocks[1].up.weight.allreduce = False
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight.*ParallelDims\.build"):
        megatron.fully_shard_model(
            shared, mesh["outer"], expt_device_mesh=mesh["inner"], fsdp_unit_modules=[]
        )
    by_name = nn.Sequential()
    by_name.experts = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"experts\.0\.weight.*ParallelDims\.build"):
        megatron.fully_shard_model(by_name, mesh["outer"], expt_device_mesh=mesh["inner"])
    # Without a mesh of experts a name means nothing.
    plain = nn.Sequential()
    plain.experts = nn.Sequential(nn.Linear(2, 2))
    megatron.fully_shard_model(plain, mesh["outer"])
    assert not any(annotation_of(parameter).is_expert for parameter in plain.parameters())
    with pytest.raises(ValueError, match=r"a module named 'experts'.*leave expt_device_mesh out"):
        megatron.fully_shard_model(Net(), mesh["outer"], expt_device_mesh=mesh["outer"])
    # Megatron-core marks parameters so for one rank of tensor parallelism too, and a program may
    # mark DTensors.
    megatron.fully_shard_model(cut, device_mesh=mesh, dp_shard_dim="outer", tp_dim="inner")
    marked, own = Net(), DTensor.from_local(torch.ones(8, 8), mesh["outer"], [Shard(0)])
    marked.head = nn.Linear(8, 16, bias=False)
    marked.head.weight = nn.Parameter(own)
    marked.head.weight.tensor_model_parallel = True
    megatron.fully_shard_model(marked, device_mesh=mesh, dp_shard_dim="inner", tp_dim="outer")


def test_axes_groups_and_values_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """Before any module is changed, by the keyword's name."""
    ranks(2).run(_bad_meshes)

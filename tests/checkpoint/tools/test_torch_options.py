"""Options of torch's state dict helpers, asynchronous saves and converters on sharded models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megafsdp import FusedAdam, full_state_dict, fully_shard, fully_shard_model
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from tests.checkpoint.plain_torch import (
    BF16,
    VOCABULARY,
    WIDTH,
    Run,
    divide,
    everything,
    load,
    logits,
    optimizer_of,
    run_of,
    state_of,
    tokens_of,
    train,
    whole,
)
from tests.checkpoint.sharding import differences, fill
from tests.ranks import Ranks

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
BROADCAST_ON_CPU = StateDictOptions(
    full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True
)


def _trained(kind: str, strategy: str) -> Run:
    run = run_of(kind, strategy)
    train(run, range(1))
    return run


def _load_into_the_state_dict(directory: str, strategies: tuple[str, ...]) -> list[str]:
    stale = []
    for strategy in strategies:
        run = run_of("adam", strategy)
        path = f"{directory}/{strategy}"
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=path)
        other = run_of("adam", strategy, salt=1)
        before = logits(other)
        dcp.load({"model": other.model.state_dict()}, checkpoint_id=path)
        assert not torch.equal(logits(run), before)
        if not torch.equal(logits(run), logits(other)):
            stale.append(strategy)
    return stale


@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [(2, ("no_shard", "optim", "optim_grads", "optim_grads_params")), (4, ("hsdp", "hfsdp"))],
)
def test_a_load_into_a_state_dict_alone_refreshes_compute_weights(
    ranks: Ranks, tmp_path: Path, world_size: int, strategies: tuple[str, ...]
) -> None:
    """As with FSDP2, ``dcp.load(model.state_dict())`` is a load: nothing else need be called."""
    stale = ranks(world_size).run(_load_into_the_state_dict, str(tmp_path), strategies)
    assert stale == [[]] * world_size


def _few_rows(salt: int, strategy: str = "optim") -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2, bias=False), torch.nn.Linear(2, WIDTH))
    fill(model, salt)
    return divide(model, list(model), strategy, BF16)


def _load_few_rows(directory: str) -> int:
    model, other, third = (_few_rows(salt) for salt in range(3))
    dcp.save(model.state_dict(), checkpoint_id=directory)
    whole = full_state_dict(model)
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        wanted, stale = model(x), (other(x), third(x))
        dcp.load(other.state_dict(), checkpoint_id=directory)
        for name, parameter in third.named_parameters():
            parameter.copy_from_full_(whole[name])
        assert not any(torch.equal(wanted, each) for each in stale)
        assert torch.equal(other(x), wanted) and torch.equal(third(x), wanted)
    return sum(local_tensor(p).numel() for p in model[0].parameters())


def test_ranks_without_rows_notice_a_load(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks gather again, those too that the load wrote nothing into."""
    assert 0 in ranks(4).run(_load_few_rows, str(tmp_path))


def _num_gathers(kind: str) -> int:
    model = _few_rows(0, "hfsdp")
    optimizer = optimizer_of(kind, model)
    model(torch.ones(1, WIDTH)).float().square().mean().backward()
    optimizer.step()
    with record_collectives() as record, torch.no_grad():
        model(torch.ones(1, WIDTH))
    return sum(record.calls.values())


def test_what_a_step_wrote_is_gathered_once(ranks: Ranks) -> None:
    """Muon writes into what state dicts show, torch's AdamW beside it; both mark their groups."""
    assert ranks(4).run(_num_gathers, "muon") == ranks(4).run(_num_gathers, "adamw")


def _full_states(kind: str, strategy: str) -> None:
    run = _trained(kind, strategy)
    wanted = full_state_dict(run.model)
    states = run.optimizer.state_dict()["state"]
    moments = {i: {k: whole(v) for k, v in values.items()} for i, values in states.items()}
    names = {p: name for name, p in run.model.named_parameters()}
    ordered = [names[p] for group in run.optimizer.param_groups for p in group["params"]]
    for options in (FULL, FULL_ON_CPU):
        model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
        if options.cpu_offload and dist.get_rank() > 0:
            assert not model and not optimizer, "torch gives full states to rank 0 alone"
            continue
        assert differences(model, wanted) == []
        assert all(type(value) is torch.Tensor for value in model.values())
        for index, name in enumerate(ordered):
            assert differences(optimizer["state"][name], moments[index]) == []


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("adamw", "optim"),
        ("adam-bf16", "hsdp"),
        ("adam-fp8", "hfsdp"),
        ("adam-remainders", "optim_grads_params"),
        ("muon", "no_shard"),
    ],
)
def test_full_states_are_whole(ranks: Ranks, kind: str, strategy: str) -> None:
    """full_state_dict=True gives plain tensors of the whole, moments in fp32; offloaded, too."""
    ranks(4 if strategy in ("hsdp", "hfsdp") else 2).run(_full_states, kind, strategy)


def _values(run: Run) -> dict[str, object]:
    """Return everything, with tuples of options as torch's setters give them back."""
    found = everything(run)
    for index in range(len(run.optimizer.param_groups)):
        group = run.optimizer.param_groups[index].items()
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group if k != "params"}
        found[f"group {index}"] = plain
    return found


def _full_states_set(kind: str, strategy: str, several: tuple[StateDictOptions, ...]) -> None:
    run = _trained(kind, "optim_grads_params")
    wanted = _values(run)
    full = get_state_dict(run.model, run.optimizer, options=FULL)
    for options in several:
        model, optimizer = copy.deepcopy(full)
        if options.broadcast_from_rank0 and dist.get_rank() > 0:
            model, optimizer = {}, {}
        other = run_of(kind, strategy, salt=1)
        train(other, range(5, 6))
        assert differences(_values(other), wanted)
        set_model_state_dict(other.model, model, options=options)
        set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
        assert differences(_values(other), wanted) == [], options
        # What was set is what forward computes with.
        assert torch.equal(logits(other), logits(run))
        train(other, range(1, 2))
    # A load that is not torch's setters' must say how it is cut.
    with pytest.raises(NotImplementedError, match=r"load_full_state_dict\(\)"):
        run.model.load_state_dict(full[0])
    assert differences(_values(run), wanted) == []


# With the number of ranks and the options that run by default.
_SET = [
    ("adamw", "optim_grads_params", 2, (FULL, BROADCAST, BROADCAST_ON_CPU)),
    ("adamw-fused", "optim", 3, (BROADCAST,)),
    ("sgd", "optim_grads", 2, (BROADCAST_ON_CPU,)),
    ("adam", "hsdp", 4, (BROADCAST,)),
    ("adam", "hfsdp", 4, (FULL,)),
    ("adam-fp8", "optim_grads_params", 2, (FULL, BROADCAST)),
    ("muon", "no_shard", 2, (BROADCAST,)),
]


@pytest.mark.parametrize(
    ("kind", "strategy", "world_size", "several"),
    [
        *_SET,
        *(
            pytest.param(*case, rest, marks=pytest.mark.matrix("torch-tools"))
            for *case, several in _SET
            if (rest := tuple(o for o in (FULL, BROADCAST, BROADCAST_ON_CPU) if o not in several))
        ),
    ],
)
def test_torchs_setters_take_full_states(
    ranks: Ranks,
    kind: str,
    strategy: str,
    world_size: int,
    several: tuple[StateDictOptions, ...],
) -> None:
    """On every rank, or broadcast from rank 0: weights, states, the next forward, bit for bit."""
    ranks(world_size).run(_full_states_set, kind, strategy, several)


def _as_accelerate_loads(strategy: str) -> None:
    run = _trained("adam", "optim_grads_params")
    wanted = full_state_dict(run.model)
    with torch.device("meta"):
        other = run_of("adam", strategy, salt=1)
    state = {}
    for name, own in other.model.state_dict().items():
        full = wanted[name]
        if dist.get_rank() > 0:
            full = torch.empty_like(full)
        dist.broadcast(full, src=0)
        if isinstance(own, DTensor):
            full = distribute_tensor(full, own.device_mesh, own.placements)
        state[name] = full
    other.model.load_state_dict(state, assign=True)
    for block in other.model.blocks:
        # In no state dict: accelerate keeps these from before the move to meta.
        block.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert differences(full_state_dict(other.model), wanted) == []
    assert torch.equal(logits(other), logits(run))
    parameters = dict(other.model.named_parameters())
    assert not any(parameters[name] is value for name, value in state.items() if name in parameters)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("optim_grads_params", 3), ("no_shard", 2), ("hsdp", 4), ("hfsdp", 4)],
)
def test_a_model_on_meta_takes_what_rank_zero_distributes(
    ranks: Ranks, strategy: str, world_size: int
) -> None:
    """Tensors that torch has cut, with assign=True: values are copied, parameters stay."""
    ranks(world_size).run(_as_accelerate_loads, strategy)


def _options() -> None:
    run, other = _trained("adam", "optim_grads_params"), run_of("adam", "optim", salt=1)
    frozen = {n for n, p in run.model.named_parameters() if not p.requires_grad}
    assert frozen == {"blocks.0.norm.bias", "blocks.1.norm.bias", "blocks.1.down.weight"}
    fresh = full_state_dict(other.model)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    state = get_model_state_dict(run.model, options=options)
    assert set(run.model.state_dict()) - set(state) == frozen
    result = set_model_state_dict(other.model, state, options=options)
    assert set(result.missing_keys) == frozen
    loaded, wanted = full_state_dict(other.model), full_state_dict(run.model)
    assert set(differences(loaded, wanted)) == frozen
    assert set(differences(loaded, fresh)) == set(wanted) - frozen
    del state["blocks.0.up.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.0\.up\.weight"):
        set_model_state_dict(other.model, state)
    with pytest.warns(FutureWarning, match="submodules"):
        for is_kept, prefix in ((True, "blocks.1."), (False, "")):
            kept = StateDictOptions(keep_submodule_prefixes=is_kept)
            block = get_model_state_dict(run.model, submodules={run.model.blocks[1]}, options=kept)
            assert set(block) == {prefix + n for n in run.model.blocks[1].state_dict()}


def test_options_of_the_helpers(ranks: Ranks) -> None:
    """Frozen parameters left out, missing keys, prefixes of submodules: as documented."""
    ranks(2).run(_options)


def _save_asynchronously(directory: str, kind: str, strategy: str, form: str) -> Any:
    run = _trained(kind, strategy)
    wanted = everything(run)
    response: Any = dcp.async_save(
        state_of(run, "helpers"),
        checkpoint_id=directory,
        async_checkpointer_type=AsyncCheckpointerType[form],
        # Training goes on meanwhile, on the same backend: the thread needs ranks of its own.
        process_group=dist.new_group() if form == "THREAD" else None,
    )
    train(run, range(1, 2))
    getattr(response, "upload_completion", response).result()
    return wanted, everything(run)


def _load(directory: str, kind: str, strategy: str) -> Any:
    run = run_of(kind, strategy, salt=1)
    load(run, "helpers", directory)
    loaded = everything(run)
    train(run, range(1, 2))
    return loaded, everything(run)


_ASYNCHRONOUS = [
    ("adam", (2, "optim_grads_params"), (3, "optim")),
    ("adam-remainders", (4, "hfsdp"), (2, "no_shard")),
    ("adam-fp8", (2, "no_shard"), (3, "optim_grads")),
]


@pytest.mark.parametrize(("kind", "saved_by", "loaded_by"), _ASYNCHRONOUS)
def test_asynchronous_saves_hold_the_values_of_their_call(
    ranks: Ranks, tmp_path: Path, kind: str, saved_by: Any, loaded_by: Any
) -> None:
    """Steps taken while a thread writes are not in the checkpoint; a loaded run takes them too."""
    saved = ranks(saved_by[0]).run(
        _save_asynchronously, str(tmp_path), kind, saved_by[1], "THREAD"
    )[0]
    for loaded in ranks(loaded_by[0]).run(_load, str(tmp_path), kind, loaded_by[1]):
        assert differences(saved[0], loaded[0]) == []
        assert differences(saved[1], loaded[1]) == []


@pytest.mark.matrix("torch-tools")
@pytest.mark.parametrize(("kind", "saved_by", "loaded_by"), _ASYNCHRONOUS[:2])
def test_saves_by_another_process_hold_the_values_of_their_call(
    ranks: Ranks, tmp_path: Path, kind: str, saved_by: Any, loaded_by: Any
) -> None:
    """Cuts travel with the tensors to the process that writes."""
    saved = ranks(saved_by[0]).run(
        _save_asynchronously, str(tmp_path), kind, saved_by[1], "PROCESS"
    )[0]
    for loaded in ranks(loaded_by[0]).run(_load, str(tmp_path), kind, loaded_by[1]):
        assert differences(saved[0], loaded[0]) == []
        assert differences(saved[1], loaded[1]) == []


def test_converters_of_torch_read_and_write_whole_states(ranks: Ranks, tmp_path: Path) -> None:
    """``dcp_to_torch_save`` gives whole tensors; ``torch_save_to_dcp`` gives what we load."""
    sharded, whole_file, back = tmp_path / "sharded", tmp_path / "whole.pt", tmp_path / "back"
    saved = ranks(3).run(_save, str(sharded), "adam-fp8", "optim")[0]
    dcp_to_torch_save(sharded, whole_file)
    states = torch.load(whole_file, weights_only=True)
    model = {name: value for name, value in saved[0].items() if name in states["model"]}
    assert len(model) == 16
    assert differences(states["model"], model) == []
    moment = states["optimizer"]["state"]["embed.weight"]["exp_avg"]
    assert torch.equal(moment, saved[0]["0/exp_avg"])
    torch_save_to_dcp(whole_file, back)
    for loaded in ranks(2).run(_load, str(back), "adam-fp8", "optim_grads_params"):
        assert differences(saved[0], loaded[0]) == []
        assert differences(saved[1], loaded[1]) == []


def _save(directory: str, kind: str, strategy: str) -> Any:
    run = _trained(kind, strategy)
    dcp.save(state_of(run, "helpers"), checkpoint_id=directory)
    wanted = everything(run)
    train(run, range(1, 2))
    return wanted, everything(run)


def _llama(strategy: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = fully_shard_model(LlamaForCausalLM(config), strategy=strategy)
    return model, FusedAdam(model.parameters(), lr=0.01)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    tokens = tokens_of(3)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _save_llama(directory: str) -> Any:
    model, optimizer = _llama("optim_grads_params", 0)
    _step(model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=directory)
    loss = _step(model, optimizer)
    return loss, full_state_dict(model)


def _load_llama(directory: str) -> Any:
    model, optimizer = _llama("optim", 1)
    names = ("model", "optimizer")
    states = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=directory)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    loss = _step(model, optimizer)
    return loss, full_state_dict(model)


def test_a_transformers_model_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """Saved by 2 ranks, loaded by 4 under another strategy: the same loss and the same step."""
    # Ranks have equal batches: the mean of 2 or of 4 equal gradients is exact.
    saved = ranks(2).run(_save_llama, str(tmp_path))[0]
    for loss, weights in ranks(4).run(_load_llama, str(tmp_path)):
        assert torch.equal(loss, saved[0])
        assert differences(weights, saved[1]) == []


def _states_of_another_class(kinds: tuple[str, str]) -> None:
    first, second = _trained(kinds[0], "optim"), run_of(kinds[1], "optim")
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    moments = [k for k in everything(first) if k.endswith(("/exp_avg", "/exp_avg_sq"))]
    left, right = everything(first), everything(second)
    assert moments and all(torch.equal(left[k], right[k]) for k in moments)
    assert torch.equal(left["logits"], right["logits"])
    train(second, range(1, 2))


@pytest.mark.parametrize("kinds", [("adamw", "adam"), ("adam", "adamw"), ("adam-fp8", "adam")])
def test_optimizers_take_each_others_states(ranks: Ranks, kinds: tuple[str, str]) -> None:
    """FusedAdam loads a state dict of torch's AdamW and steps, and the other way round."""
    ranks(2).run(_states_of_another_class, kinds)


class _Scaled(nn.Module):
    """A linear with a factor, as models of pairs have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.factor = nn.Linear(5, 3), nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, scaled."""
        return self.linear(x) * self.factor


def _numbers_set(options: StateDictOptions) -> None:
    models = [fully_shard(_Scaled(seed)) for seed in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]

    def step(index: int) -> None:
        models[index](torch.ones(2, 5)).sum().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    step(0)
    # torch shares what it loads.
    full = copy.deepcopy(get_state_dict(models[0], optimizers[0], options=FULL))
    if options.broadcast_from_rank0 and dist.get_rank() > 0:
        full = {}, {}
    set_model_state_dict(models[1], full[0], options=options)
    set_optimizer_state_dict(models[1], optimizers[1], full[1], options=options)
    for index in range(2):
        step(index)
    states = [full_state_dict(model) for model in models]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    state = optimizers[1].state[models[1].factor]
    assert all(isinstance(state[name], DTensor) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("options", [FULL, BROADCAST])
def test_full_states_of_numbers_stay_dtensors(ranks: Ranks, options: StateDictOptions) -> None:
    """Of parameters without a dimension, for which torch's setters put plain tensors."""
    ranks(2).run(_numbers_set, options)


def _foreign_options() -> None:
    run = run_of("adam", "optim")
    for name in ("amsgrad", "maximize"):
        odd = torch.optim.AdamW(run.model.parameters(), **{name: True})
        mine = FusedAdam(run.model.parameters())
        with pytest.raises(ValueError, match=f"without {name}"):
            mine.load_state_dict(odd.state_dict())
    train(run, range(1))
    packed = run.optimizer.state_dict()
    rows = local_tensor(packed["state"][0]["exp_avg"])
    # The last one has as many elements as the rows.
    for other in (torch.zeros(VOCABULARY, WIDTH), rows.t().contiguous()):
        packed["state"][0]["exp_avg"] = other
        with pytest.raises(ValueError, match="this rank's rows, of shape"):
            run.optimizer.load_state_dict(packed)


def test_what_fused_adam_would_ignore_is_refused(ranks: Ranks) -> None:
    """Options with another arithmetic, and plain states of another shape, are named."""
    ranks(2).run(_foreign_options)

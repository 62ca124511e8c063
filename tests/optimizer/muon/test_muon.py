"""Sharded Muon steps as one process does: owners, rounds, fused parts, AdamW, checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from megafsdp import MixedPrecisionPolicy, checkpoint, full_state_dict, full_tensor, fully_shard
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.optimizer.muon import matrices as muon_matrix
from megafsdp.optimizer.muon.muon import Muon
from tests.fsdp.toy import assert_same_parameters
from tests.ranks import Ranks

WIDTH = 12
_NUM_STEPS = 2
ADAMW_STATES = {"step", "exp_avg", "exp_avg_sq"}
# Rows of each of 3 query groups: two query heads, a key and a value of 4 rows.
QKV = FusedParts(("query", "key", "value"), (8, 4, 4), num_groups=3)
GATED = FusedParts(("gate", "up"), (20, 20))


class _Block(nn.Module):
    """A fused attention matrix, a gated MLP, a stack of matrices, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, QKV.extent)
        self.proj = nn.Linear(QKV.extent, WIDTH, bias=False)
        self.fc1 = nn.Linear(WIDTH, GATED.extent, bias=False)
        self.fc2 = nn.Linear(20, WIDTH, bias=False)
        self.stack = nn.Parameter(torch.randn(3, WIDTH, 7) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus three branches."""
        h = self.norm(x)
        gate, up = self.fc1(h).chunk(2, -1)
        x = x + self.proj(self.qkv(h).tanh()) + self.fc2(F.silu(gate) * up)
        return x + torch.einsum("bd,edf->bf", h, self.stack).mean(-1, keepdim=True).tanh()


class _Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(33, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 33, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of predicting each token's double."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), tokens * 2 % 33)


def _groups(net: _Net) -> list[dict[str, object]]:
    outer = [net.embedding.weight, net.head.weight]
    inner = list(net.blocks.parameters())
    return [{"params": inner}, {"params": outer, "use_muon": False, "lr": 0.005}]


def _shard(net: _Net, layout: str) -> _Net:
    world = dist.get_world_size()
    options: dict[str, object] = {"strategy": layout}
    if layout in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        options = {"mesh": mesh, "outer_strategy": "optim" if layout == "hfsdp" else "no_shard"}
    for block in net.blocks:
        annotate(block.qkv.weight, fused=QKV)
        annotate(block.fc1.weight, fused=GATED)
        fully_shard(block, **options)
    return fully_shard(net, **options)


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 33, (24,), generator=torch.Generator().manual_seed(step))


def _backward(net: nn.Module, step: int, *, is_sharded: bool) -> None:
    tokens = _tokens(step)
    if is_sharded:
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    net(tokens).backward()


def _naive_newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Map singular values one by one through the quintic, by decomposition, in fp64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vh


class _NaiveMuon:
    """The definition, one matrix after another, on full tensors."""

    def __init__(self, net: _Net, rule: str | None, split: str, nesterov: bool) -> None:
        self.net, self.rule, self.split, self.nesterov = net, rule, split, nesterov
        self.momentum: dict[str, torch.Tensor] = {}
        vectors = [p for p in net.blocks.parameters() if p.ndim == 1]
        outer = [net.embedding.weight, net.head.weight]
        self.adamw = torch.optim.AdamW(
            [{"params": vectors}, {"params": outer, "lr": 0.005}],
            lr=0.02,
            betas=(0.9, 0.95),
            eps=1e-5,
            weight_decay=0.1,
        )

    def _ratio(self, rows: int, cols: int) -> float:
        if self.rule == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
        return max(1.0, rows / cols) ** 0.5

    def _rows_of_parts(self, fused: FusedParts) -> list[list[int]]:
        rows: dict[tuple[str, int], list[int]] = {}
        position = 0
        for group in range(fused.num_groups):
            for name, size in zip(fused.names, fused.sizes, strict=True):
                key = (name, group if self.split == "groups" else 0)
                rows.setdefault(key, []).extend(range(position, position + size))
                position += size
        return list(rows.values())

    def _update(self, matrix: torch.Tensor, fused: FusedParts | None) -> torch.Tensor:
        everything = [list(range(matrix.size(0)))]
        update = torch.zeros_like(matrix)
        for rows in everything if fused is None else self._rows_of_parts(fused):
            part = _naive_newton_schulz(matrix[rows], 5) * self._ratio(len(rows), matrix.size(1))
            update[rows] = part.to(matrix.dtype)
        return update

    @torch.no_grad()
    def step(self) -> None:
        """Step everything; gradients are dropped."""
        for name, parameter in self.net.blocks.named_parameters():
            if parameter.ndim == 1:
                continue
            old = self.momentum.get(name, torch.zeros_like(parameter))
            grad = parameter.grad
            self.momentum[name] = 0.95 * old + 0.05 * grad
            average = self.momentum[name]
            if self.nesterov:
                average = 0.95 * average + 0.05 * grad
            fused = None
            if self.split != "none":
                fused = {"qkv": QKV, "fc1": GATED}.get(name.split(".")[1])
            stack = average if average.ndim == 3 else average[None]
            update = torch.stack([self._update(matrix, fused) for matrix in stack])
            parameter.mul_(1 - 0.02 * 0.1)
            parameter.sub_(0.02 * update.view_as(parameter))
        self.adamw.step()
        self.net.zero_grad()


def _muon(net: _Net, **options: object) -> Muon:
    chosen: dict[str, object] = {"lr": 0.02, "adamw_eps": 1e-5, "bucket_numel": 700}
    return Muon(_groups(net), **(chosen | options))


@functools.cache
def _by_definition(rule: str | None, split: str, nesterov: bool) -> dict[str, torch.Tensor]:
    """Return the weights of one process after steps that decompose matrices."""
    net = _Net()
    naive = _NaiveMuon(net, rule, split, nesterov)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    for step in range(_NUM_STEPS):
        net(_tokens(step)).backward()
        naive.step()
    for name, parameter in net.named_parameters():
        assert (parameter - start[name]).abs().max() > 1e-3, name
    return net.state_dict()


def _trains(
    layout: str, rule: str | None, split: str, nesterov: bool, wanted: dict[str, torch.Tensor]
) -> None:
    net = _shard(_Net(), layout)
    optimizer = _muon(net, adjust_lr_fn=rule, split_fused=split, nesterov=nesterov)
    for step in range(_NUM_STEPS):
        _backward(net, step, is_sharded=True)
        optimizer.step()
        optimizer.zero_grad()
    reference = _Net()
    reference.load_state_dict(wanted)
    # The sums of gradients are ordered otherwise (1e-7), which five quintics enlarge where singular
    # values are small: their slope at zero is 3.4445^5, about 500.
    assert_same_parameters(net, reference, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, "optim_grads_params"),
        (2, "optim_grads_params"),
        (3, "optim_grads_params"),
        (4, "optim_grads_params"),
        (2, "optim_grads"),
        (2, "optim"),
        (2, "no_shard"),
        (4, "hsdp"),
        (4, "hfsdp"),
    ],
)
def test_sharded_muon_steps_as_the_definition(ranks: Ranks, num_ranks: int, layout: str) -> None:
    """Two steps of every layout equal one process that decomposes matrices."""
    options = (None, "parts", True)
    ranks(num_ranks).run(_trains, layout, *options, _by_definition(*options))


@pytest.mark.parametrize(
    ("rule", "split", "nesterov"),
    [
        ("match_rms_adamw", "groups", True),
        ("original", "none", False),
        ("match_rms_adamw", "parts", False),
    ],
)
def test_options_change_the_steps_as_the_definition_says(
    ranks: Ranks, rule: str, split: str, nesterov: bool
) -> None:
    """Both rate rules, each way to split fused parameters, with and without Nesterov."""
    wanted = _by_definition(rule, split, nesterov)
    ranks(2).run(_trains, "optim_grads_params", rule, split, nesterov, wanted)


def _as_torchs(rule: str | None, dtype: torch.dtype) -> float:
    reference = nn.Sequential(*[nn.Linear(9, 9, bias=False) for _ in range(3)], nn.Linear(9, 30))
    reference[3].bias = None
    torch.manual_seed(3)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    net = fully_shard(copy.deepcopy(reference))
    options = {"lr": 0.02, "adjust_lr_fn": rule}
    theirs = torch.optim.Muon(reference.parameters(), **options)
    ours = Muon(net.parameters(), **options, ns_dtype=dtype)
    worst = 0.0
    for step in range(2):
        for index, parameter in enumerate(reference.parameters()):
            generator = torch.Generator().manual_seed(10 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for sharded, whole in zip(net.parameters(), reference.parameters(), strict=True):
            sharded.grad = torch.zeros_like(sharded)
            sharded.grad.copy_from_full_(whole.grad)
        theirs.step()
        ours.step()
    for sharded, whole in zip(net.parameters(), reference.parameters(), strict=True):
        worst = max(worst, (full_tensor(sharded.detach()) - whole).abs().max().item())
    return worst


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
def test_bf16_steps_equal_torchs_bit_for_bit(ranks: Ranks, rule: str | None) -> None:
    """torch.optim.Muon orthogonalises in bf16; the same gradients give the same weights."""
    assert ranks(3).run(_as_torchs, rule, torch.bfloat16) == [0.0] * 3


def test_fp32_steps_lie_near_torchs(ranks: Ranks) -> None:
    """Two steps of 0.02 times updates of at most 1.2 an element, rounded by bf16's 2^-8: 1e-3."""
    for error in ranks(3).run(_as_torchs, None, torch.float32):
        assert 0 < error < 1e-3


def test_the_states_of_torchs_muon_are_gone_on_with() -> None:
    """Its options are taken, those that it lacks stay, and frozen parameters get no states."""
    weights = [nn.Parameter(torch.randn(6, 9)) for _ in range(2)]
    theirs = torch.optim.Muon(weights, lr=0.5, momentum=0.5)
    weights[0].grad = torch.randn(6, 9)
    theirs.step()
    others = [nn.Parameter(weight.detach().clone()) for weight in weights]
    ours = Muon(others, ns_dtype=torch.bfloat16)
    packed = theirs.state_dict()
    # Flat rows get the shape of their parameter.
    flat = {name: value.reshape(-1) for name, value in packed["state"][0].items()}
    ours.load_state_dict(packed | {"state": packed["state"] | {0: flat}})
    assert ours.state[others[0]]["momentum_buffer"].shape == others[0].shape
    others[1].requires_grad_(False)
    ours.make_states()
    assert list(ours.state) == others[:1]
    others[0].grad = weights[0].grad
    theirs.step()
    ours.step()
    assert torch.equal(others[0], weights[0])


def _work(layout: str) -> tuple[list[tuple[int, int]], CollectiveRecord]:
    net = _shard(_Net(), layout)
    optimizer = _muon(net, bucket_numel=1 << 20, split_fused="none")
    _backward(net, 0, is_sharded=True)
    shapes: list[tuple[int, int]] = []
    original = muon_matrix.orthogonalize

    def spy(matrix: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, *rest)

    with mock.patch.object(muon_matrix, "orthogonalize", spy), record_collectives() as record:
        optimizer.step()
    return shapes, record


_SHAPES = 2 * [(48, 12), (12, 48), (40, 12), (12, 20), *[(12, 7)] * 3]


@pytest.mark.parametrize("layout", ["optim_grads_params", "hfsdp"])
def test_every_matrix_has_one_owner(ranks: Ranks, layout: str) -> None:
    """All ranks have about the same work, and a step is two collectives."""
    results = ranks(4).run(_work, layout)
    assert sorted(s for shapes, _ in results for s in shapes) == sorted(_SHAPES)
    loads = [sum(r * c * min(r, c) for r, c in shapes) for shapes, _ in results]
    assert max(loads) <= 1.34 * sum(loads) / 4  # As good as these 14 matrices allow.
    for _, record in results:
        assert record.calls == {"all_to_all": 2}


def test_replicas_do_the_same_work(ranks: Ranks) -> None:
    """HSDP shares the matrices within each replica; no_shard exchanges nothing."""
    results = ranks(4).run(_work, "hsdp")
    for replica in (results[:2], results[2:]):
        assert sorted(s for shapes, _ in replica for s in shapes) == sorted(_SHAPES)
    for shapes, record in ranks(2).run(_work, "no_shard"):
        assert sorted(shapes) == sorted(_SHAPES)
        assert not record.calls


def _bucketed(bucket_numel: int) -> tuple[int, dict[str, torch.Tensor]]:
    net = _shard(_Net(), "optim_grads_params")
    optimizer = _muon(net, bucket_numel=bucket_numel)
    _backward(net, 0, is_sharded=True)
    with record_collectives() as record:
        optimizer.step()
    return record.calls["all_to_all"], full_state_dict(net)


def test_small_buckets_make_more_rounds_and_the_same_weights(ranks: Ranks) -> None:
    """Memory bounds the rounds; weights do not depend on the bucket."""
    (one, wanted), *_ = ranks(3).run(_bucketed, 1 << 20)
    (many, got), *_ = ranks(3).run(_bucketed, 1)
    assert one == 2
    numels = [rows * cols for rows, cols in _SHAPES]
    assert many >= 2 * math.ceil(sum(numels) / (3 * max(numels))) > 2
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def _restores(root: Path, is_saving: bool) -> dict[str, torch.Tensor]:
    """Train two steps and save, or load; then train one more and return what there is."""
    net = _shard(_Net(), "optim_grads_params")
    optimizer = _muon(net)
    for step in range(2 if is_saving else 0):
        _backward(net, step, is_sharded=False)
        optimizer.step()
        optimizer.zero_grad()
    if is_saving:
        checkpoint.save(root, step=2, model=net, optimizer=optimizer)
    else:
        for group in optimizer.param_groups:
            group["lr"] = 1.0
        checkpoint.load(root, model=net, optimizer=optimizer)
    result = {}
    for name, parameter in net.named_parameters():
        if "momentum_buffer" in optimizer.state[parameter]:
            buffer = optimizer.state[parameter]["momentum_buffer"]
            assert isinstance(buffer, UnevenDTensor)
            result[f"momentum of {name}"] = full_tensor(buffer)
    assert len(result) == 10
    # Every rank has the same tokens: gradients do not depend on the number of ranks but for the
    # order of the sum.
    _backward(net, 2, is_sharded=False)
    optimizer.step()
    return result | full_state_dict(net)


def test_checkpoints_carry_the_momentum_to_other_numbers_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Saved by 2 ranks, loaded by 1 and by 3, the next step is the same."""
    (wanted, _) = ranks(2).run(_restores, tmp_path, True)
    for num_ranks in (1, 3):
        for got in ranks(num_ranks).run(_restores, tmp_path, False):
            for name, value in wanted.items():
                if name.startswith("momentum"):
                    assert torch.equal(got[name], value), name
                # Gradients of 3 equal ranks, summed and divided by 3, are rounded.
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=3e-5)


def _state_dict_resumes() -> None:
    net = _shard(_Net(), "optim_grads_params")
    first, weights = _muon(net), []
    _backward(net, 0, is_sharded=True)
    first.step()
    saved, state = full_state_dict(net), copy.deepcopy(first.state_dict())
    second = _muon(net, lr=1.0)
    second.step()  # Its plan must not outlive the groups that it was made for.
    second.load_state_dict(state)
    for optimizer in (first, second):
        for name, parameter in net.named_parameters():
            local_tensor(parameter).copy_(_rows(parameter, saved[name]))
        optimizer.step()
        weights.append(full_state_dict(net))
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in saved)
    assert not all(torch.equal(weights[0][n], saved[n]) for n in saved)


@pytest.mark.parametrize("use_muon", [False, True])
def test_a_state_dict_may_be_loaded_twice(use_muon: bool) -> None:
    """Steps in between change neither its moments nor its count of steps."""
    weight = nn.Parameter(torch.eye(3))
    optimizer = Muon([weight], lr=0.1, use_muon=use_muon)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    before, state = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    found = []
    for _ in range(2):
        optimizer.load_state_dict(state)
        with torch.no_grad():
            weight.copy_(before)
        weight.grad = torch.arange(9.0).view(3, 3)
        optimizer.step()
        found.append(weight.detach().clone())
    assert torch.equal(*found) and not torch.equal(found[0], before)


def _rows(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    start, stop = parameter.uneven_layout.element_range()
    return full.view(-1)[start:stop].view(local_tensor(parameter).shape)


def test_a_state_dict_resumes_another_optimizer(ranks: Ranks) -> None:
    """Momentum, AdamW's moments and options of a loaded optimizer give the same next step."""
    ranks(2).run(_state_dict_resumes)


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "moonshot"},
        {"split_fused": "heads"},
        {"lr": -1.0},
        {"lr": math.inf},
        {"momentum": 1.0},
        {"momentum": math.nan},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.5)},
        {"betas": (0.9,)},
        {"eps": -1.0},
        {"adamw_eps": math.inf},
        {"ns_steps": 0},
        {"ns_steps": 2.5},
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_coefficients": (1.0, 2.0, math.nan)},
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, object]) -> None:
    """The message names option and group; at construction, by group, and before a step."""
    (name,) = options
    first, second = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    with pytest.raises(ValueError, match=f"{name} of param group 0 of Muon"):
        Muon([first], **options)
    optimizer = Muon([first])
    with pytest.raises(ValueError, match=f"{name} of param group 1 of Muon"):
        optimizer.add_param_group({"params": [second], **options})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second]})
    optimizer.param_groups[1].update(options)
    first.grad = second.grad = torch.ones(3, 3)
    # A scheduler that ends at a rate of 0 may miss it by rounding.
    if options == {"lr": -1.0}:
        optimizer.step()
        assert second.min() > 1.0 > first.max()
        return
    with pytest.raises(ValueError, match=f"{name} of param group 1 of Muon"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3, 3)) and not optimizer.state


@pytest.mark.parametrize("options", [{"ns_dtype": torch.int32}, {"bucket_numel": 0}])
def test_rounds_without_meaning_are_refused(options: dict[str, object]) -> None:
    """Before a step finds that nothing can travel."""
    with pytest.raises(ValueError, match=f"{next(iter(options))} of Muon"):
        Muon([nn.Parameter(torch.ones(3, 3))], **options)


@pytest.mark.parametrize(
    "fused",
    [
        FusedParts(("one", "other"), (3, 1)),
        FusedParts(("gate", "up"), (3, 3), dim=1),
        FusedParts(("query", "key"), (3, 1), dim=2, num_groups=2),
    ],
)
def test_fused_matrices_of_a_stack_step_as_each_alone(fused: FusedParts) -> None:
    """Parts along the stack are whole matrices; others are parts of each matrix."""
    stack = nn.Parameter(torch.randn(4, 6, 8))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    annotate(stack, fused=fused)
    if fused.dim:
        for matrix in alone:
            annotate(matrix, fused=dataclasses.replace(fused, dim=fused.dim - 1))
    stack.grad = torch.randn(4, 6, 8)
    for matrix, grad in zip(alone, stack.grad, strict=True):
        matrix.grad = grad.clone()
    Muon([stack], lr=0.1).step()
    Muon(alone, lr=0.1).step()
    assert torch.equal(stack.detach(), torch.stack([m.detach() for m in alone]))


@pytest.mark.parametrize(
    ("split", "shapes"),
    [
        ("none", [(48, 12)]),
        ("parts", [(24, 12), (12, 12), (12, 12)]),
        ("groups", [(8, 12), (4, 12), (4, 12)] * 3),
    ],
)
def test_the_cost_of_a_matrix_is_that_of_its_products(
    split: str, shapes: list[tuple[int, int]]
) -> None:
    """Owners are chosen by it: products over the shorter side of each logical matrix."""
    weight = nn.Parameter(torch.ones(48, 12))
    annotate(weight, fused=QKV)
    options = Muon([weight], split_fused=split).param_groups[0]
    (matrix,) = muon_matrix.matrices_of(weight, options)
    assert matrix.cut().cost == sum(r * c * min(r, c) for r, c in shapes)


def test_four_dimensions_are_refused_unless_adamw_steps_them() -> None:
    """A kernel of a convolution is no stack of matrices."""
    kernel = nn.Parameter(torch.ones(2, 2, 3, 3))
    with pytest.raises(ValueError, match="4 dimensions"):
        Muon([kernel])
    optimizer = Muon([kernel], use_muon=False)
    kernel.grad = torch.ones_like(kernel)
    optimizer.step()
    assert kernel.max() < 1.0


def test_copies_step_and_parameters_without_gradient_stay() -> None:
    """A copied optimizer plans anew, and so does one whose parameters have other gradients."""
    first, second = (nn.Parameter(torch.eye(3) * k) for k in (1.0, 2.0))
    optimizer = copy.deepcopy(Muon([first, second], lr=0.1, ns_dtype=torch.float64))
    copies = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in copies]
    copies[0].grad = torch.ones(3, 3)
    optimizer.step()
    assert not torch.equal(copies[0], before[0])
    assert torch.equal(copies[1], before[1])
    copies[0].grad, copies[1].grad = None, torch.ones(3, 3)
    between = copies[0].detach().clone()
    optimizer.step()
    assert torch.equal(copies[0], between)
    assert not torch.equal(copies[1], before[1])
    assert torch.equal(first, before[0])


def test_changed_groups_are_planned_anew() -> None:
    """Fused matrices may be split in another way, and parameters move to another group."""
    weight = nn.Parameter(torch.randn(6, 8))
    annotate(weight, fused=FusedParts(("gate", "up"), (3, 3)))
    other = {"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.5}
    optimizer = Muon([{"params": [weight]}, other], lr=0.1, ns_dtype=torch.float64)
    weight.grad = torch.randn(6, 8)
    first, second = optimizer.param_groups
    for change in (
        lambda: second["params"].append(first["params"].pop()),
        lambda: second.update(split_fused="none"),
    ):
        optimizer.step()
        change()
        # A copy has no plans.
        copied = copy.deepcopy(optimizer)
        (own,) = (p for g in copied.param_groups for p in g["params"] if p.shape == weight.shape)
        own.grad = weight.grad
        annotate(own, fused=FusedParts(("gate", "up"), (3, 3)))
        copied.step()
        optimizer.step()
        assert torch.equal(weight, own)


def _steps_narrow_gradients() -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    linear = fully_shard(nn.Linear(6, 8), mp_policy=policy)
    linear(torch.randn(3, 6)).square().sum().backward()
    whole = [nn.Parameter(full_tensor(p.detach())) for p in linear.parameters()]
    for own, parameter in zip(whole, linear.parameters(), strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        own.grad = full_tensor(parameter.grad).float()
    for params in (whole, linear.parameters()):
        Muon(params, lr=0.1).step()
    for own, parameter in zip(whole, linear.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(parameter.detach()), own.detach())


def test_gradients_may_be_narrower_than_weights(ranks: Ranks) -> None:
    """Matrices and vectors are stepped in the dtype of the main weights."""
    ranks(2).run(_steps_narrow_gradients)


def _refuses_torchs_shards() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, cut = (
        nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [placement]))
        for placement in (Replicate(), Shard(0))
    )
    optimizer = Muon([whole])
    with pytest.raises(NotImplementedError, match="divided by fully_shard"):
        optimizer.add_param_group({"params": [cut]})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_torch_has_sharded_are_refused(ranks: Ranks) -> None:
    """Replicated ones are whole, so they are taken; a refused group is not added."""
    ranks(2).run(_refuses_torchs_shards)


def _refuses_whole_gradients() -> None:
    for options in ({}, {"use_muon": False}):
        net = fully_shard(nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)))
        _, second = net.parameters()
        optimizer = Muon(net.parameters(), lr=0.1, **options)
        before = [local_tensor(p.detach()).clone() for p in net.parameters()]
        net(torch.ones(3, 6)).square().sum().backward()
        second.grad = torch.ones(6, 8)
        with pytest.raises(RuntimeError, match="a gradient kept as its parameter"):
            optimizer.step()
        for parameter, rows in zip(net.parameters(), before, strict=True):
            assert torch.equal(local_tensor(parameter.detach()), rows)
        assert sum(rows.numel() for rows in before) > 0


def test_whole_gradients_of_sharded_parameters_are_refused(ranks: Ranks) -> None:
    """Their rows are not this rank's; what comes before them is not stepped either."""
    ranks(2).run(_refuses_whole_gradients)


def test_groups_may_go_over_to_the_other_rule_and_back() -> None:
    """States of the rule that stepped a parameter before do not count as those of the other."""
    parameter, fresh = (nn.Parameter(torch.eye(3) + 1) for _ in range(2))
    optimizer = Muon([parameter], lr=0.1, use_muon=False)
    for uses_muon, names in (
        (True, {"momentum_buffer"}),
        (False, {"step", "exp_avg", "exp_avg_sq"}),
    ):
        parameter.grad = torch.ones(3, 3)
        optimizer.step()
        optimizer.param_groups[0]["use_muon"] = uses_muon
        with torch.no_grad():
            fresh.copy_(parameter)
        fresh.grad = torch.ones(3, 3)
        optimizer.step()
        Muon([fresh], lr=0.1, use_muon=uses_muon).step()
        assert set(optimizer.state[parameter]) == names
        assert torch.equal(parameter, fresh)


def test_strides_of_plain_parameters_do_not_count() -> None:
    """Transposed matrices, stacks of them and momentum like that step as contiguous ones."""
    for shape in ((6, 4), (3, 6, 4)):
        dense = nn.Parameter(torch.randn(shape))
        strided = nn.Parameter(dense.detach().mT.contiguous().mT)
        assert not strided.is_contiguous()
        optimizers = [Muon([p], lr=0.1) for p in (dense, strided)]
        for _ in range(2):
            grad = torch.randn(shape)
            for optimizer, parameter in zip(optimizers, (dense, strided), strict=True):
                parameter.grad = grad.clone()
                optimizer.step()
            for state in optimizers[1].state.values():
                state["momentum_buffer"] = state["momentum_buffer"].mT.contiguous().mT
        assert torch.equal(dense, strided)


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_learning_rate_may_be_a_tensor_of_one_element(use_muon: bool) -> None:
    """With or without a dimension, to the same bits."""
    weights = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for weight, lr in zip(weights, (torch.tensor(0.1), torch.tensor([0.1])), strict=True):
        optimizer = Muon([weight], lr=lr, use_muon=use_muon)
        weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(weights[1].detach(), weights[0].detach())
    assert not torch.equal(weights[1].detach(), torch.ones(4, 6))


def test_empty_matrices_are_stepped_alone() -> None:
    """Nothing is to be done, in no round, and no ratio of rows to columns is needed."""
    for shape in ((0, 6), (6, 0)):
        parameter = nn.Parameter(torch.ones(shape))
        parameter.grad = torch.ones(shape)
        annotate(parameter, fused=FusedParts(("gate", "up"), (3, 3), dim=shape.index(6)))
        Muon([parameter]).step()


def _takes_plain_states(root: Path) -> None:
    net = _shard(_Net(1), "optim_grads_params")
    first, second = _muon(net), _muon(net)
    _backward(net, 0, is_sharded=True)
    first.step()
    packed = first.state_dict()
    packed["state"] = {
        index: {name: local_tensor(value).clone() for name, value in state.items()}
        for index, state in packed["state"].items()
    }
    second.load_state_dict(packed)
    for parameter, state in first.state.items():
        for name, value in state.items():
            got = second.state[parameter][name]
            assert type(got) is type(value)
            assert torch.equal(local_tensor(got), local_tensor(value))
    checkpoint.save(root, step=1, model=net, optimizer=second)


def test_plain_states_of_this_ranks_rows_load_and_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    """They become DTensors like their parameters, as a checkpoint wants them."""
    ranks(2).run(_takes_plain_states, tmp_path)

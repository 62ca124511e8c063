"""A model with everything that state dicts stumble over, its optimizers, and torch's ways to save.

Gradients are written by hand after each backward, the same on any number of ranks, so that runs on
different meshes and strategies are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from megafsdp import FusedAdam, MixedPrecisionPolicy, Muon, full_tensor, fully_shard
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from tests.checkpoint.sharding import fill, fixed, full_state

VOCABULARY = 37
WIDTH = 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REMAINDERS = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    main_params_dtype=torch.bfloat16,
    main_grads_dtype=torch.float32,
)


class Block(nn.Module):
    """A norm with a frozen bias, a matrix, a stack of matrices, and a counting buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.up = nn.Linear(WIDTH, 5 * WIDTH - 1)
        self.down = nn.Linear(5 * WIDTH - 1, WIDTH, bias=False)
        self.stack = nn.Parameter(torch.zeros(3, WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the matrices make of its norm."""
        if self.training:
            self.count += 1
        y = self.norm(x)
        y = y + torch.einsum("btd,edf->btf", y, self.stack)
        return x + self.down(torch.relu(self.up(y)))


class Net(nn.Module):
    """Tied embeddings around two blocks, of which the second has a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].down.weight.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Run:
    """A model, its optimizer and scheduler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR


def divide(model: nn.Module, units: list[nn.Module], strategy: str, policy: object) -> nn.Module:
    """Shard units and model: by a strategy, or over two axes by ``hsdp`` or ``hfsdp``."""
    options: dict[str, object] = {"mp_policy": policy, "strategy": strategy}
    if strategy in ("hsdp", "hfsdp"):
        mesh = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_outer", "dp_shard")
        )
        outer = "optim" if strategy == "hfsdp" else "no_shard"
        options |= {"strategy": "optim_grads_params", "mesh": mesh, "outer_strategy": outer}
    for unit in units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: frozen parameters are in neither."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim > 1]
    vectors = [p for p in trainable if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.01),
        "adamw-fused": lambda: torch.optim.AdamW(groups, lr=0.01, fused=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "adam": lambda: FusedAdam(groups, lr=0.01),
        "adam-bf16": lambda: FusedAdam(
            groups, lr=0.01, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16
        ),
        "adam-fp8": lambda: FusedAdam(
            groups, lr=0.01, exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16
        ),
        "adam-remainders": lambda: FusedAdam(groups, lr=0.01, store_param_remainders=True),
        "muon": lambda: Muon(groups, lr=0.01),
    }
    return makers[kind]()


def run_of(kind: str, strategy: str, salt: int = 0) -> Run:
    """Build everything with the values of a salt."""
    policy = REMAINDERS if kind == "adam-remainders" else BF16
    model = Net()
    fill(model, salt)
    divide(model, list(model.blocks), strategy, policy)
    optimizer = optimizer_of(kind, model)
    return Run(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1)))


def tokens_of(step: int) -> torch.Tensor:
    """Return the same batch on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (2, 5), generator=generator)


def train(run: Run, steps: range) -> None:
    """Take steps with gradients that depend on name and step alone."""
    for step in steps:
        run.model(tokens_of(step)).float().square().mean().backward()
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                values = fixed(f"grad {name}", tuple(parameter.shape), step)
                if isinstance(parameter.grad, UnevenDTensor):
                    parameter.grad.copy_from_full_(values)
                else:
                    local_tensor(parameter.grad).copy_(values)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()


def logits(run: Run) -> torch.Tensor:
    """Return what the model computes, without a change of its buffers."""
    run.model.eval()
    with torch.no_grad():
        result = run.model(tokens_of(99))
    run.model.train()
    return result


def everything(run: Run) -> dict[str, object]:
    """Return all that a run consists of, as whole plain tensors; collective."""
    state = full_state(run.model, None)
    packed = run.optimizer.state_dict()
    for index, values in packed["state"].items():
        state |= {f"{index}/{key}": whole(value) for key, value in values.items()}
    state |= {f"group {i}": group for i, group in enumerate(packed["param_groups"])}
    return {**state, "scheduler": run.scheduler.last_epoch, "logits": logits(run)}


def whole(value: object) -> object:
    """Return a tensor in full and anything else as it is; collective."""
    return full_tensor(value).clone() if isinstance(value, torch.Tensor) else value


class AppState:
    """What torch's tutorial calls an application state: it saves and loads by itself."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return the state by torch's helper."""
        model, optimizer = get_state_dict(self._run.model, self._run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        set_state_dict(
            self._run.model,
            self._run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ON_CPU = StateDictOptions(cpu_offload=True)


def state_of(run: Run, way: str) -> dict[str, Any]:
    """Return what a user gives to ``dcp.save`` and ``dcp.load``."""
    scheduler = {"scheduler": run.scheduler.state_dict()}
    if way == "modules":
        return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    if way == "state dicts":
        states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        return {**states, **scheduler}
    if way == "stateful":
        return {"app": AppState(run), "scheduler": run.scheduler}
    options = {"flat": FLAT, "on the cpu": ON_CPU}.get(way)
    return {
        "model": get_model_state_dict(run.model, options=options),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options),
        **scheduler,
    }


def load(run: Run, way: str, directory: str) -> None:
    """Load a run in the way in which it was saved."""
    state = state_of(run, way)
    dcp.load(state, checkpoint_id=directory)
    if way in ("modules", "stateful"):
        return
    run.scheduler.load_state_dict(state["scheduler"])
    if way == "state dicts":
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        return
    options = {"flat": FLAT, "on the cpu": ON_CPU}.get(way)
    set_model_state_dict(run.model, state["model"], options=options)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=options)

"""What a step measures of experts, and when it moves the biases of their routers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import FusedAdam, fully_shard_model
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.parallel import Router
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.train_step import TrainStep
from megafsdp.training.step.update import StatisticsRequest
from tests.ranks import Ranks
from tests.training.runs import MIXTURE, MODEL, numbers_read_late
from tests.training.step.steps import batches_of

CPU = torch.device("cpu")
RATE = 0.01
# '!' marks a step whose gradients are infinite on the last rank alone.
PLAN = "..!."


class _Watch:
    """The loads and scores of every layer in a step, counted outside of the routers."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        for router in self.routers:
            router.register_forward_hook(self._look)
        self.start()

    def start(self) -> None:
        """Forget the last step."""
        self.loads = torch.zeros(len(self.routers), 4, dtype=torch.float64)
        self.scores = torch.zeros_like(self.loads)

    def _look(
        self, router: Router, args: tuple[torch.Tensor], out: tuple[torch.Tensor, ...]
    ) -> None:
        layer = self.routers.index(router)
        self.loads[layer] += torch.bincount(out[1].flatten(), minlength=4)
        scores = (args[0].detach() @ router.weight.detach().T).softmax(-1)
        self.scores[layer] += scores.double().sum(0)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loads and the scores of all ranks."""
        for counted in (self.loads, self.scores):
            dist.all_reduce(counted)
        return self.loads, self.scores


def _steps(balance: str, is_late: bool) -> None:
    sizes = MODEL | MIXTURE
    config = ModelConfig(**sizes, router_balance=balance, router_bias_update_rate=RATE)
    model = fully_shard_model(build_model(config, seed=5), unit_classes(config))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_broken = False

    def break_gradients(module: nn.Module, args: object, loss: torch.Tensor) -> None:
        if is_broken and rank == num_ranks - 1:
            loss.register_hook(lambda grad: grad * math.inf)

    model.register_forward_hook(break_gradients)
    watch = _Watch(model)
    with numbers_read_late(is_late):
        step = TrainStep(
            model,
            FusedAdam(model.parameters(), lr=1e-2, max_grad_norm=1.0),
            device=CPU,
            clip_norm=1.0,
            skips_nonfinite=True,
            max_skips=1,
            stop=StopRequest(CPU),
        )
        wanted_bias = torch.zeros(len(watch.routers), 4)
        for number, kind in enumerate(PLAN):
            is_broken = kind == "!"
            watch.start()
            batches = batches_of(number, rank, num_ranks)
            result = step(batches, wanted=StatisticsRequest(expert_loads=True))
            loads, scores = watch.sums()
            assert result.is_skipped is is_broken
            assert loads.sum(1).tolist() == [2 * 2 * 3 * 16 * num_ranks] * 2
            worst = (loads.amax(1) / loads.mean(1)).max().item()
            assert worst > 1.1
            assert result.statistics.max_load == pytest.approx(worst, rel=1e-6)
            if balance == "aux_loss":
                shares = loads / loads.sum(1, keepdim=True), scores / scores.sum(1, keepdim=True)
                loss = 4 * (shares[0] * shares[1]).sum(1).mean().item()
                assert result.statistics.aux_loss == pytest.approx(loss, rel=1e-5)
                assert all(router.expert_bias is None for router in watch.routers)
                continue
            assert result.statistics.aux_loss is None
            if not is_broken:
                errors = (loads.mean(1, keepdim=True) - loads).sign()
                wanted_bias += RATE * errors.float()
            found = torch.stack([router.expert_bias for router in watch.routers])
            assert torch.equal(found, wanted_bias)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("balance", ["bias", "aux_loss"])
def test_biases_move_by_the_loads_of_steps_that_are_taken(
    ranks: Ranks, balance: str, is_late: bool
) -> None:
    """Both microbatches of both ranks count; a skipped step moves nothing and leaves no counts.

    Loads and scores are summed beside the routers. The host may read a step's numbers when it was
    taken or skipped already.
    """
    ranks(2).run(_steps, balance, is_late)

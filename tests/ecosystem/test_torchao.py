"""torchao's layers for training in FP8, for quantization-aware training, and of frozen codes."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import checkpoint, fully_shard, fully_shard_model
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.fsdp.keywords import StrategyChoice
from megafsdp.fsdp.params.wrapped import is_wrapped, unwrapped
from tests.fsdp.toy import adamw, assert_same_grads, full_tensors, train_bit_for_bit
from tests.ranks import Ranks

WIDTH = 32

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="ecosystem: torchao is not installed"
    ),
]


class Block(nn.Module):
    """Two linears, which torchao replaces by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the last dim."""
        return x + self.down(self.up(x).relu())


# torchao is imported on ranks alone: it writes to the terminal and registers warnings.
def _in_float8(net: nn.Module, **options: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(net, config=Float8LinearConfig(emulate=True, **options))


def _in_wrapped_float8(net: nn.Module) -> None:
    _in_float8(net, enable_fsdp_float8_all_gather=True)


def _in_int8(net: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(net, int8_mixed_precision_training())


def _in_mxfp8(net: nn.Module) -> None:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import MXFP8TrainingWeightWrapperTensor
    from torchao.quantization.quantize_.common import KernelPreference

    config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight = MXFP8TrainingWeightWrapperTensor(module.weight.detach(), config)
            module.weight, module.bias = nn.Parameter(weight), None


def _quantization_aware(net: nn.Module) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    quantize_(
        net,
        QATConfig(
            activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
            weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=WIDTH),
            step="prepare",
        ),
    )


def _trains(
    convert: Callable[[nn.Module], None], strategy: StrategyChoice, is_compiled: bool
) -> None:
    reference = nn.Sequential(Block(), Block())
    convert(reference)
    assert type(reference[0].up) is not nn.Linear or is_wrapped(reference[0].up.weight)
    net = fully_shard_model(copy.deepcopy(reference), [Block], strategy=strategy)
    for block in (*reference, *net) if is_compiled else ():
        block.compile()
    train_bit_for_bit(reference, net, 32, WIDTH)
    for name, found in full_tensors(dict(net.named_parameters())).items():
        assert torch.equal(found, unwrapped(reference.get_parameter(name))), name


@pytest.mark.parametrize(
    ("strategy", "is_compiled"),
    [("optim_grads_params", False), ("optim_grads_params", True), ("optim", False)],
)
@pytest.mark.parametrize(
    "convert", [_in_float8, _in_wrapped_float8, _in_int8, _in_mxfp8, _quantization_aware]
)
def test_training_has_the_bits_of_one_process(
    ranks: Ranks,
    convert: Callable[[nn.Module], None],
    strategy: StrategyChoice,
    is_compiled: bool,
) -> None:
    """Two ranks' gradients are halved and added, which rounds alike on both sides."""
    ranks(2).run(_trains, convert, strategy, is_compiled)


def _trains_parts() -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
    from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    losses = []
    for shard, has_wrappers in (
        (torch_fully_shard, False),
        (fully_shard, False),
        (fully_shard, True),
    ):
        torch.manual_seed(0)
        net = Block()
        net.up.bias = net.down.bias = None
        _in_float8(net, enable_fsdp_float8_all_gather=has_wrappers)
        plan = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
        shard(parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])
        optimizer = adamw(net)
        for step in range(3):
            draws = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
            loss = net(torch.randn(16, WIDTH, generator=draws)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            precompute_float8_dynamic_scale_for_fsdp(net)
            losses.append(loss.item())
    assert losses[3:6] == losses[6:]
    assert losses[:3] == pytest.approx(losses[3:6], rel=1e-6)


def test_losses_over_tensor_parallel_parts_are_those_of_fsdp2(ranks: Ranks) -> None:
    """Whose own gathers of FP8 gloo refuses, so its weights are not wrapped."""
    ranks(4).run(_trains_parts)


def _of_nf4(net: nn.Module) -> None:
    from torchao.quantization import NF4Tensor

    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight = NF4Tensor.from_tensor(module.weight.detach(), 64, 32)
            module.weight = nn.Parameter(weight, requires_grad=False)


def _of_int8(net: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(net.requires_grad_(False), Int8WeightOnlyConfig())


class Adapted(nn.Module):
    """A frozen block, whose weights are codes, beside a trained one."""

    def __init__(self, convert: Callable[[nn.Module], None], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen, self.trained = Block(), Block()
        convert(self.frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the last dim, through the frozen block last."""
        return self.frozen(self.trained(x))


def _trains_beside_codes(convert: Callable[[nn.Module], None], directory: Path) -> None:
    reference, net = Adapted(convert), Adapted(convert)
    with pytest.raises(NotImplementedError, match=r"'frozen.up.weight'.*in ignored_params"):
        fully_shard(net)
    ignored = {p for p in net.frozen.parameters() if type(p) is not nn.Parameter}
    assert len(ignored) == 2
    fully_shard(net, ignored_params=ignored)
    batch = torch.randn(dist.get_world_size(), 4, WIDTH)
    for part in batch:
        (reference(part).square().mean() / len(batch)).backward()
    net(batch[dist.get_rank()]).square().mean().backward()
    assert_same_grads(net, reference, rtol=0, atol=0)
    other = Adapted(convert, seed=1)
    assert not torch.equal(other(batch[0]), reference(batch[0]))
    checkpoint.save(directory, step=1, model=net)
    checkpoint.load(directory, model=other)
    assert torch.equal(other(batch[0]), reference(batch[0]))


@pytest.mark.parametrize("convert", [_of_nf4, _of_int8])
def test_frozen_codes_train_others_as_ignored_parameters(
    ranks: Ranks, convert: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    """They are refused by name, with this cure; their gathers for FSDP2 are not called."""
    ranks(2).run(_trains_beside_codes, convert, tmp_path)


class Wide(nn.Module):
    """Weights with enough elements on each rank for codes, and biases that are stepped in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map the last dim."""
        return self.down(self.up(x).relu())


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = net(torch.randn(8, 64, generator=draws)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# A stored graph of one of these optimizers is found for another, also under FSDP2.
@torch._functorch.config.patch(enable_autograd_cache=False)
def _steps_of_codes(name: str, directory: Path) -> None:
    import torchao.optim
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    def build(seed: int, is_ours: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = Wide()
        if is_ours:
            fully_shard(net, even_shards=True)
        else:
            torch_fully_shard(net)
        return net, getattr(torchao.optim, name)(net.parameters(), lr=1e-2)

    losses = [_train(*build(0, is_ours), range(4)) for is_ours in (False, True)]
    assert losses[0] == losses[1]
    first, second = build(0, True), build(1, True)
    assert _train(*first, range(2)) == losses[0][:2]
    assert type(first[1].state[first[0].up.weight]["exp_avg"].to_local()) is not torch.Tensor
    dcp.save(dict(zip("mo", get_state_dict(*first), strict=True)), checkpoint_id=directory)
    # One step more makes the states that the load fills.
    _train(*second, range(1))
    loaded = dict(zip("mo", get_state_dict(*second), strict=True))
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(*second, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])
    assert _train(*second, range(2, 4)) == losses[0][2:]


@pytest.mark.skipif(IS_DISPATCH_BYPASSED, reason="torch 2.11 traces no rules of ours")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_optimizers_of_codes_step_even_shards_as_those_of_fsdp2(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """They compile the step of each parameter; torch's checkpoints have the codes."""
    ranks(2).run(_steps_of_codes, name, tmp_path)

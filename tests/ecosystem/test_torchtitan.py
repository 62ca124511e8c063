"""torchtitan's trainer by the program of docs/integrations/torchtitan.md, beside FSDP2."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ecosystem.test_pages import PAGES
from tests.end_to_end.test_readme import ROOT, python_blocks

pytest.importorskip("torchtitan", reason="ecosystem: torchtitan is not installed")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
        reason="torchtitan 0.3 needs torch 2.15",
    ),
]

# Lets the trainer run on CPUs, with attention that they have and two layers; then runs the page's
# program, or torchtitan's own with FSDP2, which sums on gloo.
DRIVER = """
import collections, importlib, os, sys, types
import torch, torch._utils
torch.set_num_threads(1)
cpu = types.ModuleType("cpu")
vars(cpu).update({name: each for name, each in vars(torch.cpu).items() if name[0] != "_"})
cpu.current_device, cpu.get_device_name = lambda: 0, lambda *_: "cpu"
cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
cpu.memory_stats = lambda *_: collections.defaultdict(int)
cpu.empty_cache = cpu.reset_peak_memory_stats = cpu.reset_accumulated_memory_stats = lambda: None
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: cpu
import torchtitan.distributed.fsdp
import torchtitan.models.common.config_utils as config_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
config_utils.get_attention_config = lambda _: ScaledDotProductAttention.Config()
registry = importlib.import_module(f"torchtitan.models.{os.environ['MODEL']}.config_registry")
whole = registry.model_registry
def shortened(*args, **kwargs):
    spec = whole(*args, **kwargs)
    spec.model.layers = spec.model.layers[:2]
    return spec
registry.model_registry = shortened
fully_shard = torchtitan.distributed.fsdp.fully_shard
def summing(module, **options):
    units = fully_shard(module, **options)
    for unit in units if isinstance(units, list) else [units]:
        unit.set_force_sum_reduction_for_comms(True)
    return units
torchtitan.distributed.fsdp.fully_shard = summing
exec(os.environ["PROGRAM"])
"""
OF_FSDP2 = "from torchtitan.train import main; main()"


def _write_assets(folder: Path) -> None:
    """Write what the debug configurations read: a tokenizer of bytes, and some text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<|end|>"])
    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    special = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    texts = [path.read_text() for path in sorted(ROOT.glob("megafsdp/fsdp/*.py"))]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "tests/assets/c4_test/data.json").write_text(lines)


def _train(folder: Path, program: str, run: str, num_steps: int, options: str) -> list[float]:
    """Train up to a step, saving every second one; return loss and norm of each step."""
    (folder / "driver.py").write_text(DRIVER)
    num_ranks, model, config, *others = options.split()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num_ranks]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "driver.py"]
    command += ["--module", model, "--config", config, "--training.disable_cuda_graphs"]
    command += ["--training.local_batch_size", "2", "--training.seq_len", "64"]
    command += ["--training.steps", str(num_steps), "--dump_folder", run]
    command += ["--lr_scheduler.total_steps", "10"]
    command += ["--checkpoint.enable", "--checkpoint.interval", "2", *others]
    own = {"PROGRAM": program, "MODEL": model, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", text)
    return [float(each) for line in sorted(set(found)) for each in line]


CASES = {
    "tied weights, tp": "4 qwen3 qwen3_debugmodel --parallelism.tensor_parallel_degree 2",
    # gloo's exchange of lists takes equal sizes alone.
    "mixture, ep": "4 qwen3 qwen3_moe_debug --parallelism.expert_parallel_degree 2 "
    "--debug.moe_force_load_balance",
    "lora over float8": "2 llama3 llama3_debugmodel_float8_emulate_lora",
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_runs_go_on_from_checkpoints_of_fsdp2_and_back(tmp_path: Path, options: str) -> None:
    """Each trains from the other's checkpoint, to the other's losses and norms."""
    _write_assets(tmp_path)
    (ours,) = python_blocks((PAGES / "torchtitan.md").read_text())
    whole = _train(tmp_path, OF_FSDP2, "theirs", 6, options)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "ours" / "checkpoint" / f"step-{step}")
    middle = _train(tmp_path, ours, "ours", 4, options)
    end = _train(tmp_path, OF_FSDP2, "ours", 6, options)
    assert middle[::3] + end[::3] == [3, 4, 5, 6]
    # Printed with four digits after the point; Adam's first steps follow signs of small gradients.
    torch.testing.assert_close(
        torch.tensor(middle + end), torch.tensor(whole[6:]), rtol=0, atol=2e-3
    )

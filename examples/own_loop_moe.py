"""A mixture of transformers, Qwen3-MoE or Mixtral, trained by Muon with experts declared.

    torchrun --nproc-per-node 2 examples/own_loop_moe.py

One call declares each stack of experts, for any number of ranks: Muon takes the gate and the up
projection of each expert as separate matrices, and checkpoints give them separate names, so that
other programs can read them. Started again, also on 1 or 3 ranks, it resumes.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import megafsdp

OUTPUT, STEPS, ROWS, LENGTH = "runs/own_loop_moe", 20, 8, 64
# Names in a checkpoint, in place of "experts.gate_up_proj".
NAMES = ("{module}.gate_proj", "{module}.up_proj")


def declare_experts(model: nn.Module) -> None:
    """Say of each stack ``(experts, 2 x inner, hidden)`` that gate and up lie along its dim 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            inner = parameter.shape[1] // 2
            fused = megafsdp.FusedParts(("gate", "up"), (inner, inner), dim=1, stored_as=NAMES)
            megafsdp.annotate(parameter, is_expert=True, fused=fused)
        elif name.endswith("experts.down_proj"):
            megafsdp.annotate(parameter, is_expert=True)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
if device.type == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(0)  # All ranks start from the same weights.
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 256}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).to(device)
declare_experts(model)
megafsdp.fully_shard_model(model)
# Muon is for matrices between hidden states: AdamW steps embeddings, output layer and vectors.
others = [p for name, p in model.named_parameters() if "embed" in name or "lm_head" in name]
matrices = [p for p in model.parameters() if all(p is not other for other in others)]
groups = [{"params": matrices}, {"params": others, "use_muon": False}]
optimizer = megafsdp.Muon(groups, lr=3e-3, adjust_lr_fn="match_rms_adamw")

done = megafsdp.checkpoint.latest_step(OUTPUT) or 0
if done:
    megafsdp.checkpoint.load(OUTPUT, model=model, optimizer=optimizer)
text = torch.tensor(list(Path(dist.__file__).read_bytes()), device=device)
torch.manual_seed(1 + rank + done)  # Each rank draws samples of its own.
for step in range(done + 1, done + STEPS + 1):
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), device=device)
    rows = text[starts + torch.arange(LENGTH, device=device)]
    loss = model(rows, labels=rows).loss
    loss.backward()
    megafsdp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 in (0, 1):
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
megafsdp.checkpoint.save(OUTPUT, step=done + STEPS, model=model, optimizer=optimizer)
dist.destroy_process_group()

"""A Qwen3 of transformers, cut by its own tp plan and then sharded: two axes of ranks.

    torchrun --nproc-per-node 4 examples/own_loop_tp.py

torch's parallelize_module cuts the layers over pairs of ranks; megafsdp shards what it leaves on
each rank over the data-parallel ranks. Started again, also on 2 or 6 ranks, it resumes.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, parallel
from transformers import Qwen3Config, Qwen3ForCausalLM

import megafsdp

OUTPUT, STEPS, ROWS, LENGTH, TP = "runs/own_loop_tp", 20, 8, 64, 2
# torch's styles for the names in a model's tp plan. A head norm sees its rank's heads, dim 2.
HEAD_NORM = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
STYLES = {
    "colwise": parallel.ColwiseParallel(),
    "rowwise": parallel.RowwiseParallel(),
    "embedding_rowwise": parallel.RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": parallel.ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": HEAD_NORM,
}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
meshes = megafsdp.ParallelDims(tp=TP).build(device.type)  # The rest is data-parallel.

torch.manual_seed(0)  # All ranks start from the same weights.
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).to(device)
plan = {name: STYLES[style] for name, style in model.tp_plan.items()}
parallel.parallelize_module(model, meshes.tp, plan)
model.lm_head.weight = model.model.embed_tokens.weight  # Cutting them one by one untied them.
megafsdp.fully_shard_model(model, mesh=meshes.data)
optimizer = megafsdp.FusedAdam(model.parameters(), lr=3e-3, max_grad_norm=1.0)

done = megafsdp.checkpoint.latest_step(OUTPUT) or 0
if done:
    megafsdp.checkpoint.load(OUTPUT, model=model, optimizer=optimizer)
text = torch.tensor(list(Path(dist.__file__).read_bytes()), device=device)
torch.manual_seed(1 + meshes.data_rank + done)  # The ranks of one tp group read the same samples.
for step in range(done + 1, done + STEPS + 1):
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), device=device)
    rows = text[starts + torch.arange(LENGTH, device=device)]
    loss = model(rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 10 in (0, 1):
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
megafsdp.checkpoint.save(OUTPUT, step=done + STEPS, model=model, optimizer=optimizer)
dist.destroy_process_group()

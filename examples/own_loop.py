"""Train your own module in your own loop: a few calls of megafsdp, the rest is plain PyTorch.

    torchrun --nproc-per-node 2 examples/own_loop.py

The model learns the bytes of a file of Python's standard library. Started again, it resumes.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megafsdp

OUTPUT = "runs/own_loop"
STEPS, MICROBATCHES, ROWS, LENGTH, WIDTH = 40, 2, 8, 64, 128


class ByteModel(nn.Module):
    """A small transformer over bytes, of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of predicting the next byte."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, tokens.device)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())

torch.manual_seed(0)  # All ranks start from the same weights.
model = ByteModel().to(device)
for layer in model.layers:
    megafsdp.fully_shard(layer)
megafsdp.fully_shard(model)
# Clips gradients in its step; any element-wise optimizer of torch works in its place.
optimizer = megafsdp.FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.01, max_grad_norm=1.0)

last = megafsdp.checkpoint.latest_step(OUTPUT)
if last is not None:
    megafsdp.checkpoint.load(OUTPUT, model=model, optimizer=optimizer)
done = last or 0

text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
torch.manual_seed(1 + rank + done)  # Each rank draws samples of its own.
for step in range(done + 1, done + STEPS + 1):
    for index in range(MICROBATCHES):
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), device=device)
        rows = text[starts + torch.arange(LENGTH + 1, device=device)]
        with megafsdp.microbatch(model, is_last=index == MICROBATCHES - 1):
            loss = model(rows[:, :-1], rows[:, 1:])
            (loss / MICROBATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 in (0, 1):
        norm = optimizer.grad_norm.item()
        print(f"step {step}  loss {loss.item():.3f}  grad norm {norm:.3f}", flush=True)

megafsdp.checkpoint.save(OUTPUT, step=done + STEPS, model=model, optimizer=optimizer)
dist.destroy_process_group()

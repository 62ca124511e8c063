"""Train on workers of Ray, which resumes when workers die.

    python examples/cluster/ray_train.py --workers 16 --gpus --storage /mnt/shared/runs --steps 200

Run it on a machine of the cluster, or by ``ray job submit``. The storage is a folder that all
machines mount. Started again under the same name, it resumes from the last checkpoint, with any
number of workers.
"""

import argparse

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from megafsdp import clip_grad_norm_, fully_shard_model
from megafsdp.integrations.ray import report, resume
from megafsdp.models import build_model, presets


def train(config: dict) -> None:
    """Train on one worker, within the process group that Ray has made."""
    device = ray.train.torch.get_device()
    model = build_model(presets[config["preset"]], seed=0).to(device)
    model = fully_shard_model(model, ["TransformerLayer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = resume(model, optimizer)
    rank = torch.distributed.get_rank()
    for step in range(done + 1, config["steps"] + 1):
        # Rows are drawn by step and worker, so that a repeated step has the same rows.
        source = torch.Generator().manual_seed(step * 100_000 + rank)
        tokens = torch.randint(256, (config["rows"], 129), generator=source).to(device)
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % config["save_every"] == 0 or step == config["steps"]:
            report({"loss": loss.item()}, step=step, model=model, optimizer=optimizer)


def main() -> None:
    """Start the workers and print the last metrics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU a worker")
    parser.add_argument("--storage", default="/tmp/runs", help="folder that all machines mount")
    parser.add_argument("--name", default="ray")
    parser.add_argument("--preset", default="qwen3-toy")
    parser.add_argument("--rows", type=int, default=2, help="samples of a worker in a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--max-failures", type=int, default=3)
    options = parser.parse_args()
    ray.init()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()

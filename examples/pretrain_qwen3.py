"""Pretrain a Qwen3 of 0.6 billion parameters: a configuration and one call.

    megafsdp prep corpus/ --tokenizer qwen3/tokenizer.json --output data/qwen3
    torchrun --nproc-per-node 8 examples/pretrain_qwen3.py --run.directory runs/qwen3

Any value of examples/configs/pretrain_qwen3.yaml can be overridden. Started again, it resumes from
its latest checkpoint.
"""

import sys
from pathlib import Path

from megafsdp.training import ConfigError, parse_config, train

CONFIG = Path(__file__).parent / "configs" / "pretrain_qwen3.yaml"

if __name__ == "__main__":
    try:
        train(parse_config(["--config", str(CONFIG), *sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(f"{Path(__file__).name}: {error}")

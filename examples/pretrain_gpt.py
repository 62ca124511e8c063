"""Pretrain a GPT-2 of 124 million parameters: a configuration and one call.

    megafsdp prep corpus/ --tokenizer gpt2/tokenizer.json --output data/gpt
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --run.directory runs/gpt

Any value of examples/configs/pretrain_gpt.yaml can be overridden. Started again, it resumes from
its latest checkpoint.
"""

import sys
from pathlib import Path

from megafsdp.training import ConfigError, parse_config, train

CONFIG = Path(__file__).parent / "configs" / "pretrain_gpt.yaml"

if __name__ == "__main__":
    try:
        train(parse_config(["--config", str(CONFIG), *sys.argv[1:]]))
    except ConfigError as error:
        sys.exit(f"{Path(__file__).name}: {error}")

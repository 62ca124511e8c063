"""A trained run becomes a model of transformers, and goes on as a run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megafsdp import checkpoint, fully_shard_model
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.training import Config, train
from megafsdp.training.cli.main import main
from tests.ranks import Ranks
from tests.training.runs import tiny, write_corpus

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")


def _train(config: Config) -> None:
    train(config)


def _import_and_score(source: str, config: ModelConfig) -> torch.Tensor:
    model = fully_shard_model(build_model(config, seed=9), unit_classes(config))
    checkpoint.import_hf(model, source)
    with torch.no_grad():
        return model.eval()(_tokens())


def _tokens() -> torch.Tensor:
    return torch.arange(32).reshape(2, 16) * 5 % 256


@pytest.mark.parametrize("architecture", ["gpt", "llama", "qwen3"])
def test_a_trained_run_speaks_as_a_model_of_transformers(
    ranks: Ranks, architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on 2 ranks, exported by the command line, loaded there, and imported on 3 ranks."""
    write_corpus(tmp_path)
    num_groups = 4 if architecture == "gpt" else 2
    heads = {"num_attention_heads": 4, "num_query_groups": num_groups, "head_dim": 8}
    config = tiny(tmp_path, model={"architecture": architecture, **heads})
    ranks(2).run(_train, config)
    source, target = str(config.checkpoint_directory), str(tmp_path / "exported")
    assert main(["ckpt", "export-hf", source, target, "--dtype", "fp32"]) == 0
    assert "bytes in 1 file(s)" in capsys.readouterr().out

    model_config = config.model.resolve()
    ours = build_model(model_config, seed=9)
    checkpoint.load(source, model=ours)
    theirs, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    # The defaults of transformers lie outside of this vocabulary, or mean another token.
    assert theirs.config.eos_token_id is None
    with torch.no_grad():
        wanted = ours.eval()(_tokens())
        logits = theirs.eval()(_tokens()).logits
        untrained = build_model(model_config, seed=config.run.seed).eval()(_tokens())
    assert (wanted - untrained).abs().max() > 0.1, "six steps have moved the logits"
    # The two add up in another order; logits are of size 1.
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
    for logits in ranks(3).run(_import_and_score, target, model_config):
        assert torch.equal(logits, wanted)

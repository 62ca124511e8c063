"""Text from a run's checkpoint, on one rank and on several, against a loop without our engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import checkpoint
from megafsdp.data import ByteTokenizer
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.models import LanguageModel, ModelConfig, build_model
from megafsdp.training import generate as generation
from megafsdp.training import to_yaml, train
from megafsdp.training.cli.main import main
from megafsdp.training.generate import GenerateOptions, generate
from tests.ranks import Ranks
from tests.training.runs import MODEL, SEQUENCE_LENGTH, stored_tensors, tiny, write_corpus

CONFIG = ModelConfig(**MODEL, init_std=0.5)


def _model(seed: int) -> LanguageModel:
    # Far from uniform, so that the likeliest token is no matter of rounding.
    return build_model(CONFIG, seed=seed)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints of steps 2 and 5."""
    config = tiny(tmp_path, model={"init_std": 0.5})
    config.run_directory.mkdir()
    (config.run_directory / "config.yaml").write_text(to_yaml(config))
    for step in (2, 5):
        extra = {"config": config.to_dict(), "run": {"step": step}}
        checkpoint.save(config.checkpoint_directory, step=step, model=_model(step), extra=extra)
    return config.run_directory


@torch.no_grad()
def _greedy(
    model: nn.Module, prompt: str, num_tokens: int, *, context: int = SEQUENCE_LENGTH
) -> str:
    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        logits = model.eval()(torch.tensor([tokens[-context:]]))[0, -1]
        tokens.append(int(logits[: ByteTokenizer.vocab_size].argmax()))
        if tokens[-1] == ByteTokenizer.eod:
            break
    return ByteTokenizer().decode(tokens)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_text_is_that_of_the_latest_checkpoint(ranks: Ranks, run: Path, num_ranks: int) -> None:
    """Greedy, token by token; the same on every rank, whatever the run was divided like."""
    options = GenerateOptions(run=str(run), prompt="import ", tokens=16, device="cpu")
    wanted = _greedy(_model(5), "import ", 16)
    assert len(wanted) > 10
    assert ranks(num_ranks).run(generate, options) == [wanted] * num_ranks
    older = _greedy(_model(2), "import ", 16)
    assert older != wanted
    assert ranks(num_ranks).run(generate, replace(options, step=2)) == [older] * num_ranks


def test_text_ends_with_the_document(run: Path) -> None:
    """However long it may be."""
    wanted = _greedy(_model(5), "h", 12)
    assert len(wanted) < 12
    assert generate(GenerateOptions(run=str(run), prompt="h", tokens=12, device="cpu")) == wanted


@pytest.mark.parametrize("from_hf", [None, "saved"])
def test_positions_are_those_that_the_model_has_seen(tmp_path: Path, from_hf: str | None) -> None:
    """Of the run's samples; all of the model's, if it came from elsewhere."""
    config = tiny(tmp_path, model={"init_std": 0.5, "max_sequence_length": 32})
    filled = replace(config.model.filled(), from_hf=from_hf)
    config = replace(config, model=filled, data=replace(config.data, tokenizer="byte"))
    model = build_model(filled.resolve(), seed=5)
    extra = {"config": config.to_dict()}
    checkpoint.save(config.checkpoint_directory, step=1, model=model, extra=extra)
    root = str(config.checkpoint_directory)
    text = generate(GenerateOptions(run=root, prompt="import ", tokens=30, device="cpu"))
    seen, all_positions = (_greedy(model, "import ", 30, context=n) for n in (16, 32))
    assert seen != all_positions
    assert text == (seen if from_hf is None else all_positions)


def _generate_where_only_the_first_rank_reads(options: GenerateOptions) -> str:
    """Generate as on a shared file system that shows the checkpoint to other ranks later."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(generation, "_read", None)
        return generate(options)


def test_the_first_rank_finds_the_checkpoint_for_all(ranks: Ranks, run: Path) -> None:
    """Others would look for another one, or for none."""
    options = GenerateOptions(run=str(run), prompt="import ", tokens=4, device="cpu")
    wanted = _greedy(_model(5), "import ", 4)
    assert ranks(2).run(_generate_where_only_the_first_rank_reads, options) == [wanted] * 2


def _generate_where_the_last_rank_has_no_tokenizer(options: GenerateOptions) -> str:
    """Return the error of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(generation, "load_tokenizer", _fail)
        with pytest.raises(ConfigError) as failure:
            generate(options)
        return str(failure.value)


def _fail(spec: str) -> None:
    raise ConfigError(f"no tokenizer {spec}")


def test_all_ranks_fail_where_one_has_no_tokenizer(ranks: Ranks, run: Path) -> None:
    """Else the others would wait for it."""
    options = GenerateOptions(run=str(run), prompt="a", tokens=1, device="cpu")
    for message in ranks(2).run(_generate_where_the_last_rank_has_no_tokenizer, options):
        assert "no tokenizer byte" in message


def test_weights_with_remainders_are_read(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint has them in fp32, where the run's main weights are bf16."""
    write_corpus(tmp_path)
    config = tiny(
        tmp_path,
        model={"init_std": 0.5},
        precision={"main_params_dtype": "bf16"},
        optimizer={"store_param_remainders": True},
        train={"steps": 1},
    )
    ranks(2).run(train, config)
    stored = stored_tensors(config.checkpoint_directory, 1)
    model = _model(0)
    model.load_state_dict({name: stored[f"model.{name}"] for name in model.state_dict()})
    options = GenerateOptions(run=config.run.directory, prompt="import ", tokens=30, device="cpu")
    assert ranks(2).run(generate, options) == [_greedy(model, "import ", 30)] * 2


def test_draws_follow_seed_temperature_and_top_k(ranks: Ranks, run: Path) -> None:
    """Two ranks draw alike; of the likeliest token alone every draw is the greedy one."""
    drawn = GenerateOptions(run=str(run), prompt="a", tokens=12, temperature=1.5, device="cpu")

    def text(**changes: object) -> str:
        (first, second) = ranks(2).run(generate, replace(drawn, **changes))
        assert first == second
        return first

    usual, likeliest = text(), text(top_k=1)
    assert usual == text() != text(seed=1)
    assert likeliest == text(temperature=0.0) != text(top_k=2)


def test_the_command_prints_the_text_and_no_control_characters(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on standard output; other ranks than the first print nothing."""
    words = ["generate", str(run), "--prompt", "a\x1b[2J", "--tokens", "0", "--device", "cpu"]
    assert main(words) == 0
    assert capsys.readouterr().out == "a\\x1b[2J\n"
    monkeypatch.setattr("megafsdp.training.cli.main.generate", lambda options: "text")
    # It would keep the warnings of later tests from being seen.
    monkeypatch.setattr("megafsdp.training.cli.main._configure_logging", lambda: None)
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "of at least 0, got -1. In the option --tokens"),
        ({"temperature": float("nan")}, "a finite number of at least 0, got nan"),
        ({"top_k": 0}, "at least 1, got 0. In the option --top-k"),
        ({"seed": -1}, "from 0 to 2.*got -1. In the option --seed"),
        ({"seed": 2**64}, "from 0 to 2.*got 18446744073709551616. In the option --seed"),
        ({"tokenizer": "no/such.json"}, "a tokenizer file, got no such file"),
    ],
)
def test_wrong_options_are_refused(run: Path, changes: dict[str, object], message: str) -> None:
    """Numbers before anything is read."""
    options = replace(GenerateOptions(run=str(run), prompt="a", device="cpu"), **changes)
    with pytest.raises(ConfigError, match=message):
        generate(options)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """Without a checkpoint, or with one that no run has saved."""
    options = GenerateOptions(run=str(tmp_path), prompt="a", device="cpu")
    with pytest.raises(CheckpointError, match="published steps"):
        generate(options)
    checkpoint.save(tmp_path, step=1, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"a checkpoint of a training run.*got one without"):
        generate(options)


def test_a_run_without_a_tokenizer_asks_for_one(tmp_path: Path) -> None:
    """The message names the option; a prompt that the model has no rows for is refused."""
    for folder, sections, message in (
        ("a", {"data": {"tokenizer": None}}, "where data.tokenizer is null.*--tokenizer"),
        ("b", {"model": {"vocab_size": 97}}, "below the model's vocab_size 97, got token 97"),
    ):
        config = tiny(tmp_path / folder, **sections)
        model = build_model(config.model.resolve(), seed=0)
        extra = {"config": config.to_dict()}
        checkpoint.save(config.checkpoint_directory, step=1, model=model, extra=extra)
        root = str(config.checkpoint_directory)
        with pytest.raises(ConfigError, match=message):
            generate(GenerateOptions(run=root, prompt="a", device="cpu"))

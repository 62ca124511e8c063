"""A run that goes through Megatron-LM's format goes on as if it never had."""

from __future__ import annotations

from pathlib import Path

import torch

from megafsdp.checkpoint.megatron.exporter import to_megatron
from megafsdp.checkpoint.megatron.importer import from_megatron
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.training import Config, train
from tests.ranks import Ranks
from tests.training.runs import stored_tensors, tiny, write_corpus


def test_a_run_goes_on_from_its_checkpoint_in_their_format(ranks: Ranks, tmp_path: Path) -> None:
    """Three steps, there and back, three more: bit for bit those of six steps, by both forms."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, checkpoint={"interval_steps": 3})
    ranks(2).run(train, config)
    for transformer_impl in ("transformer_engine", "local"):
        _go_there_and_back(ranks, config, tmp_path / transformer_impl, transformer_impl)


def _go_there_and_back(
    ranks: Ranks, config: Config, directory: Path, transformer_impl: str
) -> None:
    theirs = directory / "theirs"
    to_megatron(config.checkpoint_directory, theirs, step=3, transformer_impl=transformer_impl)
    run_options = {"directory": str(directory / "other"), "device": "cpu"}
    other = tiny(directory.parent, run=run_options)
    from_megatron(theirs, other.checkpoint_directory)
    with (
        CheckpointReader(config.checkpoint_directory, 3) as saved,
        CheckpointReader(other.checkpoint_directory, 3) as converted,
    ):
        assert converted.object("lr_scheduler") == saved.object("lr_scheduler")
        run, whole_run = (r.object("extra")["run"] for r in (converted, saved))
        assert run.items() <= whole_run.items() and run["consumed_samples"] == 36
    ranks(2).run(train, other)
    before, wanted, found = (
        stored_tensors(*place)
        for place in (
            (config.checkpoint_directory, 3),
            (config.checkpoint_directory, 6),
            (other.checkpoint_directory, 6),
        )
    )
    assert set(found) == set(wanted)
    odd = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert odd == []
    assert any(not torch.equal(before[name], wanted[name]) for name in wanted)

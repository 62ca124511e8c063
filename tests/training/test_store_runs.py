"""Runs whose checkpoints are in an object store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megafsdp.checkpoint import StorePath, latest_step
from megafsdp.checkpoint.tools.diff import diff
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.training import Config, train
from megafsdp.training.run_folder import checkpoints_of
from tests.checkpoint.faulty_store import Fault, FaultyStore
from tests.ranks import Ranks, RanksError
from tests.training.runs import rows, tiny, write_corpus


def _break_off(config: Config) -> None:
    def end(step: int, *unused: object) -> None:
        if step == 5:
            raise KeyError("the power is gone")

    with pytest.raises(KeyError, match="the power is gone"):
        train(config, on_step=end)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_broken_run_goes_on_from_a_store_bit_for_bit(
    ranks: Ranks, tmp_path: Path, in_background: bool
) -> None:
    """Weights, states, and random states equal those of an unbroken run on a disk."""
    store = FaultyStore(tmp_path / "store")
    write_corpus(tmp_path)
    checkpoints = {"interval_steps": 2, "keep_last": 1, "in_background": in_background}
    straight = tiny(tmp_path, run={"directory": str(tmp_path / "straight")})
    ranks(2).run(train, straight)
    config = tiny(tmp_path, checkpoint={"directory": store.root, **checkpoints})
    ranks(2).run(_break_off, config)
    assert latest_step(store.root) == 4
    ranks(2).run(train, config)
    report = diff(straight.checkpoint_directory, store.root, ignore=["extra"])
    assert report.is_equal, report.describe()
    assert report.num_equal > 30
    folders = {name.partition("/")[0] for name in store.names()}
    assert folders == {"iter_0000006", "latest_checkpointed_iteration.txt"}
    assert checkpoints_of(config.run_directory) == StorePath(store.root)


@pytest.mark.parametrize("verb", ["read", "write", "remove"])
def test_a_store_without_permission_is_found_before_the_first_step(
    ranks: Ranks, tmp_path: Path, verb: str
) -> None:
    """On every rank, so that no training is lost for want of a place to save it."""
    store = FaultyStore(tmp_path / "store")
    write_corpus(tmp_path)
    config = tiny(tmp_path, checkpoint={"directory": store.root})
    if verb == "read":
        ranks(2).run(
            train, tiny(tmp_path, checkpoint={"directory": store.root}, train={"steps": 1})
        )
    before = len(rows(tmp_path)) if verb == "read" else 0
    store.plan(Fault(verb, "denied"))
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert "CheckpointError: Expected a store that" in text
        assert "Give this user the rights to list, read, write and remove objects there" in text
    assert len(rows(tmp_path)) == before


def test_a_store_that_is_full_ends_a_run_with_its_last_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The error says what to do; with room the same command goes on."""
    store = FaultyStore(tmp_path / "store")
    write_corpus(tmp_path)
    config = tiny(tmp_path, checkpoint={"directory": store.root, "interval_steps": 2})
    store.plan(Fault("write", "full", "iter_0000004/__1_0"))
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    for text in failure.value.failures.values():
        assert "no space left in the store" in text
        assert "Make room in the store or raise its quota; what was published before stays" in text
    assert latest_step(store.root) == 2
    store.plan()
    assert [summary.step for summary in ranks(2).run(train, config)] == [6, 6]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("nowhere://bucket/run", r"a URL of a kind that fsspec knows.*Correct the URL"),
        ("gs://bucket/run", r"the package that opens gs:// URLs.*gs:// needs gcsfs"),
    ],
)
def test_a_url_that_nothing_opens_is_refused_on_every_rank(
    ranks: Ranks, tmp_path: Path, url: str, what: str
) -> None:
    """An unknown kind, or one whose package is not installed: what to install."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError, match=what) as failure:
        ranks(2).run(train, tiny(tmp_path, checkpoint={"directory": url}))
    assert set(failure.value.failures) == {0, 1}
    assert all("CheckpointError" in text for text in failure.value.failures.values())
    with pytest.raises(CheckpointError, match=what):
        latest_step(url)


def test_a_runs_own_folder_is_local(tmp_path: Path) -> None:
    """Metrics are appended to files there, which a store cannot do."""
    with pytest.raises(ConfigError, match=r"a local folder.*Set checkpoint\.directory to the URL"):
        train(tiny(tmp_path, run={"directory": "s3://bucket/run"}))


def test_a_run_says_that_a_store_is_not_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job with the same folder of checkpoints would not be kept out."""
    write_corpus(tmp_path)
    store = FaultyStore(tmp_path / "store")
    with caplog.at_level(logging.WARNING, logger="megafsdp.training"):
        train(tiny(tmp_path, checkpoint={"directory": store.root}, train={"steps": 1}))
    assert f"'{store.root}' cannot be locked" in caplog.text

"""Preparation by several processes: the bits of one, in bounded memory, and one error on a kill."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from megafsdp.data import ByteTokenizer, PrepOptions, prep_workers, prepare
from megafsdp.data.prep_workers import tokenize
from megafsdp.errors import ConfigError, DataError

CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture
def options(tmp_path: Path) -> PrepOptions:
    """Return the options for 3 MB in files of very different lengths, and a tokenizer file."""
    source = random.Random(0)
    words = ["<|endoftext|>", "?", *(f"w{i}" for i in range(200))]
    (tmp_path / "texts").mkdir()
    for number in range(40):
        text = " ".join(source.choices(words, k=source.choice([0, 1, 50, 40_000])))
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return PrepOptions(
        output=str(tmp_path / "serial"),
        inputs=(str(tmp_path / "texts"),),
        tokenizer=str(tmp_path),
        validation_every=5,
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_files_are_those_of_one_process(options: PrepOptions, workers: int) -> None:
    """Tokens, index and record, bit for bit; another number of workers prepares nothing again."""
    record = prepare(options)
    parallel = replace(options, output=f"{options.output}-{workers}", workers=workers)
    assert prepare(parallel) == record
    assert record.train.bytes > 1_000_000
    # Beside these the folder has the ranges of the tokens, with the times of the files.
    for path in (p for s in ("bin", "idx") for p in Path(options.output).glob(f"*.{s}")):
        twin = Path(parallel.output, path.name)
        assert twin.read_bytes() == path.read_bytes(), path.name
    assert not prepare(replace(parallel, workers=1)).is_fresh


def test_texts_are_read_a_few_batches_ahead() -> None:
    """Whatever the corpus: of 50 MB of text a small part is in memory at a time."""
    num_read = 0

    def texts() -> Iterator[str]:
        nonlocal num_read
        for number in range(500):
            num_read = number + 1
            yield f"{number} ".ljust(100_000, "x")

    ahead = []
    tracemalloc.start()
    try:
        pairs = tokenize(texts(), ByteTokenizer(), "byte", num_workers=2)
        for number, (text, tokens) in enumerate(pairs):
            ahead.append(num_read - number)
            assert text.startswith(f"{number} ")
            assert bytes(tokens).decode() == text
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert number == 499
    # Two batches of three texts are under way, and one is read.
    assert max(ahead) == 9
    assert peak_nbytes < 8_000_000


def test_a_worker_that_is_killed_ends_in_one_error(
    options: PrepOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to look at; older results stay, and no process is left behind."""
    first = prepare(options)

    def documents(*unused: object) -> Iterator[str]:
        yield from ("x " * 50_000 for _ in range(8))
        (worker, *_) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        yield from ("x " * 50_000 for _ in range(80))

    with monkeypatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr("megafsdp.data.prep._texts", documents)
        prepare(replace(options, workers=2, force=True))
    message = str(caught.value)
    assert "got one that ended by signal SIGKILL. In prep, which has written nothing" in message
    assert message.endswith("use fewer workers.")
    assert multiprocessing.active_children() == []
    assert prepare(options) == replace(first, is_fresh=False)


def test_workers_leave_an_interrupt_to_the_process_that_reads() -> None:
    """A terminal interrupts all; the reader decides what that means."""
    texts = ["x" * 300_000] * 6
    pairs = tokenize(texts, ByteTokenizer(), "byte", num_workers=2)
    found = [next(pairs)]
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGINT)
    found += pairs
    assert [text for text, _ in found] == texts


def test_an_error_of_a_tokenizer_is_the_error() -> None:
    """By its own type, as in one process."""
    for num_workers in (1, 2):
        with pytest.raises(UnicodeEncodeError):
            list(tokenize(["a", "\ud800"], ByteTokenizer(), "byte", num_workers=num_workers))


def test_many_empty_texts_are_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a corpus of them would be read at once."""
    monkeypatch.setattr(prep_workers, "_BATCH_LENGTH", 4)
    assert list(prep_workers._batches([""] * 6 + ["abc"])) == [[""] * 4, [""] * 2 + ["abc"]]


def test_an_error_of_a_file_is_the_error(options: PrepOptions) -> None:
    """It passes through the processes, by its own type and text."""
    bad = Path(options.inputs[0], "bad.txt")
    bad.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"UTF-8 text, got byte 0xff.*bad\.txt"):
        prepare(replace(options, workers=2))
    assert [path.name for path in Path(options.output).iterdir()] == ["prep.lock"]
    assert multiprocessing.active_children() == []


def _prepare_and_wait(pids: multiprocessing.queues.Queue[list[int]]) -> None:
    def texts() -> Iterator[str]:
        yield from ("x" * 300_000 for _ in range(2))
        pids.put([child.pid for child in multiprocessing.active_children()])
        time.sleep(600)

    list(tokenize(texts(), ByteTokenizer(), "byte", num_workers=2))


def test_workers_end_with_the_process_that_reads() -> None:
    """Also when it is killed, and could not say so."""
    CONTEXT.set_forkserver_preload(["megafsdp.data.prep_workers"])
    pids = CONTEXT.Queue()
    reader = CONTEXT.Process(target=_prepare_and_wait, args=(pids,))
    reader.start()
    workers = pids.get(timeout=60)
    assert workers
    reader.kill()
    reader.join()
    deadline_s = time.monotonic() + 30
    while any(_is_running(pid) for pid in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_worker_is_refused(options: PrepOptions) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match="at least 1 worker, got 0"):
        prepare(replace(options, workers=0))

"""Preparation from text to token files, end to end."""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import lzma
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import zstandard

from megafsdp.data import (
    ByteTokenizer,
    IndexedDataset,
    PrepOptions,
    SampleDataset,
    check_vocabulary,
    prepare,
)
from megafsdp.data import prep as prep_module
from megafsdp.data.prep import recorded_tokenizer
from megafsdp.errors import ConfigError, DataError


@pytest.fixture
def options(tmp_path: Path) -> PrepOptions:
    """Return the options for 50 text files, every tenth of them for validation."""
    for number in range(50):
        folder = tmp_path / "texts" / f"{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.txt").write_text(f"Text {number}, äöü.\n" * (number + 1))
    inputs = (str(tmp_path / "texts"),)
    return PrepOptions(output=str(tmp_path / "out"), inputs=inputs, validation_every=10)


def _documents(output: str, split: str) -> list[str]:
    dataset = IndexedDataset(Path(output, split))
    tokens = [dataset[i].tolist() for i in range(len(dataset))]
    assert all(document[-1] == ByteTokenizer.eod for document in tokens)
    return [ByteTokenizer().decode(document) for document in tokens]


def test_every_document_goes_to_one_split(options: PrepOptions) -> None:
    """All texts come out once, each with an end of document, and the record has the figures."""
    record = prepare(options)
    train, validation = (_documents(options.output, split) for split in ("train", "validation"))
    texts = [path.read_text() for path in Path(options.inputs[0]).rglob("*.txt")]
    assert sorted(train + validation) == sorted(texts)
    assert (len(train), len(validation)) == (45, 5)
    assert train != sorted(train)
    assert record.train.documents == 45
    assert record.train.bytes == sum(len(text.encode()) for text in train)
    assert record.train.tokens == record.train.bytes + 45
    assert record.validation.bytes == sum(len(text.encode()) for text in validation)
    assert record.train.max_token == record.validation.max_token == 256
    assert (record.tokenizer, record.vocab_size, record.is_fresh) == ("byte", 320, True)
    check_vocabulary(IndexedDataset(Path(options.output, "train")), record.vocab_size)


def test_record_is_kept_beside_the_files(options: PrepOptions) -> None:
    """The folder holds the pairs, their token ranges, meta.json and the lock's file."""
    record = prepare(options)
    assert sorted(path.name for path in Path(options.output).iterdir()) == [
        "meta.json",
        "prep.lock",
        *[f"train.{suffix}" for suffix in ("bin", "idx", "range.json")],
        *[f"validation.{suffix}" for suffix in ("bin", "idx", "range.json")],
    ]
    meta = json.loads(Path(options.output, "meta.json").read_text())
    assert meta["train"]["tokens"] == record.train.tokens
    assert meta["content_sha256"] == record.content_sha256
    assert meta["options"]["validation_every"] == 10
    assert "5 documents" in record.describe()
    assert record.content_sha256[:12] in record.describe()


def test_second_preparation_changes_nothing(
    options: PrepOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """Prepared data is recognised, said so, and left alone; --force and another folder are free."""
    first = prepare(options)
    stamp = Path(options.output, "train.bin").stat().st_mtime_ns
    with caplog.at_level(logging.INFO, "megafsdp.data"):
        again = prepare(replace(options, no_progress=True))
    assert again == replace(first, is_fresh=False)
    assert "prepared already" in caplog.text
    assert Path(options.output, "train.bin").stat().st_mtime_ns == stamp
    assert prepare(replace(options, force=True)) == first


@pytest.mark.parametrize("change", ["seed", "text", "time", "data", "pair", "meta", "version"])
def test_changed_inputs_or_results_are_prepared_again(options: PrepOptions, change: str) -> None:
    """Another option, an edited text, a damaged or other token file or a lost record start over."""
    first = prepare(options)
    if change == "seed":
        options = replace(options, seed=9)
    elif change == "text":
        Path(options.inputs[0], "0", "00.txt").write_text("Another text.\n")
    elif change == "time":
        os.utime(Path(options.inputs[0], "0", "00.txt"), ns=(1, 1))
    elif change == "version":
        path = Path(options.output, "meta.json")
        path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    elif change == "data":
        path = Path(options.output, "validation.bin")
        path.write_bytes(path.read_bytes()[:-2])
    elif change == "pair":
        for suffix in (".bin", ".idx"):
            training = Path(options.output, f"train{suffix}")
            Path(options.output, f"validation{suffix}").write_bytes(training.read_bytes())
    else:
        Path(options.output, "meta.json").write_text('{"version": 1}')
    again = prepare(options)
    assert again.is_fresh
    assert (again.content_sha256 == first.content_sha256) == (change not in ("seed", "text"))
    assert IndexedDataset(Path(options.output, "validation")).num_tokens == again.validation.tokens


def test_interrupted_preparation_is_not_taken_for_a_finished_one(options: PrepOptions) -> None:
    """A file that cannot be read leaves no record and no temporary file; mended, all is well."""
    bad = Path(options.inputs[0], "0", "bad.txt")
    bad.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad\.txt"):
        prepare(options)
    assert [path.name for path in Path(options.output).iterdir()] == ["prep.lock"]
    bad.unlink()
    assert prepare(options).is_fresh


def test_failed_preparation_leaves_the_older_results(options: PrepOptions) -> None:
    """Until new files are complete the old ones and their record stay."""
    first = prepare(options)
    bad = Path(options.inputs[0], "0", "bad.txt")
    bad.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad\.txt"):
        prepare(options)
    bad.unlink()
    assert prepare(options) == replace(first, is_fresh=False)


def test_failure_while_publishing_leaves_no_record(options: PrepOptions) -> None:
    """A record never describes a mixture of old and new files."""
    prepare(options)
    with (
        mock.patch("megafsdp.data.indexed_writer.os.replace", side_effect=OSError("disk full")),
        pytest.raises(DataError, match=rf"got OSError: disk full.*'{options.output}/"),
    ):
        prepare(replace(options, seed=2))
    assert not Path(options.output, "meta.json").exists()
    assert not list(Path(options.output).glob("*.tmp*"))
    assert prepare(options).is_fresh


def test_a_full_disk_is_one_error_and_leaves_nothing(options: PrepOptions) -> None:
    """While tokens or the record are written; the message names the folder."""
    no_room = OSError(errno.ENOSPC, "No space left on device")
    for name in ("indexed_writer.os.fsync", "output_files.os.replace"):
        with (
            mock.patch(f"megafsdp.data.{name}", side_effect=no_room),
            pytest.raises(DataError, match=rf"No space left.*'{options.output}/.*Make room"),
        ):
            prepare(replace(options, force=True))
        assert not list(Path(options.output).glob("*.tmp*"))
        assert not Path(options.output, "meta.json").exists()
    assert prepare(options).is_fresh


def test_two_preparations_into_one_folder_are_refused(options: PrepOptions) -> None:
    """Else a record may stand beside the files of the other."""
    second = replace(options, seed=2)
    begin = prep_module._write_splits

    def interleaved(*arguments: Any) -> Any:
        with pytest.raises(ConfigError, match=rf"no other job runs, got process.*{options.output}"):
            prepare(second)
        return begin(*arguments)

    with mock.patch.object(prep_module, "_write_splits", interleaved):
        first = prepare(options)
    assert prepare(options) == replace(first, is_fresh=False)
    assert prepare(second).is_fresh


def test_what_a_killed_preparation_left_is_removed(options: PrepOptions) -> None:
    """Its temporary files, and no others; prepared data is left alone."""
    output = Path(options.output)
    output.mkdir()
    left = ["train.123.tmp.bin", "validation.4.tmp.idx", "meta.json.123.tmp"]
    others = ["other.123.tmp.bin", "train.range.json.123.tmp"]
    for name in left + others:
        (output / name).touch()
    prepare(options)
    assert sorted(path.name for path in output.glob("*.tmp*")) == others


def test_without_a_lock_nothing_of_another_job_is_removed(options: PrepOptions) -> None:
    """It may be running."""
    output = Path(options.output)
    output.mkdir()
    (output / "train.123.tmp.bin").touch()
    no_locks = OSError(errno.ENOLCK, "no locks here")
    with mock.patch("megafsdp.data.output_files.lock_descriptor", side_effect=no_locks):
        assert prepare(options).is_fresh
    assert (output / "train.123.tmp.bin").exists()


def test_the_tokenizer_of_prepared_files_is_recorded(options: PrepOptions) -> None:
    """Of these files, not of others in their folder, and not without a record."""
    prepare(options)
    output = Path(options.output)
    for name in ("train", "validation"):
        assert recorded_tokenizer(str(output / name)) == ("byte", 320)
    assert recorded_tokenizer(str(output / "other")) is None
    (output / "meta.json").unlink()
    assert recorded_tokenizer(str(output / "train")) is None


def test_the_hash_of_the_content_is_of_the_splits_too(options: PrepOptions) -> None:
    """The same documents in the same order, held out otherwise."""
    first = prepare(options)
    assert prepare(replace(options, validation_every=9)).content_sha256 != first.content_sha256


def test_text_that_is_held_out_as_a_whole_is_refused(tmp_path: Path) -> None:
    """There is nothing to train on."""
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "all"}\n')
    options = PrepOptions(output=str(tmp_path / "out"), inputs=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(DataError, match="text to train on, got none"):
        prepare(replace(options, validation_every=2))


def test_json_lines_keep_their_order(tmp_path: Path) -> None:
    """One JSON-lines file gives its documents in order; empty ones are left out."""
    lines = [json.dumps({"text": f"line {i}" if i % 7 else ""}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output = str(tmp_path / "out")
    prepare(PrepOptions(output=output, inputs=(str(tmp_path / "a.jsonl"),), validation_every=5))
    kept = [i for i in range(20) if i % 7]
    assert _documents(output, "train") == [f"line {i}" for i in kept if (i + 1) % 5]
    assert _documents(output, "validation") == [f"line {i}" for i in kept if (i + 1) % 5 == 0]


def test_end_of_document_can_be_left_out(options: PrepOptions) -> None:
    """Without it the tokens are the text's bytes alone."""
    record = prepare(replace(options, append_eod=False))
    assert record.train.tokens == record.train.bytes


def test_missing_validation_is_said(options: PrepOptions, caplog: pytest.LogCaptureFixture) -> None:
    """Fewer documents than validation_every give an empty split and a warning."""
    with caplog.at_level(logging.WARNING, "megafsdp.data"):
        record = prepare(replace(options, validation_every=100))
    assert (record.train.documents, record.validation.documents) == (50, 0)
    assert "No document went to validation" in caplog.text
    dataset = IndexedDataset(Path(options.output, "validation"))
    with pytest.raises(DataError, match="got 0"):
        SampleDataset(dataset, sequence_length=4, num_samples=None)
    caplog.clear()
    prepare(replace(options, validation_every=0))
    assert not caplog.text


def test_tokenizer_file_is_used(options: PrepOptions, tmp_path: Path) -> None:
    """A tokenizers file gives its tokens, and another content of it prepares again."""
    path = tmp_path / "tokenizer.json"
    words = {"<|endoftext|>": 0, "?": 1, "Text": 2}
    model = tokenizers.models.WordLevel(words, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    options = replace(options, tokenizer=str(path))
    record = prepare(options)
    first = IndexedDataset(Path(options.output, "train"))[0].tolist()
    assert first[:2] == [2, 1]
    assert first[-1] == 0
    assert (record.vocab_size, record.train.max_token) == (64, 2)
    tokenizer.add_tokens(["äöü"])
    tokenizer.save(str(path))
    assert prepare(options).train.max_token == 3


def test_another_end_of_documents_prepares_again(options: PrepOptions, tmp_path: Path) -> None:
    """It is named beside the tokenizer, whose own file stays the same."""
    model = tokenizers.models.WordLevel({"</s>": 0, "<end>": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    options = replace(options, tokenizer=str(tmp_path))
    for text, eod in (("</s>", 0), ("<end>", 1)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": text}))
        assert prepare(options).is_fresh
        assert IndexedDataset(Path(options.output, "train"))[0].tolist()[-1] == eod


def test_compressed_files_and_tables_are_prepared(tmp_path: Path) -> None:
    """Found in a folder by the usual endings; each gives the documents that went into it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(3))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "b.txt.xz").write_bytes(lzma.compress(b"text"))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines.replace("line", "Line").encode()))
    table = pyarrow.table({"text": ["row 0", "row 1"], "n": [0, 1]})
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    output = str(tmp_path / "out")
    prepare(PrepOptions(output=output, inputs=(str(folder),), validation_every=0))
    expected = [f"line {i}" for i in range(3)] + ["row 0", "row 1", "text"]
    assert sorted(_documents(output, "train")) == sorted([f"Line {i}" for i in range(3)] + expected)


def test_chosen_endings_decide_what_a_json_file_is(tmp_path: Path) -> None:
    """A folder of sources has such files; without the ending a named file is JSON lines."""
    (tmp_path / "a.json").write_text('{"text": 1}\n')
    output = str(tmp_path / "out")
    prepare(PrepOptions(output=output, inputs=(str(tmp_path),), suffixes=(".json",)))
    assert _documents(output, "train") == ['{"text": 1}\n']
    with pytest.raises(DataError, match="under the key 'text', got 1"):
        prepare(PrepOptions(output=output, inputs=(str(tmp_path / "a.json"),)))


def test_progress_bar_counts_all_bytes(options: PrepOptions) -> None:
    """On a terminal the bar reaches 100 %; on request, or without a terminal, there is none."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screens = {}
    for name, screen, choice in (
        ("terminal", Terminal(), options),
        ("quiet", Terminal(), replace(options, no_progress=True)),
        ("file", io.StringIO(), options),
    ):
        with mock.patch("sys.stderr", screen):
            prepare(replace(choice, force=True))
        screens[name] = screen.getvalue()
    assert "prep: 100%" in screens["terminal"]
    assert screens["quiet"] == screens["file"] == ""


def test_corpus_is_not_held_in_memory(tmp_path: Path) -> None:
    """Preparing 8 MB of JSON lines takes a small part of that in memory."""
    line = json.dumps({"text": "x" * 1000}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 8000)
    options = PrepOptions(output=str(tmp_path / "out"), inputs=(str(tmp_path / "a.jsonl"),))
    tracemalloc.start()
    try:
        record = prepare(options)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.train.bytes + record.validation.bytes == 8_000_000
    assert peak_nbytes < 2_000_000


def test_standard_library_is_prepared_in_seconds(tmp_path: Path) -> None:
    """The quick start's corpus: about 500 files, one in 20 for validation, the same every time."""
    options = PrepOptions(output=str(tmp_path / "out"), stdlib=True)
    record = prepare(options)
    assert record.train.tokens > 4_000_000
    assert record.validation.tokens > 100_000
    assert record.validation.documents == pytest.approx(record.train.documents / 19, abs=1)
    moved = prepare(replace(options, output=str(tmp_path / "other")))
    assert moved == record


def test_docstrings_hold_out_the_files_that_the_sources_hold_out(tmp_path: Path) -> None:
    """A blend of sources and docstrings leaks no validation file into training."""
    source = '"""Docstring {0}."""\nx = {0}\n'
    for number in range(40):
        text = source.format(number) if number % 3 else f"x = {number}\n"
        (tmp_path / f"{number:02}.py").write_text(text)
    options = PrepOptions(
        output=str(tmp_path / "sources"), inputs=(str(tmp_path / "*.py"),), validation_every=4
    )
    prepare(options)
    prepare(replace(options, output=str(tmp_path / "docstrings"), docstrings=True))
    sources = "".join(_documents(options.output, "validation"))
    held_out = _documents(str(tmp_path / "docstrings"), "validation")
    assert held_out
    assert all(f'"""{docstring}"""' in sources for docstring in held_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ()}, "either inputs or stdlib"),
        ({"stdlib": True}, "either inputs or stdlib"),
        ({"inputs": ("absent",)}, "at least one text file.*'absent'"),
        ({"validation_every": 1}, "validation_every of 0"),
        ({"validation_every": -3}, "validation_every of 0"),
        ({"tokenizer": "absent.json"}, "a tokenizer file, got no such file"),
    ],
)
def test_wrong_options_are_refused(
    options: PrepOptions, changes: dict[str, object], message: str
) -> None:
    """Options are checked before anything is written."""
    with pytest.raises(ConfigError, match=message):
        prepare(replace(options, **changes))
    assert not Path(options.output).exists()


@pytest.mark.parametrize("place", ["/proc/x", "a file", "a file/below"])
def test_output_that_cannot_be_written_is_refused(
    options: PrepOptions, tmp_path: Path, place: str
) -> None:
    """As a mistake in the options, before the corpus is read."""
    (tmp_path / "a file").touch()
    output = str(tmp_path / place)
    with pytest.raises(ConfigError, match=f"a folder that can be written to.*'{output}'"):
        prepare(replace(options, output=output))


def test_corpus_without_text_is_refused(tmp_path: Path) -> None:
    """Empty files are no corpus."""
    (tmp_path / "a.txt").write_text("")
    options = PrepOptions(output=str(tmp_path / "out"), inputs=(str(tmp_path / "a.txt"),))
    with pytest.raises(DataError, match="text to train on"):
        prepare(options)

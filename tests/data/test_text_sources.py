"""Finding files and the documents in them."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from megafsdp.data.text_sources import (
    TextFile,
    docstring_documents,
    file_documents,
    find_files,
    find_stdlib_files,
)
from megafsdp.errors import ConfigError, DataError


def _file(path: Path, content: str | bytes) -> TextFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (found,) = find_files([str(path)], ())
    return found


def _read(file: TextFile, json_key: str = "text", encoding_errors: str = "strict") -> list[str]:
    return [document.text for document in file_documents(json_key, encoding_errors)(file)]


def _docstrings(file: TextFile) -> list[str]:
    return [document.text for document in docstring_documents(file)]


def test_paths_folders_and_patterns_give_each_file_once(tmp_path: Path) -> None:
    """Inputs may overlap; folders are searched by suffix, named files are taken as they are."""
    for name in ("b.txt", "a/x.txt", "a/y.md", "a/z.log", "c.py"):
        _file(tmp_path / name, name)
    inputs = [str(tmp_path), str(tmp_path / "c.py"), str(tmp_path / "**" / "*.txt")]
    found = find_files(inputs, (".txt", ".md"))
    assert [Path(file.name).relative_to(tmp_path).as_posix() for file in found] == [
        "a/x.txt",
        "a/y.md",
        "b.txt",
        "c.py",
    ]
    assert [file.nbytes for file in found] == [7, 6, 5, 4]


def test_a_file_under_several_names_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative, absolute and linked ones; the first that leads to it stays."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.txt", "a/y.txt"):
        _file(tmp_path / name, name)
    (tmp_path / "z.txt").symlink_to("a/x.txt")
    inputs = ["a/x.txt", str(tmp_path / "a"), "./a/../a", "z.txt"]
    names = [file.name for file in find_files(inputs, (".txt",))]
    assert names == [str(tmp_path / "a/y.txt"), "a/x.txt"]


def test_a_pattern_takes_the_folders_that_it_matches(tmp_path: Path) -> None:
    """As a shell does, which expands it to what is given: files, and folders to search."""
    for name in ("one.txt", "b/two.txt", "b/c/three.txt", "b/four.log"):
        _file(tmp_path / name, name)
    found = find_files([str(tmp_path / "*")], (".txt",))
    assert [file.path.name for file in found] == ["three.txt", "two.txt", "one.txt"]
    given = [str(path) for path in tmp_path.iterdir()]
    assert find_files(given, (".txt",)) == found


def test_a_file_with_the_name_of_a_pattern_is_taken_as_it_is(tmp_path: Path) -> None:
    """A pattern would not lead to it."""
    file = _file(tmp_path / "part[1].txt", "one")
    assert _read(file) == ["one"]


@pytest.mark.parametrize("entry", ["absent.txt", "*.nothing", "."])
def test_input_without_files_is_refused(tmp_path: Path, entry: str) -> None:
    """A misspelt input is not an empty corpus."""
    with pytest.raises(ConfigError, match="at least one text file, got none"):
        find_files([str(tmp_path / entry)], (".txt",))


def test_standard_library_is_listed_without_its_tables(tmp_path: Path) -> None:
    """Sources are sorted; folders of tables, tests and installed packages are left out."""
    names = [file.name for file in find_stdlib_files()]
    assert names == sorted(names)
    assert len(names) > 200
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not {name.split("/")[0] for name in names} & {"encodings", "test", "site-packages"}


def test_text_file_is_one_document(tmp_path: Path) -> None:
    """Line ends and the encoding are kept."""
    assert _read(_file(tmp_path / "a.txt", "Grüße\r\n\n")) == ["Grüße\r\n\n"]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    """Each line gives the text under the key; blank lines are passed over."""
    lines = '{"text": "one", "n": 1}\n\n{"text": "two\\nlines"}\n{"text": ""}'
    assert _read(_file(tmp_path / "a.jsonl", lines)) == ["one", "two\nlines", ""]
    assert _read(_file(tmp_path / "b.ndjson", '{"body": "x"}'), json_key="body") == ["x"]
    marked = '\ufeff{"text": "one"}\n{"text": "two"}\n'
    for name in ("c.jsonl", "c.json"):
        assert _read(_file(tmp_path / name, marked)) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"broken JSON.*line 2.*Mend the line"),
        ('{"text": "x", "id": ' + "1" * 5000 + "}", r"broken JSON.*4300.*line 2"),
        ("[" * 100_000, r"broken JSON.*(recursion|overflow).*line 2"),
        ('{"body": "x"}', r"under the key 'text', got the keys body.*line 2.*json_key"),
        ('{"text": 5}', r"under the key 'text', got 5.*line 2.*Take out the rows without text"),
        ('{"text": null}', r"under the key 'text', got null.*or set json_key"),
        ("[1]", r"got the keys none"),
        ('\ufeff{"text": "x"}', r"broken JSON.*line 2"),
        ('{"text": "\\ud800"}', r"UTF-8 text, got byte 0xed"),
    ],
)
def test_broken_json_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """The error names the file, the line and the key."""
    file = _file(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match=message) as caught:
        _read(file)
    assert "a.jsonl" in str(caught.value)


def test_json_lines_are_known_by_any_case_of_the_ending(tmp_path: Path) -> None:
    """Else a model would learn the JSON."""
    lines = '{"text": "one"}\n{"text": "two"}\n'
    assert _read(_file(tmp_path / "A.JSONL", lines)) == ["one", "two"]
    assert _read(_file(tmp_path / "B.JSONL.GZ", gzip.compress(lines.encode()))) == ["one", "two"]


def test_json_files_are_json_lines(tmp_path: Path) -> None:
    """Megatron-LM's ending; what is no object a line is refused, lest a model learns JSON."""
    lines = b'\n{"text": "one"}\n{"text": "two"}\n'
    assert _read(_file(tmp_path / "a.JSON", lines)) == ["one", "two"]
    assert _read(_file(tmp_path / "b.json.gz", gzip.compress(lines))) == ["one", "two"]
    with pytest.raises(DataError, match=r"under the key 'text', got the keys body.*line 1"):
        _read(_file(tmp_path / "c.json", '{"body": "x"}'))
    for content in ('[{"text": "one"}]', '{\n "text": "one"\n}\n', ""):
        file = _file(tmp_path / "d.json", content)
        with pytest.raises(
            DataError, match=r"no whole object.*d\.json'.*add \.json to the suffixes"
        ):
            _read(file)


def test_json_files_of_chosen_endings_are_text(tmp_path: Path) -> None:
    """Such as those among sources of programs; JSON lines of the key stay lines."""
    read = file_documents("text", "strict", takes_json_as_text=True)
    for content in ('[{"text": "one"}]', '{\n "text": "one"\n}\n', '{"body": "x"}\n'):
        file = _file(tmp_path / "a.json", content)
        assert [document.text for document in read(file)] == [content]
    lines = _file(tmp_path / "b.json", '{"text": "one"}\n{"text": "two"}\n')
    assert [document.text for document in read(lines)] == ["one", "two"]


def test_compressed_files_are_found_by_what_is_inside(tmp_path: Path) -> None:
    """In folders, the ending of a compression may follow a wanted one; JSON lines stay lines."""
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    for name in ("a.jsonl.gz", "b.txt.gz", "c.csv.gz"):
        _file(tmp_path / name, gzip.compress(lines))
    found = find_files([str(tmp_path)], (".txt", ".jsonl"))
    assert [file.path.name for file in found] == ["a.jsonl.gz", "b.txt.gz"]
    assert _read(found[0]) == ["one", "two"]
    assert _read(found[1]) == [lines.decode()]
    # Under a name that says nothing of its compression.
    assert _read(_file(tmp_path / "d.jsonl", gzip.compress(lines))) == ["one", "two"]


def test_positions_grow_to_the_size_of_the_file(tmp_path: Path) -> None:
    """Also of a compressed file, whose text is longer than the file."""
    source = random.Random(0)
    texts = [json.dumps({"text": f"{source.getrandbits(8000):x}"}) + "\n" for _ in range(400)]
    for name, data in (
        ("a.jsonl", "".join(texts).encode()),
        ("a.jsonl.gz", gzip.compress("".join(texts).encode())),
    ):
        file = _file(tmp_path / name, data)
        positions = [d.position_nbytes for d in file_documents("text", "strict")(file)]
        assert positions == sorted(positions)
        assert positions[0] < file.nbytes / 2
        assert positions[-1] == file.nbytes


def test_text_that_is_not_utf8_is_refused_or_replaced(tmp_path: Path) -> None:
    """The error names byte and offset; on request broken characters are replaced."""
    file = _file(tmp_path / "a.txt", b"caf\xe9!")
    with pytest.raises(DataError, match=r"got byte 0xe9 at offset 3.*a\.txt.*encoding_errors"):
        _read(file)
    assert _read(file, encoding_errors="replace") == ["caf\ufffd!"]


def test_docstrings_of_a_file_are_one_document(tmp_path: Path) -> None:
    """Module, class and function docstrings are joined; a file without any gives no text."""
    source = (
        '"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\nx = "\\d"\n'
    )
    assert _docstrings(_file(tmp_path / "a.py", source)) == ["One.\n\nTwo.\n\nThree."]
    assert _docstrings(_file(tmp_path / "b.py", "x = 1\n")) == [""]
    with pytest.raises(DataError, match=r"Python source.*c\.py"):
        _docstrings(_file(tmp_path / "c.py", "def:\n"))

"""Tokenizers: bytes, JSON files, and the bytes that tokens stand for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.data import ByteTokenizer, JsonTokenizer, load_tokenizer
from megafsdp.errors import ConfigError

_CORPUS = ["the cat sat on the mat", "def f(x):\n    return x + 1\n", "Grüße, 世界 🙂"] * 20


def _train(path: Path, *, byte_level: bool = True, eod: str = "<|endoftext|>") -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if byte_level:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
        alphabet = []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[eod], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # As in many published files, a plain encode() would put a special token in front.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{eod} $A", special_tokens=[(eod, tokenizer.token_to_id(eod))]
    )
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def json_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    """Return a byte-level BPE of 300 tokens, trained here."""
    return JsonTokenizer(_train(tmp_path_factory.mktemp("bpe") / "tokenizer.json"))


# Characters of one to four bytes; st.text() would first sort all of Unicode into categories.
_CODES = st.one_of(
    st.integers(first, last)
    for first, last in (
        (0, 0x7F),
        (0x80, 0x7FF),
        (0x800, 0xD7FF),
        (0xE000, 0xFFFF),
        (0x10000, 0x10FFFF),
    )
)
_TEXTS = st.lists(_CODES.map(chr)).map("".join)


@given(_TEXTS)
def test_bytes_make_the_round_trip(text: str) -> None:
    """Any text comes back from its bytes, and the bytes are counted."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.encode_array(text).tolist() == tokens
    assert tokenizer.decode([*tokens, tokenizer.eod]) == text
    assert tokenizer.num_bytes([*tokens, tokenizer.eod, 300]) == len(text.encode())


def test_broken_bytes_decode_without_an_error() -> None:
    """A sample may end inside a character, and an untrained model writes any token."""
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0x47, 0xC3, 256, 319]) == "G\ufffd"
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 320)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_bytes_are_counted_in_lists_arrays_and_tensors(kind: type) -> None:
    """The evaluation passes tensors of any shape."""
    assert ByteTokenizer().num_bytes(kind([[72, 105], [256, 319]])) == 2


def test_json_file_makes_the_round_trip(json_tokenizer: JsonTokenizer) -> None:
    """A byte-level BPE encodes and decodes text it was not trained on."""
    text = "Über 1 café\n\t= 🙃"
    tokens = json_tokenizer.encode(text)
    assert json_tokenizer.decode([*tokens, json_tokenizer.eod]) == text
    assert json_tokenizer.encode_array(text).tolist() == tokens
    assert json_tokenizer.eod not in tokens
    assert json_tokenizer.eod == 0
    assert json_tokenizer.vocab_size == 320
    assert json_tokenizer.decode([319]) == ""


@given(text=_TEXTS, start=st.integers(0, 20), stop=st.integers(0, 40))
def test_bytes_of_a_byte_level_file_are_exact(
    json_tokenizer: JsonTokenizer, text: str, start: int, stop: int
) -> None:
    """Whole texts count their bytes, and cutting tokens anywhere loses none."""
    tokens = json_tokenizer.encode(text)
    assert json_tokenizer.num_bytes([*tokens, json_tokenizer.eod]) == len(text.encode())
    middle = min(start, stop)
    parts = json_tokenizer.num_bytes(tokens[:middle]) + json_tokenizer.num_bytes(tokens[middle:])
    assert parts == len(text.encode())


def test_bytes_of_another_kind_of_file_are_those_of_the_text(tmp_path: Path) -> None:
    """Without a byte-level vocabulary the decoded text is measured."""
    tokenizer = JsonTokenizer(_train(tmp_path / "tokenizer.json", byte_level=False))
    text = "the cat sat on the mat"
    assert tokenizer.num_bytes([*tokenizer.encode(text), tokenizer.eod]) == len(text)


def test_spec_chooses_the_tokenizer(json_tokenizer: JsonTokenizer) -> None:
    """The word byte, a file, or the folder of a file."""
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
    for spec in (json_tokenizer.path, str(Path(json_tokenizer.path).parent)):
        assert load_tokenizer(spec).encode("the cat") == json_tokenizer.encode("the cat")


def test_end_of_document_can_be_named(tmp_path: Path) -> None:
    """A file with an unusual end-of-document token needs its name."""
    path = _train(tmp_path / "tokenizer.json", eod="<fin>")
    with pytest.raises(ConfigError, match=r"ends a document.*endoftext.*eod="):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), eod="<fin>").eod == 0
    with pytest.raises(ConfigError, match="among <end>, got none"):
        load_tokenizer(str(path), eod="<end>")


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("tokenizer_config.json", "</fin>"),
        ("tokenizer_config.json", {"content": "</fin>", "special": True}),
        ("special_tokens_map.json", "</fin>"),
    ],
)
def test_end_of_document_is_the_one_of_the_configuration(
    tmp_path: Path, name: str, token: object
) -> None:
    """As transformers saves it, before the usual texts; a name that is given comes first."""
    path = _train(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["</fin>"])
    tokenizer.save(str(path))
    assert load_tokenizer(str(path)).eod == 0
    for written in ({"eos_token": token}, {"eos_token": None}, {}):
        (tmp_path / name).write_text(json.dumps(written))
        eod = tokenizer.token_to_id("</fin>") if written.get("eos_token") else 0
        assert load_tokenizer(str(tmp_path)).eod == load_tokenizer(str(path)).eod == eod
    (tmp_path / name).write_text(json.dumps({"eos_token": token}))
    assert load_tokenizer(str(path), eod="<|endoftext|>").eod == 0


def test_end_of_document_is_looked_for_in_both_files(tmp_path: Path) -> None:
    """One of them may leave it open."""
    path = _train(tmp_path / "tokenizer.json", eod="</fin>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</fin>"}')
    assert load_tokenizer(str(path)).eod == 0


def test_vocabulary_reaches_to_the_largest_token(tmp_path: Path) -> None:
    """Files may leave numbers out."""
    model = tokenizers.models.WordLevel({"</s>": 0, "?": 100}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).vocab_size == 128


def test_bytes_of_added_words_are_those_of_their_text(
    tmp_path: Path, json_tokenizer: JsonTokenizer
) -> None:
    """They are written as they are, not a character for each byte."""
    stored = tokenizers.Tokenizer.from_file(json_tokenizer.path)
    stored.add_tokens(["äöü"])
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    tokens = tokenizer.encode("äöü")
    assert len(tokens) == 1 and tokenizer.num_bytes(tokens) == 6


def test_configuration_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """A token that is not in the vocabulary, or a file that is not JSON."""
    path = _train(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|other|>"}')
    with pytest.raises(
        ConfigError, match=r"ends a document among <\|other\|>, got none.*eos_token"
    ):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"in JSON, got .*tokenizer_config\.json.*Mend"):
        load_tokenizer(str(path))


def test_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """A missing file and a file of another kind are named."""
    with pytest.raises(ConfigError, match=r"no such file.*absent\.json.*data\.tokenizer"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"a tokenizer file, got .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_missing_library_is_said(tmp_path: Path) -> None:
    """Without the tokenizers package the error says how to get it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with (
        mock.patch.dict(sys.modules, tokenizers=None),
        pytest.raises(ConfigError, match=r"pip install 'megafsdp\[hf\]'"),
    ):
        load_tokenizer(str(tmp_path))


def test_lengths_that_a_file_asks_for_are_not_kept(
    tmp_path: Path, json_tokenizer: JsonTokenizer
) -> None:
    """Files that cut and fill what their model reads tokenize whole documents here."""
    stored = tokenizers.Tokenizer.from_file(json_tokenizer.path)
    stored.enable_truncation(max_length=8)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("".join(_CORPUS), "a"):
        assert tokenizer.encode(text) == json_tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text

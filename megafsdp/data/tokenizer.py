"""Text to tokens and back: raw bytes, or the JSON file of a Hugging Face ``tokenizers`` tokenizer.

``num_bytes`` says how much text a run of tokens stands for, which turns nats per token into bits
per byte. Training a vocabulary is not done here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megafsdp.errors import ConfigError, expected

if TYPE_CHECKING:
    import tokenizers

BYTE_SPEC = "byte"
TOKENIZER_FILE = "tokenizer.json"
# Files that transformers writes beside it; they name the end-of-document token.
TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_EOD_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<eod>",
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)
# Rows of an embedding come in multiples of this, which tensor cores and shards like.
_VOCAB_MULTIPLE = 64


class Tokenizer(Protocol):
    """The part of a tokenizer that data preparation, evaluation and sampling use.

    Attributes:
        eod: Token that ends a document.
        vocab_size: Number of embedding rows, at least the largest token plus one.
    """

    eod: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end of document."""
        ...

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the tokens of a text as an array."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special tokens and broken characters never raise."""
        ...

    def num_bytes(self, tokens: ArrayLike) -> int:
        """Return how many bytes of UTF-8 text the tokens stand for; special tokens count 0."""
        ...


class ByteTokenizer:
    """Read text as its UTF-8 bytes: tokens 0 to 255, 256 ends a document, vocabulary of 320."""

    eod = 256
    vocab_size = 320

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the bytes of a text as uint8."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; broken UTF-8 becomes U+FFFD, tokens above 255 nothing."""
        return bytes(token for token in tokens if token < self.eod).decode("utf-8", "replace")

    def num_bytes(self, tokens: ArrayLike) -> int:
        """Return how many of the tokens are bytes."""
        return int(np.count_nonzero(np.asarray(tokens) < self.eod))


class JsonTokenizer:
    """Tokenize with a ``tokenizer.json`` file of the ``tokenizers`` library.

    ``num_bytes`` is exact for byte-level vocabularies (GPT-2, Llama 3, Qwen). For others it is the
    length of the decoded text, which is a few bytes off where a sequence is cut inside a character
    or after a space.

    Args:
        path: The JSON file. The files of transformers beside it say how documents end.
        eod: Text of the token that ends a document; None takes the ``eos_token`` of
            ``tokenizer_config.json`` or ``special_tokens_map.json``, else looks for a usual one.

    Raises:
        ConfigError: The library is missing, a file cannot be read, or there is no such token.
    """

    def __init__(self, path: str | os.PathLike[str], *, eod: str | None = None) -> None:
        self.path = os.fspath(path)
        self._tokenizer = _load_json(self.path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        chosen = _configured_eod(Path(self.path).parent) if eod is None else eod
        candidates = _EOD_TEXTS if chosen is None else (chosen,)
        found = [vocabulary[text] for text in candidates if text in vocabulary]
        if not found:
            what = f"a token that ends a document among {', '.join(candidates)}"
            hint = "Name the file's own as eos_token in a tokenizer_config.json beside it, or with"
            hint += " load_tokenizer(spec, eod=...)"
            raise ConfigError(expected(what, "none", where=f"tokenizer '{path}'", hint=hint))
        self.eod = found[0]
        num_tokens = max(vocabulary.values()) + 1
        self.vocab_size = -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        self._token_nbytes = self._byte_level_nbytes(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; no special token is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> NDArray[np.integer]:
        """Return the tokens of a text as int32."""
        return np.array(self.encode(text), dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special tokens and padding of the vocabulary give nothing."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def num_bytes(self, tokens: ArrayLike) -> int:
        """Return how many bytes of text the tokens stand for."""
        # An empty list would become an array of floats.
        values = np.asarray(tokens).reshape(-1).astype(np.int64)
        if self._token_nbytes is None:
            return len(self.decode(values.tolist()).encode("utf-8"))
        return int(self._token_nbytes[values].sum())

    def _byte_level_nbytes(self, vocabulary: dict[str, int]) -> NDArray[np.int64] | None:
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        if "ByteLevel" not in _types_in(decoder):
            return None
        nbytes = np.zeros(self.vocab_size, dtype=np.int64)
        # A byte-level vocabulary writes each byte as one character of its own.
        for text, token in vocabulary.items():
            nbytes[token] = len(text)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            nbytes[token] = 0 if added.special else len(added.content.encode("utf-8"))
        return nbytes


def load_tokenizer(spec: str, *, eod: str | None = None) -> Tokenizer:
    """Make a tokenizer.

    Args:
        spec: ``"byte"``, or the path of a ``tokenizer.json`` file or of a folder that has one.
        eod: Text of the token that ends a document; None takes the one that the files beside the
            tokenizer name, or else its usual one.

    Returns:
        The tokenizer.

    Raises:
        ConfigError: The path leads to no tokenizer.
    """
    if spec == BYTE_SPEC:
        return ByteTokenizer()
    path = Path(spec)
    return JsonTokenizer(path / TOKENIZER_FILE if path.is_dir() else path, eod=eod)


def _load_json(path: str) -> tokenizers.Tokenizer:
    hint = f"Give '{BYTE_SPEC}' or the path of a tokenizer.json file; in training as data.tokenizer"
    if not Path(path).is_file():
        what = "a tokenizer file"
        raise ConfigError(expected(what, "no such file", where=f"'{path}'", hint=hint))
    try:
        import tokenizers
    except ImportError as error:
        what = "the tokenizers package that reads tokenizer files"
        install = "Run `pip install 'megafsdp[hf]'`, or use the tokenizer 'byte'"
        where = f"the environment that reads '{path}'"
        raise ConfigError(expected(what, error, where=where, hint=install)) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The library raises bare Exception.
        what = "a tokenizer file"
        raise ConfigError(expected(what, error, where=f"'{path}'", hint=hint)) from error
    # Files keep truncation and padding of their model, which would cut documents or fill them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _configured_eod(folder: Path) -> str | None:
    """Return the end-of-text token in the files that transformers saves with a tokenizer."""
    for name in TOKENIZER_CONFIG_FILES:
        path = folder / name
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            hint = "Mend or remove the file, or name the token with load_tokenizer(spec, eod=...)"
            what = "the fields of a tokenizer's configuration in JSON"
            raise ConfigError(expected(what, error, where=f"'{path}'", hint=hint)) from error
        token = fields.get("eos_token") if isinstance(fields, dict) else None
        # An added token is a dict of its text and properties.
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None


def _types_in(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {str(node["type"])} if "type" in node else set()
        return own.union(*map(_types_in, node.values()))
    if isinstance(node, list):
        return set().union(*map(_types_in, node))
    return set()

"""What turns text into token ids and back: bytes, which need nothing, or a file of the `tokenizers` library."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hecate.errors import DataError, install_line

BYTES = 256
MOST = 1 << 24
"""Tokens of a vocabulary to train, at most."""
END = "<|endoftext|>"
"""Token that ends a document, where a tokenizer has it."""


class Tokenizer(ABC):
    """Text as token ids `0 .. size-1`."""

    size: int
    sha256: str
    """Of the file; of bytes it is that of no file."""
    end: int | None = None
    """Token that ends a document."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without any that its words do not stand for."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids, each part as soon as it is whole."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return "".join(self.pieces(ids))

    @abstractmethod
    def lengths(self) -> NDArray[np.uint32] | None:
        """Bytes of text that each token stands for; None where tokens do not tell. [DATA-TOKENIZER-D2]"""


def refuse_one_text(texts: Sequence[str]) -> None:
    """A text in place of texts, whose characters would be encoded one by one, is a `DataError`."""
    if isinstance(texts, str | bytes):
        raise DataError(f"encode takes a list of texts, got one {type(texts).__name__}; write encode([text])[0]")


class Bytes(Tokenizer):
    """Every byte of UTF-8 is a token."""

    size = BYTES
    sha256 = hashlib.sha256(b"").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The bytes of each text."""
        refuse_one_text(texts)
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Characters, as soon as their last byte is there; `\\ufffd` for what is none."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            yield decoder.decode(bytes([token]) if token < BYTES else b"\xff")  # a model may know more tokens
        yield decoder.decode(b"", final=True)

    def lengths(self) -> NDArray[np.uint32]:
        """One each."""
        return np.ones(BYTES, dtype=np.uint32)


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` as the `tokenizers` library writes it; nothing is downloaded. [DATA-TOKENIZER-D1]

    Special tokens are not found in text: a document that quotes one has the ids of its characters, and templates add
    none.
    """

    def __init__(self, text: str, where: str) -> None:
        try:
            self._own = library().Tokenizer.from_str(text)
        except DataError:
            raise
        except Exception as error:  # the library raises plain exceptions
            raise DataError(
                f"{where} is no tokenizer of the tokenizers library ({' '.join(str(error).split())}); give a "
                "tokenizer.json, such as `hecate data train-tokenizer` writes"
            ) from None
        self._own.encode_special_tokens = True
        self._own.no_truncation()
        self._own.no_padding()
        self.text = text
        self.size = max(self._own.get_vocab().values(), default=0) + 1  # ids may have gaps
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.end = self._own.token_to_id(END)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text."""
        refuse_one_text(texts)
        found = self._own.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.uint32) for item in found]

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Words and their parts; special tokens are shown by their names."""
        held: list[int] = []
        shown = ""
        for token in ids:
            held.append(token)
            text = self._own.decode(held, skip_special_tokens=False)
            if text.endswith("\ufffd"):  # the rest of the character may follow
                continue
            yield text[len(shown) :]
            held, shown = held[-1:], self._own.decode(held[-1:], skip_special_tokens=False)
        yield self._own.decode(held, skip_special_tokens=False)[len(shown) :]

    def lengths(self) -> NDArray[np.uint32] | None:
        """Exact where tokens are sequences of bytes, as in byte-level BPE; special tokens stand for none."""
        description: dict[str, Any] = json.loads(self.text)
        if "ByteLevel" not in _kinds(description.get("decoder")):
            return None
        found = np.zeros(self.size, dtype=np.uint32)
        for name, token in self._own.get_vocab().items():
            found[token] = len(name)  # one character stands for each byte
        for token, added in self._own.get_added_tokens_decoder().items():
            found[token] = 0 if added.special else len(added.content.encode())
        return found


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Types of a decoder and of those it is made of."""
    if decoder is None:
        return set()
    inner = decoder.get("decoders") or ()
    return {str(decoder.get("type"))}.union(*map(_kinds, inner))


def open_tokenizer(given: str | Path) -> Tokenizer:
    """`bytes`, or the tokenizer of a file."""
    if str(given) == "bytes":
        return Bytes()
    path = Path(given)
    try:
        return FileTokenizer(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError:
        raise DataError(f"{path} is no tokenizer: it is not text; give a tokenizer.json, or bytes") from None
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {path}: {error.strerror or error}; give a tokenizer.json, or bytes"
        ) from None


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> str:
    """The `tokenizer.json` of a byte-level BPE that texts were compressed with most; it has a token for every byte and
    the token `<|endoftext|>`, id 0. [DATA-TOKENIZER-D3]"""
    if vocabulary < BYTES + 1:
        raise DataError(f"a vocabulary has the {BYTES} bytes and {END}, so at least {BYTES + 1}, got {vocabulary}")
    if vocabulary > MOST:
        raise DataError(f"a vocabulary has at most {MOST:,} tokens, got {vocabulary}")
    first = next(filter(None, texts), None)
    if first is None:
        raise DataError("there is no text to train a tokenizer on; name more files")
    own = library()
    found = own.Tokenizer(own.models.BPE())
    found.pre_tokenizer = own.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = own.decoders.ByteLevel()
    alphabet = own.pre_tokenizers.ByteLevel.alphabet()
    trainer = own.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(chain([first], texts), trainer)
    return str(found.to_str(pretty=True)) + "\n"


def library() -> Any:
    """The `tokenizers` library, which the extra `data` brings."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"this needs the library tokenizers: {install_line('data')}; or use tokenizer bytes") from None
    return tokenizers

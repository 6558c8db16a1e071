"""Tokenizers from text to token ids and back: bytes, which need no file, or a file of the `tokenizers` library."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hecate.errors import DataError, install_line, printable, shorten
from hecate.files import read_whole, reading
from hecate.processes import interpreter

BYTES = 256
MOST = 1 << 24
"""Largest number of tokens of a vocabulary."""
MOST_BYTES, ROOM, SECONDS = 1 << 28, 4 << 30, 30
"""Largest size of a tokenizer.json; for trying one, bytes of memory (beyond 100 times its size) and CPU seconds."""
END = "<|endoftext|>"
"""Token that ends a document, if a tokenizer has it."""


class Tokenizer(ABC):
    """A tokenizer with token ids `0 .. size-1`."""

    size: int
    sha256: str
    """SHA-256 of the tokenizer's file; for `Bytes` that of an empty one."""
    end: int | None = None
    """Token that ends a document."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, without added special tokens."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids, in pieces that are yielded as soon as their characters are complete."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return "".join(self.pieces(ids))

    @abstractmethod
    def lengths(self) -> NDArray[np.uint32] | None:
        """Bytes of text that each token stands for; None if that is not determined. [DATA-TOKENIZER-D2]"""


def refuse_one_text(texts: Sequence[str]) -> None:
    """Refuses a single text in place of a list, as its characters would be encoded one by one."""
    if isinstance(texts, str | bytes):
        raise DataError(f"encode takes a list of texts, got one {type(texts).__name__}; write encode([text])[0]")


def raw(text: str) -> bytes:
    """A text in UTF-8; `DataError` for lone surrogates, as from a command line in another encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        cure = "give it in UTF-8, which the terminal's locale has to be, too"
        raise DataError(f"the text {shorten(text)} is not UTF-8 at character {error.start}; {cure}") from None


class Bytes(Tokenizer):
    """Every byte of UTF-8 is a token."""

    size = BYTES
    sha256 = hashlib.sha256(b"").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The bytes of each text."""
        refuse_one_text(texts)
        return [np.frombuffer(raw(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Characters, as soon as their last byte has arrived; `\\ufffd` for invalid bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            yield decoder.decode(bytes([token]) if token < BYTES else b"\xff")  # a model may have more tokens
        yield decoder.decode(b"", final=True)

    def lengths(self) -> NDArray[np.uint32]:
        """One byte per token."""
        return np.ones(BYTES, dtype=np.uint32)


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` as the `tokenizers` library writes it; nothing is downloaded. [DATA-TOKENIZER-D1]

    Special tokens are not recognised in text: a document that quotes one is encoded as ordinary text; and templates
    add none.
    """

    def __init__(self, text: str, where: str, *, tried: bool = False) -> None:
        self.text, self.where = text, where
        content, tokenizers = raw(text), library("tokenizers")
        self.sha256 = hashlib.sha256(content).hexdigest()
        if not tried and self.sha256 not in _tried:
            _try(content, where)
            _tried.add(self.sha256)
        with _translating(where):
            self._own = tokenizers.Tokenizer.from_str(text)
            self._own.encode_special_tokens = True
            self._own.no_truncation()
            self._own.no_padding()
            self.size = max(self._own.get_vocab().values(), default=0) + 1  # ids may have gaps
            self.end = self._own.token_to_id(END)
        if self.size > MOST:
            raise DataError(f"{where} has token {self.size - 1:,}; ids are below {MOST:,}: number its tokens from 0")

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text."""
        refuse_one_text(texts)
        for text in texts:
            raw(text)
        with _translating(self.where):
            encodings = self._own.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, dtype=np.uint32) for item in encodings]

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Words or parts of words; special tokens appear as their names."""
        pending: list[int] = []
        shown = ""
        for token in ids:
            pending.append(token)
            text = self._text_of(pending)
            if text.endswith("\ufffd"):  # the rest of the character may follow
                continue
            yield text[len(shown) :]
            pending, shown = pending[-1:], self._text_of(pending[-1:])
        yield self._text_of(pending)[len(shown) :]

    def _text_of(self, ids: list[int]) -> str:
        with _translating(self.where):
            return str(self._own.decode(ids, skip_special_tokens=False))

    def lengths(self) -> NDArray[np.uint32] | None:
        """Bytes of every token in a byte-level BPE, 0 for special tokens; None for other tokenizers."""
        description: dict[str, Any] = json.loads(self.text)
        if "ByteLevel" not in _kinds(description.get("decoder")):
            return None
        lengths = np.zeros(self.size, dtype=np.uint32)
        for name, token in self._own.get_vocab().items():
            lengths[token] = len(name)  # in the vocabulary each byte is one character
        for token, added in self._own.get_added_tokens_decoder().items():
            lengths[token] = 0 if added.special else len(added.content.encode())
        return lengths


_tried: set[str] = set()  # SHA-256 of tokenizers that have loaded
_TRIAL = """
import json, resource
for what, most in (resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_CPU, int(sys.argv[2])):
    try:
        resource.setrlimit(what, (most, most))
    except (ValueError, OSError):
        pass  # not on this system
try:
    from tokenizers import Tokenizer
    own = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    own.no_truncation()
    own.no_padding()
    letters = "".join(map(chr, range(32, 383)))
    try:
        ids = own.encode_batch_fast([letters, " ".join(letters)], add_special_tokens=False)[0].ids
        own.decode(ids[:1000], skip_special_tokens=False)
    except Exception:
        pass  # it may have no token for some letters
    print(json.dumps(None))
except BaseException as error:
    print(json.dumps(f"{type(error).__name__} {error}"))
"""


def _try(content: bytes, where: str) -> None:
    """Loads a tokenizer and encodes some letters in another process, with limited memory and time: an untrusted file
    may crash the process, or ask for any amount of memory."""
    limits = ROOM + 100 * len(content), SECONDS
    quiet = {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        interpreter(f"exec({_TRIAL!r})", *map(str, limits)), input=content, capture_output=True, check=False,
        env={**os.environ, **quiet},
    )  # fmt: skip
    try:
        fault = json.loads(done.stdout)
    except ValueError:  # the process died
        fault = f"it takes more than {limits[0] >> 30} GiB of memory or {SECONDS} seconds to load, or ends the process"
    if fault is not None:
        raise _no_tokenizer(where, fault)


@contextmanager
def _translating(where: str) -> Iterator[None]:
    """Context that turns errors of the library into `DataError`; its panics are not `Exception`s."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, DataError):
        raise
    except BaseException as error:
        raise _no_tokenizer(where, str(error)) from None


def _no_tokenizer(where: str, fault: str) -> DataError:
    why = printable(" ".join(fault.split()), 300)
    return DataError(
        f"{where} is no tokenizer of the tokenizers library that serves here ({why}); give a tokenizer.json, such as "
        "`hecate data train-tokenizer` writes"
    )


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Types of a decoder and of the decoders inside it."""
    if decoder is None:
        return set()
    inner = decoder.get("decoders") or ()
    return {str(decoder.get("type"))}.union(*map(_kinds, inner))


def open_tokenizer(source: str | Path, *, tried: bool = False) -> Tokenizer:
    """The tokenizer `bytes`, or that of a file, which is first tried in another process unless `tried`."""
    if str(source) == "bytes":
        return Bytes()
    path = Path(source)
    with reading(f"tokenizer {path}", "give a tokenizer.json, or bytes"):
        text = read_whole(path, MOST_BYTES).decode()
    return FileTokenizer(text, str(path), tried=tried)


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> str:
    """The `tokenizer.json` of a byte-level BPE trained on texts; it has a token for every byte, and `<|endoftext|>` as
    id 0. [DATA-TOKENIZER-D3]"""
    if vocabulary < BYTES + 1:
        raise DataError(f"a vocabulary has the {BYTES} bytes and {END}, so at least {BYTES + 1}, got {vocabulary}")
    if vocabulary > MOST:
        raise DataError(f"a vocabulary has at most {MOST:,} tokens, got {vocabulary}")
    first = next(filter(None, texts), None)
    if first is None:
        raise DataError("there is no text to train a tokenizer on; name more files")
    tokenizers = library("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(chain([first], texts), trainer)
    return str(tokenizer.to_str(pretty=True)) + "\n"


def library(name: str) -> Any:
    """A module of a library of the extra `data`; `DataError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package, instead = name.split(".")[0], "; or use tokenizer bytes" if name == "tokenizers" else ""
        raise DataError(f"this needs the library {package}: {install_line('data')}{instead}") from None

"""Token shards as training data of any size: shuffled windows, or rows that continue from batch to batch; resets where
documents start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hecate.checks import Size
from hecate.data import shards
from hecate.data.base import IGNORED, Batch, DataConfig, Split, WindowSource
from hecate.data.shards import SIDECAR, Sidecar, TokenFile, TokenStream, digest_of, files_of, nanogpt_file, read_sidecar
from hecate.data.tokenizer import Bytes, Tokenizer, open_tokenizer
from hecate.errors import ConfigError, DataError
from hecate.variant import Conflicts

# The step determines every batch: windows of a stream in a keyed order, each once per epoch, without a stored list. The
# rows of all batches are numbered: row i of the batch of step s is number s * batch_size + i, whichever process reads
# it, in however many micro-batches. Number n is place n mod `windows` of epoch n // `windows`, and that epoch's
# permutation maps the place to a window. So a run resumed with another number of processes reads the same windows as
# one that never stopped.
ROUNDS = 6
Numbers = NDArray[np.int64]


def epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """The keys of an epoch's permutation, one per round."""
    digest = hashlib.blake2b(f"hecate/{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permuted(places: Numbers, size: int, keys: NDArray[np.uint64]) -> Numbers:
    """Places under a pseudorandom permutation of 0 .. size-1. [DATA-CURSOR-D2]

    A Feistel network on the next even number of bits; results outside the range go through it again until they are
    inside, fewer than four times on average.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    out = np.array(places, dtype=np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        high, low = out[outside] >> shift, out[outside] & mask
        for key in keys:
            high, low = low, high ^ (_mix(low, key) & mask)
        out[outside] = (high << shift) | low
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: uint64 arithmetic, the same on every platform and version."""
    with np.errstate(over="ignore"):
        x = (x ^ key) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def numbers_of(step: int, batch_size: int, rows: range | None = None) -> Numbers:
    """The numbers of some rows of the batch of a step; `rows` None means all."""
    chosen = range(batch_size) if rows is None else rows
    return step * batch_size + np.arange(chosen.start, chosen.stop, dtype=np.int64)


def shuffled(numbers: Numbers, windows: int, seed: int) -> Numbers:
    """The window of each row number; a batch may span two epochs. [DATA-CURSOR-D1]"""
    order = np.empty_like(numbers)
    epochs = numbers // windows
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        order[mask] = permuted(numbers[mask] % windows, windows, epoch_keys(seed, int(epoch)))
    return order


def in_lanes(
    step: int, batch_size: int, windows: int, seed: int, rows: range | None = None
) -> tuple[Numbers, NDArray[np.bool_]]:
    """The window of each row of a step when rows continue from batch to batch, and whether the row is reset there.

    The windows form a ring, which is rotated by the epoch's key and cut into `batch_size` lanes of equal length. Row b
    reads lane b from its first window to its last, one per step. It is reset at the first window of the lane and at
    window 0, where the ring closes, as the text does not continue there. The remainder of the division is a different
    part of the ring in every epoch. [DATA-CURSOR-D3]
    """
    lane = windows // batch_size
    epoch, place = divmod(step, lane)
    begin = int(epoch_keys(seed, epoch)[0] % np.uint64(windows))
    chosen = (begin + numbers_of(0, batch_size, rows) * lane + place) % windows
    return chosen, (chosen == 0) | (place == 0)


SAMPLED = 1 << 20
"""Number of training tokens that the unigram baseline counts."""
_EDGE = 1 << 16


class Tokens(DataConfig):
    """tokens: shards of token ids, as `hecate data tokenize` writes them; of any size, read from disk.

    `path` is a folder with a `tokens.json`, a folder of nanoGPT's `.bin` files (those with `train` and with `val` in
    their names), or one such file. The training windows are disjoint; every epoch reads each of them once, in a new
    order.

    Fields:
        documents: behaviour where a document starts. `reset`: the memory is reset, and the first token is not a label;
            `carry`: the memory is kept, and the first token is not a label; `ignore`: nothing.
        state: `fresh`: every window begins with an empty memory; `carry`: each row continues from batch to batch with
            its state, in the order of the text; gradients end with the batch.
        validation: null takes the folder's own validation tokens, a number holds out that share at the end of the
            training tokens, a path names another folder or file.
        vocab_size: filled from the folder if left out, and at least the folder's; required for `.bin` files.
        tokenizer_file: a tokenizer.json, or bytes, for files without a tokenizer.

    Shapes: tokens, targets `[B, T]`; resets `[B, T]`.
    Cost: a read of T + 1 tokens per row.
    References: the cursor is our own; the `.bin` files are those of nanoGPT's descendants. [DATA-TOKENS-D1]
    """

    kind: Literal["tokens"] = "tokens"
    path: str = Field(min_length=1)
    documents: Literal["reset", "carry", "ignore"] = "reset"
    state: Literal["fresh", "carry"] = "fresh"
    validation: float | str | None = None
    vocab_size: Size | None = Field(None, ge=2)
    tokenizer_file: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_the_folder(cls, data: Any) -> Any:
        """Fills in the vocabulary, so that the config alone suffices on machines without the folder."""
        if not isinstance(data, Mapping) or data.get("vocab_size") is not None or not isinstance(data.get("path"), str):
            return data
        folder = Path(data["path"])
        return {**data, "vocab_size": read_sidecar(folder).vocabulary} if (folder / SIDECAR).is_file() else data

    def conflicts(self) -> Conflicts:
        if self.validation == "" or (isinstance(self.validation, float) and not 0 < self.validation < 1):
            yield ("validation",), f"must be a share between 0 and 1, a path or null, got {self.validation!r}"

    @property
    def carries(self) -> bool:
        return self.state == "carry"

    def vocabulary(self) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        folder = Path(self.path)
        if folder.suffix == ".bin" or (folder.is_dir() and any(folder.glob("*.bin"))):
            raise ConfigError(
                f"is needed: the files of {self.path} do not say how many tokens there are", ("vocab_size",)
            )
        return read_sidecar(folder).vocabulary

    def tokenizer(self) -> Tokenizer | None:
        if self.tokenizer_file is not None:
            return open_tokenizer(self.tokenizer_file)
        folder = Path(self.path)
        return shards.tokenizer_of(folder) if (folder / SIDECAR).is_file() else None

    def load(self) -> TokenSource:
        """Opens the files and checks their sizes; `hecate data inspect` checks their hashes."""
        train = _open_split(Path(self.path), "train")
        other = self.validation if isinstance(self.validation, str) else None
        validation = None if other is None else _open_split(Path(other), "validation")
        if validation is not None and validation.maker != train.maker:
            raise DataError(
                f"the tokens of {self.validation} are of another tokenizer than those of {self.path}; tokenize both "
                "with one"
            )
        for opened in (train, validation):
            if opened is not None and (opened.vocabulary or 0) > self.vocabulary():
                raise DataError(
                    f"the tokens of {self.path} have a vocabulary of {opened.vocabulary}, data.vocab_size is "
                    f"{self.vocab_size}; leave it out and it is filled in"
                )
        if self.tokenizer_file is not None and train.maker not in (None, open_tokenizer(self.tokenizer_file).sha256):
            raise DataError(f"{self.tokenizer_file} is not the tokenizer that the shards of {self.path} were made with")
        return TokenSource(self, train, validation)


class Opened(NamedTuple):
    """Files of a folder by split; vocabulary and SHA-256 of the tokenizer, if known."""

    files: dict[Split, list[TokenFile]]
    digest: str
    vocabulary: int | None = None
    maker: str | None = None
    lengths: NDArray[np.int64] | None = None


def _open_split(path: Path, wanted: Split) -> Opened:
    """Opens a folder of shards, or `.bin` files. A folder named as the validation data contributes its validation
    tokens, or if it has none, its training tokens."""
    one, paths = path.is_file() and path.suffix == ".bin", sorted(path.glob("*.bin"))
    if (path / SIDECAR).exists() or not (one or paths):
        sidecar: Sidecar = read_sidecar(path)
        files = {split: files_of(path, sidecar, split) for split in get_args(Split)}
        if wanted == "validation" and not files[wanted]:
            files[wanted] = files["train"]
        maker = sidecar.tokenizer or Bytes.sha256
        digest, lengths = digest_of(sidecar.model_dump(mode="json")), shards.lengths_of(path, sidecar)
        return Opened(files, digest, sidecar.vocabulary, maker, lengths)
    named = {"train": [p for p in paths if "train" in p.name], "validation": [p for p in paths if "val" in p.name]}
    if one:
        named[wanted] = [path]
    if not named[wanted]:
        cure = "name one file, or rename them"
        raise DataError(f"no .bin file in {path} has {'train' if wanted == 'train' else 'val'} in its name; {cure}")
    files = {split: [nanogpt_file(p) for p in named[split]] for split in get_args(Split)}
    return Opened(files, _print_of([*files["train"], *files["validation"]]))


def _print_of(files: list[TokenFile]) -> str:
    """Fingerprint of files without a sidecar: SHA-256 of their sizes, and of the tokens at both ends."""
    digest = hashlib.sha256()
    for file in files:
        stream = TokenStream([file])
        digest.update(f"{file.dtype}/{file.tokens}/".encode())
        digest.update(stream.read(0, min(_EDGE, file.tokens)).tobytes())
        digest.update(stream.read(max(file.tokens - _EDGE, 0), min(_EDGE, file.tokens)).tobytes())
    return digest.hexdigest()


class TokenSource(WindowSource):
    """Batches of token shards; the metric is bits per byte if the bytes per token are known, else perplexity."""

    ordered = True
    unit = "tokens"

    def __init__(self, config: Tokens, train: Opened, validation: Opened | None) -> None:
        self.config, self._vocabulary = config, config.vocabulary()
        whole = TokenStream(train.files["train"])
        tail = TokenStream((validation or train).files["validation"])
        if isinstance(config.validation, float):
            cut = len(whole) - max(int(len(whole) * config.validation), 1)
            if whole.has_starts and cut > 0:
                cut = whole.next_start(cut) or cut  # no document is in both
            whole, tail = whole.part(0, max(cut, 0)), whole.part(max(cut, 0), len(whole))
        elif not len(tail):
            cure = "hold out some of the training tokens with data.validation=0.01, or name a folder there"
            raise DataError(f"{config.path} has no validation tokens; {cure}")
        if config.documents != "ignore" and not (whole.has_starts and tail.has_starts):
            raise DataError(
                f"data.documents is {config.documents!r}, but nothing says where documents start in {config.path}; "
                "write data.documents=ignore, or make shards of the text with `hecate data tokenize`"
            )
        self.train, self.validation = whole, tail
        self.carries = config.carries
        self.metric = "perplexity" if train.lengths is None else "bits_per_byte"
        self.lengths = None if train.lengths is None else torch.from_numpy(train.lengths)
        facts = [train.digest, validation and validation.digest, config.documents, config.state, len(whole), len(tail)]
        self.fingerprint = digest_of(facts)

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        windows = self.windows_of("training", seq_len)
        if not self.carries:
            chosen = shuffled(numbers_of(step, batch_size, rows), windows, seed)
            return self.windows(self.train, chosen * seq_len, seq_len)
        if windows < batch_size:
            raise DataError(
                f"the training tokens have {windows} windows of {seq_len}, fewer than the {batch_size} rows that go on "
                "from batch to batch; lower budget.batch_size or budget.seq_len, or write data.state=fresh"
            )
        chosen, anew = in_lanes(step, batch_size, windows, seed, rows)
        batch = self.windows(self.train, chosen * seq_len, seq_len)
        resets = torch.zeros_like(batch.tokens, dtype=torch.bool) if batch.resets is None else batch.resets
        resets[:, 0] |= torch.from_numpy(anew)
        return batch._replace(resets=resets)

    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        """Scores of the uniform distribution, and of the frequencies in a sample of the training tokens.
        [DATA-TOKENS-D5]"""
        counts = np.ones(self._vocabulary)
        spans = max(min(SAMPLED // seq_len, len(self.train) // seq_len), 1)
        for place in np.arange(spans) * (len(self.train) // spans):
            counts += np.bincount(self._ids(self.train, int(place), seq_len), minlength=self._vocabulary)
        nats = -np.log(counts / counts.sum())
        labels = torch.cat(
            [b.targets[b.targets != IGNORED] for b in self.validation_batches(batch_size, seq_len, batches)]
        )
        losses = {"uniform": float(np.log(self._vocabulary)), "unigram": float(nats[labels.numpy()].mean())}
        if self.lengths is None:
            return {name: float(np.exp(loss)) for name, loss in losses.items()}
        each = float(self.lengths[labels].double().mean())
        return {name: loss / np.log(2) / each for name, loss in losses.items()}

    def describe(self) -> dict[str, str | int | float]:
        sizes = {"training tokens": len(self.train), "validation tokens": len(self.validation)}
        known = {"vocabulary": self._vocabulary, "documents": self.config.documents, "state": self.config.state}
        return {"path": self.config.path, **sizes, **known, "sha256": self.fingerprint}

    def windows(self, part: TokenStream, starts: NDArray[np.int64], seq_len: int) -> Batch:
        tokens = np.empty((len(starts), seq_len + 1), dtype=np.int64)
        targets = np.empty((len(starts), seq_len), dtype=np.int64)
        resets = np.zeros((len(starts), seq_len), dtype=bool)
        for row, at in enumerate(starts.tolist()):
            tokens[row] = self._ids(part, at, seq_len + 1)
            targets[row] = tokens[row, 1:]
            if self.config.documents != "ignore":
                places = part.starts(at, at + seq_len + 1) - at
                targets[row, places[places > 0] - 1] = IGNORED
                resets[row, places[places < seq_len]] = True
        masks = torch.from_numpy(resets) if self.config.documents == "reset" else None
        return Batch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets), masks)

    def _ids(self, stream: TokenStream, at: int, count: int) -> NDArray[np.int64]:
        ids = stream.read(at, min(count, len(stream) - at))
        if len(ids) and int(ids.max()) >= self._vocabulary:
            raise DataError(
                f"{self.config.path} has token {int(ids.max())} near place {at:,}, and data has a vocabulary of "
                f"{self._vocabulary}: the shards are of another tokenizer, or damaged (`hecate data inspect` tells)"
            )
        return ids

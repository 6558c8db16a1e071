"""States of the beginnings that prompts share, kept in a tree and on disk, the least recently used let go first."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hecate import states
from hecate.checks import expect_count
from hecate.errors import CheckpointError
from hecate.files import make_folder, refusing
from hecate.serve.parked import ParkedDtype, parking

_FILE = re.compile(r"[0-9a-f]{64}\.safetensors")


class _Node:
    """A run of tokens below another node; a state, if one is kept, is that after the last of them."""

    __slots__ = ("below", "bytes", "edge", "state", "up")

    def __init__(self, edge: tuple[int, ...], up: _Node | None) -> None:
        self.edge, self.up, self.below, self.bytes = edge, up, dict[int, _Node](), 0
        self.state: Any = None
        if up is not None:
            up.below[edge[0]] = self

    def tokens(self) -> list[int]:
        """All tokens from the root."""
        runs, node = [], self
        while node.up is not None:
            runs.append(node.edge)
            node = node.up
        return [token for run in reversed(runs) for token in run]


class PrefixCache:
    """The states after prompts' beginnings, by their tokens, in a radix tree. [SERVE-TREE-D1]

        count, state = prefixes.longest(tokens)    # the state after tokens[:count]; None after none
        prefixes.keep(tokens, state)               # after exactly these tokens

    A look-up costs the length of the prompt. States are copied in and out: what a caller does to them changes none.

    Args:
        max_bytes: of all states; beyond them the least recently used go.
        block: tokens between the places at which a reader of prompts keeps one.
        model: the `hecate.states.fingerprint` of the model whose they are, for files.
        parked_dtype: "float16" keeps states in half the bytes, in memory and in files. [SERVE-PARK-D1]
        exact: of a `Scheduler(exact=True)`, whose states have other bits; files of the other kind are of another model.
            [SERVE-EXACT-D1]
    """

    def __init__(
        self, max_bytes: int = 256 << 20, block: int = 256, *, model: str = "",
        parked_dtype: ParkedDtype | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        expect_count(max_bytes, "max_bytes", 0)
        expect_count(block, "block")
        self.park = parking(parked_dtype)
        self.max_bytes, self.block, self.bytes = max_bytes, block, 0
        self.parked_dtype, self.exact, self.model = parked_dtype, exact, f"{model} exact" if exact else model
        self.hits = self.misses = self.tokens_saved = self.evicted = 0
        self._root = _Node((), None)
        self._held: OrderedDict[int, _Node] = OrderedDict()  # by age; the newest is last

    def __len__(self) -> int:
        return len(self._held)

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes that tokens lead through whole, and how many tokens each ends after."""
        node, at = self._root, 0
        while True:
            yield node, at
            below = node.below.get(tokens[at]) if at < len(tokens) else None
            if below is None or tuple(tokens[at : at + len(below.edge)]) != below.edge:
                return
            node, at = below, at + len(below.edge)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Any]:
        """The longest beginning that is known: its number of tokens, and the state after them; (0, None) if none is."""
        known = [pair for pair in self._path(tokens) if pair[0].state is not None]
        if not known:
            self.misses += 1
            return 0, None
        node, count = known[-1]
        self._held.move_to_end(id(node))
        self.hits, self.tokens_saved = self.hits + 1, self.tokens_saved + count
        return count, states.unpark(node.state)

    def keep(self, tokens: Sequence[int], state: Any) -> None:
        """Keeps the state `[1, ...]` after these tokens; one that alone is above `max_bytes` is not kept."""
        state = self.park(state)  # a copy: rows of a batch are views, each of which keeps the whole batch
        size = states.bytes_of(state)
        if not tokens or size > self.max_bytes:
            return
        node = self._place(tokens)
        if node.state is None:
            node.state, node.bytes = state, size
            self.bytes += size
        self._held[id(node)] = node
        self._held.move_to_end(id(node))
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._held.values())))

    def _place(self, tokens: Sequence[int]) -> _Node:
        """The node that ends after exactly these tokens, made if it is not there."""
        *_, (node, at) = self._path(tokens)
        if at == len(tokens):
            return node
        below = node.below.get(tokens[at])
        if below is None:
            return _Node(tuple(tokens[at:]), node)
        pairs = zip(below.edge, tokens[at:], strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(tokens) - at)
        middle = _Node(below.edge[:same], node)
        below.edge, below.up = below.edge[same:], middle
        middle.below[below.edge[0]] = below
        return middle if at + same == len(tokens) else _Node(tuple(tokens[at + same :]), middle)

    def _drop(self, node: _Node) -> None:
        del self._held[id(node)]
        self.bytes, self.evicted = self.bytes - node.bytes, self.evicted + 1
        node.state, node.bytes = None, 0
        while node.up is not None and node.state is None and not node.below:
            del node.up.below[node.edge[0]]
            node = node.up

    def save(self, folder: Path | str) -> None:
        """Writes every state to a file of its own, named by the model and the tokens; files of other states that an
        earlier call wrote there are deleted. [SERVE-TREE-D2]

        Raises:
            CheckpointError: the folder cannot be written.
        """
        folder, names = Path(folder), set()
        with refusing(f"write {folder}", "choose another folder"):
            make_folder(folder)
            for node in self._held.values():  # in this order, by which `open` knows their age
                tokens = torch.tensor(node.tokens())
                names.add(name := f"{_name(self.model, tokens.tolist())}.safetensors")
                states.save({"tokens": tokens, "state": node.state}, folder / name, self.model)
            for path in folder.iterdir():
                if _FILE.fullmatch(path.name) and path.name not in names:
                    path.unlink(missing_ok=True)

    @classmethod
    def open(
        cls, folder: Path | str, max_bytes: int = 256 << 20, block: int = 256, *, model: str = "",
        parked_dtype: ParkedDtype | None = None, exact: bool = False,
    ) -> PrefixCache:  # fmt: skip
        """The tree that `save` wrote, parked or not, as far as `max_bytes` go; a folder that is not there is an empty
        one.

        Raises:
            CheckpointError: a file of another model, or one that is damaged or renamed. [SERVE-TREE-D2]
        """
        made, files = cls(max_bytes, block, model=model, parked_dtype=parked_dtype, exact=exact), []
        with suppress(FileNotFoundError):
            files = [path for path in Path(folder).iterdir() if _FILE.fullmatch(path.name)]
        for path in sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            if path.stat().st_size > 4 * max_bytes + (1 << 20):
                continue  # larger than any state that would be kept
            found = states.load(path, model=made.model)
            tokens = found.get("tokens") if isinstance(found, dict) else None
            if not isinstance(tokens, torch.Tensor) or f"{_name(made.model, tokens.tolist())}.safetensors" != path.name:
                raise CheckpointError(f"{path} is not of the tokens that its name tells; delete it")
            made.keep(tokens.tolist(), states.unpark(found["state"]))
        return made


def _name(model: str, tokens: list[int]) -> str:
    return sha256(f"{model} {json.dumps(tokens)}".encode()).hexdigest()

"""States that a server keeps between requests: those of prefixes that prompts share, in a tree and on disk, the least
recently used evicted first; and each user's memory, a file that is replaced when an answer is complete."""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hecate import states
from hecate.algorithm import RLS, NewtonSchulz
from hecate.checks import expect_choice, expect_count, readable
from hecate.errors import CheckpointError, ConfigError, shorten
from hecate.files import TEMPORARY, lock, make_folder, refusing, sync
from hecate.readout import Ridge
from hecate.retention import Lq
from hecate.rule import MemoryConfig

ParkedDtype = Literal["float16"]


def parking(dtype: ParkedDtype | None) -> Callable[[Any], Any]:
    """The function that copies a state for storage: `states.park`, or without a dtype `states.clone`."""
    if dtype is None:
        return states.clone
    expect_choice(dtype, "parked_dtype", ("float16",))
    return states.park


def check_parked(model: nn.Module, dtype: ParkedDtype) -> None:
    """Refuses a model with a memory in which the rounding error of a state does not fade. [SERVE-PARK-D1]

    Raises:
        ConfigError: such a memory; names it and its setting.
    """
    for name, module in model.named_modules():
        rule = getattr(module, "rule", None)
        if isinstance(rule, MemoryConfig) and (why := _unbearable(rule)) is not None:
            raise ConfigError(f"parked_dtype={dtype!r} and {name or 'the model'}: {why}; leave parked_dtype out")


def _unbearable(rule: MemoryConfig) -> str | None:
    """Reason why a rounding error in a state would affect all later answers of a rule; None if it fades."""
    if isinstance(rule.algorithm, RLS):
        return "algorithm 'rls' keeps an inverse of all keys, in which errors add up"
    if isinstance(rule.readout, Ridge) and not rule.retention.uses_retain:
        return f"readout 'ridge' under retention {rule.retention.kind!r} keeps all keys, and solving magnifies errors"
    if isinstance(rule.retention, Lq) and rule.retention.q > 2:
        return f"retention 'lq' with q={rule.retention.q:g} has powers that are steep at 0, and errors grow"
    if isinstance(rule.algorithm, NewtonSchulz) and not rule.structure.linear:
        return (
            f"algorithm 'newton_schulz' on structure {rule.structure.kind!r} takes steps of one size, and errors grow"
        )
    return None


OWN = 0o700  # mode of new folders: they contain users' data
_FILE, _LOCK = re.compile(r"[0-9a-f]{64}\.safetensors"), ".lock"


class _Node:
    """A node of the tree: a run of tokens after those of its parent, and possibly the state after the last of them."""

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
    """A radix tree of the states after prefixes of prompts, by their tokens. [SERVE-TREE-D1]

        count, state = prefixes.longest(tokens)    # the state after tokens[:count]; None after none
        prefixes.keep(tokens, state)               # after exactly these tokens

    A look-up takes time proportional to the prompt. States are copied in and out, so that callers cannot change them.

    Args:
        max_bytes: limit for all states; beyond it the least recently used are dropped.
        block: number of tokens between the places of a prompt at which its reader keeps a state.
        model: the `hecate.states.fingerprint` of the states' model, for files.
        parked_dtype: "float16" keeps states in half the bytes, in memory and in files. [SERVE-PARK-D1]
        exact: for a `Scheduler(exact=True)`, whose states differ in their bits; files of one kind are refused by the
            other, as those of another model. [SERVE-EXACT-D1]
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
        self._held: OrderedDict[int, _Node] = OrderedDict()  # nodes with a state, least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes along tokens whose runs match completely, each with the number of tokens up to its end."""
        node, at = self._root, 0
        while True:
            yield node, at
            below = node.below.get(tokens[at]) if at < len(tokens) else None
            if below is None or tuple(tokens[at : at + len(below.edge)]) != below.edge:
                return
            node, at = below, at + len(below.edge)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Any]:
        """The longest prefix with a state: its number of tokens, and the state after them; (0, None) if there is
        none."""
        known = [pair for pair in self._path(tokens) if pair[0].state is not None]
        if not known:
            self.misses += 1
            return 0, None
        node, count = known[-1]
        self._held.move_to_end(id(node))
        self.hits, self.tokens_saved = self.hits + 1, self.tokens_saved + count
        return count, states.unpark(node.state)

    def keep(self, tokens: Sequence[int], state: Any) -> None:
        """Keeps a copy of the state `[1, ...]` after these tokens, unless it exceeds `max_bytes` alone."""
        state = self.park(state)  # a copy: a row is a view, which would keep its whole batch in memory
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
        """The node that ends after exactly these tokens; it is made if needed."""
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
        """Writes every state to a file, named by a hash of the model and the tokens, and deletes files of other states
        from earlier calls. [SERVE-TREE-D2]

        Raises:
            CheckpointError: a folder that cannot be written.
            ConfigError: a folder of users' memories.
        """
        folder, names = Path(folder), set()
        _expect_no_users(folder)
        with refusing(f"write {folder}", "choose another folder"):
            make_folder(folder, OWN)
            for node in self._held.values():  # oldest first: `open` sorts by the times of the files
                tokens = torch.tensor(node.tokens())
                names.add(name := _file_name(self.model, tokens.tolist()))
                states.save({"tokens": tokens, "state": node.state}, folder / name, self.model)
            for path in folder.iterdir():
                if _FILE.fullmatch(path.name) and path.name not in names:
                    path.unlink(missing_ok=True)

    @classmethod
    def open(
        cls, folder: Path | str, max_bytes: int = 256 << 20, block: int = 256, *, model: str = "",
        parked_dtype: ParkedDtype | None = None, exact: bool = False,
    ) -> PrefixCache:  # fmt: skip
        """The tree that `save` wrote, parked or not, up to `max_bytes`; empty if the folder does not exist.

        Raises:
            CheckpointError: a file that is of another model, damaged or renamed. [SERVE-TREE-D2]
            ConfigError: a folder of users' memories.
        """
        cache, files = cls(max_bytes, block, model=model, parked_dtype=parked_dtype, exact=exact), []
        _expect_no_users(Path(folder))
        with suppress(FileNotFoundError):
            files = [path for path in Path(folder).iterdir() if _FILE.fullmatch(path.name)]
        for path in sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            if path.stat().st_size > 4 * max_bytes + (1 << 20):
                continue  # larger than any state that `keep` accepts
            entry = states.load(path, model=cache.model)
            tokens = entry.get("tokens") if isinstance(entry, dict) else None
            if not isinstance(tokens, torch.Tensor) or _file_name(cache.model, tokens.tolist()) != path.name:
                raise CheckpointError(f"{path} is not of the tokens that its name tells; delete it")
            cache.keep(tokens.tolist(), states.unpark(entry["state"]))
        return cache


def _expect_no_users(folder: Path) -> None:
    """Refuses the folder of a `Memories`, as saving a tree there would delete users' files."""
    if (folder / _LOCK).exists():
        raise ConfigError(
            f"{folder} has users' memories; shared beginnings (prefixes) need another folder than memories"
        )


def _file_name(model: str, tokens: list[int]) -> str:
    return f"{sha256(f'{model} {json.dumps(tokens)}'.encode()).hexdigest()}.safetensors"


MAX_BYTES = 4 << 30
"""Default limit for all files of a folder, above which new users are refused."""


class Memories:
    """A folder with a state for each user. [SERVE-USER-D1]

    Files are named by a hash of the user's name, never by the name itself, and belong to one model: files of another
    are refused. Writing is atomic: a killed process leaves the old file or the new one.

    Args:
        folder: folder of the files, made if needed.
        model: the `hecate.states.fingerprint` of the model.
        max_bytes: limit for all files; beyond it only users with a file are still served.
        parked_dtype: "float16" writes files of half the bytes; files of either kind can be read. [SERVE-PARK-D1]

    Raises:
        CheckpointError: a folder that cannot be made, or is in use by another process.
    """

    def __init__(
        self, folder: Path | str, model: str, max_bytes: int = MAX_BYTES, *, parked_dtype: ParkedDtype | None = None
    ) -> None:
        if not isinstance(model, str):
            raise ConfigError(f"model must be what states.fingerprint(model) says, got {shorten(model)}")
        self.folder, self.model, self.max_bytes = Path(folder), model, max_bytes
        self.park, self.parked_dtype = parking(parked_dtype), parked_dtype
        with refusing(f"use {folder}", "choose another folder, or stop the server that has it"):
            make_folder(self.folder.absolute(), OWN)
            self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)  # held until the process ends
            lock(self._lock, self.folder)
            for path in self.folder.glob(f"{TEMPORARY}*.safetensors-*"):  # left by a killed writer
                path.unlink(missing_ok=True)
            self._sizes = {path.name: path.stat().st_size for path in self.folder.glob("*.safetensors")}

    def path(self, user: str) -> Path:
        """Path of a user's file."""
        return self.folder / f"{sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}.safetensors"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def close(self) -> None:
        """Releases the lock on the folder."""
        os.close(self._lock)

    def file_bytes(self, state: Any) -> int:
        """Size of the file of a state."""
        return len(states.packed(self.park(state), self.model))

    def check_room(self, user: str, size: int, others: Iterable[str] = ()) -> None:
        """Refuses a new user if a file of `size` bytes would exceed the limit, beside the files that exist and as large
        ones for those of `others`, users who are being answered, who have none yet.

        Raises:
            ConfigError: not enough room; names the sizes.
        """
        new = {self.path(name).name for name in (user, *others)} - self._sizes.keys()
        used = self.bytes + size * (len(new) - 1)
        if self.path(user).name in new and used + size > self.max_bytes:
            raise ConfigError(
                f"memories have {readable(used)} of {readable(self.max_bytes)}, and one of {readable(size)} more "
                "is not kept; delete some (DELETE /v1/memories/USER), or leave user out"
            )

    def load(self, user: str) -> Any:
        """The user's state that was saved last; None for a new user.

        Raises:
            CheckpointError: a file that is damaged or of another model.
        """
        path = self.path(user)
        return states.unpark(states.load(path, model=self.model)) if path.exists() else None

    def save(self, user: str, state: Any) -> None:
        """Saves the user's state, replacing the file atomically.

        Raises:
            CheckpointError: a file that cannot be written; the old one stays.
        """
        path = self.path(user)
        states.save(self.park(state), path, self.model)
        self._sizes[path.name] = path.stat().st_size

    def delete(self, user: str) -> bool:
        """Deletes a user's file; returns False if there was none.

        Raises:
            CheckpointError: a file that cannot be deleted.
        """
        path = self.path(user)
        with refusing(f"delete {path}"):
            if not path.exists():
                return False
            path.unlink()
            sync(self.folder)
        self._sizes.pop(path.name, None)
        return True

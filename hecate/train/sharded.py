"""Checkpoints that many processes write and read together, each its own part. [CKPT-SHARD-D1]

Each writes the blocks that it has, of a tensor that several have the lowest of them, into a safetensors file of its
own; a manifest lists every file with its hash and every block of every tensor. It is written last, and held against the
folder before anything is loaded, by a world of any size. All processes succeed, or all raise the same
`CheckpointError`. Nothing in a file is pickled. `Saver` writes those of a run while it goes on, by one process or many.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from hecate.distributed import World, gathered, is_sharded
from hecate.errors import CheckpointError, HecateError
from hecate.files import refusing, sync, write_file
from hecate.train.checkpoint import (
    MANIFEST,
    SHARDED,
    Box,
    Checkpoint,
    Content,
    LeftAloneError,
    ShardedContent,
    Skipped,
    aliases_of,
    check_blocks,
    check_files,
    check_listed,
    check_name,
    checkpoints,
    copies,
    describe_file,
    dtype_of,
    manifest_text,
    named,
    newest_checkpoint,
    newest_of,
    prune_checkpoints,
    publishing,
    read_blocks,
    read_manifest,
    whole,
    write_checkpoint,
    write_tensors,
)
from hecate.train.state import Restorable, blank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Team:
    """The processes of a gloo group, which act together and fail together.

    `group` must be of the CPU (gloo) and used by nothing else while a checkpoint is written behind a run.
    """

    def __init__(self, group: ProcessGroup) -> None:
        from torch import distributed

        if "gloo" not in distributed.get_backend(group):
            raise CheckpointError(
                "checkpoints pass their facts over a gloo group, got one of "
                f"{distributed.get_backend(group)}; make one by torch.distributed.new_group(backend='gloo')"
            )
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Results of `act`, plain JSON, on every rank; where it fails on one, all raise what the first of them did.

        Raises `CheckpointError` as well where another rank has ended or does not answer in the group's time.
        """
        try:
            mine = {"value": act()}
        except HecateError as error:
            mine = {"error": str(error)}
        except Exception as error:
            mine = {"error": f"cannot {what}: {type(error).__name__}: {error}"}
        every = self._exchange(what, mine)
        for item in every:
            if "error" in item:
                raise CheckpointError(item["error"])
        return [item["value"] for item in every]

    def _exchange(self, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        from torch import distributed

        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        try:
            distributed.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
            texts = [torch.zeros(max(map(int, lengths)), dtype=torch.uint8) for _ in lengths]
            padded = torch.cat([data, torch.zeros(len(texts[0]) - len(data), dtype=torch.uint8)])
            distributed.all_gather(texts, padded, group=self.group)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise LeftAloneError(
                f"cannot {what}: another process of the run has ended or does not answer ({first}); start the run "
                "again with --resume (earlier checkpoints are intact)"
            ) from None
        return [json.loads(text[: int(n)].numpy().tobytes()) for text, n in zip(texts, lengths, strict=True)]


def group_of(world: World) -> ProcessGroup | None:
    """A gloo group of a world's processes, for checkpoints alone; None where there is one process. Together."""
    if world.size == 1:
        return None
    from torch import distributed

    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))


class Staged(NamedTuple):
    """Copies on the CPU of the blocks that this rank writes; what a manifest tells of all tensors; aliases."""

    blocks: dict[str, Tensor]
    tensors: dict[str, dict[str, Any]]
    aliases: dict[str, str]


def staged(tensors: Mapping[str, Tensor], team: Team) -> Staged:
    """Tensors to store, as they stand now; together.

    Every rank gives the same names, as `DTensor`s or, the same on all ranks, plain tensors. Of a block that several
    have the lowest rank's is written. Rank 0 says what is an alias: a rank whose part of a tensor is empty could not.
    """
    tensors = {name: _summed(tensor) for name, tensor in sorted(tensors.items())}
    own = {name: own_block(tensor.detach()) for name, tensor in tensors.items()}

    def known() -> list[Any]:
        kinds = {name: f"{list(t.shape)} {t.dtype}" for name, t in tensors.items()}
        return [aliases_of(tensors), kinds, {name: [at, list(block.shape)] for name, (at, block) in own.items()}]

    every = team.all("save a checkpoint", known)
    for rank, (_, kinds, _) in enumerate(every):
        for name in sorted({*kinds, *every[0][1]}):
            one, other = (x.get(name, "missing") for x in (every[0][1], kinds))
            if one != other:
                raise CheckpointError(
                    f"cannot save a checkpoint: tensor {name!r} is {one} on rank 0 and {other} on rank {rank}; all "
                    "ranks must have the same model and optimiser"
                )
    aliases, blocks = every[0][0], dict[str, Tensor]()
    told: dict[str, dict[str, Any]] = {
        name: {"dtype": named(t.dtype), "shape": list(t.shape)} for name, t in tensors.items() if name not in aliases
    }
    for name, about in told.items():
        pieces: dict[tuple[int, ...], dict[str, Any]] = {}
        for rank, (at, shape) in enumerate(boxes[name] for *_, boxes in every):
            if 0 not in shape and tuple(at) not in pieces:
                pieces[tuple(at)] = {"file": _file_of(rank), "offset": at, "shape": shape}
                if rank == team.rank:
                    blocks[name] = own[name][1]
        about["pieces"] = list(pieces.values())
    return Staged(copies(blocks), told, aliases)


def own_block(tensor: Any) -> Box:
    """This process's block of a tensor, and where in the whole it begins."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tensor
    (chunk,) = tensor.__create_chunk_list__()  # torch's own protocol of what a process has to store
    return tuple(chunk.offsets), tensor.to_local()


def _file_of(rank: int) -> str:
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def _summed(tensor: Tensor) -> Tensor:
    """A `DTensor` whose parts are still to be added up has no blocks to store."""
    if is_sharded(tensor) and any(placement.is_partial() for placement in getattr(tensor, "placements")):  # noqa: B009
        return gathered(tensor)
    return tensor


def write_sharded(folder: Path, step: int, given: Staged, facts: Mapping[str, Any], team: Team) -> Path:
    """Writes `folder/step_XXXXXXXX`, of what is `staged`, together; the folder is one that all processes share.
    [CKPT-SHARD-D1]

    Facts are those of rank 0. Raises the same `CheckpointError` on all ranks.
    """
    what, first = f"write checkpoint {folder / f'step_{step:08d}'}", team.rank == 0
    with ExitStack() as held:

        def begin() -> list[str] | None:
            return [str(path) for path in held.enter_context(publishing(folder, step))] if first else None

        temporary, target = map(Path, team.all(what, begin)[0])

        files: dict[str, dict[str, Any]] = {}
        for part in team.all(what, lambda: _write_blocks(what, temporary, given.blocks, team.rank)):
            files |= part

        def conclude() -> None:
            if not first:
                return
            for name, described in files.items():
                if not (temporary / name).is_file() or (temporary / name).stat().st_size != described["bytes"]:
                    raise CheckpointError(
                        f"cannot write checkpoint {temporary}: rank 0 does not see {name} as another rank wrote it; "
                        "give an --out on a disk that all machines share"
                    )
            about = {"step": step, "facts": facts, "aliases": given.aliases, "tensors": given.tensors}
            write_file(temporary / MANIFEST, manifest_text(SHARDED, files=files, **about))

        team.all(what, conclude)
        team.all(what, held.close)  # here rank 0 publishes it
    return target


def _write_blocks(what: str, folder: Path, blocks: Mapping[str, Tensor], rank: int) -> dict[str, dict[str, Any]]:
    """Writes a rank's blocks, if it has any, into a file of its own, durable; the file's description by its name."""
    if not folder.is_dir():
        raise CheckpointError(
            f"cannot {what}: rank {rank} does not see the folder that rank 0 has made; give an --out on a disk that "
            "all machines share"
        )
    if not blocks:
        return {}
    file = folder / _file_of(rank)
    with refusing(f"{what}: rank {rank}", "choose another --out (earlier checkpoints are intact)"):
        write_tensors(blocks, file)
        sync(file)
    return {file.name: describe_file(file).model_dump()}


def verified(path: Path, team: Team) -> Content | ShardedContent:
    """The content of a checkpoint whose files are what was written; together."""
    read: list[Content | ShardedContent] = []

    def own() -> str:
        content = read_manifest(path)
        check_name(path, content.step)
        check_listed(path, content)
        if isinstance(content, ShardedContent):
            check_files(path, content, sorted(content.files)[team.rank :: team.size])
        else:
            for _ in whole(path, content, slice(team.rank, None, team.size)):
                pass  # each is verified as it is read
        read.append(content)
        return hashlib.sha256(content.model_dump_json().encode()).hexdigest()

    if len(set(team.all(f"read {path}", own))) > 1:
        raise CheckpointError(f"{path} is not the same on all ranks; give an --out on a disk that all machines share")
    return read[0]


def fill(path: Path, content: Content | ShardedContent, tensors: Mapping[str, Tensor], team: Team) -> None:
    """Fills tensors in place from a `verified` checkpoint of any world, one process included; together. [CKPT-SHARD-D2]

    Each rank gives the same names, `DTensor`s of any placement or plain tensors, and reads no more than its parts (to
    verify hashes, the ranks share the files among them). Names that are not asked for are not read. Raises the same
    `CheckpointError` on all ranks before anything is changed, but for a disk that fails in between.
    """

    def fits() -> None:
        for name, tensor in tensors.items():
            stored = content.tensors.get(content.aliases.get(name, name))
            there = "missing" if stored is None else f"{list(stored.shape)} torch.{stored.dtype}"
            if there != (here := f"{list(tensor.shape)} {tensor.dtype}"):
                raise CheckpointError(f"{path}: tensor {name!r} is {there} there and {here} here; load it into its own")
        check_blocks(path, content)

    def read() -> None:
        wanted: dict[str, list[Box]] = {}
        for name, tensor in tensors.items():  # names of one stored tensor may have another placement each
            wanted.setdefault(content.aliases.get(name, name), []).append(own_block(tensor.detach()))
        read_blocks(path, content, wanted)

    team.all(f"read {path}", fits)
    team.all(f"read {path}", read)


def newest_for(trainer: Restorable, folder: Path, group: ProcessGroup) -> tuple[Path, Checkpoint, list[Skipped]] | None:
    """As `newest_checkpoint`, together: its tensors are placed as the trainer's and fit its `restore`. [CKPT-SHARD-D2]

    A rank reads no more than its parts, whatever world has written the checkpoint."""
    team = Team(group)

    def listed() -> list[Path]:
        names = team.all(f"read {folder}", lambda: [path.name for path in checkpoints(folder)])[0]
        return [folder / name for name in names]

    def load(path: Path) -> Checkpoint:
        content = verified(path, team)
        shapes = {name: (item.shape, dtype_of(path, name, item)) for name, item in content.tensors.items()}
        shapes |= {name: shapes[base] for name, base in content.aliases.items()}
        tensors = blank(trainer.model, trainer.optimizers.values(), shapes)
        fill(path, content, tensors, team)
        return Checkpoint(tensors, content.facts)

    return newest_of(folder, listed, load)


class Saver:
    """Writes a run's checkpoints into `folder` and keeps the `keep` newest there, and the best. [CKPT-ASYNC-D1]

    `behind`: `save` returns once all is copied to memory, and a thread writes the copy; the next save, `wait` and the
    end of the `with` block wait for it. What fails there is raised by whichever of them comes first.
    `group`: a gloo group of its own (`torch.distributed.new_group(backend="gloo")`) where many processes save together.
    Leaving the block with an error waits, too, and adds what failed to it as a note.
    """

    def __init__(self, folder: Path, keep: int, *, behind: bool = False, group: ProcessGroup | None = None) -> None:
        self.folder, self.keep = folder, keep
        self._team = None if group is None else Team(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if behind else None
        self._pending: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Saves what the tensors and facts are now. Raises `CheckpointError`, of the former save as well."""
        self.wait()
        if self._team is None:
            aliases = aliases_of(checkpoint.tensors)
            stored = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in aliases}
            given = Staged(copies(stored), {}, aliases)
        else:
            given = staged(checkpoint.tensors, self._team)
        work = step, given, copy.deepcopy(checkpoint.facts)
        if self._thread is None:
            self._write(*work)
        else:
            self._pending = self._thread.submit(self._write, *work)

    def newest(self, run: Restorable) -> tuple[Path, Checkpoint, list[Skipped]] | None:
        """As `newest_checkpoint`; many processes find the same one together, its tensors placed as the run's."""
        return newest_checkpoint(self.folder) if self._team is None else newest_for(run, self.folder, self._team.group)

    def wait(self) -> None:
        """Returns once what was saved is on disk. Raises `CheckpointError` where it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, given: Staged, facts: Mapping[str, Any]) -> None:
        if self._team is None:
            write_checkpoint(self.folder, step, given.blocks, given.aliases, facts)
        else:
            write_sharded(self.folder, step, given, facts, self._team)
        if self._team is None or self._team.rank == 0:
            prune_checkpoints(self.folder, self.keep, upto=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and the checkpoint written behind the run failed: {late}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()

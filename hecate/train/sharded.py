"""Checkpoints that several processes write and read together, each its own part. [CKPT-SHARD-D1]

torch's distributed checkpoint (DCP) writes the parts as safetensors files, and redistributes them when another number
of processes loads them. It trusts the folder it reads: a missing file, a file of an earlier save or another dtype
passes silently. So a manifest lists every file with its hash, and every block of every tensor; it is written last, and
the folder is verified against it before anything is loaded. All processes succeed, or all raise the same
`CheckpointError`. Nothing in a file is pickled.
`Saver` writes the checkpoints of a run, from one process or several, optionally in the background.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hecate.distributed import World, gathered, is_sharded
from hecate.errors import CheckpointError, HecateError
from hecate.files import cure, write_file
from hecate.train import checkpoint as store
from hecate.train.checkpoint import Checkpoint, Content, Piece, ShardedContent, Skipped, Spread, Staged, bad, named
from hecate.train.state import Restorable, sharded_like

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

Block = tuple[str, str, tuple[int, ...], tuple[int, ...], str]
"""Tensor, file, offset, shape and dtype of a block."""
_SHARED = "give an --out on a disk that all machines share"


class Team:
    """The processes of a gloo group, which succeed together or fail together.

    `group` must have the CPU backend gloo, and must not be used for anything else while a checkpoint is written in the
    background.
    """

    def __init__(self, group: ProcessGroup) -> None:
        from torch import distributed

        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    def all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """The results of `act`, plain JSON, of all ranks, on every rank; if it fails on any, all ranks raise the error
        of the first that failed.

        Also raises `CheckpointError` if another rank has ended, or does not answer within the group's timeout.
        """
        try:
            # A rank that fails must not leave the others waiting: its error is exchanged like a result.
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

        # JSON as bytes: torch's own exchange of objects unpickles what it receives.
        data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        # Lengths first, then texts padded to the longest: a gather takes tensors of one size.
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _together(what):
            distributed.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
            texts = [torch.zeros(max(map(int, lengths)), dtype=torch.uint8) for _ in lengths]
            padded = torch.cat([data, torch.zeros(len(texts[0]) - len(data), dtype=torch.uint8)])
            distributed.all_gather(texts, padded, group=self.group)
        return [json.loads(text[: int(n)].numpy().tobytes()) for text, n in zip(texts, lengths, strict=True)]


@contextmanager
def _together(what: str, instead: str = "") -> Iterator[None]:
    """Context of what all ranks do together: a failure on one is a `CheckpointError` on all, with the remedy `instead`,
    and a `LeftAloneError` if another process has ended, or does not answer."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # of DCP, the same on all ranks
        faults = {rank: fault for rank, (fault, _) in sorted(error.failures.items())}
        reasons = "; ".join(f"rank {n}: {getattr(fault, 'strerror', None) or fault}" for n, fault in faults.items())
        cures = [cure(fault) for fault in faults.values() if isinstance(fault, OSError) and cure(fault)]
        remedy = f"; {' or '.join([*cures[:1], instead])}" if instead else ""
        raise CheckpointError(f"cannot {what}: {reasons}{remedy}") from None
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise store.LeftAloneError(
            f"cannot {what}: another process of the run has ended or does not answer ({first}); start the run again "
            "with --resume (earlier checkpoints are intact)"
        ) from None


def group_of(world: World) -> ProcessGroup | None:
    """A gloo group of a world's processes, for checkpoints only; None for a single process. All ranks call it."""
    if world.size == 1:
        return None
    from torch import distributed

    # A separate group: a background thread writes, and its collectives must not mix with those of the run.
    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))


def staged(step: int, checkpoint: Checkpoint, team: Team) -> Staged:
    """A checkpoint with copies of the tensors' present values; all ranks call it together.

    Every rank passes the same names, with `DTensor`s, or with plain tensors that are equal on all ranks, of which the
    lowest rank's are written. Rank 0 determines the aliases: a rank whose part of a tensor is empty could not."""
    tensors = {name: _sum_parts(tensor) for name, tensor in sorted(checkpoint.tensors.items())}

    def describe() -> list[Any]:
        return [store.aliases_of(tensors), {name: f"{list(t.shape)} {t.dtype}" for name, t in tensors.items()}]

    every = team.all("save a checkpoint", describe)
    for rank, (_, shapes) in enumerate(every):
        for name in sorted({*shapes, *every[0][1]}):
            one, other = (x.get(name, "missing") for x in (every[0][1], shapes))
            if one != other:
                raise CheckpointError(
                    f"cannot save a checkpoint: tensor {name!r} is {one} on rank 0 and {other} on rank {rank}; all "
                    "ranks must have the same model and optimiser"
                )
    return store.staged(step, Checkpoint(tensors, checkpoint.facts), every[0][0])


def _sum_parts(tensor: Tensor) -> Tensor:
    """The tensor; a `DTensor` with partial sums, which has no blocks to store, is summed to a whole tensor."""
    if is_sharded(tensor) and any(placement.is_partial() for placement in getattr(tensor, "placements")):  # noqa: B009
        return gathered(tensor)
    return tensor


def write_sharded(folder: Path, checkpoint: Staged, team: Team) -> Path:
    """Writes the staged checkpoint to `folder/step_XXXXXXXX`; all ranks call it together, on a disk that they share.
    [CKPT-SHARD-D1]

    The facts are rank 0's. Raises the same `CheckpointError` on all ranks.
    """
    what, first = f"write checkpoint {folder / f'step_{checkpoint.step:08d}'}", team.rank == 0
    with ExitStack() as stack:

        def begin() -> list[str] | None:
            return list(map(str, stack.enter_context(store.publishing(folder, checkpoint.step)))) if first else None

        temporary, target = map(Path, team.all(what, begin)[0])

        def check_folder() -> None:
            if not temporary.is_dir():
                raise CheckpointError(f"cannot {what}: rank {team.rank} does not see the folder of rank 0; {_SHARED}")

        team.all(what, check_folder)
        _write_blocks(what, temporary, checkpoint.tensors, team)
        parts = team.all(what, lambda: _blocks(temporary, team.rank))

        team.all(what, lambda: _write_manifest(checkpoint, temporary, parts) if first else None)
        team.all(what, stack.close)  # here rank 0 publishes it
    return target


def _write_blocks(what: str, folder: Path, stored: Mapping[str, Tensor], team: Team) -> None:
    """Writes each rank's blocks to its own file, and forces it to disk."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # A replicated tensor is written once, by the lowest rank, which every rank knows.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _together(what, "choose another --out (earlier checkpoints are intact)"):
        save(dict(stored), storage_writer=writer, planner=planner, process_group=team.group)


def _blocks(folder: Path, rank: int) -> dict[str, Any]:
    """The files that this rank wrote, and the blocks in them."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    # DCP counts ranks from 1 in file names.
    files = sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    described, pieces = {file.name: store.describe_file(file).model_dump() for file in files}, []
    if files:
        for name, file, offset, shape, _ in _stored_blocks(HuggingFaceStorageReader(str(folder)).read_metadata()):
            if file in described:
                pieces.append([name, Piece(file=file, offset=offset, shape=shape).model_dump(mode="json")])
    return {"files": described, "pieces": pieces}


def _stored_blocks(metadata: Metadata) -> list[Block]:
    """The blocks in a folder, as DCP reads it."""
    return [
        (index.fqn, Path(info.relative_path).name, tuple(index.offset or ()), tuple(info.shape), named(info.dtype))
        for index, info in (metadata.storage_data or {}).items()
    ]


def _write_manifest(checkpoint: Staged, folder: Path, parts: list[Any]) -> None:
    """Writes the manifest; refuses if rank 0 does not see a file that another rank has written."""
    files = {name: described for part in parts for name, described in part["files"].items()}
    for name, described in files.items():
        # If the disk is not shared, this is where it is noticed at the latest, before anything is published.
        if not (folder / name).is_file() or (folder / name).stat().st_size != described["bytes"]:
            unlike = f"rank 0 does not see {name} as another rank wrote it"
            raise CheckpointError(f"cannot write checkpoint {folder}: {unlike}; {_SHARED}")
    tensors: dict[str, dict[str, Any]] = {
        name: {"dtype": named(t.dtype), "shape": list(t.shape), "pieces": []} for name, t in checkpoint.tensors.items()
    }
    for name, piece in sorted((pair for part in parts for pair in part["pieces"]), key=lambda pair: pair[1]["file"]):
        tensors[name]["pieces"].append(piece)
    text = store.manifest_text(store.SHARDED, **checkpoint._asdict() | {"files": files, "tensors": tensors})
    write_file(folder / store.MANIFEST, text)


def verified(path: Path, team: Team) -> Content | ShardedContent:
    """The content of a checkpoint, after verifying its files against it; all ranks call it together."""
    read: list[Content | ShardedContent] = []

    def verify() -> str:
        content = store.read_manifest(path)
        store.check_name(path, content.step)
        store.check_listed(path, content)
        if isinstance(content, ShardedContent):
            # The ranks share the work: each file is hashed by one of them.
            store.check_files(path, content, sorted(content.files)[team.rank :: team.size])
        else:
            for _ in store.whole(path, content, slice(team.rank, None, team.size)):
                pass  # each tensor is verified as it is read
        read.append(content)
        return hashlib.sha256(content.model_dump_json().encode()).hexdigest()

    # On another machine the same path may be another folder.
    if len(set(team.all(f"read {path}", verify))) > 1:
        raise CheckpointError(f"{path} is not the same on all ranks; {_SHARED}")
    return read[0]


def fill(path: Path, content: Content | ShardedContent, tensors: Mapping[str, Tensor], team: Team) -> None:
    """Fills tensors in place from a `verified` checkpoint, written by any number of processes; all ranks call it
    together. [CKPT-SHARD-D2]

    Every rank passes the same names, with `DTensor`s of any placement or plain tensors, and reads only its own parts
    (hashing is shared among the ranks). Tensors with other names are not read. Raises the same `CheckpointError` on all
    ranks before anything is changed, unless the disk fails while reading.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(path))

    def fits() -> None:
        for name, tensor in tensors.items():
            stored = content.tensors.get(content.aliases.get(name, name))
            there = "missing" if stored is None else f"{list(stored.shape)} torch.{stored.dtype}"
            if there != (here := f"{list(tensor.shape)} {tensor.dtype}"):
                raise CheckpointError(f"{path}: tensor {name!r} is {there} there and {here} here; load it into its own")
        _check_blocks(path, content, reader.read_metadata())

    what = f"read {path}"
    team.all(what, fits)
    views = {name: tensor.detach() for name, tensor in sorted(tensors.items())}
    while views:  # aliases of one stored tensor may differ in placement, so each pass loads one name per stored tensor
        now = {content.aliases.get(name, name): name for name in views}
        with _together(what):
            load({base: views.pop(name) for base, name in now.items()}, storage_reader=reader, process_group=team.group)


def _check_blocks(path: Path, content: Content | ShardedContent, metadata: Metadata) -> None:
    """Refuses a checkpoint in which DCP would read other blocks than the manifest lists."""
    # DCP only looks at the headers of the files.
    expected: set[Block] = set()
    for name, item in content.tensors.items():
        whole = Piece(file=store.TENSORS, offset=(0,) * len(item.shape), shape=item.shape)
        pieces = item.pieces if isinstance(item, Spread) else (whole,)
        expected |= {(name, p.file, p.offset, p.shape, item.dtype) for p in pieces}
    for name, file, *_ in sorted(expected ^ set(_stored_blocks(metadata))):
        raise bad(path / file, f"does not hold the block of tensor {name!r} that its manifest lists")


class Saver(AbstractContextManager["Saver"]):
    """Writer of a run's checkpoints, which keeps the `keep` newest in `folder`, and the best. [CKPT-ASYNC-D1]

    `behind`: `save` returns once everything is copied to memory, and a thread writes the copy. The next save, `wait`
    and the end of the `with` block wait for it; the first of them raises its error.
    `group`: a separate gloo group (`torch.distributed.new_group(backend="gloo")`) if several processes save together.
    If the block ends with an error, it waits as well, and adds a failure to write to that error as a note.
    """

    def __init__(self, folder: Path, keep: int, *, behind: bool = False, group: ProcessGroup | None = None) -> None:
        self.folder, self.keep = folder, keep
        self._team = None if group is None else Team(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if behind else None
        self._pending: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Saves the present values of tensors and facts. Raises `CheckpointError`, also for the previous save."""
        self.wait()
        checkpoint = Checkpoint(checkpoint.tensors, copy.deepcopy(checkpoint.facts))
        image = store.staged(step, checkpoint) if self._team is None else staged(step, checkpoint, self._team)
        if self._thread is None:
            self._write(image)
        else:
            self._pending = self._thread.submit(self._write, image)

    def newest(self, run: Restorable) -> tuple[Path, Checkpoint, list[Skipped]] | None:
        """As `newest_checkpoint`; several processes find the same one together, with its tensors placed as the run's.
        [CKPT-SHARD-D2]

        Each rank only reads its own parts, however many processes have written the checkpoint."""
        folder, team = self.folder, self._team
        if team is None:
            return store.newest_checkpoint(folder)

        def list_paths() -> list[Path]:
            names = team.all(f"read {folder}", lambda: [path.name for path in store.checkpoints(folder)])[0]
            return [folder / name for name in names]

        def load(path: Path) -> Checkpoint:
            content = verified(path, team)
            items = {**content.tensors, **{name: content.tensors[base] for name, base in content.aliases.items()}}
            # Each placed as in this run; what is not sharded here is whole, on the CPU.
            like = sharded_like(run, {name: item.shape for name, item in items.items()})
            tensors = {
                name: torch.zeros_like(like.get(name, torch.empty(item.shape)), dtype=getattr(torch, item.dtype))
                for name, item in items.items()
            }
            fill(path, content, tensors, team)
            return Checkpoint(tensors, content.facts)

        return store.newest_of(folder, list_paths, load)

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises `CheckpointError` if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, checkpoint: Staged) -> None:
        if self._team is None:
            store.write_checkpoint(self.folder, checkpoint)
        else:
            write_sharded(self.folder, checkpoint, self._team)
        if self._team is None or self._team.rank == 0:
            store.prune_checkpoints(self.folder, self.keep, upto=checkpoint.step)

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

"""A model over the processes of a mesh: blocks that are recomputed, compiled or run in bfloat16; parameters that are
sharded or copied; and writes into sharded tensors.

The work is torch's: `fully_shard`, `DistributedDataParallel` and `checkpoint`. `DTensor` is looked for only where
torch.distributed is loaded already.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hecate.distributed.world import World
from hecate.errors import ConfigError

LOW = torch.bfloat16
_WHOLE = Tensor, nn.Parameter
Recompute = int | Literal["none", "full"]


def is_sharded(value: Any) -> bool:
    """True if a tensor is a `DTensor`: spread over processes, or at least declared to be."""
    if type(value) in _WHOLE:  # the fast path: a step asks this of every tensor, several times
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def spread(value: Tensor, like: Any) -> Any:
    """A whole value, the same on every process, placed like `like`: each process keeps its part, in the value's own
    dtype, and nothing is sent."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(like.device).expand(like.shape)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def gathered(value: Any) -> Tensor:
    """The whole of a tensor on every process, all of which must call it; the tensor itself if it is whole."""
    return value.full_tensor().detach() if is_sharded(value) else value


@torch.no_grad()
def overwrite(into: Tensor, value: Tensor) -> None:
    """Overwrites a tensor with its new value, given whole; of a sharded tensor, this process's part."""
    into.copy_(spread(value, into))


def adapt(model: nn.Module, *, low: bool, recompute: Recompute, compiled: bool) -> None:
    """Changes how a model's `blocks` run, but not their parameters. [DIST-BLOCK-D1]

    `compiled` compiles each. `low` runs each, and the model around them, with parameters as bfloat16, as
    `fully_shard` does under its policy: for models that are not sharded. `recompute` keeps only the inputs of every
    block ("full"), or of every n-th from the first, and runs these blocks again in the backward pass.
    """
    blocks = list(getattr(model, "blocks", ()))
    if (compiled or recompute != "none") and not blocks:
        setting = "compile" if compiled else "recompute"
        raise ConfigError(f"works on blocks, and {type(model).__name__} has none; leave it out", ("budget", setting))
    every = {"none": 0, "full": 1}.get(str(recompute), recompute)
    for index, block in enumerate(blocks):
        if compiled:
            block.forward = torch.compile(block.forward)
        if low:
            block.forward = _in_low(block, block.forward, ())
        if every and index % int(every) == 0:
            from torch.utils.checkpoint import checkpoint

            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if low:
        model.forward = _in_low(model, model.forward, blocks)


class _Call(nn.Module):
    """A module run by a function of ours, under which `functional_call` may lend it other parameters."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _in_low(module: nn.Module, function: Callable[..., Any], without: Iterable[nn.Module]) -> Callable[..., Any]:
    """`function`, the forward pass of a module, with its parameters as bfloat16, except for those of modules in
    `without`."""
    call, others = _Call(module, function), {id(p) for part in without for p in part.parameters()}

    def run(*args: Any, **kwargs: Any) -> Any:
        named = {n: p for n, p in call.named_parameters() if p.is_floating_point() and id(p) not in others}
        lent = {name: p.to(LOW) for name, p in named.items()}
        return torch.func.functional_call(call, lent, args, kwargs)

    return run


def shard(model: nn.Module, world: World, *, low: bool) -> None:
    """Shards parameters over `data`, copied over `replicate`: each block by itself, then the rest of the model.
    [DIST-SHARD-D1]

    With `low` they are gathered as bfloat16, their gradients are summed in float32, and the inputs of modules, states
    of memories included, keep their dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if world.mesh is None:
        raise ConfigError("a model is sharded over the processes of a mesh, and there is one; start it under torchrun")
    mesh = world.mesh["replicate", "data"] if world.extent("replicate") > 1 else world.mesh["data"]
    dtypes = {"param_dtype": LOW, "reduce_dtype": torch.float32} if low else {}
    policy = MixedPrecisionPolicy(cast_forward_inputs=False, **dtypes)
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    # Logits are a view of a product of matrices, and nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def materialise(model: Any, device: torch.device, source: torch.Generator) -> None:
    """Allocates a model that is on the meta device, of sharded parameters this process's part alone, and draws its
    parameters. Each is drawn whole and each process keeps its part, so bits are those of one process.
    [DIST-SHARD-D2]"""
    model.to_empty(device=device)
    model.reset_parameters(source)


def copied(module: nn.Module, world: World, *, unused: bool = True) -> nn.Module:
    """The module with its gradients averaged over `replicate` in the backward pass. [DIST-COPY-D1]

    With `unused`, parameters that are not in a step's graph are searched for, and stay without a gradient.
    """
    from torch.nn.parallel import DistributedDataParallel

    if world.mesh is None:
        raise ConfigError("a model is copied over the processes of a mesh, and there is one; start it under torchrun")
    return DistributedDataParallel(
        module,
        process_group=world.mesh.get_group("replicate"),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        broadcast_buffers=False,
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,
    )


@contextmanager
def part_of_step(module: nn.Module, model: nn.Module, last: bool) -> Iterator[None]:
    """A context for the forward and backward pass of one part of a batch: gradients are summed over copies with the
    last part only, but over shards with every part, so that no process ever has them whole."""
    shards = getattr(model, "set_requires_all_reduce", None)
    if shards is not None:
        shards(last)
        model.set_is_last_backward(last)  # type: ignore[operator]
    waits = getattr(module, "no_sync", None)
    with nullcontext() if last or waits is None else waits():
        yield


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """A context in which every process has the whole parameters, as in a forward pass: for modules of the model that
    are called by themselves. All processes must enter it."""
    try:
        for part in _sharded_parts(model):
            part.unshard()
        yield
    finally:
        settle(model)


def settle(model: nn.Module) -> None:
    """Shards again the parameters that a forward pass without a backward pass has left gathered."""
    for part in _sharded_parts(model):
        part.reshard()


def _sharded_parts(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` has been called on."""
    return (m for m in model.modules() if hasattr(m, "reshard") and hasattr(m, "set_requires_all_reduce"))

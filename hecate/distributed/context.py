"""Context parallelism: ranks hold consecutive pieces of every sequence, uneven or empty ones too. [CTX-SCAN-D1]

    context = share(model, group)                  # once; every rank of the group has the same model
    tokens, targets, resets = piece(batch, context.rank, context.size)
    logits, state = model(tokens)                  # those of this piece
    loss_of_sum(logits, targets).backward()        # a sum over this piece's targets, divided by the count of all
    sum_gradients(model, context)

Outputs of a piece are the slice of what one process computes, and the state that is returned is that after the last
piece, on every rank; its gradients flow from the last rank alone.

A scan goes one of three ways, which follows from its rule (`way`): by algebra, where the rule is affine in its state,
with the same bytes per border whatever the lengths of pieces; by heads, all tokens of some heads on each rank; or by
relay, one rank after another, each passing on its state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.distributed import exchange
from hecate.distributed.affine import Scan, affine_scan, not_affine, spreading
from hecate.engine import written_before
from hecate.errors import ConfigError
from hecate.late import HELD
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.structure import starts
from hecate.tape import steady

Tree = TypeVar("Tree")
Shares = Literal["itself", "layers", "turns"]
_LOG = logging.getLogger("hecate.distributed")


class Way(NamedTuple):
    """Way of a scan over several ranks, `algebra`, `heads` or `relay`, and the reason for it."""

    name: str
    reason: str


def way(config: MemoryConfig, heads: int, ranks: int, gates: Gates | None = None) -> Way:
    """Way in which pieces of a sequence are scanned; it depends on the rule, not on their sizes. [CTX-WAY-D1]"""
    refusal = not_affine(config, gates)
    if refusal is None:
        return Way("algebra", "a piece is an affine function of the state that enters it")
    if heads % ranks == 0:
        return Way("heads", f"{refusal}; {heads} heads divide by {ranks} ranks")
    return Way("relay", f"{refusal}; {heads} heads do not divide by {ranks} ranks, so they take turns")


def ways(model: nn.Module, ranks: int) -> dict[str, Way]:
    """Way in which `share` runs each layer of a model over this number of ranks, by the layer's path. It needs no other
    process, and parameters may be on the meta device. [CTX-WAY-D2]"""
    table: dict[str, Way] = {}
    for path, layer in _layers(model):
        if _shares(layer) == "turns":
            table[path] = Way("relay", f"{type(layer).__name__} goes on from the state that the piece before has left")
        if _shares(layer) != "itself":
            continue
        scans = {name: part for name, part in layer.named_modules() if _scans(part)}
        for name, part in scans.items():
            gates = Gates(retain_value=torch.empty(0)) if "retain_value" in part.config.gating.gates else None
            table[".".join(filter(None, (path, name)))] = way(part.config, part.heads, ranks, gates)
        if not scans:
            table[path] = Way("relay", f"{type(layer).__name__} hands on the keys and values that it has seen")
    return table


class Context(exchange.Ranks):
    """The ranks over which sequences are spread, with the operations that layers need."""

    def relay(
        self, run: Callable[[Any], tuple[Any, Tree]], state: Any, like: Callable[[], Tree]
    ) -> tuple[Any, Tree, Tensor | float]:
        """Runs `run(state) -> (result, state)` rank after rank, on the first one from `state`: returns the result, the
        state after this piece, and an anchor, which has to be added to a tensor on which the loss depends. `like()` is
        a state of the structure that `run` returns, of any shapes. [CTX-RELAY-D1]"""
        anchor: Tensor | float = 0.0
        if self.rank:
            with torch.no_grad():
                template = like()
            state, anchor = exchange.receive(template, self)
        output, after = run(state)
        if not self.last:
            anchor = anchor + exchange.send(after, self)
        return output, after, anchor

    def final(self, state: Tree, *, alike: bool = True) -> Tree:
        """The last rank's state, on every rank, `alike` if all ranks have one of the same shapes; its gradients flow on
        the last rank alone."""
        return exchange.from_last(state, self, alike=alike)

    def counted(self, origin: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Numbers of tokens `[B]` written since the start or the last reset, before this piece and after the last
        piece; `origin` is that before the first piece."""
        ones = torch.ones(len(origin), length, dtype=torch.bool, device=origin.device) if write is None else write
        mine = torch.zeros_like(origin)
        if length:
            mine = written_before(mine, ones, reset, length)[:, -1] + ones[:, -1]
        fresh = torch.zeros_like(origin) if reset is None else reset.any(1).long()
        before = count = origin
        for rank, (number, restarts) in enumerate(exchange.gather(torch.stack([mine, fresh]), self)):
            before = count if rank == self.rank else before
            count = torch.where(restarts.bool(), number, count + number)
        return before, count

    def halo(
        self,
        x: Tensor,
        width: int,
        past: Tensor | None,
        segment: Tensor | None,
        write: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The `width` tokens before this piece `[B, T, C]`, and the numbers of their documents, counted so that the
        document open at the start of the piece is 0; None if there are no borders. `past` and `segment` are the same
        before the first piece. Tokens that are not written are 0. [CTX-HALO-D1]"""
        batch, length, _ = x.shape
        written = x if write is None else torch.where(write.unsqueeze(-1), x, 0.0)
        short = max(0, width - length)
        tail = torch.cat([x.new_zeros(batch, short, x.shape[2]), written[:, max(0, length - width) :]], 1)
        every = exchange.gather(tail, self)
        known = torch.arange(width, device=x.device) >= short
        segments = torch.zeros(batch, length, dtype=torch.int64, device=x.device) if reset is None else reset.cumsum(1)
        total = segments[:, -1:] if length else segments.new_zeros(batch, 1)
        places = torch.cat([segments.new_zeros(batch, short), segments[:, max(0, length - width) :]], 1)
        facts = exchange.gather(torch.cat([known.long().expand(batch, -1), places, total], 1), self)
        first = x.new_zeros(batch, width, x.shape[2]) if past is None else past.to(x.dtype)
        origin = segments.new_zeros(batch, width) if segment is None else segment
        tokens, documents, valid, borders = [first], [origin], [known.new_ones(width)], segments.new_zeros(batch, 1)
        for rank in range(self.rank):
            flags, own_places, count = facts[rank].split([width, width, 1], 1)
            tokens.append(every[rank])
            documents.append(own_places + borders)
            valid.append(flags[0].bool())
            borders = borders + count
        order = torch.cat(valid).int().argsort(stable=True)[-width:]
        window = torch.cat(tokens, 1)[:, order] + every[:0].sum()
        numbers = torch.cat(documents, 1)[:, order] - borders
        return window, None if reset is None and segment is None else numbers


# One scan.


def context_scan(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    context: Any,
    phi_params: Params | None = None,
    state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, MemoryState]:
    """`memory_scan` of this rank's piece of a sequence: its outputs, and the state after the last piece.

    Args:
        context: a `Context` or a process group, whose ranks call this with the same config and the pieces in order,
            of any lengths.
        state: the state that enters the first piece, the same on every rank; None starts at `initial`.
        how: engine, autodiff and name, as in `memory_scan`.

    Gradients of what all ranks share (`initial`, phi's parameters, those behind q, k, v and gates) have to be summed
    over ranks: `sum_gradients`. NaN or infinity in a memory raises nothing here: it spreads to the loss, and within
    `hecate.late.holding()` a later check names it.

    Raises:
        ConfigError: second derivatives, which collectives do not have.
    """
    if steady():
        raise ConfigError("exact, and ranks that share a sequence cut it: leave one of them out")
    context = context if isinstance(context, Context) else Context.of(context)
    gates = Gates() if gates is None else gates
    chosen = way(config, q.shape[2], context.size, gates)
    config = config if HELD else spreading(config)
    if not torch.compiler.is_compiling() and _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("memory %r, piece %d of %d: %s (%s)", how.get("name", "memory"), context.rank, context.size, *chosen)
    scan = Scan(config, q, k, v, gates, state, phi_params, initial, write_mask, reset_mask, how)
    return _WAYS[chosen.name](context, scan)


def _by_algebra(context: Context, scan: Scan) -> tuple[Tensor, MemoryState]:
    start: Any = scan.fresh() if scan.state is None else scan.state
    count: Tensor | None = None
    if scan.config.feature_map.needs_position:
        before, count = context.counted(start.seen, scan.write_mask, scan.reset_mask, scan.q.shape[1])
        start = start._replace(seen=before)
    y, after = affine_scan(context, scan._replace(v=scan.v.to(start.memory["weight"].dtype), state=start))
    return y.to(scan.v.dtype), after._replace(seen=count)


def _by_relay(context: Context, scan: Scan) -> tuple[Tensor, MemoryState]:
    y, after, anchor = context.relay(lambda state: scan._replace(state=state).run(), scan.state, scan.fresh)
    return y + anchor, context.final(after)


def _by_heads(context: Context, scan: Scan) -> tuple[Tensor, MemoryState]:
    config, q, k, v, gates, state, params, initial, *_ = scan
    batch, length, heads, _ = q.shape
    if config.forms.per_head and gates.retain is None:
        retains, wide = config.retention.default_retains(heads), torch.promote_types(k.dtype, torch.float32)
        retain = torch.tensor(retains, dtype=wide, device=k.device).expand(batch, length, heads)
        gates = gates._replace(retain=retain)
    lengths = exchange.lengths_of(length, context, q.device)
    some = slice(context.rank * heads // context.size, (context.rank + 1) * heads // context.size)

    def to_heads(x: Any, name: str = "") -> Any:
        """`[B, own T, (n,) H, *]` -> `[B, T, (n,) H / ranks, *]`."""
        if not isinstance(x, Tensor):
            return x
        axis = 3 if config.writes > 1 and name in _EACH_WRITE else 2
        x = x.movedim(axis, 2)
        out = exchange.swap(x.reshape(*x.shape[:3], -1), context, lengths, there=True)
        return out.reshape(*out.shape[:3], *x.shape[3:]).movedim(2, axis)

    head_gates = Gates(**{name: to_heads(gate, name) for name, gate in gates._asdict().items()})
    write, reset = (
        None if x is None else exchange.joined(x, lengths, context) for x in (scan.write_mask, scan.reset_mask)
    )
    if initial is not None or state is None or reset is not None:
        initial = _starts(config, initial, some, q, v)
    if state is not None:
        state = pytree.tree_map_only(Tensor, lambda x: x[:, some] if x.dim() > 1 else x, state)
    inputs = to_heads(q), to_heads(k, "k"), to_heads(v, "v")
    # Parameters of one head serve all.
    params = pytree.tree_map_only(Tensor, lambda x: x[some] if len(x) == heads else x, params)
    y, after = Scan(config, *inputs, head_gates, state, params, initial, write, reset, scan.how).run()
    y = exchange.swap(y, context, lengths, there=False)
    after, anchor = _all_heads(after, context)
    return y + anchor, after


_EACH_WRITE = ("k", "v", "lr", "erase", "write")  # these have an axis of writes before that of heads


def _starts(
    config: MemoryConfig, initial: dict[str, Tensor] | None, some: slice, q: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """The initial weights of some heads; a structure draws those of all heads at once."""
    sizes = config.feature_map.output_dim(q.shape[-1]), v.shape[-1]
    if initial is None:
        dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), config.dtype)
        initial = starts(config.structure, *sizes, heads=q.shape[2], dtype=dtype, device=q.device)
    shapes = config.structure.shapes(*sizes)
    return {
        name: item[some] if item.dim() == 1 + len(shapes[name]) else item[:, some] for name, item in initial.items()
    }


def _all_heads(state: MemoryState, context: Context) -> tuple[MemoryState, Tensor | float]:
    """The state of all heads, from that of some on every rank, and its anchor."""
    leaves, spec = pytree.tree_flatten(state)
    anchor: Tensor | float = 0.0
    merged: list[Any] = []
    for item in leaves:
        if isinstance(item, Tensor) and item.dim() > 1:  # the count of tokens `[B]` is the same on all ranks
            every = exchange.gather(item, context)
            anchor = anchor + exchange.anchor_of(every)
            whole = torch.cat(list(every), 1)
            merged.append(whole if context.last else whole.detach())
        else:
            merged.append(item)
    return pytree.tree_unflatten(merged, spec), anchor


_WAYS = {"algebra": _by_algebra, "heads": _by_heads, "relay": _by_relay}


# A model.

_HOOKS = "_context_hooks"


def share(model: nn.Module, group: Any) -> Context:
    """Tells the layers of a model that the ranks of a group hold consecutive pieces of every sequence. [CTX-MODEL-D1]

    A layer that carries a state from token to token (`state` among its arguments) says in `shares` how it runs a piece:
    "itself" by means of its `context`, "layers" by passing the states of its layers through. Others take "turns": they
    run rank after rank, unchanged. `unshare(model)` undoes it.

    Raises:
        ConfigError: a model that carries no state, of which it is not known how tokens affect one another; a layer that
            sees later tokens.
    """
    context = group if isinstance(group, Context) else Context.of(group)
    if not _carries(model):
        raise ConfigError(
            f"parallel.context > 1: {type(model).__name__} has no argument 'state', so nobody can tell it what the "
            "pieces before have left; use context 1, or a model whose layers go on from a state"
        )
    unshare(model)
    for _, layer in _layers(model):
        if _shares(layer) != "turns":
            layer.__dict__["context"] = context
        else:
            if getattr(layer, "causal", True) is False:
                raise ConfigError(
                    f"parallel.context > 1: {type(layer).__name__} with causal=False sees later tokens, which are on "
                    "other ranks; use context 1"
                )
            relayed = _Relayed(context)
            before = layer.register_forward_pre_hook(relayed.before, with_kwargs=True)
            after = layer.register_forward_hook(relayed.after, with_kwargs=True)
            layer.__dict__[_HOOKS] = (before, after)
    return context


def unshare(model: nn.Module) -> None:
    """Undoes `share`: from now on every process has whole sequences."""
    for layer in model.modules():
        for handle in layer.__dict__.pop(_HOOKS, ()):
            handle.remove()
        layer.__dict__.pop("context", None)


def _carries(layer: nn.Module) -> bool:
    return "state" in inspect.signature(type(layer).forward).parameters


def _shares(layer: nn.Module) -> Shares:
    return getattr(layer, "shares", "turns")


def _layers(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost layers that carry a state, and the layers within those that pass states through, by their paths."""
    if _carries(model):
        yield path, model
        if _shares(model) != "layers":
            return
    for name, child in model.named_children():
        yield from _layers(child, f"{path}.{name}" if path else name)


def _scans(layer: nn.Module) -> bool:
    """True if a layer scans by a rule."""
    return isinstance(getattr(layer, "config", None), MemoryConfig)


class _Relayed:
    """Hooks by which a layer `(x, state, masks) -> (y, state)` goes on from the state of the rank before."""

    def __init__(self, context: Context) -> None:
        self.context, self.anchors = context, list[Any]()

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Receives the state of the rank before."""
        x, anchor = args[0], torch.zeros(())
        kwargs = {**kwargs, **({"state": args[1]} if len(args) > 1 else {})}
        if self.context.rank:
            none = {
                name: item[:, :0] if isinstance(item, Tensor) and item.shape[:2] == x.shape[:2] else item
                for name, item in kwargs.items()
                if name != "state"
            }
            with torch.no_grad():
                _, like = layer.forward(x[:, :0], None, **none)
            kwargs["state"], anchor = exchange.receive(like, self.context)  # type: ignore[assignment]
        self.anchors.append(anchor)
        return args[:1], kwargs

    def after(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Sends the state to the next rank, and returns the last rank's."""
        (y, state), anchor = output, self.anchors.pop()
        if not self.context.last:
            anchor = anchor + exchange.send(state, self.context)
        return y + anchor, self.context.final(state, alike=False)


def piece(batch: Tree, rank: int, ranks: int) -> Tree:
    """A rank's piece of a pytree of tensors `[B, T, ...]`: tokens T rank / ranks up to T (rank + 1) / ranks."""

    def cut(x: Tensor) -> Tensor:
        length = x.shape[1]
        return x[:, length * rank // ranks : length * (rank + 1) // ranks]

    return pytree.tree_map_only(Tensor, cut, batch)


@torch.no_grad()
def sum_gradients(model: nn.Module, context: exchange.Ranks) -> None:
    """Sums the gradients of parameters over the ranks of a context, each of which ran a piece: the sum, not the mean.

    For sharded parameters it sums each rank's shard. A parameter that has a gradient on one rank has one on all
    afterwards; those on which no loss depends stay without."""
    import torch.distributed as dist

    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        return
    flags = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=context.group)
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p, used in zip(params, flags.tolist(), strict=True):
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            whole: Any = p.grad
            local = whole.to_local() if hasattr(whole, "to_local") else whole
            groups.setdefault((local.dtype, local.device), []).append(local)
    for grads in groups.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=context.group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

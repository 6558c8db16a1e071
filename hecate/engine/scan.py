"""A memory over a sequence (`memory_scan`), as a feature map (`memory_features`), and one token at a time
(`memory_step`, and `Stepper`, which keeps the state); and a scan as one operator of torch.export."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.checks import expect, named, warn_if_turned
from hecate.engine import nonfinite
from hecate.engine.arguments import check_config, check_mask, check_tokens, document_starts
from hecate.engine.call import Call
from hecate.engine.engine import EngineName, choose, explain, untold
from hecate.engine.flops import counted, counters, hidden, scan_flops
from hecate.engine.one_token import keep_program, one_by_one, short_way
from hecate.engine.reductions import one_write_each, read_once, read_through
from hecate.engine.triton.decode import InPlace
from hecate.engine.triton.ops import config_of, recorded, unshared
from hecate.errors import ConfigError, ShapeError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.states import with_tensors
from hecate.tape import Autodiff, Tape, differentiate, execute, several
from hecate.tape.bridge import compiled_alone, without_autocast
from hecate.tape.ops import joined

_AUTODIFFS = get_args(Autodiff)
_LOG = logging.getLogger("hecate.engine")
UNROLLED = 8  # the most steps of an engine that torch.compile unrolls, each of which takes it a second or more
_TIMED = ("gates", "write_mask", "reset_mask")  # [B, T, ...], beside q, k and v

pytree._register_namedtuple(Gates, serialized_type_name="hecate.Gates")  # in files of torch.export


@named(*MemoryConfig.model_fields)
def memory_scan(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    phi_params: Params | None = None,
    state: MemoryState | None = None,
    initial: dict[str, Tensor] | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    tape: Tape | None = None,
    name: str = "memory",
) -> tuple[Tensor, MemoryState]:
    """Writes and reads a memory at every token of a sequence. [ENG-SCAN-D1]

    torch's `FlopCounterMode` counts it as the products of its recurrence, whatever runs it. [ENG-FLOP-D1]

    Shapes: q, k `[B, T, H, D]`, v `[B, T, H, V]`; result y `[B, T, H, V]` in v's dtype and the state after the last
    token, in `config.state_dtype` or better. Scanning a sequence in pieces, each from the state of the last, gives the
    same result as scanning it whole.

    Args:
        gates: lr, retain, momentum and, for rules that erase and write apart, what `Gates` says; None takes the rule's
            defaults.
        phi_params: parameters from `config.feature_map.init(D, heads=H)`; may be left out without any.
        state: the state to go on from; None starts at `initial`.
        initial: weights `[H, ...]` or `[B, H, ...]` by name, where a memory starts and restarts, and what it forgets
            towards under a retention `towards` the start, to be given with a state, too; None takes the structure's own
            (zero for a matrix). The retention has the last word on where that is: `Retention.start`.
        write_mask: `[B, T]` bool; at False the token is read but leaves the memory exactly as it was, whatever it
            carries.
        reset_mask: `[B, T]` bool; at True the memory restarts from `initial` before that token.
        cu_seqlens: `[documents + 1]` int, borders of documents packed into one row (B = 1); resets at each.
        engine: `"auto"` picks the fastest exact one; results agree within rounding.
        autodiff: `"tape"` recomputes (memory of order sqrt(T)), phi(k) and phi(q) too: .4 to 2 % of a step of an MLP
            memory, 3 to 11 % of the delta rule's; `"torch"` lets autograd record; `"auto"` takes autograd for linear
            memories beyond the token loop, else the tape.
        tape: record the call on this tape instead of autograd; `tape.backward` then takes the cotangent of y to q, k,
            v, tensor gates and phi parameters.
        name: what errors call this memory.

    Raises:
        ConfigError: an engine or gate that the config cannot honour, a gate out of its range, parameters that are not
            those of phi.
        ShapeError: tensors that do not fit together, or what is no tensor.
        NonFiniteError: under `on_nonfinite="raise"`, with batch row, head and token; on a CPU also in the backward
            pass, for a gradient that reaches the memory; on a device by a later call, or by `state.check()`, lest this
            one wait. It cannot be raised while compiling or inside `torch.func` transforms, which forbid looking at
            values.

    Warns (`LayoutWarning`) where q looks like `[B, H, T, D]` and nothing tells: see `hecate.checks.warn_if_turned`.
    """
    given: dict[str, Any] = {
        "phi_params": phi_params, "state": state, "initial": initial, "write_mask": write_mask,
        "reset_mask": reset_mask, "cu_seqlens": cu_seqlens, "engine": engine, "autodiff": autodiff, "tape": tape,
        "name": name,
    }  # fmt: skip
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return exported_scan(config, q, k, v, gates, **given)
    plain = write_mask is reset_mask is cu_seqlens is None and tape is None
    plain = plain and engine == "auto" and autodiff in _AUTODIFFS
    single = plain and isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] == 1
    if single and (answer := short_way(config, q, k, v, gates, state, phi_params, initial, name)) is not None:
        return answer
    if plain and state is not None and not single:
        options: dict[str, Any] = {"phi_params": phi_params, "initial": initial, "name": name}
        if (few := one_by_one(memory_scan, config, q, k, v, gates, state, **options)) is not None:
            return few
    alone = plain and name == "memory" and state is None and initial is None and phi_params is None
    if alone and not torch.compiler.is_compiling() and isinstance(q, Tensor) and q.dim() == 4:  # a layer has a name
        warn_if_turned(q, gates)
    y, new = whole_scan(config, q, k, v, gates, **given)
    if single:
        keep_program(config, q, k, v, gates, new, phi_params, initial)
    return y, new


def whole_scan(config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, **kwargs: Any) -> Any:
    """`memory_scan` without short cuts for single tokens: every check, then an engine; counts FLOPs if torch asks."""
    watched = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    counting = counters() if watched and kwargs.get("tape") is None else []
    if not counting or not all(isinstance(x, Tensor) and x.dim() > 3 for x in (q, k, v)):
        return _scan(config, q, k, v, gates, **kwargs)
    with hidden(counting):
        flops = scan_flops(_scan, config, q, k, v, gates, kwargs.get("phi_params"))
    return counted(_scan, counting, flops, config, q, k, v, gates, **kwargs)


def _scan(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *, engine: EngineName = "auto",
    autodiff: Autodiff = "auto", tape: Tape | None = None, name: str = "memory", **options: Any,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """A whole scan in order: reduce it to a plain one, plan the call, choose an engine, run it, check the numbers, and
    give the state its names."""
    how: dict[str, Any] = {"engine": engine, "autodiff": autodiff, "tape": tape, "name": name}
    record = execute if tape is None else tape
    if getattr(config, "writes", 1) > 1:
        single, (q, k, v, gates), options = one_write_each(check_config(config), q, k, v, gates, run=record, **options)
        y, state = _scan(single, q, k, v, gates, **options, **how)
        return read_once(config, y, run=record), state
    if not getattr(getattr(config, "readout", None), "plain", True):
        return read_through(_scan, check_config(config), q, k, v, gates, run=record, how=how, **options)
    call = Call.of(config, q, k, v, gates, **options)
    chosen = choose(call, engine)
    if not torch.compiler.is_compiling() and _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("memory %r, %d tokens: engine %s (%s)", name, call.length, *explain(call, engine))
    if v.numel() == 0 or (v.is_meta and engine == "auto" and tape is None):
        return _shapes_alone(call)
    policy = call.config.on_nonfinite
    if policy == "skip":
        call = nonfinite.skip(call)
    if autodiff == "auto":
        autodiff = chosen.autodiff(call.config)
    if tape is not None:
        outputs = chosen.outputs(call, tape)
    elif compiled_alone() and chosen.steps(call) > UNROLLED and untold(call.config) is None:
        from hecate.engine.operator import scanned  # torch takes its time to register operators

        outputs = tuple(scanned(chosen.name, call))
    elif autodiff == "torch":  # autograd records it
        with without_autocast(call.plan.device):
            outputs = chosen.outputs(call, execute)
    else:
        # By the plan, not the call: a graph should keep no tensors but those that it saves.
        outputs = differentiate(partial(chosen.program, call.plan), call.flat, autodiff)
    y, *states = several(outputs)
    if y.shape != v.shape:
        named = call.config.structure.named
        raise ShapeError(f"{named} answers {list(y.shape)} where v is {list(v.shape)}; its predict must give [..., V]")
    if tape is None and _may_read_early(call):
        y = joined(y, *call.flat)
    if policy == "raise":
        nonfinite.check(call, name, (y, *states))
    y, state = call.result((y, *states))
    if policy == "raise" and y.requires_grad:
        nonfinite.watch_cotangents(name, y, state, call.traced)
    return y, state


def _may_read_early(call: Call) -> bool:
    """True if perhaps no answer depends on any write of this call."""
    short = call.plan.length <= call.config.chunk
    if short or call.config.commit == "token":
        return short
    return call.plan.masks != ()


def _shapes_alone(call: Call) -> tuple[Tensor, MemoryState]:
    """Outputs for no tokens, or for tokens on meta: zeros, the state unchanged, and gradients 0 for every input."""
    v = call.inputs.v
    y = joined(torch.zeros_like(v), *call.flat)
    _, state = call.result((y, *(item.clone() for _, carry in call.memories for item in carry.flat)))
    return y, state if state.seen is None else state._replace(seen=state.seen.clone())


def memory_features(
    inner: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *, residual: bool = True,
    write_mask: Tensor | None = None, name: str = "feature memory",
    scan: Callable[..., tuple[Tensor, MemoryState]] = memory_scan, **options: Any,
) -> tuple[Tensor, Tensor, MemoryState]:  # fmt: skip
    """phi_t(x) = x + M_t(x) at x = q_t and x = k_t: the features, and M's state at the end; with `residual=False`
    M_t(x) itself.

    M is a memory of its own, written with (k_t, v_t) at every token, and both features of a token read it in one state
    (`inner.read` says whether before or after that token's write), so nothing sees a later token. An empty M leaves q
    and k as they are. Pass the features as q and k to `memory_scan`: any rule follows on any rule. v = k makes M
    self-supervised: it learns which directions keys take, and the features stretch those. Without the residual they are
    as wide as v, and 0 while M is empty. [ENG-FEAT-D1]

    Shapes: q, k `[B, T, H, D]`, v and features `[B, T, H, V]`, V = D with the residual. The other arguments are those
    of `scan`, by default `memory_scan`, which runs twice, once for each read.
    """
    check_tokens(q, k, v)
    check_mask("write_mask", write_mask, k)
    if residual and v.shape != k.shape:
        raise ShapeError(
            f"v must be as wide as k, {list(k.shape)}, for phi(x) = x + M(x) to have a sum, got {list(v.shape)}; or "
            "take phi(x) = M(x), residual=False"
        )
    if write_mask is not None:
        # The k of a masked token may hold garbage, and it is read at as well.
        k = torch.where(write_mask[..., None, None], k, 0.0)

    def answer(x: Tensor) -> tuple[Tensor, MemoryState]:
        y, after = scan(inner, x, k, v, gates, write_mask=write_mask, name=name, **options)
        return (x + y if residual else y), after

    (phi_q, _), (phi_k, state) = answer(q), answer(k)
    return phi_q, phi_k, state


# One token at a time.


@named(*MemoryConfig.model_fields)
def memory_step(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *,
    state: MemoryState | None = None, phi_params: Params | None = None, initial: dict[str, Tensor] | None = None,
    name: str = "memory",
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """One token: q, k `[B, H, D]`, v `[B, H, V]`, gates `[B, H]` -> y `[B, H, V]` and the new state.

    A loop of it equals `memory_scan`. Checks are made once for all tokens that look the same (shapes, dtypes, devices);
    after that a call is arithmetic only, unless autograd records it or torch has to see every operation.
    [ENG-STEP-D1, ENG-STEP-I2]
    """
    if (answer := short_way(config, q, k, v, gates, state, phi_params, initial, name)) is not None:
        return answer
    expect(q, "B H width", name="q")
    for of, tensor in (("k", k), ("v", v)):
        expect(tensor, "B n H width" if getattr(config, "writes", 1) > 1 else "B H width", name=of)
    timed = gates
    if isinstance(gates, Gates):
        timed = Gates(*(gate.unsqueeze(1) if isinstance(gate, Tensor) else gate for gate in gates))  # type: ignore[arg-type]
    token = (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), timed)
    y, new = whole_scan(config, *token, state=state, phi_params=phi_params, initial=initial, name=name)
    keep_program(config, q, k, v, gates, new, phi_params, initial)
    return y.squeeze(1), new


class Stepper:
    """A memory that keeps its state between tokens: `stepper(q, k, v, gates) -> y` for one token. [ENG-STEP-D2]

        stepper = hecate.stepper(MemoryConfig(retention="decay"))
        y = stepper(q, k, v, Gates(lr=0.1, retain=0.9))  # q, k [B, H, D], v and y [B, H, V]

    Every call is `memory_step` from `stepper.state`, to the bit, and leaves the new state there; a call that raises
    leaves the old one. States are never changed in place: one that was read stays as it is, and another may be put in
    its place.

    Args:
        state: what to go on from; None starts at `initial`, or else at the structure's own start.
        phi_params: parameters of the feature map, as for `memory_scan`.
        heads, d_key, d_value: sizes that every token must have; None takes them as they come.
        initial: weights `[H, ...]` or `[B, H, ...]` by name, where the memory starts.
        name: what errors call this memory.
        in_place: overwrite the state, and y, at every call, in one kernel of engine "triton" that a CUDA graph can
            hold: equal to `memory_step` within rounding. `stepper.state` and y are then buffers of the stepper: copy
            what is to outlive the next call. A state that is given or put in its place is copied. Needs
            on_nonfinite="propagate". [ENG-TRITON-D6]

    Raises:
        ConfigError: `in_place` with a config or tokens that no kernel takes, or under autograd.
        ShapeError: a token of other sizes; everything else that `memory_step` raises.
    """

    def __init__(
        self,
        config: MemoryConfig,
        state: MemoryState | None = None,
        *,
        phi_params: Params | None = None,
        heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        initial: dict[str, Tensor] | None = None,
        name: str = "memory",
        in_place: bool = False,
    ) -> None:
        self.buffers = InPlace(config, phi_params) if in_place else None
        self.config, self.state, self.phi_params, self.initial, self.name = config, state, phi_params, initial, name
        sizes = {"q": (heads, d_key), "k": (heads, d_key), "v": (heads, d_value)}
        self.sizes = {name: pair for name, pair in sizes.items() if pair != (None, None)}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None) -> Tensor:
        """y `[B, H, V]` of one token."""
        if self.sizes:
            self._check_sizes({"q": q, "k": k, "v": v})
        if self.buffers is not None:
            return self._in_place(self.buffers, q, k, v, gates)
        config, state, params, name = self.config, self.state, self.phi_params, self.name
        initial = self.initial if state is None or config.retention.anchored else None
        answer = short_way(config, q, k, v, gates, state, params, initial, name)
        if answer is None:
            answer = memory_step(config, q, k, v, gates, state=state, phi_params=params, initial=initial, name=name)
        y, self.state = answer
        return y

    def _in_place(self, buffers: InPlace, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None) -> Tensor:
        if self.state is None:
            check_tokens(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
            options = {"initial": self.initial, "phi_params": self.phi_params, "name": self.name}
            q0, k0, v0 = (item.unsqueeze(1)[:, :0] for item in (q, k, v))
            with torch.no_grad():
                _, self.state = memory_scan(self.config, q0, k0, v0, **options)  # type: ignore[arg-type]
        if self.state is not buffers.state:
            self.state = buffers.adopt(self.state)
        return buffers(q, k, v, gates)

    def _check_sizes(self, token: dict[str, Tensor]) -> None:
        for name, wanted in self.sizes.items():
            tensor = token[name]
            expect(tensor, "B H width", name=name)
            if any(size not in (None, actual) for size, actual in zip(wanted, tensor.shape[1:], strict=True)):
                sizes = ", ".join("any" if size is None else str(size) for size in wanted)
                raise ShapeError(f"{name} must be [B, {sizes}] for this stepper, got {list(tensor.shape)}")


stepper = Stepper  # reads like a function: `hecate.stepper(config)` makes one


# Under torch.export, which traces a program once and keeps it for every size, a scan is one operator, whose engine is
# chosen where the program runs; other runtimes get `as_loop` in its place.


def exported_scan(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, *, tape: Any = None,
    cu_seqlens: Tensor | None = None, reset_mask: Tensor | None = None, engine: str, autodiff: str, name: str,
    **options: Any,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """`memory_scan` as a call of the operator. [ENG-EXPORT-D1]"""
    if tape is not None:
        raise ConfigError("a tape records calls, and torch.export makes none; leave tape out")
    if check_config(config).writes == 1:  # several writes are checked where they are split up, in `_first`
        check_tokens(q, k, v)
    if cu_seqlens is not None:
        reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=options["state"] is not None)
    tree = {"q": q, "k": k, "v": v, "gates": gates, "reset_mask": reset_mask, **options}
    leaves, spec = pytree.tree_flatten(tree)
    fields = {
        "config": config.model_dump_json(include=set(MemoryConfig.model_fields)),
        "how": {"engine": engine, "autodiff": autodiff, "name": name},
        "tree": pytree.treespec_dumps(spec),
        "numbers": [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves],
    }
    call, read = json.dumps(fields), config_of(str(fields["config"]))
    lost = [field for field in MemoryConfig.model_fields if getattr(read, field) != getattr(config, field)]
    if lost:
        raise ConfigError(f"a program keeps the rule as text, which reads as another one: {', '.join(lost)}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    answers = with_tensors(*pytree.tree_flatten(_first(call, tensors)), memory_scan_operator(call, tensors))
    return cast(tuple[Tensor, MemoryState], answers)


def scan_arguments(call: str, tensors: Sequence[Tensor]) -> tuple[MemoryConfig, dict[str, Any], dict[str, Any]]:
    """The config, the arguments by name, and engine, autodiff and name of a call of the operator."""
    fields, rest = json.loads(call), iter(tensors)
    leaves = [next(rest) if number is None else number[0] for number in fields["numbers"]]
    tree = pytree.tree_unflatten(leaves, pytree.treespec_loads(fields["tree"]))
    return config_of(fields["config"]), tree, fields["how"]


def scan_answers(y: Tensor, state: MemoryState) -> list[Tensor]:
    """Outputs of the operator: y and the state's tensors, in order."""
    return [leaf for leaf in pytree.tree_leaves((y, state)) if isinstance(leaf, Tensor)]


def _first(call: str, tensors: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
    """y and the state after one token of one sequence, laid out as in every call; run in a thread of its own, where no
    tracing is active."""
    config, tree, _ = scan_arguments(call, tensors)
    weights = config.structure.shapes(config.feature_map.output_dim(tree["k"].shape[-1]), tree["v"].shape[-1])

    def few(path: Any, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        name, *rest = (getattr(key, "key", None) for key in path)
        lead = {"phi_params": (), "initial": (), "state": (1,)}.get(str(name), (1, 1))
        shape = x.shape[x.dim() - 1 - len(weights[str(rest[0])]) :] if name == "initial" else x.shape[len(lead) :]
        return torch.zeros(*lead, *shape, dtype=x.dtype, device=x.device)

    def answers() -> tuple[Tensor, MemoryState]:
        arguments = pytree.tree_map_with_path(few, tree)
        return whole_scan(config.model_copy(update={"on_nonfinite": "propagate"}), **arguments, engine="sequential")

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(answers).result()


@torch.library.custom_op("hecate::memory_scan", mutates_args=())
def memory_scan_operator(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """y and the tensors of the state."""
    config, tree, how = scan_arguments(call, tensors)
    return unshared(scan_answers(*whole_scan(config, **tree, **how)), tensors)


@memory_scan_operator.register_fake
def _(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    q = scan_arguments(call, tensors)[1]["q"]
    y, *state = scan_answers(*_first(call, tensors))
    shapes = [(y, (*q.shape[:2], *y.shape[2:])), *((x, (*q.shape[:1], *x.shape[1:])) for x in state)]
    return [q.new_empty(shape, dtype=like.dtype) for like, shape in shapes]


@torch.library.custom_op("hecate::memory_scan_backward", mutates_args=())
def _backward_operator(call: str, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """Cotangents of the tensors, of size zero for integers and booleans; the forward pass is run again."""
    with recorded(), torch.enable_grad():
        leaves = [item.detach().requires_grad_(item.is_floating_point()) for item in tensors]
        config, tree, how = scan_arguments(call, leaves)
        answers = scan_answers(*whole_scan(config, **tree, **how))
        pairs = [(y, g) for y, g in zip(answers, cotangents, strict=True) if g is not None and y.requires_grad]
        moving = [item for item in leaves if item.requires_grad]
        ys, gs = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(ys, moving, gs, allow_unused=True, materialize_grads=True))
    return [next(grads).clone() if item.requires_grad else item.new_empty(0) for item in leaves]


@_backward_operator.register_fake
def _(call: str, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    return [item.new_empty(item.shape if item.is_floating_point() else (0,)) for item in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.call, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    tensors = ctx.saved_tensors
    grads = _backward_operator(ctx.call, list(tensors), list(cotangents))
    return None, [g if item.is_floating_point() else None for item, g in zip(tensors, grads, strict=True)]


memory_scan_operator.register_autograd(_backward, setup_context=_setup)


def as_loop(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The operator as `torch.ops.higher_order.scan` of the program of one token, for runtimes without it.
    [ENG-EXPORT-D2]"""
    config, tree, _ = scan_arguments(call, tensors)
    way: dict[str, Any] = {"engine": "sequential", "autodiff": "torch"}
    if tree["state"] is None:  # that after an unwritten token: a program needs a state from its first token on
        tree["state"] = _state_ahead(config, tree)
    if type(length := tree["q"].shape[1]) is int and length == 1:  # no loop
        return [item.clone() for item in scan_answers(*whole_scan(config, **tree, **way))]
    timed = {name: tree.pop(name) for name in ("q", "k", "v", *_TIMED)}
    state = tree.pop("state")
    each, each_spec = pytree.tree_flatten(timed)
    rows = [item.transpose(0, 1).contiguous() for item in each if isinstance(item, Tensor)]
    fixed, fixed_spec = pytree.tree_flatten(tree)
    further = [item for item in fixed if isinstance(item, Tensor)]

    state_leaves, state_spec = pytree.tree_flatten(state)
    start = [item for item in state_leaves if isinstance(item, Tensor)]

    def step(*inputs: Tensor) -> list[Tensor]:
        before, rest = inputs[: len(start)], inputs[len(start) :]
        token = with_tensors(each, each_spec, [item.unsqueeze(1) for item in rest[: len(rows)]])
        token |= with_tensors(fixed, fixed_spec, rest[len(rows) :])
        y, after = whole_scan(config, **token, state=with_tensors(state_leaves, state_spec, before), **way)
        return [*(item.clone() for item in scan_answers(y, after)[1:]), y.squeeze(1)]

    outputs = torch.ops.higher_order.scan(step, start, rows, tuple(further))
    return [outputs[-1].transpose(0, 1), *outputs[:-1]]


def _state_ahead(config: MemoryConfig, tree: dict[str, Any]) -> MemoryState:
    """The state before the first token, made by a scan of one token that is not written."""
    q = tree["q"]
    token = {n: pytree.tree_map_only(Tensor, lambda x: x[:, :1], tree[n]) for n in ("q", "k", "v", *_TIMED)}
    token |= {"write_mask": torch.zeros_like(q[:, :1, 0, 0], dtype=torch.bool), "reset_mask": None}
    rest = {name: tree[name] for name in ("phi_params", "initial")}
    return whole_scan(config, **token, **rest, engine="sequential", autodiff="torch")[1]

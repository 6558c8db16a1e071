"""A memory over a sequence, as phi, and one token at a time: `memory_scan`, `memory_features`, `memory_step` and
`Stepper`, which holds the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from hecate.checks import expect, named, warn_if_turned
from hecate.engine.arguments import check_mask, check_tokens
from hecate.engine.engine import EngineName
from hecate.engine.exported import exported_scan, exporting
from hecate.engine.one_token import keep_program, one_by_one, short_way
from hecate.engine.triton.decode import InPlace
from hecate.engine.whole import whole_scan
from hecate.errors import ShapeError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff, Tape

_AUTODIFFS = get_args(Autodiff)


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
    if exporting(q):
        return exported_scan(
            config, q, k, v, gates, phi_params=phi_params, state=state, initial=initial, write_mask=write_mask,
            reset_mask=reset_mask, cu_seqlens=cu_seqlens, engine=engine, autodiff=autodiff, tape=tape, name=name,
        )  # fmt: skip
    plain = write_mask is reset_mask is cu_seqlens is None and tape is None
    plain = plain and engine == "auto" and autodiff in _AUTODIFFS
    single = plain and isinstance(q, Tensor) and q.dim() == 4 and q.shape[1] == 1
    if single and (found := short_way(config, q, k, v, gates, state, phi_params, initial, name)) is not None:
        return found
    if plain and state is not None and not single:
        own: dict[str, Any] = {"phi_params": phi_params, "initial": initial, "name": name}
        if (few := one_by_one(memory_scan, config, q, k, v, gates, state, **own)) is not None:
            return few
    alone = plain and name == "memory" and state is None and initial is None and phi_params is None
    if alone and not torch.compiler.is_compiling() and isinstance(q, Tensor) and q.dim() == 4:  # a layer gives its name
        warn_if_turned(q, gates)
    y, new = whole_scan(
        config, q, k, v, gates, phi_params=phi_params, state=state, initial=initial, write_mask=write_mask,
        reset_mask=reset_mask, cu_seqlens=cu_seqlens, engine=engine, autodiff=autodiff, tape=tape, name=name,
    )  # fmt: skip
    if single:
        keep_program(config, q, k, v, gates, new, phi_params, initial)
    return y, new


def memory_features(
    inner: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, *, residual: bool = True,
    write_mask: Tensor | None = None, name: str = "feature memory",
    scan: Callable[..., tuple[Tensor, MemoryState]] = memory_scan, **given: Any,
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
        y, after = scan(inner, x, k, v, gates, write_mask=write_mask, name=name, **given)
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

    A loop of it equals `memory_scan`. Checks are made once for all tokens that look the same (shapes, dtypes, devices):
    what follows is the arithmetic alone, unless autograd records it or torch has to see every operation.
    [ENG-STEP-D1, ENG-STEP-I2]
    """
    if (found := short_way(config, q, k, v, gates, state, phi_params, initial, name)) is not None:
        return found
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
    """A memory that holds its state: `stepper(q, k, v, gates) -> y` for one token. [ENG-STEP-D2]

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
        found = short_way(config, q, k, v, gates, state, params, initial, name)
        if found is None:
            found = memory_step(config, q, k, v, gates, state=state, phi_params=params, initial=initial, name=name)
        y, self.state = found
        return y

    def _in_place(self, buffers: InPlace, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None) -> Tensor:
        if self.state is None:
            check_tokens(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))
            given = {"initial": self.initial, "phi_params": self.phi_params, "name": self.name}
            q0, k0, v0 = (item.unsqueeze(1)[:, :0] for item in (q, k, v))
            with torch.no_grad():
                _, self.state = memory_scan(self.config, q0, k0, v0, **given)  # type: ignore[arg-type]
        if self.state is not buffers.state:
            self.state = buffers.adopt(self.state)
        return buffers(q, k, v, gates)

    def _check_sizes(self, token: dict[str, Tensor]) -> None:
        for name, wanted in self.sizes.items():
            given = token[name]
            expect(given, "B H width", name=name)
            if any(size not in (None, own) for size, own in zip(wanted, given.shape[1:], strict=True)):
                sizes = ", ".join("any" if size is None else str(size) for size in wanted)
                raise ShapeError(f"{name} must be [B, {sizes}] for this stepper, got {list(given.shape)}")


stepper = Stepper  # as a verb reads: `hecate.stepper(config)` makes one

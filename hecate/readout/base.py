"""Readout: what a query is turned into before it reads, by what the memory has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from hecate.tape import Run
from hecate.variant import Variant

Held = dict[str, Tensor]


class Asked(NamedTuple):
    """A sequence as a readout sees it: features q and k `[B, T, H, P]`, the gates lr `[B, T, H]` and retain (also per
    phi channel), those of its own `[B, T, H, *]` in the order of `Readout.gates`, None where not given; masks `[B, T]`
    or None."""

    q: Tensor
    k: Tensor
    lr: Tensor
    retain: Tensor
    gates: tuple[Tensor | None, ...]
    write: Tensor | None
    reset: Tensor | None


class Means(NamedTuple):
    """Means by which a readout walks over tokens.

    Fields:
        run: executes blocks.
        spans: `(block, inputs, held) -> (outputs, held)` cuts inputs `[B, T, ...]` or None into spans and runs the
            block (*inputs, held) -> (output, held) on one after the other; only what is held in between is kept.
        recall: `(q, k, codes, lr, retain, held) -> (answers, held)` of a memory K that learns codes by heart,
            K' = diag(retain) K + lr code k^T with retain per code, `[B, H, P, codes]` as it is held.
        late: whether a token is read after it is written.
    """

    run: Run
    spans: Callable[..., tuple[Tensor, Tensor]]
    recall: Callable[..., tuple[Tensor, Tensor]]
    late: bool


class Turned(NamedTuple):
    """The query and the key that the memory itself gets, its retain, and what the readout holds after the last
    token."""

    q: Tensor
    k: Tensor
    retain: Tensor
    held: Held


class Readout(Variant, family="readout"):
    """A map of every query to another, which the memory answers, through a second state: one that the keys alone have
    made, under the memory's own gates.

    That state starts and restarts at zero, and a token that is not written leaves it. The memory stays linear in what
    is written, so every engine that runs it runs it here. A variant gives `turned` and the shapes of its state.

    Shapes: q and k `[B, T, H, P]`; state `[B, H, ...]` by name.
    """

    plain: ClassVar[bool] = False  # whether queries stay as they are
    gates: ClassVar[tuple[str, ...]] = ()  # of `hecate.rule.Gates`, which it takes beside lr and retain
    channels: ClassVar[bool] = False  # whether retain may differ between phi channels
    _formulas = ("turned", "state_shapes")

    def state_shapes(self, d_phi: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its state for one memory, by name."""
        return {}

    def refusals(self, config: Any) -> Iterator[str]:
        """Why a `MemoryConfig` cannot be read this way."""
        if self.plain:
            return
        if not config.forms.target:
            yield f"bias {config.bias.kind!r} corrects what is stored, which this read-out does itself; use bias 'dot'"
        if not config.structure.linear or config.structure.diagonal:
            yield f"{config.structure.named} is no linear map of phi(k); use structure 'matrix'"
        if config.retention.gate_form.channels and not self.channels:
            yield "retention.channels decays keys unevenly, and what is held of them would not stay symmetric"
        if not config.retention.linear:
            yield f"retention {config.retention.kind!r} is not linear; use retention 'none' or 'decay'"
        if config.algorithm.kernel_form() is None or config.algorithm.slots:
            yield f"algorithm {config.algorithm.kind!r} is no plain sum of writes; use algorithm 'gd'"
        for name, plain in (("writes", 1), ("chunk", 1), ("commit", "token"), ("normalizer", "none"), ("step", "raw")):
            if (given := getattr(config, name)) != plain:
                yield f"it knows no {name}={given!r}; use {plain!r}"
        if config.feature_map.needs_position:
            yield f"feature_map {config.feature_map.kind!r} counts tokens; use another"
        if config.on_nonfinite == "skip":
            yield "on_nonfinite='skip' may leave out tokens, whose keys it would hold; use 'raise'"

    def turned(self, asked: Asked, held: Held, means: Means) -> Turned:
        """Tensors that the memory is queried and written with."""
        raise NotImplementedError(f"{type(self).__name__} defines no turned")


class Direct(Readout):
    r"""direct: y = M phi(q).

    Formula: $y_t = f(M_t, \phi(q_t))$
    Shapes: no state.
    Origin: what a memory is. [ENG-READ-D1]
    """

    kind: Literal["direct"] = "direct"
    plain: ClassVar[bool] = True

    def turned(self, asked: Asked, held: Held, means: Means) -> Turned:
        return Turned(asked.q, asked.k, asked.retain, held)


ReadoutKind = Readout

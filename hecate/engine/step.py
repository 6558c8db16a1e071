"""Memories one token at a time: `memory_step`, and `Stepper`, which holds the state."""

from __future__ import annotations

from torch import Tensor

from hecate.checks import expect
from hecate.engine.arguments import check_tokens
from hecate.engine.one_token import one_token
from hecate.engine.scan import whole_scan
from hecate.errors import ShapeError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState


def memory_step(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    state: MemoryState | None = None,
    phi_params: Params | None = None,
    initial: dict[str, Tensor] | None = None,
    name: str = "memory",
) -> tuple[Tensor, MemoryState]:
    """One token: q, k `[B, H, D]`, v `[B, H, V]`, gates `[B, H]` -> y `[B, H, V]` and the new state.

    A loop of it equals `memory_scan`. Checks are made once for all tokens that look the same (shapes, dtypes, devices):
    what follows is the arithmetic alone, unless autograd records it or torch has to see every operation.
    [ENG-STEP-D1, ENG-STEP-I2]
    """

    def whole() -> tuple[Tensor, MemoryState]:
        if not all(isinstance(item, Tensor) and item.dim() == 3 for item in (q, k, v)):
            check_tokens(q, k, v, "B H width")
        timed = gates
        if isinstance(gates, Gates):
            timed = Gates(*(gate.unsqueeze(1) if isinstance(gate, Tensor) else gate for gate in gates))
        token = (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), timed)
        y, new = whole_scan(config, *token, state=state, phi_params=phi_params, initial=initial, name=name)
        return y.squeeze(1), new

    return one_token(whole, config, q, k, v, gates, state, phi_params, initial, name)


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

    Raises:
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
    ) -> None:
        self.config, self.state, self.phi_params, self.initial, self.name = config, state, phi_params, initial, name
        sizes = {"q": (heads, d_key), "k": (heads, d_key), "v": (heads, d_value)}
        self.sizes = {name: pair for name, pair in sizes.items() if pair != (None, None)}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None) -> Tensor:
        """y `[B, H, V]` of one token."""
        if self.sizes:
            self._check_sizes({"q": q, "k": k, "v": v})
        y, self.state = memory_step(
            self.config,
            q,
            k,
            v,
            gates,
            state=self.state,
            phi_params=self.phi_params,
            initial=self.initial if self.state is None else None,
            name=self.name,
        )
        return y

    def _check_sizes(self, token: dict[str, Tensor]) -> None:
        for name, wanted in self.sizes.items():
            given = token[name]
            expect(given, "B H width", name=name)
            if any(size not in (None, own) for size, own in zip(wanted, given.shape[1:], strict=True)):
                sizes = ", ".join("any" if size is None else str(size) for size in wanted)
                raise ShapeError(f"{name} must be [B, {sizes}] for this stepper, got {list(given.shape)}")


stepper = Stepper  # as a verb reads: `hecate.stepper(config)` makes one

"""What a layer asks of its memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hecate.engine import memory_scan
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState


class Asked(NamedTuple):
    """The arguments of one `memory_scan` that change its numbers: what a layer makes of x."""

    config: MemoryConfig
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    phi_params: Params | None = None
    initial: dict[str, Tensor] | None = None
    state: MemoryState | None = None
    write_mask: Tensor | None = None
    reset_mask: Tensor | None = None

    def scan(self, **how: Any) -> tuple[Tensor, MemoryState]:
        """`memory_scan` of it; `how` are engine, autodiff and name."""
        given: Any = dict(zip(self._fields[5:], self[5:], strict=True))
        return memory_scan(self.config, self.q, self.k, self.v, self.gates, **given, **how)

    def between(self, at: int, end: int, state: MemoryState | None) -> Asked:
        """Tokens at <= t < end, from another state."""
        names = ("q", "k", "v", "write_mask", "reset_mask")
        given = {name: getattr(self, name) for name in names}
        cut: dict[str, Any] = {name: None if item is None else item[:, at:end] for name, item in given.items()}
        gates = (gate[:, at:end] if isinstance(gate, Tensor) else gate for gate in self.gates)
        return self._replace(**cut, gates=Gates(*gates), state=state)

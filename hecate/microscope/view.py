"""What the microscope shows of a model, memory by memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hecate.errors import ConfigError, did_you_mean
from hecate.microscope.attention import Attention, implicit_attention, nonlinearity
from hecate.microscope.recall import Recall, Recaller
from hecate.microscope.states import gates_of, moments, norms_of, ranks_of
from hecate.nn.asked import Asked
from hecate.rule import MemoryConfig, memory_weights


class MemoryView:
    """One memory at work on B sequences of T tokens; everything in float64. [SCOPE-VIEW-D1]

    Args:
        name: of the memory in its model.
        scans: what it was asked; more than one where its state was replaced in between.
        points: most moments at which its state is looked at, besides the start.
        unread: why its answers to q are not used; None if they are.
    """

    def __init__(self, name: str, scans: list[Asked], points: int = 64, *, unread: str | None = None) -> None:
        self.name, self.scans, self.points, self.unread = name, scans, points, unread

    @property
    def config(self) -> MemoryConfig:
        """The rule."""
        return self.scans[0].config

    @property
    def length(self) -> int:
        """Tokens seen."""
        return sum(asked.v.shape[1] for asked in self.scans)

    @property
    def heads(self) -> int:
        """Memories side by side."""
        return self.scans[0].v.shape[2]

    @property
    def refusal(self) -> str | None:
        """Why there is no attention map; None if there is one."""
        return self.unread or nonlinearity(self.config)

    @cached_property
    def attention(self) -> Attention:
        """The implicit attention map; where the state was replaced, the past is in `start`.

        Raises:
            ConfigError: a rule that is not linear in its values, with the setting at fault.
        """
        if self.unread is not None:
            raise ConfigError(f"{self.name} has no attention map: {self.unread}")
        with torch.no_grad():
            pieces = [implicit_attention(asked) for asked in self.scans]
        shape = list(pieces[0].map.shape)
        shape[2] = shape[3] = self.length
        whole, at = pieces[0].map.new_zeros(shape), 0
        for piece in pieces:
            end = at + piece.map.shape[2]
            whole[:, :, at:end, at:end] = piece.map
            at = end
        return Attention(whole, torch.cat([piece.start for piece in pieces], 2))

    @cached_property
    def answers(self) -> Tensor:
        """What the memory answered, `[B, T, H, V]`."""
        with torch.no_grad():
            return torch.cat([asked.scan()[0] for asked in self.scans], 1)

    @cached_property
    def gates(self) -> dict[str, Tensor]:
        """lr, retain and momentum as far as the rule has them, `[B, T, H]`; retain per channel
        `[B, T, H, P]`."""
        return gates_of(self.scans)

    @property
    def times(self) -> Tensor:
        """Tokens read at each of the N moments, from 0 to T."""
        return self._over_time[0].times

    @property
    def recall(self) -> Recall:
        """What is recalled against age."""
        return self._over_time[0]

    @property
    def norms(self) -> dict[str, Tensor]:
        """Frobenius norm of each weight at each moment, `[B, H, N]`."""
        return self._over_time[1]

    @property
    def ranks(self) -> dict[str, Tensor]:
        """Effective rank of each weight that is a matrix at each moment, `[B, H, N]`."""
        return self._over_time[2]

    @cached_property
    def _over_time(self) -> tuple[Recall, dict[str, Tensor], dict[str, Tensor]]:
        """One walk over the moments: states are looked at and let go."""
        norms, ranks = [], []
        diagonal = self.config.structure.diagonal
        with torch.no_grad():
            recaller = Recaller(self.scans)
            for moment in moments(self.scans, self.points):
                recaller.ask(moment)
                weights = memory_weights(self.config, moment.state)
                norms.append(norms_of(weights))
                ranks.append(ranks_of(weights, diagonal=diagonal))
            return recaller.result(), _stacked(norms), _stacked(ranks)

    def draw(self, figure: Any = None, *, row: int = 0, heads: int = 4) -> Any:
        """Draws sequence `row` and at most so many heads' maps; returns the matplotlib figure."""
        from hecate.microscope.draw import draw_memory

        return draw_memory(self, figure, row=row, heads=heads)

    def save(self, path: Path | str, *, row: int = 0, heads: int = 4) -> Path:
        """Draws a PNG file, whole or not at all."""
        from hecate.microscope.draw import save_figure

        return save_figure(self.draw(row=row, heads=heads), Path(path))


class View(Mapping[str, MemoryView]):
    """Every memory of a model at work, by name; what single memories show, as mappings."""

    def __init__(self, memories: dict[str, MemoryView]) -> None:
        self._memories = memories

    def __getitem__(self, name: str) -> MemoryView:
        if name not in self._memories:
            raise ConfigError(
                f"no memory is called {name!r}; there are {', '.join(self._memories)}."
                f"{did_you_mean(name, self._memories)}"
            )
        return self._memories[name]

    def __contains__(self, name: object) -> bool:
        return name in self._memories

    def __iter__(self) -> Iterator[str]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    @property
    def attention(self) -> dict[str, Attention]:
        """The attention maps of those memories that have one."""
        return {name: item.attention for name, item in self.items() if item.refusal is None}

    @property
    def refusals(self) -> dict[str, str]:
        """Why the others have none."""
        return {name: item.refusal for name, item in self.items() if item.refusal is not None}

    @property
    def gates(self) -> dict[str, dict[str, Tensor]]:
        """`MemoryView.gates` of each."""
        return {name: item.gates for name, item in self.items()}

    @property
    def norms(self) -> dict[str, dict[str, Tensor]]:
        """`MemoryView.norms` of each."""
        return {name: item.norms for name, item in self.items()}

    @property
    def ranks(self) -> dict[str, dict[str, Tensor]]:
        """`MemoryView.ranks` of each."""
        return {name: item.ranks for name, item in self.items()}

    @property
    def recall(self) -> dict[str, Recall]:
        """`MemoryView.recall` of each."""
        return {name: item.recall for name, item in self.items()}

    def save(self, folder: Path | str, *, row: int = 0, heads: int = 4) -> list[Path]:
        """A PNG file per memory, `microscope-NAME.png`; returns them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = _file_names(list(self))
        return [item.save(folder / names[name], row=row, heads=heads) for name, item in self.items()]


def _file_names(names: list[str]) -> dict[str, str]:
    """Names of files; two memories whose names differ in odd characters only get numbers."""
    found: dict[str, str] = {}
    for name in names:
        stem = file = "microscope-" + re.sub(r"[^A-Za-z0-9._-]+", "_", name)
        number = 2
        while f"{file}.png" in found.values():
            file, number = f"{stem}-{number}", number + 1
        found[name] = f"{file}.png"
    return found


def _stacked(moments: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in moments], 2) for name in moments[0]}

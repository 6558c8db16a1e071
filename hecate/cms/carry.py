"""A memory whose content is kept apart by age: the levels of composition `carry`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from hecate.checks import check_shapes, expect_choice
from hecate.distributed.context import Shares
from hecate.engine import as_plain, log_linear_scan
from hecate.nn import Memory
from hecate.nn.parameters import draw_normal, source_of
from hecate.nn.rule import ScanArguments
from hecate.rule import MemoryState
from hecate.tape.bridge import without_autocast


class CarryMemory(Memory):
    """Log-linear attention: a `Memory` that reads what is of one age with a weight of its own. [CMS-CARRY-D1]

    L levels of periods 1, 2, 4, ... share projections and gates. A token is written to level 0 and lives in exactly
    one; a level that is due carries its content up into the next and restarts at 0, and the last one keeps what it has
    got. All of them decay and unlearn alike. The read is sum_l lambda_l(t) M^(l) q_t with a learned lambda_l(t) =
    softplus(level_l (W x_t)_l) per token, head and level, level starting at 1. With lambda = 1 that is the plain rule.

    A state holds L times the plain rule's weights, `[B, H, L, V, P]`, whatever the length: L = ceil(log2 T) + 1 levels
    tell T tokens apart to the last, and in a longer stream the oldest content is read with one weight, as the plain
    rule reads it. Learned starting weights start in the last level. `engine` is "auto", "sequential" or "parallel".

    References: Log-Linear Attention (Guo et al., 2025, arXiv 2506.04761).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: Any = None,
        *,
        levels: int,
        engine: str = "auto",
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        expect_choice(engine, "engine of composition 'carry'", ("auto", "sequential", "parallel"))
        super().__init__(d_model, heads, config, engine=engine, generator=generator, **options)
        self.bare = False  # a token takes the way of a sequence
        rows, place = heads * levels, {"device": options.get("device"), "dtype": options.get("dtype")}
        check_shapes({"mixture": (rows, d_model)}, "lower carry_levels, heads or d_model")
        self.mixture = nn.Parameter(torch.empty(rows, d_model, **place))
        self.level = nn.Parameter(torch.empty(heads, levels, **place))
        if not self.mixture.is_meta:
            self._draw_levels(generator)

    @property
    def shares(self) -> Shares:
        """Mode of context parallelism: levels of ages are handed on from rank to rank."""
        return "turns"

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        super().reset_parameters(generator)
        self._draw_levels(generator)

    def _draw_levels(self, generator: torch.Generator | None) -> None:
        draw_normal(self.mixture, self.d_model**-0.5, source_of(generator))
        nn.init.ones_(self.level)

    def scale(self, x: Tensor) -> Tensor:
        """lambda `[B, T, H, L]` of x `[B, T, d_model]`, in float32 or better."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            logits = linear(x.to(wide), self.mixture.to(wide)).unflatten(-1, self.level.shape)
            return softplus(self.level.to(wide) * logits)

    def scan(self, asked: ScanArguments, x: Tensor) -> tuple[Tensor, MemoryState]:
        """The weighed read of all levels, and their states."""
        how: dict[str, Any] = {"engine": self.engine, "autodiff": self.autodiff, "name": self.name}
        return log_linear_scan(**asked._asdict(), scale=self.scale(x), **how)

    def seen(self, **given: Any) -> tuple[ScanArguments, str | None]:
        """The plain rule's part: what all levels hold together."""
        asked, _ = super().seen(**given)
        state = None if asked.state is None else as_plain(asked.state, self.level.shape[1])
        return asked._replace(state=state), "a level of each age is read with a weight of its own"

    def extra_repr(self) -> str:
        """The rule, sizes and levels."""
        return f"{super().extra_repr()}, carry_levels={self.level.shape[1]}"

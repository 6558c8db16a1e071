"""One block of a language model: layers that mix tokens, then a gated MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hecate.cms import CMS, CMSState, SelfReferential
from hecate.errors import ConfigError, ShapeError
from hecate.models.config import LanguageModelConfig
from hecate.nn import Composed, Memory
from hecate.nn.parameters import blank, draw_normal, source_of
from hecate.rule import bytes_of, detached


class BlockState(NamedTuple):
    """What a block with levels after its memory carries: a pytree of tensors."""

    memory: Any
    levels: CMSState

    def detach(self) -> BlockState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return bytes_of(self)


class Block(nn.Module):
    """x + memory(norm(x)), then the same with levels where they follow, then x + mlp(x).

    Its state is that of `memory`, or a `BlockState`. What they are is what `LanguageModelConfig` asks for; each is a
    layer `(x, state, masks) -> (y, state)`. [LM-MIXER-D1]
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        name: str,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        norm: dict[str, Any] = {"eps": 1e-6, **place}
        first, second = _mixers(config, name, generator=generator, **place)
        self.memory_norm = nn.RMSNorm(config.d_model, **norm)
        self.memory = first
        self.levels_norm = None if second is None else nn.RMSNorm(config.d_model, **norm)
        self.levels = second
        hidden = int(config.mlp_ratio * config.d_model)
        self.mlp = GatedMLP(config.d_model, hidden, **place) if hidden else None
        if self.mlp is not None and self.mlp.down.weight.device.type != "meta":
            self.mlp.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        for layer in (self.memory, self.levels, self.mlp):
            if layer is not None:
                layer.reset_parameters(generator)  # type: ignore[operator]
        for norm in (self.memory_norm, self.levels_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)

    def forward(
        self, x: Tensor, state: Any, *, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The block's output and its state after the last token."""
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        if self.levels is None or self.levels_norm is None:
            y, after = self.memory(self.memory_norm(x), state, **masks)
            x = x + y
        else:
            if state is not None and not isinstance(state, BlockState):
                raise ShapeError(
                    "state of a block with levels after its memory must be a BlockState, got "
                    f"{type(state).__name__}; was it made by another model?"
                )
            first, second = (None, None) if state is None else state
            y, first = self.memory(self.memory_norm(x), first, **masks)
            x = x + y
            y, second = self.levels(self.levels_norm(x), second, **masks)
            x, after = x + y, BlockState(first, second)
        return (x if self.mlp is None else x + self.mlp(x)), after


def _mixers(config: LanguageModelConfig, name: str, **how: Any) -> tuple[nn.Module, nn.Module | None]:
    """A block's memory, and the levels that follow it."""
    sizes, cms = (config.d_model, config.heads), config.cms
    own = _own_memory(config, name, **how)
    alone = config.attention is not None and config.attention.kind == "attention"
    levels = None
    if cms is not None and own is None and not alone:
        own = CMS(*sizes, cms, name=f"{name} levels", **how)
        cms = None
    if config.attention is not None:
        try:
            own = Composed(*sizes, config.attention, own, name=name, **how)
        except ConfigError as error:
            raise error.under("attention") from None
    if own is None:
        raise ConfigError("a block needs a memory, levels or attention")
    # Drawn in the order in which `reset_parameters` draws anew.
    if cms is not None:
        levels = CMS(*sizes, cms, name=f"{name} levels", **how)
    return own, levels


def _own_memory(config: LanguageModelConfig, name: str, **how: Any) -> nn.Module | None:
    """The block's memory: self-referential or plain; None where something takes its place."""
    shared = {
        "conv_kernel": config.conv_kernel,
        "output_gate": config.output_gate,
        "feature_memory": config.feature_memory,
        "name": name,
        **how,
    }
    if config.self_reference is not None:
        return SelfReferential(config.d_model, config.heads, config.self_reference, **shared)
    if not config.plain:
        return None
    return Memory(
        config.d_model,
        config.heads,
        config.memory,
        d_key=config.d_key,
        d_value=config.d_value,
        qk_norm=config.qk_norm,
        learned_initial=config.learned_initial,
        **shared,
    )


class GatedMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    def __init__(
        self, width: int, hidden: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.norm = nn.RMSNorm(width, eps=1e-6, device=device, dtype=dtype)
        self.up = blank(nn.Linear, width, 2 * hidden, **place)
        self.down = blank(nn.Linear, hidden, width, **place)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draws the weights anew; the norm starts at one."""
        nn.init.ones_(self.norm.weight)
        for linear in (self.up, self.down):
            draw_normal(linear.weight, linear.in_features**-0.5, source_of(generator))

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., width]`."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)

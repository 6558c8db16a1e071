"""Looking at a model while it reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError, shorten
from hecate.microscope.calls import joined, memory_names, observed
from hecate.microscope.view import MemoryView, View


def look(
    model: nn.Module,
    x: Tensor,
    *,
    state: Any = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    points: int = 64,
) -> View:
    """What every memory of a model or layer does while it reads x. [SCOPE-LOOK-D1]

        view = look(model, tokens)
        view["blocks.0.memory"].attention.map   # [B, H, T, T]
        view["blocks.0.memory"].save("memory.png")

    The model runs once, in evaluation mode and without gradients, and is left as it was. What its memories were asked
    is then scanned again in float64, so that the numbers are those of the pictured rule rather than of its rounding.
    Every `nn.Memory` is found wherever it is: alone, as a level of a CMS, beside attention; so are feature memories,
    and the boxes of self-referential ones, whose values are what the boxes were taught. The sums of a causal
    `nn.LinearAttention` (`PerformerAttention` has one) are a memory per query head; with positions in the numerator or
    in a table they are none, and left out.

    Args:
        model: a model of tokens or a layer of `x [B, T, d_model]`, called as
            `model(x, state, write_mask=..., reset_mask=...)`.
        x: what it reads.
        state: the state to go on from.
        write_mask, reset_mask: bool `[B, T]`.
        points: most moments at which states are looked at, besides the start.

    Raises:
        ConfigError: a model without memories, or none that was written.
        ShapeError: no tokens.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper runs no hooks inside
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {shorten(model)}")
    if type(points) is not int or points < 1:
        raise ConfigError(f"must be an integer of at least 1, got {shorten(points)}", path=("points",))
    if not memory_names(model):
        raise ConfigError(
            f"{type(model).__name__} has no memories to look at: there is no hecate.nn.Memory, CMS "
            "or SelfReferential below it, and no causal LinearAttention with positions outside of "
            "a table and of the numerator"
        )
    if not isinstance(x, Tensor):
        raise ShapeError(f"x must be a tensor of tokens, got {shorten(x)}")
    if x.dim() < 2 or 0 in x.shape:
        raise ShapeError(f"there are no tokens to look at: x is {list(x.shape)}")
    masks = {"write_mask": write_mask, "reset_mask": reset_mask}
    given = {name: mask for name, mask in masks.items() if mask is not None}
    calls = observed(model, lambda: model(x, state, **given))
    if not calls:
        raise ConfigError("no memory was written: write_mask leaves out every token")
    return View(
        {name: MemoryView(name, joined(found), points, unread=found[0].unread) for name, found in calls.items()}
    )

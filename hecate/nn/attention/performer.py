"""Linear attention with random features of the softmax kernel, redrawn as training goes on."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hecate.checks import expect_choice
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.attention.linear import LinearAttention
from hecate.nn.parameters import source_of
from hecate.phi import Favor, PerformerReLU
from hecate.phi.random import Norms
from hecate.rule import MemoryState, bytes_of, detached

Kernel = Literal["positive", "hyperbolic", "trigonometric", "relu"]


class PerformerState(NamedTuple):
    """What a `PerformerAttention` carries between calls: a pytree of tensors.

    Fields:
        sums: of the attention.
        redraws: number of the draws whose features were summed, `[]` int64.
    """

    sums: MemoryState
    redraws: Tensor

    def detach(self) -> PerformerState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)


class PerformerAttention(nn.Module):
    """Linear attention with random features: `(x [B, T, d_model], state=None) -> (y, state)`.

        layer = PerformerAttention(256, heads=4, redraw_every=1000)
        optimizer.register_step_post_hook(lambda *_: layer.advance())

    y_t = W_out sum_s w_ts v_s with w_ts = phi(q_t).phi(k_s) / sum_s phi(q_t).phi(k_s), where phi is `phi.Favor`, an
    estimate of softmax attention, or `phi.PerformerReLU`. [TRF-PERF-D1]

    Draws number n are a function of `seed` and n alone, which are in the state dict: equal on all processes that start
    from one state dict (DDP's default), and the same after a resume. They change in `advance` and `redraw`, never in a
    call, so that what runs a call twice, such as a checkpoint, sees one phi. A state made with other draws is refused.
    [TRF-PERF-I1]

    Args:
        d_model, heads: width of x and y, number of query heads.
        kernel: "positive", "hyperbolic" or "trigonometric" features of exp(q.k / sqrt(D)), or
            "relu". Trigonometric ones can be negative, and so can sums of them: that kernel needs normalizer="none".
        num_features: d_phi; None for max(D, int(D log D)) of key heads of width D, even for pairs.
        orthogonal: blocks of orthogonal projections; False for independent ones.
        norms: lengths of the projections, "chi" or "sqrt"; None for the map's own.
        kernel_epsilon: of "relu" alone; None for 1e-3.
        redraw_every: training steps between draws; None for one draw kept.
        generator: source of all draws, the seed among them; None uses torch's default generator.
        **options: every other option of `LinearAttention`.

    Cost: that of `LinearAttention`, and O(D d_phi) per token and head for phi. A call with a state reads one number
    back from the device.

    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794)."""

    seed: Tensor
    redraws: Tensor
    steps: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kernel: Kernel = "positive",
        num_features: int | None = None,
        orthogonal: bool = True,
        norms: Norms | None = None,
        kernel_epsilon: float | None = None,
        redraw_every: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if redraw_every is not None and (type(redraw_every) is not int or redraw_every < 1):
            raise ConfigError(f"redraw_every must be an integer >= 1 or None, got {shorten(redraw_every)}")
        if kernel == "trigonometric" and options.get("normalizer", "sum") != "none":
            raise ConfigError(
                "kernel='trigonometric' has negative weights, whose sum can vanish or change sign; "
                "use kernel 'positive' or 'hyperbolic', or normalizer='none'",
                path=("normalizer",),
            )
        self.kernel, self.redraw_every = kernel, redraw_every
        if "feature_map" in options:
            raise ConfigError(
                "feature_map is made of kernel, num_features, orthogonal and norms here; leave it "
                "out, or use LinearAttention with a feature_map of your own"
            )
        expect_choice(kernel, "kernel", get_args(Kernel))
        if kernel != "relu" and kernel_epsilon is not None:
            raise ConfigError(
                f"kernel_epsilon={kernel_epsilon} is added to ReLU features, but kernel is "
                f"{kernel!r}; leave it out or use kernel='relu'"
            )
        own = {"num_features": num_features, "norms": norms, "kernel_epsilon": kernel_epsilon, "orthogonal": orthogonal}
        fields: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        phi = PerformerReLU(**fields) if kernel == "relu" else Favor(variant=kernel, **fields)
        options |= {"feature_map": phi, "generator": generator, "device": device, "dtype": dtype}
        self.attention = LinearAttention(d_model, heads, **options)
        for name in ("seed", "redraws", "steps"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        if self.seed.device.type != "meta":
            self._start(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter and the seed anew from `generator` (None: torch's default)."""
        self.attention.reset_parameters(generator)
        self._start(generator)

    def _start(self, generator: torch.Generator | None) -> None:
        how: dict[str, Any] = {"generator": source_of(generator), "dtype": torch.int64, "device": "cpu"}
        self.seed.copy_(torch.randint(2**63 - 1, (), **how))
        self.redraws.zero_()
        self.steps.zero_()
        self._draw()

    def advance(self) -> None:
        """Counts a training step; every `redraw_every`-th one redraws."""
        self._check_training("advance")
        self.steps += 1
        if self.redraw_every is not None and int(self.steps) % self.redraw_every == 0:
            self.redraw()

    def redraw(self) -> None:
        """The next draws of the seed; states made with the present ones are refused from now on."""
        self._check_training("redraw")
        self.redraws += 1
        self._draw()

    def _draw(self) -> None:
        mixed = np.random.SeedSequence([int(self.seed), int(self.redraws)]).generate_state(1)
        source = torch.Generator().manual_seed(int(mixed[0]))
        fresh = self.attention.feature_map.redraw(self.attention.phi_params, source)
        held = self.attention.phi_frozen
        for name, value in fresh["frozen"].items():
            # Not in place: a graph that still waits for its backward pass keeps the old draws.
            setattr(held, held.names[name], value)

    def _check_training(self, what: str) -> None:
        if not self.training:
            raise ConfigError(
                f"{self.attention.name}: {what}() would change the draws of a layer that is "
                "evaluated; call train() first, or leave the draws as they are"
            )

    def forward(
        self, x: Tensor, state: PerformerState | None = None, *, return_attention: bool = False, **given: Tensor | None
    ) -> tuple[Tensor, PerformerState] | tuple[Tensor, PerformerState, Tensor]:
        """(y, state), and with `return_attention` the weights w `[B, H, T, S]` as a third.

        The weights are those that y used: w @ v are the heads' answers ahead of dropout and W_out. They take O(T S
        d_phi) time and O(T S) memory per head, and a call without a state. Other arguments (`context`, `write_mask`,
        `reset_mask`, `cu_seqlens`) are those of `LinearAttention`.
        """
        if state is not None:
            self._check_state(state, return_attention)
        y, sums = self.attention(x, None if state is None else state.sums, **given)
        after = PerformerState(sums, self.redraws.clone())
        return (y, after, self._weights(x, **given)) if return_attention else (y, after)

    def _check_state(self, state: PerformerState, return_attention: bool) -> None:
        name = self.attention.name
        whole = isinstance(state, PerformerState) and isinstance(state.sums, MemoryState)
        if not whole or not isinstance(state.redraws, Tensor):
            raise ShapeError(
                f"{name}: state must be the PerformerState that this layer returned, got {type(state).__name__}"
            )
        if return_attention:
            raise ConfigError(
                f"{name}: return_attention needs all tokens in one call, but a state holds sums "
                "over earlier ones; pass the whole sequence without a state"
            )
        if not torch.compiler.is_compiling() and int(state.redraws) != int(self.redraws):
            raise ShapeError(
                f"{name}: the state was summed with draws number {int(state.redraws)}, the layer is at "
                f"{int(self.redraws)}, whose features do not fit the sums; start from state=None after a redraw"
            )

    def _weights(self, x: Tensor, *, context: Tensor | None = None, **masks: Tensor | None) -> Tensor:
        """The answers to values that are each token's own unit vector: its weights."""
        q, k, _ = self.attention.projected(x, context, masks.get("write_mask"))
        own = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).unsqueeze(1)
        weights, _ = self.attention.attend(q, k, own.expand(*k.shape[:3], -1), None, **masks)
        return weights.transpose(1, 2)

    def extra_repr(self) -> str:
        """The schedule."""
        return f"kernel={self.kernel!r}, redraw_every={self.redraw_every}"

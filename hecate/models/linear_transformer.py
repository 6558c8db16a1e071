"""A linear transformer over sequences of embeddings."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hecate.checks import MAX_SIZE, Count, Depth, Size, named
from hecate.errors import ShapeError, faults_at
from hecate.nn import LinearAttention
from hecate.nn.arguments import Mask, check_sequence
from hecate.nn.blocks import MLPS, Layers, Norm, hidden_width, norm_of
from hecate.nn.parameters import blank, redraw
from hecate.nn.positions import NoPosition, Position
from hecate.phi import ELU, FeatureMapKind
from hecate.states import State
from hecate.variant import Config, Conflicts


class _TransformerFields(NamedTuple):
    layers: tuple[Any, ...]
    last: Tensor | None


class TransformerState(State, _TransformerFields):
    """State of a causal `LinearTransformer` between calls: a pytree of tensors. [TRF-LIN-I1]

    Fields:
        layers: the sums of every layer's attention.
        last: the output at the last written token, `[B, hidden_size]`, 0 before any; None if the
            output is the whole sequence.
    """

    __slots__ = ()
    whole = ()


class LinearTransformerConfig(Config):
    """Sizes of a `LinearTransformer`, and its attention. [TRF-LIN-D1]

    Fields:
        embed_dim: width of the input; the only field without a default.
        hidden_size, num_layers, num_heads: width, depth, number of heads of width hidden_size // num_heads.
        dropout: probability with which training zeroes a channel of a branch's output; as in
            `nn.Dropout` it uses torch's global generator.
        window_size: largest number of tokens of one call; None for any number. No parameter or
            state depends on it. In Edifice it is the length that the input is compiled for.
        output: "last" for the last written token only, "sequence" for every token.
        feature_map, causal, normalizer, eps, kv_heads, positions: as in `hecate.nn.LinearAttention`.
        norm: "rms", or "layer" for layer norm, in every block and at the end.
        mlp: "gated" by silu, W_down(silu(W_gate x) * W_up x), or "plain", W_down gelu(W_up x).
        mlp_ratio: hidden width of the MLP over hidden_size; 0 leaves it out.
        bias: whether every linear layer has a bias, 0 at the start.
    """

    embed_dim: Size = Field(ge=1)
    hidden_size: Size = Field(256, ge=1)
    num_layers: Depth = Field(4, ge=1)
    num_heads: Size = Field(4, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    window_size: Count | None = Field(None, ge=1)
    output: Literal["last", "sequence"] = "last"
    feature_map: FeatureMapKind = ELU()
    causal: bool = True
    normalizer: Literal["sum", "none"] = "sum"
    eps: float = Field(0.0, ge=0)
    kv_heads: Size | None = Field(None, ge=1)
    positions: Position = NoPosition()
    norm: Norm = "rms"
    mlp: Literal["gated", "plain"] = "gated"
    mlp_ratio: float = Field(4.0, ge=0, le=MAX_SIZE)
    bias: bool = False

    def conflicts(self) -> Conflicts:
        """Sizes that do not fit, and anything that the attention refuses."""
        if self.hidden_size % self.num_heads:
            yield ("num_heads",), f"must divide hidden_size={self.hidden_size}, got {self.num_heads}"
        if not hidden_width(self.hidden_size, self.mlp_ratio, "hidden_size") and self.mlp != "gated":
            reason = f"{self.mlp!r} with mlp_ratio={self.mlp_ratio:g}, which leaves the MLP out"
            yield ("mlp",), f"{reason}; give mlp_ratio a number above 0, or leave mlp out"
        # On the meta device, so that the attention refuses here what it would refuse later.
        with faults_at("hidden_size"):
            TransformerLayer(self, "layer", device="meta")


_ATTENTION = ("feature_map", "causal", "normalizer", "eps", "kv_heads", "positions", "bias")


class TransformerLayer(Layers):
    """x + drop(attention(norm(x))), then x + drop(mlp(x)): pre-norm, both branches residual."""

    def __init__(
        self, config: LinearTransformerConfig, name: str, generator: torch.Generator | None = None, **place: Any
    ) -> None:
        super().__init__()
        width = config.hidden_size
        hidden = hidden_width(width, config.mlp_ratio, "hidden_size")
        self.norm = norm_of(config.norm, width, **place)
        options: dict[str, Any] = {option: getattr(config, option) for option in _ATTENTION}
        self.attention = LinearAttention(width, config.num_heads, name=name, generator=generator, **options, **place)
        fields: dict[str, Any] = {"norm": config.norm, "bias": config.bias, **place}
        self.mlp = MLPS[config.mlp](width, hidden, generator, **fields) if hidden else None
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any, **masks: Tensor | None) -> tuple[Tensor, Any]:
        """The layer's output and its state after the last token."""
        y, state = self.attention(self.norm(x), state, **masks)
        x = x + self.drop(y)
        return (x if self.mlp is None else x + self.drop(self.mlp(x))), state


@named(*LinearTransformerConfig.model_fields)
class LinearTransformer(nn.Module):
    """`(x [B, T, embed_dim], state=None) -> (y, state)`: pre-norm blocks of linear attention.

        input [B, T, embed_dim]
          -> projection to hidden_size
          -> num_layers times:  x + drop(attention(norm(x))),  then  x + drop(mlp(norm(x)))
          -> norm
          -> output="last": y [B, hidden_size]; output="sequence": y [B, T, hidden_size]

        attention, per head and causal: q, k, v of width d = hidden_size / num_heads
          S_t = S_(t-1) + phi(k_t) v_t^T   [d_phi, d]      z_t = z_(t-1) + phi(k_t)   [d_phi]
          y_t = S_t^T phi(q_t) / (z_t . phi(q_t))

    With causal=True it streams: any split of a sequence gives the same outputs, from a state of num_heads d_phi (d + 1)
    numbers per layer (fewer with `kv_heads`), whatever the length; kinds of `positions` that cannot stream refuse a
    state. Training keeps O(T) activations. With padding (`write_mask` False) the output "last" is that of the last
    written token. With causal=False a token sees its whole sequence, in one call and without a state. The last token
    sees all of it either way: with one layer its output is the same, with more it is not, because the tokens that it
    attends to have then seen the tokens after them. [TRF-LIN-D1]

    Cost: per token and head 2 d_phi d multiplications, and phi; softmax attention over N tokens takes 2 N d, which is
    more for N > d_phi, or for N > 2 d_phi if a causal softmax skips masked pairs. Which of the two is faster at a given
    N depends on the kernels.

    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). Options are named as in the Elixir
    library Edifice, whose blocks are those of norm="layer", mlp="plain", bias=True, eps=1e-6."""

    def __init__(
        self,
        config: LinearTransformerConfig,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config.validated()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        width = config.hidden_size
        self.project = blank(nn.Linear, config.embed_dim, width, bias=config.bias, **place)
        self.layers = nn.ModuleList(
            TransformerLayer(config, f"layer {index}", generator, **place) for index in range(config.num_layers)
        )
        self.norm = norm_of(config.norm, width, **place)
        redraw(generator, self.project)

    @classmethod
    def build(
        cls,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Builds a model from the fields of a `LinearTransformerConfig`."""
        config = LinearTransformerConfig.model_validate(options)
        return cls(config, generator=generator, device=device, dtype=dtype)

    @classmethod
    def output_size(cls, **options: Any) -> int:
        """Width of the output of a model with these options."""
        return LinearTransformerConfig.model_validate(options).hidden_size

    @classmethod
    def param_count(cls, **options: Any) -> int:
        """Number of parameters of a model with these options, counted on the meta device."""
        return sum(item.numel() for item in cls.build(device="meta", **options).parameters())

    @classmethod
    def recommended_defaults(cls) -> dict[str, Any]:
        """Options to start from, for `build(embed_dim=..., **options)`."""
        return {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "window_size": 60, "dropout": 0.1}

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        redraw(generator, *self.layers, self.norm, self.project)

    def forward(
        self, x: Tensor, state: TransformerState | None = None, *, write_mask: Mask = None, reset_mask: Mask = None
    ) -> tuple[Tensor, TransformerState | None]:
        """One pass over x `[B, T, embed_dim]` from a state; masks are bool `[B, T]`.

        `write_mask` is False at padding, `reset_mask` True where a document starts. With
        causal=False the state is None.
        """
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        check_sequence(self.project.weight, x, **masks)
        self._check(x, state)
        if write_mask is not None and self.config.output == "last":
            # Outputs at padding are not used; zeroing its inputs keeps them out of gradients.
            x = torch.where(write_mask.unsqueeze(-1), x, 0.0)
        # Under autocast, too, the residual stream has the parameters' precision.
        h, carried = self.project(x).to(self.project.weight.dtype), []
        for index, layer in enumerate(self.layers):
            h, after = layer(h, None if state is None else state.layers[index], **masks)
            carried.append(after)
        y, last = self.norm(h), None
        if self.config.output == "last":
            y = last = _last(y, None if state is None else state.last, write_mask)
        return y, TransformerState(tuple(carried), last) if self.config.causal else None

    def _check(self, x: Tensor, state: TransformerState | None) -> None:
        window = self.config.window_size
        if window is not None and x.shape[1] > window:
            cure = "pass them in pieces with the state, or build the model with a larger window_size or None"
            raise ShapeError(f"x has {x.shape[1]} tokens, more than window_size={window}; {cure}")
        if state is None:
            return
        if not self.config.causal:
            cure = "pass all its tokens at once, or build it with causal=True"
            raise ShapeError(f"a model with causal=False looks at a sequence as a whole and takes no state; {cure}")
        expected = x.shape[0], self.config.hidden_size
        fits = isinstance(state, TransformerState) and len(state.layers) == len(self.layers)
        if fits and self.config.output == "last":
            fits = state.last is not None and tuple(state.last.shape) == expected
        if not fits:
            raise ShapeError(
                f"state must be the TransformerState that this model returned for {x.shape[0]} sequences, of "
                f"{len(self.layers)} layers and output {self.config.output!r}; got {type(state).__name__}"
            )


def _last(y: Tensor, before: Tensor | None, write_mask: Mask) -> Tensor:
    """y at the last written token, `[B, width]`; for rows without one the earlier value, or 0."""
    before = y.new_zeros(y.shape[0], y.shape[-1]) if before is None else before
    if not y.shape[1]:
        return before
    if write_mask is None:
        return y[:, -1]
    place = torch.arange(1, y.shape[1] + 1, device=y.device)
    latest = (write_mask * place).amax(1)
    rows = y[torch.arange(y.shape[0], device=y.device), (latest - 1).clamp(min=0)]
    return torch.where((latest > 0).unsqueeze(-1), rows, before.to(y.dtype))

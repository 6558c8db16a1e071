"""Parts of a layer that follow from its rule: parameters of phi and of gates, starting weights, a check for diverging
steps; `FeatureMemory`, a memory ahead of phi with parameters of its own; `ScanArguments`, all that a memory is called
with; and queries projected onto the span of the chunk's keys."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.checks import Size, check_shapes, expect_choice
from hecate.distributed import gathered
from hecate.distributed.context import Context, context_scan
from hecate.engine import L2_NORM, Inputs, memory_features, memory_scan, one_write_each, to_tokens, written_before
from hecate.errors import ConfigError, StabilityWarning
from hecate.gating import Masks, Sizes, Written
from hecate.nn.arguments import check_length
from hecate.nn.conv import QKNorm, normalise_qk
from hecate.nn.gates import GateHeads
from hecate.nn.parameters import FeatureParameters, TensorDict, draw_normal, without_numbers
from hecate.phi import Params
from hecate.rule import LAYER_FIELDS, Gates, MemoryConfig, MemoryState
from hecate.rule.state import slot_shapes
from hecate.tape import execute, one
from hecate.tape.bridge import without_autocast
from hecate.tape.ops import joined
from hecate.variant import Conflicts


class GatingParameters(nn.Module):
    """A config's gating as a module: its parameters, and its outputs for a layer's q, k, v and gates."""

    def __init__(self, config: MemoryConfig, sizes: Sizes, **place: Any) -> None:
        super().__init__()
        self.gating, self.sizes, self.chunk = config.gating, sizes, config.chunk
        shapes, width = self.gating.shapes(sizes), config.feature_map.output_dim(sizes.d_key)
        if self.gating.channels and width != sizes.d_key:
            channels = f"{', '.join(self.gating.channels)} per key channel, {sizes.d_key} of them"
            phi = f"feature_map {config.feature_map.kind!r} has {width}; use one as wide as keys"
            raise ConfigError(f"gating {self.gating.kind!r} makes {channels}, and {phi}", path=("gating",))
        carried = {f"state of {name}": shape for name, shape in self.gating.state_shapes(sizes).items()}
        cure = f"lower d_model, heads or the widths that gating {self.gating.kind!r} sees"
        check_shapes({**shapes, **carried}, cure)
        like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        self.params = TensorDict(like, learned=True, **place)

    def draw(self, source: torch.Generator) -> None:
        """The starting values."""
        tensors = self.params.tensors
        with torch.device("cpu"):  # whatever the default is, draws are made there
            self.params.copy_({n: self.gating.start(n, tuple(p.shape), self.sizes, source) for n, p in tensors.items()})

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates, before: dict[str, Tensor] | None, masks: Masks
    ) -> tuple[Written, dict[str, Tensor]]:
        """Inputs to the memory, and the gating's state after the last token; it starts at zero if `before` is None."""
        if shapes := self.gating.state_shapes(self.sizes):
            check_length(x, f"gating {self.gating.kind!r}")
        if before is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            before = {n: torch.zeros(x.shape[0], *shape, dtype=wide, device=x.device) for n, shape in shapes.items()}
        inputs = Written(q, k, v, {name: gate for name, gate in gates._asdict().items() if gate is not None})
        with without_autocast(x.device.type):
            written, after = self.gating.forward(
                self.params.tensors, x, inputs, before, masks._replace(chunk=self.chunk)
            )
        after = {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in after.items()}
        if not x.numel():  # of no tokens every parameter has the gradient 0, and the state is a copy
            v = joined(written.v, *self.params.tensors.values())
            return written._replace(v=v), {name: tensor.clone() for name, tensor in after.items()}
        return written, after


class HeldRule(FeatureParameters):
    """A rule and the parameters of its phi, for memories that share them.

    `erases` counts how many times a write takes the key's direction out of a memory.
    """

    rule: MemoryConfig
    erases = 1

    @property
    def d_phi(self) -> int:
        """The width of phi."""
        return self.rule.feature_map.output_dim(self.phi_width)

    def random_keys(self, count: int, qk_norm: QKNorm) -> tuple[Tensor, Params]:
        """Keys `[count, H, D]` to measure phi at, the same ones every time, and phi's parameters; all in float64."""
        double: Any = {"dtype": torch.float64, "device": "cpu"}
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(count, self.phi_heads, self.phi_width, generator=generator, **double)
        params: Params = pytree.tree_map(lambda tensor: gathered(tensor.detach()).to(**double), self.phi_params)
        return normalise_qk(keys, qk_norm), params

    def warn_if_unstable(self, name: str, qk_norm: QKNorm) -> None:
        """Warns, at the line that builds the layer, if writes may diverge at the lr gate's ceiling: if lr |phi(k)|^2
        times `erases`, measured on random keys, is too large."""
        rule, algorithm = self.rule, self.rule.algorithm
        # If not even an infinite key diverges, none does.
        if rule.step != "raw" or rule.key_norm != "none" or rule.diverging(math.inf) is None:
            return
        # 256 keys, fewer where phi is wide.
        keys, params = self.random_keys(max(8, min(256, 2**22 // (self.phi_heads * self.d_phi))), qk_norm)
        position = torch.zeros((), dtype=torch.int64, device="cpu") if rule.feature_map.needs_position else None
        with torch.no_grad():
            phi = rule.feature_map(keys, params, position=position)
        largest = rule.diverging(float(phi.square().sum(-1).max()) * self.erases * rule.gating.erases)
        if largest is not None:
            twice = "" if self.erases == 1 else f" times {self.erases} erases"
            if rule.gating.erases != 1:
                twice += f" times {rule.gating.erases:g}, the most that erase * write of its gating reaches,"
            warnings.warn(
                f"memory {name!r}: lr * |phi(k)|^2{twice} reaches {largest:.3g} at the ceiling lr={algorithm.lr:g} of "
                f"its gate (feature_map {rule.feature_map.kind!r}, qk_norm {qk_norm!r}, key_norm 'none'), and bias "
                f"{rule.bias.kind!r} may diverge beyond {algorithm.limits()}; set key_norm='l2', "
                "step='normalized' or a lower algorithm.lr",
                StabilityWarning,
                stacklevel=5,
            )

    def draw_answering(self, initial: TensorDict, d_value: int, source: torch.Generator, like: Tensor) -> None:
        """Draws starting weights for a memory that has to give answers before its first write: the structure's own
        start, or N(0, 1/fan_in) for a linear one, which otherwise starts at zero and answers nothing."""
        structure = self.rule.structure
        if not structure.linear and structure.drawn:
            place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
            initial.copy_(structure.init(self.d_phi, d_value, heads=self.phi_heads, **place))
            return
        for weight in initial.tensors.values():
            draw_normal(weight, 1.0 if structure.diagonal else self.d_phi**-0.5, source)


class RuleParameters(HeldRule):
    """The learned side of a `MemoryConfig` for H heads with keys D and values V.

    `gates` come from x `[B, T, d_model]`; `phi_learned` and `phi_frozen` are the feature map's, `initial` the starting
    weights, trained or not.
    """

    def __init__(
        self, sizes: Sizes, config: MemoryConfig, *, learned_initial: bool, firing: bool = False, **place: Any
    ) -> None:
        super().__init__()
        d_model, heads, d_key, d_value, *_ = sizes
        self.config, self.rule, self.heads, self.d_value = config, config, heads, d_value
        self.gates = GateHeads(d_model, heads, config, d_key=d_key, firing=firing, **place)
        d_phi = config.feature_map.output_dim(d_key)
        weights = config.structure.shapes(d_phi, d_value)
        sizes = sizes._replace(writes=config.writes, weights=len(weights))
        self.gating = None if config.gating.plain else GatingParameters(config, sizes, **place)
        start = config.structure.init(d_phi, d_value, heads=heads, **without_numbers(place["dtype"]))
        # Before any tensor is made: an algorithm's slots may be larger than the memory.
        slots = slot_shapes(config, weights, d_phi, d_value)
        check_shapes(slots, f"narrow the state of algorithm {config.algorithm.kind!r}", heads)
        self.hold_features(config.feature_map, heads, d_key, **place)
        self.initial = TensorDict(start, learned=learned_initial, **place)

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Everything anew from a generator, in the dtype and on the device of `like`."""
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        self.gates.reset_parameters(source)
        if self.gating is not None:
            self.gating.draw(source)
        self.draw_features(source, like)
        self.initial.copy_(self.config.structure.init(self.d_phi, self.d_value, heads=self.heads, **place))


class FeatureMemoryConfig(MemoryConfig):
    """The rule of a feature memory, and what its answers are: see `FeatureMemory`.

    q and k come to it as its layer's qk_norm leaves them, whatever the rule would have a layer of its own do.

    Fields beside those of `MemoryConfig`, which stands for one with `residual`:
        residual: features are k + M(k), of the keys' width; else M(k) alone.
        d_value: the width of M(k) without `residual`; None takes that of the keys.
    """

    residual: bool = True
    d_value: Size | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _from_memory(cls, data: Any) -> Any:
        if type(data) is MemoryConfig:
            return {name: getattr(data, name) for name in data.model_fields_set - {*LAYER_FIELDS}}
        for name in LAYER_FIELDS if isinstance(data, Mapping) else ():
            if data.get(name) is not None:
                reason = f"a feature memory stands behind the {name.removeprefix('layer_')} of its layer"
                raise ConfigError(f"{data[name]!r}: {reason}; set that one, or leave it out", path=(name,))
        return data

    def settle(self) -> None:
        """Leaves out what a named rule says of a layer around it."""
        for name in LAYER_FIELDS:
            object.__setattr__(self, name, None)

    def conflicts(self) -> Conflicts:
        """Conflicts of any rule, and settings that would make or need other keys, values and gates."""
        yield from super().conflicts()
        if self.writes > 1:
            yield ("writes",), f"writes={self.writes}: a feature memory makes one key and one value per token"
        gating: Any = self.gating  # mypy takes what a subclass inherits for what its constructor accepts
        if not gating.plain:
            yield ("gating",), f"gating {gating.kind!r}: a feature memory makes gates of its own"
        if self.residual and self.d_value is not None:
            conflict = f"d_value={self.d_value} with residual=True: k + M(k) has the width of k"
            yield ("d_value",), f"{conflict}; leave d_value out, or set residual=False"

    def width(self, d_key: int) -> int:
        """Width of the features of keys of width `d_key`."""
        return d_key if self.d_value is None else self.d_value


class FeatureMemory(RuleParameters):
    """A memory M before phi: q and k become x + M_t(x), or M_t(x) with `residual=False`.

    With `residual`, M is written with (k_t, k_t) under gates of its own: it learns as the sequence goes by which
    directions keys take, and an empty M, as a matrix starts, leaves q and k as they are. Without, phi is the memory: M
    is written with (k_t, U k_t), U `[H, F, D]` learned, so that features follow what U asks for and the sequence has
    shown; M starts at learned weights drawn as N(0, 1/fan_in) (a deep one at its own), since an empty one would make
    every feature 0. [NN-FEAT-D1, NN-FEAT-D2]

    Shapes: x `[B, T, d_model]`, q and k `[B, T, H, D]` in, `[B, T, H, F]` out, F = `d_value`.
    """

    config: FeatureMemoryConfig

    def __init__(
        self, d_model: int, heads: int, config: FeatureMemoryConfig, *, d_key: int, learned_initial: bool, **place: Any
    ) -> None:
        sizes = Sizes(d_model, heads, d_key, config.width(d_key))
        super().__init__(sizes, config, learned_initial=learned_initial, **place)
        self.target = None if config.residual else nn.Parameter(torch.empty(heads, self.d_value, d_key, **place))

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Draws everything anew; without `residual` the memory starts at weights that give answers."""
        super().draw_rule(source, like)
        if self.target is not None:
            draw_normal(self.target, self.phi_width**-0.5, source)
            self.draw_answering(self.initial, self.d_value, source, like)

    def values(self, k: Tensor) -> Tensor:
        """Values that M is written with at the keys k `[B, T, H, D]`: k itself, or U k."""
        return k if self.target is None else torch.einsum("bthd,hfd->bthf", k, self.target)

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, state: MemoryState | None, **how: Any
    ) -> tuple[Tensor, Tensor, MemoryState]:
        """q, k and the state after the last token; `how` are masks, engine, autodiff and name."""
        how |= {"initial": self.initial.tensors, "phi_params": self.phi_params, "residual": self.config.residual}
        return memory_features(self.config, q, k, self.values(k), self.gates(x), state=state, **how)


class ScanArguments(NamedTuple):
    """The arguments of one `memory_scan` that determine its result, as a layer makes them from x."""

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

    def scan(self, context: Context | None = None, **how: Any) -> tuple[Tensor, MemoryState]:
        """`memory_scan` of them, over the ranks of a context if there is one; `how` are engine, autodiff and name."""
        if context is not None:
            return context_scan(**self._asdict(), context=context, **how)
        return memory_scan(**self._asdict(), **how)

    def each_write(self) -> ScanArguments:
        """The same scan with several writes of a token spread over as many tokens."""
        masks: dict[str, Any] = {"write_mask": self.write_mask, "reset_mask": self.reset_mask}
        config, (q, k, v, gates), masks = one_write_each(
            self.config, self.q, self.k, self.v, self.gates, run=execute, **masks
        )
        return self._replace(config=config, q=q, k=k, v=v, gates=gates, **masks)

    def repeat(self, times: int) -> ScanArguments:
        """The scan of all sequences repeated, one whole batch after the other."""
        rule, initial, (batch, _, heads, width) = self.config, self.initial, self.v.shape
        if initial is not None:  # it may be shared by all sequences
            shapes = rule.structure.shapes(rule.feature_map.output_dim(self.k.shape[-1]), width)
            initial = {name: item.expand(batch, heads, *shapes[name]) for name, item in initial.items()}
        source = self._replace(phi_params=None, initial=initial)
        copied = pytree.tree_map_only(Tensor, lambda x: x.repeat(times, *[1] * (x.dim() - 1)), source)
        return copied._replace(phi_params=self.phi_params)

    def between(self, at: int, end: int, state: MemoryState | None) -> ScanArguments:
        """The scan of the tokens at <= t < end alone, from another state."""
        tokens = {name: getattr(self, name) for name in ("q", "k", "v", "gates", "write_mask", "reset_mask")}
        return self._replace(**between(tokens, at, end), state=state)


def between(tree: Any, at: int, end: int) -> Any:
    """Tokens at <= t < end of a pytree of tensors `[B, T, ...]`."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[:, at:end], tree)


def by_token(layer: nn.Module, x: Tensor, state: Any, masks: dict[str, Tensor | None]) -> tuple[Tensor, Any]:
    """A layer called with one token after another, for layers that would take them in blocks. [TAPE-EXACT-D1]"""
    answers = []
    for t in range(x.shape[1]):
        y, state = layer(x[:, t : t + 1], state, **between(masks, t, t + 1))
        answers.append(y)
    return torch.cat(answers, 1), state


def features_of(
    config: MemoryConfig, q: Tensor, k: Tensor, params: Params, lr: float = 1.0, **fields: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k) and lr as a scan computes them, after key_norm, query_scale and step; q, k `[B, T, H, D]`,
    `fields` are `write` and `position` of a scan's inputs."""
    dtype = torch.promote_types(k.dtype, config.dtype)
    gate = torch.ones(k.shape[:3], dtype=dtype, device=k.device)
    with without_autocast(k.device.type):
        tokens = to_tokens(config, Inputs(q, k, k, lr * gate, gate, gate, **fields), params, dtype, execute)
    return tokens.phi_q, tokens.phi_k, tokens.lr


# Queries projected onto what keys span.


Projection = Literal["none", "sum", "orthogonal"]

SUM = MemoryConfig(bias="dot")  # M = sum of v k^T
NEW = 1e-4  # a unit key adds a direction to the span if its part outside it is longer than this


def check_projection(config: MemoryConfig, projection: Projection) -> None:
    """Refuses rules whose queries cannot be projected."""
    expect_choice(projection, "query_projection", get_args(Projection))
    if projection == "none":
        return
    refusal = None
    if config.feature_map.needs_position:
        refusal = f"feature_map {config.feature_map.kind!r} depends on positions, which a scan counts"
    elif config.normalizer != "none":
        refusal = "normalizer 'sum' needs phi(q) as it is: a projected one may have negative weights"
    elif config.on_nonfinite == "skip":
        refusal = "on_nonfinite='skip' may leave out tokens, whose keys the projection would hold"
    if refusal is not None:
        raise ConfigError(
            f"query_projection={projection!r}: {refusal}; use 'none' or change the memory", path=("query_projection",)
        )


def project_queries(
    projection: Projection, asked: ScanArguments, projector: MemoryState | None
) -> tuple[Tensor, Tensor, MemoryState]:
    """Projected queries P_t phi(q_t) and features phi(k_t) of a scan's tokens, and the state of P. [CMS-TNT-D2]

    P_t is made of the unit features of keys written in the memory's present chunk, the token's own among them: "sum"
    adds up their projections k k^T, "orthogonal" projects onto their span. `projector` is the state of P at the start.

    Shapes: features `[B, T, H, P]`.
    Cost: "sum" that of one more memory with P x P weights; "orthogonal" a loop over tokens.
    """
    q, k, memory, write, reset = asked.q, asked.k, asked.state, asked.write_mask, asked.reset_mask
    if projection == "orthogonal":
        check_length(q, f"query_projection={projection!r}")
    phi_q, phi_k, _ = features_of(asked.config, q, k, asked.phi_params or {"learned": {}, "frozen": {}}, write=write)
    position = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)  # `len` fixes an export's batch size
    if memory is not None:
        position = memory.position[:, 0]
    opens = written_before(position, write, reset, q.shape[1]) % asked.config.chunk == 0
    if write is not None:  # the span is kept until the first token of the next chunk is written
        opens = opens & write
    if reset is not None:
        opens = opens | reset
    unit = one(execute(L2_NORM, phi_k))
    if projection == "sum":
        options: dict[str, Any] = {"state": projector, "write_mask": write, "reset_mask": opens}
        phi_q, after = memory_scan(SUM, phi_q, unit, unit, Gates(lr=1.0), **options, name="projection")
        return phi_q, phi_k, after
    if projector is None or not q.shape[1]:  # a scan of no tokens returns a copy
        _, projector = memory_scan(SUM, phi_q[:, :0], unit[:, :0], unit[:, :0], state=projector)
    phi_q, span = _orthogonal(phi_q, unit, opens, write, projector.memory["weight"])
    return phi_q, phi_k, projector._replace(memory={"weight": span})


def _orthogonal(q: Tensor, k: Tensor, opens: Tensor, write: Tensor | None, span: Tensor) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt, token by token: P grows by r r^T / |r|^2, r the part of k outside the span."""
    dtype = torch.promote_types(span.dtype, k.dtype)  # as a scan goes on from a state
    q, k, span, outputs = q.to(dtype), k.to(dtype), span.to(dtype), list[Tensor]()
    for t in range(q.shape[1]):
        span = torch.where(opens[:, t, None, None, None], 0.0, span)
        rest = k[:, t].unsqueeze(-1)
        for _ in range(2):  # the second pass removes what rounding left of the first
            rest = rest - span @ rest
        square = rest.square().sum(-2, keepdim=True)
        new = square > NEW * NEW
        if write is not None:
            new = new & write[:, t, None, None, None]
        unit = torch.where(new, rest / torch.where(new, square, 1.0).sqrt(), 0.0)
        span = span + unit @ unit.mT
        outputs.append((span @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return (torch.stack(outputs, 1) if outputs else q), span

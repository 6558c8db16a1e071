"""Turning the MLPs of an existing model into memories that start at their weights: `graft_mlp`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hecate.activation import GELU, Activation, ReLU, SiLU, Tanh
from hecate.checks import Count, Depth
from hecate.engine import memory_scan
from hecate.errors import ConfigError, ShapeError
from hecate.gating import Masks, Sizes
from hecate.hf.adopt import FLOATS
from hecate.hf.cache import remembering
from hecate.hf.graft import (
    BRANCH,
    MASKS,
    Holder,
    Train,
    announce,
    decoder_of,
    expect_keywords,
    expect_layers,
    fields_of,
    with_base,
)
from hecate.nn import LayerState
from hecate.nn.gates import GateHeads
from hecate.nn.parameters import blank, source_of
from hecate.nn.rule import GatingParameters
from hecate.phi import Identity
from hecate.rule import Gates, MemoryConfig
from hecate.structure import MLP, GatedMLP, Matrix
from hecate.variant import Config, Conflicts

KEY = "hecate_mlp"
"""Key of an MLP graft in a model's config."""
_NAMES = ("mlp", "feed_forward", "ffn")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PLAIN = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
_LAST = tuple(dict.fromkeys(names[-1] for names in (*_PLAIN, *_GATED)))
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


_HEBBIAN = MemoryConfig.model_validate({
    "bias": "dot", "retention": {"kind": "decay", "towards": "start"}, "algorithm": {"kind": "gd", "lr": 0.1},
    "chunk": 32, "commit": "chunk", "read": "before", "step": "normalized",
})  # fmt: skip


class MLPGraftConfig(Config):
    """Config of a graft into MLPs: everything needed to load its weights again.

    Fields:
        version: version of these fields.
        layers: numbers of the layers whose MLP becomes a memory.
        memory: the memory's rule; None is `in_place_ttt` for "last", and for "whole" a Hebbian rule in chunks of 32
            with normalised steps, whose weights decay towards their start. The MLP takes the place of structure and
            feature map, so these are left out (`glu`, `mlp` and `gated_mlp` stand for the MLP itself), as are a rule's
            settings for a layer, `layer_qk_norm` and the like.
        fast: "last" makes the last linear map a memory, of the hidden layer's features; "whole" the whole MLP.
        periods: one memory for each period, which commits after that many tokens; None is one memory by the rule.
        dtype: dtype of its weights; None takes the model's, but at least float32.
    """

    version: Literal[1] = 1
    layers: tuple[Annotated[Depth, Field(ge=0)], ...] = Field(min_length=1)
    memory: MemoryConfig | None = None
    fast: Literal["last", "whole"] = "last"
    periods: tuple[Annotated[Count, Field(ge=1)], ...] | None = Field(None, min_length=1)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None

    def conflicts(self) -> Conflicts:
        """Rules that an MLP cannot run, and periods that do not increase."""
        rule, whole = self.rule, self.fast == "whole"
        structures = ("matrix", "mlp", "gated_mlp") if whole else ("matrix",)
        for field, plain in (("feature_map", ("identity", "glu")), ("structure", structures)):
            if (kind := getattr(rule, field).kind) not in plain:
                yield ("memory", field), f"{kind!r}: the MLP itself is the {field}; leave it out"
        if rule.gating.pairs(rule.writes) > 1:
            why = f"writes={rule.writes} takes as many keys of a token, and an MLP makes one; use 1"
            yield ("memory", "writes"), why
        if rule.step == "raw" and rule.key_norm == "none" and not whole and rule.diverging(1e9) is not None:
            why = f"bias {rule.bias.kind!r} diverges with keys as long as hidden layers make them"
            yield ("memory", "step"), f"{why}; set key_norm='l2', or step='normalized'"
        for low, high in pairwise(self.periods or ()):
            if low >= high:
                yield ("periods",), f"must rise, from fast to slow, got {low} ahead of {high}"
        self.rules(Matrix())

    @property
    def rule(self) -> MemoryConfig:
        """`memory`, or the default rule if that is None."""
        if self.memory is not None:
            return self.memory
        return MemoryConfig.model_validate("in_place_ttt") if self.fast == "last" else _HEBBIAN

    def rules(self, structure: Any) -> tuple[MemoryConfig, ...]:
        """The rule of each memory, with the structure that the MLP has."""
        fields = {"structure": structure, "feature_map": Identity()}
        if self.periods is None:
            return (self.rule.model_copy(update=fields),)
        every = ({"chunk": period, "commit": "chunk" if period > 1 else "token"} for period in self.periods)
        return tuple(self.rule.model_copy(update=fields | each) for each in every)


class _Layout(NamedTuple):
    """The layout of an MLP: the name of its last layer, its widths, the structure of its memories, and for "whole" the
    names of its parameters by the names of the structure's weights."""

    last: str
    d_hidden: int
    d_model: int
    structure: Any
    weights: dict[str, str]


def graft_mlp(
    model: Any,
    layers: Sequence[int] | None = None,
    memory: MemoryConfig | str | Mapping[str, Any] | None = None,
    *,
    fast: Literal["last", "whole"] = "last",
    periods: Sequence[int] | None = None,
    train: Train = "memory",
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Turns the MLPs of some layers into memories that start at their weights; returns the same model. [HF-MLP-D1]

        graft_mlp(model, layers=[4, 8], periods=(64,))                  # In-Place TTT: the last map learns as it reads
        graft_mlp(model, fast="whole", periods=(64, 512))               # levels, as HOPE starts them

    For an MLP y = W h(x), "last" computes y_t = (W + sum_p M_p,t) h(x_t), with M_p a matrix memory with keys h(x_t)
    that starts at zero and commits every p tokens; "whole" computes y_t = sum_p c_p f(M_p,t, x_t), with f the MLP as a
    function of its weights, at which each M_p starts, and c_p = 1/(number of periods) per channel at first. Values are
    W_v x, with W_v zero at first: until it is trained nothing is written, and the model computes the same function,
    with "last" to the bit. Of the new parameters, W_v and c have gradients from the first step on, gates from the
    second.

    Names of existing weights stay; new ones contain `.hecate.`. `save_pretrained` writes all of them, for
    `hecate.hf.load`. For each period, the state of a row has as many numbers as the weights that became a memory.

    Args:
        model: on its device, with its weights; not dispatched over devices by accelerate, and not a `PeftModel`, which
            has to be made after the graft. It may have a `graft` beside its attention.
        layers: indices from 0; None for all.
        memory: a rule that writes nothing if values are zero, in any form that `hecate.nn.Memory` takes; None as in
            `MLPGraftConfig`.
        fast, periods: see `MLPGraftConfig`.
        train: "memory" freezes all weights except those of grafts; "all" none: the start is trained, too.
        dtype: dtype of the new weights; None takes the model's, but at least float32.
        generator: source of draws, if a gate needs any; None uses torch's default generator.

    Raises:
        ConfigError: layers that do not exist; mixtures of experts; quantised or missing weights; an MLP of another
            layout or, for "whole", with another activation; a rule that would change the function, or would not learn.
            The model is then unchanged.
    """
    decoder = decoder_of(model, FastMLP)
    asked = fields_of(decoder, layers, dtype, train)
    config = MLPGraftConfig.model_validate({**asked, "memory": memory, "fast": fast, "periods": periods})
    return install_mlps(model, decoder, config, build_mlps(decoder, config, generator), train)


def build_mlps(decoder: Any, config: MLPGraftConfig, generator: torch.Generator | None) -> dict[int, tuple[str, Fast]]:
    """The name of each layer's MLP, and the memories to add to it; the model is not changed."""
    expect_layers(decoder, config.layers)
    grafts: dict[int, tuple[str, Fast]] = {}
    for index in config.layers:
        layer = decoder.layers[index]
        name = next((name for name in _NAMES if isinstance(getattr(layer, name, None), nn.Module)), None)
        if name is None:
            raise ConfigError(f"layer {index}, a {type(layer).__name__}, has no {' or '.join(_NAMES)}")
        past = "layer_past" if "layer_past" in inspect.signature(type(layer).forward).parameters else "past_key_values"
        expect_keywords(layer, **{past: "takes no past_key_values, where memories keep their states"})
        mlp = getattr(layer, name)
        layout = _layout(mlp, f"layer {index}: the {type(mlp).__name__}", config.fast)
        rules = config.rules(layout.structure)
        for rule in rules:
            _check_silent(rule)
        weight = getattr(mlp, layout.last).weight
        kind = torch.promote_types(weight.dtype, torch.float32)
        place = {"device": weight.device, "dtype": kind if config.dtype is None else getattr(torch, config.dtype)}
        last, d_key = (None, layout.d_model) if config.fast == "whole" else (layout.last, layout.d_hidden)
        fast = Fast(layout.d_model, d_key, rules, last, layout.weights, f"MLP of layer {index}", **place)
        fast.reset_parameters(generator)
        _check_same(mlp, fast, index)
        grafts[index] = name, fast
    return grafts


def install_mlps(
    model: Any, decoder: Any, config: MLPGraftConfig, grafts: dict[int, tuple[str, Fast]], train: str
) -> Any:
    """Adds the memories that `build_mlps` made to the model; returns the model."""
    for index, (name, fast) in grafts.items():
        _install(getattr(decoder.layers[index], name), fast, index)
        layer = decoder.layers[index]
        layer.__class__ = with_base(layer.__class__, Handing)
    return announce(model, decoder, KEY, config, train)


def _install(mlp: Any, fast: Fast, index: int) -> Any:
    setattr(mlp, BRANCH, fast.train(mlp.training))
    mlp.layer_idx, mlp.__class__ = index, with_base(mlp.__class__, FastMLP)
    return mlp


def _layout(mlp: Any, who: str, fast: str) -> _Layout:
    """The layout of an MLP.

    Raises:
        ConfigError: a mixture of experts, a patched forward, quantised weights, another layout; for "whole" an unknown
            activation.
    """
    if hasattr(mlp, "experts") or hasattr(mlp, "router"):
        raise ConfigError(f"{who} is a mixture of experts, whose tokens go to different weights; graft other layers")
    if "forward" in vars(mlp):
        raise ConfigError(f"{who} has a forward that is not of its class, as where accelerate dispatches a model")
    ends = [name for name in _LAST if isinstance(getattr(mlp, name, None), nn.Module)]
    if len(ends) != 1:
        raise ConfigError(f"{who} ends in none of {', '.join(_LAST)}, or in several")
    for name, weight in mlp.named_parameters():
        if weight.dtype not in FLOATS:
            raise ConfigError(f"{who} has {name} quantised to {weight.dtype}; load it in floating point")
    last = getattr(mlp, ends[0])
    if not isinstance(last, nn.Linear):
        raise ConfigError(f"{who} ends in a {type(last).__name__}, not a linear layer: it is quantised or adapted")
    sizes = ends[0], last.in_features, last.out_features
    if fast == "last":
        return _Layout(*sizes, Matrix(), {})
    maps = {name for name, part in mlp.named_children() if isinstance(part, nn.Linear)}
    gated, plain = ([names for names in every if maps == {*names}] for every in (_GATED, _PLAIN))
    biased = {name for name in maps if getattr(mlp, name).bias is not None}
    if not (gated or plain) or (biased and (gated or biased != maps)):
        raise ConfigError(f"{who} has layers {', '.join(sorted(maps))}, which are no MLP of hecate's; use fast='last'")
    how: dict[str, Any] = {"activation": _activation(mlp, who), "d_hidden": last.in_features}
    if gated:
        weights = dict(zip(("w1", "w3", "w2"), gated[0], strict=True))
        return _Layout(*sizes, GatedMLP(**how), {name: f"{layer}.weight" for name, layer in weights.items()})
    parts = {f"w{n}": f"{layer}.weight" for n, layer in enumerate(plain[0], 1)}
    parts |= {f"b{n}": f"{layer}.bias" for n, layer in enumerate(plain[0], 1) if biased}
    return _Layout(*sizes, MLP(**how, bias=bool(biased)), parts)


def _activation(mlp: Any, who: str) -> Activation:
    """The activation of an MLP, recognised by its values."""
    act = next((getattr(mlp, name) for name in _ACTIVATIONS if callable(getattr(mlp, name, None))), None)
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    known: tuple[Activation, ...] = (SiLU(), GELU(), ReLU(), Tanh())
    if act is None:  # only the forward has it; `_check_same` compares that
        return known[0]
    for one in known:
        if torch.allclose(act(x), one.value(x), rtol=0, atol=1e-9):
            return one
    kinds = ", ".join(one.kind for one in known)
    raise ConfigError(f"{who} has the activation {type(act).__name__}, none of {kinds}; use fast='last'")


def _check_silent(rule: MemoryConfig) -> None:
    """Refuses a rule whose memories change although values are zero, or whose value map gets no gradient, as tested on
    small memories."""
    small, width = rule.chunk if rule.chunk < 4 else 4, 5
    deep = rule.structure.model_copy(update={"d_hidden": 6}) if rule.structure.kind != "matrix" else rule.structure
    rule = rule.model_copy(update={"chunk": small, "structure": deep, "on_nonfinite": "propagate"})
    source, whole = torch.Generator().manual_seed(0), deep.kind != "matrix"
    fast = FastWeights(width, width, rule, "memory", dtype=torch.float64, device="cpu")
    fast.reset_parameters(source)
    x = torch.randn(1, 3 * small, width, generator=source, dtype=torch.float64, device="cpu")
    initial = deep.init(width, width, dtype=torch.float64) if whole else None
    with torch.enable_grad():
        y, _ = fast(x, x, initial, None, {})
        (learns,) = torch.autograd.grad(y.square().sum() if whole else y.sum(), [fast.value.weight])
    rows = () if initial is None else tuple(w.expand(3 * small, *w.shape[1:]) for w in initial.values())
    start = deep.predict(rows, x[0]) if whole else torch.zeros_like(y)
    if not torch.allclose(y, start.expand_as(y), rtol=0, atol=1e-9):
        raise ConfigError(
            f"memory: bias {rule.bias.kind!r} with retention {rule.retention.kind!r} moves a memory although values "
            "are zero, and the model would not stay what it is; use dot, and retention none or decay towards the start"
        )
    if not bool(learns.any()):
        raise ConfigError(f"memory: bias {rule.bias.kind!r} gives values that start at zero no gradient; use dot or l2")


@torch.no_grad()
def _check_same(mlp: Any, fast: Fast, index: int) -> None:
    """Refuses an MLP whose forward computes another function than its memories at their start."""
    weight = next(mlp.parameters())
    width: int = fast.levels[0].value.in_features  # type: ignore[union-attr, assignment]
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, width, generator=source, device="cpu").to(weight)
    twin = with_attributes(mlp, _modules=dict(mlp._modules))
    try:
        with torch.random.fork_rng(devices=[]):
            before: Tensor = mlp(x)
            mine, _ = _install(twin, fast, index).with_states(x, None, write_mask=None, reset_mask=None)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(f"layer {index}: the forward of {type(mlp).__name__} is of another build ({error})") from None
    off = (mine - before).float().norm()
    if off > (0 if fast.last is not None else 20 * torch.finfo(before.dtype).eps * before.float().norm()):
        raise ConfigError(
            f"layer {index}: the forward of {type(mlp).__name__} does more than its layers say, as where it has "
            "dropout or scales; use fast='last', or another layer"
        )


# The modules that a graft adds to a running model.


PLACE = "mlp"
"""Key of the states of an MLP's memories in a cache layer."""
States = tuple[LayerState, ...]
Given = Mapping[str, Any]  # masks by name, bool `[B, T]` or None


class FastWeights(nn.Module):
    """A memory with given keys, values v = W x, W zero at first, and gates from x, without further projections.

    With zero values a memory stays at its start. The gradient of W is not zero at first; the gates get gradients once W
    is not zero.
    """

    def __init__(self, d_model: int, d_key: int, config: MemoryConfig, name: str, **place: Any) -> None:
        super().__init__()
        self.config, self.name = config, name
        weights = len(config.structure.shapes(d_key, d_model))
        sizes = Sizes(d_model, 1, d_key, d_model, config.writes, weights)
        self.gates = GateHeads(d_model, 1, config, d_key=d_key, **place)
        self.gating = None if config.gating.plain else GatingParameters(config, sizes, **place)
        self.value = blank(nn.Linear, d_model, d_model, bias=False, **place)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Sets the value map to zero, and gates to the rule's initial values."""
        nn.init.zeros_(self.value.weight)
        self.gates.reset_parameters(generator)
        if self.gating is not None:
            self.gating.draw(source_of(generator))

    def forward(
        self, x: Tensor, keys: Tensor, initial: Mapping[str, Tensor] | None, state: LayerState | None, masks: Given
    ) -> tuple[Tensor, LayerState]:
        """Output `[B, T, d_model]` and state, from x `[B, T, d_model]` and keys `[B, T, d_key]`, which also serve as
        queries."""
        q = k = keys.unsqueeze(2)
        v, gates, skip, after = self.value(x).unsqueeze(2), self.gates(x), None, None
        if self.gating is not None:
            where = Masks(masks.get("write_mask"), masks.get("reset_mask"))
            written, after = self.gating(x, q, k, v, gates, None if state is None else state.gating, where)
            (q, k, v, _, skip), gates = written, Gates(**written.gates)
        past = None if state is None else state.memory
        start = None if initial is None else dict(initial)
        y, memory = memory_scan(self.config, q, k, v, gates, state=past, initial=start, **masks, name=self.name)
        y = y if skip is None else y + skip
        return y.squeeze(2), LayerState(memory, None, None, gating=after or None)


class Fast(nn.Module):
    """The memories of an MLP, one for each period.

    Fields:
        last: the name of the layer that the memories are added to; None if the whole MLP is a memory.
        weights: names of the MLP's parameters by the names of the memory's weights; empty with `last`.
        mix: weight of each memory's output, `[memories, d_model]`; None for a single memory, and with `last`.
    """

    def __init__(
        self, d_model: int, d_key: int, rules: Sequence[MemoryConfig], last: str | None,
        weights: Mapping[str, str], name: str, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        names = [f"{name} (period {rule.chunk})" for rule in rules]
        levels = (FastWeights(d_model, d_key, *pair, **place) for pair in zip(rules, names, strict=True))
        self.last, self.weights, self.levels, self.mix = last, dict(weights), nn.ModuleList(levels), None
        if last is None and len(rules) > 1:
            self.mix = nn.Parameter(torch.empty(len(rules), d_model, **place))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Resets all parameters to their start: memories that change nothing, with equal weights."""
        for level in self.levels:
            level.reset_parameters(generator)  # type: ignore[operator]
        if self.mix is not None:
            nn.init.constant_(self.mix, 1 / len(self.levels))

    def forward(
        self, x: Tensor, keys: Tensor, initial: Mapping[str, Tensor] | None, states: States | None, masks: Given
    ) -> tuple[Tensor, States]:
        """The summed outputs of all memories for x `[B, T, d_model]` and keys `[B, T, d_key]`, and their states."""
        dtype: Any = self.levels[0].value.weight.dtype  # type: ignore[union-attr]
        x, keys = x.to(dtype), keys.to(dtype)
        if (write := masks["write_mask"]) is not None:  # attention may output NaN at padding, where it has no key
            x, keys = (item.masked_fill(~write.unsqueeze(-1), 0) for item in (x, keys))
        answers, after = [], []
        for index, level in enumerate(self.levels):
            y, state = level(x, keys, initial, None if states is None else states[index], masks)
            answers.append(y if self.mix is None else self.mix[index] * y)
            after.append(state)
        return sum(answers[1:], answers[0]), tuple(after)


class FastMLP(Holder):
    """Mixin for an MLP whose weights are the start of memories."""

    def forward(self, x: Tensor, *, hecate_call: tuple[Any, Given] | None = None) -> Tensor:
        """Output for x `[B, T, d_model]`, of the weights as written so far. `hecate_call`: the cache, and the masks."""
        if hecate_call is None:
            raise ConfigError(
                f"no masks reached the MLP of layer {self.layer_idx}: it was called on its own; call its layer or model"
            )
        past, masks = hecate_call
        if past is None:
            return self.with_states(x, None, **masks)[0]
        return remembering(past.layers[self.layer_idx]).answers(PLACE, self, x, **masks)

    def with_states(self, x: Tensor, states: States | None, **masks: Tensor | None) -> tuple[Tensor, States]:
        """The output `[B, T, d_model]` and the states after the last token."""
        fast = getattr(self, BRANCH)
        if fast.last is None:
            tensors = {name: self.get_parameter(parameter) for name, parameter in fast.weights.items()}
            initial = {n: w[None] if w.dim() == 2 else w[None, :, None] for n, w in tensors.items()}
            y, states = fast(x, x, initial, states, masks)
            return y.to(x.dtype), states
        linear, after = getattr(self, fast.last), states

        def last(hidden: Tensor) -> Tensor:
            nonlocal after
            beside, after = fast(x, hidden, None, states, masks)
            y = linear(hidden)
            return y + beside.to(y.dtype)

        y = super(FastMLP, with_attributes(self, **{fast.last: last})).forward(x)
        return y, after  # type: ignore[return-value]


class Handing(nn.Module):
    """Mixin for a decoder layer that passes masks and the cache to its MLP."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer's own forward, with the same arguments."""
        masks = kwargs.get(MASKS)
        past = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        name, mlp = next((name, part) for name, part in self.named_children() if isinstance(part, FastMLP))
        if masks is None:
            raise ConfigError(f"no masks reached layer {mlp.layer_idx}: it was called on its own; call its model")
        if past is not None:
            _expect_read(past, mlp.layer_idx)
        layer = with_attributes(self, **{name: partial(mlp, hecate_call=(past, masks))})
        return super(Handing, layer).forward(*args, **kwargs)


def _expect_read(past: Any, index: int) -> None:
    """Refuses a cache with tokens that the memories of an MLP have not read."""
    layer = past.layers[index] if index < len(past.layers) else None
    if layer is None or PLACE in getattr(layer, "memories", ()):
        return
    linear = getattr(layer, "has_previous_state", None)
    if any(linear.values()) if linear is not None else int(layer.get_seq_length()) > 0:
        raise ShapeError(
            f"past_key_values holds tokens that the MLP of layer {index} has not read; fill it with the grafted model"
        )


def with_attributes(module: Any, **attributes: Any) -> Any:
    """A shallow copy of a module, sharing its parameters, with some attributes replaced for the length of a call."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **attributes)
    return twin

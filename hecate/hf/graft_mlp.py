"""The MLPs of a model that people have as memories that start at their weights: `graft_mlp`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hecate.activation import GELU, Activation, ReLU, SiLU, Tanh
from hecate.checks import Count, Depth, expect_choice
from hecate.errors import ConfigError
from hecate.hf.graft import FLOATS, Train, announce, decoder_of, expect_keywords, expect_layers, freeze
from hecate.hf.grafted import BRANCH, Masks
from hecate.hf.grafted_mlp import Fast, FastMLP, FastWeights, Handing, with_base
from hecate.phi import Identity
from hecate.rule import MemoryConfig
from hecate.structure import MLP, GatedMLP, Matrix
from hecate.variant import Config

KEY = "hecate_mlp"
"""The key of the graft in a model's config."""
_NAMES = ("mlp", "feed_forward", "ffn")
_LAST = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_PLAIN = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


_HEBBIAN = MemoryConfig.model_validate({
    "bias": "dot", "retention": {"kind": "decay", "towards": "start"}, "algorithm": {"kind": "gd", "lr": 0.1},
    "chunk": 32, "commit": "chunk", "read": "before", "step": "normalized",
})  # fmt: skip


class MLPGraftConfig(Config):
    """Config of a graft into MLPs: all that is needed to load its weights again.

    Fields:
        version: of these fields.
        layers: the layers whose MLP goes on learning.
        memory: its rule; None is `in_place_ttt` for "last", and for "whole" a Hebbian one in chunks of 32 whose
        weights decay towards their start, its steps normalised. The MLP is structure and feature map, so these are
        left out (`glu`, `mlp` and `gated_mlp` mean the MLP's own), and so is what a rule asks of a layer around
        it, `layer_qk_norm` and the like.
    fast: "last" lets the last linear map learn, of the hidden layer's features; "whole" all of the MLP.
        periods: a memory for each, which commits every so many tokens; None is one memory as the rule says.
        dtype: of its weights; None is the model's, float32 where that is narrower.
    """

    version: Literal[1] = 1
    layers: tuple[Annotated[Depth, Field(ge=0)], ...] = Field(min_length=1)
    memory: MemoryConfig | None = None
    fast: Literal["last", "whole"] = "last"
    periods: tuple[Count, ...] | None = Field(None, min_length=1)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> MLPGraftConfig:
        rule, whole = self.rule, self.fast == "whole"
        structures = ("matrix", "mlp", "gated_mlp") if whole else ("matrix",)
        for field, plain in (("feature_map", ("identity", "glu")), ("structure", structures)):
            if (kind := getattr(rule, field).kind) not in plain:
                raise ConfigError(f"{kind!r}: the MLP itself is the {field}; leave it out", path=("memory", field))
        if rule.gating.pairs(rule.writes) > 1:
            why = f"writes={rule.writes} takes as many keys of a token, and an MLP makes one; use 1"
            raise ConfigError(why, path=("memory", "writes"))
        if rule.step == "raw" and rule.key_norm == "none" and not whole and rule.diverging(1e9) is not None:
            raise ConfigError(
                f"bias {rule.bias.kind!r} diverges with keys as long as hidden layers make them; set key_norm='l2', or "
                "step='normalized'",
                path=("memory", "step"),
            )
        for low, high in pairwise(self.periods or ()):
            if low >= high:
                raise ConfigError(f"must rise, from fast to slow, got {low} ahead of {high}", path=("periods",))
        self.rules(Matrix())
        return self

    @property
    def rule(self) -> MemoryConfig:
        """`memory`, or what stands for None."""
        if self.memory is not None:
            return self.memory
        return MemoryConfig.model_validate("in_place_ttt") if self.fast == "last" else _HEBBIAN

    def rules(self, structure: Any) -> tuple[MemoryConfig, ...]:
        """The rule of each memory, whose structure is a part of the MLP."""
        own = {"structure": structure, "feature_map": Identity()}
        if self.periods is None:
            return (self.rule.model_copy(update=own),)
        every = ({"chunk": period, "commit": "chunk" if period > 1 else "token"} for period in self.periods)
        return tuple(self.rule.model_copy(update=own | each) for each in every)


class _Layout(NamedTuple):
    """An MLP in hecate's words: the name of its last layer, its hidden width, and for "whole" the structure that it is
    and names of its parameters by those of the structure's weights."""

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
    """Makes the MLPs of some layers memories that start at their weights; the model itself, changed. [HF-MLP-D1]

        graft_mlp(model, layers=[4, 8], periods=(64,))                  # In-Place TTT: the last map learns as it reads
        graft_mlp(model, fast="whole", periods=(64, 512))               # levels, as HOPE starts them

    For an MLP y = W h(x) "last" gives y_t = (W + sum_p M_p,t) h(x_t), M_p a matrix memory of keys h(x_t) that starts at
    zero and commits every p tokens; "whole" y_t = sum_p c_p f(M_p,t, x_t), f the MLP and its weights where each M_p
    starts, c_p = 1/(number of periods) per channel at first. Values are W_v x, W_v zero at first: until it is trained
    nothing is written, and the model computes what it did, with "last" to the bit. Of the new parameters W_v and c
    learn from the first step on, the gates from the second.

    Names of weights stay; new ones have `.hecate.` in theirs. `save_pretrained` writes all of them, for
    `hecate.hf.load`. The state of a row has as many numbers as the weights that learn, for each period.

    Args:
        model: on its device, with its weights; none whose forward accelerate dispatches over devices, and no
            `PeftModel`, which comes after the graft. It may have a `graft` beside its attention.
        layers: indices from 0; None for all.
        memory: a rule, or what stands for one, that writes nothing where values are zero; None as in `MLPGraftConfig`.
        fast, periods: see `MLPGraftConfig`.
        train: "memory" freezes all weights but those of grafts; "all" none: the start is learned, too.
        dtype: of the new weights; None is the model's, float32 where that is narrower.
        generator: source of draws, where a gate has some; None uses torch's default generator.

    Raises:
        ConfigError: layers that are not there; mixtures of experts, quantised weights or none, an MLP of another
            build or, for "whole", with another activation; a rule that would not leave the function as it is, or would
            not learn. The model is then as it was.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    decoder = decoder_of(model, FastMLP)
    given: Any = range(len(decoder.layers)) if layers is None else layers
    given = tuple(given) if isinstance(given, range) else given
    fields = {"layers": given, "memory": memory, "fast": fast, "periods": periods, "dtype": name}
    config = MLPGraftConfig.model_validate(fields)
    expect_choice(train, "train", ("memory", "all"))
    return install_mlps(model, decoder, config, build_mlps(decoder, config, generator), train)


def build_mlps(decoder: Any, config: MLPGraftConfig, generator: torch.Generator | None) -> dict[int, tuple[str, Fast]]:
    """The name of the MLP of each layer and what it gets; changes nothing."""
    expect_layers(decoder, config.layers)
    made: dict[int, tuple[str, Fast]] = {}
    for index in config.layers:
        layer = decoder.layers[index]
        name = next((name for name in _NAMES if isinstance(getattr(layer, name, None), nn.Module)), None)
        if name is None:
            raise ConfigError(f"layer {index}, a {type(layer).__name__}, has no {' or '.join(_NAMES)}")
        past = "layer_past" if "layer_past" in inspect.signature(type(layer).forward).parameters else "past_key_values"
        expect_keywords(layer, **{past: "takes no past_key_values, where memories keep their states"})
        mlp = getattr(layer, name)
        layout = _layout(mlp, f"layer {index}: the {type(mlp).__name__}", config.fast)
        rules = config.rules(Matrix() if layout.structure is None else layout.structure)
        for rule in rules:
            _check_silent(rule)
        weight = getattr(mlp, layout.last).weight
        kind = torch.promote_types(weight.dtype, torch.float32)
        place = {"device": weight.device, "dtype": kind if config.dtype is None else getattr(torch, config.dtype)}
        last, d_key = (None, layout.d_model) if config.fast == "whole" else (layout.last, layout.d_hidden)
        fast = Fast(layout.d_model, d_key, rules, last, layout.weights, f"MLP of layer {index}", **place)
        fast.reset_parameters(generator)
        _check_same(mlp, fast, index)
        made[index] = name, fast
    return made


def install_mlps(
    model: Any, decoder: Any, config: MLPGraftConfig, made: dict[int, tuple[str, Fast]], train: str
) -> Any:
    """Puts what was built into the model."""
    if train == "memory":
        freeze(model)
    for index, (name, fast) in made.items():
        _install(getattr(decoder.layers[index], name), fast, index)
        layer: Any = decoder.layers[index]
        kind: Any = type(layer)
        layer.__class__ = with_base(kind, Handing)
    return announce(model, decoder, KEY, json.loads(config.model_dump_json()))


def _install(mlp: Any, fast: Fast, index: int) -> Any:
    setattr(mlp, BRANCH, fast.train(mlp.training))
    kind: Any = type(mlp)
    mlp.layer_idx, mlp.__class__ = index, with_base(kind, FastMLP)
    return mlp


def _layout(mlp: Any, who: str, fast: str) -> _Layout:
    """The build of an MLP.

    Raises:
        ConfigError: a mixture of experts, a forward that was patched, weights that are quantised, another build; for
            "whole" another activation.
    """
    if hasattr(mlp, "experts") or hasattr(mlp, "router"):
        raise ConfigError(f"{who} is a mixture of experts, whose tokens go to different weights; graft other layers")
    if "forward" in vars(mlp):
        raise ConfigError(f"{who} has a forward that is not of its class, as where accelerate dispatches a model")
    found = [name for name in _LAST if isinstance(getattr(mlp, name, None), nn.Module)]
    if len(found) != 1:
        raise ConfigError(f"{who} ends in none of {', '.join(_LAST)}, or in several")
    for name, weight in mlp.named_parameters():
        if str(weight.dtype).removeprefix("torch.") not in FLOATS:
            raise ConfigError(f"{who} has {name} quantised to {weight.dtype}; load it in floating point")
    last = getattr(mlp, found[0])
    if not isinstance(last, nn.Linear):
        raise ConfigError(f"{who} ends in a {type(last).__name__}, not a linear layer: it is quantised or adapted")
    sizes = found[0], last.in_features, last.out_features
    if fast == "last":
        return _Layout(*sizes, None, {})
    own = {name for name, part in mlp.named_children() if isinstance(part, nn.Linear)}
    gated, plain = ([names for names in every if own == {*names}] for every in (_GATED, _PLAIN))
    biased = {name for name in own if getattr(mlp, name).bias is not None}
    if not (gated or plain) or (biased and (gated or biased != own)):
        raise ConfigError(f"{who} has layers {', '.join(sorted(own))}, which are no MLP of hecate's; use fast='last'")
    how: dict[str, Any] = {"activation": _activation(mlp, who), "d_hidden": last.in_features}
    if gated:
        weights = dict(zip(("w1", "w3", "w2"), gated[0], strict=True))
        return _Layout(*sizes, GatedMLP(**how), {name: f"{own}.weight" for name, own in weights.items()})
    parts = {f"w{n}": f"{own}.weight" for n, own in enumerate(plain[0], 1)}
    parts |= {f"b{n}": f"{own}.bias" for n, own in enumerate(plain[0], 1) if biased}
    return _Layout(*sizes, MLP(**how, bias=bool(biased)), parts)


def _activation(mlp: Any, who: str) -> Activation:
    """The activation of an MLP, told by its values."""
    own = next((getattr(mlp, name) for name in _ACTIVATIONS if callable(getattr(mlp, name, None))), None)
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    known: tuple[Activation, ...] = (SiLU(), GELU(), ReLU(), Tanh())
    if own is None:  # in the forward alone, which is compared
        return known[0]
    for one in known:
        if torch.allclose(own(x), one.value(x), rtol=0, atol=1e-9):
            return one
    kinds = ", ".join(one.kind for one in known)
    raise ConfigError(f"{who} has the activation {type(own).__name__}, none of {kinds}; use fast='last'")


def _check_silent(rule: MemoryConfig) -> None:
    """Refuses a rule whose memories move although values are zero, or whose values would not learn; on small ones."""
    small, width = rule.chunk if rule.chunk < 4 else 4, 5
    deep = rule.structure.model_copy(update={"d_hidden": 6}) if rule.structure.kind != "matrix" else rule.structure
    rule = rule.model_copy(update={"chunk": small, "structure": deep, "on_nonfinite": "propagate"})
    source, whole = torch.Generator().manual_seed(0), deep.kind != "matrix"
    fast = FastWeights(width, width, rule, "memory", dtype=torch.float64, device="cpu")
    fast.reset_parameters(source)
    x = torch.randn(1, 3 * small, width, generator=source, dtype=torch.float64, device="cpu")
    initial = deep.init(width, width, dtype=torch.float64) if whole else None
    with torch.enable_grad():
        y, _ = fast(x, x, initial, None, Masks())
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
    """Refuses an MLP whose own forward is another function than that with memories at their start."""
    weight = next(mlp.parameters())
    width: int = fast.levels[0].value.in_features  # type: ignore[union-attr, assignment]
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, width, generator=source, device="cpu").to(weight)
    twin: Any = object.__new__(type(mlp))
    twin.__dict__.update(mlp.__dict__, _modules=dict(mlp._modules))
    try:
        with torch.random.fork_rng(devices=[]):
            before: Tensor = mlp(x)
            mine, _ = _install(twin, fast, index).masked(x, None, write_mask=None, reset_mask=None)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(f"layer {index}: the forward of {type(mlp).__name__} is of another build ({error})") from None
    off = (mine - before).float().norm()
    if off > (0 if fast.last is not None else 20 * torch.finfo(before.dtype).eps * before.float().norm()):
        raise ConfigError(
            f"layer {index}: the forward of {type(mlp).__name__} does more than its layers say, as where it has "
            "dropout or scales; use fast='last', or another layer"
        )

"""Giving a trained model of transformers a richer rule that starts as the same function: `upgrade`; and `Hosted`, a
memory in place of a layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import index
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from hecate.algorithm import Momentum
from hecate.checks import Depth, Size, Taps, expect_choice
from hecate.errors import ConfigError, not_known, shorten
from hecate.hf.adopt import Told, hook_models, layers_run, masks_of, official, rule_of
from hecate.hf.cache import remembering
from hecate.hf.layers import RULES, arguments_of, from_layer
from hecate.nn import Memory
from hecate.nn.gates import Firing
from hecate.nn.parameters import draw_normal
from hecate.phi import MLP
from hecate.rule import LAYER, MemoryConfig
from hecate.rule import RULES as NAMED
from hecate.variant import Config

Train = Literal["new", "all"]
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip
Start = Callable[[Memory, Memory], None]


HELD = "layer"
"""Key of the state of a `Hosted` memory in its cache layer."""


LAYERS = "hecate_layers"
"""Key of a model's upgraded layers in its config: a mapping from their names to `HostedConfig`s."""


class HostedConfig(Config):
    """Config of a memory in place of a layer: everything needed to load its weights again."""

    version: Literal[1] = 1
    memory: MemoryConfig
    layer_idx: Depth = Field(ge=0)
    d_model: Size = Field(ge=1)
    heads: Size = Field(ge=1)
    d_key: Size = Field(ge=1)
    d_value: Size = Field(ge=1)
    conv_kernel: Taps
    learned_initial: bool = False
    firing: Firing = "always"

    def build(self) -> Memory:
        """The memory, on the meta device."""
        sizes = self.model_dump(exclude={"version", "memory", "layer_idx"})
        return Memory(config=self.memory, name=f"layer {self.layer_idx}", device="meta", **sizes)


def describe_hosted(model: nn.Module) -> None:
    """Writes into the config of a model of transformers which of its layers are memories."""
    for root in [part for part in model.modules() if isinstance(part, PreTrainedModel)][:1]:
        configs = {}
        for name, part in root.named_modules():
            if isinstance(part, Hosted):
                how = {"memory": part.memory.config, "layer_idx": part.layer_idx, **arguments_of(part.memory)}
                configs[name] = HostedConfig(**how).model_dump(mode="json")
        if configs:
            setattr(root.config, LAYERS, configs)
        elif hasattr(root.config, LAYERS):  # left from another model with this config
            delattr(root.config, LAYERS)


class Hosted(Told):
    """A `hecate.nn.Memory` with the interface of transformers' linear layers.

    Its state is in the cache's layer for linear attention, which reorders, repeats and resets it with the cache, and
    can take back recorded tokens.
    """

    def __init__(self, memory: Memory, layer_idx: int) -> None:
        super().__init__()
        self.memory, self.layer_idx = memory, layer_idx

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """The memory's output for hidden_states `[B, T, d_model]`; its state is stored in the cache."""
        masks = masks_of(hidden_states, attention_mask, kwargs, cache_params)
        wide = hidden_states.to(self.memory.out.weight.dtype)
        if cache_params is None:
            y, _ = self.memory(wide, None, **masks)
        else:
            y = self._state_layer(cache_params).answers(HELD, self.memory, wide, **masks)
        return y.to(hidden_states.dtype)

    def _state_layer(self, cache: Any) -> Any:
        """The cache layer for the state; refuses one filled before the upgrade."""
        layer = remembering(cache.layers[self.layer_idx])
        if HELD not in layer.memories and any(layer.has_previous_state.values()):
            raise ConfigError(
                f"layer {self.layer_idx} of the cache was filled by the model before its upgrade; fill it anew"
            )
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        return layer


class Wider(NamedTuple):
    """A rule that contains others.

    Fields:
        contains: rules that it equals at some values of its parameters.
        adds: its addition to these, in words.
        rule: function from a memory to the fields of its config that change.
        layer: arguments of `hecate.nn.Memory` that change.
        start: function (new, old) that sets the parameters of the new memory so that it computes the same as the old
            one; parameters of unchanged shape are copied before.
        learns: beginnings of the names of the new parameters.
        after: another wider rule that is applied first.
    """

    contains: tuple[str, ...]
    adds: str
    rule: Callable[[Memory], dict[str, Any]] = lambda _: {}
    layer: Mapping[str, Any] = MappingProxyType({})
    start: Start = lambda new, old: None
    learns: tuple[str, ...] = ()
    after: str | None = None


def _repeat_rows(new: Memory, old: Memory) -> None:
    """Starts a gate per channel at the gate of its head."""
    for mine, theirs in ((new.gates.weight, old.gates.weight), (new.gates.bias, old.gates.bias)):
        mine["retain"].copy_(theirs["retain"].repeat_interleave(len(mine["retain"]) // new.heads, 0))


def _zero_gates(new: Any, _: Memory) -> None:
    """Starts gates with maximum 2 and without bias at zero weights, where they are 2 sigmoid(0) = 1."""
    for weight in new.gating.params.tensors.values():
        weight.zero_()


def _second_write(new: Any, old: Any) -> None:
    """Starts a second write with the first one's value, random keys, and an lr of 0 that has a gradient."""
    source = torch.Generator().manual_seed(0)
    for mine, theirs in ((new.qkv.weight, old.qkv.weight), (new.conv.weight.T, old.conv.weight.T)):
        q, k, v = theirs.split(old.splits)
        mine.copy_(torch.cat([q, k, k, v, v]))
    keys = new.qkv.weight.split(new.splits)[1][new.splits[1] // 2 :]
    draw_normal(keys, new.qkv.weight.float().square().mean().sqrt().item(), source)
    if old.conv.bias is not None:
        q, k, v = old.conv.bias.split(old.splits)
        new.conv.bias.copy_(torch.cat([q, k, k, v, v]))
    for mine, theirs in ((new.gates.weight, old.gates.weight), (new.gates.bias, old.gates.bias)):
        if "lr" in theirs:
            mine["lr"].zero_()[: new.heads].copy_(theirs["lr"])


def _two_writes(memory: Memory) -> dict[str, Any]:
    options = (memory.config.layer_options or LAYER).model_copy(update={"later_writes": "rectified"})
    return {"writes": 2, "layer_options": options}


def _cancelling_pairs(new: Memory, _: Memory) -> None:
    """Starts hidden units in pairs with the same input and opposite outputs: their sum is 0, and each has a
    gradient."""
    tensors = new.phi_learned.tensors
    w_in, w_out = tensors["w_in"], tensors["w_out"]  # [H, D, F], [H, F, D]
    source = torch.Generator().manual_seed(0)
    draw_normal(w_in, w_in.shape[1] ** -0.5, source)
    draw_normal(w_out, w_out.shape[1] ** -0.5, source)
    w_in[..., 1::2] = w_in[..., ::2]
    w_out[:, 1::2] = -w_out[:, ::2]


def _channels(memory: Memory) -> dict[str, Any]:
    return {"retention": memory.config.retention.model_copy(update={"channels": True})}


def _momentum(memory: Memory) -> dict[str, Any]:
    """Config with a momentum gate that is 0 at 0 and has a derivative there, unlike a sigmoid, which is 0 only at
    -infinity."""
    config = memory.config
    options = (config.layer_options or LAYER).model_copy(update={"momentum": "rectified"})
    return {"algorithm": Momentum(lr=config.algorithm.lr, momentum=0.0), "layer_options": options}


_HEAD = {"channels": True, "top": 2.0, "bias": False}
WIDER: dict[str, Wider] = {
    "kda": Wider(("gated_delta",), "a decay per channel", _channels, start=_repeat_rows, learns=("gates.",)),
    "gated_delta_2": Wider(
        RULES, "a decay, an erase gate and a value gate per channel",
        lambda _: {"gating": {"kind": "heads", "erase": _HEAD, "value": _HEAD}},
        start=_zero_gates, learns=("gating.",), after="kda",
    ),
    "delta_product": Wider(
        RULES, "a second write a token, of random keys", _two_writes,
        start=_second_write, learns=("qkv.", "conv.", "gates."),
    ),
    "momentum": Wider(RULES, "momentum of the inner step", _momentum, learns=("gates.",)),
    "mlp_phi": Wider(
        RULES, "a learned feature map x + W_2 gelu(W_1 x)",
        lambda memory: {"feature_map": MLP(d_hidden=2 * memory.d_key)},
        start=_cancelling_pairs, learns=("phi_learned.",),
    ),
    "learned_initial": Wider(RULES, "a learned start", layer={"learned_initial": True}, learns=("initial.",)),
    "firing": Wider(RULES, "a gate that chooses the tokens to write", layer={"firing": "learned"}, learns=("gates.",)),
}  # fmt: skip
"""Rules that contain the gated delta rule or KDA."""
NOT_WIDER = {
    "comba": "it is the rule only where c = sigmoid(a) ends, at 1, and a gate at its end does not learn",
    "titans_linear": "its decay does not come before the gradient; 'momentum' has what it adds",
}


class Upgrade(NamedTuple):
    """The report of `upgrade`; `str` gives a readable text.

    Fields:
        rule: the rule that the layers run now.
        layers: names of the layers.
        new: names of the model's parameters that are new, or have another shape.
    """

    rule: str
    layers: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        return layers_run(self.layers, f"{self.rule}, which adds {WIDER[self.rule].adds}")


def upgrade(model: Any, rule: str, layers: Sequence[int] | None = None, *, train: Train = "all") -> Upgrade:
    """Replaces a model's linear layers by memories of a richer rule that compute the same function. [HF-UPGRADE-D1]

        print(hecate.hf.upgrade(model, "gated_delta_2"))
        Trainer(model, ...).train()

    At some values of its new parameters, every rule of `WIDER` equals the rule of the layers: it starts there, and
    every new parameter has a gradient there. Trained parameters stay as they are. An upgraded layer is a `Hosted`
    memory; it can be upgraded again, to another rule.

    Args:
        model: a model of transformers, on its device, adopted or not.
        rule: a name of `WIDER`.
        layers: numbers of layers of the model; None takes every layer of a delta rule.
        train: "new" freezes all parameters except new ones; "all" does not change which are frozen.

    Raises:
        TypeError: `model` is not a torch module.
        ConfigError: a rule that does not contain that of a layer, by name; no such layers; layers that `from_layer`
            refuses, or that accelerate dispatches. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"upgrade takes a torch module, got a {type(model).__name__}; from_pretrained gives one")
    expect_choice(train, "train", get_args(Train))
    if layers is not None:
        layers = _numbers(layers)
    targets = _layers(model, layers)
    if not isinstance(rule, str) or rule not in WIDER:
        raise ConfigError(_not_wider(rule, targets))
    upgraded: dict[str, tuple[Hosted, set[str]]] = {}
    for name, layer in targets.items():
        memory = layer.memory if isinstance(layer, Hosted) else from_layer(layer)
        wide, new = widened(memory, rule, name)
        upgraded[name] = Hosted(wide, layer.layer_idx).train(layer.training), new
        for attribute in _HOOKS:  # the same dictionaries, so that handles can still remove their hooks
            setattr(upgraded[name][0], attribute, getattr(layer, attribute))
    learns = tuple(f"{name}.memory.{key}" for name, (_, new) in upgraded.items() for key in sorted(new))
    every = list(model.named_modules(remove_duplicate=False))
    if train == "new":
        model.requires_grad_(False)
    for name, (hosted, new) in upgraded.items():
        if train == "new":
            hosted.requires_grad_(False)
            for key in new:
                hosted.memory.get_parameter(key).requires_grad_()
        for place in [place for place, part in every if part is targets[name]]:  # a layer may be in several places
            parent, _, last = place.rpartition(".")
            setattr(model.get_submodule(parent), last, hosted)
    hook_models(model)
    describe_hosted(model)
    return Upgrade(rule, tuple(upgraded), learns)


def _numbers(layers: Any) -> tuple[int, ...]:
    """Numbers of layers from any iterable; refuses an empty one."""
    try:
        numbers = tuple(map(index, layers))
    except TypeError:
        numbers = ()
    if not numbers:
        raise ConfigError(f"layers must be numbers of layers, such as [0], or None for all, got {shorten(layers)}")
    return numbers


def _layers(model: nn.Module, numbers: Sequence[int] | None) -> dict[str, Any]:
    """The layers of a delta rule by name: those with these numbers, or all."""
    every = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, Hosted) or rule_of(official(type(part))) in RULES
    }
    known = {part.layer_idx: name for name, part in every.items()}
    for number in numbers or ():
        if number not in known:
            raise ConfigError(
                f"layers={list(numbers or ())}: layer {number} is none of a delta rule; they are {[*known]}"
            )
    layers = {name: part for name, part in every.items() if numbers is None or part.layer_idx in numbers}
    if not layers:
        raise ConfigError(f"the {type(model).__name__} has no layer of {' or '.join(RULES)} to upgrade")
    for name, part in layers.items():
        if hasattr(part, "_hf_hook"):
            raise ConfigError(f"accelerate dispatches {name}; upgrade the model first, and dispatch it then")
    return layers


def rule_name(config: MemoryConfig) -> str:
    """Name of a config's rule as in `WIDER`: kda with a decay per channel, else gated_delta."""
    return "kda" if config.retention.gate_form.channels else "gated_delta"


def _not_wider(rule: str, layers: dict[str, Any]) -> str:
    if not isinstance(rule, str) or rule not in {*NOT_WIDER, *NAMED}:
        return f"unknown rule {shorten(rule)}{not_known(rule, WIDER)}"
    if rule in NOT_WIDER:
        return f"rule {rule!r} cannot take the layers over: {NOT_WIDER[rule]}; there are {', '.join(WIDER)}"
    name, first = next(iter(layers.items()))
    has = rule_name((first.memory if isinstance(first, Hosted) else from_layer(first)).config)
    if rule == has:
        return f"rule {rule!r} is that of {name} already; there are {', '.join(WIDER)}"
    config, base = NAMED[rule].config, NAMED[has].config
    other = [
        f"{field} {getattr(value, 'kind', value)!r}"
        for field, value in vars(config).items()
        if field not in ("key_norm", "query_scale") and not field.startswith("layer_")
        if getattr(value, "kind", value) != getattr(getattr(base, field), "kind", getattr(base, field))
    ]
    differs = ", ".join(other) or "one decay for a head"
    return (
        f"rule {rule!r} does not contain {has}, which is that of {name}: it has {differs}; there are {', '.join(WIDER)}"
    )


@torch.no_grad()
def widened(memory: Memory, rule: str, name: str = "memory") -> tuple[Memory, set[str]]:
    """A memory of a wider rule that computes the same function as the given one, and the names of its new parameters.

    Raises:
        ConfigError: a rule that does not contain the memory's, or that the memory has already.
    """
    wider, kind, first = WIDER[rule], rule_name(memory.config), set[str]()
    if wider.after is not None and kind in WIDER[wider.after].contains:
        memory, first = widened(memory, wider.after, name)
    if rule_name(memory.config) not in wider.contains:
        raise ConfigError(f"rule {rule!r} contains {', '.join(wider.contains)}, and {name} is {kind} already")
    options = arguments_of(memory)
    config = memory.config.model_copy(update=wider.rule(memory))
    if config == memory.config and wider.layer.items() <= options.items():
        raise ConfigError(f"{name} has {wider.adds} already: rule {rule!r} adds nothing to it")
    like = memory.out.weight
    place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": torch.Generator().manual_seed(0)}
    with warnings.catch_warnings():  # they would be about initial values that are overwritten
        warnings.simplefilter("ignore")
        new = Memory(config=config, name=name, **{**options, **wider.layer, **place})
    old, shapes = memory.state_dict(), {key: value.shape for key, value in new.state_dict().items()}
    same = {key: value.clone() for key, value in old.items() if shapes.get(key) == value.shape}
    new.load_state_dict(same, strict=False, assign=True)  # each in its own dtype
    wider.start(new, memory)
    before = {(key, p.shape) for key, p in memory.named_parameters()}
    learned = {key for key, p in new.named_parameters() if (key, p.shape) not in before}
    if strange := {key for key in learned if not key.startswith(wider.learns)}:
        raise ConfigError(f"{name} has {', '.join(sorted(strange))}, of which rule {rule!r} knows no start")
    for key, p in memory.named_parameters():  # frozen parameters stay frozen
        if key not in learned:
            new.get_parameter(key).requires_grad_(p.requires_grad)
    new.warn_if_unstable(name, new.qk_norm)
    return new.train(memory.training), learned | first

"""Gate heads: inner learning rate, kept fraction and momentum from the token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, softplus

from hecate.checks import expect_choice
from hecate.distributed import overwrite
from hecate.errors import ConfigError
from hecate.gating.heads import inverse_sigmoid, rate_start, spread
from hecate.nn.blocks import EXACT
from hecate.nn.parameters import draw_normal, source_of, unheard
from hecate.retention import GateForm
from hecate.rule import LAYER, Gates, MemoryConfig
from hecate.tape.bridge import without_autocast

Firing = Literal["always", "learned"]
GATES = "lr", "retain", "momentum"
ROOT = 16  # GLA's temperature
RATES, STEPS = (1.0, 16.0), (1e-3, 1e-1)  # KDA's A and dt
STD = 0.02  # of the released models' linear layers
Start = float | tuple[float, ...]  # of all heads, or of each
Starts = dict[str, Start]


def start_logit(start: float, power: int = 1) -> float:
    """The logit of a sigmoid whose root of `power` is `start`, kept away from its ends."""
    # A gate that starts at exactly 0 or 1 could never leave it.
    return inverse_sigmoid(min(max(start, 1e-4), 1 - 1e-4) ** power)


def fill_start(bias: Tensor, start: Start, logit_of: Callable[[float], float] = start_logit) -> None:
    """Biases `[rows]` at the logit of a number, or of one for each head's rows."""
    starts = start if isinstance(start, tuple) else (start,)
    biases = torch.empty(bias.shape, dtype=bias.dtype, device="cpu")
    for rows, level in zip(biases.chunk(len(starts)), starts, strict=True):
        rows.fill_(logit_of(level))
    overwrite(bias, biases)


class RetainForm(nn.Module):
    """The function that makes a retain gate of its logits, as `GateForm` describes it. Parameters: `rate`, log A of the
    functions "softplus" and "bounded"; `down`, the first of the two maps of a low-rank head, shared by all heads.
    [NN-GATE-D2]

    Shapes: logits `[..., rows]`, rows H or H P, to gates `[..., H]` or `[..., H, P]`; `down` takes `[..., width]`, and
    what it returns has the width `inputs`.
    """

    def __init__(self, form: GateForm, heads: int, width: int, *, d_head: int, d_phi: int, **place: Any) -> None:
        super().__init__()
        rank = d_head if form.rank == "head" else form.rank
        self.form, self.inputs = form, width if rank is None else rank
        self.shape = (heads, d_phi) if form.channels else (heads,)
        self.rows = math.prod(self.shape)
        self.down: Any = None if rank is None else nn.Parameter(torch.empty(rank, width, **place))
        self.low, self.rated = rank is not None, form.squash in ("softplus", "bounded")  # torch looks up by a call each
        self.rate: Any = nn.Parameter(torch.empty(heads, **place)) if self.rated else None
        self.plain = form.squash == "sigmoid" and rank is None and not form.channels

    def project(self, x: Tensor) -> Tensor:
        """Input of the linear map that gives the logits: x, or for a low-rank head W_1 x."""
        return linear(x, self.down.to(x.dtype)) if self.low else x

    def forward(self, logit: Tensor) -> Tensor:
        """The gates."""
        if self.form.channels:
            logit = logit.unflatten(-1, self.shape)
        if self.rated:
            rate = self.rate.to(logit.dtype).exp().reshape(-1, *[1] * (len(self.shape) - 1))
            if self.form.squash == "bounded":
                return torch.exp(self.form.lowest * torch.sigmoid(rate * logit))
            return torch.exp(-rate * softplus(logit))
        if self.form.squash == "root":
            return torch.exp(logsigmoid(logit) / ROOT)
        return torch.sigmoid(logit)

    def draw(self, source: torch.Generator, weight: Tensor, bias: Tensor, start: Any, *, fill: float = 0.0) -> None:
        """Draws starting values; a head that is not of low rank has all its weights at `fill`."""
        if self.down is None:
            nn.init.constant_(weight, fill)
        else:
            draw_normal(self.down, STD, source)
            draw_normal(weight, STD, source)
        if self.rate is None:
            fill_start(bias, start, partial(start_logit, power=ROOT if self.form.squash == "root" else 1))
            return
        if self.form.squash == "bounded":
            nn.init.zeros_(self.rate)
            fill_start(bias, start, self._bounded_logit)
            return
        overwrite(self.rate, spread(tuple(self.rate.shape), source, *RATES))
        overwrite(bias, rate_start(tuple(bias.shape), source, *STEPS))

    def _bounded_logit(self, retain: float) -> float:
        share = math.log(min(retain, 1 - 1e-4)) / self.form.lowest
        return -math.log(1 / min(share, 1 - 1e-4) - 1)


def gate_starts(config: MemoryConfig, heads: int | None = None) -> Starts:
    """The gates that a rule has, with the values between 0 and 1 at which their sigmoids start: one for each of
    `heads` where these differ."""
    momentum = config.algorithm.default_momentum
    retention = config.retention
    starts: Starts = {"lr": config.algorithm.lr_start * (1 if config.algorithm.dampens else 1 - momentum)}
    if retention.uses_retain:
        starts["retain"] = retention.default_retain
        if retention.per_head and heads is not None:
            starts["retain"] = retention.default_retains(heads)
    if config.algorithm.uses_momentum:
        starts["momentum"] = momentum
    return {name: start for name, start in starts.items() if name not in config.gating.replaces}


def _rectified_tanh(logit: Tensor) -> Tensor:
    """max(0, tanh logit), with the derivative of tanh."""
    risen = torch.tanh(logit)
    return risen + (risen.clamp(min=0) - risen).detach()


def _check_gates(config: MemoryConfig, starts: Starts) -> None:
    """Refuses options of gates that a rule does not have, and a start that only a bias could give."""
    options, algorithm = config.layer_options or LAYER, config.algorithm
    if options.momentum != "sigmoid" and "momentum" not in starts:
        reason = f"algorithm {algorithm.kind!r} has no momentum gate"
        raise ConfigError(f"{options.momentum!r}: {reason}", path=("layer_options", "momentum"))
    if options.later_writes != "sigmoid" and (config.writes == 1 or "lr" not in starts):
        reason = f"writes={config.writes} with gating {config.gating.kind!r} has no lr gate of later writes"
        raise ConfigError(f"{options.later_writes!r}: {reason}", path=("layer_options", "later_writes"))
    if options.lr_bias:
        return
    path = ("layer_options", "lr_bias")
    if "lr" not in starts:
        raise ConfigError(f"False: gating {config.gating.kind!r} has no lr gate of the layer's", path=path)
    if starts["lr"] != 0.5:
        half = f"without a bias lr starts at half its ceiling, and algorithm {algorithm.kind!r} has it start at"
        raise ConfigError(f"False: {half} {starts['lr']:g} of it (algorithm.lr_start, less momentum)", path=path)


def check_firing(config: MemoryConfig, firing: Firing) -> None:
    """Refuses a firing gate where an idle token would still change the memory."""
    expect_choice(firing, "firing", get_args(Firing))
    if firing == "always":
        return
    if config.writes > 1 or not config.gating.plain:
        setting = f"writes={config.writes}" if config.writes > 1 else f"gating {config.gating.kind!r}"
        raise ConfigError(f"firing='learned' holds one lr per token back, and {setting} makes others", path=("firing",))
    if config.retention.uses_retain and "retain" in config.gating.replaces:
        still = "makes the retain of idle tokens 1, and gating 'heads' with retain=False leaves it as it is"
        raise ConfigError(f"firing='learned' {still}; set gating.retain, or firing='always'", path=("firing",))
    if config.algorithm.kernel_form() is None:
        raise ConfigError(
            f"firing='learned' makes the lr of idle tokens 0, but algorithm {config.algorithm.kind!r} takes their "
            "gradients into its own state whatever lr is; use algorithm 'gd' or 'momentum', or firing='always'",
            path=("firing",),
        )
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(1, 4, 4, generator=generator, dtype=torch.float64, device="cpu")
    memory = config.retention.start(draw)
    idle = config.retention.step(memory, torch.zeros_like(memory), memory.new_ones(1))
    if not torch.allclose(idle, memory, rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"firing='learned' makes the retain of idle tokens 1, but retention {config.retention.kind!r} changes a "
            "memory even so; use retention 'none' or 'decay', or firing='always'",
            path=("firing",),
        )


HeldGates = tuple[RetainForm | None, nn.ParameterDict, nn.ParameterDict]


def hold_gates(
    config: MemoryConfig, starts: Starts, heads: int, width: int, d_key: int, lr_bias: bool = True, **place: Any
) -> HeldGates:
    """Empty parameters for the gates of inputs `width` wide, which `draw_gates` fills: the retain gate's form, and
    weights `[H, width]` and biases `[H]` for every gate. lr has no bias without `lr_bias`; retain has more rows where
    there is a gate per channel."""
    shapes, form = dict.fromkeys(starts, (heads, width)), None
    if "lr" in starts:
        shapes["lr"] = (config.writes * heads, width)
    if "retain" in starts:
        d_phi = config.feature_map.output_dim(d_key)
        form = RetainForm(config.retention.gate_form, heads, width, d_head=d_key, d_phi=d_phi, **place)
        shapes["retain"] = (form.rows, form.inputs)
    weight = nn.ParameterDict({name: torch.empty(shape, **place) for name, shape in shapes.items()})
    biased = {name: shape[0] for name, shape in shapes.items() if name != "lr" or lr_bias}
    return form, weight, nn.ParameterDict({name: torch.empty(rows, **place) for name, rows in biased.items()})


def draw_gates(starts: Starts, gates: HeldGates, source: torch.Generator, fill: float = 0.0) -> None:
    """Weights at `fill`, biases at the starting values; a retain gate of low rank or softplus draws from `source`."""
    form, weight, bias = gates
    for name, start in starts.items():
        if form is not None and name == "retain":
            form.draw(source, weight[name], bias[name], start, fill=fill)
        else:
            nn.init.constant_(weight[name], fill)
            if name in bias:
                fill_start(bias[name], start)


class GateHeads(nn.Module):
    """lr = lr_max sigmoid(w.x + b), retain = sigmoid(w.x + b), momentum = sigmoid(w.x + b), per head.

    Gates see the token, never phi(k). At initialisation w = 0, so every gate starts at a stated value: lr at
    `algorithm.lr_start` of `algorithm.lr`, its ceiling, by default half of it, times (1 - momentum) if the algorithm
    has momentum and does not dampen lr itself, because momentum multiplies the effective step by 1/(1 - momentum);
    retain and momentum at the config's own values, kept 1e-4 away from 0 and 1. An item stored at the start thus halves
    after log(1/2)/log(retain) tokens. [NN-GATE-D1]

    The retention may ask for retain per phi channel, by a head of low rank, w = w_2 W_1, or by another function of w.x
    + b: `hecate.retention.Decay`. Low-rank weights start at N(0, 0.02^2), so retain starts near its stated value, and
    at it where x is 0. [NN-GATE-D2]

    With `firing`, a fourth gate g = sigmoid(w.x + b), 3/4 at the start, decides whether a token is written: h = 1[g >
    1/2] makes lr h lr and retain 1 - h (1 - retain), so an idle token neither writes nor decays. h passes its gradient
    to g unchanged (straight through). [CMS-FIRE-D1]

    Shapes: x `[B, T, d_model]` -> gates `[B, T, H]`, retain per channel `[B, T, H, P]`, in float32 or better; None for
    gates the rule lacks. P is the width of phi at keys of width `d_key` (default d_model // heads).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MemoryConfig,
        *,
        d_key: int | None = None,
        firing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.lr_max, self.writes = config.algorithm.lr, config.writes
        self.starts = gate_starts(config, heads) | (Starts(firing=0.75) if firing else {})
        d_key, options = d_model // heads if d_key is None else d_key, config.layer_options or LAYER
        self.rectified, self.later = options.momentum == "rectified", options.later_writes == "rectified"
        _check_gates(config, self.starts)
        gates = hold_gates(config, self.starts, heads, d_model, d_key, options.lr_bias, device=device, dtype=dtype)
        self.retain, self.weight, self.bias = gates

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Weights to zero, biases to the starting values; a retain gate of low rank or softplus draws from `generator`
        (None: torch's default generator)."""
        draw_gates(self.starts, (self.retain, self.weight, self.bias), source_of(generator))
        if self.later and "lr" in self.bias:
            nn.init.zeros_(self.bias["lr"].view(self.writes, -1)[1:])
        if self.rectified:
            start: Any = self.starts["momentum"]
            nn.init.constant_(self.bias["momentum"], math.atanh(min(start, 1 - 1e-4)))

    def forward(self, x: Tensor) -> Gates:
        """The gates of every token."""
        values = self.values(x)
        lr, retain, gate = values.get("lr"), values.get("retain"), values.get("firing")
        if lr is not None:
            lr = lr if self.lr_max == 1 else self.lr_max * lr
            lr = lr if self.writes == 1 else lr.unflatten(-1, (self.writes, -1))
        if gate is not None:
            # The difference is exactly zero; its gradient is that of the gate.
            fired = (gate > 0.5).to(gate.dtype) + (gate - gate.detach())
            lr = self.lr_max * fired if lr is None else lr * fired
            if retain is not None:
                fired = fired.unsqueeze(-1) if retain.dim() > fired.dim() else fired
                retain = retain * fired + (1 - fired)
        return Gates(lr, retain, values.get("momentum"))

    def plain(self) -> list[Tensor | None] | None:
        """Weight and bias of lr, of retain and of momentum, None for each that does not exist, if all gates are plain
        sigmoids of linear maps of x (lr times its ceiling); else None."""
        parts: Any = self._modules
        form, tensors = parts.get("retain"), list[Tensor | None]()
        if self.rectified or self.writes > 1 or "firing" in self.starts or not (form is None or form.plain):
            return None
        weights, biases = parts["weight"], parts["bias"]
        if weights._modules or biases._modules or not unheard((form, RetainForm)):
            return None  # parametrised, or with hooks
        for name in GATES:
            weight, bias = weights._parameters.get(name), biases._parameters.get(name)
            if bias is None and name in self.starts and getattr(biases, name, None) is not None:
                return None  # a computed bias, as after pruning
            tensors += weight, bias
        return tensors

    def values(self, x: Tensor) -> dict[str, Tensor]:
        """Every gate by name between 0 and 1, `[B, T, H]` (retain per channel `[B, T, H, P]`)."""
        parts: Any = self._modules  # read from here, as torch makes a call to look up each attribute
        gates, (retain, weights, biases) = {}, map(parts.get, ("retain", "weight", "bias"))
        x = x if x.dtype in EXACT else x.to(torch.promote_types(x.dtype, torch.float32))
        with without_autocast(x.device.type):
            for name in self.starts:
                form = retain if name == "retain" else None
                weight, bias = weights._parameters.get(name), biases._parameters.get(name)
                if weight is None or bias is None:  # parametrised, or without a bias
                    weight, bias = getattr(weights, name), getattr(biases, name, None)
                inputs = x if form is None else form.project(x)
                if weight.dtype != x.dtype:
                    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
                logit = linear(inputs, weight, bias)
                if name == "momentum" and self.rectified:
                    gates[name] = _rectified_tanh(logit)
                elif name == "lr" and self.later:
                    first, *others = logit.chunk(self.writes, -1)
                    gates[name] = torch.cat([torch.sigmoid(first), *map(_rectified_tanh, others)], -1)
                else:
                    gates[name] = torch.sigmoid(logit) if form is None else form(logit)
        return gates

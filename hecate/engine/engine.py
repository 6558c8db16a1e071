"""Engines, each a way to run a call that agrees with the token loop; and the choice of one. [ENG-ENGINE-D1]

    class Mine(Engine):
        name = "mine"

        def refuses(self, config):  # why it cannot run a config exactly, whatever the inputs
            return None if config.forms.linear else "it is for linear memories"

        def cost(self, plan):
            return 10.0 * plan.length

        def run(self, call, run=execute):
            ...
            return y, *states

Subclassing registers it, wherever the class is: `engine="mine"` asks for it, `engine="auto"` takes it if cheapest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hecate.engine.call import TRACED, Call, Plan, TensorsNeeded
from hecate.engine.features import faced, normalized, to_tokens
from hecate.engine.tokens import Carry, Tokens, cast, linear_block
from hecate.errors import ConfigError, not_known
from hecate.rule import MemoryConfig
from hecate.rule.rule import knobs_of
from hecate.structure import Memory
from hecate.tape import STEADY, Autodiff, Block, ByHand, Run, Tensors, differentiable, execute, is_traced, one, steady
from hecate.tape.bridge import compiled_alone

EngineName = str


class Engine(ABC):
    """A way to run calls. A subclass with a `name` is registered under it.

    It defines `cost` and `run`, and if it cannot run everything `refuses` and `unfit`. `run` is made of blocks, which a
    tape can record and torch can differentiate; an engine with a backward pass of its own also defines `forward` and
    `backward`.
    """

    name: ClassVar[str]
    truth: ClassVar[bool] = False  # whether it is the one that the others have to agree with
    automatic: ClassVar[bool] = True  # whether `auto` may take it
    steady: ClassVar[bool] = False  # whether a token's bits depend only on the tokens up to it, for `exact`
    transposes: ClassVar[bool] = False  # whether it can read memories by their transpose
    anchors: ClassVar[bool] = False  # whether it can forget towards the start
    bounds: ClassVar[bool] = False  # whether it can normalise steps by the curvature that a chunk's writes meet
    traceable: ClassVar[bool] = True  # whether torch.compile can trace it; else it is an operator there
    takes: ClassVar[tuple[str, ...]] = ()  # which of the gates erase, write, retain_value and floor it supports
    registry: ClassVar[dict[str, Engine]] = {}
    reason: ClassVar[str] = ""  # why it costs what it costs, where that is the same for all calls
    registrations: ClassVar[int] = 0  # so far: a choice made before the last one may be out of date

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            taken = cls if cls.name not in Engine.registry else type(Engine.registry[cls.name])
            # A class defined again, as in a notebook, replaces itself.
            again = (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
            if cls.name == "auto" or not again:
                raise ConfigError(f"there is an engine {cls.name!r} already; give {cls.__name__} another name")
            # ABC has not yet computed `__abstractmethods__`, and would allow an instance.
            names = sorted({name for base in cls.__mro__[1:] for name in getattr(base, "__abstractmethods__", ())})
            missing = ", ".join(n for n in names if getattr(getattr(cls, n), "__isabstractmethod__", False))
            if missing:
                gives = "an engine gives cost and run, a TokenEngine cost and scan"
                raise ConfigError(f"engine {cls.name!r} has no {missing}: {gives}; define {cls.__name__} with them")
            Engine.registry[cls.name] = cls()
            Engine.registrations += 1

    def refuses(self, config: MemoryConfig) -> str | None:
        """Reason why it is not exact for a config; None if it is."""
        return None

    def excludes(self, config: MemoryConfig) -> str | None:
        """Reason why it cannot run a config, whatever the inputs; None if it can."""
        if config.forms.transposed and not self.transposes:
            return f"it reads what memories predict, and {config.structure.named} is read by its transpose"
        if config.retention.anchored and not self.anchors:
            return f"it forgets towards zero, and retention {config.retention.kind!r} as configured towards the start"
        if config.blocks and not self.bounds:
            return "it takes steps by the length of keys, and step='normalized' by the curvature that writes meet"
        return self.refuses(config)

    def unfit(self, plan: Plan) -> str | None:
        """Reason why it cannot run calls of a plan although it supports their config: device, dtypes, masks, tracing,
        sizes.

        A plan has no tensors: `unfit`, `cost` and `about` are asked once for all calls that look alike. An engine that
        asks for `plan.tensors`, or anything else that only a call has, is asked again, with the call, every time."""
        return None

    def unable(self, plan: Plan) -> str | None:
        """The first reason why it cannot run calls of a plan, its config included; None if it can."""
        if (
            plan.traced and not self.traceable and not compiled_alone()
        ):  # first: the questions about a config may not be traceable either
            return TRACED
        config, known = plan.config, plan.config.refusals
        if torch.compiler.is_compiling():  # which cannot trace a cache
            known = {}
        if self not in known:
            known[self] = self.excludes(config)
        if (reason := known[self]) is not None:
            return reason
        for name in plan.general:
            # With bias dot no prediction is made, so the key that is written is the only key.
            if name not in self.takes and not (name == "write" and config.forms.target):
                return f"it does not know gates.{name}"
        return self.unfit(plan)

    @abstractmethod
    def cost(self, plan: Plan) -> float:
        """Microseconds, roughly: `auto` takes the least. `math.inf` leaves the call to others."""

    def about(self, plan: Plan) -> str:
        """A few words on its cost, for the log and `hecate show --engine`: by default its `reason`."""
        return self.reason

    def steps(self, plan: Plan | Call) -> int:
        """About how many steps one after the other torch.compile would unroll; 0 if few at any length."""
        return 0

    def autodiff(self, config: MemoryConfig) -> Autodiff:
        """Meaning of `autodiff="auto"`: autograd, which keeps what blocks make, for linear memories; else the tape."""
        return "torch" if config.forms.linear else "auto"

    @abstractmethod
    def run(self, call: Call, run: Run = execute) -> Tensors:
        """Outputs `[B, T, H, V]` and the new states' tensors in the order of `Call.flat`, in blocks that `run`
        executes."""

    def forward(self, call: Call, keeps: bool) -> tuple[Tensors, Any]:
        """The outputs of `run`, and the record for `backward` if `keeps` is set."""
        raise NotImplementedError

    def backward(self, call: Call, record: Any, cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Cotangents of `call.flat`."""
        raise NotImplementedError

    def program(self, plan: Plan, run: Run, *flat: Tensor | None) -> Tensors:
        """The `outputs` of a call as a function of its tensors, for `differentiate`."""
        return self.outputs(Call(plan, flat), run)

    def outputs(self, call: Call, run: Run) -> Tensors:
        """y in v's dtype, and the new states, none of which shares storage with an input."""
        plan, flat = call.plan, call.flat
        if type(self).backward is Engine.backward:
            y, *states = self.run(call, run)
        else:
            hand = ByHand(
                f"engine.{self.name}",
                lambda inputs, keeps: self.forward(Call(plan, inputs), keeps),
                lambda inputs, record, cotangents: self.backward(Call(plan, inputs), record, cotangents),
                lambda *inputs: self.run(Call(plan, inputs)),
            )
            y, *states = run(hand.block(), *flat, label="tokens")
        if y.dtype != plan.values:  # type: ignore[union-attr]
            y = one(run(cast(plan.values), y, label="outputs"))
        return y, *apart(states, flat, run, call.traced)


class TokenEngine(Engine):
    """An engine for tokens in phi-space: it defines `scan`, and `run` adds features before it, the normaliser after."""

    takes: ClassVar[tuple[str, ...]] = ("floor",)
    counts_along: ClassVar[bool] = False  # whether, with bias dot, a normaliser may be one more row of a matrix memory
    l2_norm: ClassVar[Block | None] = None  # a kernel of its own for key_norm="l2"

    @abstractmethod
    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Outputs `[B, T, H, V]` of tokens `[B, T, H, *]`, and the new state of the N = B H memories.

        Of the call it uses only the config and the place in the chunk."""

    def run(self, call: Call, run: Run = execute) -> Tensors:
        """Features, the scan, and the quotient by the normaliser."""
        tokens = to_tokens(call.config, call.inputs, call.params, call.plan.dtype, run, l2=self.l2_norm)
        if call.config.forms.transposed:
            tokens = faced(call.config, tokens, run)
        memories = call.memories
        if len(memories) > 1:
            return normalized(self.scan, call, tokens, run, along=self.counts_along)
        initial, carry = memories[0]
        y, carry = self.scan(call, tokens, carry, initial, run=run)
        return y, *carry.flat


def with_graph(name: str, program: Callable[..., Tensors], plain: Callable[..., Tensors]) -> ByHand:
    """A program whose derivative is that of the graph which its forward pass keeps."""

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        if not keeps:
            return program(*inputs), ()
        with torch.enable_grad():
            leaves = [None if item is None else item.detach().requires_grad_(differentiable(item)) for item in inputs]
            outputs: Any = program(*leaves)
        return tuple([item.detach() for item in outputs]), (*leaves, *outputs)

    def vjp(inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Tensors:
        leaves, outputs = record[: len(inputs)], record[len(inputs) :]
        moving = [item for item in leaves if differentiable(item)]
        pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
        ys, gs = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(ys, moving, gs, retain_graph=True, allow_unused=True))
        return tuple([next(grads) if differentiable(item) else None for item in leaves])

    return ByHand(name, forward, vjp, plain)


def apart(states: Sequence[Tensor | None], flat: Tensors, run: Run, traced: bool | None = None) -> list[Tensor | None]:
    """The states, with copies of tensors that no token has changed, such as an anchor, so that no result is an input or
    a view of one. `traced`: the value of `is_traced` for the inputs, if known."""
    traced = is_traced(*flat) if traced is None else traced
    storages = set()
    for item in flat:
        if item is not None and not traced:
            storages.add(item.untyped_storage().data_ptr())
    copies: list[Tensor | None] = []
    for item in states:
        shared = False
        if item is not None and item.is_floating_point():
            # torch.compile takes an address for a constant, and would compile again for every tensor.
            shared = any(item is x for x in flat) if traced else item.untyped_storage().data_ptr() in storages
        copies.append(one(run(COPY, item, label="state")) if shared else item)
    return copies


COPY = linear_block("copy", torch.clone, lambda g: g)


# The choice.


def one_retain(plan: Plan | Call) -> str | None:
    """Reason why a retention's step has no kernel where retain differs between cells, though it has one where not."""
    form = plan.config.forms.retention
    wide = plan.channels or "retain_value" in plan.general
    if isinstance(form, str) or not wide or not isinstance(reason := form.step(single=False), str):
        return None
    return f"retention {plan.config.retention.kind!r} with a retain for every channel has no kernel: {reason}"


def chunk_refusal(config: MemoryConfig) -> str | None:
    """Reason why an engine that takes every gradient at the current state is not exact for a config; None if it is."""
    if config.chunk == 1 and config.commit == "token":
        return None
    return f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"


def untold(config: MemoryConfig) -> str | None:
    """Reason why a rule cannot be passed to an operator as text: read back, it would be another rule, as where a kind
    has been redefined since. None if it can."""
    for knob in (*knobs_of(config.rule), config.feature_map):
        if type(knob)._registry.get(knob.kind) is not type(knob):
            return f"its operator is handed the rule as text, and {knob.kind!r} is another class by now"
    return None if config.text is not None else "its operator is handed the rule as text, which reads as another one"


def check_exact(config: MemoryConfig, asked: EngineName) -> None:
    """Refuses an engine, by name, that cannot run a config exactly, whatever the inputs."""
    if asked == "auto":
        return
    engine = Engine.registry.get(asked) if isinstance(asked, str) else None
    if engine is None:
        raise ConfigError(f"unknown engine {asked!r}{not_known(asked, ('auto', *Engine.registry))}")
    _refuse(asked, engine.excludes(config))


def choose(asked_of: Plan | Call, asked: EngineName = "auto") -> Engine:
    """The engine asked for, or for "auto" the cheapest one that can run the call, or calls of the plan. It is noted in
    the plan, for all its calls, unless an engine looks at tensors. `ConfigError` if the one asked for cannot."""
    plan = asked_of if isinstance(asked_of, Plan) else asked_of.plan
    exact = not torch.compiler.is_compiling() and STEADY.get()  # `steady`, without a frame
    known = (asked, exact, Engine.registrations, len(Engine.registry))
    choice = plan.choice  # read once: another thread may ask for another engine
    if choice[0] == known and not plan.by_tensors:
        return choice[1]
    if not plan.by_tensors:
        try:
            choice = plan.choice = known, _chosen(plan, asked)
        except TensorsNeeded:
            plan.by_tensors = True
    # An engine may have caught `TensorsNeeded`, and answered without the tensors.
    return _chosen(asked_of, asked) if plan.by_tensors else choice[1]


def _chosen(asked_of: Any, asked: EngineName) -> Engine:
    if asked != "auto":
        check_exact(asked_of.config, asked)
        engine = Engine.registry[asked]
        _refuse(asked, engine.unable(asked_of))
        if not engine.steady and steady():
            raise ConfigError(
                f"engine={asked!r} takes tokens in blocks, and exact asks for bits that no block changes: "
                "use engine='auto', or leave exact out"
            )
        return engine
    best, least, exact = None, math.inf, steady()
    for engine in Engine.registry.values():
        if not engine.automatic or (exact and not engine.steady):
            continue
        # Cost first, as `unable` may import what the engine needs.
        cost = float(engine.truth) if exact else engine.cost(asked_of)
        if cost < least and engine.unable(asked_of) is None:
            best, least = engine, cost
    if best is not None:
        return best
    raise ConfigError("no engine runs this call: " + "; ".join(f"{k}: {v}" for k, v in verdicts(asked_of).items()))


def explain(asked_of: Plan | Call, asked: EngineName = "auto", *, others: bool = False) -> tuple[str, str]:
    """The name of the engine that `choose` takes, and why; with the verdicts on the others if it gives no reason of its
    own, or if `others` is set."""
    engine = choose(asked_of, asked)
    if asked != "auto":
        return engine.name, "asked for"
    said = verdicts(asked_of)
    reason = said.pop(engine.name)
    rest = "; ".join(f"{name}: {why}" for name, why in said.items() if why)
    if reason and not others:
        return engine.name, reason
    reason = reason or "the cheapest that can"
    return engine.name, f"{reason} ({rest})" if rest else reason


def verdicts(asked_of: Any) -> dict[str, str]:
    """Each engine's verdict on a call or a plan: why it cannot run it, or else what it says about its cost."""
    return {name: engine.unable(asked_of) or engine.about(asked_of) for name, engine in Engine.registry.items()}


def exact_engines(config: MemoryConfig, *, length: int = 2, masked: bool = False) -> list[str]:
    """Names of the engines, besides the token loop, that can run a config on the CPU, with masks or without."""
    plan = Plan.sketch(config, length=length, channels=config.retention.gate_form.channels, masked=masked)
    others = [each for each in Engine.registry.values() if not each.truth]
    return [each.name for each in others if each.unable(plan) is None]


def loops(config: MemoryConfig) -> bool:
    """True if under `exact` only the token loop can run a config; its single tokens then have programs."""
    known: dict[Any, Any] = config.refusals
    if loops not in known:
        plan = Plan.sketch(config, length=1, channels=config.retention.gate_form.channels)
        others = [each for each in Engine.registry.values() if each.steady and not each.truth]
        known[loops] = all(each.unable(plan) is not None for each in others)
    return bool(known[loops])


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(
            f"engine={name!r} cannot run this memory exactly: {reason}; use engine='auto' or 'sequential'"
        )

"""Common base of all optimisers here: each is a `torch.optim.Optimizer` in every respect and declares its options once,
for the constructor, for parameter groups and for config files."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

import torch
from pydantic import Field
from pydantic.fields import FieldInfo
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from hecate.checks import expect_choice
from hecate.distributed import gathered, is_sharded, overwrite
from hecate.errors import ArgumentError, ConfigError, NonFiniteError, ShapeError, did_you_mean, not_known
from hecate.optim.tensors import State, agreed, as_matrix, local, outline, state_dtype, sum_is_finite
from hecate.tape.bridge import can_inspect, full_precision
from hecate.variant import Config, Variant

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
NOT_OFFERED = ("capturable", "fused")
OF_GROUPS = ("params", "param_names", "kind", "period", "reduce", "elapsed", "commits", *NOT_OFFERED)
"""Keys of a group that are not options of a step: torch's, a label, those of `Leveled`, and those `check` refuses."""
MatrixView = Literal["flatten", "last"]


class OptimizerKind(Variant, family="optimizer"):
    """Optimiser, which turns gradients into steps: a `factory` and, as fields, its arguments.

    A `MatrixOptimizer` has one as `Options`: the fields are arguments of its constructor and options of its groups
    too, where they may take the ends of their intervals (a momentum of 1) and tensors of one element.
    """

    factory: ClassVar[Callable[..., torch.optim.Optimizer]]
    windowed: ClassVar[bool] = True  # whether `Leveled` may pass it the mean of several gradients

    def trains(self, model: nn.Module) -> Named:
        """The parameters of a model that this kind trains, by name."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser for these parameter groups of a model."""
        return type(self).factory(groups, lr=lr, **self.options())

    def options(self) -> Group:
        """The arguments of `factory`."""
        return {name: getattr(self, name) for name in sorted(type(self).model_fields.keys() - {"kind", "fallback"})}


class Allowed(NamedTuple):
    """Allowed values of an option: one of `words`, or a number (`kind` float or int) from low to high."""

    words: tuple[Any, ...]
    kind: type | None = None
    low: float = 0
    high: float = math.inf

    def check(self, name: str, value: Any, slack: float = 0.0) -> None:
        """Refuses a value that is not allowed; a number may lie outside its bounds by `slack`."""
        if self.kind is None:
            return expect_choice(value, name, self.words)
        tensor = isinstance(value, Tensor)
        if (tensor and self.kind is float and not can_inspect(value)) or (not tensor and value in self.words):
            return
        number = value.item() if tensor and self.kind is float and value.numel() == 1 else value
        fits = type(number) is int or (self.kind is float and isinstance(number, float))
        if not fits or not self.low - slack <= number <= self.high + slack or number == math.inf:
            what = "an integer" if self.kind is int else "a finite number"
            bound = "" if self.high == math.inf else f" and at most {self.high}"
            raise ConfigError(f"{name} must be {what} of at least {self.low}{bound}, got {value!r}")


def allowed(field: FieldInfo) -> Allowed | None:
    """Allowed values of a field whose type is made of words, flags and numbers; None for other types.

    Ends of open intervals are allowed too, because experiments need them.
    """
    words: list[Any] = []
    kind: type | None = None
    limits: list[Any] = list(field.metadata)
    waiting: list[Any] = [field.annotation]
    while waiting:
        annotation = waiting.pop(0)
        if get_origin(annotation) in (Union, UnionType):
            waiting += get_args(annotation)
        elif get_origin(annotation) is Annotated:
            waiting.append(get_args(annotation)[0])
            limits += [limit for note in get_args(annotation)[1:] for limit in note.metadata]
        elif get_origin(annotation) is Literal:
            words += get_args(annotation)
        elif annotation is bool or annotation is type(None):
            words += (True, False) if annotation is bool else (None,)
        elif annotation in (int, float):
            kind = annotation
        else:
            return None
    low = max((getattr(x, end) for x in limits for end in ("ge", "gt") if hasattr(x, end)), default=0)
    tops = [x.le if hasattr(x, "le") else x.lt - (kind is int) for x in limits if hasattr(x, "le") or hasattr(x, "lt")]
    return Allowed(tuple(words), kind, low, min(tops, default=math.inf))


def signature_of(fields: dict[str, FieldInfo], positional: tuple[str, ...]) -> inspect.Signature:
    """Signature of a constructor: `params` and the `positional` fields, then the other fields by keyword only."""
    params = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in dict.fromkeys([*positional, *fields]):
        how = inspect.Parameter.POSITIONAL_OR_KEYWORD if name in positional else inspect.Parameter.KEYWORD_ONLY
        params.append(inspect.Parameter(name, how, default=fields[name].default, annotation=fields[name].annotation))
    return inspect.Signature(params)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the first caller outside of this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hecate.optim", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def name_of(group: Group, p: Tensor) -> str:
    """The parameter's name, or without names its index in the group and its shape."""
    place = next(i for i, other in enumerate(group["params"]) if other is p)
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} {list(p.shape)}"


def refuse_misspelt(group: Group, kind: str, options: Collection[str], others: Collection[str] = ()) -> None:
    """Refuses keys of a group that look like one of its `options` misspelt, or that are options of `others` only.

    Any other key is a label that a scheduler or the user put there: a `name`, an `initial_lr`, a `max_momentum`."""
    for word in group:
        close = did_you_mean(word, options, 0.8).startswith(" Did you mean")  # other advice is not on spelling
        label = not close or any(f"_{option}_" in f"_{word}_" for option in options)
        if word not in options and word not in OF_GROUPS and (word in others or not label):
            raise ConfigError(f"a group of {kind} has no option {word!r}{not_known(word, options)}")


Bucket = tuple[Group, list[Tensor], list[Tensor]]
ROUNDING = 1e-12  # torch's schedulers may end a little below 0


class MatrixOptimizer(Optimizer):
    """An optimiser that sees each parameter as a matrix of rows.

    A subclass says what state a parameter has (`held`, or `fresh_state`) and what one step does to a list of parameters
    of one device and dtype (`update`). It declares its options once: as fields of `Options`, which a config file may
    set too if it has a `kind`, and of `Extras`, which a file cannot set. All of them are arguments of its constructor,
    by keyword only except for those in `positional`.

    State exists from construction, so that the checkpoint of a fresh optimiser is complete; it is float32 or better for
    half-precision parameters, through `load_state_dict` as well. All gradients are checked before anything is written,
    by all processes of a mesh together. `step` draws no random numbers. Options belong to groups, so that schedulers
    and settings per group work; each step checks the numbers among them again.

    Shapes: a parameter of 2 dimensions is a matrix as it is; one of more is flattened to `[first, rest]`
    (`matrix="flatten"`) or `[rest, last]` (`"last"`); one of 1 is a single row, a scalar `[1, 1]`. An empty parameter
    has no state and takes no step. [OPT-BASE-D1]
    """

    class Options(OptimizerKind):
        """Options for the constructor and for config files."""

    class Extras(Config):
        """Options for the constructor only, or with a wider type there."""

        lr: NonNegative = 1e-3
        weight_decay: NonNegative = 0.0
        maximize: bool = False
        foreach: bool | None = None
        differentiable: bool = False
        on_nonfinite: Literal["raise", "skip", "propagate"] = "raise"
        state_dtype: Literal["full", "parameter"] = "full"
        matrix: MatrixView = "flatten"
        capturable: bool = False
        fused: bool | None = None

    positional: ClassVar[tuple[str, ...]] = ("lr",)
    held: ClassVar[tuple[str, ...]] = ()  # state entries that are shaped like the parameter
    structural: ClassVar[tuple[str, ...]] = ("state_dtype", "matrix")  # options that must be the checkpoint's
    carried: ClassVar[tuple[str, ...]] = ()  # attributes that copies and pickles include
    only_with: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {}  # option: (other, its values that it needs)
    allowed: ClassVar[Mapping[str, Allowed]]
    numbers: ClassVar[Mapping[str, float]]  # numeric options, with their largest values
    every: ClassVar[set[str]] = set()  # options of all these optimisers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        fields = {**cls.Options.model_fields, **cls.Extras.model_fields}
        fields.pop("kind")
        cls.every.update(fields)
        cls.allowed = {name: limits for name, field in fields.items() if (limits := allowed(field))}
        cls.numbers = {name: a.high for name, a in cls.allowed.items() if a.kind is float and None not in a.words}
        setattr(cls, "__signature__", signature_of(fields, cls.positional))  # noqa: B010 - unknown to mypy
        if config := vars(cls).get("Options"):
            config.factory, config.__doc__, config.__name__ = cls, cls.__doc__, cls.__name__

    def __init__(self, params: ParamsT, *args: Any, **named: Any) -> None:
        signature: inspect.Signature = getattr(type(self), "__signature__")  # noqa: B009
        if isinstance(params, nn.Module):
            kind = type(params).__name__
            raise ConfigError(f"params must be parameters, got the module {kind}; write {kind.lower()}.parameters()")
        try:
            bound = signature.bind(params, *args, **named)
        except TypeError as error:  # Python's own, without the name of the class
            known = [name for name in signature.parameters if name != "params"]
            unknown = next((name for name in named if name not in known), None)
            hint = f"; by place it takes params, {', '.join(self.positional)}"
            hint = hint if unknown is None else not_known(unknown, known)
            raise ArgumentError(f"{type(self).__name__} got {str(error).removeprefix('got ')}{hint}") from None
        bound.apply_defaults()
        super().__init__(params, self.prepared({k: v for k, v in bound.arguments.items() if k != "params"}))
        for name, (option, values) in self.only_with.items():
            # Not in `check`: a group that lacks the other option may have inherited this one from the constructor.
            setting, default = self.defaults[name], bound.signature.parameters[name].default
            acts = any(group[option] in values for group in self.param_groups)
            if (isinstance(setting, Tensor) or setting != default) and not acts:
                alone = f"{option} {' or '.join(map(repr, values))} alone, which no group has"
                raise ConfigError(f"{name}={setting} acts with {alone}; leave {name} out or set {option}")

    def prepared(self, options: Group) -> Group:
        """The defaults of groups, from the arguments of the constructor."""
        return {name: value for name, value in options.items() if name not in NOT_OFFERED or value}

    # For subclasses to define.

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """The state of a parameter before its first step, sharded as the parameter is: zeros for each of `held`."""
        return {name: self.zeros(p, group) for name in self.held}

    def zeros(self, p: Tensor, group: Group, *shape: int) -> Tensor:
        """Zeros in the dtype of state, of p's shape, layout and placement or of another shape, whole on its device."""
        dtype = state_dtype(p, group["state_dtype"])
        if shape:
            return torch.zeros(shape, dtype=dtype, device=p.device)
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)

    def rows_of(self, x: Tensor, group: Group) -> Tensor:
        """A parameter or gradient as a matrix of rows."""
        return as_matrix(x, group["matrix"])

    def sides(self, p: Tensor, group: Group) -> torch.Size:
        """Number of rows of a parameter, and their width."""
        return self.rows_of(outline(p), group).shape

    @abstractmethod
    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """One step on parameters of one device and dtype, in place.

        Tensors are this process's shards, or whole where `gathers` is True. Gradients are those of a loss to minimise
        (`maximize` has been applied), and finite unless `on_nonfinite` is "propagate". With `differentiable`, a state's
        entry is replaced by a new tensor; otherwise it is overwritten in place.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update")  # torch does not make this class abstract

    def gathers(self, group: Group, p: Tensor) -> bool:
        """True if a step needs the whole of a sharded parameter, which is then gathered; a subclass may need less."""
        return True

    def check(self, group: Group) -> None:
        """Refuses options that no step can be computed with; a subclass adds checks beyond its fields' types."""
        if isinstance(lr := group["lr"], Tensor) and lr.numel() != 1:
            raise ConfigError(f"Tensor lr must be 1-element, got shape {list(lr.shape)}")
        for name, limits in self.allowed.items():
            if name in group:
                limits.check(name, group[name])
        for name in NOT_OFFERED:
            if group.get(name):
                cure = "this optimiser has no kernel for it; leave it out, foreach is the fast path"
                raise ConfigError(f"{name}=True is not offered: {cure}")
        if group["foreach"] and group["differentiable"]:
            raise ConfigError("foreach and differentiable exclude each other; set one of them")

    def check_numbers(self, group: Group) -> None:
        """Refuses numbers set by a scheduler or the user that the constructor would refuse; allows for rounding."""
        for name, high in self.numbers.items():
            value = group[name]
            if type(value) is float and 0 <= value <= high and value != math.inf:
                continue
            if not isinstance(value, Tensor) or value.device.type == "cpu":
                self.allowed[name].check(name, value, ROUNDING)

    def examine(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        """Refuses gradients with which no step can be taken, before anything is changed."""

    # One step.

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure`, if given, computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.check_numbers(group)
        due = self._buckets()
        if bad := self._nonfinite(due):
            due = self._buckets(bad)
        for act in (self.examine, self._advance):
            for bucket in due:
                with full_precision(bucket[1][:1]):
                    act(*bucket)
        return loss

    def _buckets(self, left_out: Collection[Tensor] = ()) -> list[Bucket]:
        """Parameters with their gradients, by group, device, dtype and whether they are gathered."""
        buckets: dict[tuple[Any, ...], Bucket] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if (grad := p.grad) is None or not p.numel() or p in left_out:
                    continue
                if grad.layout is not torch.strided:
                    got = f"got {grad.layout} for {name_of(group, p)}"
                    cure = "give it to torch.optim.SparseAdam, or set sparse=False in its Embedding"
                    raise ConfigError(f"{type(self).__name__} takes dense gradients only, {got}; {cure}")
                whole = is_sharded(p) and self.gathers(group, p)
                _, params, grads = buckets.setdefault((number, p.device, p.dtype, whole), (group, [], []))
                params.append(p)
                grads.append(gathered(grad) if whole else local(grad))
        return list(buckets.values())

    def _nonfinite(self, due: list[Bucket]) -> set[Tensor]:
        """Parameters that this step leaves out, by `on_nonfinite`: the same on every process."""
        watched = [group for group in self.param_groups if group["on_nonfinite"] != "propagate"]
        bad: set[Tensor] = set()
        for group, params, grads in due:
            if group["on_nonfinite"] != "propagate" and can_inspect(grads[0]) and not sum_is_finite(grads):
                bad |= {p for p, grad in zip(params, grads, strict=True) if not bool(torch.isfinite(grad).all())}
        bad = agreed([p for group in watched for p in group["params"]], bad)
        fatal = [group for group in watched if bad and group["on_nonfinite"] == "raise"]
        names = [name_of(group, p) for group in fatal for p in group["params"] if p in bad]
        if names:
            some = f"{', '.join(names[:3])}{', ...' if names[3:] else ''}"
            cure = "Lower lr or clip gradients; on_nonfinite='skip' leaves such parameters as they are"
            raise NonFiniteError(f"the gradient of {some} holds NaN or infinity; nothing was changed. {cure}")
        return bad

    def _advance(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        states: list[State] = [self.state[p] for p in params]
        if not any(is_sharded(p) for p in params):
            return self.update(group, params, grads, states)
        whole = any(is_sharded(p) and self.gathers(group, p) for p in params)
        view = gathered if whole else local
        viewed = [{key: view(value) for key, value in state.items()} for state in states]
        values = [view(p) for p in params]
        self.update(group, values, grads, viewed)
        if whole:
            for p, value, state, entries in zip(params, values, states, viewed, strict=True):
                for entry, new in ((p, value), *((state[key], entries[key]) for key in state)):
                    if is_sharded(entry):  # other tensors were changed in place
                        overwrite(entry, new)

    # Groups, checkpoints, copies.

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group: checks its options and parameters, and makes their state."""
        if isinstance(param_group, dict):  # torch refuses anything else
            refuse_misspelt(param_group, type(self).__name__, self.defaults, self.every)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                if not p.is_floating_point() or p.layout != torch.strided:
                    got = f"{p.dtype if p.layout == torch.strided else p.layout} for {name_of(group, p)}"
                    cure = "give it to another optimiser (complex ones as torch.view_as_real)"
                    raise ConfigError(f"{type(self).__name__} updates dense real parameters, got {got}; {cure}")
                if is_sharded(p) and group["differentiable"]:
                    raise ConfigError(f"differentiable=True takes whole parameters, {name_of(group, p)} is not")
            self.check(group)
            states = {p: self.fresh_state(p, group) if p.numel() else {} for p in group["params"]}
        except BaseException:
            self.param_groups.pop()
            raise
        for p, state in states.items():
            self.state[p] = state

    def agree(self, group: Group, other: Group) -> None:
        """Refuses a checkpoint of another optimiser, or whose options give the state another meaning."""
        if foreign := sorted(self.every & other.keys() - group.keys()):
            raise ConfigError(
                f"the checkpoint has {', '.join(foreign)}, which {type(self).__name__} lacks: it is another optimiser's"
            )
        for key in self.structural:
            if key in other and other[key] != group[key]:
                written = f"the checkpoint was written with {key} = {other[key]!r}"
                raise ConfigError(f"{written}, this optimiser has {group[key]!r}; construct it with the checkpoint's")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; refuses one of other parameters or options before anything changes.

        torch casts state to its parameter's dtype, which rounds a float32 momentum of bfloat16 weights; here every
        entry keeps the dtype of a fresh state. [OPT-BASE-I2]
        """
        with self.register_load_state_dict_pre_hook(lambda _, state: self.examine_state(state)):  # after user hooks
            super().load_state_dict(state_dict)

    def examine_state(self, loaded: dict[str, Any]) -> None:
        """Checks a state dict against this optimiser's state; leaves a copy of its state for `__setstate__`."""
        groups, saved_groups = self.param_groups, loaded["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved_groups]:
            return  # torch reports it
        saved: dict[Tensor, State] = {}
        for group, other in zip(groups, saved_groups, strict=True):
            self.agree(group, other)
            for p, index in zip(group["params"], other["params"], strict=True):
                entries = loaded["state"].get(index, {})  # torch leaves out parameters without state
                saved[p] = _matching(name_of(group, p), self.state[p], entries)
        self._saved = saved

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.carried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["state"] |= self.__dict__.pop("_saved", {})
        super().__setstate__(state)
        for group in self.param_groups:  # the state may come from a version with fewer options
            for key, value in self.defaults.items():
                group.setdefault(key, value)


def _matching(name: str, fresh: State, saved: State) -> State:
    """A copy of a parameter's saved state, on the devices and in the dtypes of its fresh state."""
    if fresh.keys() != saved.keys():
        needed = f"this optimiser needs {sorted(fresh)}; construct it as it was when the checkpoint was written"
        raise ConfigError(f"the checkpoint's state of {name} holds {sorted(saved)}, {needed}")
    for key, value in fresh.items():
        if value.shape != saved[key].shape:
            shapes = f"{list(value.shape)} here and {list(saved[key].shape)} in the checkpoint"
            raise ShapeError(f"state {key!r} of {name} is {shapes}; load it into the same model")
    return {key: saved[key].detach().to(value.device, value.dtype, copy=True) for key, value in fresh.items()}

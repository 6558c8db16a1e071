"""A feature map `phi: R^d -> R^d_phi`: its parameters, its derivative, its declared traits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, NotRequired, TypedDict, TypeVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from hecate.checks import MAX_NUMBERS, check_shapes, check_size, without_storage
from hecate.errors import ConfigError, ShapeError
from hecate.tape import Block, Tensors
from hecate.tape.bridge import without_autocast
from hecate.tape.ops import torch_vjp
from hecate.variant import Variant


class Params(TypedDict):
    """Parameters of a feature map: `learned` ones are trained, `frozen` ones are drawn once and kept.

    Every tensor has a leading head axis `[H, ...]`; with `H = 1` it serves any number of heads.

    `position` is not a parameter, but is passed along with them, so that combinators need not read it: integers that
    broadcast to x's shape without its last axis, present for maps that need them.
    """

    learned: dict[str, Tensor]
    frozen: dict[str, Tensor]
    position: NotRequired[Tensor]


Parity = Literal["even", "odd", "none"]
Rising = Literal["everywhere", "odd_part", "none"]
Value = TypeVar("Value")


class Traits(NamedTuple):
    """Promises of a feature map, each verified by `hecate.testing.check_feature_map`."""

    non_negative: bool = False  # every feature >= 0
    kernel_non_negative: bool = False  # phi(x).phi(y) >= 0 for all x, y
    parity: Parity = "none"  # phi(-x) = phi(x), -phi(x), or neither
    degree: float | None = None  # phi(c x) = c^degree phi(x) for c > 0
    norm_bound: float | None = None  # upper bound of |phi(x)|^2 over all x
    is_random: bool = False  # frozen parameters are draws
    needs_position: bool = False  # phi depends on the token's position
    componentwise: bool = False  # feature i is the same function of x_i alone, for every i
    rising: Rising = "none"  # componentwise and strictly increasing, or only phi(x) - phi(-x) is, as relu's
    bounded_slope: bool = False  # |phi(x) - phi(y)| <= L |x - y| for some L
    forgets_length: bool = False  # phi(c x) = phi(x) for c > 0, except near 0 (with degree 0: everywhere)
    decodes: bool = False  # a linear map of the features gives x back, wholly or in part; never so for an even map
    linear_at: int | None = None  # features linear_at, linear_at + 1, ... are x_0, x_1, ... times one factor


def _checked_width(output_dim: Callable[..., int]) -> Callable[..., int]:
    @wraps(output_dim)
    def checked(self: FeatureMap, d: int) -> int:
        what = f"feature map {self.kind!r}: "
        check_size(d, what + "the width of inputs", "lower d_model or d_key")
        cure = "choose fewer features, or put a narrower `linear` before it with `compose`"
        what += f"d_phi for inputs of width {d}"
        return check_size(output_dim(self, d), what, cure, MAX_NUMBERS)

    return checked


def _checked_init(init: Callable[..., Params]) -> Callable[..., Params]:
    @wraps(init)
    def checked(self: FeatureMap, d: int, *, heads: int = 1, **how: Any) -> Params:
        self.output_dim(d)
        check_size(heads, "heads", "lower heads")
        check_shapes(self.shapes(d), f"lower heads, d_key or the features of {self.kind!r}", heads)
        return init(self, d, heads=heads, **how)

    return checked


class PowerForm(NamedTuple):
    """phi(x).phi(y) = sum_i coefficients[i] (x.y)^i for x, y of one width, and features of that kernel.

    Fields:
        coefficients: a_0 .. a_n.
        width: of the features.
        features: (x `[..., d]`, out or None) -> `[..., width]`, put into `out` if given.
        pullback: (x, cotangent of the features) -> that of x.
        spread: weights `[..., P]` of phi -> those of the features; its transpose is `gathered`.
        gathered: weights of the features -> those of phi `[..., P]`; undoes `spread`.
    """

    coefficients: tuple[float, ...]
    width: int
    features: Callable[..., Tensor]
    pullback: Callable[[Tensor, Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]
    gathered: Callable[[Tensor], Tensor]

    def kernel(self, product: Tensor) -> Tensor:
        """sum_i a_i z^i of inner products z."""
        total = torch.full_like(product, self.coefficients[-1])
        for factor in reversed(self.coefficients[:-1]):
            total = total * product + factor
        return total


class _Trait(Generic[Value]):
    """A trait as an attribute of a map; hidden on the class, so that a variant may have a field of that name."""

    def __set_name__(self, owner: type[FeatureMap], name: str) -> None:
        self.name = name

    def __get__(self, instance: FeatureMap | None, owner: type[FeatureMap]) -> Value:
        if instance is None:
            raise AttributeError(f"{self.name} is a trait of an instance")
        return getattr(instance.traits(), self.name)


class FeatureMap(Variant, family="feature_map"):
    """A map of keys and queries to phi-space, applied per head and before every update and read.

    A variant defines `output_dim` unless it has a field `d_phi`; `forward`, with `vjp` right below it; its traits if
    they differ from the defaults, as `promises` or, if they depend on fields, `traits`; and `shapes` if it has
    parameters. A map without a hand-written `vjp` defines `features` instead and is differentiated by `torch.func.vjp`;
    `hecate list` says so. `output_dim` and `init` of every variant refuse sizes too large for any memory.

    Shapes: x `[..., D]`, or `[..., H, D]` when its parameters are per head; features `[..., d_phi]`. The same instance
    with the same parameters serves the write and the read.
    """

    model_config = ConfigDict(ignored_types=(_Trait,))
    _derivatives = ("vjp",)
    _formulas = ("forward", "vjp", "features", "value", "pull")
    _follows = MappingProxyType({"forward": ("features",), "vjp": ("features", "forward")})
    promises: ClassVar[Traits] = Traits()
    widening: ClassVar[int] = 1  # features for each component of x, if no field sets their number
    unit_scale: ClassVar[Mapping[str, Any]] = {}  # defaults of fields for inputs with entries of size 1
    # Traits that code outside of this package reads; see `Traits`.
    non_negative = _Trait[bool]()
    kernel_non_negative = _Trait[bool]()
    parity = _Trait[Parity]()
    degree = _Trait[float | None]()
    norm_bound = _Trait[float | None]()
    is_random = _Trait[bool]()
    needs_position = _Trait[bool]()

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for name, checked in (("output_dim", _checked_width), ("init", _checked_init)):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    @_checked_width
    def output_dim(self, d: int) -> int:
        """Width d_phi for inputs of width d: the field `d_phi` where it is given, else d times `widening`."""
        return vars(self).get("d_phi") or self.widening * d

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of one head by name, which are checked before any is drawn."""
        return {}

    def traits(self) -> Traits:
        """The declared traits."""
        return self.promises

    @_checked_init
    def init(
        self,
        d: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Fresh parameters for inputs of width d; random maps draw from `generator` alone."""
        params = without_storage(self.shapes(d), heads, dtype, device)
        if params is None:
            with (source := seeded(generator)).device:  # whatever the default is
                fresh = self.fresh(d, heads, source)
            params = {name: item.to(dtype=dtype, device=device) for name, item in fresh.items()}
        return {"learned": {}, "frozen": params} if self.is_random else {"learned": params, "frozen": {}}

    def fresh(self, d: int, heads: int, generator: torch.Generator) -> dict[str, Tensor]:
        """New parameters `[H, ...]` in float64, drawn in the order of `shapes`."""
        return {name: self.start(name, (heads, *shape), generator) for name, shape in self.shapes(d).items()}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Initial value of a learned parameter `[H, ...]`, in float64 where the generator lives: 0 for a vector, N(0,
        1/fan_in) for a matrix, so that outputs keep the inputs' variance; one seed gives one matrix in every dtype."""
        if len(shape) == 2:
            return torch.zeros(shape, dtype=torch.float64, device=generator.device)
        if min(shape) < 1:
            raise ShapeError(f"heads and widths must be at least 1, got {list(shape)}")
        draw = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return draw / math.sqrt(shape[1])

    def parameters(self, params: Params, *names: str) -> list[Tensor]:
        """The parameters of these names; draws are detached, so that under tape and autograd they have no gradient."""
        group, what = (params["frozen"], "draw") if self.is_random else (params["learned"], "learned parameter")
        for name in names:
            if name not in group:
                cure = "pass params=feature_map.init(d, generator=...)"
                raise ConfigError(f"feature map {self.kind!r} needs its {what} {name!r}, got {sorted(group)}; {cure}")
        return [group[name].detach() if self.is_random else group[name] for name in names]

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        """New params with fresh draws of the same shapes, dtypes and device in place of the frozen ones; learned ones
        stay. For random maps."""
        if not self.is_random:
            reason = f"feature map {self.kind!r} has nothing to redraw: it has no random draws"
            raise ConfigError(f"{reason}; redraw maps whose `is_random` is true")
        (w,) = self.parameters(params, "w")
        fresh = self.init(w.shape[-2], heads=w.shape[0], generator=generator, dtype=torch.float64)
        frozen = {name: value.to(params["frozen"][name]) for name, value in fresh["frozen"].items()}
        return {"learned": params["learned"], "frozen": frozen}

    def features(self, x: Tensor, params: Params) -> Tensor:
        """phi(x), for maps without a hand-written VJP."""
        raise NotImplementedError(f"{type(self).__name__} defines neither forward nor features")

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Any]:
        """Features, and the residuals that `vjp` needs."""
        return self.features(x, params), (x, params)

    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Cotangents of x and of the learned parameters from the cotangent g of the features."""
        if type(self).forward is not FeatureMap.forward:  # residuals are its own
            raise ConfigError(f"{type(self).__name__} defines forward without vjp; define vjp too, or features alone")
        x, params = residuals

        def of(x: Tensor, learned: dict[str, Tensor]) -> Tensor:
            return self.features(x, params | {"learned": learned})

        gx, glearned = torch_vjp(of, (x, params["learned"]), g)
        return gx, glearned

    def __call__(self, x: Tensor, params: Params | None = None, *, position: Tensor | None = None) -> Tensor:
        """phi(x) `[..., d_phi]`; `params` may be left out for maps without parameters.

        Maps that need positions take them here, for x `[B, T, H, D]` as `[T, 1]` or `[B, T, 1]`, as only the caller
        knows which axis is time. A scan counts them itself.
        """
        if params is None:
            params = {"learned": {}, "frozen": {}}
        if position is not None:
            params = {**params, "position": position}
        return self.forward(x, params)[0]

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The kernel `[...]` that phi(x).phi(y) equals, at least in expectation; None if none is known."""
        return None

    def power_form(self, d: int) -> PowerForm | None:
        """Form of the map for block engines on inputs of width d, if its kernel is a polynomial of their inner product
        and nothing is learned; otherwise None."""
        return None

    def inner_maps(self) -> tuple[FeatureMap, ...]:
        """The maps that this one is made of."""
        return ()

    def _by_hand(self) -> bool:
        # If one map has no VJP, torch differentiates all of them: a VJP around it would evaluate it again.
        return self.hand_written() and all(map_._by_hand() for map_ in self.inner_maps())

    def block(self, params: Params) -> tuple[Block, tuple[Tensor, ...]]:
        """This map as a tape block, and the parameter tensors to pass after x."""
        learned, frozen = list(params["learned"]), list(params["frozen"])
        position = [params["position"]] if "position" in params else []
        declares = type(self).output_dim is not FeatureMap.output_dim or vars(self).get("d_phi") is not None

        def forward(x: Tensor, *tensors: Tensor) -> tuple[Tensors, Any]:
            stream = iter(tensors)
            trained = dict(zip(learned, stream, strict=False))
            inputs: Params = {"learned": trained, "frozen": dict(zip(frozen, stream, strict=False))}
            if position:
                inputs["position"] = next(stream)
            features, residuals = self.forward(x, inputs)
            # Kernels rely on both: they would read beyond a row that is too short. For most maps no call is needed.
            width = self.output_dim(x.shape[-1]) if declares else self.widening * x.shape[-1]
            if features.dtype != x.dtype or features.shape[-1] != width:
                self._refuse_features(x, features, width)
            return (features,), residuals

        def vjp(residuals: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            gx, glearned = self.vjp(residuals, g)
            return gx, *(glearned[name] for name in learned), *[None] * (len(frozen) + len(position))

        tensors = (*params["learned"].values(), *params["frozen"].values(), *position)
        return Block(f"phi.{self.kind}", forward, vjp if self._by_hand() else None), tensors

    def _refuse_features(self, x: Tensor, features: Tensor, width: int) -> NoReturn:
        what = f"feature map {self.kind!r}"
        if features.dtype != x.dtype:
            raise ShapeError(f"{what} makes {features.dtype} of {x.dtype}; give features in the dtype of x")
        declared = f"where its output_dim says {width}; mend one of them"
        raise ShapeError(f"{what} makes {features.shape[-1]} features of width {x.shape[-1]}, {declared}")


FeatureMapKind = FeatureMap


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator itself, or a fresh one with seed 0; the global random state is not used."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 or better: the dtype in which phases, norms and exponentials are evaluated."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor, *operands: Tensor) -> Tensor:
    """x in its `compute_dtype`, or better if an operand is."""
    dtype = compute_dtype(x)
    for operand in operands:
        dtype = torch.promote_types(dtype, operand.dtype)
    return x.to(dtype)


def position_of(kind: str, x: Tensor, params: Params) -> Tensor:
    """The positions of x's tokens, checked against its shape; an error says how to pass them."""
    if "position" not in params:
        cure = "outside a scan pass position=..., for x [T, D] torch.arange(T)"
        raise ConfigError(f"feature map {kind!r} needs every token's position; {cure}")
    position, lead = params["position"], x.shape[:-1]
    fits = all(a in (1, b) for a, b in zip(position.shape[::-1], lead[::-1], strict=False))
    if position.is_floating_point() or position.dim() > len(lead) or not fits:
        wanted = f"whole numbers that broadcast to {list(lead)}, x's shape without its last axis"
        raise ShapeError(f"position must be {wanted}, got {position.dtype} {list(position.shape)}")
    return position


def project(x: Tensor, w: Tensor) -> Tensor:
    """Per-head matrix product: x `[..., D]` or `[..., H, D]`, w `[H, D, P]` -> `[..., P]`.

    One head's matrix serves every head, as a plain product.
    """
    if x.shape[-1] != w.shape[-2]:
        raise ShapeError(f"expected inputs of width {w.shape[-2]}, got {list(x.shape)}")
    if w.shape[0] == 1:
        return x @ w[0]
    if x.dim() < 2 or x.shape[-2] != w.shape[0]:
        raise ShapeError(f"expected inputs [..., {w.shape[0]} heads, {w.shape[1]}], got {list(x.shape)}")
    # One product for each head: `@` would make one for each token.
    rows = x.reshape(-1, *x.shape[-2:]).transpose(0, 1)
    return torch.bmm(rows, w).transpose(0, 1).reshape(*x.shape[:-1], w.shape[-1])


def project_precisely(x: Tensor, w: Tensor) -> Tensor:
    """`project` in float32 or better, autocast or not; float64 draws make it float64."""
    x = widened(x, w)
    with without_autocast(x.device.type):
        return project(x, w.to(x.dtype))


def project_vjp(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of x, in the dtype of g, and of w, in its own, from the cotangent g `[..., P]` of `project(x, w)`."""
    xs, gs = (item.to(g).reshape(-1, w.shape[0], item.shape[-1]).transpose(0, 1) for item in (x, g))
    with without_autocast(x.device.type):
        return project(g, w.to(g).mT), (xs.mT @ gs).to(w)


def per_head(value: Tensor, x: Tensor) -> Tensor:
    """A parameter `[H, ...]` that broadcasts with x `[..., H, D]`; one head's serves every head."""
    if value.shape[0] == 1:
        return value[0]
    if x.dim() < 2 or x.shape[-2] != value.shape[0]:
        raise ShapeError(f"expected inputs [..., {value.shape[0]} heads, D], got {list(x.shape)}")
    return value


def sum_to_heads(value: Tensor, heads: int) -> Tensor:
    """Sums `[..., P]` or `[..., H, P]` over all but the head and feature axes: `[H, P]`."""
    return value.reshape(-1, heads, value.shape[-1]).sum(0)


def bounded(width: int, limit: int, d: int, knob: str, cure: str | None = None) -> int:
    """`width`; refuses one above `limit`, with the advice to lower `knob`, or else `cure`."""
    if width > limit:
        first = f"lower {knob}, " if cure is None else cure
        beyond = f"gives d_phi = {width:,} for inputs of width {d}, more than max_d_phi = {limit:,}"
        cure = f"{first}put a narrower `linear` before it with `compose`, or raise max_d_phi"
        raise ConfigError(f"{beyond}; {cure}", (knob,))
    return width

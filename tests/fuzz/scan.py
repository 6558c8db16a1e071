"""Random calls of `memory_scan`, run whole or in pieces, with all they give by name."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate import Gates, MemoryConfig, memory_scan
from hecate.errors import ConfigError, HecateError
from tests.fuzz.configs import schema_of
from tests.fuzz.draw import value_of

MAX_WIDTH = 40
LENGTHS = (0, 1, 2, 3, 5, 5, 17, 33)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
TOKENS = ("q", "k", "v", *Gates._fields)


class Scan(NamedTuple):
    """A call. `leaves` by name: q, k, v, gates, `initial.W`, `phi.W` and tensors of a state."""

    config: MemoryConfig
    leaves: dict[str, Tensor]
    numbers: dict[str, float]  # gates that are no tensors
    frozen: dict[str, Tensor]
    masks: dict[str, Tensor]
    state: Any = None  # leaves of a state's tree, those in `leaves` as their names, and its layout

    @property
    def dtype(self) -> torch.dtype:
        """In which the scan computes."""
        dtype = self.config.dtype
        for name in "qkv":
            dtype = torch.promote_types(dtype, self.leaves[name].dtype)
        return dtype

    @property
    def length(self) -> int:
        return self.leaves["q"].shape[1]

    def part(self, at: int, end: int) -> Scan:
        """The tokens at <= t < end; borders of documents as resets."""
        masks = dict(self.masks)
        if "cu_seqlens" in masks:
            starts = torch.isin(torch.arange(self.length), masks.pop("cu_seqlens"))
            masks["reset_mask"] = starts.unsqueeze(0)
        leaves = {n: t[:, at:end] if n in TOKENS else t for n, t in self.leaves.items()}
        return self._replace(leaves=leaves, masks={n: m[:, at:end] for n, m in masks.items()})

    def under(self, prefix: str) -> dict[str, Tensor]:
        found = {n: t for n, t in self.leaves.items() if n.startswith(prefix)}
        return {name.removeprefix(prefix): item for name, item in found.items()}

    def call(self, state: Any, engine: Any, autodiff: Any) -> tuple[Tensor, Any]:
        return memory_scan(
            self.config,
            *(self.leaves[name] for name in "qkv"),
            Gates(*({**self.numbers, **self.leaves}.get(name) for name in Gates._fields)),
            phi_params={"learned": self.under("phi."), "frozen": self.frozen},
            state=state,
            initial=self.under("initial.") or None,
            engine=engine,
            autodiff=autodiff,
            **self.masks,
        )


def run(
    scan: Scan, *, engine: Any = "sequential", autodiff: Any = "torch", cuts: tuple[int, ...] = (), grads: bool = True
) -> dict[str, Tensor]:
    """Outputs, state and the gradients of a random sum of them, on copies that must not change."""
    points = {n: t.detach().clone().requires_grad_(grads) for n, t in scan.leaves.items()}
    frozen, masks = ({n: t.clone() for n, t in given.items()} for given in scan[3:5])
    own, state = scan._replace(leaves=points, frozen=frozen, masks=masks), None
    if scan.state is not None:
        tensors, layout = scan.state
        state = pytree.tree_unflatten([points[t] if isinstance(t, str) else t for t in tensors], layout)
    rows = []
    for at, end in pairwise((0, *cuts, scan.length)):
        y, state = (own.part(at, end) if cuts else own).call(state, engine, autodiff)
        rows.append(y)
    for copies, given in zip((points, frozen, masks), (scan.leaves, *scan[3:5]), strict=True):
        for name, item in given.items():
            assert torch.equal(copies[name], item) or item.isnan().any(), f"{name} is changed"
    kept = [item for item in pytree.tree_leaves(state) if isinstance(item, Tensor)]
    if not cuts:
        _check_apart([rows[-1], *kept], points)
    found = {"y": torch.cat(rows, 1)} | {f"state[{i}]": item for i, item in enumerate(kept)}
    if grads:
        found |= _gradients(found, points)
    return {name: item.detach() for name, item in found.items()}


def _check_apart(results: list[Tensor], points: dict[str, Tensor]) -> None:
    held = {item.untyped_storage().data_ptr(): name for name, item in points.items()}
    for item in results:
        owner = held.get(item.untyped_storage().data_ptr()) if item.numel() else None
        assert owner is None, f"a result is a view of {owner}"


def _gradients(found: dict[str, Tensor], points: dict[str, Tensor]) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for item in found.values():
        if item.is_floating_point():
            weights = torch.randn(item.shape, generator=source, dtype=torch.float64)
            total = total + (item.double() * weights).sum()
    if not total.requires_grad:
        return {f"grad {name}": torch.zeros_like(item) for name, item in points.items()}
    grads = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return {f"grad {name}": grad for name, grad in zip(points, grads, strict=True)}


def drawn(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Scan:
    """A random call; in three of ten it goes on from the state of an earlier part."""
    rng, source = random.Random(seed), torch.Generator().manual_seed(seed)
    d, heads, batch = rng.randint(1, 9), rng.randint(1, 3), rng.choice([0, 1, 1, 2, 2, 3])
    lead = (batch, rng.choice(lengths), heads)
    config = _config(rng, d)
    width, shapes = _shapes(config, rng, d)
    dtype, size = rng.choice(DTYPES), 10.0 ** rng.choice([0] * 8 + [-30, -10, -2, 2, 10, 30])

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=source)

    leaves = {"q": normal(*lead, d), "k": normal(*lead, d, scale=size), "v": normal(*lead, width)}
    numbers = _gates(config, rng, source, leaves, config.feature_map.output_dim(d))
    if rng.random() < 0.5:
        for name, shape in shapes.items():
            per = (batch,) if rng.random() < 0.2 else ()
            leaves[f"initial.{name}"] = normal(*per, heads, *shape, scale=max(shape[-1], 1) ** -0.5)
    phi = config.feature_map.init(d, heads=heads, generator=source, dtype=torch.float64)
    leaves |= {f"phi.{name}": item for name, item in phi["learned"].items()}
    leaves = {name: item.to(dtype) for name, item in leaves.items()}
    frozen = {n: t.to(dtype) if t.is_floating_point() else t for n, t in phi["frozen"].items()}
    if rng.random() < 0.1:
        leaves["v"] = leaves["v"].to(rng.choice(DTYPES))
    scan = Scan(config, leaves, numbers, frozen, _masks(rng, source, *lead[:2]))
    goes_on = rng.random() < 0.3 and "cu_seqlens" not in scan.masks and lead[1] > 1
    return _going_on(scan, rng.randrange(1, lead[1])) if goes_on else scan


def _config(rng: random.Random, d: int) -> MemoryConfig:
    """A random configuration that is allowed, and whose map is not too wide to be quick."""
    while True:
        value = value_of(schema_of(MemoryConfig), rng, rng.choice([0.2, 0.4, 0.6]))
        if rng.random() < 0.3:
            value["key_norm"] = "l2"
        try:
            config = MemoryConfig.model_validate(value)
            wide = config.feature_map.output_dim(d)
            config.feature_map.init(d, generator=torch.Generator())
            config.structure.shapes(wide, wide)
        except ConfigError:
            continue
        if wide <= MAX_WIDTH:
            return config


def _shapes(config: MemoryConfig, rng: random.Random, d: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """A width of values and the memory's shapes; vectors and residuals ask for that of phi."""
    d_phi = config.feature_map.output_dim(d)
    for width in (d_phi if rng.random() < 0.2 else rng.randint(1, 9), d_phi):
        try:
            return width, config.structure.shapes(d_phi, width)
        except ConfigError:
            continue
    raise AssertionError("_config has tried phi's width")


def _gates(
    config: MemoryConfig, rng: random.Random, source: torch.Generator, leaves: dict[str, Tensor], d_phi: int
) -> dict[str, float]:
    """Adds the gates that are tensors to the leaves, and returns the others."""
    numbers: dict[str, float] = {}
    used = (True, config.retention.uses_retain, config.algorithm.uses_momentum)
    for name, uses in zip(Gates._fields, used, strict=False):
        form = rng.choice(["none", "number", "tensor", "tensor", "channels"]) if uses else "none"
        if form == "number":
            numbers[name] = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        elif form != "none":
            wide = form == "channels" and name == "retain" and config.structure.linear
            shape = (*leaves["q"].shape[:3], *([d_phi] if wide else []))
            gate = torch.rand(shape, generator=source).double()
            ends = torch.rand(shape, generator=source) < rng.choice([0.0, 0.2])
            leaves[name] = torch.where(ends, gate.round(), gate)
    return numbers


def _masks(rng: random.Random, source: torch.Generator, batch: int, length: int) -> dict[str, Tensor]:
    masks = {
        name: torch.rand(batch, length, generator=source) < share
        for name, share in (("write_mask", 0.7), ("reset_mask", 0.15))
        if rng.random() < 0.3
    }
    if batch == 1 and "reset_mask" not in masks and rng.random() < 0.5:
        cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(3)))
        masks["cu_seqlens"] = torch.tensor([0, *cuts, length])
    return masks


def _going_on(scan: Scan, at: int) -> Scan:
    """The tokens from `at` on, from the state of those before; it is a leaf like any input."""
    try:
        with torch.no_grad():
            _, state = scan.part(0, at).call(None, "sequential", "torch")
    except HecateError:
        return scan
    tensors, layout = pytree.tree_flatten(state)
    held = [part for part in state if isinstance(part, dict) and "filled" in part]
    marks = [id(part["filled"]) for part in held]  # which slots hold a token: no number to differentiate
    names = {i: f"state.{i}" for i, t in enumerate(tensors) if _is_float(t) and id(t) not in marks}
    later = scan.part(at, scan.length)
    floats = {name: tensors[i].clone() for i, name in names.items()}
    named = [names.get(i, item) for i, item in enumerate(tensors)]
    return later._replace(leaves={**later.leaves, **floats}, state=(named, layout))


def _is_float(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()

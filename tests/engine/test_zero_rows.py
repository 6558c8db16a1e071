"""Rows of zeros, equal rows and single tokens: where a norm, a sign, a root or a quotient meets 0, gradients stay
finite and near those of ordinary rows, and every engine has the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.engine import Engine
from hecate.errors import ConfigError
from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.rule.config import RULES
from tests.product.cells import all_axes, nearest, settings, validate

MOST = 1e4
"""How many times the largest gradient of ordinary rows one may be."""
LENGTH, WIDTH = 12, 4
DEEP = {"kind": "mlp", "norm": "layer", "bias": True}
NS = {"kind": "newton_schulz"}
KINKS: dict[str, dict[str, Any]] = {
    "l1": {"bias": "l1"},
    "lp": {"bias": {"kind": "lp", "p": 1.5}},
    "yaad": {"bias": {"kind": "yaad", "delta": 0.1}},
    "robust": {"bias": "robust"},
    "newton_schulz": {"algorithm": NS},
    "rescaled": {"algorithm": {**NS, "rescale": True}},
    "cubic": {"algorithm": {**NS, "polynomial": "cubic", "steps": 8}},
    "frozen": {"algorithm": NS, "chunk": 4},
    "committed": {"algorithm": NS, "chunk": 4, "commit": "chunk"},
    "vector": {"algorithm": NS, "structure": "vector"},
    "adaptive": {"algorithm": "adaptive"},
    "adaptive window": {"algorithm": {"kind": "omega", "inner": {"kind": "adaptive"}}},
    "norm": {"structure": {**DEEP, "layers": 1}, "feature_map": "identity"},
    "norms in chunks": {"structure": {**DEEP, "residual": True}, "feature_map": "identity", "chunk": 4},
    "normalised": {"feature_map": {"kind": "normalise", "inner": {"kind": "identity"}}, "key_norm": "none"},
    "normalised sum": {"feature_map": {"kind": "normalise", "inner": {"kind": "relu"}, "norm": "sum"}},
    "step": {"step": "normalized", "feature_map": "identity", "key_norm": "none"},
    "step of a bias": {"step": "normalized", "structure": {"kind": "mlp", "bias": True}, "feature_map": "identity"},
    "sum": {"feature_map": "relu", "normalizer": "sum"},
}
TAPED, RECORDED = ("sequential", "tape"), ("sequential", "torch")


def zeros(names: str, at: slice) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = {name: item.clone() for name, item in inputs.items()}
        for name in names:
            inputs[name][:, at] = 0
        return inputs

    return changed


def rows(index: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        at = index(torch.arange(inputs["q"].shape[1]))
        return {name: item[:, at] if name in "qkv" else item for name, item in inputs.items()}

    return changed


PATTERNS = {
    "first": zeros("qkv", slice(6)),
    "one": zeros("qkv", slice(1)),
    "middle": zeros("qkv", slice(4, 10)),
    "all": zeros("qkv", slice(None)),
    "keys": zeros("k", slice(6)),
    "values": zeros("v", slice(None)),
    "queries": zeros("q", slice(6)),
    "constant": rows(torch.zeros_like),
    "pairs": rows(lambda at: at // 2),
}


def inputs_of(config: MemoryConfig, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> dict[str, Tensor]:
    """Ordinary rows and gates, and phi's learned parameters under `phi.`."""
    source = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=source)

    width, lead = config.feature_map.output_dim(WIDTH), (2, length, 1)
    try:
        config.structure.shapes(width, WIDTH)
        width = WIDTH
    except ConfigError:
        pass  # as wide as phi
    several = (*lead[:2], config.writes, 1) if config.writes > 1 else lead
    q, k, v = (
        torch.randn(*shape, generator=source) for shape in ((*lead, WIDTH), (*several, WIDTH), (*several, width))
    )
    top = min(config.algorithm.lr, 0.5 if config.structure.linear else 0.1)
    found = {"q": q, "k": k, "v": v, "lr": uniform(0.3 * top, top, *several)}
    if config.retention.uses_retain:
        found["retain"] = uniform(0.8, 1.0, *lead)
    if config.algorithm.uses_momentum:
        found["momentum"] = uniform(0.1, 0.9, *lead)
    return {name: item.to(dtype) for name, item in found.items()}


def gradients(config: MemoryConfig, inputs: dict[str, Tensor], engine: str, autodiff: Any) -> dict[str, Tensor]:
    """Those of a random sum of outputs and state."""
    points = {name: item.clone().requires_grad_() for name, item in inputs.items()}
    gates = Gates(**{name: item for name, item in points.items() if name not in "qkv"})
    source, dtype = torch.Generator().manual_seed(1), inputs["q"].dtype
    params = config.feature_map.init(WIDTH, generator=source, dtype=dtype)
    learned = {name: item.clone().requires_grad_() for name, item in params["learned"].items()}
    made = memory_scan(
        config, points["q"], points["k"], points["v"], gates, phi_params={**params, "learned": learned}, engine=engine,
        autodiff=autodiff,
    )  # fmt: skip
    tensors = [item for item in pytree.tree_leaves(made) if isinstance(item, Tensor) and item.is_floating_point()]
    assert all(bool(item.isfinite().all()) for item in tensors)
    total = torch.stack([(item * torch.randn(item.shape, generator=source)).sum() for item in tensors]).sum()
    points |= {f"phi.{name}": item for name, item in learned.items()}
    grads = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return dict(zip(points, grads, strict=True))


def size(grads: dict[str, Tensor]) -> float:
    assert all(bool(g.isfinite().all()) for g in grads.values()), "a gradient is not finite"
    return max(float(g.abs().max()) for g in grads.values() if g.numel())


def check(
    config: MemoryConfig, dtype: torch.dtype = torch.float64, engines: tuple[str, ...] = (), most: float = MOST
) -> None:
    """Every pattern against ordinary rows, and the ways to run it against each other."""
    inputs = inputs_of(config, dtype)
    most *= size(gradients(config, inputs, *TAPED))
    single = {name: item[:, :1] for name, item in inputs.items()}
    short = {"single": single, "single zero": zeros("qkv", slice(None))(single)}
    ways = [RECORDED, *((name, "auto") for name in engines if Engine.registry[name].refuses(config) is None)]
    for cases in ({name: change(inputs) for name, change in PATTERNS.items()}, short):
        together = {name: torch.cat([case[name] for case in cases.values()]) for name in inputs}
        taped = split(gradients(config, together, *TAPED), cases)
        for name, grads in taped.items():
            assert size(grads) <= most, name
        for way in ways if dtype == torch.float64 else ():
            for name, found in split(gradients(config, together, *way), cases).items():
                scale = size(taped[name]) + 1
                # 1e-9: a few thousand roundings, of steps that amplify them by up to `MOST`.
                for key, g in taped[name].items():
                    assert float((found[key] - g).abs().max()) <= 1e-9 * scale, (name, way, key)


def split(grads: dict[str, Tensor], cases: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Gradients of each of some cases side by side in a batch; those of phi's parameters are of all of them."""
    names = list(cases)
    parts = {key: [g] * len(names) if key.startswith("phi.") else g.chunk(len(names)) for key, g in grads.items()}
    return {name: {key: part[index] for key, part in parts.items()} for index, name in enumerate(names)}


def of_kink(name: str) -> MemoryConfig:
    return MemoryConfig.model_validate(
        {"feature_map": "elu", "key_norm": "l2", "state_dtype": "float64", **KINKS[name]}
    )


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.spec("BIAS-L1-I1", "ALG-NS-I1", "ALG-ADAPT-D1", "STR-MLP-I3", "PHI-NORM-I1", "RULE-ZERO-I1")
def test_rows_where_a_formula_has_a_kink(name):
    check(of_kink(name), engines=("parallel", "chunk", "window"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINKS if "newton" not in name])
@pytest.mark.spec("RULE-ZERO-I1")
def test_compiled_kernels_have_the_same_kinks(name):
    pytest.importorskip("numba")
    check(of_kink(name), engines=("compiled",))


def scanned() -> Iterator[str]:
    """Rules whose scans ask for nothing but q, k, v and gates."""
    for name in RULES:
        if named_rule(name).readout.plain:
            yield name


@pytest.mark.parametrize("name", list(scanned()))
@pytest.mark.spec("RULE-ZERO-I1")
def test_rows_of_a_named_rule(name):
    # A full step of atlas has the slope 485 / |S| wherever S lacks rank, and a window of zeros meets it twice in a row.
    config, most = named_rule(name, state_dtype="float64"), 485.0**2 if name == "atlas" else MOST
    check(config, most=most)
    check(config.model_copy(update={"state_dtype": "float32"}), torch.float32, most=most)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.spec("NN-MEM-D2", "RULE-ZERO-I1")
def test_rows_of_a_layer(name):
    """Zero embeddings, as of padding, in layers without what hides them: an output gate of silu(0)."""
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    for fields in ({}, {"output_gate": False, "conv_kernel": 0}):
        layer = Memory(16, 2, name, generator=torch.Generator().manual_seed(0), engine="sequential", **fields)

        def largest(x: Tensor, layer: Memory = layer) -> float:
            x, source = x.clone().requires_grad_(), torch.Generator().manual_seed(1)
            y, _ = layer(x)
            total = (y * torch.randn(y.shape, generator=source)).sum()
            named = {"x": x, **dict(layer.named_parameters())}
            grads = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
            return size(dict(zip(named, grads, strict=True)))

        most = MOST * largest(x)
        silent = torch.stack([x] * 4)
        for rows, at in zip(silent, (slice(6), slice(1), slice(4, 12), slice(None)), strict=True):
            rows[:, at] = 0
        assert largest(silent.flatten(0, 1)) <= most, fields


@pytest.mark.parametrize(
    "blocks", [{}, {"levels": [{"name": "a"}, {"name": "b", "period": 4}]}, {"self_reference": {}}]
)
@pytest.mark.spec("NN-MEM-D2", "RULE-ZERO-I1")
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
def test_a_zero_embedding_goes_through_every_norm(blocks):
    sizes = {"vocab_size": 7, "d_model": 16, "heads": 2, "layers": 3, "tie_embeddings": False}
    model = LanguageModel({**sizes, **blocks}, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.embedding.weight[0] = 0
    tokens = torch.randint(1, 7, (2, 16), generator=torch.Generator().manual_seed(1))

    def largest(tokens: Tensor) -> float:
        model.zero_grad()
        model(tokens)[0].square().sum().backward()
        return size({name: p.grad for name, p in model.named_parameters()})

    most = MOST * largest(tokens)
    for at in (slice(6), slice(5, 12), slice(None)):
        silent = tokens.clone()
        silent[:, at] = 0
        assert largest(silent) <= most


FIELDS = ("structure", "bias", "retention", "algorithm", "feature_map", "step", "normalizer", "read", "decay_order")


def variants() -> Iterator[tuple[str, MemoryConfig]]:
    """Every kind of every knob, with and without a phi that is 0 at 0, at its own settings."""
    for field in FIELDS:
        for kind in all_axes()[field]:
            for other in ("identity", "elu"):
                pair = ((field, kind), ("way", "token") if field == "feature_map" else ("feature_map", other))
                cell = nearest(pair)
                if isinstance(validate(cell), MemoryConfig):
                    fields = {**cell.fields(), "retention": settings()["retention"][cell.retention]}
                    yield f"{field}-{kind}-{other}", MemoryConfig.model_validate(fields)


@pytest.mark.slow
@pytest.mark.parametrize(("_", "config"), [pytest.param(*pair, id=pair[0]) for pair in variants()])
@pytest.mark.spec("RULE-ZERO-I1")
def test_rows_of_every_kind(_, config):
    check(config, engines=("parallel", "chunk", "window"))

"""After a call every parameter has a gradient, be it zero: processes that add up gradients wait for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.rule import MemoryConfig
from hecate.rule.config import RULES
from tests.nn.layers import own_layers
from tests.product.cells import all_axes, nearest, validate

pytestmark = pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
D_MODEL, CHUNK = 16, 8
PAIR = [{"name": "fast", "memory": "delta"}, {"name": "slow", "period": CHUNK, "memory": "gated_delta"}]
TREE = [{"name": "only", "memory": {"bias": "dot", "retention": "decay"}}]
ALONE = [{"name": "only", "memory": {"chunk": CHUNK}, "restart": CHUNK}]
MODELS: dict[str, dict[str, Any]] = {
    **{how: {"levels": PAIR, "composition": how} for how in ("sequential", "independent", "chained")},
    **{
        how: {"levels": PAIR, "composition": "independent", "aggregation": how} for how in ("rsqrt", "learned", "gated")
    },
    "nested": {"levels": [PAIR[0], {**PAIR[1], "memory": "delta"}], "composition": "nested"},
    "carry": {"levels": TREE, "composition": "carry"},
    "firing": {"levels": [{**ALONE[0], "firing": "learned"}]},
    "projected": {"levels": [{**ALONE[0], "query_projection": "sum"}]},
    "orthogonal": {"levels": [{**ALONE[0], "query_projection": "orthogonal"}]},
    "read before": {"levels": [{"name": "only", "period": CHUNK, "memory": {"read": "before"}}]},
    "deep": {"levels": [{"name": "only", "period": CHUNK, "memory": {"structure": "mlp"}}]},
    "features": {"feature_memory": {}},
    "features alone": {"feature_memory": {"residual": False, "d_value": 4}},
    "self-reference": {"self_reference": {"memory": {"retention": "decay"}, "chunk": CHUNK}},
    "twice": {"self_reference": {"memory": {"algorithm": "momentum"}, "erase": "twice"}},
    "hope": {"self_reference": {"chunk": CHUNK}, "levels": [PAIR[1]]},
}


def missing(module: nn.Module, call: Callable[..., Any]) -> set[str]:
    """Parameters that some call, of one token or of a chunk's all but one, leaves without a gradient."""
    found: set[str] = set()
    every, one = (torch.ones(2, length, dtype=torch.bool) for length in (CHUNK - 1, 1))
    odd = (torch.arange(CHUNK - 1) % 2 == 1).expand(2, -1)
    for length, masks in (
        (1, {}), (1, {"write_mask": ~one}), (1, {"reset_mask": one}),
        (CHUNK - 1, {}), (CHUNK - 1, {"write_mask": odd}), (CHUNK - 1, {"write_mask": ~every, "reset_mask": every}),
    ):  # fmt: skip
        module.zero_grad(set_to_none=True)
        call(length, **masks)[0].square().sum().backward()
        for name, p in module.named_parameters():
            if p.grad is None:
                found.add(f"{name}: {length} tokens, {list(masks)}")
            else:
                assert p.grad.isfinite().all(), name
    return found


def of_layer(config: Any, **sizes: int) -> set[str]:
    layer = Memory(D_MODEL, 2, config, generator=torch.Generator().manual_seed(0), **sizes)
    return missing(layer, lambda length, **masks: layer(torch.randn(2, length, D_MODEL), **masks))


@pytest.mark.spec("NN-MEM-I14")
@pytest.mark.parametrize("name", [name for name in RULES if name in own_layers()])
def test_of_a_named_rule(name):
    assert not of_layer({"kind": name, "on_nonfinite": "propagate"})


@pytest.mark.spec("NN-MEM-I14")
@pytest.mark.parametrize("name", MODELS)
def test_of_levels_and_what_writes_itself(name):
    sizes = {"vocab_size": 5, "d_model": D_MODEL, "heads": 2, "layers": 1}
    model = LanguageModel({**sizes, **MODELS[name]}, generator=torch.Generator().manual_seed(0))
    assert not missing(model, lambda length, **masks: model(torch.zeros(2, length, dtype=torch.int64), **masks))


def gated() -> Iterator[Any]:
    """Every gating and readout, token by token and in chunks, read before and after the write."""
    for field in ("gating", "readout"):
        for kind in all_axes()[field]:
            for way in ("token", "large"):
                for read in ("after", "before"):
                    cell = nearest(((field, kind), ("way", way)))
                    config = validate(cell if kind == "target_conv" else cell._replace(read=read))
                    if isinstance(config, MemoryConfig):
                        config = config.model_copy(update={"state_dtype": "float32"})
                        yield pytest.param(config, id=f"{kind}-{way}-{read}")


@pytest.mark.spec("NN-MEM-I14")
@pytest.mark.parametrize("config", list(gated()))
def test_of_a_gating(config):
    assert not of_layer(config, d_key=4, d_value=4)

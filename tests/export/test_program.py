"""torch.export with open length and batch: the program is the layer, at sizes at which it was never traced."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from hecate.engine import memory_scan
from hecate.engine.scan import as_loop, memory_scan_operator
from hecate.errors import ConfigError
from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.rule import RULES, Gates, MemoryConfig
from tests.serve.common import made

RECURRENT = {"momentum_delta", "mamba3", "pgdn", "pkda", "osdn", "mlstm", "abc", "large_chunk_ttt", "in_place_ttt"}
FAST = {"gated_delta", "titans", "delta_product", "mlstm", "pgdn"}
OPEN = {0: Dim("B", min=1, max=1 << 10), 1: Dim("T", min=1, max=1 << 16)}


def sized(rules):
    return [pytest.param(r, marks=() if r in FAST else pytest.mark.slow) for r in sorted(rules)]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(rule: Any, **fields: Any) -> Memory:
    return Memory(8, 2, rule, generator=torch.Generator().manual_seed(0), **fields)


def open_batch(state: Any) -> Any:
    return pytree.tree_map(lambda x: {0: OPEN[0]} if isinstance(x, Tensor) else None, state)


def program(module: nn.Module, *given: Any, **open_axes: Any) -> Any:
    return torch.export.export(module, given, dynamic_shapes=open_axes, strict=False)


@cache
def exported(rule: str) -> tuple[Memory, Any]:
    """A layer of a rule, and its program."""
    own = layer(rule)
    return own, program(own, drawn(2, 6, 8), x=OPEN)


def scans(found: Any) -> list[Any]:
    return [node for node in found.graph.nodes if node.target == torch.ops.hecate.memory_scan.default]


def near(found: Any, wanted: Any, atol: float = 1e-12) -> None:
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True))
    assert sum(isinstance(want, Tensor) for _, want in pairs) > 1
    for got, want in pairs:
        assert got is want is None or got.dtype == want.dtype
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=atol)


@pytest.mark.parametrize("rule", sized(set(RULES) - RECURRENT))
@pytest.mark.spec("ENG-EXPORT-D1")
def test_a_program_is_the_layer_at_any_length_and_batch(rule):
    own, found = exported(rule)
    assert len(scans(found)) == 1
    for batch, length in ((1, 1), (3, 2), (5, 37)):
        x = drawn(batch, length, 8, seed=length)
        near(found.module()(x), own(x))


@pytest.mark.parametrize("rule", sized(RECURRENT))
@pytest.mark.spec("ENG-EXPORT-D1")
def test_gatings_with_steps_of_their_own_are_refused_by_name(rule):
    kind = MemoryConfig.model_validate(rule).gating.kind
    with pytest.raises(ConfigError, match=f"gating '{kind}' steps through a sequence by itself"):
        program(layer(rule), drawn(2, 6, 8), x=OPEN)


@pytest.mark.parametrize(("fields", "name"), [
    ({"attention": {"kind": "attention", "window": 4}}, "attention of"),
    ({"self_reference": {"chunk": 4}}, "a self-referential memory"),
])  # fmt: skip
@pytest.mark.spec("ENG-EXPORT-D1")
def test_layers_with_steps_of_their_own_are_refused_by_name(fields, name):
    model = LanguageModel({"vocab_size": 256, "d_model": 8, "heads": 2, "layers": 1, **fields})
    with pytest.raises(ConfigError, match=f"{name}.* steps through a sequence by itself"):
        program(model, torch.zeros(2, 6, dtype=torch.int64), tokens=OPEN)


@pytest.mark.spec("ENG-EXPORT-D1")
def test_projected_queries_are_exported_or_refused_by_name():
    own, x = layer("delta", query_projection="sum"), drawn(3, 9, 8)
    near(program(own, drawn(2, 6, 8), x=OPEN).module()(x), own(x), atol=1e-6)
    with pytest.raises(ConfigError, match="query_projection='orthogonal' steps through a sequence by itself"):
        program(layer("delta", query_projection="orthogonal"), drawn(2, 6, 8), x=OPEN)


@pytest.mark.parametrize("kind", ["gated_delta", pytest.param("levels", marks=pytest.mark.slow)])
@pytest.mark.spec("ENG-EXPORT-D1")
def test_a_language_model_goes_on_from_states_and_is_written_to_a_file(kind):
    model, draws = made(kind, layers=1), torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 256, (3, 30), generator=draws)
    with torch.no_grad():
        _, state = model(tokens[:, :5])
    given = tokens[:2, 5:9].contiguous(), pytree.tree_map_only(Tensor, lambda x: x[:2], state)
    found = program(model, *given, tokens=OPEN, state=open_batch(state))
    file = io.BytesIO()
    torch.export.save(found, file)
    file.seek(0)
    read = torch.export.load(file).module()
    for cut in (6, 30):
        with torch.no_grad():
            near(read(tokens[:, 5:cut], state), model(tokens[:, 5:cut], state))


@pytest.mark.spec("ENG-EXPORT-D1")
def test_gradients_go_through_the_operator():
    own, found = exported("titans")
    x, runs = drawn(3, 9, 8).requires_grad_(), found.module()
    for got, want in zip(*(slopes(module, x) for module in (runs, own)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def slopes(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Of a sum over outputs and last memories, by the input and every parameter."""
    y, state = module(x)
    total = y.square().sum() + sum(weight.sum() for weight in state.memory.memory.values())
    return torch.autograd.grad(total, [x, *module.parameters()])


class Scan(nn.Module):
    """A scan with everything that it may be given."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, q: Tensor, v: Tensor, retain: Tensor, write: Tensor, reset: Tensor, weight: Tensor) -> Any:
        masks = {"write_mask": write, "reset_mask": reset}
        gates = Gates(lr=0.25, retain=retain)
        return memory_scan(self.config, q, q, v, gates, initial={"weight": weight}, **masks, name="own")


def everything(batch: int, length: int) -> tuple[Tensor, ...]:
    q, v = drawn(batch, length, 2, 4), drawn(batch, length, 2, 3, seed=2)
    masks = (drawn(batch, length, seed=seed) > 0 for seed in (3, 4))
    return q, v, drawn(batch, length, 2, seed=5).sigmoid(), *masks, drawn(2, 3, 4, seed=6)


# torch's own scan asks for leaves in a way that torch has left behind.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.parametrize("fields", [
    {"normalizer": "sum", "bias": "dot", "feature_map": "elu"}, pytest.param({"chunk": 4}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.spec("ENG-EXPORT-D1", "ENG-EXPORT-D2")
def test_numbers_masks_and_starts_reach_the_operator_and_its_loop(fields):
    config = MemoryConfig.model_validate({"retention": "decay", "key_norm": "l2", **fields})
    own = Scan(config)
    found = program(own, *everything(2, 6), q=OPEN, v=OPEN, retain=OPEN, write=OPEN, reset=OPEN, weight=None)
    table = {torch.ops.hecate.memory_scan.default: as_loop}
    looped = found.run_decompositions(table)
    assert not [node for node in looped.graph.nodes if "hecate" in str(node.target)]
    for batch, length in ((1, 1), (3, 11)):
        given = everything(batch, length)
        near(found.module()(*given), own(*given))
        near(looped.module()(*given), own(*given))


@pytest.mark.spec("ENG-EXPORT-D1")
def test_the_operator_is_one_of_torchs():
    (node,) = scans(exported("gated_delta")[1])
    call = node.args[0]
    shapes = [n.meta["val"] for n in node.args[1]]
    sizes = {str(shapes[0].shape[0]): 3, str(shapes[0].shape[1]): 5}
    tensors = [torch.rand([sizes.get(str(s), s) for s in x.shape]).to(x.dtype).requires_grad_() for x in shapes]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    assert set(torch.library.opcheck(memory_scan_operator, (call, tensors), test_utils=tests).values()) == {"SUCCESS"}

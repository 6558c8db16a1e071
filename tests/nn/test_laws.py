"""What holds for every layer: in pieces, packed, padded, cut short, drawn, learning, and under torch's transforms.

A layer has `d_model`, and takes `x [B, T, d_model]`, a state, a write mask and a reset mask; it gives outputs and the
state after them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from hecate import MemoryConfig, MemoryState
from hecate.cms import SelfReferential
from hecate.models import LinearTransformer
from hecate.nn import Composed, LinearAttention, Memory, PerformerAttention, SlidingAttention
from tests.cms import common as cms
from tests.cms import test_carry as carry
from tests.cms import test_local as local
from tests.cms import test_self_referential as self_referential
from tests.models import test_mixers as mixers
from tests.nn import test_memory_as_phi as as_phi
from tests.nn import test_performer as performer
from tests.nn.attentions import CONFIGS, HEADS, composed_of, masks_of, sliding_of
from tests.nn.attentions import D_MODEL as WIDTH
from tests.nn.layers import (
    OTHER_RULES,
    drawn_alike,
    in_pieces,
    layer_of,
    leaves,
    near,
    own_layers,
    rules,
    seeded,
    untouched,
)
from tests.nn.test_build import MIXED
from tests.nn.test_feature_memory import INNERS, OUTER
from tests.nn.test_linear_attention import LEARNING, STREAMS
from tests.nn.test_linear_attention import layer_of as linear
from tests.nn.test_sliding import LAYERS as SLIDING
from tests.phi.examples import examples, named

LENGTH = 9
WEIGHED = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}

MADE: dict[str, Callable[[], nn.Module]] = {
    **{f"memory {name}": partial(layer_of, config) for name, config in rules().items()},
    **{f"memory, {name}": partial(layer_of, WEIGHED, engine=name) for name in ("sequential", "parallel")},
    **{f"features {name}": partial(layer_of, OUTER, feature_memory=inner) for name, inner in INNERS.items()},
    **{f"phi {name}": partial(as_phi.built, name) for name in as_phi.INNERS},
    **{f"linear {name}": partial(linear, **options) for name, options in STREAMS.items()},
    **{f"all {name}": partial(linear, causal=False, **options) for name, options in STREAMS.items()},
    **{
        f"performer {name}": partial(performer.layer_of, **performer.KERNELS[name])
        for name in ("positive", "hyperbolic", "sqrt")
    },
    **{f"sliding {name}": partial(sliding_of, **options) for name, options in SLIDING.items()},
    **{f"composed {name}": partial(composed_of, name) for name in CONFIGS},
    **{f"cms {'-'.join(join)}": partial(cms.cms_of, *join) for join in cms.JOINS},
    **{
        f"cms {name}": partial(cms.cms_of, "nested", levels=levels)
        for name, levels in {"carrying": cms.CARRYING, "frozen": cms.FROZEN, "gated": cms.GATED}.items()
    },
    **{f"cms carry {name}": partial(carry.tree_of, **rule) for name, rule in carry.OTHERS.items()},
    **{f"cms local {name}": partial(local.two_scales, name) for name in ("none", "sum", "orthogonal")},
    **{
        f"self {name}": lambda name=name: self_referential.layer_of(self_referential.config_of(name))
        for name in self_referential.CASES
    },
    **{
        f"self {name}, twice": lambda name=name: self_referential.layer_of(
            self_referential.config_of(name, erase="twice")
        )
        for name in ("delta", "far", "all", "momentum", "before")
    },
    "self features": lambda: self_referential.layer_of(
        self_referential.config_of(),
        feature_memory=MemoryConfig(retention="decay", algorithm={"kind": "gd", "lr": 0.3}),
    ),
}
FORGETFUL = [name for name in MADE if name.startswith("all")]  # a token sees those after it
ORDERED = [name for name in MADE if name not in FORGETFUL]
PLAIN = [  # which differ from others by their scans alone, or by a sum at the end
    *(f"memory {name}" for name in rules() if name not in own_layers()),
    *(f"self {name}" for name in ("few", "before", "huber", "dot", "elu")),
    *(f"self {name}" for name in ("order", "order in chunks", "order at commits")),
    *(f"self {name}, twice" for name in ("delta", "all", "momentum", "before")),
    *(f"all {name}" for name in ("none", "cosformer", "favor", "before")), "linear none", "linear favor",
    "cms independent-rsqrt", "cms independent-learned", "composed mag_add", "composed mac_add", "sliding plain",
]  # fmt: skip
# One of every class and of every way through it.
FEW = [
    "memory, sequential", "memory, parallel", "memory deep", "features delta", "linear elu", "linear decay", "all elu",
    "sliding narrow", "sliding full", "composed mag", "composed mal_paper", "composed mac", "cms nested-sum",
    "cms independent-gated", "self far", "self chunks",
]  # fmt: skip
every = pytest.mark.parametrize("name", [name for name in MADE if name not in PLAIN])
ordered = pytest.mark.parametrize("name", [name for name in ORDERED if name not in PLAIN])
few = pytest.mark.parametrize("name", FEW)
UNSEEN = [name for name in FEW if "nested" not in name]  # that need not look at masks to know where to cut


@cache
def layer_named(name: str) -> nn.Module:
    return MADE[name]()


def inputs(layer: nn.Module, batch: int = 2, length: int = LENGTH, seed: int = 2) -> Tensor:
    return torch.randn(batch, length, int(layer.d_model), generator=seeded(seed))


def goes_on_alike(layer: nn.Module, state: Any, other: Any) -> None:
    """What is read of two states and written to them is the same."""
    more = inputs(layer, leaves(state)[0].shape[0] if leaves(state) else 2, 3, seed=9)
    near(layer(more, state)[0], layer(more, other)[0], what="what comes after")


@pytest.mark.spec("NN-MEM-I1", "NN-CONV-I1", "NN-MEM-I3", "NN-MEM-I4", "NN-FEAT-I1", "LIN-ATT-I2")
@pytest.mark.spec("ATT-SLIDE-I1", "ATT-SLIDE-I2", "ATT-COMP-I1", "CMS-LAYER-I1", "CMS-NEST-I1", "SELF-LAYER-I1")
@pytest.mark.spec("NN-FEAT-D2", "CMS-CARRY-I1", "CMS-TNT-I1", "GATE-STATE-I1")
@pytest.mark.parametrize("name", ORDERED)
def test_any_split(name: str) -> None:
    """Pieces of two, one, no, four and two tokens under masks, with gradients; and token by token."""
    layer = layer_named(name)
    x, masks = inputs(layer).requires_grad_(), masks_of(2, LENGTH, seed=sum(map(ord, name)), reset=0.2)
    for cuts, given in (([2, 3, 3, 7], masks), ([0, *range(LENGTH)], {})):
        with torch.set_grad_enabled(given is masks and name not in PLAIN):
            (y, state), (pieces, last) = layer(x, **given), in_pieces(layer, x, cuts, **given)
            near(pieces, y, what="y")
            near([leaf.double() for leaf in leaves(last)], [leaf.double() for leaf in leaves(state)], what="state")
            goes_on_alike(layer, last, state)
        if y.requires_grad:
            wanted = [x, *layer.parameters()]
            near(*(torch.autograd.grad(z.square().sum(), wanted, materialize_grads=True) for z in (pieces, y)), 1e-9)


@pytest.mark.spec("NN-MEM-I3", "NN-FEAT-I1", "ATT-SLIDE-I2", "ATT-COMP-I1", "CMS-LAYER-I1", "CMS-LAYER-I2")
@pytest.mark.spec("SELF-LAYER-I2")
@ordered
def test_padding_is_as_none_and_a_masked_token_leaves_the_memory_bit_for_bit(name: str) -> None:
    layer, padded = layer_named(name), 4
    x, write = inputs(layer), (torch.arange(padded + LENGTH) >= padded).expand(2, -1)
    y, state = layer(torch.cat([inputs(layer, length=padded, seed=5), x], 1), write_mask=write)
    expected, last = layer(x)
    near(y[:, padded:], expected)
    goes_on_alike(layer, state, last)
    _, after = layer(inputs(layer, length=3, seed=8), last, write_mask=torch.zeros(2, 3, dtype=torch.bool))
    near(memories_of(after), memories_of(last), 0.0)


def memories_of(state: Any) -> list[MemoryState]:
    parts = pytree.tree_leaves(state, is_leaf=lambda item: isinstance(item, MemoryState))
    return [item for item in parts if isinstance(item, MemoryState)]


@pytest.mark.spec("NN-MEM-I4", "NN-CONV-I2", "LIN-ATT-I4", "ATT-SLIDE-I2", "ATT-COMP-I1", "CMS-LAYER-I2", "NN-FEAT-I1")
@every
def test_packed_documents_equal_separate_runs(name: str) -> None:
    layer = layer_named(name)
    x, borders = inputs(layer, 1), [0, 2, 3, 7, LENGTH]  # a document shorter than a convolution among them
    alone = [layer(x[:, at:end]) for at, end in pairwise(borders)]
    reset = torch.zeros(1, LENGTH, dtype=torch.bool)
    reset[0, borders[1:-1]] = True
    y, state = layer(x, reset_mask=reset)
    near(y, torch.cat([item[0] for item in alone], 1))
    if name in ORDERED:
        goes_on_alike(layer, state, alone[-1][1])


@pytest.mark.spec("NN-MEM-I2", "LIN-ATT-I2", "ATT-COMP-I2", "CMS-LAYER-I1", "SELF-CHUNK-E1", "NN-FEAT-I1")
@pytest.mark.parametrize(
    ("name", "length"),
    [
        *((name, LENGTH) for name in ORDERED if name not in PLAIN),
        *((name, 40) for name in ORDERED if name.startswith("linear")),
    ],
)
def test_a_changed_token_changes_nothing_before_it(name: str, length: int) -> None:
    layer = layer_named(name)
    _, state = layer(inputs(layer, 1, 3, seed=3))  # there is something to say
    x = inputs(layer, 1, length)
    y, _ = layer(x, state)
    for at in (3, length - 1):
        changed = x.clone()
        changed[:, at] += 1.0
        other, _ = layer(changed, state)
        near(other[:, :at], y[:, :at], 0.0 if name.startswith("linear") else 1e-13)
        assert (other[:, at] - y[:, at]).abs().max() > 1e-4


@pytest.mark.spec("NN-MEM-I6", "LIN-ATT-I6", "ATT-SLIDE-I1", "ATT-COMP-I1", "CMS-LAYER-I1")
@every
def test_no_sequence_no_token_one_token_and_inputs_that_stay_as_they_are(name: str) -> None:
    layer = layer_named(name)
    for batch, length, masks in ((0, 3, {}), (2, 0, masks_of(2, 0))):
        x = inputs(layer, batch, length)
        y, state = layer(x, **masks)
        assert y.shape == x.shape
        if name in ORDERED:
            assert layer(inputs(layer, batch, 1), state)[0].shape == (batch, 1, x.shape[-1])
    x, masks = inputs(layer), masks_of(2, LENGTH)
    state = layer(x, **masks)[1] if name in ORDERED else None
    given_tensors = [x, *masks.values(), *leaves(state)]
    before = [item.clone() for item in given_tensors]
    layer(x, state, **masks)[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(given_tensors, before, strict=True))


@pytest.mark.spec("NN-MEM-I1", "NN-MEM-I6")
@pytest.mark.parametrize("name", [name for name in FEW if name in ORDERED])
def test_inference_mode_goes_on_from_its_own_states(name: str) -> None:
    layer = layer_named(name)
    x = inputs(layer)
    with torch.inference_mode():
        y, _ = in_pieces(layer, x, [4, 5])
    near(y, layer(x)[0])


@pytest.mark.spec("NN-MEM-I1", "SELF-LAYER-I1")
@pytest.mark.parametrize("name", dict.fromkeys([*FEW, *(x for x in MADE if x.startswith(("self", "cms local")))]))
def test_states_of_another_precision_are_gone_on_from(name: str) -> None:
    layer = layer_named(name)
    x = inputs(layer, length=3)  # self-references under dot grow with their own size
    narrow = copy.deepcopy(layer).float()
    _, state = layer(x)
    _, low = narrow(x.float())
    near(layer(x, low)[0], layer(x, state)[0], 1e-2)
    near(narrow(x.float(), state)[0].double(), layer(x, state)[0], 1e-2)


@pytest.mark.spec("NN-MEM-I6", "ATT-COMP-I1", "CMS-LAYER-I1", "SELF-LAYER-I1")
@few
def test_the_state_is_a_pytree_that_carries_gradients_and_detaches(name: str) -> None:
    layer = layer_named(name)
    early, later = inputs(layer).requires_grad_(), inputs(layer, seed=3)
    _, state = layer(early)
    y, _ = layer(later, state)
    (through,) = torch.autograd.grad(y.square().sum(), early)
    assert through.norm() > 1e-6
    assert not any(item.requires_grad for item in leaves(state.detach()))
    near(layer(later, state.detach())[0], y, 0.0)
    assert state.bytes == sum(item.numel() * item.element_size() for item in leaves(state))
    if name != "sliding full":
        assert layer(inputs(layer, length=40))[1].bytes == state.bytes


@pytest.mark.spec("ATT-SLIDE-I4")
@pytest.mark.parametrize("name", [name for name in MADE if name.startswith("sliding")])
def test_tangents_pass_through_attention(name: str) -> None:
    layer = layer_named(name)
    x, way, weight = inputs(layer), inputs(layer, seed=3), inputs(layer, seed=4)
    _, slope = torch.func.jvp(lambda x: layer(x)[0], (x,), (way,))
    (back,) = torch.autograd.grad((layer(x.requires_grad_())[0] * weight).sum(), x)
    near((slope * weight).sum(), (back * way).sum())


@pytest.mark.spec("LIN-ATT-I6", "ATT-SLIDE-I4")
@pytest.mark.parametrize(("name", "reentrant"), [*zip(FEW, cycle((False, True)), strict=False)])
def test_inside_a_checkpoint(name: str, reentrant: bool) -> None:
    layer = MADE[name]()
    x = inputs(layer).requires_grad_()
    wanted = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x)[0].square().sum(), wanted, materialize_grads=True)
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant).square().sum().backward()
    near([torch.zeros_like(item) if item.grad is None else item.grad for item in wanted], list(plain), 1e-12)


@pytest.mark.spec("NN-MEM-I11", "LIN-ATT-I6", "ATT-SLIDE-I4", "SELF-LAYER-I2")
@pytest.mark.parametrize("name", UNSEEN)
def test_per_sample_gradients(name: str) -> None:
    layer = layer_named(name)
    x, parameters = inputs(layer, 3), dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, parameters, (row[None],))[0]
        return y.square().sum()

    with sdpa_kernel(SDPBackend.MATH):  # another has no derivative under vmap
        together = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for index, row in enumerate(x):
        alone = torch.autograd.grad(loss(parameters, row), list(parameters.values()), materialize_grads=True)
        near([item[index] for item in together.values()], list(alone), 1e-9)


def short(config: MemoryConfig) -> MemoryConfig:
    """As few tokens as tests have decide nothing in a longer chunk that ends in a commit."""
    return config.model_copy(update={"chunk": min(config.chunk, 3)}) if config.commit == "chunk" else config


# Layers fresh from their initialisation, and what `untouched` is to do; named rules: see test_named.
FRESH: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    **{f"memory {name}": (partial(layer_of, short(rules()[name])), {}) for name in OTHER_RULES},
    **{
        f"phi {named(item)}": (partial(layer_of, {**WEIGHED, "feature_map": item}), {})
        for item in examples()
        if item.init(6, heads=2)["learned"]
    },
    **{f"features {name}": (partial(layer_of, OUTER, feature_memory=inner), {}) for name, inner in INNERS.items()},
    **{f"linear {name}": (partial(linear, **options), {"steps": 1}) for name, options in LEARNING.items()},
    "cross": (
        partial(linear, causal=False, d_context=5),
        {"steps": 1, "context": torch.randn(2, 5, 5, generator=seeded(), dtype=torch.float64)},
    ),
    "sliding": (partial(sliding_of, 4, persistent=2), {"steps": 1}),
    **{f"composed {name}": (partial(composed_of, name), {"length": 11}) for name in CONFIGS},
    **{f"cms {'-'.join(join)}": (partial(cms.cms_of, *join), {"steps": 3, "length": 16}) for join in cms.JOINS},
}  # fmt: skip


@pytest.mark.spec("NN-MEM-I10", "NN-FEAT-I1", "LIN-ATT-I6", "ATT-SLIDE-I4", "CMS-LAYER-I5")
@pytest.mark.parametrize("name", FRESH)
def test_every_parameter_learns_from_a_cold_start(name: str) -> None:
    build, how = FRESH[name]
    assert untouched(build(shake=0.0), **how) == []


def drawn(kind: Callable[..., nn.Module], *sizes: Any, **fields: Any) -> Callable[..., nn.Module]:
    return lambda seed=0, **how: kind(*sizes, **fields, generator=seeded(seed), **how)


def composed_drawn(name: str, generator: torch.Generator, **how: Any) -> nn.Module:
    memory = Memory(WIDTH, 2, generator=generator, **how)
    return Composed(WIDTH, HEADS, CONFIGS[name], memory, generator=generator, **how)


FAR = self_referential.config_of("far", memory={"feature_map": "hedgehog", "key_norm": "l2"})
DRAWN: dict[str, Callable[..., nn.Module]] = {
    "memory": drawn(Memory, 12, 2, MIXED),
    "linear": drawn(LinearAttention, 12, 4, kv_heads=2, feature_map="favor", positions="circulant_string"),
    "performer": drawn(PerformerAttention, WIDTH, HEADS),
    "sliding": drawn(SlidingAttention, WIDTH, HEADS, window=4, persistent=2),
    **{f"composed {name}": drawn(composed_drawn, name) for name in ("mag", "mal", "mac")},
    **{f"cms {'-'.join(join)}": partial(cms.cms_of, *join, shake=0.0) for join in cms.JOINS},
    "self": drawn(SelfReferential, 6, 2, FAR),
    "linear transformer": drawn(LinearTransformer.build, embed_dim=5, hidden_size=8, num_heads=2, num_layers=2),
    **{f"model {name}": partial(mixers.model_of, **mixers.MIXERS[name][0]) for name in ("plain", "hope")},
}


@pytest.mark.spec("NN-MEM-I5", "NN-MEM-I7", "ATT-SLIDE-I4", "LIN-ATT-I6", "TRF-PERF-I1", "SELF-START-I1", "LM-MODEL-I4")
@pytest.mark.spec("TRF-LIN-I3")
@pytest.mark.filterwarnings("ignore::hecate.errors.HealthWarning")  # of the chain
@pytest.mark.parametrize("name", DRAWN)
def test_one_seed_one_layer_however_it_is_made(name: str) -> None:
    drawn_alike(DRAWN[name])


# Layers fresh from their initialisation; the part of a state that stays in float32; and how often a number is rounded
# between x and y: by projections, convolutions, norms, gates and what is answered.
LOW: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], int]] = {
    "memory": (partial(layer_of, WEIGHED, shake=0.0), lambda state: state.memory, 10),
    "memory, sequential": (partial(layer_of, WEIGHED, shake=0.0, engine="sequential"), lambda state: state.memory, 10),
    "memory without taps": (partial(layer_of, WEIGHED, shake=0.0, conv_kernel=0), lambda state: state.memory, 10),
    "linear": (partial(linear, shake=0.0), lambda state: state, 6),
    "all linear": (partial(linear, shake=0.0, causal=False), lambda state: state, 6),
    "sliding": (lambda: SlidingAttention(16, 2, window=6, persistent=1, generator=seeded()), lambda state: (), 6),
    **{
        f"composed {kind}": (partial(composed_of, kind, shake=0.0), lambda state: state.memory.memory.memory, 18)
        for kind in ("mag", "mal", "mac")
    },
    "self far": (
        lambda: self_referential.layer_of(self_referential.config_of("far"), shake=0.0), lambda state: state.boxes, 12
    ),
    "cms local": (
        partial(local.two_scales, "sum", shake=0.0),
        lambda state: [level.memory for level in state.levels],
        30,
    ),
}  # fmt: skip


@pytest.mark.spec("NN-MEM-I12", "ATT-SLIDE-I4", "LIN-ATT-I1", "LIN-ATT-I6", "SELF-LAYER-I2", "CMS-TNT-I1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
def test_low_precision_by_autocast_and_by_the_module(name: str, dtype: torch.dtype) -> None:
    build, held, roundings = LOW[name]
    layer, tolerance = build().float(), roundings * torch.finfo(dtype).eps
    x = inputs(layer, length=32).float()
    expected, _ = layer(x)
    size = expected.norm()
    with torch.autocast("cpu", dtype=dtype):
        first, state = layer(x[:, :9])
        rough = [layer(x)[0]] if name.startswith("all") else [first, layer(x[:, 9:], state)[0]]
    y = torch.cat(rough, 1).float()
    near(y / size, expected / size, tolerance)
    assert {item.dtype for item in leaves(held(state)) if item.is_floating_point()} <= {torch.float32}
    y.square().mean().backward()
    assert {item.grad.dtype for item in layer.parameters()} == {torch.float32}
    low, after = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    assert {item.dtype for item in leaves(held(after)) if item.is_floating_point()} <= {torch.float32}
    near(low.float() / size, expected / size, tolerance)


COMPILED = [
    ("memory, parallel", "aot_eager"), *((name, "eager") for name in ("linear elu", "sliding narrow", "self far")),
    *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in (
        "linear elu", "features delta", "sliding narrow", "self far", "memory, sequential", "performer positive",
        "all string", "all decay", "sliding full", "composed mag", "linear cosformer", "linear decay",
        "composed mal_paper",
        "memory deep", "cms independent-gated", "self chunks")),
]  # fmt: skip


@pytest.mark.spec("NN-MEM-I11", "NN-FEAT-I1", "LIN-ATT-I6", "ATT-SLIDE-I4", "SELF-LAYER-I2")
@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_compiles_to_one_graph(name: str, backend: str) -> None:
    torch._dynamo.reset()
    layer = MADE[name]()
    length = 70 if name.startswith("sliding") else 1 if name.startswith("self") else 2  # blocks, or tokens
    x, masks = inputs(layer, length=length).requires_grad_(), masks_of(2, length)
    state = None if name in FORGETFUL else layer(inputs(layer, length=2))[1].detach()
    got = torch.compile(layer, backend=backend, fullgraph=True)(x, state, **masks)
    expected = layer(x, state, **masks)
    near([got[0], *leaves(got[1])], [expected[0], *leaves(expected[1])])
    slopes = (torch.autograd.grad(y.square().sum(), x)[0] for y, _ in (got, expected))
    near(*slopes, 1e-10)

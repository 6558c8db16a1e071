"""torch.func, gradcheck, compile, checkpoint and autocast around a scan; low precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.engine.cpu.engine import TOKENS
from hecate.errors import ConfigError
from hecate.nn import Memory
from hecate.rule import RULES
from tests.memories import DEEP, case_of, close, config_of, flat_state, ways

CONFIGS = {
    "titans": {"retention": "decay", "algorithm": "momentum", "feature_map": "elu", "key_norm": "l2"},
    "gated delta": {"retention": "decay", "decay_order": "before_gradient", "step": "implicit"},
    "linear attention": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "deep frozen": {"structure": DEEP, "chunk": 2, "bias": {"kind": "lp", "p": 1.5, "eps": 0.3}},
    "chunk": {"chunk": 3, "commit": "chunk", "retention": "decay", "algorithm": "momentum"},
}
OMEGA = {"algorithm": {"kind": "omega", "lr": 0.3, "window": 3, "decay": 0.9}, "retention": "decay"}
FIRST = {"retention": "decay", "decay_order": "before_gradient"}
CUBIC = {"kind": "newton_schulz", "polynomial": "cubic", "steps": 3}
IN_CHUNKS = {
    "frozen, decayed first": ("chunk", {**FIRST, "chunk": 3}),
    "committed, decayed first": ("chunk", {**FIRST, "chunk": 3, "commit": "chunk"}),
    "window": ("window", {**OMEGA, "feature_map": {"kind": "polynomial", "degree": 2}, "key_norm": "l2"}),
    "window, one step a chunk": ("window", {**OMEGA, "chunk": 3, "commit": "chunk"}),
    "newton_schulz": ("window", {**FIRST, "algorithm": CUBIC}),
    "newton_schulz, frozen": ("window", {**FIRST, "algorithm": CUBIC, "chunk": 3}),
    "deep momentum": ("factored", {"algorithm": {"kind": "deep_momentum", "width": 3}, "retention": "decay"}),
}
PAIRS = ways(CONFIGS)
FROZEN = [("deep frozen", "chunk"), ("chunk", "chunk")]
CONFIGS |= {name: fields for name, (_, fields) in IN_CHUNKS.items()}


def by(pairs: list[tuple[str, str]]) -> pytest.MarkDecorator:
    rows = [(*pair, autodiff) for pair in pairs for autodiff in ("tape", "torch")]
    return pytest.mark.parametrize(("name", "engine", "autodiff"), rows)


EVERY = by(PAIRS)
ALL = by([*PAIRS, *FROZEN, *((name, engine) for name, (engine, _) in IN_CHUNKS.items())])
MAPPED = by([*PAIRS, *FROZEN, *((name, engine) for name, (engine, _) in IN_CHUNKS.items() if engine == "chunk")])


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """So that a few tokens are several steps of a chunk, and several blocks."""
    monkeypatch.setattr("hecate.engine.chunk.engine.DUAL", 2)
    for name, size in (("blocks.SIZE", 2), ("blocks.AGAIN", 2), ("chunks.SIZE", 2)):
        monkeypatch.setattr(f"hecate.engine.window.{name}", size)


def function_of(case, engine: str, autodiff: str):
    """A scan as a function of the tensors it takes, returning outputs and one summed state."""

    def scan(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        y, state = case.with_leaves(list(leaves)).scan(engine=engine, autodiff=autodiff)
        return y, sum(state.memory.values(), torch.zeros(())) if len(state.memory) == 1 else y

    return scan


@pytest.mark.spec("ENG-FUNC-I1", "ENG-CHUNK-V2")
@ALL
def test_gradcheck_and_gradgradcheck(name, engine, autodiff):
    case = case_of(config_of(**CONFIGS[name]), batch=1, heads=1, length=4, d=2, masks=True).fresh()
    scan = function_of(case, engine, autodiff)
    assert torch.autograd.gradcheck(scan, case.leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(scan, case.leaves, fast_mode=True)


@pytest.mark.spec("ENG-FUNC-I2", "ENG-CHUNK-I3")
@MAPPED
def test_functional_transforms_agree_with_autograd(name, engine, autodiff):
    case = case_of(config_of(**CONFIGS[name]), batch=1, heads=2, length=4, d=2)
    scan = function_of(case, engine, autodiff)

    def loss(*leaves: Tensor) -> Tensor:
        y, state = scan(*leaves)
        return y.sin().sum() + state.square().sum()

    fresh = case.fresh().leaves
    expected = torch.autograd.grad(loss(*fresh), fresh)
    wanted = tuple(range(len(fresh)))
    grads = torch.func.grad(loss, argnums=wanted)(*case.leaves)
    for mine, true in zip(grads, expected, strict=True):
        close(mine, true, 1e-11)
    # A batch of three by vmap against a loop.
    batch = [torch.stack([leaf, 0.5 * leaf, 0.9 * leaf]) for leaf in case.leaves]
    mapped = torch.func.vmap(torch.func.grad(loss, argnums=wanted))(*batch)
    for row in range(3):
        single = torch.func.grad(loss, argnums=wanted)(*(leaf[row] for leaf in batch))
        for mine, true in zip(mapped, single, strict=True):
            close(mine[row], true, 1e-11)


@pytest.mark.spec("ENG-FUNC-I2")
@EVERY
def test_jacrev_twice_is_the_hessian(name, engine, autodiff):
    case = case_of(config_of(**CONFIGS[name]), batch=1, heads=1, length=3, d=2)
    scan = function_of(case, engine, autodiff)

    def loss(k: Tensor) -> Tensor:
        leaves = list(case.leaves)
        leaves[1] = k
        return scan(*leaves)[0].square().sum()

    hessian = torch.func.jacrev(torch.func.jacrev(loss))(case.k).reshape(6, 6)
    assert float(hessian.norm()) > 0.01
    close(hessian, hessian.mT, 1e-10)
    expected = torch.autograd.functional.hessian(loss, case.k).reshape(6, 6)
    close(hessian, expected, 1e-10)


COMPILED = [  # engines, by tape and by torch
    ("titans", "parallel", "tape"), ("deep frozen", "sequential", "torch"),
    ("committed, decayed first", "chunk", "tape"),
    *(pytest.param(*way, marks=pytest.mark.slow) for way in (
        ("titans", "sequential", "tape"), ("linear attention", "parallel", "torch"), ("titans", "sequential", "torch"),
        ("titans", "parallel", "torch"), ("chunk", "sequential", "tape"))),
]  # fmt: skip


@pytest.mark.spec("ENG-COMPILE-I1")
@pytest.mark.parametrize(("name", "engine", "autodiff"), COMPILED)
def test_compiles_to_one_graph_with_the_same_gradients(name, engine, autodiff):
    torch._dynamo.reset()
    length, masks = (3, False) if engine == "chunk" else (2, True)
    case = case_of(config_of(**CONFIGS[name]), batch=1, length=length, masks=masks)

    def step(*leaves: Tensor) -> tuple[Tensor, ...]:
        y, state = case.with_leaves(list(leaves)).scan(engine=engine, autodiff=autodiff)
        return y, *(t for t in flat_state(state).values() if t.is_floating_point())

    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = case.fresh().leaves
        outputs = run(*leaves)
        grads = torch.autograd.grad([item.square().sum() for item in outputs], leaves, materialize_grads=True)
        results.append((*outputs, *grads))
    for mine, true in zip(*results, strict=True):
        close(mine, true, 1e-12)


# Whose engine is chosen by what a compiler cannot trace of a config; a cascade; draws; and by night every rule.
BY_DAY = ("gsa", "titans", "trellis", "deep_momentum")
FIRST = [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.slow) for name in RULES]


@pytest.mark.spec("ENG-COMPILE-I1")
@pytest.mark.parametrize("name", FIRST)
def test_the_first_call_of_a_rule_compiles(name):
    """As many tokens as kernels start at, by a layer of which nothing was asked before."""
    torch._dynamo.reset()
    layer = Memory(4, heads=1, config=named_rule(name), generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, TOKENS, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)[0]
        layer.engine = "sequential"
        close(found, layer(x)[0], 1e-9)


@pytest.mark.spec("ENG-COMPILE-I1")
@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_tape_compiles_whatever_is_differentiated(leaves):
    """Nothing; the queries alone; all, and the keys are values as well."""
    torch._dynamo.reset()
    config = config_of(bias="huber", key_norm="l2")
    q, k = torch.randn(2, 1, 3, 1, 3, generator=torch.Generator().manual_seed(0)).unbind()
    inputs = [x.clone().requires_grad_(place < leaves) for place, x in enumerate((q, k))]

    def scan(*inputs):
        return memory_scan(config, *inputs, inputs[1], engine="parallel", autodiff="tape")[0]

    found, expected = torch.compile(scan, backend="eager", fullgraph=True)(*inputs), scan(*inputs)
    close(found, expected, 1e-12)
    if leaves:
        mine, true = (torch.autograd.grad(y.sin().sum(), inputs[:leaves]) for y in (found, expected))
        for pair in zip(mine, true, strict=True):
            close(*pair, 1e-12)


@pytest.mark.spec("ENG-FUNC-I3")
@pytest.mark.spec("ENG-COMPILE-I1")
@pytest.mark.parametrize("gate", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_one_process_compiles_configs_and_gates_of_other_numbers(gate):
    """From the second number on, the compiler takes a config's floats and gates for symbols."""

    def scan(config, gates, *inputs):
        return memory_scan(config, *inputs, gates)[0]

    q, k, v = (torch.randn(1, 2, 1, 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    for number in (0.9, 0.7, 0.6):
        config = MemoryConfig(
            retention={"kind": "decay", "retain": number},
            algorithm={"kind": "momentum", "lr": number / 2, "momentum": number / 3},
            key_norm="l2",
            state_dtype="float64",
        )
        gates = None if gate is None else Gates(gate * number, number**2, number / 4)
        close(compiled(config, gates, q, k, v), scan(config, gates, q, k, v), 1e-12, f"{number}")


@pytest.mark.spec("ENG-COMPILE-I2")
@pytest.mark.parametrize("engine", [pytest.param("sequential", marks=pytest.mark.slow), "parallel"])
def test_other_tensors_of_the_same_shapes_compile_nothing_anew(engine):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    config = config_of(**CONFIGS["titans"])
    compiled = torch.compile(lambda *x: memory_scan(config, *x, engine=engine)[0], backend=counter, fullgraph=True)
    for seed in range(3):
        compiled(*torch.randn(3, 1, 4, 1, 3, generator=torch.Generator().manual_seed(seed)).unbind())
    assert counter.frame_count == 1


@EVERY
def test_inside_activation_checkpointing(name, engine, autodiff):
    case = case_of(config_of(**CONFIGS[name]), length=5)
    scan = function_of(case, engine, autodiff)
    results = []
    for around in (lambda *x: scan(*x)[0], lambda *x: checkpoint(scan, *x, use_reentrant=False)[0]):
        leaves = case.fresh().leaves
        y = around(*leaves)
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaves)))
    assert all(torch.equal(mine, true) for mine, true in zip(*results, strict=True))


@pytest.mark.spec("TAPE-BRIDGE-I2")
@pytest.mark.parametrize("name", ["gsa", "oja", "ttt_mlp"])
def test_gradients_asked_for_under_hooks_and_in_batches(name):
    """Hooks on saved tensors stay out of the way back, and many cotangents at once are those of one after another."""
    case = case_of(named_rule(name), length=33, d=4, width=4).fresh()
    y, _ = case.scan()
    ways = torch.randn(2, *y.shape)
    single = [torch.autograd.grad(y, case.leaves, way, retain_graph=True, allow_unused=True) for way in ways]
    with torch.autograd.graph.save_on_cpu():
        hooked = torch.autograd.grad(y, case.leaves, ways[0], retain_graph=True, allow_unused=True)
    batched = torch.autograd.grad(y, case.leaves, ways, is_grads_batched=True, allow_unused=True)
    for both, *alone, under in zip(batched, *single, hooked, strict=True):
        assert (both is None) == (alone[0] is None)
        if both is not None:
            assert torch.equal(under, alone[0])
            torch.testing.assert_close(both, torch.stack(alone), rtol=1e-9, atol=1e-11)


@pytest.mark.spec("ENG-DTYPE-I1")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize("engine", ["sequential", "parallel"])
def test_autocast_does_not_reach_the_memory(engine, autodiff):
    """Under bfloat16 autocast, a float32 scan is the float32 scan, forward and backward."""
    case = case_of(MemoryConfig(**CONFIGS["titans"]), length=9, dtype=torch.float32)
    results = []
    for low in (False, True):
        own = case.fresh()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y, state = own.scan(engine=engine, autodiff=autodiff)
            total = y.sin().sum()
            if engine == "parallel" or autodiff == "tape":  # else operations of torch, which autocast reaches
                results.append((y, state.memory["weight"], *torch.autograd.grad(total, own.leaves, retain_graph=True)))
        results.append((y, state.memory["weight"], *torch.autograd.grad(total, own.leaves)))
    assert all(item.dtype == torch.float32 for found in results for item in found)
    assert all(torch.equal(mine, true) for found in results for mine, true in zip(found, results[0], strict=True))


@pytest.mark.spec("ENG-DTYPE-I2")
@pytest.mark.parametrize("engine", ["sequential", "parallel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_lose_only_their_own_rounding(engine, dtype):
    """The memory runs in float32: the result is that of the rounded inputs, rounded once."""
    config = MemoryConfig(retention="decay", algorithm="momentum", key_norm="l2")
    case = case_of(config, length=40, dtype=dtype).fresh()
    y, state = case.scan(engine=engine)
    assert y.dtype == dtype and state.memory["weight"].dtype == torch.float32
    grads = torch.autograd.grad(y.float().sin().sum(), case.leaves)
    assert all(grad.dtype == dtype for grad in grads)
    wide = case.with_leaves([leaf.detach().float() for leaf in case.leaves])
    expected, _ = wide.scan(engine=engine)
    unit = torch.finfo(dtype).eps
    assert bool(((y.float() - expected).abs() <= unit / 2 * expected.abs() + 1e-6).all())


@pytest.mark.spec("ENG-DTYPE-I3")
@pytest.mark.parametrize("engine", ["sequential", "parallel"])
def test_float32_errors_stay_within_the_bound_of_their_operations(engine):
    """With lr |phi|^2 <= 1 a token adds a few roundings to the state, T of them T times that."""
    length = 300
    fields = {"retention": "decay", "decay_order": "before_gradient", "key_norm": "l2"}
    case = case_of(MemoryConfig(**fields), length=length, d=8, width=4, dtype=torch.float32)
    y, _ = case.scan(engine=engine)
    double = case.with_leaves([leaf.double() for leaf in case.leaves])
    exact, _ = double._replace(config=MemoryConfig(state_dtype="float64", **fields)).scan()
    unit = torch.finfo(torch.float32).eps / 2
    # 8 products and 7 sums per prediction, as many per read, 3 operations per write.
    bound = length * (15 + 15 + 3) * unit * float(exact.abs().max())
    assert 0 < float((y - exact).abs().max()) <= bound
    # In practice far below, because errors of a contraction do not add up.
    assert float((y - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.spec("ENG-FUNC-I4")
def test_vmap_over_sequences_equals_the_batch():
    case = case_of(config_of(retention="decay"), batch=3)

    def single(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
        gates = Gates(lr[None], retain[None])
        y, _ = memory_scan(case.config, q[None], k[None], v[None], gates, initial=case.initial)
        return y[0]

    y = torch.func.vmap(single)(case.q, case.k, case.v, case.gates.lr, case.gates.retain)
    close(y, case.scan()[0], 1e-12)


@pytest.mark.spec("TAPE-BRIDGE-I2")
@pytest.mark.parametrize("autodiff", ["auto", "torch"])
@pytest.mark.parametrize("rule", ["gated_delta", "titans", "gla"])
def test_forward_mode_through_a_layer(rule, autodiff):
    layer = Memory(4, 2, rule, autodiff=autodiff, generator=torch.Generator().manual_seed(0))
    x, way = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))
    _, slope = torch.func.jvp(lambda x: layer(x)[0], (x,), (way,))
    close(slope, (torch.autograd.functional.jacobian(lambda x: layer(x)[0], x) * way).sum((-3, -2, -1)), 1e-10)


def test_forward_mode_through_a_solved_step_token_by_token():
    config = {"bias": "huber", "step": "implicit", "key_norm": "l2"}
    x = torch.randn(1, 3, 4)
    with pytest.raises(ConfigError, match="step 'implicit'.* engine 'sequential'"):
        torch.func.jvp(lambda x: Memory(4, 2, config, engine="parallel")(x)[0], (x,), (x,))
    torch.func.jvp(lambda x: Memory(4, 2, config, engine="sequential")(x)[0], (x,), (x,))

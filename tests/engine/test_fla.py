"""The adapter to flash-linear-attention, with straight recurrences of its signature as kernels."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hecate import Gates, MemoryConfig, memory_scan
from hecate.cms import CMS, CMSConfig
from hecate.engine import Engine, Plan, choose
from hecate.engine import fla as adapter
from hecate.engine.fla import kernel as fla
from hecate.engine.fla import ops
from hecate.engine.parallel import by_torch, parallel, run_by_hand
from hecate.engine.tokens import Carry, Tokens
from hecate.errors import ConfigError
from hecate.nn import Memory
from hecate.tape import execute

FLA = Engine.registry["fla"]
CONFIGS = {
    "linear": {"bias": "dot"},
    "decay": {"bias": "dot", "retention": "decay"},
    "channels": {"bias": "dot", "retention": "decay"},
    "delta": {"bias": "l2"},
    "gated delta": {"bias": "l2", "retention": "decay", "decay_order": "before_gradient"},
    "kda": {"bias": "l2", "retention": "decay", "decay_order": "before_gradient"},
}
CHANNELWISE = {"channels", "kda"}


def kernel(q, k, v, scale, initial_state, output_final_state, beta=None, g=None, cu_seqlens=None, cu_seqlens_cpu=None):
    """State `[B, H, K, V]`, logarithmic gates, gradient after the decay, all in v's dtype."""
    if cu_seqlens is not None:
        assert len(initial_state) == len(cu_seqlens) - 1 and cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        ends, parts = cu_seqlens.tolist(), []
        for at, (start, end) in enumerate(pairwise(ends)):
            own = [None if x is None else x[:, start:end] for x in (q, k, v, beta, g)]
            parts.append(kernel(*own[:3], scale, initial_state[at : at + 1], output_final_state, *own[3:]))
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])
    state, outputs = initial_state.to(v.dtype), []
    for t in range(v.shape[1]):
        if g is not None:
            gate = g[:, t].to(v.dtype).exp()
            state = state * (gate.unsqueeze(-1) if gate.dim() == 3 else gate[..., None, None])
        value = v[:, t]
        if beta is not None:
            seen = (state * k[:, t].unsqueeze(-1)).sum(-2)
            value = beta[:, t].unsqueeze(-1) * (value - seen)
        state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append((state * (scale * q[:, t]).unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 1), state if output_final_state else None


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a function in the place of every kernel."""

    def put(function) -> None:
        fla.distrust.cache_clear()
        monkeypatch.setattr(fla, "load_kernel", lambda call: function)

    yield put
    fla.distrust.cache_clear()


def case(name: str, length: int = 7) -> tuple[MemoryConfig, list[Tensor]]:
    config = MemoryConfig.model_validate({**CONFIGS[name], "state_dtype": "float64"})
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    gate = draw(length, 3) if name in CHANNELWISE else draw(length)
    # The adapter hands the state over in float32, as the kernels want it: nothing to round here.
    inputs = [draw(4, 3).float().double(), draw(length, 3), draw(length, 3), draw(length, 4), draw(length).sigmoid()]
    return config, [*inputs, gate.sigmoid()]


def close(mine: Tensor, right: Tensor, tolerance: float) -> None:
    mine, right = mine.detach(), right.detach()
    assert float((mine - right).norm()) <= tolerance * float(right.norm())


def scan_of(name: str, config: MemoryConfig, engine: str):
    def scan(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        memory, *rest = inputs
        tokens = Tokens(*rest, torch.zeros_like(rest[3]))
        carry = Carry((memory,), (), (), (), (), (), torch.zeros(2))
        start = (torch.zeros_like(memory),)
        if engine == "fla":  # the two memories as heads of one sequence
            by_head = Tokens(*(x if x is None else x.transpose(0, 1)[None] for x in tokens))
            y, new = run_by_hand(fla.by_kernel(config, carry, torch.float64), by_head, carry, start, run=execute)
            y = y[0].transpose(0, 1)
        else:
            y, new = parallel(config, tokens, carry, start, run=execute)
        return y, new.memory[0]

    return scan


@pytest.mark.spec("ENG-FLA-D1")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_kernel_gets_the_rule_s_tokens_and_gives_its_gradients(name, stand_in):
    stand_in(kernel)
    config, inputs = case(name)
    own, true = ([item.clone().requires_grad_() for item in inputs] for _ in range(2))
    found, expected = (scan_of(name, config, "fla")(*own), scan_of(name, config, "parallel")(*true))
    for mine, right in zip(found, expected, strict=True):
        close(mine, right, 1e-12)
    grads = torch.autograd.grad(sum(item.sin().sum() for item in found), own, allow_unused=True)
    right = torch.autograd.grad(sum(item.sin().sum() for item in expected), true, allow_unused=True)
    for mine, other in zip(grads, right, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            # The cotangent of the state comes back in float32.
            close(mine, other, 1e-7 if mine is grads[0] else 1e-12)


@pytest.mark.spec("ENG-FLA-I1")
def test_second_derivatives_come_from_the_parallel_engine(stand_in):
    stand_in(kernel)
    config, inputs = case("gated delta", length=3)
    found: list[list[Tensor]] = []
    for engine in ("fla", "parallel"):
        own = [item.clone().requires_grad_() for item in inputs]
        y, state = scan_of("gated delta", config, engine)(*own)
        (grad,) = torch.autograd.grad(y.sin().sum() + state.sum(), own[2], create_graph=True)
        found.append(list(torch.autograd.grad(grad.square().sum(), own, allow_unused=True)))
    for mine, right in zip(*found, strict=True):
        close(mine, right, 1e-7)


@pytest.mark.spec("ENG-FLA-I2")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_kernel_is_trusted_only_after_it_agrees(name, stand_in):
    config, _ = case(name)
    config = config.model_copy(update={"state_dtype": "float32"})
    ask = (config, name in CHANNELWISE, torch.float32, "cpu", (8, 8))
    stand_in(kernel)
    assert fla.distrust(*ask) is None
    # Whoever asks first: what is found is remembered.
    fla.distrust.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        assert fla.distrust(*ask) is None

    def reads_before(**inputs):
        y, state = kernel(**inputs)
        return torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1), state

    stand_in(reads_before)
    assert "differs from float64 by" in fla.distrust(*ask)

    def fails(**inputs):
        raise RuntimeError("no shared memory")

    stand_in(fails)
    assert "fails on torch.float32 with widths (8, 8): no shared memory" in fla.distrust(*ask)


class OutOfResources(Exception):
    """What a compiler of kernels raises is no RuntimeError."""


@pytest.mark.spec("ENG-FLA-I2")
@pytest.mark.parametrize("fault", ["compiler", "last block", "strong decay", "swapped heads"])
def test_a_kernel_that_is_right_only_where_it_is_easy_is_refused(fault, stand_in):
    def faulty(**inputs):
        if fault == "compiler":
            raise OutOfResources("shared memory")
        if fault == "strong decay":
            inputs["g"] = inputs["g"].clamp_min(-1.0)
        y, state = kernel(**inputs)
        if fault == "last block":
            y = torch.cat([y[:, :128], 0 * y[:, 128:]], 1)
        return y, state.flip(1) if fault == "swapped heads" else state

    config = MemoryConfig.model_validate(CONFIGS["gated delta"])
    stand_in(faulty)
    found = fla.distrust(config, False, torch.float32, "cpu", (8, 8))
    assert ("fails on" if fault == "compiler" else "differs from float64") in found


@pytest.mark.spec("ENG-FLA-I2")
def test_a_kernel_is_tried_once_for_all_configs_that_it_computes(stand_in):
    stand_in(kernel)
    call = {"device": "cuda", "values": torch.bfloat16}
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "distrust", lambda *ask: tried.append(ask))
        for fields in ({}, {"feature_map": "elu"}, {"key_norm": "l2", "step": "implicit"}):
            config = MemoryConfig.model_validate({**CONFIGS["gated delta"], **fields})
            assert FLA.unfit(Plan.sketch(config, **call)) is None
    assert len(set(tried)) == 1


@pytest.mark.spec("ENG-FLA-I2")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chunk": 4}, "chunk=4"),
        ({"read": "before"}, "read='before'"),
        ({"bias": "huber"}, "bias 'huber'"),
        ({"algorithm": "momentum"}, "algorithm 'momentum'"),
        ({"bias": "l2", "retention": "decay"}, "decay_order='with_step'"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip'"),
        ({"state_dtype": "float64"}, "state_dtype='float64'"),
    ],
)
def test_refusals_say_why_and_of_the_config_alone(fields, reason):
    config = MemoryConfig.model_validate(fields)
    assert reason in FLA.refuses(config)
    with pytest.raises(ConfigError, match=f"engine='fla'.*{reason}"):
        Memory(8, heads=2, config=config, engine="fla")


@pytest.mark.spec("ENG-FLA-I2", "ENG-FLA-I3")
def test_a_call_that_does_not_fit_says_why(stand_in):
    stand_in(None)
    config, on_device = MemoryConfig.model_validate(CONFIGS["gated delta"]), {"device": "cuda"}
    assert FLA.refuses(config) is None
    for changes, reason in (
        ({"device": "cpu"}, "run on a GPU, the tensors are on cpu"),
        ({"masked": True}, "neither write nor reset masks"),
        ({"traced": True}, "torch.compile"),
        ({"values": torch.float64}, "the values are torch.float64"),
        ({"dtype": torch.float64}, "q, k or v make it torch.float64"),
        ({}, r"needs fla.ops.gated_delta_rule.chunk_gated_delta_rule: pip install"),
    ):
        assert reason in FLA.unfit(Plan.sketch(config, **{**on_device, **changes}))
        with pytest.raises(ConfigError, match="engine='fla' cannot run this memory exactly"):
            choose(Plan.sketch(config, **{**on_device, **changes}), "fla")


@pytest.mark.spec("ENG-FLA-I3")
def test_a_layer_takes_an_engine_of_another_device(stand_in, monkeypatch):
    """Whether a GPU is at hand is asked of each call, not where a model is built."""
    rule = {"kind": "gated_delta", "on_nonfinite": "propagate"}
    source = {"generator": torch.Generator(), "dtype": torch.float32}
    layer = Memory(8, heads=2, config=rule, engine="fla", **source)
    levels = [{"name": "fast", "memory": rule}]
    CMS(8, 2, CMSConfig(levels=levels), engine="fla", **source)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with pytest.raises(ConfigError, match="engine='fla'.*a GPU, the tensors are on cpu"):
        layer(x)
    # As if it were there: rows and heads find their own memory, with a state to go on from.
    stand_in(kernel)
    monkeypatch.setattr(type(FLA), "unfit", lambda *call: None)
    with torch.no_grad():
        _, state = layer(x)
        y, final = layer(x.flip(0), state)
        layer.engine = "sequential"
        expected, true = layer(x.flip(0), state)
    close(y, expected, 1e-5)
    close(final.memory.memory["weight"], true.memory.memory["weight"], 1e-5)


def test_asking_for_it_where_it_cannot_run_is_an_error():
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ConfigError, match="engine='fla' cannot run this memory exactly"):
        memory_scan(MemoryConfig(), q, q, q, Gates(), engine="fla")


@pytest.mark.spec("ENG-FLA-I2")
def test_auto_takes_a_trusted_kernel_for_half_precision_on_a_gpu(stand_in):
    config = MemoryConfig(bias="dot", retention="decay", state_dtype="float32")
    half = {"length": 100, "shape": (8, 8), "device": "cuda", "values": torch.bfloat16}

    def chosen(**changes) -> str:
        return choose(Plan.sketch(config, **{**half, **changes})).name

    assert chosen() == "parallel"  # no kernel to be found
    stand_in(kernel)
    fla.distrust.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "distrust", lambda *ask: None)
        assert chosen() == "fla"
        assert chosen(values=torch.float32) == "parallel"
        assert chosen(masked=True) == "parallel"
        assert chosen(traced=True) == "parallel"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "distrust", lambda *ask: "differs")
        assert chosen() == "parallel"


@pytest.mark.spec("ENG-FLA-D1")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("norm", ["none", "l2"])
def test_documents_and_gates_of_zero_go_to_the_kernel_as_they_lie(name, norm, stand_in, monkeypatch):
    """Packed documents as `cu_seqlens`, empty ones left out; in the inputs' dtype where nothing is made of them."""
    stand_in(kernel)
    monkeypatch.setattr(type(FLA), "unfit", lambda _, call: None if adapter._by_documents(call) else "masks")
    config = MemoryConfig.model_validate({**CONFIGS[name], "key_norm": norm, "on_nonfinite": "propagate"})
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(1, 9, 2, *shape, generator=generator, dtype=torch.float32)  # noqa: E731
    gate = (draw(3) if name in CHANNELWISE else draw()).sigmoid().clone()
    gate[:, 5] = 0.0
    inputs = [draw(3), draw(3), draw(4), draw().sigmoid()] + [gate] * config.retention.uses_retain
    start = {"weight": torch.randn(2, 4, 3, generator=generator, dtype=torch.float32)}
    borders, found = torch.tensor([0, 4, 4, 9]), []
    for engine in ("fla", "sequential"):
        own = [item.clone().requires_grad_() for item in inputs]
        y, state = memory_scan(config, *own[:3], Gates(*own[3:]), cu_seqlens=borders, initial=start, engine=engine)
        loss = y.sin().sum() + state.memory["weight"].cos().sum()
        grads = torch.autograd.grad(loss, own)
        if config.retention.uses_retain:  # of a gate of 0 a logarithm has no derivative
            grads[4][:, 5] = 0.0
        found.append([y, state.memory["weight"], *grads])
    for mine, right in zip(*found, strict=True):
        close(mine, right, 1e-5)


# Under torch.compile.


def leaves_of(name: str, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, length, 2, *shape, generator=generator)

    gates = [draw(), draw(3) if name in CHANNELWISE else draw()][: 1 + ("retention" in CONFIGS[name])]
    leaves = [draw(3), draw(3), draw(4), *(gate.sigmoid() for gate in gates)]
    start = torch.randn(2, 4, 3, generator=generator).float()
    return [item.requires_grad_() for item in (*(leaf.to(dtype) for leaf in leaves), start)]


def with_grads(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return *outputs, *torch.autograd.grad(sum(item.float().square().sum() for item in outputs), leaves)


def operands(name: str, grad: bool) -> tuple[MemoryConfig, list[Tensor]]:
    """A rule, and what an operator takes of a call of its: the memory, phi(k), phi(q), v, lr and retain."""
    q, k, v, lr, *retain, start = (item.detach() for item in leaves_of(name, 5))
    own = [torch.cat([start, -start]), k, q, v, lr, *(retain or [torch.ones_like(lr)])]
    return MemoryConfig.model_validate(CONFIGS[name]), [item.requires_grad_(grad) for item in own]


@pytest.fixture
def on_a_card(stand_in, monkeypatch):
    """As if there were a card, and kernels to be trusted."""
    torch._dynamo.reset()
    stand_in(kernel)
    monkeypatch.setattr(ops, "verdict", lambda *ask: None)
    monkeypatch.setattr(type(FLA), "unfit", lambda *call: None)


@pytest.mark.spec("ENG-FLA-D2")
@pytest.mark.parametrize(
    ("name", "norm", "dtype"),
    [("linear", "none", torch.float32), ("gated delta", "none", torch.bfloat16), ("kda", "l2", torch.float32)],
)
def test_one_graph_and_one_operator_for_every_length(name, norm, dtype, on_a_card):
    config = MemoryConfig.model_validate({**CONFIGS[name], "key_norm": norm, "on_nonfinite": "propagate"})

    def scan(q, k, v, *rest):
        *gates, start = rest
        y, state = memory_scan(config, q, k, v, Gates(*gates), initial={"weight": start}, engine="fla")
        return y, state.memory["weight"]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, backend=counter, fullgraph=True)
    for length in (5, 9, 3):
        leaves = leaves_of(name, length, dtype)
        for leaf in leaves[:-1]:
            torch._dynamo.mark_dynamic(leaf, 1)
        pairs = zip(with_grads(compiled(*leaves), leaves), with_grads(scan(*leaves), leaves), strict=True)
        for mine, true in pairs:
            assert mine.dtype == true.dtype
            # The 12 products of a state with its cotangent may be added up in another order; those of bfloat16 in
            # float32, to be rounded once.
            close(mine, true, 12 * 2.0**-24 if dtype == torch.float32 else 2.0**-7)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert len([node for node in graph.graph.nodes if "fla_scan" in str(node.target)]) == 1


@pytest.mark.spec("ENG-FLA-D2")
@pytest.mark.parametrize(("name", "grad"), [("linear", True), ("kda", True), ("gated delta", False)])
def test_operators_keep_what_torch_asks_of_them(name, grad, on_a_card):
    config, own = operands(name, grad)
    rule, tokens = (
        ops.rule_of(config, "as blocks", raw=False),
        [item.detach().bfloat16().requires_grad_(grad) for item in own[1:4]],
    )
    for given in (own, [own[0], *tokens, *own[4:]]):
        found = torch.library.opcheck(ops.fla_scan, (rule, given[3].dtype, *given))
        plain = [item.detach() for item in given]
        cotangents = [own[3].detach(), plain[0].mT.contiguous().mT]
        back = torch.library.opcheck(ops.fla_scan_backward, (rule, given[3].dtype, plain, cotangents))
        assert {*found.values(), *back.values()} == {"SUCCESS"}


@pytest.mark.spec("ENG-FLA-D2")
@pytest.mark.parametrize("right", [True, False])
def test_an_operator_asks_whether_a_kernel_is_trusted_and_else_runs_torch(right, stand_in, caplog):
    lengths = []

    def tried(**inputs):
        lengths.append(inputs["v"].shape[1])
        y, state = kernel(**inputs)
        return y if right else 2 * y, state

    stand_in(tried)
    ops._tell.cache_clear()
    config, own = operands("gated delta", True)
    found = with_grads(ops.fla_scan(ops.rule_of(config, "as blocks", raw=False), torch.float32, *own), own)
    # Of 150 tokens forward and backward together; and the call's own, once more for its backward pass.
    assert lengths == ([150, 5, 5] if right else [150])
    said = [record.getMessage() for record in caplog.records if record.name == "hecate.engine"]
    assert (not said) if right else "runs plain torch: its kernel differs from float64" in "".join(said)
    assert len(said) <= 1
    carry, wide = Carry((own[0],), (), (), (), (), (), torch.zeros(2)), [item.detach().double() for item in own]
    for item in wide:
        item.requires_grad_()
    y, state = by_torch(config, carry)(wide[0], wide[0], *wide[1:], torch.zeros_like(wide[4]))
    for mine, true in zip(found, with_grads((y, state), wide), strict=True):
        close(mine.double(), true, fla.PARITY[torch.float32])


@pytest.mark.spec("ENG-FLA-D2", "ENG-FLA-I2")
def test_under_compile_who_asks_for_it_gets_it_and_auto_takes_our_own(monkeypatch):
    config = MemoryConfig(bias="dot", retention="decay", on_nonfinite="propagate")
    facts = {"length": 100, "shape": (8, 8), "device": "cuda", "values": torch.bfloat16, "traced": True}
    call, masked = (Plan.sketch(config, **facts, masked=masked) for masked in (False, True))
    with pytest.raises(ConfigError, match="torch has to see every operation"):
        choose(call, "fla")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(call, "fla") is FLA and choose(call).name == "triton"
    with pytest.raises(ConfigError, match="under torch.compile its kernels take no masks"):
        choose(masked, "fla")

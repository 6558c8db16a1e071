"""The adapter to flash-linear-attention, with straight recurrences of its signature as kernels."""

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine import fla
from hecate.engine.parallel import parallel
from hecate.engine.select import choose_engine
from hecate.engine.tokens import Carry, Tokens
from hecate.errors import ConfigError
from hecate.tape import execute

CONFIGS = {
    "linear": {"bias": "dot"},
    "decay": {"bias": "dot", "retention": "decay"},
    "channels": {"bias": "dot", "retention": "decay"},
    "delta": {"bias": "l2"},
    "gated delta": {"bias": "l2", "retention": "decay", "decay_order": "before_gradient"},
    "kda": {"bias": "l2", "retention": "decay", "decay_order": "before_gradient"},
}
CHANNELWISE = {"channels", "kda"}


def kernel(q, k, v, scale, initial_state, output_final_state, beta=None, g=None):
    """State `[B, H, K, V]`, logarithmic gates, gradient after the decay, all in v's dtype."""
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
        fla._difference.cache_clear()
        monkeypatch.setattr(fla, "load_kernel", lambda call: function)

    yield put
    fla._difference.cache_clear()


def case(name: str, length: int = 7) -> tuple[MemoryConfig, list[Tensor]]:
    config = MemoryConfig.model_validate({**CONFIGS[name], "state_dtype": "float64"})
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    gate = draw(length, 3) if name in CHANNELWISE else draw(length)
    # The adapter hands the state over in float32, as the kernels want it: nothing to round here.
    inputs = [
        draw(4, 3).float().double(),
        draw(length, 3),
        draw(length, 3),
        draw(length, 4),
        draw(length).sigmoid(),
    ]
    return config, [*inputs, gate.sigmoid()]


def close(mine: Tensor, right: Tensor, tolerance: float) -> None:
    mine, right = mine.detach(), right.detach()
    assert float((mine - right).norm()) <= tolerance * float(right.norm())


def scan_of(name: str, config: MemoryConfig, engine: str):
    def scan(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        memory, *rest = inputs
        tokens = Tokens(*rest, torch.zeros_like(rest[3]))
        carry = Carry((memory,), (), (), (), (), torch.zeros(2))
        start = (torch.zeros_like(memory),)
        if engine == "fla":
            y, new = fla.by_fla(config, tokens, carry, start, run=execute, dtype=torch.float64)
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
    found, expected = (
        scan_of(name, config, "fla")(*own),
        scan_of(name, config, "parallel")(*true),
    )
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
    assert fla._difference(*ask) is None

    def reads_before(**inputs):
        y, state = kernel(**inputs)
        return torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1), state

    stand_in(reads_before)
    assert "differs from the parallel engine by" in fla._difference(*ask)

    def fails(**inputs):
        raise RuntimeError("no shared memory")

    stand_in(fails)
    assert "fails on torch.float32 with widths (8, 8): no shared memory" in fla._difference(*ask)


@pytest.mark.spec("ENG-FLA-I2")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chunk": 4}, "chunk=4"),
        ({"read": "before"}, "read='before'"),
        ({"bias": "huber"}, "bias 'huber'"),
        ({"algorithm": "momentum"}, "algorithm 'momentum'"),
        ({"bias": "l2", "retention": "decay"}, "decay_order='with_step'"),
        ({}, "run on a GPU"),
    ],
)
def test_refusals_say_why(fields, reason):
    assert reason in fla.fla_refusal(MemoryConfig.model_validate(fields), fla.FlaScan())


def test_asking_for_it_where_it_cannot_run_is_an_error():
    q = torch.randn(1, 3, 1, 4)
    with pytest.raises(ConfigError, match="engine='fla' cannot run this memory exactly"):
        memory_scan(MemoryConfig(), q, q, q, Gates(), engine="fla")


@pytest.mark.spec("ENG-FLA-I2")
def test_auto_takes_a_trusted_kernel_for_half_precision_on_a_gpu(stand_in):
    config = MemoryConfig(bias="dot", retention="decay", state_dtype="float32")
    gates = torch.full((2, 5, 1), 0.9)
    half = fla.FlaScan(torch.bfloat16, gates, False, (8, 8))

    def chosen(scan: fla.FlaScan, **options) -> str:
        return choose_engine(config, "auto", length=100, device="cuda", scan=scan, **options)[0]

    assert chosen(half) == "parallel"  # no kernel to be found
    stand_in(kernel)
    fla._difference.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "_difference", lambda *ask: None)
        assert chosen(half) == "fla"
        assert chosen(half._replace(values=torch.float32)) == "parallel"
        assert chosen(half._replace(masked=True)) == "parallel"
        assert chosen(half._replace(retain=gates * (torch.arange(5) != 2)[:, None])) == "parallel"
        assert chosen(half, traced=True) == "parallel"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla, "_difference", lambda *ask: "differs")
        assert chosen(half) == "parallel"

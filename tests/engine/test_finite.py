"""Non-finite memories and step sizes that would make them so."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, NonFiniteError, late, memory_scan, memory_step
from hecate.engine import nonfinite
from hecate.errors import ConfigError
from hecate.tape import bridge
from tests.memories import DEEP, case_of, close, config_of, flat_state, ways

CONFIGS = {
    "delta": {},
    "titans": {"retention": "decay", "algorithm": "momentum"},
    "linear attention": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "chunk": {"chunk": 3, "commit": "chunk"},
    "frozen, decayed first": {"chunk": 3, "retention": "decay", "decay_order": "before_gradient"},
    "deep": {"structure": DEEP},
}


RUNS = ways(CONFIGS)


def spoiled(name: str, where: list[tuple[int, int, int, str, float]], policy: str = "raise"):
    """A case with junk at (row, token, head) of an input."""
    case = case_of(config_of(**CONFIGS[name], on_nonfinite=policy), length=9, batch=3)
    parts = {n: getattr(case, n).clone() for n in ("q", "k", "v")}
    gates = {n: None if g is None else g.clone() for n, g in case.gates._asdict().items()}
    for row, token, head, field, junk in where:
        {**parts, **gates}[field][row, token, head] = junk
    return case._replace(**parts, gates=Gates(**gates))


@pytest.mark.spec("ENG-FINITE-D1")
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", ["k", "v", "lr"])
@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_raise_names_the_memory_row_head_and_token(name, engine, field, junk):
    for row, token, head in ((0, 0, 0), (2, 4, 1), (1, 8, 0)):
        later = [(0, min(token + 1, 8), 1, "v", torch.nan)] if token < 8 else []
        case = spoiled(name, [(row, token, head, field, junk), *later])
        place = f"memory 'mine'.* batch row {row}, head {head}, token {token}:"
        with pytest.raises(NonFiniteError, match=place):
            case.scan(engine=engine, name="mine")


@pytest.mark.spec("ENG-FINITE-D1")
def test_overflow_is_found_at_the_token_where_it_happens():
    config = MemoryConfig(on_nonfinite="raise")
    k = torch.full((1, 200, 1, 1), 2.0, dtype=torch.float32)
    for engine in ("sequential", "parallel"):
        # M k - v is (-3)^n after n writes: 3^81 > 3.4e38 is read at token 80; M is half of it.
        place = r"an output .* token 80, while.* overflows .*\* \|phi\(k\)\|\^2=4"
        with pytest.raises(NonFiniteError, match=place) as caught:
            memory_scan(config, k, k, k / 2, Gates(torch.ones(1, 200, 1)), engine=engine)
        assert "key_norm='l2'" in str(caught.value)
        # ScanArguments for half as much, it is the memory's own error that overflows, one token later.
        place = r"memory 'memory' became .* token 81: .*\* \|phi\(k\)\|\^2=4"
        with pytest.raises(NonFiniteError, match=place):
            memory_scan(config, k / 4, k, k / 2, Gates(torch.ones(1, 200, 1)), engine=engine)


@pytest.mark.spec("ENG-FINITE-D1")
@pytest.mark.parametrize(("field", "named"), [("k", "phi_k"), ("v", "v"), ("lr", "lr")])
def test_what_came_without_numbers_is_named_in_place_of_a_cure(field, named):
    with pytest.raises(NonFiniteError, match=f"token 4: {named} came with NaN or infinity; mend") as caught:
        spoiled("delta", [(2, 4, 1, field, torch.nan)]).scan()
    assert "lower lr" not in str(caught.value)


@pytest.mark.spec("ENG-FINITE-D1")
def test_a_query_that_overflows_is_told_apart_and_placed():
    for engine in ("sequential", "parallel"):
        case = spoiled("delta", [(1, 5, 1, "q", torch.inf), (2, 3, 0, "q", torch.nan)])
        with pytest.raises(NonFiniteError, match=r"batch row 2, head 0, token 3.*quer"):
            case.scan(engine=engine)


@pytest.mark.spec("ENG-FINITE-D1")
@pytest.mark.parametrize(("name", "engine"), RUNS)
@pytest.mark.parametrize("first", ["output", "memory", "both"])
def test_the_earlier_of_a_broken_output_and_a_broken_memory_is_named(name, engine, first):
    """Blocks spoil outputs ahead of the token that breaks them: those are not named."""
    ask, write = {"output": (2, 6), "memory": (6, 2), "both": (4, 4)}[first]
    case = spoiled(name, [(1, write, 1, "v", torch.nan), (2, ask, 0, "q", torch.inf)])
    place = {
        "output": "an output of memory.* batch row 2, head 0, token 2, while",
        "memory": "memory 'mine' became.* batch row 1, head 1, token 2:",
        "both": "memory 'mine' became.* batch row 1, head 1, token 4:",
    }[first]
    with pytest.raises(NonFiniteError, match=place):
        case.scan(engine=engine, name="mine")


@pytest.mark.spec("ENG-FINITE-D1")
def test_an_output_that_overflows_in_its_own_dtype_alone_is_placed():
    """The state is float32 and finite; 300 times 300 is more than float16 holds."""
    x = torch.full((1, 3, 1, 1), 1.0, dtype=torch.float16)
    x[0, 1:] = 300
    config = MemoryConfig(bias="dot")
    for engine in ("sequential", "parallel"):
        with pytest.raises(NonFiniteError, match=r"an output .* token 1, while"):
            memory_scan(config, x, x / x, x, engine=engine)


@pytest.mark.spec("ENG-FINITE-D2", "ENG-CHUNK-D4")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize(("name", "engine"), [*RUNS, ("chunk", "chunk"), ("frozen, decayed first", "chunk")])
def test_skip_leaves_exactly_that_token_unwritten(name, engine, autodiff):
    junk = [(0, 3, 0, "v", torch.nan), (1, 5, 0, "k", torch.inf), (1, 5, 1, "k", torch.nan)]
    junk += [(2, 0, 1, "lr", torch.inf), (2, 8, 0, "v", -torch.inf)]
    case = spoiled(name, junk, "skip").fresh()
    y, state = case.scan(engine=engine, autodiff=autodiff)
    assert torch.isfinite(y).all()
    grads = torch.autograd.grad(y.square().sum(), case.leaves)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    # Head by head the same as masking that head's token.
    clean = spoiled(name, [], "propagate")
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)):
        mask = torch.ones(1, 9, dtype=torch.bool)
        for r, token, h, _, _ in junk:
            if (r, h) == (row, head):
                mask[0, token] = False
        alone = clean._replace(
            **{n: getattr(clean, n)[row : row + 1, :, head : head + 1] for n in ("q", "k", "v")},
            gates=Gates(*(None if g is None else g[row : row + 1, :, head : head + 1] for g in clean.gates)),
            initial={n: w[head : head + 1] for n, w in clean.initial.items()},
            write=mask,
        )
        expected, final = alone.scan(engine=engine)
        close(y[row, :, head], expected[0, :, 0], 1e-12)
        for key, item in flat_state(final).items():
            close(flat_state(state)[key][row, head], item[0, 0], 1e-12, key)


@pytest.mark.spec("ENG-FINITE-D3", "ENG-PAR-I3")
def test_propagate_goes_on_and_spoils_no_other_memory():
    for engine in ("sequential", "parallel"):
        case = spoiled("delta", [(1, 4, 0, "v", torch.nan)], "propagate")
        y, _ = case.scan(engine=engine)
        bad = torch.zeros(3, 9, 2, dtype=torch.bool)
        bad[1, 4:, 0] = True
        seen = torch.isnan(y).any(-1)
        assert bool(seen[bad].all())
        if engine == "sequential":
            assert torch.equal(seen, bad)
        bad[1, :, 0] = True
        assert not bool(seen[~bad].any())
    # Blocks before that of the junk are untouched in the parallel engine, too.
    long = case_of(config_of(key_norm="l2", on_nonfinite="propagate"), length=130, batch=1)
    v = long.v.clone()
    v[:, 70] = torch.nan
    y, _ = long._replace(v=v).scan(engine="parallel")
    assert torch.isfinite(y[:, :64]).all() and torch.isnan(y[:, 70:]).all()


@pytest.mark.spec("ENG-FINITE-I1")
def test_a_sum_of_weights_that_overflows_is_found():
    """The values are tiny, so the memory stays finite while its sum of weights does not."""
    k = torch.full((1, 3, 1, 1), 3e38, dtype=torch.float32)
    v = torch.full((1, 3, 1, 1), 1e-30, dtype=torch.float32)
    q = torch.full((1, 3, 1, 1), 1e-30, dtype=torch.float32)
    fields = {"bias": "dot", "feature_map": "relu", "normalizer": "sum"}
    with pytest.raises(NonFiniteError, match=r"batch row 0, head 0, token 1"):
        memory_scan(MemoryConfig(**fields), q, k, v)
    y, state = memory_scan(MemoryConfig(**fields, on_nonfinite="skip"), q, k, v)
    assert all(bool(torch.isfinite(item).all()) for item in (y, *flat_state(state).values()))


@pytest.mark.spec("ENG-FINITE-D1")
def test_a_step_names_its_memory_too():
    k = torch.full((2, 1, 3), torch.nan)
    with pytest.raises(NonFiniteError, match=r"memory 'level 2'.*batch row 0, head 0, token 0"):
        memory_step(MemoryConfig(), k, k, k, name="level 2")


# Stability.


@pytest.mark.spec("RULE-STABLE-D1")
def test_step_sizes_beyond_the_bound_are_refused_with_numbers():
    for fields, limit in (
        ({"key_norm": "l2"}, 2.0),
        ({"key_norm": "l2", "bias": "huber"}, 2.0),
        ({"key_norm": "sum", "feature_map": "elu"}, 2.0),
        ({"key_norm": "l2", "algorithm": {"kind": "momentum", "momentum": 0.5}}, 3.0),
    ):
        algorithm = fields.get("algorithm", {"kind": "gd"})
        for lr, fine in ((limit, True), (1.01 * limit, False)):
            own = {**fields, "algorithm": {**algorithm, "lr": lr}}
            if fine:
                MemoryConfig(**own)
                continue
            with pytest.raises(ConfigError) as caught:
                MemoryConfig(**own)
            text = str(caught.value)
            for word in ("algorithm.lr", f"lr={lr:g}", "feature_map", "key_norm", f"{limit:g}"):
                assert word in text
    # The same for a number given at the call, and nothing for rules that no step size can upset.
    k = torch.ones(1, 2, 1, 2)
    with pytest.raises(ConfigError, match=r"lr=2\.5.*can reach 2\.5.*lower lr to 2 "):
        memory_scan(MemoryConfig(key_norm="l2"), k, k, k, Gates(2.5))
    for fields in ({"bias": "dot"}, {"step": "implicit"}, {"step": "normalized"}):
        MemoryConfig(key_norm="l2", algorithm={"kind": "gd", "lr": 5.0}, **fields)


@pytest.mark.spec("RULE-STABLE-I1")
@pytest.mark.parametrize(
    "fields", [{}, {"retention": "decay"}, {"retention": "decay", "algorithm": "momentum"}], ids=str
)
def test_a_hundred_thousand_tokens_stay_bounded_in_float32(fields):
    generator = torch.Generator().manual_seed(0)
    length = 100_000
    q, k, v = (torch.randn(1, length, 1, 8, generator=generator, dtype=torch.float32) for _ in range(3))
    lr = torch.rand(1, length, 1, generator=generator, dtype=torch.float32)
    if "algorithm" in fields:
        lr = 0.1 * lr  # momentum 0.9 sums ten steps
    y, state = memory_scan(MemoryConfig(key_norm="l2", **fields), q, k, v, Gates(lr), engine="parallel")
    weight = state.memory["weight"]
    assert weight.dtype == torch.float32 and float(y.abs().max()) < 100
    # The end depends on the recent past alone: a scan of the last tokens in float64 finds the same.
    tail = slice(length - 2000, length)
    exact = MemoryConfig(key_norm="l2", state_dtype="float64", **fields)
    late, _ = memory_scan(exact, *(x[:, tail].double() for x in (q, k, v)), Gates(lr[:, tail].double()))
    close(y[:, -100:], late[:, -100:], 1e-4)


# Looks that are put off, as on a device.


@pytest.fixture
def late_looks(monkeypatch):
    """Makes the CPU a device; its numbers have arrived when the next call looks."""
    monkeypatch.setattr(bridge, "AT_ONCE", ())
    yield late._WAITING
    late._WAITING.clear()


@pytest.mark.spec("ENG-FINITE-D4")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_look_that_is_put_off_names_the_same_place(name, late_looks):
    for row, token, head in ((0, 0, 0), (2, 4, 1), (1, 7, 0)):
        later = [(0, token + 1, 1, "v", torch.nan)]
        bad = spoiled(name, [(row, token, head, "v", torch.nan), *later])
        if name == "chunk":  # what reads the start of a chunk sees a write once the chunk is closed
            token = 3 * (token // 3) + 2
            bad = spoiled(name, [(row, token, head, "v", torch.nan)])
        good = case_of(bad.config)
        place = rf"memory 'mine' became non-finite at batch row {row}, head {head}, token {token}, by what it answers"
        _, state = bad.scan(engine="sequential", name="mine")
        assert len(late_looks) == 1
        with pytest.raises(NonFiniteError, match=place):
            good.scan(name="another")
        _, state = bad.scan(engine="sequential", name="mine")
        with pytest.raises(NonFiniteError, match=place):
            state.check()
        # The state knows no tokens: both are in it.
        first = (row, head) if name == "chunk" else min((row, head), (0, 1))
        where = "row {}, head {}".format(*first)
        with pytest.raises(NonFiniteError, match=f"'own' is non-finite in state.memory.* {where}"):
            state.check("own")
        _, state = good.scan()
        state.check()
        good.scan(state)


@pytest.mark.spec("ENG-FINITE-D4")
def test_an_output_alone_and_a_state_alone_are_told_apart_late(late_looks):
    case = spoiled("delta", [(1, 5, 1, "q", torch.inf)])
    case.scan(engine="sequential")
    with pytest.raises(NonFiniteError, match=r"an output of memory 'memory' became .* row 1, head 1, token 5"):
        late.look()
    last = spoiled("delta", [(2, 8, 0, "v", torch.inf)])
    before = last._replace(config=config_of(read="before"))
    before.scan(engine="sequential")
    with pytest.raises(NonFiniteError, match="memory 'memory' became .* batch row 2, head 0, token 8"):
        late.look()


@pytest.mark.spec("ENG-FINITE-D4")
def test_the_trainer_looks_after_each_step(late_looks):
    """Whatever the loss makes of it."""
    from hecate.train.compose import load_experiment
    from hecate.train.trainer import Trainer

    settings = ["budget.batch_size=2", "data.seq_len=16", "data.num_pairs=2"]
    trainer = Trainer(load_experiment("mqar", settings))
    trainer.train_step()
    y, state = torch.zeros(2, 16, 2, 3), torch.zeros(4, 3, 3)
    y[0, 1, 1, 2], state[1] = torch.nan, torch.inf
    nonfinite._put_off("level 2", [y, state])
    with pytest.raises(NonFiniteError, match="step 2: memory 'level 2' became .* row 0, head 1, token 1, .* On cpu"):
        trainer.train_step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_numbers_are_finite(late_looks, dtype):
    """Nothing is added up on the way to a look."""
    most = torch.finfo(dtype).max
    y, state = torch.full((2, 5, 2, 3), most, dtype=dtype), torch.full((4, 3, 3), -torch.finfo(torch.float32).max)
    nonfinite._put_off("mine", [y, state, state.double()])
    late.look()
    y[1, 3, 0, 1] = -torch.inf
    nonfinite._put_off("mine", [y, state, state])
    with pytest.raises(
        NonFiniteError, match="an output of memory 'mine' became non-finite at batch row 1, head 0, token 3"
    ):
        late.look()


def test_nothing_is_put_off_where_there_are_no_numbers(late_looks):
    x = torch.zeros(1, 3, 1, 2, device="meta")
    memory_scan(MemoryConfig(), x, x, x)
    torch.func.grad(lambda q: memory_scan(MemoryConfig(), q, q, q)[0].sum())(torch.zeros(1, 3, 1, 2))
    assert not late_looks


def test_writes_that_diverge_by_their_sum_are_said_to():
    """lr |phi|^2 of each is far from 2; of a chunk's one key sixteen are not."""
    k = torch.ones(1, 4000, 1, 1, dtype=torch.float32)
    gates = Gates(lr=torch.full((1, 4000, 1), 0.3))
    with pytest.raises(NonFiniteError, match=r"=0\.3 \(.*beyond 2 where.*as here writes of 16 tokens add up, for"):
        memory_scan(MemoryConfig(chunk=16, commit="chunk"), k, k, k, gates)

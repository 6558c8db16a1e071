"""Memories that are read through a readout: ridge regressions and bounded slots, against papers' programs in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, named_rule
from hecate.cms import SelfReferenceConfig
from hecate.engine.reductions import SPAN
from hecate.errors import ConfigError, NonFiniteError, ShapeError
from hecate.gating import Masks, Sizes, Written
from hecate.nn import Memory
from hecate.readout import Ridge
from hecate.tape import Tape
from tests.memories import close
from tests.reference import gates_2026 as logits
from tests.reference import papers_2025 as older

T, P, V, MODEL = 2 * SPAN + 5, 4, 3, 6
RIDGE: dict[str, Any] = {"bias": "dot", "retention": "decay", "readout": "ridge", "state_dtype": "float64"}


def draw(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, T, 2, *shape, generator=g, dtype=torch.float64)

    return {
        "q": normal(P), "k": normal(P), "v": normal(V), "lr": normal().sigmoid(),
        "retain": normal().sigmoid() / 4 + 0.75, "ridge": normal(P).exp() / 4, "mix": normal().sigmoid(),
    }  # fmt: skip


def scanned(config: MemoryConfig, given: dict[str, Tensor], *names: str, **how: Any) -> Any:
    gates = Gates(**{name: given[name] for name in ("lr", "retain", *names)})
    return memory_scan(config, given["q"], given["k"], given["v"], gates, **how)


def row(given: dict[str, Tensor], *names: str) -> list[np.ndarray]:
    return [given[name][1, :, 0].detach().numpy() for name in names]


@pytest.mark.spec("READ-RIDGE-D1")
def test_a_read_is_a_weighted_least_squares():
    given = draw()
    given["ridge"] = given["ridge"][:, :1].expand(2, T, 2, P)  # as a layer has it
    y, _ = scanned(MemoryConfig(**RIDGE), given, "ridge")
    q, k, v, retain, lr, ridge = row(given, "q", "k", "v", "retain", "lr", "ridge")
    close(y[1, :, 0], torch.from_numpy(older.mesa_least_squares(q, k, v, retain, lr, ridge[0])), 1e-12)


@pytest.mark.spec("READ-RIDGE-D2")
@pytest.mark.parametrize(("solver", "last"), [("cg", 1e-9), ("chebyshev", 1e-3)])
def test_iterations_come_near_the_solution(solver, last):
    given, errors = draw(), []
    exact, _ = scanned(MemoryConfig(**RIDGE), given, "ridge", "mix")
    for steps in (2, 8, 64):
        config = MemoryConfig(**{**RIDGE, "readout": Ridge(solver=solver, iterations=steps)})
        y, _ = scanned(config, given, "ridge", "mix")
        errors.append(float((y - exact).norm() / exact.norm()))
    assert errors[0] > 2 * errors[1] > 0 and errors[2] < last, errors


@pytest.mark.spec("READ-RIDGE-D2")
def test_chebyshev_is_that_of_the_paper():
    rng, steps = np.random.default_rng(0), 7
    k = rng.normal(size=(P, P))
    h, q = k @ k.T, rng.normal(size=P)
    size = np.linalg.norm(h)
    readout = Ridge(ridge=0.0, relative=0.02, solver="chebyshev", iterations=steps)
    config = MemoryConfig(**{**RIDGE, "readout": readout, "retention": "none"})
    keys, query = (torch.as_tensor(x)[None, :, None] for x in (k.T, np.tile(q, (P, 1))))
    eye = torch.eye(P, dtype=torch.float64)[None, None]  # G = 1, so that a read is the query's turned self
    y, state = memory_scan(config, query, keys, 0 * keys, Gates(1.0), initial={"weight": eye})
    close(y[0, -1, 0], torch.from_numpy(older.chebyshev(h, 0.02 * size, q, steps)), 1e-12)
    close(state.readout["keys"][0, 0], torch.from_numpy(h), 1e-13)


@pytest.mark.spec("READ-RIDGE-V1")
@pytest.mark.parametrize("solver", ["exact", "cg", "chebyshev"])
@pytest.mark.parametrize("read", ["after", "before"])
def test_derivatives_by_tape_autograd_and_plain_operations(solver, read):
    """Iterations run to the end, where the implicit derivative is that of the steps."""
    readout = Ridge(relative=0.1, solver=solver, iterations=80)
    config, found = MemoryConfig(**{**RIDGE, "readout": readout, "read": read}), []
    mask = torch.rand(2, 2, T, generator=torch.Generator().manual_seed(3))
    masks = {"write_mask": mask[0] > 0.2, "reset_mask": mask[1] > 0.85}
    given = draw()
    leaves = [item.requires_grad_() for item in given.values()]

    def loss(y: Tensor, state: Any) -> Tensor:
        keys = state.readout["keys"]
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + keys.square().sum()

    for autodiff in ("tape", "torch"):
        value = loss(*scanned(config, given, "ridge", "mix", autodiff=autodiff, **masks))
        found.append(torch.autograd.grad(value, leaves))

    def plain(*items: Tensor) -> Tensor:
        return loss(*scanned(config, dict(zip(given, items, strict=True)), "ridge", "mix", **masks))

    if solver != "cg":  # whose last steps divide rounding by rounding
        found.append(torch.func.grad(plain, tuple(range(len(leaves))))(*[leaf.detach() for leaf in leaves]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            close(b, a, 1e-9)
    if solver == "exact" and read == "after":
        few = {name: item.detach()[:1, :3, :1].clone().requires_grad_() for name, item in given.items()}

        def short(*items: Tensor) -> Tensor:
            return scanned(config, dict(zip(few, items, strict=True)), "ridge", "mix")[0]

        assert torch.autograd.gradcheck(short, tuple(few.values()))
        assert torch.autograd.gradgradcheck(short, tuple(few.values()), fast_mode=True)


@pytest.mark.spec("ENG-READ-D1")
@pytest.mark.parametrize("name", ["gated_mesa", "gated_kalmanet", "gsa", "abc", "raven"])
def test_a_tape_steps_and_states(name):
    config, given = named_rule(name).model_copy(update={"state_dtype": "float64"}), draw()
    own = (
        {"ridge": None, "mix": None}
        if name in ("gsa", "abc", "raven")
        else {"ridge": given["ridge"], "mix": given["mix"]}
    )
    gates = Gates(given["lr"], given["retain"], **own)
    tokens = [given[item].requires_grad_() for item in ("q", "k", "v")]
    y, state = memory_scan(config, *tokens, gates)
    true = torch.autograd.grad(y.sum(), tokens)
    tape = Tape()
    with torch.no_grad():
        taped, _ = memory_scan(config, *tokens, gates, tape=tape)
        for a, b in zip(tape.backward([taped], [torch.ones_like(taped)], tokens), true, strict=True):
            close(a, b, 1e-12)
        held, rows = None, []
        for t in range(T):
            one = Gates(*(None if gate is None else gate[:, t] for gate in gates))
            out, held = memory_step(config, *(x[:, t] for x in tokens), one, state=held)
            rows.append(out)
        close(torch.stack(rows, 1), y, 1e-12)
        close(held.readout["keys"], state.readout["keys"], 1e-12)
        assert state.detach().readout["keys"].requires_grad is False
        plain = memory_scan(config.direct, *tokens, Gates(given["lr"], None))[1]
        assert state.bytes == plain.bytes + state.readout["keys"].numel() * 8
    with pytest.raises(ShapeError, match="state.readout holds nothing"):
        memory_scan(config, *tokens, gates, state=plain)
    with pytest.raises(ShapeError, match=r"state.readout holds \['keys'\], but the config has readout 'direct'"):
        memory_scan(config.direct, *tokens, Gates(given["lr"]), state=state)
    bad = state._replace(readout={"keys": state.readout["keys"][..., :2]})
    with pytest.raises(ShapeError, match=r"state.readout\['keys'\] must be \[2, 2, 4, 4\]"):
        memory_scan(config, *tokens, gates, state=bad)


def gated(rule: str | MemoryConfig, **changed: Any) -> tuple[Tensor, dict[str, np.ndarray], dict[str, Tensor]]:
    """x, a rule's parameters and the gates that it makes."""
    gating, sizes = MemoryConfig.model_validate(rule).gating, Sizes(MODEL, 1, P, V)
    g = torch.Generator().manual_seed(2)
    x = 2 * torch.randn(1, T, MODEL, generator=g, dtype=torch.float64)
    params = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in gating.shapes(sizes).items()}
    held = {n: torch.zeros(1, *s, dtype=torch.float64) for n, s in gating.state_shapes(sizes).items()}
    tokens = [torch.zeros(1, T, 1, width, dtype=torch.float64) for width in (P, P, V)]
    made, _ = gating.forward(params, x, Written(*tokens, dict(changed)), held, Masks())
    return x, {n: p.numpy() for n, p in params.items()}, made.gates


@pytest.mark.spec("GATE-RAVEN-D1")
@pytest.mark.parametrize("top", [1, None])
def test_a_router_sends_a_token_to_few_slots(top):
    config = named_rule("raven").model_copy(update={"gating": {"kind": "raven", "top": top}, "state_dtype": "float64"})
    x, params, gates = gated(config)
    router = x[0].numpy() @ params["slots.weight"][0].T
    rise = x[0].numpy() @ params["share.weight"][0] + params["share.bias"][0]
    strength = -np.exp(params["share.rate"][0]) * np.logaddexp(0, rise)
    kept = logits.raven(router, strength, top or P)
    close(gates["retain"][0, :, 0], torch.from_numpy(kept), 1e-13)
    write, retain = gates["write"], gates["retain"]
    close(write + retain, torch.ones_like(write), 1e-15)
    assert ((write > 0).sum(-1) == (top or P)).all() and (retain[write == 0] == 1).all()
    # A slot that the last token does not go to is as it was, to the last bit.
    given = draw()
    tokens = [given[name][:1, :, :1] for name in ("q", "k", "v")]
    _, before = memory_scan(config, *(z[:, :-1] for z in tokens), Gates(1.0, retain[:, :-1], write=write[:, :-1]))
    own = Gates(1.0, retain[:, -1], write=write[:, -1])
    _, after = memory_step(config, *(z[:, -1] for z in tokens), own, state=before)
    held = [(state.memory["weight"], state.readout["keys"]) for state in (before, after)]
    for old, new in zip(*held, strict=True):
        assert torch.equal((old != new)[0, 0].any(0), write[0, -1, 0] > 0)


@pytest.mark.spec("GATE-RAVEN-D1")
def test_a_router_at_its_ends():
    """Scores whose sigmoids are all 0 or all 1, and equal ones, of which the first are chosen."""
    config = named_rule("raven").model_copy(update={"gating": {"kind": "raven", "top": 2}})
    gating, one = config.gating, torch.ones(1, 1, 1, dtype=torch.float64)
    params = {n: torch.zeros(s, dtype=torch.float64) for n, s in gating.shapes(Sizes(1, 1, P, V)).items()}
    made = Written(*(torch.zeros(1, 1, 1, w, dtype=torch.float64) for w in (P, P, V)), {})
    half = np.log(2) / 2  # of what exp(g) takes, g = -softplus(0)
    for rows, expected in (
        ([-800.0, -900.0, -900.0, -900.0], [np.log(2), 0, 0, 0]),
        ([-800.0, -800.0, -800.0, -900.0], [half, half, 0, 0]),
        ([70.0, 80.0, 90.0, 60.0], [0, half, half, 0]),
        ([0.0, 0.0, 0.0, 0.0], [half, half, 0, 0]),
    ):
        params["slots.weight"] = torch.tensor(rows, dtype=torch.float64).view(1, P, 1).requires_grad_()
        gates = gating.forward(params, one, made, {}, Masks())[0].gates
        close(gates["retain"][0, 0, 0], torch.tensor(expected, dtype=torch.float64).neg().exp(), 1e-14)
        (slope,) = torch.autograd.grad(gates["retain"].sum() + gates["write"].square().sum(), params["slots.weight"])
        assert slope.isfinite().all()


@pytest.mark.spec("GATE-RAVEN-D1")
def test_a_router_to_more_slots_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="^gating.top: a token goes to 9 slots, and there are 8, as many as a key is"):
        Memory(16, 2, {"kind": "raven", "gating": {"kind": "raven", "top": 9}})
    assert Memory(16, 2, "raven").qk_norm == "rms"


@pytest.mark.spec("READ-RIDGE-D1", "READ-SLOTS-D1")
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"bias": "l2"}, "^readout: readout 'ridge': bias 'l2' corrects what is stored"),
        ({"structure": "mlp"}, "structure 'mlp' is no linear map of phi"),
        ({"structure": "vector"}, "structure 'vector' is no linear map"),
        ({"structure": {"kind": "matrix", "learns": "key"}}, "learns='key' is no linear map"),
        ({"retention": {"kind": "elastic_net"}}, "retention 'elastic_net' is not linear"),
        ({"retention": {"kind": "decay", "channels": True}}, "retention.channels decays keys unevenly"),
        ({"algorithm": "momentum"}, "algorithm 'momentum' is no plain sum"),
        ({"algorithm": "omega"}, "algorithm 'omega' is no plain sum"),
        ({"writes": 2}, "it knows no writes=2; use 1"),
        ({"chunk": 4}, "it knows no chunk=4"),
        ({"commit": "chunk"}, "it knows no commit='chunk'"),
        ({"normalizer": "max"}, "it knows no normalizer='max'"),
        ({"step": "implicit"}, "it knows no step='implicit'"),
        ({"on_nonfinite": "skip"}, "may leave out tokens, whose keys it would hold"),
        ({"readout": {"kind": "ridge", "ridge": 0.0}}, "an empty H has no inverse"),
        ({"readout": "slots", "retention": "none"}, "^readout: readout 'slots': retention 'none' has no retain gate"),
        ({"readout": "direct", "gating": "mesa"}, "it makes the gate ridge; set readout='ridge'"),
        ({"gating": {"kind": "mesa", "ridge": 0.1}}, "has to start above its least 0.25"),
        ({"readout": "direct", "gating": "kalmanet"}, "it makes the gate mix; set readout='ridge'"),
        ({"gating": "gsa"}, "it makes the gate write; set readout='slots'"),
        ({"gating": "raven"}, "it makes the gate write; set readout='slots'"),
        ({"gating": {"kind": "raven", "top": 0}}, "^gating.top: must be >= 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_read_so_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MemoryConfig(**{**RIDGE, **fields})


@pytest.mark.spec("ENG-READ-D1")
@pytest.mark.parametrize(
    ("config", "gates", "sentence"),
    [
        ({}, {"write": 0.5}, "gates.write is given, but readout 'ridge' knows lr and retain, ridge, mix alone"),
        ({}, {"erase": 0.5}, "gates.erase is given, but bias 'dot' never asks"),
        ({}, {"ridge": -1.0}, r"gates.ridge must be a finite number >= 0, got -1"),
        ({}, {"ridge": torch.full((2, T, 2, P), -1.0)}, r"gates.ridge must be a finite number >= 0, got -1 at"),
        ({}, {"mix": 2.0}, r"gates.mix must be in \[0, 1\], got 2"),
        ({}, {"ridge": torch.ones(2, T, 2, P + 1)}, r"gates.ridge must be \[B, T, H\] = \[2, 37, 2\] or"),
        ({}, {"mix": torch.ones(2, T, 2, P)}, r"gates.mix must be a number or \[B, T, H\]"),
        ({}, {"retain": torch.ones(2, T, 2, P)}, "gates.retain has one value per phi channel, but readout 'ridge'"),
        ({"readout": "slots"}, {"mix": 0.5}, "gates.mix is given, but readout 'slots' has no mix"),
        ({"readout": "slots"}, {"retain_value": torch.ones(2, T, 2, V)}, "readout 'slots' knows lr and retain, write"),
        ({"readout": "direct"}, {"ridge": 0.5}, "gates.ridge is given, but readout 'direct' has no ridge"),
    ],
    ids=str,
)
def test_gates_that_do_not_fit_are_refused(config, gates, sentence):
    given = draw()
    with pytest.raises((ConfigError, ShapeError), match=sentence):
        memory_scan(MemoryConfig(**{**RIDGE, **config}), given["q"], given["k"], given["v"], Gates(**gates))


def test_what_has_no_solution_is_no_number_and_parts_that_predict_refuse():
    given, config = draw(), MemoryConfig(**RIDGE)
    given["k"][1, 7, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="batch row 1, head 1, token 7"):
        scanned(config, given)
    loose = config.model_copy(update={"on_nonfinite": "propagate"})
    reset = (torch.arange(T) == 20).expand(2, T)
    lost = scanned(loose, given, reset_mask=reset)[0].isnan().any(-1)
    assert lost.nonzero()[:, 1].unique().tolist() == list(range(7, 20)) and lost.sum() == 13
    given["k"][1, 7, 1] = 1e200  # its square overflows
    assert torch.equal(scanned(loose, given, reset_mask=reset)[0].isnan().any(-1), lost)
    with pytest.raises(ConfigError, match="a box answers with what it predicts; readout 'ridge'"):
        SelfReferenceConfig(memory=config)

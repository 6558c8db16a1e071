"""The engine interface: which engine takes a call, engines from outside, and what a call costs in Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from hecate import ConfigError, MemoryConfig
from hecate.engine import Call, Engine, Plan, TokenEngine, choose, exact_engines, explain, verdicts
from hecate.tape import Tape, execute
from tests.engine.test_properties import whole
from tests.memories import case_of, close, config_of

LENGTHS = (1, 2, 3, 15, 16, 2048)
STEPS = ((1, 1), (2, 1), (2, 2), (3, 2), (8, 4), (9, 5), (2048, 1024), (2048, 1025))
CALLS = [
    *[{"length": n} for n in LENGTHS],
    *[{"length": n, "shape": s} for n in (15, 16) for s in ((128, 128), (129, 128), (256, 256))],
    *[{"length": n, "shape": (128, 128), "dtype": torch.float64} for n in (2, 64)],
    *[{"length": n, "steps": s} for n, s in STEPS],
    *[{"length": n, "device": "cuda"} for n in (1, 2, 64)],
    *[{"length": n, "device": "cuda", "values": torch.bfloat16} for n in (1, 2, 64)],
    *[{"length": n, "dtype": torch.bfloat16} for n in (2, 64)],
    *[{"length": n, "traced": True} for n in (1, 2, 64)],
    *[{"length": n, "masked": True} for n in (1, 64)],
]
LETTERS = {"sequential": "s", "parallel": "p", "chunk": "c", "compiled": "k", "compiled_layers": "l", "fla": "f"}
LETTERS |= {"window": "w"}
# Of a rule its fields, and what `auto` took of each call when every engine's threshold stood in a chain of conditions
# of its own.
TABLE = {
    "delta": ({}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "hebbian": ({"bias": "dot"}, "spppkkpppkkkpkspppppkksppsppppsppsk"),
    "gated delta": ({"retention": "decay", "decay_order": "before_gradient"}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "titans": ({"retention": "decay", "algorithm": "momentum"}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "nesterov": ({"algorithm": {"kind": "momentum", "nesterov": True}}, "spppkkppppppppspppppkksppsppppsppsk"),
    "huber": ({"bias": "huber", "retention": "decay"}, "spppkkpppkkkpkspppppkksppsppppsppsk"),
    "huber of the norm": ({"bias": {"kind": "huber", "norm": True}}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "elastic net": ({"retention": "elastic_net"}, "sssskkssskkksksssssskkssssssssssssk"),
    "elastic net, decayed first": (
        {"retention": "elastic_net", "decay_order": "before_gradient"},
        "sssskkssskkksksssssskkssssssssssssk",
    ),
    "l2 retention": ({"retention": "l2"}, "sssskkssskkksksssssskkssssssssssssk"),
    "kl": ({"retention": "kl"}, "sssskkssslllslsssssskkssssssssssssk"),
    "sphere": ({"retention": "sphere"}, "sssskkssskkksksssssskkssssssssssssk"),
    "delta momentum": ({"algorithm": "delta_momentum"}, "sssskkssskkksksssssskkssssssssssssk"),
    "mlp": ({"structure": "mlp"}, "ssssllssslllslssssssllssssssssssssl"),
    "vector": ({"structure": "vector"}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "vector, huber of the norm": (
        {"structure": "vector", "bias": {"kind": "huber", "norm": True}},
        "sssssssssssssssssssssssssssssssssss",
    ),
    "linear attention": (
        {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
        "spppkkpppkkkpkspppppkksppsppppsppsk",
    ),
    "chunk": ({"chunk": 8}, "scccccccccccccscsscscssccsccccsccsc"),
    "titans, chunk": (
        {"chunk": 8, "retention": "decay", "algorithm": "momentum"},
        "scccccccccccccscsscscssccsccccsccsc",
    ),
    "chunk commit": ({"chunk": 8, "commit": "chunk"}, "scccccccccccccscsscscssccsccccsccsc"),
    "chunk commit of one": ({"commit": "chunk"}, "sssssssssssssssssssssssssssssssssss"),
    "mlp, chunk": ({"structure": "mlp", "chunk": 8}, "scccccccccccccscsscscssccsccccsccsc"),
    "omega": ({"algorithm": "omega"}, "ssswwwwwwwwwswsssswwwwsswsswswsswsw"),
    "omega, chunk": ({"algorithm": "omega", "chunk": 8}, "ssswwwwwwwwwswsssssswwsswsswswsswsw"),
    "float64": ({"state_dtype": "float64"}, "spppkkpppkppppspppppkksppsppppsppsk"),
    "skip": ({"on_nonfinite": "skip", "bias": "dot"}, "spppkkpppkkkpkspppppkksppsppppsppsk"),
}
CONFIGS = {name: fields for name, (fields, _) in TABLE.items()}


@pytest.mark.spec("ENG-ENGINE-I1")
@pytest.mark.parametrize("name", CONFIGS)
def test_auto_takes_what_the_measured_thresholds_say(name, monkeypatch):
    monkeypatch.setattr("hecate.engine.fla.kernel.load_kernel", lambda kernel: None)
    config = MemoryConfig(**CONFIGS[name])
    assert "".join(LETTERS[choose(Plan.sketch(config, **call)).name] for call in CALLS) == TABLE[name][1]


@pytest.mark.spec("ENG-ENGINE-I1")
def test_a_call_answers_what_its_sketch_is_told():
    case = case_of(config_of(**CONFIGS["titans, chunk"]), length=20, channels=True)
    call = Call.of(case.config, case.q, case.k, case.v.float(), case.gates, initial=case.initial)
    told = {"length": 20, "shape": (2, 3), "device": "cpu", "dtype": torch.float64, "values": torch.float32}
    sketch = Plan.sketch(case.config, **told, channels=True, steps=3)
    for name in (*told, "channels", "masked", "traced", "config"):
        assert getattr(call, name) == getattr(call.plan, name) == getattr(sketch, name), name
    assert choose(call) is choose(sketch) is Engine.registry["chunk"]


def borrowed(cheap: float, **methods) -> Engine:
    """An engine of a user's: the token loop under another name."""

    class Mine(TokenEngine):
        """The token loop, borrowed."""

        name = "mine"

        def refuses(self, config):
            return None if config.structure.linear else "it is for linear memories"

        def unfit(self, call):
            return "it takes no masks" if call.masked else None

        def cost(self, call):
            return cheap * call.length

        def about(self, call):
            return "borrowed"

        def scan(self, call, tokens, carry, initial, *, run):
            return Engine.registry["sequential"].scan(call, tokens, carry, initial, run=run)

    for name, method in methods.items():
        setattr(Mine, name, method)
    return Engine.registry["mine"]


@pytest.mark.spec("ENG-ENGINE-D1")
def test_an_engine_from_outside_the_package(others):
    config = config_of(**CONFIGS["titans"])
    case = case_of(config, length=6)
    with pytest.raises(ConfigError, match=r"unknown engine 'mine'\. Known: auto, "):
        case.scan(engine="mine")
    mine = borrowed(0.1)
    assert choose(Plan.sketch(config)) is mine and explain(Plan.sketch(config)) == ("mine", "borrowed")
    assert "mine" in exact_engines(config) and verdicts(Plan.sketch(config))["mine"] == "borrowed"
    whole(case, engine="mine").equals(whole(case, engine="sequential"))
    assert torch.equal(case.scan()[0], case.scan(engine="sequential")[0])
    with pytest.raises(ConfigError, match="engine='mine' cannot run this memory exactly: it is for linear memories"):
        case_of(config_of(structure="mlp")).scan(engine="mine")
    with pytest.raises(ConfigError, match="it takes no masks"):
        case_of(config, masks=True).scan(engine="mine")
    assert choose(Plan.sketch(config, masked=True)) is not mine
    assert borrowed(0.1) is not mine  # defined once more, it takes its own place
    with pytest.raises(ConfigError, match="there is an engine 'parallel' already"):
        type("Other", (TokenEngine,), {"name": "parallel", "cost": None, "scan": None})
    mine = Engine.registry["mine"]
    del Engine.registry["mine"]
    assert choose(Plan.sketch(config)) is others["parallel"]
    borrowed(1e9)
    assert choose(Plan.sketch(config)) is others["parallel"]
    with pytest.raises(ConfigError, match="unknown engine 'parralel'. Did you mean 'parallel'"):
        case.scan(engine="parralel")


@pytest.mark.spec("ENG-ENGINE-D2")
def test_an_engine_without_a_method_is_refused_where_it_is_defined(others):
    for base, missing in ((Engine, "cost, run"), (TokenEngine, "cost, scan")):
        with pytest.raises(ConfigError, match=f"engine 'half' has no {missing}: an engine gives"):
            type("Half", (base,), {"name": "half"})
    with pytest.raises(ConfigError, match="engine 'half' has no run: "):
        type("Half", (Engine,), {"name": "half", "cost": lambda self, call: 1.0})
    assert "half" not in Engine.registry


@pytest.mark.spec("ENG-ENGINE-D2")
def test_an_engine_that_says_nothing_is_not_explained_by_what_others_say(others):
    borrowed(0.1, about=Engine.about)
    name, reason = explain(Plan.sketch(config_of(**CONFIGS["titans"])))
    assert name == "mine" and reason.startswith("the cheapest that can (") and "parallel: " in reason


class Pulled:
    """The backward pass of an engine of one's own, which counts how often it is asked."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def forward(self, engine: Engine, call: Call, keeps: bool):
        self.calls["forward"] += 1
        return engine.run(call), tuple(call.flat) if keeps else None

    def backward(self, engine: Engine, call: Call, record, cotangents):
        self.calls["backward"] += 1
        assert all(a is None or torch.equal(a, b) for a, b in zip(call.flat, record, strict=True))
        where = [at for at, x in enumerate(call.flat) if x is not None and x.is_floating_point()]
        with torch.enable_grad():
            own = list(call.flat)
            for at in where:
                own[at] = call.flat[at].detach().requires_grad_()
            outputs = engine.run(Call(call.plan, tuple(own)))
            pairs = [(out, g) for out, g in zip(outputs, cotangents, strict=True) if out.requires_grad]
            leaves = [own[at] for at in where]
            outputs, given = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
        found = [None] * len(own)
        for at, grad in zip(where, grads, strict=True):
            found[at] = grad
        return found


@pytest.mark.spec("ENG-ENGINE-D1")
def test_an_engine_with_a_backward_pass_of_its_own(others):
    pulled = Pulled()
    borrowed(
        0.1,
        forward=lambda self, call, keeps: pulled.forward(self, call, keeps),
        backward=lambda self, call, record, cotangents: pulled.backward(self, call, record, cotangents),
    )
    case = case_of(config_of(**CONFIGS["titans"]), length=5, batch=1)
    whole(case, engine="mine").equals(whole(case, engine="sequential"))
    assert pulled.calls["forward"] and pulled.calls["backward"]
    fresh = case.fresh()

    def scan(*leaves: Tensor) -> Tensor:
        return fresh.with_leaves(list(leaves)).scan(engine="mine")[0]

    assert torch.autograd.gradgradcheck(scan, fresh.leaves, fast_mode=True)
    grads = torch.func.grad(lambda q: scan(q, *case.leaves[1:]).square().sum())(case.q)
    expected = torch.func.grad(lambda q: case._replace(q=q).scan(engine="sequential")[0].square().sum())(case.q)
    close(grads, expected, 1e-12)
    tape = Tape()
    y, _ = case.scan(engine="mine", tape=tape)
    assert "engine.mine" in str(tape)
    (g,) = tape.backward([y], [torch.ones_like(y)], [case.v])
    (true,) = torch.autograd.grad(scan(*fresh.leaves).sum(), fresh.v)
    close(g, true, 1e-12)


@pytest.mark.spec("ENG-CALL-D1")
def test_a_graph_keeps_the_tensors_of_a_call_and_not_the_call():
    """Calls are made again from a plan without tensors: nothing lives on in a closure."""
    case = case_of(config_of(**CONFIGS["titans"]), length=3).fresh()
    call = Call.of(case.config, case.q, case.k, case.v, case.gates, initial=case.initial)
    assert not [item for item in torch.utils._pytree.tree_leaves(vars(call.plan)) if isinstance(item, Tensor)]
    again = Call(call.plan, call.flat)
    y, state = again.result(Engine.registry["sequential"].program(again.plan, execute, *again.flat))
    expected, final = case.scan(engine="sequential")
    assert torch.equal(y, expected) and torch.equal(state.memory["weight"], final.memory["weight"])
    assert math.prod(call.shape) == 6 and call.memories[0][0][0].shape == (4, 2, 3)

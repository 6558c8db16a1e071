"""What gatings make of a token, against the papers' loops in numpy; their state over splits, masks and resets."""

from __future__ import annotations

import pickle
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.errors import ConfigError
from hecate.gating import (
    Complement,
    Curvature,
    Gating,
    Hypergradient,
    Masks,
    MomentumDeltaGates,
    Sizes,
    Written,
    corrections,
)
from hecate.nn import Memory
from hecate.retention import Decay
from tests.memories import close
from tests.reference import gates_2026 as logits
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.registries import restore_registries

T, MODEL, P, V = 17, 6, 4, 3
SOLVED = corrections._solve_chunk


class Case:
    """One head of a rule's gating with parameters off their start, random inputs, and what it makes of them."""

    def __init__(self, name: str, chunk: int = 1, config: MemoryConfig | None = None, **gates: Tensor) -> None:
        source = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source, dtype=torch.float64)

        self.config = (config or named_rule(name)).model_copy(update={"state_dtype": "float64"})
        gating, weights = self.config.gating, len(self.config.structure.shapes(P, V))
        sizes = Sizes(MODEL, 1, P, V, self.config.writes, weights)
        self.params = {
            name: gating.start(name, shape, sizes, source) + 0.3 * normal(*shape)
            for name, shape in gating.shapes(sizes).items()
        }
        self.x, self.q, self.k, self.v = (normal(1, T, *shape) for shape in ((MODEL,), (1, P), (1, P), (1, V)))
        held = {name: torch.zeros(1, *shape, dtype=torch.float64) for name, shape in gating.state_shapes(sizes).items()}
        made = Written(self.q, self.k, self.v, dict(gates))
        self.made, _ = gating.forward(self.params, self.x, made, held, Masks(chunk=chunk))

    def scanned(self) -> Tensor:
        q, k, v, gates, skip = self.made
        y = memory_scan(self.config, q, k, v, Gates(**gates))[0][0, :, 0]
        return y if skip is None else y + skip[0, :, 0]

    def logit(self, name: str) -> np.ndarray:
        found = self.x[0] @ self.params[f"{name}.weight"].mT
        return found[:, 0].numpy()

    def __getitem__(self, name: str) -> Any:
        """A parameter of the head, or an input, in numpy."""
        return (self.params[name] if name in self.params else getattr(self, name)[0, :, 0]).squeeze().numpy()


def per_token(seed: int, *shape: int) -> Tensor:
    return torch.rand(1, T, 1, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.spec("GATE-COMBA-D1")
def test_comba_without_a_norm():
    """The query is corrected by the key as both come, and read with as it is then."""
    lr, retain = per_token(2), per_token(3)
    case = Case("comba", config=named_rule("comba", key_norm="none"), lr=lr, retain=retain)
    gates = retain[0, :, 0].numpy(), lr[0, :, 0].numpy()
    q, k, c, d = case["q"], case["k"], float(logits.comba(case["a"])), float(case["d"])
    true, _ = older.comba(q - d * c * k, k, case["v"], *gates, c)
    close(case.scanned(), torch.from_numpy(true), 1e-13)


@pytest.mark.spec("GATE-MDN-D1")
def test_momentum_delta_without_its_correction():
    case = Case("momentum_delta", config=named_rule("momentum_delta", gating=MomentumDeltaGates(correction=False)))
    f, rate, mu_rate = np.exp(case["f"]), case["alpha.rate"], case["mu.rate"]
    eta, beta, alpha, mu = logits.momentum_delta(
        *(case.logit(name) for name in ("eta", "b", "alpha", "mu")), f, rate, mu_rate, case["alpha.bias"],
        case["mu.bias"], MODEL,
    )  # fmt: skip
    assert (mu[1:] * beta[1:] / beta[:-1]).max() > 1, "the gate must leave [0, 1] for this to say anything"
    true, *_ = newer.momentum_delta(unit(case["q"]), unit(case["k"]), case["v"], alpha, beta, mu, eta)
    close(case.scanned(), torch.from_numpy(true), 1e-12)


@pytest.mark.spec("GATE-ABC-D1", "GATE-MDN-D1")
@pytest.mark.parametrize(("name", "seeds"), [("abc", 8), ("momentum_delta", 12)])
def test_logits_of_any_size_leave_gradients_finite(name, seeds):
    """abc: exp(s) of an unwritten token over a sum of exp(-32) is 6e27, and its derivative out of range. Momentum
    DeltaNet: by logits of +-90 b falls to 1e-39, and momentum is the next one over it."""
    layer = Memory(16, heads=2, config=name, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    for seed in range(seeds):
        source = torch.Generator().manual_seed(seed)
        x = 30 * torch.randn(2, 33, 16, generator=source, dtype=torch.float32)
        x.requires_grad_()
        layer.zero_grad()
        y, _ = layer(x, write_mask=torch.rand(2, 33, generator=source) < 0.5 if name == "abc" else None)
        y.square().mean().backward()
        assert all(bool(g.isfinite().all()) for g in (y, x.grad, *(p.grad for p in layer.parameters())))


@pytest.mark.spec("GATE-CURV-D1")
def test_curvature_that_fades_by_a_sigmoid():
    lr, retain = per_token(2), per_token(3, P)
    case = Case("pkda", config=named_rule("pkda", gating=Curvature(gate="sigmoid")), lr=lr, retain=retain)
    decay, rate = (logits.sigmoid(case.logit(part) + case[f"{part}.bias"]) for part in ("decay", "rate"))
    # The layer's keys are of unit length before, so the curvature is that of the key as it comes.
    factor = newer.curvature(case["k"], decay, rate, center=case["center"])
    true, _ = newer.preconditioned_delta(
        unit(case["q"]), unit(case["k"]), case["v"], factor, lr[0, :, 0].numpy(), retain[0, :, 0].numpy()
    )
    close(case.scanned(), torch.from_numpy(true), 1e-13)


def test_preconditioned_rules_let_curvature_fade_as_released():
    """exp(-A softplus(W x + b)), A in U(1, 16) and softplus(b) log-uniform in [1e-3, 1e-1], W at zero."""
    for name in ("pgdn", "pkda"):
        gating = Memory(64, 32, name, generator=torch.Generator().manual_seed(0)).gating
        start = gating.params.tensors
        rate, step = start["decay.rate"].exp(), torch.nn.functional.softplus(start["decay.bias"])
        assert named_rule(name).gating.gate == "softplus" and not start["decay.weight"].any()
        assert 1 <= rate.min() < 4 and 12 < rate.max() <= 16 and 1e-3 <= step.min() < 3e-3 and 4e-2 < step.max() <= 1e-1
    # What 0.1 and 0.2 have written of their gating goes on as a sigmoid.
    written = {"kind": "curvature", "base": 1.5, "eps": 1e-6, "center": -0.2, "decay": 0.99, "rate": 0.5}
    assert MemoryConfig(gating=written, retention="decay").gating.gate == "sigmoid"
    with pytest.raises(ConfigError, match="decay=0.9 is where a sigmoid starts.*leave decay out"):
        Curvature(gate="softplus", decay=0.9)


@pytest.mark.spec("GATE-OSDN-D1")
@pytest.mark.parametrize(
    "own", [{"eta": 0.4, "low": 0.7, "high": 1.2}, {"forget": None, "begin": 0.0}], ids=["bounded", "kept"]
)
def test_osdn(own):
    lr = per_token(2)
    config = named_rule("osdn").model_copy(update={"gating": Hypergradient(**own)})
    case = Case("osdn", config=config, lr=lr)
    gating = config.gating
    forget = np.ones(T) if gating.forget is None else logits.sigmoid(case.logit("forget") + case["forget.bias"])
    bounds = gating.low, gating.high or np.inf
    start = np.clip(case["start"], *bounds)
    factor = newer.hypergradient(unit(case["k"]), forget, gating.eta, start, low=bounds[0], high=bounds[1])
    close(case.made.gates["write"][0, :, 0], torch.from_numpy(factor), 1e-13)
    true, _ = newer.preconditioned_delta(
        unit(case["q"]), unit(case["k"]), case["v"], factor, lr[0, :, 0].numpy(), np.ones(T)
    )
    close(case.scanned(), torch.from_numpy(true), 1e-13)


def preconditioned(gating: Hypergradient, length: int, heads: int = 2) -> dict[str, Any]:
    """Inputs of `forward` and its parameters, with masks; off the start."""
    g, sizes = torch.Generator().manual_seed(5), Sizes(MODEL, heads, P, V)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    params = {n: gating.start(n, s, sizes, g) + 0.3 * normal(*s) for n, s in gating.shapes(sizes).items()}
    mask = torch.rand(2, 3, length, generator=g)
    return {
        "params": {n: p.requires_grad_() for n, p in params.items()}, "x": normal(3, length, MODEL),
        "k": normal(3, length, heads, P).requires_grad_(), "masks": Masks(mask[0] > 0.2, mask[1] > 0.97),
        "held": {"moved": 0.1 * normal(3, heads, P)},
    }  # fmt: skip


def factors(gating: Hypergradient, given: dict[str, Any], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """d of every token and after the last, in pieces of these sizes."""
    held, found, at = given["held"], [], 0
    for size in sizes:
        to = slice(at, at + size)
        k, masks = given["k"][:, to], Masks(*(mask[:, to] for mask in given["masks"][:2]))
        made, held = gating.forward(given["params"], given["x"][:, to], Written(k, k, k, {}), held, masks)
        found.append(made.gates["write"])
        at += size
    return torch.cat(found, 1), held["moved"]


@pytest.mark.spec("GATE-OSDN-I1", "GATE-STATE-I1")
@pytest.mark.parametrize(
    ("own", "by_token"), [({"low": 0.0}, False), ({"low": 0.4, "eta": 2.0}, True), ({"low": 0.5, "high": 1.1}, True)]
)
def test_a_chunk_of_osdn_is_its_tokens(own, by_token, monkeypatch):
    """Masks, resets and a rest of a chunk; whether bounds are met or not."""
    gating, length, stayed = Hypergradient(forget=0.9, **own), 150, []
    monkeypatch.setattr(corrections, "_solve_chunk", lambda *given: stayed.append(SOLVED(*given)) or stayed[-1])
    given = preconditioned(gating, length)
    leaves = [given["k"], *given["params"].values()]
    found = []
    for sizes in ([length], [1] * length):
        d, last = factors(gating, given, sizes)
        weight = torch.linspace(-1, 1, d.numel(), dtype=d.dtype).view_as(d)
        found.append((d, last, *torch.autograd.grad((d * weight).sum() + last.square().sum(), leaves)))
    assert len(stayed) == 3, "one token alone solves nothing"
    high = np.inf if gating.high is None else gating.high
    ends = [end.item() for pair in stayed for d in pair for end in d.detach().aminmax()]
    assert (min(ends) < gating.low or max(ends) > high) is by_token
    for mine, true in zip(*found, strict=True):
        close(mine, true, 1e-11)


@pytest.mark.spec("GATE-OSDN-D1", "GATE-OSDN-E1")
@pytest.mark.parametrize("own", [{"eta": 0.0}, {"eta": 1.0}, {"eta": 0.3, "high": 1.5}])
def test_osdn_without_forgetting_from_one_is_delta(own):
    gating = Hypergradient(forget=None, **own)
    sizes = Sizes(MODEL, 2, P, V)
    params = {"start": gating.start("start", (2, P), sizes, torch.Generator())}
    given = preconditioned(gating, 70) | {"params": params, "held": {"moved": torch.zeros(3, 2, P).double()}}
    d, last = factors(gating, given, [70])
    close(d, torch.ones_like(d), 1e-14)
    assert last.abs().max() < 1e-14
    y, scaled = (
        memory_scan(MemoryConfig(key_norm="l2", state_dtype="float64"), *[given["k"]] * 3, gates, engine="sequential")[
            0
        ]
        for gates in (Gates(0.7), Gates(0.7, write=d))
    )
    close(scaled, y, 1e-13)


@pytest.mark.spec("GATE-TARGET-D1", "GATE-TARGET-I1")
@pytest.mark.parametrize("chunk", [2, 5])
def test_in_place_ttt(chunk):
    case = Case("in_place_ttt", chunk=chunk)
    w_gate, w_up, w_down = (np.random.default_rng(i).normal(size=s) for i, s in enumerate(((6, P), (6, P), (V, 6))))
    case.config = case.config.model_copy(update={"feature_map": {"kind": "glu", "d_hidden": 6}, "chunk": chunk})
    params = {"learned": {"w_gate": torch.as_tensor(w_gate.T)[None], "w_up": torch.as_tensor(w_up.T)[None]}}
    x, conv = case["k"], case.params["conv"][:, 0].numpy()
    true, after = newer.in_place_ttt(x, case["v"], w_gate, w_up, w_down, conv, chunk, case.config.algorithm.lr)
    _, k, v, gates, _ = case.made
    how = {"initial": {"weight": torch.as_tensor(w_down)[None]}, "phi_params": {**params, "frozen": {}}}
    y, state = memory_scan(case.config, case.k, k, v, Gates(**gates), **how)
    close(y[0, :, 0], torch.from_numpy(true), 1e-13)
    close(state.memory["weight"][0, 0], torch.from_numpy(after), 1e-13)
    assert not gates.get("lr") and k.shape == (1, T, 3, 1, P)


@pytest.mark.spec("GATE-TARGET-I1")
def test_a_token_ahead_is_seen_from_the_next_chunk_on_alone():
    config = named_rule("in_place_ttt").model_copy(update={"chunk": 4})
    layer = Memory(6, 2, config, d_key=4, d_value=3, conv_kernel=0, dtype=torch.float64)
    for param in layer.parameters():
        param.data += 0.3 * torch.randn(param.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = torch.randn(1, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = layer(x)[0]
    moved = layer(x + 5.0 * (torch.arange(12) == 5).view(1, 12, 1))[0] - y
    changed = moved.abs().amax((0, 2)) > 0
    assert changed.tolist() == [t == 5 or t >= 8 for t in range(12)]
    # The write of token 3, the first chunk's last, does not look into the second.
    assert layer(x[:, :4])[1].memory.position.tolist() == [[0, 0]]


def test_mlstm_gates_stay_in_range_where_exp_would_not():
    gating = named_rule("mlstm").gating
    one, x = torch.ones(1), torch.linspace(-1, 1, T).view(1, T, 1)
    params = {"i.weight": 1e4 * one[None], "i.bias": 0 * one, "f.weight": 0 * one[None], "f.bias": one}
    made, _ = gating.forward(params, x, Written(*[torch.ones(1, T, 1, P)] * 3, {}), {"m": 0 * one[None]}, Masks())
    assert set(made.gates) == {"lr", "retain", "floor"} and all(gate.isfinite().all() for gate in made.gates.values())
    assert made.gates["lr"].max() <= 1 and made.gates["retain"].max() <= 1


@pytest.mark.spec("GATE-TIED-D1")
def test_what_is_not_kept_is_written_with_the_layers_keys():
    x, made = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1)), []
    for gating in ("none", Complement(keys=True)):
        config = MemoryConfig(bias="dot", retention=Decay(channels=True), gating=gating)
        made.append(Memory(8, 2, config, generator=torch.Generator().manual_seed(0)).asked(x)[0])
    plain, asked = made
    assert torch.equal(asked.k, plain.k) and torch.equal(asked.gates.retain, plain.gates.retain)
    close(asked.gates.write, 1 - asked.gates.retain, 0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gating": "rwkv7", "retention": "decay"}, "set writes=2"),
        ({"gating": "mlstm"}, "normalizer='max'"),
        ({"bias": "dot", "gating": "mamba2"}, "retention 'none' has no retain gate"),
        ({"gating": "momentum_delta", "retention": "decay", "algorithm": "momentum"}, "bounded=False"),
        ({"gating": "comba", "key_norm": "sum"}, "a corrected query has; use 'l2'"),
        ({"gating": "complement"}, "no retain gate"),
        ({"gating": "complement", "retention": "decay"}, "set retention.channels, or gating.keys"),
        ({"gating": "curvature", "algorithm": {"kind": "gd", "lr": 1.9}, "key_norm": "l2"}, "diverge; lower one"),
        ({"gating": "hypergradient"}, "key_norm is 'none'; set key_norm='l2'"),
        ({"kind": "large_chunk_ttt", "algorithm": "gd"}, "algorithm 'gd' has none; use one that has"),
        ({"kind": "large_chunk_ttt", "commit": "token"}, "it needs commit='chunk'"),
        ({"kind": "osdn", "writes": 2}, "one key per token, not writes=2"),
        ({"kind": "osdn", "feature_map": "elu"}, "not those of feature_map 'elu'; use 'identity'"),
        ({"kind": "osdn", "gating": {"kind": "hypergradient", "high": 2.5}}, "times lr=1 within 2"),
        ({"kind": "osdn", "gating": {"kind": "hypergradient", "low": 2, "high": 1}}, "has to lie above low=2"),
        ({"gating": {"kind": "heads", "retain_value": {}}}, "set retain_value.channels"),
        ({"kind": "in_place_ttt", "writes": 2}, "2 taps ahead make 3 writes of a token, got writes=2"),
        ({"kind": "in_place_ttt", "read": "after"}, "causal with commit='chunk' and read='before' alone"),
        ({"kind": "in_place_ttt", "bias": "l2"}, "bias 'l2' makes a write depend on those before it"),
        ({"kind": "in_place_ttt", "normalizer": "max"}, "would count each of its writes as a token"),
        ({"kind": "in_place_ttt", "on_nonfinite": "skip"}, "leave out tokens of a chunk that it has counted"),
    ],
    ids=lambda x: str(x.get("gating")) if type(x) is dict else "",
)
def test_what_a_gating_cannot_gate_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=f"gating: gating .*{sentence}"):
        MemoryConfig.model_validate(fields)


def test_parts_that_make_one_write_refuse_several():
    with pytest.raises(ConfigError, match="feature_memory looks at one key"):
        Memory(8, 2, named_rule("delta_product"), feature_memory=MemoryConfig())
    with pytest.raises(ConfigError, match="a feature memory makes one key"):
        Memory(8, 2, feature_memory=named_rule("delta_product"))
    with pytest.raises(ConfigError, match="firing='learned'.*writes=2"):
        Memory(8, 2, named_rule("delta_product"), firing="learned")


@pytest.mark.parametrize("what", ["parts", "shapes", "state_shapes"])
def test_tensors_of_a_user_s_gating_beyond_the_limit_are_refused(what, monkeypatch):
    """Before one is made: parameters, by `parts` or by `shapes` and `start`, and the state."""
    restore_registries(monkeypatch)

    class Wide(Gating):
        """wide_of_a_user: everything as it is."""

        kind: Literal["wide_of_a_user"] = "wide_of_a_user"

    size = (1 << 20, 1 << 20)
    shapes = {"wide": (size, 0.0)} if what == "parts" else {"wide": size}
    monkeypatch.setattr(Wide, what, lambda self, sizes: shapes)
    said = "'state of wide' would" if what == "state_shapes" else "'wide' would"
    with pytest.raises(ConfigError, match=f"{said} be a tensor .* more than the limit .* gating 'wide_of_a_user'"):
        Memory(8, 2, MemoryConfig(gating=Wide()))


def test_pickles_of_before_find_their_heads():
    config = named_rule("gated_delta_2")
    before = pickle.dumps(config, 0).replace(b"hecate.gating.heads", b"hecate.gating.base")
    assert before != pickle.dumps(config, 0) and pickle.loads(before) == config

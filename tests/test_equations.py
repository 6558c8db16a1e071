"""Equations: every variant and every named rule has them, they can be typeset, and their values are the code's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser

from hecate import algorithm, bias, named_rule, phi, retention
from hecate.activation import Activation
from hecate.data import DataConfig
from hecate.evals import Evaluation
from hecate.phi import FeatureMap
from hecate.rule import RULES
from hecate.train.loggers import LoggerKind
from hecate.variant import Variant, equation
from tests.latex import FUNCTIONS, Equations
from tests.registries import shipped_kinds
from tests.rule.trials import TRIALS, unit
from tests.test_docstrings import shipped

VARIANTS = [
    cls for cls in shipped() if not issubclass(cls, DataConfig | Evaluation | LoggerKind)
]  # which compute nothing
RNG = np.random.default_rng(0)


def lines(text: str, *numbers: int) -> str:
    """Those of an equation, all where none is named."""
    found = text.split("\n")
    return "\n".join(found[number] for number in numbers or range(len(found)))


@pytest.mark.spec("VAR-EQUATION-D1")
def test_every_equation_can_be_typeset():
    texts = {cls.__qualname__: equation(cls) for cls in VARIANTS} | {
        name: rule.equation for name, rule in RULES.items()
    }
    assert [name for name, text in texts.items() if not text] == []
    parser = MathTextParser("path")
    for line in {line for text in texts.values() for line in text.split("\n")}:
        assert line.startswith("$") and line.endswith("$") and line.count("$") == 2, line
        parser.parse(line)


@pytest.mark.spec("VAR-EQUATION-D1")
def test_a_variant_has_the_equation_of_its_own_docstring_alone():
    class Above(phi.Linear.__base__):  # type: ignore[name-defined, misc]
        r"""above: nothing.

        Formula: $a = \frac{1}
        {2}$
        $b = 2$
        Shapes: none, for $5.
        """

    class Below(Above):
        pass

    assert equation(Above) == "$a = \\frac{1} {2}$\n$b = 2$"
    assert equation(Below) == equation(Variant) == ""


COMPONENTWISE = [cls for cls in shipped_kinds(FeatureMap).values() if r"\phi(x)_i = " in equation(cls)]
COMPONENTWISE = [cls for cls in COMPONENTWISE if cls.__name__ != "RandomMaclaurin"]


@pytest.mark.spec("VAR-EQUATION-I1")
def test_the_equation_of_a_componentwise_map_and_of_an_activation_is_its_value():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    for cls in COMPONENTWISE:
        made = cls(**{name: 0.3 for name in ("shift", "slope", "beta") if name in cls.model_fields})
        given = made.model_dump()
        del given["kind"]
        found = [Equations(equation(cls), x_i=value, **given)["phi(x)_i"] for value in x.tolist()]
        np.testing.assert_allclose(np.array(found), made(x).numpy(), rtol=1e-12, err_msg=cls.__name__)
    for kind, cls in shipped_kinds(Activation).items():
        found = [Equations(equation(cls), x=value)["act(x)"] for value in x.tolist()]
        np.testing.assert_allclose(np.array(found), cls().value(x).numpy(), rtol=1e-12, err_msg=kind)


MAPS: list[tuple[FeatureMap, int, dict[str, str]]] = [  # the line of an equation, and names of parameters by letter
    (phi.Identity(), 0, {}),
    (phi.CReLU(), 0, {}),
    (phi.Softmax(temperature=0.7), 0, {}),
    (phi.Softmax(temperature=0.7, half_space=True), 1, {}),
    (phi.Normalise(inner="identity", eps=0.1), 0, {}),
    (phi.Linear(d_phi=3), 0, {"W": "weight"}),
    (phi.T2R(d_phi=5), 0, {"W": "weight", "b": "bias"}),
    (phi.Hadamard(d_phi=5), 0, {"W_1": "w_1", "W_2": "w_2"}),
    (phi.GLU(d_hidden=5), 0, {"W_g": "w_gate", "W_u": "w_up"}),
    (phi.Hedgehog(), 0, {"W": "weight", "b": "bias"}),
    (phi.Hedgehog(joint=True), 1, {"W": "weight", "b": "bias"}),
    (phi.MLP(activation="silu"), 0, {"W_in": "w_in", "W_out": "w_out"}),
    (phi.MLP(activation="silu", residual=False), 1, {"W_in": "w_in", "W_out": "w_out"}),
    (phi.ArcCosine(num_features=6, order=2), 0, {"W": "w"}),
    (phi.PerformerReLU(num_features=6, kernel_epsilon=0.1), 0, {"W": "w"}),
    (phi.Favor(num_features=6), 0, {"W": "w"}),
    (phi.Favor(num_features=6, variant="hyperbolic"), 1, {"W": "w"}),
    (phi.Favor(num_features=6, variant="trigonometric"), 2, {"W": "w"}),
    (phi.RandomFourier(d_phi=6), 0, {"W": "w", "b": "b"}),
    (phi.RandomFourier(d_phi=6, form="paired"), 1, {"W": "w"}),
]


@pytest.mark.spec("VAR-EQUATION-I1")
@pytest.mark.parametrize(("made", "line", "names"), MAPS, ids=lambda x: getattr(x, "kind", ""))
def test_the_equation_of_a_map_is_its_value(made: FeatureMap, line: int, names: dict[str, str]):
    x = np.array([0.4, -0.6, 1.1, 0.2])
    params = made.init(4, dtype=torch.float64)
    own = {name: value[0].numpy() for group in ("learned", "frozen") for name, value in params[group].items()}
    letters: dict[str, Any] = {letter: own[name] for letter, name in names.items()}
    letters |= {letter: own[:, None] for letter, own in letters.items() if own.ndim == 1}
    columns = letters["W"].shape[1] if "W" in letters else None  # of which pairs make two features each
    letters |= {"x": x[:, None], "d": 4.0, "m": columns, "P": columns, "n": 2.0, "tau": 0.7, "varepsilon": 0.1}
    letters |= {"inner": lambda x: x, "act": FUNCTIONS["silu"], "tildex": x[:, None] / 4**0.25}
    found = Equations(lines(equation(type(made)), line), **letters)
    if made.kind == "hedgehog":
        found["z"] = letters["W"].T @ found["x"] + letters["b"]
    expected = made(torch.as_tensor(x)[None, None], params)[0, 0].numpy()
    np.testing.assert_allclose(found["phi(x)"][:, 0], expected, rtol=1e-12)


ERROR = np.array([0.3, -2.0, 0.7, 1.4])
BIASES: list[tuple[Any, str, dict[str, float]]] = [
    (bias.Dot(), lines(equation(bias.Dot)), {}),
    (bias.L2(), lines(equation(bias.L2)), {}),
    (bias.L1(eps=0.2), equation(bias.L1).split(r",\quad ", 1)[1], {"varepsilon": 0.2}),
    (
        bias.Lp(p=3.0),
        f"u_i{equation(bias.Lp).partition('u_i')[2]}".split("\n")[0] + "\n$r_i = s_i$\n$s_i = |e_i|$",
        {"p": 3},
    ),
    (bias.Huber(delta=0.5), lines(equation(bias.Huber), 0).split(r",\quad ", 1)[1], {"delta": 0.5}),
    (bias.Robust(radius=0.4, eps=0.1), equation(bias.Robust), {"radius": 0.4, "varepsilon": 0.1}),
    (
        bias.KL(temperature=2.0),
        r"$\pi = \mathrm{softmax}(v / \tau)$" + "\n" + lines(equation(bias.KL), 1),
        {"tau": 2.0},
    ),
]


@pytest.mark.spec("VAR-EQUATION-I1")
@pytest.mark.parametrize(("made", "text", "fields"), BIASES, ids=lambda x: getattr(x, "kind", ""))
def test_the_equation_of_a_bias_is_its_gradient(made: Any, text: str, fields: dict[str, float]):
    v = np.array([0.5, 1.0, -0.2, 0.1])
    expected = made.grad(torch.as_tensor(v + ERROR), torch.as_tensor(v)).numpy()
    if "u_i" in text:
        found = np.array([Equations(text, e_i=e, **fields)["u_i"] for e in ERROR])
    else:
        columns = {"hatv": (v + ERROR)[:, None], "v": v[:, None], "e": ERROR[:, None]}
        found = Equations(text, **columns, **fields)["u"][:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


RETENTIONS: list[tuple[Any, tuple[int, ...], dict[str, float]]] = [
    (retention.NoRetention(), (0,), {}),
    (retention.Decay(), (0,), {}),
    (retention.L2(), (0,), {}),
    (retention.L2(decoupled=True), (1,), {}),
    (retention.ElasticNet(threshold=0.2), (0,), {"threshold": 0.2}),
    (retention.Bregman(link="sigmoid"), (0,), {}),
    (retention.KL(scale=2.0), (0,), {"scale": 2.0}),
    (retention.Bounded(low=-1.0), (0,), {"low": -1.0, "high": 1.0}),
    (retention.NormCap(norm=0.5), (0,), {"norm": 0.5}),
]


@pytest.mark.spec("VAR-EQUATION-I1")
@pytest.mark.parametrize(("made", "which", "fields"), RETENTIONS, ids=lambda x: getattr(x, "kind", ""))
def test_the_equation_of_a_retention_is_its_step(made: Any, which: tuple[int, ...], fields: dict[str, float]):
    old, step = RNG.normal(size=(2, 3, 4))
    kept = made.default_retain if made.kind == "l2" else 0.7
    args = (torch.as_tensor(old)[None], torch.as_tensor(step)[None], torch.tensor([kept], dtype=torch.float64))
    carried = made.step(*args)
    expected = made.weights(carried)[0].numpy() if made.dual else carried[0].numpy()
    text = lines(equation(type(made)), *which)
    if made.kind == "norm_cap":
        text = text.replace(r"\mathrm{retention}(M_{t-1}, D_t)", "M_{t-1} + D_t")
    if made.kind == "bregman":
        text = text.replace("link", "sigmoid")
    letters = {"M_before": old, "A_before": old, "D_t": step, "alpha_t": kept, "penalty": 0.01}
    np.testing.assert_allclose(Equations(text, **letters, **fields)["M_t"], expected, rtol=1e-12)


ALGORITHMS: list[tuple[Any, tuple[int, ...], dict[str, float]]] = [
    (algorithm.GD(), (), {}),
    (algorithm.Momentum(), (0,), {}),
    (algorithm.Adaptive(decay=0.8, eps=0.1), (), {"decay": 0.8, "varepsilon": 0.1}),
    (algorithm.DeltaMomentum(erase=0.5), (), {"erase": 0.5}),
]


@pytest.mark.spec("VAR-EQUATION-I1")
@pytest.mark.parametrize(("made", "which", "fields"), ALGORITHMS, ids=lambda x: getattr(x, "kind", ""))
def test_the_equation_of_an_algorithm_is_its_direction(made: Any, which: tuple[int, ...], fields: dict[str, float]):
    grad, slot = RNG.normal(size=(2, 3, 4))
    slots = [slot, slot**2][: len(made.slots)]
    one = torch.ones(1, dtype=torch.float64)
    given = [torch.as_tensor(x)[None] for x in (grad, *slots)]
    expected = made.direction(given[0], 0.3 * one, 0.6 * one, *given[1:])
    text = lines(equation(type(made)), *which)
    letters = {"G_t": grad, "S_before": slot, "E_before": slot**2, "eta_t": 0.3, "mu_t": 0.6, "I": np.eye(4)}
    found = Equations(text, **letters, **fields)
    for name, own in zip(("D_t", "S_t", "E_t"), expected, strict=False):
        np.testing.assert_allclose(found[name], own[0].numpy(), rtol=1e-12)


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


RECURRENCES = (
    "hebbian linear_attention retnet gla mamba2 delta gated_delta kda gated_delta_2 comba efla momentum_delta pgdn "
    "pkda osdn oja mlstm hgrn2 longhorn dgd titans_linear gated_mesa delta_momentum gsa abc raven ttt_linear"
).split()


@pytest.mark.spec("VAR-EQUATION-I1")
@pytest.mark.parametrize("name", RECURRENCES)
def test_the_equation_of_a_rule_is_the_transcription_of_its_paper(name: str):
    config = named_rule(name)
    trial = TRIALS[name](config, 20)
    q, k = (unit(x) if config.key_norm == "l2" else x for x in (trial.inputs.q, trial.inputs.k))
    width, letters = q.shape[1], {"lr": "eta", "retain": "alpha", "retain_value": "alpha", "momentum": "mu"}
    weight = np.zeros(trial.state["weight"].shape)
    before = {"M_before": weight, "S_before": weight, "z_before": np.zeros((width, 1)), "H_before": 0 * np.eye(width)}
    before |= {"K_before": 0 * np.eye(width), "V_before": weight}
    for t in range(20):
        before["M_C"] = before["M_C"] if t % config.chunk else before["M_before"]
        gates = {
            f"{letters.get(gate, gate)}_t": own if np.ndim(own) == 0 else own[t] for gate, own in trial.gates.items()
        }
        gates = {gate: own[:, None] if np.ndim(own) else own for gate, own in gates.items()}
        given = {"q_t": q[t][:, None], "k_t": k[t][:, None], "v_t": trial.inputs.v[t][:, None], "phi": elu, **before}
        given |= {
            "hatq_t": given["q_t"] / (width**0.5 if name == "mlstm" else 1),
            "value_t": 1.0,
            "h": 0,
            "I": np.eye(width),
        }
        given["I"] = np.eye(weight.shape[1])
        given["d"] = 0.0 if name == "mamba2" else float(width)
        if "write_t" in gates:  # whose making is the gating's
            given |= {"bark_t": gates["write_t"] * given["k_t"], "d_t": gates["write_t"], "s_t": gates["write_t"]}
        found = Equations(RULES[name].equation, **given, **gates)
        np.testing.assert_allclose(found["y_t"][:, 0], trial.y[t], rtol=1e-9, atol=1e-12)
        before |= {f"{letter}_before": found[f"{letter}_t"] for letter in "MSzHKV" if f"{letter}_t" in found.rules}
    np.testing.assert_allclose(
        before["V_before" if "readout.keys" in trial.state and name != "gated_mesa" else "M_before"],
        trial.state["weight"],
        rtol=1e-9,
        atol=1e-12,
    )


def test_a_wrong_equation_is_found():
    x = {"M_before": np.eye(2), "D_t": np.ones((2, 2)), "alpha_t": 0.5}
    assert (Equations("$M_t = \\alpha_t M_{t-1} + D_t$", **x)["M_t"] == [[1.5, 1], [1, 1.5]]).all()
    assert (Equations("$M_t = \\alpha_t (M_{t-1} + D_t)$", **x)["M_t"] == [[1, 0.5], [0.5, 1]]).all()
    with pytest.raises(AssertionError, match="nothing is known of X"):
        Equations("$M_t = X$")["M_t"]

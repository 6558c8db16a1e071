"""The general kernel of the compiled engine against the token loop: every part with every other, pair by pair."""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, NonFiniteError, memory_scan
from hecate.bias import Bias, Yaad
from hecate.engine import Engine, Plan, choose, explain
from hecate.errors import ConfigError
from tests.engine.test_properties import in_pieces, whole
from tests.memories import Case, case_of, config_of, weighted

numba = pytest.importorskip("numba")

COMPILED = Engine.registry["compiled"]
CAP = {"kind": "norm_cap", "norm": 0.8}
BIASES: list[Any] = [
    "dot",
    "l2",
    {"kind": "lp", "p": 1.5, "eps": 0.1},
    {"kind": "huber", "delta": 0.7},
    {"kind": "huber", "delta": 0.7, "norm": True},
    {"kind": "l1", "eps": 0.1},
    {"kind": "yaad", "delta": 0.7, "eps": 0.1},
    {"kind": "robust", "radius": 0.3, "eps": 0.1},
    "kl",
    {"kind": "kl", "target": "distribution"},
]
RETENTIONS: list[Any] = [
    "none",
    "decay",
    "l2",
    {"kind": "elastic_net", "threshold": 0.02},
    "kl",
    {"kind": "kl", "signed": True, "scale": 2.0},
    {"kind": "bounded", "low": -1.0, "high": 2.0},
    {"kind": "lq", "q": 4.0, "eps": 1e-2},
    {"kind": "lq", "q": 1.5, "eps": 1e-2},
    {"kind": "bregman", "link": {"kind": "lq", "q": 4.0, "form": "paper", "eps": 1e-2}},
    *[{"kind": "sphere", "slot": slot, "form": form} for slot in ("column", "row") for form in ("tangent", "divide")],
    {**CAP, "retention": "decay"},
    {**CAP, "retention": {"kind": "elastic_net", "threshold": 0.02}},
    {**CAP, "retention": "kl"},
    {**CAP, "retention": {"kind": "sphere", "form": "divide"}},
]
ALGORITHMS: list[Any] = [
    "gd",
    "momentum",
    "delta_momentum",
    {"kind": "delta_momentum", "form": "paper"},
    "rls",
    {"kind": "rls", "ridge": 0.5, "discount": 0.9},
    {"kind": "momentum", "nesterov": True},
    {"kind": "adaptive", "eps": 0.1},
    {"kind": "ftrl", "l1": 0.02},
]
FACTORS: dict[str, list[Any]] = {
    "bias": BIASES,
    "retention": RETENTIONS,
    "algorithm": ALGORITHMS,
    "structure": ["matrix", "slots", "vector"],
    "decay_order": ["with_step", "before_gradient"],
    "read": ["after", "before"],
    "gates": [(), ("channels",), ("erase", "write"), ("retain_value",), ("erase", "write", "retain_value", "channels")],
    "masks": [False, True],
    "d": [3, 8, 17],
}


def config_from(row: dict[str, Any]) -> MemoryConfig | None:
    """The configuration of a row of factors, None where it is impossible or has no kernel."""
    fields = {name: row[name] for name in row if name not in ("gates", "masks", "d")}
    try:
        config = config_of(**fields, key_norm="l2")
    except ConfigError:
        return None
    gates = row["gates"]
    if COMPILED.refuses(config) is not None:
        return None
    decays, linear = config.retention.uses_retain, config.structure.linear
    if ("channels" in gates and not (decays and linear)) or ("retain_value" in gates and not decays):
        return None
    if gates and config.structure.diagonal and "retain_value" in gates:
        return None
    asks = not ("erase" in gates and (config.bias.kind == "dot" or not linear))
    takes = not ("erase" in gates and not config.algorithm.takes_any_gradient())
    return config if asks and takes and not ("retain_value" in gates and not linear) else None


def case_from(row: dict[str, Any], config: MemoryConfig, length: int = 37, ends: float = 0.1) -> Case:
    """Random inputs of a row; ends: the share of gates that are exactly 0 or 1."""
    d = row["d"]
    width = d if config.structure.diagonal else 3
    case = case_of(
        config, d=d, width=width, length=length, masks=row["masks"], channels="channels" in row["gates"], ends=ends
    )
    generator = torch.Generator().manual_seed(3)

    def gate(last: int) -> Tensor:
        return 0.5 + 0.5 * torch.rand(*case.k.shape[:3], last, generator=generator)

    more = {name: gate(d) for name in ("erase", "write") if name in row["gates"]}
    if "retain_value" in row["gates"]:
        more["retain_value"] = gate(width)
    return case._replace(gates=case.gates._replace(**more))


def covering(factors: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values occurs for which a possible row is found."""
    draw, rows, seen = random.Random(seed), [], set()
    for one, other in combinations(factors, 2):
        for i, j in product(range(len(factors[one])), range(len(factors[other]))):
            for _ in range(80):
                if ((one, i), (other, j)) in seen:
                    break
                picked = {name: draw.randrange(len(values)) for name, values in factors.items()} | {one: i, other: j}
                row = {name: factors[name][index] for name, index in picked.items()}
                if config_from(row) is not None:
                    seen |= set(combinations(picked.items(), 2))
                    rows.append(row)
    return rows


def check(row: dict[str, Any], pieces: tuple[int, ...] = (), **options: Any) -> None:
    config = config_from(row)
    assert config is not None, "the row has no kernel"
    case = case_from(row, config, **options)
    expected = whole(case, engine="sequential")
    # Where a memory runs away, so does rounding.
    if all(float(item.detach().abs().max()) < 1e4 for item in (expected.y, *expected.grads)):
        whole(case, engine="compiled").equals(expected, 1e-9)
        if pieces:
            whole(case, engine="compiled", autodiff="tape").equals(expected, 1e-9)
            in_pieces(case, [*pieces], engine="compiled").equals(expected, 1e-9)


BASE = {"structure": "matrix", "decay_order": "with_step", "read": "after", "gates": (), "masks": True, "d": 5}
FEW = [
    {"bias": "l2", "retention": "decay", "algorithm": "delta_momentum"},
    {"bias": "huber", "retention": {"kind": "sphere"}, "algorithm": "gd", "structure": "slots", "masks": False},
    {"bias": "l2", "retention": {**CAP, "retention": "sphere"}, "algorithm": "momentum", "structure": "slots"},
    {"bias": "l2", "retention": "none", "algorithm": {"kind": "rls", "ridge": 0.5, "discount": 0.9}},
    {"bias": BIASES[3], "retention": "kl", "algorithm": "gd", "read": "before"},
    {"bias": "l2", "retention": {**CAP, "retention": "kl"}, "algorithm": "gd", "decay_order": "before_gradient"},
    {"bias": BIASES[2], "retention": "kl", "algorithm": "momentum", "gates": ("channels",), "d": 17},
    {"bias": "l2", "retention": RETENTIONS[6], "algorithm": "momentum", "decay_order": "before_gradient"},
    {"bias": "l2", "retention": RETENTIONS[6], "algorithm": "gd", "structure": "vector", "d": 3},
    {"bias": BIASES[6], "retention": RETENTIONS[3], "algorithm": "gd", "decay_order": "before_gradient"},
    {"bias": "l2", "retention": {**CAP, "retention": RETENTIONS[3]}, "algorithm": "delta_momentum", "read": "before"},
    {"bias": "l2", "retention": "decay", "algorithm": "gd", "gates": FACTORS["gates"][4]},
    {"bias": "dot", "retention": "decay", "algorithm": "momentum", "gates": ("retain_value",)},
    {"bias": "l2", "retention": "l2", "algorithm": "gd", "gates": ("erase", "write"), "decay_order": "before_gradient"},
]


@pytest.mark.spec("ENG-NUM-D8", "ENG-NUM-I1", "ENG-SCAN-I1")
@pytest.mark.parametrize("row", FEW, ids=lambda row: "-".join(map(str, row.values())))
def test_a_few_against_the_token_loop(row):
    """State is handed on between calls, and kept between segments, of which there are two."""
    check({**BASE, **row}, pieces=(1, 20, 20))


@pytest.mark.slow
@pytest.mark.spec("ENG-NUM-D8", "ENG-NUM-I1")
def test_every_pair_against_the_token_loop():
    rows = covering(FACTORS)
    met = {(str(row["bias"]), str(row["retention"])) for row in rows}
    assert met == {(str(a), str(b)) for a, b in product(BIASES, RETENTIONS)}
    failed = []
    for row in rows:
        # A gate of exactly 1 may leave a memory on the ball that bounds it, where the derivative jumps.
        bounded = "norm_cap" in str(row["retention"]) or "sphere" in str(row["retention"])
        try:
            check(row, ends=0.0 if bounded else 0.1)
        except NonFiniteError:
            pass
        except AssertionError as error:
            failed.append(f"{row}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.spec("ENG-NUM-V2")
def test_second_derivatives():
    config = config_of(retention="decay", algorithm="delta_momentum")
    case = case_of(config, batch=1, heads=1, length=2, d=2, width=2)
    case = case._replace(gates=case.gates._replace(retain_value=torch.full((1, 2, 1, 2), 0.9))).fresh()

    def scan(*leaves: Tensor) -> Tensor:
        return weighted(*case.with_leaves(list(leaves)).scan(engine="compiled"))

    assert torch.autograd.gradcheck(scan, case.leaves)
    assert torch.autograd.gradgradcheck(scan, case.leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.spec("ENG-NUM-I2", "ENG-NUM-D8")
@pytest.mark.parametrize("row", FEW, ids=lambda row: "-".join(map(str, row.values())))
def test_single_precision(row):
    """Against the token loop in float64, the error may be four times the token loop's own."""
    row = {**BASE, **row}
    config = config_from(row)
    double = case_from(row, config)
    single = double._replace(config=MemoryConfig(**{**config.model_dump(), "state_dtype": "float32"}))
    single = single.with_leaves([leaf.float() for leaf in double.leaves])
    true, ours, theirs = (
        whole(own, engine=engine)
        for own, engine in ((double, "sequential"), (single, "compiled"), (single, "sequential"))
    )
    pairs = zip([ours.y, *ours.grads], [theirs.y, *theirs.grads], [true.y, *true.grads], strict=True)
    size = max(float(grad.norm()) for grad in true.grads)
    for got, loop, expected in pairs:
        assert got.dtype == loop.dtype == torch.float32
        error, own = (float((item.detach().double() - expected.detach()).norm()) for item in (got, loop))
        assert error <= 4 * own + 37 * torch.finfo(torch.float32).eps * min(size, float(expected.detach().norm()) + 1)


@pytest.mark.spec("ENG-NUM-I2", "ENG-NUM-D8")
@pytest.mark.parametrize("width", [1, 3, 4])
def test_values_narrower_than_a_vector_under_momentum_in_single_precision(width):
    config, draw = MemoryConfig(bias="huber", algorithm="momentum", retention="decay"), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 30, 2, size, generator=draw, dtype=torch.float32) / 3 for size in (8, 8, width))
    leaves, gates = [item.requires_grad_() for item in (q, k, v)], Gates(lr=0.3, retain=0.9, momentum=0.5)
    ours, theirs = (
        torch.autograd.grad(memory_scan(config, *leaves, gates, engine=engine)[0].square().sum(), leaves)
        for engine in ("compiled", "sequential")
    )
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


# What has no form.


class Softest(Yaad):
    """softest: a derivative that cannot be printed."""

    kind: Literal["family_test_softest"] = "family_test_softest"

    def psi(self, error):
        return error.sort(-1).values


del Bias._registry["family_test_softest"]  # passed as a value: tests of all known kinds need not know it


@pytest.mark.spec("ENG-NUM-D8", "ENG-NUM-D3")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"bias": Softest()}, "bias 'family_test_softest' as configured has no kernel: aten.sort has no kernel form"),
        ({"algorithm": "newton_schulz"}, "algorithm 'newton_schulz' as configured has no kernel: aten.transpose"),
        ({"structure": "slots", "algorithm": "delta_momentum"}, "'delta_momentum' has a kernel for gradients of rank"),
        ({"structure": "vector", "retention": "kl"}, "retention 'kl' as configured is not known to treat them apart"),
        ({"structure": "vector", "bias": "yaad"}, "bias 'yaad' as configured is not known to treat them apart"),
        ({"structure": "mlp", "retention": "kl"}, "structure 'mlp' has no kernel"),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_refused_in_a_sentence(fields, reason):
    config = config_of(**fields)
    with pytest.raises(ConfigError, match=f"engine='compiled'.*{reason}"):
        choose(Plan.sketch(config), "compiled")
    assert explain(Plan.sketch(config, length=100))[0] != "compiled"


@pytest.mark.spec("ENG-NUM-D9")
def test_a_kernel_that_is_compiled_says_so_once(caplog, monkeypatch, tmp_path):
    module = pytest.importorskip("hecate.engine.cpu.family")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    engine = pytest.importorskip("hecate.engine.cpu.engine")
    numba.core.event.unregister("numba:compile", engine._tell())
    engine._tell.cache_clear()
    engine._tell()
    module._built.cache_clear()
    wanted = tuple(("no_gain", (), "gain", back) for back in (False, True))
    with caplog.at_level(logging.INFO, logger="hecate.engine"):
        for _ in range(2):
            module.ready(wanted, torch.zeros(0).numpy().dtype.type)
            module.ready.cache_clear()
    module._built.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    line, first, second = caplog.messages
    assert "compiling kernels" in line and "kept on disk" in line and "hecate doctor --warm" in line
    assert first.startswith("compiling no_gain_float") and second.startswith("compiling no_gain_back_float")
    assert list(tmp_path.rglob("*.nbi"))


@pytest.mark.spec("ENG-NUM-D9")
def test_threads_load_and_compile_one_at_a_time(monkeypatch, tmp_path):
    """Two that imported numba together waited for each other for ever, and two kernels of one name were compiled."""
    module = pytest.importorskip("hecate.engine.cpu.family")
    engine = pytest.importorskip("hecate.engine.cpu.engine")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    module._built.cache_clear()
    wanted, within, most = (("no_gain", (), "gain", False),), [], []

    def slow(name: str) -> str:
        within.append(name)
        time.sleep(0.05)
        most.append(len(within))
        within.pop()
        return name

    with ThreadPoolExecutor(4) as threads, monkeypatch.context() as patch:
        patch.setattr(engine.importlib, "import_module", slow)
        list(threads.map(engine.load_kernels.__wrapped__, "abcd"))
        patch.undo()
        kernels = [*threads.map(module.ready.__wrapped__, [wanted] * 4, [torch.zeros(0).numpy().dtype.type] * 4)]
    module._built.cache_clear()
    assert most == [1, 1, 1, 1] and all(kernel.signatures for (kernel,) in kernels)

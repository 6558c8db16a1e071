"""The compiled engine against the token loop, and where it must leave the work to torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hecate import Gates, MemoryConfig, NonFiniteError, memory_scan
from hecate.engine import Engine, Plan, explain
from hecate.engine.cpu import engine as module
from hecate.errors import ConfigError, install_line
from hecate.nn import Memory
from hecate.tape import Tape
from tests.engine.test_properties import LINEAR, Result, cases, in_pieces, whole
from tests.memories import BIASES, Case, case_of, close, config_of, weighted

numba = pytest.importorskip("numba")

FORMS = BIASES[:5]  # all but the norm of huber
SHRUNK = {"kind": "elastic_net", "threshold": 0.05}
KEPT = [
    "none",
    "decay",
    SHRUNK,
    {"kind": "elastic_net", "threshold": 0.0},
    {"kind": "l2", "decoupled": True},
    "bregman",
]
ERRORS = [
    *FORMS,
    {"kind": "lp", "p": 2.0},
    {"kind": "lp", "p": 1.2, "eps": 0.1},
    {"kind": "lp", "p": 2.5},
    {"kind": "l1", "eps": 0.1},
]


def fields_of(bias: str | dict) -> st.SearchStrategy[dict]:
    """Configurations with a bias."""
    return st.builds(
        lambda fields, retention: {
            **fields,
            "retention": retention,
            "bias": bias,
            **({"decay_order": "with_step"} if "threshold" in retention else {}),
        },
        LINEAR,
        st.sampled_from(KEPT),
    )


COMPILED = Engine.registry["compiled"]
TITANS = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 7, 31, 32, 33, 61])


def shrunk(case: Case) -> Case:
    """Smaller keys, so that long sequences stay tame under every bias."""
    return case._replace(k=0.4 * case.k)


@pytest.mark.spec("ENG-NUM-I1", "ENG-NUM-V1", "ENG-SCAN-I1")
@pytest.mark.parametrize("bias", ERRORS, ids=str)  # one by one: each compiles kernels of its own
@settings(max_examples=5)
@given(data=st.data())
def test_whole_and_pieces_against_sequential(bias, data):
    """Outputs, final state and the gradients of all inputs, whatever the configuration."""
    case = shrunk(data.draw(cases(fields_of(bias), length=data.draw(LENGTHS))))
    assert COMPILED.refuses(case.config) is None
    try:
        expected = whole(case, engine="sequential")
    except NonFiniteError:
        assume(False)
    # Steps of lp are unbounded: where the memory runs away, so does rounding.
    assume(all(float(item.detach().abs().max()) < 1e3 for item in (expected.y, *expected.grads) if item.numel()))
    whole(case, engine="compiled", autodiff="torch").equals(expected)
    whole(case, engine="compiled", autodiff="tape").equals(expected)
    cuts = data.draw(st.lists(st.integers(0, case.k.shape[1]), max_size=3))
    in_pieces(case, cuts, engine="compiled").equals(expected)


@pytest.mark.spec("ENG-NUM-I1")
@pytest.mark.parametrize(
    ("d", "width", "names"),
    [(1, 1, "huber"), (7, 5, "dot"), (8, 4, "l2"), (9, 9, "huber"), (16, 8, "dot"), (33, 17, "l2"),
     (64, 3, "huber l2 dot"), (75, 29, "huber l2 dot"), (64, 65, "lp")],
)  # fmt: skip
def test_widths_around_whole_vectors(d, width, names):
    """Rows of up to 32 numbers stay in registers; beyond, in tiles for dot alone, and others go in blocks of 16 KiB,
    the last of which may have rows that are padding."""
    more = {"huber": {"read": "before"}, "l2": {"decay_order": "before_gradient"}, "dot": {"read": "before"}}
    for bias in names.split():
        config = config_of(**TITANS | {"bias": bias} | more.get(bias, {"algorithm": "gd"}))
        case = case_of(config, d=d, width=width, length=19, masks=True, ends=0.2)
        whole(case, engine="compiled").equals(whole(case, engine="sequential"))


@pytest.mark.spec("ENG-NUM-D6", "ENG-NUM-I1")
@pytest.mark.parametrize(
    ("d", "width", "bias", "algorithm", "read", "channels"),
    [
        (7, 5, "huber", "gd", "after", False),
        (64, 3, "l2", "momentum", "before", True),
        (64, 3, "dot", "gd", "before", False),
        (75, 5, "l2", "momentum", "after", False),
        (75, 5, "huber", "gd", "before", True),
    ],
)
def test_cells_at_zero(d, width, bias, algorithm, read, channels):
    """Soft thresholds over several segments, in registers and beyond: many cells are exactly 0."""
    config = config_of(bias=bias, retention=SHRUNK, algorithm=algorithm, key_norm="l2", read=read)
    case = case_of(config, d=d, width=width, length=133, masks=True, ends=0.2, channels=channels)
    expected = whole(case, engine="sequential")
    share = float((expected.state.memory["weight"] == 0).double().mean())
    assert 0.05 < share < 0.95
    whole(case, engine="compiled").equals(expected)
    in_pieces(case, [1, 70], engine="compiled", autodiff="tape").equals(expected)


@pytest.mark.spec("ENG-NUM-D6")
def test_what_is_zero_already_gets_no_gradient():
    """Threshold 0 is decay, but for cells that are 0: nothing passes through them, either way."""
    ours, theirs = (
        case_of(config_of(retention=retention), length=40, batch=1)
        for retention in ({"kind": "elastic_net", "threshold": 0.0}, "decay")
    )
    v = torch.zeros_like(ours.v)  # with initial weights of 0, every cell stays there
    cases = [
        case._replace(v=v, initial={"weight": torch.zeros_like(case.initial["weight"])}) for case in (ours, theirs)
    ]
    results = [whole(case, engine="compiled") for case in cases]
    assert max(float(grad.abs().max()) for grad in results[0].grads) == 0
    assert max(float(grad.abs().max()) for grad in results[1].grads) > 0.1
    results[0].equals(whole(cases[0], engine="sequential"))


@pytest.mark.spec("ENG-NUM-D7")
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_are_read_where_they_lie(heads):
    """No block folds them into the batch; tensors that lie otherwise give the same."""
    case = case_of(config_of(**TITANS), heads=heads, length=70, d=5, width=5, masks=True)
    tape = Tape()
    y, _ = case.scan(engine="compiled", tape=tape)
    assert "heads" not in str(tape)
    turned = [case.q, case.k, case.v]
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in turned)
    assert q.is_contiguous() == (heads == 1)
    other = case._replace(q=q, k=k, v=v)
    assert torch.equal(other.scan(engine="compiled")[0], y)
    whole(other, engine="compiled").equals(whole(case, engine="sequential"))


@pytest.mark.spec("ENG-NUM-D5")
@pytest.mark.parametrize("engine", ["compiled", "parallel"])
@pytest.mark.parametrize("bias", ["dot", "l2"])
def test_one_scan_for_memory_and_normaliser(engine, bias, monkeypatch):
    """With dot the normaliser is one more row of the memory; its state stays its own."""
    calls = []
    own = type(Engine.registry[engine])
    kernel = own.scan

    def counted(self, call, tokens, *rest, **options):
        calls.append(tokens.v.shape[-1])
        return kernel(self, call, tokens, *rest, **options)

    monkeypatch.setattr(own, "scan", counted)
    config = config_of(**TITANS, bias=bias, normalizer="sum", feature_map="elu")
    case = case_of(config, length=37, masks=True, ends=0.2)
    ours, expected = (whole(case, engine=name) for name in (engine, "sequential"))
    ours.equals(expected)
    width = case.v.shape[-1]
    assert calls[:2] == ([width + 1] if bias == "dot" else [width, 1])


@pytest.mark.spec("ENG-NUM-I2")
@pytest.mark.parametrize(("bias", "algorithm"), [*zip(FORMS[:4], ["gd", "momentum"] * 2, strict=True)], ids=str)
def test_single_precision(bias, algorithm):
    """Against the token loop in float64, the error may be twice the token loop's own."""
    config = MemoryConfig(bias=bias, retention="decay", algorithm=algorithm, key_norm="l2")
    case = case_of(config, d=16, width=8, length=67, masks=True, dtype=torch.float32)
    exact = case_of(
        MemoryConfig(**{**config.model_dump(), "state_dtype": "float64"}),
        d=16, width=8, length=67, masks=True,
    )  # fmt: skip
    exact = exact.with_leaves([leaf.double() for leaf in case.leaves])
    true, ours, theirs = (
        whole(own, engine=engine) for own, engine in ((exact, "sequential"), (case, "compiled"), (case, "sequential"))
    )
    pairs = zip([ours.y, *ours.grads], [theirs.y, *theirs.grads], [true.y, *true.grads], strict=True)
    size = max(float(grad.norm()) for grad in true.grads)
    for got, loop, expected in pairs:
        assert got.dtype == loop.dtype == torch.float32
        error, own = (float((item.detach().double() - expected.detach()).norm()) for item in (got, loop))
        # Sums go in another order, so rounding of 67 steps may fall out differently.
        assert error <= 2 * own + 67 * torch.finfo(torch.float32).eps * min(size, float(expected.detach().norm()) + 1)


@pytest.mark.spec("ENG-NUM-V2")
@pytest.mark.parametrize(("bias", "retention"), [("l2", "decay"), (BIASES[2], "decay"), ("l2", SHRUNK)], ids=str)
@pytest.mark.parametrize("autodiff", ["torch", "tape"])
def test_second_derivatives(bias, retention, autodiff):
    config = config_of(bias=bias, retention=retention, algorithm="momentum")
    case = case_of(config, batch=1, heads=1, length=4, d=2, width=2).fresh()

    def scan(*leaves: Tensor) -> Tensor:
        return weighted(*case.with_leaves(list(leaves)).scan(engine="compiled", autodiff=autodiff))

    assert torch.autograd.gradcheck(scan, case.leaves)
    assert torch.autograd.gradgradcheck(scan, case.leaves, fast_mode=True)


@pytest.mark.spec("ENG-NUM-V2")
def test_batched_cotangents_and_forward_mode():
    case = case_of(config_of(**TITANS), length=5, batch=1).fresh()
    y, _ = case.scan(engine="compiled")
    g = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(1))
    batched = torch.autograd.grad(y, case.leaves, g, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad(y, case.leaves, g[index], retain_graph=True)
        for mine, true in zip(batched, one, strict=True):
            close(mine[index], true, 1e-12)
    long = case_of(config_of(**TITANS), length=40, batch=1)
    with torch.autograd.forward_ad.dual_level():
        k = torch.autograd.forward_ad.make_dual(long.k, torch.ones_like(long.k))
        y, _ = long._replace(k=k).scan(autodiff="torch")
        assert float(torch.autograd.forward_ad.unpack_dual(y).tangent.norm()) > 1e-3


# Where it does not apply.


def scan(config: MemoryConfig, length: int = 40, **options: object) -> Tensor:
    case = case_of(config, batch=1, heads=1, length=length)
    return case.scan(**options)[0]


@pytest.mark.spec("ENG-NUM-D3")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chunk": 2}, "chunk=2"),
        ({"commit": "chunk"}, "commit='chunk'"),
        ({"structure": "mlp"}, "structure 'mlp'"),
        ({"algorithm": "deep_momentum"}, "algorithm 'deep_momentum' as configured has no kernel: its slots are no"),
    ],
    ids=str,
)
def test_rules_without_a_kernel_are_refused_by_name_and_left_by_auto(fields, reason):
    config = config_of(**fields)
    with pytest.raises(ConfigError, match=f"engine='compiled'.*{reason}"):
        scan(config, engine="compiled")
    assert explain(Plan.sketch(config, length=100))[0] != "compiled"
    with pytest.raises(ConfigError, match=reason):
        Memory(8, heads=2, config=config, engine="compiled")


@pytest.mark.spec("ENG-NUM-D3")
def test_tensors_that_kernels_cannot_read():
    config = config_of()
    for options, word in (
        ({"device": "cuda"}, "cuda"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"traced": True}, "torch.compile"),
    ):
        assert word in str(COMPILED.unable(Plan.sketch(config, **options)))
        assert explain(Plan.sketch(config, length=100, **options))[0] == "parallel"
    config = config_of(on_nonfinite="propagate")
    case = case_of(config, length=40)
    meta = [item.to("meta") for item in (case.q, case.k, case.v)]
    y, _ = memory_scan(config, *meta, Gates(0.5))
    assert y.device.type == "meta" and y.shape == case.v.shape
    with pytest.raises(ConfigError, match="tensors are on meta"):
        memory_scan(config, *meta, Gates(0.5), engine="compiled")


@pytest.mark.spec("ENG-NUM-D3")
def test_transforms_take_another_engine():
    case = case_of(config_of(), batch=2, length=40)
    one = case_of(config_of(), batch=1, length=40)

    def loss(q: Tensor, engine: str = "auto") -> Tensor:
        return one._replace(q=q[None], k=one.k, v=one.v).scan(engine=engine)[0].square().sum()

    grads = torch.func.vmap(torch.func.grad(loss))(case.q)
    for row in range(2):
        q = case.q[row].clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(q, "sequential"), q)
        close(grads[row], expected, 1e-11)
    with pytest.raises(ConfigError, match=r"torch\.func"):
        torch.func.grad(lambda q: loss(q, "compiled"))(case.q[0])
    with FlopCounterMode(display=False) as flops:
        case.scan()
    assert flops.get_total_flops() > 0


@pytest.mark.spec("ENG-NUM-D3")
def test_without_numba(monkeypatch):
    monkeypatch.setattr(module, "load_kernels", lambda *_: None)
    config = config_of()
    assert explain(Plan.sketch(config, length=100))[0] == "parallel"
    assert torch.isfinite(scan(config)).all()
    with pytest.raises(ConfigError, match=re.escape(install_line("cpu"))):
        scan(config, engine="compiled")


@pytest.mark.spec("ENG-NUM-D3")
def test_compilers_are_loaded_only_when_they_are_needed():
    code = (
        "import sys, torch; from hecate.bias import Huber; from hecate.formula import bias_formula\n"
        "bias_formula(Huber()); assert 'torch._dynamo' not in sys.modules\n"
        "import hecate.engine, hecate.nn, hecate.models\n"
        "config, x = hecate.MemoryConfig(key_norm='l2'), torch.randn(1, 64, 1, 2)\n"
        "hecate.memory_scan(config, *[x[:, :4]] * 3)\n"
        "assert not {'numba', 'hecate.engine.triton.launch'} & {*sys.modules}\n"
        "sys.modules['numba'] = None\n"  # as if it were not installed
        "hecate.memory_scan(config, x, x, x)\n"
        "try: hecate.memory_scan(config, x, x, x, engine='compiled')\n"
        "except hecate.ConfigError as error: assert '.[cpu]' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fault_is_seen():
    """The comparison itself: another rule is told apart."""
    case = case_of(config_of(**TITANS), length=35)
    other = case._replace(config=config_of(**{**TITANS, "bias": "huber"}))
    with pytest.raises(AssertionError):
        whole(other, engine="compiled").equals(whole(case, engine="sequential"))
    assert isinstance(whole(case, engine="compiled"), Result)

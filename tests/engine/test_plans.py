"""Plans: what calls that look alike have in common, found once; and what is left for each of them in Python."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import re
import sys
import weakref
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hecate
from hecate import ConfigError, Gates, MemoryConfig, NonFiniteError, memory_scan
from hecate.engine import Call, Engine, Plan, TokenEngine, choose
from hecate.engine.call import MOST
from hecate.nn import Memory
from tests.launches import as_on_a_device
from tests.memories import case_of, config_of

# Of forward and backward of `Memory(256, heads=4, config=rule)`: functions of the package that are called, files that
# they lie in, and changes of file from one to the next, as measured.
FRAMES = {
    ("gated_delta", 1): (977, 31, 374),
    ("gated_delta", 16): (131, 21, 79),
    ("gated_delta", 64): (149, 22, 89),
    ("delta", 1): (907, 30, 333),
    ("delta", 16): (129, 21, 78),
    ("delta", 64): (147, 22, 88),
    ("titans", 1): (1370, 34, 488),
    ("titans", 64): (453, 28, 204),
    ("linear_attention", 1): (1647, 32, 596),
    ("linear_attention", 16): (224, 25, 133),
    ("linear_attention", 64): (242, 26, 142),
}


def frames_of(rule: str, length: int) -> list[tuple[str, str]]:
    """File and name of each function of the package that a call of a layer calls, forward and backward."""
    source = torch.Generator().manual_seed(0)
    layer = Memory(256, heads=4, config=rule, dtype=torch.float32, generator=source)  # rows of 64 fit into registers
    x = torch.randn(2, length, 256, dtype=torch.float32, generator=source)
    root, frames = str(Path(hecate.__file__).parent), []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            frames.append((frame.f_code.co_filename[len(root) + 1 :], frame.f_code.co_name))

    for again in (True, True, False):  # what is made once per config, width or looks is made by then
        sys.setprofile(None if again else count)
        try:
            layer(x)[0].sum().backward()
        finally:
            sys.setprofile(None)
    return frames


@pytest.mark.spec("ENG-CALL-I7")
@pytest.mark.parametrize(("rule", "length"), FRAMES)
def test_the_python_of_a_layer_call(rule, length):
    if length > 16:
        pytest.importorskip("numba")
    files = [file for file, _ in frames_of(rule, length)]
    found = len(files), len(set(files)), sum(a != b for a, b in pairwise(files))
    assert all(own <= most for own, most in zip(found, FRAMES[rule, length], strict=True)), found


# The same of a call of engine triton on a card, without its kernels, forward and with its backward pass.
ON_A_CARD = {"gated_delta": (106, 158), "titans_linear": (112, 170)}


@pytest.fixture
def launches(monkeypatch):
    """Kernels that Triton is asked for, and those launched as they were found, each with its arguments; none runs."""
    launch = pytest.importorskip("hecate.engine.triton.launch")
    asked, found = [], []

    class Found:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *given, **where: found.append((self.name, len(given)))

    class Kernel:
        def __init__(self, kernel):
            self.__name__, self.arg_names = kernel.__name__, kernel.arg_names

        def __getitem__(self, grid):
            def run(*given, **told):
                asked.append((self.__name__, len(given) + len(told.keys() & set(self.arg_names))))
                return Found(self.__name__)

            return run

    for name in ("factors", "scan", "pull", "tokens", "gates"):
        monkeypatch.setattr(launch, name, Kernel(getattr(launch, name)))
    monkeypatch.setattr(launch, "CompiledKernel", Found)
    monkeypatch.setattr(importlib.import_module("hecate.engine.triton.engine"), "interpreting", lambda: True)
    with as_on_a_device():
        yield asked, found


def on_a_card(rule, dtype=torch.bfloat16):
    """A call of engine triton, and its leaves."""
    config = hecate.named_rule(rule, on_nonfinite="propagate")
    q, k, v = torch.ones(3, 1, 70, 2, 16, dtype=dtype).unbind(0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = torch.ones(3, 1, 70, 2).unbind(0)
    gates = Gates(*(row if taken else None for row, taken in zip(rows, config.forms.gates, strict=True)))
    return lambda *given: memory_scan(config, *(given or leaves), gates, engine="triton", name="m")[0], leaves


@pytest.mark.spec("ENG-TRITON-D12")
@pytest.mark.parametrize("rule", ON_A_CARD)
def test_the_python_of_a_call_on_a_card(rule, launches):
    call, leaves = on_a_card(rule)
    root, frames = str(Path(hecate.__file__).parent), []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            frames.append(frame.f_code.co_name)

    for again in (True, True, False):
        sys.setprofile(None if again else count)
        try:
            y = call()
            ahead = len(frames)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        finally:
            sys.setprofile(None)
    found = ahead, len(frames)
    assert all(own <= most for own, most in zip(found, ON_A_CARD[rule], strict=True)), found


@pytest.mark.spec("ENG-TRITON-D12")
def test_kernels_are_launched_as_they_were_found(launches):
    asked, found = launches
    call, leaves = on_a_card("gated_delta")

    def both(*given):
        asked.clear(), found.clear()
        y = call(*given)
        torch.autograd.grad(y, given or leaves, torch.ones_like(y))
        return list(asked), list(found)

    first, same = both()
    assert {name for name, _ in first} == {"factors", "scan", "pull", "tokens", "gates"}
    assert same == first[:1]  # which backward asks for once more
    none, again = both()
    assert none == [] and sorted(again) == sorted(first + same)  # with all that they take
    wide = torch.ones(1, 70 * 2 * 16 + 1, dtype=torch.bfloat16)
    apart = [wide[:, 1:].view(1, 70, 2, 16).requires_grad_(), *leaves[1:]]  # at an address that Triton tells apart
    assert sorted(both(*apart)[0]) == sorted(first + same)


def test_the_page_on_the_way_of_a_call_says_what_runs():
    """Every name in it is one of the package; the first of each step run, in the order of the steps."""
    pytest.importorskip("numba")
    page = (Path(hecate.__file__).parents[1] / "CONTRIBUTING.md").read_text()
    section = page.split("## The way of one call")[1].split("\n## ")[0]
    found = re.findall(r"`([\w/]+)\.py(?:: ([\w.]+))?`", section)
    for file, name in found:
        if not file.startswith("tests/"):
            item = importlib.import_module(f"hecate.{file.replace('/', '.')}")
            attrgetter(name or "__file__")(item)
    steps = re.findall(r"^\d+\. `([\w/]+\.py): [\w.]*?(\w+)`", section, re.MULTILINE)
    assert len(steps) == 12
    ran = iter(frames_of("gated_delta", 64))
    assert [step for step in steps if step not in ran] == []  # `in` goes on from where the last was found
    numbers = tuple(map(int, re.search(r"is (\d+) Python frames in (\d+)\s+files", section).groups()))
    assert numbers == FRAMES["gated_delta", 64][:2]


CONFIGS = {
    "delta": {},
    "titans": {"retention": "decay", "algorithm": "momentum"},
    "heads": {"retention": {"kind": "decay", "retain": "retnet"}},
    "mlp": {"structure": "mlp"},
    "kl": {"retention": "kl"},
    "towards": {"retention": {"kind": "decay", "towards": "start"}, "chunk": 4},
    "sum": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "max": {"bias": "dot", "normalizer": "max"},
    "chunk": {"chunk": 3, "retention": "decay", "decay_order": "before_gradient"},
    "commit": {"chunk": 3, "commit": "chunk", "retention": "decay", "algorithm": "momentum"},
    "bounded": {"structure": "mlp", "chunk": 3, "step": "normalized"},
    "chunked sum": {"bias": "dot", "feature_map": "elu", "normalizer": "sum", "chunk": 3},
    "omega": {"algorithm": "omega"},
    "positions": {"feature_map": {"kind": "cosformer", "max_length": 40}, "bias": "dot"},
}


def found_of(case, state=None, **options):
    """Outputs, state and gradients of a scan."""
    case = case.fresh()
    y, new = case.scan(state, **options)
    ends = [item for item in tree_leaves(new) if isinstance(item, Tensor)]
    total = y.square().sum() + sum(item.square().sum() for item in ends if item.requires_grad)
    grads = torch.autograd.grad(total, case.leaves, allow_unused=True)
    return new, [y, *ends, *[grad for grad in grads if grad is not None]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.spec("ENG-CALL-D2")
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_of_known_looks_has_the_bits_of_one_that_is_checked(name, masks):
    case = case_of(config_of(**CONFIGS[name]), masks=masks, d=4)
    state, first = found_of(case)
    assert len(case.config.plans) == 1
    assert same(first, found_of(case)[1]) and len(case.config.plans) == 1
    state = torch.utils._pytree.tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, state)
    for length in (5, 1):
        part = case.part(0, length)
        fresh = part._replace(config=case.config.model_copy())
        assert same(found_of(part, state)[1], found_of(fresh, state)[1])
        assert same(found_of(part, state)[1], found_of(fresh, state)[1])


@pytest.mark.spec("ENG-CALL-D2")
def test_a_plan_excuses_nothing():
    config, x = MemoryConfig(retention="decay"), torch.ones(1, 4, 2, 3)
    good = torch.full((1, 4, 2), 0.5)
    weight = torch.ones(2, 3, 3)
    memory_scan(config, x, x, x, Gates(good, good), initial={"weight": weight})
    memory_scan(config, x, x, x, Gates(good, 0.5))
    for changes, said in (
        ({"gates": Gates(good, good + torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None])}, "token 2, head 0"),
        ({"gates": Gates(good, 1.5)}, r"gates.retain must be in \[0, 1\], got 1.5"),
        ({"gates": Gates(-good, good)}, "gates.lr must be a finite number >= 0, got -0.5 at batch row 0, token 0"),
        ({"gates": Gates(good, good, good)}, "takes no momentum gate"),
        ({"gates": {"lr": good, "retain": good}}, r"write Gates\(\*\*gates\)"),
        ({"initial": {"w": weight}}, r"initial must hold \['weight'\], got \['w'\]"),
        ({"initial": {"weight": weight[:1]}}, r"initial\['weight'\] must be"),
        ({"k": x[:, :3]}, "equal B, T, H"),
        ({"v": x.long()}, "v must be floating point"),
        ({"write_mask": good[..., 0]}, "write_mask must be bool"),
    ):
        with pytest.raises(hecate.HecateError, match=said):
            memory_scan(config, **{"q": x, "k": x, "v": x, "gates": Gates(good, good), **changes})
    broken = x.clone()
    broken[0, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="token 2"):
        memory_scan(config, x, broken, x, Gates(good, good))
    masked = torch.tensor([[True, True, False, True]])
    out = Gates(good, good + torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None])
    for _ in range(2):  # what is not written may hold anything
        memory_scan(config, x, x, x, out, write_mask=masked)


@pytest.mark.spec("ENG-CALL-D2", "ENG-CHAN-I1")
def test_a_plan_goes_on_with_retain_of_the_width_that_a_chunk_has_kept():
    config = config_of(chunk=4, commit="chunk", retention="decay")
    narrow, wide = case_of(config, length=6), case_of(config, length=6, channels=True)
    for first, then in ((narrow, wide), (wide, narrow)):
        _, state = first.scan()
        found = [then.scan(state)[0] for _ in range(2)]
        fresh = then._replace(config=config.model_copy()).scan(state)[0]
        assert torch.equal(found[0], fresh) and torch.equal(found[1], fresh)


@pytest.mark.spec("ENG-CALL-D2")
def test_plans_hold_no_tensors_and_belong_to_one_config():
    case = case_of(config_of(algorithm="momentum", retention="decay"))
    case.scan()
    (plan,) = case.config.plans.values()
    assert not [item for item in tree_leaves(vars(plan)) if isinstance(item, Tensor)]
    config = case.config
    others = [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy()]
    assert all(other == config and not other.plans for other in others)
    q, kept = case.q.clone(), []
    y, state = memory_scan(config, q, case.k, case.v, case.gates)
    kept = [weakref.ref(item) for item in (q, y, state.memory["weight"])]
    del q, y, state
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    x = torch.ones(1, 2, 1, 2)
    for turn in range(MOST + 5):
        memory_scan(config, x, x, x, Gates(turn / 100))
    assert len(config.plans) == MOST
    with torch.no_grad():
        memory_scan(fresh := MemoryConfig(), x, x, x)
    assert len(fresh.plans) == 1
    torch.func.grad(lambda q: memory_scan(fresh, q, x, x)[0].sum())(x)
    assert len(fresh.plans) == 1  # torch has to see every operation


def by_size(look) -> type[TokenEngine]:
    """An engine for keys below 2 alone, as its `look` at a call finds them."""

    class Small(TokenEngine):
        """The token loop, for small keys."""

        name = "small"

        def unfit(self, call):
            return "keys are large" if look(call) else None

        def cost(self, call):
            return 0.1 * call.length

        def scan(self, call, tokens, carry, initial, *, run):
            return Engine.registry["sequential"].scan(call, tokens, carry, initial, run=run)

    return Small


def caught(call) -> bool:
    try:
        return bool(call.inputs.k.abs().amax() > 2)
    except Exception:
        return False


@pytest.mark.spec("ENG-ENGINE-I2")
@pytest.mark.parametrize(
    "look",
    [
        lambda call: call.inputs.k.abs().amax() > 2,
        lambda call: call.tensors.inputs.k.abs().amax() > 2,
        lambda call: hasattr(call, "flat") and call.flat[1].abs().amax() > 2,
        caught,
    ],
)
def test_an_engine_that_looks_at_numbers_is_asked_in_every_call(look, others):
    by_size(look)
    config, x = MemoryConfig(key_norm="l2"), torch.ones(1, 4, 2, 3)
    ran = []
    for size in (1.0, 3.0, 1.0, 3.0):
        for _ in range(2):
            ran.append(choose(Call.of(config, x, size * x, x)).name)
    assert ran == ["small", "small", "parallel", "parallel"] * 2


@pytest.mark.spec("ENG-ENGINE-D1")
def test_what_a_plan_has_chosen_holds_until_another_engine_comes_or_goes(others):
    config, x = MemoryConfig(key_norm="l2"), torch.ones(1, 4, 2, 3)
    chosen = lambda **how: choose(Call.of(config, x, x, x), **how).name  # noqa: E731
    assert chosen() == chosen() == "parallel"
    asked = []
    by_size(asked.append)
    assert chosen() == chosen() == "small" and len(asked) == 1 and isinstance(asked[0], Plan)
    assert chosen(asked="sequential") == "sequential" and chosen() == "small"
    assert chosen(asked="parallel") == "parallel"
    with pytest.raises(ConfigError, match="engine='chunk' cannot run"):
        chosen(asked="chunk")
    assert chosen() == "small"
    del Engine.registry["small"]
    assert chosen() == "parallel"
    with pytest.raises(ConfigError, match="unknown engine 'small'"):
        chosen(asked="small")

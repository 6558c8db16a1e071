"""A tape handed to a scan: gradients, print, norms, and what it keeps."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step
from hecate.structure import MLP, Matrix, Structure, base
from hecate.tape import Tape
from tests.memories import case_of, close, config_of, ways

FULL = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
DEEP = {"kind": "mlp", "layers": 2, "expansion": 2, "activation": "silu"}
CASES = {
    "titans": FULL,
    "deep": {**FULL, "structure": DEEP},
    "linear attention": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "chunk": {**FULL, "chunk": 3, "commit": "chunk"},
}


@pytest.mark.spec("ENG-TAPE-D1", "ENG-TAPE-I1")
@pytest.mark.spec("ENG-NUM-V1")
@pytest.mark.parametrize(("name", "engine"), ways(CASES, ("sequential", "parallel", "compiled")))
def test_backward_of_a_recorded_scan_equals_autograd(name, engine):
    case = case_of(config_of(**CASES[name]), masks=True, length=35 if engine == "compiled" else 9).fresh()
    y, _ = case.scan(engine=engine)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    wanted = [case.q, case.k, case.v, *(gate for gate in case.gates if gate is not None)]
    expected = torch.autograd.grad(y, wanted, g)
    plain = case.with_leaves([leaf.detach() for leaf in case.leaves])
    tape = Tape()
    again, _ = plain.scan(engine=engine, tape=tape)
    assert torch.equal(again, y) and (engine == "sequential" or f"engine.{engine}" in str(tape))
    inputs = [plain.q, plain.k, plain.v, *(gate for gate in plain.gates if gate is not None)]
    for mine, true in zip(tape.backward([again], [g], inputs), expected, strict=True):
        close(mine, true, 1e-12)


@pytest.mark.spec("ENG-TAPE-I2")
def test_a_recorded_scan_can_be_read():
    case = case_of(config_of(**FULL), length=9)
    tape = Tape(observe=True)
    y, _ = case.scan(engine="sequential", tape=tape)
    text = str(tape)
    for word in ("phi(k)", "phi.identity", "key_norm", "l2_norm", "segment 0", "segment 2", "outputs"):
        assert word in text, text
    assert len(text.splitlines()) < 40
    tape.backward([y], [torch.ones_like(y)], [case.q, case.k, case.v])
    norms = tape.norms("segment 1")
    # Each token's blocks stand under the segment and the token, numbered from the sequence's start.
    tokens = {key.split("/")[1] for key in norms if "token " in key}
    assert tokens == {"token 3", "token 4", "token 5"}
    assert all(bool(torch.isfinite(norm)) for norm in norms.values())
    assert float(tape.norms("token 4")["segment 1/token 4/bias.l2"]) > 1e-6


@pytest.mark.spec("ENG-SEQ-I1")
def test_backward_memory_grows_with_the_root_of_the_length():
    """What is alive at once in the backward pass of a large memory with small tokens."""

    def peak(length: int) -> int:
        structure = {"kind": "mlp", "layers": 2, "expansion": 64, "activation": "tanh"}
        config = config_of(structure=structure, retention="decay", key_norm="l2")
        case = case_of(config, batch=1, length=length, heads=1, d=2, width=2)
        case = case._replace(gates=Gates(0.01, 0.9)).fresh()
        y, _ = case.scan(engine="sequential", autodiff="tape")
        with Peak() as most:
            torch.autograd.grad(y.sum(), case.leaves)
        return most.bytes

    short, long = peak(64), peak(1024)
    # Exactly 4 for weights alone; tokens themselves, few but linear in T, may add a little.
    assert 3.2 < long / short < 4.8


@pytest.mark.spec("ENG-AUTODIFF-I2")
def test_forward_saves_the_inputs_and_one_state_per_segment():
    def saved(length: int, autodiff: str = "tape") -> int:
        kept: dict[int, int] = {}

        def pack(item: Tensor) -> Tensor:
            kept[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            return item

        case = case_of(config_of(**FULL), length=length).fresh()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
            case.scan(engine="sequential", autodiff=autodiff)
        tokens = (case.q, case.k, case.v, case.v, *case.gates)  # v for the outputs
        return sum(kept.values()) - 8 * sum(item.numel() for item in tokens if item is not None)

    state = 8 * 4 * (2 * 3 + 2 * 3)  # weights and slots of four memories
    # 4, 8 and 16 segments.
    assert [saved(length) - saved(16) for length in (64, 256)] == [4 * state, 12 * state]
    assert saved(64, "torch") > 64 * state


class Counted(Structure):
    """counted: pred = M p, counting how often each method is asked."""

    kind: Literal["counted_of_a_test"] = "counted_of_a_test"
    calls: ClassVar[Counter[str]] = Counter()

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d_v, d_phi)}

    def init(self, d_phi, d_v, *, heads=1, generator=None, dtype=torch.float32, device=None):
        return {"weight": torch.zeros(heads, d_v, d_phi, dtype=dtype, device=device)}

    def predict(self, memory, p):
        self.calls["predict"] += 1
        return Matrix().predict(memory, p)

    def predict_vjp(self, memory, p, u):
        self.calls["predict_vjp"] += 1
        return Matrix().predict_vjp(memory, p, u)

    def pullback(self, memory, p, u):
        self.calls["pullback"] += 1
        return Matrix().pullback(memory, p, u)

    def pullback_vjp(self, memory, p, u, cotangents):
        self.calls["pullback_vjp"] += 1
        return Matrix().pullback_vjp(memory, p, u, cotangents)


del Structure._registry["counted_of_a_test"]  # other tests go through all that are registered


@pytest.mark.spec("ENG-SEQ-I2")
@pytest.mark.parametrize("length", [1, 9, 10])
def test_forward_and_backward_run_every_token_forward_twice(length):
    case = case_of(config_of(structure=Counted()), length=length).fresh()

    def counts(autodiff: str, *, twice: bool = False) -> dict[str, int]:
        Counted.calls.clear()
        y, _ = case.scan(engine="sequential", autodiff=autodiff)
        first = torch.autograd.grad(y.square().sum(), case.leaves, create_graph=twice)
        assert not twice or all(item.requires_grad for item in first[1:4])
        return dict(Counted.calls)

    backward = {"predict_vjp": 2 * length, "pullback_vjp": length}
    # A key and a query are predicted in each pass: one pass forward, one more per segment.
    assert counts("tape") == {"predict": 4 * length, "pullback": 2 * length, **backward}
    # To be differentiated in turn, the states between the segments are computed once more.
    again = {"predict": 6 * length, "pullback": 3 * length, **backward}
    assert counts("tape", twice=True) == again
    assert counts("torch") == {"predict": 2 * length, "pullback": length}
    with torch.no_grad():
        Counted.calls.clear()
        case.scan(engine="sequential", autodiff="tape")
    assert Counted.calls == {"predict": 2 * length, "pullback": length}


@pytest.mark.spec("ENG-STEP-I1")
def test_a_step_from_a_state_draws_no_initial_weights(monkeypatch):
    case = case_of(config_of(structure=DEEP), length=2)
    drawn = []
    draw = MLP.init
    monkeypatch.setattr(MLP, "init", lambda *a, **b: drawn.append(1) or draw(*a, **b))
    base._cached_init.cache_clear()  # what was drawn is kept
    _, state = memory_scan(case.config, case.q, case.k, case.v)
    assert len(drawn) == 1
    base._cached_init.cache_clear()
    memory_step(case.config, case.q[:, 0], case.k[:, 0], case.v[:, 0], state=state)
    assert len(drawn) == 1
    reset = torch.tensor([[False, True]] * 2)
    memory_scan(case.config, case.q, case.k, case.v, state=state, reset_mask=reset)
    assert len(drawn) == 2


@pytest.mark.spec("ENG-SEQ-I2")
def test_states_kept_by_the_forward_pass_give_the_gradients_of_running_it_again():
    case = case_of(config_of(**FULL, structure=DEEP), length=10, masks=True)
    results = []
    for twice in (False, True):
        own = case.fresh()
        y, state = own.scan(autodiff="tape")
        total = y.sin().sum() + state.memory["w1"].square().sum()
        results.append(torch.autograd.grad(total, own.leaves, create_graph=twice))
    # Under create_graph norms are pulled back by torch's own operations, which round otherwise.
    for mine, true in zip(*results, strict=True):
        assert float((mine - true.detach()).norm()) <= 1e-14 * float(true.detach().norm())


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Largest number of bytes held at once by tensors made inside the block."""

    def __enter__(self):
        self.bytes = self.now = 0
        self.sizes: dict[int, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.bytes = max(self.bytes, self.now)
                    weakref.finalize(storage, self.freed, key)
        return out

    def freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def test_gates_of_a_tape_need_not_be_tensors():
    case = case_of(MemoryConfig(state_dtype="float64"))
    tape = Tape()
    y, _ = memory_scan(case.config, case.q, case.k, case.v, Gates(0.3), tape=tape)
    (grad,) = tape.backward([y], [torch.ones_like(y)], [case.k])
    assert float(grad.norm()) > 0.01


def test_the_choice_of_engine_is_logged(caplog):
    case = case_of(config_of(bias="huber"), length=3)
    with caplog.at_level("DEBUG", logger="hecate.engine"):
        case.scan(engine="sequential", name="level 1")
    (record,) = caplog.records
    assert record.getMessage() == "memory 'level 1', 3 tokens: engine sequential (asked for)"

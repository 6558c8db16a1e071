"""A memory as phi: both features of a token from one state, and any rule behind."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine import memory_features
from hecate.errors import ShapeError
from tests.memories import close, reference_of
from tests.reference import memory as reference

B, T, H, D, V = 2, 8, 2, 3, 2
DEEP = {"kind": "mlp", "expansion": 1, "activation": "silu"}
PAIRS = {
    "delta on delta": ({"retention": "decay"}, {"retention": "decay", "key_norm": "l2"}),
    "titans on dot": ({"bias": "dot"}, {"retention": "decay", "algorithm": "momentum"}),
    "deep on deep": ({"structure": DEEP}, {"structure": DEEP, "chunk": 2, "key_norm": "l2"}),
    "before": ({"read": "before"}, {"bias": "dot", "read": "before"}),
    "chunks": (
        {"chunk": 3, "commit": "chunk", "retention": "decay"},
        {"feature_map": "elu", "normalizer": "sum", "bias": "dot"},
    ),
}
every = pytest.mark.parametrize("name", PAIRS)


class Case:
    """Inputs of both memories; `run` scans the outer one on the features of the inner."""

    def __init__(self, name, length=T, batch=B, heads=H, seed=0, masked=False):
        source = torch.Generator().manual_seed(seed)
        self.inner, self.outer = (MemoryConfig(state_dtype="float64", **fields) for fields in PAIRS[name])
        lead = (batch, length, heads)
        widths = {"q": D, "k": D, "v": V, "target": D}
        self.leaves = {n: torch.randn(*lead, d, generator=source) / d**0.5 for n, d in widths.items()}
        for side, config, (d, v) in (("in", self.inner, (D, D)), ("out", self.outer, (D, V))):
            self.leaves[f"{side}.lr"] = 0.1 + 0.3 * torch.rand(*lead, generator=source)
            self.leaves[f"{side}.retain"] = 0.5 + 0.4 * torch.rand(*lead, generator=source)
            self.leaves[f"{side}.momentum"] = 0.5 * torch.rand(*lead, generator=source)
            for n, shape in config.structure.shapes(d, v).items():
                self.leaves[f"{side}.initial.{n}"] = 0.3 * torch.randn(heads, *shape, generator=source)
        self.write = self.reset = None
        if masked:
            self.write = torch.rand(batch, length, generator=source) < 0.7
            self.reset = torch.rand(batch, length, generator=source) < 0.3

    def gates(self, side, leaves):
        config = self.inner if side == "in" else self.outer
        return Gates(
            leaves[f"{side}.lr"],
            leaves[f"{side}.retain"] if config.retention.uses_retain else None,
            leaves[f"{side}.momentum"] if config.algorithm.uses_momentum else None,
        )

    def run(self, leaves=None, at=0, end=None, state=None, **options):
        leaves = self.leaves if leaves is None else leaves
        own = {n: t if "initial" in n else t[:, at:end] for n, t in leaves.items()}
        masks = {"write_mask": self.write, "reset_mask": self.reset}
        masks = {n: None if mask is None else mask[:, at:end] for n, mask in masks.items()}
        options = {**masks, **options}

        def initial(side):
            mark = f"{side}.initial."
            return {n.removeprefix(mark): t for n, t in own.items() if n.startswith(mark)}

        before = (None, None) if state is None else state
        phi_q, phi_k, features = memory_features(
            self.inner, own["q"], own["k"], own["target"], self.gates("in", own),
            state=before[0], initial=initial("in"), **options,
        )  # fmt: skip
        y, after = memory_scan(
            self.outer, phi_q, phi_k, own["v"], self.gates("out", own),
            state=before[1], initial=initial("out"), **options,
        )  # fmt: skip
        return y, (features, after)


def expected_rows(case, b, h):
    """Both memories in numpy: the inner one read at q and at k, the outer one on the sums."""
    own = {n: (t[h] if "initial" in n else t[b, :, h]).numpy() for n, t in case.leaves.items()}
    masks = [None if m is None else m[b].numpy() for m in (case.write, case.reset)]

    def scan(side, config, q, k, v):
        gates = (own[f"{side}.{gate}"] for gate in ("lr", "retain", "momentum"))
        names = config.structure.shapes(q.shape[-1], v.shape[-1])
        weights = [own[f"{side}.initial.{name}"] for name in names]
        return reference.scan(reference_of(config), q, k, v, *gates, weights, *masks)[0]

    q, k = own["q"], own["k"]
    phi_q, phi_k = (x + scan("in", case.inner, x, k, own["target"]) for x in (q, k))
    return scan("out", case.outer, phi_q, phi_k, own["v"])


@pytest.mark.spec("ENG-FEAT-D1")
@every
@pytest.mark.parametrize("masked", [False, True])
def test_equals_two_memories_written_out(name, masked):
    case = Case(name, masked=masked)
    y, _ = case.run()
    for b, h in np.ndindex(B, H):
        close(y[b, :, h], torch.tensor(expected_rows(case, b, h)), 1e-11, f"{name} {b} {h}")


@pytest.mark.spec("ENG-FEAT-I1")
@every
def test_gradcheck_through_both_memories(name):
    case = Case(name, length=3, batch=1, heads=1)
    points = {n: t.clone().requires_grad_() for n, t in case.leaves.items()}

    def of(*given):
        y, (features, after) = case.run({**case.leaves, **dict(zip(points, given, strict=True))})
        return y, *features.memory.values(), *after.memory.values()

    assert torch.autograd.gradcheck(of, tuple(points.values()))


@pytest.mark.spec("ENG-FEAT-I1")
@every
def test_both_memories_learn(name):
    """Gradients of every input and starting weight of either memory, none below a floor."""
    case = Case(name)
    points = {n: t.clone().requires_grad_() for n, t in case.leaves.items()}
    y, _ = case.run(points)
    grads = torch.autograd.grad(y.square().sum(), points.values(), allow_unused=True)
    sizes = {n: 0.0 if g is None else float(g.norm()) for n, g in zip(points, grads, strict=True)}
    idle = {
        f"{side}.{gate}"
        for side, config in (("in", case.inner), ("out", case.outer))
        for gate, used in (("retain", config.retention.uses_retain), ("momentum", config.algorithm.uses_momentum))
        if not used
    }
    assert {n for n, size in sizes.items() if size < 1e-3} == idle, sizes


@pytest.mark.spec("ENG-FEAT-I2", "ENG-FEAT-I3")
@every
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cuts", [[3], [0, 1, 1, 5], list(range(1, T))], ids=len)
def test_any_split(name, masked, cuts):
    case = Case(name, masked=masked)
    expected, last = case.run()
    state, ys = None, []
    for at, end in pairwise([0, *cuts, T]):
        y, state = case.run(at=at, end=end, state=state)
        ys.append(y)
    close(torch.cat(ys, 1), expected, 1e-11, "y")
    for mine, true in zip(state, last, strict=True):
        for weight in true.memory:
            close(mine.memory[weight], true.memory[weight], 1e-11, weight)


@pytest.mark.spec("ENG-FEAT-I2")
@every
def test_documents_and_masked_garbage(name):
    case, borders = Case(name, batch=1), [0, 2, 3, T]
    packed, _ = case.run(cu_seqlens=torch.tensor(borders), reset_mask=None)
    alone = [case.run(at=at, end=end)[0] for at, end in pairwise(borders)]
    close(packed, torch.cat(alone, 1), 1e-11, "documents")
    kept = [0, 1, 4, 7]
    case.write = torch.zeros(1, T, dtype=torch.bool)
    case.write[:, kept] = True
    dirty = {
        n: torch.where(case.write[..., None, None], t, torch.nan) if n in ("k", "v", "target") else t
        for n, t in case.leaves.items()
    }
    y, _ = case.run(dirty)
    case.write = None
    short = {n: t if "initial" in n else t[:, kept] for n, t in case.leaves.items()}
    close(y[:, kept], case.run(short)[0], 1e-11, "masked")


@pytest.mark.spec("ENG-FEAT-I1")
def test_starts_as_the_identity_and_stretches_what_it_has_seen():
    k = torch.zeros(1, 3, 1, 2)
    k[..., 0] = 1.0
    q = torch.tensor([[1.0, 1.0]]).expand(1, 3, 1, 2)
    config = MemoryConfig(read="before", state_dtype="float64")
    phi_q, phi_k, state = memory_features(config, q, k, k, Gates(1.0))
    assert torch.equal(phi_k[:, 0], k[:, 0]) and torch.equal(phi_q[:, 0], q[:, 0])
    assert phi_k[0, 1:, 0].tolist() == [[2.0, 0.0]] * 2  # known: M k = k
    assert phi_q[0, 1:, 0].tolist() == [[2.0, 1.0]] * 2  # only the known direction
    assert state.memory["weight"].tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]
    with pytest.raises(ShapeError, match="v must be as wide as k"):
        memory_features(config, q, k, k[..., :1])


def test_compiles():
    case = Case("delta on delta", length=2)
    points = {n: t.clone().requires_grad_() for n, t in case.leaves.items() if not n.endswith("momentum")}

    def loss(leaves):
        return case.run({**case.leaves, **leaves})[0].sin().sum()

    expected = torch.autograd.grad(loss(points), points.values())
    run = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for mine, true in zip(torch.autograd.grad(run(points), points.values()), expected, strict=True):
        close(mine, true, 1e-10, "gradients")

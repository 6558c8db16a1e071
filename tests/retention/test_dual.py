"""Mirror memories carry their dual state: nothing that was written is lost, on any engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, memory_weights, retention
from hecate.engine import exact_engines
from hecate.tape.ops import over
from hecate.testing import check_rule
from tests.memories import Case, case_of, config_of
from tests.reference import knobs, mirror

LINKS: list[tuple[Any, Any]] = [
    (retention.KL(), mirror.Softmax()),
    (retention.KL(scale=3.0), mirror.Softmax(3.0)),
    (retention.KL(signed=True, scale=2.0), mirror.SignedSoftmax(2.0)),
    (retention.Bounded(low=-1.0, high=2.0), knobs.Sigmoid(-1.0, 2.0)),
    (retention.Lq(eps=1e-12), knobs.Lq()),
    (retention.Lq(q=1.5), knobs.Lq(1.5)),
    (retention.Lq(q=2.5, form="paper"), knobs.Lq(2.5, "paper")),
    (retention.Bregman(link="signed_softmax"), mirror.SignedSoftmax()),
]
every_link = pytest.mark.parametrize(("knob", "link"), LINKS, ids=[repr(k) for k, _ in LINKS])
TIMINGS = [
    mirror.Timing(),
    mirror.Timing(read="before"),
    mirror.Timing(order="before_gradient"),
    mirror.Timing(chunk=3),
    mirror.Timing(chunk=3, read="before"),
    mirror.Timing(chunk=3, commit="chunk"),
    mirror.Timing(chunk=3, commit="chunk", read="before"),
]


def config_at(knob: Any, timing: mirror.Timing, **fields: Any) -> MemoryConfig:
    return config_of(
        retention=knob, chunk=timing.chunk, commit=timing.commit, read=timing.read, decay_order=timing.order, **fields
    )


def expected(case: Case, link: Any, timing: mirror.Timing, dot: bool) -> tuple[Any, Any]:
    """The reference on every row and head: outputs `[B, T, H, V]` and memories `[B, H, V, P]`."""
    rows, memories = [], []
    for b in range(len(case.q)):
        masks = [None if m is None else m[b].numpy() for m in (case.write, case.reset)]
        own = [
            mirror.scan(
                link,
                timing,
                dot,
                *(x[b, :, h].numpy() for x in (case.q, case.k, case.v, *case.gates[:2])),
                case.initial["weight"][h].numpy(),
                *masks,
            )
            for h in range(case.q.shape[2])
        ]
        rows.append(np.stack([y for y, _, _ in own], 1))
        memories.append(np.stack([m for _, m, _ in own]))
    return np.stack(rows), np.stack(memories)


@pytest.mark.spec("RET-MIRROR-D1", "RET-MIRROR-I1", "RET-MIRROR-E1")
@pytest.mark.parametrize("size", [5.0, 9.0])
@every_link
def test_six_writes_and_six_of_the_opposite_end_where_they_began(knob, link, size):
    """Bias dot, nothing forgotten: what drives a memory to its border comes back."""
    case = case_of(config_of(retention=knob, bias="dot"), length=12)
    signs = size * torch.tensor([1.0] * 6 + [-1.0] * 6)[None, :, None, None]
    case = case._replace(
        k=torch.zeros_like(case.k) + torch.tensor([1.0, 0.0, 0.0]),
        v=torch.zeros_like(case.v) + signs,
        gates=Gates(torch.ones(2, 12, 2), torch.ones(2, 12, 2)),
        write=torch.ones(2, 12, dtype=torch.bool),
    )
    y, state = case.scan()
    rows, _ = expected(case, link, mirror.Timing(), dot=True)
    assert np.abs(y.numpy() - rows).max() <= 1e-11 * np.abs(rows).max()
    untouched, start = case._replace(write=torch.zeros(2, 12, dtype=torch.bool)).scan()
    scale = float(y.abs().max())
    assert float((y[:, :11] - untouched[:, :11]).abs().amax((0, 2, 3)).min()) > 1e-3 * scale
    assert float((y[:, 11] - untouched[:, 11]).abs().max()) <= 1e-11 * scale
    torch.testing.assert_close(
        memory_weights(case.config, state)["weight"],
        memory_weights(case.config, start)["weight"],
        rtol=1e-11,
        atol=1e-11,
    )


def agrees(case: Case, link: Any, timing: mirror.Timing, **options: Any) -> None:
    y, state = case.scan(**options)
    rows, memories = expected(case, link, timing, dot=False)
    for got, true in ((y, rows), (memory_weights(case.config, state)["weight"], memories)):
        assert np.abs(got.numpy() - true).max() <= 1e-12 * np.abs(true).max()


@pytest.mark.spec("RET-MIRROR-D1", "RET-MIRROR-I2")
@pytest.mark.parametrize(
    ("at", "timing"),
    [(at, timing) for at in range(len(LINKS)) for timing in TIMINGS[at % 2 :: 2]],
    ids=lambda given: str(given) if isinstance(given, mirror.Timing) else repr(LINKS[given][0]),
)
def test_every_timing_mask_and_reset_against_numpy(at, timing):
    """On the token loop and, where it runs, on the chunk engine; of every link every second timing."""
    knob, link = LINKS[at]
    case = case_of(config_at(knob, timing), batch=1, length=11, masks=True)
    for engine in ["sequential", *exact_engines(case.config, length=11)]:
        agrees(case, link, timing, engine=engine)
        agrees(case._replace(write=None, reset=None), link, timing, engine=engine)


@pytest.mark.spec("RET-MIRROR-I3")
@every_link
@pytest.mark.parametrize("fields", [{}, {"chunk": 3}, {"algorithm": "momentum"}], ids=str)
def test_what_is_carried_moves_linearly(knob, link, fields):
    """Two scans of the same keys with bias dot: dual states add up, and a split is exact."""
    case = case_of(config_of(retention=knob, bias="dot", **fields), length=9)
    case = case._replace(initial={"weight": 0 * case.initial["weight"]})

    def carried(v: torch.Tensor) -> torch.Tensor:
        return case._replace(v=v).scan()[1].memory["weight"]

    other = case.v.flip(1)
    nothing = carried(0 * other)
    both = carried(case.v + 2 * other) - nothing
    apart = carried(case.v) - nothing + 2 * (carried(other) - nothing)
    torch.testing.assert_close(both, apart, rtol=1e-11, atol=1e-13)
    _, state = case.part(0, 4).scan()
    _, state = case.part(4, 9).scan(state)
    torch.testing.assert_close(state.memory["weight"], carried(case.v), rtol=1e-12, atol=1e-14)


@pytest.mark.spec("RET-MIRROR-I4")
@pytest.mark.parametrize("algorithm", ["gd", "momentum"])
def test_no_constant_grows_in_a_row_of_logits(algorithm):
    """Every step adds 100 to all logits of a row and little to their differences: in float32 those
    would be gone long before a million tokens. The memory is that of the differences alone."""
    length = 2000
    k = torch.ones(1, length, 1, 4, dtype=torch.float32)
    k[..., 0] += 1e-3
    v = torch.full((1, length, 1, 2), 100.0)
    config = MemoryConfig(retention="kl", bias="dot", algorithm=algorithm)
    gates = Gates(1.0, 1.0, 0.0 if algorithm == "momentum" else None)
    _, state = memory_scan(config, k, k, v.float(), gates)
    logits = state.memory["weight"][0, 0].double()
    assert float(logits.abs().max()) < 151  # 2000 x 100 x 1e-3 x 3/4
    told = length * 100 * (float(k[0, 0, 0, 0]) - 1)  # the key as float32 has it
    spread = logits[:, 0] - logits[:, 1]
    torch.testing.assert_close(spread, torch.full((2,), told), rtol=1e-3, atol=0)


def test_gates_per_channel_keep_the_constant_that_they_can_tell():
    """One channel forgets, the other does not: a constant of the row is then no constant."""
    knob = retention.KL()
    direction = torch.tensor([[[3.0, 1.0]]])
    moved = knob.step(torch.zeros(1, 1, 2), direction, torch.tensor([[0.5, 1.0]]))
    assert torch.equal(moved, direction)
    shared = knob.step(torch.zeros(1, 1, 2), direction, torch.tensor([0.5]))
    assert shared.tolist() == [[[1.0, -1.0]]]


@pytest.mark.spec("RET-CAP-D2")
@every_link
def test_around_a_dual_state_a_cap_projects_the_memory_alone(knob, link):
    """What is carried goes on beyond the ball: told the opposite, the memory comes back from it."""
    norm = 0.4

    class Lazy(type(link)):
        def memory(self, carried):
            free = super().memory(carried)
            return free * min(1, norm / np.sqrt(np.sum(free**2)))

    lazy = Lazy.__new__(Lazy)
    lazy.__dict__.update(link.__dict__)
    cap = retention.NormCap(norm=norm, retention=knob)
    for timing in TIMINGS[LINKS.index((knob, link)) % 2 :: 2]:
        case = case_of(config_at(cap, timing), batch=1, length=11, masks=True)
        agrees(case, lazy, timing)
    free = case.scan()[1].memory["weight"]
    assert bool((knob.weights(free.flatten(0, 1)).flatten(1).norm(dim=1) > norm).any())


@pytest.mark.spec("RET-MIRROR-D2")
def test_the_weights_of_a_state():
    case = case_of(config_of(retention="kl", structure={"kind": "mlp", "layers": 2}), d=2)
    case = case.fresh()
    _, state = case.scan()
    weights = memory_weights(case.config, state)
    for name, weight in weights.items():
        assert torch.allclose(weight, state.memory[name].softmax(-1), rtol=1e-14)
    grads = torch.autograd.grad(sum(w.square().sum() for w in weights.values()), case.v)
    assert float(grads[0].norm()) > 1e-6
    plain = case_of(config_of(retention="decay"))
    _, state = plain.scan()
    assert torch.equal(memory_weights(plain.config, state)["weight"], state.memory["weight"])


def test_a_retention_of_a_user_that_carries_a_dual_state():
    """Overriding `weights` says so by itself: the step and the link are differentiated by torch."""

    class Cubes(retention.Retention):
        """cubes_of_a_user: M = A + A^3, A' = retain A + D."""

        kind: Literal["cubes_of_a_user"] = "cubes_of_a_user"
        uses_retain: ClassVar[bool] = True

        def weights(self, carried: torch.Tensor) -> torch.Tensor:
            return carried + carried**3

        def step(self, memory: torch.Tensor, direction: torch.Tensor, retain: torch.Tensor) -> torch.Tensor:
            return over(retain, memory) * memory + direction

    try:
        for fields in ({}, {"chunk": 3}, {"chunk": 2, "commit": "chunk"}):
            check_rule(MemoryConfig(retention="cubes_of_a_user", **fields))
        assert Cubes().dual and not Cubes().linear
    finally:
        del retention.Retention._registry["cubes_of_a_user"]


def test_files_with_a_field_that_is_gone_load_with_a_warning():
    with pytest.warns(FutureWarning, match=r"KL\.eps is left out: the dual state"):
        config = MemoryConfig.model_validate({"retention": {"kind": "kl", "eps": 1e-6}})
    assert config == MemoryConfig(retention="kl")

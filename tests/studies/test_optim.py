"""The study of optimisers: its surfaces and its descent against loops by hand, and its verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hecate.phi import FeatureMap
from studies import optim
from studies.contenders import ENTRANTS, KEPT, NEEDED, costs, maps, state_bytes, zero_gradient
from studies.descents import (
    CEILING,
    CONDITION,
    PUBLISHED,
    SIDE,
    Score,
    Surface,
    Sweep,
    Warp,
    descend,
    final,
    quadratic,
    rosenbrock,
    score,
    steps_to,
    sweep,
    warped,
)
from studies.dots import ranked
from studies.lessons import CONTEXT, LENGTH, PAIRS, draw_recall, draw_text, learn, recall_loss, recall_model
from studies.outcomes import Budget, Outcome

pytestmark = pytest.mark.filterwarnings("ignore:phi sees")
BY_NAME = {entrant.name: entrant for entrant in ENTRANTS}
SGD, ADAMW = ENTRANTS[0], ENTRANTS[1]
WARPS = [Warp(1.0, 0.5, 1.0), Warp(10.0, 1.0, 3.0)]


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    torch.set_default_dtype(torch.float32)


def psi(x: np.ndarray, warp: Warp) -> tuple[float, np.ndarray]:
    """The toy surface and its gradient, by hand."""
    r, theta = x
    off = r - theta + warp.a * math.sin(warp.w * r)
    inner = 1 + warp.a * warp.w * math.cos(warp.w * r)
    return (r * r + warp.k * off * off, np.array([2 * r + 2 * warp.k * off * inner, -2 * warp.k * off]))


def valley(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Rosenbrock's function and its gradient, by hand."""
    a, b = x
    off = b - a * a
    return (1 - a) ** 2 + 100 * off * off, np.array([-2 * (1 - a) - 400 * a * off, 200 * off])


def momentum_by_hand(f, x: np.ndarray, lr: float, steps: int) -> list[float]:
    held, losses = np.zeros_like(x), []
    for _ in range(steps + 1):
        loss, gradient = f(x)
        losses.append(loss)
        held = 0.9 * held + gradient
        x = x - lr * held
    return losses


def test_descent_on_every_surface_and_by_every_rate_is_a_loop_by_hand():
    surface = warped(WARPS, [PUBLISHED, 3])
    # rates at which rounding does not grow: beyond them the steep surface is chaotic
    rates = torch.tensor([[1e-3], [1e-4]], dtype=torch.float64).expand(-1, 4)
    history = descend(SGD.make, surface, rates, 20)
    starts = surface.start[:, 0].numpy()
    assert starts[0].tolist() == starts[2].tolist() == [-3.5, 2.0]
    assert 0 < abs(starts[1] - starts[0]).max() < 1 and np.array_equal(starts[1], starts[3])
    for row, lr in enumerate((1e-3, 1e-4)):
        for place, warp in enumerate((WARPS[0], WARPS[0], WARPS[1], WARPS[1])):
            wanted = momentum_by_hand(lambda x, w=warp: psi(x, w), starts[place], lr, 20)
            np.testing.assert_allclose(history[:, row, place].numpy(), wanted, rtol=1e-9)


def test_rosenbrock_by_hand():
    surface = rosenbrock([0, 1])
    history = descend(SGD.make, surface, torch.full((1, 2), 1e-4, dtype=torch.float64), 30)
    for place in range(2):
        wanted = momentum_by_hand(valley, surface.start[place, 0].numpy(), 1e-4, 30)
        np.testing.assert_allclose(history[:, 0, place].numpy(), wanted, rtol=1e-9)


def test_the_quadratic_has_its_condition():
    surface = quadratic([5])
    points = torch.eye(SIDE * SIDE, dtype=torch.float64).view(-1, 1, SIDE, SIDE)
    pairs = points + points.transpose(0, 1).reshape(1, -1, SIDE, SIDE)
    alone = surface.loss(points)[:, 0]
    together = surface.loss(pairs.reshape(-1, 1, SIDE, SIDE))[:, 0].view(SIDE**2, SIDE**2)
    values = torch.linalg.eigvalsh(together - alone[:, None] - alone)  # x^T H y by polarisation
    assert values[0].item() == pytest.approx(1 / CONDITION) and values[-1].item() == pytest.approx(1)
    assert not torch.equal(quadratic([6]).start, surface.start)


def test_who_has_arrived_or_is_lost_stops_and_the_others_go_on():
    surface = Surface(
        torch.tensor([[[1.0, 1.0]], [[4.0, 4.0]]], dtype=torch.float64), lambda x: x.square().sum((-1, -2))
    )
    rates = torch.tensor([[1e-1], [1e-3], [1e3]], dtype=torch.float64).expand(-1, 2)
    history = descend(SGD.make, surface, rates, 60, enough=1.0)
    needed = steps_to(history, 1.0)
    assert needed[0, 0] < needed[0, 1] < 60 and needed[1, 1] == math.inf
    arrived = history[:, 0, 0]
    at = int(needed[0, 0])
    assert arrived[at - 1] > 1 >= arrived[at] and bool((arrived[at:] == arrived[at]).all())
    assert bool((history[1:, 1, 1] < history[:-1, 1, 1]).all())
    assert history[-1, 2, 0] > 1e9 and final(history)[2, 0] == math.log10(CEILING)
    nan = torch.full((1, 1, 1), math.nan)
    assert final(nan).item() == math.log10(CEILING) and steps_to(nan, 1.0).item() == math.inf


def test_rates_are_chosen_on_the_other_starts():
    # x^2 wants a large rate, 1e4 x^2 a small one
    start = torch.ones(1, 1, 2, dtype=torch.float64)
    mild = Surface(start, lambda x: x.square().sum((-1, -2)))
    steep = Surface(start, lambda x: 1e4 * x.square().sum((-1, -2)))
    grid = (1e-5, 1e-1)
    on_mild = score(SGD.make, grid, mild, steep, 100)
    on_steep = score(SGD.make, grid, steep, mild, 100)
    assert (on_mild.lr, on_steep.lr) == (1e-1, 1e-5)
    assert on_mild.merit < -1 and on_mild.mean == math.log10(CEILING)
    chosen = sweep(SGD.make, (1e-5, 1e-2), WARPS[:1], [0, 1], 100)
    assert chosen.lrs.tolist() == [1e-2] and chosen.steps.shape == (1, 2)
    assert bool((chosen.steps < 100).all()) and chosen.published.item() < 100


def test_shares_won_and_lost():
    inf = math.inf
    base = Sweep(torch.tensor([[5.0], [5.0], [inf], [inf]]), torch.zeros(4), torch.zeros(4))
    other = Sweep(torch.tensor([[4.0], [inf], [9.0], [inf]]), torch.zeros(4), torch.zeros(4))
    assert [share.item() for share in other.against(base)] == [0.5, 0.5, 0.25]
    assert [share.item() for share in base.against(base)] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("entrant", ENTRANTS, ids=list(BY_NAME))
def test_every_entrant_descends_and_shows_when_it_is_lost(entrant):
    surface = quadratic([0])
    rates = torch.tensor([[1e-3], [1e4]], dtype=torch.float64)
    history = descend(entrant.make, surface, rates, 30)
    assert history[-1, 0, 0] < history[0, 0, 0]
    assert not history[-1, 1, 0] < history[0, 0, 0]
    assert entrant.options.get("momentum", 0.9) == 0.9
    assert entrant.options.get("weight_decay", 0.0) == 0.0
    if entrant.is_memory:
        assert entrant.options["on_nonfinite"] == KEPT["on_nonfinite"] == "propagate"


def test_phi_identity_is_plain_momentum():
    rates = torch.tensor([[1e-3], [1e-1]], dtype=torch.float64)
    plain, memory = (descend(e.make, quadratic([0]), rates, 40) for e in (SGD, BY_NAME["phi identity"]))
    assert torch.equal(plain, memory)


def test_state_is_counted():
    assert state_bytes(SGD) == 4
    numbers = 256 * 8 + 32 * CONTEXT * 8 + 256 * 32
    assert state_bytes(ADAMW) == pytest.approx(8 + 3 * 4 / numbers)
    assert state_bytes(BY_NAME["M3"]) == pytest.approx(16 + 3 * 8 / numbers)


@pytest.mark.slow
def test_every_entrant_takes_the_rows_of_the_models():
    """Of up to 32 numbers, which a lift may not decode."""
    assert all(state_bytes(entrant) >= 0 for entrant in ENTRANTS)


def test_text_is_learned_and_a_lost_run_shows():
    text = draw_text([0], 40)
    assert len(text.batches[0]) == 40 and text.batches[0][0][0].shape == (128, CONTEXT)
    bits = learn(ADAMW.make, 1e-2, 0, text)
    assert bits < 6 < learn(ADAMW.make, 0.0, 0, text)
    assert bits == learn(ADAMW.make, 1e-2, 0, text)
    assert 6 < learn(SGD.make, 1e30, 0, text) <= CEILING


def test_recall_is_learned_and_its_loss_is_attention_by_hand():
    lesson = draw_recall([0], 60)
    tokens, targets = lesson.batches[0][0]
    assert tokens.shape == (32, LENGTH) and ((targets >= 0).sum(1) == PAIRS).all()
    assert learn(ADAMW.make, 3e-2, 0, lesson) < lesson.chance - 1
    assert learn(ADAMW.make, 0.0, 0, lesson) > lesson.chance
    params = recall_model(1)
    embedding, to_query, to_key, to_value, out = (p.detach().double().numpy() for p in params)
    losses = []
    for row, wanted in zip(tokens[:3].numpy(), targets[:3].numpy(), strict=True):
        seen = embedding[row]
        before = np.vstack([np.zeros_like(seen[:1]), seen[:-1]])
        for t in np.flatnonzero(wanted >= 0):
            scores = before[: t + 1] @ to_key.T @ (to_query @ seen[t]) / math.sqrt(seen.shape[1])
            weights = np.exp(scores - scores.max())
            logits = out @ to_value @ (weights @ seen[: t + 1] / weights.sum())
            top = logits.max()
            losses.append(top + np.log(np.exp(logits - top).sum()) - logits[wanted[t]])
    found = recall_loss(params, (tokens[:3], targets[:3])).item()
    assert found == pytest.approx(np.mean(losses), rel=1e-5)


def test_what_a_gradient_of_zero_does():
    found = {at.kind: at for at in zero_gradient()}
    assert set(NEEDED) <= set(found) == set(maps()) <= set(FeatureMap.variants())
    literal = {kind: at.moved["literal"] for kind, at in found.items()}
    assert literal["exp"] == literal["elu"] == 1 and literal["sigmoid"] == 0.5
    assert literal["softplus"] == pytest.approx(math.log(2))
    assert literal["identity"] == literal["tanh"] == literal["relu"] == 0
    for form in ("centred", "odd"):
        moved = {at.moved[form] for at in found.values()}
        assert {by for by in moved if not isinstance(by, str)} == {0.0}
    refused = {kind for kind, at in found.items() if any(isinstance(x, str) for x in at.moved.values())}
    assert "cosformer" in refused and not any(
        "required" in str(reason) for at in found.values() for reason in at.moved.values()
    )
    verdicts = {kind: at.verdict for kind, at in found.items()}
    assert verdicts["elu"] == verdicts["sigmoid"] == "moves"
    assert verdicts["tanh"] == "cannot: phi(0) = 0" and verdicts["cosformer"] == "refused"
    assert verdicts["softmax"] == verdicts["taylor"] == "cannot: the lift takes phi(0) to 0"


def test_every_map_of_the_library_is_compared():
    taken = {name.removeprefix("phi ") for name in BY_NAME if name.startswith("phi ")}
    assert taken == set(maps()) - {"cosformer"} and len(taken) >= 34
    times = costs(ENTRANTS[:4], 1)
    assert times[0] == 1 and min(times) > 0


def test_ranks_are_means_over_tasks():
    tasks = [[torch.tensor([x]) for x in row] for row in ([1.0, 2.0, 3.0], [9.0, 1.0, 2.0])]
    assert ranked(tasks) == [1, 0, 2]


def outcome(entrant, values: list[float]) -> Outcome:
    found = Score(torch.tensor(values, dtype=torch.float64), values[0], 1e-4)
    swept = Sweep(torch.tensor([[values[0]] * 2]), torch.tensor([values[0]]), torch.ones(1))
    return Outcome(entrant, found, found, swept, None, None, 4.0)


@pytest.mark.parametrize(
    ("values", "words"), [([3.0, 3.1], "behind"), ([1.0, 1.1], "ahead of"), ([1.5, 2.6], "level with")]
)
def test_the_notes_say_who_won(values, words):
    budget = Budget.of(quick=True)
    memory = outcome(BY_NAME["delta scalar"], values)
    result = optim.report([outcome(SGD, [2.0, 2.0]), outcome(ADAMW, [2.0, 2.0]), memory], budget, {})
    notes = "\n".join(result.notes)
    assert f"delta scalar, is {words} SGD with momentum (torch)" in notes
    assert f"delta scalar, is {words} AdamW (torch)" in notes
    assert ("wins more often than it loses against: delta scalar" in notes) == (words == "behind")
    assert "edge of the grid: SGD with momentum (torch) 0.0001" in notes
    assert len(result.columns) == 7


def test_runs_compare_like_with_like():
    assert len(BY_NAME) == len(ENTRANTS) and ENTRANTS[0] is SGD
    full, quick = Budget.of(quick=False), Budget.of(quick=True)
    assert len(full.warps) == 48 and set(quick.warps) <= set(full.warps)
    assert set(quick.grid) <= set(full.grid) and full.text and full.recall and not quick.text
    names = [entrant.name for entrant in quick.entrants]
    assert full.entrants == ENTRANTS and 3 < len(names) < 12 and set(names) < set(BY_NAME)

"""The study of optimisers: its noise, its worlds against numpy, and that like is compared with like."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.optim import SGD

from studies import optim
from studies.optim import CONTENDERS, DF, LOST, TASKS, Bowl, Form, Labels, Lion, Reading, Task, descended, student, text
from studies.study import Run

pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.parametrize("df", [1.5, 2.0, math.inf])
def test_noise_has_the_tails_of_student(df):
    """P(t <= x) at df = 2 is 1/2 + x / (2 sqrt(2 + x^2)); tails of df fall as x^-df; a normal's by erf."""
    drawn = student((200_000,), df, torch.Generator().manual_seed(0)).abs().double()
    shares = {x: float((drawn > x).double().mean()) for x in (1.0, 30.0, 300.0)}
    within = 4 / math.sqrt(len(drawn))  # four deviations of a share
    if df == 2.0:
        assert all(abs(share - (1 - x / math.sqrt(2 + x * x))) < within for x, share in shares.items())
    if df == 1.5:
        assert shares[30.0] / shares[300.0] == pytest.approx(10**1.5, rel=0.4)  # some 10 of 200,000 beyond 300
    if df == math.inf:
        assert abs(shares[1.0] - math.erfc(1 / math.sqrt(2))) < within and shares[30.0] == 0


def test_gradients_of_the_worlds_are_those_of_their_scores_without_noise(monkeypatch):
    monkeypatch.setattr(optim, "student", lambda shape, df, g: torch.zeros(*shape))
    bowl = Bowl(DF, 3)
    bowl.gradients()
    w = bowl.params[0].detach().double().flatten().requires_grad_()
    loss = w @ bowl.hessian.double() @ w / 2
    (wanted,) = torch.autograd.grad(loss, w)
    torch.testing.assert_close(bowl.params[0].grad.double().flatten(), wanted, rtol=1e-4, atol=1e-5)
    assert bowl.score() == pytest.approx(math.log10(loss.item()), abs=1e-5)
    values = torch.linalg.eigvalsh(bowl.hessian.double())
    assert values[0].item() == pytest.approx(0.01, rel=1e-3) and values[-1].item() == pytest.approx(1, rel=1e-4)
    labels = Labels(3)
    assert labels.score() == pytest.approx(math.log10(labels.truth.square().sum().item() / 16))
    total = torch.zeros(16, 32)
    for _ in range(2000):
        labels.gradients()
        total += labels.params[0].grad / 2000
    # E x x^T = 1: the gradient is w - W, a mean over 32,000 examples errs by |W| / sqrt(32,000) a number
    assert (total + labels.truth).norm() < 4 * labels.truth.norm() * (32 / 32_000) ** 0.5


def test_lion_by_hand():
    w, m = np.array([1.0, -2.0]), np.zeros(2)
    p = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
    optimizer = Lion([p], 0.1, 0.9, 0.99)
    for step in range(5):
        g = np.array([math.sin(step), 3.0 - step])
        w, m = w - 0.1 * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        p.grad = torch.tensor(g)
        optimizer.step()
    np.testing.assert_allclose(p.detach().numpy(), w)


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.filterwarnings("ignore:phi sees")
def test_every_contender_descends_and_shows_when_it_is_lost(name):
    task = Task(lambda seed: Bowl(math.inf, seed), 60)
    for form in CONTENDERS[name]:
        (still,) = descended(task, form, 0.0, [0], 1)
        (moved,) = descended(task, form, 1e-2, [0], 60)
        assert moved < still
        if form.clip is not None:
            assert moved != descended(task, Form(form.make), 1e-2, [0], 60)[0]
        assert descended(task, form, 1e30, [0], 20) == [LOST]


def test_seeds_share_an_optimiser_and_nothing_else():
    """Clipping and noise are of a seed's own."""
    task = TASKS["noise of every number, t"]
    for name in ("SGD, norm clipped", "phi: tanh, rms"):
        form = CONTENDERS[name][0]
        assert descended(task, form, 0.03, [0, 1], 30) == [descended(task, form, 0.03, [s], 30)[0] for s in (0, 1)]


@pytest.mark.filterwarnings("ignore:phi sees")
def test_tanh_cuts_what_an_outlier_does():
    """Where each number has noise of its own whose variance is infinite, tanh wins in short runs too."""
    task = TASKS["noise of every number, t"]
    best = {
        name: min(sum(descended(task, CONTENDERS[name][0], lr, [0, 1], 150)) / 2 for lr in (0.1, 0.032, 0.01))
        for name in ("SGD", "AdamW", "phi: tanh, as they come")
    }
    assert best["phi: tanh, as they come"] < min(best["AdamW"], best["SGD"]) - 0.1


def test_text_is_read_and_a_rate_of_zero_reads_nothing():
    task = Task(Reading, 60)
    unigram = text().baselines(4096, 8, 1)["unigram"]
    (adam,) = descended(task, CONTENDERS["AdamW"][1], 1e-2, [0], 60)
    assert adam < unigram < descended(task, Form(SGD), 0.0, [0], 1)[0]


def test_rates_and_forms_are_chosen_on_the_judges(monkeypatch):
    asked = []

    def scores(task, form, lr, seeds, steps):
        asked.append(tuple(seeds))
        good = lr == 1e-2 if tuple(seeds) == optim.JUDGES else True
        return [float(not good)] * len(seeds)

    monkeypatch.setattr(optim, "descended", scores)
    result = optim.optim(Run("optim", [0, 1]))
    assert {row[2] for row in result.rows} == {"0.01"} and len(result.rows) == len(CONTENDERS)
    assert asked.count((0, 1)) == len(CONTENDERS) * len(TASKS)
    assert asked.count(optim.JUDGES) == sum(map(len, CONTENDERS.values())) * sum(len(t.grid) for t in TASKS.values())

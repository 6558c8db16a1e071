"""The study of overwriting: both rules against loops by hand, and what a quick run must show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from studies.associations import (
    DELTA,
    RANDOM,
    REMEMBERED,
    RULES,
    SUM,
    WIDE,
    Outcome,
    Remembering,
    Trained,
    claims,
    draw_pairs,
    end,
)  # fmt: skip
from tests.studies.test_capacity import dpfp, generator, projections

SIZE = 6


def by_hand(contender, model, pairs, row: int, key: int) -> np.ndarray:
    """The answer to a key after the pairs of a row, by the equations of the paper."""
    nu = contender.rule.feature_map.nu
    k, betas, q = projections(model, pairs)
    w, z = np.zeros((SIZE, 128 * nu)), np.zeros(128 * nu)
    asked = dpfp(q[key], nu)
    if contender is SUM:
        for one, value in zip(k[row], pairs.values[row].tolist(), strict=True):
            w, z = w + np.outer(np.eye(SIZE)[value], dpfp(one, nu)), z + dpfp(one, nu)
        return w @ asked / (z @ asked)
    for one, beta, value in zip(k[row], betas[row], pairs.values[row].tolist(), strict=True):
        phi = dpfp(one, nu) / dpfp(one, nu).sum()
        old = w @ phi
        new = beta * np.eye(SIZE)[value] + (1 - beta) * old
        w = w - np.outer(old, phi) + np.outer(new, phi)
    return w @ asked / asked.sum()


@pytest.mark.parametrize("contender", [SUM, DELTA, WIDE], ids=lambda c: c.name)
def test_rules_by_hand(contender):
    model = Remembering(SIZE, contender.rule, generator()).double()
    pairs = draw_pairs(SIZE, 2 * SIZE, 2, True, generator(1))
    one = torch.tensor([[2], [5]])
    last = model.answers(pairs, one, generator())  # asked by the last token
    every = torch.arange(SIZE).expand(2, SIZE)
    read = model.answers(pairs, every, generator())  # asked after it
    for row in range(2):
        wanted = np.array([by_hand(contender, model, pairs, row, key) for key in range(SIZE)])
        np.testing.assert_allclose(read[row].detach().numpy(), wanted, rtol=1e-9, atol=1e-12)
        got = last[row, 0].detach().numpy()
        np.testing.assert_allclose(got, wanted[int(one[row])], rtol=1e-9, atol=1e-12)


def test_every_parameter_that_a_rule_reads_is_trained():
    for contender in RULES:
        model = Remembering(SIZE, contender.rule, generator())
        pairs = draw_pairs(SIZE, 2 * SIZE, 2, True, generator(1))
        model.answers(pairs, pairs.keys[:, :1], generator())[..., 0].sum().backward()
        moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        gate = set() if contender is SUM else {"gate", "gate_bias"}
        assert moved == {"embedding", "key", "key_bias", "query", "query_bias"} | gate


def outcome(contender, size: int, *best: float, lost: bool = False) -> Outcome:
    runs = [Trained([b, math.nan] if lost else [b], 100, True) for b in best]
    return Outcome(contender, size, contender.published[0], runs, [2 * b for b in best])


def test_claims_can_fail():
    good = [
        outcome(SUM, 20, 0.1, 0.12), outcome(DELTA, 20, 0.001, 0.002), outcome(WIDE, 20, 0.001),
        outcome(RANDOM, 20, 0.4, 0.2, lost=True),
    ]  # fmt: skip
    below, near, random = claims(good)
    assert "here it holds" in below and "here it holds" in near
    assert "2 of 2 trainings" in random and "at least 100 times" in random
    bad = [outcome(SUM, 20, 0.1, 0.12), outcome(DELTA, 20, 0.001, 0.11), *good[2:]]
    assert "does NOT hold" in claims(bad)[0] and "at least 2 times" in claims(bad)[2]
    assert "does NOT hold" in claims([*good[:2], outcome(WIDE, 20, 0.02), good[3]])[1]
    whole, lost = end(good[3])
    # Student's t of one degree of freedom is 12.706 at 95 %: 300 +- 12.706 * 100
    assert good[3].cells()[2:] == [102.3, good[3].ours, "0 to 1.57e+03", 2, "100"]
    assert lost == "2 of 2" and good[3].ours.mean == pytest.approx(300) and whole.mean == pytest.approx(600)


def test_published_numbers_are_those_of_every_size():
    assert all(len(contender.published) == len(REMEMBERED.sizes) for contender in RULES)
    assert all(a < b / 10 for a, b in zip(DELTA.published, SUM.published, strict=True))


def quick_run_shows(result):
    """Delta below sum; `test_studies` runs it."""
    rows = {row[0]: row for row in result.rows}
    plain, delta, random = (rows[c.name] for c in (SUM, DELTA, RANDOM))
    assert delta[3].mean < plain[3].mean / 2 and delta[7].mean < plain[7].mean / 2
    assert random[3].mean > 3 * delta[3].mean
    assert plain[7].mean > 1.3 * plain[3].mean  # more overwriting than the published evaluation has
    assert any("delta below sum at every S; here it holds" in note for note in result.notes)

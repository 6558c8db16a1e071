"""Norms, ranks, gates and recall against a loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.errors import ShapeError
from hecate.microscope import MemoryView, Recall
from hecate.microscope.view import effective_rank
from hecate.rule import Gates
from tests.memories import config_of
from tests.microscope.common import asked_of, second_half

LENGTH = 10


def delta_states(asked, row, head):
    """The gated delta rule by hand: the memory before the first token and after each."""
    k, v, lr, retain = (item[row, :, head].numpy() for item in (asked.k, asked.v, asked.gates.lr, asked.gates.retain))
    memory = asked.initial["weight"][head].numpy()
    states = [memory]
    for t in range(len(lr)):
        memory = retain[t] * memory + lr[t] * np.outer(v[t] - memory @ k[t], k[t])
        states.append(memory)
    return states, k, v


@pytest.fixture
def asked():
    return asked_of(config_of(retention="decay"), length=LENGTH, d=3, width=4)


@pytest.mark.spec("SCOPE-RANK-D1", "SCOPE-RECALL-D1", "SCOPE-VIEW-D1")
def test_against_a_loop(asked):
    view = MemoryView("m", [asked])
    assert view.times.tolist() == [*range(LENGTH + 1)]
    for row in range(2):
        for head in range(2):
            states, k, v = delta_states(asked, row, head)
            for t, memory in enumerate(states):
                norm, rank = (float(item["weight"][row, head, t]) for item in (view.norms, view.ranks))
                assert norm == pytest.approx(np.linalg.norm(memory), rel=1e-12)
                share = np.linalg.svd(memory)[1]
                share = share / share.sum()
                expected = np.exp(-(share * np.log(share)).sum())
                assert rank == pytest.approx(expected, rel=1e-10)
                for s in range(LENGTH):
                    found = [float(item[row, head, t, s]) for item in view.recall[1:]]
                    if s >= t:
                        assert np.isnan(found).all()
                        continue
                    answer = memory @ k[s]
                    cosines = v[:t] @ answer / np.linalg.norm(v[:t], axis=1)
                    cosines = cosines / np.linalg.norm(answer)
                    error = np.linalg.norm(answer - v[s]) / np.linalg.norm(v[s])
                    other = np.delete(cosines, s)
                    chance = other.mean() if t > 1 else 0.0
                    np.testing.assert_allclose(found, [cosines[s], error, chance], atol=1e-12)


@pytest.mark.spec("SCOPE-VIEW-D1")
@pytest.mark.parametrize("points", [1, 3, 7, 64])
def test_any_number_of_moments_shows_the_same(asked, points):
    whole, some = MemoryView("m", [asked]), MemoryView("m", [asked], points)
    assert len(some.times) == min(points, LENGTH) + 1 and some.times[-1] == LENGTH
    torch.testing.assert_close(some.norms["weight"], whole.norms["weight"][..., some.times])
    torch.testing.assert_close(some.recall.cosine, whole.recall.cosine[:, :, some.times], equal_nan=True)


def test_scans_in_a_row(asked):
    """A state that goes on, and one that does not: moments count tokens through both."""
    rest, state = second_half(asked)
    first = asked.between(0, LENGTH // 2 + 1, None)
    whole, split = MemoryView("m", [asked]), MemoryView("m", [first, rest])
    torch.testing.assert_close(split.norms["weight"], whole.norms["weight"])
    torch.testing.assert_close(split.recall.cosine, whole.recall.cosine, equal_nan=True)
    torch.testing.assert_close(split.answers, whole.answers)
    cut = LENGTH // 2 + 1
    assert not split.attention.map[..., cut:, :cut].any()
    torch.testing.assert_close(split.attention.map[..., cut:, cut:], whole.attention.map[..., cut:, cut:])
    assert state is rest.state


@pytest.mark.spec("SCOPE-RECALL-D1")
@pytest.mark.parametrize(
    "fields",
    [
        {"feature_map": "elu", "normalizer": "sum", "bias": "dot"},
        {"feature_map": "cosformer", "key_norm": "l2"},
        {"query_scale": "key_dim", "chunk": 4, "commit": "chunk"},
        {"structure": "mlp", "algorithm": "momentum"},
        {"structure": "vector"},
        {"retention": "kl"},
    ],
    ids=str,
)
def test_what_is_recalled_is_what_a_scan_would_read(fields):
    """At the last token the query k gives the answer to its own key."""
    asked = asked_of(config_of(**fields), length=6, d=3, width=3)
    asked = asked._replace(q=asked.k)
    view = MemoryView("m", [asked])
    scale = 3**0.5 if asked.config.query_scale == "key_dim" else 1.0
    error = (scale * view.answers - asked.v).norm(dim=-1) / asked.v.norm(dim=-1)
    times = torch.arange(6)
    torch.testing.assert_close(view.recall.error[:, :, times + 1, times], error.transpose(1, 2))


@pytest.mark.spec("SCOPE-VIEW-D1", "RET-MIRROR-D2")
def test_norms_and_ranks_are_those_of_the_weights():
    """Not of the logits that kl carries: its rows are distributions over two features."""
    asked = asked_of(config_of(retention="kl"), length=4, d=2, width=3)
    view = MemoryView("m", [asked], 1)
    for norm, state in zip(view.norms["weight"].unbind(-1), (None, asked.scan()[1]), strict=True):
        own = asked.between(0, 0, None).scan()[1] if state is None else state
        rows = own.memory["weight"].softmax(-1)
        torch.testing.assert_close(norm, rows.flatten(2).norm(dim=-1))
    shares = torch.linalg.svdvals(rows)
    shares = shares / shares.sum(-1, keepdim=True)
    expected = torch.special.entr(shares).sum(-1).exp()
    torch.testing.assert_close(view.ranks["weight"][..., -1], expected)


def test_gates_are_filled_in():
    config = config_of(retention={"kind": "decay", "retain": 0.9}, algorithm="momentum")
    asked = asked_of(config, length=4)
    view = MemoryView("m", [asked._replace(gates=Gates(lr=0.25))])
    filled = {name: gate.unique().tolist() for name, gate in view.gates.items()}
    assert filled == {"lr": [0.25], "retain": [0.9], "momentum": [0.9]}
    assert set(MemoryView("m", [asked_of(config_of())]).gates) == {"lr"}


@pytest.mark.spec("SCOPE-RANK-D1")
def test_effective_rank():
    values = torch.tensor([[2.0, 2.0, 2.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    torch.testing.assert_close(effective_rank(values), torch.tensor([3.0, 1.0, 0.0, 2.0]))


def test_curves_by_age():
    """Ages 0, 1, 2-3 and 4-7 make bins; two moments of one head."""
    nan = torch.nan
    cosine = torch.tensor([[[[1.0, 3.0, nan, nan, nan], [2.0, 4.0, 6.0, 8.0, 10.0]]]])
    recall = Recall(torch.tensor([2, 5]), cosine, 2 * cosine, 0 * cosine)
    curve = recall.by_age()
    # After 2 tokens: ages 1, 0 of the first two; after 5: 4, 3, 2, 1, 0.
    assert curve.ages.tolist() == [0.0, 1.0, 2.5, 4.0]
    assert curve.means.tolist() == [[6.5, 4.5, 5.0, 2.0]]
    assert recall.by_age("error").means.tolist() == [[13.0, 9.0, 10.0, 4.0]]
    with pytest.raises(ShapeError, match="nothing was written"):
        Recall(recall.times, nan * cosine, cosine, cosine).by_age()

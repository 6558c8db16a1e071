"""Tasks that train: words and their chance, layers that follow and that cannot, cheats and the dead, kept cells."""

from __future__ import annotations

import sys
from itertools import permutations

import pytest
import torch
from torch import nn

from hecate.errors import ConfigError
from hecate.gym import Contender, StateTracking, run

SHORT = StateTracking(rows=4, length=8, steps=2, rates=(0.01,))
REFLECTS = "{kind: delta, algorithm: {kind: gd, lr: 2}}"


pytestmark = pytest.mark.usefixtures("float32")


class Dead(nn.Module):
    def __init__(self, width, generator):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width**0.5)

    def forward(self, x, state, **masks):
        return 0 * x @ self.weight, state


class Sees(Dead):
    """The next token."""

    def forward(self, x, state, **masks):
        return x.roll(-1, 1) @ self.weight, state


class Sums(Dead):
    """All tokens, in its state."""

    def forward(self, x, state, **masks):
        sums = (x @ self.weight).cumsum(1) + (0 if state is None else state)
        return sums, sums[:, -1:]


class Hides(Sums):
    """The same, in itself, where the state belongs."""

    held = None

    def forward(self, x, state, **masks):
        y, held = super().forward(x, self.held)
        self.held = held.detach() if x.shape[0] == 2 else None
        return y, state


class LeaksInLongCalls(Sums):
    def forward(self, x, state, **masks):
        y, state = super().forward(x, state)
        return (y if x.shape[1] < 16 else y + x.roll(-1, 1)), state


@pytest.mark.spec("GYM-TRAIN-D1")
def test_words_are_asked_for_the_product_of_each_prefix():
    task = StateTracking(rows=2, degree=3, length=5, times=2)
    stream, group = task.stream(1), list(permutations(range(3)))
    assert not stream.written.any() and task.chance() == 1 / 6 and stream.keys.shape == (2, 10, 6)
    for letters, products in zip(stream.keys.argmax(-1).tolist(), stream.values.argmax(-1).tolist(), strict=True):
        at = (0, 1, 2)
        for letter, product in zip(letters, products, strict=True):
            at = tuple(group[letter][i] for i in at)
            assert group[product] == at
    spans = {name: part.nonzero().flatten().tolist() for name, part in stream.parts.items()}
    assert spans == {"10 tokens": [5, 6, 7, 8, 9], "5 tokens": [2, 3, 4]}


@pytest.mark.spec("GYM-TRAIN-D1")
def test_a_reflection_follows_signs_at_twice_the_length_and_a_write_below_one_does_not():
    task = StateTracking(rows=32, width=16, degree=2, length=12, times=2, steps=60, rates=(0.01,))
    turns, shrinks = run([REFLECTS, "delta"], [task], seeds=2, reference="delta")
    assert turns.verdict == "better" and min(turns.scores) > 0.98 and turns.parts["24 tokens"] > 0.98
    assert max(shrinks.scores) < 0.8 and turns.setting == {"rate": 0.01} and turns.state == shrinks.state == 16 * 4


@pytest.mark.parametrize(
    ("layer", "verdict", "reason"),
    [
        (Dead, "no better than chance", "chance is 0.167"),
        (Sums, "no better than chance", "chance is 0.167"),
        (Sees, "cheats", "later tokens, or on more than the state: token 0 differs"),
        (Hides, "cheats", "later tokens, or on more than the state"),
        (LeaksInLongCalls, "cheats", "later tokens"),
    ],
)
@pytest.mark.spec("GYM-FLAG-D1")
def test_planted_cheats_and_dead_layers_are_told(layer, verdict, reason):
    (planted,) = run([layer], [SHORT], seeds=1)
    assert planted.verdict == verdict and reason in planted.reason


@pytest.mark.spec("GYM-RUN-D1")
def test_what_is_trained_is_kept_and_global_random_numbers_are_left_alone(tmp_path, monkeypatch):
    before = torch.get_rng_state()
    first = run(["delta_product", "ridge"], [SHORT], seeds=2, out=tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    monkeypatch.setattr("hecate.gym.training.trained", None)
    again = run(["delta_product", "ridge"], [SHORT], seeds=2, out=tmp_path)
    assert repr(again) == repr(first)  # NaN is not NaN, field by field, from Python 3.13 on
    assert (first[1].verdict, first[1].reason) == ("not run", "it has no layer that could be trained")


@pytest.mark.spec("GYM-NAME-D1")
def test_who_cannot_enter_is_told_where_it_was_named_and_left_out_elsewhere(monkeypatch):
    (named,) = run(["delta_product"], ["linear"], quick=True)
    assert named.verdict == "not run" and "one pair a token" in named.reason
    with pytest.raises(ConfigError, match="set writes to 1"):
        run(["delta + delta_product"], ["linear"])
    known = {name: (lambda name=name: Contender(name, None, layer=Dead)) for name in ("delta", "gated_delta")}
    monkeypatch.setattr(sys.modules["hecate.gym.run"], "contenders", lambda: known)
    assert [row.contender for row in run([], ["linear"], quick=True)] == ["gated_delta"]  # the reference
    assert [row.contender for row in run([], [SHORT], quick=True)] == ["delta", "gated_delta"]


def test_training_that_diverges_is_told():
    class Explodes(Sums):
        def forward(self, x, state, **masks):
            y, state = super().forward(x, state)
            return y / 0, state

    (row,) = run([Explodes], [SHORT], seeds=1)
    assert (row.verdict, row.reason) == ("diverged", "with every setting")


@pytest.mark.parametrize("width", [4, 20, 34])
def test_widths_that_four_heads_with_rotary_channels_cannot_share_are_refused(width):
    with pytest.raises(ConfigError, match="width"):
        StateTracking(width=width)

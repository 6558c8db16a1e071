"""Contenders against references that are written apart, in float64 where that is possible."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig, memory_scan, named_rule
from hecate.errors import ConfigError
from hecate.gym import contender_of, contenders
from hecate.gym.contenders import Rule, Together, numbers
from hecate.gym.peers import Attention, GatedDelta, Ridge
from hecate.gym.run import unlike

B, T, D = 2, 40, 4
KNOWN = contenders()


@pytest.fixture
def stream() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    keys = torch.nn.functional.normalize(torch.randn(B, T, D, generator=g), dim=-1)
    return keys, torch.randn(B, T, D, generator=g)


def in_pieces(memory, keys, values, *cuts):
    answers, state = [], None
    for start, end in zip((0, *cuts), (*cuts, keys.shape[1]), strict=True):
        found, state = memory(keys[:, start:end], values[:, start:end], state)
        answers.append(found)
    return torch.cat(answers, 1), state


def test_attention_is_the_softmax_of_what_lies_ahead(stream, monkeypatch):
    monkeypatch.setattr("hecate.gym.peers.BLOCK", 7)
    keys, values = stream
    for window in (None, 5):
        memory = Attention(3.0, window)
        wanted = torch.zeros_like(values)
        for t in range(1, T):
            past = slice(0 if window is None else max(0, t - window), t)
            weights = (3.0 * keys[:, past] @ keys[:, t, :, None]).softmax(1)
            wanted[:, t] = (weights * values[:, past]).sum(1)
        found, state = in_pieces(memory, keys, values, 11, 30)
        assert (found - wanted).abs().max() < 1e-12
        past = slice(0 if window is None else T - window, T)
        weights = (3.0 * keys[:, :3] @ keys[:, past].mT).softmax(-1)
        assert (memory(keys[:, :3], None, state)[0] - weights @ values[:, past]).abs().max() < 1e-12
        assert numbers(state, B) == 2 * D * (T if window is None else window)


@pytest.mark.parametrize("retain", [1.0, 0.9])
def test_ridge_is_least_squares_ahead_of_every_token(stream, retain, monkeypatch):
    monkeypatch.setattr("hecate.gym.peers.BLOCK", 28)  # blocks of 7
    keys, values = stream
    memory = Ridge(0.1, retain)
    wanted = np.zeros((B, T, D))
    for row in range(B):
        k, v = keys[row].numpy(), values[row].numpy()
        for t in range(T):
            weight = retain ** np.arange(t - 1.0, -1, -1)
            gram = (k[:t].T * weight) @ k[:t] + retain**t * 0.1 * np.eye(D)
            wanted[row, t] = np.linalg.solve(gram, (k[:t].T * weight) @ v[:t]).T @ k[t]
    found, state = in_pieces(memory, keys, values, 9, 10)
    assert np.abs(found.numpy() - wanted).max() < 1e-9
    asked = memory(keys[:, :2], None, state)[0].numpy()
    weight = retain ** np.arange(T - 1.0, -1, -1)
    gram = (keys[0].numpy().T * weight) @ keys[0].numpy() + retain**T * 0.1 * np.eye(D)
    last = np.linalg.solve(gram, (keys[0].numpy().T * weight) @ values[0].numpy())
    assert np.abs(asked[0] - keys[0, :2].numpy() @ last).max() < 1e-9


# The import of transformers alone takes longer than all of this.
@pytest.mark.parametrize("name", ["fla", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_published_kernels_are_the_gated_delta_rule(name, stream):
    contender = KNOWN[name]()
    if contender.missing:
        pytest.skip(contender.missing)
    keys, values = (item.float() for item in stream)
    peer = contender.build({"lr": 0.4, "retain": 0.9}, 0)
    assert isinstance(peer, GatedDelta)
    ours = contender_of(
        "{kind: gated_delta, algorithm: {kind: gd, lr: 0.4}, retention: {kind: decay, retain: 0.9}}", KNOWN
    )
    theirs, state = in_pieces(peer, keys, values, 13)
    found, own = in_pieces(ours.build({}, 0), keys, values, 13)
    assert (theirs - found).abs().max() < 1e-5 * found.abs().max() * D  # float32
    assert (peer(keys, None, state)[0] - ours.build({}, 0)(keys, None, own)[0]).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_titans_pytorch_is_titans_with_frozen_gradients(stream, monkeypatch):
    contender = KNOWN["titans-pytorch"]()
    if contender.missing:
        pytest.skip(contender.missing)
    monkeypatch.setattr("hecate.gym.peers.BLOCK", 32)  # blocks of 8
    keys, values = stream
    peer = contender.build({"lr": 0.05, "momentum": 0.8}, 0)
    found, state = in_pieces(peer, keys, values, 8, 13)
    weights = peer._start(1, torch.float64)[0].values()
    start = {name: item[0].mT.unsqueeze(0) for name, item in zip(("w1", "w2"), weights, strict=True)}
    config = MemoryConfig.model_validate({
        "structure": {"kind": "mlp", "layers": 2, "expansion": 2, "activation": "gelu"},
        "algorithm": {"kind": "momentum", "lr": 0.05, "momentum": 0.8}, "chunk": 8, "read": "before",
        "state_dtype": "float64",
    })  # fmt: skip
    wanted, _ = memory_scan(config, keys.unsqueeze(2), keys.unsqueeze(2), values.unsqueeze(2), initial=start)
    assert (found - wanted.squeeze(2)).abs().max() < 1e-6 * wanted.abs().max()
    assert numbers(state, B) == 3 * 2 * D * 2 * D


def test_levels_and_heads(stream):
    keys, values = stream
    slow, fast = Rule(named_rule("delta"), 0), Rule(named_rule("gated_delta"), 0)
    first, _ = slow(keys, values, None)
    second, _ = fast(keys, values - first, None)
    assert torch.equal(Together([slow, fast], True)(keys, values, None)[0], first + second)
    mean = (first + fast(keys, values, None)[0]) / 2
    found, state = in_pieces(Together([slow, fast], False), keys, values, 6)
    assert (found - mean).abs().max() < 1e-6 and numbers(state, B) == 2 * D * D


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "transformers"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("GYM-CALL-D1")
def test_every_contender_answers_token_by_token_what_it_does_at_once(name, stream):
    contender = KNOWN[name]()
    if contender.missing:
        pytest.skip(contender.missing)
    if contender.build is None:
        pytest.skip("its layer is trained")
    memory = contender.build(contender.settings[0], 1)
    assert unlike(memory, *(item[:, :10].float() for item in stream), name) == ""
    assert len(contender.settings) == 8


@pytest.mark.spec("GYM-NAME-D1")
def test_names(tmp_path):
    (tmp_path / "mine.yaml").write_text("kind: titans\nchunk: 4\n")
    by_file = contender_of(str(tmp_path / "mine.yaml"), KNOWN)
    assert by_file.facts["rules"][0]["chunk"] == 4 and by_file.settings[0]["retention.retain"] == 0.9999
    levels = contender_of("delta + {kind: delta, feature_map: elu}", KNOWN)
    assert len(levels.facts["rules"]) == 2 and levels.facts["levels"]
    assert not contender_of("delta|gated_delta", KNOWN).facts["levels"]
    assert contender_of("yaad", KNOWN).name == "yaad"
    function = contender_of(lambda keys, values, state: (keys, state), KNOWN)
    assert function.settings == ({},) and function.facts["source"]
    for given, said in (
        ("detla", "Did you mean 'delta'?"), ("delta+delta_product", "set writes to 1"), ("{kind: titan}", "titan"),
        ("nowhere.yaml", "nowhere.yaml"), ("no_such_module:f", "no_such_module"), ("json:nothing", "no memory called"),
        (3, "must be a name"), ("fractions:Fraction", "of classes only a torch.nn.Module is one"),
        ("torch.nn:Bilinear", "a layer is made of (width, generator), which fails here: missing a required"),
        (torch.nn.Linear(2, 2), "a memory is called with (keys, values, state), which fails here: too many"),
        (lambda keys: keys, "a memory is called with (keys, values, state), which fails here: too many"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(said)):
            contender_of(given, KNOWN)


def test_what_is_not_installed_says_how(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    lacking = [made().missing for made in contenders().values() if made().missing]
    assert len(lacking) == 3 and all("is not installed: pip install" in text for text in lacking)


def test_files_are_read_whatever_their_name_and_held_to_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a+b.yaml", "a|b.yml"):
        Path(name).write_text("kind: delta\n")
        assert contender_of(name, {}).facts["rules"] == contender_of("delta", {}).facts["rules"]
    Path("two.yaml").write_text("kind: delta_product\n")
    assert contender_of("two.yaml", {}).build is None

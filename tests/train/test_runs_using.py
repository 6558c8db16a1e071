"""What a trained model is used for without its data: texts it goes on with, and its loss on other ones."""

from __future__ import annotations

import json
import math
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from hecate.data import Bytes
from hecate.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.train import checkpoints, generate, open_model, open_run
from hecate.train.evaluate import Draws, likely, written
from hecate.train.trained import by_length, export_weights, import_weights, parse_lengths, source_of, tables

from .common import quiet_run, text_run, tiny
from .worlds import MODELS


@pytest.fixture(autouse=True)
def plain(float32):
    """As on the command line."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a text that is gone again."""
    torch.set_default_dtype(torch.float32)
    home = tmp_path_factory.mktemp("used")
    sizes = {"budget": {"seq_len": 16, "steps": 20}, "sample": {"prompt": "line ", "tokens": 3}}
    folder = text_run(home, model={"memory": "gated_delta"}, **sizes)
    (home / "text.txt").unlink()
    return folder


def seeds(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(n) for n in range(count)]


@pytest.mark.spec("TRAIN-GEN-D2")
@pytest.mark.parametrize(("top_k", "top_p"), [*product([None, 1, 3, 50], [None, 0.3, 0.7]), (None, 1e-9), (None, 1.0)])
def test_draws_are_of_the_likeliest(top_k, top_p):
    logits = np.random.default_rng(3).normal(size=12) * 2
    chances = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    order = np.argsort(-chances)
    kept = list(order[: top_k or 12])
    share = chances[kept] / chances[kept].sum()
    if top_p is not None:
        kept = kept[: next((n + 1 for n in range(len(kept)) if share[: n + 1].sum() >= top_p - 1e-12), len(kept))]
    wanted = np.zeros(12)
    wanted[kept] = chances[kept] / chances[kept].sum()
    found = likely(torch.from_numpy(logits), 0.7, top_k, top_p).numpy()
    np.testing.assert_allclose(found / found.sum(), wanted, atol=1e-12)


def test_logits_that_are_no_numbers_are_refused():
    for temperature in (0.0, 1.0):
        model = LanguageModel(
            LanguageModelConfig(vocab_size=8, d_model=8, layers=1, heads=1), generator=torch.Generator()
        )
        with torch.no_grad():
            model.norm.weight.fill_(math.nan)
        with pytest.raises(NonFiniteError, match="the logits are not finite"):
            next(generate(model, [1, 2], 3, temperature=temperature, generator=torch.Generator()))


@pytest.mark.spec("TRAIN-GEN-D2")
def test_the_least_temperature_and_share_leave_the_likeliest():
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0, 1.9])
    for shift in (-9.0, 0.0, 9.0):
        for how in ((1e-40,), (1e-300,), (1e-300, 2, 0.5), (0.7, None, 0.0), (0.7, 3, 0.0)):
            found = likely(logits + shift, *how)
            assert found[1] > 0 and found.count_nonzero() == 1


SHAPES = MODELS | {
    "attention": {"attention": {"kind": "attention"}},
    "mag": {"memory": "gated_delta", "attention": {"kind": "mag", "window": 8}},
    "chunked": {"memory": {"kind": "gated_delta", "chunk": 4}},
    "hope": {"self_reference": {"chunk": 4, "memory": {"retention": "decay"}}, "mlp_ratio": 0.0},
}


@pytest.mark.spec("TRAIN-GEN-D1")
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
@pytest.mark.parametrize("name", ["delta", "titans", "levels", "mlp", "attention", "mag", "chunked", "hope"])
def test_prompts_of_any_length_go_on_together_as_they_would_alone(name):
    torch.set_default_dtype(torch.float64)
    sizes = {"vocab_size": 24, "d_model": 16, "layers": 2, "heads": 2, "mlp_ratio": 1.0}
    config = LanguageModelConfig.model_validate(sizes | SHAPES[name])
    model = LanguageModel(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # so that texts differ
    prompts = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]]
    alone = [list(generate(model, p, 12, temperature=0.8, generator=g)) for p, g in zip(prompts, seeds(3), strict=True)]
    draws = Draws(model, prompts, seeds(3), temperature=0.8)
    assert [list(draws.row(n, 12)) for n in (2, 0, 1)] == [alone[n] for n in (2, 0, 1)]
    assert len({tuple(row) for row in alone}) == 3
    assert list(Draws(model, prompts, seeds(3), temperature=0.8).row(1, 5)) == alone[1][:5]


@pytest.mark.spec("TRAIN-GEN-D2")
def test_draws_of_nothing_are_refused():
    for how, said in (
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"), ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 0.0}, "top_p must be above 0"), ({"top_p": 1.5}, r"top_p must be in \[0, 1\]"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0"),
    ):  # fmt: skip
        model = LanguageModel(LanguageModelConfig(vocab_size=4, d_model=8, layers=1, heads=1))
        with pytest.raises(ConfigError, match=said):
            Draws(model, [[1]], seeds(1), **({"temperature": 1.0} | how))
        with pytest.raises(ConfigError, match="needs a prompt of at least one token"):
            Draws(model, [[1], []], seeds(2), temperature=1.0)
    with pytest.raises(ConfigError, match="tokens must be an integer >= 0, got -1"):
        generate(model, [1], -1, temperature=0.0, generator=torch.Generator())


@pytest.mark.spec("TRAIN-GEN-D3")
def test_a_text_ends_ahead_of_a_stop():
    for following, stop, shown in (
        ("abc END def", ["END"], "abc "),
        ("abc EN", ["END"], "abc EN"),
        ("aab", ["ab"], "a"),
        ("one\n\ntwo", ["\n\n", "two"], "one"),
        ("x two one", ["one", "two"], "x "),
        ("no stop", [], "no stop"),
        ("\u00e9\u00e8!", ["\u00e8"], "\u00e9"),
    ):
        tokens = Bytes()
        ids = [int(x) for x in tokens.encode([following])[0]]
        prompt = [int(x) for x in tokens.encode(["END: "])[0]]
        pieces = list(written(tokens, prompt, iter(ids), stop))
        assert "".join(pieces) == "END: " + shown
        assert len(pieces) > 3  # as they come
        for none in ("", "\udcff"):  # as a shell hands on a byte that is no UTF-8
            with pytest.raises(ConfigError, match="--stop must be a text of at least one character, in UTF-8"):
                list(written(tokens, prompt, iter(ids), [none]))


@pytest.mark.spec("TRAIN-OPEN-D1")
def test_a_model_is_opened_without_its_data(run, tmp_path):
    trained = open_model(run, "newest")
    assert trained.step == 20 and not trained.model.training and trained.device.type == "cpu"
    path = checkpoints(run / "checkpoints")[-1]
    own = open_model(path)
    assert all(torch.equal(a, b) for a, b in zip(own.model.parameters(), trained.model.parameters(), strict=True))
    with pytest.raises(DataError):
        open_run(run)
    with pytest.raises(CheckpointError, match="is not a run folder: it has no config.yaml"):
        open_model(tmp_path)


@pytest.mark.spec("TRAIN-OPEN-D1", "TRAIN-GEN-D1", "TRAIN-GEN-D2", "TRAIN-GEN-D3")
def test_generate_from_the_command_line(hecate, run, tmp_path):
    code, out, err = hecate("generate", run, "--tokens", 40, "--seed", 3)
    assert code == 0 and out.startswith("line ") and not err
    path = tmp_path / "elsewhere"
    shutil.copytree(checkpoints(run / "checkpoints")[-1], path / "step_00000020")
    assert hecate("generate", path / "step_00000020", "--seed", 3, "--tokens", 40)[0] == 0
    greedy = hecate("generate", run, "--tokens", 40, "--temperature", 0)[1]
    assert hecate("generate", run, "--tokens", 40, "--top-k", 1)[1] == greedy
    assert hecate("generate", run, "--tokens", 40, "--top-p", 1e-9)[1] == greedy
    both = hecate("generate", run, "--prompt", "line 1", "--prompt", "of", "--batch", 2, "--tokens", 9)[1]
    assert both.startswith("--- 1\nline 1") and [f"--- {n}\n" in both for n in (2, 3, 4)] == [True] * 3
    whole = greedy[len("line ") : -1]
    cut = whole[4:6]
    stopped = hecate("generate", run, "--tokens", 40, "--temperature", 0, "--stop", cut)[1]
    assert stopped == "line " + whole[: whole.index(cut)] + "\n"
    code, _, err = hecate("generate", run, "--top-p", 0)
    assert code == 2 and "top_p must be above 0" in err


def by_hand(model, text: bytes, length: int, rows: int) -> tuple[float, float]:
    """Mean loss over whole windows of a text that share no label, and that of their second half."""
    ids = torch.tensor(list(text))
    available = (len(ids) - 1) // length
    starts = [n * available // rows * length for n in range(rows)]
    windows = torch.stack([ids[s : s + length + 1] for s in starts])
    with torch.no_grad():
        logits, _ = model(windows[:, :-1])
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")
    losses = losses.view(rows, length).double()
    return float(losses.mean()), float(losses[:, length // 2 :].mean())


@pytest.mark.spec("TRAIN-EVAL-D3")
def test_other_texts_and_longer_sequences_are_scored(run, tmp_path, hecate):
    trained = open_model(run)
    other = tmp_path / "other.txt"
    other.write_text("line 7 of 49, and line 8 of 64; " * 200)
    source = source_of(trained, other)
    found = by_length(trained, source, [16, 64, 512])
    assert [own.sequences for own in found] == [8, 2, 2]  # two batches of 4 x 16, 1 x 64 and 1 x 512
    for own in found:
        loss, late = by_hand(trained.model, other.read_bytes(), own.length, own.sequences)
        assert own.loss == pytest.approx(loss, abs=1e-5) and own.labels == own.length * own.sequences
        last = own.positions[-1]
        assert (last.first, last.last) == (own.length // 2, own.length - 1)
        assert last.loss == pytest.approx(late, abs=1e-5)
    (head, rows), (places, losses) = tables(trained, source, found)
    assert head[-1] == "bits per byte" and [row[0] for row in rows] == ["16", "64", "512"]
    assert rows[1][-1] == f"{found[1].loss / math.log(2):.4f}"
    assert places == ("tokens read", "loss at 16", "loss at 64", "loss at 512")
    assert losses[-1][:3] == ("256 to 511", "", "") and len(losses) == 10
    code, out, err = hecate("eval", run, "--data", other, "--lengths", "16,512")
    assert code == 0 and f"{found[0].loss:.4f}" in out and "256 to 511" in out, err


@pytest.mark.spec("TRAIN-EVAL-D3")
def test_lengths_and_data_that_do_not_fit_are_refused(run, tmp_path, hecate):
    assert parse_lengths("4k, 16,1K,16") == [16, 1024, 4096] and parse_lengths("1m") == [1 << 20]
    for text in ("", "0", "1.5k", "k", "-4", "4,,5", "9999m"):
        with pytest.raises(ConfigError, match="--lengths must be numbers of tokens such as 1k,4k,16k"):
            parse_lengths(text)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    code, _, err = hecate("eval", run, "--data", short, "--lengths", "64")
    assert code == 2 and "a window of seq_len=64 needs 65" in err
    code, _, err = hecate("eval", run, "--data", tmp_path / "gone")
    assert code == 2 and "no file or folder" in err
    quiet_run(tiny(budget={"steps": 1}), tmp_path / "task")
    code, _, err = hecate("eval", tmp_path / "task", "--lengths", "64")
    assert code == 2 and "data 'mqar' has sequences of length 8, got 64" in err
    code, _, err = hecate("eval", tmp_path / "task", "--data", short)
    assert code == 2 and "--data is for texts and tokens, and the run was trained on 'mqar'" in err


@pytest.mark.spec("TRAIN-OPEN-D1")
def test_tokens_are_continued_by_the_copy_of_their_tokenizer(tmp_path, hecate):
    pytest.importorskip("tokenizers")
    text = "".join(f"word {n % 7} and word {n % 5}. " for n in range(3000))
    (tmp_path / "a.txt").write_text(text)
    tokenizer, shards = tmp_path / "t.json", tmp_path / "shards"
    code, _, err = hecate("data", "train-tokenizer", tmp_path / "a.txt", "--vocab", 300, "--out", tokenizer)
    assert code == 0, err
    code, _, err = hecate("data", "tokenize", tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", shards)
    assert code == 0, err
    config = tiny(
        data={"kind": "tokens", "path": str(shards), "validation": 0.2}, budget={"seq_len": 16, "steps": 2},
        sample={"prompt": "word", "tokens": 2},
    )  # fmt: skip
    quiet_run(config, tmp_path / "run")
    code, out, err = hecate("eval", tmp_path / "run", "--data", shards, "--lengths", "16,64")
    assert code == 0 and "perplexity" in out, err
    one = export_weights(tmp_path / "run", "safetensors", tmp_path / "one")
    two = import_weights(one, tmp_path / "two")
    shutil.rmtree(shards)
    given = json.loads(tokenizer.read_text())
    tokenizer.unlink()
    for made in (tmp_path / "run", one, two):
        assert json.loads((made / "tokenizer.json").read_text()) == given
    code, out, err = hecate("generate", tmp_path / "run", "--prompt", "word 3 and", "--tokens", 6)
    assert code == 0 and out.startswith("word 3 and"), err
    assert Path(tmp_path / "run/checkpoints").is_dir()
    code, out, err = hecate("generate", two, "--prompt", "word 3 and", "--tokens", 6)
    assert code == 0 and out.startswith("word 3 and"), err

"""Training on token shards: windows, documents, rows that go on, and what a run of them reports."""

from __future__ import annotations

import math
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from typer.testing import CliRunner

from hecate.cli import app
from hecate.data import IGNORED, Batch, Copy, Loader, Text, Tokens
from hecate.data.shards import SIDECAR, TOKENIZER, file_sha256, read_sidecar
from hecate.data.tokenize import tokenize
from hecate.data.tokenizer import open_tokenizer, train_tokenizer
from hecate.errors import CheckpointError, ConfigError, DataError
from hecate.states import leaves
from hecate.train import Trainer, run_experiment
from hecate.train.checkpoint import load_checkpoint, save_checkpoint
from hecate.train.evaluate import evaluate, loss_by_position
from hecate.train.loggers import read_metrics
from hecate.train.state import Carried
from tests.data.corpora import bytes_folder, jsonl, texts
from tests.data.test_shards import documents_of, nanogpt
from tests.models.test_language_model import GATED, model_of, tokens_of
from tests.models.test_mixers import LEVELS, MIXERS
from tests.nn.layers import near
from tests.train.common import TINY_MODEL, same_bits, tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Reports have none: to draw them takes a second."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bytes_folder(tmp_path_factory.mktemp("tokens"), texts(120))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Shards of a tokenizer of 300 tokens."""
    pytest.importorskip("tokenizers")
    where = tmp_path_factory.mktemp("words")
    (where / "t.json").write_text(train_tokenizer(iter(texts(100)), 300))
    jsonl(where / "a.jsonl", texts(200))
    tokenize([str(where / "a.jsonl")], where / "out", tokenizer=str(where / "t.json"), validation=0.2, shard_tokens=700)
    return where / "out"


def of(folder: Path, **fields) -> Tokens:
    return Tokens(path=str(folder), **fields)


@pytest.mark.spec("DATA-TOKENS-D1", "DATA-LOADER-D2", "DATA-CURSOR-D1")
def test_every_window_once_per_epoch_in_any_rows(folder):
    source, text = of(folder).load(), "".join(documents_of(folder, "train")).encode()
    windows, length, batch = (len(text) - 1) // 32, 32, 12
    seen, whole = [], Loader(source, seed=3, batch_size=batch, seq_len=length)
    halves = [Loader(source, seed=3, batch_size=batch, seq_len=length, rows=range(a, a + 6)) for a in (0, 6)]
    for _ in range(-(-windows // batch)):
        found = whole.next()
        parts = [half.next() for half in halves]
        for name in Batch._fields:
            assert torch.equal(getattr(found, name), torch.cat([getattr(part, name) for part in parts]))
        seen += [bytes(row) for row in found.tokens.tolist()]
    assert sorted(seen[:windows]) == sorted(text[w * length : (w + 1) * length] for w in range(windows))
    again = Loader(source, seed=3, batch_size=batch, seq_len=length, rows=range(3, 5))
    again.load_state_dict(halves[0].state_dict() | {"step": 2})
    assert torch.equal(again.next().tokens, source.train_batch(3, 2, batch, length).tokens[3:5])
    with pytest.raises(DataError, match="consecutive ones of a batch of 12"):
        Loader(source, seed=3, batch_size=batch, seq_len=length, rows=range(6, 13))


@pytest.mark.spec("DATA-LOADER-D2")
def test_rows_of_every_source(folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    for config, length in ((Copy(symbols=3), 6), (Text(paths=[str(tmp_path)]), 9), (of(folder, state="carry"), 16)):
        source = config.load()
        whole, part = (source.train_batch(1, 4, 8, length, rows) for rows in (None, range(2, 7)))
        for name in Batch._fields:
            own = getattr(whole, name)
            assert own is getattr(part, name) or torch.equal(own[2:7], getattr(part, name))


@pytest.mark.spec("DATA-TOKENS-D2")
def test_documents(folder):
    text = documents_of(folder, "train")
    starts = np.cumsum([0, *(len(d.encode()) for d in text)])
    found = {how: of(folder, documents=how).load() for how in ("reset", "carry", "ignore")}
    batches = {how: source.train_batch(0, 0, 16, 48) for how, source in found.items()}
    joined, borders = "".join(text).encode(), 0
    plain = batches["ignore"]
    for row in range(16):
        at = joined.find(bytes(plain.tokens[row].tolist() + plain.targets[row, -1:].tolist()))
        own = set((starts - at).tolist())
        for t in range(48):
            assert bool(batches["reset"].resets[row, t]) == (t in own)
            crossing = t + 1 in own
            borders += crossing
            for how in ("reset", "carry"):
                assert batches[how].targets[row, t] == (IGNORED if crossing else plain.targets[row, t])
    assert borders > 5 and plain.resets is None and batches["carry"].resets is None
    assert len({source.fingerprint for source in found.values()}) == 3


PACKED = {"plain": {"memory": GATED}, "conv": {"memory": GATED, "conv_kernel": 3}} | {
    name: fields for name, (fields, *_) in MIXERS.items()
}
PACKED["levels of chunks"] = {"levels": [LEVELS[0], LEVELS[1] | {"restart": 6}]}


@pytest.mark.spec("DATA-TOKENS-D2")
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_window_is_its_documents_alone(name):
    """Memory, convolution, attention, levels: logits, loss and the state that goes on."""
    model, tokens = model_of(**PACKED[name]), tokens_of(2)
    cuts = [[0, 2, 3, 9], [0, 5, 9]]
    resets = torch.zeros(2, 9, dtype=torch.bool)
    targets = tokens.roll(-1, 1)
    for row, places in enumerate(cuts):
        resets[row, places[:-1]] = True
        targets[row, [p - 1 for p in places[1:]]] = IGNORED
    packed, state = model(tokens, reset_mask=resets)
    alone, losses = [], []
    for row, places in enumerate(cuts):
        parts = [model(tokens[row : row + 1, a:b]) for a, b in pairwise(places)]
        alone.append(torch.cat([logits for logits, _ in parts], 1))
        for (logits, _), (a, b) in zip(parts, pairwise(places), strict=True):
            if b - a > 1:
                losses.append(cross_entropy(logits[0, :-1], tokens[row, a + 1 : b], reduction="sum"))
    near(packed, torch.cat(alone))
    count = int((targets != IGNORED).sum())
    loss = cross_entropy(packed.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    near(loss, sum(losses) / count)
    more = tokens_of(2, seed=5)[:, :4]
    last = [model(tokens[row : row + 1, places[-2] :])[1] for row, places in enumerate(cuts)]
    near(model(more, state)[0], torch.cat([model(more[r : r + 1], last[r])[0] for r in range(2)]))


@pytest.mark.spec("DATA-TOKENS-D3")
def test_rows_go_on_with_their_state(folder):
    """Against a loop that calls the model by hand: the state of each row, cut off, and new where a lane begins."""
    config = tiny(data={"kind": "tokens", "path": str(folder), "state": "carry"}, budget={"seq_len": 16})
    trainer, other = Trainer(config), Trainer(config)
    windows = (len(trainer.source.train) - 1) // 16
    lane, state, before = windows // 4, None, None
    for step in range(6):
        batch = other.loader.next()
        if step:
            known = before.targets[:, -1] != IGNORED
            assert torch.equal(before.targets[known, -1], batch.tokens[known, 0])  # goes on where it ended
        assert bool(batch.resets[:, 0].all()) == (step == 0)
        logits, state = other.model(batch.tokens, *([] if state is None else [state]), reset_mask=batch.resets)
        loss = cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED)
        assert trainer.train_step().loss == float(loss.detach())
        other.model.load_state_dict(trainer.model.state_dict())
        state = tree_map_only(torch.Tensor, torch.Tensor.detach, state)
        before = batch
    assert other.source.train_batch(0, lane, 4, 16).resets[:, 0].all()  # the next epoch
    fresh = Trainer(tiny(data={"kind": "tokens", "path": str(folder)}, budget={"seq_len": 16}))
    assert fresh.carried.tensors() == {} and not fresh.source.carries


class Spiral(torch.nn.Module):
    """A model of a user's, whose state is complex."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.into, self.turn = torch.nn.Embedding(size, 4), torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.out = torch.nn.Linear(4, size)

    def forward(self, tokens, state=None, **_):
        states = [torch.zeros(len(tokens), 4, dtype=torch.complex64) if state is None else state]
        for x in self.into(tokens).unbind(1):
            states.append(0.5 * self.turn * states[-1] + x)
        return self.out(torch.stack(states[1:], 1).real), states[-1]


@pytest.mark.spec("DATA-TOKENS-D3")
def test_gradients_end_with_the_batch_in_a_complex_state(folder):
    torch.set_default_dtype(torch.float32)
    config = tiny(data={"kind": "tokens", "path": str(folder), "state": "carry"}, budget={"seq_len": 16})
    trainer = Trainer(config, model=Spiral(config.data.vocabulary()))
    assert all(math.isfinite(trainer.train_step().loss) for _ in range(3))


CARRYING = {
    "memory": {},
    "levels": {"levels": LEVELS, "conv_kernel": 4},
    "mag": {"attention": {"window": 8}},
    "mac": {"attention": {"kind": "mac", "segment": 8}},
    "self": {"self_reference": {}, "conv_kernel": 4},
}


@pytest.mark.spec("TRAIN-CARRY-D1")
@pytest.mark.parametrize("name", CARRYING)
def test_a_resumed_run_goes_on_with_the_bits_of_one_that_never_stopped(folder, tmp_path, name):
    torch.set_default_dtype(torch.float32)
    data = {"kind": "tokens", "path": str(folder), "state": "carry", "documents": "carry"}
    config = tiny(data=data, budget={"seq_len": 12}, model=CARRYING[name])
    whole = Trainer(config)
    losses = [whole.train_step().loss for _ in range(7)]
    first = Trainer(config)
    for _ in range(4):
        first.train_step()
    path = save_checkpoint(tmp_path, 4, first.checkpoint())
    saved = load_checkpoint(path)
    assert any(key.startswith("carried/") for key in saved.tensors)
    second = Trainer(config)
    second.restore(saved, str(path))
    again = [second.train_step().loss for _ in range(3)]
    assert again == losses[4:]
    assert same_bits(whole.checkpoint().tensors, second.checkpoint().tensors)
    assert same_bits(saved.tensors, load_checkpoint(path).tensors)  # nothing stepped on the caller's


@pytest.mark.spec("TRAIN-CARRY-D1")
def test_carried_states_by_rows(folder):
    """A step in micro-batches, and in other micro-batches or rows after a checkpoint."""
    config = tiny(data={"kind": "tokens", "path": str(folder), "state": "carry"}, budget={"seq_len": 12})
    model = Trainer(config).model
    tokens = tokens_of(4, seed=1)[:, :9]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        _, whole = model(tokens, reset_mask=mask)
        one, two = Carried(), Carried()
        one.take(whole)
        two.take(*(model(tokens[a : a + 2], reset_mask=mask[a : a + 2])[1] for a in (0, 2)))
        same = one.tensors()
        near(two.tensors(), same)
        part = Carried()
        part.load(same, model, range(1, 3), CPU, "x", micros=2)
        near(part.tensors(), {name: leaf[1:3] for name, leaf in same.items()})
        y = model(tokens, whole, reset_mask=mask)[0]
        held = [leaf for micro in range(2) for leaf in leaves(part.arguments(micro)).values()]
        assert len({leaf.untyped_storage().data_ptr() for leaf in held}) == len(held)  # aligned as in a new run
        for micro in range(2):
            row = slice(micro + 1, micro + 2)
            near(model(tokens[row], *part.arguments(micro), reset_mask=mask[row])[0], y[row])
    first = next(iter(same))
    for damaged, message in (
        ({name: x for name, x in same.items() if name != first}, "lacks carried state"),
        (same | {"carried/x": same[first]}, "has an unknown carried state 'x'"),
        (same | {first: same[first][:1]}, "which is not of 3 rows of this model"),
        ({}, "lacks carried state .*data.state=fresh"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Carried().load(damaged, model, range(1, 3), CPU, "x")


@pytest.mark.spec("DATA-TOKENS-D1")
def test_validation(folder, tmp_path):
    sizes = [len(text.encode()) for text in documents_of(folder, "train")]
    ends = np.cumsum(sizes)
    part = of(folder, validation=0.3).load()
    assert len(part.train) in ends and len(part.train) + len(part.validation) == ends[-1]
    assert len(part.train) >= 0.7 * ends[-1] > len(part.train) - max(sizes)
    own = of(folder).load()
    assert (len(own.train), len(own.validation)) == (ends[-1], sum(s.tokens for s in read_sidecar(folder).validation))
    other = bytes_folder(tmp_path, texts(20, seed=8), validation=0.0)
    assert len(of(folder, validation=str(other)).load().validation) == sum(len(t.encode()) for t in texts(20, seed=8))
    with pytest.raises(DataError, match=r"has no validation tokens; hold out some .* data.validation=0.01"):
        of(other).load()
    flat = torch.cat([b.tokens for b in own.validation_batches(4, 16, 100)]).flatten()
    held = "".join(documents_of(folder, "validation")).encode()
    assert bytes(flat.tolist()) == held[: len(flat)] and len(held) - len(flat) <= 16
    assert len(list(own.validation_batches(2, 16, 3))) == 3
    for value in (0.0, 1.0, ""):
        with pytest.raises(ConfigError, match="must be a share between 0 and 1"):
            of(folder, validation=value)


@pytest.mark.spec("DATA-TOKENS-D4", "DATA-TOKENS-D5")
def test_bits_per_byte_are_exact(words, folder):
    """The loss in bits over the bytes of the text that the labels spell, however it was cut into tokens."""
    source, model = of(words).load(), model_of(vocab_size=300)
    assert source.metric == "bits_per_byte"
    tokenizer = open_tokenizer(words / "tokenizer.json")
    end = tokenizer.end
    tokens = source.validation.read(0, 500)
    cuts = np.flatnonzero(tokens == end) + 1
    nats = size = count = 0
    batches = []
    for a, b in pairwise([0, *cuts[:6].tolist()]):
        row = torch.from_numpy(tokens[a:b])[None]
        batches.append(Batch(row[:, :-1], row[:, 1:]))
        size += len(tokenizer.decode(row[0, 1:-1].tolist()).encode())
        logits = model(row[:, :-1])[0].detach()
        nats += float(cross_entropy(logits[0].float(), row[0, 1:], reduction="sum"))
        count += b - a - 1
    score = evaluate(model, batches, CPU, source.lengths)
    assert score.labels == count
    assert score.value("bits_per_byte") == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    some = list(source.validation_batches(4, 16, 5))
    labels = torch.cat([b.targets[b.targets != IGNORED] for b in some])
    found = source.baselines(4, 16, 5)
    assert found["uniform"] == pytest.approx(math.log2(300) * len(labels) / float(source.lengths[labels].sum()))
    assert 0 < found["unigram"] < found["uniform"]
    plain = of(folder).load()
    same = evaluate(model_of(vocab_size=256), plain.validation_batches(4, 16, 2), CPU, plain.lengths)
    assert same.bytes_per_label == 1 and plain.baselines(4, 16, 2)["uniform"] == pytest.approx(8)
    assert same.value("bits_per_byte") == same.loss / math.log(2)
    assert same.value("perplexity") == math.exp(same.loss)


@pytest.mark.spec("DATA-TOKENS-D1", "DATA-SHARD-D4")
def test_nanogpt_folders(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50, 3000)
    for name, part in (("x_train_0", ids[:1500]), ("x_train_1", ids[1500:2500]), ("x_val_0", ids[2500:])):
        nanogpt(tmp_path / f"{name}.bin", part)
    fields = {"vocab_size": 50, "documents": "ignore"}
    source = of(tmp_path, **fields).load()
    assert np.array_equal(source.train.read(0, 2500), ids[:2500]) and len(source.validation) == 500
    assert source.metric == "perplexity" and source.baselines(2, 16, 2)["uniform"] == pytest.approx(50)
    file = of(tmp_path / "x_train_0.bin", validation=0.1, **fields).load()
    assert (len(file.train), len(file.validation)) == (1350, 150)
    other = of(tmp_path / "x_train_0.bin", validation=str(tmp_path / "x_val_0.bin"), **fields).load()
    assert len(other.validation) == 500
    cases = [
        ({"documents": "ignore"}, ConfigError, r"the files of .* do not say how many tokens there are"),
        ({"vocab_size": 50}, DataError, "data.documents is 'reset', but nothing says where documents start"),
        ({"vocab_size": 20, "documents": "ignore"}, DataError, r"has token .* of 20: the shards are of another"),
    ]
    for wrong, kind, message in cases:
        with pytest.raises(kind, match=message):
            config = of(tmp_path, **wrong)
            config.vocabulary()
            config.load().train_batch(0, 0, 8, 64)
    config = tiny(data={"kind": "tokens", "path": str(tmp_path), **fields}, budget={"seq_len": 16, "steps": 3})
    result = run_experiment(config, tmp_path / "run")
    assert result.metric == "perplexity"
    assert result.score.value("perplexity") == pytest.approx(math.exp(result.score.loss))
    assert (tmp_path / "run" / "samples.txt").read_text().split("\n")[1].split()[0].isdigit()
    assert CliRunner().invoke(app, ["generate", str(tmp_path / "run")]).exit_code == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("made", ["nanogpt", "tokenizer", "starts"])
def test_a_pipe_among_the_files_is_not_waited_for(words, tmp_path, made):
    whole = shutil.copytree(words, tmp_path / "whole")
    nanogpt(tmp_path / "train.bin", np.arange(300) % 50)
    pipe = {"nanogpt": tmp_path / "val.bin", "tokenizer": whole / TOKENIZER, "starts": next(whole.glob("*starts*"))}
    pipe[made].unlink(missing_ok=True)
    os.mkfifo(pipe[made])
    with pytest.raises(DataError, match=f"cannot read .*{pipe[made].name}: it is a pipe or a device"):
        if made == "nanogpt":
            of(tmp_path, vocab_size=50, documents="ignore").load()
        of(whole).tokenizer()
        of(whole).load()
    with pytest.raises(DataError, match="it is a pipe or a device"):
        file_sha256(pipe[made])


def test_a_tokenizer_with_line_ends_of_windows_opens_with_its_shards(words, tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(20))
    given = tmp_path / "t.json"
    given.write_bytes((words / TOKENIZER).read_bytes().replace(b"\n", b"\r\n"))
    tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=str(given), validation=0.2)
    assert of(tmp_path / "out").tokenizer().sha256 == open_tokenizer(given).sha256


@pytest.mark.parametrize(("prompt", "told"), [
    ("def ", "sample.prompt 'def ' has token .*, and the model knows 50"), ("\ud83d", "is not UTF-8"), ("", None),
])  # fmt: skip
def test_a_prompt_that_no_sample_can_begin_with_is_told_before_training(words, tmp_path, prompt, told):
    tokenizers = pytest.importorskip("tokenizers")
    nanogpt(tmp_path / "x.bin", np.arange(900) % 50)
    spaced = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # of white space it makes no token
    spaced.save(str(tmp_path / "t.json"))
    file = words / TOKENIZER if told else tmp_path / "t.json"
    data = {"kind": "tokens", "path": str(tmp_path / "x.bin"), "documents": "ignore", "vocab_size": 50}
    data |= {"validation": 0.2, "tokenizer_file": str(file)}
    config = tiny(data=data, budget={"steps": 1, "seq_len": 8}, sample={"prompt": prompt, "tokens": 2})
    if told is None:
        assert run_experiment(config, tmp_path / "run").status == "finished"
        return
    with pytest.raises(DataError, match=told):
        run_experiment(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_folders_that_do_not_fit(folder, words, tmp_path):
    with pytest.raises(DataError, match="are of another tokenizer than those of"):
        of(words, validation=str(folder)).load()
    with pytest.raises(DataError, match="have a vocabulary of 300, data.vocab_size is 200"):
        of(words, vocab_size=200).load()
    assert of(words, vocab_size=320).load()._vocabulary == 320  # padded
    assert of(words).vocab_size == 300
    with pytest.raises(DataError, match=r"is not the tokenizer that the shards of .* were made with"):
        of(words, tokenizer_file="bytes").load()
    with pytest.raises(DataError, match=r"fewer than the 500 rows"):
        of(folder, state="carry").load().train_batch(0, 0, 500, 16)
    with pytest.raises(DataError, match=r"the training split has \d+ tokens, a window of seq_len=100000 needs"):
        of(folder).load().train_batch(0, 0, 1, 100_000)
    with pytest.raises(ConfigError, match=r"data.state: is 'carry', but model.attention.window is null"):
        tiny(data={"kind": "tokens", "path": str(folder), "state": "carry"}, model={"attention": {}})
    with pytest.raises(ConfigError, match=r"cannot read .*tokens.json"):
        tiny(data={"kind": "tokens", "path": str(tmp_path / "nothing")})


@pytest.mark.spec("DATA-LOADER-D1")
def test_a_cursor_of_other_data_is_refused(tmp_path):
    here = bytes_folder(tmp_path / "a", texts(60))
    config = tiny(data={"kind": "tokens", "path": str(here)}, budget={"seq_len": 16})
    trainer = Trainer(config)
    trainer.train_step()
    saved = trainer.checkpoint()
    there = bytes_folder(tmp_path / "b", texts(60, seed=1))
    here.rename(tmp_path / "old")
    there.rename(here)
    with pytest.raises(CheckpointError, match="the saved data cursor has fingerprint=.* the batches would differ"):
        Trainer(config).restore(saved, "x")


def test_a_config_is_enough_where_the_folder_is_not(folder, tmp_path):
    here = bytes_folder(tmp_path, texts(60))
    config = tiny(data={"kind": "tokens", "path": str(here)})
    saved = config.model_dump(mode="json")
    here.rename(tmp_path / "gone")
    assert type(config).model_validate(saved).data.vocabulary() == 256


@pytest.mark.spec("TRAIN-EVAL-D2")
def test_loss_by_position():
    model = model_of()
    tokens = tokens_of(3, seed=2).repeat(1, 5)[:, :40]
    targets = tokens.roll(-1, 1)
    targets[:, -1], targets[0, 3] = IGNORED, IGNORED
    resets = torch.zeros_like(tokens, dtype=torch.bool)
    resets[1, 13] = True
    batches = [Batch(tokens[:2], targets[:2], resets[:2]), Batch(tokens[2:], targets[2:])]
    logits = torch.cat([model(b.tokens, reset_mask=b.resets)[0] for b in batches]).detach().float()
    nats = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none").view(3, 40)
    places = torch.arange(40).repeat(3, 1)
    places[1, 13:] -= 13
    for piece in (64, 7):
        found = loss_by_position(model, batches, CPU, piece=piece)
        assert [(p.first, p.last) for p in found] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]
        for first, last, loss, labels in found:
            own = (places >= first) & (places <= last) & (targets != IGNORED)
            assert labels == int(own.sum()) and loss == pytest.approx(float(nats[own].mean()), abs=1e-5)


def test_a_run_on_token_shards(words, tmp_path):
    """From training to text: the report, the sample, `generate`, and a resumed run with equal records."""
    torch.set_default_dtype(torch.float32)
    data = {"kind": "tokens", "path": str(words), "state": "carry"}
    budget = {"seq_len": 32, "steps": 6, "eval_every": 3, "checkpoint_every": 3}
    config = tiny(data=data, budget=budget, model=TINY_MODEL, sample={"prompt": "one", "tokens": 5})
    result = run_experiment(config, tmp_path / "run")
    assert result.metric == "bits_per_byte" and set(result.baselines) == {"uniform", "unigram"}
    assert "training tokens" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "samples.txt").read_text().startswith("--- step 6\none")
    found = CliRunner().invoke(app, ["generate", str(tmp_path / "run"), "--prompt", "two", "--tokens", "4"])
    assert found.exit_code == 0 and found.output.startswith("two")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000006")
    run_experiment(config, tmp_path / "again", resume=True)
    losses = [[(r["step"], r["loss"]) for r in read_metrics(tmp_path / run / "metrics.jsonl") if r["event"] == "train"]
              for run in ("run", "again")]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert (words / SIDECAR).exists()

"""Evaluations against an oracle that knows the answers, a guesser, and programs that look for what is hidden."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hecate.data import IGNORED, MQAR, Bytes, Copy, MADCompression, Parity
from hecate.errors import ConfigError, DataError, NonFiniteError
from hecate.evals import (
    LossByPosition,
    Niah,
    Reader,
    Report,
    Synthetic,
    VariableTracking,
    evaluate_run,
    evaluate_tasks,
    evaluation_of,
    task_names,
)
from hecate.evals.base import Given, Part, Row
from hecate.evals.tasks import Haystack, encoder_of
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.train import generate
from hecate.train.trained import open_model
from tests.train.common import TiedGRU, quiet_run, tiny

TEXT = "\n".join(f"This is line {n} of a text. It says little! Does it? Number {n * n}." for n in range(300))
GIVEN = Given(encoder_of(Bytes()), TEXT, 256)
ASKED = [
    Niah(lengths=(600, 1000), samples=6),
    VariableTracking(lengths=(1500,), samples=3, chains=2, hops=2),
    Synthetic(data=MQAR(vocab_size=16, num_pairs=2, seq_len=8), samples=20),
    Synthetic(data=Parity(seq_len=8), samples=20),
]


def rows_of(task, given=GIVEN):
    return [(part, part.row(index)) for part in task.parts(given) for index in range(part.rows)]


def text_of(row):
    return bytes(row.tokens.tolist()).decode()


class Oracle:
    """Gives every label that it has seen in the rows the highest logit; `wrong` spoils the last label of a row."""

    def __init__(self, tasks, wrong=False):
        self.known = {tuple(row.tokens): row.targets for task in tasks for _, row in rows_of(task)}
        self.wrong, self.calls = wrong, 0

    def __call__(self, tokens):
        self.calls += 1
        found = torch.zeros(*tokens.shape, 256)
        for place, row in enumerate(tokens.tolist()):
            targets = torch.from_numpy(self.known[tuple(row)]).clone()
            if self.wrong:
                last = int(torch.nonzero(targets != IGNORED)[-1])
                targets[last] = (targets[last] + 1) % 256
            found[place] = functional.one_hot(targets.clamp(min=0), 256) * 50.0
        return found


@pytest.mark.spec("EVAL-SCORE-D1", "EVAL-TASKS-D1")
def test_an_oracle_is_right_and_one_wrong_label_spoils_its_answer():
    for own in evaluate_tasks(Oracle(ASKED), Bytes(), ASKED, text=TEXT):
        assert own.score == own.exact == own.accuracy == 1 and own.loss < 1e-6 and own.error == 0
        assert all(share == 1 for share in own.depths.values())
        assert sum(span.labels for span in own.positions) == own.labels
    for own in evaluate_tasks(Oracle(ASKED, wrong=True), Bytes(), ASKED, text=TEXT):
        assert own.exact == pytest.approx(2 / 3 if own.name == "variable_tracking" else 0)
        assert own.accuracy == pytest.approx(1 - own.rows / own.labels)


@pytest.mark.spec("EVAL-SCORE-D1")
def test_logits_that_are_no_numbers_have_no_score():
    """The arg max of NaN is its first place, which some labels are."""
    task, oracle = Synthetic(data=Parity(seq_len=8), samples=3), Oracle(ASKED)
    with pytest.raises(NonFiniteError, match="hold NaN"):
        evaluate_tasks(lambda tokens: oracle(tokens) * torch.nan, Bytes(), [task])


@pytest.mark.spec("EVAL-SCORE-D1")
def test_scores_are_those_of_a_loop_and_do_not_depend_on_the_batch():
    tasks = [Niah(lengths=(500,), samples=4, forms=(2,)), Synthetic(data=Copy(vocab_size=9, symbols=5), samples=13)]
    model = TiedGRU(256)
    model.train()
    found = {at: evaluate_tasks(model, Bytes(), tasks, text=TEXT, tokens_at_once=at) for at in (1, 1100, 1 << 20)}
    assert model.training  # as it was
    model.eval()
    for number, task in enumerate(tasks):
        hits, losses, right = [], [], []
        for _, row in rows_of(task):
            kept = row.targets != IGNORED
            with torch.no_grad():
                logits = model(torch.from_numpy(row.tokens[None]))[0][0][kept]
            labels = torch.from_numpy(row.targets[kept])
            losses += functional.cross_entropy(logits.float(), labels, reduction="none").tolist()
            hits += (logits.argmax(-1) == labels).tolist()
            right.append(all(hits[-len(labels) :]))
        for own in (each[number] for each in found.values()):
            assert own.accuracy == np.mean(hits) and own.exact == np.mean(right) and own.labels == len(hits)
            assert own.loss == pytest.approx(np.mean(losses), rel=1e-5)  # float32 of batches


@pytest.mark.spec("EVAL-NIAH-D1", "EVAL-HAYSTACK-D1", "EVAL-ROW-D1")
@pytest.mark.parametrize("form", [1, 2, 3])
def test_the_needle_is_in_the_text_once_at_its_depth(form):
    task = Niah(forms=(form,), lengths=(700, 1500), samples=10)
    for part, row in rows_of(task):
        text = text_of(row)
        assert len(row.tokens) == part.length and part.name == f"niah_{form}"
        kept = row.targets != IGNORED
        answer = bytes(row.targets[kept].tolist()).decode()
        assert text.endswith(f"mentioned in the provided text is{answer}")
        assert (row.targets[kept] == row.tokens[-kept.sum() :]).all() and kept[:-1].sum() == kept.sum()
        prompt, value = text[: -len(answer)], answer.strip()
        assert prompt.count(value) == 1 and len(value) == (36 if form == 3 else 7)
        key = prompt.split(" for ")[-1].split(" mentioned")[0]
        needle = f"s for {key} is: {value}."
        assert prompt.count(needle) == 1
        body = prompt[prompt.index("afterwards.\n") + 12 : prompt.index("\nWhat is the special")]
        end = "\n" if form == 1 else " "
        sentence = f"One of the special magic {'uuid' if form == 3 else 'number'}{needle}{end}"
        place, rest = body.index(sentence), len(body) - len(sentence)
        assert abs(place / rest - row.depth) < 46 / rest  # half a sentence or line
        assert place == 0 or body[place - 1] in " \n"
    assert {row.depth for _, row in rows_of(task)} == {0, 0.25, 0.5, 0.75, 1}
    again = task.parts(GIVEN)[1].row(7)
    assert (again.tokens == task.parts(GIVEN)[1].row(7).tokens).all()
    assert len({text_of(row) for _, row in rows_of(task)}) == 20


@pytest.mark.spec("EVAL-TRACK-D1")
@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (3, 2)])
def test_chains_lead_to_the_answer(chains, hops):
    task = VariableTracking(lengths=(2000,), samples=5, chains=chains, hops=hops)
    for part, row in rows_of(task):
        assert len(row.tokens) == part.length and part.chance == 1 / (chains * (1 + hops))
        text = text_of(row)
        body = text[text.rindex("Memorize and track") :]
        value = body.split("assigned the value ")[1].split()[0]
        held, known = {}, []
        for line in body.splitlines():
            if line.startswith("VAR "):
                name, _, source = line[4:].partition(" = ")
                assert name not in held
                held[name] = source if source.isdigit() else held[source.removeprefix("VAR ")]
                known += [name] if held[name] == value else []
        assert len(held) == chains * (1 + hops) and len(known) == 1 + hops
        assert body.endswith("they are: " + " ".join(known))
        assert f"{1 + hops} variables are assigned the value {value}" in body
        numbers = row.answers[row.targets != IGNORED]
        assert numbers.tolist() == np.repeat(np.arange(1 + hops), 6).tolist()


@pytest.mark.spec("EVAL-HAYSTACK-D1")
def test_a_short_text_goes_round():
    hay = Haystack("One two. Three!", encoder_of(Bytes()))
    text, _ = hay.around(np.random.default_rng(0), 40, [], [])
    assert len(text) == 40 and bytes(text.tolist()).decode() in "One two. Three!" * 5
    with pytest.raises(DataError, match="has no sentence"):
        Haystack(" \n ", encoder_of(Bytes()))


@pytest.mark.spec("EVAL-SYNTHETIC-D1")
def test_synthetic_tasks_have_their_lengths():
    def lengths(task, **fields):
        return [part.length for part in Synthetic(data=task, samples=2, **fields).parts(Given(vocabulary=40))]

    assert lengths(Parity(seq_len=8)) == [8, 16] and lengths(Copy()) == [32]
    assert lengths(Parity(seq_len=8), lengths=(5, 9)) == [5, 9]
    assert lengths(MADCompression(seq_len=15)) == [15]  # twice is even
    with pytest.raises(ConfigError, match=r"'mad_compression' of length 63 has 47 token ids, and the model knows 40"):
        lengths(MADCompression())
    with pytest.raises(ConfigError, match="data: must be a synthetic task, got 'bundled', a text"):
        Synthetic(data="bundled")


@pytest.mark.spec("EVAL-POSITION-D1")
def test_loss_by_position_is_that_of_every_token():
    (own,) = evaluate_tasks(TiedGRU(256), Bytes(), [LossByPosition(lengths=(64,), samples=3)], text=TEXT)
    assert own.labels == 192 and [(s.first, s.last) for s in own.positions][:3] == [(0, 0), (1, 1), (2, 3)]
    mean = sum(span.loss * span.labels for span in own.positions) / own.labels
    assert mean == pytest.approx(own.loss) and own.score == own.loss


def test_a_model_with_a_state_reads_in_pieces():
    config = LanguageModelConfig(vocab_size=256, d_model=8, layers=1, heads=2)
    model = LanguageModel(config, generator=torch.Generator().manual_seed(0)).eval()
    part = Niah(forms=(2,), lengths=(700,), samples=2).parts(GIVEN)[0]
    whole, pieces = (Reader(model, piece=piece).scored(part, 1400) for piece in (None, 100))
    assert whole.loss == pytest.approx(pieces.loss, rel=1e-5) and whole.accuracy == pieces.accuracy


@pytest.mark.spec("EVAL-GREEDY-D1")
def test_a_row_is_right_where_greedy_generation_gives_its_answer():
    config = LanguageModelConfig(vocab_size=256, d_model=8, layers=1, heads=2)
    model = LanguageModel(config, generator=torch.Generator().manual_seed(0)).eval()
    draws, size, found = torch.Generator(), 8, []
    for index, spoilt in enumerate((None, 0, 3, size - 1, None)):
        row = Niah(forms=(2,), lengths=(400,), samples=5).parts(GIVEN)[0].row(index)
        prompt = row.tokens[: -(row.targets != IGNORED).sum()].tolist()
        said = list(generate(model, prompt, size, temperature=0, generator=draws))
        answer = [token ^ (place == spoilt) for place, token in enumerate(said)]
        tokens = np.array(prompt + answer)
        labels = np.concatenate([np.full(len(prompt) - 1, IGNORED), answer, [IGNORED]])
        asked = Row(tokens, labels, np.where(labels == IGNORED, -1, 0))
        part = Part("own", len(tokens), 1, lambda _, asked=asked: asked, "exact", None)
        for piece in (None, 100):
            found.append((Reader(model, piece=piece).scored(part, 400).exact, said == answer))
    assert {right for _, right in found} == {True, False}
    assert all(score == right for score, right in found)


class Theirs:
    """What a tokenizer of transformers has, with a token ahead of every text."""

    bos_token_id = 300

    def encode(self, text, add_special_tokens=True):
        return [300] * add_special_tokens + list(text.encode())


class Plain(nn.Module):
    """A causal model as transformers has them."""

    class config:
        vocab_size, max_position_embeddings = 301, 1024

    def __init__(self):
        super().__init__()
        self.inner = TiedGRU(301)

    def forward(self, input_ids):
        assert input_ids[0, 0] == 300 and input_ids.shape[1] == 900
        return type("Output", (), {"logits": self.inner(input_ids)[0]})()


@pytest.mark.spec("EVAL-TASKS-D1")
def test_what_transformers_has_is_enough():
    tasks = [Niah(lengths=(900,), samples=2), VariableTracking(lengths=(900,), samples=2, hops=1)]
    assert len(evaluate_tasks(Plain(), Theirs(), tasks, text=TEXT)) == 4
    with pytest.raises(ConfigError, match="niah of length 4096 is beyond the 1024 positions of the model"):
        evaluate_tasks(Plain(), Theirs(), ["niah"], text=TEXT)


@pytest.mark.spec("EVAL-TASKS-D1")
@pytest.mark.parametrize(
    ("tasks", "given", "error", "sentence"),
    [
        (["nia"], {}, ConfigError, r"no task 'nia'. Did you mean 'niah'\? Known: "),
        (["niah"], {"text": None}, DataError, "no text for the haystack of niah_2; name a file or folder with --data"),
        (["loss_by_position"], {"text": None}, DataError, "no text for loss_by_position"),
        ([Niah(lengths=(100,))], {}, ConfigError, "niah_1 of length 100 has no room .* take at least [0-9]+"),
        ([Niah(lengths=(999,), forms=(2,))], {"vocabulary": 50}, ConfigError, "and the model knows 50 ids"),
        ([MQAR()], {"vocabulary": 50}, ConfigError, "'mqar' of length 64 has 256 token ids, and the model knows 50"),
        ([Niah()], {"tokenizer": None}, ConfigError, "niah is a task in text, and the model comes without a tokenizer"),
        ([Niah()], {"tokenizer": 3}, ConfigError, "tokenizer must be one of hecate's or have transformers' encode"),
    ],
)
def test_what_cannot_be_asked_is_refused(tasks, given, error, sentence):
    given = {"tokenizer": Bytes(), "text": TEXT} | given
    with pytest.raises(error, match=sentence):
        evaluate_tasks(TiedGRU(256), given.pop("tokenizer"), tasks, **given)


def test_names_are_tasks():
    assert {"niah", "niah_2", "variable_tracking", "loss_by_position", "parity", "mqar"} <= set(task_names())
    assert evaluation_of("niah_2", samples=3) == Niah(forms=(2,), samples=3)
    assert evaluation_of("parity", lengths=None) == Synthetic(data=Parity())
    for name in task_names():
        assert evaluation_of(name).kind in (name, "synthetic", "niah")


@pytest.mark.spec("EVAL-RUN-D1", "EVAL-FILES-D1")
def test_a_run_is_evaluated_into_its_folder(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    text = {"kind": "text", "paths": [str(tmp_path / "book.txt")]}
    config = tiny(data=text, budget={"steps": 2, "seq_len": 16, "eval_every": 2, "checkpoint_every": 2})
    run = tmp_path / "run"
    quiet_run(config, run)
    names = ["niah", "variable_tracking", "loss_by_position"]
    report, folder = evaluate_run(str(run), names, lengths=[1100], samples=2)
    assert folder == run / "evals" / "step-2" and len(report.results) == 5
    (checkpoint,) = (run / "checkpoints").glob("step*")
    _, second = evaluate_run(checkpoint, ["niah_1"], lengths=[800], samples=2, data=f"{tmp_path}/book.txt")
    assert second == run / "evals" / "step-2-2"
    assert sorted(path.name for path in folder.iterdir()) == ["results.csv", "results.json", "scores.png", "scores.svg"]
    found = json.loads((folder / "results.json").read_text())
    assert found["step"] == 2 and found["results"] == [own.record() for own in report.results]
    assert {"Titans", "Hope"} == {figure["model"] for figure in found["published"]}
    lines = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [float(line["score"]) for line in lines] == [own.score for own in report.results]
    trained = open_model(run)
    own = evaluate_tasks(trained.model, trained.tokenizer, [VariableTracking(lengths=(1100,), samples=2)])
    assert own[0].loss == report.results[3].loss
    assert [table[0][0] for table in report.tables()] == ["task", "exact by depth", "tokens read", "published"]
    with pytest.raises(ConfigError, match="'parity' is for a model that was trained on it, .* trained on 'text'"):
        evaluate_run(run, ["parity"])


@pytest.mark.spec("EVAL-RUN-D1")
def test_a_run_on_a_task_is_asked_its_own(hecate, tmp_path):
    run = tmp_path / "run"
    quiet_run(tiny(budget={"steps": 2, "eval_every": 2, "checkpoint_every": 2}), run)
    code, said, _ = hecate("eval", run, "--tasks", "mqar", "--samples", 3, "--out", tmp_path / "out")
    assert code == 0 and "mqar" in said
    assert f"results: {tmp_path / 'out' / 'step-2'}" in said and not (run / "evals").exists()
    found = json.loads((tmp_path / "out/step-2/results.json").read_text())
    assert [own["length"] for own in found["results"]] == [8, 16] and found["tasks"][0]["data"]["num_pairs"] == 2
    with pytest.raises(ConfigError, match="niah_1 is a task in text, and the run was trained on 'mqar' without"):
        evaluate_run(run, ["niah_1"])
    with pytest.raises(ConfigError, match="--data is for tasks in text, and mqar have none"):
        evaluate_run(run, ["mqar"], data=tmp_path)
    code, _, err = hecate("eval", run, "--samples", 3)
    assert code == 2 and "--samples is for --tasks, which is left out" in err


@pytest.mark.spec("EVAL-FILES-D1")
def test_what_a_killed_evaluation_left_goes_and_what_another_writes_stays(tmp_path):
    import os

    mine = tmp_path / ".tmp-step-notes"
    left, begun = tmp_path / ".tmp-step-2-3-4711", tmp_path / ".tmp-step-2-4712"
    for path in (mine, left, begun):
        path.mkdir()
        (path / "results.json").write_text("{")
    for path in (mine, left):
        os.utime(path, (0, 0))
    Report(evaluate_tasks(TiedGRU(256), None, [Parity(seq_len=4)])).save(tmp_path, "step-2", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [begun.name, mine.name, "step-2"]


@pytest.mark.spec("EVAL-FILES-D1")
def test_without_matplotlib_there_is_no_figure(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = Report(evaluate_tasks(TiedGRU(256), None, [Parity(seq_len=4)])).save(tmp_path, "x", {})
    assert sorted(path.name for path in folder.iterdir()) == ["results.csv", "results.json"]

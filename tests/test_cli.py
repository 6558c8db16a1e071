"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from itertools import product

import pytest
import torch
import yaml
from rich.console import Console

from hecate import commands
from hecate.cli import main
from hecate.engine import Engine
from hecate.rule import RULES, named_rule
from hecate.train import ExperimentConfig, checkpoints
from hecate.train.compose import experiment_schema
from hecate.train.loggers import read_metrics
from tests.forked import Forked
from tests.registries import restore_registries

TINY = """
name: tiny
model: {d_model: 8, layers: 1, heads: 2, mlp_ratio: 1.0, conv_kernel: 2}
data: {kind: bundled, max_bytes: 65536}
budget: {steps: 4, batch_size: 2, seq_len: 8, eval_every: 2, eval_batches: 1, checkpoint_every: 2}
sample: {tokens: 3}
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """A working folder of its own, float32 as on the command line, and no time spent on figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    torch.set_default_dtype(torch.float32)
    (tmp_path / "tiny.yaml").write_text(TINY)


@pytest.mark.spec("TRAIN-CLI-D1")
def test_train_evaluate_generate_and_resume(hecate, tmp_path):
    code, out, err = hecate("train", "tiny.yaml", "--set", "optim.lr=1e-2", "--out", "run")
    assert code == 0, err
    assert "bigram (baseline)" in out and "finished at step 4; report: run/report.md" in out
    assert "step      2/4  validation" in err
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optim"]["lr"] == 0.01

    code, out, _ = hecate("eval", "run")
    evals = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["event"] == "eval"]
    best = min(evals, key=lambda r: r["validation_loss"])
    assert code == 0 and f"{best['bits_per_byte']:.4f}" in out and f"(step {best['step']})" in out

    texts = {hecate("generate", "run", "--prompt", "ab", "--tokens", "5", "--seed", s)[1] for s in "112"}
    assert len(texts) == 2 and all(text.startswith("ab") for text in texts)
    greedy = {hecate("generate", "run", "--temperature", "0", "--seed", s)[1] for s in "12"}
    assert len(greedy) == 1 and greedy.pop().startswith("def ")
    exact = [hecate("generate", "run", "--exact", "--batch", count, "--tokens", "5")[1] for count in "12"]
    assert exact[1].startswith(f"--- 1\n{exact[0]}--- 2\n")
    assert hecate("generate", "run", "--prompt", "a\u00e9", "--tokens", "0")[1] == "a\u00e9\n"

    code, _, err = hecate("resume", "run")
    assert code == 0 and "at step 4, the last of its budget: --steps N trains on\n" in err
    code, out, err = hecate("train", "--out", "run", "--resume", "--steps", "6")
    assert code == 0 and "resumed from run/checkpoints/step_00000004 at step 4" in err
    assert "finished at step 6" in out
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optim"]["lr"] == 0.01

    assert hecate("import", "run", "--config", "tiny.yaml", "--set", "optim.lr=0.5", "--out", "init")[0] == 0
    assert yaml.safe_load((tmp_path / "init/config.yaml").read_text())["optim"]["lr"] == 0.5


@pytest.mark.spec("TRAIN-CLI-D1")
def test_runs_are_numbered_and_the_latest_is_resumed(hecate, tmp_path):
    (tmp_path / "runs").mkdir()
    for expected in ("runs/tiny", "runs/tiny-2"):
        code, out, _ = hecate("train", "tiny.yaml", "--quiet", "--steps", "1")
        assert code == 0 and f"report: {expected}/report.md" in out
    (tmp_path / "runs/tiny-other").mkdir()
    (tmp_path / "runs/tiny-other/config.yaml").write_text("{}")
    code, out, _ = hecate("train", "tiny.yaml", "--quiet", "--resume", "--steps", "2")
    assert code == 0 and "finished at step 2; report: runs/tiny-2/report.md" in out


FAMILIES = "phi, bias, retention, link, algorithm, structure, activation, gating, readout, position, data, optimizer, "
NO_FOLDER = "gone is not a run folder: there is no such folder; "
MISTAKES = {
    "train nope": "no preset 'nope'. Did you mean 'hope'? Known: cms, hope, hope_170m, lact_760m, lm-130m, ",
    "train my.yaml": "cannot read config my.yaml: No such file or directory; `hecate init my.yaml` writes one",
    "train latin.yaml": "latin.yaml is not UTF-8 text (byte 6); save it as UTF-8",
    "train tiny.yaml --set optim.lr=0": "optim.lr: must be > 0.0, got 0  [--set optim.lr=0]",
    "train tiny.yaml --set data.kind=text --set data.paths=[gone.txt]": "data.paths: no file or folder 'gone.txt'",
    "train tiny.yaml --resume": "there is no run of 'tiny' in runs/ to resume",
    "train tiny.yaml --resume --out x": "--resume takes its config from x; leave 'tiny.yaml' out",
    f"train tiny.yaml --out {'x' * 300}": "cannot use 'xxx",
    "train tiny.yaml --out=": "--out is empty, as where a variable of the shell is not set; name a folder",
    "train tiny.yaml --out  ": "--out is empty, as where",
    "serve nowhere --memories ": "--memories is empty, as where",
    "serve nowhere --prefixes=": "--prefixes is empty, as where",
    "train --resume --out gone": f"{NO_FOLDER}`hecate train --out` starts a run there",
    "train --set engine=fused": "engine: no such setting. hecate takes the fastest engine that is exact; `hecate show",
    "eval gone": f"{NO_FOLDER}name one that `hecate train` has written, such as runs/quickstart",
    "eval folder": "folder is a model of transformers, no run folder: `hecate eval folder --tasks` asks it",
    "eval folder --checkpoint first": "checkpoint must be one of 'best', 'newest', got 'first'",
    "generate gone": NO_FOLDER,
    "list phy": f"no family 'phy'. Did you mean 'phi'? Known: {FAMILIES}logger, engines, rules, presets.",
    "list feature_maps": f"no family 'feature_maps'. Did you mean 'phi'? Known: {FAMILIES}",
    "export gone --to gguf": "--to must be one of 'safetensors', 'torch', 'dcp', 'hf', 'onnx', got 'gguf'",
    "export gone --to hf --dtype float16": "--dtype float16 and --to hf: weights keep",
}


@pytest.mark.spec("TRAIN-CLI-D2")
@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message_on_stderr_and_leaves_nothing(line, hecate, tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: \u00e9".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = hecate(*line.split(" "))
    assert (code, out) == (2, "") and err.startswith(f"error: {MISTAKES[line]}")
    assert "Traceback" not in err and err.count("error:") == 1 and sorted(tmp_path.rglob("*")) == before


def test_an_export_of_the_folder_that_one_is_in_lies_beside_it(hecate, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    made = []
    monkeypatch.setattr("hecate.train.trained.export_weights", lambda run, to, out, which: made.append(out) or out)
    for folder in (".", "../run/.", "../run/sub/.."):
        assert hecate("export", folder)[0] == 0
    assert [path.resolve() for path in made] == [tmp_path / "run-safetensors"] * 3
    assert hecate("export", "/")[::2] == (2, "error: / has no name to make that of the new folder from; give --out\n")


@pytest.mark.spec("TRAIN-CLI-D2")
def test_a_diverged_run_exits_with_one(hecate):
    code, _, err = hecate("train", "tiny.yaml", "--set", "optim.lr=1e30", "--set", "clip=null",
                          "--set", "warmup=0", "--quiet")  # fmt: skip
    assert code == 1 and "error: step " in err and "Lower optim.lr" in err


@pytest.mark.spec("TRAIN-CLI-D2")
@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line_without_a_source_file(hecate):
    code, _, err = hecate("train", "tiny.yaml", "--set", "model.qk_norm=none", "--quiet")
    assert code == 0 and "warning: memory 'layer 0': lr * |phi(k)|^2 reaches" in err
    assert ".py" not in err


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="no preset 'nope'"):
        main(["--debug", "show", "nope"])


def test_generating_from_a_task_is_refused(hecate):
    fields = ["--set", "data=copy", "--set", "budget.seq_len=null"]
    assert hecate("train", "tiny.yaml", *fields, "--out", "run", "--quiet")[0] == 0
    code, _, err = hecate("generate", "run")
    assert code == 2 and "trained on task 'copy', which has no text to continue" in err


@pytest.mark.spec("TRAIN-CLI-D3")
def test_show_is_what_train_would_use(hecate, tmp_path):
    code, out, _ = hecate("show", "mqar", "--set", "feature_map=elu")
    assert code == 0
    (tmp_path / "shown.yaml").write_text(out)
    assert hecate("show", "shown.yaml")[1] == out
    assert yaml.safe_load(out)["model"]["memory"]["feature_map"]["kind"] == "elu"


@pytest.mark.spec("TRAIN-CLI-D3")
@pytest.mark.parametrize(
    ("settings", "engine", "word"),
    [
        (["model.memory.chunk=8"], "chunk", "chunk"),
        (["structure=mlp", "feature_map=identity"], "compiled_layers", "structure 'mlp'"),
        (["structure=mlp", "feature_map=identity", "model.memory.chunk=8"], "chunk", "chunk"),
    ],
)
def test_show_says_which_engine_runs_and_why(hecate, settings, engine, word):
    flags = [part for setting in settings for part in ("--set", setting)]
    code, out, _ = hecate("show", "mqar", "--engine", *flags)
    assert code == 0 and len(out.splitlines()) == 1
    assert out.startswith(f"model.memory: {engine}: ") and word in out


@pytest.mark.spec("TRAIN-CLI-D3")
def test_the_schema_is_that_of_the_experiment(hecate):
    code, out, _ = hecate("schema")
    schema = json.loads(out)
    assert code == 0 and schema == experiment_schema()
    assert set(schema["properties"]) == {*ExperimentConfig.model_fields, "extends"}


@pytest.mark.spec("TRAIN-LIST-D1")
def test_lists(hecate):
    code, out, _ = hecate("list")
    assert code == 0
    families = [line.split()[0] for line in out.splitlines()[1:]]
    variants = "phi bias retention link algorithm structure activation gating readout position data optimizer logger"
    assert families == [*variants.split(), "engines", "rules", "presets"]
    folded = hecate("list")[1].splitlines()[-1].split()
    assert int(folded[1]) == len(folded) - 2 and folded[-3:] == ["mqar-RULE", "quickstart-RULE", "lm-SIZE-BACKBONE"]
    said = hecate("list", "--help")[1]
    for family in families:
        code, out, err = hecate("list", family)
        assert family in said and code == 0 and len(out.splitlines()) > 2, err
    elu = next(line for line in hecate("list", "phi")[1].splitlines() if line.startswith("elu "))
    for text in (
        "phi(x) = x + 1 for x > 0, exp(x) otherwise", "non_negative", "hand-written",
        "arXiv 2006.16236",
    ):  # fmt: skip
        assert text in elu
    for family, kind, texts in (
        ("bias", "kl", ("log sum exp(pred)", "curvature 1/2", "hand-written", "2504.13173")),
        ("retention", "sphere", ("X / |X|", "not linear; starts at the identity", "2504.05646")),
        ("link", "signed_softmax", ("M = scale sinh(A) / sum cosh(A)", "Kivinen")),
        ("optimizer", "muon", ("NS(u)", "Jordan")),
        ("gating", "comba", ("q - d c k", "2506.02475")),
        ("readout", "slots", ("y = V softmax(K q)", "2409.07146")),
        ("rules", "delta", ("matrix, l2, none, gd, key_norm=l2 ", "2406.06484")),
        ("rules", "gated_mesa", ("matrix, dot, decay, gd, gating=mesa, readout=ridge", "2506.05233")),
        ("rules", "rwkv7", ("gating=rwkv7, writes=2, layer_qk_norm=none", "2503.14456", "a short convolution (0.07)")),
        ("rules", "oja", ("structure.learns=key", "gating=heads", "no paper")),
    ):
        line = next(x for x in hecate("list", family)[1].splitlines() if x.startswith(f"{kind} "))
        assert all(text in line for text in texts), line
    rules = hecate("list", "rules")[1].splitlines()[1:]
    assert [line.split()[0] for line in rules] == list(RULES)
    assert not [line for line in rules if "arXiv" not in line and "no paper" not in line]
    assert ".0" not in "".join(re.findall(r"degree=[\d.]+|norm_bound=[\d.]+", hecate("list", "phi")[1]))
    mqar = next(line for line in hecate("list", "data")[1].splitlines() if line.startswith("mqar "))
    assert "2312.04927" in mqar and "hand-written" not in mqar


@pytest.mark.spec("TRAIN-CLI-D4")
def test_version(hecate):
    import hecate as package

    assert hecate("--version") == (0, f"hecate {package.__version__}\n", "")


@pytest.mark.spec("TRAIN-CLI-D4")
@pytest.mark.spec("TRAIN-DOCTOR-D1")
def test_the_doctor_says_what_runs_here_and_warms_kernels(hecate, monkeypatch):
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+cu130")
    code, out, _ = hecate("doctor")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if "  " in line)
    assert code == 0 and torch.__version__ in out
    runs = {name: said for name, said in rows.items() if said.startswith("runs ")}
    assert set(runs) == set(Engine.registry)
    assert runs["sequential"].startswith(f"runs {len(RULES)} of {len(RULES)} rules")
    assert runs["fla"].startswith("runs none: its kernels run on a GPU")
    code, out, _ = hecate("doctor", "--warm", "deep_momentum", "--width", "4")
    assert code == 0 and out.startswith("deep_momentum: ")
    for argv, word in ((["doctor", "delta"], "--warm"), (["doctor", "--warm", "detla"], "Did you mean 'delta'?")):
        code, _, err = hecate(*argv)
        assert code == 2 and word in err


def test_help_says_each_command_in_a_whole_line_and_has_an_example(hecate):
    listed = hecate("--help")[1].split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert len(listed) == 19 and not [line for line in listed if line.endswith("...") or len(line) > 80]
    for command in "train eval generate report list show schema estimate export import tape serve".split():
        code, out, _ = hecate(command, "--help")
        assert code == 0 and f"hecate {command}" in out.split("Example", 1)[1], command


PARTS = """
from typing import Literal
from hecate import phi

class Halved(phi.FeatureMap):
    \"\"\"halved: phi(x) = x / 2.\"\"\"
    kind: Literal["halved"] = "halved"
    def forward(self, x, params):
        return x / 2, None
    def vjp(self, residuals, g):
        return g / 2, {}
"""


def test_own_parts_are_imported_before_a_command(hecate, tmp_path, monkeypatch):
    restore_registries(monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_parts.py").write_text(PARTS)
    assert "kind: halved" in hecate("--import", "my_parts", "show", "mqar", "--set", "feature_map=halved")[1]
    assert sys.modules.pop("my_parts").__file__ == str(tmp_path / "my_parts.py")


@pytest.mark.spec("TRAIN-RUN-D2")
def test_a_terminated_process_saves_and_can_be_resumed(hecate, tmp_path):
    code = "import sys; sys.modules['matplotlib.figure'] = None; from hecate.__main__ import main; main()"
    line = "train tiny.yaml --steps 100000 --set checkpoint_every=100000 --set eval_every=2 --out run"
    read, write = os.pipe()
    with (tmp_path / "out").open("w") as file, os.fdopen(read) as said:
        process = Forked(code, *line.split(), files=(0, file.fileno(), write))
        os.close(write)
        # Lines ahead of it say what takes long: loading data, compiling.
        assert any("step      2/100000" in line for line in said)
        process.kill(signal.SIGTERM)
        err = said.read()
    out = (tmp_path / "out").read_text()
    assert process.wait() == 128 + signal.SIGTERM
    assert "interrupted at step" in out and "continue with: hecate resume run" in out
    assert "Traceback" not in err
    last = checkpoints(tmp_path / "run/checkpoints")[-1]
    step = int(last.name.removeprefix("step_"))
    code, out, _ = hecate("train", "--out", "run", "--resume", "--steps", str(step + 1), "--quiet")
    assert code == 0 and f"finished at step {step + 1}" in out


@pytest.mark.spec("TRAIN-RUN-D8")
@pytest.mark.parametrize(("quiet", "rank", "said"), [(False, "0", True), (True, "0", False), (False, "1", False)])
def test_imports_that_take_long_are_said_once(monkeypatch, capsys, quiet, rank, said):
    monkeypatch.setattr(commands, "LONG", 0.01)
    monkeypatch.setenv("RANK", rank)
    with commands.importing(quiet):
        time.sleep(0.3)
    with commands.importing(quiet):
        pass
    time.sleep(0.1)
    out, err = capsys.readouterr()
    assert out == "" and err == ("importing torch and the training code\n" if said else "")


@pytest.mark.spec("TRAIN-EST-D1")
@pytest.mark.parametrize("preset", ["mqar", "cms", "hope", "mac", "mal"])
def test_estimate_counts_what_is_built(hecate, preset):
    from hecate.models import LanguageModel
    from hecate.rule import bytes_of
    from hecate.train import load_experiment
    from hecate.train.estimate import estimate_rows

    config = load_experiment(preset)
    model = LanguageModel(config.model_for_data(), dtype=torch.float32)
    rows = dict(estimate_rows(config))
    assert rows["parameters"] == f"{sum(item.numel() for item in model.parameters()):,}"
    with torch.no_grad():
        _, state = model(torch.zeros(1, 2, dtype=torch.int64))
    value, unit = rows["state per sequence"].replace(",", "").split()
    size = float(value) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    kept = bytes_of(state)
    # The window of a convolution or of attention fills up as tokens come; memories have one size.
    assert abs(size - kept) <= 0.001 * kept or preset in ("mag", "mal", "mac")
    code, out, _ = hecate("estimate", preset)
    assert code == 0 and rows["parameters"] in out


@pytest.mark.spec("TRAIN-PAPER-D1")
@pytest.mark.parametrize(
    ("preset", "rule"),
    [*((f"{rule}_170m", rule) for rule in ("yaad", "moneta", "memora", "titans", "omeganet")),
     ("hope_170m", None), ("lact_760m", "large_chunk_ttt")],
)  # fmt: skip
def test_presets_of_papers_are_of_their_size_and_say_what_is_ours(preset, rule):
    from hecate.train import load_experiment
    from hecate.train.compose import FILES, preset_about
    from hecate.train.estimate import sizes_of

    text, config = FILES[preset].read_text(), load_experiment(preset)
    assert "ours" in text.lower() and preset_about(preset)
    model, budget, small = config.model, config.budget, preset.endswith("_170m")
    assert (model.d_model, model.layers, config.name) == (*((768, 12) if small else (1536, 24)), preset)
    assert rule is None or type(model.memory.structure) is type(named_rule(rule).structure)
    assert not small or budget.steps * budget.batch_size * config.seq_len == pytest.approx(15e9, rel=1e-4)
    if small and rule:
        vocabulary = 2 * (32_000 - 256) * 768  # a word's vocabulary, untied, in place of bytes
        assert sizes_of(config).parameters + vocabulary == pytest.approx(172e6, rel=0.02)


@pytest.mark.spec("TRAIN-LIST-D1")
def test_presets_are_listed_by_what_their_files_say(hecate):
    out = hecate("list", "presets")[1]
    assert "Yaad at the size of its paper's smallest language model: Huber loss" in out
    assert "gates attention over a sliding window (MAG)" in out


NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
COUNTED = {"levels": "levels", "memory layers": "layers", "memories": "levels"}


@pytest.mark.spec("TRAIN-LIST-D1")
def test_a_preset_says_as_many_levels_and_layers_as_it_has():
    from hecate.train import load_experiment
    from hecate.train.compose import BACKBONES, BY_BACKBONE, FILES, preset_about

    told = {name: (preset_about(name), name) for name in FILES}
    told |= {f"backbone {name}": (preset_about(name, BACKBONES), f"{BY_BACKBONE[0]}-{name}") for name in BACKBONES}
    assert len({about for about, _ in told.values()}) == len(told) and told["cms"][0] != told["backbone cms"][0]
    seen = 0
    for about, name in told.values():
        model = load_experiment(name).model
        for word, what in re.findall(rf"\b({'|'.join(NUMBERS)}|\d+) (levels|memory layers|memories)\b", about):
            if what == "memories" and not model.levels:
                continue  # of a layer, or of whichever else
            found = getattr(model, COUNTED[what])
            count = NUMBERS.index(word) if word in NUMBERS else int(word)
            assert count == (found if isinstance(found, int) else len(found)), f"{name}: {about}"
            seen += 1
    assert seen >= 2


@pytest.mark.parametrize(
    ("family", "columns"),
    [
        *product(["phi", "rules"], [40, 80, 100, 160]),
        *product([None, "bias", "structure", "presets", "gating"], [40, 100]),
    ],
)
@pytest.mark.spec("TRAIN-LIST-D1")
def test_a_list_on_a_terminal_cuts_nothing(family, columns, monkeypatch, capsys):
    from hecate.train import display
    from hecate.train.catalogue import catalogue

    monkeypatch.setattr(display, "Console", lambda: Console(width=columns, force_terminal=True))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    header, rows = catalogue(family)
    display.print_table(header, rows)
    shown = capsys.readouterr().out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert "\u2026" not in shown and max(map(len, lines)) <= columns
    if lines[0].startswith("\u250f"):  # a table: what does not fit a cell stands in several lines of it
        widths = [len(part) - 2 for part in lines[0].strip("\u250f\u2513").split("\u2533")]
        natural = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        assert all(width >= min(most, display.WRAPPED) for width, most in zip(widths, natural, strict=True))
    else:
        letters = "".join("".join(line.split()) for line in lines)
        assert all("".join(cell.split()) in letters for row in rows for cell in row)


@pytest.mark.spec("TRAIN-EST-D2")
def test_tape_prints_calls_and_norms(hecate):
    code, out, _ = hecate("tape", "cms", "--tokens", "2")
    assert code == 0
    for text in ("model.levels[0].memory", "model.levels[1].memory", "structure.mlp.predict", "l2_norm"):
        assert text in out
    norms = [float(line.split()[0]) for line in out.splitlines() if line.startswith("  ") and "/" in line]
    assert len(norms) > 10 and any(norm > 0 for norm in norms)
    code, _, err = hecate("tape", "nothing")
    assert code == 2 and "no preset" in err


@pytest.mark.spec("COMPARE-RESUME-D1")
@pytest.mark.parametrize("given", [(), ("--plan",)])
def test_a_comparison_without_a_folder_gets_a_new_one_and_says_which(hecate, monkeypatch, given):
    from pathlib import Path

    from hecate.compare import run
    from hecate.train.display import Interrupted

    asked = []

    def stopped(cells, out, **_):
        asked.append(str(out))
        raise Interrupted

    monkeypatch.setattr(run, "compare", stopped)
    monkeypatch.setattr(run, "plan", stopped)
    Path("other.yaml").write_text(TINY.replace("mlp_ratio: 1.0", "mlp_ratio: 2.0"))
    line = ("compare", "tiny.yaml", "other.yaml", *given)
    code, _, err = hecate(*line)
    assert code == 3 and "kept in runs/compare-tiny-other: the same line with --out runs/compare-tiny-other" in err
    Path("runs/compare-tiny-other").mkdir(parents=True)
    hecate(*line)
    assert "the same line again goes on" in hecate(*line, "--out", "mine")[2]
    assert asked == ["runs/compare-tiny-other", "runs/compare-tiny-other-2", "mine"]

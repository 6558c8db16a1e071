"""Every way to get a config wrong gives exactly one clear error before anything is built."""

from __future__ import annotations

import pytest
import torch

from hecate.errors import ConfigError
from hecate.train import load_experiment
from tests.clock import within

CASES = [  # YAML text, --set texts, exact message or its start when it has "..."
    ("optimizer: {lr: 1}", [],
     "optimizer: unknown field of ExperimentConfig. Did you mean 'optim'? Known fields: name, seed, model, data, "
     "optim, budget, parallel, sample, tensorboard, loggers, init_from.  [x.yaml:1]"),
    ("optim:\n  lr: 1.0\n  weigth_decay: 0.1\n", [],
     "optim.weigth_decay: unknown field of OptimConfig. Did you mean 'weight_decay'? Known fields: lr, optimizer, "
     "weight_decay, warmup, schedule, final, clip, periods.  [x.yaml:3]"),
    ("optim: {lr: .nan}", [], "optim.lr: must be a finite number, got nan  [x.yaml:1]"),
    ("optim: {lr: fast}", [], "optim.lr: must be a number, got 'fast' (str)  [x.yaml:1]"),
    ("seed: true", [], "seed: must be an integer, got True (bool)  [x.yaml:1]"),
    ("budget: {steps: 1e3}", [], "budget.steps: must be an integer, got 1000.0 (float)  [x.yaml:1]"),
    ("tensorboard: no", [], "tensorboard: must be true or false, got 'no' (str)  [x.yaml:1]"),
    ("init_from: ''", [], "init_from: string should have at least 1 character, got ''  [x.yaml:1]"),
    ("data: {kind: tokens, path: ''}", [], "data.path: string should have at least 1 character, got ''  [x.yaml:1]"),
    ("budget: {batch_size: -4}", [], "budget.batch_size: must be >= 1, got -4  [x.yaml:1]"),
    (f"seed: {1 << 63}", [], f"seed: must be < {1 << 63}, got {1 << 63}  [x.yaml:1]"),
    ("optim:\n  betas: [0.9,\n    1.0]", [], "optim.betas[1]: must be < 1.0, got 1.0  [x.yaml:3]"),
    ("optim: {betas: [0.9]}", [], "optim.betas[1]: is required  [x.yaml:1]"),
    ("optim: {schedule: cosin}", [],
     "optim.schedule: must be 'cosine', 'constant' or 'linear', got 'cosin'  [x.yaml:1]"),
    ("optim: 3", [], "optim: ..."),
    ("name: ../../etc", [], "name: ..."),
    ("budget: {device: tpu}", [], "budget.device: must be 'cpu' or 'cuda', got 'tpu'  [x.yaml:1]"),
    ("model: {d_model: 10, heads: 3}", [],
     "model.heads: must divide d_model=10, got 3; or give d_key and d_value  [x.yaml:1]"),
    ("model:\n  memory:\n    feature_map: eluu\n", [],
     "model.memory.feature_map: unknown feature_map kind 'eluu'. Did you mean 'elu'? Known: ...  [x.yaml:3]"),
    ("model:\n  memory:\n    feature_map:\n      kind: random_fourier\n      d_phi: 64\n      sigma: -1\n", [],
     "model.memory.feature_map.sigma: must be > 0.0, got -1  [x.yaml:6]"),
    ("model:\n  memory:\n    feature_map: normalise", [], "model.memory.feature_map.inner: is required  [x.yaml:3]"),
    ("data: {num_pairs: 4}", [],
     "data: needs a 'kind'; known data kinds: bundled, copy, mad_compression, mad_fuzzy_recall, mad_memorization, "
     "mad_noisy_recall, mad_recall, mad_selective_copy, modular_counting, mqar, parity, permutations, retrieval, "
     "text, tokens  [x.yaml:1]"),
    ("data: 3", [], "data: must be a data kind, a mapping with a 'kind', or an instance, got 3 (int)  [x.yaml:1]"),
    ("data: {kind: text, paths: []}", [], "data.paths: ..."),
    ("data: mqar\nmodel: {vocab_size: 10}", [],
     "model.vocab_size: must equal the vocabulary of data 'mqar', 256, got 10; leave it out and it is filled in  "
     "[x.yaml:2]"),
    ("data: mqar\nbudget: {seq_len: 32}", [],
     "budget.seq_len: data 'mqar' has sequences of length 64, got 32; leave it out  [x.yaml:2]"),
    ("extends: mqra", [],
     "extends: no preset 'mqra'. Did you mean 'mqar'? Known: cms, hope, hope_170m, lact_760m, lm-130m, lm-1b, "
     "lm-340m, lm-35m, mac, mag, mal, memora_170m, moneta_170m, mqar, omeganet_170m, quickstart, retrieval, "
     "titans_170m, tnt, yaad_170m, mqar-RULE, quickstart-RULE, lm-SIZE-BACKBONE. A file must end in .yaml or .yml  "
     "[x.yaml:1]"),
    ("seed: 1\nextends: ../x.yaml", [],
     "extends: must name a preset or a file in the folder of the config, got '../x.yaml'  [x.yaml:2]"),
    ("extends: /etc/passwd.yaml", [],
     "extends: must name a preset or a file in the folder of the config, got '/etc/passwd.yaml'  [x.yaml:1]"),
    ("extends: x.yaml", [], "extends: 'extends' goes in a circle or too deep: x.yaml -> x.yaml  [x.yaml:1]"),
    ("extends: gone.yaml", [], "extends: cannot read config ..."),
    ("extends: [mqar]", [], "extends: must be a preset or a file name, got ['mqar']  [x.yaml:1]"),
    ("", ["optim.lr"], "--set needs path=value, such as optim.lr=1e-3, got 'optim.lr'"),
    ("", ["save_every=1"], "save_every: no such setting. Did you mean 'checkpoint_every'?  [--set save_every=1]"),
    ("", ["learning_rate=1"], "learning_rate: no such setting. Did you mean 'lr'?  [--set learning_rate=1]"),
    ("", ["optim.learn=1"],
     "optim.learn: unknown field of OptimConfig. Known fields: lr, optimizer, weight_decay, warmup, schedule, final, "
     "clip, periods.  [--set optim.learn=1]"),
    ("", ["kind=elu"], "kind: could mean model.memory.structure.kind, ..."),
    ("", ["optim.betas[2]=0.5"],
     "optim.optimizer.betas[2]: there is a list of 2 here; give an index below its length  [--set optim.betas[2]=0.5]"),
    ("", ["seed.x=3"], "seed: has no fields, it is 0  [--set seed.x=3]"),
    ("", ["seed=1", "seed=2"], "seed: set twice, --set seed=1 and --set seed=2"),
    ("", ["feature_map=elu", "feature_map.kind=relu"],
     "model.memory.feature_map: set twice, --set feature_map=elu and --set feature_map.kind=relu"),
    ("", ["feature_map=eluu"],
     "model.memory.feature_map: unknown feature_map kind 'eluu'. Did you mean 'elu'? Known: ...  [--set "
     "feature_map=eluu]"),
    ("name: !!python/object/apply:os.system [touch gotcha]", [],
     "name: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed  [x.yaml:1]"),
]  # fmt: skip


@pytest.mark.spec("TRAIN-CONFIG-D1", "TRAIN-COMPOSE-D1")
@pytest.mark.parametrize(("text", "overrides", "expected"), CASES)
def test_one_clear_error(text, overrides, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_experiment("x.yaml", overrides)
    assert len(caught.value.problems) == 1
    start, _, end = expected.partition("...")
    message = str(caught.value)
    assert message == expected if start == expected else message.startswith(start) and message.endswith(end)
    assert not list(tmp_path.glob("gotcha"))


@pytest.mark.spec("TRAIN-CONFIG-D2")
def test_all_problems_of_independent_settings_are_listed_at_once(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("seed: -1\noptim:\n  lr: 0\nbudget:\n  steps: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert str(caught.value).splitlines() == [
        "seed: must be >= 0, got -1  [x.yaml:1]",
        "optim.lr: must be > 0.0, got 0  [x.yaml:3]",
        "budget.steps: must be >= 1, got 0  [x.yaml:5]",
    ]


@pytest.mark.spec("TRAIN-CONFIG-D2")
def test_a_state_that_would_not_fit_is_refused_without_building_it(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("model:\n  d_model: 4096\n  heads: 1\n  memory:\n    feature_map: {kind: polynomial, degree: 9}\n")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocates"))
    with within(5), pytest.raises(ConfigError, match=r"model.memory.*\[x.yaml:\d\]"):  # building would take far more
        load_experiment(path)


def test_problems_in_an_extended_file_name_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 3\noptim:\n  lr: -1\n")
    (tmp_path / "x.yaml").write_text("extends: base.yaml\nseed: 4\n")
    with pytest.raises(ConfigError, match=r"^optim.lr: must be > 0.0, got -1  \[base.yaml:3\]$"):
        load_experiment(tmp_path / "x.yaml")
    (tmp_path / "base.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"^not valid YAML: .*  \[base.yaml:1\]$"):
        load_experiment(tmp_path / "x.yaml")


def test_a_symbolic_link_does_not_lead_out(tmp_path):
    (tmp_path / "secret.yaml").write_text("seed: 1")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (inner / "x.yaml").write_text("extends: link.yaml")
    with pytest.raises(ConfigError, match="must name a preset or a file in the folder"):
        load_experiment(inner / "x.yaml")

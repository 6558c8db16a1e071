"""Documents and arguments that nobody writes by accident: each is one sentence, at once."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Annotated

import pytest
from pydantic import AfterValidator

from hecate.cli import main
from hecate.errors import ConfigError
from hecate.train import ExperimentConfig, Trainer, load_experiment, run_experiment
from hecate.train.document import MAX_DEPTH, parse_value
from hecate.train.estimate import check_memory, parse_bytes, share_of, sizes_of, training_bytes
from hecate.variant import Config, FrozenDict, content_hash
from studies.__main__ import main as studies
from tests.clock import within

from .common import tiny


def message(build) -> str:
    with within(1), pytest.raises(ConfigError) as caught:
        build()
    assert len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loaded(text, *overrides):
        (tmp_path / "x.yaml").write_text(text)
        return load_experiment("x.yaml", overrides)

    return loaded


# --- files


@pytest.mark.spec("TRAIN-COMPOSE-D1")
@pytest.mark.parametrize("up", ["../presets/mqar", "{folder}/secret", "sub/../../secret", "secret\\0"])
def test_a_preset_is_a_name_and_no_path(load, tmp_path, up):
    (tmp_path.parent / "secret.yaml").write_text("seed: 7")
    name = up.format(folder=tmp_path.parent)
    assert "extends: " in message(lambda: load(f'extends: "{name}"'))
    name = name.replace("\\0", "\0")
    assert "no preset" in message(lambda: load_experiment(name))


def test_names_that_no_file_can_have(load, tmp_path):
    assert "cannot read config" in message(lambda: load_experiment("a\0.yaml"))
    assert "no preset" in message(lambda: load_experiment("a" * 5000))
    assert "cannot read config" in message(lambda: load_experiment("a" * 5000 + ".yaml"))
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "extends: " in message(lambda: load("extends: loop.yaml"))


# --- documents


def test_integers_of_thousands_of_digits(load):
    for text in ("0x" + "f" * 9000, "9" * 9000, "-" + "1" * 9000):
        assert "seed: is not a readable int" in message(lambda text=text: load(f"seed: {text}"))
        assert "is not a readable int" in message(lambda text=text: load("", f"seed={text}"))
    assert "too large to show" in message(lambda: ExperimentConfig(seed=int("f" * 9000, 16)))


@pytest.mark.spec("TRAIN-YAML-D2", "VAR-NEST-I1")
def test_texts_nested_without_end(load):
    for text in ("[" * 100_000, "{a: " * 20_000, "- " * 100_000, "[" * 80 + "]" * 80):
        assert "nested too deeply" in message(lambda text=text: parse_value(text, "x"))
    parse_value("[" * (MAX_DEPTH // 2) + "]" * (MAX_DEPTH // 2), "x")
    dots = ".".join(["a"] * 100_000)
    assert f"at most {MAX_DEPTH} steps" in message(lambda: load("", f"{dots}=1"))
    assert f"at most {MAX_DEPTH} steps" in message(lambda: load("", f"optim{'[0]' * 1000}=1"))
    assert "needs path=value" in message(lambda: load("", f"optim[{'9' * 5000}]=1"))
    assert "optim: has no fields" in message(lambda: load("", "optim=3", "optim.lr=1"))
    maps = "{kind: odd_lift, inner: " * 18 + "elu" + "}" * 18
    assert "more than 16 variants" in message(lambda: load("", f"feature_map={maps}"))


@pytest.mark.spec("TRAIN-CONFIG-D1")
def test_a_document_of_a_newer_hecate_is_told_apart_from_a_misspelt_one(load):
    text = message(lambda: load("schema_version: 3\nseed: 1"))
    assert text.startswith("schema_version: is 3: the config is of a newer hecate")
    assert text.endswith("[x.yaml:1]")


# --- the command line


@pytest.mark.spec("TRAIN-CLI-D2")
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("../parts", "no name of a module"), ("", "no name of a module"),
        ("..", "no name of a module"), ("/etc/x", "no name of a module"),
        ("broken_syntax", "SyntaxError"), ("broken_name", "NameError"), ("leaves", "SystemExit"),
        ("wrong_kind", "must pin its kind"), ("gone", "No module named 'gone'; name a module"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_one_sentence(tmp_path, hecate, monkeypatch, name, word):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_syntax.py").write_text("def (:")
    (tmp_path / "broken_name.py").write_text("nothing.of_this")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "wrong_kind.py").write_text("from hecate import phi\nclass A(phi.FeatureMap):\n    kind: str = 'a'\n")
    code, out, err = hecate("--import", name, "list")
    assert code == 2 and not out
    assert err.startswith("error: --import") and word in err and err.count("error:") == 1


@pytest.mark.spec("TRAIN-EST-D3")
def test_what_takes_more_than_the_limit_is_refused_before_it_is_built(tmp_path, hecate):
    huge = {"d_model": 1 << 13, "layers": 1 << 10, "heads": 64}
    config = ExperimentConfig(model=huge)
    text = message(lambda: run_experiment(config, tmp_path / "run"))
    assert text.startswith("model: training takes at least") and "lower model.d_model" in text
    assert not (tmp_path / "run").exists()
    wide, limit = tiny(budget={"batch_size": 1 << 20}), 1 << 29
    text = message(lambda: run_experiment(wide, tmp_path / "run", mem_limit=limit))
    assert text.startswith("budget.batch_size: ") and "512 MiB" in text
    small = tiny()
    needed = sum(training_bytes(small, sizes_of(small), share_of(small)).values())
    check_memory(small, needed)
    assert "more than the limit" in message(lambda: check_memory(small, needed - 1))
    for argv, code in (("8G", 0), ("1K", 2), ("1" * 400, 2)):
        found, _, err = hecate("estimate", "mqar", "--mem-limit", argv)
        assert found == code and (code == 0 or "error:" in err)


def test_sizes_in_words_and_bytes():
    assert [parse_bytes(t) for t in ("3", "2K", "1.5M", "8g", "1 GiB", "2TB")] == [
        3, 2 << 10, 3 << 19, 8 << 30, 1 << 30, 2 << 40
    ]  # fmt: skip
    for text in ("8X", "0", "", "-1G", "nan", "1e9", "0.0K"):
        assert "such as 8G or 512M" in message(lambda text=text: parse_bytes(text))


# --- what a config is


@pytest.mark.spec("VAR-FROZEN-I1")
def test_a_config_is_frozen_to_its_last_mapping():
    config = tiny(optim={"periods": {"*norm*": 2}})
    for change in (
        lambda p: p.update(a=1), lambda p: p.__setitem__("a", 1), lambda p: p.pop("*norm*"),
        lambda p: p.clear(), lambda p: p.setdefault("a", 1), lambda p: p.popitem(),
        lambda p: p.__delitem__("*norm*"), lambda p: p.__ior__({"a": 1}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="frozen"):
            change(config.optim.periods)
    assert config.optim.periods == {"*norm*": 2}
    assert hash(config) == hash(ExperimentConfig.model_validate(config.model_dump(mode="json")))
    assert config.optim.model_dump(mode="json")["periods"] == {"*norm*": 2}


class Kept(Config):
    """A value of every sort."""

    word: str = "elu"
    numbers: tuple[float, ...] = (0.5, -0.0)
    nothing: int | None = None
    flag: bool = True
    table: Annotated[dict[str, int], AfterValidator(FrozenDict)] = FrozenDict(a=1, b=2)


@pytest.mark.spec("VAR-FROZEN-I1")
def test_hashes_are_the_same_in_every_process():
    Kept.__module__ = "kept"  # Python salts the hashes of texts, here those of names and values
    assert content_hash("elu") == 12590815448552878454
    assert hash(Kept()) == -7516405848874740699
    assert hash(Kept(numbers=(0.5, 0.0))) == hash(Kept()) and Kept(numbers=(0.5, 0.0)) == Kept()
    others = [Kept(word="relu"), Kept(nothing=0), Kept(table={"a": 2, "b": 1}), Kept(flag=False)]
    assert len({hash(item) for item in (Kept(), *others)}) == 5
    for again in (pickle.loads(pickle.dumps(Kept().table)), copy.deepcopy(Kept().table)):
        assert again == Kept().table and type(again) is FrozenDict and hash(again)


@pytest.mark.spec("VAR-HOLES-I1")
def test_a_trainer_validates_what_it_is_given():
    good = tiny()
    forged = ExperimentConfig.model_construct(**{**good.__dict__, "seed": -1})
    assert message(lambda: Trainer(forged)) == "seed: must be >= 0, got -1"


JUNK = [None, True, -1, 0, 10**12, 10**400, 1e308, float("nan"), "", "x", [], {}, [1], "sum", "rls",
        {"kind": "x"}, {"kind": None}, "learned", "mlp", 3, "a\0", "\ud800"]  # fmt: skip


@pytest.mark.spec("VAR-PATH-I1")
def test_every_fault_of_a_document_has_a_place():
    rng, refused = random.Random(0), 0
    documents = [
        load_experiment(name).model_dump(mode="json")
        for name in ("mqar", "cms", "hope", "mac", "quickstart-titans", "mqar-moneta")
    ]
    for _ in range(400):
        document = rng.choice(documents)
        for _ in range(rng.choice([1, 1, 2])):
            document = _put(document, rng.choice(list(_paths(document))), rng.choice(JUNK))
        try:
            config = ExperimentConfig.model_validate(document)
        except ConfigError as error:
            refused += 1
            assert all(problem.path for problem in error.problems), str(error)
        else:
            assert ExperimentConfig.model_validate(config.model_dump(mode="json")) == config
    assert refused > 300


def _paths(value, path=()):
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else pairs:
        yield from _paths(inner, (*path, key))


def _put(value, path, new):
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _put(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("size", ["1000000000000", "9" * 400])
def test_numbers_of_options_have_an_end(size, capsys):
    for argv in (
        ("tape", "mqar", "--tokens", size), ("generate", "gone", "--seed", size),
        ("generate", "gone", "--tokens", size), ("report", "gone", "--tokens", size),
        ("train", "mqar", "--steps", size + "9" * 9), ("levels", "--seeds", size), ("levels", "--threads", size),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            (studies if argv[0] == "levels" else main)(argv)
        said = capsys.readouterr().err
        assert caught.value.code == 2 and "Traceback" not in said and "No such command" not in said

"""Settings as people look them up: `hecate init`, `hecate list FAMILY NAME`, tables of fields."""

from __future__ import annotations

import importlib
import re
from functools import cached_property
from typing import Literal

import pytest

from hecate import files
from hecate.bias import Bias
from hecate.commands import init
from hecate.errors import ConfigError
from hecate.phi import DPFP
from hecate.train import catalogue
from hecate.train.catalogue import FAMILIES, VARIANTS, accepts, field_rows, flow, short, starter, variant_page
from hecate.train.compose import BACKBONES, FILES, load_experiment
from hecate.train.config import BudgetConfig, ExperimentConfig
from tests.spec_files import ROOT

UNCOMMENTED = re.compile(r"(?m)^( *)#(?! \S)")


@pytest.mark.spec("TRAIN-START-D1")
@pytest.mark.parametrize("name", [*FILES, "mqar-titans", f"lm-340m-{next(iter(BACKBONES))}"])
def test_a_starter_is_its_preset_with_and_without_its_signs(name, tmp_path):
    file, text, expected = tmp_path / "my.yaml", starter(name), load_experiment(name)
    for content in (text, UNCOMMENTED.sub(r"\1", text)):
        file.write_text(content)
        assert load_experiment(file) == expected
    for section in ("model", "optim", "budget", "parallel", "sample"):  # every field has its line
        for field in type(getattr(expected, section)).model_fields:
            assert re.search(rf"(?m)^ *#? *{field}:", text), field


@pytest.mark.spec("TRAIN-START-D1")
def test_a_setting_behind_a_sign_can_be_changed(tmp_path):
    file = tmp_path / "my.yaml"
    text = starter()
    assert "  #clip: 1.0\n" in text and "\n  # the largest norm of the whole gradient" in text
    file.write_text(text.replace("  #clip: 1.0", "  clip: 0.5"))
    changed = load_experiment(file)
    assert changed.optim.clip == 0.5
    assert changed.model_copy(update={"optim": load_experiment("quickstart").optim}) == load_experiment("quickstart")


@pytest.mark.spec("TRAIN-START-D1")
def test_init_writes_into_no_name_that_is_taken(tmp_path, monkeypatch):
    link, file = tmp_path / "link.yaml", tmp_path / "my.yaml"
    link.symlink_to(tmp_path / "elsewhere.yaml")  # which is not there
    with pytest.raises(ConfigError, match="link.yaml is there already; nothing was written"):
        init(link)
    assert link.is_symlink() and [*tmp_path.iterdir()] == [link]

    def meanwhile(*_):
        file.write_text("another's")
        return "text"

    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "starter", meanwhile)
        with pytest.raises(ConfigError, match="my.yaml is there already"):
            init(file)
    assert file.read_text() == "another's"
    lost = tmp_path / "none/my.yaml"
    with pytest.raises(ConfigError, match=re.escape(f"cannot write {lost}: No such file or directory; give another")):
        init(lost)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", lambda path: exec("raise OSError(28, 'No space left on device')"))
        with pytest.raises(ConfigError, match="No space left on device; free some space"):
            init(tmp_path / "full.yaml")
    assert not (tmp_path / "full.yaml").exists()
    init(tmp_path / "fine.yaml")
    assert load_experiment(tmp_path / "fine.yaml") == load_experiment("quickstart")


@pytest.mark.spec("TRAIN-START-D1")
def test_a_name_stays_in_its_comment(tmp_path):
    text = starter("quickstart", "a\nseed: 7\n#.yaml")
    (tmp_path / "my.yaml").write_text(text)
    assert load_experiment(tmp_path / "my.yaml") == load_experiment("quickstart")


@pytest.mark.spec("TRAIN-LIST-D2")
def test_every_variant_has_a_page():
    for family, root in VARIANTS.items():
        for name, own in root.variants().items():
            text, table, example = variant_page(family, name)
            assert own.formula() in " ".join(text.split()) and name in example
            fields = {field for field in own.model_fields if field != "kind"}
            assert {row[0] for row in (table[1] if table else [])} == fields, name
    for family in ("rules", "engines", "presets"):
        assert FAMILIES[family]()[1] and "hecate" in variant_page(family, FAMILIES[family]()[1][0][0])[2]


@pytest.mark.spec("TRAIN-LIST-D2")
def test_a_page_says_what_a_field_takes():
    _, table, example = variant_page("phi", "dpfp")
    assert table[1] == [["nu", "integer >= 1", "1", ""]] and example == "feature_map: dpfp"
    rows = {row[0]: row for row in field_rows(BudgetConfig.model_json_schema())}
    assert rows["device"][1:3] == ["cpu, cuda", "cpu"] and rows["minutes"][1:3] == ["number > 0 or null", "null"]
    for asked, message in (
        (("phi", "dpf"), r"^no phi 'dpf'\. Did you mean 'dpfp'\?"), (("ph", "dpfp"), "^no family 'ph'"),
        (("rules", "titan"), "^no rule 'titan'"), (("presets", "hop"), "^no preset 'hop'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            variant_page(*asked)


@pytest.mark.spec("TRAIN-LIST-D2")
def test_users_variants_have_pages_too():
    class Steep(Bias):
        """steep: 2 |u|^2. A bias of this test.

        References: none."""

        kind: Literal["steep_of_a_test"] = "steep_of_a_test"
        slope: float = 2.0

        @cached_property
        def table(self) -> list[float]:
            return [self.slope]

    steep = Steep(slope=3.0)
    try:
        text, table, example = variant_page("bias", "steep_of_a_test")
        assert text.startswith("steep: 2 |u|^2") and table[1][0][:3] == ["slope", "number", "2.0"]
        assert example == "bias: steep_of_a_test"
        assert steep.table == [3.0] and short(steep) == {"kind": "steep_of_a_test", "slope": 3.0}  # not what it keeps
    finally:
        del Bias._registry["steep_of_a_test"]


def test_values_are_written_short():
    assert short(DPFP()) == "dpfp" and short(DPFP(nu=3)) == {"kind": "dpfp", "nu": 3}
    assert flow(short((DPFP(nu=3), None))) == "[{kind: dpfp, nu: 3}, null]"
    assert short(ExperimentConfig()) == {}
    assert accepts({"type": "array", "items": {"type": "integer", "minimum": 1}}) == "list of integer >= 1"


def test_tables_cover_the_schema(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    found = importlib.import_module("reference").tables()
    assert {"model", "model.memory", "optim", "budget", "parallel", "sample", "feature_map.dpfp"} <= found.keys()
    assert all(len(row) == 4 and row[1] for _, rows in found.values() for row in rows)

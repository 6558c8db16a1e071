"""The JSON schema that `hecate schema` prints for editors: what loads is valid, and every setting says what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from hecate.rule import RULES
from hecate.train import load_experiment
from hecate.train.compose import FILES, dump_experiment, experiment_schema, presets
from hecate.train.document import parse_yaml, read_yaml
from tests.spec_files import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs/pages").glob("*.md")]
WRITTEN = [(path.name, text) for path in PAGES for text in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.S)]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(json.dumps(experiment_schema()))


@pytest.fixture(scope="module")
def validator(schema) -> Any:
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def fault(validator: Any, value: Any) -> str | None:
    found = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return None if found is None else f"{found.json_path}: {found.message}"


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_every_preset_and_every_yaml_of_the_pages_is_valid(validator):
    assert len(FILES) >= 20 and len(WRITTEN) >= 5
    values = {name: read_yaml(path).value for name, path in FILES.items()}
    values |= {f"{page}, {n}": parse_yaml(text, page).value for n, (page, text) in enumerate(WRITTEN)}
    assert {name: found for name, value in values.items() if (found := fault(validator, value))} == {}


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_what_show_prints_is_valid(validator):
    for name in (name for name in presets() if "-" not in name or name.startswith("lm-")):  # rules are below
        assert fault(validator, parse_yaml(dump_experiment(load_experiment(name)), name).value) is None, name


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_a_rule_stands_for_its_fields_wherever_a_memory_is(validator):
    for rule in RULES:
        for memory in (rule, {"kind": rule}, {"kind": rule, "chunk": 2, "feature_map": "elu"}):
            levels = [{"name": "one", "memory": memory}]
            for model in ({"memory": memory}, {"levels": levels}, {"self_reference": {"memory": memory}}):
                assert fault(validator, {"model": model}) is None
        assert fault(validator, {"model": {"feature_memory": {"kind": rule, "residual": True}}}) is None


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_what_does_not_load_is_not_valid(validator):
    for value in (
        {"model": {"memory": "titan"}},
        {"model": {"memory": {"kind": "titan", "chunk": 2}}},
        {"model": {"memory": {"kind": "titans", "chunks": 2}}},
        {"model": {"memory": {"chunk": "2"}}},
        {"model": {"memory": ["titans"]}},
        {"extends": 3},
        {"modle": {}},
    ):
        assert fault(validator, value) is not None, value


def properties(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property of every object of a schema, with its place."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from properties(item, f"{path}[{index}]")
    elif isinstance(node, dict):
        if "enum" not in node and node.get("type") == "object":
            yield from ((f"{path}.{name}", field) for name, field in node.get("properties", {}).items())
        for name, item in node.items():
            yield from properties(item, f"{path}.{name}")


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_every_setting_says_what_it_is(schema):
    found = dict(properties(schema))
    assert len(found) > 500
    assert not [path for path, field in found.items() if len(field.get("description", "").split()) < 2]
    # What is edited most has an entry of its own in its docstring, so that no two settings say the same.
    for name in ("OptimConfig", "BudgetConfig", "SampleConfig", "ParallelConfig", None):
        fields = (schema if name is None else schema["$defs"][name])["properties"]
        texts = [field["description"] for field in fields.values()]
        assert len(set(texts)) == len(texts), name


def test_descriptions_are_those_of_the_docstrings(schema):
    for place, field, text in (
        ("BudgetConfig", "keep", "number of newest checkpoints to keep"),
        ("LanguageModelConfig", "mlp_ratio", "hidden width of the gated MLP over d_model; 0 leaves it out."),
        ("data.tokens", "vocab_size", "filled from the folder if left out, and at least the folder's; "),
        ("bias.huber", "delta", "huber: "),
        ("optimizer.delta_momentum", "reading", "what g^T g is."),
        ("retention.decay", "kind", "decay: M' = retain M + D, "),
        ("LanguageModelConfig", "memory", "the rule of every layer's memory"),
    ):
        assert schema["$defs"][place]["properties"][field]["description"].startswith(text)

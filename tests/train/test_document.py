"""YAML as it is read and written."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hecate.errors import ConfigError
from hecate.train.document import dump_yaml, parse_value, parse_yaml, read_yaml
from tests.clock import within


@pytest.mark.spec("TRAIN-YAML-D1")
def test_scalars():
    for text, value in (
        ("1e-3", 0.001), ("1e3", 1000.0), ("-2.5E+2", -250.0), (".5", 0.5), ("5.", 5.0),
        ("3", 3), ("-3", -3), ("+3", 3), ("0x10", 16), ("0o17", 15), ("0", 0),
        ("017", "017"), ("1_000", "1_000"), ("1:30", "1:30"), ("08", "08"),
        ("no", "no"), ("on", "on"), ("y", "y"), ("Yes", "Yes"), ("off", "off"),
        ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
        ("2024-01-02", "2024-01-02"), ("=", "="), ("'1e-3'", "1e-3"), ('"true"', "true"),
        ("!!str 12", "12"), ("!!float 3", 3.0), (".inf", math.inf), ("-.INF", -math.inf),
        ("[1, [no, 2e1]]", [1, ["no", 20.0]]), ("{a: {b: 1}}", {"a": {"b": 1}}),
    ):  # fmt: skip
        found = parse_value(text, "here")[0]
        assert found == value and type(found) is type(value), text
    assert math.isnan(parse_value(".nan", "here")[0])


_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=12)
_TRICKY = st.sampled_from(
    ["no", "1e-3", "017", "0o17", "~", "", "null", "true", "1_0", "2024-01-02", "- a", "a: b",
     "=", "<<",
     " x ", "#", "0x1F", ".5", "5.", "+1", "1:30", "'", '"', "!!str", "&a", "*a", "%", "@", "a\nb"]
)  # fmt: skip
_SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False), _TEXT, _TRICKY,
)  # fmt: skip
_KEY = st.one_of(_TEXT, _TRICKY).filter(lambda key: key != "<<")
_TREE = st.recursive(_SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3))


@pytest.mark.spec("TRAIN-YAML-I1")
@given(st.dictionaries(_KEY, _TREE, max_size=4))
@example({"prompt": "a\x85b", "\u2028": "\u2029"})  # line breaks to YAML
def test_what_is_dumped_is_read_back(value):
    found = parse_yaml(dump_yaml(value), "here").value
    assert found == value and repr(found) == repr(value)


@pytest.mark.spec("TRAIN-YAML-D2")
def test_refusals():
    for text, message in (
        ("a: 1\nb: 2\na: 3\n", "a: given twice, in lines 1 and 3; keep one  [f:3]"),
        ("x: {b: 1, b: 1}", "x.b: given twice, in lines 1 and 1; keep one  [f:1]"),
        ("a: &a [*a]", "a[0]: contains itself through an alias  [f:1]"),
        ("a: *nowhere", "not valid YAML: found undefined alias 'nowhere'  [f:1]"),
        ("a: 1\n b: 2\n", "not valid YAML: mapping values are not allowed here  [f:2]"),
        ("a: [1\n", "not valid YAML: expected ',' or ']', but got '<stream end>'  [f:2]"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document  [f:2]"),
        ("\ta: 1", "not valid YAML: found character '\\t' that cannot start any token  [f:1]"),
        ("a: \x07", "not valid YAML: character #x0007 is not allowed  [f]"),
        ("- 1", "must be a mapping of settings, got [1]  [f:1]"),
        ("1: 2", "a key must be a text, got '1'  [f:1]"),
        ("[a]: 2", "a key must be a text, got a sequence  [f:1]"),
        ("<<: {a: 1}", "merge keys (<<) are not supported; use 'extends'  [f:1]"),
        ("a: !!python/name:os.system x",
         "a: tag 'tag:yaml.org,2002:python/name:os.system' is not allowed  [f:1]"),
        ("a: !!python/object/apply:os.system [x]",
         "a: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed  [f:1]"),
        ("a: !mine {b: 1}", "a: tag '!mine' is not allowed  [f:1]"),
        ("a: !!int word", "a: is not a readable int: 'word'  [f:1]"),
        ("a: " + "9" * 5000, f"a: is not a readable int: '{'9' * 40}'  [f:1]"),
        ("[" * 3000, "nested too deeply for a config  [f]"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            parse_yaml(text, "f")
        assert str(caught.value) == message


@pytest.mark.spec("TRAIN-YAML-D2")
def test_alias_bombs_are_refused_quickly():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 8)]
    with pytest.raises(ConfigError, match="expands to more than 20000 values"):
        parse_yaml("\n".join(lines), "f")
    with pytest.raises(ConfigError, match="more than 64 aliases"):
        parse_yaml("a: &a 1\nb: [" + ", ".join(["*a"] * 65) + "]", "f")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)  # to be refused before it is read


UNREADABLE = {
    "large": (sparse, "it has more than 1 MiB"),
    "latin": (lambda path: path.write_bytes(b"name: \xe9"), "is not UTF-8 text"),
    "gone": (lambda path: None, "cannot read config .*gone.yaml: No such file"),
    "folder": (Path.mkdir, "cannot read config .*: Is a directory"),
    "pipe": (os.mkfifo, "a pipe or a device"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
    "without a size": (lambda path: path.symlink_to("/proc/self/pagemap"), "it has more than 1 MiB"),
    "loop": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.spec("TRAIN-YAML-D2")
@pytest.mark.parametrize("name", UNREADABLE)
def test_only_regular_files_are_read_and_never_more_than_the_limit(tmp_path, name):
    make, message = UNREADABLE[name]
    make(path := tmp_path / f"{name}.yaml")
    with within(1), pytest.raises(ConfigError, match=message):
        read_yaml(path)

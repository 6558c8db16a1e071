"""Errors: types, paths, sentences."""

from __future__ import annotations

import pickle

import pytest
from pydantic import Field, field_validator, model_validator

from hecate import errors
from hecate.errors import ConfigError, HecateError, Problem, did_you_mean, format_path, shorten
from hecate.variant import Config


def test_paths():
    paths = {
        (): "",
        ("a",): "a",
        ("levels", 1, "memory"): "levels[1].memory",
        (0, "a"): "[0].a",
        ("a", 0, 1): "a[0][1]",
    }
    assert {path: format_path(path) for path in paths} == paths


def test_names_with_commas_are_told_apart():
    assert errors.not_known("elo", ["elu", "relu"]) == ". Did you mean 'elu'? Known: elu, relu."
    assert errors.not_known("none", ["delta, dpfp", "delta"]).endswith(" Known: delta, dpfp; delta.")


def test_every_error_is_a_hecate_error_and_what_python_would_raise():
    kinds = {
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == "hecate.errors"
    }
    assert {item for item in kinds if not issubclass(item, HecateError)} == {
        errors.FileSystemWarning,
        errors.HealthWarning,
        errors.LayoutWarning,
        errors.StabilityWarning,
    }
    for kind in (errors.ConfigError, errors.ShapeError, errors.DataError):
        assert issubclass(kind, ValueError)
    assert issubclass(errors.NonFiniteError, ArithmeticError)


def test_config_error_from_a_sentence_and_from_problems():
    one = ConfigError("must be even, got 3", ("a", 0))
    assert str(one) == "a[0]: must be even, got 3"
    assert str(ConfigError("nothing to do")) == "nothing to do"
    two = ConfigError([Problem(("a",), "x"), Problem((), "y")])
    assert str(two) == "a: x\ny"
    for error in (one, two):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is ConfigError and again.problems == error.problems
        assert str(again) == str(error)


def test_errors_raised_by_validators_keep_their_paths():
    class Inner(Config):
        """Refuses odd numbers, with a path of its own."""

        n: int = 0
        m: int = 0

        @field_validator("n")
        @classmethod
        def even(cls, n: int) -> int:
            if n % 2:
                raise ValueError(f"must be even, got {n}")
            return n

        @model_validator(mode="after")
        def together(self) -> Inner:
            if self.n > self.m + 10:
                raise ConfigError("must be at most m + 10", ("n",))
            return self

    class Outer(Config):
        """Holds it."""

        inner: tuple[Inner, ...]

    with pytest.raises(ConfigError) as caught:
        Outer(inner=[{"n": 1}, {"n": 12, "m": 1}])
    assert str(caught.value).splitlines() == ["inner[0].n: must be even, got 1", "inner[1].n: must be at most m + 10"]


def test_sentences_of_types_without_a_special_word():
    class Odd(Config):
        """Fields of other types."""

        pair: tuple[int, int] = (0, 0)
        name: str = ""
        table: dict[str, int] = Field(default_factory=dict)
        raw: bytes = b""

    def text(**fields):
        with pytest.raises(ConfigError) as caught:
            Odd(**fields)
        return str(caught.value)

    assert text(name=3) == "name: must be a text, got 3 (int)"
    assert text(table=[]) == "table: must be a mapping, got [] (list)"
    assert text(pair=3) == "pair: must be a list, got 3 (int)"
    assert text(raw=3) == "raw: input should be a valid bytes, got 3"


def test_did_you_mean():
    assert did_you_mean("sigm", ["sigma", "d_phi"]) == " Did you mean 'sigma'?"
    assert did_you_mean("zzz", ["sigma", "d_phi"]) == ""
    assert did_you_mean("nonsense", ["tokens", "sense"]) == " Did you mean 'sense'?"
    assert did_you_mean("nonsense", ["tokens"]) == did_you_mean(None, []) == ""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert did_you_mean(deep, ["sigma"]) == ""


def test_shorten():
    assert shorten("a") == "'a'" and len(shorten("a" * 100)) == 80

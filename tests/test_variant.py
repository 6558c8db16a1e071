"""Open unions: what they accept, what they refuse and in which words, and what they write down."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hecate.errors import ConfigError
from hecate.variant import Config, Variant


class Shape(Variant, family="test_shape"):
    """A family of this file."""


class Round(Shape):
    """round: x^2 + y^2 = r^2."""

    kind: Literal["round"] = "round"
    radius: float = Field(1.0, gt=0)


class Square(Shape):
    """square: max(|x|, |y|) = side / 2."""

    kind: Literal["square"] = "square"
    side: int = Field(2, ge=1, le=100)
    filled: bool = False
    corners: tuple[int, ...] = ()


class Union(Shape):
    """union: any of its parts."""

    kind: Literal["union"] = "union"
    parts: tuple[Shape, ...] = Field(min_length=1)
    cut: Shape | None = None


class Drawing(Config):
    """What holds them."""

    shape: Shape = Round()
    copies: int = Field(1, ge=1)
    offset: tuple[float, float] | None = None


class Album(Config):
    """One more floor, for paths."""

    drawings: list[Drawing]
    named: dict[str, Shape] = Field(default_factory=dict)


def message(build) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


# --- what a field of a family accepts


@pytest.mark.spec("VAR-UNION-D1")
@pytest.mark.parametrize("given", ["round", {"kind": "round"}, Round(), {"kind": "round", "radius": 1}])
def test_a_field_accepts_a_word_a_mapping_and_an_instance(given):
    assert Drawing(shape=given).shape == Round(radius=1.0)
    assert type(Drawing(shape=given).shape) is Round
    assert Shape.model_validate(given) == Round()


def test_the_family_itself_builds_its_members():
    assert Shape(kind="square", side=3) == Square(side=3)
    assert Shape("round") == Round()
    assert Shape({"kind": "square", "side": 3}) == Square(side=3)
    assert Shape(Round(radius=2.0)) == Round(radius=2.0)
    with pytest.raises(ConfigError, match=r"takes named fields only, got 2\.0"):
        Round(2.0)
    with pytest.raises(ConfigError, match="takes named fields only"):
        Shape("round", radius=2.0)


@pytest.mark.spec("VAR-UNION-D2")
def test_a_kind_defined_later_is_known_everywhere():
    assert "star" not in Shape.variants()
    assert "unknown test_shape kind 'star'" in message(lambda: Drawing(shape="star"))

    class Star(Shape):
        """star: points on two circles."""

        kind: Literal["star"] = "star"
        points: int = Field(5, ge=2)

    try:
        assert Drawing(shape={"kind": "star", "points": 7}).shape == Star(points=7)
        assert Union(parts=("star",)).parts == (Star(),)
        assert Shape.variants()["star"] is Star
        definitions = Drawing.model_json_schema()["$defs"]
        assert "star" in definitions["test_shape"]["oneOf"][-1]["enum"]
        assert "test_shape.star" in definitions
    finally:
        del Shape._registry["star"]


@pytest.mark.spec("VAR-UNION-D2")
def test_families_do_not_mix():
    class Other(Variant, family="test_other"):
        """Another family."""

    class OtherRound(Other):
        """round: of the other family."""

        kind: Literal["round"] = "round"

    assert Other.variants() == {"round": OtherRound} and Shape.variants()["round"] is Round
    assert "must be a test_shape kind" in message(lambda: Drawing(shape=OtherRound()))


def test_an_abstract_helper_narrows_the_field():
    class Family(Variant, family="test_narrow"):
        """A family."""

    class Helper(Family):
        """Shared by some."""

    class A(Helper):
        """a: below the helper."""

        kind: Literal["a"] = "a"

    class B(Family):
        """b: not below the helper."""

        kind: Literal["b"] = "b"

    class Holder(Config):
        """Takes helpers only."""

        field: Helper = A()

    assert Helper.is_family() and not A.is_family()
    assert Holder(field="a").field == A()
    assert "unknown test_narrow kind 'b'. Known: a." in message(lambda: Holder(field="b"))
    assert "must be a test_narrow kind" in message(lambda: Holder(field=B()))


@pytest.mark.spec("VAR-UNION-I1")
def test_a_class_may_be_executed_again_as_in_a_notebook():
    cell = "class Blob(Shape):\n    'blob: anything.'\n    kind: Literal['blob'] = 'blob'\n    size: int = {size}\n"
    scope: dict[str, Any] = {"Shape": Shape, "Literal": Literal, "__name__": "notebook"}
    try:
        exec(compile(cell.format(size=1), "cell 1", "exec", dont_inherit=True), scope)
        first = scope["Blob"]
        exec(compile(cell.format(size=2), "cell 2", "exec", dont_inherit=True), scope)
        assert Drawing(shape="blob").shape.size == 2
        assert Drawing(shape=first()).shape.size == 1, "instances made before stay usable"
    finally:
        del Shape._registry["blob"]


@pytest.mark.spec("VAR-UNION-I1")
def test_a_kind_is_pinned_and_taken_once():
    scope: dict[str, Any] = {"Shape": Shape, "Literal": Literal, "__name__": "mine"}

    def define(body: str) -> None:
        exec(compile(f"class Loose(Shape):\n    'loose: of a kind.'\n    {body}\n", "cell", "exec", 0, True), scope)

    for kind, sentence in (
        ('Literal["round"] = "round"', "kind 'round' is taken by"),
        ('Literal["loose"]', "needs a default for its kind"),
        ('str = "loose"', "must pin its kind"),
        ('Literal["loose", "lax"] = "loose"', "must pin its kind"),
    ):
        assert sentence in message(lambda kind=kind: define(f"kind: {kind}"))
    define("size: int = 1")  # a helper, which is asked for a value
    assert "Loose is no test_shape kind; pin one: `kind: Literal['own'] = 'own'`" in message(scope["Loose"])
    assert Shape.variants()["round"] is Round and "loose" not in Shape.variants()


# --- what is refused, and in which words


@pytest.mark.spec("VAR-STRICT-I1")
def test_messages():
    for build, text in (
        (
            lambda: Drawing(shape="ronud"),
            "unknown test_shape kind 'ronud'. Did you mean 'round'? Known: round, square,",
        ),
        (lambda: Drawing(shape="ROUND"), "Did you mean 'round'?"),
        (lambda: Drawing(shape={"side": 3}), "shape: needs a 'kind'; known test_shape kinds: round,"),
        (lambda: Drawing(shape={"kind": ["round"]}), "unknown test_shape kind ['round']"),
        (lambda: Drawing(shape={"kind": 3}), "unknown test_shape kind 3"),
        (lambda: Drawing(shape=3), "must be a test_shape kind, a mapping with a 'kind', or an inst"),
        (lambda: Drawing(shape=None), "got None (NoneType)"),
        (lambda: Drawing(shape=Shape), "shape: must be a test_shape kind"),
        (
            lambda: Drawing(shpe="round"),
            "shpe: unknown field of Drawing. Did you mean 'shape'? Known fields: shape, copies",
        ),
        (lambda: Round(raduis=1.0), "raduis: unknown field of Round. Did you mean 'radius'? Known fields: radius."),
        (lambda: Round.model_validate({1: 2}), "1: unknown field of Round"),
        (lambda: Round(radius=0), "radius: must be > 0.0, got 0"),
        (lambda: Square(side=0), "side: must be >= 1, got 0"),
        (lambda: Square(side=101), "side: must be <= 100, got 101"),
        (lambda: Union(), "parts: is required"),
        (lambda: Union(parts=[]), "parts: must be a list of 1 or more, got ()"),
        (lambda: Round(kind="square"), "kind: must be 'round', got 'square'"),
        (lambda: Album(drawings=3), "drawings: must be a list, got 3 (int)"),
    ):
        assert text in message(build)


@pytest.mark.spec("VAR-STRICT-I1")
def test_numbers_and_flags_are_what_they_say():
    for value in (True, "8", 8.0, 8.5, math.nan, math.inf, None, [8]):
        assert f"side: must be an integer, got {value!r}" in message(lambda value=value: Square(side=value))
    for value in (True, "1.5", math.nan, math.inf, -math.inf, None, 1j):
        text = message(lambda value=value: Round(radius=value))
        assert text.startswith("radius: must be") and repr(value) in text
    assert Round(radius=2).radius == 2.0
    for value in (0, 1, "true", None):
        assert "filled: must be true or false" in message(lambda value=value: Square(filled=value))
    for constant in ("NaN", "Infinity", "-Infinity"):
        text = message(lambda constant=constant: Round.model_validate_json(f'{{"radius": {constant}}}'))
        assert "radius: must be a finite number" in text


def test_keys_given_twice_are_refused():
    for text in ('{"radius": 1.0, "radius": 2.0}', b'{"kind": "round", "kind": "round"}'):
        with pytest.raises(ConfigError, match="(radius|kind): given twice in one JSON object; keep one"):
            Round.model_validate_json(text)


@pytest.mark.spec("VAR-PATH-I1")
def test_every_fault_is_listed_with_its_path():
    with pytest.raises(ConfigError) as caught:
        Album(
            drawings=[
                {"shape": {"kind": "union", "parts": ["round", {"kind": "square", "side": -1}]}},
                {"copies": True},
                {"shap": "round"},
                Drawing(),
            ],
            named={"logo": {"kind": "union", "parts": [{"kind": "rond"}]}},
        )
    text = [str(problem) for problem in caught.value.problems]
    assert text[0] == "drawings[0].shape.parts[1].side: must be >= 1, got -1"
    assert text[1] == "drawings[1].copies: must be an integer, got True (bool)"
    assert text[2].startswith("drawings[2].shap: unknown field of Drawing.")
    assert text[3].startswith("named.logo.parts[0]: unknown test_shape kind 'rond'")
    assert len(text) == 4
    assert caught.value.problems[0].path == ("drawings", 0, "shape", "parts", 1, "side")


def test_only_config_errors_leave_whatever_is_given():
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=5,
    )
    likely = st.dictionaries(
        st.sampled_from(["kind", "side", "parts", "radius", "cut"]),
        junk | st.sampled_from(["round", "square", "union"]),
    )

    @given(st.dictionaries(st.sampled_from(["shape", "copies", "offset"]), junk | likely))
    def check(data):
        try:
            drawing = Drawing.model_validate(data)
        except ConfigError as error:
            assert error.problems and str(error)
        else:
            assert Drawing.model_validate(drawing.model_dump()) == drawing

    check()


# --- values


def test_values_are_frozen():
    with pytest.raises(ConfigError, match=r"^Round is frozen; model_copy\(update=\{'radius': \.\.\.\}\) gives"):
        Round().radius = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("changing", [[1.0], {"a": 1.0}, {1.0}])
def test_values_that_could_change_are_refused_where_they_are_hashed(changing):
    class Loose(Config):
        """A field that holds anything."""

        values: Any

    assert hash(Loose(values=(1.0,))) == hash(Loose(values=(1.0,)))
    text = message(lambda: hash(Loose(values=changing)))
    assert text.startswith(f"Loose: unhashable type: '{type(changing).__name__}' among the values") and "tuples" in text


@pytest.mark.spec("VAR-HOLES-I1")
def test_model_construct_is_found_where_it_is_used():
    forged = Round.model_construct(radius=-3.0)
    assert message(lambda: Drawing(shape=forged)) == "shape.radius: must be > 0.0, got -3.0"
    assert message(forged.validated) == "radius: must be > 0.0, got -3.0"
    nested = Union.model_construct(kind="union", parts=(forged,), cut=None)
    text = message(lambda: Drawing(shape=nested))
    assert text == "shape.parts[0].radius: must be > 0.0, got -3.0"
    whole = Drawing.model_construct(shape=forged, copies=1)
    assert "drawings[0].shape.radius" in message(lambda: Album(drawings=[whole]))
    assert "shape: must be" in message(lambda: Drawing(shape=Shape.model_construct(kind="round")))


@pytest.mark.spec("VAR-HOLES-I1")
def test_an_object_is_validated_once(monkeypatch):
    counted = []
    check = Drawing.model_validate.__func__
    monkeypatch.setattr(Drawing, "model_validate", classmethod(lambda cls, o: counted.append(o) or check(cls, o)))
    drawing = Drawing(shape="round", copies=1)
    first = drawing.validated()
    assert first == drawing and first.validated() is first and drawing.validated() is first
    assert counted == [drawing]
    # What a checked value says holds for no other object: neither copies nor forged ones.
    forged = Drawing.model_construct(**{**first.__dict__, "copies": -1})
    assert message(forged.validated) and message(forged.validated)
    for other in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other == first and other.validated() is not other


def test_model_copy_is_validated():
    drawing = Drawing(shape="square", copies=2)
    assert message(lambda: drawing.model_copy(update={"copies": 0})) == "copies: must be >= 1, got 0"
    assert "unknown field" in message(lambda: drawing.model_copy(update={"copys": 3}))
    changed = drawing.model_copy(update={"shape": "round"})
    assert changed == Drawing(shape="round", copies=2) and drawing.shape == Square()
    assert drawing.model_copy() == drawing
    assert drawing.model_copy(deep=True).shape is not drawing.shape


def test_conflicts_are_refused_at_their_field():
    class Span(Config):
        low: int = 0
        high: int = 1

        def conflicts(self):
            if self.low > self.high:
                yield ("high",), f"must be at least low={self.low}, got {self.high}"
                yield ("low",), "never told beside the first"

    class Held(Config):
        spans: tuple[Span, ...] = ()

    assert list(Span().conflicts()) == []
    assert message(lambda: Span(low=2)) == "high: must be at least low=2, got 1"
    assert message(lambda: Span().model_copy(update={"low": 3})) == "high: must be at least low=3, got 1"
    assert message(lambda: Held(spans=[{}, {"high": -1}])) == "spans[1].high: must be at least low=0, got -1"


def test_defaults_are_validated():
    class Wrong(Config):
        """Its default is out of bounds."""

        n: int = Field(0, ge=1)

    assert message(Wrong) == "n: must be >= 1, got 0"


SHAPES = st.recursive(
    st.builds(Round, radius=st.floats(1e-300, 1e300))
    | st.builds(
        Square, side=st.integers(1, 100), filled=st.booleans(), corners=st.lists(st.integers(), max_size=3).map(tuple)
    ),
    lambda inner: st.builds(Union, parts=st.lists(inner, min_size=1, max_size=3).map(tuple), cut=st.none() | inner),
    max_leaves=6,
)
POINTS = st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 2)
DRAWINGS = st.builds(Drawing, shape=SHAPES, copies=st.integers(1), offset=st.none() | POINTS)


@pytest.mark.spec("VAR-TRIP-I1")
@given(drawing=DRAWINGS)
def test_round_trips(drawing):
    same = [
        Drawing.model_validate(drawing.model_dump()),
        Drawing.model_validate(drawing.model_dump(mode="json")),
        Drawing.model_validate(json.loads(drawing.model_dump_json())),
        Drawing.model_validate_json(drawing.model_dump_json()),
        pickle.loads(pickle.dumps(drawing)),
        copy.deepcopy(drawing),
        drawing.validated(),
    ]
    for other in same:
        assert other == drawing and hash(other) == hash(drawing)
        assert type(other.shape) is type(drawing.shape)


def test_equal_values_are_equal_however_they_were_written():
    plain, spelt = Drawing(), Drawing(shape={"kind": "round", "radius": 1}, copies=1, offset=None)
    assert plain == spelt and hash(plain) == hash(spelt) and len({plain, spelt}) == 1
    assert Round(radius=1.0) != Round(radius=2.0) and Round() != Square()


def test_lists_become_tuples_where_tuples_are_declared():
    class Nested(Config):
        """Tuples in tuples."""

        pairs: tuple[tuple[int, int], ...] = ()
        marked: Annotated[tuple[int, ...], "note"] = ()
        listed: list[int] = Field(default_factory=list)

    nested = Nested.model_validate({"pairs": [[1, 2], (3, 4)], "marked": [1], "listed": [1]})
    assert nested.pairs == ((1, 2), (3, 4)) and nested.marked == (1,) and nested.listed == [1]
    assert "pairs[0][1]: must be an integer" in message(lambda: Nested(pairs=[[1, "2"]]))
    assert "pairs[0]" in message(lambda: Nested(pairs=[[1, 2, 3]]))
    assert "pairs: " in message(lambda: Nested(pairs="12"))
    given = {"pairs": [[1, 2]]}
    Nested.model_validate(given)
    assert given == {"pairs": [[1, 2]]}, "what was given is not changed"


# --- JSON schema and metadata


def resolve(reference: str, schema: dict) -> dict:
    return schema["$defs"][reference.removeprefix("#/$defs/")]


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_schema_is_a_one_of_over_every_kind():
    schema = Drawing.model_json_schema()
    family = resolve(schema["properties"]["shape"]["$ref"], schema)
    members = [resolve(item["$ref"], schema) for item in family["oneOf"][:-1]]
    assert {item["properties"]["kind"]["const"] for item in members} == set(Shape.variants())
    assert family["oneOf"][-1] == {"type": "string", "enum": sorted(Shape.variants())}
    assert all("kind" in item["required"] for item in members)
    assert all(item["additionalProperties"] is False for item in members)


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_schema_of_combinators_refers_back_to_the_family():
    for schema in (Album.model_json_schema(), Shape.model_json_schema(), Union.model_json_schema()):
        text = json.dumps(schema)
        assert "x-hecate-family" not in text
        for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
            assert resolve(reference, schema)
        union = schema["$defs"]["test_shape.union"]["properties"]
        assert union["parts"]["items"] == {"$ref": "#/$defs/test_shape"}
        assert {"$ref": "#/$defs/test_shape"} in union["cut"]["anyOf"]


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_schema_accepts_what_the_models_accept():
    validator = jsonschema.Draft202012Validator(Drawing.model_json_schema())
    good = Drawing(shape=Union(parts=(Round(), Union(parts=(Square(corners=(1,)),)))))
    assert validator.is_valid(good.model_dump(mode="json"))
    assert validator.is_valid({"shape": "round"})
    for bad in ({"shape": "ronud"}, {"shape": {"radius": 1.0}}, {"shape": {"kind": "square", "r": 1}}):
        assert not validator.is_valid(bad)
        assert message(lambda bad=bad: Drawing.model_validate(bad))


@pytest.mark.spec("VAR-SCHEMA-I1")
def test_a_description_is_of_the_family_and_says_nothing_of_how_configs_are_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Shape, "_registry", dict(Shape._registry))

    class Scaled(Shape):
        """scaled: s x, one of its class's values."""

        kind: Literal["scaled"] = "scaled"
        s: float = 1.0
        wrong: float = 1.0
        base: float = 1.0

    fields = Scaled.model_json_schema()["properties"]
    formula = "scaled: s x, one of its class's values."
    assert [fields[name]["description"] for name in ("s", "wrong", "base")] == [formula] * 3


def test_formula_is_the_first_paragraph_of_the_docstring():
    class Wide(Round):
        """wide: a formula
        of two lines.

        And more.
        """

        kind: Literal["wide"] = "wide"  # type: ignore[assignment]

    del Shape._registry["wide"]
    assert Round.formula() == "x^2 + y^2 = r^2."
    assert Wide.formula() == "a formula of two lines."

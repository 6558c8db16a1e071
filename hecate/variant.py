"""Configuration values and the open discriminated union.

A *family* (feature maps, biases, ...) is an abstract `Variant`; each concrete subclass is a variant, told apart by the
text of its `kind` field. Subclassing registers. The family class itself is the type to annotate a field with: such a
field accepts an instance, a mapping with a `kind`, or a bare string.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from hecate.errors import ConfigError, did_you_mean, shorten
from hecate.frozen import content_hash
from hecate.schema import FAMILY, read_json, resolve_families

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


def _as_tuple(annotation: Any, value: Any) -> Any:
    """Lists become tuples where a field holds tuples: YAML and JSON cannot write tuples."""
    if get_origin(annotation) is Annotated or type(None) in get_args(annotation):
        options = [item for item in get_args(annotation) if item is not type(None)]
        return _as_tuple(options[0], value)
    if get_origin(annotation) is not tuple or not isinstance(value, list | tuple):
        return value
    items = get_args(annotation)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        return tuple(value)
    return tuple(_as_tuple(item, part) for item, part in zip(items, value, strict=True))


class _ConfigMeta(ModelMetaclass):
    """Turns pydantic's `ValidationError` into `ConfigError` at construction.

    Overriding `__init__` instead would make pydantic call it for nested values and lose paths.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        if args and (fields or len(args) > 1 or not (issubclass(cls, Variant) and cls.is_family())):
            raise ConfigError(f"{cls.__name__} takes named fields only, got {shorten(args[0])}")
        if issubclass(cls, Variant) and cls.is_family():
            return cls.model_validate(args[0] if args else fields)
        with _validating(cls):
            return super().__call__(*args, **fields)


MAX_NESTING = 16
"""Most variants inside one another; those that hold several, like `compose`, hold any number."""
_nesting: ContextVar[int] = ContextVar("nesting", default=0)


@contextmanager
def _validating(cls: type[Any]) -> Iterator[None]:
    """pydantic's findings become a `ConfigError`; a variant too deep inside others is one, too."""
    variant = issubclass(cls, Variant) and not cls.is_family()
    depth = _nesting.get() + variant
    if depth > MAX_NESTING:
        raise ConfigError(
            f"nested too deeply: more than {MAX_NESTING} variants inside one another, the last a "
            f"{cls._family} {cls.model_fields['kind'].default!r}; take fewer"
        )
    token = _nesting.set(depth)
    try:
        yield
    except ValidationError as error:
        raise ConfigError.from_validation(error) from None
    finally:
        _nesting.reset(token)


class Config(BaseModel, metaclass=_ConfigMeta):
    """A frozen, strict value: unknown fields, wrong types, NaN and infinity are `ConfigError`s.

    Copies are validated as well: `model_copy(update=...)` and instances nested in other configs."""

    # What `validated` returns, None for the object itself, and the hash; never copied.
    __slots__ = ("_checked", "_hash")
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        revalidate_instances="always",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        unknown = [key for key in data if key not in cls.model_fields]
        if unknown:
            known = [name for name in cls.model_fields if name != "kind"]
            listing = f"known fields: {', '.join(known)}." if known else "it has no fields."
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError(
                            "unknown_field",
                            "unknown field of {owner}; {listing}{hint}",
                            {"owner": cls.__name__, "listing": listing, "hint": did_you_mean(key, known)},
                        ),
                        loc=(str(key),),
                        input=data[key],
                    )
                    for key in unknown
                ],
            )
        return {key: _as_tuple(cls.model_fields[key].annotation, data[key]) for key in data}

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """`BaseModel.model_validate` that raises `ConfigError`."""
        with _validating(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """`BaseModel.model_validate_json` that raises `ConfigError`; no key may occur twice."""
        return cls.model_validate(read_json(json_data), **options)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced, validated like a new value."""
        fields = {
            name: getattr(self, name)
            for name in self.model_fields_set | set(update or ())
            if name in type(self).model_fields
        }
        return type(self).model_validate({**fields, **(update or {})})

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        """JSON schema; every family field becomes a `oneOf` over the kinds known at this moment."""
        return resolve_families(super().model_json_schema(*args, **options), _schemas)

    def __hash__(self) -> int:
        found: int | None = getattr(self, "_hash", None)
        if found is None:
            name = f"{type(self).__module__}.{type(self).__qualname__}"
            fields = (getattr(self, field, None) for field in type(self).model_fields)
            found = content_hash((name, *fields))
            object.__setattr__(self, "_hash", found)
        return found

    def validated(self) -> Self:
        """The same value, checked once per object: closes the hole of `model_construct`."""
        checked: Self | None = getattr(self, "_checked", self)
        if checked is self:
            checked = type(self).model_validate(self)
            object.__setattr__(checked, "_checked", None)
            object.__setattr__(self, "_checked", checked)
        return self if checked is None else checked


class Variant(Config):
    """One choice of a family; `kind` names it in YAML, JSON and error messages.

    A family is declared with `class Bias(Variant, family="bias")`, a variant by subclassing the family with a `kind:
    Literal["huber"] = "huber"` field.
    """

    kind: str

    _family: ClassVar[str] = ""
    _registry: ClassVar[dict[str, type[Variant]]] = {}

    def __init_subclass__(cls, family: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if family:
            cls._family, cls._registry = family, {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        options.pop("family", None)
        super().__pydantic_init_subclass__(**options)
        field = cls.model_fields["kind"]
        kind = field.default
        if not isinstance(kind, str):
            if get_origin(field.annotation) is Literal:
                raise ConfigError(
                    f"{cls.__qualname__} needs a default for its kind: "
                    f"`kind: Literal[{get_args(field.annotation)[0]!r}] = ...`"
                )
            return
        if cls.__pydantic_complete__ and get_args(field.annotation) != (kind,):
            raise ConfigError(f"{cls.__qualname__} must pin its kind: `kind: Literal[{kind!r}] = {kind!r}`")
        taken = cls._registry.get(kind)
        identity = (cls.__module__, cls.__qualname__)
        if taken is not None and (taken.__module__, taken.__qualname__) != identity:
            raise ConfigError(
                f"{cls._family} kind {kind!r} is taken by {taken.__module__}.{taken.__qualname__}; "
                f"give {cls.__qualname__} another kind"
            )
        cls._registry[kind] = cls

    @classmethod
    def variants(cls) -> dict[str, type[Self]]:
        """Every registered variant below this class by kind, those defined by the user included."""
        found = {kind: item for kind, item in cls._registry.items() if issubclass(item, cls)}
        return dict(sorted(found.items()))

    @classmethod
    def is_family(cls) -> bool:
        """Whether this is the family itself or an abstract helper rather than a variant."""
        return not isinstance(cls.model_fields["kind"].default, str)

    @classmethod
    def formula(cls) -> str:
        """First paragraph of the docstring, `elu: phi(x) = ...`, without the name."""
        first = (inspect.getdoc(cls) or "").split("\n\n", 1)[0]
        return " ".join(first.split()).partition(": ")[2]

    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, cls) and not value.is_family():
            return type(value).model_validate(value)
        fields = {"kind": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping):
            raise PydanticCustomError(
                "wrong_kind",
                "must be a {family} kind, a mapping with a 'kind', or an instance, got {given}",
                {"family": cls._family, "given": f"{shorten(value)} ({type(value).__name__})"},
            )
        known = cls.variants()
        kind = fields.get("kind")
        if kind is None:
            raise PydanticCustomError(
                "unknown_kind",
                "needs a 'kind'; known {family} kinds: {known}",
                {"family": cls._family, "known": ", ".join(known)},
            )
        if not isinstance(kind, str) or kind not in known:
            raise PydanticCustomError(
                "unknown_kind",
                "unknown {family} kind {kind}; known: {known}.{hint}",
                {
                    "family": cls._family,
                    "kind": shorten(kind),
                    "known": ", ".join(known),
                    "hint": did_you_mean(kind, known),
                },
            )
        return known[kind].model_validate(dict(fields))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if Config in cls.__bases__ or not cls.is_family():
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls._parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value, info: value.model_dump(mode=info.mode), info_arg=True
            ),
            metadata={"pydantic_js_functions": [lambda schema, handler: {FAMILY: cls._family}]},
        )

    @classmethod
    def _union_schema(cls) -> JsonSchemaValue:
        known = cls.variants()
        return {
            "title": cls._family,
            "oneOf": [
                *({"$ref": f"#/$defs/{cls._family}.{kind}"} for kind in known),
                {"type": "string", "enum": list(known)},
            ],
        }


def _schemas(family: str) -> tuple[JsonSchemaValue, dict[str, JsonSchemaValue]]:
    """The union of a family, and the schema of each of its kinds."""
    root = next(root for root in Variant.__subclasses__() if root._family == family)
    kinds = root.variants().items()
    return root._union_schema(), {kind: super(Config, variant).model_json_schema() for kind, variant in kinds}

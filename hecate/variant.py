"""Configuration values and the open discriminated union.

A *family* (feature maps, biases, ...) is an abstract `Variant`; each concrete subclass is a variant, identified by the
text of its `kind` field. Subclassing registers it. A field annotated with the family class accepts an instance, a
mapping with a `kind`, or the kind alone as a string. A family's package imports all of its files (`import_variants`),
so that adding a variant to the library takes one new file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from itertools import chain, takewhile
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from hecate.errors import MEANT, ConfigError, Problem, did_you_mean, meant, not_known, shorten

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

Key = TypeVar("Key")
Value = TypeVar("Value")
Class = TypeVar("Class", bound=type)
Schema = dict[str, Any]
Conflicts = Iterator[tuple[tuple[str | int, ...], str]]
FAMILY = "x-hecate-family"
"""Key of a placeholder for a family in a JSON schema."""


class FrozenDict(dict[Key, Value]):
    """A mapping that refuses changes and can be hashed."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is frozen; build a new one with {**mapping, key: value}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset((content_hash(k), content_hash(v)) for k, v in self.items()))

    def __reduce__(self) -> tuple[type[FrozenDict[Key, Value]], tuple[dict[Key, Value]]]:
        return type(self), (dict(self),)


def content_hash(value: Any) -> int:
    """A hash that is the same in every process; Python salts its hashes of strings."""
    if isinstance(value, str):
        digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big")
    if isinstance(value, tuple):
        return hash(tuple(map(content_hash, value)))
    return 0x6E6F6E65 if value is None else hash(value)  # Python 3.11 hashes None by its address


def briefly(value: Any) -> Any:
    """A field's value in the form of `Config.brief`: a variant with default settings becomes its kind."""
    if isinstance(value, Variant):
        fields = value.brief()
        return {"kind": value.kind, **fields} if fields else value.kind
    if isinstance(value, Config):
        return value.brief()
    if isinstance(value, Mapping):
        return {key: briefly(item) for key, item in value.items()}
    return tuple(map(briefly, value)) if isinstance(value, tuple) else value


def _as_tuple(annotation: Any, value: Any) -> Any:
    """A value whose lists become tuples where the field holds tuples: YAML and JSON have no tuples."""
    if get_origin(annotation) is Annotated or type(None) in get_args(annotation):
        options = [item for item in get_args(annotation) if item is not type(None)]
        return _as_tuple(options[0], value)
    if isinstance(value, list) and get_origin(annotation) in (Union, UnionType):
        for item in get_args(annotation):
            if tuple in (get_origin(item), get_origin(next(iter(get_args(item)), None))):
                return _as_tuple(item, value)
    if get_origin(annotation) is not tuple or not isinstance(value, list | tuple):
        return value
    items = get_args(annotation)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        return tuple(value)
    return tuple(_as_tuple(item, part) for item, part in zip(items, value, strict=True))


MAX_DEPTH = 128
"""Maximum nesting depth of the values of a file, which are read and written recursively."""


def read_json(text: str | bytes | bytearray, *, strict: bool = False) -> Any:
    """The value of a JSON text; refuses duplicate keys. `strict`, for files from untrusted sources, also refuses NaN,
    infinity, integers of more than 64 bits and nesting deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(text, object_pairs_hook=_mapping_of, parse_constant=int if strict else None)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("not valid JSON: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    level, depth = [value] if strict else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested more than {MAX_DEPTH} deep")
        if any(isinstance(item, int) and abs(item) >= 1 << 64 for item in level):
            raise ConfigError("an integer of more than 64 bits")
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = list(chain.from_iterable(inner))
    return value


def _mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ConfigError("given twice in one JSON object; keep one", (key,))
        mapping[key] = value
    return mapping


def _naming_hint(cls: Any, argument: Any) -> str:
    """Hint on what to write instead of a positional argument."""
    if isinstance(argument, str | Mapping):
        return f"; {cls.__name__}.model_validate reads a name or a mapping"
    fields = [name for name in cls.model_fields if name != "kind"]
    return f"; write {fields[0]}=..." if fields else "; it has no fields"


# `Field` is not among the field specifiers: type checkers recognise the default of a specifier by keyword only.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _ConfigMeta(ModelMetaclass):
    """Turns pydantic's `ValidationError` into `ConfigError` at construction.

    Overriding `__init__` instead would make pydantic call it for nested values and lose paths.
    """

    if not TYPE_CHECKING:  # type checkers would see this signature instead of the fields

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            if args and (fields or len(args) > 1 or not (issubclass(cls, Variant) and cls.is_family())):
                given = f"got {shorten(args[0])}{_naming_hint(cls, args[0])}"
                raise ConfigError(f"{cls.__name__} takes named fields only, {given}")
            if issubclass(cls, Variant) and cls.is_family():
                return cls.model_validate(args[0] if args else fields)
            with _validating(cls):
                return super().__call__(*args, **fields)


MAX_NESTING = 16
"""Maximum nesting depth of variants; a variant that holds a list of others, like `compose`, may hold any number."""
_nesting: ContextVar[int] = ContextVar("nesting", default=0)


@contextmanager
def _validating(cls: type[Any]) -> Iterator[None]:
    """Context that turns pydantic's errors into a `ConfigError`, and refuses variants nested too deeply."""
    variant = issubclass(cls, Variant) and not cls.is_family()
    depth = _nesting.get() + variant
    if depth > MAX_NESTING:
        last = f"the last a {cls._family} {cls.model_fields['kind'].default!r}"
        raise ConfigError(f"nested too deeply: more than {MAX_NESTING} variants inside one another, {last}; take fewer")
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

    # Caches of `validated` (None stands for the object itself) and of the hash; never copied.
    __slots__ = ("_checked", "_hash")
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        revalidate_instances="always",
    )

    follows: ClassVar[tuple[str, ...]] = ()
    """Fields whose values, if left out, follow from other fields."""
    retired: ClassVar[Mapping[str, str]] = {}
    """Fields of earlier versions, and why they are not needed: files that have them still load, with a warning."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for key in cls.retired.keys() & data.keys():
            warnings.warn(f"{cls.__name__}.{key} is left out: {cls.retired[key]}", FutureWarning, stacklevel=2)
        data = {key: value for key, value in data.items() if key not in cls.retired}
        unknown = [str(key) for key in data if key not in cls.model_fields]
        if unknown:
            known = [name for name in cls.model_fields if name != "kind"]
            listing = f" Known fields: {', '.join(known)}." if known else " It has no fields."
            sentence = f"unknown field of {cls.__name__}."
            raise ConfigError(Problem((key,), sentence + cls._hint(key, known) + listing) for key in unknown)
        return {key: _as_tuple(cls.model_fields[key].annotation, data[key]) for key in data}

    @classmethod
    def _hint(cls, key: str, known: list[str]) -> str:
        """Suggestion for an unknown field: a known field, or the known field that has it as a field of its own."""
        return meant(key, known) or did_you_mean(key, known, 0.7) or cls._holder_of(key) or did_you_mean(key, known)

    @classmethod
    def _holder_of(cls, key: str) -> str:
        ours = (key, *MEANT.get(key, ()))
        for name, field in cls.model_fields.items():
            for item in (field.annotation, *get_args(field.annotation)):
                if not (isinstance(item, type) and issubclass(item, Config)):
                    continue
                classes = {"": item} if not issubclass(item, Variant) else item.variants()
                default = getattr(field.default, "kind", "")
                for kind in sorted(classes, key=lambda kind: (kind != default, kind not in ours)):
                    for word in ours:
                        if word in classes[kind].model_fields:
                            start = f"'kind': {kind!r}, " if kind else ""
                            return f" It is a field of {name}: {name}={{{start}{word!r}: ...}}."
        return ""

    def settle(self) -> None:
        """Fills in the fields of `follows` that were left out; runs before `conflicts`."""

    def conflicts(self) -> Conflicts:
        """Conflicts between settings: for each the path of the field to change, and a sentence; the first is raised as
        a `ConfigError`."""
        yield from ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        self.settle()
        for path, sentence in self.conflicts():
            raise ConfigError(sentence, path)
        return self

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
        names = (self.model_fields_set | set(update or ())) & type(self).model_fields.keys()
        return type(self).model_validate({name: getattr(self, name) for name in names} | dict(update or {}))

    if not TYPE_CHECKING:  # otherwise type checkers would allow setting any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except ValidationError:
                changed = f"model_copy(update={{{name!r}: ...}}) gives a changed copy"
                raise ConfigError(f"{type(self).__name__} is frozen; {changed}") from None

    def brief(self) -> dict[str, Any]:
        """The fields that are not at their default, as plain values: a mapping that is read as the same config."""
        changes = {}
        for name, field in type(self).model_fields.items():
            value = vars(self).get(name)
            usual = field.get_default(call_default_factory=True)
            of_itself = name not in self.model_fields_set if name in self.follows else value == usual
            if not of_itself:
                changes[name] = briefly(value)
        return changes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.brief().items())})"

    __str__ = __repr__

    # `model_post_init` builds attributes in advance, because torch.compile cannot trace the construction of a model.
    # They are not fields, so that every copy has to build them again.
    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self.model_post_init(None)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    __copy__ = __deepcopy__

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        """JSON schema in which every field of a family is a `oneOf` over the kinds registered so far."""
        return resolve_families(super().model_json_schema(*args, **options))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        """pydantic's schema, with a description of each property from docstrings."""
        schema = handler(core)
        for name, entry in handler.resolve_ref_schema(schema).get("properties", {}).items():
            entry.setdefault("description", about_field(cls, name))
        return schema

    def __hash__(self) -> int:
        digest: int | None = getattr(self, "_hash", None)
        if digest is None:
            name = f"{type(self).__module__}.{type(self).__qualname__}"
            fields = (getattr(self, field, None) for field in type(self).model_fields)
            try:
                digest = content_hash((name, *fields))
            except TypeError as error:  # a list or a dict could change after kernels are made of it
                sentence = f"{error} among the values of its fields; declare tuples, of pairs in place of a dict"
                raise ConfigError(f"{type(self).__name__}: {sentence}") from None
            object.__setattr__(self, "_hash", digest)
        return digest

    def validated(self) -> Self:
        """The same value, validated once per object, as `model_construct` skips validation."""
        checked: Self | None = getattr(self, "_checked", self)
        if checked is self:
            checked = type(self).model_validate(self)
            object.__setattr__(checked, "_checked", None)
            object.__setattr__(self, "_checked", checked)
        return self if checked is None else checked


_BLOCK = re.compile(r"\n\s*\n|\n(?= {0,4}\w+(?:, \w+)*:\s)")
_ENTRY = re.compile(r" {0,4}(\w+(?:, \w+)*): ")
_EQUATION = re.compile(r"\$[^$]+\$")
_CITED = re.compile(r"\s*\[[A-Z]+-[^\]]*\]")


def about_field(cls: type[Any], name: str) -> str:
    """Description of a field from the docstrings of its class and bases: its entry in a section (`as in X` refers to
    X's entry); else the description of its family, the first two sentences that name it, or the first paragraph."""
    bases = (base for base in cls.__mro__ if base.__module__ not in ("builtins", "pydantic.main", __name__))
    docs = [inspect.cleandoc(vars(base).get("__doc__") or "") for base in bases]
    blocks = [" ".join(_CITED.sub("", block).split()) for doc in docs for block in _BLOCK.split(doc)]
    entries = [(match[1].split(", "), block[match.end() :]) for block in blocks if (match := _ENTRY.match(block))]
    entry = next((text for names, text in entries if name in names), "")
    if said_by := re.match(r"as in `(?:([\w.]+)\.)?(\w+)`", entry):
        other = getattr(sys.modules.get(said_by[1] or cls.__module__), said_by[2], None)
        entry = about_field(other, name) if isinstance(other, type) else entry
    family = cls.model_fields[name].annotation if issubclass(cls, Config) else None
    if entry or (isinstance(family, type) and issubclass(family, Variant)):
        return entry or " ".join((inspect.getdoc(family) or "").split("\n\n")[0].split())
    prose = [sentence for block in blocks if not _ENTRY.match(block) for sentence in re.split(r"(?<=\.) ", block)]
    said = [sentence for sentence in prose if re.search(rf"(?<!['\w]){name}\b", sentence)] if name != "kind" else []
    return " ".join(said[:2]) or next(filter(None, blocks), name)


class Variant(Config):
    """One choice of a family; `kind` names it in YAML, JSON and error messages.

    A family is declared with `class Bias(Variant, family="bias")`, a variant by subclassing the family with a `kind:
    Literal["huber"] = "huber"` field. Of the family's methods, `_derivatives` are those that fall back to `torch.func`,
    `_formulas` those that a variant's `kernel` describes, and `_follows` maps methods to the formulas that they follow
    from: a subclass that redefines such a formula without them gets the family's versions of these methods.
    """

    kind: str

    _derivatives: ClassVar[tuple[str, ...]] = ()
    _formulas: ClassVar[tuple[str, ...]] = ()
    _follows: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    _declares: ClassVar[bool] = False  # whether its `kernel` still describes its formulas
    _derived: ClassVar[bool] = True  # whether it defines all of `_derivatives`
    _family: ClassVar[str] = ""
    _family_type: ClassVar[type[Variant]]
    _registry: ClassVar[dict[str, type[Variant]]] = {}

    def __init_subclass__(cls, family: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if family:
            cls._family, cls._family_type, cls._registry = family, cls, {}
        for name, formulas in cls._follows.items():  # in this order, as one may follow from another
            namespace = vars(cls)
            if name not in namespace and not namespace.keys().isdisjoint(formulas):
                setattr(cls, name, cls._of_family(name))

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        options.pop("family", None)
        super().__pydantic_init_subclass__(**options)
        cls._declares = still_declared(cls, "kernel", cls._formulas)
        cls._derived = all(inspect.getattr_static(cls, name) is not cls._of_family(name) for name in cls._derivatives)
        field = cls.model_fields["kind"]
        kind = field.default
        if not isinstance(kind, str):
            if get_origin(field.annotation) is Literal:
                pinned = f"`kind: Literal[{get_args(field.annotation)[0]!r}] = ...`"
                raise ConfigError(f"{cls.__qualname__} needs a default for its kind: {pinned}")
            return
        if cls.__pydantic_complete__ and get_args(field.annotation) != (kind,):
            raise ConfigError(f"{cls.__qualname__} must pin its kind: `kind: Literal[{kind!r}] = {kind!r}`")
        taken = cls._registry.get(kind)
        identity = (cls.__module__, cls.__qualname__)
        if taken is not None and (taken.__module__, taken.__qualname__) != identity:
            owner = f"{taken.__module__}.{taken.__qualname__}"
            raise ConfigError(f"{cls._family} kind {kind!r} is taken by {owner}; give {cls.__qualname__} another kind")
        cls._registry[kind] = cls

    @classmethod
    def variants(cls) -> dict[str, type[Self]]:
        """Every registered variant below this class, by kind, including the user's."""
        return {kind: item for kind, item in sorted(cls._registry.items()) if issubclass(item, cls)}

    @classmethod
    def is_family(cls) -> bool:
        """True if this is the family itself or an abstract helper rather than a variant."""
        return not isinstance(cls.model_fields["kind"].default, str)

    @classmethod
    def _of_family(cls, name: str) -> Any:
        """A method or property as defined for all variants, by the family or by the helper class that adds it."""
        return next(vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base))

    @classmethod
    def hand_written(cls) -> bool:
        """True if every derivative is written by hand rather than left to `torch.func`."""
        return cls._derived

    def kernel_form(self) -> Any:
        """The form in which kernels compute the formulas, declared by a variant as `kernel`; None leaves them to torch,
        as when a subclass of the declaring class redefines a formula."""
        return self.kernel if self._declares else None  # type: ignore[attr-defined]

    def token_form(self) -> Any:
        """The form for kernels that go token by token, where formulas need be neither linear nor coordinatewise,
        declared by a variant as `token`; else its `kernel_form`."""
        if still_declared(self, "token", self._formulas):
            return self.token  # type: ignore[attr-defined]
        return self.kernel_form()

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
            shown = f"{shorten(value)} ({type(value).__name__})"
            if callable(value):
                shown += f"; a function or module of your own becomes one as a class with a kind, see {cls.__name__}"
            name = f"an {cls._family}" if cls._family[:1] in "aeiou" else f"a {cls._family}"
            raise ConfigError(f"must be {name} kind, a mapping with a 'kind', or an instance, got {shown}")
        known, kind = cls.variants(), fields.get("kind")
        if not known and cls is not cls._family_type:
            raise ConfigError(f"{cls.__qualname__} is no {cls._family} kind; pin one: `kind: Literal['own'] = 'own'`")
        if kind is None:
            raise ConfigError(f"needs a 'kind'; known {cls._family} kinds: {', '.join(known)}")
        if not isinstance(kind, str) or kind not in known:
            tip = "One of your own needs its module imported, with --import MODULE on the command line"
            raise ConfigError(f"unknown {cls._family} kind {shorten(kind)}{not_known(kind, known)} {tip}")
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


def resolve_families(schema: Schema) -> Schema:
    """A schema with family placeholders replaced by references, and with the definitions that they refer to: the union
    of each family, and the schema of each of its kinds.

    pydantic cannot do this: the members of a family are not yet known when a class is built, and the union is
    recursive, because combinators hold members of their own family.
    """
    definitions: Schema = schema.pop("$defs", {})

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(item) for item in node]
        if not isinstance(node, dict):
            return node
        if FAMILY in node:
            define(node[FAMILY])
            rest = {key: visit(value) for key, value in node.items() if key != FAMILY}
            return {**rest, "$ref": f"#/$defs/{node[FAMILY]}"}
        return {key: visit(value) for key, value in node.items()}

    def define(family: str) -> None:
        if family in definitions:
            return
        root = next(root for root in Variant.__subclasses__() if root._family == family)
        known = root.variants()
        kinds = [*({"$ref": f"#/$defs/{family}.{kind}"} for kind in known), {"type": "string", "enum": list(known)}]
        definitions[family] = {"title": family, "oneOf": kinds}
        for kind, variant in known.items():
            inner = super(Config, variant).model_json_schema()
            definitions.update(inner.pop("$defs", {}))
            # In the union a variant is recognised by its kind, which is therefore required.
            inner["required"] = sorted({"kind", *inner.get("required", [])})
            definitions[f"{family}.{kind}"] = visit(inner)

    resolved = visit(schema)
    for name in list(definitions):
        definitions[name] = visit(definitions[name])
    return {**resolved, "$defs": definitions} if definitions else dict(resolved)


def still_declared(value: object, trait: str, formulas: tuple[str, ...]) -> bool:
    """True if a class, or that of an instance, declares a trait and no subclass of the declaring one redefines one of
    these formulas.

    A subclass that changes a formula inherits the declaration about the old one, which no longer holds.
    """
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if trait in vars(cls):
            return True
        if not vars(cls).keys().isdisjoint(formulas):
            return False
    return False


def equation(cls: type) -> str:
    """The equations of a variant in LaTeX, one a line, each between dollars: the section `Formula:` of its docstring,
    in the notation of `docs/pages/notation.md`. Empty if its own docstring has none: it is not inherited, since a
    subclass may compute something else."""
    lines = inspect.cleandoc(cls.__doc__ or "").split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("Formula: ")), len(lines))
    return "\n".join(_EQUATION.findall(" ".join(takewhile(str.strip, lines[start:]))))


def delegating(field: str, *names: str) -> Callable[[Class], Class]:
    """Class decorator that delegates these properties and methods of a variant to the variant in a field."""

    def of_field(name: str) -> property:
        return property(lambda self: getattr(getattr(self, field), name))

    def decorated(cls: Class) -> Class:
        for name in names:
            setattr(cls, name, of_field(name))
        cls._derived |= set(cls._derivatives) <= set(names)  # type: ignore[attr-defined]
        return cls

    return decorated


def import_variants(package: str, *families: type[Variant]) -> list[str]:
    """Imports every file of a package and adds the variants defined there to the package's names; returns these.

    Adding a variant takes one new file and no other edit, except for type checkers, which read `__init__.pyi`.
    """
    home = vars(sys.modules[package])
    for item in pkgutil.iter_modules(home["__path__"], f"{package}."):
        import_module(item.name)
    known = [cls for family in families for cls in family.variants().values()]
    classes = {cls.__name__: cls for cls in known if cls.__module__.startswith(f"{package}.")}
    home.update(classes)
    return sorted(classes)

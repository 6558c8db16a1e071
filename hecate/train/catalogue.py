"""Catalogue of all variants, named rules and presets, with their settings; and of this machine: versions, missing
extras, the engines and kernels that run here, and compiling kernels before their first use."""

from __future__ import annotations

import inspect
import os
import platform
import re
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel

from hecate import activation, algorithm, bias, formula, gating, phi, readout, retention, structure
from hecate.data import DataConfig
from hecate.engine import Engine, Plan, choose, exact_engines, kernel_verdicts, verdicts
from hecate.errors import MESSAGE, ConfigError, install_line, not_known, printable
from hecate.models import LanguageModel
from hecate.nn.positions import Position
from hecate.optim import OptimizerKind
from hecate.rule import RULES, MemoryConfig, MemoryRule, named_rule
from hecate.train import compose
from hecate.train.compose import FILES, dump_experiment, load_experiment, preset_about
from hecate.train.config import ExperimentConfig
from hecate.train.document import dump_yaml, flow, parse_value, short
from hecate.train.loggers import LoggerKind
from hecate.train.report import Table
from hecate.train.run import versions
from hecate.variant import Variant

PACKAGES = ("torch", "numpy", "pydantic", "numba", "flash-linear-attention", "triton", "matplotlib")
EXTRAS = {
    "cpu": ("exact kernels on a CPU", ("numba",)), "gpu": ("kernels on a GPU", ("triton",)),
    "plot": ("figures of runs and reports", ("matplotlib",)),
    "data": ("token shards and tokenizers", ("tokenizers", "pyarrow")),
    "hf": ("models in transformers: adopt, graft, export", ("transformers", "tokenizers", "accelerate")),
    "serve": ("hecate serve", ("starlette", "uvicorn")),
    "track": ("loggers beside metrics.jsonl", ("tensorboard", "wandb", "trackio")),
}  # fmt: skip
"""Extras: the purpose of each, and the modules that it installs."""

LENGTH = 1024
"""Length of the sequence for which tables choose engines: many tokens, unlike a decoding step."""

_ROOTS: tuple[type[Variant], ...] = (
    phi.FeatureMap, bias.Bias, retention.Retention, retention.Link, algorithm.Algorithm, structure.Structure,
    activation.Activation, gating.Gating, readout.Readout, Position, DataConfig, OptimizerKind, LoggerKind,
)  # fmt: skip
VARIANTS = {"phi" if root is phi.FeatureMap else root._family: root for root in _ROOTS}
_PRINTED: dict[type, Callable[[Any], Any]] = {
    bias.Bias: formula.formula_of,
    activation.Activation: formula.activation_nodes,
    retention.Retention: formula.retention_formula,
    phi.FeatureMap: formula.map_formula,
}
_TEXTS: dict[str, Callable[[Any], list[formula.Text]]] = {
    "bias": lambda variant: [*attrgetter("psi", "pull")(formula.bias_formula(variant))],
    "retention": formula.retention_texts,
    "link": lambda variant: formula.retention_texts(retention.Bregman(link=variant))[2:],
    "algorithm": formula.algorithm_texts,
    "activation": lambda variant: [formula.activation_text(variant)],
    "phi": lambda variant: [formula.printable(formula.map_formula(variant))],
}
_FAST = (algorithm.Algorithm, structure.Structure)  # families whose variants engines accept by their declared traits
_TRAITS = re.compile(r"^Traits: (.+?)(?=\n[A-Z]\w*: |\Z)", re.DOTALL | re.MULTILINE)
_REFERENCE = re.compile(r"References?: (.+?)(?=\n\s*\n|\[[A-Z]+-|\Z)", re.DOTALL)


def catalogue(family: str | None = None) -> Table:
    """Header and rows of the table of one family, or of all families. [TRAIN-LIST-D1]"""
    if family is None:
        kinds = {name: list(root.variants()) for name, root in VARIANTS.items()}
        named = {**kinds, "engines": list(Engine.registry), "rules": list(RULES), "presets": compose.folded_presets()}
        return ["family", "count", "kinds"], [[name, str(len(names)), " ".join(names)] for name, names in named.items()]
    _check_known("family", family, FAMILIES)
    return FAMILIES[family]()


def _check_known(what: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ConfigError(f"no {what} {name!r}{not_known(name, names)}")


def variant_rows(root: type[Variant]) -> Table:
    """Kind, formula, traits, gradient status and paper of every variant."""
    rows = []
    for kind, variant in root.variants().items():
        # Families without derivatives have neither a traits nor a gradient column.
        derivative = "hand-written" if variant.hand_written() else "torch.func"
        cells = [_traits(variant), derivative] if root._derivatives else []
        cells += [_kernel(variant)] if root in _PRINTED else [_exact(variant)] if root in _FAST else []
        rows.append([kind, variant.formula(), *cells, _section(_REFERENCE, variant)])
    kernel = ["kernel"] if root in _PRINTED else ["exact engines"] if root in _FAST else []
    return ["kind", "formula", *(["traits", "gradient"] if root._derivatives else []), *kernel, "paper"], rows


def formula_text(text: str, family: str = "bias") -> str:
    """The functions that kernels are printed from, for a variant of one of the families in `_TEXTS`, given as a kind or
    a mapping; each with its constants c. [ENG-FORMULA-D3]

    Raises Unprintable, with the reason, if there are none."""
    if family not in _TEXTS:
        raise ConfigError(f"no formulas of family {family!r}{not_known(family, _TEXTS)}")
    value, _ = parse_value(text, f"the {family}")
    kind = value.get("kind") if isinstance(value, dict) else value
    others = [name for name in _TEXTS if isinstance(kind, str) and kind in VARIANTS[name].variants()]
    if others and family not in others:
        a, b = (f"{'an' if name[0] == 'a' else 'a'} {name}" for name in (family, others[0]))
        raise ConfigError(f"{kind!r} is not {a} but {b}: give --family {' or '.join(others)}")
    texts = _TEXTS[family](VARIANTS[family].model_validate(value))
    if not texts:
        raise formula.Unprintable(f"{family} {kind!r} changes nothing, and kernels leave it out")
    return "\n".join(f"{function.source}# c = {function.numbers}\n" for function in texts)


def _kernel(variant: Any) -> str:
    """Kernels of a variant at its default settings: printed ones, or the token loop and the reason."""
    try:
        # At its defaults: whether a formula can be printed may depend on settings.
        form: Any = _PRINTED[variant._family_type](variant())
    except ConfigError:
        return "depends on its settings"
    of_keys = issubclass(variant, phi.FeatureMap)  # memories compute features in torch
    if isinstance(form, str):
        return f"{'torch' if of_keys else 'token loop'}: {form}"
    if of_keys:
        return "printed, in optimisers" + " and on a GPU" * formula.is_cheap(variant())
    if isinstance(form, formula.RetentionFormula):
        return "printed" if form.cellwise else "printed, for whole weights"
    return "printed" if getattr(form, "coordinatewise", True) else "printed, for whole rows"


def _exact(variant: Any) -> str:
    """Engines other than the token loop that run the default config with this variant, or why no kernel does."""
    try:
        config = MemoryConfig.model_validate({variant._family_type.__name__.lower(): variant()})
    except ConfigError:
        return "depends on its settings"
    engines = exact_engines(config)
    if not engines:
        return f"token loop: {verdicts(Plan.sketch(config, length=LENGTH))['compiled']}"
    return ", ".join(engines)


def _section(pattern: re.Pattern[str], variant: type[Variant]) -> str:
    match = pattern.search(inspect.getdoc(variant) or "")
    return " ".join(match[1].split()).rstrip(". ") if match else ""


def _traits(variant: Any) -> str:
    """Declared traits of a phi at its default settings, or the settings that they depend on; for other families the
    section `Traits:` of the docstring."""
    if not issubclass(variant, phi.FeatureMap):
        return _section(_TRAITS, variant)
    required = {name: field.annotation for name, field in variant.model_fields.items() if field.is_required()}
    try:  # with the smallest value that each required field accepts
        example = variant(**{n: 2 if kind is int else 1.0 if kind is float else "elu" for n, kind in required.items()})
        declared = example.traits()._asdict().items()
    except ConfigError:
        return f"depends on {', '.join(required)}"
    shown = ((k, f"{v:g}" if isinstance(v, float) else v) for k, v in declared if v not in (False, None, "none"))
    return ", ".join(k if v is True else f"{k}={v}" for k, v in shown)


def _rules() -> Table:
    rows = []
    for name, rule in RULES.items():
        config = rule.config
        knobs = [getattr(config, knob).kind for knob in MemoryRule.model_fields]
        engine = choose(Plan.sketch(config, length=LENGTH)).name
        rows.append([name, ", ".join([*knobs, *_other_settings(config)]), engine, rule.text])
    return ["rule", "knobs and settings", "engine", "paper"], rows


def _other_settings(config: MemoryConfig) -> list[str]:
    """The fields other than the four knobs that are not at their default, in the form of `--set`."""
    plain = MemoryConfig()
    others = [(name, value) for name, value in config if name not in MemoryRule.model_fields]
    fields = [f"{name}={getattr(value, 'kind', value)}" for name, value in others if value != getattr(plain, name)]
    return fields if not config.structure.transposed else ["structure.learns=key", *fields]


def _engines() -> Table:
    said = verdicts(Plan.sketch(MemoryConfig(), length=LENGTH))
    rows = [
        [name, (inspect.getdoc(type(engine)) or "").split("\n\n")[0].removeprefix(f"{name}: "), said[name]]
        for name, engine in Engine.registry.items()
    ]
    return ["engine", "what it is", f"of {LENGTH} tokens of MemoryConfig()"], rows


def _presets() -> Table:
    shipped = {name: load_experiment(name) for name in FILES}
    rows = [[name, config.data.kind, preset_about(name), str(config.budget.steps)] for name, config in shipped.items()]
    rows += [[f"{name}-RULE", "", f"{name} with the memory of that rule", ""] for name in compose.BY_RULE]
    rows += [["lm-SIZE-" + name, "", preset_about(name, compose.BACKBONES), ""] for name in compose.BACKBONES]
    return ["preset", "data", "what it is", "steps"], rows


FAMILIES: dict[str, Callable[[], Table]] = {
    **{name: partial(variant_rows, root) for name, root in VARIANTS.items()},
    "engines": _engines,
    "rules": _rules,
    "presets": _presets,
}
"""The function that makes each family's table."""


def machine() -> Table:
    """Table of versions, threads and devices."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = [[name, version] for name, version in versions(PACKAGES).items()]
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    rows = [["python", platform.python_version()], *packages, ["machine", system], ["torch on a CPU", threads]]
    return ["what", "here"], [*rows, ["CUDA", ", ".join(devices) or "no device"]]


def missing() -> Table:
    """Table of the extras with a missing package: the purpose of each, and the line that installs it."""
    # Found without importing: some imports take seconds, or need a device.
    lacks = {extra: [name for name in modules if find_spec(name) is None] for extra, (_, modules) in EXTRAS.items()}
    rows = [[extra, EXTRAS[extra][0], ", ".join(names), install_line(extra)] for extra, names in lacks.items() if names]
    return ["extra", "for", "not installed", "install it with"], rows


def engines() -> Table:
    """Table of the number of named rules that each engine runs on each device, and for how many `auto` chooses it; or
    why it runs none."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    calls = {on: [Plan.sketch(config, length=LENGTH, device=on) for config, *_ in RULES.values()] for on in devices}
    chosen = {on: [choose(call).name for call in asked] for on, asked in calls.items()}

    def of(engine: Engine, on: str) -> str:
        # A sketch has no tensors, so that nothing is allocated.
        said = [engine.unable(call) for call in calls[on] if engine.excludes(call.config) is None]
        if None in said:
            return f"runs {said.count(None)} of {len(RULES)} rules, auto takes it for {chosen[on].count(engine.name)}"
        return f"runs none: {said[0] if said else 'no named rule is for it'}"

    rows = [[name, *(of(engine, on) for on in devices)] for name, engine in Engine.registry.items()]
    return ["engine", *(f"{LENGTH} tokens on {on}" for on in devices)], rows


def kernels() -> Table:
    """Table of the GPU kernels that were tested on this machine: passed, or the reason why not used.
    [TRAIN-DOCTOR-D2]"""

    def shown(facts: dict[str, Any]) -> list[str]:
        rule = ", ".join(f"{name}={setting}" for name, setting in facts.get("rule", {}).items()) or "MemoryConfig()"
        widths = " x ".join(map(str, facts.get("widths", ())))
        return [" ".join([rule, *facts.get("beside", ())]), f"{facts.get('dtype')} {widths}", str(facts.get("card"))]

    rows = [[*shown(facts), reason or "passed its parity test"] for facts, reason in kernel_verdicts()]
    return ["kernel", "values", "card", "verdict"], rows


def warm(rules: Iterable[str], width: int) -> Iterator[tuple[str, float]]:
    """Runs a small model of each rule forward, backward and for one token, so that the kernels they compile are on
    disk; yields the rule with its engine, and the seconds it took.

    Args:
        rules: named rules; all of them if empty.
        width: width of a head. Kernels for small states are compiled for each width.

    Raises:
        ConfigError: for an unknown rule.
    """
    configs = [(name, named_rule(name)) for name in list(rules) or RULES]  # all of them before the first is run
    for name, config in configs:
        start = time.perf_counter()
        # The smallest model whose layer calls the same kernels, forward, backward and for one token.
        model = LanguageModel({"vocab_size": 2, "d_model": width, "layers": 1, "heads": 1, "memory": name})
        tokens = torch.randint(2, (16, 64), generator=torch.Generator().manual_seed(0))
        logits, state = model(tokens)
        logits.sum().backward()
        with torch.no_grad():
            model(tokens[:, :1], state)
        call = Plan.sketch(config, length=64, shape=(width, width))
        yield f"{name}: {choose(call).name}", time.perf_counter() - start


SECTIONS = ("model", "optim", "budget", "parallel", "sample")
HEADER = ["setting", "accepts", "default", "meaning"]
PATHS = {
    "phi": "feature_map",
    "optimizer": "optim.optimizer",
    "logger": "loggers",
    "activation": "structure.activation",
    "link": "retention.link",
}


def field_rows(schema: Mapping[str, Any]) -> list[list[str]]:
    """Name, accepted values, default and meaning of every field of an object in the JSON schema."""
    # A field without its own description has that of its class.
    about = str(schema.get("description", "")).split("\n\n")[0].split()
    rows = []
    for name, field in schema.get("properties", {}).items():
        if name == "kind" or field.get("deprecated"):
            continue
        text = str(field.get("description", ""))
        meaning = "" if text.split() == about else text
        required = name in schema.get("required", ())
        rows.append([name, accepts(field), "required" if required else flow(field.get("default")), meaning])
    return rows


def accepts(schema: Mapping[str, Any]) -> str:
    """The values that a field takes, in words: its type, its range, its choices."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"a {name} kind" if name[0].islower() else name
    # Optional fields are a choice between a type and null.
    if "anyOf" in schema or "oneOf" in schema:
        choices = [accepts(choice) for choice in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(choices))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(flow, schema.get("enum", [schema.get("const")])))
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items") or {}]
        return "list of " + ", ".join(dict.fromkeys(accepts(item) for item in items))
    signs = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
    bounds = {sign: schema[key] for sign, key in signs.items() if key in schema}
    limits = [f"{sign} {bound:g}" for sign, bound in bounds.items() if sign[0] == ">" or bound < 1 << 20]
    named = {"object": "mapping", "string": "text", "boolean": "true or false"}.get(kind, kind)
    return " ".join([named, " and ".join(limits)]).strip()


def variant_page(family: str, name: str) -> tuple[str, Table | None, str]:
    """All about one variant: its text, a table of its settings if it has some, and an example. [TRAIN-LIST-D2]"""
    _check_known("family", family, FAMILIES)
    if family == "presets":
        _check_known("preset", name, compose.presets())
        about = f"{preset_about(name)}\n\n" if name in FILES else ""
        return f"{name}: {about}{dump_experiment(load_experiment(name))}".rstrip(), None, f"hecate train {name}"
    if family == "rules":
        _check_known("rule", name, RULES)
        config = dump_yaml({"memory": short(RULES[name].config)})
        text = textwrap.fill(f"{name}: {RULES[name].text}", 100)
        return f"{text}\n\n{RULES[name].equation}\n\n{config}".rstrip(), None, f"hecate train mqar-{name}"
    if family == "engines":
        _check_known("engine", name, Engine.registry)
        return inspect.getdoc(type(Engine.registry[name])) or name, None, "hecate show quickstart --engine"
    variants = VARIANTS[family].variants()
    _check_known(family, name, variants)
    schema = variants[name].model_json_schema()
    rows = field_rows(schema)
    path = PATHS.get(family, family)
    settings = {"kind": name} | {row[0]: "..." for row in rows if row[2] == "required"}
    example = f"{path}: {flow(settings) if len(settings) > 1 else name}"
    text = inspect.getdoc(variants[name]) or name
    return text, (HEADER, rows) if rows else None, example


def starter(source: str | Path = "quickstart", target: str = "my.yaml") -> str:
    """A commented YAML file with every setting: those that a preset or file sets, as it writes them; the others
    commented out, with the values they have by default. [TRAIN-START-D1]"""
    config, written = load_experiment(source), compose.raw_settings(source)
    source, target = (printable(str(name), MESSAGE) for name in (source, target))  # on one line
    lines = [
        f"# An experiment, begun from {source}. A setting right behind a # has that value without it, too:",
        "# take the # away to change it. `hecate list FAMILY` names the kinds of each family,",
        f"# `hecate show {target}` prints the whole experiment, `hecate train {target}` trains it.",
    ]
    for name in type(config).model_fields:
        value, section = getattr(config, name), written.get(name)
        if name not in SECTIONS:
            lines += ["", *_entry(type(config), name, value, written, "")]
            continue
        lines += ["", f"{name}:" if section else f"#{name}:"]
        for field in type(value).model_fields:
            lines += _entry(type(value), field, getattr(value, field), section or {}, "  ", unset=not section)
    return "\n".join(lines) + "\n"


def _entry(
    owner: type[BaseModel], name: str, value: Any, written: Mapping[str, Any], pad: str, *, unset: bool = False
) -> list[str]:
    """A setting's lines: its meaning as a comment, and its value, commented out if the source does not set it."""
    about = textwrap.wrap(" ".join(str(_descriptions(owner).get(name, "")).split()), 110)
    lines = [f"{pad}# {line}" for line in about]
    if name not in written:
        mark = f"#{pad}" if unset else f"{pad}#"
        return [*lines, f"{mark}{name}: {flow(short(value))}"]
    setting = written[name]
    if not setting or not isinstance(setting, (list, dict)):
        return [*lines, f"{pad}{name}: {flow(setting)}"]
    text = yaml.safe_dump(setting, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)
    flat = text.startswith(("{", "[")) and text.count("\n") == 1
    return [*lines, f"{pad}{name}: {text.rstrip()}"] if flat else [
        *lines, f"{pad}{name}:", *(f"{pad}  {line}" for line in text.splitlines()),
    ]  # fmt: skip


@cache
def _descriptions(owner: type[BaseModel]) -> dict[str, str]:
    schema = compose.experiment_schema() if owner is ExperimentConfig else owner.model_json_schema()
    return {name: field.get("description", "") for name, field in schema["properties"].items()}

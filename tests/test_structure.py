"""The shape of the package: floors, sizes, and what its sources may not do."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hecate.variant import Variant

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hecate"

FLOORS = [
    {"errors", "checks", "files", "states", "variant", "late", "tape", "terminal", "processes", "figure"},
    {"activation", "phi", "bias", "retention", "algorithm", "structure", "gating", "readout"},
    {"formula", "rule", "engine"},
    {"distributed"},
    {"nn", "cms", "optim"},
    {"data", "models"},
    {"cli", "commands", "train", "hf", "microscope", "evals", "compare", "gym", "serve", "onnx", "__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FREE = {"testing"}  # for users' tests: sees every floor, and no floor sees it
ACROSS = {  # imports within a floor, each in one direction only
    "checks": {"errors"},
    "variant": {"errors"},
    "states": {"errors", "files"},
    "files": {"errors"},
    "processes": {"errors"},
    "terminal": {"errors", "files"},
    "figure": {"errors", "files"},
    "tape": {"checks", "errors"},
    "engine": {"formula", "rule"},
    "phi": {"activation"},
    "structure": {"activation"},
    "rule": {"formula"},
    "cms": {"nn"},
    "cli": {"hf", "onnx", "commands", "train", "microscope", "compare", "evals"},
    "commands": {"train", "gym", "serve", "hf"},
    "onnx": {"hf", "train"},
    "hf": {"train", "serve"},
    "compare": {"train"},
    "evals": {"train", "hf"},
    "gym": {"compare", "train"},
    "microscope": {"train"},
    "__main__": {"cli"},
    "serve": {"train"},
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of a tree; to walk it costs more than any check of it."""
    return tuple(ast.walk(tree))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Each check takes the tree of one file and the name of its room, and yields `line: complaint`.


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def upward_imports(tree: ast.AST, room: str) -> Iterator[str]:
    for line, name in imported(tree):
        if name.startswith("."):
            yield f"{line}: relative import {name}"
        parts = name.split(".")
        if parts[0] != "hecate" or room in FREE or room == "__init__":
            continue
        if len(parts) == 1 or parts[1] not in FLOOR:
            yield f"{line}: {room} may not import {name}"
        elif parts[1] != room and parts[1] not in ACROSS.get(room, ()):
            if FLOOR[parts[1]] >= FLOOR[room]:
                yield f"{line}: {room}, floor {FLOOR[room]}, imports {name}, {FLOOR[parts[1]]}"


def bare_asserts(tree: ast.AST, room: str) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Assert) and room != "testing":
            yield f"{node.lineno}: bare assert; raise a hecate.errors type with a sentence"


LONG = {"naive"}  # the recurrence on one page, signature and all


def long_functions(tree: ast.AST, room: str) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0] if ast.get_docstring(node) else None
            of_docstring = 0 if said is None else (said.end_lineno or 0) - said.lineno + 1
            lines = (node.end_lineno or 0) - node.lineno + 1 - of_docstring
            # A program of a card keeps in registers what it works on, from its first line to its last.
            made_by = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
            most = 150 if "triton.jit" in map(dotted, made_by) else 60
            if lines > most and node.name not in LONG:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unpickling(tree: ast.AST, room: str) -> Iterator[str]:
    writing = {"torch.save"} if room != "train" else set()  # `hecate export --to torch`: tensors alone, for others
    for line, name in imported(tree):
        if name.split(".")[0] in PICKLES or name in {"torch.load", "torch.save"}:
            yield f"{line}: imports {name}"
    for node in nodes(tree):
        if dotted(node) in {"torch.load", "numpy.load", "np.load", *writing}:
            yield f"{node.lineno}: uses {dotted(node)}"


SEEDS = {"manual_seed", "seed", "initial_seed", "manual_seed_all", "seed_all", "set_rng_state"}
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
FILLS = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_"}
NUMPY = {"default_rng", "Generator", "PCG64", "Philox", "SeedSequence"}
FILLS |= {"xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"}
FILLS |= {"trunc_normal_", "orthogonal_", "sparse_", "geometric_"}


def forked(tree: ast.AST) -> set[ast.AST]:
    """What happens inside `with torch.random.fork_rng(...)`, which restores what was."""
    inside = set()
    for node in nodes(tree):
        if isinstance(node, ast.With):
            calls = (item.context_expr for item in node.items)
            if any(isinstance(c, ast.Call) and dotted(c.func).endswith("fork_rng") for c in calls):
                inside |= set(ast.walk(node))
    return inside


def global_randomness(tree: ast.AST, room: str) -> Iterator[str]:
    within = forked(tree)
    for node in nodes(tree):
        if not isinstance(node, ast.Call) or (node in within and room == "train"):
            continue
        name = dotted(node.func)
        module, _, leaf = name.rpartition(".")
        last = node.func.attr if isinstance(node.func, ast.Attribute) else leaf
        seeded = any(keyword.arg == "generator" for keyword in node.keywords)
        on_torch = module in {"torch", "torch.random", "torch.cuda", "torch.cuda.random"}
        if (
            (on_torch and leaf in SEEDS and not (leaf == "set_rng_state" and room == "train"))
            or (module == "torch" and leaf in DRAWS and not seeded)
            or (module == "torch" and leaf in {"rand_like", "randn_like", "randint_like"})
            or (last in FILLS and not seeded)
            or (module == "random" and leaf not in {"Random", "getstate", "setstate"})
            or (module in {"np.random", "numpy.random"} and leaf not in NUMPY)
            or (module in {"np.random", "numpy.random"} and not node.args and not node.keywords)
        ):
            yield f"{node.lineno}: {name or last} draws from or sets a global generator"


def second_orders_cut(tree: ast.AST, room: str) -> Iterator[str]:
    for node in nodes(tree):
        names = [dotted(node)] if isinstance(node, ast.Attribute | ast.Name) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[-1] == "once_differentiable" for name in names):
            yield f"{node.lineno}: once_differentiable gives silently wrong second derivatives"


def private_engine_imports(tree: ast.AST, room: str) -> Iterator[str]:
    """Other packages know the names of `hecate.engine`, not its files."""
    public = exported(PACKAGE / "engine/__init__.py")
    for line, name in imported(tree):
        base, _, leaf = name.rpartition(".")
        if base == "hecate.engine" and (leaf in public or not (PACKAGE / f"engine/{leaf}.py").exists()):
            continue
        if room != "engine" and name.startswith("hecate.engine."):
            yield f"{line}: imports {name}, a file of the engine's; import a name of hecate.engine"


def exported(path: Path) -> set[str]:
    """The `__all__` of a file."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


ASK_DESCRIPTIONS = {"engine", "nn", "cms", "optim"}  # forms, traits and methods of variants, never which one it is


def asked_kinds(tree: ast.AST, room: str) -> Iterator[str]:
    """Comparisons with the kind of another; a class may ask for its own option."""
    for node in nodes(tree) if room in ASK_DESCRIPTIONS else ():
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            sides = [dotted(side) for side in (node.left, *node.comparators)]
            if any(side.split(".")[-1] == "kind" and side != "self.kind" for side in sides):
                yield f"{node.lineno}: compares a kind; ask a description or trait"


def asked_variants(tree: ast.AST, room: str) -> Iterator[str]:
    """`isinstance(x, Variant)` and `type(x) is Variant`, but for the families themselves, which arguments may have to
    be."""
    known = namespace(tree) if room in ASK_DESCRIPTIONS else {}
    for node in nodes(tree) if known else ():
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
            asked = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Call) and dotted(side.func) == "type" for side in sides):
                asked = [inner for side in sides for inner in ast.walk(side)]
        for name in filter(None, map(dotted, asked)):
            first, *rest = name.split(".")
            value = known.get(first)
            for attribute in rest:
                value = getattr(value, attribute, None)
            if isinstance(value, type) and issubclass(value, Variant) and Variant not in value.__bases__:
                yield f"{node.lineno}: asks for the variant {name}; ask a description or trait"


def namespace(tree: ast.AST) -> dict[str, Any]:
    """What a source imports from this package, by name."""
    found = {}
    for node in nodes(tree):
        own = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hecate"
        # Kernels for a GPU import Triton, and define no variants.
        if own and not node.module.startswith("hecate.engine.triton."):
            module = importlib.import_module(node.module)
            found |= {alias.asname or alias.name: getattr(module, alias.name, None) for alias in node.names}
    return found


TRACED = {"bias", "cms", "engine", "gating", "models", "nn", "phi", "retention", "rule", "structure", "tape"}
"""Rooms that torch.compile walks through, but for kernels."""
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}


def graph_breaks(tree: ast.AST, room: str) -> Iterator[str]:
    """What versions of torch before 2.13 break a graph at: they take what a star leaves for a tuple."""
    for node in nodes(tree) if room in TRACED else ():
        if isinstance(node, ast.Name) and (
            node.id == "starmap" or (node.id == "id" and isinstance(node.ctx, ast.Load))
        ):
            yield f"{node.lineno}: {node.id} breaks a graph"
        inside = nodes(node) if isinstance(node, ast.FunctionDef) else ()
        targets = [target for item in inside if isinstance(item, ast.Assign) for target in item.targets]
        stars = [star for target in targets for star in ast.walk(target) if isinstance(star, ast.Starred)]
        starred = {dotted(star.value) for star in stars}
        for item in inside:
            written = isinstance(item, ast.Subscript) and isinstance(item.ctx, ast.Store)
            called = isinstance(item, ast.Attribute) and item.attr in CHANGES
            if (written or called) and isinstance(item.value, ast.Name) and item.value.id in starred:
                yield f"{item.lineno}: {item.value.id}, which a star has made, is changed in place"


def validators_without_signatures(tree: ast.AST, room: str) -> Iterator[str]:
    """pydantic asks for them; from Python 3.12 on a generic class, such as FrozenDict[str, int], has none."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func).endswith("Validator"):
            if any(isinstance(given, ast.Subscript) for given in node.args):
                yield f"{node.lineno}: {ast.unparse(node)}"


RIDDLE = re.compile(r"\s*(?:What|Whether|Why|How|Those|Who|Which)\b")


def riddles(tree: ast.AST, room: str) -> Iterator[str]:
    """Docstrings, those of attributes too, that begin like a question instead of naming a thing."""
    bodies = [node.body for node in nodes(tree) if isinstance(getattr(node, "body", None), list)]
    for value in (item.value for body in bodies for item in body if isinstance(item, ast.Expr)):
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and RIDDLE.match(text):
            yield f"{value.lineno}: {text.strip().splitlines()[0]}"


CHECKS: dict[Callable[[ast.AST, str], Iterator[str]], dict[str, list[str]]] = {
    # check -> room -> sources that it must complain about
    upward_imports: {
        "tape": ["from hecate.phi import ELU", "def f():\n    import hecate.engine.scan"],
        "phi": ["from hecate.bias import L2", "from hecate import bias", "from .base import FeatureMap"],
        "rule": ["from hecate.engine import scan", "from hecate.testing import check_vjp"],
        "engine": ["import hecate"],
        "models": ["from hecate.data import text"],
        "train": ["from hecate.cli import main"],
    },
    bare_asserts: {"phi": ["assert x > 0, 'positive'"]},
    long_functions: {
        "phi": ["def f():\n" + "    x = 1\n" * 60],
        "engine": ["@triton.jit\ndef f():\n" + "    x = 1\n" * 150],
    },
    unpickling: {"train": ["import pickle", "from torch import load", "torch.load('x')", "f = torch.load"]},
    global_randomness: {"phi": [
        "torch.manual_seed(0)", "torch.randn(3)", "torch.rand_like(x)", "x.normal_()", "(x + y).uniform_(0, 1)",
        "nn.init.normal_(w)", "random.shuffle(x)", "np.random.rand(3)", "np.random.default_rng()",
        "torch.set_rng_state(s)",
    ]},
    private_engine_imports: {
        "nn": ["from hecate.engine.scan import x", "import hecate.engine.scan", "from hecate.engine import loop"],
        "testing": ["def f():\n    from hecate.engine.scan import memory_scan"],
    },
    asked_kinds: {
        "engine": ["a = config.bias.kind == 'l2'", "if algorithm.kind not in ('gd', 'momentum'): pass"],
        "optim": ["rising = kind in RISING"],
    },
    asked_variants: {"nn": [
        "from hecate.phi import ELU, Identity\nisinstance(x, Identity | ELU)",
        "from hecate import bias\ntype(x) is bias.L2",
        "from hecate.algorithm import GD as Plain\nisinstance(x, (int, Plain))",
    ]},
    graph_breaks: {"nn": [
        "starmap(f, x)", "known = set(map(id, x))", "def f(x):\n    a, *b = x\n    b[0] = a",
        "def f(x):\n    *b, a = x\n    b.pop()",
    ]},
    validators_without_signatures: {"variant": ["AfterValidator(FrozenDict[str, int])"]},
    riddles: {"phi": [
        '"""What a file is."""', 'def f():\n    """Whether it is so."""', 'x = 1\n"""How\nmuch."""',
    ]},
    second_orders_cut: {"tape": [
        "from torch.autograd.function import once_differentiable",
        "@torch.autograd.function.once_differentiable\ndef f(): ...",
    ]},
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sources(check):
    assert not complaints(check)


def complaints(check: Callable[[ast.AST, str], Iterator[str]]) -> dict[str, list[str]]:
    found = {}
    for path in sources():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines = [f"{named(path)}:{line}" for line in check(parsed(path), room)]
        if lines:
            found[named(path)] = lines
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_itself(check):
    """Misses nothing; what it may not refuse stands in the sources."""
    for room, faults in CHECKS[check].items():
        for fault in faults:
            assert list(check(ast.parse(fault), room)), f"missed in {room}: {fault}"


def test_what_only_begins_as_a_riddle_does_is_none():
    text = '"""Contents."""\n\ndef f():\n    """However, what it is."""\n    return "What"\n'
    assert not list(riddles(ast.parse(text), "phi"))


def test_every_room_has_a_floor():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()}
    assert rooms - FREE - {"__init__"} <= FLOOR.keys()


def test_within_a_floor_imports_go_one_way():
    pairs = {(room, other) for room, others in ACROSS.items() for other in others}
    assert not {(other, room) for room, other in pairs} & pairs
    assert all(FLOOR[room] == FLOOR[other] for room, other in pairs)


# A file is one thought; `__init__` and `__main__` may be short. The house is to have at most 28,000 lines of code (no
# docstrings, comments or blank lines) in 190 files; these are what it has, and are lowered whenever it has fewer.
MOST_CODE, MOST_FILES = 43398, 230
# Comments say why, and shapes where a layout changes: at least so many for every hundred lines of code.
COMMENTS = {"engine": 4.0, "nn": 4.0, "train": 4.0}
# Names that say nothing of what they hold, in every hundred variables.
VAGUE, MOST_VAGUE = {"own", "found", "given", "kept", "held", "made", "seen", "left", "told"}, 0.9


def test_files_have_40_to_600_lines():
    lengths = {named(path): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: length for name, length in lengths.items() if length > 600}
    short = {named(p) for p in sources() if lengths[named(p)] < 40 and p.stem not in ("__init__", "__main__")}
    assert not short


class Lines(NamedTuple):
    """Lines of code, and comments that are no orders to a tool."""

    code: int
    comments: int


@cache
def lines_of(text: str) -> Lines:
    docstrings, code, comments = set(), set(), 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not re.match(r"#\s*(type: ignore|noqa|fmt:)", token.string)
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(len(code - docstrings), comments)


LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_lines_are_told_apart():
    text = '"""A module.\n\nOf two paragraphs."""\n\n# why\nx = """not\na docstring"""  # noqa: F841\n'
    assert lines_of(text) == (2, 1)
    assert lines_of('def f():\n    """A sentence."""\n    return 1  # one\n') == (2, 1)


def test_the_house_does_not_grow():
    assert sum(lines_of(path.read_text()).code for path in sources()) <= MOST_CODE
    assert len(sources()) <= MOST_FILES


@pytest.mark.parametrize("room", COMMENTS)
def test_rooms_say_why(room):
    code, comments = map(
        sum, zip(*(lines_of(path.read_text()) for path in (PACKAGE / room).rglob("*.py")), strict=True)
    )
    assert 100 * comments / code >= COMMENTS[room]


def test_names_are_nouns_of_the_field():
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for path in sources() for node in nodes(parsed(path))
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]  # fmt: skip
    assert 100 * sum(name in VAGUE for name in names) / len(names) <= MOST_VAGUE


# Modules that import one another, in a function or for a type checker as well. A package's `__init__` imports its own
# files, and whoever imports a name of a package imports its `__init__`: so a file that imports its own package's name
# is in a circle with all that the `__init__` imports. That importing `a.b` runs the `__init__` of `a` does not count.


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in sources()
    }


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports, given all of them by name."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        graph[module] = set()
        for _, name in imported(tree):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that can all be reached from one another."""

    def reached(module: str) -> set[str]:
        seen, ahead = set(), [module]
        while ahead:
            for name in graph[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def test_no_import_circles():
    assert not circles(import_graph({name: parsed(path) for name, path in modules().items()}))


def test_circles_are_found():
    texts = {
        "hecate": "",
        "hecate.a": "from hecate.a.b import x",
        "hecate.a.b": "def f():\n    import hecate.c",
        "hecate.c": "if TYPE_CHECKING:\n    from hecate.d import Y",
        "hecate.d": "from hecate import c\nimport torch",
        "hecate.e": "from hecate.e.f import z",
        "hecate.e.f": "from hecate.e import w",
        "hecate.g": "from hecate.a import b",
    }
    assert circles(import_graph({name: ast.parse(text) for name, text in texts.items()})) == [
        ["hecate.c", "hecate.d"],
        ["hecate.e", "hecate.e.f"],
    ]


def collected(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when a file of tests is imported: all but the bodies of functions."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        yield node
        inner = node.decorator_list if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
        waiting += [child for child in inner if not isinstance(child, ast.Lambda)]


def test_no_test_depends_on_the_variants_of_others():
    """`variants()` while tests are collected is whatever the files before have defined; `shipped_kinds` is not."""
    text = "@parametrize(Bias.variants())\ndef test_a(): Bias.variants()\nOWN = [b for b in Bias.variants()]"

    def found(tree: ast.Module) -> list[int]:
        calls = (node for node in collected(tree) if isinstance(node, ast.Call))
        return sorted(call.lineno for call in calls if dotted(call.func).endswith(".variants"))

    assert found(ast.parse(text)) == [1, 3]
    asking = (path for path in ROOT.glob("tests/**/*.py") if ".variants()" in path.read_text())
    assert not {str(path): lines for path in asking if (lines := found(parsed(path)))}

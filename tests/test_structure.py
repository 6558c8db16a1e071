"""The shape of the package: floors, sizes, and what its sources may not do."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hecate"

FLOORS = [
    {"errors", "checks", "sizes", "variant", "late", "tape"},
    {"phi", "bias", "retention", "algorithm", "structure"},
    {"rule", "engine"},
    {"nn", "cms", "optim"},
    {"data", "models"},
    {"cli", "train", "interop", "microscope", "__main__"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FREE = {"testing"}  # for users' tests: sees every floor, and no floor sees it
ACROSS = {  # imports within a floor, each in one direction only
    ("checks", "errors"),
    ("sizes", "errors"),
    ("variant", "errors"),
    ("tape", "checks"),
    ("tape", "errors"),
    ("engine", "rule"),
    ("cms", "nn"),
    ("cli", "train"),
    ("cli", "interop"),
    ("cli", "microscope"),
    ("microscope", "train"),
    ("__main__", "cli"),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Each check takes the tree of one file and the name of its room, and yields `line: complaint`.


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
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
        elif parts[1] != room and (room, parts[1]) not in ACROSS:
            if FLOOR[parts[1]] >= FLOOR[room]:
                yield f"{line}: {room}, floor {FLOOR[room]}, imports {name}, {FLOOR[parts[1]]}"


def bare_asserts(tree: ast.AST, room: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and room != "testing":
            yield f"{node.lineno}: bare assert; raise a hecate.errors type with a sentence"


def long_functions(tree: ast.AST, room: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno - 1
            lines = (node.end_lineno or 0) - (start or 0)
            if lines > 60:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unpickling(tree: ast.AST, room: str) -> Iterator[str]:
    for line, name in imported(tree):
        if name.split(".")[0] in PICKLES or name in {"torch.load", "torch.save"}:
            yield f"{line}: imports {name}"
    for node in ast.walk(tree):
        if dotted(node) in {"torch.load", "torch.save", "numpy.load", "np.load"}:
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
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            calls = (item.context_expr for item in node.items)
            if any(isinstance(c, ast.Call) and dotted(c.func).endswith("fork_rng") for c in calls):
                inside |= set(ast.walk(node))
    return inside


def global_randomness(tree: ast.AST, room: str) -> Iterator[str]:
    within = forked(tree)
    for node in ast.walk(tree):
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
    for node in ast.walk(tree):
        names = [dotted(node)] if isinstance(node, ast.Attribute | ast.Name) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[-1] == "once_differentiable" for name in names):
            yield f"{node.lineno}: once_differentiable gives silently wrong second derivatives"


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
    long_functions: {"phi": ["def f():\n" + "    x = 1\n" * 60]},
    unpickling: {"train": ["import pickle", "from torch import load", "torch.load('x')", "f = torch.load"]},
    global_randomness: {
        "phi": [
            "torch.manual_seed(0)",
            "torch.randn(3)",
            "torch.rand_like(x)",
            "x.normal_()",
            "(x + y).uniform_(0, 1)",
            "nn.init.normal_(w)",
            "random.shuffle(x)",
            "np.random.rand(3)",
            "np.random.default_rng()",
            "torch.set_rng_state(s)",
        ]
    },
    second_orders_cut: {
        "tape": [
            "from torch.autograd.function import once_differentiable",
            "@torch.autograd.function.once_differentiable\ndef f(): ...",
        ]
    },
}

ALLOWED = {
    upward_imports: [("engine", "from hecate.rule import x"), ("testing", "import hecate.engine")],
    bare_asserts: [("testing", "assert x")],
    long_functions: [("phi", "def f():\n" + "    x = 1\n" * 59)],
    unpickling: [("train", "from safetensors.torch import load")],
    global_randomness: [
        ("phi", "torch.randn(3, generator=g)\nx.normal_(generator=g)\ntorch.Generator().manual_seed(0)"),
        ("train", "with torch.random.fork_rng(), x as y:\n    torch.manual_seed(0)"),
        ("data", "random.Random(0)\nnp.random.default_rng(0)\nrng.shuffle(x)"),
    ],
    second_orders_cut: [("tape", "once = 1")],
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sources(check):
    found = []
    for path in sources():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found += [f"{named(path)}:{line}" for line in check(ast.parse(path.read_text()), room)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_check_itself(check):
    for room, faults in CHECKS[check].items():
        for fault in faults:
            assert list(check(ast.parse(fault), room)), f"missed in {room}: {fault}"
    for room, source in ALLOWED[check]:
        assert not list(check(ast.parse(source), room)), f"refused in {room}: {source}"


def test_every_room_has_a_floor():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()}
    assert rooms - FREE - {"__init__"} <= FLOOR.keys()


def test_within_a_floor_imports_go_one_way():
    assert not {(b, a) for a, b in ACROSS} & ACROSS
    assert all(FLOOR[a] == FLOOR[b] for a, b in ACROSS)


def test_no_file_is_longer_than_600_lines():
    lengths = {named(path): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: length for name, length in lengths.items() if length > 600}

"""Formulas of whole weights as parts of the walk: steps of retention and links, in as few passes over a state as sums
of columns and of the whole weight wait for one another.

A pass goes row by row, as many vectors at once as `WIDE` has, and over a row once for each sum of it that the next
loop needs. One number per row, column or
weight is a vector of equal numbers or an array `[P]`. `do(X, D, rv, rp, O, V, P, v, p, x, c)` of a step has r_ij = rv_i
rp_j, and O may be X; back, G is the cotangent of O on the way in and that of X on the way out, that of D is added to H
if it moves, else H is that, and `grv`, `grp` are added to, `grv` with sums over rows alone where rp_j is one number. A
link's `do(A, M, V, P, v, p, x, c)` is M, 0 beyond the true widths; back adds to H, the cotangent of A. Descents are as
`parts` has them, of the gradient u w^T. [ENG-NUM-D8]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hecate.formula import AlgorithmFormula, Weights
from hecate.formula.nodes import ALONG, DOWN, SUMS, Node
from hecate.formula.printer import literal, said, uses

SIGNATURES = {
    "step": "X, D, rv, rp, O, V, P, v, p, x, c",
    "step_back": "X, D, rv, rp, G, H, grv, grp, moving, V, P, v, p, x, c",
    "link": "A, M, V, P, v, p, x, c",
    "link_back": "A, M, G, H, V, P, v, p, x, c",
    "descend": "M, S, u, w, lr, m, D, V, P, v, p, x, c",
    "descend_back": "M, S, u, w, lr, m, H, G, gu, gw, out, V, P, v, p, x, c",
}
COSTLY = frozenset(("exp", "expm1", "log", "log1p", "tanh", "erf", "sin", "cos", "power"))
Place = tuple[int, int]  # a pass, and a loop over a row within it
FIRST: Place = (0, 0)
NORMAL = 1.2e-38  # in float32
Scope = tuple[list[str], dict[Node, str], str]  # lines, the names that are known in them, and their indentation


class Given(NamedTuple):
    """An input: its text, and on which axes it has more than one number."""

    text: str
    axes: int


class Result(NamedTuple):
    """A node and what becomes of it: `set` and `add` are of an array, `move` adds to one if the state moves; `gate`
    is a retain's cotangent, cell by cell, of one number per column (`rp`) or for all; `outer` is that of u w^T, handed
    to u and w; `number` one of a weight. An array's states ahead of it are `after`."""

    node: Node
    how: str
    to: str
    after: int = 0

    @property
    def place(self) -> str:
        """Of a row, or of a number in whole states."""
        return f"{self.after} * V * P + " if self.after else ""


class Scratch(NamedTuple):
    """Numbers that a function needs beside its arguments: states, rows of a state, and vectors a row."""

    states: int = 0
    rows: int = 0
    vectors: int = 0


class Cells:
    """The text of one function. It is printed anew until nothing is missing that an earlier loop should have left."""

    def __init__(
        self, name: str, given: dict[Node, Given], results: Sequence[Result], numbers: dict[Node, int], by_column: bool
    ) -> None:
        self.given, self.results, self.numbers, self.by_column = given, results, numbers, by_column
        self.count = uses([result.node for result in results], {node: item.text for node, item in given.items()})
        self.places: dict[Node, Place] = {}
        self._zeros: dict[Node, bool] = {}
        for node in self.count:
            self._place(node)
        # A whole weight's sum goes cell by cell, unless the sums of its rows are wanted, too.
        self.whole = {
            node for node in self.count
            if node.op.startswith("column_") and node.args[0].op == node.op[7:] and self.count[node.args[0]] == 1
        }  # fmt: skip
        self.sinks = self._sinks()
        arrays = [result for result in results if result.how != "number"]
        self.final = max([self.places[item.node] for item in arrays] + [*self.sinks.values(), FIRST])
        # What an earlier loop leaves, where and when: sums of columns first.
        self.kept: dict[Node, tuple[str, Place]] = {
            node: ("row", self.places[node]) for node in self.sinks if self.by_columns(node)
        }
        while True:
            lines, missing = self._print(name)
            if not missing:
                break
            self.kept |= missing
        self.lines = lines

    @property
    def text(self) -> str:
        """The function."""
        return "\n".join([*self.lines, ""])

    def _place(self, node: Node) -> Place:
        """The first loop in which a node is known."""
        if node not in self.places:
            args = [] if node in self.given or node.op in ("in", "const") else node.args
            place = max([self._place(item) for item in args], default=FIRST)
            if SUMS.get(node.op) == DOWN:
                place = place[0] + 1, 0
            elif node.op in SUMS and node.args[0].axes & DOWN:
                place = place[0], place[1] + 1
            self.places[node] = place
        return self.places[node]

    def _sinks(self) -> dict[Node, Place]:
        """Sums, and the loops that make them."""
        skipped = {node.args[0] for node in self.whole}
        sums = [node for node in self.count if node.op in SUMS and node not in skipped and node not in self.given]
        found = {node: self.places[self.summed(node)] for node in sums}
        return {node: place for node, place in found.items() if node.axes & DOWN or SUMS[node.op] == DOWN}

    def by_columns(self, node: Node) -> bool:
        """True of a sum that is one number per column."""
        return SUMS[node.op] == DOWN and node not in self.whole and bool(self.summed(node).axes & ALONG)

    def summed(self, node: Node) -> Node:
        """The argument of a sum."""
        inner: Node = node.args[0]
        return inner.args[0] if node in self.whole else inner

    def _print(self, name: str) -> tuple[list[str], dict[Node, tuple[str, Place]]]:
        page = Page(self)
        for at in range(self.final[0] + 1):
            page.loop_over_rows(at)
        for result in self.results:
            if result.how == "number":
                page.add_number(result)
        outputs = [result for result in self.results if result.how in ("set", "move")]
        first = next(iter(SIGNATURES[name].split(", ")))
        head = [
            f"def {name}({SIGNATURES[name]}):",
            f"    zero = filled(load({first}, 0, WIDE), 0.0)",
            "    place = places(zero)",
        ]
        head += [f"    size = per_vector({first}) * len(WIDE)"]
        tail = (
            ["    for i in range(v * P, V * P):", *(f"        {item.to}[{item.place}i] = 0" for item in outputs)]
            if outputs
            else []
        )
        return [*head, *page.lines, *tail], page.missing()

    def at(self, node: Node) -> str:
        """The place of a kept node in the scratch space: states, then rows, then vectors of a row."""
        own, _ = self.kept[node]
        before = [other for other in self.kept if self.kept[other][0] == own]
        index = before.index(node)
        states, rows = (sum(place == what for place, _ in self.kept.values()) for what in ("state", "row"))
        start = {"state": "0", "row": f"{states} * V * P", "vector": f"({states} * V + {rows}) * P"}[own]
        return f"{start} + {index} * {({'state': 'V * P', 'row': 'P', 'vector': 'V * size'})[own]}"

    def costly(self, node: Node) -> bool:
        """True of what takes long to compute anew."""
        if node in self.given or node in self.kept or node.op in ("in", "const", *SUMS):
            return False
        return node.op in COSTLY or any(self.costly(item) for item in node.args)

    def vanishes(self, node: Node) -> bool:
        """True of what is 0 beyond the true columns, where arrays of cells are."""
        if node not in self._zeros:
            self._zeros[node] = self._vanishes(node)
        return self._zeros[node]

    def _vanishes(self, node: Node) -> bool:
        if node in self.given:
            return self.given[node].text.startswith("load") and node.args != ("r",)
        if node.op in ("add", "sub", "neg", "abs", "where"):
            return all(self.vanishes(item) for item in node.args[node.op == "where" :])
        if node.op == "mul":
            return any(self.vanishes(a) and self._finite(b) for a, b in (node.args, node.args[::-1]))
        if node.op == "div":
            return self.vanishes(node.args[0]) and not node.args[1].axes & ALONG
        return node.literal(0)

    def _finite(self, node: Node) -> bool:
        """True of what is a number beyond the true columns if it is one elsewhere."""
        if node in self.given or node.op in ("in", "const") or not node.axes & ALONG:
            return True
        finite = node.op in ("add", "sub", "mul", "neg", "abs", "where") or node.truth
        return finite and all(self._finite(item) for item in node.args)

    @property
    def scratch(self) -> Scratch:
        """Numbers that `x` has to hold."""
        kinds = [kind for kind, _ in self.kept.values()]
        return Scratch(kinds.count("state"), kinds.count("row"), kinds.count("vector"))


class Page:
    """Lines of a function as they are written, and the names of what is known in them."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.lines: list[str] = []
        self.weights: dict[Node, str] = {}  # one number of a weight: known from there on
        self.rows: dict[Node, str] = {}  # one number of a row: known to the end of the pass
        self.scopes: dict[int, Scope] = {}  # where nodes of these axes are computed
        self.masked = False
        self.place: Place = FIRST
        self.seen: dict[Node, list[Place]] = {}  # the loops in which a node was computed
        self.behind: list[Node] = []  # sums of rows that a later pass asks for
        self.names = 0

    def missing(self) -> dict[Node, tuple[str, Place]]:
        """Nodes that an earlier loop should leave: sums of rows for later passes, and those that are costly."""
        known = self.cells.kept
        found = {node: ("vector", self.cells.places[node]) for node in self.behind if node not in known}
        if found:
            return found
        twice = {
            node for node, places in self.seen.items()
            if len(places) > 1 and node.axes == ALONG | DOWN and not node.truth
            and node not in known and self.cells.costly(node)
        }  # fmt: skip
        inner = {item for node in twice for item in node.args}
        for node in {self._core(node, twice) for node in twice - inner}:
            first, *later = sorted(self.seen[node])
            found[node] = "row" if all(place[0] == first[0] for place in later) else "state", first
        return found

    def _core(self, node: Node, twice: set[Node]) -> Node:
        """The node to keep in place of one: the costly part below it, if that is one and wanted elsewhere, too."""
        while node.op not in COSTLY:
            below = [item for item in node.args if item in twice]
            if len(below) != 1 or self.cells.count[below[0]] == 1:
                break
            node = below[0]
        return node

    def loop_over_rows(self, at: int) -> None:
        """A pass over the weight: row by row, or column by column where no sum of a row is wanted."""
        cells, last = self.cells, self.cells.final if at == self.cells.final[0] else (at, 0)
        sinks = {node: place for node, place in cells.sinks.items() if place[0] == at}
        ahead: list[str] = []
        after: list[str] = []
        for node in sinks:
            if SUMS[node.op] == DOWN and not cells.by_columns(node):
                self.weights[node] = name = self._name()
                ahead.append(f"    {name} = {_start(node)}")
                if node in cells.whole:
                    after.append(f"    {name} = {node.op[7:]}({name})")
        across = any(result.how == "outer" for result in cells.results)  # sums a row, whatever else there is
        if last[1] == 0 and not across and all(cells.by_columns(node) or node in cells.whole for node in sinks):
            body = self._column(at, sinks, ahead)
        else:
            body = ["    for r in range(v):", "        o = r * P"]
            for node in sinks:
                if cells.by_columns(node):
                    ahead += [
                        "    for j in range(0, P, size):",
                        f"        store(x, {cells.at(node)} + j, {_start(node)})",
                    ]
            self.rows = {}
            for loop in range(1 + max([place[1] for place in [*sinks.values(), last]])):
                body += self._row((at, loop), [node for node, place in sinks.items() if place[1] == loop], ahead)
        self.lines += [*ahead, *body, *after]

    def _enter(self, place: Place, ahead: list[str], outer: list[str], inner: list[str], *, columns: bool) -> None:
        """A loop, whose lines are written ahead of the pass, in the outer and in the inner loop."""
        self.place, self.masked = place, False
        outside: Scope = outer, {} if columns else self.rows, "        "
        inside: Scope = inner, {}, "            "
        self.scopes = {
            0: (ahead, self.weights, "    "), ALONG: outside if columns else inside,
            DOWN: inside if columns else outside, ALONG | DOWN: inside,
        }  # fmt: skip

    def _column(self, at: int, sinks: Iterable[Node], ahead: list[str]) -> list[str]:
        """A pass in which sums stay in registers, from row to row."""
        outer: list[str] = []
        inner: list[str] = ["            o = r * P"]
        done: list[str] = []
        self._enter((at, 0), ahead, outer, inner, columns=True)
        for node in sinks:
            own = self.weights.get(node)
            if own is None:
                own = self._name()
                outer.append(f"        {own} = {_start(node)}")
                done.append(f"        store(x, {self.cells.at(node)} + j, {own})")
            inner.append(f"            {own} = {self._joined(node, own, self.cells.summed(node))}")
        self._results(outer, inner, done, columns=True)
        return ["    for j in range(0, P, size):", *outer, "        for r in range(v):", *inner, *done]

    def _row(self, place: Place, sinks: list[Node], ahead: list[str]) -> list[str]:
        """A loop over a row, with the lines that come before it and after."""
        cells = self.cells
        outer: list[str] = []
        inner: list[str] = []
        done: list[str] = []
        self._enter(place, ahead, outer, inner, columns=False)
        for node in sinks:
            x, own = cells.summed(node), self.weights.get(node, "")
            if SUMS[node.op] == ALONG:
                self.rows[node] = own = self._name()
                outer.append(f"        {own} = {_start(node)}")
                done.append(f"        {own} = {node.op}({own})")
                if node in cells.kept:
                    done.append(f"        store(x, {cells.at(node)} + r * size, {own})")
            if cells.by_columns(node):
                to = f"{cells.at(node)} + j"
                inner.append(f"            store(x, {to}, {self._joined(node, f'load(x, {to}, WIDE)', x)})")
            elif SUMS[node.op] == ALONG or node in cells.whole:
                inner.append(f"            {own} = {self._joined(node, own, x)}")
            else:
                done.append(f"        {own} = {self._joined(node, own, x, row=True)}")
        self._results(outer, inner, done, columns=False)
        return [*outer, *(["        for j in range(0, P, size):", *inner] if inner else []), *done]

    def _results(self, outer: list[str], inner: list[str], done: list[str], *, columns: bool) -> None:
        """Writes the results in the last loop of all."""
        if self.place == self.cells.final:
            results = [result for result in self.cells.results if result.how != "number"]
            for result, text in [(result, self._inside(result.node)) for result in results]:
                if result.how == "gate":
                    self._gate(result.node, text, outer, inner, done, columns=columns)
                elif result.how == "outer":
                    share, whole, pad = self._name(), self._name(), "            "
                    outer.append(f"        {whole} = zero")
                    inner += [f"{pad}{share} = {text}", f"{pad}{whole} = mad({share}, load(w, j, WIDE), {whole})"]
                    inner.append(f"{pad}store(gw, j, mad({share}, u[r], load(gw, j, WIDE)))")
                    done.append(f"        gu[r] = first(total({whole}))")
                else:
                    text = f"filled(zero, {text})" if result.node.op == "const" else text
                    inner += [f"            {line}" for line in _written(result, text)]

    def _gate(
        self, node: Node, text: str, outer: list[str], inner: list[str], done: list[str], *, columns: bool
    ) -> None:
        """Adds the cotangents of a retain, cell by cell, to those of its rows and columns."""
        if node.literal(0):
            return
        pad, share, own = "            ", self._name(), self._name()
        inner.append(f"{pad}{share} = {text}")
        if self.cells.by_column and columns:
            outer.append(f"        {own} = zero")
            inner.append(f"{pad}{own} = mad({share}, rv[r], {own})")
            done.append(f"        store(grp, j, load(grp, j, WIDE) + {own})")
        elif self.cells.by_column:
            inner.append(f"{pad}store(grp, j, mad({share}, rv[r], load(grp, j, WIDE)))")
        if self.cells.by_column:
            inner.append(f"{pad}{share} = {share} * load(rp, j, WIDE)")
        if columns:
            inner.append(f"{pad}grv[r] += first(total({share}))")
        else:
            whole = self._name()
            outer.append(f"        {whole} = zero")
            inner.append(f"{pad}{whole} = {whole} + {share}")
            done.append(f"        grv[r] += first(total({whole}))")

    def add_number(self, result: Result) -> None:
        """Adds one number of a weight to another, of which 0 is no part."""
        if not result.node.literal(0):
            lines: list[str] = []
            self._enter((self.cells.final[0] + 1, 0), lines, lines, lines, columns=True)
            text = self._text(result.node)
            self.lines += [*lines, f"    {result.to} += first({text})"]

    # What is computed where.

    def _name(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def _inside(self, node: Node, other: str = "0.0") -> str:
        """A node where there are true columns, else another number."""
        text = self._text(node)
        if other == "0.0" and self.cells.vanishes(node):
            return text
        if not self.masked:
            self.masked = True
            lines, _, pad = self.scopes[ALONG]
            lines.append(f"{pad}inside = place + j < p")
        return f"true(inside, {text}, {other})"

    def _joined(self, node: Node, own: str, x: Node, *, row: bool = False) -> str:
        """A sum or a maximum and one more number."""
        adds = node.op.endswith("total")
        if adds and not row and x.op == "mul" and self._joins(x, x) and self.cells.vanishes(x):
            a, b = (self._text(item) for item in x.args)
            return f"mad({a}, {b}, {own})"
        text = self._text(x) if row else self._inside(x, "0.0" if adds else "-INF")
        return f"{own} + {text}" if adds else f"larger({own}, {text})"

    def _text(self, node: Node) -> str:
        """The name of a node, which is computed if it is not known here."""
        cells, given = self.cells, self.cells.given.get(node)
        if node.op == "const":
            own = literal(node.args[0])
            return own if node.literal() else f"c[{cells.numbers.setdefault(node, len(cells.numbers))}]"
        lines, known, pad = self.scopes[node.axes if given is None else given.axes]
        if node not in known:
            text = self._made(node, given)
            known[node] = name = self._name()
            lines.append(f"{pad}{name} = {text}")
            if node in cells.kept and cells.kept[node][1] == self.place and node.op not in SUMS:
                lines.append(f"{pad}store(x, {self._spot(node)}, {name})")
        return known[node]

    def _made(self, node: Node, given: Given | None) -> str:
        """The expression of a node."""
        cells = self.cells
        if given is not None:
            return given.text
        if node.op == "in":
            return f"zero + {'p' if node.args[0] == 'N' else 'v'}"
        if node.op in SUMS or (node in cells.kept and cells.kept[node][1] != self.place):
            return self._recalled(node)
        if node.axes & ALONG and self.place not in (own := self.seen.setdefault(node, [])):
            own.append(self.place)
        if node.op == "power" and node.args[1].op == "const":
            return _power(node, self._text)
        if node.op == "div" and node.axes & ALONG and node.args[1].op != "const" and not node.args[1].axes & ALONG:
            inverse = 1 / node.args[1]  # of a row or a weight: one quotient in place of one a cell
            cells.places[inverse] = cells.places[node.args[1]]
            return f"{self._text(node.args[0])} * {self._text(inverse)}"
        if node.op in ("add", "sub"):
            for at, product in enumerate(node.args):
                if self._joins(product, node):
                    a, b, other = (self._text(item) for item in (*product.args, node.args[1 - at]))
                    signs = ("-" if node.op == "sub" and at == 1 else ""), ("-" if node.op == "sub" and at == 0 else "")
                    return f"mad({signs[0]}{a}, {b}, {signs[1]}{other})"
        return said(node, {item: self._text(item) for item in node.args})

    def _joins(self, product: Node, into: Node) -> bool:
        """True of a product that is not known yet and wanted in one sum alone."""
        once = product.op == "mul" and product.axes == into.axes and self.cells.count[product] == 1
        known = any(product in known for _, known, _ in self.scopes.values())
        return once and not known and product not in self.cells.kept and product not in self.cells.given

    def _recalled(self, node: Node) -> str:
        """A node that an earlier loop has left, or a sum over numbers of columns."""
        cells = self.cells
        if node in cells.kept:
            return f"load(x, {self._spot(node)}, WIDE)"
        if node.axes & DOWN:
            self.behind.append(node)
            return "zero"
        return self._over_columns(node)

    def _spot(self, node: Node) -> str:
        at = self.cells.at(node)
        return f"{at} + {dict(vector='r * size', state='o + j', row='j')[self.cells.kept[node][0]]}"

    def _over_columns(self, node: Node) -> str:
        """A sum over what has one number per column, in a loop ahead of the rows."""
        scopes, masked, name = self.scopes, self.masked, self._name()
        lines: list[str] = []
        ahead, *_ = scopes[0]
        self._enter(self.place, ahead, lines, lines, columns=True)
        text = self._joined(node, name, node.args[0])
        self.scopes, self.masked = scopes, masked
        ahead += [f"    {name} = {_start(node)}", "    for j in range(0, P, size):", *lines, f"        {name} = {text}"]
        return f"{node.op}({name})"


def _power(node: Node, text: Callable[[Node], str]) -> str:
    """x^n by products, square and cube roots where n is such that they do."""
    x, n = text(node.args[0]), node.args[1].args[0]
    if n in (2, 3, 4):
        return f"({x} * {x})" if n == 2 else f"({x} * {x} * {x})" if n == 3 else f"({x} * {x}) * ({x} * {x})"
    if n == 0.25:
        return f"sqrt(sqrt({x}))"
    thirds = round(3 * n)
    if thirds in (-2, -1, 1, 2) and abs(n - thirds / 3) < 1e-15:
        return f"{'thirds_above' if _floored(node.args[0]) else 'thirds'}({x}, {thirds})"
    return f"power({x}, {text(node.args[1])})"


def _floored(x: Node) -> bool:
    """True of a number that is no smaller than a constant that is normal in float32."""
    if x.op != "where" or x.args[0].op != "lt":
        return False
    _, floor, other = x.args
    return x.args[0].args == (other, floor) and floor.op == "const" and floor.args[0] >= NORMAL


def _written(result: Result, text: str) -> list[str]:
    """Lines that write a result into its array."""
    to = f"{result.to}, {result.place}o + j"
    if result.how == "set":
        return [f"store({to}, {text})"]
    added = f"store({to}, load({to}, WIDE) + {text})"
    return [added] if result.how == "add" else ["if moving:", f"    {added}", "else:", f"    store({to}, {text})"]


def _start(node: Node) -> str:
    return "zero" if node.op.endswith("total") else "zero - INF"


ARRAYS = {name: Given(f"load({name}, o + j, WIDE)", ALONG | DOWN) for name in ("X", "D", "A", "M")}
RETAIN = {
    "single": Given("filled(zero, rp[0])", 0), "rows": Given("filled(zero, rp[0] * rv[r])", DOWN),
    "channels": Given("load(rp, j, WIDE) * rv[r]", ALONG | DOWN),
}  # fmt: skip


def step_of(step: Weights, retain: str) -> tuple[Cells, Cells, tuple[float, ...]]:
    """The functions of a step and its numbers; retain is `single`, of `rows`, or of `channels` and maybe rows."""
    nodes, numbers = step.out.nodes, dict[Node, int]()
    gate = RETAIN[retain]
    given = {nodes.input("X"): ARRAYS["X"], nodes.input("D"): ARRAYS["D"], nodes.input("r"): gate}
    there = Cells("step", given, [Result(step.out, "set", "O")], numbers, by_column=False)
    gx, gd, gr = step.pulled
    own = Result(gr, "number" if retain == "single" else "gate", "grv[0]")
    results = [Result(gx, "set", "G"), Result(gd, "move", "H"), own]
    given |= {nodes.input("g"): Given("load(G, o + j, WIDE)", ALONG | DOWN)}
    back = Cells("step_back", given, results, numbers, by_column=retain == "channels")
    return there, back, tuple(node.args[0] for node in numbers)


def descent_of(formula: AlgorithmFormula) -> tuple[Cells, Cells, tuple[float, ...]]:
    """The functions of an algorithm and its numbers. Of its slots the direction comes last."""
    numbers, last, (direction, *slots) = dict[Node, int](), formula.slots, formula.results
    gates = [Given(f"filled(zero, {gate})", 0) for gate in ("lr", "m")]
    texts = [Given("load(w, j, WIDE) * u[r]", ALONG | DOWN), *gates, *(_slot("S", at) for at in range(last))]
    given = dict(zip(formula.inputs, texts, strict=True))
    results = [Result(node, "set", "D", at) for at, node in enumerate([*slots, direction])]
    there = Cells("descend", given, results, numbers, by_column=False)
    given |= zip(formula.cotangents, (_slot("H", at) for at in (last, *range(last))), strict=True)
    of_gradient, of_lr, of_momentum, *of_slots = formula.pulled
    # What comes before a token knows no direction of it.
    results = [Result(node, "set", "H", at) for at, node in enumerate([*of_slots, direction.nodes.const(0.0)])]
    results += [Result(of_lr, "number", "out[0]"), Result(of_momentum, "number", "out[1]")]
    results.append(Result(of_gradient, "outer", ""))
    back = Cells("descend_back", given, results, numbers, by_column=False)
    return there, back, tuple(node.args[0] for node in numbers)


def _slot(array: str, at: int) -> Given:
    return Given(f"load({array}, {at} * V * P + o + j, WIDE)", ALONG | DOWN)


def link_of(link: Weights) -> tuple[Cells, Cells, tuple[float, ...]]:
    """The functions of a link and its numbers."""
    nodes, numbers = link.out.nodes, dict[Node, int]()
    given = {nodes.input("A"): ARRAYS["A"]}
    there = Cells("link", given, [Result(link.out, "set", "M")], numbers, by_column=False)
    known = {} if link.out.op in ("in", "const") else {link.out: ARRAYS["M"]}
    given |= {nodes.input("g"): Given("load(G, o + j, WIDE)", ALONG | DOWN)} | known
    back = Cells("link_back", given, [Result(link.pulled[0], "add", "H")], numbers, by_column=False)
    return there, back, tuple(node.args[0] for node in numbers)

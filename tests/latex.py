"""Values of equations in LaTeX: a reader of the little that docstrings need, which multiplies what stands side by side.

Vectors are columns `[n, 1]`. A letter is looked up among what is given, then among the equations of the same line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+\.?\d*|[^\s]")
SPACES = {r"\left", r"\right", r"\,", r"\;", r"\ ", r"\!", r"\quad"}
BARS = {"|", r"\Vert"}
ACCENTS = {r"\hat", r"\tilde", r"\bar"}


def _norm(x: Array) -> Array:
    return np.sqrt((x * x).sum())


def _softmax(x: Array) -> Array:
    shares = np.exp(x - x.max(-1 if x.shape[-1] > 1 else 0, keepdims=True))
    return shares / shares.sum(-1 if x.shape[-1] > 1 else 0, keepdims=True)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{rf"\{name}": getattr(np, name) for name in ("exp", "log", "tanh", "sinh", "cosh", "cos", "sin")},
    r"\max": np.maximum,
    r"\min": np.minimum,
    "sign": np.sign,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": _softmax,
    "erf": np.vectorize(math.erf),
    "diag": lambda x: np.diag(x[:, 0]),
}


class Equations(dict[str, Any]):
    """Values by letter, as they are given or as equations make them: letters without backslashes and braces, `eta_t`,
    `hatv`, `M_before` for M_{t-1}."""

    def __init__(self, text: str, **given: Any) -> None:
        super().__init__(given)
        self.rules: dict[str, list[str]] = {}
        plain = re.sub(r" \\quad \\text\{[^}]*\}", "", text.replace("$", ""))
        for statement in re.split(r",\\quad |\n", plain):
            *lefts, right = statement.split(" = ")
            for name in lefts:
                self.rules.setdefault(_name(name), TOKEN.findall(right))

    def __missing__(self, name: str) -> Any:
        assert name in self.rules, f"nothing is known of {name}"
        self[name] = Reader(self.rules[name], self).value()
        return self[name]


def _name(text: str) -> str:
    """`\\hat v_{t-1}` as hatv_before."""
    plain = re.sub(r"\\mathrm|[\\{} ]", "", text)
    return plain.replace("t-1", "before")


class Reader:
    """Reads tokens into one value."""

    def __init__(self, tokens: list[str], known: Mapping[str, Any]) -> None:
        self.tokens = [token for token in tokens if token not in SPACES]
        self.known, self.at = known, 0
        self.closing = False  # whether a bar ends what is read

    def value(self) -> Any:
        found = self.sum()
        assert self.at == len(self.tokens), f"unread: {self.tokens[self.at :]}"
        return found

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str | None = None) -> str:
        found = self.next
        assert found and token in (None, found), f"{token} expected at {self.tokens[self.at :]}"
        self.at += 1
        return found

    def sum(self) -> Any:
        total = 0.0 if self.next == "-" else self.product()
        while self.next in ("+", "-"):
            total = total + self.product() if self.take() == "+" else total - self.product()
        return total

    def product(self) -> Any:
        total = self.power()
        while self.next and self.next not in "+-,)}]" and not (self.closing and self.next in BARS):
            if self.next == r"\odot":
                self.take()
                total = total * self.power()
            elif self.next == "/":
                self.take()
                total = total / self.power()
            else:
                total = self._times(total, self.power())
        return total

    @staticmethod
    def _times(a: Any, b: Any) -> Any:
        if np.ndim(a) == 0 or np.ndim(b) == 0:
            return a * b
        found = a @ b
        return found[0, 0] if found.shape == (1, 1) else found

    def power(self) -> Any:
        base = self.atom()
        while self.next == "^":
            self.take()
            if self.next == r"\top":
                self.take()
                base = base.T
            else:
                exponent = self.group()
                base = np.linalg.inv(base) if exponent == -1 else base**exponent
        return base

    def group(self) -> Any:
        """What stands in braces, or one token."""
        if self.next != "{":
            return self.atom()
        self.take("{")
        return self._inside("}")

    def _inside(self, end: str) -> Any:
        outer, self.closing = self.closing, end in BARS
        found = self.sum()
        self.closing = outer
        self.take(end)
        return found

    def atom(self) -> Any:
        token = self.take()
        if token[0].isdigit():
            return float(token)
        if token == "(":
            return self._inside(")")
        if token == "[":
            return np.concatenate(self._listed("]"))
        if token == "|":
            return np.abs(self._inside("|"))
        if token == r"\Vert":
            found = _norm(self._inside(r"\Vert"))
            if self.next == "_":
                assert (self.take(), self.take()) == ("_", "F")
            return found
        if token == r"\frac":
            above = self.group()
            return above / self.group()
        if token == r"\sqrt":
            return np.sqrt(self.group())
        return self._named(token)

    def _named(self, token: str) -> Any:
        name = token
        if token in ACCENTS:
            name += self.take()
        elif token == r"\mathrm":
            self.take("{")
            name = self._until("}")
        if self.next == "_":
            self.take()
            name += "_" + (self._until("}") if self.next == "{" and self.take() else self.take())
        found = FUNCTIONS[name] if name in FUNCTIONS else self.known[_name(name)]
        if not callable(found):
            return found
        self.take("(")
        return found(*self._listed(")"))

    def _listed(self, end: str) -> list[Any]:
        outer, self.closing = self.closing, False
        found = [self.sum()]
        while self.next == ",":
            self.take()
            found.append(self.sum())
        self.closing = outer
        self.take(end)
        return found

    def _until(self, end: str) -> str:
        parts = []
        while self.next != end:
            parts.append(self.take())
        self.take(end)
        return "".join(parts)

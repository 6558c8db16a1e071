"""Errors a user can cause, each a sentence: what was given, what was expected, what to do; and a table of the names
that other libraries and papers use, with hecate's name for each, for the hints in these sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pydantic import ValidationError


MESSAGE, WORD, LINES = 2000, 256, 20
"""Limits of what an error shows: characters of a message, characters of a word in it, faults of a configuration."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONG = re.compile(rf"\S{{{WORD + 1},}}")


class HecateError(Exception):
    """Base of every error raised by hecate; its message is one line without control characters."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(str(message), MESSAGE))

    @property
    def line(self) -> str:
        """The message as one line, for use inside another message."""
        return "; ".join(str(self).splitlines())


class Problem(NamedTuple):
    """One fault of a configuration: where it is and what is wrong with it."""

    path: tuple[str | int, ...]
    message: str

    def __str__(self) -> str:
        return f"{format_path(self.path)}: {self.message}" if self.path else self.message


class ConfigError(HecateError, ValueError):
    """A configuration that cannot be built; `problems` lists every fault with its path."""

    def __init__(self, message: str | Iterable[Problem], path: Iterable[str | int] = ()) -> None:
        problems = [Problem(tuple(path), message)] if isinstance(message, str) else list(message)
        self.problems = [Problem(where, printable(text, MESSAGE)) for where, text in problems]
        lines = [str(problem) for problem in self.problems[:LINES]]
        if len(self.problems) > LINES:
            lines.append(f"and {len(self.problems) - LINES} more")
        Exception.__init__(self, "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return type(self), (self.problems,)

    @classmethod
    def from_validation(cls, error: ValidationError) -> ConfigError:
        """The errors of a pydantic `ValidationError` as paths and sentences."""
        problems: list[Problem] = []
        lines = error.errors(include_url=False)
        faults = [tuple(line["loc"]) for line in lines]
        for path, line in zip(faults, lines, strict=True):
            # pydantic counts only the valid items of a tuple, so a faulty item makes it "too short" as well.
            inside = [other for other in faults if other != path and other[: len(path)] == path]
            if line["type"] == "too_short" and inside:
                continue
            cause = line.get("ctx", {}).get("error")
            if isinstance(cause, ConfigError):
                problems += [Problem(path + inner.path, inner.message) for inner in cause.problems]
            else:
                message = line["msg"][0].lower() + line["msg"][1:]
                details = {"shown": shorten(line["input"]), "type": type(line["input"]).__name__, "message": message}
                template = _SENTENCES.get(line["type"], "{message}, got {shown}")
                problems.append(Problem(path, template.format(**line.get("ctx", {}) | details)))
        return cls(problems)


@contextmanager
def faults_under(*path: str | int) -> Iterator[None]:
    """Context in which a path is put in front of each fault of a `ConfigError`: the value is at that path in
    another."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(Problem(path + item.path, item.message) for item in error.problems) from None


@contextmanager
def faults_at(*path: str | int) -> Iterator[None]:
    """Context in which those faults of a `ConfigError` that have no path get this one."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(Problem(item.path or path, item.message) for item in error.problems) from None


@contextmanager
def retelling(kind: type[HecateError], lead: str, then: str = "") -> Iterator[None]:
    """Turns what hecate, a library or the system refuses into an error of this kind: "LEAD: reason; THEN"."""
    try:
        yield
    except (HecateError, OSError, ValueError) as error:
        raise kind(f"{lead}: {getattr(error, 'line', error)}" + (f"; {then}" if then else "")) from None


class ArgumentError(HecateError, TypeError):
    """A keyword argument that a function or class does not take."""


class ShapeError(HecateError, ValueError):
    """A tensor whose shape, dtype or device does not fit."""


class NonFiniteError(HecateError, ArithmeticError):
    """NaN or infinity in a memory; names the memory, the batch row, the head and the token."""


class CheckpointError(HecateError):
    """A checkpoint that cannot be read or written; names the file and the remedy."""


class DataError(HecateError, ValueError):
    """Training data that cannot be used."""


class ParallelError(HecateError):
    """Processes of one run that disagree, or one of them that has died."""


class HookError(HecateError):
    """A failure in a user's hook or logger that a run calls; names it."""


class StabilityWarning(UserWarning):
    """A step size at which a delta-type memory may diverge."""


class LayoutWarning(UserWarning):
    """A tensor of a valid shape that looks as if two of its axes were swapped."""


class HealthWarning(UserWarning):
    """A part of a model that has no effect or cannot learn."""


class FileSystemWarning(UserWarning):
    """A guarantee about files that their file system cannot give."""


def install_line(extra: str) -> str:
    """Command that installs an extra, from a checkout: the name `hecate` on the package index is another project's."""
    return f'pip install -c constraints.txt ".[{extra}]" (in a checkout of hecate)'


def format_path(path: Iterable[str | int]) -> str:
    """`("levels", 1, "memory")` -> `levels[1].memory`."""
    text = ""
    for part in path:
        shown = str(part) if isinstance(part, int) else printable(str(part), 80)
        text += f"[{shown}]" if isinstance(part, int) else f".{shown}" if text else shown
    return text


def printable(text: str, most: int | None = None) -> str:
    """Text that is safe to print on a terminal: control characters, marks that change the text direction and lone
    surrogates are escaped; line ends and tabs are not. With `most`, one line of at most that many characters: the
    middle of a longer text, and of words longer than `WORD`, is left out. Any text from outside is shown through it."""
    text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    if most is None:
        return text
    text = _LONG.sub(lambda match: _cut(match[0], WORD), text.replace("\n", "\\n").replace("\t", "\\t"))
    return _cut(text, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[most // 2 + 3 - most :]}"


def shorten(value: object) -> str:
    """`repr(value)` as one `printable` line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        return f"a {type(value).__name__} too large to show"
    return printable(text, 80)


def meant(word: object, known: Iterable[str]) -> str:
    """Hint for a word of another library or paper: its name in hecate, or advice on what to write; else an empty
    text."""
    text = word.lower() if isinstance(word, str) else ""
    for ours in MEANT.get(text, ()):
        if ours in known:
            return f" Did you mean {ours!r}?"
    return f" {ADVICE[text]}" if text in ADVICE else ""


def did_you_mean(word: object, known: Iterable[str], closeness: float = 0.6) -> str:
    """` Did you mean 'elu'?`, or an empty text if no known name is close."""
    text, known = word if isinstance(word, str) else shorten(word), list(known)
    if hint := meant(word, known):
        return hint
    match = difflib.get_close_matches(text.lower(), known, n=1, cutoff=closeness)
    return f" Did you mean {match[0]!r}?" if match else ""


def not_known(word: object, known: Iterable[str], hint: str = "") -> str:
    """`. Did you mean 'elu'? Known: elu, relu.`, to follow the word: first the suggestion, then all known names."""
    known = list(known)
    between = "; " if any("," in name for name in known) else ", "
    return f".{hint or did_you_mean(word, known)} Known: {between.join(known)}."


_SENTENCES = {
    "greater_than": "must be > {gt}, got {shown}",
    "greater_than_equal": "must be >= {ge}, got {shown}",
    "less_than": "must be < {lt}, got {shown}",
    "less_than_equal": "must be <= {le}, got {shown}",
    "literal_error": "must be {expected}, got {shown}",
    "missing": "is required",
    "too_short": "must be a list of {min_length} or more, got {shown}",
    "finite_number": "must be a finite number, got {shown}",
    "int_type": "must be an integer, got {shown} ({type})",
    "float_type": "must be a number, got {shown} ({type})",
    "bool_type": "must be true or false, got {shown} ({type})",
    "string_type": "must be a text, got {shown} ({type})",
    "dict_type": "must be a mapping, got {shown} ({type})",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list, got {shown} ({type})"),
    "value_error": "{error}",
}


# Names that other libraries and papers use.
_WIDTH = ("d_model", "embed_dim", "hidden_size")

MEANT: Mapping[str, tuple[str, ...]] = {
    # sizes
    **dict.fromkeys(("n_heads", "num_heads", "n_head", "nhead", "num_attention_heads"), ("heads", "num_heads")),
    **dict.fromkeys(("dim", "embed_dim", "hidden_size", "hidden_dim", "n_embd", "d_embed"), _WIDTH),
    **dict.fromkeys(("save_every", "save_steps", "save_interval"), ("checkpoint_every",)),
    **dict.fromkeys(("n_layers", "num_layers", "n_layer", "depth", "num_hidden_layers"), ("layers", "num_layers")),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "key_dim", "head_k_dim"), ("d_head", "d_key")),
    **dict.fromkeys(("value_dim", "head_v_dim"), ("d_value",)),
    **dict.fromkeys(("num_features", "n_features", "nb_features"), ("d_phi", "num_features")),
    **dict.fromkeys(("chunk_size", "chunk_len"), ("chunk",)),
    # arguments
    **dict.fromkeys(("phi", "kernel", "kernel_fn", "feature_fn"), ("feature_map",)),
    **dict.fromkeys(("rule", "cfg", "memory_config"), ("config",)),
    **dict.fromkeys(("past_key_values", "cache", "initial_state", "hidden_state", "memory_state"), ("state",)),
    **dict.fromkeys(("input_ids", "ids"), ("tokens",)),
    **dict.fromkeys(("hidden_states", "inputs", "input"), ("x",)),
    **dict.fromkeys(("alpha", "forget", "forget_gate"), ("retain", "decay")),
    **dict.fromkeys(("learning_rate", "step_size", "eta", "theta"), ("lr",)),
    **dict.fromkeys(("betas", "mu"), ("momentum",)),
    **dict.fromkeys(("lr", "erase"), ("gates",)),
    "retain": ("gates", "decay"),
    "momentum": ("gates",),
    # kinds and rules
    **dict.fromkeys(("rff", "fourier", "random_features"), ("random_fourier",)),
    **dict.fromkeys(("mse", "squared", "l2_loss"), ("l2",)),
    **dict.fromkeys(("deltanet", "delta_rule", "delta_net"), ("delta", "l2")),
    **dict.fromkeys(("gated_deltanet", "gdn"), ("gated_delta",)),
    **dict.fromkeys(("feature_map", "feature_maps", "map", "maps"), ("phi",)),
    "linear": ("matrix",),
    "muon": ("newton_schulz",),
    "performer": ("favor",),
    "linear_transformer": ("linear_attention",),
    "mamba": ("mamba2",),
    "rwkv": ("rwkv7",),
    "lact": ("large_chunk_ttt",),
}
"""Names in hecate by a name used elsewhere; the first that is valid where the word was written is suggested."""

_MASK = "Padding is write_mask, bool [B, T], True for tokens that are written: attention_mask.bool()."
_LOSS = (
    "A model gives logits; the loss is torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "
    "labels shifted by one."
)
_LAYER = "Heads and widths are the layer's: Memory(d_model, heads, config)."
ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("attention_mask", "mask", "padding_mask", "key_padding_mask", "attn_mask"), _MASK),
    **dict.fromkeys(("labels", "targets"), _LOSS),
    **dict.fromkeys(("heads", "d_model"), _LAYER),
    "engine": "hecate takes the fastest engine that is exact; `hecate show FILE --engine` says which and why.",
    "batch_first": "x is [B, T, d_model], batch first, in every layer.",
    "dropout": "Memories drop nothing; put nn.Dropout around the layer.",
    "beta": "What papers call beta is lr in a rule and momentum in an optimiser.",
}
"""Advice on what to write, by a word that has no counterpart in hecate."""

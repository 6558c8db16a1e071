"""Commands that take no experiment: `hecate list`, `formula`, `schema`, `init`, `doctor`, `data`, `gym` and `serve`;
and code shared by all commands: the user's imports, warnings, help from docstrings, the notice of slow imports."""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hecate.errors import MESSAGE, ConfigError, install_line, printable, retelling, shorten
from hecate.processes import import_modules
from hecate.terminal import afterwards, echo

Run = TypeVar("Run", bound=Callable[..., None])
LONG = 1.0
"""Seconds of importing after which a command says what it is waiting for."""


@contextmanager
def importing(quiet: bool) -> Iterator[None]:
    """Context for slow imports: after `LONG` seconds the first process of a run prints a notice, unless `quiet`."""
    waiting = threading.Timer(LONG, echo, ["importing torch and the training code"], {"err": True})
    waiting.daemon = True
    if not quiet and os.environ.get("RANK", "0") == "0":
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


@contextmanager
def extra(what: str = "") -> Iterator[None]:
    """Context for imports of an extra: turns an ImportError into a `ConfigError` that begins with `what`."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what}{error}") from None


class Command(TyperCommand):
    """A command that imports the user's modules first, and prints each warning as one line."""

    def invoke(self, ctx: Any) -> Any:
        """Imports the user's modules, then runs the command."""
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: echo(
                f"warning: {printable(str(message), MESSAGE)}", err=True
            )
            import_modules(ctx.find_root().params.get("imports") or [])
            return super().invoke(ctx)


_PARTS = re.compile(r"\n\n(?=Args:|Examples?: )")
_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def command(app: typer.Typer, name: str | None = None, *, short: str) -> Callable[[Run], Run]:
    """Decorator that makes a function a command: its docstring has the help text, a section `Args:` for the options,
    and examples. A bool parameter becomes a flag without a `--no-` form."""

    def added(function: Run) -> Run:
        about, *parts = _PARTS.split(inspect.cleandoc(function.__doc__ or ""))
        hints: dict[str, Any] = get_type_hints(function, include_extras=True)
        for word, text in _ENTRY.findall("\n".join(parts)):
            option: Any = typer.Option(*([f"--{word.replace('_', '-')}"] if hints[word] is bool else []))
            kind, option = get_args(hints[word]) if get_origin(hints[word]) is Annotated else (hints[word], option)
            option.help = " ".join(text.split())
            hints[word] = Annotated[kind, option]
        function.__annotations__ = hints
        examples = next((" ".join(part.split()) for part in parts if part.startswith("Example")), None)
        return app.command(name, cls=Command, help=about, short_help=short, epilog=examples)(function)

    return added


def _families(incomplete: str) -> list[str]:
    """Families whose names begin with this text."""
    from hecate.train.catalogue import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


_Family = typer.Argument(metavar="[FAMILY]", show_default=False, autocompletion=_families)


def list_(
    family: Annotated[str | None, _Family] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
) -> None:
    """List the variants of a family with formula, traits, gradient and paper, or describe one variant in full.

    Args:
        family: phi, bias, retention, link, algorithm, structure, activation, gating, readout, position, data,
            optimizer, logger, engines, rules or presets.
        name: A variant of the family, to print its description, settings and an example.

    Examples: hecate list | hecate list phi | hecate list phi dpfp | hecate list presets
    """
    from hecate.train import catalogue, display

    if family is None or name is None:
        display.print_table(*catalogue.catalogue(family))
        return
    text, table, example = catalogue.variant_page(family, name)
    echo(f"{text}\n")
    if table is not None:
        display.print_table(*table)
        echo("")
    echo(f"Example: {example}")


def formula(
    kind: Annotated[str, typer.Argument(metavar="KIND")],
    family: Annotated[str, typer.Option(metavar="FAMILY")] = "bias",
) -> None:
    """Print the functions that kernels call for a variant, traced from its own torch methods.

    Args:
        kind: A kind, or a mapping as in YAML.
        family: bias, retention, link, algorithm, activation or phi.

    Examples: hecate formula '{kind: lp, p: 1.5}', hecate formula kl --family retention
    """
    from hecate.train.catalogue import formula_text

    echo(formula_text(kind, family), end="")


def schema() -> None:
    """Print the JSON schema of an experiment, for editors that complete YAML.

    Example: hecate schema > experiment.schema.json
    """
    from hecate.train.compose import experiment_schema

    echo(json.dumps(experiment_schema(), indent=1))


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]")] = Path("my.yaml"),
    source: Annotated[str, typer.Option("--from", metavar="PRESET|FILE")] = "quickstart",
) -> None:
    """Write a commented YAML file with every setting and its default, to change and train.

    Args:
        path: The file to write; it must not exist.
        source: Preset or file with the settings to begin with; `hecate list presets` has the presets.

    Examples: hecate init my.yaml | hecate init levels.yaml --from hope, then hecate train my.yaml
    """
    from hecate.files import refusing, write_file
    from hecate.train.catalogue import starter

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"the file must end in .yaml or .yml, as `hecate train` reads it, got {str(path)!r}")
    text = starter(source, str(path))
    with refusing(f"write {path}", "give another name", kind=ConfigError):
        try:
            path.touch(exist_ok=False)  # atomic, so that a file or link that appears meanwhile is kept
        except FileExistsError:
            raise ConfigError(f"{path} is there already; nothing was written: give another name or remove it") from None
        try:
            write_file(path, text)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    echo(f"{path}: change it, then hecate train {path}")


def doctor(
    rules: Annotated[list[str] | None, typer.Argument(metavar="[RULE]...", show_default=False)] = None,
    warm: bool = False,
    width: Annotated[int, typer.Option(min=1, max=1024)] = 64,
) -> None:
    """Show what this machine has, what it lacks and the command to install it, and which engines run here; or compile
    kernels before their first use.

    Args:
        rules: Rules to warm; all of them if left out.
        warm: Compile the kernels of rules and keep them on disk.
        width: Width of a head, to warm for.

    Examples: hecate doctor | hecate doctor --warm titans delta
    """
    from hecate.train import catalogue
    from hecate.train.display import print_table

    if not warm:
        if rules:
            raise ConfigError(f"doctor takes rules, such as {rules[0]!r}, with --warm; hecate list rules tells of them")
        for table in (catalogue.machine(), catalogue.missing(), catalogue.engines(), catalogue.kernels()):
            if table[1]:
                print_table(*table)
        return
    for what, seconds in catalogue.warm(rules or [], width):
        echo(f"{what}, {seconds:.1f} s")


_Inputs = Annotated[list[str], typer.Argument(
    metavar="INPUT...", show_default=False,
    help="Files, folders or globs: text, .jsonl (both also .gz, .zst), .parquet.",
)]  # fmt: skip
_Field = Annotated[str, typer.Option(help="Where records of JSON and Parquet have their text.")]
_Separator = Annotated[str | None, typer.Option(
    help="Line that parts the documents of a text; a file is one document if left out.",
)]  # fmt: skip
_Document = Annotated[int, typer.Option(
    "--max-document", metavar="MIB", min=1, max=1 << 20, help="Longest document, unpacked; a longer one is refused.",
)]  # fmt: skip
_Line = Annotated[int, typer.Option(
    "--max-line", metavar="MIB", min=1, max=1 << 20, help="Longest line of JSON, unpacked; a longer one is refused.",
)]  # fmt: skip

data = typer.Typer(
    help="Make token shards and tokenizers, and inspect them.", no_args_is_help=True, rich_markup_mode=None
)


@command(data, short="Turn a corpus into token shards.")
def tokenize(
    inputs: _Inputs,
    out: Annotated[Path, typer.Option(show_default=False)],
    tokenizer: str = "bytes",
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    field: _Field = "text",
    separator: _Separator = None,
    validation: Annotated[float, typer.Option(min=0)] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1)] = 1 << 27,
    document: _Document = 128,
    line: _Line = 16,
) -> None:
    """Turn a corpus into token shards for `data.kind=tokens`. The same command resumes where a killed one stopped.

    Args:
        out: Folder of the shards.
        tokenizer: A tokenizer.json, or bytes.
        workers: Processes; one for each core if left out.
        validation: Share of the documents to hold out.
        shard_tokens: Number of tokens in a full shard.

    Example: hecate data tokenize corpus/*.jsonl.zst --tokenizer tokenizer.json --out tokens
    """
    from hecate.data.corpus import Limits
    from hecate.data.tokenize import Progress
    from hecate.data.tokenize import tokenize as make

    began, shown = time.monotonic(), 0.0

    def say(state: Progress) -> None:
        nonlocal shown
        seconds = time.monotonic() - began
        if state.note:
            echo(state.note, err=True)
        elif seconds - shown > 2:
            shown = seconds
            done = f"file {state.file}/{state.files}  {state.documents:,} documents  {state.tokens:,} tokens"
            echo(f"{done}  {state.tokens / seconds:,.0f} tokens/s", err=True)

    sidecar = make(
        inputs, out, tokenizer=tokenizer, workers=workers or os.cpu_count() or 1, field=field, separator=separator,
        validation=validation, shard_tokens=shard_tokens, limits=Limits(document << 20, line << 20), progress=say,
    )  # fmt: skip
    end = "" if sidecar.validation else " --set data.validation=0.01"
    with afterwards():
        _table(out)
        if end:
            echo("no document was held out: data.validation=0.01 holds out the end of the tokens", err=True)
        echo(f"train with: --set data.kind=tokens --set data.path={out}{end}")


@command(data, "train-tokenizer", short="Train a byte-level BPE on a corpus.")
def train_tokenizer(
    inputs: _Inputs,
    vocab: Annotated[int, typer.Option(show_default=False)],
    out: Annotated[Path, typer.Option(show_default=False)],
    field: _Field = "text",
    separator: _Separator = None,
    document: _Document = 128,
    line: _Line = 16,
) -> None:
    """Train a byte-level BPE tokenizer, which has a token for every byte and so can encode any text.

    Args:
        vocab: Largest number of tokens.
        out: The tokenizer.json to write.

    Example: hecate data train-tokenizer corpus --vocab 32000 --out tokenizer.json
    """
    from hecate.data.corpus import Limits, documents, find
    from hecate.data.tokenizer import FileTokenizer, train_tokenizer
    from hecate.errors import DataError
    from hecate.files import refusing, write_file

    if out.exists():
        raise DataError(f"{out} exists; shards may have been made with it: choose another --out")
    how: dict[str, Any] = {"field": field, "separator": separator, "limits": Limits(document << 20, line << 20)}
    text = train_tokenizer((text for file in find(inputs) for text in documents(file, **how)), vocab)
    with refusing(f"write {out}", "choose another --out", kind=DataError):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, text)
    with afterwards():
        echo(f"{FileTokenizer(text, str(out)).size:,} tokens: {out}")


@command(data, "inspect", short="Show what token shards hold, and verify their files.")
def inspect_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    show: Annotated[int, typer.Option("--documents", min=0)] = 3,
    hashes: Annotated[bool, typer.Option("--hashes/--no-hashes")] = True,
) -> None:
    """Count what a folder of shards holds, print its first documents, and verify every file.

    Args:
        folder: A folder of token shards.
        show: How many documents to print.
        hashes: Read and hash every file.

    Example: hecate data inspect tokens
    """
    from hecate.data.shards import check_hash, first_documents, hashes_of, read_sidecar

    _table(folder)
    for number, (tokens, text) in enumerate(first_documents(folder, show), 1):
        echo(f"--- document {number}, {tokens:,} tokens\n{text}")
    if hashes:
        wanted = hashes_of(folder, read_sidecar(folder))
        for path, digest in wanted.items():
            check_hash(path, digest)
        echo(f"all {len(wanted)} files are whole")


def _table(folder: Path) -> None:
    from hecate.data.shards import TokenStream, files_of, read_sidecar
    from hecate.train.display import print_table

    sidecar = read_sidecar(folder)
    rows = []
    for split, shards in (("train", sidecar.train), ("validation", sidecar.validation)):
        TokenStream(files_of(folder, sidecar, "train" if split == "train" else "validation"))  # are all there?
        tokens, documents, text = (sum(getattr(s, name) for s in shards) for name in ("tokens", "documents", "text"))
        ratio = f"{text / tokens:.3f}" if tokens else ""
        rows.append((split, *(f"{n:,}" for n in (len(shards), documents, tokens, text)), ratio))
    print_table(("split", "shards", "documents", "tokens", "bytes of text", "bytes a token"), rows)
    source = "bytes" if sidecar.tokenizer is None else f"tokenizer {sidecar.tokenizer[:12]}"
    end = "no token ends documents" if sidecar.end is None else f"token {sidecar.end} ends documents"
    echo(f"{sidecar.dtype}, vocabulary {sidecar.vocabulary:,}, {source}; {end}")


def gym(
    named: Annotated[list[str] | None, typer.Argument(metavar="CONTENDER", show_default=False)] = None,
    tasks: Annotated[str | None, typer.Option(metavar="TASK[,TASK]")] = None,
    seeds: int = 5,
    out: Path = Path("runs/gym"),
    reference: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    quick: bool = False,
    listed: Annotated[bool, typer.Option("--list")] = False,
) -> None:
    """Test what memories remember, learn and track, on generated streams with known scores to compare with. Write one
    table, gym.json, gym.csv and a figure. Settings are chosen on another seed; differences to the reference are
    corrected by Dunnett's method; contenders that look ahead, or are no better than chance, are flagged.

    Args:
        named: Contenders: names from --list, rules, YAML of a rule or a file, several rules joined by + (levels) or |
            (heads), or your own module:function; all of --list if left out.
        tasks: Tasks from --list; all if left out.
        seeds: Number of reported streams, with seeds 0, 1, ...
        out: Folder of the results; the same command resumes there.
        reference: The contender that others are compared with; gated_delta, or the first.
        quick: Small tasks, two seeds and two settings, for a first look.
        listed: Show tasks and contenders without running them.

    Examples: hecate gym --quick | hecate gym titans 'titans + gated_delta' attention --tasks odd,two_paces |
    hecate gym gated_delta mine:memory --out runs/mine
    """
    from hecate.gym import contenders, report, run
    from hecate.train.display import print_table, print_tables

    if listed:
        print_tables(report.listing([make() for make in contenders().values()]))
        return
    wanted = [name.strip() for name in tasks.split(",")] if tasks is not None else ()
    say = partial(echo, err=True)
    try:
        results = run(named or (), wanted, seeds=seeds, out=out, reference=reference, quick=quick, say=say)
    except KeyboardInterrupt:
        echo(f"stopped; what is done is kept in {out}: the same line again goes on", err=True)
        raise
    except Exception as error:
        if not (place := getattr(error, "__notes__", None)):
            raise
        reason = f"{type(error).__name__}: {shorten(str(error))}"
        raise ConfigError(f"{place[0]} fails with {reason}; hecate --debug gym shows where") from error
    written = report.write(results, out)
    with afterwards():
        print_table(*report.table(results))
        for path in written:
            echo(str(path))
        if written[-1].suffix != ".svg":
            echo(f"no figure without matplotlib: {install_line('plot')}")


KEY = "HECATE_API_KEY"


def serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False)],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    memories: Path | None = None,
    prefixes: Path | None = None,
    prefix_mib: Annotated[int, typer.Option(min=0, max=1 << 20)] = 256,
    parked_dtype: str | None = None,
    exact: bool = False,
    max_batch: Annotated[int, typer.Option(min=1, max=256)] = 16,
    max_queue: Annotated[int, typer.Option(min=1, max=1 << 16)] = 64,
    name: str | None = None,
    checkpoint: str = "best",
) -> None:
    """Serve OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /v1/memories, /health, /metrics.

    Args:
        folder: A run, a checkpoint, or a folder of export --to hf.
        host: Address to listen on; one that other machines reach needs a key in HECATE_API_KEY.
        port: Port to listen on.
        memories: Folder with a persistent memory for each `user` of requests.
        prefixes: Folder for the states of shared prefixes: read at the start, written at the end.
        prefix_mib: Memory for these states, in MiB.
        parked_dtype: float16 keeps memories and prefixes in half the bytes; refused for rules that it would harm.
        exact: Answers that do not depend on concurrent requests, to the bit; a lone request takes up to four times as
            long per token.
        max_batch: Number of requests at once, a power of two.
        max_queue: Number of requests that may wait.
        name: The model's name for clients; the folder's name if left out.
        checkpoint: Which checkpoint of a run: best or newest.

    Examples: hecate serve runs/quickstart | hecate serve model --port 8080 --memories users
    """
    with extra():
        from hecate.serve import server
    from hecate import states
    from hecate.checks import readable
    from hecate.serve import Memories, PrefixCache, Scheduler

    key = os.environ.get(KEY) or None
    server.check_host(host, key)
    if memories and prefixes and memories.resolve() == prefixes.resolve():
        raise ConfigError(f"memories and prefixes are both {memories}: one deletes what the other keeps; name two")
    model, texts = _of_export(folder) if (folder / "config.json").is_file() else _of_run(folder, checkpoint)
    kept: dict[str, Any] = {"model": states.fingerprint(model), "parked_dtype": parked_dtype}
    room, shared = prefix_mib << 20, {**kept, "exact": exact}
    tree = PrefixCache.open(prefixes, room, **shared) if prefixes else PrefixCache(room, **shared)
    store = None if memories is None else Memories(memories, **kept)
    scheduler = Scheduler(model, max_batch=max_batch, max_queue=max_queue, prefixes=tree, memories=store, exact=exact)
    name = name or folder.resolve().name
    echo(f"{name} at http://{host}:{port}, {readable(scheduler.state_bytes)} a state" + ("" if key else "; no key"))
    server.serve(server.application(scheduler, texts, name=name, key=key), host, port, key=key)
    if store is not None:
        store.close()
    if prefixes is not None:
        tree.save(prefixes)


def _of_run(folder: Path, checkpoint: str) -> tuple[Any, Any]:
    """A run's language model and its texts."""
    from hecate.serve import Texts, plain_chat
    from hecate.train.trained import open_model, reads_text

    trained = open_model(folder, checkpoint)
    tokenizer = reads_text(trained, str(folder))
    return trained.model, Texts(lambda text: tokenizer.encode([text])[0].tolist(), tokenizer.decode, plain_chat)


def _of_export(folder: Path) -> tuple[Any, Any]:
    """The model of a folder in transformers' format and its texts, with its tokenizer's chat template if it has one."""
    from hecate.serve import Texts, plain_chat

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the folder has everything
    with extra():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hecate.hf import HecateForCausalLM
    with retelling(ConfigError, f"{folder} is no model with a tokenizer"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if not isinstance(model, HecateForCausalLM):
        raise ConfigError(f"{folder} has a {type(model).__name__}; models of hecate alone are served")

    def chat(messages: list[dict[str, str]]) -> str | list[int]:
        if not tokenizer.chat_template:
            return plain_chat(messages)
        try:  # a template writes the first token itself
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # templates may raise anything
            raise ConfigError(f"the chat template of the model refuses these messages: {error}") from None

    ends = model.generation_config.eos_token_id
    stops = frozenset([ends] if isinstance(ends, int) else ends or ())
    encode, decode = (lambda text: tokenizer(text)["input_ids"]), (lambda ids: tokenizer.decode(ids))
    return model.model.lm, Texts(encode, decode, chat, stops)

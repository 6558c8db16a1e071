"""The commands of `hecate data`: corpora to token shards, tokenizers, and what is in a folder of shards; and what all
commands do ahead of their work and say of slow imports."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hecate.errors import MESSAGE, printable
from hecate.processes import import_modules
from hecate.terminal import afterwards, echo

_Inputs = Annotated[list[str], typer.Argument(
    metavar="INPUT...", show_default=False,
    help="Files, folders or globs: text, .jsonl (both also .gz, .zst), .parquet.",
)]  # fmt: skip
_Field = Annotated[str, typer.Option("--field", help="Where records of JSON and Parquet have their text.")]
_Separator = Annotated[str | None, typer.Option(
    "--separator", help="Line that parts the documents of a text; a file is one document if left out.",
)]  # fmt: skip
_Document = Annotated[int, typer.Option(
    "--max-document", metavar="MIB", min=1, max=1 << 20, help="Longest document, unpacked; a longer one is refused.",
)]  # fmt: skip
_Line = Annotated[int, typer.Option(
    "--max-line", metavar="MIB", min=1, max=1 << 20, help="Longest line of JSON, unpacked; a longer one is refused.",
)]  # fmt: skip


LONG = 1.0
"""Seconds of imports after which a command says what it waits for."""


@contextmanager
def importing(quiet: bool) -> Iterator[None]:
    """Around imports: the first process of a run says so where they take long."""
    waiting = threading.Timer(LONG, echo, ["importing torch and the training code"], {"err": True})
    waiting.daemon = True
    if not quiet and os.environ.get("RANK", "0") == "0":
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


class Command(TyperCommand):
    """A command after the user's imports; a warning is one line."""

    def invoke(self, ctx: Any) -> Any:
        """Runs it."""
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: echo(
                f"warning: {printable(str(message), MESSAGE)}", err=True
            )
            import_modules(ctx.find_root().params.get("imports") or [])
            return super().invoke(ctx)


app = typer.Typer(
    help="Make token shards and tokenizers, and look into them.", no_args_is_help=True, rich_markup_mode=None
)
_command = partial(app.command, cls=Command)


@_command(
    short_help="Turn a corpus into token shards.",
    epilog="Example: hecate data tokenize corpus/*.jsonl.zst --tokenizer tokenizer.json --out tokens",
)
def tokenize(
    inputs: _Inputs,
    out: Annotated[Path, typer.Option("--out", help="Folder of the shards.", show_default=False)],
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="A tokenizer.json, or bytes.")] = "bytes",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core if left out.")] = None,
    field: _Field = "text",
    separator: _Separator = None,
    validation: Annotated[float, typer.Option(min=0, help="Share of the documents that is held out.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens after which a shard is full.")] = 1 << 27,
    document: _Document = 128,
    line: _Line = 16,
) -> None:
    """Turn a corpus into token shards for `data.kind=tokens`. The same command goes on where a killed one stopped."""
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
            echo(
                f"file {state.file}/{state.files}  {state.documents:,} documents  {state.tokens:,} tokens  "
                f"{state.tokens / seconds:,.0f} tokens/s",
                err=True,
            )

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


@_command(
    "train-tokenizer",
    short_help="Train a byte-level BPE on a corpus.",
    epilog="Example: hecate data train-tokenizer corpus --vocab 32000 --out tokenizer.json",
)
def train_tokenizer(
    inputs: _Inputs,
    vocab: Annotated[int, typer.Option("--vocab", help="Tokens, at most.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The tokenizer.json to write.", show_default=False)],
    field: _Field = "text",
    separator: _Separator = None,
    document: _Document = 128,
    line: _Line = 16,
) -> None:
    """Train a byte-level BPE: it has a token for every byte, so that any text can be written with it."""
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


@_command(
    short_help="What token shards hold, and whether they are whole.", epilog="Example: hecate data inspect tokens"
)
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.", show_default=False)],
    show: Annotated[int, typer.Option("--documents", min=0, help="How many documents to print.")] = 3,
    hashes: Annotated[bool, typer.Option("--hashes/--no-hashes", help="Whether to read and hash every file.")] = True,
) -> None:
    """Count what a folder of shards holds, print its first documents, and verify every file."""
    from hecate.data.shards import file_sha256, first_documents, hashes_of, read_sidecar
    from hecate.errors import DataError

    _table(folder)
    for number, (tokens, text) in enumerate(first_documents(folder, show), 1):
        echo(f"--- document {number}, {tokens:,} tokens\n{text}")
    if hashes:
        wanted = hashes_of(folder, read_sidecar(folder))
        for path, digest in wanted.items():
            if file_sha256(path) != digest:
                raise DataError(
                    f"{path} is damaged: it has another SHA-256 than recorded; put it back as it was written"
                )
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
    made = "bytes" if sidecar.tokenizer is None else f"tokenizer {sidecar.tokenizer[:12]}"
    end = "no token ends documents" if sidecar.end is None else f"token {sidecar.end} ends documents"
    echo(f"{sidecar.dtype}, vocabulary {sidecar.vocabulary:,}, {made}; {end}")

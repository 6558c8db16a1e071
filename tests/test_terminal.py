"""What reaches a terminal, and what happens where nothing does."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hecate import errors, terminal
from hecate.cli import main
from hecate.data.tokenizer import Bytes, FileTokenizer
from hecate.errors import CheckpointError, ConfigError, DataError, printable, shorten
from hecate.terminal import OutputError, StandardError, afterwards, echo, message_of
from hecate.train.display import Display, print_table
from tests import forked
from tests.test_cli import TINY

NASTY = "a\x1b]0;x\x07\r\x7f\x9b31m\u202e\u2066\udcff"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.spec("TRAIN-CLI-D5")
def test_what_a_terminal_would_act_on_is_escaped_and_what_is_long_is_cut():
    shown = printable(f"{NASTY}\n\té\u00a0語")
    assert not UNSAFE.search(shown) and shown.endswith("\n\té\u00a0語")
    assert shown.startswith(r"a\x1b]0;x\x07\r\x7f\x9b31m\u202e\u2066\udcff") and printable(shown) == shown
    assert printable("a\nb", 80) == r"a\nb"
    long = printable("x" * 900_000 + " the end", 2000)
    assert len(long) < 300 and long.startswith("xxx") and long.endswith("x the end") and "..." in long
    assert len(printable("ab " * 300_000, 2000)) == 2000
    assert len(shorten("k" * 900_000)) == 80 and not UNSAFE.search(shorten(Path(NASTY)))


@pytest.mark.spec("TRAIN-CLI-D5")
def test_no_error_repeats_what_it_was_given_at_length_or_as_it_is():
    for kind in (ConfigError, errors.ShapeError, DataError, CheckpointError, errors.HookError):
        text = str(kind(f"{NASTY} {'k' * 900_000}: no such thing\nerror: forged"))
        assert len(text) < 600 and not UNSAFE.search(text) and "\n" not in text and "no such thing" in text


@pytest.mark.spec("TRAIN-CLI-D5")
def test_keys_and_many_faults_are_cut():
    error = ConfigError("is unknown", ("a", NASTY + "k" * 900_000, 3))
    assert len(str(error)) < 120 and not UNSAFE.search(str(error)) and error.problems[0].path[2] == 3
    many = ConfigError(errors.Problem((f"k{n}",), "is unknown") for n in range(100))
    assert len(many.problems) == 100 and str(many).endswith("\nand 80 more") and "; k1: is unknown; " in many.line


NAMELESS = [
    ("show", f"{NASTY[:-1]}.yaml"),
    ("show", "mqar", "--set", f"model.{NASTY}=3"),
    ("show", "mqar", "--set", f"{'k' * 900_000}=3"),
    ("list", NASTY),
    (NASTY,),
    ("list", "phi", NASTY + "k" * 100_000),
    ("show", f"--{NASTY}"),
    ("train", "--resume", "--out", NASTY),
    ("compare", "mqar", "--over", f"seed={NASTY},1", "--out", "x"),
    ("compare", "mqar", "--over", f"[{NASTY}]", "--out", "x"),
    ("eval", NASTY),
    ("generate", NASTY),
    ("export", NASTY, "--to", NASTY),
    ("import", NASTY, "--out", "x"),
    ("report", NASTY),
    ("data", "tokenize", NASTY, "--out", "x"),
    ("data", "inspect", NASTY),
    ("doctor", "--warm", NASTY),
    ("--import", NASTY, "list"),
]


@pytest.mark.spec("TRAIN-CLI-D5")
def test_no_name_reaches_a_terminal_as_it_is(hecate, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for argv in NAMELESS:
        code, out, err = hecate(*argv)
        assert code == 2 and not UNSAFE.search(out + err) and len(err) < 1500 and "Traceback" not in err, argv


@pytest.mark.spec("TRAIN-CLI-D5")
@pytest.mark.parametrize("wide", [True, False])
def test_tables_lines_and_bars_show_names_as_they_are_written(capsys, monkeypatch, wide):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: wide, raising=False)
    print_table(("[bold]a[/x]", NASTY), [("[red]b[/red]", f"c\n{NASTY}")])
    out = capsys.readouterr().out
    assert "[bold]a[/x]" in out and "[red]b[/red]" in out and not UNSAFE.search(re.sub(r"\x1b\[[\d;]*m", "", out))
    from rich.console import Console

    drawn = io.StringIO()
    with Display(Console(file=drawn, force_terminal=True, width=200)) as display:
        display.start("[/x][red]a", 0, 1)
        display.step(1, lambda: NASTY)
        display.say(NASTY)
    assert "[/x][red]a" in drawn.getvalue() and "\x07" not in drawn.getvalue() and "\u202e" not in drawn.getvalue()


class Full(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.spec("TRAIN-CLI-D6")
def test_output_that_nobody_takes_is_no_failure_of_what_is_done(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full(errno.ENOSPC))
    with pytest.raises(OutputError, match=r"^cannot write to standard output: No space left on device$"):
        echo("a")
    with afterwards():
        echo("a")
    assert capsys.readouterr().err == (
        "warning: cannot write to standard output: No space left on device; the work itself is done\n"
    )
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    with afterwards():
        print_table(("a",), [("b",)])
    with pytest.raises(SystemExit) as caught:
        main(["list"])
    assert caught.value.code == 141 and capsys.readouterr().err == ""
    for stream in (None, Full(errno.ENOSPC), Full(errno.EPIPE)):
        monkeypatch.setattr(sys, "stderr", stream)
        echo("a", err=True)
        with Display() as display:
            display.say("a")
        assert StandardError().write("a") == 1
    monkeypatch.setattr(sys, "stdout", None)
    print_table(("a",), [("b",)])


def raising(error: BaseException):
    def catalogue(_: object) -> None:
        raise error

    return catalogue


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.spec("TRAIN-CLI-D6")
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device; free some space"),
        (OSError(errno.EMFILE, "Too many open files", "/x"), 2, "error: cannot use '/x': Too many open files; raise `"),
        (OSError(errno.EIO, "Input/output error"), 2, "error: Input/output error\n"),
        (MemoryError("Unable to allocate 15 GiB"), 2, "error: there is not enough memory for this (Unable to allocate"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "error: there is not enough"),
        (RecursionError(), 2, "error: something here is nested too deeply"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), 2, "error: a text has charact"),
        (PanicException("index out of bounds\nat x.rs"), 1, "error: PanicException: index out of bounds at x.rs"),
        (KeyError("a\x1b"), 1, "error: KeyError: 'a\\x1b'; nothing here expects this: HECATE_DEBUG=1 shows where"),
        (errors.NonFiniteError("step 3"), 1, "error: step 3\n"),
        (DataError("no file"), 2, "error: no file\n"),
    ],
)  # fmt: skip
def test_every_failure_is_one_message(hecate, monkeypatch, error, code, message):
    import hecate.train.catalogue as found

    monkeypatch.setattr(found, "catalogue", raising(error))
    status, out, err = hecate("list")
    assert (status, out) == (code, "") and err.startswith(message) and err.count("\n") == 1
    monkeypatch.setenv("HECATE_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["list"])


def test_an_interrupt_is_no_message(hecate, monkeypatch):
    import hecate.train.catalogue as found

    monkeypatch.setattr(found, "catalogue", raising(KeyboardInterrupt()))
    assert hecate("list") == (130, "", "")
    assert message_of(torch.OutOfMemoryError("CUDA out of memory")).startswith(
        "there is not enough memory for this (CUDA"
    )
    noted = RuntimeError("boom")
    noted.add_note("contender x")
    assert message_of(noted).startswith("RuntimeError: boom; contender x; nothing here expects this")


INTERRUPTED = """
import atexit, runpy, signal, sys
import hecate.terminal as terminal
press = lambda: signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background

class Loaded:
    def find_spec(self, name, *_):
        if name == "hecate.cli" and where == "as modules are loaded":
            press()

class Gone:
    def __del__(self):
        press()

def twice(function):
    def called(*given):
        press()
        return function(*given)
    return called

where, module = sys.argv[1:]
sys.meta_path.insert(0, Loaded())
if where == "at the last lines":
    terminal.finish = twice(terminal.finish)
elif where == "as Python ends":
    atexit.register(press)
elif where == "where none can be raised":
    atexit.register(Gone)
import hecate.train.catalogue as found
found.catalogue = twice(found.catalogue)
sys.argv = [module, "list" if module == "hecate" else "--list"]
if module == "studies":
    import studies.study
    studies.study.list_studies = twice(studies.study.list_studies)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.spec("TRAIN-CLI-D2")
@pytest.mark.parametrize(
    ("where", "module"),
    [
        ("as modules are loaded", "hecate"), ("as Python ends", "hecate"),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (
            ("at the last lines", "hecate"), ("where none can be raised", "hecate"), ("once", "studies"))),
    ],
)  # fmt: skip
def test_no_ctrl_c_prints_a_traceback(where, module):
    command = [sys.executable, "-c", INTERRUPTED, where, module]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr) == ("", "") and ended.returncode in (130, -signal.SIGINT)


SHELL = """
import os, sys
sys.modules["matplotlib.figure"] = None  # drawing takes a second
from hecate.cli import main
kept, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
r, unread = os.pipe()
os.close(r)
found = []
def hecate(to, *argv):
    os.dup2(to, 1)
    sys.stdout = open(1, "w", closefd=False)
    try:
        main(argv)
    except SystemExit as ended:
        found.append(ended.code)
for argv in ["list"], ["--help"], ["--version"], ["train", "tiny.yaml", "--out", "run"]:
    hecate(full, *argv)
os.dup2(full, 2)
hecate(full, "list", "nothing")
hecate(unread, "list")
os.dup2(unread, 2)
hecate(unread, "train", "--out", "run", "--resume", "--steps", "5")
os.close(1)
os.close(2)
sys.stdout = sys.stderr = None
for argv in ["list"], ["list", "nothing"]:
    try:
        main(argv)
    except SystemExit as ended:
        found.append(ended.code)
os.write(kept, repr(found).encode())
"""


@pytest.mark.spec("TRAIN-CLI-D6")
def test_real_streams_that_are_full_or_closed(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = forked.run(SHELL, cwd=tmp_path)
    assert done.stdout == "[2, 2, 2, 0, 2, 141, 0, 0, 2]", done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "the work itself is done" in done.stderr
    assert "step 5 of" in (tmp_path / "run/report.md").read_text()


@pytest.mark.spec("TRAIN-CLI-D6")
def test_files_do_not_become_standard_streams(tmp_path):
    code = (
        "import os\nfrom hecate import terminal\nos.close(1)\nterminal.prepare()\n"
        "print(os.open('file', os.O_CREAT | os.O_WRONLY), file=__import__('sys').stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=True)
    assert int(done.stderr) > 2


def test_a_prompt_that_is_no_text_is_refused():
    for text in ("a\udcff", "\ud800", "caf\udce9"):
        for tokenizer in (Bytes(), FileTokenizer(WORDS, "t.json")):
            with pytest.raises(DataError, match=r"^the text '.*' is not UTF-8 at character \d; give it in UTF-8"):
                tokenizer.encode(["sound", text])


WORDS = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


def test_a_display_outlives_its_stream(monkeypatch):
    """Its bar draws from a thread of its own, whose failure would be a traceback."""

    class Tty(Full):
        def isatty(self) -> bool:
            return True

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(sys, "stderr", Tty(errno.EIO))
    with Display() as display:
        display.start("a", 0, 1)
        display.step(1, lambda: "b")
        display._bar.refresh()
    assert not raised and display.console.is_terminal


def test_full_disks_are_told_from_other_faults(tmp_path):
    from hecate.files import refusing

    def message(number: int) -> str:
        with pytest.raises(CheckpointError) as caught, refusing("write x", "choose another --out"):
            raise OSError(number, os.strerror(number))
        return str(caught.value)

    assert message(errno.ENOSPC).endswith("device; free some space or choose another --out")
    assert message(errno.EDQUOT).endswith("; free some space or choose another --out")
    assert message(errno.EACCES).endswith("; make it writable or choose another --out")
    assert message(errno.EIO).endswith("error; choose another --out")
    assert terminal.DEBUG == "HECATE_DEBUG"

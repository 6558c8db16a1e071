"""Processes that are started, modules of users, and file systems that can less."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

import hecate
from hecate import files, processes
from hecate.compare import run as comparing
from hecate.data.tokenize import tokenize
from hecate.data.tokenizer import FileTokenizer, open_tokenizer
from hecate.errors import CheckpointError, ConfigError, DataError, FileSystemWarning
from hecate.files import by_library, make_folder, new_folder, write_file
from hecate.processes import import_modules, interpreter, safe_path, without_interrupts
from hecate.train.loggers import MetricsWriter
from tests import forked

TRAP = "open({mark!r}, 'a').write(__name__ + ' ')\n"
NAMES = ("statistics", "random", "selectors", "socket", "struct", "queue", "signal", "numpy", "torch", "typing")


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """A working folder whose files have the names of libraries; what of them has run."""
    mark = tmp_path / "mark"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in NAMES:
        Path(f"{name}.py").write_text(TRAP.format(mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", str(Path(hecate.__file__).parents[1]))
    return lambda: mark.read_text() if mark.exists() else ""


@pytest.mark.spec("COMPARE-RESUME-D1")
def test_what_is_started_runs_no_file_of_the_working_folder(trapped, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", str(Path.cwd()), *sys.path])  # as under `python -m`
    done = subprocess.run(
        interpreter("import statistics, hecate.files as f; print(f.__file__, sys.argv[1])", "é"),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not trapped() and done.stdout.endswith(" é\n") and str(Path(hecate.__file__).parent) in done.stdout
    started = []
    monkeypatch.setattr(comparing.subprocess, "Popen", lambda command, **_: started.append(command))
    work = comparing._Work(Path("out"), 1, [], None, None, print, 0)
    make_folder(Path("out/a"))
    work._start(comparing._Job(comparing.Cell("a", (), None), None, Path("out/a/run")))
    assert started[0][1] == "-P" and "-m" not in started[0]


def test_this_package_from_a_folder_is_found_last(trapped, monkeypatch):
    monkeypatch.setattr(processes, "__file__", str(Path("hecate/processes.py").absolute()))
    code = interpreter("")[3]
    assert code.index(repr(str(Path.cwd()))) > max(code.find(repr(path)) for path in sys.path if path)


def test_neither_the_command_line_nor_its_pool_runs_a_file_of_the_working_folder(trapped):
    Path("typing.py").unlink()  # which Python itself takes from there ahead of any line of ours
    Path("a.txt").write_text("one two\n")
    command = [sys.executable, "-m", "hecate", "data", "tokenize", "a.txt", "--out", "out", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "train with: --set data.kind=tokens" in done.stdout, done.stderr
    assert not trapped()
    with safe_path():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_working_folder_that_was_deleted_is_told(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); import hecate.__main__"
    own = {**os.environ, "PYTHONPATH": str(Path(hecate.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True)
    said = "error: the working folder does not exist any more; cd to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_modules_of_users_come_behind_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("own_part_a", "own_part_b"):
        Path(f"{name}.py").write_text("import fractions\nx = fractions.Fraction\n")
    Path("fractions.py").write_text("raise AssertionError")
    import_modules(["own_part_a", "own_part_b"])
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
    assert sys.modules.pop("own_part_a").__file__ == str(tmp_path / "own_part_a.py")
    with pytest.raises(ConfigError, match=r"^--import fractions means fractions of .*, and not fractions.py of this"):
        import_modules(["fractions"])
    Path("own_part_c.py").write_text("raise SystemExit('a\\x1b')")
    with pytest.raises(ConfigError, match=r"own_part_c: the module fails with SystemExit: a\\x1b$"):
        import_modules(["own_part_c"])


def failing(number: int, calls: list[int]):
    def call(*_: object, **__: object) -> None:
        calls.append(number)
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


@pytest.mark.spec("TRAIN-RUN-D9")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_all_is_written_and_said_once(tmp_path, monkeypatch, unwarned, number):
    calls: list[int] = []
    monkeypatch.setattr(fcntl, "flock", failing(number, calls))
    with pytest.warns(FileSystemWarning, match="has no locks .*: see to it that one process at a time") as said:
        for _ in range(2):
            with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
                metrics.write({"event": "train", "step": 1})
        with comparing.locked(tmp_path / "out"):
            pass
        (tmp_path / "a.txt").write_text("one two")
        tokenize([str(tmp_path / "a.txt")], tmp_path / "tokens", tokenizer="bytes", validation=0)
    assert len(said) == 1 and len(calls) == 4


@pytest.mark.spec("TRAIN-RUN-D9")
def test_a_lock_that_another_has_or_that_fails_is_refused(tmp_path, monkeypatch, unwarned):
    with MetricsWriter(tmp_path / "metrics.jsonl"), pytest.raises(CheckpointError, match="another process is training"):
        MetricsWriter(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO, []))
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(CheckpointError, match="Input/output error; mend that, then continue with --resume"):
            MetricsWriter(tmp_path / "metrics.jsonl")
    assert len(list(Path("/proc/self/fd").iterdir())) == open_now


@pytest.mark.spec("TRAIN-RUN-D9")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF])
def test_folders_that_cannot_be_forced_to_disk_are_written(tmp_path, monkeypatch, unwarned, number):
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(FileSystemWarning, match="cannot force what is written to disk .*: a power cut may lose") as said:
        write_file(tmp_path / "a", "text")
        make_folder(tmp_path / "b/c")
        with new_folder(tmp_path / "d") as folder:
            (folder / "e").write_text("text")
        files.remove_folder(tmp_path / "d")
    assert len(said) == 1 and (tmp_path / "a").read_text() == "text" and (tmp_path / "b/c").is_dir()


def test_a_disk_that_fails_is_no_lack_of_the_file_system(tmp_path, monkeypatch, unwarned):
    for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(os, "fsync", failing(number, []))
        for act in (
            lambda: write_file(tmp_path / "a", "text"),
            lambda number=number: make_folder(tmp_path / f"{number}"),
        ):
            with pytest.raises(OSError, match=os.strerror(number)):
                act()


def test_a_run_that_cannot_be_started_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing.subprocess, "Popen", failing(errno.EMFILE, []))
    work = comparing._Work(tmp_path, 1, [], None, None, print, 0)
    cell = comparing.Cell("a", (), None)
    with pytest.raises(
        CheckpointError, match=r"Too many open files; raise `ulimit -n` or give fewer --jobs, then call"
    ):
        work._start(comparing._Job(cell, None, tmp_path / "run"))


WRITERS = """
import errno, resource, sys, torch
from pathlib import Path
from hecate.train import trained
tensors = {"a": torch.zeros(100_000)}
trained.read_weights = lambda *_: tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for to in trained.FORMATS:
    try:
        trained.export_weights(Path("run"), to, Path(to))
    except trained.CheckpointError as error:
        print(error)
"""


def test_what_libraries_say_of_a_disk_is_told_as_what_it_is(tmp_path):
    done = forked.run(WRITERS, cwd=tmp_path)
    lines = [f"cannot write {to}: File too large; choose another --out" for to in ("safetensors", "torch", "dcp")]
    assert done.stdout.splitlines() == lines, done.stderr
    assert not list(tmp_path.iterdir()) and "Warning" not in done.stderr
    with pytest.raises(OSError, match="No space left") as caught, by_library():
        raise RuntimeError("Error while serializing: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(KeyError), by_library():
        raise KeyError("a fault of ours")


def described(**parts: object) -> str:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return json.dumps({"version": "1.0", "model": model, **parts})


def charsmap(text: str) -> dict[str, object]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 4096}
HOSTILE = {
    "panics": (charsmap("AAAA"), "Cannot parse precompiled_charsmap"),
    "panics as it encodes": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    "panics as it decodes": ({"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}}, "out of bounds"),
    "aborts": (charsmap("//////////8="), "it takes more than 1 GiB of memory or 4 sec"),
    "grows": ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 4}}, "it takes more than 1 GiB"),
    "huge ids": ({"model": {"type": "WordLevel", "vocab": {"a": 4294967290}, "unk_token": "a"}}, "ids are below 16"),
    "is none": ({"model": {"type": "Nothing"}}, "is no tokenizer of the tokenizers library"),
}  # fmt: skip


@pytest.mark.spec("DATA-TOKENIZER-D4")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_harms_is_refused(tmp_path, monkeypatch, capfd, name):
    parts, message = HOSTILE[name]
    monkeypatch.setattr("hecate.data.tokenizer.ROOM", 1 << 30)
    monkeypatch.setattr("hecate.data.tokenizer.SECONDS", 4)
    path = tmp_path / "tokenizer.json"
    path.write_text(described(**parts))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=message) as caught:
        open_tokenizer(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert str(path) in str(caught.value) and capfd.readouterr() == ("", "")


@pytest.mark.spec("DATA-TOKENIZER-D4")
def test_a_tokenizer_is_tried_once_and_may_lack_letters(tmp_path, monkeypatch):
    text = described(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"})
    assert FileTokenizer(text, "t.json").encode(["a"])[0].tolist() == [0]
    monkeypatch.setattr("hecate.data.tokenizer._try", lambda *_: pytest.fail("again"))
    again = FileTokenizer(text, "t.json")
    with pytest.raises(DataError, match=r"t.json .* \(WordLevel error: Missing \[UNK\] token"):
        again.encode(["b"])
    monkeypatch.setattr("hecate.data.tokenizer.MOST_BYTES", 1 << 20)
    (tmp_path / "t.json").write_text(text + " " * (1 << 20))
    with pytest.raises(DataError, match="it has more than 1 MiB; give a tokenizer.json, or bytes"):
        open_tokenizer(tmp_path / "t.json")


def test_ctrl_c_is_left_to_the_process_that_starts_others(tmp_path):
    """A terminal sends it to all of them, and what is importing torch would answer with a traceback."""

    def blocked(status: str) -> bool:
        return bool(int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16) >> (signal.SIGINT - 1) & 1)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with without_interrupts():
        started = subprocess.run(["/bin/cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    assert blocked(started) and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    forkserver._forkserver._stop()  # that of another test
    (tmp_path / "a.txt").write_text("text")
    tokenize([str(tmp_path / "a.txt")], tmp_path / "tokens", tokenizer="bytes", workers=2, validation=0)
    assert blocked(Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text())

"""The harness of several processes: what dies is told, and tried once more where it may not be to blame."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import forked
from tests.ranks import Died, run_ranks


def answer() -> int:
    return int(os.environ["RANK"])


def die_while_there_is(path: str) -> int:
    """Aborts the process of rank 0, the first time alone."""
    file = Path(path)
    if answer() == 0 and file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGABRT)
    return answer()


def die() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


def test_a_forked_process_is_as_one_that_python_starts(tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), sys.stdin.read()); sys.exit('no')"
    done = forked.run(code, 3, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['-c', '3'] {tmp_path} \n", "no\n")
    assert "ZeroDivisionError" in forked.run("1 / 0").stderr
    process = forked.Forked("import time; time.sleep(60)")
    process.kill(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_has_answered_before_and_dies_is_tried_once_more(tmp_path, capsys):
    flag = tmp_path / "flag"
    flag.touch()
    assert run_ranks(1, answer) == [0]
    assert run_ranks(1, die_while_there_is, str(flag)) == [0]
    assert "rank 0 of 1 died (exit -6); once more" in capsys.readouterr().err
    with pytest.raises(Died, match=r"rank 0 of 1 died \(exit -6\)"):
        run_ranks(1, die)
    assert capsys.readouterr().err.count("once more") == 1
    with pytest.raises(Died):
        run_ranks(1, die)
    assert not capsys.readouterr().err  # in a new process: no second try

"""Compiled kernels on disk: found by what they are made of, and only in a folder that is the user's alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hecate.errors import install_line

disk = pytest.importorskip("hecate.engine.cpu.disk", reason=f"needs numba: {install_line('cpu')}")

ROOT = Path(__file__).parents[2]
COMPILED = """
import numpy as np
from hecate.engine.cpu import family
kernels = family.ready(tuple(("no_gain", (), "gain", back) for back in (False, True)), np.float64)
print(sum(map(len, (kernel.stats.cache_hits for kernel in kernels))), *(len(kernel.signatures) for kernel in kernels))
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def hits(where: Path, cache: Path) -> int:
    """Kernels that a fresh process of the sources in a folder finds on disk."""
    own = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(where)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=own, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, *signatures = map(int, done.stdout.split())
    assert signatures == [1, 1]
    return found


@pytest.mark.spec("ENG-NUM-D9")
def test_equal_sources_elsewhere_find_the_kernels_and_others_none(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "hecate", tmp_path / "a/hecate", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "a/hecate/engine/cpu/engine.py").open("a") as file:
        file.write("\n# what calls kernels holds none\n")
    assert hits(ROOT, tmp_path) == 0
    assert hits(tmp_path / "a", tmp_path) == 2
    monkeypatch.setattr(disk, "__file__", str(tmp_path / "a/hecate/engine/cpu/disk.py"))
    found = disk.digest.__wrapped__()
    assert found == disk.digest()
    with (tmp_path / "a/hecate/engine/cpu/vectors.py").open("a") as file:
        file.write("\n# a comment\n")
    assert disk.digest.__wrapped__() != found
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700


@pytest.mark.spec("ENG-NUM-D9")
@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_folder_that_others_may_enter_is_refused(kernels, mode):
    kernels.mkdir()
    kernels.chmod(mode)
    assert disk.folder() is None
    kernels.chmod(0o700)
    assert disk.folder().parent == kernels


@pytest.mark.spec("ENG-NUM-D9")
def test_a_link_a_file_or_a_folder_of_another_user_is_refused(kernels, tmp_path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    kernels.symlink_to(own)
    assert disk.folder() is None
    kernels.unlink()
    kernels.write_text("")
    assert disk.folder() is None
    kernels.unlink()
    assert disk.folder() is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert disk.folder() is None


def test_what_cannot_be_kept_is_compiled(kernels, monkeypatch):
    kernels.write_text("")
    kernel = disk.compiled(lambda x: x + 1)
    assert kernel(1) == 2 and not kernel.stats.cache_path


def test_homes(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.folder().parent == tmp_path / "hecate/kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk.folder().parent == tmp_path / ".cache/hecate/kernels"


def test_kernels_of_other_sources_go_when_nobody_has_used_them(kernels):
    kernels.mkdir(mode=0o700)
    old, recent = kernels / "old", kernels / "recent"
    for path in (old, recent):
        path.mkdir()
        (path / "a.nbi").write_text("")
    os.utime(old, (0, 0))
    own = disk.folder()
    assert {path.name for path in kernels.iterdir()} == {"recent", own.name}
    os.utime(own, (0, 0))
    assert disk.folder() == own and own.stat().st_mtime > 0  # in use

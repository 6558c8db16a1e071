"""Token shards: what is written is read, at any size, and what is damaged is refused in a sentence."""

from __future__ import annotations

import copy
import gc
import gzip
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hecate.cli import app
from hecate.data import Bytes, Tokens
from hecate.data.corpus import documents, find
from hecate.data.shards import (
    SIDECAR,
    TokenFile,
    TokenStream,
    digest_of,
    files_of,
    first_documents,
    nanogpt_file,
    read_sidecar,
    tokenizer_of,
)
from hecate.data.tokenize import tokenize
from hecate.data.tokenizer import open_tokenizer, train_tokenizer
from hecate.errors import DataError, install_line
from tests import forked
from tests.data.corpora import WORDS, bytes_folder, jsonl, texts
from tests.ranks import descendants


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents_of(folder: Path, split: str) -> list[str]:
    sidecar = read_sidecar(folder)
    stream, tokenizer = TokenStream(files_of(folder, sidecar, split)), tokenizer_of(folder, sidecar)
    starts = [*stream.starts(0, len(stream)).tolist(), len(stream)]
    drop = 0 if sidecar.end is None else 1
    return [tokenizer.decode(stream.read(a, b - a - drop)) for a, b in pairwise(starts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bytes_folder(tmp_path_factory.mktemp("bytes"), texts(80))


@pytest.mark.spec("DATA-SHARD-D1", "DATA-SHARD-D3")
def test_what_is_written_is_read_across_shards(folder):
    sidecar = read_sidecar(folder)
    assert len(sidecar.train) > 2 and len(sidecar.validation) > 1
    assert sidecar.dtype == "uint16" and sidecar.vocabulary == 256 and sidecar.tokenizer is None
    train, held = documents_of(folder, "train"), documents_of(folder, "validation")
    assert sorted(train + held) == sorted(texts(80)) and 2 < len(held) < 40
    order = texts(80)
    assert [text for text in order if text in set(train)] == train
    stream = TokenStream(files_of(folder, sidecar, "train"))
    whole = np.frombuffer("".join(train).encode(), dtype=np.uint8)
    assert len(stream) == len(whole) == sum(s.tokens for s in sidecar.train) == sum(s.text for s in sidecar.train)
    for at, count in ((0, 5), (995, 80), (0, len(whole)), (len(whole) - 1, 1), (7, 0)):
        assert np.array_equal(stream.read(at, count), whole[at : at + count])
    part = stream.part(100, 2100)
    assert len(part) == 2000 and np.array_equal(part.read(950, 1050), whole[1050:2100])
    starts = stream.starts(0, len(stream))
    assert np.array_equal(part.starts(0, 2000), starts[(starts >= 100) & (starts < 2100)] - 100)
    assert part.next_start(1) == min(s for s in starts - 100 if s >= 1)
    assert stream.next_start(int(starts[-1]) + 1) is None
    assert len(stream._open) <= 64


@pytest.mark.spec("DATA-TOKENIZE-D1")
def test_the_bytes_are_those_of_one_process_at_any_number_of_workers(tmp_path):
    pytest.importorskip("tokenizers")
    source = jsonl(tmp_path / "a.jsonl", texts(3000))
    (tmp_path / "t.json").write_text(train_tokenizer(iter(texts(200)), 300))
    how = {"tokenizer": str(tmp_path / "t.json"), "validation": 0.1, "shard_tokens": 10_000}
    tokenize([str(source)], tmp_path / "one", **how)
    tokenize([str(source)], tmp_path / "two", workers=2, **how)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(read_sidecar(tmp_path / "one").train) > 1
    both = documents_of(tmp_path / "one", "train") + documents_of(tmp_path / "one", "validation")
    assert sorted(both) == sorted(texts(3000))


@pytest.mark.spec("DATA-TOKENIZE-D2")
def test_equal_documents_are_on_one_side(tmp_path):
    folder = bytes_folder(tmp_path, texts(60, words=3) * 3, validation=0.3)
    assert not set(documents_of(folder, "train")) & set(documents_of(folder, "validation"))


KILLED = """
import os, signal, sys
from pathlib import Path
import hecate.data.tokenize as module
real, steps, count = os.fsync, 0, 0
def fsync(handle):
    global count
    count += 1
    if count == steps:
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
for steps in map(int, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        module.tokenize([sys.argv[1]], Path(sys.argv[2]), tokenizer="bytes", validation=0.2, shard_tokens=1000)
        os._exit(0)
    print(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.spec("DATA-SHARD-D6")
def test_a_damaged_list_of_documents_is_refused_before_it_resets_anything(folder, tmp_path):
    """One bit of a file of the right size."""
    copied = Path(shutil.copytree(folder, tmp_path / "tokens"))
    sidecar = read_sidecar(copied)
    damaged = copied / sidecar.train[1].starts
    content = bytearray(damaged.read_bytes())
    content[8] ^= 1
    damaged.write_bytes(content)
    stream = TokenStream(files_of(copied, sidecar, "train"))
    before = sidecar.train[0].tokens
    assert len(stream.starts(0, before)) == sidecar.train[0].documents  # the first is as it was
    for read in (lambda: stream.starts(before, before + 1), lambda: stream.next_start(before)):
        with pytest.raises(DataError, match=rf"{damaged.name} is damaged: it has another SHA-256"):
            read()


@pytest.mark.spec("DATA-TOKENIZER-D1")
def test_one_text_is_not_taken_for_many(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(iter(texts(20)), 300))
    for tokenizer in (Bytes(), open_tokenizer(str(path))):
        for text in ("text", b"text"):
            with pytest.raises(DataError, match=r"got one (str|bytes); write encode\(\[text\]\)\[0\]"):
                tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(["text"])[0].tolist()) == "text"


@pytest.mark.spec("DATA-TOKENIZE-D3")
def test_a_killed_run_goes_on(tmp_path):
    """Killed at whichever sync; the finished parts are not read again, and the result is that of an unbroken run."""
    source = jsonl(tmp_path / "a.jsonl", texts(300))
    how = {"tokenizer": "bytes", "validation": 0.2, "shard_tokens": 1000}
    tokenize([str(source)], tmp_path / "whole", **how)
    out, notes = tmp_path / "out", []
    done = forked.run(KILLED, source, out, 1, 2, 5, 11, 12, 13, 20)
    assert done.stdout.split() == [str(int(signal.SIGKILL))] * 7 and not (out / SIDECAR).exists()
    parts = sorted(path.name for path in out.glob("part-*.json"))
    assert len(parts) >= 3
    damaged = out / "train-00002.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    tokenize([str(source)], out, progress=lambda state: notes.append(state.note), **how)
    assert contents(out) == contents(tmp_path / "whole")
    assert "part 2 is written again: train-00002.bin is damaged" in notes
    assert "going on after 2 finished parts" in notes


@pytest.mark.slow
@pytest.mark.spec("DATA-TOKENIZE-D3")
def test_workers_end_with_the_process_that_started_them(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts(200_000))
    command = [sys.executable, "-m", "hecate", "data", "tokenize", str(source), "--out", str(tmp_path / "out")]
    run = subprocess.Popen([*command, "--workers", "2", "--shard-tokens", "100000"], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list((tmp_path / "out").glob("part-*.json")) and time.monotonic() < end:
        time.sleep(0.01)
    mine = descendants(run.pid)
    assert len(mine) > 2
    run.kill()
    run.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in mine) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in mine if Path(f"/proc/{pid}").exists()]


@pytest.mark.spec("DATA-TOKENIZE-D3")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "t.json"}, "was begun with other tokenizer"),
        ({"validation": 0.1}, "was begun with other validation"),
        ({"shard_tokens": 5}, "was begun with other shard_tokens"),
        ({"more": True}, "was begun with other inputs"),
    ],
)
def test_another_job_is_refused(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    if "tokenizer" in change:
        pytest.importorskip("tokenizers")
        Path("t.json").write_text(train_tokenizer(iter(texts(10)), 257))
    jsonl(Path("a.jsonl"), texts(80))
    Path("b.txt").write_text("more")
    how = {"tokenizer": "bytes", "validation": 0.2, "shard_tokens": 1000}

    def stop(state):
        if list(Path("out").glob("part-*.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(["a.jsonl"], Path("out"), progress=stop, **how)
    before = contents(Path("out"))
    inputs = ["a.jsonl", *(["b.txt"] if change.pop("more", False) else [])]
    with pytest.raises(DataError, match=message):
        tokenize(inputs, Path("out"), **how | change)
    assert contents(Path("out")) == before  # nothing is lost
    tokenize(["a.jsonl"], Path("out"), **how)
    with pytest.raises(DataError, match="already holds tokens"):
        tokenize(["a.jsonl"], Path("out"), **how)


def test_inputs_that_could_not_be_read_may_be_mended(tmp_path):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(DataError, match="line 2 is no JSON"):
        tokenize([str(source)], out, tokenizer="bytes", validation=0.0)
    assert not list(out.iterdir())
    source.write_text('{"text": "a"}\n')
    assert tokenize([str(source)], out, tokenizer="bytes", validation=0.0).train[0].tokens == 1


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("words")
    with pytest.raises(DataError, match="holds other files; choose another --out"):
        tokenize([str(tmp_path / "mine.txt")], tmp_path, tokenizer="bytes")


def packed(path: Path, raw: bytes) -> Path:
    if path.suffix == ".gz":
        raw = gzip.compress(raw, mtime=0)
    if path.suffix == ".zst":
        arrow = pytest.importorskip("pyarrow")
        half = len(raw) // 2  # two frames
        raw = b"".join(arrow.compress(part, "zstd", asbytes=True) for part in (raw[:half], raw[half:]))
    path.write_bytes(raw)
    return path


@pytest.mark.spec("DATA-CORPUS-D1")
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst", "a.parquet"]
)
def test_documents_of_every_kind_of_file(tmp_path, name):
    wanted, path = texts(2500), tmp_path / name
    separator = None
    if ".jsonl" in name:
        packed(path, "".join(json.dumps({"body": text}) + "\n\n" for text in wanted).encode())
    elif ".txt" in name:
        separator = "<|sep|>"
        packed(path, "\n<|sep|>\n".join(wanted).encode())
        wanted = [text + "\n" for text in wanted[:-1]] + wanted[-1:]
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"other": [1] * len(wanted), "body": wanted}), path)
    assert find([str(tmp_path)]) == [path]
    assert list(documents(path, field="body", separator=separator)) == wanted


NO_BLOCK = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 40


@pytest.mark.spec("DATA-CORPUS-D2")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2 is no JSON"),
        ("a.txt", b"ab\xff\xfe", "a.txt is no UTF-8: invalid start byte at byte 2"),
        ("a.txt.gz", gzip.compress(b"a" * 10_000, mtime=0)[:-12], "cannot read .*a.txt.gz"),
        ("a.txt.gz", NO_BLOCK, "cannot read .*a.txt.gz: Error -3"),
        ("a.txt.gz", b"plain", "cannot read .*a.txt.gz: Not a gzipped file"),
        ("a.txt.zst", b"plain text", "cannot read .*a.txt.zst"),
        ("a.parquet", b"PAR1 but not", "cannot read .*a.parquet"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if name.endswith((".zst", ".parquet")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(documents(tmp_path / name))


@pytest.mark.spec("DATA-CORPUS-D2")
def test_a_cut_off_zst_is_no_whole_one(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    raw = "".join(json.dumps({"text": str(rng.integers(1 << 60))}) + "\n" for _ in range(20_000)).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(arrow.compress(raw, "zstd", asbytes=True)[:-3])
    with pytest.raises(DataError, match="cannot read .*zst: it is cut off"):
        list(documents(tmp_path / "a.jsonl.zst"))


def test_inputs_that_are_not_there_or_not_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_bytes(b"")
    with pytest.raises(DataError, match="a.pdf has no suffix that tells what it is; known are .txt"):
        find(["a.pdf"])
    (tmp_path / "a.txt").write_text("a")
    for name in ("nothing", ""):
        with pytest.raises(DataError, match=f"no text, JSON lines or Parquet in '{name}'"):
            find([name])
    with pytest.raises(DataError, match="cannot read 'xxx.*: File name too long"):
        find(["x" * 300])
    with pytest.raises(DataError, match="Parquet in 'a[*]{2}b'"):
        find(["a**b"])


def test_halves_of_surrogate_pairs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bytes", validation=0.0)
    assert documents_of(tmp_path / "out", "train") == ["a\ufffdb \U0001f600"]


def test_a_tokenizer_of_a_users_may_have_a_dtype_of_its_own():
    class Own(Bytes):
        def __init__(self) -> None:
            self.dtype = "int64"

    assert Own().dtype == "int64"


@pytest.mark.spec("DATA-TOKENIZER-D1", "DATA-TOKENIZER-D2", "DATA-TOKENIZER-D3")
def test_a_tokenizer_of_bytes_writes_any_text(tmp_path):
    pytest.importorskip("tokenizers")
    text = train_tokenizer(iter(texts(300)), 320)
    (tmp_path / "t.json").write_text(text)
    own = open_tokenizer(tmp_path / "t.json")
    assert own.end == 0 and 257 < own.size <= 320 and train_tokenizer(iter(texts(300)), 320) == text
    lengths = own.lengths()
    for words in [*texts(20, seed=9), "\u00e9\U0001f600 \x00\r\n", "<|endoftext|>", " ", "\U0001f600" * 9]:
        ids = own.encode([words])[0]
        assert own.decode(ids.tolist()) == "".join(own.pieces(iter(ids.tolist()))) == words
        assert lengths[ids].sum() == len(words.encode())
        assert 0 not in ids  # a quoted end is no end
    assert len(own.encode([" ".join(WORDS * 9)])[0]) < 0.6 * len(" ".join(WORDS * 9).encode())
    assert lengths[0] == 0 and own.decode([0]) == "<|endoftext|>"
    whole = Bytes()
    assert whole.decode(whole.encode(["\u65e5 a"])[0].tolist()) == "\u65e5 a" and whole.lengths().tolist() == [1] * 256
    assert "".join(whole.pieces([0xE6, 0x97, 65])) == "\ufffdA"
    assert whole.decode([65, 300, 66]) == "A\ufffdB"  # of a model with more tokens


def test_bad_tokenizers(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match="cannot read tokenizer .*missing.json"):
        open_tokenizer(tmp_path / "missing.json")
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="t.json is no tokenizer of the tokenizers library"):
        open_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read tokenizer .* codec can't decode .*; give a tokenizer.json"):
        open_tokenizer(tmp_path / "t.json")
    for given, vocabulary, message in (
        ([], 256, "at least 257, got 256"), (["a"], 1 << 80, "at most 16,777,216 tokens"),
        ([""], 300, "there is no text to train a tokenizer on"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            train_tokenizer(iter(given), vocabulary)


@pytest.mark.parametrize("missing", ["tokenizers", "pyarrow", "pyarrow.parquet"])
def test_a_library_that_is_not_there_is_named_with_its_extra(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "a.txt.zst").write_bytes(b"a")
    (tmp_path / "a.parquet").write_bytes(b"a")
    calls = {
        "tokenizers": lambda: open_tokenizer(tmp_path / "t.json"),
        "pyarrow": lambda: list(documents(tmp_path / "a.txt.zst")),
        "pyarrow.parquet": lambda: list(documents(tmp_path / "a.parquet")),
    }
    with pytest.raises(DataError, match=re.escape(install_line("data"))):
        calls[missing]()


def rewritten(folder: Path, top: dict[str, object] | None = None, **content) -> dict[str, object]:
    """A sidecar that says something else; what it holds now."""
    document = json.loads((folder / SIDECAR).read_text()) | (top or {})
    document["content"] |= content
    (folder / SIDECAR).write_text(json.dumps(document))
    return document["content"]


NO_JSON = "tokens.json is cut off or no JSON"
BROKEN = [
    (lambda f: os.truncate(f / "train-00001.bin", 100), r"train-00001.bin is cut off: it has 100 bytes"),
    (lambda f: os.truncate(f / "train-00001.bin", 9999), "train-00001.bin has grown"),
    (lambda f: os.truncate(f / "train-00000.starts", 8), "train-00000.starts is cut off"),
    (lambda f: (f / "validation-00000.bin").unlink(), "cannot read .*validation-00000.bin: No such file"),
    (lambda f: os.truncate(f / SIDECAR, 100), NO_JSON),
    (lambda f: rewritten(f, vocabulary=9), "tokens.json is damaged: its digest does not match"),
    (lambda f: rewritten(f, top={"version": 2}), "has version 2, this hecate reads up to 1"),
    (lambda f: rewritten(f, top={"format": "x"}), "is no sidecar of hecate-tokens"),
    (lambda f: (f / "lengths.bin").write_bytes(bytes(1024)), "lengths.bin is damaged"),
    (lambda f: (f / SIDECAR).unlink(), "data tokenize"),
    (lambda f: (f / SIDECAR).write_text('{"a":' * 500 + "1" + "}" * 500), NO_JSON),
    (lambda f: (f / SIDECAR).write_text('{"a": 1%s}' % ("0" * 99)), NO_JSON),
    (lambda f: os.truncate(f / SIDECAR, 64 << 30), "tokens.json: it has more than 64 MiB"),
    (lambda f: forged(f, vocabulary=1 << 40), "tokens.json is not valid: vocabulary: must be <= 16777216"),
    (lambda f: crowded(f), "train-00000.starts has .* documents in .* tokens; is it damaged"),
]


def forged(folder: Path, **content) -> None:
    """The same, with a digest that fits."""
    rewritten(folder, top={"digest": digest_of(rewritten(folder, **content))})


def crowded(folder: Path) -> None:
    """More documents than a batch can have, all at the first token, in a file with holes."""
    count = (1 << 24) + 5000
    train = json.loads((folder / SIDECAR).read_text())["content"]["train"]
    os.truncate(folder / train[0]["starts"], 8 * count)
    digest = hashlib.sha256((folder / train[0]["starts"]).read_bytes()).hexdigest()
    forged(folder, train=[train[0] | {"documents": count, "starts_sha256": digest}])


@pytest.mark.spec("DATA-SHARD-D2")
@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_folders_are_refused_in_a_sentence(folder, tmp_path, number):
    copied = Path(shutil.copytree(folder, tmp_path / "tokens"))
    damage, message = BROKEN[number]
    config = Tokens(path=str(copied))
    damage(copied)
    with pytest.raises(DataError, match=message):
        config.load().train.starts(0, 8) if (copied / SIDECAR).exists() else read_sidecar(copied)


@pytest.mark.spec("DATA-SHARD-D1")
def test_hashes_are_for_inspect(folder, tmp_path):
    copied = Path(shutil.copytree(folder, tmp_path / "tokens"))
    path = copied / "train-00001.bin"
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1
    path.write_bytes(raw)
    Tokens(path=str(copied)).load()
    found = CliRunner().invoke(app, ["data", "inspect", str(copied)])
    assert found.exit_code == 2 and "train-00001.bin is damaged: it has another SHA-256" in found.output
    assert CliRunner().invoke(app, ["data", "inspect", str(copied), "--no-hashes"]).exit_code == 0


def test_first_documents(folder):
    train = documents_of(folder, "train")
    assert first_documents(folder, 3) == [(len(text.encode()), text) for text in train[:3]]
    assert first_documents(folder, 1, most=2)[0][1] == train[0][:2] + "..."


def nanogpt(path: Path, ids: np.ndarray, header=(20240520, 1)) -> Path:
    head = np.zeros(256, dtype="<i4")
    head[: len(header)] = header
    head[2] = len(ids)
    path.write_bytes((head.tobytes() if header else b"") + ids.astype("<u2").tobytes())
    return path


@pytest.mark.spec("DATA-SHARD-D4")
def test_nanogpt_files(tmp_path):
    ids = np.arange(1000) % 777
    for name, header in (("with.bin", (20240520, 1)), ("without.bin", ())):
        stream = TokenStream([nanogpt_file(nanogpt(tmp_path / name, ids, header))])
        assert np.array_equal(stream.read(0, 1000), ids) and not stream.has_starts
    for header, message in (((20240520, 2), "version 2"), ((20240801, 7), "header 20240801")):
        with pytest.raises(DataError, match=message):
            nanogpt_file(nanogpt(tmp_path / "bad.bin", ids, header))
    path = nanogpt(tmp_path / "cut.bin", ids)
    os.truncate(path, 1500)
    with pytest.raises(DataError, match="cut.bin is cut off: it has 1500 bytes, its folder says 3024"):
        nanogpt_file(path)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="no uint16 tokens"):
        nanogpt_file(tmp_path / "odd.bin")


HUGE = """
import resource, sys, time
import numpy as np, torch
from hecate.data import Loader
from hecate.data.shards import Shard, Sidecar
from hecate.data.tokens import Tokens
torch.zeros(1)
def resident():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) // 1024
before, began = resident(), time.perf_counter()
loader = Loader(Tokens(path=sys.argv[1], validation=0.001).load(), seed=0, batch_size=8, seq_len=2048)
first = loader.next()
took = time.perf_counter() - began
for _ in range(300):
    loader.next()
print(took, resident() - before, first.tokens.shape[1])
"""


@pytest.mark.spec("DATA-SHARD-D3")
def test_ten_gigabytes_cost_no_more_memory_than_ten_megabytes(tmp_path):
    """Sparse files: 5e9 tokens of 7e6 documents; started within two seconds, read with less than 50 MB."""
    tokens, many = 500_000_000, 700_000
    starts = np.arange(many, dtype="<u8") * (tokens // many)
    shards, digest = [], hashlib.sha256(starts.tobytes()).hexdigest()
    for number in range(10):
        with (tmp_path / f"train-{number:05d}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        (tmp_path / f"train-{number:05d}.starts").write_bytes(starts.tobytes())
        shards.append(
            {
                "file": f"train-{number:05d}.bin", "tokens": tokens, "sha256": "0" * 64, "text": tokens,
                "starts": f"train-{number:05d}.starts", "documents": many, "starts_sha256": digest,
            }
        )  # fmt: skip
    from hecate.data.shards import Sidecar

    fields = {"dtype": "uint16", "vocabulary": 50_257, "tokenizer": None, "end": None, "lengths": None}
    sidecar = Sidecar.model_validate({**fields, "train": shards, "validation": []})
    (tmp_path / SIDECAR).write_text(sidecar.text())
    done = forked.run(HUGE, tmp_path)
    seconds, megabytes, length = map(float, done.stdout.split())
    assert seconds < 2 and megabytes < 50 and length == 2048


@pytest.mark.spec("DATA-TOKENIZE-D1", "DATA-SHARD-D1")
def test_the_commands(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    jsonl(Path("a.jsonl"), texts(60))

    def run(*words: str, code: int = 0) -> str:
        found = CliRunner().invoke(app, ["data", *words])
        assert found.exit_code == code, found.output
        return found.output

    assert "300 tokens: t.json" in run("train-tokenizer", "a.jsonl", "--vocab", "300", "--out", "t.json")
    assert "t.json exists" in run("train-tokenizer", "a.jsonl", "--vocab", "300", "--out", "t.json", code=2)
    words = ["tokenize", "a.jsonl", "--tokenizer", "t.json", "--out", "out", "--workers", "1", "--validation", "0.2"]
    assert "data.path=out" in run(*words)
    shown = run("inspect", "out", "--documents", "2")
    assert "uint16, vocabulary 300" in shown and "token 0 ends documents" in shown and "files are whole" in shown
    assert "--- document 2," in shown
    assert "already holds tokens" in run(*words, code=2)
    assert "cannot read nothing/tokens.json" in run("inspect", "nothing", code=2)
    jsonl(Path("few.jsonl"), ["one"])
    shown = run("tokenize", "few.jsonl", "--out", "few", "--workers", "1")
    assert "no document was held out" in shown and "data.path=few --set data.validation=0.01" in shown


def test_a_file_that_ends_while_it_is_read(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(200))
    stream = TokenStream([TokenFile(path, "uint16", 100)])
    os.truncate(path, 100)
    with pytest.raises(DataError, match="was cut off while it was read"):
        stream.read(40, 20)


@pytest.mark.spec("DATA-SHARD-D3")
def test_a_copy_of_a_stream_opens_its_files_itself(tmp_path):
    for name, number in (("own.bin", 3), ("other.bin", 7)):
        np.full(100, number, "<u2").tofile(tmp_path / name)
    stream = TokenStream([nanogpt_file(tmp_path / "own.bin")])
    assert stream.read(0, 2).tolist() == [3, 3]
    copies = [copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    del stream
    gc.collect()  # closes what the first has opened
    with (tmp_path / "other.bin").open("rb"):  # which takes the free number
        assert [each.read(0, 2).tolist() for each in copies] == [[3, 3]] * 3

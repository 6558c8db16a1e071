"""Texts: what is read, how it is split, and the n-gram baselines."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from hecate.data import Bundled, Text, fit_ngrams
from hecate.data import text as module
from hecate.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(200, 256)))
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.md").write_bytes(bytes(range(100, 150)))
    (tmp_path / "ignored.bin").write_bytes(b"no")
    return tmp_path


WHOLE = bytes(range(100)) + b"\n" + bytes(range(200, 256)) + b"\n" + bytes(range(100, 150))


@pytest.mark.spec("DATA-TEXT-D1")
@pytest.mark.parametrize(
    "paths", [["."], ["a.txt", "b.txt", "deep/c.md"], ["{}/*.txt", "**/*.md"], ["b.txt", ".", "a.txt"]]
)
def test_files_folders_and_globs(corpus, monkeypatch, paths):
    monkeypatch.chdir(corpus)
    source = Text(paths=[path.format(corpus) for path in paths], validation=0.25).load()
    assert source.train.tobytes() + source.validation.tobytes() == WHOLE
    assert len(source.validation) == len(WHOLE) // 4


@pytest.mark.spec("DATA-TEXT-D2")
def test_windows_stay_in_their_split_and_reach_all_of_it(corpus):
    source = Text(paths=[str(corpus)], validation=0.25).load()
    seen = set()
    for step in range(100):
        batch = source.train_batch(0, step, 16, 8)
        joined = torch.cat([batch.tokens, batch.targets[:, -1:]], 1)
        assert torch.equal(joined[:, 1:], batch.targets)
        for row in joined.tolist():
            place = source.train.tobytes().find(bytes(row))
            assert place >= 0
            seen.add(place)
    assert seen == set(range(len(source.train) - 8))
    assert not torch.equal(source.train_batch(0, 2, 4, 8).tokens, source.train_batch(1, 2, 4, 8).tokens)


@pytest.mark.spec("DATA-TEXT-D2")
@pytest.mark.parametrize(("batches", "labels"), [(1, 16), (2, 32), (50, 48)])
def test_validation_windows_share_no_label(corpus, batches, labels):
    source = Text(paths=[str(corpus)], validation=0.25).load()  # 52 bytes held out
    targets = [b.targets for b in source.validation_batches(2, 8, batches)]
    flat = torch.cat(targets).flatten().tolist()
    assert len(flat) == labels
    positions = [WHOLE[-51:].find(bytes(t.tolist())) for b in targets for t in b]
    assert len(set(positions)) == len(positions) and all(p % 8 == 0 for p in positions)


def test_unusable_files_are_named(corpus, monkeypatch):
    for fields, message in (
        ({"paths": ["nothing.txt"]}, "no file or folder 'nothing.txt'"),
        ({"paths": [""]}, "no file or folder ''"),
        ({"paths": ["*.rst"]}, r"no files matching '\*.rst'"),
        ({"paths": ["deep"], "suffixes": [".txt"]}, "no files ending in .txt in folder 'deep'"),
        ({"paths": ["."], "max_bytes": 100}, "exceeds max_bytes=100"),
    ):
        monkeypatch.chdir(corpus)
        with pytest.raises(DataError, match=message):
            Text(**fields).load()


@pytest.mark.parametrize("content", [b"", b"x", b"ab"])
def test_a_text_too_short_for_a_window_is_refused(tmp_path, content):
    (tmp_path / "short.txt").write_bytes(content)
    source = Text(paths=[str(tmp_path / "short.txt")]).load()
    with pytest.raises(DataError, match="split has . bytes, a window of seq_len=8 needs 9"):
        source.train_batch(0, 0, 1, 8)


@pytest.mark.spec("DATA-BUNDLED-D1")
def test_the_bundled_corpus_is_the_same_in_every_process():
    source = Bundled(max_bytes=1 << 18).load()
    assert len(source.train) + len(source.validation) <= 1 << 18
    text = source.train.tobytes() + source.validation.tobytes()
    assert b"def " in text
    code = "from hecate.data import Bundled\nprint(Bundled(max_bytes=1 << 18).load().fingerprint, end='')"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "17", "PATH": "/usr/bin"},
    )  # fmt: skip
    assert other.stdout == source.fingerprint
    assert Bundled(max_bytes=1 << 17).load().fingerprint != source.fingerprint


@pytest.mark.spec("DATA-BUNDLED-D1")
def test_packages_join_the_bundled_corpus():
    source = Bundled(packages=("json", "hecate"), max_bytes=64 << 20).load()
    text = source.train.tobytes() + source.validation.tobytes()
    assert b"class JSONDecoder" in text and b"bundled: bytes of Python's own" in text
    for name in ("nosuchpackage", "struct", "os.path", "../etc"):
        with pytest.raises(DataError, match="is no package that is installed"):
            Bundled(packages=(name,)).load()


@pytest.mark.spec("DATA-BUNDLED-D2")
def test_the_bundled_corpus_does_with_one_of_its_halves(monkeypatch):
    monkeypatch.setattr(module, "_topics", dict)
    only_library = Bundled().load()
    monkeypatch.undo()
    monkeypatch.setattr(module, "_library", dict)
    only_topics = Bundled().load()
    assert len(only_topics.train) > 1 << 16 and len(only_library.train) > 1 << 20
    monkeypatch.setattr(module, "_topics", dict)
    with pytest.raises(DataError, match=r"neither pydoc_data.topics .* data.kind=text"):
        Bundled().load()


def test_missing_topics_and_sources_are_empty(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    assert module._topics() == module._library() == {}


@pytest.mark.spec("DATA-NGRAM-D1")
def test_ngrams_against_counting_by_hand():
    train = b"abracadabra" * 3
    grams = fit_ngrams(np.frombuffer(train, dtype=np.uint8))
    n = len(train)
    unigram = [(train.count(bytes([b])) + 1) / (n + 256) for b in range(256)]
    np.testing.assert_allclose(grams.unigram, unigram, rtol=1e-14)
    np.testing.assert_allclose(grams.bigram.sum(1), np.ones(256), rtol=1e-12)
    after = [train[i + 1] for i in range(n - 1) if train[i] == ord("a")]
    # The weight of the prior follows from one entry and must explain every other of the row.
    share = after.count(ord("b")) / len(after)
    p, q = unigram[ord("b")], float(grams.bigram[ord("a"), ord("b")])
    weight = len(after) * (share - q) / (q - p)
    assert weight == pytest.approx(round(weight * 2) / 2)
    for b in range(256):
        expected = (after.count(b) + weight * unigram[b]) / (len(after) + weight)
        assert float(grams.bigram[ord("a"), b]) == pytest.approx(expected)


@pytest.mark.spec("DATA-NGRAM-D1")
def test_ngram_weight_is_the_best_of_the_grid_on_the_train_tail():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, 4000).astype(np.uint8)  # bigrams carry nothing: lean on the prior
    chain = np.cumsum(rng.integers(1, 3, 4000)).astype(np.uint8)  # bigrams carry all but one bit
    strong, weak = fit_ngrams(noise), fit_ngrams(chain)
    fresh = rng.integers(0, 256, 4000).astype(np.uint8)
    one, two = strong.bits(fresh[:-1], fresh[1:])
    assert two == pytest.approx(one, abs=0.05)
    one, two = weak.bits(chain[:-1], chain[1:])
    assert two < 2 < 7 < one


def test_bits_per_byte_of_a_certain_and_an_unknown_text():
    grams = fit_ngrams(np.zeros(10_000, dtype=np.uint8))
    zeros = np.zeros(5, dtype=np.uint8)
    assert max(grams.bits(zeros, zeros)) < 0.05
    assert grams.bits(zeros, zeros + 1)[0] == pytest.approx(math.log2(10_256))


@pytest.mark.spec("DATA-BASE-D3")
def test_baselines_use_the_very_validation_labels(corpus):
    source = Text(paths=[str(corpus)], validation=0.25).load()
    batches = list(source.validation_batches(2, 8, 2))
    grams = fit_ngrams(source.train)
    tokens = torch.cat([b.tokens for b in batches]).flatten().tolist()
    targets = torch.cat([b.targets for b in batches]).flatten().tolist()
    unigram = [-math.log2(grams.unigram[t]) for t in targets]
    bigram = [-math.log2(grams.bigram[a, t]) for a, t in zip(tokens, targets, strict=True)]
    found = source.baselines(2, 8, 2)
    assert found["unigram"] == pytest.approx(sum(unigram) / len(unigram))
    assert found["bigram"] == pytest.approx(sum(bigram) / len(bigram))

"""The tree of states: what it finds, what it lets go, and its files."""

from __future__ import annotations

import os
import random
import shutil

import pytest
import torch

from hecate import states
from hecate.errors import CheckpointError, ConfigError
from hecate.serve import Memories, PrefixCache, Request, Scheduler
from tests.serve.common import alone, drawn, made, run
from tests.train.test_crash import every_kill


@pytest.mark.spec("SERVE-TREE-D1")
def test_it_is_a_dictionary_that_finds_the_longest_beginning():
    """Against a plain dict, with tokens so few that edges are split all the time; bytes never above the limit."""
    draws, size = random.Random(0), 8
    tree, known, age = PrefixCache(40 * size), {}, {}
    for step in range(3000):
        tokens = tuple(draws.randrange(2) for _ in range(draws.randrange(1, 9)))
        if draws.random() < 0.5:
            tree.keep(tokens, torch.tensor([[hash(tokens) % 1000 + 0.0]], dtype=torch.float64))
            known[tokens], age[tokens] = hash(tokens) % 1000, step
            if len(known) > 40:
                oldest = min(known, key=lambda key: age[key])
                del known[oldest]
        count, state = tree.longest(tokens)
        wanted = max((n for n in range(1, len(tokens) + 1) if tokens[:n] in known), default=0)
        assert count == wanted and (not count or float(state) == known[tokens[:count]])
        if count:
            age[tokens[:count]] = step + 0.5
        assert tree.bytes == size * len(tree) <= tree.max_bytes and len(tree) == len(known)
    assert tree.evicted > 100 and tree.hits > 1000 and tree.misses > 5


@pytest.mark.spec("SERVE-TREE-D1")
def test_states_are_copied_in_and_out():
    tree, batch = PrefixCache(), torch.zeros(1000, 3)
    own = batch[2:3]
    tree.keep([1, 2], own)
    own += 1
    found = tree.longest([1, 2, 3])[1]
    assert found.tolist() == [[0, 0, 0]] and found.untyped_storage().nbytes() == 3 * batch.itemsize
    found += 1
    assert tree.longest([1, 2])[1].tolist() == [[0, 0, 0]]
    tree.keep([], own)
    small = PrefixCache(8)
    small.keep([1], batch)
    assert len(small) == 0 and len(tree) == 1
    with pytest.raises(ConfigError, match="block must be an integer >= 1"):
        PrefixCache(block=0)


@pytest.mark.parametrize("kind", ["gated_delta", "levels"])
@pytest.mark.spec("SERVE-TREE-D1", "SERVE-BATCH-D1")
def test_answers_are_those_without_a_tree(kind):
    model, tree = made(kind), PrefixCache(block=8)
    size = Scheduler(model).state_bytes
    tree.max_bytes = 12 * size
    shared, tails = drawn(1, 40, 27), drawn(2, *range(1, 13))
    prompts = [shared[n % 2][: 40 - 3 * (n % 4)] + tail for n, tail in enumerate(tails)]
    scheduler = Scheduler(model, prefixes=tree, max_batch=4)
    asked = [scheduler.submit(Request(prompt, 4)) for prompt in prompts + prompts]
    run(scheduler)
    assert [request.made for request in asked] == [alone(model, [prompt], 4)[0] for prompt in prompts] * 2
    assert tree.hits > 12 and tree.tokens_saved > 12 * 16 and tree.evicted and tree.bytes <= tree.max_bytes
    assert scheduler.counts["prompt_tokens"] + tree.tokens_saved == 2 * sum(map(len, prompts))


@pytest.mark.spec("SERVE-TREE-D1")
def test_a_hit_gives_the_same_bits_as_another():
    model, tree, prompt = made(), PrefixCache(block=8), drawn(3, 30)[0]
    run_once = Scheduler(model, prefixes=tree)
    run_once.submit(Request(prompt, 1))
    run(run_once)
    with torch.no_grad():
        first, second = (model(torch.tensor([prompt[24:]]), tree.longest(prompt[:28])[1])[0] for _ in range(2))
    assert tree.longest(prompt[:28])[0] == 24 and tree.longest(prompt)[0] == 29 and torch.equal(first, second)


@pytest.mark.spec("SERVE-TREE-D2", "STATE-MODEL-D1")
def test_files_are_of_one_model_and_of_the_tokens_in_their_name(tmp_path):
    model, folder = made(), tmp_path / "tree"
    mark = states.fingerprint(model)
    tree, prompts = PrefixCache(model=mark), drawn(4, 5, 9, 9)
    for prompt in (*prompts, prompts[1][:3]):
        tree.keep(prompt, model(torch.tensor([prompt]))[1])
    tree.longest(prompts[0])
    tree.save(folder)
    tree.save(folder)
    opened = PrefixCache.open(folder, model=mark)
    assert len(list(folder.iterdir())) == len(opened) == 4 and opened.bytes == tree.bytes
    for prompt in prompts:
        found, wanted = (states.leaves(each.longest(prompt)[1]) for each in (opened, tree))
        assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())
    half = PrefixCache.open(folder, 2 * tree.bytes // 4, model=mark)
    assert len(half) == 2 and half.longest(prompts[0])[0] == 5  # the newest
    half.save(folder)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(CheckpointError, match="is another model's"):
        PrefixCache.open(folder, model=states.fingerprint(made(seed=1)))
    name = sorted(folder.iterdir())[0]
    shutil.copy(name, folder / f"{'0' * 64}.safetensors")
    with pytest.raises(CheckpointError, match="is not of the tokens that its name tells"):
        PrefixCache.open(folder, model=mark)
    (folder / f"{'0' * 64}.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot read state"):
        PrefixCache.open(folder, model=mark)
    assert len(PrefixCache.open(tmp_path / "none", model=mark)) == 0


@pytest.mark.spec("SERVE-TREE-D2")
def test_a_folder_of_users_is_not_written_over(tmp_path):
    memories, tree = Memories(tmp_path, "one"), PrefixCache(model="one")
    memories.save("ada", torch.ones(1, 2))
    memories.close()
    tree.keep((1, 2), torch.ones(1, 2))
    for act in (lambda: tree.save(tmp_path), lambda: PrefixCache.open(tmp_path, model="one")):
        with pytest.raises(ConfigError, match=r"has users' memories; .* need another folder"):
            act()
    assert memories.path("ada").exists()


@pytest.mark.spec("SERVE-TREE-D2", "SERVE-USER-D1")
def test_folders_that_are_made_are_nobody_elses(tmp_path):
    Memories(tmp_path / "users", "one").close()
    tree = PrefixCache(model="one")
    tree.keep((1, 2), torch.ones(1, 2))
    tree.save(tmp_path / "tree")
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"users": 0o700, "tree": 0o700}


@pytest.mark.spec("STATE-MODEL-D1")
def test_a_fingerprint_is_of_config_and_weights(tmp_path):
    model = made()
    mark, state = states.fingerprint(model), model(torch.tensor([[1, 2]]))[1]
    assert mark == states.fingerprint(made()) and len(mark) == 64
    others = [made(seed=1), made(conv_kernel=2), made().double() if torch.get_default_dtype() != torch.float64 else
              made().float()]  # fmt: skip
    assert len({mark, *map(states.fingerprint, others)}) == 4
    states.save(state, tmp_path / "with", mark)
    states.save(state, tmp_path / "without")
    states.load(tmp_path / "with")
    states.load(tmp_path / "with", model=mark)
    with pytest.raises(CheckpointError, match="of a model that it does not tell"):
        states.load(tmp_path / "without", model=mark)


@pytest.mark.spec("SERVE-USER-D1")
def test_a_file_is_the_old_one_or_the_new_one_whenever_its_writer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def write(folder, value):
        memories = Memories(folder, "m")
        memories.save("ada", {"state": torch.full((1, 9), value)})
        memories.close()

    seen = set()
    for folder, killed in every_kill(tmp_path, lambda folder: write(folder, 1.0), lambda folder: write(folder, 2.0)):
        memories = Memories(folder, "m")
        (value,) = memories.load("ada")["state"].unique().tolist()
        assert killed or value == 2.0
        assert sorted(path.name for path in folder.iterdir()) == [".lock", memories.path("ada").name]
        memories.close()
        seen.add(value)
    assert seen == {1.0, 2.0}

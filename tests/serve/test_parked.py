"""States in float16: what moves, what is halved, what is refused, and that everything else goes on as before."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from hecate import states
from hecate.errors import CheckpointError, ConfigError
from hecate.nn import Memory
from hecate.rule import RULES, MemoryConfig
from hecate.serve import Memories, PrefixCache, Request, Scheduler
from hecate.serve.kept import check_parked
from hecate.states import Parked
from tests.serve.common import drawn, made, run

REFUSED = {"mesa": "'rls'", "moneta": "'lq'", "large_chunk_ttt": "'newton_schulz'"}


def layer(rule: str, seed: int = 0) -> Memory:
    return Memory(16, 2, rule, generator=torch.Generator().manual_seed(seed))


@pytest.mark.spec("STATE-PARK-D1")
def test_numbers_move_by_half_a_unit_in_the_last_place():
    draws = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 3, 64, 64, generator=draws) * 10.0 ** torch.randint(-6, 9, (64, 64), generator=draws)
    state = {"wide": wide, "tiny": wide[:, :, :1] * 1e-300, "zero": torch.zeros(1, 1, 1), "none": torch.zeros(1, 1, 0)}
    state |= {"head": torch.rand(2, 3), "count": torch.ones(2, 3, 4, dtype=torch.int64), "half": wide.bfloat16()}
    state["open"] = torch.tensor([[[torch.inf, -torch.inf, torch.nan, 3.0]]])
    parked = states.park(state)
    found = states.unpark(parked)
    for name in ("wide", "tiny"):
        assert parked.state[name].dtype == torch.float16 and found[name].dtype == torch.float64
    moved, most = (found["wide"] - wide).abs(), wide.abs()
    assert (moved <= torch.maximum(most * 2**-11, most.amax() * 2**-39)).all() and moved.any()
    for name in ("zero", "none", "head", "count", "half", "open"):
        assert found[name].dtype == state[name].dtype
        assert torch.allclose(found[name], state[name], rtol=0, atol=0, equal_nan=True), name
    again = states.unpark(states.park(found))
    assert torch.equal(again["wide"], found["wide"])  # what was rounded once is not moved again
    found["head"].zero_()
    assert state["head"].any() and parked.state["head"].any()  # nothing is shared


@pytest.mark.parametrize("rule", sorted(set(RULES) - set(REFUSED)))
@pytest.mark.spec("STATE-PARK-D1", "SERVE-PARK-D1")
def test_a_rule_that_bears_it_answers_within_four_roundings(rule):
    """Parked every 16 tokens, beside a state that never is: a rounding is 2^-11, those before it have faded."""
    own, x = layer(rule), torch.randn(2, 96, 16, generator=torch.Generator().manual_seed(1))
    check_parked(own, "float16")
    whole = kept = None
    wrong, size = x.new_zeros(()), x.new_zeros(())
    with torch.no_grad():
        for piece in x.split(16, 1):
            (y, whole), (z, kept) = own(piece, whole), own(piece, kept)
            wrong, size = wrong + (y - z).square().sum(), size + y.square().sum()
            parked = states.park(kept)
            kept = states.unpark(parked)
    assert 0 < wrong.sqrt() < 4 * 2**-11 * size.sqrt()
    single = pytree.tree_map(lambda t: t.float() if torch.is_tensor(t) and t.is_floating_point() else t, kept)
    large = [t for t in states.leaves(single).values() if t.is_floating_point() and t.dim() > 2]
    spared = sum(t.nbytes for t in large) // 2 - 4 * len(large)  # but for a scale each
    assert states.bytes_of(states.park(single)) == states.bytes_of(single) - spared


@pytest.mark.spec("SERVE-PARK-D1")
def test_a_rule_in_which_rounding_stays_is_refused_by_name():
    for rule in REFUSED:
        with pytest.raises(ConfigError, match=rf"blocks\.0\.memory.*{REFUSED[rule]}.*leave parked_dtype out"):
            Scheduler(made(memory=rule), prefixes=PrefixCache(parked_dtype="float16"))


@pytest.mark.spec("SERVE-PARK-D1")
def test_a_ridge_without_decay_is_refused(tmp_path):
    mesa = {**MemoryConfig.model_validate("gated_mesa").model_dump(), "retention": {"kind": "none"}}
    memories = Memories(tmp_path, "m", parked_dtype="float16")
    with pytest.raises(ConfigError, match="readout 'ridge' under retention 'none'"):
        check_parked(made(memory=mesa), "float16")
    with pytest.raises(ConfigError, match="parked_dtype must be one of"):
        PrefixCache(parked_dtype="float8")
    with pytest.raises(ConfigError, match="'rls'"):
        Scheduler(made(memory="mesa"), memories=memories)
    memories.close()


def answers(model, prompts, **kept):
    scheduler = Scheduler(model, **kept)
    asked = [scheduler.submit(Request(prompt, 3, user="ada" if "memories" in kept else None)) for prompt in prompts]
    run(scheduler)
    assert all(request.finish == "length" for request in asked)
    return scheduler


@pytest.mark.parametrize("kind", ["gated_delta", "levels", "window"])
@pytest.mark.spec("SERVE-PARK-D1")
def test_trees_and_files_hold_half_and_read_either_kind(kind, tmp_path):
    model, prompts = made(kind).float(), drawn(1, 40, 40)
    mark, trees, sizes = states.fingerprint(model), {}, {}
    for dtype in (None, "float16"):
        tree = trees[dtype] = PrefixCache(block=8, model=mark, parked_dtype=dtype)
        memories = Memories(tmp_path / str(dtype), mark, parked_dtype=dtype)
        answers(model, prompts, prefixes=tree)
        scheduler = answers(model, prompts, memories=memories)
        sizes[dtype] = memories.bytes
        assert memories.bytes == scheduler.file_bytes
        memories.close()
    assert 0.4 < trees["float16"].bytes / trees[None].bytes < 0.6 and sizes["float16"] < sizes[None]
    exact, near = (states.leaves(trees[dtype].longest(prompts[0])[1]) for dtype in (None, "float16"))
    for path, leaf in exact.items():
        assert near[path].dtype == leaf.dtype
        torch.testing.assert_close(near[path], leaf, rtol=2**-10, atol=2**-30)
    for wrote, reads in ((None, "float16"), ("float16", None)):
        trees[wrote].save(tmp_path / "tree")
        opened = PrefixCache.open(tmp_path / "tree", model=mark, parked_dtype=reads)
        assert len(opened) == len(trees[wrote])
        for path, leaf in states.leaves(opened.longest(prompts[0])[1]).items():
            assert torch.equal(leaf, near[path])
        memories = Memories(tmp_path / str(wrote), mark, parked_dtype=reads)
        assert not isinstance(memories.load("ada"), Parked)
        answers(model, prompts, memories=memories)
        memories.close()


def test_a_file_with_scales_of_another_tree_is_refused():
    parked = states.park({"a": torch.ones(1, 2, 3), "b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="a scale for each of 2 leaves, got 1"):
        states.unpark(parked._replace(scales=parked.scales[:1]))


@pytest.mark.spec("STATE-PARK-D1")
def test_scales_that_are_none_of_a_parked_state_are_refused():
    for scale in (torch.ones(3), torch.ones((), dtype=torch.int64), 2.0):
        parked = states.park({"a": torch.ones(1, 2, 2), "b": None, "c": torch.arange(2)})
        for place in range(3):
            scales = tuple(scale if at == place else own for at, own in enumerate(parked.scales))
            with pytest.raises(CheckpointError, match="a parked state has a floating point scale"):
                states.unpark(parked._replace(scales=scales))


@pytest.mark.spec("STATE-PARK-D1")
def test_a_parked_state_that_changes_its_dtype_is_still_there():
    state = {"small": 1e-6 * torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(0)) + 1e-6}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found = states.unpark(states.to(states.park(state), dtype))["small"].float()
        assert ((found - state["small"]).abs() <= 2**-8 * state["small"]).all(), dtype

"""Models of transformers on hecate's kernels: the function of every family, and documents of a packed row."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache

from hecate.errors import ConfigError, ShapeError
from hecate.hf import AdoptionWarning, adopt, release
from hecate.hf.adopt import Adopted, families, official, rule_of
from tests.hf.common import in_pieces, off
from tests.hf.families import BUILT, built, modeling

MIXING = {"glm5_next", "granitemoehybrid", "mamba2"}  # documents reach not all of their layers in transformers itself
SOME = ["qwen3_next", "kimi_linear", "bamba"]  # one of each rule
DOCUMENTS = (37, 1, 2, 50)  # one shorter than a convolution reaches back, and one that it covers
IDS = torch.randint(1, 61, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1))
PADDED = IDS[:, :60].view(2, 30).masked_fill(torch.tensor([[11], [0]]) > torch.arange(30), 0)


@cache
def model_of(family: str) -> Any:
    """A family's model; every test leaves it as it was."""
    return built(family)


def lent(family: str) -> Iterator[Any]:
    """A family's model for one test."""
    made = model_of(family)
    yield made
    release(made)
    made.zero_grad(set_to_none=True)


@pytest.fixture(params=BUILT)
def model(request: pytest.FixtureRequest) -> Any:
    yield from lent(request.param)


@pytest.fixture(params=SOME)
def one_of_a_rule(request: pytest.FixtureRequest) -> Any:
    yield from lent(request.param)


def family(model: Any) -> str:
    return type(model).__module__.split(".")[-2]


def logits(model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **given).logits


def greedy(model: Any, ids: Tensor, count: int = 8, **given: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **given)


def gradients(model: Any, ids: Tensor = IDS, **given: Any) -> dict[str, Tensor]:
    """Of a loss that every output counts in."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, use_cache=False, **given).logits
    out.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def all_off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The relative difference of all gradients together."""
    assert ours.keys() == theirs.keys()
    apart = sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
    return (apart / sum(grad.double().square().sum() for grad in theirs.values())).sqrt().item()


def test_every_family_of_the_installed_transformers_is_tried():
    """A family that is new there needs a model in `tests/hf/families.py`, or a reason to be left out."""
    assert set(families()) == set(BUILT)
    for name in BUILT:  # what is read from the sources is what the classes say
        own = [kind for kind in vars(modeling(name)).values() if isinstance(kind, type)]
        assert sum(kind.__module__ == modeling(name).__name__ and rule_of(kind) is not None for kind in own) == 1


@pytest.mark.spec("HF-ADOPT-D1")
def test_the_function_of_every_family_stays(model):
    before, whole, there = logits(model), gradients(model), PADDED != 0
    padded, sizes = logits(model, PADDED, attention_mask=there.long())[there], (50, 1, IDS.shape[1] - 51)
    pieces = in_pieces(model, IDS, *sizes)  # bamba's differ from the whole in transformers itself
    report = adopt(model)
    layers = [name for name, part in model.named_modules() if isinstance(part, Adopted)]
    assert layers and [*report.adopted] == layers and not report.left
    assert off(logits(model), before) < 3e-6 and not torch.equal(logits(model), before)
    assert all_off(gradients(model), whole) < 5e-6
    assert off(logits(model, PADDED, attention_mask=there.long())[there], padded) < 3e-6
    assert off(in_pieces(model, IDS, *sizes), pieces) < 3e-6
    release(model)
    assert torch.equal(logits(model), before)


@pytest.mark.spec("HF-ADOPT-D1")
def test_beams_checkpoints_and_half_precision(one_of_a_rule):
    model = one_of_a_rule
    short, behind = IDS[:, :20], {"attention_mask": (PADDED != 0).long(), "num_beams": 3}
    found, beams, exact = greedy(model, short), greedy(model, PADDED, 5, **behind), logits(model)
    adopt(model)
    assert torch.equal(greedy(model, short), found) and torch.equal(greedy(model, PADDED, 5, **behind), beams)
    model.train()
    plain = gradients(model)
    model.activation_checkpointing_enable()
    again = gradients(model)
    model.activation_checkpointing_disable()
    model.eval()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    half = copy.deepcopy(model).bfloat16()
    ours = off(logits(half), exact)
    release(half)
    theirs = off(logits(half), exact)
    assert ours < 1.5 * theirs
    assert torch.isfinite(in_pieces(adopt(half) and half, IDS, 50, 1, 39)).all()
    with torch.autocast("cpu", torch.bfloat16):
        ours = off(in_pieces(model, IDS, 50, 1, 39), exact)
        release(model)
        theirs = off(in_pieces(model, IDS, 50, 1, 39), exact)
    assert ours < 1.5 * theirs


@pytest.mark.spec("HF-ADOPT-D1")
def test_what_is_not_finite_goes_on_as_in_transformers(one_of_a_rule):
    """A loss that is NaN skips a step of mixed precision; a memory that raised would end the training."""
    model = copy.deepcopy(one_of_a_rule)
    adopt(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[IDS[0, 40]] = torch.inf
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    out.loss.backward()
    assert out.loss.isnan()


def packed(model: Any) -> tuple[dict[str, Any], ...]:
    """The ways to say where documents begin."""
    sizes = torch.tensor(DOCUMENTS)
    borders = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int()])
    numbers = torch.arange(len(DOCUMENTS)).repeat_interleave(sizes)[None].int()
    positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
    return {"position_ids": positions}, {"cu_seq_lens_q": borders}, {"seq_idx": numbers}


@pytest.mark.spec("HF-ADOPT-D2")
def test_packed_documents_are_as_apart_as_rows(model):
    if family(model) in MIXING - {"mamba2"}:
        pytest.skip("its softmax layers mix documents")
    head = None
    if family(model) == "mamba2":  # its language model tells its layers nothing
        head, model = model, model.backbone
    run = (lambda ids, **how: model(input_ids=ids, use_cache=False, **how).last_hidden_state) if head else None
    said = run or (lambda ids, **how: logits(model, ids, **how))
    with torch.no_grad():
        alone = torch.cat([said(ids) for ids in IDS.split(DOCUMENTS, 1)], 1)
        leak = off(said(IDS, **packed(model)[0]), alone)
        assert leak > 1e-3, "transformers keeps documents apart: say so on the page"
        adopt(model)
        fresh = said(IDS)
        for how in packed(model):
            assert off(said(IDS, **how), alone) < 3e-6, [*how]
            assert torch.equal(said(IDS), fresh), "a mark stays"
    release(model)


@pytest.mark.spec("HF-ADOPT-D2")
def test_gradients_of_packed_documents(one_of_a_rule):
    model = one_of_a_rule
    alone: dict[str, Tensor] = {}
    for ids in IDS.split(DOCUMENTS, 1):
        alone = {name: alone.get(name, 0) + grad for name, grad in gradients(model, ids).items()}
    adopt(model)
    for how in packed(model):
        assert all_off(gradients(model, **how), alone) < 3e-6


@pytest.mark.spec("HF-ADOPT-D2")
def test_two_packed_rows_and_checkpoints_before_their_backward(one_of_a_rule):
    """Nothing is remembered between calls: the backward pass of one comes after the forward of another."""
    model = one_of_a_rule
    adopt(model)
    first, second = packed(model)[0], {"position_ids": torch.cat([torch.arange(60), torch.arange(30)])[None]}
    wanted = [gradients(model, **how) for how in (first, second)]
    model.train()
    model.activation_checkpointing_enable()
    losses = [model(input_ids=IDS, use_cache=False, **how).logits.square().sum() for how in (first, second)]
    sum(losses).backward()
    model.activation_checkpointing_disable()
    model.eval()
    both = {name: wanted[0][name] + wanted[1][name] for name in wanted[0]}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all_off(found, both) < 1e-6


@pytest.mark.spec("HF-ADOPT-D2")
@pytest.mark.parametrize("name", sorted(MIXING))
def test_what_goes_on_mixing_documents_is_said(name):
    model = model_of(name)
    report = adopt(model)
    assert len(report.leaks) == 1 and "mix them" in str(report)
    with pytest.warns(AdoptionWarning, match="mix them"):
        mixed = logits(model, **packed(model)[0])
    alone = torch.cat([logits(model, ids) for ids in IDS.split(DOCUMENTS, 1)], 1)
    assert off(mixed, alone) > 1e-3, "it does not mix them any more"
    if name == "glm5_next":  # its linear layers are exact
        layer: Any = next(part for part in model.modules() if isinstance(part, Adopted))
        x, seq_idx = (
            torch.randn(1, 90, 32, dtype=torch.float32, generator=torch.Generator().manual_seed(2)),
            packed(0)[2],
        )
        with torch.no_grad():
            alone = torch.cat([layer(part) for part in x.split(DOCUMENTS, 1)], 1)
            assert off(layer(x, **seq_idx), alone) < 3e-6
    release(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits(model, **packed(model)[0])


@pytest.mark.spec("HF-ADOPT-D2", "HF-ADOPT-E1")
def test_rows_that_cannot_be_packed(one_of_a_rule):
    model = one_of_a_rule
    positions, borders, _ = packed(model)
    adopt(model)
    with pytest.raises(ShapeError, match="one row, and there are 2"):
        logits(model, IDS.expand(2, -1), **borders)
    with pytest.raises(ShapeError, match="seq_idx must be"):
        logits(model, IDS, seq_idx=torch.zeros(1, 3))
    for how in (positions, borders):
        with pytest.raises(ConfigError, match="use_cache=False"):
            model(input_ids=IDS, use_cache=True, **how)
    held = DynamicCache(config=model.config.get_text_config())
    model(input_ids=IDS[:, :20], past_key_values=held)
    with pytest.raises(ConfigError, match="use_cache=False"):
        model(input_ids=IDS[:, 20:40], past_key_values=held, position_ids=torch.arange(20)[None] % 10)
    adopt(model, packed="given")  # looks at no position
    assert off(logits(model, **positions), logits(model)) > 1e-3
    assert off(logits(model, **positions, **borders), logits(model, **positions)) > 1e-3


@pytest.mark.spec("HF-ADOPT-I1")
def test_other_models_of_the_process_are_untouched():
    name = "kimi_linear"
    model, other = built(name), built(name)
    before, kinds = logits(other), [type(part) for part in other.modules()]
    adopt(model)
    ours = logits(model)
    results: dict[str, list[Tensor]] = {"ours": [], "other": []}

    def work(key: str, one: Any) -> None:
        results[key] = [logits(one) for _ in range(5)]

    threads = [threading.Thread(target=work, args=pair) for pair in (("ours", model), ("other", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results["ours"]) == len(results["other"]) == 5
    assert all(torch.equal(found, ours) for found in results["ours"])
    assert all(torch.equal(found, before) for found in results["other"])
    assert kinds == [type(part) for part in other.modules()]
    assert list(model.state_dict()) == list(other.state_dict())
    layer = next(part for part in model.modules() if isinstance(part, Adopted))
    assert isinstance(layer, official(type(layer))) and type(layer).__name__ == official(type(layer)).__name__
    fresh = built(name)
    assert torch.equal(logits(fresh), before) and not any(isinstance(part, Adopted) for part in fresh.modules())

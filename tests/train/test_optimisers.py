"""Optimisers by kind: what they train and how often, exact resumption, older files, refusals."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

from hecate import optim
from hecate.errors import CheckpointError, ConfigError
from hecate.phi import Tanh
from hecate.train import (
    OptimConfig,
    OptimizerKind,
    Trainer,
    dump_experiment,
    load_checkpoint,
    load_experiment,
    run_experiment,
    save_checkpoint,
    state,
)
from hecate.train.config import SGD, AdamW, Muon, PartialKind
from hecate.train.trainer import build_optimizers
from tests.registries import shipped_kinds

from .common import TiedGRU, same_bits, tiny

# Beside every kind at its defaults: state of other dtypes, options that are texts or mappings.
CHOICES = {
    **{kind: kind for kind in shipped_kinds(OptimizerKind)},
    "learned lift": {
        "kind": "phi_momentum", "lift": "learned",
        "feature_map": {"kind": "random_fourier", "d_phi": 8},
    },
    "learned phi": {"kind": "phi_momentum", "feature_map": "hedgehog", "phi_lr": 0.1},
    "kronecker": {"kind": "phi_momentum", "feature_map": "tanh", "precondition": "kronecker"},
    "tuples": {
        "kind": "kernel_momentum", "feature_map": {"kind": "concat", "maps": ["elu", "tanh"]},
    },
    "one network": {"kind": "deep_momentum", "shared": True},
    "scaled m3": {"kind": "m3", "second_moment": "before", "slow_period": 2},
    "sgd beside": {"kind": "muon", "fallback": "sgd"},
}  # fmt: skip
SLOW = {"*.qkv.*": 2}
# One state, several optimisers, parameters of its own, state of other dtypes, two paces.
LEVELED = ("adamw", "muon", "m3", "learned phi", "kronecker", "one network")


def steps(trainer, count):
    return [trainer.train_step() for _ in range(count)]


@pytest.mark.spec("CKPT-RESUME-I1", "TRAIN-OPTIM-D2")
@pytest.mark.parametrize(("choice", "periods"), [
    *(pytest.param(choice, {}, id=choice) for choice in CHOICES),
    *(pytest.param(choice, SLOW, id=f"{choice}, leveled") for choice in LEVELED),
])  # fmt: skip
def test_every_kind_trains_and_resumes_to_the_bit(choice, periods, tmp_path):
    config = tiny(optim={"optimizer": CHOICES[choice], "periods": periods, "warmup": 0})
    whole = Trainer(config)
    start = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    expected = steps(whole, 4)
    assert not any(torch.equal(p, start[name]) for name, p in whole.model.named_parameters())
    half = Trainer(config)
    first = steps(half, 3)  # in the middle of a window of 2
    path = save_checkpoint(tmp_path, 3, half.checkpoint())
    resumed = Trainer(config)
    resumed.restore(load_checkpoint(path), str(path))
    assert first + steps(resumed, 1) == expected
    one, two = whole.checkpoint(), resumed.checkpoint()
    assert one.facts == two.facts and same_bits(one.tensors, two.tensors)
    assert ("Leveled(" in one.facts["optimizer"]["optimizer"]) == bool(periods)


@pytest.mark.spec("TRAIN-OPTIM-D2")
@pytest.mark.parametrize("kind", shipped_kinds(OptimizerKind))
def test_the_schedule_is_that_of_every_kind(kind):
    trainer = Trainer(tiny(optim={"optimizer": kind, "lr": 0.1, "warmup": 4}))
    assert steps(trainer, 1)[0].lr == 0.1 / 4
    assert {g["lr"] for o in trainer.optimizers.values() for g in o.param_groups} == {0.1 / 4}


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (AdamW(betas=(0.8, 0.9)), functools.partial(torch.optim.AdamW, betas=(0.8, 0.9), fused=True)),
        (SGD(momentum=0.5), functools.partial(torch.optim.SGD, momentum=0.5)),
        (
            optim.PhiMomentum.Options(momentum=0.8, feature_map=Tanh(), lift="vjp"),
            functools.partial(optim.PhiMomentum, momentum=0.8, feature_map="tanh", lift="vjp"),
        ),
    ],
    ids=["adamw", "sgd", "phi_momentum"],
)
def test_a_kind_is_the_optimiser_written_out(kind, written):
    model, other = TiedGRU(), TiedGRU()
    config = OptimConfig(optimizer=kind, lr=0.1, weight_decay=0.01)
    (ours,) = build_optimizers(model, config).values()
    matrices = [p for p in other.parameters() if p.dim() > 1]
    vectors = [p for p in other.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    theirs = written(groups, lr=0.1)
    for _ in range(3):
        for net, optimizer in (model, ours), (other, theirs):
            net.eval()
            optimizer.zero_grad()
            net(torch.arange(16).reshape(2, 8))[0].logsumexp(-1).sum().backward()
            optimizer.step()
    assert same_bits(model.state_dict(), other.state_dict())


@pytest.mark.spec("TRAIN-OPTIM-D3")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["muon", "m3"])
def test_matrix_optimisers_leave_the_rest_to_their_fallback(kind, tied):
    config = tiny(model={"tie_embeddings": tied}, optim={"optimizer": kind})
    trainer = Trainer(config)
    owned = {
        part: {name for group in optimizer.param_groups for name in group["param_names"]}
        for part, optimizer in trainer.optimizers.items()
    }
    every = {name for name, _ in trainer.model.named_parameters()}
    assert owned[kind] | owned["adamw"] == every and not owned[kind] & owned["adamw"]
    assert "blocks.0.memory.qkv.weight" in owned[kind]
    left = {"embedding.weight", "norm.weight", "blocks.0.memory.norm"}
    assert left | (set() if tied else {"head.weight"}) <= owned["adamw"]
    shapes = dict(trainer.model.named_parameters())
    assert all(shapes[name].dim() >= 2 for name in owned[kind])


@pytest.mark.spec("TRAIN-OPTIM-D4")
def test_slow_parameters_stand_still_between_commits_and_the_last_step_commits():
    trainer = Trainer(tiny(optim={"periods": SLOW, "warmup": 0}, budget={"steps": 5}))
    slow = trainer.model.get_parameter("blocks.0.memory.qkv.weight")
    fast = trainer.model.get_parameter("embedding.weight")
    for step in range(5):
        before = slow.detach().clone(), fast.detach().clone()
        trainer.train_step()
        assert torch.equal(slow, before[0]) == (step in (0, 2))
        assert not torch.equal(fast, before[1])
    groups = trainer.checkpoint().facts["optimizer"]["groups"]
    assert [group["elapsed"] for group in groups] == [0] * len(groups)


@pytest.mark.spec("TRAIN-OPTIM-D4")
def test_periods_of_one_are_the_bare_optimiser():
    one, two = Trainer(tiny()), Trainer(tiny(optim={"periods": {"*": 1}}))
    assert steps(one, 3) == steps(two, 3)
    assert same_bits(one.model.state_dict(), two.model.state_dict())


@pytest.mark.spec("TRAIN-OPTIM-D5")
def test_fields_of_older_files_are_those_of_adamw(tmp_path):
    config = OptimConfig.model_validate({"lr": 0.01, "betas": [0.5, 0.6], "eps": 1e-6})
    assert config == OptimConfig(lr=0.01, optimizer=AdamW(betas=(0.5, 0.6), eps=1e-6))
    old = tiny().model_dump(mode="json")
    adamw = old["optim"].pop("optimizer")
    old["optim"].pop("periods")
    old["optim"] |= {"betas": adamw["betas"], "eps": adamw["eps"]}
    path = tmp_path / "config.yaml"
    path.write_text(dump_experiment(tiny()), encoding="utf-8")
    assert type(tiny()).model_validate(old) == tiny() == load_experiment(path)
    # A checkpoint of that time: its config has those fields, its groups no names.
    trainer = Trainer(tiny())
    steps(trainer, 2)
    saved = trainer.checkpoint()
    resumed = Trainer(tiny())
    resumed.restore(saved._replace(facts={**saved.facts, "config": old}), "where")
    assert steps(resumed, 1) == steps(trainer, 1)


@pytest.mark.spec("CKPT-RESUME-D2")
@pytest.mark.parametrize("periods", [{}, SLOW], ids=["every step", "leveled"])
def test_a_checkpoint_of_another_kind_is_refused_by_name(periods):
    checkpoint = Trainer(tiny(optim={"optimizer": "sgd", "periods": periods})).checkpoint()
    other = Trainer(tiny(optim={"optimizer": "muon", "periods": periods}))
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="^where was trained with optimizer 'sgd', .* 'muon'"):
        other.restore(checkpoint, "where")
    facts = {**checkpoint.facts, "config": other.config.model_dump(mode="json")}
    found = "SGD.*Muon.*AdamW"
    found = r"Leveled\(SGD\).*Leveled\(Muon\) \+ Leveled" if periods else found
    with pytest.raises(CheckpointError, match=f"^where was trained with {found}"):
        other.restore(checkpoint._replace(facts=facts), "where")
    assert same_bits(before, other.model.state_dict())


def test_state_that_another_option_made_is_refused():
    for periods in ({}, SLOW):
        choice = {"kind": "phi_momentum", "precondition": "diagonal"}
        checkpoint = Trainer(tiny(optim={"optimizer": choice, "periods": periods})).checkpoint()
        other = Trainer(tiny(optim={"optimizer": "phi_momentum", "periods": periods}))
        facts = {**checkpoint.facts, "config": other.config.model_dump(mode="json")}
        with pytest.raises(CheckpointError, match="^where does not fit .* 'diagonal'"):
            other.restore(checkpoint._replace(facts=facts), "where")


REFUSED = [  # settings of `optim`, and what is said of them
    ({"optimizer": {"kind": "sgd", "momentum": 2}}, r"optim\.optimizer\.momentum: must be < 1.0, got 2"),
    ({"optimizer": "lion"}, r"optim\.optimizer: unknown optimizer kind 'lion'\. Known: adamw, "),
    ({"optimizer": {"kind": "muon", "fallback": "dgd"}},
     r"optim\.optimizer\.fallback: .* got 'dgd', which trains the weights of Linear layers"),
    ({"optimizer": {"kind": "muon", "fallback": "m3"}},
     r"optim\.optimizer\.fallback: must be a kind for .* got 'm3'"),
    ({"optimizer": {"kind": "sgd", "eps": 1}}, r"optim\.optimizer\.eps: unknown field of SGD"),
    ({"optimizer": {"kind": "sgd", "nesterov": True, "momentum": 0}},
     r"optim\.optimizer\.nesterov: needs momentum above 0"),
    ({"periods": {"*.qkv.*": 0}}, r"optim\.periods\.\*\.qkv\.\*: must be >= 1, got 0"),
    ({"periods": {"*.qkv.*": 21}}, r"optim\.periods\.\*\.qkv\.\*: must be at most budget\.steps, 20, got 21"),
    *(({"betas": (0.5, 0.6), "optimizer": own}, r"optim\.betas: belongs to optimizer 'adamw'")
      for own in ("muon", Muon(), {"kind": "adamw", "betas": [0.1, 0.2]})),
    # what the model shows
    ({"optimizer": {"kind": "phi_momentum", "nesterov": True, "dampening": 0.5}},
     r"optim\.optimizer: nesterov needs dampening 0"),
    ({"periods": {"*.nothing": 4}},
     r"optim\.periods: the pattern '\*\.nothing' decides no .* Names are embedding\.weight, "),
    ({"optimizer": "dgd", "periods": SLOW},
     r"optim\.optimizer: 'dgd' steps by .* those of 2 for 'blocks\.0\.memory\.qkv\.weight'"),
]  # fmt: skip


@pytest.mark.spec("TRAIN-CONFIG-D1", "TRAIN-OPTIM-D3", "TRAIN-OPTIM-D4", "TRAIN-OPTIM-D5")
@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_by_its_path(fields, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Trainer(tiny(optim=fields))


@pytest.mark.spec("TRAIN-OPTIM-D3")
def test_a_model_without_matrices_is_refused():
    class Row(nn.Module):
        def __init__(self):
            super().__init__()
            self.row = nn.Parameter(torch.zeros(16))

    with pytest.raises(ConfigError, match=r"^optim\.optimizer: 'muon' trains matrices between .*, and this"):
        build_optimizers(Row(), OptimConfig(optimizer="muon"))


def test_a_kind_of_the_user_trains(monkeypatch):
    monkeypatch.setattr(OptimizerKind, "_registry", dict(OptimizerKind._registry))

    class Adagrad(OptimizerKind):
        kind: Literal["my_adagrad"] = "my_adagrad"
        lr_decay: float = 0.0
        factory: ClassVar[Any] = torch.optim.Adagrad

    trainer = Trainer(tiny(optim={"optimizer": {"kind": "my_adagrad", "lr_decay": 0.1}}))
    steps(trainer, 1)
    assert trainer.optimizers["my_adagrad"].param_groups[0]["lr_decay"] == 0.1
    assert type(trainer.optimizers["my_adagrad"]) is Adagrad.factory


def test_partial_kinds_are_those_with_a_fallback():
    kinds = shipped_kinds(OptimizerKind).items()
    found = {kind for kind, variant in kinds if "fallback" in variant.model_fields}
    assert found == PartialKind.variants().keys() == {"dgd", "muon", "m3"}


@pytest.mark.spec("TRAIN-OPTIM-D6")
@pytest.mark.parametrize("tied", [True, False])
def test_dgd_trains_the_layers_it_is_attached_to(tied):
    """The weights of Linear layers step by their samples, clipped as the gradient was."""
    config = tiny(model={"tie_embeddings": tied}, optim={"optimizer": "dgd", "clip": 0.01})
    trainer = Trainer(config)
    layers = [n for n, m in trainer.model.named_modules() if isinstance(m, nn.Linear)]
    owned = [n for g in trainer.optimizers["dgd"].param_groups for n in g["param_names"]]
    wanted = {f"{n}.weight" for n in layers} - {"head.weight"}
    assert set(owned) == wanted and "blocks.0.memory.qkv.weight" in wanted
    rest = {n for g in trainer.optimizers["sgd"].param_groups for n in g["param_names"]}
    assert rest | wanted == {n for n, _ in trainer.model.named_parameters()} and not rest & wanted
    name = "blocks.0.memory.qkv.weight"
    start = trainer.model.get_parameter(name).detach().double().clone()
    (result,) = steps(trainer, 1)
    assert result.grad_norm > 1  # clipped to a hundredth of that at least
    optimizer = trainer.optimizers["dgd"]
    p = trainer.model.get_parameter(name)
    (seen,) = optimizer._seen[p]
    x, g = seen.inputs.double(), seen.grads.double() * len(seen.grads) * 0.01 / result.grad_norm
    decay = optimizer.param_groups[0]["weight_decay"] * result.lr
    c = result.lr / (1 + result.lr * x.square().sum(-1, keepdim=True))
    expected = (1 - decay) * start - (c * (x @ start.T + g)).T @ x / len(x)
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.spec("TRAIN-RUN-D1")
def test_the_report_says_which_optimiser_ran(tmp_path):
    config = tiny(optim={"optimizer": "muon", "periods": SLOW}, budget={"steps": 2})
    run_experiment(config, tmp_path / "run")
    report = (tmp_path / "run" / "report.md").read_text()
    for text in (
        "\n- `muon` trained ",
        "  optimizer: muon\n",
        "- once in 2 steps: `blocks.0.memory.qkv.weight`",
        "- `adamw` trained ",
    ):
        assert text in report


@pytest.mark.spec("TRAIN-OPTIM-D1")
def test_a_checkpoint_does_not_bind_the_way_of_a_step():
    """A state of torch's plain form goes on in the fused one, and is checked as closely."""
    weights = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]
    fused = AdamW().build(torch.nn.Module(), [{"params": weights}], lr=0.1)
    assert fused.param_groups[0]["fused"] is True
    stepped = state._probe_states(fused)
    assert stepped is not None and stepped[0]["exp_avg"].shape == (3, 2)
    own = fused.param_groups[0]
    state._check_options("groups.0", {**own, "fused": None, "foreach": True, "params": ["a", "b"]}, own)
    with pytest.raises(ConfigError, match="eps"):
        state._check_options("groups.0", {**own, "fused": None, "eps": 1e-3}, own)

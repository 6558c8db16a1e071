"""The loop in memory: determinism, exact resumption, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hecate.data import IGNORED, Batch
from hecate.errors import ConfigError, NonFiniteError
from hecate.train import Trainer, load_checkpoint, run_experiment, save_checkpoint
from hecate.train.evaluate import evaluate, generate, state_leaves
from hecate.train.trainer import parameter_groups

from .common import TiedGRU, same_bits, tiny

TEXT = {"kind": "bundled", "max_bytes": 1 << 16}


def trained(trainer, steps):
    return [trainer.train_step() for _ in range(steps)]


def fresh(kind, **fields):
    if kind == "gru":
        torch.manual_seed(1)
        return Trainer(tiny(**fields), model=TiedGRU())
    data = {"data": TEXT, "budget": {"seq_len": 12}} if kind == "text" else {}
    return Trainer(tiny(**data, **fields))


@pytest.mark.spec("TRAIN-LOOP-I1", "TRAIN-LOOP-I2")
@pytest.mark.parametrize("kind", ["memory", "text", "gru"])
def test_the_same_config_gives_the_same_bits_whatever_was_drawn_before(kind):
    one = fresh(kind)
    steps = trained(one, 5)
    two = fresh(kind)
    if kind != "gru":  # whose dropout draws globally
        torch.rand(17)
    assert trained(two, 5) == steps
    assert same_bits(one.model.state_dict(), two.model.state_dict())
    other = fresh(kind, seed=1)
    assert trained(other, 5) != steps


@pytest.mark.spec("CKPT-RESUME-I1")
@pytest.mark.parametrize("kind", ["memory", "text", "gru"])
def test_ten_and_ten_steps_are_twenty_to_the_bit(kind, tmp_path):
    whole = fresh(kind)
    expected = trained(whole, 20)
    half = fresh(kind)
    first = trained(half, 10)
    path = save_checkpoint(tmp_path, half.step, half.checkpoint())
    trained(half, 3)  # whatever happens after the checkpoint does not matter
    torch.manual_seed(99)
    resumed = Trainer(half.config, model=TiedGRU(seed=5) if kind == "gru" else None)
    resumed.restore(load_checkpoint(path), str(path))
    assert resumed.step == 10
    assert first + trained(resumed, 10) == expected
    one, two = whole.checkpoint(), resumed.checkpoint()
    assert one.facts == two.facts
    assert same_bits(one.tensors, two.tensors)
    names = set(one.tensors)
    assert {"rng/torch"} < names and any(n.endswith("/step") for n in names)
    assert any(n.endswith("/exp_avg_sq") for n in names)
    if kind == "gru":
        assert '"model/head.weight": "model/embedding.weight"' in (path / "manifest.json").read_text()
        assert resumed.model.head.weight is resumed.model.embedding.weight and int(resumed.model.seen) == 20 * 4


class Fixed(nn.Module):
    """Logits that ignore the input: a learned row, or a given value."""

    def __init__(self, vocab: int, value: float = 0.0) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.full((vocab,), value))

    def forward(self, tokens, state=None):
        return self.row.expand(*tokens.shape, -1), None


class Explodes(Fixed):
    """Gradients without an end."""

    def forward(self, tokens, state=None):
        logits, _ = super().forward(tokens)
        logits.register_hook(lambda g: g * math.inf)
        return logits, None


@pytest.mark.spec("TRAIN-LOOP-D2")
def test_what_is_not_finite_stops_before_the_parameters_change():
    for model, message in (
        (Fixed(16, math.nan), r"^step 1: the loss is nan at learning rate .* Lower"),
        (Fixed(16, math.inf), r"^step 1: the loss is nan at learning rate .* Lower"),
        (Explodes(16), r"^step 1: the gradient norm is (nan|inf) at"),
    ):
        trainer, before = Trainer(tiny(), model=model), model.row.detach().clone()
        with pytest.raises(NonFiniteError, match=message):
            trainer.train_step()
        assert torch.allclose(model.row, before, rtol=0, atol=0, equal_nan=True) and trainer.step == 0


@pytest.mark.spec("TRAIN-EVAL-D1")
def test_every_label_weighs_the_same():
    model = Fixed(4)
    with torch.no_grad():
        model.row.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    batches = [
        Batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[1, 0, 1]])),
        Batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[IGNORED, IGNORED, 2]])),
        Batch(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[IGNORED, IGNORED]])),
    ]
    score = evaluate(model, batches, torch.device("cpu"))
    total = math.log(math.e + 3)
    assert score.labels == 4 and score.accuracy == 0.5
    assert score.loss == pytest.approx((2 * (total - 1) + 2 * total) / 4)
    assert score.value("bits_per_byte") == pytest.approx(score.loss / math.log(2))
    assert score.value("accuracy") == 0.5


def test_evaluation_leaves_the_run_as_it_was():
    plain = fresh("gru")
    expected = trained(plain, 3)
    watched = fresh("gru")
    steps = trained(watched, 2)
    frozen = next(watched.model.children()).eval()  # as layers are kept whose statistics are not to move
    watched.evaluate()
    state_leaves(watched.model, watched.source, 8, watched.device)
    assert watched.model.training and not frozen.training
    assert steps + trained(watched, 1) == expected


@pytest.mark.spec("TRAIN-OPTIM-D1")
def test_only_matrices_decay():
    trainer = Trainer(tiny())
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    decayed, plain = (
        {names[id(p)] for p in group["params"]} for group in parameter_groups(trainer.model.named_parameters(), 0.1)
    )
    assert decayed | plain == set(names.values()) and not decayed & plain
    assert "embedding.weight" in decayed and "blocks.0.memory.qkv.weight" in decayed
    assert "norm.weight" in plain and "blocks.0.memory.norm" in plain
    assert all(p.dim() >= 2 for n, p in trainer.model.named_parameters() if n in decayed)
    assert [g["weight_decay"] for g in trainer.optimizers["adamw"].param_groups] == [0.1, 0.0]


def test_training_learns():
    trainer = Trainer(tiny(data={"kind": "copy", "vocab_size": 3, "symbols": 1}, optim={"lr": 0.02}))
    trained(trainer, 60)
    assert trainer.evaluate().accuracy == 1.0


@pytest.mark.spec("TRAIN-GEN-D1")
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_streaming_generation_equals_reading_everything_again(temperature):
    model = Trainer(tiny()).model
    prompt = [3, 1, 4, 1, 5]
    streamed = list(
        generate(
            model, prompt, 12, temperature=temperature,
            generator=torch.Generator().manual_seed(3), device=None,
        )
    )  # fmt: skip
    generator, whole = torch.Generator().manual_seed(3), list(prompt)
    with torch.no_grad():
        for _ in range(12):
            last = model(torch.tensor([whole]))[0][0, -1].float()
            if temperature:
                weights = torch.softmax(last / temperature, -1)
                whole.append(int(torch.multinomial(weights, 1, generator=generator)))
            else:
                whole.append(int(last.argmax()))
    assert streamed == whole[5:]


@pytest.mark.spec("TRAIN-GEN-D1")
def test_generation_keeps_a_state_of_constant_size_and_one_token_per_call():
    model, sizes, lengths = TiedGRU(), [], []

    class Watched(nn.Module):
        def forward(self, tokens, state=None):
            logits, state = model(tokens, state)
            sizes.append(state.numel())
            lengths.append(tokens.shape[1])
            return logits, state

    list(generate(Watched(), [1, 2, 3], 6, temperature=1.0, generator=torch.Generator()))
    assert len(set(sizes)) == 1 and lengths == [3, 1, 1, 1, 1, 1]


def test_cuda_without_a_device_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="budget.device: is 'cuda', but no CUDA device"):
        Trainer(tiny(budget={"device": "cuda"}))
    with pytest.raises(ConfigError, match="budget.device: is 'cuda', but no CUDA device"):
        run_experiment(tiny(budget={"device": "cuda"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()

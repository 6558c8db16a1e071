"""Every named rule: its paper, its derivatives, what it forgets and how it starts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryState, memory_scan, named_rule
from hecate.errors import ConfigError
from hecate.nn import GateHeads, Memory
from hecate.retention import Sphere
from hecate.rule import RULES, MemoryConfig, NamedRule
from hecate.rule.config import Rules
from hecate.structure import MLP
from hecate.testing import check_rule
from tests.memories import close
from tests.reference import papers
from tests.rule.distance import LENGTH, engines_of, errors, gradient_errors, reference
from tests.rule.trials import TRIALS, Inputs

EVERY = pytest.mark.parametrize("name", RULES)
FORGETTING = [
    name
    for name, rule in RULES.items()
    if rule.config.retention.uses_retain and rule.config.gating.plain and rule.config.writes == 1
]

# A factor common to the lr of all tokens cancels: in the quotient, and under Newton-Schulz.
SCALE_FREE = {"linear_attention": 1e-12, "large_chunk_ttt": 1e-8}  # eps^2 over that of a momentum with lr 1e-3


def test_every_rule_has_a_transcription():
    assert set(TRIALS) == set(RULES)
    assert all(reference(name).startswith(("papers", "bounded")) for name in RULES)


@pytest.mark.spec("RULE-NAMED-R1", "BIAS-DOT-R1", "BIAS-L2-R1", "RULE-NORM-R1", "RULE-ORDER-R1", "RULE-STEP-R1")
@pytest.mark.spec("RULE-CHUNK-R1", "RET-DECAY-R1", "ALG-MOM-R1", "STR-MLP-R1")
@EVERY
def test_a_rule_is_that_of_its_paper(name):
    for engine in engines_of(name):
        try:
            found = errors(name, LENGTH, engine=engine)
        except Exception as error:
            raise AssertionError(f"{name} on engine {engine}") from error
        wrong = {part: error for part, error in found.items() if not error <= 1e-10}
        assert not wrong, f"{name} on engine {engine}: {wrong}"


@pytest.mark.spec("RULE-NAMED-R2")
@EVERY
def test_gradients_are_those_of_the_paper(name):
    """Differences settle to 1e-9 or lose eps / 6e-8 to rounding; a gradient counts from 1e-3 of the largest on."""
    found = gradient_errors(name, 8, directions=1, chunk=3, engine="sequential")
    wrong = {draw: error for draw, error in found.items() if not error <= 1e-7}
    assert len(found) >= 7 and not wrong, f"{name}: {wrong}"


def test_a_wrong_gradient_is_noticed(monkeypatch):
    own, lost = MLP.pullback, []

    def pullback(self, memory, p, u):
        first, *rest = own(self, memory, p, u)
        lost.append(1)
        return (first.detach(), *rest)  # the same values

    assert max(errors("ttt_mlp", 8, engine="sequential").values()) < 1e-12
    monkeypatch.setattr(MLP, "pullback", pullback)
    found = gradient_errors("ttt_mlp", 8, directions=1, engine="sequential", autodiff="torch")
    assert lost and max(found.values()) > 1e-3


@pytest.mark.spec("RULE-STEP-D2")
def test_mesa_is_the_ridge_optimum_of_tokens_weighed_by_lr():
    """A token of weight 0 is not there, and hears of it: no gradient of it is lost to the root of 0."""
    x = Inputs(LENGTH)
    x.lr[5] = 0.0
    y, weight, _ = papers.mesa(x.unit_q, x.unit_k, x.v, named_rule("mesa").algorithm.ridge, x.lr)
    q, k, v = (torch.as_tensor(item)[None, :, None] for item in (x.q, x.k, x.v))
    lr = torch.as_tensor(x.lr)[None, :, None].requires_grad_()
    got, state = memory_scan(named_rule("mesa"), q, k, v, Gates(lr))
    (grad,) = torch.autograd.grad(got.square().sum(), lr)
    assert grad.isfinite().all() and not grad[0, 5, 0]
    got, state = got.detach(), state.detach()
    close(got[0, :, 0], y, 1e-10)
    close(state.memory["weight"][0, 0], weight, 1e-10)


def as_scanned(config: MemoryConfig) -> str:
    """What a scan with the gates of `check_rule`, one number a token and head, reads of a config."""
    fields = config.model_dump(exclude={"gating", "layer_options"})
    if fields["retention"]["kind"] == "decay":
        fields["retention"] = {"kind": "decay"}
    return repr({name: field for name, field in fields.items() if not name.startswith("layer_")})


@pytest.mark.parametrize("name", {as_scanned(rule.config): name for name, rule in RULES.items()}.values())
def test_derivatives_of_a_rule(name):
    config = named_rule(name)
    config = config.model_copy(update={"chunk": min(config.chunk, 2)})
    smooth = config.bias.kind != "yaad"  # its loss jumps where the error leaves the ball
    check_rule(config, smooth=smooth)


def starting_gates(name: str) -> GateHeads:
    heads = GateHeads(3, 1, named_rule(name), d_key=4)
    heads.reset_parameters(torch.Generator().manual_seed(0))
    return heads


def gates_of(name: str, length: int) -> Gates:
    """The starting gates of so many tokens; of a rule without a head, its own numbers."""
    config, made = named_rule(name), starting_gates(name)(torch.zeros(1, length, 3))
    lr, retain = (torch.full((1, length, 1), x) for x in (config.algorithm.lr, config.retention.default_retain))
    return made._replace(lr=lr if made.lr is None else made.lr, retain=retain if made.retain is None else made.retain)


def stored_and_left(name: str, length: int) -> tuple[Tensor, list[MemoryState]]:
    """Reads of an item written once with the starting gates, and the states after it and after
    `length` tokens of orthogonal keys that write nothing."""
    config = named_rule(name)
    d = 4
    gates = cut(gates_of(name, 1 + length), slice(None))
    lr, _, momentum, *_ = gates
    # Nothing but retention may act: an item's key may meet others in phi, and momentum may go on.
    for gate in (lr, momentum):
        if gate is not None:
            gate[:, 1:] = 0
    k = torch.zeros(1, 1 + length, 1, d)
    k[:, 0, :, 0], k[:, 1:, :, 1] = 1, 1
    q = torch.zeros_like(k)
    q[..., 0] = 1
    v = torch.tensor([0.7, -1.3, 0.4, 0.2]).expand(1, 1 + length, 1, d)
    phi = config.feature_map.init(d, generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    first, rest = ([item[:, part] for item in (q, k, v)] for part in (slice(1), slice(1, None)))
    y, one = memory_scan(config, *first, gates=cut(gates, slice(1)), phi_params=phi)
    more, last = memory_scan(config, *rest, gates=cut(gates, slice(1, None)), state=one, phi_params=phi)
    return torch.cat([y, more], 1)[0, :, 0].detach(), [one, last]


def cut(gates: Gates, tokens: slice) -> Gates:
    return Gates(*(None if gate is None else gate[:, tokens].detach() for gate in gates))


@pytest.mark.spec("RULE-NAMED-I2", "RET-DECAY-I1", "NN-GATE-I2")
@pytest.mark.parametrize("name", FORGETTING)
def test_half_life_at_the_starting_gates(name):
    """After log(1/2) / log(retain) tokens: half of what a linear memory answers, of what every weight
    of a deep one is away from its start, or of the dual state that it carries; directions forget by
    new writes alone. Per channel, each at its own pace; the item lies in the first."""
    config = named_rule(name)
    channels = gates_of(name, 1).retain.detach().reshape(-1)
    started, retain = float(channels[0]), config.retention.default_retain
    if config.retention.gate_form.squash == "softplus":  # A in (1, 16), dt in (1e-3, 1e-1)
        assert torch.all((channels < math.exp(-1e-3)) & (channels > math.exp(-1.6)))
        assert len(set(channels.tolist())) == len(channels) == 4
        retain = started
    else:
        assert started == pytest.approx(min(retain, 1 - 1e-4), abs=1e-12)
    retain = started if retain < 1 else retain
    half_life = round(math.log(0.5) / math.log(retain)) if retain < 1 else 20
    y, states = stored_and_left(name, half_life)
    one, last = (dict(state.memory) for state in states)
    kept = started**half_life
    if retain < 1:  # a whole number of tokens is at most half a token off
        assert abs(math.log(2 * kept)) <= -0.5 * math.log(retain) + 1e-12
    rounding = 1e-14 * half_life
    for key, weight in one.items():
        if isinstance(config.retention, Sphere):
            close(last[key], weight, rounding, key)
        else:
            each = channels**half_life if len(channels) > 1 else kept
            start = (
                config.structure.init(4, 4, dtype=weight.dtype)[key] if config.retention.anchored else torch.zeros(())
            )
            close(last[key], start + each * (weight - start), rounding, key)
    assert y[0].norm() > 1e-3, "the item was stored"
    if config.structure.linear:
        close(y, started ** torch.arange(1.0 + half_life)[:, None] * y[0], rounding)


@pytest.mark.spec("RULE-NAMED-I1")
@EVERY
def test_no_rule_starts_where_no_gradient_flows(name):
    """Every parameter of a layer as it is built moves the outputs of its first two chunks."""
    config = named_rule(name)
    layer = Memory(16, 2, config, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2 * config.chunk + 6, 16, generator=generator)
    y, _ = layer(x)
    loss = (y * torch.randn(y.shape, generator=generator)).sum() / y[0].numel() ** 0.5
    loss.backward()
    for path, parameter in layer.named_parameters():
        assert parameter.grad is not None, path
        norm = float(parameter.grad.norm())
        if path in ("gates.bias.lr", "gating.params.lr__bias") and name in SCALE_FREE:
            assert norm < SCALE_FREE[name], f"{name} is not free of the scale of lr any more"
            continue
        # A gate that starts at 1 - 1e-4 or 1e-4 has that slope, whatever the rule.
        floor = 1e-3 * 1e-4 if "gates" in path or "gating" in path else 1e-3
        assert floor < norm < 1e3, f"{name}: the gradient of {path} has norm {norm:.1e}"


def test_a_long_name_is_cut():
    with pytest.raises(ConfigError, match=r"^unknown rule 'x+\.\.\.x+'\. Known: ") as caught:
        named_rule("x" * 10_000)
    assert len(str(caught.value)) < 600


def test_rules_are_copied_joined_and_may_be_made_late():
    rules = copy.copy(Rules())  # of which none was read
    rules["mine"] = lambda: NamedRule(MemoryConfig(chunk=3), "none")
    assert rules["mine"].config.chunk == 3 and rules["mine"] is rules["mine"]
    assert "mine" not in RULES and set(RULES | rules) == {*RULES, "mine"} and RULES.copy() == RULES

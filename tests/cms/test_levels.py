"""A level is a memory layer; building, errors, cold start, derivatives."""

import warnings

import pytest
import torch

from hecate.cms import CMS, CMSConfig, LevelConfig
from hecate.errors import ConfigError, HealthWarning, ShapeError, StabilityWarning
from hecate.nn import Memory
from tests.cms.common import DELTA, JOINS, LEVELS, cms_of, inputs, masks
from tests.nn.layers import near, seeded

every_join = pytest.mark.parametrize("join", JOINS, ids="-".join)


def built(levels, **options):
    return CMS(8, 2, CMSConfig(levels=levels, **options), generator=seeded())


@pytest.mark.spec("CMS-LAYER-R1")
@pytest.mark.parametrize(
    ("memory", "period"), [(DELTA, 1), ({**DELTA, "chunk": 3}, 1), ("gated_delta", 1), (DELTA, 3)], ids=str
)
@pytest.mark.parametrize("composition", ["independent", "sequential", "nested"])
def test_one_level_is_the_plain_layer(memory, period, composition):
    """Of a period of several tokens: one that commits chunks."""
    layer = built([{"name": "only", "memory": memory, "period": period}], composition=composition)
    plain = Memory(8, 2, memory if period == 1 else {**memory, "chunk": period, "commit": "chunk"})
    plain.load_state_dict(layer.levels[0].state_dict())
    x, given = inputs(), masks()
    y, state = layer(x, **given)
    expected, last = plain(x if composition == "independent" else layer.norms[0](x), **given)
    assert torch.equal(y, expected)
    near(state.levels[0], last, 0.0)


@pytest.mark.spec("CMS-LAYER-R1")
def test_windows_are_batched_products(caplog):
    layer = cms_of("independent", levels=[LEVELS[0], {**LEVELS[1], "period": 16}])
    with caplog.at_level("DEBUG", "hecate.engine"):
        layer(inputs(1, 64))
    lines = [record.getMessage() for record in caplog.records]
    assert any("'cms/middle', 64 tokens: engine chunk" in line for line in lines)
    assert not any("sequential" in line for line in lines)


@pytest.mark.spec("CMS-LAYER-I3")
@pytest.mark.parametrize(("period", "kernel"), [(1, 0), (4, 0), (4, 4)])
def test_frozen_reads_are_active_reads(period, kernel):
    """A read that writes nothing takes the way of all others: phi, norms, convolution."""
    memory = {**DELTA, "feature_map": "elu"}
    level = {"name": "only", "memory": memory, "period": period, "conv_kernel": kernel}
    layer, idle = (cms_of("independent", levels=[level]) for _ in range(2))
    with torch.no_grad():
        gates = idle.memories[0].gates
        for name, end in (("lr", -800.0), ("retain", 800.0)):
            gates.weight[name].zero_()
            gates.bias[name].fill_(end)
    more = inputs(length=3, seed=6)
    _, state = layer(inputs(length=12))  # three windows of 4: the next tokens close none
    active, after = (layer if period == 4 else idle)(more, state)
    near(after.levels[0].memory.memory, state.levels[0].memory.memory, 0.0)
    if kernel:  # where a mask would hide the token from the convolution too
        frozen, _ = idle(more, state)
    else:
        frozen, _ = layer(more, state, write_mask=torch.zeros(2, 3, dtype=torch.bool))
    near(frozen, active, 1e-13)
    assert active.abs().max() > 0.1


@pytest.mark.spec("CMS-NEST-V1")
def test_gradients_through_restarts():
    small = {"heads": 1, "d_key": 2, "d_value": 2, "conv_kernel": 0, "output_gate": False}
    levels = [{**level, **small, "memory": {**DELTA, "feature_map": "elu"}} for level in LEVELS[:2]]
    layer = cms_of("nested", levels=levels)
    names = [name for name, _ in layer.named_parameters() if "initial" in name or "qkv" in name]
    values = [p.detach().clone().requires_grad_() for n, p in layer.named_parameters() if n in names]

    def outputs(x, *values):
        own = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, own, (x,))[0]

    x = inputs(1, 5).requires_grad_()
    assert torch.autograd.gradcheck(outputs, (x, *values), rtol=1e-6, atol=1e-8, fast_mode=True)
    # What the slow level starts from reaches the output of token 4 through the restart alone.
    with torch.no_grad():
        values[names.index("levels.1.qkv.weight")].zero_()
        layer.memories[1].out.weight.zero_()
    y = outputs(x, *values)
    slow = values[names.index("levels.1.initial.weight")]
    (through,) = torch.autograd.grad(y[:, 2].sum(), slow, retain_graph=True)
    (before,) = torch.autograd.grad(y[:, 1].sum(), slow)
    assert through.abs().max() > 1e-3 and before.abs().max() == 0.0


BAD = [
    ({"levels": []}, "levels"),
    ({"levels": [{"name": "a"}, {"name": "a"}]}, "level 0 already"),
    ({"levels": [{"name": "a", "period": 4}, {"name": "b", "period": 2}]}, "from fast to slow"),
    ({"levels": [{"name": "a", "period": 0}]}, "must be >= 1"),
    ({"levels": [{"name": "a", "period": 4, "memory": {"chunk": 2}}]}, "chunk=2 and commit='token'"),
    ({"levels": [{"name": "a", "period": 4, "memory": {"commit": "chunk"}}]}, "period=4 sets"),
    ({"levels": [{"name": "a"}], "aggregation": "rsqrt"}, "only composition 'independent'"),
    ({"levels": [{"name": "a", "conv_kernel": 1}]}, "must be 0"),
]
NESTED = [
    ([{"name": "a", "period": 2}, {"name": "b", "period": 3}], "no multiple of 2"),
    ([{"name": "a"}, {"name": "b"}], "commits at every token"),
    ([{"name": "a", "memory": {"chunk": 4}}, {"name": "b", "period": 2}], "no multiple of 4"),
    (
        [
            {"name": "a", "memory": {"normalizer": "sum", "feature_map": "elu"}},
            {"name": "b", "period": 2, "memory": {"feature_map": "elu", "key_norm": "l2"}},
        ],
        "sum of weights",
    ),
    ([{"name": "a", "memory": {"retention": "sphere"}}, {"name": "b", "period": 2}], "sets of their own"),
    ([{"name": "a", "memory": {"on_nonfinite": "skip"}}, {"name": "b", "period": 2}], "'skip'"),
    ([{"name": "a", "d_key": 3}, {"name": "b", "period": 2}], "copies one into the other"),
]


@pytest.mark.spec("CMS-LAYER-I6")
def test_bad_configs():
    for fields, match in BAD:
        with pytest.raises(ConfigError, match=match):
            CMSConfig(**fields)


@pytest.mark.spec("CMS-LAYER-I6")
def test_levels_that_cannot_be_nested():
    for levels, match in NESTED:
        with pytest.raises(ConfigError, match=match) as caught:
            built(levels, composition="nested")
        assert "'a'" in str(caught.value) and "'b'" in str(caught.value)
        assert caught.value.problems[0].path[:2] == ("levels", 1)


@pytest.mark.spec("CMS-LAYER-I6")
def test_bad_calls():
    layer, nested = cms_of(), cms_of("nested")
    _, state = layer(inputs())
    for words, given in {
        "CMSState": (inputs(), state.levels),
        "each of 3 levels": (inputs(), state._replace(levels=state.levels[:2])),
        "another batch": (inputs(3), state),
        r"x must be \[B, T, 8\]": (inputs()[..., :4],),
    }.items():
        with pytest.raises(ShapeError, match=words):
            layer(*given)
    with pytest.raises(ConfigError, match=r"levels\[1\].*parallel"):
        cms_of(engine="parallel")
    with pytest.raises(ConfigError, match="torch.func"):
        torch.func.vmap(lambda x: nested(x.unsqueeze(0))[0])(inputs())


@pytest.mark.spec("CMS-LAYER-I6")
def test_a_level_keeps_the_chunk_that_its_period_means():
    level = LevelConfig(name="a", period=4, memory={"chunk": 4, "commit": "chunk"})
    assert level.rule == level.memory
    titans = LevelConfig(name="b", memory="titans")
    assert titans.rule == titans.memory
    assert CMSConfig.model_validate(CMSConfig(levels=[level]).model_dump()).levels == (level,)


@pytest.mark.spec("CMS-LAYER-I4")
def test_windows_that_diverge_are_warned_of():
    long = {"name": "slow", "period": 64, "memory": {"retention": "decay"}}
    with pytest.warns(StabilityWarning, match=r"set algorithm\.lr below") as caught:
        layer = built([long])
    _, state = layer(torch.randn(1, 2048, 8, generator=seeded()))
    assert state.levels[0].memory.memory["weight"].abs().max() > 1e6
    limit = float(str(caught[0].message).split("algorithm.lr below ")[1].split(",")[0])
    memory = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.9 * limit}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = built([{**long, "memory": memory}])
    _, state = layer(torch.randn(1, 2048, 8, generator=seeded()))
    assert state.levels[0].memory.memory["weight"].abs().max() < 10.0


@pytest.mark.spec("CMS-JOIN-I1")
def test_a_chain_that_passes_nothing_is_warned_of():
    """Nothing comes out and nothing learns before the first commit; then it does."""
    levels = [{**LEVELS[2], "name": name, "memory": DELTA} for name in ("a", "b")]
    with pytest.warns(HealthWarning, match="sequences shorter than 4 train nothing") as caught:
        layer = built(levels, composition="chained")
    assert len(caught) == 1  # the last level has none behind it
    for length, flows in ((3, False), (5, True)):
        y = layer(inputs(length=length))[0]
        found = torch.autograd.grad(y.square().sum(), list(layer.parameters()), allow_unused=True)
        assert any(g is not None and g.abs().max() > 1e-9 for g in found) == flows
        assert bool(y.abs().max() > 0) == flows
    deep = {"structure": {"kind": "mlp", "expansion": 1}, "algorithm": {"kind": "gd", "lr": 0.05}}
    built([{**level, "memory": deep} for level in levels], composition="chained")

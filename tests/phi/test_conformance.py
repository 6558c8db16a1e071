"""Every registered feature map, by itself: `pytest -k that_kind` runs one."""

import json
from typing import Literal

import pytest
import torch
import yaml
from pydantic import Field
from torch import Tensor

from hecate import phi
from hecate.errors import ConfigError, ShapeError
from hecate.testing import check_feature_map
from hecate.variant import Config
from tests.phi.examples import EXAMPLES, examples, named
from tests.registries import shipped_kinds

# A user's own map: `features` only, no derivative, defined after the library was imported.


class SineWave(phi.FeatureMap):
    """sine_wave_of_a_user: phi(x) = sin(frequency x) w."""

    kind: Literal["sine_wave_of_a_user"] = "sine_wave_of_a_user"
    frequency: float = Field(default=2.0, gt=0)

    def traits(self) -> phi.Traits:
        return phi.Traits(parity="odd")

    def init(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
        return {"learned": {"w": torch.ones(heads, d, dtype=dtype, device=device)}, "frozen": {}}

    def features(self, x: Tensor, params: phi.Params) -> Tensor:
        w = params["learned"]["w"]
        return (self.frequency * x).sin() * (w[0] if w.shape[0] == 1 else w).to(x.dtype)


ALL = examples(__name__)
IDS = [named(instance) for instance in ALL]


FIRST = list({instance.kind: instance for instance in reversed(ALL)}.values())
first = pytest.mark.parametrize("instance", FIRST, ids=named)


class Holder(Config):
    """A configuration with a feature map in it."""

    feature_map: phi.FeatureMap


def _params(instance, d=5, heads=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    params = instance.init(d, heads=heads, generator=generator, dtype=dtype)
    # One position for all tokens fits every shape.
    return {**params, "position": torch.tensor(7)} if instance.needs_position else params


def _x(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


HOLDING = [made for made in ALL if any(_params(made).get(part) for part in ("learned", "frozen"))]
HOLDING = [made for made in HOLDING if not isinstance(made, SineWave)]  # a user's map checks what it likes


def test_every_kind_has_examples_of_its_own_kind():
    here = {"sine_wave_of_a_user"}
    own = shipped_kinds(phi.FeatureMap).keys()
    assert len(own) >= 20
    assert {instance.kind for instance in ALL} == own | here
    assert all(instance.kind == kind for kind, each in EXAMPLES.items() for instance in each)
    assert set(EXAMPLES) <= set(phi.FeatureMap.variants())
    assert len(set(IDS)) == len(IDS)


@pytest.mark.spec("PHI-FAMILY-D1", "PHI-FAMILY-V1", "PHI-FAMILY-I1", "PHI-FAMILY-I2", "PHI-FAMILY-I4")
@pytest.mark.spec("PHI-RFF-V1", "PHI-RFF-V2", "PHI-FAVOR-V1", "PHI-PRELU-V1", "PHI-ARCCOS-V1", "PHI-MACL-V1")
@pytest.mark.spec("PHI-NYSTROM-V1", "PHI-SLAY-V1", "PHI-HEDGEHOG-V1", "PHI-GLU-V1", "PHI-REBASED-V1", "PHI-SOFTMAX-V1")
@pytest.mark.spec("PHI-SOFTPLUS-V1", "PHI-GELU-V1", "PHI-EXP-V1", "PHI-TAYLOR-V1", "PHI-POLY-V1", "PHI-LINEAR-V1")
@pytest.mark.spec("PHI-CONCAT-V1", "PHI-COMPOSE-V1", "PHI-NORM-V1", "PHI-ODD-V1", "PHI-TENSOR-V1", "PHI-RAND-I3")
@pytest.mark.parametrize("instance", ALL, ids=IDS)
def test_conforms(instance):
    check_feature_map(instance)


@pytest.mark.parametrize("instance", ALL, ids=IDS)
def test_survives_yaml_and_json_and_is_hashable(instance):
    fields = instance.model_dump(mode="json")
    for read in (yaml.safe_load(yaml.safe_dump(fields)), json.loads(json.dumps(fields))):
        assert phi.FeatureMap.model_validate(read) == instance
        holder = Holder.model_validate({"feature_map": read})
        assert holder.feature_map == instance
        assert hash(holder.feature_map) == hash(instance)
    assert Holder.model_validate_json(Holder(feature_map=instance).model_dump_json()).feature_map == instance


@pytest.mark.parametrize("instance", ALL, ids=IDS)
def test_empty_and_scalar_batches(instance):
    params = _params(instance)
    for shape in ((0, 5), (2, 0, 3, 5), (5,), (1, 1, 1, 5)):
        features = instance(_x(*shape), params)
        assert features.shape == (*shape[:-1], instance.output_dim(5))


@first
def test_expanded_and_strided_inputs_give_the_same_features(instance):
    params = _params(instance)
    x = _x(4, 3, 10)[..., ::2]
    assert torch.equal(instance(x, params), instance(x.contiguous(), params))
    wide = _x(1, 5).expand(6, 5)
    # Different batch shapes may be summed in a different order, nothing more.
    torch.testing.assert_close(instance(wide, params)[3], instance(wide[:1], params)[0], rtol=1e-13, atol=1e-14)


@first
def test_torch_func_passes_through(instance):
    params, x = _params(instance), _x(3, 5)
    probe = _x(instance.output_dim(5), seed=1)

    def total(x: Tensor, params: phi.Params) -> Tensor:
        return (instance(x, params) * probe).sum()

    block, tensors = instance.block(params)
    (features,), residuals = block.apply((x, *tensors))
    by_hand = block.pullback(residuals, [probe.expand_as(features)])[0]
    by_func = torch.func.vmap(torch.func.grad(total), in_dims=(0, None))(x, params)
    torch.testing.assert_close(by_func, by_hand, rtol=1e-12, atol=1e-13)


SOME = [pytest.param(m, marks=[pytest.mark.slow] if index % 5 else [], id=named(m)) for index, m in enumerate(FIRST)]


@pytest.mark.parametrize("instance", SOME)
def test_one_graph_has_the_same_features(instance):
    params, x = _params(instance), _x(3, 5)
    features = instance(x, params)
    torch._dynamo.reset()
    compiled = torch.compile(instance.__call__, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, params), features, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("instance", HOLDING, ids=named)
def test_a_wrong_number_of_heads_or_a_missing_parameter_is_named(instance):
    params = _params(instance, heads=3)
    with pytest.raises(ShapeError, match="3 heads"):
        instance(_x(2, 4, 5), params)
    with pytest.raises(ConfigError, match=r"init\(d"):
        instance(_x(2, 5), position=params.get("position"))


@pytest.mark.spec("PHI-FAMILY-V2")
def test_a_map_without_a_derivative_is_differentiated_and_says_so():
    assert not SineWave.hand_written()
    assert all(type(instance).hand_written() for instance in ALL if not isinstance(instance, SineWave))

"""A global and a local memory: restarts, projected queries, and the two together."""

import numpy as np
import pytest
import torch

from hecate.cms import CMS, CMSConfig, LevelConfig
from hecate.errors import ConfigError, ShapeError
from hecate.nn import Memory
from hecate.train import load_experiment
from tests.cms.common import DELTA, LEVELS, cms_of, inputs, masks
from tests.cms.test_reference import compare
from tests.nn.layers import near, seeded
from tests.reference import papers_2025
from tests.reference.cms import projected

LOCAL = {
    "name": "local",
    "memory": {**DELTA, "chunk": 3, "feature_map": "elu", "key_norm": "none", "step": "key_normalized"},
    "restart": 6,
    "query_projection": "sum",
}
GLOBAL = {"name": "global", "period": 8, "memory": {**DELTA, "read": "before"}}
LENGTH = 17


def two_scales(projection="sum", **options):
    local = {**LOCAL, "query_projection": projection}
    return cms_of("independent", levels=[local, GLOBAL], **options)


@pytest.mark.spec("CMS-TNT-D1", "CMS-TNT-D2")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("projection", ["none", "sum", "orthogonal"])
def test_against_the_reference(projection, masked):
    given_masks = masks(length=LENGTH, seed=4) if masked else {}
    compare(two_scales(projection), inputs(length=LENGTH), **given_masks)


def spectrum(layer, x, t):
    """Eigenvalues of P_t, seen through the answers to a basis of queries."""
    _, state = layer(x[:, : t + 1])
    return torch.linalg.eigvalsh(state.projection.memory["weight"][0, 0])


@pytest.mark.spec("CMS-TNT-E1")
def test_a_sum_of_projections_is_no_projection():
    options = {"d_key": 4, "conv_kernel": 0, "generator": seeded()}
    own = {"config": {**DELTA, "chunk": 4}, **options}
    layers = {kind: Memory(8, 2, query_projection=kind, **own) for kind in ("sum", "orthogonal")}
    same = inputs(1, 1).expand(1, 4, 8)  # one key four times
    near(spectrum(layers["sum"], same, 3), torch.tensor([0.0, 0.0, 0.0, 4.0]), 1e-9)
    near(spectrum(layers["orthogonal"], same, 3), torch.tensor([0.0, 0.0, 0.0, 1.0]), 1e-9)
    x = inputs(1, 8)
    near(spectrum(layers["orthogonal"], x, 2), torch.tensor([0.0, 1.0, 1.0, 1.0]), 1e-9)
    near(spectrum(layers["orthogonal"], x, 3), torch.ones(4), 1e-9)
    near(spectrum(layers["orthogonal"], x, 4), torch.tensor([0.0, 0.0, 0.0, 1.0]), 1e-9)


@pytest.mark.spec("CMS-TNT-I1")
@pytest.mark.parametrize("projection", ["sum", "orthogonal"])
def test_gradients(projection):
    small = {"heads": 1, "d_key": 2, "d_value": 2, "output_gate": False, "conv_kernel": 0}
    memory = {**DELTA, "chunk": 2}
    own = {"memory": memory, "restart": 4, "query_projection": projection}
    layer = cms_of("independent", levels=[{"name": "local", **own, **small}])
    x = inputs(1, 7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], x, rtol=1e-6, atol=1e-8, fast_mode=True)


@pytest.mark.spec("CMS-TNT-R1", "CMS-TNT-E2")
def test_the_preset_is_the_paper():
    """With one set of projections for both, the reads of its levels add up to those of the paper's recurrence."""
    model = load_experiment("tnt").model
    config = CMSConfig(levels=model.levels, composition=model.composition)
    layer, x = CMS(8, 2, config, generator=seeded()), inputs(1, 150)
    local, far = layer.memories
    generator = seeded(4)
    with torch.no_grad():
        far.load_state_dict(local.state_dict(), strict=False)
        for memory in layer.memories:
            for parameter in (memory.initial.tensors["weight"], *memory.gates.parameters()):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        restart = (torch.arange(150) % 32 == 0).unsqueeze(0)
        asked = local.asked(x, restart_mask=restart)[0], far.asked(x)[0]
        read = [each.scan() for each in asked]
        plain = asked[1]  # the local memory's queries are projected already
        for head in range(2):
            q, k, v = (item[0, :, head].numpy() for item in (plain.q, plain.k, plain.v))
            lr = [each.gates.lr[0, :, head].numpy() for each in asked[::-1]]
            start = [each.initial["weight"][head].numpy() for each in asked[::-1]]
            y, weight, w = papers_2025.tnt(q, k, v, *lr, 64, 8, 32, *start)
            near(read[0][0][0, :, head] + read[1][0][0, :, head], torch.as_tensor(y))
            near(read[1][1].memory["weight"][0, head], torch.as_tensor(weight))
            near(read[0][1].memory["weight"][0, head], torch.as_tensor(w))
        near(layer(x)[0], local.read_out(x, read[0][0]) + far.read_out(x, read[1][0]))


REFUSED = [
    ({"feature_map": "cosformer"}, "positions"),
    ({"feature_map": "elu", "normalizer": "sum"}, "negative weights"),
    ({"on_nonfinite": "skip"}, "may leave out tokens"),
]


@pytest.mark.spec("CMS-TNT-I2")
def test_refused_projections():
    for memory, match in REFUSED:
        with pytest.raises(ConfigError, match=match):
            LevelConfig(name="a", memory=memory, query_projection="sum")
        with pytest.raises(ConfigError, match=match):
            Memory(8, 2, memory, query_projection="orthogonal")


@pytest.mark.spec("CMS-TNT-I2")
def test_refused_restarts_and_states():
    with pytest.raises(ConfigError, match="cut a chunk of 4 tokens short"):
        LevelConfig(name="a", period=4, restart=6)
    nested = [{"name": "a", "restart": 2}, {"name": "b", "period": 2}]
    with pytest.raises(ConfigError, match="its own starting weights"):
        cms_of("nested", levels=nested)
    layer, plain = two_scales(), cms_of("independent", levels=LEVELS[:2])
    _, state = plain(inputs())
    with pytest.raises(ShapeError, match=r"state\.projection is None"):
        layer.memories[0](inputs(), state.levels[0])
    with pytest.raises(ShapeError, match=r"restart_mask must be bool \[B, T\]"):
        layer.memories[0](inputs(), restart_mask=torch.ones(2, 11))


def test_the_reference_projects():
    """Its two projections agree where keys are orthogonal."""
    keys, q = list(np.eye(4)[:2] * 3.0), np.array([1.0, 2.0, 3.0, 4.0])
    assert np.allclose(projected("sum", keys, q), [1, 2, 0, 0])
    assert np.allclose(projected("orthogonal", keys, q), [1, 2, 0, 0])

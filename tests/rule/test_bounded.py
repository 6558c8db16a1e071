"""Memories of few slots against numpy transcriptions of Lattice and Trellis."""

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.errors import ConfigError
from hecate.structure import Slots, TwoPass
from tests.reference import bounded as reference

T, M, V, D = 40, 4, 3, 5


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def batched(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)[None, :, None]


def gates() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(9)
    return 0.1 + 0.3 * generator.random(T), 0.6 + 0.4 * generator.random(T)


@pytest.mark.spec("STR-SLOTS-D1")
def test_slots_turn_as_in_lattice():
    k, q, v = drawn(T, M), drawn(M, T).T.copy(), drawn(T, V)
    lr, retain = gates()
    config = MemoryConfig(structure="slots", retention="decay", state_dtype="float64")
    start = Slots().init(M, V, dtype=torch.float64)
    columns = start["weight"][0].numpy()
    expected, slots = reference.lattice(columns.T, k, q, v, lr, retain, sphere=False)
    y, state = memory_scan(config, batched(q), batched(k), batched(v), Gates(batched(lr), batched(retain)))
    # eps = 1e-6 in |s| against slots of length about 1.
    np.testing.assert_allclose(y[0, :, 0].numpy(), expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.memory["weight"][0, 0].numpy().T, slots, rtol=0, atol=1e-10)


@pytest.mark.spec("STR-SLOTS-I1")
def test_a_write_is_across_its_slots():
    generator = torch.Generator().manual_seed(0)
    memory, p, u = (torch.randn(6, *shape, generator=generator, dtype=torch.float64) for shape in ((V, M), (M,), (V,)))
    (grad,) = Slots().pullback((memory,), p, u)
    assert float((grad * memory).sum(1).abs().max()) < 1e-10 and float(grad.norm()) > 1


@pytest.mark.spec("STR-TWO-D1")
@pytest.mark.parametrize("link", ["silu", "softmax", "identity"])
def test_two_passes_as_in_trellis(link):
    w, a, q, v = drawn(T, D), drawn(T, M), drawn(D, T).T.copy(), drawn(T, V)
    lr, retain = 0.3 * gates()[0], gates()[1]
    structure = TwoPass(codes=M, link=link)
    start = structure.init(D + M, V, dtype=torch.float64)
    keys, values = (item[0].numpy() for item in start.values())
    expected, keys, values = reference.trellis(link, keys, values, w, a, q, v, lr, retain)
    config = MemoryConfig(structure=structure, retention="decay", state_dtype="float64")
    asked = np.concatenate([q, np.full((T, M), np.pi)], 1)  # the code of a query is not looked at
    y, state = memory_scan(
        config, batched(asked), batched(np.concatenate([w, a], 1)), batched(v), Gates(batched(lr), batched(retain))
    )
    np.testing.assert_allclose(y[0, :, 0].numpy(), expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.memory["w_key"][0, 0].numpy(), keys, rtol=0, atol=1e-10)
    np.testing.assert_allclose(state.memory["w_value"][0, 0].numpy(), values, rtol=0, atol=1e-10)


@pytest.mark.spec("STR-TWO-R1")
def test_with_the_identity_each_pass_is_a_gated_delta_rule():
    w, a, v = (batched(drawn(*shape)) for shape in ((T, D), (T, M), (T, V)))
    lr, retain = (batched(gate) for gate in (0.1 * gates()[0], gates()[1]))
    fields = {"retention": "decay", "decay_order": "before_gradient", "state_dtype": "float64"}
    structure = TwoPass(codes=M, link="identity")
    both = torch.cat([w, a], -1)
    config = MemoryConfig(structure=structure, **fields)
    _, state = memory_scan(config, both, both, v, Gates(lr, retain))
    start = structure.init(D + M, V, dtype=torch.float64)
    for name, key, value in (("w_key", w, a), ("w_value", a, v)):
        one = {"weight": start[name]}
        delta = MemoryConfig(**fields)
        _, alone = memory_scan(delta, key, key, value, Gates(lr, retain), initial=one)
        torch.testing.assert_close(state.memory[name], alone.memory["weight"], rtol=1e-11, atol=1e-11)


def test_codes_leave_room_for_keys():
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ConfigError, match="codes=4 takes that many of the d_phi=4"):
        memory_scan(MemoryConfig(structure=TwoPass(codes=4)), x, x, x)

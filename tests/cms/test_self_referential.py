"""Self-referential memories: the numpy reference, any split, and what the errata claim."""

import copy
import warnings
from itertools import product

import numpy as np
import pytest
import torch

from hecate import MemoryConfig
from hecate.cms import SelfReferenceConfig, SelfReferential
from hecate.errors import ConfigError, ShapeError, StabilityWarning
from hecate.nn import Memory
from tests.nn.layers import in_pieces, leaves, near, seeded, shaken
from tests.reference import memory as ref
from tests.reference import self_referential as reference

D_MODEL, HEADS, LENGTH = 6, 2, 9
EVERY = ("k", "v", "q", "lr", "retain")
MLP = {
    "structure": {"kind": "mlp", "residual": True, "expansion": 1, "activation": "silu"},
    "algorithm": {"kind": "momentum", "lr": 0.2},
    "retention": "decay",
}

# The layer's config, and the rule as the reference has it.
CASES = {
    "delta": ({}, {}),
    "chunks": ({"memory": {"chunk": 4}}, {"chunk": 4}),
    "far": ({"chunk": 3}, {}),
    "near": ({"memory": {"chunk": 4}, "chunk": 1}, {"chunk": 4}),
    "apart": ({"memory": {"chunk": 2}, "chunk": 3}, {"chunk": 2}),
    "commit": ({"memory": {"chunk": 3, "commit": "chunk"}}, {"chunk": 3, "commit": "chunk"}),
    "all": ({"adaptive": EVERY, "chunk": 2}, {}),
    "few": ({"adaptive": ("lr",), "chunk": 2}, {}),
    "before": (
        {"memory": {"read": "before", "algorithm": {"kind": "gd", "lr": 0.3}}, "qk_norm": "rms"},
        {"read": "before"},
    ),
    "order": ({"memory": {"decay_order": "before_gradient"}, "chunk": 2}, {"decay_order": "before_gradient"}),
    "order in chunks": (
        {"memory": {"decay_order": "before_gradient", "chunk": 4}, "chunk": 2},
        {"decay_order": "before_gradient", "chunk": 4},
    ),
    "order at commits": (
        {"memory": {"decay_order": "before_gradient", "chunk": 3, "commit": "chunk"}},
        {"decay_order": "before_gradient", "chunk": 3, "commit": "chunk"},
    ),
    "momentum": ({"memory": {"algorithm": {"kind": "momentum", "lr": 0.3}}, "chunk": 2}, {"momentum": True}),
    "huber": (
        {"memory": {"bias": {"kind": "huber", "delta": 0.3}, "key_norm": "l2"}, "chunk": 2},
        {"bias": "huber", "delta": 0.3, "key_norm": "l2"},
    ),
    "dot": ({"memory": {"bias": "dot"}, "input_norm": "none"}, {"bias": "dot"}),
    "elu": (
        {"memory": {"feature_map": "elu", "step": "normalized", "query_scale": "key_dim"}},
        {"phi": ref.elu, "step": "normalized", "query_scale": "key_dim"},
    ),
    "deep": (
        {"memory": {**MLP, "chunk": 3}},
        {"residual": True, "momentum": True, "activation": "silu", "chunk": 3, "towards": "start"},
    ),
}


def config_of(case="delta", **fields):
    own = copy.deepcopy(CASES[case][0])
    memory = {"retention": "decay", **own.pop("memory", {}), **fields.pop("memory", {})}
    return SelfReferenceConfig.model_validate({"memory": memory, **own, **fields})


def layer_of(config, *, seed=0, shake=0.3, **options):
    """A layer whose parameters are off their starting values, so that gates differ by token."""
    place = {"generator": seeded(seed), "dtype": torch.float64}
    return shaken(SelfReferential(D_MODEL, HEADS, config, **place, **options), seed + 1, 2 * shake)


def inputs(batch=2, length=LENGTH, seed=2):
    shape = (batch, length, D_MODEL)
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def masks(batch=2, length=LENGTH, seed=4):
    source = seeded(seed)
    write, reset = (torch.rand(batch, length, generator=source) < p for p in (0.7, 0.2))
    return {"write_mask": write, "reset_mask": reset}


def numpy_of(layer):
    """The layer's parameters for the reference."""

    def array(tensor):
        return None if tensor is None else tensor.detach().numpy()

    boxes, gate = layer.boxes, layer.boxes.gate_weight
    heads = [
        {
            "boxes": {box: [array(w[h]) for w in held.tensors.values()] for box, held in boxes.initial.items()},
            "gate_weight": {name: array(w[h]) for name, w in gate.items()},
            "gate_bias": {name: array(b[h]) for name, b in boxes.gate_bias.items()},
        }
        for h in range(layer.heads)
    ]
    return {
        "into": array(layer.into.weight),
        "conv": None if layer.conv is None else array(layer.conv.weight),
        "out": array(layer.out.weight),
        "output_gate": None if layer.output_gate is None else array(layer.output_gate.weight),
        "norm": array(layer.norm),
        "heads": heads,
    }


def setting_of(case, config):
    return reference.Setting(
        ref.Rule(decay=True, **CASES[case][1]),
        config.boxes,
        config.moving,
        config.phase,
        config.erase,
        config.period,
        config.memory.algorithm.lr,
        config.qk_norm,
        config.input_norm,
    )


def same_as_reference(case, layer, x, **masks):
    setting, params = setting_of(case, layer.config), numpy_of(layer)
    with torch.no_grad():
        y, state = layer(x, **masks)
    held = {name: w.unflatten(1, (-1, HEADS)) for name, w in state.boxes.memory.items()}
    for row in range(len(x)):
        own = [None if mask is None else mask[row].numpy() for mask in masks.values()]
        expected, after = reference.layer(setting, params, x[row].numpy(), *own)
        near(y[row], torch.from_numpy(expected), 1e-12, "y")
        for h in range(HEADS):
            for at, box in enumerate(layer.boxes.written):
                mine = [weight[row, at, h] for weight in held.values()]
                near(mine, [torch.from_numpy(w) for w in after[h][box]], 1e-12, box)


@pytest.mark.spec("SELF-BOX-D1", "SELF-STEP-D1", "SELF-CHUNK-D1", "SELF-ERASE-D1")
@pytest.mark.parametrize("case", CASES)
def test_is_the_reference(case):
    ways = ("once", "twice") if case in ("delta", "far", "all", "momentum", "before") else ("once",)
    for erase, phase in product(ways, (1, 2, 3)):
        if phase > 1 or "adaptive" not in CASES[case][0]:  # phase 1 has no adaptive boxes
            given = masks() if phase == 3 else {}
            same_as_reference(case, layer_of(config_of(case, phase=phase, erase=erase)), inputs(), **given)


@pytest.mark.spec("SELF-ERASE-E1")
@pytest.mark.parametrize(("erase", "end"), [("once", 1.0), ("twice", 0.5)])
def test_where_repeated_writes_end(erase, end):
    layer = layer_of(config_of(phase=1, erase=erase, memory={"retention": "none"}), conv_kernel=0)
    x = inputs(1, 1)
    _, state = layer(x.expand(1, 400, D_MODEL))
    told = layer.boxes.read_static(layer.boxes.input_features(layer.into(x).unflatten(-1, (HEADS, -1))))
    k = layer.boxes.features(torch.nn.functional.normalize(told["k"], dim=-1))
    (answer,) = layer.boxes.read(state.boxes.memory, k)
    near(answer, end * told["v"], 1e-9)


@pytest.mark.spec("SELF-LAYER-I2", "SELF-CHUNK-D1")
@pytest.mark.parametrize("given", [{}, masks()], ids=["plain", "masked"])
def test_without_a_convolution_and_an_output_gate(given):
    layer = layer_of(config_of("apart"), conv_kernel=0, output_gate=False)
    same_as_reference("apart", layer, inputs(), **given)


@pytest.mark.spec("SELF-LAYER-I2")
@pytest.mark.parametrize("case", ["delta", "chunks", "commit", "deep"])
def test_engines_agree(case):
    config, x = config_of(case), inputs(length=14)
    y, state = layer_of(config)(x)
    for engine in ("sequential", *(["chunk"] if config.memory.chunk > 1 else [])):
        for autodiff in ("tape", "torch"):
            mine, after = layer_of(config, engine=engine, autodiff=autodiff)(x)
            near([mine, leaves(after)], [y, leaves(state)], 1e-12, f"{engine}, {autodiff}")


@pytest.mark.spec("SELF-CHUNK-E2")
def test_a_query_box_that_is_written_and_not_read_changes_nothing():
    boxes = ("k", "v", "lr", "retain")
    layer, written = (layer_of(config_of(adaptive=own)) for own in (boxes, EVERY))
    y, state = layer(inputs())
    _, after = written(inputs())
    of_q = written.boxes.written.index("q")
    mine, others = (s.boxes.memory["weight"].unflatten(1, (-1, HEADS)) for s in (state, after))
    moved = others[:, of_q] - written.boxes.initial["q"].tensors["weight"]
    assert moved.abs().max() > 0.1
    near(torch.cat([others[:, :of_q], others[:, of_q + 1 :]], 1), mine, 1e-12)
    assert y.isfinite().all()


@pytest.mark.spec("SELF-LAYER-D1")
@pytest.mark.parametrize("chunk", [1, 3])
def test_phase_1_is_a_plain_memory(chunk):
    config = config_of(phase=1, memory={"chunk": chunk, "algorithm": "momentum"})
    mine = layer_of(config, conv_kernel=0)
    mine.config = config.model_copy(update={"input_norm": "none"})
    mine.boxes.config = mine.config
    plain = Memory(D_MODEL, HEADS, config.memory, conv_kernel=0, dtype=torch.float64)
    box = {name: held.tensors["weight"] for name, held in mine.boxes.initial.items()}
    into = mine.into.weight.unflatten(0, (HEADS, -1))
    with torch.no_grad():
        plain.qkv.weight.copy_(torch.cat([(box[name] @ into).flatten(0, 1) for name in "qkv"]))
        plain.initial.copy_({"weight": box["memory"]})
        plain.out.weight.copy_(mine.out.weight)
        plain.norm.copy_(mine.norm)
        plain.output_gate.weight.copy_(mine.output_gate.weight)
        for gate, weight in mine.boxes.gate_weight.items():
            rows = (weight.unsqueeze(1) @ box[gate] @ into).squeeze(1)
            plain.gates.weight[gate].copy_(rows)
            plain.gates.bias[gate].copy_(mine.boxes.gate_bias[gate])
    (y, state), (expected, after) = mine(inputs()), plain(inputs())
    near([y, state.boxes.memory], [expected, after.memory.memory], 1e-12)


@pytest.mark.spec("SELF-LAYER-I1")
@pytest.mark.parametrize("fields", [{}, {"chunk": 2}, {"erase": "twice", "chunk": 2}])
def test_gradients_are_finite_differences(fields):
    config = config_of(**fields)
    layer = SelfReferential(4, 2, config, generator=seeded(), dtype=torch.float64)
    x = torch.randn(1, 3, 4, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    start = layer(x.detach())[1].detach()
    flat = [w.clone().requires_grad_() for w in start.boxes.memory.values()]

    def run(x, weight, *parameters):
        boxes = start.boxes._replace(memory={"weight": weight})
        own = dict(zip(names, parameters, strict=True))
        y, after = torch.func.functional_call(layer, own, (x, start._replace(boxes=boxes)))
        return y, after.boxes.memory["weight"]

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *flat, *parameters), fast_mode=True)


@pytest.mark.spec("SELF-START-I1")
@pytest.mark.parametrize("case", ["delta", "chunks", "momentum", "deep"])
def test_every_parameter_learns_from_the_start(case):
    for phase in (1, 2, 3):
        layer = layer_of(config_of(case, phase=phase), shake=0.0)
        y, _ = layer(inputs())
        weight = torch.randn(y.shape, generator=seeded(5), dtype=torch.float64)
        (y * weight).sum().backward()
        assert not [n for n, p in layer.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.spec("SELF-START-E1")
@pytest.mark.parametrize("phase", [2, 3])
def test_from_zero_nothing_ever_learns(phase):
    layer = layer_of(config_of(phase=phase), shake=0.0)
    with torch.no_grad():
        for parameter in layer.boxes.initial.parameters():
            parameter.zero_()
    y, _ = layer(inputs(length=20))
    y.sum().backward()
    assert not y.any()
    assert not any(p.grad.any() for p in layer.parameters())


@pytest.mark.spec("SELF-START-I1")
@pytest.mark.parametrize("phase", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_learns_to_recall(phase):
    # Four of eight keys, each with one of eight values, then the keys again in another order.
    width, pairs, one_hot = 8, 4, torch.eye(8)
    layer = SelfReferential(2 * width, 1, {"phase": phase, "chunk": 2}, conv_kernel=0, generator=seeded())
    optimiser = torch.optim.Adam(layer.parameters(), lr=3e-2)
    source, losses = seeded(1), []
    for _ in range(80):
        keys, values = torch.rand(2, 32, width, generator=source).argsort(-1)[..., :pairs]
        order = torch.randperm(pairs, generator=source)
        told = torch.cat([one_hot[keys], one_hot[values]], -1)
        asked = torch.cat([one_hot[keys], torch.zeros(32, pairs, width)], -1)[:, order]
        y, _ = layer(torch.cat([told, asked], 1))
        logits, truth = y[:, pairs:, :width].flatten(0, 1), values[:, order].flatten()
        loss = torch.nn.functional.cross_entropy(logits, truth)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    # Guessing among the four values told costs log 4 = 1.39.
    assert np.mean(losses[:5]) > 1.9
    assert np.mean(losses[-10:]) < 0.3


@pytest.mark.spec("SELF-ONE-R1")
@pytest.mark.parametrize("case", ["far", "chunks", "momentum", "all"])
def test_boxes_of_phase_3_move_as_one_and_those_of_phase_2_differ_by_what_they_started_with(case):
    for phase in (2, 3):
        layer = layer_of(config_of(case, phase=phase))
        _, state = layer(inputs())
        start = layer.boxes.start["weight"].unflatten(0, (-1, HEADS))
        end = state.boxes.memory["weight"].unflatten(1, (-1, HEADS))
        if phase == 2:
            start, end = start[1:] - start[:-1], end[:, 1:] - end[:, :-1]
        shared = torch.linalg.solve(start, end)
        near(shared, shared[:, :1].expand_as(shared), 1e-9)
        assert phase == 2 or (shared - torch.eye(3)).abs().max() > 0.01


@pytest.mark.spec("SELF-BOX-I1")
@pytest.mark.parametrize("norm", ["l2", "none"])
def test_without_a_norm_boxes_grow_without_bound(norm):
    fields = {"input_norm": norm, "adaptive": ("k", "v"), "memory": {"retention": "none"}}
    config = config_of(phase=2, **fields)
    layer = layer_of(config, shake=0.0, conv_kernel=0)
    with torch.no_grad():
        layer.into.weight.copy_(2 * torch.eye(D_MODEL))
        for box in layer.boxes.initial.values():
            box.tensors["weight"].copy_(torch.eye(D_MODEL // HEADS).expand(HEADS, -1, -1))
    x = inputs(1, 1).expand(1, 40, D_MODEL)
    _, state = layer(x)
    size = state.boxes.memory["weight"].abs().max()
    assert size <= 1 + 1e-9 if norm == "l2" else size > 1e3


@pytest.mark.spec("SELF-BOX-D1")
def test_a_head_has_its_own_phi():
    rule = {"feature_map": {"kind": "linear", "d_phi": 4}, "key_norm": "l2"}
    layer, held = layer_of(config_of("far", memory=rule)), []
    for _ in range(2):
        _, state = layer(inputs())
        held.append(state.boxes.memory["weight"].unflatten(1, (-1, HEADS)))
        with torch.no_grad():
            for parameter in layer.boxes.phi_learned.parameters():
                parameter[0] += 1
    assert torch.equal(held[0][:, :, 1], held[1][:, :, 1])
    assert not torch.allclose(held[0][:, :, 0], held[1][:, :, 0])


@pytest.mark.spec("SELF-CHUNK-I1")
@pytest.mark.parametrize("phase", [2, 3])
def test_long_chunks_of_projections_are_stable_where_gradients_are_not(phase):
    sizes = {}
    for chunk in (1, 64):
        fields = {"memory": {"chunk": chunk}, "chunk": 64, "phase": phase}
        layer = SelfReferential(32, 1, fields, generator=seeded())
        with torch.no_grad():
            _, state = layer(torch.randn(1, 512, 32, generator=seeded(1)))
        sizes[chunk] = state.boxes.memory["weight"].norm(dim=(-1, -2)).max()
    assert sizes[1] < 20
    assert sizes[64] > 1e3


@pytest.mark.spec("SELF-LAYER-I2")
@pytest.mark.parametrize("case", ["far", "delta"])
def test_second_derivatives(case):
    layer, x = layer_of(config_of(case)), inputs(1, 4)
    weight = layer.out.weight
    (first,) = torch.autograd.grad(layer(x)[0].square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), layer.boxes.gate_bias["lr"])
    assert second.abs().max() > 0


BAD_CONFIGS = [
    ({"memory": {"feature_map": "elu", "normalizer": "sum"}}, "memory.normalizer"),
    ({"memory": {"feature_map": {"kind": "cosformer", "max_length": 9}}}, "memory.feature_map"),
    ({"memory": {"writes": 2}}, "memory.writes: writes=2: a box answers a token with one key and one value"),
    ({"memory": {"gating": "comba"}}, "memory.gating: gating 'comba': boxes make the gates, of their answers"),
    ({"phase": 1, "adaptive": ("k",)}, "phase 1 keeps projections"),
    ({"adaptive": ("k", "k")}, "each box once"),
    ({"memory": {"retention": "none"}, "adaptive": ("retain",)}, "'retain' is no box"),
    ({"adaptive": ("momentum",)}, "'momentum' is no box"),
    ({"memory": MLP, "erase": "twice"}, "use structure 'matrix'"),
    ({"memory": {"bias": "dot"}, "erase": "twice"}, "bias 'l2' and erase='once'"),
    ({"memory": {"algorithm": "rls"}, "erase": "twice"}, "algorithm 'rls'"),
    ({"memory": {"decay_order": "before_gradient"}, "erase": "twice"}, "decay_order"),
    (
        {"memory": {"key_norm": "l2", "algorithm": {"kind": "gd", "lr": 1.5}}, "erase": "twice"},
        "can reach 3, .* use an lr of at most 1, or",
    ),
    ({"chunk": 0}, "chunk"),
    ({"phase": 4}, "phase"),
    ({"adaptive": ("x",)}, "adaptive"),
]


@pytest.mark.spec("SELF-CONFIG-D1")
def test_what_cannot_be_is_refused_by_name():
    for fields, message in BAD_CONFIGS:
        with pytest.raises(ConfigError, match=message):
            config_of(**fields)


@pytest.mark.spec("SELF-ERASE-D1")
def test_a_step_that_may_diverge_warns():
    rule = {"algorithm": {"kind": "gd", "lr": 1.2}}
    SelfReferential(6, 2, {"memory": rule}).forward(torch.randn(1, 3, 6))
    with pytest.warns(StabilityWarning, match="'m'.*times 2 erases reaches 2.4 .*set key_norm"):
        SelfReferential(6, 2, {"memory": rule, "erase": "twice"}, name="m")
    with pytest.warns(StabilityWarning, match=r"'m \(features\)'"):
        SelfReferential(6, 2, name="m", feature_memory=MemoryConfig(feature_map="elu"))


@pytest.mark.spec("SELF-LAYER-I2")
def test_bad_sizes_and_inputs_are_refused():
    with pytest.raises(ConfigError, match="not divisible"):
        SelfReferential(7, 2)
    with pytest.raises(ConfigError, match="conv_kernel"):
        SelfReferential(6, 2, conv_kernel=1)
    with pytest.raises(ConfigError, match="engine"):
        SelfReferential(6, 2, {"memory": MLP}, engine="parallel")
    layer, x = layer_of(config_of("chunks")), inputs()
    _, state = layer(x)
    bad = {
        "x must be": (x[0], None),
        "x is torch.float32": (x.float(), None),
        "SelfReferentialState": (x, state.boxes),
        r"state.position must be \[1\]": (x[:1], state),
        "state.conv must be": (x, state._replace(conv=None)),
        r"state.anchor\['weight'\] must be": (x, state._replace(anchor={})),
        "state.features is a state": (x, state._replace(features=state.boxes)),
        r"state.boxes.memory\['weight'\] must be": (x, state._replace(boxes=cut(state.boxes))),
    }
    for message, given_ in bad.items():
        with pytest.raises(ShapeError, match=message):
            layer(*given_)
    with pytest.raises(ShapeError, match="reset_mask must be bool"):
        layer(x, reset_mask=torch.zeros(2, LENGTH))


def cut(boxes):
    return boxes._replace(memory={name: w[:, :-1] for name, w in boxes.memory.items()})


@pytest.mark.spec("SELF-CONFIG-D1")
def test_config_is_a_value():
    config = SelfReferenceConfig.model_validate(
        {"memory": {"kind": "titans", "chunk": 16}, "adaptive": ["q", "k"], "erase": "once"}
    )
    assert (config.period, config.moving, config.anchored) == (16, ("k", "q"), True)
    assert config.boxes == ("k", "v", "q", "lr", "retain", "momentum")
    again = SelfReferenceConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert SelfReferenceConfig().moving == ("k", "v", "lr", "retain")
    assert SelfReferenceConfig(phase=1).moving == ()
    assert "phase=3" in repr(SelfReferential(4, 1))


@pytest.mark.parametrize("structure", ["vector", "slots", {"kind": "gated_mlp"}, {"kind": "two_pass", "codes": 1}])
@pytest.mark.spec("SELF-BOX-D1")
def test_any_structure(structure):
    rule = {"structure": structure, "chunk": 2, "algorithm": {"kind": "gd", "lr": 0.3}}
    layer = layer_of(config_of(memory=rule), shake=0.0)
    y, state = layer(inputs())
    mine, after = in_pieces(layer, inputs(), [3])
    near([mine, leaves(after)], [y, leaves(state)], 1e-12)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("retention", ["kl", "sphere", "bounded", "elastic_net", "lq"])
@pytest.mark.spec("SELF-BOX-D1")
def test_any_retention_starts_where_it_says(retention):
    with warnings.catch_warnings():
        layer = layer_of(config_of(phase=2, chunk=2, memory={"retention": retention}))
    y, state = layer(inputs())
    mine, after = in_pieces(layer, inputs(), [1, 4])
    near([mine, leaves(after)], [y, leaves(state)], 1e-12)
    still = layer_of(config_of(phase=1, memory={"retention": retention}))
    near(still(inputs())[0][:, :2], y[:, :2], 1e-12)
    knob, boxes = config_of(memory={"retention": retention}).memory.retention, still.boxes
    phi = boxes.input_features(torch.randn(1, 1, HEADS, D_MODEL // HEADS, generator=seeded(3)))
    weights = knob.weights(knob.start(boxes.initial["q"].tensors["weight"]))
    answer = torch.einsum("hvp,bthp->bthv", weights, phi)
    near(boxes.read_static(phi)["q"], answer, 1e-12)


def test_a_subclass_draws_its_own_parameters_once_it_has_them():
    class Scaled(SelfReferential):
        def __init__(self):
            super().__init__(8, 2)
            self.scale = torch.nn.Linear(8, 8)

        def reset_parameters(self, generator=None):
            super().reset_parameters(generator)
            torch.nn.init.ones_(self.scale.weight)

    layer = Scaled()
    layer.reset_parameters(seeded(0))
    assert bool((layer.scale.weight == 1).all())

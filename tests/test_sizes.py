"""No size of any config, feature map or layer is built before arithmetic has found that it fits."""

from __future__ import annotations

import importlib
import pkgutil
from itertools import product
from typing import Any, Literal, get_args

import annotated_types
import pytest
import torch
from pydantic.fields import FieldInfo

import hecate
from hecate import MemoryConfig, algorithm, nn, phi, structure
from hecate.checks import MAX_SIZE, readable
from hecate.cms import CMS, LevelConfig, SelfReferenceConfig, SelfReferential
from hecate.errors import ConfigError
from hecate.models import LanguageModelConfig, LinearTransformer
from hecate.train import ExperimentConfig
from hecate.variant import Config, Variant
from tests.clock import within
from tests.registries import shipped_kinds

for module in pkgutil.walk_packages(hecate.__path__, "hecate."):
    # Kernels for a GPU import Triton, and define no configs.
    if not module.name.endswith("__main__") and not module.name.startswith("hecate.engine.triton."):
        importlib.import_module(module.name)


def configs(root: type[Config] = Config) -> list[type[Config]]:
    found = [item for item in root.__subclasses__() if item.__module__.startswith("hecate.")]
    return [*found, *(below for item in found for below in configs(item))]


# by files, whose sizes are what they hold
HELD = ("hecate.train.state", "hecate.train.checkpoint", "hecate.data.shards", "hecate.data.tokenize")
CONCRETE = sorted(
    {c for c in configs() if not (issubclass(c, Variant) and c.is_family()) and c.__module__ not in HELD},
    key=lambda c: (c.__module__, c.__qualname__),
)
REQUIRED = {"maps": ("elu", "relu"), "inner": "elu", "name": "a", "paths": ("a",)} | {
    "levels": ({"name": "a"},), "link": "identity", "data": {"kind": "parity"},
}  # fmt: skip


SIZES = (10**9, 10**12, 10**400)


def integers(annotation: Any, metadata: list[Any]) -> list[list[Any]]:
    """The bounds of every int in an annotation."""
    if annotation is int:
        return [metadata]
    bounds = []
    for part in get_args(annotation) if annotation is not Literal else ():
        inner = getattr(part, "__metadata__", ())
        own = [x for m in inner for x in (m.metadata if isinstance(m, FieldInfo) else [m])]
        bare = get_args(part)[0] if inner else part
        bounds += integers(bare, [*own, *metadata])
    return bounds


FIELDS = [
    (config, name)
    for config in CONCRETE
    for name, field in config.model_fields.items()
    if integers(field.annotation, field.metadata)
]


def test_every_integer_of_every_config_has_an_end():
    assert len(CONCRETE) > 100 and len(FIELDS) > 70
    for config, name in FIELDS:
        field = config.model_fields[name]
        for bounds in integers(field.annotation, field.metadata):
            ends = [b for b in bounds if isinstance(b, annotated_types.Le | annotated_types.Lt)]
            assert ends, f"{config.__name__}.{name}: annotate it with a type of hecate.checks"


FREE = {  # nothing is allocated or repeated for them
    "seed", "period", "chunk", "restart", "max_length", "max_d_phi", "max_bytes", "window_size",
    "facts", "steps", "warmup", "eval_every", "checkpoint_every", "keep", "every", "slow_period",
}  # fmt: skip


def required(config: type[Config]) -> dict[str, Any]:
    return {name: REQUIRED.get(name, 4) for name, info in config.model_fields.items() if info.is_required()}


@pytest.mark.spec("VAR-SIZE-I1")
@pytest.mark.parametrize("huge", SIZES, ids=str)
def test_a_huge_integer_is_refused_by_its_name_or_costs_nothing(huge):
    for config, name in FIELDS:
        with within(0.2):
            try:
                config(**{**required(config), name: huge})
            except ConfigError as error:
                assert any(name in problem.path for problem in error.problems), f"{config.__name__}: {error}"
                assert len(str(error)) < 1000
            else:
                assert name in FREE and huge < 1 << 63, f"{config.__name__}.{name}"


def refused(build, *words: str) -> None:
    with within(0.2), pytest.raises(ConfigError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.spec("VAR-SIZE-I1")
@pytest.mark.parametrize("size", [10**9, 10**12])
def test_layers_refuse_widths_before_they_are_built(size):
    refused(lambda: nn.Memory(size, 1), "d_model")
    refused(lambda: nn.Memory(64, size, d_key=1, d_value=1 << 12), "heads")
    refused(lambda: nn.Memory(64, 4, d_key=size), "d_key")
    refused(lambda: nn.Memory(64, 4, d_value=size, conv_kernel=size), "lower")
    refused(lambda: nn.LinearAttention(size, 1), "d_model")
    refused(lambda: nn.LinearAttention(1 << 13, 1, causal=False, d_context=size), "lower")
    refused(lambda: nn.PerformerAttention(size, 1), "d_model")
    refused(lambda: nn.SlidingAttention(size, 1, window=4), "d_model")
    refused(lambda: nn.SlidingAttention(1 << 12, 1, window=None, persistent=size), "persistent")
    refused(lambda: CMS(size, 1, {"levels": [{"name": "a"}]}), "d_model")
    refused(lambda: SelfReferential(size, 1), "d_model")
    refused(lambda: LinearTransformer.build(embed_dim=4, hidden_size=size), "hidden_size")
    refused(lambda: LinearTransformer.param_count(embed_dim=4, num_layers=size), "num_layers")


@pytest.mark.spec("VAR-SIZE-I1")
def test_feature_maps_refuse_widths_before_they_draw():
    for (kind, variant), size in product(shipped_kinds(phi.FeatureMap).items(), SIZES):
        made = variant(**required(variant))
        refused(lambda made=made, size=size: made.output_dim(size), kind, "lower d_model or d_key")
        refused(lambda made=made, size=size: made.init(size), kind)
        refused(lambda made=made, size=size: made.init(8, heads=size), "heads")


@pytest.mark.spec("VAR-SIZE-I1")
@pytest.mark.parametrize("kind", sorted(shipped_kinds(phi.FeatureMap)))
def test_shapes_are_those_that_init_gives_and_none_is_drawn_without_storage(kind, monkeypatch):
    variant = phi.FeatureMap.variants()[kind]
    fields = required(variant)
    for own in (fields, fields | {"coefficients": "learned"}, fields | {"form": "paired"}):
        try:
            feature_map = variant(**own)
        except ConfigError:
            continue
        params = feature_map.init(6, heads=2)
        both = params["learned"] | params["frozen"]
        expected = {name: (2, *shape) for name, shape in feature_map.shapes(6).items()}
        assert {name: tuple(item.shape) for name, item in both.items()} == expected
        with monkeypatch.context() as patch:
            for name in ("randn", "rand", "randint", "multinomial"):
                patch.setattr(torch, name, lambda *_, **__: pytest.fail("draws"))
            bare = feature_map.init(6, heads=2, device="meta")
        for group in ("learned", "frozen"):
            assert bare[group].keys() == params[group].keys()
            for name, item in bare[group].items():
                assert item.is_meta and item.shape == params[group][name].shape


def test_large_draws_are_counted_first():
    wide = phi.RandomFourier(d_phi=MAX_SIZE, orthogonal=True)
    refused(lambda: wide.init(1 << 12), "'w'", "16 GiB", "8 GiB", "lower heads, d_key")
    refused(lambda: phi.Hedgehog().init(MAX_SIZE), "4 TiB")
    many = {"heads": 64, "device": "meta"}
    refused(lambda: phi.Linear(d_phi=1 << 16).init(1 << 12, **many), "[64, 4096, 65536]", "64 GiB")
    refused(lambda: phi.Concat(maps=(phi.Linear(d_phi=MAX_SIZE),) * 4).init(1 << 12), "'0.weight'")


def test_a_user_s_own_map_and_structure_are_held_to_it():
    class Blown(phi.FeatureMap):
        """blown: as wide as told."""

        kind: Literal["blown"] = "blown"
        factor: int = 10**9

        def output_dim(self, d: int) -> int:
            return d * self.factor

    try:
        refused(lambda: Blown().output_dim(4), "'blown'", "4000000000")
        refused(lambda: Blown().init(4), "'blown'")
        refused(lambda: nn.Memory(8, 2, MemoryConfig(feature_map="blown")), "'blown'")
        assert Blown(factor=2).output_dim(4) == 8
        with pytest.raises(ConfigError, match="whole number"):
            Blown.model_construct(kind="blown", factor=0.5).output_dim(4)
    finally:
        del phi.FeatureMap._registry["blown"]


def test_structures_refuse_widths_before_they_draw():
    for variant in shipped_kinds(structure.Structure).values():
        refused(lambda variant=variant: variant().init(MAX_SIZE, MAX_SIZE, heads=MAX_SIZE), "TiB")


@pytest.mark.spec("VAR-SIZE-I1")
def test_states_of_algorithms_are_counted():
    wide = {"kind": "linear", "d_phi": MAX_SIZE}
    rls = MemoryConfig(feature_map=wide, algorithm=algorithm.RLS())
    refused(lambda: nn.Memory(8, 1, rls), "'inverse'", "4 TiB", "'rls'")
    refused(lambda: LanguageModelConfig(memory=rls), "d_model: 'inverse'", "'rls'")


@pytest.mark.spec("VAR-SIZE-I1")
def test_models_refuse_what_their_blocks_and_tables_would_take():
    refused(lambda: LanguageModelConfig(d_model=MAX_SIZE, heads=1), "d_model", "TiB")
    refused(lambda: LanguageModelConfig(vocab_size=MAX_SIZE, d_model=1 << 12), "embedding")
    refused(lambda: LanguageModelConfig(mlp_ratio=1e300), "mlp_ratio")
    refused(
        lambda: ExperimentConfig(
            model={"d_model": 1 << 12, "mlp_ratio": 1.0}, data={"kind": "copy", "vocab_size": MAX_SIZE}
        ),
        "model.d_model: 'embedding'",
    )


@pytest.mark.parametrize("huge", [10**9, 10**12, (1 << 63) - 1])
def test_counts_that_cost_nothing_run_at_once(huge):
    x = torch.zeros(1, 3, 8)

    def run(layer):
        with torch.no_grad(), within(0.2):
            assert layer(x)[0].isfinite().all()

    for commit in ("token", "chunk"):
        run(nn.Memory(8, 2, MemoryConfig(chunk=huge, commit=commit)))
    level = LevelConfig(name="a", period=huge, memory={"bias": "dot"})
    for own in ({"levels": (level,)}, {"levels": ({"name": "a", "restart": huge},)}):
        run(CMS(8, 2, own))
    run(SelfReferential(8, 2, SelfReferenceConfig(chunk=huge)))
    run(nn.Memory(8, 2, MemoryConfig(feature_map={"kind": "cosformer", "max_length": huge})))
    run(LinearTransformer.build(embed_dim=8, hidden_size=8, num_layers=1, window_size=huge))


def test_a_model_of_many_layers_is_validated_at_once():
    with within(0.2):
        config = LanguageModelConfig(vocab_size=4, layers=1 << 10)
    assert config.layers == 1 << 10


def test_bytes_in_words():
    assert [readable(1 << n) for n in (3, 13, 23, 33, 43)] == [
        "8 bytes", "8 KiB", "8 MiB", "8 GiB", "8 TiB"
    ]  # fmt: skip

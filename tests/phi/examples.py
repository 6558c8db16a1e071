"""Instances of every map for the conformance suite; kinds not listed run at their defaults."""

from hecate import phi

EXAMPLES: dict[str, list[phi.FeatureMap]] = {
    "compose": [
        phi.Compose(maps=(phi.Linear(d_phi=3), phi.Taylor())),
        phi.Compose(maps=(phi.Normalise(inner=phi.Identity()), phi.RandomFourier(d_phi=8))),
        phi.Compose(maps=(phi.Linear(d_phi=4), phi.MLP(d_hidden=3, activation="tanh"))),
        phi.Compose(maps=(phi.ReLU(), phi.SquaredReLU())),
        phi.Compose(maps=(phi.CosFormer(max_length=300), phi.ELU())),
    ],
    "concat": [
        phi.Concat(maps=(phi.Linear(d_phi=3), phi.ELU(), phi.Linear(d_phi=2))),
        phi.Concat(maps=(phi.RandomFourier(d_phi=4), phi.RandomFourier(d_phi=6, form="paired"))),
        phi.Concat(maps=(phi.DPFP(), phi.SquaredReLU())),
        phi.Concat(maps=(phi.Identity(), phi.OddLift(inner=phi.ReLU()))),
        phi.Concat(maps=(phi.CosFormer(), phi.Linear(d_phi=2))),
    ],
    "cosformer": [phi.CosFormer(), phi.CosFormer(max_length=255)],
    "dpfp": [phi.DPFP(), phi.DPFP(nu=3), phi.DPFP(nu=9)],
    "exp": [phi.Exp(), phi.Exp(shift=2.0)],
    "gelu_shifted": [phi.GELUShifted(), phi.GELUShifted(shift=0.0)],
    "leaky_relu": [phi.LeakyReLU(), phi.LeakyReLU(slope=0.3), phi.LeakyReLU(slope=0.0)],
    "leaky_relu_squared": [
        phi.LeakyReLUSquared(),
        phi.LeakyReLUSquared(shift=0.0),
        phi.LeakyReLUSquared(slope=0.0, shift=0.1),
    ],
    "linear": [phi.Linear(d_phi=3), phi.Linear(d_phi=7)],
    "mlp": [
        phi.MLP(d_hidden=4),
        phi.MLP(d_hidden=4, activation="tanh"),
        phi.MLP(d_hidden=4, activation="silu", residual=False),
        phi.MLP(d_hidden=4, activation="relu", residual=False, d_phi=6),
    ],
    "normalise": [
        phi.Normalise(inner=phi.Identity()),
        phi.Normalise(inner=phi.Linear(d_phi=3), eps=0.1),
        phi.Normalise(inner=phi.DPFP(), norm="sum"),
        phi.Normalise(inner=phi.Exp(), norm="sum"),
        phi.Normalise(inner=phi.CosFormer()),
    ],
    "odd_lift": [
        phi.OddLift(inner=phi.ELU()),
        phi.OddLift(inner=phi.MLP(d_hidden=3)),
        phi.OddLift(inner=phi.RandomFourier(d_phi=8)),
        phi.OddLift(inner=phi.CosFormer()),
    ],
    "polynomial": [
        phi.Polynomial(),
        phi.Polynomial(degree=1),
        phi.Polynomial(degree=3, coefficients="ones"),
        phi.Polynomial(degree=4),
        phi.Polynomial(degree=3, coefficients="learned"),
        phi.Polynomial(degree=2, form="raw"),
    ],
    "relu": [phi.ReLU(), phi.ReLU(shift=0.001)],
    "softplus": [phi.Softplus(), phi.Softplus(beta=3.0)],
    "taylor": [phi.Taylor(), phi.Taylor(compact=False), phi.Taylor(order=3), phi.Taylor(order=4)],
    "glu": [phi.GLU(), phi.GLU(d_hidden=6)],
    "hedgehog": [phi.Hedgehog(), phi.Hedgehog(joint=True)],
    "slay": [phi.SLAY(m=4, nodes=3), phi.SLAY(eps=0.3, m=2)],
    "hadamard": [phi.Hadamard(d_phi=6)],
    "rebased": [phi.Rebased(), phi.Rebased(eps=0.5)],
    "softmax": [phi.Softmax(), phi.Softmax(half_space=True, temperature=0.5)],
    "t2r": [phi.T2R(d_phi=7)],
    "tensor_product": [
        phi.TensorProduct(maps=(phi.Identity(), phi.ELU())),
        phi.TensorProduct(maps=(phi.CosFormer(), phi.ELU())),
        phi.TensorProduct(maps=(phi.Linear(d_phi=3), phi.CReLU())),
        phi.TensorProduct(maps=(phi.Linear(d_phi=3), phi.RandomFourier(d_phi=4), phi.Linear(d_phi=2))),
    ],
    # Random maps. The derivative of arc_cosine at order 0 is 0, which no check can tell from wrong.
    "arc_cosine": [
        phi.ArcCosine(),
        phi.ArcCosine(order=2, num_features=8),
        phi.ArcCosine(order=2, num_features=8, norms="chi", orthogonal=False),
    ],
    "nystrom": [phi.Nystrom(num_centres=6, sigma=2.0), phi.Nystrom(num_centres=6, sigma=2.0, centres="learned")],
    "polysketch": [phi.Polysketch(sketch=4), phi.Polysketch(sketch=3, degree=16)],
    "random_maclaurin": [
        phi.RandomMaclaurin(d_phi=12),
        phi.RandomMaclaurin(d_phi=12, series="binomial", degree=3),
        phi.RandomMaclaurin(d_phi=8, coefficients=(0.0, 1.0, 0.0, 0.5)),
        phi.RandomMaclaurin(d_phi=8, coefficients=(0.0, 0.0, 1.0)),
    ],
    "sorf": [phi.SORF(d_phi=10), phi.SORF(d_phi=40, sigma=2.0)],
    "favor": [
        phi.Favor(),
        phi.Favor(num_features=7, norms="sqrt", orthogonal=False),
        phi.Favor(num_features=8, scale="none"),
        phi.Favor(num_features=14, variant="hyperbolic"),
        phi.Favor(num_features=12, variant="trigonometric"),
    ],
    "performer_relu": [
        phi.PerformerReLU(),
        phi.PerformerReLU(num_features=7, kernel_epsilon=0, norms="chi"),
        phi.PerformerReLU(num_features=8, orthogonal=False),
    ],
    "random_fourier": [
        phi.RandomFourier(d_phi=8),
        phi.RandomFourier(d_phi=8, sigma=0.5, form="paired"),
        phi.RandomFourier(d_phi=7, sigma=2.0, orthogonal=True),
    ],
}


def examples(*modules: str) -> list[phi.FeatureMap]:
    """One instance or more of every kind of the library and of `modules`, new ones by themselves.

    Kinds that other tests define, broken ones among them, are theirs to test.
    """
    return [
        instance
        for kind, variant in phi.FeatureMap.variants().items()
        if variant.__module__.startswith("hecate.") or variant.__module__ in modules
        for instance in EXAMPLES.get(kind) or [variant()]
    ]


def named(instance: phi.FeatureMap) -> str:
    """A test id: `dpfp-nu=3`."""
    fields = instance.model_dump(exclude={"kind"}, exclude_defaults=True)
    texts = [f"{key}={_short(value)}" for key, value in fields.items()]
    return "-".join([instance.kind, *texts])


def _short(value: object) -> str:
    if isinstance(value, dict):
        return str(value["kind"])
    if isinstance(value, (list, tuple)):
        return "+".join(_short(item) for item in value)
    return str(value)

"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.harness import group
from studies.costs.named import NamedRules as NamedRules
from studies.costs.optimisers import optimisers
from studies.costs.own import engines, tape, token
from studies.costs.rules import biases, delta, gated_delta, linear, mlp, titans

GROUPS = {
    "linear": linear,
    "delta": delta,
    "gated_delta": gated_delta,
    "titans": titans,
    "mlp": mlp,
    "biases": biases,
    "tape": tape,
    "token": token,
    "engines": engines,
    "optim": optimisers,
}
STUDIES = [group(name, cases) for name, cases in GROUPS.items()]

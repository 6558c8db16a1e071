"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.attention import linear
from studies.costs.harness import group
from studies.costs.named import NamedRules as NamedRules
from studies.costs.optimisers import optimisers
from studies.costs.own import engines, tape
from studies.costs.rules import biases, delta, gated_delta, mlp, titans
from studies.costs.token import token

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

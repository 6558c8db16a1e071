"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.attention import linear
from studies.costs.decoding import decode, token
from studies.costs.engines import engines
from studies.costs.lengths import Lengths as Lengths
from studies.costs.levels import levels
from studies.costs.maps import maps
from studies.costs.named import NamedRules as NamedRules
from studies.costs.optimisers import optimisers
from studies.costs.rules import biases, delta, gated_delta, mlp, titans
from studies.costs.study import group
from studies.costs.tapes import tape

GROUPS = {
    "linear": linear,
    "delta": delta,
    "gated_delta": gated_delta,
    "titans": titans,
    "mlp": mlp,
    "biases": biases,
    "tape": tape,
    "decode": decode,
    "token": token,
    "phi": maps,
    "engines": engines,
    "levels": levels,
    "optim": optimisers,
}
STUDIES = [group(name, cases) for name, cases in GROUPS.items()]

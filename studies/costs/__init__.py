"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.harness import group
from studies.costs.named import NamedRules as NamedRules
from studies.costs.optimisers import optim
from studies.costs.own import engines, tape, token
from studies.costs.rules import biases, delta, gated_delta, linear, mlp, titans

CASES = (linear, delta, gated_delta, titans, mlp, biases, tape, token, engines, optim)
GROUPS = {cases.__name__: cases for cases in CASES}
STUDIES = [group(name, cases) for name, cases in GROUPS.items()]

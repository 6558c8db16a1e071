"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.named import NAMED as NAMED
from studies.costs.optimisers import optim as optim
from studies.costs.own import engines, tape, token
from studies.costs.rules import biases, delta, gated_delta, linear, mlp, titans

__all__ = ["NAMED", "biases", "delta", "engines", "gated_delta", "linear", "mlp", "optim", "tape", "titans", "token"]

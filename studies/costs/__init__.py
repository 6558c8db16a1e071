"""Costs of hecate against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.cases import NAMED, biases, delta, engines, gated_delta, linear, mlp, optim, tape, titans
from studies.costs.harness import cost

LINEAR, DELTA, GATED, TITANS, MLP = map(cost, (linear, delta, gated_delta, titans, mlp))
BIASES, TAPE, ENGINES, OPTIM = map(cost, (biases, tape, engines, optim))
__all__ = ["BIASES", "DELTA", "ENGINES", "GATED", "LINEAR", "MLP", "NAMED", "OPTIM", "TAPE", "TITANS"]

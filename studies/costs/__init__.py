"""What hecate costs against peers: every group of comparisons is a study `cost-NAME`."""

from studies.costs.cases import NAMED, biases, delta, engines, gated_delta, linear, mlp, optim, tape, titans, token

__all__ = ["NAMED", "biases", "delta", "engines", "gated_delta", "linear", "mlp", "optim", "tape", "titans", "token"]

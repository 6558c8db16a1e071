"""Only where Triton interprets, which it is told before it is loaded: a process of its own."""

import os

import numpy as np

# What lies beyond the true widths of a tile may overflow: it is masked, and a card does not mind.
np.seterr(over="ignore", invalid="ignore", divide="ignore")

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

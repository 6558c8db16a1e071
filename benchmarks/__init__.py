"""Benchmarks of hecate."""

import os

# Read when torch loads: keeps the profiler's own log off the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

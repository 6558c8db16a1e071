"""Measurements: each study answers one question with a table and a figure.

    python -m studies --list            # which there are
    python -m studies levels --quick    # a table on the screen; levels-quick.csv, .json and .png
    python -m studies cost              # ours against peers: every group of comparisons
    python -m studies all --quick       # do they all still run?

A study is a name, a question and the function that answers it: a `Study` in a file here. It is no part of the
installed package: run it from a checkout.
"""

import os

# Read when torch loads: keeps the profiler's own log off the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

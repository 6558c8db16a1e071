"""`python -m hecate`: the command line."""

from hecate.cli import main

main()

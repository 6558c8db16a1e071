"""`python -m hecate.cli`: the command line."""

from hecate.cli import main

main()

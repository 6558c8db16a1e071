"""`python -m hecate`: the command line."""

from hecate.cli import main

if __name__ == "__main__":
    main()

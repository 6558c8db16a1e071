"""`python -m hecate`: the command line."""

import sys
from pathlib import Path

try:
    here = Path.cwd()
except FileNotFoundError:
    print("error: the working folder does not exist any more; cd to another one", file=sys.stderr)
    sys.exit(2)
# Python puts the working folder first on its path, where a user's file could take the place of a library's module.
if not sys.flags.safe_path and Path(sys.path[0]).absolute() == here:
    del sys.path[0]
    if Path(__file__).resolve().parents[1] == here.resolve():  # this package itself is there
        sys.path.append(str(here))

from hecate.terminal import quiet_interrupts

quiet_interrupts()

from hecate.cli import main  # noqa: E402

if __name__ == "__main__":
    main()

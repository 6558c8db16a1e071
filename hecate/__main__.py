"""`python -m hecate`: the command line."""

import sys
from pathlib import Path

# Python puts the working folder first on its path, where a user's file could take the place of a library's module.
if not sys.flags.safe_path and Path(sys.path[0]).absolute() == Path.cwd():
    del sys.path[0]
    if Path(__file__).resolve().parents[1] == Path.cwd().resolve():  # this package itself is there
        sys.path.append(str(Path.cwd()))

from hecate.terminal import quiet_interrupts

quiet_interrupts()

from hecate.cli import main  # noqa: E402

if __name__ == "__main__":
    main()

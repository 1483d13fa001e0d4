"""Make ``python -m fabric_template`` work like the ``fabric-template`` command."""

import sys

from .tools.cli import main

# Spawned processes import this file, but must not run the command again.
if __name__ == "__main__":
    sys.exit(main())

"""Run the command line for ``python -m fabric_template``."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # Spawned processes import this file under another name.
    sys.exit(main())

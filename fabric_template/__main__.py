"""Run the command line for ``python -m fabric_template``."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # Run nothing in spawned processes, which import this file.
    sys.exit(main())

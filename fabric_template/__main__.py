"""Run the command line by ``python -m fabric_template``, also in a copy under another name."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # A spawned process imports this file again, under another name.
    sys.exit(main())

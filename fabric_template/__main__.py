"""Run the command line with ``python -m fabric_template``, or with the name of a copy."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # A spawned process imports this file again, under another name.
    sys.exit(main())

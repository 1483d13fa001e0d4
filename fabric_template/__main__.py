"""``python -m fabric_template``: the command line, also of a copy under another name."""

import sys

from .tools.cli import main

if __name__ == "__main__":  # a spawned process imports this file again, under another name
    sys.exit(main())

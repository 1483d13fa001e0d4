"""Put the package, tests/support and tests/faults on sys.path. Import this module before any module from these folders."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# torch and NumPy read OMP_NUM_THREADS at import. The scripts fork, so they must have only one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "faults")]

"""Put the package, tests/support and tests/faults on sys.path. Imported before them."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Before torch and NumPy: the scripts fork, so they may have no other thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "faults")]

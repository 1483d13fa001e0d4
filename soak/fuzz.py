"""Fuzzed files for every reader, chosen by atheris: each must end in a clean error or a right result.

    python soak/fuzz.py --inputs 10000 --seed 1

The bytes that atheris chooses are turned into files by tests/faults/readers.py, which also says what is a failure. One
process for each reader, one after the other; with `--reader` one of them. What fails is kept, in `--keep`, to be run again.
"""

import argparse
import importlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

SHARES = {
    "checkpoint": 0.3, "folder": 0.15, "old_pickle": 0.1, "safetensors": 0.15, "table": 0.1, "config": 0.15, "lock": 0.05,
}  # fmt: skip
LENGTH = 256  # bytes of choices for one file


def fuzz(reader, inputs, seed, keep):
    """Run one reader on so many inputs in this process; atheris ends the process, so the figures are printed before."""
    import atheris

    for name in ("torch", "lightning.fabric", "pandas", "yaml", "jsonargparse"):
        importlib.import_module(name)  # before: they are not ours to instrument, which takes minutes
    with atheris.instrument_imports(include=["fabric_template"], enable_loader_override=False):
        import readers

    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)) / "v"
    folder.mkdir()
    readers.warm_up(folder)
    figures = {"reader": reader, "inputs": 0, "read": 0, "slowest": 0.0, "failures": Counter()}
    began = time.monotonic()

    def one(data):
        figures["inputs"] += 1
        try:
            outcome = readers.probe(reader, bytes(data), folder)
        except readers.Broken as error:
            kind = str(error).split(":")[0][:60]
            figures["failures"][kind] += 1
            if figures["failures"][kind] <= 3:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{reader}-{seed}-{figures['inputs']}").write_bytes(data)
                print(f"{reader}, input {figures['inputs']}: {error}", file=sys.stderr)
        else:
            figures["read"] += outcome.read
            figures["slowest"] = max(figures["slowest"], outcome.seconds)
        if figures["inputs"] == inputs:
            figures["seconds"] = time.monotonic() - began
            print(json.dumps(figures), flush=True)
            shutil.rmtree(folder.parent)

    arguments = [
        f"-runs={inputs}",
        f"-seed={seed}",
        f"-max_len={LENGTH}",
        "-len_control=0",
        "-timeout=60",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def campaign(inputs, seed, keep):
    """All readers, each in its process; returns a list of figures. A process that died is a crash."""
    found = []
    for number, (reader, share) in enumerate(SHARES.items()):
        count = max(1, round(inputs * share))
        command = [sys.executable, __file__, "--reader", reader, "--inputs", str(count), "--seed", str(seed + number)]
        done = subprocess.run([*command, "--keep", str(keep)], stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found.append(json.loads(lines[-1]) if lines else {"reader": reader, "inputs": 0, "failures": {"crash": 1}})
        print(found[-1], file=sys.stderr, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="how many files, over all readers")
    parser.add_argument("--seed", type=int, default=None, help="of atheris; drawn and printed if not given")
    parser.add_argument("--reader", choices=SHARES, help="only this one, in this process")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir(), "fuzz-failures"),
        help="where inputs that fail are kept",
    )
    words = parser.parse_args()
    seed = words.seed if words.seed is not None else random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}", file=sys.stderr)
    if words.reader:
        fuzz(words.reader, words.inputs, seed, words.keep)
    else:
        print(json.dumps(campaign(words.inputs, seed, words.keep)))


if __name__ == "__main__":
    main()

"""Run the long checks, such as thousands of SIGKILLs and failing system calls, and print a table.

    make soak                                        all parts, about two hours on two free cores
    python soak/run.py --part kills --kills 100      one part with fewer kills
    python soak/run.py --jobs 1 --seed 7             one part after the other, with the seed of an earlier run

Parts: `workers` is soak/elastic.py (workers killed under torchrun), `workers_sharded` the same with a sharded model,
`launchers` is soak/launchers.py (launchers x strategies x methods, and signals to torchrun),
`kills` and `ranks` are tests/faults/kills.py with one and with two processes, `sharded` with two and a sharded model,
`programs` is soak/random_runs.py (random programs with both loops and an oracle), `programs2` with two processes,
`killed` and `killed2` let an event end these programs and resume them, `sweep` is tests/faults/sweep.py (every disk
operation fails once in each way), `reads` is soak/reads.py (every read fails once), `tests` are the tests marked `soak`,
which the suite leaves out, `syscalls` is soak/syscalls.py (system calls fail below Python, which needs a C compiler).
With the printed seed, a run repeats the same moments and inputs as far as clocks allow. The exit code is 1 if anything was lost.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests" / "faults"
SOAK = ROOT / "soak"
# The longest parts come first, so that parallel jobs end at about the same time.
PARTS = ("programs", "killed", "programs2", "killed2", "kills", "syscalls", "ranks", "sharded")
PARTS += ("workers", "workers_sharded", "launchers", "reads", "sweep", "tests")
# A part ends with this exit code if this machine cannot run it.
SKIPPED = 77


def command_of(part, options, seed):
    programs = [SOAK / "random_runs.py", "--seed", seed, "--count"]
    kills = [FAULTS / "kills.py", "--seed", seed, "--kills"]
    workers = [SOAK / "elastic.py", "--seed", seed, "--kills", options.worker_kills]
    script = {
        "kills": [*kills, options.kills],
        "ranks": [*kills, options.rank_kills, "--ranks", 2],
        "sharded": [*kills, options.rank_kills // 2, "--sharded"],
        "workers": workers,
        "workers_sharded": [*workers, "--sharded"],
        "launchers": [SOAK / "launchers.py"],
        "programs": [*programs, options.programs],
        "programs2": [*programs, options.programs // 10, "--ranks", 2],
        "killed": [*programs, options.killed, "--killed"],
        "killed2": [*programs, options.killed // 10, "--killed", "--ranks", 2],
        "sweep": [FAULTS / "sweep.py", "--buffer", options.buffer],
        "reads": [SOAK / "reads.py", "--every", "1"],
        "tests": ["-m", "pytest", "-q", "-m", "soak", ROOT / "tests"],
        "syscalls": [SOAK / "syscalls.py", "--seed", seed, "--faults", options.faults],
    }[part]
    return [sys.executable, *script]


def run(part, options, seed):
    """Run a part in a separate process, and return the part's row of the table."""
    command = [str(word) for word in command_of(part, options, seed)]
    print(f"{part}: {' '.join(command)}", file=sys.stderr, flush=True)
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - started
    if part == "tests":
        print(done.stdout, file=sys.stderr)
        figures = figures_of_tests(done.stdout)
    else:
        lines = [line for line in done.stdout.splitlines() if line[:1] in "{["]
        figures = json.loads(lines[-1]) if lines else None
    figures = figures or ({} if done.returncode == SKIPPED else None)
    row = row_of(part, seconds, figures)
    print(f"\n{part} has ended\n{table([row])}\n", file=sys.stderr, flush=True)
    return row


def figures_of_tests(output):
    """Return the counts of tests from pytest's last line, or None if no test ran."""
    found = re.findall(r"(\d+) (passed|failed|errors?)\b", output[-500:])
    counts = {kind: int(count) for count, kind in found}
    if not counts:
        return None
    lost = sum(count for kind, count in counts.items() if kind != "passed")
    return {"tests": sum(counts.values()), "losses": [None] * lost}


def row_of(part, seconds, figures):
    """Return a part's row of the table. ``figures`` is None after a failure, and empty if the part was skipped."""
    if figures is None:
        return part, 0, "it broke down", seconds, ""
    if not figures:
        return part, 0, 0, seconds, "skipped: no C compiler here"
    what, count, remark = describe(part, figures)
    return what, count, len(figures["losses"]), seconds, remark


def describe(part, figures):
    """Return what a part has tested, how often, and a remark."""
    if part in ("kills", "ranks", "sharded"):
        how = ", sharded" if part == "sharded" else ""
        what = f"SIGKILL, {figures['ranks']} process{'es' * (figures['ranks'] > 1)}{how}"
        remark = (
            f"{figures['rounds']} runs; {figures['left_temporary_files']} kills in mid-write, {figures['started_again']} before "
            f"the first save; seed {figures['seed']}"
        )
        return what, figures["kills"], remark
    if part.startswith("workers"):
        how = ", sharded" if figures["kind"] == "sharded" else ""
        remark = f"{figures['rounds']} runs, {figures['hangs']} hung; seed {figures['seed']}"
        return f"SIGKILL of a worker under torchrun{how}", figures["kills"], remark
    if part == "launchers":
        cells, signals = len(figures["table"]), len(figures["signals"])
        remark = f"{cells} launchers with a strategy, each with all methods; {signals} signals"
        return "launchers, strategies and signals", cells + signals, remark
    if part == "reads":
        return "failing reads", figures["faults"], f"{figures['looks']} reads in a resumed run"
    if part == "tests":
        return "tests", figures["tests"], "those marked soak"
    if part == "syscalls":
        ends = ", ".join(f"{end} {count}" for end, count in figures["ends"].items())
        return "failing system calls", figures["faults"], f"{ends}; seed {figures['seed']}"
    if part.startswith(("programs", "killed")):
        kind = "random programs, killed and resumed" if figures["killed"] else "random programs"
        what = f"{kind}, {figures['ranks']} process{'es' * (figures['ranks'] > 1)}"
        refused = ", ".join(f"{loop} {count}" for loop, count in figures["refused"].items())
        remark = f"refused by name: {refused}; seed {figures['seed']}"
        return what, figures["programs"], remark
    if part == "sweep":
        kinds = ", ".join(f"{kind} {count}" for kind, count in figures["faults"].items())
        remark = f"{kinds}; {figures['operations']} operations in a run"
        return "injected faults", sum(figures["faults"].values()), remark
    raise ValueError(f"part: got {part}, expected one of {PARTS}")


def table(rows):
    """Return the results as a Markdown table for benchmarks/RESULTS.md."""
    lines = ["| what | how many | lost or broken | minutes | remarks |", "|---|---|---|---|---|"]
    for what, count, lost, seconds, remark in rows:
        lines.append(f"| {what} | {count:,} | {lost} | {seconds / 60:.1f} | {remark} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="run only this part; may be repeated"
    )
    parser.add_argument(
        "--kills", type=int, default=1000, help="SIGKILLs of a run in one process (1000)"
    )
    parser.add_argument(
        "--rank-kills", type=int, default=200, help="SIGKILLs of a run in two processes (200)"
    )
    parser.add_argument(
        "--worker-kills", type=int, default=100, help="SIGKILLs of a worker under torchrun (100)"
    )
    parser.add_argument("--faults", type=int, default=1000, help="system calls that fail (1000)")
    parser.add_argument("--programs", type=int, default=2000, help="random programs (2000)")
    parser.add_argument(
        "--killed", type=int, default=500, help="random programs that are killed (500)"
    )
    parser.add_argument(
        "--buffer", type=int, default=1, help="bytes that a save of the sweep writes at a time (1)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parts that run side by side (2)")
    parser.add_argument("--seed", type=int, help="drawn and printed if not given")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}", file=sys.stderr)
    parts = options.part or PARTS
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda part: run(part, options, seed), parts))
    print(f"\n{date.today():%d %B %Y}, seed {seed}\n\n{table(rows)}")
    sys.exit(any(lost != 0 for _, _, lost, _, _ in rows))


if __name__ == "__main__":
    main()

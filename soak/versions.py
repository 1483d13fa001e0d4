"""Run the contract tests with several versions of torch and Lightning, each in its own environment.

    python soak/versions.py                     # all versions, in an hour and with about 20 GB of downloads
    python soak/versions.py --only lowest
    python soak/versions.py --tests tests/contract/test_parity_table.py
    python soak/versions.py --only newest --python python3.10

The script prints a table of the passed and failed tests. Each environment is kept in the folder given by --environments.
constraints.txt needs Python 3.11 or later.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = ["pytest>=8", "pytest-timeout", "hypothesis", "tensorboard", "torchdata"]
TOOLS += ["click", "safetensors", "rich", "nbmake", "nbclient", "ipykernel"]

# Map each row's name to (pip's arguments for torch, pip's arguments for the other packages).
ROWS = {
    "lowest": ("torch==2.6.0", ["-c", "constraints-lowest.txt", "lightning", "pytorch-lightning"]),
    "lightning 2.5": ("torch==2.13.0", ["lightning==2.5.5", "pytorch-lightning==2.5.5"]),
    "constraints": ("torch==2.13.0", ["-c", "constraints.txt", "lightning", "pytorch-lightning"]),
    "newest": ("torch", ["lightning", "pytorch-lightning"]),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(ROWS), nargs="*", default=list(ROWS))
    parser.add_argument("--environments", type=Path, default=REPOSITORY / "build" / "environments")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter, such as python3.10"
    )
    parser.add_argument("--tests", nargs="*", default=["tests/contract"])
    arguments = parser.parse_args()
    is_red = False
    for name in arguments.only:
        folder = arguments.environments / name.replace(" ", "-")
        if arguments.python != sys.executable:
            folder = folder.with_name(f"{folder.name}-{Path(arguments.python).name}")
        python = make_environment(folder, arguments.python, *ROWS[name])
        versions, outcome, failed = run_tests(python, arguments.tests)
        print(f"{name:14} {versions:80} {outcome}", *failed, sep="\n    ", flush=True)
        is_red = is_red or bool(failed)
    sys.exit(is_red)


def make_environment(folder, interpreter, torch, packages):
    """Return the Python interpreter of an environment with these versions. Create the environment if necessary."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (folder / "is_complete").exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, torch], check=True, cwd=REPOSITORY)
        others = [*packages, *TOOLS, "--editable", "."]
        subprocess.run([*pip, *others], check=True, cwd=REPOSITORY)
        (folder / "is_complete").touch()
    return python


def run_tests(python, tests):
    """Return the versions, pytest's last line and the failed tests."""
    code = (
        "import platform, torch, lightning, numpy, pandas;"
        "modules = (torch, lightning, numpy, pandas);"
        "versions = (f'{module.__name__} {module.__version__}' for module in modules);"
        "print(f'python {platform.python_version()}', *versions, sep=', ')"
    )
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    # Do not turn warnings into errors, because other versions give different deprecation warnings.
    options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    command = [python, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    lines = run.stdout.splitlines() or ["no output"]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.MULTILINE)
    return shown.stdout.strip(), lines[-1], failed


if __name__ == "__main__":
    main()

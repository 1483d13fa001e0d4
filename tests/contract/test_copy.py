"""Test that a copy of the package works under a different name and without fabric_template."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import fork_command

from fabric_template.tools.package_copy import copy_command

PACKAGE = Path(__file__).resolve().parents[2] / "fabric_template"
FILES = sorted(PACKAGE.rglob("*.py"))

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fabric_template":
            raise ImportError(f"{name} is blocked: the copy must stand on its own")

sys.meta_path.insert(0, Blocked())
"""

TRAIN = """
import torch
torch.set_num_threads(1)
from somewhere.my_loop import FabricLoop, TensorLoader, plot_logs, read_logs
from somewhere.my_loop.demos.digits import DigitsClassifier, DigitsData
from somewhere.my_loop.tools.runs_command import runs_command

data = DigitsData()
options = {"accelerator": "cpu", "name": "digits", "monitor": "val_loss", "enable_progress_bar": False}
loop = FabricLoop(max_epochs=1, limit_train_batches=4, **options)
loop.fit(DigitsClassifier(hidden=8), datamodule=data)
again = FabricLoop(max_epochs=2, limit_train_batches=4, **options)
history = again.fit(DigitsClassifier(hidden=8), datamodule=data, resume="last")
assert history["epoch"].tolist() == [0, 1]
assert len(loop.validate(load="best", verbose=False)) == 1
assert len(loop.predict(datamodule=data)) > 0
assert len(read_logs("logs")) == 2
plot_logs("logs")[0].figure.savefig("digits.png")
assert runs_command(html="runs.html") == 0
wrong = [name for name in sys.modules if name.split(".")[0] == "fabric_template"]
assert not wrong, wrong
print("trained")
"""


def run(code, folder):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = fork_command([sys.executable, "-c", BLOCK + code])
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def copy_to(folder):
    assert copy_command(str(folder / "somewhere" / "my_loop")) == 0


def test_a_renamed_copy_of_the_package_trains_without_the_original(tmp_path):
    copy_to(tmp_path)
    done = run(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("trained\n")
    written = ["checkpoints", "digits.png", "logs", "runs.html", "somewhere"]
    assert sorted(path.name for path in tmp_path.iterdir()) == written
    # A checkpoint must not contain module names of the copy, so that it can be read after the copy is renamed.
    checkpoint = torch.load(tmp_path / "checkpoints/digits/version_0/last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1
    assert (tmp_path / "checkpoints/digits/version_0/last.ckpt").read_bytes().count(b"my_loop") == 0


def test_scripts_that_run_a_copied_package_cannot_import_the_original_package(tmp_path):
    done = run("import fabric_template", tmp_path)
    assert done.returncode != 0
    assert "the copy must stand on its own" in done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_package_uses_only_relative_imports_for_its_own_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        assert not [name for name in names if name.split(".")[0] == "fabric_template"], f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_looks_up_the_package_by_a_hard_coded_name(path):
    """Calls such as import_module("fabric_template.loop") would fail in a renamed copy."""
    source = path.read_text(encoding="utf-8")
    lookups = r"(?:import_module|__import__|resources\.files|sys\.modules\[|find_spec)"
    assert not re.findall(lookups + r"""\(?\s*f?["']fabric_template""", source)


def test_importing_a_copy_of_the_package_imports_neither_pandas_nor_matplotlib(tmp_path):
    """The test ignores packages that Lightning itself imports."""
    copy_to(tmp_path)
    code = """
import lightning.fabric
# fork_command() forks a process that has already imported pandas.
for name in [name for name in sys.modules if name.split(".")[0] == "pandas"]:
    del sys.modules[name]
before = set(sys.modules)
from somewhere.my_loop import FabricLoop, TensorLoader, plot_logs, read_logs
heavy = {"pandas", "matplotlib", "jsonargparse", "sklearn", "lightning.pytorch", "tqdm"} & (set(sys.modules) - before)
assert not heavy, heavy
print("light")
"""
    done = run(code, tmp_path)
    assert done.stdout == "light\n", done.stderr[-2000:]

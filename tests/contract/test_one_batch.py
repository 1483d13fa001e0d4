"""docs/one-batch.md: its stops exist, and a batch that is traced goes through the files that it names, and no other."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fabric_template
from fabric_template import FabricLoop
from fabric_template.core.train import train_epoch

PACKAGE = Path(fabric_template.__file__).parent
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "one-batch.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| \d+ \| .* \| (.*) \|$", PAGE, re.M)
NAMED = [  # (file, what is to be read there)
    (file, name)
    for stop in STOPS
    for part in stop.split("; ")
    for file in re.findall(r"[\w/]+\.py", part)
    for name in re.findall(r"`([A-Z]?\w+(?:\.\w+)?)`", part.split(":", 1)[1])
]
# where there is nothing to do on this device, or nobody listens, a stop is settled at set-up, or is a look at an attribute
NOT_CALLED = {"data/transfer.py", "core/steps.py"}
NOT_CALLED |= {"core/schedulers.py", "record/bar.py", "process/signals.py", "files/keeper.py"}


def definitions(path):
    """The names of the functions, classes and methods in a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                yield f"{node.name}.{part.name}"


def test_there_are_stops():
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.M)] == list(range(1, len(STOPS) + 1))
    assert len(NAMED) >= len(STOPS) > 12


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_a_stop_names_is_there(file, name):
    assert name in set(definitions(PACKAGE / file))


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE))))
def test_every_file_that_is_named_is_there(file):
    assert (PACKAGE / file).is_file()


def through(batch_idx, called):
    """The page's model and data; `called` gets what has run of the package between this training step and the next one."""
    names = {"__name__": "one_batch"}
    source = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)[1].split("\n\nloop = ")[0]
    exec(compile(source, "docs/one-batch.md", "exec"), names)
    root = f"{PACKAGE}{os.sep}"

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(root):
            called.add(frame.f_code)

    class Lit(names["Lit"]):
        def training_step(self, batch, at):
            if at in (batch_idx, batch_idx + 1):
                sys.setprofile(profile if at == batch_idx else None)
            return super().training_step(batch, at)

    return Lit(), names["DigitsData"]()


def test_a_batch_goes_through_these_files(capsys):
    torch.manual_seed(0)
    called = set()
    model, data = through(3, called)
    words = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
    try:
        FabricLoop(max_epochs=1, gradient_clip_val=1.0, log_every_n_steps=10, limit_train_batches=6, **words).fit(
            model, datamodule=data
        )
    finally:
        sys.setprofile(None)
    called.add(train_epoch.__code__)  # which runs all the time
    files = {Path(code.co_filename).relative_to(PACKAGE).as_posix() for code in called}
    named = {file for file, _ in NAMED}
    assert files - named - {"core/train.py"} == set(), "tell of them"
    assert named - files == NOT_CALLED, "they are not on the way"
    lines = sum(max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1 for code in called)
    assert 300 < lines < 500, lines
    assert len(files | {"core/train.py"}) <= 12
    whole = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files | {"core/train.py"}}
    assert sum(whole.values()) <= 1700, whole

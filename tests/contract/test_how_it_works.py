"""Test the file lists and the diff in docs/how-it-works.md."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import fork_command

from fabric_template import FabricLoop
from fabric_template.demos.digits import DigitsClassifier, DigitsData
from fabric_template.training import fit_loop, lifecycle, plan

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "fabric_template"
FOLDER = f"{PACKAGE}{os.sep}"
PAGE = (REPOSITORY / "docs" / "how-it-works.md").read_text(encoding="utf-8")


class Tracer:
    """A tracer that records in which files of the package the called functions are defined."""

    def __init__(self):
        self.files = set()

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            self.files.add(frame.f_code.co_filename.removeprefix(FOLDER))

    def start(self):
        self.files = set()
        sys.setprofile(self)

    def stop(self):
        sys.setprofile(None)
        return self.files


class Logs(DigitsClassifier):
    """A model that traces from the middle of a batch to the middle of the next, and traces one call to log."""

    def __init__(self):
        super().__init__(hidden=8)
        self.tracer = Tracer()

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            self.batch = self.tracer.stop()
        loss, _ = self.compute_loss_and_acc(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        if batch_idx == 7:
            self.tracer.start()
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log_call = self.tracer.stop()
        if batch_idx == 5:
            self.tracer.start()
        return loss


RESUME = [
    (plan, "find_start_point"),
    (lifecycle, "restore_model"),
    (lifecycle, "restore_training"),
    (fit_loop, "restore_position"),
]


def make_loop(epochs):
    options = {"gradient_clip_val": 1.0, "log_every_n_steps": 50, "name": "journey"}
    return FabricLoop(accelerator="cpu", max_epochs=epochs, enable_progress_bar=False, **options)


def named(title):
    section = re.search(rf"^## {title}\n(.*?)^## ", PAGE, re.M | re.S)[1]
    return set(re.findall(r"`([\w/]+\.py)`", section))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the files whose functions run in a batch, in a call to log, and when a run is resumed."""
    os.chdir(tmp_path_factory.mktemp("traced"))
    torch.manual_seed(0)
    module = Logs()
    make_loop(1).fit(module, datamodule=DigitsData())

    resume = set()

    def trace(function):
        def call(*args, **options):
            tracer = Tracer()
            tracer.start()
            result = function(*args, **options)
            resume.update(tracer.stop())
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place, name in RESUME:
            patch.setattr(place, name, trace(getattr(place, name)))
        make_loop(2).fit(DigitsClassifier(hidden=8), datamodule=DigitsData(), resume="last")
    return module.batch - {"demos/digits.py"}, module.log_call, resume


def test_how_it_works_md_lists_the_files_used_by_training_logging_and_resuming(traced):
    batch, log_call, resume = traced
    assert batch == named("A batch")
    assert len(batch) <= 10
    assert log_call <= named("A call to self.log")
    assert len(log_call) <= 2
    assert resume <= named("Resuming a run")
    assert len(resume) <= 25, sorted(resume)


def test_files_named_on_the_how_it_works_page_exist():
    files = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    tree = re.search(r"^```text\nfabric_template/\n(.*?)^```$", PAGE, re.M | re.S)[1]
    entries = {line.split()[0] for line in tree.splitlines()}
    assert [name for name in {*files, *entries} if not (PACKAGE / name).exists()] == []
    assert {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")} <= entries


# The diffs on the how-it-works page

START = """
import torch
from NAME import FabricLoop, TensorLoader

def train(name, epochs=2, resume=None, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
    data = TensorLoader(torch.randn(32, 4), torch.randn(32, 1), batch_size=8, shuffle=True)
    step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    options = {"accelerator": "cpu", "name": name, "enable_progress_bar": False, "enable_model_summary": False, **options}
    loop = FabricLoop(max_epochs=epochs, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop.fit(net, data, data, optimizer=optimizer, training_step=step, validation_step=step, resume=resume)
    return loop, torch.cat([p.detach().flatten() for p in net.parameters()])
"""
CHECKS = {
    "Accumulate gradients by tokens": """
SIZES = [8, 3, 5, 12, 2, 9, 16, 1, 7, 4]  # samples of 4 elements

def uneven_batches():
    torch.manual_seed(1)
    return [(torch.randn(size, 4), torch.randn(size, 1)) for size in SIZES]

def step(net, batch):
    return torch.nn.functional.mse_loss(net(batch[0]), batch[1])

def by_hand(world_size):
    torch.manual_seed(0)
    net, batches, pending = torch.nn.Linear(4, 1), uneven_batches(), []
    for index in range(0, len(batches), world_size):
        pending += batches[index : index + world_size]
        tokens = sum(batch[0].numel() for batch in pending)
        if tokens >= 64 or index + world_size >= len(batches):
            loss = sum(step(net, batch) * batch[0].numel() for batch in pending) / tokens
            net.zero_grad()
            loss.backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            pending = []
    return net.weight.detach()

def by_tokens(world_size):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    strategy = "ddp_fork" if world_size == 2 else "auto"
    loop = FabricLoop(accelerator="cpu", strategy=strategy, devices=world_size, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    loop.fit(net, Shared(world_size), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step)
    return net.weight.detach()

class Shared:
    def __init__(self, world_size):
        self.world_size = world_size

    def __len__(self):
        return len(SIZES) // self.world_size

    def __iter__(self):
        rank = torch.distributed.get_rank() if self.world_size == 2 else 0
        return iter(uneven_batches()[rank :: self.world_size])

for world_size in (1, 2):
    found, expected = by_tokens(world_size), by_hand(world_size)
    assert torch.allclose(found, expected, atol=1e-6), (world_size, found, expected)
_, batches = train("batches", accumulate_grad_batches=2)
loop, tokens = train("tokens")  # A batch has 32 elements.
assert torch.allclose(tokens, batches, atol=1e-6) and loop.global_step == 4
whole = train("whole", epochs=3, max_steps=5)[1]
train("cut", epochs=3, max_steps=3)
assert torch.equal(train("cut", epochs=3, max_steps=5, resume="last")[1], whole)
""",
}


def edits(title):
    """Yield (file, old lines, new lines) for each hunk of a documented diff."""
    section = re.search(rf"^### {title}\n(.*?)(?=^### |\Z)", PAGE, re.M | re.S)[1]
    name, old, new = None, [], []
    for line in [*re.search(r"^```diff\n(.*?)^```$", section, re.M | re.S)[1].splitlines(), "@@"]:
        if line.startswith(("@@", "--- ")) and old:
            yield name, "\n".join(old), "\n".join(new)
            old, new = [], []
        if line.startswith("+++ "):
            name = line.split()[1]
        elif not line.startswith(("@@", "--- ")):
            old += [line[1:]] if line[:1] != "+" else []
            new += [line[1:]] if line[:1] != "-" else []


@pytest.mark.parametrize("title", CHECKS)
def test_each_diff_on_the_how_it_works_page_applies_and_changes_at_most_two_files(title, tmp_path):
    copy = tmp_path / "my_loop"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    changed = set()
    for name, old, new in edits(title):
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(f"{old}\n") == 1, f"{name} does not contain exactly one copy of:\n{old}"
        (copy / name).write_text(text.replace(f"{old}\n", f"{new}\n"), encoding="utf-8")
        changed.add(name)
    assert 1 <= len(changed) <= 2
    code = START.replace("NAME", copy.name) + CHECKS[title]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = fork_command([sys.executable, "-c", code])
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]

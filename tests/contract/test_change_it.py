"""docs/change-it.md: each change is applied to a copy of the package, which then does what the change is made for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import ready

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "change-it.md").read_text(encoding="utf-8")
MOST_FILES = {
    "Noise on the gradients": 2,
    "A new column in metrics.csv": 2,
    "Other names for the kept checkpoints": 1,
}

# a net, its data and a fit, with a changed copy; warnings are errors
BEFORE = """
import os, sys, traceback, warnings
sys.modules["fabric_template"] = None  # a copy stands on its own
warnings.simplefilter("error")
import torch
torch.set_num_threads(1)
"""
START = """
import torch
from NAME import FabricLoop, TensorLoader, read_logs

def train(name, epochs=2, resume=None, **words):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
    data = TensorLoader(torch.randn(32, 4), torch.randn(32, 1), batch_size=8, shuffle=True)
    step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    words = {"accelerator": "cpu", "name": name, "enable_progress_bar": False, "enable_model_summary": False, **words}
    loop = FabricLoop(max_epochs=epochs, **words)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop.fit(net, data, data, optimizer=optimizer, training_step=step, validation_step=step, resume=resume)
    return loop, torch.cat([p.detach().flatten() for p in net.parameters()])
"""
CHECKS = {
    "Noise on the gradients": """
_, without = train("without")
_, none = train("none", gradient_noise=0)
_, some = train("some", gradient_noise=0.01)
_, clipped = train("clipped", gradient_noise=0.01, gradient_clip_val=1e-9)
assert torch.equal(without, none)
assert 0 < (some - without).abs().max() < 0.5
before = train("before", epochs=0)[1]
assert 0.1 * 0.01 < (clipped - before).std() < 0.1 * 0.01 * 5  # of eight steps, sqrt(8) times one
whole = train("whole", epochs=4, gradient_noise=0.01)[1]
train("cut", gradient_noise=0.01)
assert torch.equal(train("cut", epochs=4, resume="last", gradient_noise=0.01)[1], whole)
try:
    FabricLoop(gradient_noise=-1)
except ValueError as error:
    assert "gradient_noise" in str(error) and "a number >= 0" in str(error)
else:
    raise AssertionError("a negative noise was taken")
""",
    "A new column in metrics.csv": """
loop, weights = train("column", epochs=3)
rows = read_logs("logs/column")
assert len(rows) == 3
assert abs(rows["weight_norm"].iloc[-1] - weights.norm().item()) < 1e-5
with open("logs/column/version_0/metrics.csv") as file:
    assert "weight_norm" in file.readline().split(",")
train("cut", epochs=2)
train("cut", epochs=3, resume="last")
assert read_logs("logs/cut")["weight_norm"].tolist() == rows["weight_norm"].tolist()
""",
    "Other names for the kept checkpoints": """
import os
loop, _ = train("kept", epochs=4, monitor="val_loss", save_top_k=2)
scores = sorted(read_logs("logs/kept")["val_loss"])[:2]
names = sorted(name for name in os.listdir("checkpoints/kept/version_0") if "epoch=" in name)
assert [name.split("-")[0] for name in names] == [f"{score:.4f}" for score in scores], names
assert loop.checkpoint_path("best").name == names[0]
again, _ = train("kept", epochs=6, resume="last", monitor="val_loss", save_top_k=2)
found = sorted(name for name in os.listdir("checkpoints/kept/version_0") if name != "last.ckpt" and name[0] != ".")
best = sorted(read_logs("logs/kept")["val_loss"])[:2]
assert [name.split("-")[0] for name in found] == [f"{score:.4f}" for score in best], found
""",
}


def changes():
    """(title, [(file, what stands there, what is to stand there)]) of each change."""
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        title, edits = part.splitlines()[0], []
        for diff in re.findall(r"^```diff\n(.*?)^```$", part, re.M | re.S):
            name, before, after = None, [], []
            for line in [*diff.splitlines(), "@@"]:
                if line.startswith(("@@", "--- ")) and (before or after):
                    edits.append((name, "\n".join(before), "\n".join(after)))
                    before, after = [], []
                if line.startswith("+++ "):
                    name = line.split()[1]
                elif not line.startswith(("@@", "--- ")):
                    before += [line[1:]] if line[:1] != "+" else []
                    after += [line[1:]] if line[:1] != "-" else []
        yield title, edits


def test_every_change_is_checked():
    assert [title for title, _ in changes()] == list(MOST_FILES) == list(CHECKS)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What each change complained of, each in a copy and a folder of its own; one new interpreter does them all."""
    folder, code = tmp_path_factory.mktemp("changed"), BEFORE
    for number, (title, edits) in enumerate(changes()):
        copy = folder / f"my_loop_{number}"
        shutil.copytree(REPOSITORY / "fabric_template", copy, ignore=shutil.ignore_patterns("__pycache__"))
        assert 1 <= len({name for name, _, _ in edits}) <= MOST_FILES[title]
        for name, before, after in edits:
            text = (copy / name).read_text(encoding="utf-8")
            assert text.count(f"{before}\n") == 1, f"{name} has no such lines, or more than once:\n{before}"
            (copy / name).write_text(text.replace(f"{before}\n", f"{after}\n"), encoding="utf-8")
        work = folder / f"work_{number}"
        work.mkdir()
        check = START.replace("NAME", copy.name) + CHECKS[title]
        code += f"os.chdir({str(work)!r})\ntry:\n    exec({check!r}, {{}})\n    print('well')\n"
        code += f"except BaseException:\n    print(traceback.format_exc(), file=open({str(work / 'failed')!r}, 'w'))\n"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    words = {"capture_output": True, "text": True, "cwd": folder, "env": environment}
    ended = subprocess.run(ready([sys.executable, "-c", code]), **words)
    failures = [path.read_text() if (path := folder / f"work_{n}/failed").exists() else "" for n in range(len(CHECKS))]
    assert ended.stdout.splitlines().count("well") == failures.count(""), ended.stderr[-3000:]
    return dict(zip(CHECKS, failures, strict=True))


@pytest.mark.parametrize("title", CHECKS)
def test_change(title, done):
    assert done[title] == ""

"""Test the script of docs/ray.md with two Ray workers on the CPU. It needs the extra `ray`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
import pytest
import torch
from processes import run_processes

from fabric_template import FabricLoop
from fabric_template.demos.digits import DigitsClassifier, DigitsData
from fabric_template.mini import MiniLoop

pytest.importorskip("ray")

REPOSITORY = Path(__file__).resolve().parents[2]
GUARD = 'if __name__ == "__main__":\n'
# The tests insert this code into the script of docs/ray.md, so that the workers save
# their weights. With KILL=1, the second worker is killed once, in its 15th step.
PREPARATION = """
import os, signal, ray, torch

class WithWeights:
    def fit(self, model, *args, **options):
        super().fit(model, *args, **options)
        rank = self.fabric.global_rank
        torch.save(model.state_dict(), Path(self.default_root_dir, f"{self.name}{rank}.pt"))

class FabricLoop(WithWeights, FabricLoop): pass
class MiniLoop(WithWeights, MiniLoop): pass

class DigitsClassifier(DigitsClassifier):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        if os.environ.get("KILL") and self.steps == 15 and torch.distributed.get_rank() == 1:
            killed = SHARED / f"{train.get_context().get_experiment_name()}.killed"
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

"""
START = "    ray.init(num_cpus=2, include_dashboard=False)\n"
# Append this code to the script, because docs/ray.md does not show how to start the training with MiniLoop.
START_MINI = f"""
{GUARD}
    result.metrics_dataframe.to_csv(SHARED / "run.csv")
    torch.save(torch.load(f"{{result.checkpoint.path}}/last.ckpt")["state_dict"], SHARED / "reported.pt")
    config = train.RunConfig(name="mini", storage_path=str(SHARED), failure_config=failures)
    result = TorchTrainer(train_mini, scaling_config=workers, run_config=config).fit()
    result.metrics_dataframe.to_csv(SHARED / "mini.csv")
"""


def run_page(folder, num_blocks, **variables):
    """Run the first code blocks of docs/ray.md as one script. Return its output."""
    page = (REPOSITORY / "docs" / "ray.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    blocks[0] = blocks[0].replace(GUARD, PREPARATION + GUARD + START)
    blocks[1] += START_MINI
    folder.mkdir()
    (folder / "train.py").write_text("\n".join(blocks[:num_blocks]))
    # Use a short folder name instead of pytest's, because Ray's socket paths may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        variables |= {"PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short}
        env = os.environ | variables
        done = subprocess.run([sys.executable, "train.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def train_without_ray(rank):
    options = {"max_epochs": 3, "seed": 0, "default_root_dir": "torchrun", "accelerator": "cpu"}
    data = DigitsData()
    data.setup()
    for make_loop, name in ((FabricLoop, "run"), (MiniLoop, "mini")):
        loop = make_loop(**options, name=name)
        model = DigitsClassifier()
        loop.fit(model, data.train_dataloader(), data.val_dataloader())
        torch.save(model.state_dict(), f"torchrun/{loop.name}{rank}.pt")


def weights_of(path):
    return torch.cat([value.double().flatten() for value in torch.load(path).values()])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the script of docs/ray.md with and without a killed worker, and the same training under torchrun."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "out").write_text(run_page(folder / "whole", 3))
    run_page(folder / "killed", 2, KILL="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("torchrun").mkdir()
        codes, errors = run_processes(train_without_ray)
    assert codes == [0, 0], errors
    return folder


@pytest.mark.parametrize("name", ["run", "mini"])
def test_training_with_ray_gives_the_same_weights_as_training_with_torchrun(runs, name):
    expected = weights_of(runs / "torchrun" / f"{name}0.pt")
    for rank in (0, 1):
        assert torch.equal(weights_of(runs / "whole" / "ray_results" / f"{name}{rank}.pt"), expected)


@pytest.mark.parametrize("name", ["run", "mini"])
def test_a_killed_ray_worker_does_not_change_the_result(runs, name):
    assert (runs / "killed" / "ray_results" / f"{name}.killed").exists()
    expected = weights_of(runs / "torchrun" / f"{name}0.pt")
    for rank in (0, 1):
        assert torch.equal(weights_of(runs / "killed" / "ray_results" / f"{name}{rank}.pt"), expected)


@pytest.mark.parametrize("folder", ["whole", "killed"])
@pytest.mark.parametrize("name", ["run", "mini"])
def test_ray_receives_the_logged_metrics_and_the_checkpoint(runs, folder, name):
    shared = runs / folder / "ray_results"
    reported = pandas.read_csv(shared / f"{name}.csv", index_col=0)
    logged = pandas.read_csv(runs / "torchrun" / "logs" / name / "version_0" / "metrics.csv")
    assert set(reported) >= {"train_loss", "train_acc", "val_loss", "val_acc"}
    # One of three reports may be missing, because Ray loses a
    # report that it has not read when the second worker is killed.
    assert len(reported) == 3 if folder == "whole" else len(reported) in (2, 3)
    logged = logged[list(reported)].tail(len(reported)).reset_index(drop=True)
    pandas.testing.assert_frame_equal(reported, logged, rtol=1e-5)
    assert torch.equal(weights_of(shared / "reported.pt"), weights_of(shared / "run0.pt"))


def test_the_ray_tune_search_finds_the_best_learning_rate(runs):
    assert "{'lr': 0.003}" in (runs / "out").read_text()

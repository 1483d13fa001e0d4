"""Resume in the middle of an epoch with another number of processes: the samples that are left are trained."""

import json
from pathlib import Path

import pytest
import torch
from modules import Classifier, make_data, sgd
from runs import fit, logs_of, val_loader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric_template import TensorLoader
from fabric_template.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:resume", "ignore:Stream is iterable", "ignore:FSDP2-wrapped")
SAMPLES = 64


@pytest.fixture(autouse=True)
def forked_ranks_are_quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


class Noted(Classifier):
    """Writes down the samples of each step. Without dropout the weights hardly depend on the number of processes."""

    def __init__(self):
        super().__init__(sgd, dropout=0.0, on_step=False, sync_dist=True)

    def training_step(self, batch, batch_idx):
        place = f"{self.current_epoch} {self.global_step}"
        with open(f"seen{self.global_rank}", "a") as file:
            file.write(json.dumps([place, batch[2].tolist()]) + "\n")
        return super().training_step(batch[:2], batch_idx)


def seen():
    """Return the samples of each step, of all processes, and remove the files."""
    steps = {}
    for path in sorted(Path().glob("seen*")):
        for place, samples in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(place, []).extend(samples)
        path.unlink()
    return {place: sorted(samples) for place, samples in steps.items()}


def train(processes, kind, root=".", batch=8, **words):
    """Train with a total batch size that does not depend on the number of processes."""
    data = TensorDataset(*make_data(SAMPLES).tensors, torch.arange(SAMPLES))
    size = batch // processes
    make = {
        "DataLoader": lambda: DataLoader(data, batch_size=size, shuffle=True),
        "workers": lambda: DataLoader(data, batch_size=size, shuffle=True, num_workers=1),
        "TensorLoader": lambda: TensorLoader(*data.tensors, batch_size=size, shuffle=True),
    }[kind]
    where = {"strategy": "ddp_fork", "devices": processes} if processes > 1 else {"devices": 1}
    return fit(root, Noted, make, val_loader, monitor="val_loss", **where, **words)


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [((2, 1, 2), "DataLoader"), ((2, 1, 2), "TensorLoader"), ((4, 2), "workers")],
    ids=str,
)
def test_each_step_has_the_samples_of_an_undisturbed_run(numbers, kind):
    """With the same total batch size each sample comes once, in the same step."""
    _, whole, history = train(numbers[0], kind, "whole", max_epochs=1)
    expected = seen()
    assert sorted(sample for step in expected.values() for sample in step) == list(range(SAMPLES))
    train(numbers[0], kind, max_steps=1)
    for index, processes in enumerate(numbers[1:], 2):
        train(processes, kind, max_steps=2 * index - 1, resume="last", seed=99)
    _, module, rows = train(numbers[-1], kind, max_epochs=1, resume="last", seed=99)
    assert seen() == expected
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert rows[["epoch", "step"]].equals(history[["epoch", "step"]])
    assert len(logs_of(".")[0].splitlines()) == 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*make_data(SAMPLES).tensors))


@pytest.mark.parametrize("kind", ["stream", "started by one"])
def test_an_order_that_depends_on_the_number_of_processes_is_refused(kind):
    make = {
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "started by one": lambda: DataLoader(make_data(SAMPLES), batch_size=4, shuffle=True),
    }[kind]

    def run(processes, **options):
        where = {"strategy": "ddp_fork", "devices": processes} if processes > 1 else {"devices": 1}
        return fit(".", Classifier, make, **where, **options)

    first, second = (2, 1) if kind == "stream" else (1, 2)
    run(first, max_steps=2)
    with pytest.raises(CheckpointError, match=f"middle of an epoch of a run with {first} processes, and this run"):
        run(second, max_steps=4, resume="last")

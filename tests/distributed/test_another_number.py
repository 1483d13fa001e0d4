"""Another number of processes in the middle of an epoch: 1, 2 and 4, in every direction; what was left of it is trained."""

import json
import re
from pathlib import Path

import pytest
import torch
from modules import Classifier, make_data, sgd
from runs import fit, logs_of, val_loader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fabric_template import TensorLoader
from fabric_template.checkpoint.checkpoint_io import CheckpointError, read_checkpoint

# in the forked ranks, too
pytestmark = pytest.mark.filterwarnings("ignore:resume", "ignore:Stream is iterable", "ignore:FSDP2-wrapped")
LAST = "checkpoints/run/version_0/last.ckpt"
SAMPLES = 64


@pytest.fixture(autouse=True)
def forked_ranks_are_quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


class Noted(Classifier):
    """Each rank writes down which samples a step had; no dropout, so that the weights of all numbers are nearly the same."""

    def __init__(self):
        super().__init__(sgd, dropout=0.0, on_step=False, sync_dist=True)

    def training_step(self, batch, batch_idx):
        place = f"{self.current_epoch} {self.global_step}"
        with open(f"seen{self.global_rank}", "a") as file:
            file.write(json.dumps([place, batch[2].tolist()]) + "\n")
        return super().training_step(batch[:2], batch_idx)


def seen():
    """The samples of each step, of all ranks together, and the files away."""
    steps = {}
    for path in sorted(Path().glob("seen*")):
        for place, samples in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(place, []).extend(samples)
        path.unlink()
    return {place: sorted(samples) for place, samples in steps.items()}


def train(processes, kind, root=".", batch=8, **words):
    """With so many processes, a batch for all of them together."""
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
    [((1, 2, 4), "DataLoader"), ((1, 2, 1), "TensorLoader"), ((4, 1, 2), "workers")],
    ids=str,
)
def test_each_step_has_the_samples_of_an_undisturbed_run(numbers, kind):
    """The batch of all together stays: each sample once in the epoch, in the same steps, and the next epoch follows."""
    _, whole, history = train(numbers[0], kind, "whole", max_epochs=1)
    expected = seen()
    assert sorted(sample for step in expected.values() for sample in step) == list(range(SAMPLES))
    train(numbers[0], kind, max_steps=1)
    for index, processes in enumerate(numbers[1:], 2):
        train(processes, kind, max_steps=2 * index - 1, resume="last", seed=99)
    assert "order" in read_checkpoint(LAST)["fabric_template"]
    _, module, rows = train(numbers[-1], kind, max_epochs=1, resume="last", seed=99)
    assert seen() == expected
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-4, atol=1e-5)
    columns = ["epoch", "step", "train_loss"]  # val_loss is rank zero's, of its part
    torch.testing.assert_close(
        torch.tensor(rows[columns].values), torch.tensor(history[columns].values), rtol=1e-4, atol=0
    )
    assert len(logs_of(".")[0].splitlines()) == 2
    assert "order" not in read_checkpoint(LAST)["fabric_template"]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(*make_data(SAMPLES).tensors))


def test_what_cannot_be_counted_is_refused():
    """A loader that shares its samples itself: nobody knows which are left."""

    def stream(processes, **words):
        where = {"strategy": "ddp_fork", "devices": processes} if processes > 1 else {"devices": 1}
        return fit(".", Classifier, lambda: DataLoader(Stream(), batch_size=4), **where, **words)

    stream(2, max_steps=2)
    with pytest.raises(
        CheckpointError, match=re.escape("is of a run with 2 processes, this one has 1, and it is from the middle")
    ):
        stream(1, max_steps=4, resume="last")

"""Test runs that are resumed from a checkpoint older than last.ckpt and killed before their first save."""

import shutil
from pathlib import Path

import pytest
import torch
from modules import Classifier, make_loader
from parameters import halve
from processes import run_processes
from runs import logs_of, same, tree, val_loader, with_files

from fabric_template import FabricLoop, MiniLoop
from fabric_template.loggers.csv_logger import CSVLogger

LOOPS = {"MiniLoop": MiniLoop, "FabricLoop": FabricLoop}
both_loops = pytest.mark.parametrize("kind", list(LOOPS))
BEST, LAST = "checkpoints/run/version_0/best.ckpt", "checkpoints/run/version_0/last.ckpt"


class Killed(Exception):
    pass


class BestFirst(Classifier):
    """A model with its best score in the first epoch. If `killed_at` is (epoch, batch), this batch raises an error."""

    def __init__(self, killed_at=None):
        super().__init__()
        self.killed_at = killed_at

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == self.killed_at:
            raise Killed
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch), sync_dist=True)


def train(kind, root, epochs, resume=None, killed_at=None, **options):
    torch.manual_seed(0)
    options = {"monitor": "val_loss", "max_epochs": epochs, "log_every_n_steps": 2, **options}
    options = with_files(root, **options)
    if kind == "MiniLoop":
        options = {k: v for k, v in options.items() if not k.startswith("enable_") and k != "save_top_k"}
    model = BestFirst(killed_at)
    try:
        LOOPS[kind](**options).fit(model, make_loader(), val_loader(), resume=resume)
    except Killed:
        return None
    return model.state_dict()


def step_of(root, file=LAST):
    return torch.load(Path(root, file), weights_only=False)["global_step"]


@pytest.mark.parametrize(("first", "second", "third"), halve(LOOPS, LOOPS, LOOPS))
def test_no_csv_rows_are_lost_if_a_run_resumed_from_the_best_checkpoint_is_killed(tmp_path, first, second, third):
    """The killed run has removed CSV rows, so the next run resumes from best.ckpt and not from the old last.ckpt."""
    expected = train(first, tmp_path, 3)
    logs, files = logs_of(tmp_path), tree(tmp_path)
    train(second, tmp_path, 3, "best", killed_at=(1, 3))
    assert (step_of(tmp_path), step_of(tmp_path, BEST)) == (10, 10)
    assert same(dict(train(third, tmp_path, 3, "auto")), dict(expected))
    assert (logs_of(tmp_path), tree(tmp_path)) == (logs, files)


@both_loops
def test_a_run_resumes_exactly_if_killed_while_removing_csv_rows(tmp_path, kind, monkeypatch):
    expected = train(kind, tmp_path, 3)
    logs = logs_of(tmp_path)

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fabric_template.mini.write_rows", kill)
        patch.setattr(CSVLogger, "rewind", kill)
        train(kind, tmp_path, 3, "best")
    assert logs_of(tmp_path) == logs
    assert same(dict(train(kind, tmp_path, 3, "auto")), dict(expected))
    assert logs_of(tmp_path) == logs


@pytest.mark.parametrize(("is_copied", "save_last"), halve([False, True], [True, False]))
def test_a_run_resumed_from_an_epoch_checkpoint_loses_no_csv_rows_when_killed(tmp_path, is_copied, save_last):
    expected = train("FabricLoop", tmp_path, 4, save_top_k=3)
    logs = logs_of(tmp_path)
    (path,) = Path(tmp_path, "checkpoints/run/version_0").glob("epoch=1-*.ckpt")
    if is_copied:
        path = shutil.copy(path, tmp_path / "copy.ckpt")
    train("FabricLoop", tmp_path, 4, path, killed_at=(2, 0), save_top_k=3, save_last=save_last, version=0)
    assert step_of(tmp_path) == 20
    assert same(dict(train("FabricLoop", tmp_path, 4, "auto", save_top_k=3)), dict(expected))
    assert logs_of(tmp_path) == logs
    kept = torch.load(tmp_path / LAST, weights_only=False)["fabric_template"]["checkpoints"]["kept"]
    assert [name[:7] for name in kept] == ["epoch=0", "epoch=1", "epoch=2"]


@both_loops
def test_resuming_from_an_older_checkpoint_changes_no_file_if_nothing_is_left_to_train(tmp_path, kind):
    expected = train(kind, tmp_path, 3)

    def contents():
        names = [name for name in tree(tmp_path) if not name.endswith(".yaml")]
        return {name: (tmp_path / name).read_bytes() for name in names}

    before = contents()
    for resume in ("best", tmp_path / BEST):
        train(kind, tmp_path, 1, resume)
        assert contents() == before
    assert same(dict(train(kind, tmp_path, 3, "auto")), dict(expected))


@both_loops
def test_a_failed_resume_removes_neither_csv_rows_nor_checkpoints(tmp_path, kind):
    train(kind, tmp_path, 3)
    logs = logs_of(tmp_path)
    with pytest.raises(ValueError, match=r"resume: the dtype of .* is torch\.float64"):
        train(kind, tmp_path, 3, "best", precision="64-true")
    assert (logs_of(tmp_path), step_of(tmp_path)) == (logs, 30)


def train_ranked(rank, kind, *args):
    weights = train(kind, ".", 3, *args, devices=2, strategy="ddp")
    if rank == 0 and weights is not None:
        torch.save(weights, "end.pt")


@both_loops
@pytest.mark.usefixtures("quick_spawn")
def test_a_resumed_run_of_two_ranks_loses_no_csv_rows_when_killed(kind):
    found = []
    for arguments in ((), ("best", (1, 2)), ("auto",)):
        codes, errors = run_processes(train_ranked, kind, *arguments)
        assert codes == [0, 0], errors
        found.append((step_of("."), logs_of("."), torch.load("end.pt", weights_only=True)))
    whole, killed, resumed = found
    assert (killed[0], resumed[:2]) == (5, whole[:2])
    assert same(dict(resumed[2]), dict(whole[2]))

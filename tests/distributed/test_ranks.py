"""What the ranks must have in common: their checkpoint, the length of their loaders."""

import copy
import os
import re
import shutil
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from externally import externally
from fabric_template.process import again
from modules import Classifier, by_step, make_data, make_loader, quiet
from runs import Snapshots, assert_same_end, fit, same, val_loader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointError, read_checkpoint

FORK = {"strategy": "ddp_fork"}
LAST = "checkpoints/run/version_0/last.ckpt"


@pytest.fixture(autouse=True)
def forked_ranks_are_quiet(monkeypatch):
    """Set, so that Lightning gives each rank no more threads than this process has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- an error that is caught


class Raises(Classifier):
    """Ends in an error in the step of these ranks."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank in self.ranks:
            raise ArithmeticError("in a step")
        return super().training_step(batch, batch_idx)


def caught_and_again(rank):
    found = []
    for ranks in ([0, 1], [], [1], []):
        again.PATIENCE = timedelta(
            seconds=1 if ranks == [1] else again.PATIENCE.seconds
        )  # the other cannot come any more
        loop = FabricLoop(strategy="ddp", **quiet(devices=2, max_epochs=1))
        try:
            loop.fit(Raises(ranks), make_loader(40))
            found.append(loop.global_step)
        except (ArithmeticError, RuntimeError) as error:
            found.append(str(error))
    torch.save(found, f"found{rank}.pt")


def test_a_run_behind_an_error_that_was_caught(tmp_path, monkeypatch):
    """Where all ranks caught theirs they run again. Else nothing is sent that another rank takes for its gradients."""
    monkeypatch.chdir(tmp_path)
    codes, errors = externally(caught_and_again)
    assert codes == [0, 0], errors
    waited, raised = (torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2))
    refused = (
        "an error has ended the run before on this rank, and the others are not here, as they wait for it in that run:"
    )
    assert waited[:2] == raised[:2] == ["in a step", 5]
    assert raised[2] == "in a step"
    assert raised[3].startswith(refused)
    assert "closed by peer" in waited[2] or "reset by peer" in waited[2], waited  # once the other has ended
    assert waited[3].startswith(refused)


def met_and_used(rank):
    torch.distributed.init_process_group("gloo")
    found = []
    for _ in range(3):
        again.meet_again()
        (met,) = again._MET
        group = met()  # torch holds it
        torch.distributed.all_reduce(number := torch.tensor(rank + 1), group=group)
        found.append(int(number))
    both_are_through(rank, "groups")
    torch.distributed.destroy_process_group()
    # by a file: the store at the port goes with the first rank's group, and who came to it too early would wait for ever
    torch.distributed.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
    again.meet_again()  # the one before went with all groups
    torch.save(found, f"found{rank}.pt")
    both_are_through(rank, "again")


def both_are_through(rank, name):
    """Wait for the other rank without the groups, which are about to be closed."""
    Path(f"{name}{rank}").touch()
    while not Path(f"{name}{1 - rank}").exists():
        time.sleep(0.01)


def test_nobody_closes_the_group_in_which_others_are_still_meeting(tmp_path, monkeypatch):
    """It stands until the next meeting: a rank that is done with it may be far ahead."""
    monkeypatch.chdir(tmp_path)
    codes, errors = externally(met_and_used)
    assert codes == [0, 0], errors
    assert [torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2)] == [[3, 3, 3]] * 2


# ---- another number of processes


def numbered():
    """48 samples that say who they are."""
    return DataLoader(TensorDataset(*make_data(48).tensors, torch.arange(48)), batch_size=4, shuffle=True)


class Numbered(Classifier):
    """Logs over all ranks; each rank writes down its samples, the state that an epoch began with, and a random number."""

    def __init__(self):
        super().__init__(by_step, sync_dist=True)

    def on_train_epoch_start(self):
        optimizers = [optimizer.state_dict() for optimizer in self.trainer.optimizers]
        schedulers = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        self.began = copy.deepcopy([weights, optimizers, schedulers, self.global_step])
        self.samples, self.drawn = [], torch.rand(1).item()

    def training_step(self, batch, batch_idx):
        self.samples += batch[2].tolist()
        self.log("score", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch[:2], batch_idx)

    def on_train_epoch_end(self):
        found = {"samples": self.samples, "drawn": self.drawn, "began": self.began}
        torch.save(found, f"epoch{self.current_epoch}_rank{self.global_rank}.pt")


def read_epoch(epoch, ranks):
    return [torch.load(f"epoch{epoch}_rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def test_between_two_epochs_another_number_of_processes_goes_on(recwarn):
    """2 -> 1 -> 3: each epoch begins with the state that the one before has left, and has each sample once."""
    words = {"val": val_loader, "monitor": "val_loss", "log_every_n_steps": 1, **FORK}
    fit(".", Numbered, numbered, max_epochs=1, devices=2, **words)
    states = [read_checkpoint(LAST)]
    fit(".", Numbered, numbered, max_epochs=2, devices=1, resume="last", **{**words, "strategy": "auto"})
    states.append(read_checkpoint(LAST))
    _, _, history = fit(".", Numbered, numbered, max_epochs=3, devices=3, resume="auto", **words)
    other = [str(warning.message) for warning in recwarn if "other than" in str(warning.message)]
    assert len(other) == 1  # the forked ones told it elsewhere
    assert re.match(r"resume: other than in the run that goes on: (.*; )?processes 1 \(was 2\)", other[0])
    for epoch, ranks in enumerate([2, 1, 3]):
        found = read_epoch(epoch, ranks)
        assert sorted(sample for part in found for sample in part["samples"]) == list(range(48))
        if epoch:
            state = states[epoch - 1]
            saved = [state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")]
            assert all(same(part["began"], saved) for part in found)
    assert len({part["drawn"] for part in read_epoch(2, 3)}) == 3  # not copies of one state
    assert history[["epoch", "step"]].to_numpy().tolist() == [[0, 6], [1, 18], [2, 22]]
    assert history.notna().all(axis=None)


# ---- ranks that come by themselves


MISSING = [f"{word}='last': there is no last.ckpt under 'checkpoints/run'" for word in ("resume", "load")]
MISSING.append(f"Checkpoint file not found: {LAST}; there are no checkpoints in 'checkpoints/run/version_0'")


def go_on(rank, homes, words):
    os.chdir(homes[rank])  # as on two machines: a disk of its own for each
    loop, *_ = fit(".", Classifier, max_epochs=2, strategy="ddp", devices=2, **words)
    print("went on to step", loop.global_step, file=sys.stderr)


@pytest.fixture
def disks(tmp_path):
    """Three of them: with a checkpoint, with another one of the same name and size, and with none."""
    for name, seed in (("one", 1), ("other", 2)):
        fit(name, Classifier, seed=seed, max_epochs=1, devices=2, **FORK)
    (tmp_path / "empty").mkdir()
    shutil.copytree("one", "same")
    sizes = {name: (tmp_path / name / LAST).stat().st_size for name in ("one", "other", "same")}
    return {name: f"'{LAST}' of {size:,} bytes, step 5, checksum " for name, size in sizes.items()}


@pytest.mark.parametrize("words", [{"resume": "last"}, {"resume": LAST}, {"resume": "auto"}, {"load": "last"}], ids=str)
def test_ranks_that_find_different_files(disks, words):
    """All ranks end with the same line, whether one has another file or none; with the same file they go on."""
    for homes in (["one", "other"], ["one", "empty"]):
        codes, errors = externally(go_on, homes, words)
        lines = [error.splitlines()[-2] for error in errors]
        assert codes == [1, 1]
        assert lines[0] == lines[1]
        start = (
            f"{CheckpointError.__module__}.CheckpointError: the ranks have not found the same checkpoint: rank 0 (on "
        )
        assert lines[0].startswith(start)
        told = lines[0].removeprefix(start)
        what, other = re.split(
            r"; rank 1 \(on [^)]*\): ", told.partition("): ")[2].rpartition(": write default_root_dir=")[0]
        )
        assert what.startswith(disks["one"])
        assert other.startswith(disks[homes[1]] if homes[1] in disks else tuple(MISSING)), other
    codes, errors = externally(go_on, ["one", "same"], words)
    assert (codes, [error.splitlines()[-2] for error in errors]) == ([0, 0], ["went on to step 10"] * 2)


def save_where_it_cannot_be_read_at_first(rank):
    complaint, calls = AtomicCheckpointIO.complaint, []

    def fails_once(*args, **words):
        calls.append(words["reads"])
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return complaint(*args, **words)

    AtomicCheckpointIO.complaint = fails_once
    loop, *_ = fit(".", Classifier, max_epochs=3, strategy="ddp", devices=2)
    print("read back", calls, "step", loop.global_step, file=sys.stderr)


def test_a_first_file_that_rank_zero_cannot_read_back_is_read_at_the_next_save():
    """And the other ranks know that it was not: they wait for its answer once more."""
    codes, errors = externally(save_where_it_cannot_be_read_at_first)
    lines = [error.splitlines()[-2] for error in errors]
    assert (codes, lines) == ([0, 0], ["read back [True, True, False] step 15", "read back [] step 15"])


# ---- loaders of different length


class Longer(DistributedSampler):
    """Rank one has two batches more."""

    def __init__(self, num, rank, more):
        super().__init__(range(num), 2, rank, shuffle=False)
        self.num_samples += 8 * more * rank

    def __iter__(self):
        return iter([index % 40 for index in range(self.num_samples)])


class Sampled(Classifier):
    """Makes its loaders on each rank."""

    def __init__(self, train=0, val=0, normed=False, counted=True):
        super().__init__()
        self.more, self.counted = (train, val), counted
        if normed:
            self.net.append(nn.BatchNorm1d(3))

    def train_dataloader(self):
        return self._loader(self.more[0])

    def val_dataloader(self):
        return self._loader(self.more[1])

    def _loader(self, more):
        sampler = Longer(40, self.global_rank, more)
        if self.counted:
            return DataLoader(make_data(40), batch_size=4, sampler=sampler)
        return DataLoader(Stream(sampler), batch_size=4)


class Stream(IterableDataset):
    """Nobody knows how long it is."""

    def __init__(self, sampler):
        self.sampler, self.data = sampler, make_data(40)

    def __iter__(self):
        return (self.data[index] for index in self.sampler)


def lengths_differ(stage, lengths, where):
    one, other = lengths
    return (
        f"the ranks have {stage} loaders of different length (rank 0 has {one}, rank 1 has {other} batches): those with more"
        f" would wait {where} for ever; give each as many, write limit_{stage}_batches=5, or leave the sampler out: the loop"
        " shares the samples itself"
    )


@pytest.mark.parametrize(
    ("made", "words", "refusal"),
    [
        ({"train": 1}, {}, lengths_differ("train", (5, 7), "in their next step")),
        ({"train": 1}, {"limit_train_batches": 5}, None),
        ({"train": 1}, {"max_steps": 5}, None),
        ({"train": 1}, {"max_steps": 6}, lengths_differ("train", (5, 6), "in their next step")),
        ({"val": 1}, {}, None),
        ({"val": 1, "normed": True}, {}, lengths_differ("val", (5, 7), "for rank zero's buffers (BatchNorm)")),
        ({"val": 1, "normed": True}, {"limit_val_batches": 3}, None),
        ({"counted": False}, {}, None),
    ],
    ids=str,
)
def test_loaders_of_different_length(made, words, refusal):
    """They would wait for each other until the group's timeout, half an hour; said at once, where it is so."""
    words = {"max_epochs": 2, "strategy": "ddp_fork", "devices": 2, **words}
    loop = FabricLoop(**quiet(**words))
    with nullcontext() if refusal is None else pytest.raises(Exception, match=re.escape(refusal)):
        loop.fit(Sampled(**made))


class OfRankZero(Snapshots):
    def on_train_batch_start(self, trainer, *args):
        if trainer.is_global_zero:  # which alone writes
            super().on_train_batch_start(trainer, *args)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_state_goes_on_with_its_own_shuffled_share(tmp_path):
    """StatefulDataLoader has a RandomSampler of its own, of which each rank takes its part, drawn once for each pass."""
    make = lambda: StatefulDataLoader(make_data(28), batch_size=4, shuffle=True)  # noqa: E731
    words = {"max_epochs": 2, "save_every_n_steps": 1, "strategy": "ddp_fork", "devices": 2}
    copies = OfRankZero(tmp_path / "whole", tmp_path / "killed")
    whole = fit(tmp_path / "whole", Classifier, make, callbacks=[copies], **words)
    for batches in (1, 4, 6):
        assert_same_end(
            whole, fit(tmp_path / "killed" / str(batches), Classifier, make, seed=99, resume="last", **words)
        )

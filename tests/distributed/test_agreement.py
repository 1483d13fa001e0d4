"""Test that processes must agree on their checkpoint and on the length of their loaders."""

import copy
import json
import os
import random
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from clock import Clock
from lightning.fabric.strategies import DDPStrategy
from modules import Classifier, by_step, make_data, quiet, sgd
from parameters import halve
from processes import run_processes
from runs import fit, same, val_loader
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

from fabric_template import FabricLoop, MiniLoop, TensorLoader
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.errors import CheckpointError, ConfigurationError
from fabric_template.training import progress

FORK = {"strategy": "ddp_fork"}
both_loops = pytest.mark.parametrize("kind", [FabricLoop, MiniLoop])
LAST = "checkpoints/run/version_0/last.ckpt"


# Resuming with a different number of processes


def numbered():
    """Return a loader of 48 samples, each of which contains its index."""
    return DataLoader(TensorDataset(*make_data(48).tensors, torch.arange(48)), batch_size=4, shuffle=True)


class Numbered(Classifier):
    """A module that saves each rank's samples, a random number, and the weights and optimizer states at the epoch's start."""

    def __init__(self):
        super().__init__(by_step, sync_dist=True)

    def on_train_epoch_start(self):
        optimizers = [optimizer.state_dict() for optimizer in self.trainer.optimizers]
        schedulers = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        self.state_at_start = copy.deepcopy([weights, optimizers, schedulers, self.global_step])
        self.samples, self.drawn = [], torch.rand(1).item()

    def training_step(self, batch, batch_idx):
        self.samples += batch[2].tolist()
        self.log("score", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch[:2], batch_idx)

    def on_train_epoch_end(self):
        found = {"samples": self.samples, "drawn": self.drawn, "started": self.state_at_start}
        torch.save(found, f"epoch{self.current_epoch}_rank{self.global_rank}.pt")


def read_epoch(epoch, ranks):
    return [torch.load(f"epoch{epoch}_rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def test_a_run_saved_after_an_epoch_resumes_with_a_different_number_of_processes(recwarn):
    """Each epoch starts from the saved weights and optimizer states, and reads each sample once."""
    options = {"val": val_loader, "monitor": "val_loss", "log_every_n_steps": 1, **FORK}
    fit(".", Numbered, numbered, max_epochs=1, devices=2, **options)
    states = [read_checkpoint(LAST)]
    fit(".", Numbered, numbered, max_epochs=2, devices=1, resume="last", **{**options, "strategy": "auto"})
    states.append(read_checkpoint(LAST))
    _, _, history = fit(".", Numbered, numbered, max_epochs=3, devices=3, resume="auto", **options)
    found = [str(warning.message) for warning in recwarn if "processes was 2 and is now 1" in str(warning.message)]
    assert len(found) == 1
    for epoch, ranks in enumerate([2, 1, 3]):
        found = read_epoch(epoch, ranks)
        assert sorted(sample for part in found for sample in part["samples"]) == list(range(48))
        if epoch:
            state = states[epoch - 1]
            saved = [state[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")]
            assert all(same(part["started"], saved) for part in found)
    # After resuming, each process must draw different random numbers.
    assert len({part["drawn"] for part in read_epoch(2, 3)}) == 3
    assert history[["epoch", "step"]].to_numpy().tolist() == [[0, 6], [1, 18], [2, 22]]
    assert history.notna().all(axis=None)


class DrawsNumbers(Classifier):
    def on_train_epoch_start(self):
        drawn = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        Path(f"drawn{self.current_epoch}_{torch.distributed.get_rank()}").write_text(str(drawn))


def fit_in_processes(rank, kind, devices, resume):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    loop = kind(accelerator="cpu", strategy="ddp", devices=devices, max_epochs=devices - 1)
    loop.fit(DrawsNumbers(), DataLoader(make_data(48), 4), resume=resume)


@pytest.mark.filterwarnings("ignore:.*number of processes was 2 and is now 3")
def test_additional_processes_of_a_resumed_run_draw_their_own_random_numbers():
    """FabricLoop and MiniLoop draw the same random numbers."""
    found = []
    for kind in (FabricLoop, MiniLoop):
        shutil.rmtree("checkpoints", ignore_errors=True)
        for devices, resume in ((2, None), (3, "last")):
            codes, errors = run_processes(fit_in_processes, kind, devices, resume, ranks=devices)
            assert codes == [0] * devices, errors
        found.append([Path(f"drawn1_{rank}").read_text() for rank in range(3)])
        numbers = zip(*map(json.loads, found[-1]), strict=True)
        assert [len(set(of_ranks)) for of_ranks in numbers] == [3, 3, 3]
    assert found[0] == found[1]


def train_with(processes, **options):
    where = {"strategy": "ddp_fork", "devices": processes} if processes > 1 else {"devices": 1}
    return fit(".", Classifier, **where, **options)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_resuming_mid_epoch_is_refused_if_the_number_of_processes_differs(first, second):
    train_with(first, max_steps=2)
    with pytest.raises(CheckpointError, match=f"middle of an epoch, when the number of processes was {first}"):
        train_with(second, max_steps=4, resume="last")


# Checkpoints that are missing or differ in one of the processes


def resume_in(rank, folders, arguments):
    # Use different folders, as on two machines without a shared disk.
    os.chdir(folders[rank])
    loop, *_ = fit(".", Classifier, max_epochs=2, strategy="ddp", devices=2, **arguments)
    print("ended at step", loop.global_step, file=sys.stderr)


@pytest.mark.parametrize(
    "arguments",
    [{"resume": "last"}, pytest.param({"resume": "auto"}, marks=pytest.mark.soak), {"load": "last"}],
    ids=str,
)
def test_processes_that_find_different_checkpoints_raise_the_same_error(arguments):
    """Only one process finds a checkpoint. If both find the same checkpoint, both resume."""
    fit("one", Classifier, max_epochs=1, devices=2, **FORK)
    Path("empty").mkdir()
    shutil.copytree("one", "same")
    codes, errors = run_processes(resume_in, ["one", "empty"], arguments)
    assert codes == [1, 1]
    for error in errors:
        assert "CheckpointError: resume: the processes found different checkpoints" in error
    codes, errors = run_processes(resume_in, ["one", "same"], arguments)
    assert codes == [0, 0]
    assert all("ended at step 10" in error for error in errors)


def start_alone(rank, arguments):
    fit(".", Classifier, max_epochs=1, strategy="ddp", devices=1, **arguments)


@pytest.mark.parametrize(
    "arguments", [{"resume": "missing.ckpt"}, {"resume": "last"}, {"load": "missing.ckpt"}], ids=str
)
def test_a_missing_checkpoint_raises_an_error_under_ddp_with_one_process(arguments):
    codes, errors = run_processes(start_alone, arguments, ranks=1)
    assert codes == [1]
    assert "MissingCheckpointError" in errors[0]


# Loaders with a different length in each process


class Longer(DistributedSampler):
    """A sampler with two more batches in process 1."""

    def __init__(self, rank):
        super().__init__(range(40), 2, rank, shuffle=False)
        self.num_samples += 8 * rank

    def __iter__(self):
        return iter([index % 40 for index in range(self.num_samples)])


class Sampled(Classifier):
    """A module that creates a loader of a different length on each rank."""

    def train_dataloader(self):
        return DataLoader(make_data(40), batch_size=4, sampler=Longer(self.global_rank))


def test_loaders_with_different_lengths_in_two_processes_are_refused():
    """Processes with different numbers of batches would wait for each other until a timeout of 30 minutes."""
    options = {"max_epochs": 2, "strategy": "ddp_fork", "devices": 2}
    with pytest.raises(ConfigurationError, match=r"train_dataloader: got \[5, 7\] batches in the processes"):
        FabricLoop(**quiet(**options)).fit(Sampled())
    FabricLoop(**quiet(**options, limit_train_batches=5)).fit(Sampled())


# Buffers that differ between the processes when a run resumes


def resume_with_own_buffers(rank):
    for epochs, resume in ((1, None), (2, "last")):
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        options = {"devices": 2, "strategy": DDPStrategy(broadcast_buffers=False), "max_epochs": epochs}
        loop = FabricLoop(accelerator="cpu", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop.fit(net, DataLoader(make_data(16), 4), optimizer=sgd(net), training_step=loss_of, resume=resume)
        if rank == 0:
            assert any("got broadcast_buffers=False" in str(warning.message) for warning in caught) == (epochs == 2)


def test_fabric_loop_warns_when_a_run_resumes_with_broadcast_buffers_false():
    codes, errors = run_processes(resume_with_own_buffers)
    assert codes == [0, 0], errors


# Metrics that the processes log in different orders, or that only one process logs


def loss_of(net, batch):
    return torch.nn.functional.cross_entropy(net(batch[0]), batch[1])


def return_in_order_of_rank(net, batch):
    """Return the same values in each process, but in different orders."""
    loss, rank = loss_of(net, batch), torch.distributed.get_rank()
    values = [("score", torch.tensor(3.0 + rank)), ("lag", torch.tensor(20.0 + rank))]
    return dict([("loss", loss), *(values if rank == 0 else values[::-1])])


def return_more_in_rank_1(net, batch):
    values = return_in_order_of_rank(net, batch)
    return values if torch.distributed.get_rank() == 0 else {"extra": values["lag"], **values}


def fit_with_values(rank, kind, step, **options):
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 3)
    loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, **options)
    steps = {"training_step": return_in_order_of_rank, "validation_step": step}
    loop.fit(net, DataLoader(make_data(16), 4), DataLoader(make_data(18), 4), optimizer=sgd(net), **steps)
    names = ("train_score", "train_lag", "val_score", "val_lag")
    assert [loop.callback_metrics[name].item() for name in names] == [3.5, 20.5] * 2


@pytest.mark.parametrize(("kind", "options"), halve([FabricLoop, MiniLoop], [{}, {"validate_every_n_steps": 1}]))
def test_metrics_that_each_process_returns_in_a_different_order_are_reduced_by_name(kind, options):
    codes, errors = run_processes(partial(fit_with_values, **options), kind, return_in_order_of_rank)
    assert codes == [0, 0], errors


def record_samples(rank, kind):
    samples = torch.arange(16.0).unsqueeze(1)
    seen = []
    for loader in (DataLoader(TensorDataset(samples), 4), TensorLoader(samples, batch_size=4)):
        net, read = torch.nn.Linear(1, 1), []
        loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=2)

        def step(net, batch, read=read):
            read.extend(batch[0].flatten().tolist())
            return net(batch[0]).mean()

        loop.fit(net, loader, optimizer=sgd(net), training_step=step)
        seen.append(read)
    assert seen[0] == seen[1] != sorted(seen[0])


@both_loops
def test_a_tensor_loader_has_the_sample_order_of_a_data_loader(kind):
    codes, errors = run_processes(record_samples, kind)
    assert codes == [0, 0], errors


class LogsInHooks(Classifier):
    """A module that logs two values in the hooks at the end of an epoch, in an order that depends on the process."""

    def _log(self, **values):
        for name in sorted(values, reverse=torch.distributed.get_rank() == 1):
            self.log(name, values[name], sync_dist=True)

    def on_validation_epoch_end(self):
        self._log(val_first=4.0, val_second=9.0)

    def on_train_epoch_end(self):
        self._log(early=1.0, late=7.0)


def fit_with_values_of_hooks(rank, kind):
    loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, monitor="val_second", mode="min")
    loop.fit(LogsInHooks(), DataLoader(make_data(16), 4), DataLoader(make_data(18), 4))
    names = ("early", "late", "val_first", "val_second")
    assert [loop.callback_metrics[name].item() for name in names] == [1.0, 7.0, 4.0, 9.0]


@both_loops
def test_metrics_that_hooks_log_in_a_different_order_in_each_process_are_reduced_by_name(kind):
    codes, errors = run_processes(fit_with_values_of_hooks, kind)
    assert codes == [0, 0], errors


@both_loops
def test_a_metric_that_only_one_process_returns_is_refused(kind):
    codes, errors = run_processes(fit_with_values, kind, return_more_in_rank_1)
    assert codes == [1, 1]
    names = "['val_lag', 'val_loss', 'val_score'], ['val_extra', 'val_lag', 'val_loss', 'val_score']"
    message = f"Error: log: got the metric names [{names}]"
    assert all(message in error for error in errors), errors


class LogsInOneProcess(Classifier):
    """A module that logs a torchmetrics object, whose compute() waits for all processes, only in the first process."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(batch[0].mean())
        if self.global_rank == 0:
            self.log("val_mean", self.mean)


def fit_and_log_in_one_process(rank, kind):
    loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=1)
    loop.fit(LogsInOneProcess(), DataLoader(make_data(16), 4), DataLoader(make_data(18), 4))


@both_loops
def test_a_torchmetrics_object_that_only_one_process_logs_is_refused(kind):
    """If fit raised no error, the first process would wait until the timeout of the process group."""
    codes, errors = run_processes(fit_and_log_in_one_process, kind, timeout=60)
    assert codes == [1, 1]
    message = "Error: log: got the metric names [['val_mean'], []] from the processes"
    assert all(message in error for error in errors), errors


# Learning rates and optimizer states that differ between the processes


class RatePerRank(Classifier):
    """A module that gets a different learning rate on rank 1 from ReduceLROnPlateau or from a hook."""

    def __init__(self, cause):
        super().__init__()
        self.cause = cause

    def configure_optimizers(self):
        optimizer = sgd(self)
        patience = 0 if self.cause == "unsynced metric" else 5
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_score"}

    def validation_step(self, batch, batch_idx):
        rank, epoch = torch.distributed.get_rank(), self.current_epoch
        is_synced = self.cause != "unsynced metric"
        self.log("val_score", float(epoch * (2 * rank - 1)), sync_dist=is_synced, on_epoch=True)

    def on_train_epoch_start(self):
        optimizer = self.optimizers()
        if self.cause == "hook" and self.current_epoch == 1:
            optimizer.param_groups[0]["lr"] *= 1 + torch.distributed.get_rank()


def fit_with_rates(rank, kind, cause):
    torch.manual_seed(0)
    loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=3)
    loop.fit(RatePerRank(cause), DataLoader(make_data(16), 4), DataLoader(make_data(18), 4))


@both_loops
@pytest.mark.parametrize("cause", ["unsynced metric", "hook", "none"])
def test_learning_rates_that_differ_between_processes_are_refused(kind, cause):
    """Different learning rates give different weights, of which a resumed run would restore only those of rank 0."""
    codes, errors = run_processes(fit_with_rates, kind, cause)
    if cause == "none":
        assert codes == [0, 0], errors
        return
    assert codes == [1, 1]
    rates = "[0.1], [0.010000000000000002]" if cause == "unsynced metric" else "[0.1], [0.2]"
    assert all(f"Error: optimizer: got the learning rates {rates} in the processes" in error for error in errors)
    assert read_checkpoint(LAST)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1


class Unfreezes(Classifier):
    """A module that trains its first layer from the second epoch on.

    DDP synchronizes this layer only if the layer is not yet frozen when DDP wraps the model.
    """

    def __init__(self, freezes_early):
        super().__init__()
        self.freezes_early = freezes_early
        self.net[0].requires_grad_(not freezes_early)

    def on_train_start(self):
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)


def fit_and_unfreeze(rank, kind, freezes_early):
    torch.manual_seed(0)
    loop = kind(accelerator="cpu", strategy="ddp_find_unused_parameters_true", devices=2, max_epochs=2)
    module = Unfreezes(freezes_early)
    loop.fit(module, DataLoader(make_data(16), 4))
    torch.save(module.state_dict(), f"{rank}.pt")


@both_loops
@pytest.mark.parametrize("freezes_early", [True, False])
def test_weights_that_ddp_does_not_synchronize_are_refused(kind, freezes_early):
    """DDP never averages the gradients of parameters that are frozen when it wraps the model."""
    codes, errors = run_processes(fit_and_unfreeze, kind, freezes_early)
    if not freezes_early:
        assert codes == [0, 0], errors
        assert same(*(torch.load(f"{rank}.pt", weights_only=True) for rank in range(2)))
        return
    assert codes == [1, 1]
    text = "Error: strategy: got DDP and the parameters net.0.bias, net.0.weight, which did not require a gradient"
    assert all(text in error for error in errors), errors
    assert read_checkpoint(LAST)["epoch"] == 0


class ShardedState(Classifier):
    """A module that trains with an optimizer whose state is divided among the processes."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def configure_optimizers(self):
        with warnings.catch_warnings():
            # Ignore warnings, because importing the optimizer calls torch.jit.script, which is deprecated.
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.02)

    def on_train_epoch_end(self):
        if self.current_epoch == 1 and self.fails:
            raise ValueError("killed")


def fit_with_sharded_state(kind, name, fails=False, resume=None):
    torch.manual_seed(0)
    module = ShardedState(fails)
    loop = kind(accelerator="cpu", strategy="ddp", devices=2, max_epochs=3, name=name)
    loop.fit(module, DataLoader(make_data(16), 4), resume=resume)
    return module.state_dict()


def resume_with_sharded_state(rank, kind):
    expected = fit_with_sharded_state(kind, "straight")
    with pytest.raises(ValueError, match="killed"):
        fit_with_sharded_state(kind, "stopped", fails=True)
    assert same(expected, fit_with_sharded_state(kind, "stopped", resume="last"))


@both_loops
def test_a_run_with_a_zero_redundancy_optimizer_resumes_exactly(kind):
    codes, errors = run_processes(resume_with_sharded_state, kind)
    assert codes == [0, 0], errors


# Attributes of Trainer that a LightningModule reads in each process


class ReadsRank(Classifier):
    def training_step(self, batch, batch_idx):
        trainer, rank = self.trainer, torch.tensor(float(self.global_rank))
        self.found = [self.global_rank, self.local_rank, trainer.world_size, trainer.is_global_zero]
        self.found += [self.all_gather({"rank": rank})["rank"].tolist()]
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.print("printed by rank", self.global_rank, file=sys.stderr)


def fit_and_read_ranks(rank, kind, devices):
    module = ReadsRank()
    strategy = "ddp" if devices == 2 else "auto"
    kind(accelerator="cpu", strategy=strategy, devices=devices, max_epochs=1).fit(module, DataLoader(make_data(16), 4))
    assert module.found == [rank, rank, devices, rank == 0, [0.0, 1.0] if devices == 2 else 0.0]


@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated")
@both_loops
@pytest.mark.parametrize("devices", [1, 2])
def test_a_module_can_read_its_rank_and_gather_tensors(kind, devices):
    codes, errors = run_processes(fit_and_read_ranks, kind, devices, ranks=devices)
    assert codes == [0] * devices, errors
    assert [error.count("printed by rank") for error in errors] == [1, 0][:devices]


# Validation intervals given as a time, with clocks that differ between the processes


class Records(Classifier):
    """A module that records how many batches precede each validation. The clock of rank 1 runs faster."""

    def setup(self, stage):
        self.clock = progress.time = Clock()
        self.validated, self.batches = [], 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches += 1
        self.clock.sleep(0.3 + self.global_rank)

    def on_validation_start(self):
        self.validated.append(self.batches)

    def on_train_end(self):
        progress.time = time
        Path(f"validated{self.global_rank}").write_text(str(self.validated))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_clock_of_the_first_process_decides_when_all_processes_validate(devices):
    options = {"max_epochs": 2, "val_check_interval": "00:00:00:01", "num_sanity_val_steps": 0}
    fit(".", Records, val=val_loader, devices=devices, **options, **FORK)
    found = [Path(f"validated{rank}").read_text() for rank in range(devices)]
    assert len(set(found)) == 1
    expected = [4, 8, 12, 16, 20] if devices == 1 else [4, 8]
    assert found[0] == str(expected)

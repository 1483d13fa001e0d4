"""Compare DDP on two gloo processes with Trainer, and test its files and results.

Each process writes its results under tmp_path, and the test reads them.
"""

import lightning.pytorch as pl
import pytest
import torch
from modules import (
    Classifier,
    assert_same_metrics,
    assert_same_weights,
    by_step,
    make_data,
    make_loader,
    quiet,
    run_loop,
    run_trainer,
    sgd,
)
from parameters import keep, leave
from runs import assert_same_end, fit, logs_of, same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from fabric_template import FabricLoop, read_logs

FORK = {"strategy": "ddp_fork", "devices": 2}


class Synced(Classifier):
    """A module whose logged values are averaged, added, or reduced to the maximum over all processes."""

    def __init__(self, optimizers=sgd, **options):
        super().__init__(optimizers, sync_dist=True, **options)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        options = {"sync_dist": True, "on_epoch": True}
        self.log("val_loss", cross_entropy(logits, y), **options)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), **options)
        self.log("val_sum", x.sum(), reduce_fx="sum", **options)
        self.log("val_max", x.max(), reduce_fx="max", **options)
        # Without sync_dist, only the value of the first process is logged.
        self.log("val_rank", float(self.global_rank))


class Report(pl.Callback):
    def __init__(self, folder):
        self.folder = folder
        self.gradients = []
        self.accuracies = []

    def on_after_backward(self, trainer, pl_module):
        gradient = next(pl_module.parameters()).grad
        self.gradients.append(gradient.clone())

    def on_train_epoch_end(self, trainer, pl_module):
        self.accuracies.append(trainer.callback_metrics["train_acc"])

    def on_train_end(self, trainer, pl_module):
        seen = {
            "weights": {name: value.clone() for name, value in pl_module.state_dict().items()},
            "metrics": dict(trainer.callback_metrics),
            "gradients": self.gradients,
            "accuracies": self.accuracies,
            "rank": (trainer.global_rank, trainer.world_size, trainer.is_global_zero),
        }
        torch.save(seen, f"{self.folder}/rank{trainer.global_rank}.pt")


def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def step_function(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(path.relative_to(folder).as_posix() for path in found)


# The files and results of a run with two processes


def test_two_processes_write_each_file_only_once(tmp_path):
    """After the run, the caller's module and loop contain the results."""
    pl.seed_everything(1, verbose=False)
    module = Synced(by_step)
    loop = FabricLoop(
        accelerator="cpu",
        **FORK,
        max_epochs=3,
        monitor="val_loss",
        default_root_dir=str(tmp_path),
        callbacks=[Report(tmp_path)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    history = loop.fit(module, train(), val())

    one, other = ranks(tmp_path)
    assert (one["rank"], other["rank"]) == ((0, 2, True), (1, 2, False))
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    reduced = [name for name in one["metrics"] if name.startswith(("train_loss", "val")) and name != "val_rank"]
    assert {name for name in reduced if not torch.equal(one["metrics"][name], other["metrics"][name])} == set()
    # train_acc is logged without sync_dist, so its values differ between the processes.
    assert one["accuracies"] != other["accuracies"]

    version = "run/version_0"
    assert files(tmp_path) == sorted(
        [
            f"checkpoints/{version}/best.ckpt",
            f"checkpoints/{version}/last.ckpt",
            f"logs/{version}/config.yaml",
            f"logs/{version}/hparams.yaml",
            f"logs/{version}/metrics.csv",
            "rank0.pt",
            "rank1.pt",
        ]
    )

    # After fit, the caller's module and loop must have the weights, history, metrics, counters and paths.
    assert {
        name for name, value in module.state_dict().items() if not torch.equal(value, one["weights"][name])
    } == set()
    assert sorted(loop.callback_metrics) == sorted(one["metrics"])
    assert all(torch.equal(loop.callback_metrics[name], one["metrics"][name]) for name in one["metrics"])
    assert list(history["epoch"]) == [0, 1, 2]
    # Each of two processes reads 20 of the 40 samples in batches of four, so an epoch has five steps.
    assert list(history["step"]) == [5, 10, 15]
    columns = [column for column in history.columns if column not in ("time", "waiting")]
    averages = ["train_loss", "train_acc", "val_loss", "val_acc", "val_sum", "val_max", "val_rank"]
    assert columns == ["epoch", "step", *averages, "lr"]
    logged = read_logs(tmp_path / "logs")
    assert logged[columns].to_numpy().tolist() == pytest.approx(history[columns].to_numpy())
    assert (loop.current_epoch, loop.global_step) == (3, 15)
    assert loop.checkpoint_callback.best_model_path == str(tmp_path / "checkpoints" / version / "best.ckpt")
    assert loop.checkpoint_callback.best_model_score == pytest.approx(history["val_loss"].min())
    checkpoint = torch.load(tmp_path / "checkpoints" / version / "last.ckpt", weights_only=True)
    assert all(torch.equal(value, one["weights"][name]) for name, value in checkpoint["state_dict"].items())
    assert not torch.distributed.is_initialized()


# Comparison of DDP runs with Trainer, with spawned processes and with resumed runs


CASES = {
    "plain": {},
    "accumulate_and_clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "val_check_interval": {"val_check_interval": 2},
}


@pytest.mark.parametrize("name", leave(CASES, "bf16_mixed"))
def test_ddp_gives_the_same_weights_and_metrics_as_trainer(name):
    options = {"max_epochs": 2, **FORK, **CASES[name]}
    trainer, expected = run_trainer(lambda: Synced(by_step), train, val, **options)
    loop, module = run_loop(lambda: Synced(by_step), train, val, **options)
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    # Compare the counters with numbers, because Trainer's counters stay at 0 in the caller's process.
    assert (loop.current_epoch, loop.global_step) == (2, 4 if "accumulate_grad_batches" in options else 10)


def weighted():
    sampler = WeightedRandomSampler(torch.arange(40) + 1.0, 40, generator=torch.Generator().manual_seed(2))
    return DataLoader(make_data(), batch_size=4, sampler=sampler)


@pytest.mark.parametrize("make", [lambda: make_loader(shuffle=False), weighted], ids=["unshuffled", "weighted"])
def test_training_loaders_shuffle_in_the_same_order_as_with_trainer(make):
    """With several processes, Trainer shuffles every training loader that has no DistributedSampler."""
    _, expected = run_trainer(Synced, make, max_epochs=2, **FORK)
    _, module = run_loop(Synced, make, max_epochs=2, **FORK)
    assert_same_weights(expected, module)


@pytest.mark.usefixtures("quick_spawn")
def test_training_in_spawned_processes_gives_the_same_weights_as_in_forked_processes():
    """Spawned processes get the weights in shared memory, so they must train on copies."""
    forked, expected = run_loop(Synced, train, val, max_epochs=2, **FORK)
    spawned, module = run_loop(Synced, train, val, max_epochs=2, strategy="ddp_spawn", devices=2)
    assert_same_weights(expected, module)
    assert_same_metrics(forked, spawned)


class StepBoth:
    """A step function that steps two optimizers. Unlike a lambda, it can be pickled."""

    def __init__(self, loop, optimizers):
        self.loop, self.optimizers = loop, optimizers

    def __call__(self, net, batch):
        loss = cross_entropy(net(batch[0]), batch[1])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loop.backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


@pytest.mark.usefixtures("quick_spawn")
def test_a_training_step_can_call_optimizer_step_in_spawned_processes():
    nets = []
    for strategy in ("ddp_fork", "ddp_spawn"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in net]
        loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy=strategy)
        step = StepBoth(loop, optimizers)
        loop.fit(net, make_loader(), training_step=step, optimizer=optimizers)
        assert loop.global_step == 2 * len(make_loader()) // 2
        nets.append(net)
    assert_same_weights(*nets)


class Late(Synced):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 3))


def test_layers_created_in_forked_processes_are_copied_to_the_main_process():
    loop, module = run_loop(Late, train, val, max_epochs=1, precision="64-true", **FORK)
    assert module.net[0].weight.dtype == torch.float64
    assert loop.validate(module, val(), verbose=False)[0]["val_loss"] == loop.callback_metrics["val_loss"].item()


@pytest.mark.usefixtures("quick_spawn")
def test_spawned_processes_do_not_share_the_optimizer_state():
    """If the processes shared the optimizer state, both would change the same moments of Adam."""
    nets = []
    for strategy in ("ddp_fork", "ddp_spawn"):
        torch.manual_seed(1)
        net = nn.Linear(8, 3)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for where in ({}, {"strategy": strategy, "devices": 2}):
            loop = FabricLoop(**quiet(max_epochs=1, **where))
            loop.fit(net, make_loader(40), optimizer=optimizer, training_step=step_function)
        nets.append(net)
    assert_same_weights(*nets)


def test_callback_states_of_forked_processes_are_copied_to_the_main_process(tmp_path):
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", filename="best")
    options = {"callbacks": [stopping, saving], "enable_checkpointing": True, **FORK}
    loop, _ = run_loop(Synced, train, val, max_epochs=4, **options)
    assert loop.current_epoch == 2
    assert stopping.stopped_epoch == 1
    assert saving.best_model_path == str(tmp_path / "best.ckpt")
    assert files(tmp_path) == ["best.ckpt"]


def test_ddp_averages_gradients_once_per_accumulation_window(tmp_path):
    """Before the last batch of an accumulation window, the processes have different gradients."""
    loop = FabricLoop(**quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[Report(tmp_path)], **FORK))
    pl.seed_everything(1, verbose=False)
    loop.fit(Synced(), train())
    one, other = (seen["gradients"] for seen in ranks(tmp_path))
    are_equal = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    # The optimizer steps follow batches 1, 3 and 4. DDP averages the gradients only in these batches.
    assert are_equal == [False, True, False, True, True]
    assert loop.global_step == 3


class SavesInMidStep(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx == 7:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/mid.ckpt")


def stateful():
    return StatefulDataLoader(make_data(), batch_size=4, shuffle=True)


@pytest.mark.filterwarnings("ignore:resume. .* are read again", "ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("train", keep([weighted, stateful], stateful))
def test_a_ddp_run_resumed_mid_epoch_matches_an_uninterrupted_run(tmp_path, train):
    """One run stops in its third epoch. Another run is saved in the middle of an accumulation window."""
    options = {"max_epochs": 3, "monitor": "val_loss", **FORK}
    make = lambda: Synced(by_step)  # noqa: E731
    whole = fit(tmp_path / "whole", make, train, val, **options)
    fit(tmp_path / "parts", make, train, val, max_steps=12, **options)
    resumed = fit(tmp_path / "parts", make, train, val, seed=99, resume="last", **options)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "parts") == logs_of(tmp_path / "whole")
    saved = [torch.load(path, weights_only=True)["optimizer_states"] for path in tmp_path.rglob("last.ckpt")]
    assert same(*saved)
    # A run saved in the middle of an accumulation window must restore the gradients, which differ in each process.
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, **FORK}
    whole = fit(tmp_path / "mid", train=train, callbacks=[SavesInMidStep()], **options)
    resumed = fit(tmp_path / "rest", train=train, seed=99, resume=tmp_path / "mid/mid.ckpt", **options)
    assert_same_weights(whole[1], resumed[1])


# Evaluation and errors with two processes


class UnevenStream(IterableDataset):
    """A dataset that ends after ten samples in one process and after seven in the other."""

    def __iter__(self):
        x, y = make_data(20).tensors
        rank = torch.distributed.get_rank()
        yield from zip(x[rank::2][: 10 - 3 * rank], y[rank::2], strict=False)


def uneven_stream():
    return DataLoader(UnevenStream(), batch_size=2)


@pytest.mark.filterwarnings("ignore:train_dataloaders. the processes", "ignore:resume. .* are read again")
@pytest.mark.parametrize("limit", keep([1.0, 4, 6], 1.0))
def test_an_epoch_ends_in_both_processes_when_one_process_runs_out_of_batches(tmp_path, limit):
    """If only one process ended the epoch, the process with the longer loader would wait forever."""
    options = {**FORK, "max_epochs": 2, "limit_train_batches": limit, "save_every_n_steps": 1}
    whole = fit(tmp_path / "whole", Synced, uneven_stream, val, **options)
    assert whole[0].global_step == 8
    fit(tmp_path / "parts", Synced, uneven_stream, val, **options, max_steps=6)
    resumed = fit(tmp_path / "parts", Synced, uneven_stream, val, seed=99, resume="last", **options)
    assert_same_end(whole, resumed)


def test_an_error_in_a_process_reaches_the_caller():
    class Broken(Synced):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("the step is broken")

    with pytest.raises(Exception, match="the step is broken"):
        FabricLoop(**quiet(max_epochs=1, **FORK)).fit(Broken(), train())


def test_a_lambda_as_training_step_is_refused_with_ddp_spawn():
    net = nn.Linear(8, 3)
    loop = FabricLoop(**quiet(max_epochs=1, devices=2), strategy="ddp_spawn")
    with pytest.raises(TypeError) as caught:
        loop.fit(net, make_loader(), training_step=lambda net, batch: step_function(net, batch), optimizer=sgd(net))
    assert "strategy: got a strategy that spawns processes" in str(caught.value)
    assert "<lambda>" in str(caught.value)


class LogsNothing(nn.Module):
    """A module whose steps return different values in each process."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).sum() * 0 + batch[0].mean()

    def validation_step(self, batch):
        return batch[0].mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_values_returned_by_step_methods_are_averaged_over_all_processes(tmp_path):
    """Returned values have no option such as sync_dist, so they are always averaged."""
    data = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2)
    history = FabricLoop(**quiet(max_epochs=1, **FORK)).fit(LogsNothing(), data, data)
    assert history[["train_loss", "val_loss"]].to_numpy().tolist() == [[3.5, 3.5]]


class DifferentInEachProcess(Synced):
    """A module whose weights differ between the processes until DDP wraps the model."""

    def setup(self, stage):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += self.trainer.global_rank


def test_validate_uses_the_weights_of_the_first_process():
    """Like Trainer, FabricLoop copies the weights of the first process to all processes."""
    data = make_loader(shuffle=False)
    torch.manual_seed(0)
    [alone] = FabricLoop(**quiet(devices=1)).validate(Synced(), data, verbose=False)
    torch.manual_seed(0)
    [found] = FabricLoop(**quiet(**FORK)).validate(DifferentInEachProcess(), data, verbose=False)
    assert found["val_loss"] == pytest.approx(alone["val_loss"])


class HasUnusedLayer(Synced):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


def test_unused_parameters_raise_an_error_with_ddp():
    with pytest.raises(Exception, match="parameters that were not used in producing the loss"):
        FabricLoop(**quiet(max_epochs=1, **FORK)).fit(HasUnusedLayer(), make_loader())

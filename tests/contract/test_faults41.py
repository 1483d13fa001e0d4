"""The 41 faults of Lightning's build_your_own_trainer (its examples/fabric), each shown not to be ours.

The number in a test's name is the fault's in the list; its docstring says what went wrong there. None had to
be taken on trust as impossible by construction: the last test checks that every number from 1 to 41 has a test.
"""

import ast
import importlib
import pkgutil
import re
import signal
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
from fabric_template.record.terminal import Terminal
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.utilities.warnings import PossibleUserWarning
from modules import Classifier, assert_same_weights, make_loader, quiet
from test_size_and_language import is_new_engine
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset

import fabric_template
from fabric_template import FabricLoop, MiniLoop, TensorLoader
from fabric_template.errors import CheckpointError

# by which the net counts what was done
pytestmark = pytest.mark.filterwarnings("ignore:resume. (on_train_epoch_start of Net|Net.trained)")

PACKAGE = Path(fabric_template.__file__).parent
FORK = {"strategy": "ddp_fork", "devices": 2}
both_loops = pytest.mark.parametrize("loop_class", [FabricLoop, MiniLoop])


class Net(nn.Module):
    """A plain module with step methods that counts what happens to it."""

    def __init__(self, optimizers=None):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)
        self.optimizers_of = optimizers or (lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        self.trained, self.validated, self.rates = 0, 0, []

    def training_step(self, batch, batch_idx):
        self.trained += 1
        return self.dropout(self.layer(batch[0])).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        self.optimizer = self.optimizers_of(self)
        first = self.optimizer
        while isinstance(first, dict | list | tuple):
            first = first["optimizer"] if isinstance(first, dict) else first[0]
        self.first = first
        return self.optimizer

    def on_train_epoch_start(self):
        self.rates.append(self.first.param_groups[0]["lr"])


def batches(num=4, size=2):
    generator = torch.Generator().manual_seed(0)
    return TensorLoader(torch.randn(num * size, 4, generator=generator), batch_size=size)


def sgd(net, lr=0.1):
    return torch.optim.SGD(net.parameters(), lr=lr)


def fit(model=None, train=None, val=None, fit_words=None, loop_class=FabricLoop, **words):
    """Fit quietly with either loop; returns (loop, model)."""
    model = Net() if model is None else model
    words = {"max_epochs": 1, **words}
    loop = loop_class(**(quiet(**words) if loop_class is FabricLoop else {"accelerator": "cpu", **words}))
    loop.fit(model, batches() if train is None else train, val, **(fit_words or {}))
    return loop, model


def on_disk(folder, **words):
    return FabricLoop(
        accelerator="cpu",
        default_root_dir=str(folder),
        **{"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, **words},
    )


# ---- 1 to 13: imports, optimizers, the update


def test_fault_01_every_file_can_be_imported():
    """It names L.fabric.utilities.types.LRScheduler, which is gone: the file cannot be imported."""
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "fabric_template.")]
    assert "fabric_template.loop" in names
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)


@both_loops
def test_fault_02_a_dict_with_an_optimizer(loop_class):
    """Any mapping is taken for a scheduler: the documented {"optimizer": ...} ends in a bare assert."""
    loop, net = fit(Net(lambda net: {"optimizer": sgd(net)}), loop_class=loop_class)
    assert (loop.global_step, loop.optimizers, loop.lr_scheduler_configs) == (4, [net.first], [])


@both_loops
def test_fault_03_one_update_per_window(loop_class):
    """It steps when global_step % N == 0, but global_step moves only on a step: 1 update of 6."""
    loop, net = fit(train=batches(24), accumulate_grad_batches=4, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (6, 24)


def test_fault_03_max_steps_ends_the_training():
    """... and max_steps never ends."""
    loop, net = fit(train=batches(24), accumulate_grad_batches=4, max_epochs=-1, max_steps=8)
    assert (loop.global_step, net.trained) == (8, 32)


def linear(net, batch):
    """A loss whose gradient is the mean of the batch."""
    return net(batch[0]).mean()


def weight_after(loop_class, accumulate, x, batch_size):
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    fit_words = {"optimizer": sgd(net, lr=1.0), "training_step": linear}
    loader = TensorLoader(x[:, None], batch_size=batch_size)
    fit(net, loader, fit_words=fit_words, loop_class=loop_class, accumulate_grad_batches=accumulate)
    return net.weight.item()


@both_loops
def test_fault_04_the_loss_is_divided_by_the_window(loop_class):
    """The loss is not divided by N: the step is N times too large."""
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert weight_after(loop_class, 4, x, 1) == weight_after(loop_class, 1, x, 4) == -3.0


class LocalGradients(Net):
    """Rank r keeps its gradients, to be compared with the other's."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, []

    def on_after_backward(self):
        self.seen.append(self.layer.weight.grad.clone())

    def on_train_end(self):
        torch.save(self.seen, f"{self.folder}/{torch.distributed.get_rank()}.pt")


def test_fault_05_no_synchronisation_inside_a_window(tmp_path):
    """No no_backward_sync: gradients are averaged over the ranks after every batch."""
    fit(LocalGradients(tmp_path), batches(8), accumulate_grad_batches=2, **FORK)
    one, other = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [False, True, False, True]


@both_loops
def test_fault_06_the_last_window_is_stepped_and_leaks_nothing(loop_class):
    """No flush of the last window; its gradients leak into the next epoch."""
    x = torch.tensor([1.0, 3.0, 8.0])
    assert weight_after(loop_class, 2, x, 1) == -(1.0 + 3.0) / 2 - 8.0 / 2
    loop, _ = fit(train=batches(5), accumulate_grad_batches=2, max_epochs=2, loop_class=loop_class)
    assert loop.global_step == 6


@both_loops
def test_fault_07_gradients_are_there_before_the_step(loop_class):
    """on_before_optimizer_step fires before backward: the gradients are None."""

    class Look(Net):
        def on_before_optimizer_step(self, optimizer):
            seen.append([p.grad is not None and bool(p.grad.abs().sum() > 0) for p in self.parameters()])

    seen = []
    torch.manual_seed(1)
    model = Look()
    model.dropout.p = 0.0
    fit(model, loop_class=loop_class)
    assert seen == [[True, True]] * 4


def test_fault_08_a_gradient_scaler_gets_no_closure():
    """A closure is given to step: with a GradScaler torch raises."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loop, net = fit(plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
    assert (loop.precision, loop.global_step, net.trained) == ("16-mixed", 4, 4)


def halving(net):
    optimizer = sgd(net)
    return optimizer, StepLR(optimizer, 1, 0.5)


@both_loops
def test_fault_09_a_pair_keeps_its_scheduler(loop_class):
    """(optimizer, scheduler) silently loses its scheduler: lr stays 0.1."""
    _, net = fit(Net(halving), max_epochs=4, loop_class=loop_class)
    assert net.rates == [0.1, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize("shape", ["[optimizer]", "([optimizer], [scheduler])"])
@both_loops
def test_fault_10_lists(loop_class, shape):
    """[optimizer] and ([optimizer], [scheduler]) raise "not subscriptable"."""

    def optimizers(net):
        optimizer, scheduler = halving(net)
        return [optimizer] if shape == "[optimizer]" else ([optimizer], [scheduler])

    loop, net = fit(Net(optimizers), max_epochs=2, loop_class=loop_class)
    assert loop.global_step == 8
    assert net.rates == ([0.1, 0.1] if shape == "[optimizer]" else [0.1, 0.05])


@pytest.mark.parametrize(
    "returned", ["sgd", 7, {"scheduler": None}, [object()]], ids=["text", "number", "keys", "list"]
)
def test_fault_11_unknown_shapes_are_answered_with_the_known_ones(returned):
    """Unknown shapes become an empty AssertionError."""
    net = nn.Linear(4, 1)
    with pytest.raises(TypeError, match=r"expected one of None, Optimizer, \[Optimizer, \.\.\.\]"):
        fit(net, fit_words={"optimizer": returned, "training_step": linear})


@both_loops
def test_fault_12_a_returned_tensor_and_a_scheduler(loop_class):
    """dict.update("train_loss", x): TypeError once a step returns a plain tensor and a scheduler is on."""

    def optimizers(net):
        optimizer = sgd(net)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train_loss"}

    _, net = fit(Net(optimizers), max_epochs=3, loop_class=loop_class)
    assert net.rates == [0.1, 0.1, 0.05]  # the second epoch is no better: halved after it


@both_loops
def test_fault_13_a_scheduler_that_monitors_nothing(loop_class):
    """Every scheduler monitors val_loss by default: StepLR without validation is a KeyError."""
    _, net = fit(
        Net(lambda net: dict(zip(("optimizer", "lr_scheduler"), halving(net), strict=True))),
        max_epochs=2,
        loop_class=loop_class,
    )
    assert net.rates == [0.1, 0.05]


# ---- 14 to 26: schedulers, validation, how long


@both_loops
def test_fault_14_the_monitored_value_is_the_mean(loop_class):
    """The monitored value is the last batch of this rank: 0..7 gave 7, not 3.5."""
    seen = []

    class Recorder(ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            seen.append(float(metrics))

    class Ramp(Net):
        def validation_step(self, batch, batch_idx):
            return {"loss": torch.tensor(float(batch_idx))}

    def optimizers(net):
        optimizer = sgd(net)
        return {"optimizer": optimizer, "lr_scheduler": Recorder(optimizer), "monitor": "val_loss"}

    loop, _ = fit(Ramp(optimizers), val=batches(8), max_epochs=2, loop_class=loop_class)
    assert seen == [3.5, 3.5]
    assert loop.callback_metrics["val_loss"] == 3.5


def test_fault_14_the_mean_is_over_all_ranks():
    """... of this rank."""

    class Ranks(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_rank", float(self.global_rank), sync_dist=True)

        def configure_optimizers(self):
            return sgd(self)

    loop, _ = fit(Ranks(), val=batches(4), **FORK)
    assert loop.callback_metrics["val_rank"] == 0.5


def test_fault_15_every_second_epoch_is_the_second_and_the_fourth():
    """epoch % n == 0 on 0-based epochs: after epochs 1 and 3, never after the last."""

    def optimizers(net):
        optimizer, scheduler = halving(net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": 2}}

    class Notes(Net):
        def on_validation_start(self):
            validated.append(loop.current_epoch)

    validated = []
    loop = FabricLoop(**quiet(max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=0))
    net = Notes(optimizers)
    loop.fit(net, batches(), batches())
    assert net.rates == [0.1, 0.1, 0.05, 0.05]
    assert net.first.param_groups[0]["lr"] == 0.025
    assert validated == [1, 3]


def test_fault_16_an_epoch_cut_short_steps_no_epoch_scheduler():
    """An epoch cut short by max_steps still steps the epoch scheduler."""
    loop, net = fit(Net(halving), max_epochs=-1, max_steps=6)
    assert (loop.global_step, net.trained) == (6, 6)  # one epoch and a half
    assert net.first.param_groups[0]["lr"] == 0.05


class Interrupted(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.frozen = nn.BatchNorm1d(1).eval()

    def validation_step(self, batch, batch_idx):
        if self.how == "signal":
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt
        return self.layer(batch[0]).mean()


@pytest.mark.parametrize("how", ["signal", "exception"])
def test_fault_17_an_interrupt_in_validation_leaves_nothing_switched_off(how):
    """set_grad_enabled without try/finally: Ctrl-C in validation leaves autograd off and the module in eval."""
    net = Interrupted(how)
    before = {name: module.training for name, module in net.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        fit(net, val=batches(1), num_sanity_val_steps=0)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert {name: module.training for name, module in net.named_modules()} == before
    assert before["frozen"] is False
    assert before["dropout"] is True


def test_fault_18_modes_are_the_users_and_eval_is_not_silent():
    """An eval-mode module is trained in eval mode, silently; validation puts frozen submodules back to training."""

    class Modes(Net):
        def training_step(self, batch, batch_idx):
            seen.append(("train", self.dropout.training, self.frozen.training))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(("val", self.dropout.training, self.frozen.training))
            return super().validation_step(batch, batch_idx)

    seen = []
    net = Modes()
    net.frozen = nn.BatchNorm1d(1).eval()
    fit(net, batches(1), batches(1), max_epochs=2)
    assert set(seen) == {("train", True, False), ("val", False, False)}
    assert seen[-2:] == [("train", True, False), ("val", False, False)]  # after the first validation, too

    words = r"Found 3 module\(s\) in eval mode at the start of training.*write model\.train\(\) before fit"
    with pytest.warns(PossibleUserWarning, match=words):
        fit(Net().eval())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@both_loops
def test_fault_19_precision_is_live_in_the_step(loop_class, precision):
    """On one device model.training_step goes around precision: bf16-mixed ran in float32, bf16-true raised."""

    class Look(Net):
        def training_step(self, batch, batch_idx):
            seen.add(self.layer(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

    seen = set()
    fit(Look(), precision=precision, loop_class=loop_class)
    assert seen == {torch.bfloat16}


def test_fault_20_a_plain_module_validates_on_several_devices():
    """is_overridden on the unwrapped DDP or a plain nn.Module raises: no validation on several devices."""
    history = FabricLoop(**quiet(max_epochs=2, **FORK)).fit(Net(), batches(4), batches(4))
    assert history["val_loss"].notna().tolist() == [True, True]


def test_fault_21_callbacks_hear_of_eval_and_train():
    """Callbacks' documented on_validation_model_eval/train are never called unless the module overrides them."""
    called = []

    class Listener:
        def on_validation_model_eval(self):
            called.append("eval")

        def on_validation_model_train(self):
            called.append("train")

    fit(val=batches(1), callbacks=[Listener()], max_epochs=2, num_sanity_val_steps=0)
    assert called == ["eval", "train"] * 2


@both_loops
def test_fault_22_no_epochs_train_nothing(loop_class):
    """max_epochs=0 trains an epoch."""
    loop, net = fit(max_epochs=0, loop_class=loop_class)
    assert (loop.global_step, net.trained) == (0, 0)


def test_fault_23_resumed_at_its_end_trains_nothing(tmp_path):
    """Resumed at max_steps it makes one more update."""
    on_disk(tmp_path, max_epochs=-1, max_steps=6).fit(Net(), batches())
    net = Net()
    loop = on_disk(tmp_path, max_epochs=-1, max_steps=6)
    loop.fit(net, batches(), resume="last")
    assert (loop.global_step, net.trained) == (6, 0)


def test_fault_24_without_limits_there_is_one():
    """No limits set: endless, silently."""

    class Stops(Net):
        def on_train_epoch_end(self):
            limits.append((loop.max_epochs, loop.max_steps))
            loop.should_stop = True

    limits = []
    loop = FabricLoop(**quiet())
    loop.fit(Stops(), batches())
    assert limits == [(1000, -1)]


@both_loops
def test_fault_25_a_second_fit_is_a_whole_one(loop_class):
    """A second fit trains one epoch: counters are never reset."""
    loop, net = fit(max_epochs=3, loop_class=loop_class)
    history = loop.fit(net, batches())
    assert (net.trained, loop.current_epoch, loop.global_step) == (24, 3, 12)
    assert history["epoch"].tolist() == [0, 1, 2]


def test_fault_26_the_validation_after_the_last_step_is_whole():
    """On max_steps validation breaks at once: 0 batches."""
    loop, net = fit(val=batches(3), max_epochs=-1, max_steps=8, num_sanity_val_steps=0)
    assert (loop.global_step, net.validated) == (8, 6)


# ---- 27 to 31: checkpoints


def test_fault_27_the_file_that_is_named_is_the_one_that_is_read(tmp_path):
    """ckpt_path is only tested for being a folder; checkpoint_dir is searched: trained 4 epochs, not 2."""
    on_disk(tmp_path / "one").fit(Net(), batches())
    path = tmp_path / "elsewhere.ckpt"
    (tmp_path / "one/checkpoints/run/version_0/last.ckpt").rename(path)
    (tmp_path / "one/logs/run/version_0/metrics.csv").rename(tmp_path / "metrics.csv")  # the history goes with it
    net = Net()
    history = on_disk(tmp_path / "two", max_epochs=4).fit(net, batches(), resume=path)
    assert net.trained == 8  # two more epochs
    assert history["epoch"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"Checkpoint file not found: .*nowhere\.ckpt"):
        on_disk(tmp_path / "two").fit(Net(), batches(), resume=tmp_path / "nowhere.ckpt")


def test_fault_28_the_newest_is_found_by_number_and_among_other_files(tmp_path):
    """Any file is a checkpoint, sorted as text: a note in the folder breaks resume, and 10000 < 9999."""
    for version in (9, 10):
        on_disk(tmp_path, version=version, max_epochs=version - 8).fit(Net(), batches())
    runs = tmp_path / "checkpoints" / "run"
    (runs / "version_10" / "zzz_note.txt").write_text("not a checkpoint")
    (runs / "version_notes").mkdir()
    (runs / "zzz.ckpt").write_text("not a checkpoint")
    loop = on_disk(tmp_path, max_epochs=3)
    net = Net()
    loop.fit(net, batches(), resume="last")
    assert Path(loop.ckpt_path) == runs / "version_10" / "last.ckpt"
    assert net.trained == 4  # from epoch 2 to 3
    assert loop.log_dir == str(tmp_path / "logs" / "run" / "version_10")


def test_fault_29_schedulers_are_saved_as_plain_values_and_go_on(tmp_path):
    """Saves the scheduler config, pickled whole: UnpicklingError; loaded unsafely, its counter still restarts."""

    def by_two(net):
        optimizer = sgd(net)
        return [optimizer], [StepLR(optimizer, 2, 0.5)]

    on_disk(tmp_path, max_epochs=3).fit(Net(by_two), batches())
    saved = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert [state["last_epoch"] for state in saved["lr_schedulers"]] == [3]
    net = Net(by_two)
    on_disk(tmp_path, max_epochs=6).fit(net, batches(), resume="last")
    assert net.rates == [0.05, 0.025, 0.025]  # epochs 3, 4, 5


def test_fault_30_every_word_is_read(tmp_path):
    """checkpoint_frequency is accepted and never read."""
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path.name != "config.py")
    dynamic = {f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")}  # getattr by stage
    words = vars(FabricLoop(**quiet()).config)
    unread = [word for word in words if word not in dynamic and not re.search(rf"\b(config|loop)\.{word}\b", source)]
    read_when_resolved = (PACKAGE / "core" / "config.py").read_text()
    assert [word for word in unread if read_when_resolved.count(f"self.{word}") == 0] == []
    assert 'f"limit_{stage}_batches"' in source

    class Files(Net):
        def on_train_batch_start(self, batch, batch_idx):
            written.append(torch.load(last, weights_only=True)["global_step"] if last.is_file() else None)

    last, written = tmp_path / "checkpoints/run/version_0/last.ckpt", []
    on_disk(tmp_path, max_epochs=1, save_every_n_steps=2).fit(Files(), batches(6))
    assert written == [None, None, 2, 2, 4, 4]


def test_fault_31_samples_and_random_numbers_go_on(tmp_path):
    """Sampler epoch and RNG restart on resume."""

    def train(folder, epochs, resume=None):
        pl.seed_everything(1, verbose=False)
        module = Classifier(dropout=0.5)
        on_disk(tmp_path / folder, max_epochs=epochs).fit(module, make_loader(40), resume=resume)
        return module

    expected = train("whole", 4)
    train("parts", 2)
    assert_same_weights(expected, train("parts", 4, resume="last"))


# ---- 32 to 41: logs, loaders, words


class Values:
    """A logger in a few lines, as Fabric's have them."""

    def __init__(self):
        self.metrics, self.status = [], None

    name, version = "values", 0

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        pass

    def finalize(self, status):
        self.status = status


def test_fault_32_loggers_are_logged_to():
    """loggers= is accepted and the trainer logs nothing."""
    logger = Values()
    words = {"accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}
    loop = FabricLoop(loggers=[logger], max_epochs=2, enable_model_summary=False, log_every_n_steps=5, **words)
    loop.fit(Classifier(), make_loader(40))
    assert logger.status == "success"
    per_step = [step for step, metrics in logger.metrics if "train_loss_step" in metrics]
    per_epoch = [(step, metrics["epoch"]) for step, metrics in logger.metrics if "train_acc" in metrics]
    assert per_step == [4, 9, 14, 19]
    assert per_epoch == [(9, 0), (19, 1)]


class Reads(TorchDispatchMode):
    """Counts how often a tensor's value is read back from its device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_fault_33_nothing_is_read_back_in_a_step_and_anything_may_be_returned():
    """.item() of every value each batch; non-scalars raise."""

    class Returns(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            logits = self.layer(batch[0])
            loss = logits.square().mean()
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return {"loss": loss, "logits": logits.detach(), "names": ["a", "b"]}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert sorted(outputs) == ["logits", "loss", "names"]
            counts.append(reads.count)

        def configure_optimizers(self):
            return sgd(self)

    counts = []
    with Reads() as reads:
        fit(Returns(), batches(12), gradient_clip_val=1.0, log_every_n_steps=50)
    assert counts == [counts[0]] * 12
    with Reads() as reads:
        torch.zeros(1).item()
    assert reads.count == 1  # it does count


class Endless(IterableDataset):
    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter(torch.randn(self.num, 4))


def test_fault_34_loaders_without_length():
    """len(loader): no IterableDataset."""

    class Rows(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch], batch_idx)

        def validation_step(self, batch, batch_idx):
            return super().validation_step([batch], batch_idx)

    def loader(num):
        return torch.utils.data.DataLoader(Endless(num), batch_size=2)

    loop, net = fit(Rows(), loader(10), loader(4), max_epochs=2, num_sanity_val_steps=0)
    assert (loop.global_step, net.trained, net.validated) == (10, 10, 4)
    loop, net = fit(Rows(), (torch.randn(2, 4) for _ in range(5)))  # a generator, once
    assert (loop.global_step, net.trained) == (5, 5)


def test_fault_35_no_batch_is_fetched_past_the_limit_and_the_bar_is_closed(monkeypatch, capsys):
    """Fetches one batch past the limit, leaves the bar open."""

    class Counted:
        fetched = 0

        def __len__(self):
            return 10

        def __iter__(self):
            for _ in range(10):
                self.fetched += 1
                yield (torch.ones(2, 4),)

    train, val = Counted(), Counted()
    fit(train=train, val=val, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0)
    assert (train.fetched, val.fetched) == (3, 2)
    _, net = fit(train=(stopped := Counted()), max_epochs=-1, max_steps=4)
    assert (net.trained, stopped.fetched) == (4, 4)

    written = []

    class Seen(Terminal):
        def _put(self, text):
            written.append(text)

    class Breaks(Net):
        def training_step(self, batch, batch_idx):
            assert "epoch 0/1:   0%" in written[-1]  # there is a bar now
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("fabric_template.process.session.find_screen", Seen)
    with pytest.raises(ZeroDivisionError):
        fit(Breaks(), enable_progress_bar=True)
    assert "| 2/4 [" in written[-2]
    assert written[-1] == "\n"


def test_fault_36_fractions_are_taken_and_refusals_have_words():
    """assert without words refuses the fractions its annotation allows."""
    loop, net = fit(train=batches(8), val=batches(4), limit_train_batches=0.5, limit_val_batches=0.25)
    assert loop.num_training_batches == 4
    assert loop.num_val_batches == [1]
    with pytest.raises(
        ValueError, match=r"limit_train_batches=1\.5: expected None, an int >= 0 \(batches\) or a float"
    ):
        FabricLoop(limit_train_batches=1.5)


def test_fault_37_validation_is_optional():
    """val_loader is "optional" without a default."""
    loop, net = FabricLoop(**quiet(max_epochs=1)), Net()
    history = loop.fit(net, batches())
    assert (net.trained, net.validated) == (4, 0)
    assert list(history.columns) == ["epoch", "step", "train_loss", "lr", "time"]


class NoLaunch(Fabric):
    """A Fabric that must not get to work."""

    def launch(self, *args, **kwargs):
        raise AssertionError("launched")

    def setup(self, *args, **kwargs):
        raise AssertionError("set up")

    setup_dataloaders = setup


WRONG = {
    "no training_step": (
        lambda: ((nn.Linear(4, 1), batches()), {}),
        r"No `training_step\(\)` method defined in Linear",
    ),
    "no optimizer": (lambda: ((nn.Linear(4, 1), batches()), {"training_step": linear}), "fit got no optimizer"),
    "no loader": (lambda: ((Net(),), {}), "fit has no train loader"),
    "empty loader": (lambda: ((Net(), []), {}), "fit got an empty train loader"),
    "no validation_step": (
        lambda: ((nn.Linear(4, 1), batches(), batches()), {"training_step": linear, "optimizer": torch.optim.SGD}),
        "has no validation_step",
    ),
    "no checkpoint": (lambda: ((Net(), batches()), {"resume": "last"}), r"there is no last\.ckpt"),
    "resume and load": (lambda: ((Net(), batches()), {"resume": "a", "load": "b"}), "expected one of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fault_38_refused_before_anything_is_launched(case, tmp_path):
    """FSDP is refused after launch and loader setup. Here every check comes first, and nothing is written."""
    make, message = WRONG[case]
    arguments, words = make()
    loop = FabricLoop(NoLaunch(accelerator="cpu", devices=2, strategy="ddp_fork"), max_epochs=1, name="never")
    with pytest.raises(ValueError, match=message):
        loop.fit(*arguments, **words)
    assert list(tmp_path.iterdir()) == []


def test_fault_38_fsdp_where_it_cannot_be_is_refused_at_once():
    """... as soon as the loop is made."""
    with pytest.raises(
        ValueError, match="strategy=fsdp: it is FSDP's first form, .* write strategy=ModelParallelStrategy"
    ):
        FabricLoop(strategy="fsdp", accelerator="cpu", devices=2)


def test_fault_39_a_second_module_is_alone():
    """One Fabric for ever; its setup makes each LightningModule a callback: the first's hooks fire in the next fit."""

    class Named(Classifier):
        def __init__(self, name):
            super().__init__()
            self.my_name = name

        def on_train_start(self):
            fired.append(self.my_name)

        def on_validation_epoch_end(self):
            fired.append(self.my_name)

    fired = []
    fabric = Fabric(accelerator="cpu", devices=1)
    words = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loop = FabricLoop(fabric, max_epochs=1, num_sanity_val_steps=0, **words)
    for name in ("first", "second"):
        loop.fit(Named(name), make_loader(8), make_loader(8))
    FabricLoop(fabric, max_epochs=1, num_sanity_val_steps=0, **words).fit(
        Named("third"), make_loader(8), make_loader(8)
    )
    assert fired == ["first"] * 2 + ["second"] * 2 + ["third"] * 2
    assert fabric._callbacks == []


# what has no public name, with the reason beside its import
PRIVATE = {
    ("lightning.fabric.utilities.data", "_dataloader_init_kwargs_resolve_sampler"),
    # a type, imported for the type checker only
    ("lightning.fabric.wrappers", "_FabricModule"),
}


def test_fault_40_public_imports_and_no_trainer():
    """Private and Trainer-side imports."""
    private, trainer = set(), set()
    old_engine = [path for path in PACKAGE.rglob("*.py") if not is_new_engine(path.relative_to(PACKAGE.parent))]
    for path in old_engine:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            else:
                continue
            foreign = [name for name in names if name[0].split(".")[0] in ("lightning", "torch", "pytorch_lightning")]
            private |= {name for name in foreign if re.search(r"(^|\.)_[^_]", ".".join(name))}
            if node in tree.body and path.parent.name != "demos":  # LightningModules, which nothing imports unasked
                trainer |= {name for name in foreign if "pytorch" in name[0]}
    assert private == PRIVATE
    assert trainer == set()


def test_fault_41_fit_returns_what_can_be_plotted(tmp_path):
    """fit returns nothing to plot."""
    history = on_disk(tmp_path).fit(Net(), batches(), batches())
    assert isinstance(history, pd.DataFrame)
    assert list(history.columns) == ["epoch", "step", "train_loss", "val_loss", "lr", "time"]
    assert history["epoch"].tolist() == [0, 1]
    axes = history.plot(x="epoch", y=["train_loss", "val_loss"])
    assert [line.get_label() for line in axes.get_lines()] == ["train_loss", "val_loss"]
    on_file = pd.read_csv(tmp_path / "logs" / "run" / "version_0" / "metrics.csv")
    pd.testing.assert_frame_equal(on_file[history.columns], history, check_exact=False, rtol=1e-6)


# ---- all of them


def test_every_number_has_a_test():
    numbers = {int(name.split("_")[2]) for name in globals() if name.startswith("test_fault_")}
    assert numbers == set(range(1, 42))

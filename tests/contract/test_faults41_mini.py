"""The same 41 faults (test_faults41.py explains them), each shown not to be MiniLoop's either, or why it cannot be.

The number in a test's name is the fault's in the list. A fault of an option that MiniLoop does not have is in
NOT_HERE. test_faults41.py runs the tests that are the same for both loops.
"""

import ast
import importlib.util
import inspect
import math
import re
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import pytest
import test_faults41
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from modules import Classifier, assert_same_weights, make_loader
from test_faults41 import FORK, Endless, LocalGradients, Net, NoLaunch, Reads, batches, halving, linear, sgd
from torch import nn
from torch.optim.lr_scheduler import StepLR

import fabric_template.mini
from fabric_template import MiniLoop

FILE = Path(fabric_template.mini.__file__)

fit = partial(test_faults41.fit, loop_class=MiniLoop)

NOT_HERE = {
    16: "no max_steps and no limit_*_batches: no epoch is cut short but by Ctrl-C, and that one steps nothing more",
    21: "no callbacks; the module's own on_validation_model_eval is called (test_mini.py), its ..._train is refused",
    26: "no max_steps: validation follows whole epochs only",
    32: "no loggers: metrics.csv is written by the loop itself",
}


# ---- 1 to 13: imports, optimizers, the update


def test_fault_01_the_file_can_be_imported_under_another_name(tmp_path):
    (tmp_path / "train_loop.py").write_bytes(FILE.read_bytes())
    spec = importlib.util.spec_from_file_location("train_loop", tmp_path / "train_loop.py")
    sys.modules["train_loop"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["train_loop"]
    assert module.MiniLoop(accelerator="cpu").max_epochs == 1000


def test_fault_05_no_synchronisation_inside_a_window(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(16, 4))
    fit(LocalGradients(tmp_path), torch.utils.data.DataLoader(data, 2), accumulate_grad_batches=2, **FORK)
    one, other = torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [False, True, False, True]


@pytest.mark.parametrize("given", [3, 0])
def test_fault_06_a_loader_that_gives_less_than_its_length_is_refused(given):
    """Its last window would be left without a step."""

    class Short(list):
        def __len__(self):
            return 5

    words = rf"the train loader gave {given} batches in epoch 0: expected 5, its len\(\)"
    with pytest.raises(ValueError, match=words):
        fit(train=Short([(torch.ones(2, 4),)] * given), accumulate_grad_batches=2)


def test_fault_08_a_gradient_scaler_gets_no_closure():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fabric = Fabric(accelerator="cpu", plugins=MixedPrecision("16-mixed", device="cpu", scaler=scaler))
    loop, net = fit(fabric=fabric)
    assert (loop.precision, loop.global_step, net.trained) == ("16-mixed", 4, 4)


@pytest.mark.parametrize(
    "returned", ["sgd", 7, {"scheduler": None}, [object()]], ids=["text", "number", "keys", "list"]
)
def test_fault_11_unknown_shapes_are_answered_with_the_known_ones(returned):
    with pytest.raises(TypeError, match=r"expected one optimizer, \[optimizer\], \[scheduler\], or a dict"):
        fit(nn.Linear(4, 1), fit_words={"optimizer": returned, "training_step": linear})


# ---- 14 to 26: schedulers, validation, how long


def test_fault_14_the_mean_is_over_all_ranks():
    class Ranks(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_rank", float(self.global_rank), sync_dist=True)

        def configure_optimizers(self):
            return sgd(self)

    loop, _ = fit(Ranks(), make_loader(8), make_loader(8), **FORK)
    assert [row["val_rank"] for row in loop.history] == [0.5]


def test_fault_15_every_second_epoch_is_the_second_and_the_fourth():
    def optimizers(net):
        optimizer, scheduler = halving(net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": 2}}

    _, net = fit(Net(optimizers), max_epochs=4)
    assert net.rates == [0.1, 0.1, 0.05, 0.05]
    assert net.first.param_groups[0]["lr"] == 0.025


class Interrupted(Net):
    """Ctrl-C in the first validation that is no check."""

    def __init__(self, how):
        super().__init__()
        self.how, self.frozen = how, nn.BatchNorm1d(1).eval()

    def validation_step(self, batch, batch_idx):
        if self.trained and self.how == "signal":
            signal.raise_signal(signal.SIGINT)
        elif self.trained:
            raise KeyboardInterrupt
        return super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:1 modules are in eval mode")
@pytest.mark.parametrize("how", ["signal", "exception"])
def test_fault_17_an_interrupt_in_validation_leaves_nothing_switched_off(how):
    net = Interrupted(how)
    before = {name: module.training for name, module in net.named_modules()}
    if how == "signal":
        loop, _ = fit(net, val=batches(1), max_epochs=3)
        assert (len(loop.history), net.trained) == (1, 4)  # the epoch at hand is whole, and the last one
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(net, val=batches(1), max_epochs=3)
    assert torch.is_grad_enabled()
    assert {name: module.training for name, module in net.named_modules()} == before
    assert before["frozen"] is False
    assert before["dropout"] is True


@pytest.mark.filterwarnings("ignore:1 modules are in eval mode")
def test_fault_18_modes_are_the_users_and_eval_is_not_silent():
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

    with pytest.warns(UserWarning, match=r"3 modules are in eval mode, and stay so: model\.train\(\) before fit"):
        fit(Net().eval())


def test_fault_20_a_plain_module_validates_on_several_devices():
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    loaders = torch.utils.data.DataLoader(data), torch.utils.data.DataLoader(data)
    history = MiniLoop(accelerator="cpu", max_epochs=2, **FORK).fit(Net(), *loaders)
    assert history["val_loss"].notna().tolist() == [True, True]


def test_fault_23_resumed_at_its_end_trains_nothing():
    fit(max_epochs=2)
    loop, net = fit(max_epochs=2, fit_words={"resume": "last"})
    assert (loop.global_step, net.trained, len(loop.history)) == (8, 0, 2)


def test_fault_24_without_limits_there_is_one():
    class Stops(Net):
        def on_train_epoch_end(self):
            limits.append((loop.max_epochs, loop.max_steps))
            loop.should_stop = True

    limits = []
    loop = MiniLoop(accelerator="cpu")
    loop.fit(Stops(), batches())
    assert limits == [(1000, -1)]


# ---- 27 to 31: checkpoints


def test_fault_27_the_file_that_is_named_is_the_one_that_is_read(tmp_path):
    fit(max_epochs=2, default_root_dir=tmp_path / "one")
    path = tmp_path / "elsewhere.ckpt"
    (tmp_path / "one/checkpoints/run/version_0/last.ckpt").rename(path)
    words = {"max_epochs": 4, "default_root_dir": tmp_path / "two"}
    loop, net = fit(fit_words={"resume": path}, **words)
    assert net.trained == 8  # two more epochs
    assert [row["epoch"] for row in loop.history] == [2, 3]  # those before stand in the run that it came from
    for word in ("resume", "load"):
        with pytest.raises(ValueError, match=rf"{word}=.*: there is no '.*nowhere\.ckpt': leave {word}= out"):
            fit(fit_words={word: tmp_path / "nowhere.ckpt"}, **words)


def test_fault_28_the_newest_is_found_by_number_and_among_other_files(tmp_path):
    for version in (9, 10):
        fit(version=version, max_epochs=version - 8)
    runs = tmp_path / "checkpoints" / "run"
    (runs / "version_10" / "zzz_note.txt").write_text("not a checkpoint")
    (runs / "version_notes").mkdir()
    (runs / "zzz.ckpt").write_text("not a checkpoint")
    loop, net = fit(max_epochs=3, fit_words={"resume": "last"})
    assert net.trained == 4  # from epoch 2 to 3
    assert loop.log_dir == str(tmp_path / "logs" / "run" / "version_10")


def test_fault_29_schedulers_are_saved_as_plain_values_and_go_on():
    def by_two(net):
        optimizer = sgd(net)
        return [optimizer], [StepLR(optimizer, 2, 0.5)]

    fit(Net(by_two), max_epochs=3)
    saved = torch.load("checkpoints/run/version_0/last.ckpt", weights_only=True)
    assert [state["last_epoch"] for state in saved["lr_schedulers"]] == [3]
    _, net = fit(Net(by_two), max_epochs=6, fit_words={"resume": "last"})
    assert net.rates == [0.05, 0.025, 0.025]  # epochs 3, 4, 5


def test_fault_30_every_word_is_read_and_every_epoch_is_saved():
    source = FILE.read_text()
    assert [word.name for word in fields(MiniLoop) if f"self.{word.name}" not in source] == []

    class Files(Net):
        def on_train_epoch_start(self):
            last = Path("checkpoints/run/version_0/last.ckpt")
            written.append(torch.load(last, weights_only=True)["global_step"] if last.is_file() else None)

    written = []
    fit(Files(), max_epochs=3)
    assert written == [None, 4, 8]


def test_fault_31_samples_and_random_numbers_go_on():
    def train(name, epochs, resume=None):
        pl.seed_everything(1, verbose=False)
        _, module = fit(
            Classifier(dropout=0.5), make_loader(40), name=name, max_epochs=epochs, fit_words={"resume": resume}
        )
        return module

    expected = train("whole", 4)
    train("parts", 2)
    assert_same_weights(expected, train("parts", 4, resume="last"))


# ---- 33 to 41: loaders, words


def test_fault_33_nothing_is_read_back_in_a_step_and_anything_may_be_returned():
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
        fit(Returns(), batches(12), gradient_clip_val=1.0)
    assert counts == [counts[0]] * 12


class Rows(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step([batch], batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step([batch], batch_idx)


def test_fault_34_loaders_without_length():
    def loader(num):
        return torch.utils.data.DataLoader(Endless(num), batch_size=2)

    loop, net = fit(Rows(), loader(10), loader(4), max_epochs=2)
    assert (loop.global_step, loop.num_training_batches) == (10, math.inf)
    assert (net.trained, net.validated) == (10, 6)  # two of them to see that it runs
    loop, net = fit(Rows(), (torch.randn(2, 4) for _ in range(5)))  # a generator, once
    assert (loop.global_step, net.trained) == (5, 5)
    with pytest.raises(ValueError, match="the train loader gave 0 batches in epoch 1: expected one or more"):
        fit(Rows(), (torch.randn(2, 4) for _ in range(5)), max_epochs=2)
    with pytest.raises(ValueError, match="the train loader gave 0 batches in epoch 0: expected one or more"):
        fit(Rows(), loader(0))


def test_fault_35_no_batch_is_fetched_past_the_length():
    """There is no bar, and no limit but the length."""

    class Counted:
        fetched = 0

        def __len__(self):
            return 3

        def __iter__(self):
            for _ in range(10):
                self.fetched += 1
                yield (torch.ones(2, 4),)

    train, val = Counted(), Counted()
    _, net = fit(train=train, val=val)
    assert (train.fetched, val.fetched) == (3, 2 + 3)  # two of them to see that it runs
    assert (net.trained, net.validated) == (3, 5)


def test_fault_36_every_refusal_has_words_and_a_word_it_has_not_is_refused():
    tree = ast.parse(FILE.read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    assert len(raised) > 9
    assert all(call.args for call in raised)
    for words in ({"mode": "best"}, {"accumulate_grad_batches": 0}, {"name": "a/b"}):
        with pytest.raises(ValueError, match="expected mode 'min' or 'max', accumulate_grad_batches >= 1, a folder"):
            MiniLoop(**words)
    with pytest.raises(TypeError, match="limit_train_batches"):
        MiniLoop(limit_train_batches=0.5)


def test_fault_37_validation_is_optional():
    loop, net = MiniLoop(accelerator="cpu", max_epochs=1), Net()
    history = loop.fit(net, batches())
    assert (net.trained, net.validated) == (4, 0)
    assert list(history.columns) == ["epoch", "step", "train_loss", "lr", "time"]


STEP = {"training_step": linear}
WRONG = {
    "no training_step": (nn.Linear, (batches(),), {}, "fit got no training_step: expected one of Linear"),
    "no optimizer": (nn.Linear, (batches(),), STEP, "fit got no configure_optimizers"),
    "no loader": (Net, (), {}, "fit got no train_dataloader"),
    "no last": (Net, (batches(),), {"resume": "last"}, r"resume='last': there is no '.*last\.ckpt': leave resume= out"),
    "no best": (Net, (batches(),), {"load": "best"}, r"load='best': there is no '.*best\.ckpt': leave load= out"),
    "no file": (Net, (batches(),), {"load": "a.ckpt"}, "load='a.ckpt': there is no 'a.ckpt'.*, or give a path"),
    "a folder": (Net, (batches(),), {"resume": "/"}, "resume='/': there is no '/'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fault_38_refused_before_anything_is_launched(case, tmp_path):
    kind, loaders, words, message = WRONG[case]
    loop = MiniLoop(fabric=NoLaunch(accelerator="cpu", devices=2, strategy="ddp_fork"), max_epochs=1)
    with pytest.raises((TypeError, ValueError), match=message):
        loop.fit(kind(4, 1) if kind is nn.Linear else kind(), *loaders, **words)
    if words.get("load"):
        with pytest.raises(ValueError, match=message):
            loop.validate(Net(), *loaders, **words)
    assert list(tmp_path.iterdir()) == []


def test_fault_38_fsdp_where_it_cannot_be_is_refused_at_once():
    with pytest.raises(ValueError, match="FSDP is only available on GPU"):
        MiniLoop(strategy="fsdp", accelerator="cpu", devices=2)


def test_fault_39_a_second_module_is_alone():
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
    loop = MiniLoop(fabric=fabric, max_epochs=1)
    for name in ("first", "second"):
        loop.fit(Named(name), make_loader(8), make_loader(8))
    MiniLoop(fabric=fabric, max_epochs=1).fit(Named("third"), make_loader(8), make_loader(8))
    # a check, the start, the epoch's validation
    assert fired == ["first"] * 3 + ["second"] * 3 + ["third"] * 3
    assert fabric._callbacks == []


def test_fault_40_public_imports_and_no_trainer():
    found = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    foreign = {name for name in found if name.startswith(("lightning", "torch", "pytorch_lightning"))}
    assert foreign
    assert [name for name in foreign if re.search(r"(^|\.)_[^_]", name) or "pytorch" in name] == []


def test_fault_41_fit_returns_what_can_be_plotted(tmp_path):
    history = MiniLoop(accelerator="cpu", max_epochs=2).fit(Net(), batches(), batches())
    assert isinstance(history, pd.DataFrame)
    assert list(history.columns) == ["epoch", "step", "train_loss", "val_loss", "lr", "time"]
    assert history["epoch"].tolist() == [0, 1]
    axes = history.plot(x="epoch", y=["train_loss", "val_loss"])
    assert [line.get_label() for line in axes.get_lines()] == ["train_loss", "val_loss"]
    on_file = pd.read_csv(tmp_path / "logs" / "run" / "version_0" / "metrics.csv")
    pd.testing.assert_frame_equal(on_file, history)


# ---- all of them


def test_every_number_has_a_test_or_a_reason():
    shared = [
        name
        for name, test in vars(test_faults41).items()
        if name.startswith("test_fault_") and "loop_class" in inspect.signature(test).parameters
    ]
    numbers = {int(name.split("_")[2]) for name in [*globals(), *shared] if name.startswith("test_fault_")}
    assert not numbers & NOT_HERE.keys()
    assert numbers | NOT_HERE.keys() == set(range(1, 42))

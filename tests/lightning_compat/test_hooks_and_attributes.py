"""Hooks, checkpoints and attributes of code written for Trainer."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from modules import (
    Classifier,
    assert_same_metrics,
    assert_same_weights,
    by_step,
    make_loader,
    quiet,
    run_loop,
    run_trainer,
)
from runs import fit, val_loader

from fabric_template import FabricLoop


def plain_loader():
    return make_loader(24, shuffle=False)


# ---- hooks


class Listening(Classifier):
    """Notes what the checkpoint hooks are shown."""

    def on_save_checkpoint(self, checkpoint):
        self.saved = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])

    def on_load_checkpoint(self, checkpoint):
        self.loaded = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])


def test_checkpoint_hooks_are_shown_trainers_keys(tmp_path):
    """... at the end of an epoch with the number of the epoch that ended; what we add stays out of their sight."""
    callback = ModelCheckpoint(dirpath=tmp_path / "trainer", filename="x")
    _, theirs = run_trainer(
        Listening, plain_loader, val_loader, max_epochs=2, enable_checkpointing=True, callbacks=[callback]
    )
    _, ours, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=2)
    assert ours.saved == theirs.saved
    assert ours.saved[1:] == (1, 12)
    _, again, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=3, resume="last")
    assert again.loaded == ours.saved


class WithTest(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.filterwarnings("ignore")
class Counts(pl.Callback):
    """With a state, and a note of its own in the file."""

    def __init__(self):
        self.batches, self.seen = 0, []

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches} if self.batches > 2 else {}

    def load_state_dict(self, state):
        self.seen.append(state)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["note"] = self.batches

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.seen.append(checkpoint["note"])


class CountedData(pl.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        return plain_loader()

    test_dataloader = train_dataloader

    def state_dict(self):
        return {"epoch": self.trainer.current_epoch}

    def load_state_dict(self, state):
        self.seen.append(state)


@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("limit", [2, 1.0], ids=["no state", "state"])
@pytest.mark.filterwarnings("ignore")
def test_callbacks_and_data_get_their_part_of_a_file(tmp_path, kind, limit):
    """... when it is resumed and when it is tested; a callback without state is asked, too."""
    path, word = str(tmp_path / "x.ckpt"), {FabricLoop: ("resume", "load")}.get(kind, ("ckpt_path",) * 2)
    trainer = kind(**quiet(max_epochs=1, limit_train_batches=limit, callbacks=[Counts()]))
    trainer.fit(WithTest(), datamodule=CountedData())
    trainer.save_checkpoint(path)
    batches = 2 if limit == 2 else 6
    for method, name in (("fit", word[0]), ("test", word[1])):
        counts, data = Counts(), CountedData()
        trainer = kind(**quiet(max_epochs=2, callbacks=[counts]))
        words = {} if method == "fit" else {"verbose": False}
        getattr(trainer, method)(WithTest(), datamodule=data, **{name: path}, **words)
        assert counts.seen == ([batches] if limit == 2 else [batches, {"batches": 6}])
        assert data.seen == [{"epoch": 1}]


# ---- Trainer's own checkpoints


def test_resume_from_a_model_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    """A ModelCheckpoint keeps the files, the loop keeps none: still its files go on to the same bits."""
    straight = run_loop(Classifier, make_loader, val_loader, max_epochs=3)[1]
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=7, save_top_k=-1)
    run_loop(Classifier, make_loader, val_loader, max_epochs=3, enable_checkpointing=True, callbacks=[callback])
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert [path.stem for path in paths] == ["epoch=0-step=7", "epoch=1-step=14", "epoch=2-step=21", "epoch=2-step=28"]
    for path in paths:
        torch.manual_seed(99)
        _, module = run_loop(Classifier, make_loader, val_loader, max_epochs=3, fit={"resume": path})
        assert_same_weights(straight, module)


# ---- which weights an evaluation takes


class Scored(Classifier):
    """A val_loss that is known beforehand: the second epoch is the best."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (3.0, 1.0, 2.0, 2.5)[self.current_epoch])

    def test_step(self, batch, batch_idx):
        self.log("sum", sum(parameter.sum() for parameter in self.parameters()))


@pytest.mark.parametrize("own", [True, False])
def test_without_a_model_the_best_weights_are_tested(tmp_path, own):
    """... those of the fit before, as Trainer does, and it is said; a model that is given is taken as it is."""
    callback = ModelCheckpoint(dirpath=tmp_path / "trainer", monitor="val_loss")
    trainer, _ = run_trainer(
        Scored, plain_loader, val_loader, max_epochs=3, enable_checkpointing=True, callbacks=[callback]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best, last = trainer.test(None, val_loader(), verbose=False), trainer.test(None, val_loader(), "last")
    words = {"monitor": "val_loss"} if own else {"callbacks": [ModelCheckpoint(tmp_path / "ours", monitor="val_loss")]}
    loop, module, _ = fit(tmp_path, Scored, plain_loader, val_loader, max_epochs=3, **words)
    last = loop.test(module, val_loader(), verbose=False)
    with pytest.warns(UserWarning, match="The best model of the previous `fit` call will be used"):
        found = loop.test(dataloaders=val_loader(), verbose=False)
    assert found == best != last
    assert loop.ckpt_path == loop.checkpoint_callback.best_model_path
    assert loop.test(load="best", dataloaders=val_loader(), verbose=False) == best


# ---- what a module finds around it


class Ignores(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


class NoClosure(Classifier):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step()


@pytest.mark.parametrize("run", [run_trainer, run_loop])
@pytest.mark.parametrize(
    "make", [NoClosure, lambda: Classifier(lambda m: Ignores(m.parameters(), lr=0.1))], ids=["hook", "step"]
)
def test_a_closure_that_nobody_calls(run, make):
    """Nothing would be trained."""
    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed. HINT: did you call"):
        run(make, plain_loader, max_epochs=1)


def test_optimizers_are_lightnings_too():
    loop, module = run_loop(Classifier, plain_loader, max_epochs=1)
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, LightningOptimizer)
    assert optimizer.optimizer is loop.optimizers[0]
    assert str(optimizer) == f"Lightning{loop.optimizers[0]}"


# ---- a batch of None


class Nones:
    """Some of its batches are None; the last one may be, and one at the end of a window."""

    def __init__(self, nones):
        self.batches = [None if i in nones else batch for i, batch in enumerate(plain_loader())]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Seen(Classifier):
    """Notes which batches its hooks and steps see."""

    def __init__(self):
        super().__init__(by_step, on_step=True)
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(("start", batch_idx))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, batch is None, outputs is None, self.trainer.global_step))


@pytest.mark.parametrize("nones", [{0}, {2, 5}, {1, 2, 3}, set(range(6))], ids=str)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_batch_of_none_is_left_out(nones, window):
    """... of training, and said once; its place counts for windows, schedulers and validation, as under Trainer."""
    words = {"accumulate_grad_batches": window, "max_epochs": 2, "val_check_interval": 0.5}
    trainer, expected = run_trainer(Seen, lambda: Nones(nones), val_loader, **words)
    with pytest.warns(UserWarning, match="train_dataloader yielded None. If this was on purpose, ignore") as said:
        loop, module = run_loop(Seen, lambda: Nones(nones), val_loader, **words)
    assert sum("yielded None" in str(warning.message) for warning in said) == 1
    assert module.seen == expected.seen
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)


# ---- attributes


def test_init_module():
    with FabricLoop(accelerator="cpu", precision="64-true").init_module():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.float64

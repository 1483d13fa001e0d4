"""Test checkpoints that a hook saves within a step or before the first step."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier, assert_same_weights, by_step, make_loader, quiet
from runs import Record, same, val_loader
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop
from fabric_template.errors import CheckpointError

WINDOW = {"accumulate_grad_batches": 3}


class Saves(pl.Callback):
    """A callback that saves a checkpoint in the given hook of the given batch, and records the progress."""

    def __init__(self, hook=None, batches=None, path=None):
        self.batches, self.path = batches, path
        self.seen, self.logged_at = Record(), Record()
        if hook is not None:
            setattr(self, hook, self.save)

    def save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batches and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        at = trainer.fit_loop.epoch_loop
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.current_epoch, batch_idx, trainer.global_step, rate))
        # Keep Trainer's counter separate, because it is one too high after Trainer has resumed within a step.
        self.logged_at.append((batch_idx, at._batches_that_stepped))


class Manual(Classifier):
    """A model that takes an optimizer step after each batch with manual optimization."""

    def __init__(self):
        super().__init__(by_step, dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()


def automatic():
    return Classifier(by_step, dropout=0.0)


def run(kind, saves, make=automatic, path=None, **options):
    pl.seed_everything(1, verbose=False)
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": kind == "loop", **options}
        trainer = LOOPS[kind](**quiet(**options, callbacks=[saves]))
        trainer.fit(module, make_loader(shuffle=False), val_loader(), ckpt_path=path)
    return trainer, module, saves.seen, saves.logged_at


def assert_equals_uninterrupted_run(whole, found):
    (trainer, module, seen, logged_at), (other, other_module, rest, rest_logged_at) = whole, found
    assert 0 < len(rest) <= len(seen)
    assert rest == seen[-len(rest) :]
    if isinstance(other, FabricLoop) and len(rest) < len(seen):
        assert rest_logged_at == logged_at[-len(rest) :]
    assert_same_weights(module, other_module)
    states = [[optimizer.state_dict() for optimizer in each.optimizers] for each in (trainer, other)]
    assert same(*states)
    assert (trainer.current_epoch, trainer.global_step) == (other.current_epoch, other.global_step)


IN_A_STEP = ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"]


@pytest.mark.parametrize(
    ("hook", "make", "batches", "options"),
    [
        *[(hook, automatic, 4, {}) for hook in IN_A_STEP],
        (IN_A_STEP[0], automatic, 11, {}),
        *[(hook, automatic, 5, WINDOW) for hook in ("on_train_batch_start", "on_after_backward")],
        *[("on_train_batch_start", automatic, batches, WINDOW) for batches in (6, 10)],
        *[(hook, Manual, 4, {}) for hook in ("on_train_batch_start", "on_before_backward")],
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_run_saved_within_a_step_continues_after_the_last_finished_step(tmp_path, hook, make, batches, options):
    """FabricLoop continues after the last complete accumulation window, but refuses Trainer's checkpoint."""
    whole = run("trainer", Saves(), make, **options)
    ends = {}
    for first in LOOPS:
        path = tmp_path / f"{first}.ckpt"
        run(first, Saves(hook, batches, path), make, max_epochs=1 + batches // 11, **options)
        for second in LOOPS:
            if (first, second) != ("trainer", "loop"):
                ends[first, second] = run(second, Saves(), make, path=path, **options)
    with pytest.raises(CheckpointError, match="trainer.ckpt', which Trainer saved in the middle of epoch"):
        run("loop", Saves(), make, path=tmp_path / "trainer.ckpt", **options)
    assert_equals_uninterrupted_run(whole, ends["loop", "loop"])
    # Trainer resumes in the middle of an accumulation window
    # without the gradients, so only the first batch is compared.
    if options and (batches - 1) % 10 % 3:
        assert ends["loop", "trainer"][2][0][:2] == ends["loop", "loop"][2][0][:2]
    else:
        assert_equals_uninterrupted_run(ends["trainer", "trainer"], ends["loop", "trainer"])


WITHIN = {"on_train_batch_start": "batch", "on_after_backward": "batch", "on_validation_start": "validation"}
WITHIN |= {"on_validation_batch_end": "validation", "on_validation_epoch_end": "validation"}
BETWEEN = ["on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", [*WITHIN, *BETWEEN])
def test_saving_within_a_batch_warns_that_resuming_changes_the_random_numbers(tmp_path, hook):
    """Checkpoints that are saved between batches and validations cause no warning."""
    callback = pl.Callback()
    setattr(callback, hook, lambda trainer, *args: trainer.save_checkpoint(tmp_path / "saved.ckpt"))
    trainer = FabricLoop(
        **quiet(max_epochs=1, num_sanity_val_steps=0, val_check_interval=2, callbacks=[callback], **WINDOW)
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(automatic(), make_loader(), val_loader())
    texts = [str(one.message) for one in found if "save_checkpoint" in str(one.message)]
    assert len(texts) == (hook in WITHIN)
    assert all(f"called during a {WITHIN[hook]}" in text for text in texts)
    assert all("draws different random numbers" in text for text in texts)


def test_saving_only_the_weights_during_a_batch_causes_no_warning(tmp_path):
    callback = pl.Callback()
    callback.on_after_backward = lambda trainer, *args: trainer.save_checkpoint(tmp_path / "weights.ckpt", True)
    FabricLoop(**quiet(max_epochs=1, callbacks=[callback])).fit(automatic(), make_loader())
    assert "state_dict" in torch.load(tmp_path / "weights.ckpt", weights_only=True)


class Unsized:
    """An iterable without a length, for which the loop prefetches a batch."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.filterwarnings("ignore:resume. . batches of Unsized are read again")
@pytest.mark.parametrize("kind", [DataLoader, lambda data: Unsized([*data[:, None]])], ids=["loader", "iterable"])
@pytest.mark.parametrize(("hook", "batch"), [(IN_A_STEP[0], 4), (IN_A_STEP[0], 7), ("on_train_batch_end", 7)])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "sequential"])
def test_resume_refuses_a_checkpoint_saved_within_a_step_after_one_loader_ended(tmp_path, kind, hook, batch, mode):
    """The shorter loader ends with batch 4. Checkpoints saved between two batches are not refused."""

    def train(path=None, saves=()):
        seen = []

        def training_step(model, batch):
            parts = [part for part in (batch if isinstance(batch, list) else [batch]) if part is not None]
            seen.append([part.item() for part in parts])
            return sum(model(part).sum() for part in parts)

        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        loaders = [kind(torch.arange(5.0)[:, None]), kind(torch.arange(12.0)[:, None] + 100)]
        loop = FabricLoop(**quiet(max_epochs=1, callbacks=[*saves], **WINDOW))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        loop.fit(model, CombinedLoader(loaders, mode), optimizer=optimizer, training_step=training_step, resume=path)
        return seen, model

    def save(trainer, *args):
        if args[-1] == batch:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    whole, model = train()
    callback = pl.Callback()
    setattr(callback, hook, save)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(saves=[callback])
    if (hook, batch) == (IN_A_STEP[0], 7):
        with pytest.raises(CheckpointError, match="after one of several loaders had yielded its last batch"):
            train(tmp_path / "saved.ckpt")
    else:
        rest, resumed = train(tmp_path / "saved.ckpt")
        # A run resumed from a checkpoint saved within a step repeats the batches of the accumulation window.
        assert rest == whole[3 if batch == 4 else 8 :]
        assert_same_weights(model, resumed)


def test_a_run_resumes_from_a_checkpoint_saved_in_on_fit_start(tmp_path):
    def train(callbacks=(), **options):
        torch.manual_seed(1)
        module = Classifier()
        loop = FabricLoop(**quiet(max_epochs=1, callbacks=[*callbacks]))
        loop.fit(module, make_loader(), val_loader(), **options)
        return module

    callback = pl.Callback()
    callback.on_fit_start = lambda trainer, module: trainer.save_checkpoint(tmp_path / "saved.ckpt")
    whole = train([callback])
    assert_same_weights(whole, train(resume=tmp_path / "saved.ckpt"))

"""Test that FabricLoop and Trainer resume each other's checkpoints, between and within epochs."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins.precision import MixedPrecision
from modules import HAS_EXACT_TRAINER, Classifier, make_loader, quiet
from parameters import halve, sample
from runs import Record, same, val_loader
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from fabric_template import FabricLoop
from fabric_template.errors import CheckpointError

RESUME_ARGUMENT = {"trainer": "ckpt_path", "loop": "resume"}
CKPT = {"enable_checkpointing": True}


def in_order():
    """Return a loader without randomness, so that resuming does not depend on which loop saved the checkpoint."""
    return make_loader(shuffle=False)


def by_step(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 3, 0.8), "interval": "step"}}


def by_epoch(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [StepLR(optimizer, 1, 0.7)]


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class Two(Classifier):
    """A model with two optimizers and manual optimization. Only the second optimizer has a scheduler."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            optimizer.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            self.lr_schedulers().step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net[0].parameters(), lr=0.02)
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.1, momentum=0.9)
        return [first, second], [StepLR(second, 2, 0.8)]


def scaled(kind):
    """Return the option for 16-mixed precision on the CPU. The loss scale grows every third step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    return {"plugins": (MixedPrecision if kind == "trainer" else FabricMixedPrecision)("16-mixed", "cpu", scaler)}


def automatic(optimizers):
    return lambda: Classifier(optimizers, dropout=0.0)


CASES = {
    "step_scheduler": (automatic(by_step), {}),
    "epoch_scheduler": (automatic(by_epoch), {}),
    "plateau": (automatic(plateau), {}),
    "accumulate": (automatic(by_step), {"accumulate_grad_batches": 3}),
    "two_optimizers": (Two, {}),
    "scaler": (automatic(by_step), {"scaler": True}),
    "no_validation": (automatic(by_epoch), {"limit_val_batches": 0}),
}


class Watch(pl.Callback):
    """A callback that records the progress and the learning rates at each batch."""

    def __init__(self):
        self.seen = Record()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        self.seen.append((trainer.current_epoch, trainer.global_step, batch_idx, rates))


def run(kind, root, case, make_saver=None, path=None, stops="train", **options):
    """Train with one of the two loops, from scratch or from a file. Return (trainer, module, callbacks).

    `stops` sets when EarlyStopping checks: at the end of the training epoch ("train") or of the validation ("val").
    """
    make_module, more = CASES[case]
    options = {"max_epochs": 4, **more, **options}
    if options.pop("scaler", False):
        options |= scaled(kind)
    root.mkdir(parents=True, exist_ok=True)
    callbacks = [Watch()]
    if "limit_val_batches" not in options:
        look = {"check_on_train_epoch_end": stops == "train"}
        callbacks.append(cb.EarlyStopping("val_loss", patience=2, min_delta=-1.0, **look))
    if make_saver:
        callbacks.append(make_saver(root))
    pl.seed_everything(1, verbose=False)
    module = make_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"default_root_dir": str(root), "callbacks": callbacks, **options}
        if make_saver:
            given |= CKPT
        trainer = LOOPS[kind](**quiet(**given))
        trainer.fit(module, in_order(), val_loader(), **({RESUME_ARGUMENT[kind]: path} if path else {}))
    return trainer, module, callbacks


def end(trainer, module, callbacks):
    """Return the values of a finished run that FabricLoop and Trainer must have in common."""
    scaler = trainer.scaler if isinstance(trainer, FabricLoop) else getattr(trainer.precision_plugin, "scaler", None)
    states = {type(callback).__name__: callback.state_dict() for callback in callbacks[1:2]}
    return {
        "weights": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": scaler and scaler.state_dict(),
        "progress": (trainer.current_epoch, trainer.global_step),
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "stopping": states.get("EarlyStopping"),
    }


def assert_same_end(one, other):
    first, second = end(*one), end(*other)
    different = [key for key in first if not same(plain_dict(first[key]), plain_dict(second[key]))]
    assert not different, {key: (first[key], second[key]) for key in different}


def plain_dict(value):
    """Return a scheduler's state without callables, which do not compare equal."""
    if isinstance(value, dict):
        return {key: plain_dict(part) for key, part in value.items() if not callable(part)}
    return [plain_dict(part) for part in value] if isinstance(value, list | tuple) else value


SAVERS = {
    "train_epoch_end": lambda root: cb.ModelCheckpoint(root, filename="file", save_on_train_epoch_end=True),
    "validation_end": lambda root: cb.ModelCheckpoint(root, filename="file", save_on_train_epoch_end=False),
}


@pytest.mark.parametrize(("case", "where"), halve(CASES, SAVERS))
def test_fabric_loop_and_trainer_can_resume_from_each_others_end_of_epoch_checkpoints(tmp_path, case, where):
    """Two epochs with either loop and two more with either loop match four epochs with Trainer, bit for bit.

    The exception is a scheduler that monitors a metric. Its step comes after the hooks that save,
    and Trainer does not save the metric. A resumed Trainer skips this step. FabricLoop skips
    it with Trainer's checkpoints, but not with its own.
    """
    if case == "no_validation" and where == "validation_end":
        pytest.skip("the case has no validation")
    stops = {"stops": "val" if where == "validation_end" else "train"}
    crossed = {}
    for first in LOOPS:
        saving = run(first, tmp_path / first, case, SAVERS[where], max_epochs=2, **stops)[2][-1]
        for second in LOOPS:
            root = tmp_path / f"{first}_{second}"
            crossed[first, second] = run(second, root, case, path=saving.best_model_path, **stops)
    whole = run("trainer", tmp_path / "whole", case, **stops)
    for pair, found in crossed.items():
        loses_a_step = case == "plateau" and "trainer" in pair
        expected = crossed["trainer", "trainer"] if loses_a_step else whole
        assert found[2][0].seen == expected[2][0].seen[-20:], pair
        assert_same_end(expected, found)


class CountsEpochs(Classifier):
    """A model that counts in a buffer how often on_train_epoch_end has run, and logs the count."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.register_buffer("ended", torch.zeros(()))

    def on_train_epoch_end(self):
        self.ended += 1
        self.log("ended", self.ended.clone())


class Steps(pl.Callback):
    """A callback that records the epoch, the global step and the loggers' step number twice per epoch."""

    def __init__(self):
        self.seen = []

    def record(self, trainer, module):
        logging_step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seen.append((trainer.current_epoch, trainer.global_step, logging_step))

    on_train_epoch_start = on_train_epoch_end = record


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.skipif(not HAS_EXACT_TRAINER, reason="older Trainers resume differently")
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}],
    ids=str,
)
def test_a_trainer_checkpoint_saved_after_the_last_validation_of_an_epoch_resumes_before_on_train_epoch_end(
    tmp_path, options
):
    """Trainer calls on_train_epoch_end for the saved epoch, and continues the step numbers in loggers."""
    saver = SAVERS["validation_end"](tmp_path)
    trainer = pl.Trainer(**quiet(callbacks=[saver], max_epochs=2, **options, **CKPT))
    trainer.fit(CountsEpochs(), in_order(), val_loader())
    ends = []
    for kind in LOOPS:
        steps = Steps()
        loop = LOOPS[kind](**quiet(default_root_dir=tmp_path / kind, callbacks=[steps], max_epochs=4, **options))
        module = CountsEpochs()
        loop.fit(module, in_order(), val_loader(), **{RESUME_ARGUMENT[kind]: saver.best_model_path})
        ends.append({**end(loop, module, []), "steps": steps.seen})
    assert [key for key in ends[0] if not same(ends[0][key], ends[1][key])] == []
    assert int(module.ended) == 4


EVERY_STEP = {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}


@pytest.mark.parametrize(("case", "step"), sample(4, [case for case in CASES if case != "accumulate"], [4, 10, 12]))
def test_fabric_loop_refuses_to_resume_trainer_checkpoints_saved_within_an_epoch(tmp_path, case, step):
    """FabricLoop resumes exactly from its own files but refuses files that Trainer saved mid-epoch.

    With FabricLoop's checkpoint, Trainer starts a new pass over the loader, trains on as many batches
    as were left, and skips the work after the last batch. FabricLoop trains on exactly the batches
    that were left.
    """
    options = {"stops": "val", "max_epochs": 4}
    for kind in LOOPS:
        run(kind, tmp_path / kind, case, lambda root: cb.ModelCheckpoint(root, **EVERY_STEP), stops="val", max_epochs=2)
    files = {kind: tmp_path / kind / f"step={step}.ckpt" for kind in LOOPS}
    expected, crossed = (
        run("trainer", tmp_path / f"{first}_trainer", case, path=files[first], **options) for first in LOOPS
    )
    places = [place[:3] for place in expected[2][0].seen]
    assert [place[:3] for place in crossed[2][0].seen] == places
    if case != "plateau":
        assert crossed[2][0].seen == expected[2][0].seen
        assert_same_end(expected, crossed)
    whole = run("trainer", tmp_path / "whole", case, **options)
    own = run("loop", tmp_path / "loop_loop", case, path=files["loop"], **options)
    assert own[2][0].seen == whole[2][0].seen[-len(places) :]
    assert_same_end(whole, own)
    saved = torch.load(files["trainer"], weights_only=True)
    if saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"]:
        other = run("loop", tmp_path / "trainer_loop", case, path=files["trainer"], **options)
        assert [place[:3] for place in other[2][0].seen] == places
        return
    root = tmp_path / "refused"
    message = rf"step={step}.ckpt', which Trainer saved in the middle of epoch {saved['epoch']}, expected a checkpoint"
    with pytest.raises(CheckpointError, match=message):
        run("loop", root, case, path=files["trainer"], **options)
    assert not list(root.iterdir())


class EagerLoader:
    """A loader that draws its order from the global generator when its iterator is created."""

    def __len__(self):
        return 4

    def __iter__(self):
        order = torch.randperm(16)
        x = torch.linspace(-1.0, 1.0, 128).reshape(16, 8)
        return iter([(x[part], part % 3) for part in order.split(4)])


class SanityCounter(cb.Callback):
    checks = 0

    def on_sanity_check_start(self, *args):
        self.checks += 1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("where", SAVERS)
@pytest.mark.parametrize("limit", [{}, {"max_steps": 14}])
def test_resuming_a_trainer_checkpoint_runs_the_same_sanity_check_as_trainer(tmp_path, where, limit):
    """Without max_steps, Trainer runs a sanity check after a finished epoch. The check draws random numbers."""
    options = {**limit, "num_sanity_val_steps": 2}
    saver = SAVERS[where](tmp_path)
    trainer = pl.Trainer(**quiet(callbacks=[saver], max_epochs=2, **options, **CKPT))
    trainer.fit(Classifier(), EagerLoader(), EagerLoader())
    ends = []
    for kind in LOOPS:
        root = tmp_path / kind
        counter = SanityCounter()
        # With max_steps, set no limit for epochs, because a resumed Trainer counts the checkpoint's epoch twice.
        epochs = {"max_epochs": -1 if limit else 4}
        loop = LOOPS[kind](**quiet(default_root_dir=root, callbacks=[counter], **epochs, **options))
        pl.seed_everything(3, verbose=False)
        module = Classifier()
        loop.fit(module, EagerLoader(), EagerLoader(), **{RESUME_ARGUMENT[kind]: saver.best_model_path})
        ends.append((counter.checks, end(loop, module, [])))
    assert ends[0][0] == ends[1][0]
    if HAS_EXACT_TRAINER:
        assert same(*ends), ends
    assert ends[0][0] == (where == "train_epoch_end" and not limit)


@pytest.mark.parametrize("keyword", ["resume", "ckpt_path"])
def test_fabric_loop_can_load_but_not_resume_a_mid_epoch_checkpoint_of_trainer(tmp_path, keyword):
    """Trainer may save in the middle of an epoch because of max_steps, an error or a validation."""
    saver = cb.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    options = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 1, "val_check_interval": 3}
    pl.Trainer(**quiet(**options)).fit(Classifier(), in_order(), val_loader())
    path, loop = tmp_path / "step=6.ckpt", FabricLoop(**quiet(default_root_dir=str(tmp_path), max_epochs=2))
    with pytest.raises(CheckpointError, match=f"got '{path}', which Trainer saved in the middle of epoch 0"):
        loop.fit(Classifier(), in_order(), **{keyword: path})
    module = Classifier()
    loop.validate(module, val_loader(), load=path, verbose=False)
    assert same(dict(module.state_dict()), torch.load(path, weights_only=True)["state_dict"])
    loop.fit(Classifier(), in_order(), load=path)
    assert loop.global_step == 20

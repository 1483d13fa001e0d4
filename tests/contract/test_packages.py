"""Compare FabricLoop with Trainer on LightningModules written like those of public packages."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from modules import Classifier, Gan, assert_same_metrics, assert_same_weights, make_loader, run_loop, run_trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


def val():
    return make_loader(18, shuffle=False, seed=5)


class Rows(Logger):
    """A logger that keeps the logged rows in memory."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, list(metrics.items())))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def both(make_module, **options):
    """Train with Trainer and FabricLoop, and compare the results.

    Return (trainer, its module, loop, its module).
    """
    rows = Rows(), Rows()
    trainer, expected = run_trainer(
        make_module, make_loader, val, max_epochs=2, log_every_n_steps=1, **{"logger": rows[0], **options}
    )
    loop, module = run_loop(
        make_module, make_loader, val, max_epochs=2, log_every_n_steps=1, **{"logger": rows[1], **options}
    )
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert rows[0].rows == rows[1].rows
    return trainer, expected, loop, module


class OwnLog(Classifier):
    """A module that overrides log with a method that calls Lightning's log."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def log(self, *args, **options):
        if not self.trainer.sanity_checking:
            super().log(*args, **options)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log_dict({"mean": self.mean, "double": 2 * loss}, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_end", float(self.current_epoch), reduce_fx="max")


class OwnLogAgain(OwnLog):
    def log(self, name, value, **options):
        super().log(f"own/{name}", value, **options)


@pytest.mark.parametrize("make_module", [OwnLog, OwnLogAgain])
def test_fabric_loop_and_trainer_log_the_same_values_if_a_module_overrides_log(make_module):
    trainer, _, loop, module = both(make_module)
    assert set(loop.progress_bar_metrics) == set(trainer.progress_bar_metrics)
    assert "log" not in vars(module)


class Chooses(Classifier):
    """A module that monitors val_loss if there are validation loaders, and train_loss otherwise."""

    def configure_optimizers(self):
        validates = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        monitor = "val_loss" if validates else "train_loss"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}


@pytest.mark.parametrize("make_val", [None, val])
def test_a_scheduler_monitors_the_same_metric_as_with_trainer(make_val):
    trainer, expected = run_trainer(Chooses, make_loader, make_val, max_epochs=3)
    loop, module = run_loop(Chooses, make_loader, make_val, max_epochs=3)
    assert_same_weights(expected, module)
    assert loop.strategy.lr_scheduler_configs[0].monitor == trainer.strategy.lr_scheduler_configs[0].monitor


def test_validate_and_test_do_not_change_the_current_epoch_and_global_step():
    class ProgressLogger(Classifier):
        def test_step(self, batch, batch_idx):
            self.log("seen", self.trainer.current_epoch * 100.0 + self.trainer.global_step, on_step=True, on_epoch=True)

    trainer, expected, loop, module = both(ProgressLogger)
    seen = []
    for runner, model in ((trainer, expected), (loop, module)):
        runner.logger.rows.clear()
        results = runner.validate(model, val(), verbose=False), runner.test(model, val(), verbose=False)
        seen.append((results, runner.logger.rows, runner.current_epoch, runner.global_step))
    assert seen[0] == seen[1]
    assert seen[1][2:] == (2, 20)


class Data(pl.LightningDataModule):
    """A datamodule that draws random data in setup, so its loaders differ from the module's loader."""

    def setup(self, stage):
        self.rows = torch.randn(12, 8)
        self.trainer.lightning_module.setups.append(stage)

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.rows, torch.zeros(12, dtype=torch.long)), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


class OwnLoader(Classifier):
    """A module with a validation loader and no other loader."""

    def __init__(self):
        super().__init__()
        self.setups = []

    def val_dataloader(self):
        return val()

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


def test_validate_after_fit_uses_the_loaders_of_the_module_and_not_those_of_the_datamodule():
    seen = []
    for run in (run_trainer, run_loop):
        trainer, module = run(OwnLoader, lambda: None, fit={"datamodule": (data := Data())}, max_epochs=1)
        results = trainer.validate(module, verbose=False), trainer.test(module, make_loader(), verbose=False)
        seen.append((results, module.setups, trainer.datamodule is data, torch.get_rng_state().tolist()))
    assert seen[0] == seen[1]
    assert seen[1][1] == ["fit", "validate", "test"]
    # Without a test loader, FabricLoop uses the datamodule's loader. Trainer would raise an error.
    assert list(trainer.test(verbose=False)[0]) == ["val_loss", "val_acc"]


class Uncounted(Gan):
    """A GAN that excludes the critic's steps from global_step, as many modules with two optimizers do."""

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        of_critic._on_before_step = lambda: self.trainer.profiler.start("optimizer_step")
        of_critic._on_after_step = lambda: self.trainer.profiler.stop("optimizer_step")
        if batch_idx % 3 == 0:
            kept = of_generator._on_after_step
            of_generator._on_after_step = lambda: None
            of_generator.step()
            of_generator._on_after_step = kept
        return super().training_step(batch, batch_idx)


class OverridesOnce(Gan):
    """A GAN that replaces the private hook _on_after_step of an optimizer.

    Trainer restores the hook after the batch.
    """

    def training_step(self, batch, batch_idx):
        if batch_idx % 4 == 0:
            self.optimizers()[0]._on_after_step = lambda: None
        return super().training_step(batch, batch_idx)


class StepsInOtherHooks(Gan):
    """A GAN that calls optimizer.step() in hooks, where optimizer steps are not counted."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers()[0].step()

    def on_train_epoch_end(self):
        for optimizer in self.optimizers():
            optimizer.step()


class CountsBatches(Gan):
    """A GAN whose global_step counts batches instead of optimizer steps."""

    def optimizers(self, use_pl_optimizer=True):
        return super().optimizers(use_pl_optimizer=False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
@pytest.mark.parametrize("options", [{}, {"max_steps": 7}], ids=["epochs", "steps"])
@pytest.mark.parametrize("make_module", [Uncounted, OverridesOnce, StepsInOtherHooks, CountsBatches])
def test_global_step_counts_the_same_steps_as_with_trainer(make_module, options):
    trainer, _, loop, _ = both(make_module, **options)
    assert (loop.global_step, loop.current_epoch) == (trainer.global_step, trainer.current_epoch)


class OtherOptimizer(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.strategy.optimizers = [torch.optim.Adam(module.parameters(), lr=0.01)]


def test_a_callback_can_replace_the_optimizer_through_the_strategy():
    _, _, loop, _ = both(Classifier, callbacks=[OtherOptimizer()])
    assert [type(optimizer) for optimizer in loop.optimizers] == [torch.optim.Adam]


class Grows(Classifier):
    """A module that adds a parameter at the end of an epoch, and makes a new optimizer for it."""

    def __init__(self):
        super().__init__()
        self.offsets = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3))])

    def forward(self, x):
        return super().forward(x) + sum(self.offsets)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def on_train_epoch_end(self):
        self.offsets.append(torch.nn.Parameter(torch.full((3,), 0.1 * len(self.offsets))))
        self.trainer.strategy.setup_optimizers(self.trainer)


def test_a_module_can_set_up_its_optimizers_again():
    trainer, _, loop, module = both(Grows)
    assert len(module.offsets) == 3
    assert not torch.equal(module.offsets[1], torch.full((3,), 0.1))
    optimizers = trainer.optimizers[0], loop.optimizers[0]
    assert [len(optimizer.param_groups[0]["params"]) for optimizer in optimizers] == [7, 7]


class OldTestHook(Classifier):
    def test_epoch_end(self, outputs):
        raise AssertionError

    test_step = Classifier.validation_step


def test_a_hook_that_lightning_has_removed_is_refused_only_in_its_stage():
    trainer, _, loop, module = both(OldTestHook)
    loop.validate(module, val(), verbose=False)
    for engine in (trainer, loop):
        with pytest.raises(NotImplementedError, match="Support for `test_epoch_end`"):
            engine.test(module, val(), verbose=False)


class ShuffledByEpoch(torch.utils.data.IterableDataset):
    """A dataset that is shuffled with the epoch number as the seed."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        x = torch.linspace(-1.0, 1.0, 160).reshape(20, 8)
        return iter([(x[index], index % 3) for index in order])


class SetsEpoch(Classifier):
    """A module that calls set_epoch() on each dataset that it finds through trainer.fit_loop."""

    def on_train_epoch_start(self):
        loaders = [self.trainer.fit_loop._combined_loader]
        loaders.append(self.trainer.fit_loop.epoch_loop.val_loop._combined_loader)
        for loader in loaders:
            for part in loader.flattened:
                part.dataset.set_epoch(self.current_epoch)


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_can_read_its_datasets_from_the_fit_loop_of_the_trainer(count):
    def make_loaders():
        loaders = [DataLoader(ShuffledByEpoch(), batch_size=5) for _ in range(count)]
        return loaders[0] if count == 1 else {str(index): part for index, part in enumerate(loaders)}

    class Sum(SetsEpoch):
        def training_step(self, batch, batch_idx):
            parts = batch.values() if isinstance(batch, dict) else [batch]
            return sum(super(Sum, self).training_step(part, batch_idx) for part in parts)

    trainer, expected = run_trainer(Sum, make_loaders, lambda: DataLoader(ShuffledByEpoch(), 5), max_epochs=3)
    loop, module = run_loop(Sum, make_loaders, lambda: DataLoader(ShuffledByEpoch(), 5), max_epochs=3)
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert len(loop.fit_loop._combined_loader.flattened) == count
    with pytest.raises(AttributeError, match="_combined_loader"):
        loop.fit_loop._combined_loader = None
    with pytest.raises(AttributeError):
        loop.fit_loop._combined_loader.flattened = []


def test_fit_loop_has_no_loader_yet_when_the_setup_hook_runs():
    seen = []

    class LoaderRecorder(Classifier):
        def setup(self, stage):
            seen.append(self.trainer.fit_loop._combined_loader)

    run_trainer(LoaderRecorder, make_loader, max_epochs=1)
    run_loop(LoaderRecorder, make_loader, max_epochs=1)
    assert seen == [None, None]

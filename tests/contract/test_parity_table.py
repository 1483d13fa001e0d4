"""Test that weights, metrics and the order of hooks equal those of Trainer exactly."""

import warnings
from inspect import getmembers, isfunction

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from modules import HAS_EXACT_TRAINER
from parity_modules import (
    ClosureOptimizer,
    Data,
    EpochScheduler,
    Manual,
    Module,
    OwnHooks,
    Plateau,
    SeveralLoaders,
    Skipping,
    StepScheduler,
    Stream,
    train,
    val,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from fabric_template import FabricLoop

CASES = {
    "plain": (Module, {}, {}),
    "scheduler_by_step": (StepScheduler, {"accumulate_grad_batches": 2}, {}),
    "scheduler_by_epoch": (EpochScheduler, {}, {}),
    "plateau": (Plateau, {"max_epochs": 5}, {}),
    "odd_accumulation": (Module, {"accumulate_grad_batches": 3}, {}),
    "clip_by_norm": (Module, {"gradient_clip_val": 0.1}, {}),
    "clip_by_value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "validate_by_fraction": (Module, {"val_check_interval": 0.3}, {}),
    "validate_by_batches": (Module, {"val_check_interval": 5, "check_val_every_n_epoch": None}, {}),
    "validate_by_epochs": (Plateau, {"check_val_every_n_epoch": 1, "limit_val_batches": 2}, {}),
    "no_sanity_check": (Module, {"num_sanity_val_steps": 0, "limit_train_batches": 0.5}, {}),
    "several_train_loaders": (SeveralLoaders, {}, {"train": lambda: {"a": train(), "b": train(9)}}),
    "several_val_loaders": (Module, {}, {"val": lambda: [val(), val()]}),
    "iterable_loader": (Module, {}, {"train": lambda: DataLoader(Stream(), batch_size=3)}),
    "manual": (Manual, {}, {}),
    "bf16": (Module, {"precision": "bf16-mixed"}, {}),
    "double": (Module, {"precision": "64-true"}, {}),
    "max_steps": (StepScheduler, {"max_steps": 10, "max_epochs": -1}, {}),
    "min_epochs": (Module, {"min_epochs": 2, "max_epochs": 4, "overfit_batches": 2}, {}),
    "lbfgs": (ClosureOptimizer, {"max_epochs": 2}, {}),
    "own_hooks": (OwnHooks, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, {}),
    "skipping": (Skipping, {}, {}),
    "datamodule": (Module, {"reload_dataloaders_every_n_epochs": 1}, {"data": Data}),
    "accumulation_scheduler": (Module, {"callbacks": lambda: GradientAccumulationScheduler({1: 3})}, {}),
    "weight_averaging": (
        EpochScheduler, {"max_epochs": 4, "callbacks": lambda: StochasticWeightAveraging(0.02, 0.5)}, {}
    ),
}  # fmt: skip


def run(kind, folder, case, module=None, **more):
    """Train one of the CASES with Trainer or FabricLoop. Return the loop and the module."""
    module_class, options, loaders = case
    options = {name: value() if callable(value) else value for name, value in options.items()}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    pl.seed_everything(7, verbose=False)
    module = module or module_class()
    loop = kind(**{"default_root_dir": folder, "max_epochs": 2, "accelerator": "cpu", **quiet, **options, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "data" in loaders:
            loop.fit(module, datamodule=loaders["data"]())
        else:
            loop.fit(module, loaders.get("train", train)(), loaders.get("val", val)())
    return loop, module


def assert_same(ours, theirs):
    """Compare weights, metrics, counters and the next random numbers bit for bit."""
    (loop, module), (trainer, reference) = ours, theirs
    for (name, value), expected in zip(module.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    metrics, expected = loop.callback_metrics, trainer.callback_metrics
    assert set(metrics) == set(expected)
    assert all(torch.equal(metrics[name], expected[name]) for name in expected), (metrics, expected)
    assert (loop.global_step, loop.current_epoch) == (trainer.global_step, trainer.current_epoch)
    assert torch.equal(torch.rand(3), loop.next_random)


@pytest.mark.parametrize("name", CASES)
def test_weights_and_metrics_are_the_same_as_with_trainer(name, tmp_path):
    theirs = run(pl.Trainer, tmp_path / "trainer", CASES[name])
    expected = torch.rand(3)
    ours = run(FabricLoop, tmp_path / "loop", CASES[name])
    ours[0].next_random = expected
    assert_same(ours, theirs)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_run_with_a_datamodule_can_switch_between_trainer_and_fabric_loop(ours_first, tmp_path):
    """A run that switches to the other loop matches a run with Trainer alone, bit for bit."""
    if not (ours_first or HAS_EXACT_TRAINER):
        pytest.skip("this Trainer draws different random numbers when it resumes")
    first, second = (FabricLoop, pl.Trainer) if ours_first else (pl.Trainer, FabricLoop)
    results = []
    for kinds in ((pl.Trainer, pl.Trainer), (first, second)):
        folder = tmp_path / str(len(results))
        loop, _ = run(kinds[0], folder, CASES["datamodule"], max_epochs=2)
        loop.save_checkpoint(folder / "half.ckpt")
        module_class, options, _ = CASES["datamodule"]
        module = module_class()
        loop = kinds[1](
            **{**options, "max_epochs": 4, "accelerator": "cpu", "logger": False, "default_root_dir": folder},
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        pl.seed_everything(3, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop.fit(module, datamodule=Data(), ckpt_path=folder / "half.ckpt")
        assert loop.current_epoch == 4
        results.append((loop.global_step, module.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][key], results[1][1][key]) for key in results[0][1])


def hook_names(part):
    """Return the names of the hooks that a class defines."""
    skipped = {"log", "log_dict", "optimizers", "lr_schedulers", "configure_sharded_model", "state_dict"}
    return {name for name, _ in getmembers(part, isfunction) if not name.startswith("_")} - skipped


def record_hooks(part, names, label, calls):
    """Append each call to a hook of ``part`` to ``calls``, with the arguments that are numbers or strings."""

    def recorded(name, method):
        def call(*args, **kwargs):
            numbers = [argument for argument in args if isinstance(argument, int | float | str)]
            calls.append((f"{label}.{name}", len(args), numbers, sorted(kwargs)))
            return method(*args, **kwargs)

        return call

    for name in names:
        setattr(part, name, recorded(name, getattr(part, name)))
    return part


@pytest.mark.parametrize(
    "name", ["plain", "odd_accumulation", "own_hooks", "manual", "skipping", "validate_by_fraction"]
)
def test_hooks_are_called_in_the_same_order_as_with_trainer(name, tmp_path):
    """The comparison covers all hooks of a callback and of the module."""
    orders = []
    of_module = hook_names(pl.LightningModule) - hook_names(nn.Module) - {"all_gather", "freeze", "unfreeze", "print"}
    for kind in (pl.Trainer, FabricLoop):
        calls = []
        callback = record_hooks(pl.Callback(), hook_names(pl.Callback), "callback", calls)
        module = record_hooks(CASES[name][0](), of_module, "module", calls)
        loop, _ = run(kind, tmp_path, CASES[name], module, callbacks=[callback], enable_checkpointing=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop.validate(module, val())
            loop.predict(module, DataLoader(torch.randn(6, 4), batch_size=4))
        orders.append(calls)
    assert orders[0] == orders[1]


def test_validate_test_and_predict_return_the_same_values_as_with_trainer(tmp_path):
    """test() runs with two loaders. predict() runs with one loader and with two loaders."""
    Module.test_step, results = Module.validation_step, []
    for kind in (pl.Trainer, FabricLoop):
        loop, module = run(kind, tmp_path, CASES["plain"], max_epochs=1, enable_checkpointing=False)
        inputs = DataLoader(torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured = [loop.validate(module, val()), loop.test(module, [val(), val()])]
            predicted = [loop.predict(module, inputs), *loop.predict(module, [inputs, inputs])]
        results.append((measured, [torch.cat(batches) for batches in predicted]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


class PlainObject:
    """An object with step methods and no base class."""

    def __init__(self, net):
        self.net = net

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]).squeeze(1), batch[1].float())

    def validation_step(self, batch):
        return {"error": self.training_step(batch, 0)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("level", ["object", "functions"])
def test_training_with_step_methods_or_step_functions_matches_a_hand_written_loop(level, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    twin = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    twin.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    loader, steps = train(), PlainObject(twin)
    optimizer = steps.configure_optimizers()
    for _ in range(2):
        for batch in loader:
            loss = steps.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            optimizer.step()
    twin.eval()
    with torch.no_grad():
        error = sum(float(steps.training_step(batch, 0)) * len(batch[0]) for batch in val()) / 10
    torch.manual_seed(1)
    loop = FabricLoop(
        max_epochs=2, gradient_clip_val=0.5, default_root_dir=tmp_path, num_sanity_val_steps=0, accelerator="cpu",
        limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    given = {}
    if level == "functions":
        given["training_step"] = lambda model, batch: mse_loss(model(batch[0]).squeeze(1), batch[1].float())
        given["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        given["validation_step"] = lambda model, batch: {"error": given["training_step"](model, batch)}
    history = loop.fit(net if given else PlainObject(net), train(), val(), **given)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert list(history["epoch"]) == [0, 1]
    assert history["train_loss"].is_monotonic_decreasing
    loop.config = loop.config.changed(limit_val_batches=1.0)
    step = {"validation_step": given["validation_step"]} if given else {}
    measured = loop.validate(net if given else PlainObject(net), val(), **step)
    assert measured[0]["val_error"] == pytest.approx(error, rel=1e-6)

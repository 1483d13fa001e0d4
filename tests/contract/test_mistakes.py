"""Test that both loops explain common mistakes of new users and how to fix them."""

import csv
import itertools
import re
import warnings
from collections import namedtuple
from contextlib import nullcontext
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from modules import assert_same_weights, make_data, make_loader, sgd
from parameters import once
from processes import run_processes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from fabric_template import FabricLoop, MiniLoop

LOOPS = {"FabricLoop": FabricLoop, "MiniLoop": MiniLoop}
both_loops = pytest.mark.parametrize("name", LOOPS)


def make_loop(name, **options):
    quiet = {"enable_progress_bar": False} if name == "FabricLoop" else {}
    return LOOPS[name](accelerator="cpu", **{"max_epochs": 1, **quiet, **options})


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def loss_of(net, batch):
    return cross_entropy(net(batch[0]), batch[1])


def fit(name, training_step=loss_of, options=None, train=None, val=None, make_optimizer=sgd, **given):
    net = make_net()
    optimizer = make_optimizer(net)
    if val is not None:
        given = {"validation_step": loss_of, "val_dataloaders": val, **given}
    loop = make_loop(name, **(options or {}))
    train = make_loader() if train is None else train
    history = loop.fit(net, train, optimizer=optimizer, training_step=training_step, **given)
    return net, history


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8), 0


# Step functions without a return statement


def forgets(net, batch):
    loss_of(net, batch)


@both_loops
def test_a_training_step_without_a_return_value_is_refused(name):
    with pytest.raises(TypeError, match="^training_step: got .*None.* expected .*loss"):
        fit(name, forgets, {"monitor": "train_loss"})


@both_loops
def test_fit_warns_about_a_validation_step_without_a_return_value(name):
    text = "validation_step returned no value and logged no metric. Return the loss"
    with pytest.warns(UserWarning, match=text):
        _, history = fit(name, val=make_loader(), validation_step=forgets)
    assert "train_loss" in history
    error = r"^monitor: got 'val_loss', which is not .*train_loss.*[Rr]eturn the loss from "
    with pytest.warns(UserWarning, match=text), pytest.raises(ValueError, match=error):
        fit(name, options={"monitor": "val_loss"}, val=make_loader(), validation_step=forgets)


def test_the_error_for_a_missing_train_loss_suggests_returning_the_loss():
    class Forgets(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch):
            loss_of(self.net, batch)

        def configure_optimizers(self):
            return sgd(self)

    error = (
        r"^monitor: got 'train_loss', which is not logged\. Logged metrics: none\. Return the loss from training_step"
    )
    loop = make_loop("FabricLoop", monitor="train_loss")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=error):
            loop.fit(Forgets(), make_loader())
    assert any("metrics.csv contains no metrics" in str(warning.message) for warning in warned)


def test_manual_optimization_logs_the_values_of_the_dict_that_training_step_returns():
    """metrics.csv has the same column names as with automatic optimization."""
    first, second = make_net(), make_net()
    optimizers = [sgd(first), sgd(second)]

    def step(nets, batch):
        losses = [loss_of(net, batch) for net in (first, second)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"critic_loss": losses[0].detach(), "acc": 0.5}

    loop = make_loop("FabricLoop", monitor="train_critic_loss")
    history = loop.fit(nn.ModuleList([first, second]), make_loader(), optimizer=optimizers, training_step=step)
    assert history["train_critic_loss"][0] > 0
    assert history["train_acc"][0] == 0.5
    assert loop.checkpoint_path("best") is not None


# Training steps that call backward() or step the optimizer


def backward(net, batch):
    loss = loss_of(net, batch)
    loss.backward()
    return loss


def backward_twice(net, batch):
    loss = loss_of(net, batch)
    loss.backward(retain_graph=True)
    return {"loss": loss}


def scaled_backward(net, batch):
    loss = loss_of(net, batch)
    (2 * loss).backward(retain_graph=True)
    return loss, loss


class StepsItself:
    """A step function that trains the network with its own optimizer."""

    def __init__(self, clears_last=False):
        self.optimizer, self.clears_last = None, clears_last

    def __call__(self, net, batch):
        self.optimizer = self.optimizer or sgd(net)
        if not self.clears_last:
            self.optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward(retain_graph=True)
        self.optimizer.step()
        if self.clears_last:
            self.optimizer.zero_grad()
        return loss


ONLY_LOSS = "expected a step that only computes the loss. Remove"
OWN_STEPS = {
    "backward": (lambda: backward, "(second backward pass|loss.backward).*(Remove|calls) loss.backward"),
    "retain_graph": (lambda: backward_twice, rf"got a call to loss.backward\(\), {ONLY_LOSS}"),
    "scaled": (lambda: scaled_backward, rf"got a call to loss.backward\(\), {ONLY_LOSS}"),
    "step": (StepsItself, rf"got a call to optimizer.step\(\), {ONLY_LOSS}"),
    "step, then zero_grad": (partial(StepsItself, clears_last=True), r"got a call to optimizer.step\(\)"),
}


@both_loops
@pytest.mark.parametrize("case", OWN_STEPS)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_step_that_calls_backward_on_the_returned_loss_is_refused(name, case, accumulated):
    make_step, message = OWN_STEPS[case]
    with pytest.raises((ValueError, RuntimeError), match=f"^training_step: .*{message}"):
        fit(name, make_step(), {"accumulate_grad_batches": accumulated})


@both_loops
def test_the_training_step_of_a_plain_python_class_must_not_call_backward(name):
    class Model:
        def __init__(self):
            self.net = make_net()

        def training_step(self, batch):
            return backward_twice(self.net, batch)

        def configure_optimizers(self):
            return sgd(self.net)

    with pytest.raises(ValueError, match=r"^training_step: got a call to loss.backward\(\)"):
        make_loop(name).fit(Model(), make_loader())


def adversarial(net, batch):
    """Call backward on another loss to make adversarial examples, and train on them."""
    inputs = batch[0].clone().requires_grad_()
    cross_entropy(net(inputs), batch[1]).backward()
    return loss_of(net, ((inputs + 0.05 * inputs.grad.sign()).detach(), batch[1]))


def refused(name, step):
    """Return a context manager that expects an error, or does nothing if FabricLoop accepts the step."""
    message = r"^training_step: got a call to loss.backward\(\)"
    is_refused = step is backward_twice or name == "MiniLoop"
    return pytest.raises(ValueError, match=message) if is_refused else nullcontext()


@both_loops
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
@pytest.mark.parametrize("step", [backward_twice, adversarial])
def test_a_training_step_that_calls_backward_is_refused_in_each_precision(name, precision, step):
    options = {"precision": precision}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        options = {"plugins": [MixedPrecision(precision, "cpu", scaler=scaler)]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False} if name == "FabricLoop" else {}
    loop = LOOPS[name](fabric=Fabric(accelerator="cpu", **options), max_epochs=1, accumulate_grad_batches=3, **quiet)
    net = make_net()
    with refused(name, step):
        loop.fit(net, make_loader(), optimizer=sgd(net), training_step=step)


class TrainsAnotherNet:
    """A training step that also trains a second network with its own optimizer."""

    def __init__(self):
        self.other = nn.Linear(8, 3)
        self.optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)

    def __call__(self, net, batch):
        self.optimizer.zero_grad()
        loss_of(self.other, batch).backward()
        self.optimizer.step()
        return loss_of(net, batch)


@pytest.mark.parametrize(
    ("name", "make_step"),
    [("FabricLoop", lambda: adversarial), ("FabricLoop", TrainsAnotherNet), ("MiniLoop", TrainsAnotherNet)],
)
def test_a_training_step_may_call_backward_on_an_additional_loss(name, make_step):
    expected, step = make_net(), make_step()
    optimizer = sgd(expected)
    for batch in make_loader(shuffle=False):
        loss = step(expected, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net, _ = fit(name, make_step(), train=make_loader(shuffle=False))
    assert_same_weights(expected, net)


@both_loops
def test_fit_clears_gradients_computed_before_the_run(name):
    def make_optimizer(net):
        loss_of(net, next(iter(make_loader(shuffle=False)))).backward()
        return sgd(net)

    found = [fit(name, train=make_loader(shuffle=False), make_optimizer=make)[0] for make in (sgd, make_optimizer)]
    assert_same_weights(*found)


@both_loops
def test_an_error_about_a_second_backward_pass_suggests_detach(name):
    state = torch.zeros(8)

    def step(net, batch):
        nonlocal state
        state = net[0].weight.mean(0) * state + batch[0].mean(0) + net[0].weight.sum(0) ** 2
        return loss_of(net, batch) + state.sum()

    with pytest.raises(RuntimeError, match=r"second backward pass.*detach\(\)"):
        fit(name, step)


def grad_of_several_elements(net, batch):
    inputs = batch[0].clone().requires_grad_()
    torch.autograd.grad(net(inputs), inputs)


def grad_twice(net, batch):
    inputs = batch[0].clone().requires_grad_()
    loss = loss_of(net, (inputs, batch[1]))
    for _ in range(2):
        torch.autograd.grad(loss, inputs)


@both_loops
@pytest.mark.parametrize(
    ("step", "message"),
    [(grad_of_several_elements, "grad can be implicitly created only for scalar outputs"), (grad_twice, "Trying to")],
)
def test_an_error_from_torch_autograd_grad_is_raised_unchanged(name, step, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        fit(name, step)


def fit_in_process(rank, name, step, accumulated):
    loop = make_loop(name, devices=2, strategy="ddp", accumulate_grad_batches=accumulated)
    net = make_net()
    with refused(name, step):
        loop.fit(net, make_loader(), optimizer=sgd(net), training_step=step)


@pytest.mark.parametrize(("name", "case"), once(LOOPS, [(backward_twice, 1), (backward_twice, 2), (adversarial, 1)]))
def test_a_training_step_that_calls_backward_is_refused_with_two_processes(name, case):
    codes, errors = run_processes(fit_in_process, name, *case, ranks=2)
    assert codes == [0, 0], errors


def fit_with_own_backward_in_one_process(rank, own_step):
    loop, net = make_loop("FabricLoop", devices=2, strategy="ddp"), make_net()
    step = own_step if rank == 0 else loss_of
    loop.fit(net, make_loader(), optimizer=sgd(net), training_step=step)
    assert loop.global_step > 0


@pytest.mark.parametrize("own_step", [backward_twice, adversarial])
def test_training_does_not_hang_if_only_one_of_two_processes_calls_backward(own_step):
    """FabricLoop refuses a step that calls backward only if backward is called in all processes."""
    codes, errors = run_processes(fit_with_own_backward_in_one_process, own_step, ranks=2, timeout=120)
    assert codes == [0, 0], errors


# Batches of NumPy arrays

SAMPLES = [(sample.numpy(), int(label)) for sample, label in make_data(32)]


def to_arrays(rows):
    return np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])


def array_batches():
    return [to_arrays(SAMPLES[start : start + 8]) for start in range(0, 32, 8)]


def of_tensors(net, batch):
    return loss_of(net, [torch.as_tensor(part) for part in batch])


NUMPY = r"got NumPy arrays in the batch, expected tensors. Write TensorLoader\(x, y, batch_size=32\)"


@both_loops
def test_batches_of_numpy_arrays_are_refused_unless_the_step_converts_them(name):
    loaders = [array_batches(), DataLoader(SAMPLES, batch_size=8, collate_fn=to_arrays)]
    for loader in loaders:
        with pytest.raises(TypeError, match=NUMPY):
            fit(name, train=loader)
    with pytest.raises(TypeError, match=NUMPY):
        fit(name, lambda net, batch: net(batch[0].float()).sum(), train=array_batches())
    with pytest.raises(TypeError, match=NUMPY):
        fit(name, val=array_batches())
    net, _ = fit(name, of_tensors, train=array_batches())
    batches = [tuple(map(torch.as_tensor, batch)) for batch in array_batches()]
    assert_same_weights(net, fit(name, train=batches)[0])


@both_loops
def test_an_error_raised_by_a_step_function_reaches_the_caller_unchanged(name):
    def step(net, batch):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine$"):
        fit(name, step)


# Wrong arguments of fit and validate, and wrong values that steps return or log


@both_loops
@pytest.mark.parametrize("argument", ["gradient_clip_val", "max_epochs", "seed"])
def test_fit_refuses_an_option_of_the_loop_constructor(name, argument):
    message = rf"^fit: got {argument}=1, which is an option of {name}. Write {name}\({argument}=1\)"
    with pytest.raises(TypeError, match=message):
        fit(name, **{argument: 1})
    with pytest.raises(TypeError, match="^fit: unknown .* 'val_dataloader'. Did you mean val_dataloaders"):
        fit(name, val_dataloader=make_loader())


def test_validate_refuses_an_argument_that_belongs_to_the_loop_constructor():
    with pytest.raises(TypeError, match="^validate: got max_epochs=2, which is an option"):
        make_loop("FabricLoop").validate(make_net(), make_loader(), validation_step=loss_of, max_epochs=2)


@both_loops
def test_fit_without_a_training_loader_is_refused(name):
    net = make_net()
    with pytest.raises(TypeError, match="train_dataloaders"):
        make_loop(name).fit(net, None, optimizer=sgd(net), training_step=loss_of)


@both_loops
def test_a_scheduler_whose_optimizer_was_not_passed_to_fit_is_refused(name):
    scheduler = StepLR(sgd(make_net()), 1)
    for given in (scheduler, {"scheduler": scheduler, "interval": "step"}, [scheduler]):
        with pytest.raises(ValueError, match=r"^scheduler: got .*another optimizer.* Write StepLR\(optimizer"):
            fit(name, scheduler=given)


@both_loops
def test_log_dict_in_a_step_takes_the_same_arguments_as_log(name, tmp_path):
    options = {"log_every_n_steps": 1, "validate_every_n_steps": 5}

    def run(log):
        def step(net, batch):
            loss = loss_of(net, batch)
            log(loop, {"a": loss, "b": 0.5})
            return loss

        net = make_net()
        loop = make_loop(name, **options)
        functions = {"training_step": step, "validation_step": step}
        history = loop.fit(net, make_loader(), make_loader(), optimizer=sgd(net), **functions)
        with open(loop.log_dir + "/steps.csv" if name == "FabricLoop" else loop.log_dir / "steps.csv") as file:
            return history.drop(columns=["time", "waiting", "samples_per_second"], errors="ignore"), list(
                csv.DictReader(file)
            )

    def log_each(loop, values, **given):
        for key, value in values.items():
            loop.log(key, value, **given)

    for given in ({}, {"on_step": False, "on_epoch": True}, {"on_step": True, "sync_dist": True, "batch_size": 2}):
        history, rows = run(lambda loop, values, given=given: loop.log_dict(values, **given))
        expected, expected_rows = run(lambda loop, values, given=given: log_each(loop, values, **given))
        assert history.equals(expected)
        assert rows == expected_rows
        assert len(rows) >= 10


@pytest.mark.parametrize("option", ["gradient_clip_val", "accumulate_grad_batches"])
def test_errors_about_step_functions_do_not_mention_trainer(option):
    """A user of step functions has neither a Trainer nor a LightningModule."""
    net = make_net()
    loop = make_loop("FabricLoop", **{option: 2})
    with pytest.raises(ValueError, match=f"^{option}: got 2 with several optimizers, expected .*in training_step"):
        loop.fit(net, make_loader(), optimizer=[sgd(net), sgd(net)], training_step=loss_of)
    plateau = {"scheduler": ReduceLROnPlateau(sgd(net))}
    with pytest.raises(ValueError, match="^scheduler: got ReduceLROnPlateau without a monitor"):
        fit("FabricLoop", make_optimizer=lambda net: plateau["scheduler"].optimizer, scheduler=plateau)
    names = "Trainer|LightningModule|configure_optimizers"
    calls = [{"train": 3}, {"train": DataLoader(Endless()), "options": {"limit_train_batches": 0.5}}]
    calls += [{"training_step": None}, {"make_optimizer": lambda net: None}]
    for arguments in calls:
        with pytest.raises((ValueError, TypeError)) as caught:
            fit("FabricLoop", **arguments)
        assert not re.search(names, str(caught.value)), str(caught.value)


def test_fit_warns_if_one_cycle_lr_takes_only_one_step_per_epoch():
    with pytest.warns(match="OneCycleLR"):
        fit_with_scheduler("FabricLoop", lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=60))
    # fit must not warn if the user has set the interval explicitly.
    fit_with_scheduler(
        "FabricLoop", lambda optimizer: {"scheduler": OneCycleLR(optimizer, 0.2, total_steps=60), "interval": "epoch"}
    )


def fit_with_scheduler(name, make_scheduler, **options):
    net = make_net()
    optimizer = sgd(net)
    scheduler = make_scheduler(optimizer)
    make_loop(name, **options).fit(net, make_loader(), optimizer=optimizer, scheduler=scheduler, training_step=loss_of)


@both_loops
def test_a_misspelled_monitor_in_a_new_run_raises_an_error_without_a_hint_about_resume(name):
    def plateau(optimizer):
        return {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "vall_loss"}

    with pytest.raises(ValueError, match="vall_loss.*train_loss") as caught:
        fit_with_scheduler(name, plateau, max_epochs=2)
    assert "resume" not in str(caught.value)


@both_loops
def test_the_error_about_a_returned_dict_without_a_loss_lists_the_keys_of_the_dict(name):
    with pytest.raises((TypeError, ValueError), match=r"training_step: got .*\['Loss', 'acc'\]"):
        fit(name, lambda net, batch: {"Loss": loss_of(net, batch), "acc": 1.0})


@both_loops
def test_the_error_for_an_unreduced_loss_suggests_calling_mean(name):
    def losses(net, batch):
        return cross_entropy(net(batch[0]), batch[1], reduction="none")

    with pytest.raises((TypeError, RuntimeError), match=r"training_step: got .*one element.* loss\.mean\(\)"):
        fit(name, losses)


@both_loops
def test_bools_returned_by_a_training_step_are_logged_as_numbers(name):
    def step(net, batch):
        return {"loss": loss_of(net, batch), "is_small": len(batch[0]) < 4, "name": "x"}

    _, history = fit(name, step)
    assert history["train_is_small"].tolist() == [0.0]
    assert "train_name" not in history


def test_reading_estimated_stepping_batches_before_fit_raises_an_error():
    with pytest.raises(ValueError, match="known only during fit"):
        _ = make_loop("MiniLoop").estimated_stepping_batches


def train_with_logged_values(rank, name):
    net = make_net()
    loop = make_loop(name, devices=2, strategy="ddp")

    def validation_step(net, batch, sync_dist=False):
        loop.log("val_loss", loss_of(net, batch), sync_dist=sync_dist)

    functions = {"optimizer": sgd(net), "training_step": loss_of, "validation_step": validation_step}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.fit(net, make_loader(), make_loader(), **functions)
    texts = [str(warning.message) for warning in warned if "sync_dist=True" in str(warning.message)]
    assert len(texts) == (rank == 0), texts
    assert all("'val_loss'" in text for text in texts)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        functions["validation_step"] = partial(validation_step, sync_dist=True)
        loop.fit(net, make_loader(), make_loader(), **functions)
    assert not [warning for warning in warned if "sync_dist=True" in str(warning.message)]


@both_loops
def test_fit_warns_if_only_the_value_of_the_first_process_is_logged(name):
    codes, errors = run_processes(train_with_logged_values, name, ranks=2)
    assert codes == [0, 0], errors


@both_loops
@pytest.mark.parametrize("make", [iter, lambda batches: (batch for batch in batches), partial(map, list)])
def test_a_validation_loader_that_can_be_read_only_once_is_refused(name, make):
    with pytest.raises(TypeError, match="^val_dataloaders: got a .* only once.*Pass a DataLoader or a list"):
        fit(name, val=make(list(make_loader())), validation_step=loss_of, options={"max_epochs": 2})
    _, history = fit(name, val=list(make_loader()), validation_step=loss_of)
    assert history["val_loss"][0] > 0
    # validate reads the loader only once, so it accepts a loader that fit refuses.
    batches, loop = list(make_loader()), make_loop(name, max_epochs=2)
    results = [loop.validate(make_net(), val, validation_step=loss_of) for val in (batches, make(batches))]
    assert results[0] == results[1]


def test_a_generator_is_accepted_as_a_validation_loader_if_limit_val_batches_is_set():
    options = {"limit_val_batches": 2, "num_sanity_val_steps": 0, "max_epochs": 2}
    _, history = fit("FabricLoop", options=options, val=iter(list(make_loader())), validation_step=loss_of)
    assert history["val_loss"].notna().all()


# Values that steps return, and arguments that steps receive


Output = namedtuple("Output", ["extra", "loss"])


@both_loops
def test_the_fields_of_a_returned_named_tuple_are_read_by_name(name):
    """An ordinary pair is (loss, accuracy), but the loss of a named tuple is its field named loss."""

    def step(net, batch):
        loss = loss_of(net, batch)
        return Output(loss.detach() * 0 + 7, loss)

    net, history = fit(name)
    other, named = fit(name, step)
    assert_same_weights(net, other)
    assert named["train_loss"].tolist() == history["train_loss"].tolist()
    assert named["train_extra"].tolist() == [7.0]


@both_loops
def test_validation_reads_the_fields_of_a_named_tuple_by_name(name):
    def step(net, batch):
        return Output(torch.tensor(7.0), loss_of(net, batch))

    _, pair = fit(name, val=make_loader())
    _, named = fit(name, val_dataloaders=make_loader(), validation_step=step)
    assert named["val_loss"].tolist() == pair["val_loss"].tolist()
    assert named["val_extra"].tolist() == [7.0]
    with pytest.raises(ValueError, match=r"validation_step: two of the returned keys .* refer to the same column"):
        fit(name, val_dataloaders=make_loader(), validation_step=lambda net, batch: {"acc": 1.0, "val_acc": 2.0})


def log_in_process(rank, name):
    """Log the rank with a weight that differs between the processes, as a number and as a tensor."""

    def step(net, batch):
        value = torch.tensor(float(rank))
        loop.log("number", value, on_epoch=True, sync_dist=True, batch_size=1 + 2 * rank)
        loop.log("tensor", value, on_epoch=True, sync_dist=True, batch_size=torch.tensor(1 + 2 * rank))
        return loss_of(net, batch)

    net = make_net()
    loop = make_loop(name, devices=2, strategy="ddp")
    row = loop.fit(net, make_loader(), optimizer=sgd(net), training_step=step).iloc[0]
    assert row["number"] == row["tensor"] == 0.75


@pytest.mark.usefixtures("quick_spawn")
@both_loops
def test_log_accepts_a_tensor_as_batch_size_with_two_processes(name):
    codes, errors = run_processes(log_in_process, name)
    assert codes == [0, 0], errors


@pytest.mark.parametrize("keys", [("loss", "train_loss"), ("acc", "train_acc"), (1, "1")])
@both_loops
def test_two_returned_keys_that_refer_to_the_same_column_are_refused(name, keys):
    def step(net, batch):
        loss = loss_of(net, batch)
        return {"loss": loss, **dict.fromkeys(keys, loss)}

    with pytest.raises(ValueError, match=r"training_step: two of the returned keys .* refer to the same column"):
        fit(name, step)


@both_loops
def test_a_lightning_module_may_return_keys_that_refer_to_the_same_column(name):
    """Only the loss is read, because a LightningModule logs its other values itself."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, batch_idx):
            return {"loss": loss_of(self.net, batch), "train_loss": 7.0, "acc": 1.0, "train_acc": 1.0}

        def validation_step(self, batch, batch_idx):
            return {"loss": loss_of(self.net, batch), "val_loss": 7.0, "acc": 1.0, "val_acc": 1.0}

        def configure_optimizers(self):
            return sgd(self)

    row = make_loop(name).fit(Module(), make_loader(), make_loader()).iloc[0]
    assert 0 < row["train_loss"] < 3
    assert 0 < row["val_loss"] < 3


@pytest.mark.parametrize("view", [lambda weight: weight, lambda weight: weight.view(()), lambda weight: weight[0]])
def test_a_loss_that_is_a_parameter_is_recorded_before_the_optimizer_step(view):
    """The loss shares memory with the parameter, which an optimizer step changes in place."""
    net, seen = nn.ParameterList([nn.Parameter(torch.ones(1))]), []
    loop = make_loop("FabricLoop", log_every_n_steps=1)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    step = lambda net, batch: view(net[0])  # noqa: E731
    row = loop.fit(net, [0, 1, 2], optimizer=optimizer, training_step=step).iloc[0]
    with open("logs/run/version_0/steps.csv", newline="") as file:
        seen = [float(row["train_loss"]) for row in csv.DictReader(file)]
    assert seen == [1.0, 0.5, 0.0]
    assert row["train_loss"] == 0.5


@pytest.mark.filterwarnings("ignore:.*contains an iterator that continues across epochs")
def test_mini_loop_reads_no_iterator_in_a_batch_to_find_the_batch_size():
    """Reading an endless iterator would never end. Reading any other iterator would leave no items for the step."""
    batches = [{"n": itertools.count(), "parts": iter(range(3)), "xy": xy} for xy in make_loader()]

    def step(net, batch):
        assert next(batch["n"]) == 0
        assert list(batch["parts"]) == [0, 1, 2]
        return loss_of(net, batch["xy"])

    fit("MiniLoop", step, train=batches)


def scaled(net, batch, scale=2.0, batch_idx=None):
    return loss_of(net, batch) * scale


def keyword_only(net, batch, *, batch_idx=0):
    return loss_of(net, batch)


def needs_option(net, batch, *, scale):
    return loss_of(net, batch) * scale


@pytest.mark.parametrize("step", [scaled, keyword_only, needs_option])
@both_loops
def test_a_step_function_with_an_unexpected_parameter_is_refused(name, step):
    with pytest.raises(TypeError, match=r"training_step: got .*batch, .*expected .*\(model, batch\) or"):
        fit(name, step)


@pytest.mark.parametrize("step", [lambda: 0, "loss", max])
def test_mini_loop_refuses_an_object_that_cannot_be_a_step_function(step):
    with pytest.raises((TypeError, ValueError), match=r"training_step: got .*, expected"):
        fit("MiniLoop", step)


@both_loops
def test_an_argument_of_a_step_that_partial_has_bound_is_not_passed_again(name):
    net, _ = fit(name)
    other, _ = fit(name, partial(lambda net, batch, batch_idx: loss_of(net, batch) * batch_idx, batch_idx=1))
    assert_same_weights(net, other)


@both_loops
def test_a_keyword_only_batch_idx_parameter_of_training_step_keeps_its_default(name):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, *, batch_idx=0):
            assert batch_idx == 0
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return sgd(self)

    make_loop(name).fit(Module(), make_loader())


@pytest.mark.parametrize("argument", ["resume", "load"])
@pytest.mark.parametrize("given", [True, False, 0, 1.5, ""])
def test_mini_loop_refuses_invalid_values_of_resume_and_load(argument, given):
    with pytest.raises(ValueError, match=rf"{argument}: got .*, expected a path, 'last', 'best'"):
        fit("MiniLoop", **{argument: given})


# Hooks that set should_stop or call log()


@pytest.mark.filterwarnings("ignore:metrics.csv contains no metrics")
@pytest.mark.parametrize("epoch", [0, 1])
@both_loops
def test_should_stop_in_on_train_epoch_start_skips_the_batches_of_the_epoch(name, epoch):
    """Like Trainer, both loops still call on_train_epoch_end for the skipped epoch."""

    class Stops(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.calls = make_net(), []

        def on_train_epoch_start(self):
            self.trainer.should_stop = self.trainer.current_epoch == epoch

        def training_step(self, batch, batch_idx):
            self.calls.append("step")
            return loss_of(self.net, batch)

        def on_train_epoch_end(self):
            self.calls.append("end")

        def configure_optimizers(self):
            self.optimizer = sgd(self)
            return [self.optimizer], [StepLR(self.optimizer, 1, 0.5)]

    def train(make):
        torch.manual_seed(1)
        module, loop = Stops(), make()
        loop.fit(module, make_loader())
        return module.calls, loop.current_epoch, loop.global_step, module.optimizer.param_groups[0]["lr"]

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    expected = train(lambda: pl.Trainer(max_epochs=3, enable_checkpointing=False, **quiet))
    assert train(lambda: make_loop(name, max_epochs=3)) == expected


class LogsAtStart(nn.Module):
    def __init__(self, kill_at=None):
        super().__init__()
        self.net, self.kill_at, self.count = make_net(), kill_at, 0

    def on_train_start(self):
        self.log("at_start", 1.5)

    def training_step(self, batch):
        self.count += 1
        if self.count == self.kill_at:
            raise KeyboardInterrupt
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return sgd(self)


@pytest.mark.parametrize("kill_at", [13, 27])
@both_loops
def test_values_logged_in_on_train_start_are_not_logged_again_in_a_resumed_run(name, kill_at, tmp_path):
    def rows(folder, kill_at=None, resume=None):
        torch.manual_seed(1)
        loop = make_loop(name, max_epochs=3, default_root_dir=str(tmp_path / folder))
        try:
            loop.fit(LogsAtStart(kill_at), make_loader(), resume=resume)
        except KeyboardInterrupt:
            return None
        text = next((tmp_path / folder).rglob("metrics.csv")).read_text()
        return [(row["epoch"], row["at_start"], row["train_loss"]) for row in csv.DictReader(text.split())]

    whole = rows("whole")
    rows("cut", kill_at)
    assert rows("cut", resume="last") == whole


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"])
@both_loops
def test_a_value_logged_in_a_hook_replaces_the_returned_value_with_the_same_name(name, hook):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch):
            return loss_of(self.net, batch)

    model = Logs()
    setattr(model, hook, lambda *arguments: model.log("train_loss", 5.0, on_step=False, on_epoch=True))
    history = make_loop(name, max_epochs=2).fit(model, make_loader(), optimizer=sgd(model))
    assert history["train_loss"].tolist() == [5.0, 5.0]

"""Test error messages that tests/contract/wrong_inputs.txt does not list."""

import math
import re

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import Classifier, make_loader
from runs import Plain, fit, tree, val_loader, with_files
from torch import nn

from fabric_template import FabricLoop, MiniLoop


class Endless:
    """A loader without a length."""

    def __iter__(self):
        while True:
            yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)


def check_error(kind, message, call, root):
    """Check that the call raises a one-line error starting with ``message`` and changes no file."""
    before = tree(root)
    with pytest.raises(kind, match=f"^{re.escape(message)}") as caught:
        call()
    assert "\n" not in str(caught.value)
    assert tree(root) == before


def fitting(root, *args, options=None, **given):
    loop = FabricLoop(**with_files(root, max_epochs=1, **(options or {})))
    return lambda: loop.fit(*args, **given)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"min_epochs": -2, "accumulate_grad_batches": 0, "mode": "least"},
            ValueError,
            "min_epochs: got -2, expected a number of epochs (int >= 0). accumulate_grad_batches: got 0, expected a number"
            ' of batches (int >= 1). mode: got \'least\', expected "auto", "min" or "max".',
        ),
        (
            {"min_epochs": 1.5, "mode": "least"},
            TypeError,
            "min_epochs: got 1.5, expected a number of epochs (int >= 0)."
            ' mode: got \'least\', expected "auto", "min" or "max".',
        ),
        ({"accumulate_grad_batches": True}, TypeError, "accumulate_grad_batches: got True, expected"),
        ({"on_nan": 3}, TypeError, 'on_nan: got 3, expected "warn", "stop" or "off".'),
        ({"on_nan": "raise"}, ValueError, "on_nan: got 'raise', expected"),
        ({"on_nan": "stop", "barebones": True}, ValueError, "`Trainer(barebones=True, on_nan='stop')`"),
        (
            {"max_epoch": 3, "zzz": 1},
            TypeError,
            "FabricLoop: unknown option 'max_epoch'. Did you mean max_epochs? FabricLoop: unknown option"
            " 'zzz'. help(FabricLoop) lists the options.",
        ),
        (
            {"acelerator": "cpu"},
            TypeError,
            "FabricLoop: unknown option 'acelerator'. Did you mean accelerator?",
        ),
    ],
)
def test_one_error_lists_all_invalid_options(tmp_path, options, kind, message):
    check_error(kind, message, lambda: FabricLoop(**options), tmp_path)


NUMBERS = [-2, -1, 0, 1, 3, 1.5, math.nan, math.inf, 2**32]
VALUES = [
    None,
    True,
    False,
    "3",
    "",
    "a/b",
    [],
    b"x",
    np.int64(3),
    np.float32(1.5),
    np.True_,
    torch.tensor(3),
    *NUMBERS,
]
SHARED_OPTIONS = (
    *("max_epochs", "max_steps", "name", "version", "accumulate_grad_batches", "gradient_clip_val"),
    *("validate_every_n_steps", "log_every_n_steps", "seed", "default_root_dir", "precision", "hparams"),
)


@pytest.mark.parametrize("option", SHARED_OPTIONS)
def test_fabric_loop_and_mini_loop_accept_the_same_values_for_each_shared_option(option):
    def accepts(loop, value):
        try:
            loop(**{"accelerator": "cpu", option: value})
        except (TypeError, ValueError):
            return False
        return True

    accepted = [value for value in VALUES if accepts(FabricLoop, value)]
    assert [value for value in VALUES if accepts(MiniLoop, value)] == accepted
    assert accepted not in ([], VALUES)


def test_fit_without_an_optimizer_is_refused(tmp_path):
    message = "optimizer: got None, expected an optimizer. Write fit(..., optimizer=torch.optim.Adam("
    call = fitting(tmp_path, nn.Linear(8, 3), make_loader(), training_step=lambda net, batch: net(batch[0]).sum())
    check_error(ValueError, message, call, tmp_path)


@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_loader_without_length_cannot_be_limited_to_a_fraction_of_its_batches(tmp_path, stage):
    loaders = {"train": make_loader(), "val": make_loader()} | {stage: Endless()}
    call = fitting(tmp_path, Plain(), *loaders.values(), options={f"limit_{stage}_batches": 0.5})
    with pytest.raises(ValueError, match=rf"`FabricLoop\(limit_{stage}_batches\)` must be `1.0` or an int"):
        call()


def test_fit_warns_about_a_validation_loader_without_a_validation_step(tmp_path):
    class Half(Classifier):
        validation_step = None

    with pytest.warns(UserWarning, match="^You passed in a `val_dataloader` but have no `validation_step`"):
        fitting(tmp_path, Half(), make_loader(), make_loader())()


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (lambda self, batch: None, TypeError, "training_step: got None, expected the loss as a tensor."),
        (
            lambda self, batch: 0.5,
            TypeError,
            "training_step: got 0.5, expected the loss as a tensor. Write `return loss` at the end of the step.",
        ),
        (lambda self, batch: {"los": torch.zeros(())}, ValueError, "training_step: got the keys ['los']."),
        (
            lambda self, batch: self.net(batch[0]).sum().detach(),
            ValueError,
            "training_step: got a loss without a gradient at batch 0, expected",
        ),
    ],
    ids=["None", "float", "no_loss_key", "detached"],
)
def test_a_training_step_that_returns_no_loss_is_refused(tmp_path, step, kind, message):
    model = type("Wrong", (Plain,), {"training_step": step})()
    with pytest.raises(kind, match=re.escape(message)):
        fitting(tmp_path, model, make_loader())()
    assert [path for path in tree(tmp_path) if path.endswith((".ckpt", ".csv"))] == []


@pytest.mark.parametrize("argument", ["resume", "load"])
def test_a_damaged_checkpoint_or_one_from_a_different_model_is_refused(tmp_path, argument):
    fit(tmp_path / "other", max_epochs=1)
    path = tmp_path / "other/checkpoints/run/version_0/last.ckpt"
    root = tmp_path / "mine"
    root.mkdir()
    message = "Error(s) in loading state_dict for Classifier: size mismatch for net.0.weight: copying a param"
    call = fitting(root, Classifier(hidden=4), make_loader(), **{argument: path})
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)) as caught:
        call()
    assert str(caught.value).endswith(
        f"The weights in '{path}' do not match the model. Create the model with the same arguments as the saved model."
    )
    path.write_bytes(path.read_bytes()[:2000])
    check_error(
        ValueError,
        f"{path}: the file is damaged.",
        fitting(root, Classifier(), make_loader(), **{argument: path}),
        root,
    )


def test_load_accepts_a_plain_state_dict(tmp_path):
    trained = Classifier()
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    loop = FabricLoop(**with_files(tmp_path, max_epochs=1, limit_train_batches=0))
    model = Classifier()
    loop.fit(model, make_loader(), load=tmp_path / "w.pt")
    assert all(map(torch.equal, trained.parameters(), model.parameters()))


def test_a_monitored_metric_that_is_never_logged_raises_an_error_after_the_first_epoch(tmp_path):
    """The checkpoint of the first epoch is saved before the error is raised."""
    call = fitting(tmp_path, Classifier(), make_loader(), val_loader(), options={"monitor": "val_mse"})
    with pytest.raises(ValueError, match=r"^monitor: got 'val_mse', which is not logged\. Logged metrics: .*val_loss"):
        call()
    files = [path for path in tree(tmp_path) if not path.endswith(".yaml")]
    assert files == ["checkpoints/run/version_0/last.ckpt", "logs/run/version_0/metrics.csv"]
    _, _, history = fit(tmp_path, val=val_loader, max_epochs=2, resume="last", monitor="val_loss")
    assert len(history) == 2


class FetchesBatches(Classifier):
    """A model whose step methods have the parameter ``dataloader_iter``."""

    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter)[:2])

    def validation_step(self, dataloader_iter):
        return super().validation_step(*next(dataloader_iter)[:2])

    def test_step(self, dataloader_iter, more=None):
        return super().validation_step(*next(dataloader_iter)[:2])

    def predict_step(self, *, dataloader_iter):
        return self(next(dataloader_iter)[0][0])


class FetchesInObject(Plain):
    training_step, validation_step = FetchesBatches.training_step, FetchesBatches.validation_step
    test_step, predict_step = FetchesBatches.test_step, FetchesBatches.predict_step


@pytest.mark.parametrize("make", [FetchesBatches, FetchesInObject])
@pytest.mark.parametrize(
    ("stage", "step"),
    [("fit", "training"), ("validate", "validation"), ("test", "test"), ("predict", "predict")],
)
def test_a_step_method_with_a_dataloader_iter_parameter_is_refused(tmp_path, make, stage, step):
    loop, name = FabricLoop(**with_files(tmp_path, max_epochs=1)), f"{step}_step"
    message = f"{name}: got the argument dataloader_iter, expected a batch. Write {name}(self, batch, batch_idx)."
    check_error(TypeError, message, lambda: getattr(loop, stage)(make(), make_loader()), tmp_path)


def test_a_step_function_with_a_dataloader_iter_parameter_is_refused(tmp_path):
    net, functions = nn.Linear(8, 3), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for name in ("training_step", "validation_step"):
        given = {**functions, name: lambda net, dataloader_iter: None}
        call = fitting(tmp_path, net, make_loader(), val_loader(), optimizer=optimizer, **given)
        message = f"{name}: got the argument dataloader_iter, expected a batch. Write {name}(model, batch, batch_idx)."
        check_error(TypeError, message, call, tmp_path)
        functions = {"training_step": lambda net, batch: net(batch[0]).sum()}


class NeedsLoaderIndex(Plain):
    """An object whose step methods have the parameter ``dataloader_idx``."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        return super().training_step(batch)

    def test_step(self, batch, *, dataloader_idx):
        return super().training_step(batch)

    predict_step = validation_step


class NeedsLoaderIndexInTraining(Plain):
    def training_step(self, batch, dataloader_idx):
        return super().training_step(batch)


@pytest.mark.parametrize("make", [list, lambda loaders: loaders[0], lambda loaders: {"one": loaders[0]}])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_step_that_needs_dataloader_idx_is_refused_if_there_is_only_one_loader(tmp_path, stage, make):
    loop, step = FabricLoop(**with_files(tmp_path, max_epochs=1)), f"{stage}_step".replace("validate", "validation")
    with pytest.raises(RuntimeError, match=rf"a single `\w+_dataloader`.*in `NeedsLoaderIndex.{step}\(\)`"):
        getattr(loop, stage)(NeedsLoaderIndex(), make([make_loader()]))


def test_fit_refuses_a_training_step_with_a_dataloader_idx_parameter(tmp_path):
    call = fitting(tmp_path, NeedsLoaderIndexInTraining(), make_loader())
    check_error(TypeError, "training_step: got training_step(self, batch, dataloader_idx), expected", call, tmp_path)


def test_a_step_that_needs_dataloader_idx_receives_it_if_there_are_several_loaders(tmp_path):
    seen = []

    def step(model, batch, dataloader_idx):
        seen.append(dataloader_idx)
        return torch.tensor(1.0)

    fitting(tmp_path, Plain(), make_loader(), [val_loader(), val_loader()], validation_step=step)()
    assert set(seen) == {0, 1}


class ValidatesOnTrainingData(Plain):
    def val_dataloader(self):
        return {"val": val_loader(), "train": make_loader()}


def test_a_validation_loader_key_that_duplicates_the_name_of_another_loss_is_refused(tmp_path):
    message = "val_dataloaders: got the key {!r}, expected a different key, because {} loss is also named {}_loss."
    for keys in (["train"], ["val", "train"]):
        call = fitting(tmp_path, Plain(), make_loader(), {key: val_loader() for key in keys})
        check_error(ValueError, message.format("train", "the training", "train"), call, tmp_path)
    call = fitting(tmp_path, Plain(), make_loader(), {1: val_loader(), "1": val_loader()})
    check_error(ValueError, message.format("1", "another loader's", "1"), call, tmp_path)
    with pytest.raises(ValueError, match="got the key 'train'"):
        fitting(tmp_path, ValidatesOnTrainingData(), make_loader())()
    # In the following runs, each loss has a different name, so fit and validate accept the key "train".
    fitting(tmp_path, Classifier(), make_loader(), {"train": val_loader()})()
    model = Plain()
    fitting(tmp_path, model, make_loader(), {"train": [val_loader(), val_loader()]})()
    FabricLoop(**with_files(tmp_path)).validate(model, {"train": val_loader()})


class HasOwnLoaders(NeedsLoaderIndex):
    def val_dataloader(self):
        return make_loader()

    def on_test_batch_start(self, batch, batch_idx):
        pass


def test_a_missing_or_unexpected_dataloader_idx_argument_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"a single `val_dataloader`.*in `HasOwnLoaders.validation_step\(\)`"):
        fitting(tmp_path, HasOwnLoaders(), make_loader())()
    with pytest.raises(RuntimeError, match=r"multiple `test_dataloader`.*in `HasOwnLoaders.on_test_batch_start\(\)`"):
        FabricLoop(**with_files(tmp_path)).test(HasOwnLoaders(), [make_loader()] * 2)


@pytest.mark.parametrize("where", [".", "logs", "logs/run"])
def test_a_file_in_place_of_the_log_folder_is_refused(tmp_path, where):
    root = tmp_path / "mine"
    blocked = root / where
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("a file")
    check_error(ValueError, "default_root_dir: got ", fitting(root, Classifier(), make_loader()), tmp_path)
    assert blocked.read_text() == "a file"


@pytest.mark.parametrize("kind", [MisconfigurationException, ValueError])
def test_value_errors_about_options_are_also_misconfiguration_exceptions(tmp_path, kind):
    with pytest.raises(kind, match="^max_epochs: got -7"):
        FabricLoop(max_epochs=-7)
    with pytest.raises(kind, match="^training_step: got None"):
        fitting(tmp_path, nn.Linear(8, 3), make_loader())()


@pytest.mark.parametrize("kind", [MisconfigurationException, TypeError])
def test_type_errors_about_options_are_also_misconfiguration_exceptions(tmp_path, kind):
    with pytest.raises(kind, match="^max_epochs: got '3'"):
        FabricLoop(max_epochs="3")
    with pytest.raises(kind, match="^optimizer: got 'sgd'"):
        fitting(tmp_path, Plain(), make_loader(), optimizer="sgd")()

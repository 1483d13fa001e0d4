"""Every error: one line that says what, where and what instead, before anything is written."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from modules import Classifier, make_data, make_loader
from runs import Plain, fit, loud, tree, val_loader
from torch import nn

from fabric_template import FabricLoop, TensorLoader
from fabric_template.errors import ConfigurationError


class Broken:
    """A net and whatever step a test gives it."""

    def __init__(self, **steps):
        self.net = nn.Linear(8, 3)
        for name, step in steps.items():
            setattr(self, name, step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Endless:
    """Batches without a length."""

    def __iter__(self):
        while True:
            yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)


def refused(kind, words, call, folder=None):
    """The call raises exactly this one line and leaves no file behind."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert message == words
    assert "\n" not in message
    if folder is not None:
        assert tree(folder) == []


def fitting(root, *args, words=None, **given):
    loop = FabricLoop(**loud(root, max_epochs=1, **(words or {})))
    return lambda: loop.fit(*args, **given)


# ---- the module, its steps and loaders


def test_no_training_step(tmp_path):
    words = (
        "No `training_step()` method defined{}: expected a method training_step(batch, batch_idx) that returns the"
        " loss, or a function given as fit(..., training_step=fn) with fn(model, batch, batch_idx)"
    )
    refused(ConfigurationError, words.format(" in Broken"), fitting(tmp_path, Broken(), make_loader()), tmp_path)
    refused(ConfigurationError, words.format(" in Linear"), fitting(tmp_path, nn.Linear(8, 3), make_loader()), tmp_path)
    trainers = (
        ". Lightning `Trainer` expects as minimum a `training_step()`, `train_dataloader()` and `configure_optimizers()` to be"
        " defined. It is missing in LightningModule"
    )
    refused(ConfigurationError, words.format(trainers), fitting(tmp_path, LightningModule(), make_loader()), tmp_path)


def test_no_module(tmp_path):
    words = (
        "object holds no torch.nn.Module: expected an nn.Module, or an object with modules among its attributes; write"
        " self.net = ... in its __init__"
    )
    refused(TypeError, words, fitting(tmp_path, object(), make_loader()), tmp_path)


def test_no_optimizer(tmp_path):
    net = nn.Linear(8, 3)
    words = (
        "No `configure_optimizers()` method defined in Linear, and fit got no optimizer: write fit(...,"
        " optimizer=torch.optim.Adam(model.parameters())) or a method configure_optimizers"
    )
    call = fitting(tmp_path, net, make_loader(), training_step=lambda net, batch: net(batch[0]).sum())
    refused(ConfigurationError, words, call, tmp_path)


def test_validation_loader_without_step(tmp_path):
    words = (
        "fit got val_dataloaders but Broken has no validation_step: expected a method validation_step(batch,"
        " batch_idx) (or"
        " validation_step=fn); leave val_dataloaders out to train without validation"
    )
    owner = Broken(training_step=lambda batch, batch_idx: torch.zeros(()))
    refused(ValueError, words, fitting(tmp_path, owner, make_loader(), make_loader()), tmp_path)


def test_no_loader(tmp_path):
    words = (
        "`train_dataloader` must be implemented to be used with the Lightning Trainer. An invalid dataloader was passed to"
        " `Trainer.fit(train_dataloaders=...)`. Found None: fit has no train loader;"
        " give it as fit(model, loader), as datamodule=, or write a method train_dataloader in Plain"
    )
    refused(TypeError, words, fitting(tmp_path, Plain()), tmp_path)


def test_empty_loader(tmp_path):
    words = "fit got an empty train loader (list of length 0): expected at least one batch"
    refused(ValueError, words, fitting(tmp_path, Plain(), []), tmp_path)


@pytest.mark.parametrize("stage", ["train", "val"])
def test_fraction_of_a_loader_without_length(tmp_path, stage):
    words = (
        f"limit_{stage}_batches=0.5: the {stage} loader (Endless) has no length, so there is no fraction of it. When using"
        f" an `IterableDataset`, `Trainer(limit_{stage}_batches)` must be `1.0` or an int. An int"
        f" specifies `num_{stage}_batches` to use: write limit_{stage}_batches=100"
    )
    loaders = {"train": make_loader(), "val": make_loader()} | {stage: Endless()}
    call = fitting(tmp_path, Plain(), loaders["train"], loaders["val"], words={f"limit_{stage}_batches": 0.5})
    refused(ValueError, words, call, tmp_path)


def test_two_sources_of_data(tmp_path):
    class Data:
        def train_dataloader(self):
            return make_loader()

    words = (
        "You cannot pass `train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`: expected one of them"
    )
    refused(ValueError, words, fitting(tmp_path, Plain(), make_loader(), datamodule=Data()), tmp_path)


# ---- the loss


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        (
            lambda self, batch: None,
            ValueError,
            "training_step returned None: expected the loss, a tensor; write return loss at its end",
        ),
        (
            lambda self, batch: 0.5,
            TypeError,
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step will be"
            " skipped); it returned a float: write return loss",
        ),
        (
            lambda self, batch: {"los": torch.zeros(())},
            ValueError,
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present;"
            " found the"
            " keys ['los']: write return {'loss': loss, ...}",
        ),
        (
            lambda self, batch: self.net(batch[0]).sum().detach(),
            ValueError,
            "training_step returned a loss without gradient at batch 0: expected a tensor computed from the model's"
            " parameters; is it detached, computed under torch.no_grad, or is everything frozen?",
        ),
    ],
    ids=["None", "float", "no_loss_key", "detached"],
)
def test_loss(tmp_path, step, kind, words):
    class Wrong(Broken):
        def training_step(self, batch):
            return step(self, batch)

    refused(kind, words, fitting(tmp_path, Wrong(), make_loader()))
    assert [path for path in tree(tmp_path) if path.endswith((".ckpt", ".csv"))] == []


@pytest.mark.parametrize("log_every", [2, 50])
def test_nan_loss_of_a_module_that_logs_it(tmp_path, log_every):
    """Looked for where values are read anyway: at those per step, and at the end of the epoch."""

    class Logs(Classifier):
        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            loss = loss * float("nan") if batch_idx >= 3 else loss
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, Logs, lambda: make_loader(24), max_epochs=2, log_every_n_steps=log_every)
    told = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    since = {2: "0 to 3", 50: "0 to 5"}[log_every]
    assert [text.split(" of this fit")[0] for text in told] == [
        f"The training loss is not finite (NaN or inf) since batch {since}"
    ]


def test_nan_loss_warns_once(tmp_path):
    """The run goes on, and says since which batch and how to find the operation."""

    class Diverges(Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch)
            return loss * float("nan") if batch_idx == 3 else loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, _, history = fit(tmp_path, Diverges, lambda: make_loader(24), max_epochs=3)
    told = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    assert len(told) == 1
    assert re.match(
        r"The training loss is not finite \(NaN or inf\) since batch (\d+ to )?\d+ of this fit; training goes on",
        told[0],
    )
    assert "FabricLoop(detect_anomaly=True)" in told[0]
    assert "\n" not in told[0]
    first, last = re.search(r"since batch (?:(\d+) to )?(\d+) of", told[0]).groups()
    assert int(first or last) <= 3 <= int(last)
    assert len(history) == 3


# ---- the words of the configuration


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_epoch": 3}, "FabricLoop has no argument max_epoch; did you mean max_epochs?"),
        ({"acelerator": "cpu"}, "FabricLoop has no argument acelerator; did you mean accelerator?"),
        (
            {"max_epoch": 3, "ckpt_path": "x"},
            "FabricLoop has no argument max_epoch; did you mean max_epochs?; FabricLoop has no argument"
            " ckpt_path: give the"
            " path to fit as resume= (continue the run) or load= (weights only)",
        ),
    ],
)
def test_unknown_word(tmp_path, given, words):
    refused(TypeError, words, lambda: FabricLoop(**given), tmp_path)


def test_unknown_word_like_nothing_lists_all(tmp_path):
    with pytest.raises(TypeError, match=r"^FabricLoop has no argument zzz; known are fabric, accelerator, .*compile$"):
        FabricLoop(zzz=1)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (
            {"max_epochs": "3"},
            TypeError,
            "max_epochs='3': expected None, -1 (no limit) or an int >= 0 (`max_epochs` must be a non-negative integer or -1."
            " You passed in 3.)",
        ),
        ({"accumulate_grad_batches": True}, TypeError, "accumulate_grad_batches=True: expected an int >= 1"),
        (
            {"min_epochs": -2, "accumulate_grad_batches": 0, "mode": "least"},
            ValueError,
            'min_epochs=-2: expected None or an int >= 0; accumulate_grad_batches=0: expected an'
            ' int >= 1;'
            " mode='least': expected \"min\" or \"max\"",
        ),
        (
            {"min_epochs": 1.5, "accumulate_grad_batches": 0},
            TypeError,
            "min_epochs=1.5: expected None or an int >= 0; accumulate_grad_batches=0: expected an"
            " int >= 1",
        ),
        (
            {"limit_train_batches": 1.5},
            ValueError,
            "limit_train_batches=1.5: expected None, an int >= 0 (batches) or a float from 0.0 to 1.0 (a fraction)"
            " (You have passed invalid value 1.5 for limit_train_batches, it has to be in [0.0, 1.0] or an int.)",
        ),
        (
            {"save_top_k": 3},
            ValueError,
            "save_top_k=3 without monitor: expected monitor='val_loss' or another metric",
        ),
    ],
)  # fmt: skip
def test_wrong_type_or_range(tmp_path, given, kind, words):
    """All complaints at once, in the order of the fields; a wrong type first."""
    with pytest.raises(kind) as caught:
        FabricLoop(**given)
    assert sorted(str(caught.value).split("; ")) == sorted(words.split("; "))
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == []


def test_loggers_twice():
    words = "FabricLoop got logger and loggers: expected one of them (Trainer's word or Fabric's)"
    refused(ValueError, words, lambda: FabricLoop(logger=False, loggers=[]))


# ---- checkpoints


def test_resume_and_load(tmp_path):
    words = (
        "fit(resume='last', load='x.ckpt'): expected one of them; resume= continues a run with its optimizer"
        " and counters,"
        " load= takes the weights only and starts a new one"
    )
    refused(ValueError, words, fitting(tmp_path, Plain(), make_loader(), resume="last", load="x.ckpt"), tmp_path)


@pytest.mark.parametrize("word", ["last", "best"])
def test_nothing_to_resume(tmp_path, word):
    words = (
        f"resume='{word}': there is no {word}.ckpt under '{tmp_path}/checkpoints/run'; expected a run with"
        f" name='run' to"
        " have saved one: leave resume out to start anew, or give a path"
    )
    refused(ValueError, words, fitting(tmp_path, Plain(), make_loader(), resume=word), tmp_path)


@pytest.mark.parametrize("word", ["resume", "load"])
def test_missing_file(tmp_path, word):
    path = tmp_path / "no.ckpt"
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        fitting(tmp_path, Plain(), make_loader(), **{word: path})()
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == []


def saved(tmp_path, **words):
    """A checkpoint of a Classifier, in a folder of its own."""
    fit(tmp_path / "other", max_epochs=1, **words)
    return tmp_path / "other/checkpoints/run/version_0/last.ckpt"


@pytest.mark.parametrize("word", ["resume", "load"])
def test_truncated_file(tmp_path, word):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    root = tmp_path / "mine"
    root.mkdir()
    with pytest.raises(ValueError, match=re.escape(f"'{path}'")) as caught:
        fitting(root, Classifier(), make_loader(), **{word: path})()
    assert "\n" not in str(caught.value)
    assert tree(root) == []


@pytest.mark.parametrize("word", ["resume", "load"])
def test_another_model(tmp_path, word):
    path = saved(tmp_path)
    root = tmp_path / "mine"
    root.mkdir()
    words = (
        f"Error(s) in loading state_dict for Classifier: '{path}'"
        " is of another model: 3 differences: 'net.0.weight' has shape (16, 8) in the file, (4, 8)"
        f" in the model;"
        " 'net.0.bias' has shape (16,) in the file, (4,) in the model; 'net.3.weight' has shape (3, 16) in"
        " the file, (3, 4)"
        " in the model; build the model with the same arguments"
    )
    refused(ValueError, words, fitting(root, Classifier(hidden=4), make_loader(), **{word: path}), root)

    class Other(Classifier):
        def __init__(self):
            super().__init__()
            self.head, self.net[3] = nn.Linear(1, 1), nn.Identity()

    words = (
        f"Error(s) in loading state_dict for Other: '{path}'"
        " is of another model: 4 differences: missing 'head.weight'; missing 'head.bias'; unexpected"
        " 'net.3.weight'; and 1 more; build the model with the same arguments"
    )
    refused(ValueError, words, fitting(root, Other(), make_loader(), **{word: path}), root)


def test_newer_format(tmp_path):
    path = saved(tmp_path)
    content = torch.load(path, weights_only=True)
    content["fabric_template"]["format"] = 99
    torch.save(content, path)
    root = tmp_path / "mine"
    root.mkdir()
    words = (
        f"'{path}' has format 99; this version of fabric_template reads up to 1: update it with pip install"
        f" -U, or save the"
        " checkpoint with this version"
    )
    refused(ValueError, words, fitting(root, Classifier(), make_loader(), resume=path), root)


def test_resume_from_weights(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(Classifier().state_dict(), path)
    root = tmp_path / "mine"
    root.mkdir()
    words = (
        f"resume='{path}': the file holds weights only (optimizer_states is missing); use load= to start a new"
        " run from them. Trying to restore optimizer state but checkpoint contains only the model. This is probably due to"
        " `ModelCheckpoint.save_weights_only` being set to `True`."
    )
    refused(ValueError, words, fitting(root, Classifier(), make_loader(), resume=path), root)


# ---- what only the run can know


def test_monitor_never_logged(tmp_path):
    """Told once the first epoch is over and safe on disk."""
    loop = FabricLoop(**loud(tmp_path, max_epochs=2, monitor="val_los"))
    words = (
        "monitor='val_los' was not logged in epoch 0; logged were ['lr', 'train_acc', 'train_loss',"
        " 'val_acc', 'val_loss']:"
        " write monitor= with one of these; last.ckpt is saved, resume='last' goes on from it"
    )
    refused(ValueError, words, lambda: loop.fit(Classifier(), make_loader(), val_loader()))
    files = [path for path in tree(tmp_path) if not path.endswith(".yaml")]
    assert files == ["checkpoints/run/version_0/last.ckpt", "logs/run/version_0/metrics.csv"]
    _, _, history = fit(tmp_path, val=val_loader, max_epochs=2, resume="last", monitor="val_loss")
    assert len(history) == 2


@pytest.mark.parametrize("where", [".", "logs", "logs/run"])
def test_logs_that_cannot_be_written(tmp_path, where):
    """A file lies where the folder should be."""
    root = tmp_path / "mine"
    blocked = root / where
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("a file")
    with pytest.raises(
        ValueError, match=r"^cannot (make the run's folder|write logs to) .*(Not a directory|File exists)"
    ) as caught:
        fitting(root, Classifier(), make_loader())()
    assert "\n" not in str(caught.value)
    assert "logger=False" in str(caught.value)
    assert blocked.read_text() == "a file"
    assert tree(tmp_path) == [blocked.relative_to(tmp_path).as_posix()]


def test_a_table_that_is_a_folder(tmp_path):
    fit(tmp_path, max_epochs=1)
    table = Path(tmp_path, "logs/run/version_0/metrics.csv")
    table.unlink()
    table.mkdir()
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"^cannot write logs to .*Is a directory") as caught:
        fitting(tmp_path, Classifier(), make_loader(), resume="last")()
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == before


def test_validate_without_model():
    words = (
        "`FabricLoop.validate()` requires a `LightningModule` when it hasn't been passed in a previous run: expected"
        " validate(model, ...), with that or another model, or a fit before it"
    )
    refused(TypeError, words, lambda: FabricLoop(**loud(logger=False)).validate())


def test_tensor_loader():
    x, y = make_data(10).tensors
    words = "TensorLoader: expected tensors of one length, got lengths [10, 9]: write TensorLoader(x, y)"
    refused(ValueError, words, lambda: TensorLoader(x, y[:9]))
    refused(ValueError, "TensorLoader: batch_size=0: expected an int >= 1", lambda: TensorLoader(x, batch_size=0))


# ---- what is said, and nothing stopped


def test_a_lightning_module_with_half_of_a_validation_trains_without_it(tmp_path):
    words = "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop of Classifier."
    with pytest.warns(PossibleUserWarning, match=f"^{re.escape(words)}$"):
        fitting(tmp_path, Classifier(), make_loader())()

    class Half(Classifier):
        validation_step = None

    words = "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop of Half."
    with pytest.warns(UserWarning, match=f"^{re.escape(words)}$"):
        fitting(tmp_path, Half(), make_loader(), make_loader())()


def test_keys_that_manual_optimization_ignores(tmp_path):
    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            pass

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "monitor": "train_loss", "interval": "step"}]

    with pytest.warns(RuntimeWarning, match=r"contains the key\(s\) \['monitor'\], but the keys will be ignored"):
        fitting(tmp_path, Manual(), make_loader())()


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        (
            "training_epoch_end",
            NotImplementedError,
            "Support for `training_epoch_end` has been removed in v2.0.0. `Old` implements this method. You can use the"
            " `on_train_epoch_end` hook instead. To access outputs, save them in-memory as instance attributes.",
        ),
        (
            "training_step",
            RuntimeError,
            "Training with multiple optimizers is only supported with manual optimization. Remove the `optimizer_idx`"
            " argument from `training_step`, set `self.automatic_optimization = False` and access your optimizers in"
            " `training_step` with `opt1, opt2, ... = self.optimizers()`.",
        ),
    ],
)
def test_what_lightning_2_has_dropped(tmp_path, method, kind, words):
    Old = type("Old", (Classifier,), {method: lambda self, batch, batch_idx, optimizer_idx: None})
    refused(kind, words, fitting(tmp_path, Old(), make_loader()), tmp_path)


# ---- the classes


@pytest.mark.parametrize("kind", [MisconfigurationException, ValueError])
def test_a_misuse_is_caught_as_in_code_written_for_trainer(tmp_path, kind):
    with pytest.raises(kind, match="expected None, -1"):
        FabricLoop(max_epochs=-7)
    with pytest.raises(kind, match="No `training_step"):
        fitting(tmp_path, Broken(), make_loader())()


@pytest.mark.parametrize("kind", [MisconfigurationException, TypeError])
def test_a_misuse_of_type_too(tmp_path, kind):
    with pytest.raises(kind, match="max_epochs='3'"):
        FabricLoop(max_epochs="3")
    with pytest.raises(kind, match="Unknown configuration for model optimizers"):
        fitting(tmp_path, Plain(), make_loader(), optimizer="sgd")()


class Returns(Classifier):
    """Logs nothing."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    validation_step = training_step


def test_a_monitor_of_an_epoch_that_max_steps_has_cut_short(tmp_path):
    """It was measured in the epoch before; this one ends before its validation."""
    loop, _, history = fit(tmp_path, Returns, val=val_loader, max_steps=12, monitor="val_loss")
    assert loop.global_step == 12
    assert history["val_loss"].isna().tolist() == [False, True]

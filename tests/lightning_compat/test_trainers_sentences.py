"""What Trainer refuses is refused in its own sentence, and by errors that its users catch; what it warns of, as well."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities import CombinedLoader
from modules import quiet
from torch.utils.data import DataLoader


def module(**methods):
    """A model with other methods; None: without that one."""
    empty = {name: getattr(pl.LightningModule, name) for name, method in methods.items() if method is None}
    return type("Model", (BoringModel,), {**methods, **empty})()


def loop(**words):
    return lambda kind, root: kind(**quiet(accelerator="cpu", default_root_dir=str(root), **words))


def fit(*rest, words=None, **methods):
    return lambda kind, root: loop(fast_dev_run=1, **(words or {}))(kind, root).fit(module(**methods), *rest)


def verb(name, *rest, **methods):
    return lambda kind, root: getattr(loop(fast_dev_run=1)(kind, root), name)(module(**methods), *rest)


def resumed(kind, root):
    callback = ModelCheckpoint(dirpath=root, filename="x")
    loop(max_epochs=1, limit_train_batches=1, enable_checkpointing=True, callbacks=[callback])(kind, root).fit(
        BoringModel()
    )
    other = BoringModel()
    other.extra = torch.nn.Linear(1, 1)
    loop(max_epochs=2)(kind, root).fit(other, ckpt_path=root / "x.ckpt")


def manual(**words):
    model = BoringModel()
    model.automatic_optimization = False
    return lambda kind, root: loop(max_epochs=1, **words)(kind, root).fit(model)


def logging(value):
    def training_step(self, batch, batch_idx):
        self.log("a", value)
        return self.layer(batch).sum()

    return training_step


def rate(self, in_a_dict=True):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler} if in_a_dict else scheduler}


REFUSED = {
    "devices=0": loop(devices=0),
    "devices=text": loop(devices="0"),
    "accelerator=gpu": loop(accelerator="mps"),
    "two precisions": loop(plugins=[pl.plugins.DoublePrecision(), pl.plugins.MixedPrecision("bf16-mixed", "cpu")]),
    "precision=8": loop(precision=8),
    **{
        f"{name}={value!r}": loop(**{name: value})
        for name, value in {
            "max_epochs": -2, "max_steps": -2, "limit_train_batches": 1.5, "limit_val_batches": -1, "overfit_batches": 1.5,
            "val_check_interval": "10 min", "check_val_every_n_epoch": 1.5, "gradient_clip_val": "1.0", "fast_dev_run": -1,
            "gradient_clip_algorithm": "l2", "reload_dataloaders_every_n_epochs": -1, "max_time": "10 min",
        }.items()
    },
    "a fraction across epochs": loop(check_val_every_n_epoch=None, val_check_interval=0.5),
    "two bars": loop(enable_progress_bar=None, callbacks=[TQDMProgressBar(), RichProgressBar()]),
    "two of one key": loop(callbacks=[EarlyStopping("a"), EarlyStopping("a")]),
    "no training_step": fit(training_step=None),
    "no configure_optimizers": fit(configure_optimizers=None),
    "no train_dataloader": fit(train_dataloader=None),
    "no validation_step": verb("validate", validation_step=None),
    "no test_dataloader": verb("test", test_dataloader=None),
    "no model": lambda kind, root: loop()(kind, root).validate(),
    "two sources": lambda kind, root: loop()(kind, root).fit(BoringModel(), [torch.ones(2, 32)], datamodule=BoringDataModule()),
    "two sources to test": lambda kind, root: loop()(kind, root).test(BoringModel(), [1], datamodule=BoringDataModule()),
    "sequential": fit(CombinedLoader([DataLoader(torch.ones(2, 32))], "sequential")),
    "no loss": fit(training_step=lambda self, batch, batch_idx: {"a": 1}),
    "training_epoch_end": fit(training_epoch_end=lambda self, outputs: None),
    "optimizer_idx": fit(training_step=lambda self, batch, batch_idx, optimizer_idx: None),
    "a plateau of nothing": fit(configure_optimizers=rate),
    "a plateau by itself": fit(configure_optimizers=lambda self: rate(self, in_a_dict=False)),
    "manual and clipping": manual(gradient_clip_val=2),
    "manual and accumulation": manual(accumulate_grad_batches=2),
    "a dict": fit(training_step=logging({"b": 1.0})),
    "in on_fit_start": fit(on_fit_start=lambda self: self.log("a", 1.0)),
    "in predict_step": verb("predict", predict_step=lambda self, batch, batch_idx: self.log("a", 1.0)),
    "nothing to save": lambda kind, root: loop()(kind, root).save_checkpoint(root / "x.ckpt"),
    "another model": resumed,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    """The kind of Trainer's error is one of ours, and its sentence stands in ours."""
    errors = []
    for side, kind in LOOPS.items():
        (tmp_path / side).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                errors.append(REFUSED[name](kind, tmp_path / side))
            except Exception as error:
                errors.append(error)
    theirs, ours = errors
    assert isinstance(ours, type(theirs)), (theirs, ours)
    sentence = str(theirs).split("\n")[0].split(" Please consult")[0].split(" You can find")[0].strip()
    assert sentence.replace("Trainer", "") in str(ours).replace("FabricLoop", "").replace("Trainer", "")


WARNED = {
    "no validation_step": (
        {"validation_step": None},
        "You passed in a `val_dataloader` but have no `validation_step`. Skipping",
    ),
    "no val_dataloader": (
        {"val_dataloader": None},
        "You defined a `validation_step` but have no `val_dataloader`. Skipping",
    ),
    "no optimizer": (
        {"configure_optimizers": lambda self: None},
        "`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer",
    ),
    "asleep": (
        {"on_fit_start": lambda self: None},
        "Found 1 module(s) in eval mode at the start of training. This may lead to",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warned(name, tmp_path):
    methods, words = WARNED[name]
    for kind in LOOPS.values():
        model = module(**methods)
        if name == "asleep":
            model.layer.eval()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loop(fast_dev_run=1)(kind, tmp_path).fit(model)
        assert any(words in str(warning.message) for warning in told), kind

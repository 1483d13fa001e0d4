"""Errors and warnings of Lightning that people search for have Trainer's sentence, and a class that its users catch."""

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


def loop(**options):
    return lambda kind, root: kind(**quiet(accelerator="cpu", default_root_dir=str(root), **options))


def fit(*rest, **methods):
    return lambda kind, root: loop(fast_dev_run=1)(kind, root).fit(module(**methods), *rest)


def call_of(name, *rest, **methods):
    return lambda kind, root: getattr(loop(fast_dev_run=1)(kind, root), name)(module(**methods), *rest)


def resumed(kind, root):
    callback = ModelCheckpoint(dirpath=root, filename="x")
    loop(max_epochs=1, limit_train_batches=1, enable_checkpointing=True, callbacks=[callback])(kind, root).fit(
        BoringModel()
    )
    other = BoringModel()
    other.extra = torch.nn.Linear(1, 1)
    loop(max_epochs=2)(kind, root).fit(other, ckpt_path=root / "x.ckpt")


def manual(**options):
    model = BoringModel()
    model.automatic_optimization = False
    return lambda kind, root: loop(max_epochs=1, **options)(kind, root).fit(model)


def logging(value):
    def training_step(self, batch, batch_idx):
        self.log("a", value)
        return self.layer(batch).sum()

    return training_step


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


ERRORS = {
    "accelerator=gpu": loop(accelerator="mps"),
    "two precisions": loop(plugins=[pl.plugins.DoublePrecision(), pl.plugins.MixedPrecision("bf16-mixed", "cpu")]),
    "precision=8": loop(precision=8),
    "a fraction across epochs": loop(check_val_every_n_epoch=None, val_check_interval=0.5),
    "two bars": loop(enable_progress_bar=None, callbacks=[TQDMProgressBar(), RichProgressBar()]),
    "two of one key": loop(callbacks=[EarlyStopping("a"), EarlyStopping("a")]),
    "no train_dataloader": fit(train_dataloader=None),
    "no test_dataloader": call_of("test", test_dataloader=None),
    "no model": lambda kind, root: loop()(kind, root).validate(),
    "two sources": lambda kind, root: loop()(kind, root).fit(BoringModel(), [torch.ones(2, 32)], datamodule=BoringDataModule()),
    "two sources to test": lambda kind, root: loop()(kind, root).test(BoringModel(), [1], datamodule=BoringDataModule()),
    "sequential": fit(CombinedLoader([DataLoader(torch.ones(2, 32))], "sequential")),
    "no loss": fit(training_step=lambda self, batch, batch_idx: {"a": 1}),
    "training_epoch_end": fit(training_epoch_end=lambda self, outputs: None),
    "optimizer_idx": fit(training_step=lambda self, batch, batch_idx, optimizer_idx: None),
    "ReduceLROnPlateau without monitor": fit(configure_optimizers=plateau),
    "manual and clipping": manual(gradient_clip_val=2),
    "manual and accumulation": manual(accumulate_grad_batches=2),
    "a dict": fit(training_step=logging({"b": 1.0})),
    "nothing to save": lambda kind, root: loop()(kind, root).save_checkpoint(root / "x.ckpt"),
    "another model": resumed,
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, tmp_path):
    """Our error is an instance of the class of Trainer's, and has its sentence."""
    errors = []
    for side, kind in LOOPS.items():
        (tmp_path / side).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                errors.append(ERRORS[name](kind, tmp_path / side))
            except Exception as error:
                errors.append(error)
    theirs, ours = errors
    assert isinstance(ours, type(theirs)), (theirs, ours)
    sentence = str(theirs).split("\n")[0].split(" Please consult")[0].split(" You can find")[0].strip()
    assert sentence.replace("Trainer", "") in str(ours).replace("FabricLoop", "").replace("Trainer", "")


WARNINGS = {
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
    "eval mode": (
        {"on_fit_start": lambda self: None},
        "Found 1 module(s) in eval mode at the start of training. This may lead to",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warning(name, tmp_path):
    methods, sentence = WARNINGS[name]
    for kind in LOOPS.values():
        model = module(**methods)
        if name == "eval mode":
            model.layer.eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop(fast_dev_run=1)(kind, tmp_path).fit(model)
        assert any(sentence in str(warning.message) for warning in caught), kind

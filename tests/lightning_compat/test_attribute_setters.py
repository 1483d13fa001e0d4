"""Options that are set on a loop between runs and in hooks take effect, as on Trainer."""

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from modules import quiet

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError


class Notes(BoringModel):
    """Notes when it validates and when its loader is made."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def train_dataloader(self):
        self.seen.append("loader")
        return super().train_dataloader()

    def on_validation_start(self):
        self.seen.append(self.trainer.global_step)

    def training_step(self, batch, batch_idx):
        self.log("x", float(batch_idx))
        return super().training_step(batch, batch_idx)


def made(kind, tmp_path, **options):
    pl.seed_everything(1, verbose=False)
    limits = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 2}
    return kind(**quiet(**{"accelerator": "cpu", "default_root_dir": str(tmp_path), **limits, **options}))


def assert_same(sides):
    (theirs, first), (ours, second) = sides
    assert first.seen == second.seen
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    for name in ("global_step", "current_epoch", "num_training_batches", "num_val_batches", "accumulate_grad_batches"):
        assert getattr(theirs, name) == getattr(ours, name), name


@pytest.mark.parametrize(
    ("hook", "name", "value"),
    [
        (None, "limit_train_batches", 2),
        (None, "limit_val_batches", 0),
        (None, "val_check_interval", 2),
        (None, "accumulate_grad_batches", 2),
        (None, "num_sanity_val_steps", 0),
        ("on_fit_start", "limit_train_batches", 2),
        ("on_train_start", "check_val_every_n_epoch", 2),
        ("on_train_start", "reload_dataloaders_every_n_epochs", 1),
        ("on_train_batch_start", "gradient_clip_val", 0.001),
        ("on_train_epoch_start", "accumulate_grad_batches", 2),
    ],
)
def test_option_is_set_before_fit_or_in_a_hook(hook, name, value, tmp_path):
    sides = []
    for kind in LOOPS.values():
        hooks = {} if hook is None else {hook: lambda self, trainer, *rest: setattr(trainer, name, value)}
        trainer, module = made(kind, tmp_path, callbacks=[type("Sets", (Callback,), hooks)()]), Notes()
        if hook is None:
            setattr(trainer, name, value)
        trainer.fit(module)
        assert getattr(trainer, name) == value
        sides.append((trainer, module))
    assert_same(sides)


def test_a_wrong_value_is_refused_as_in_the_constructor():
    loop = FabricLoop(**quiet())
    with pytest.raises(ConfigurationError, match="limit_val_batches: got 1.5"):
        loop.limit_val_batches = 1.5
    assert loop.limit_val_batches == 1.0

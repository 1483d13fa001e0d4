"""Trainer's precision plugins and the strategy's methods."""

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from modules import quiet

WORDS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "accelerator": "cpu"}


def on_both(model, tmp_path, **words):
    """Both, after a fit of their own model."""
    trainers = []
    for kind in LOOPS.values():
        pl.seed_everything(1, verbose=False)
        given = {name: value() if callable(value) else value for name, value in words.items()}
        trainers.append(kind(**quiet(**{**WORDS, "default_root_dir": str(tmp_path), **given})))
        trainers[-1].fit(model())
    weights = [dict(trainer.lightning_module.state_dict()) for trainer in trainers]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert trainers[0].global_step == trainers[1].global_step
    return trainers


@pytest.mark.parametrize(
    "make",
    [
        Precision,
        DoublePrecision,
        lambda: MixedPrecision("bf16-mixed", "cpu"),
        lambda: HalfPrecision("bf16-true"),
    ],
    ids=["32", "64", "mixed", "half"],
)
def test_trainers_precision_plugins(make, tmp_path):
    trainers = on_both(BoringModel, tmp_path, plugins=lambda: [make()], gradient_clip_val=0.5)
    assert trainers[0].precision == trainers[1].precision


def test_the_strategys_methods_for_files(tmp_path):
    seen = []
    for trainer in on_both(BoringModel, tmp_path):
        path = tmp_path / "x.ckpt"
        trainer.strategy.save_checkpoint({"a": 1}, path)
        seen.append(trainer.strategy.load_checkpoint(path))
        trainer.strategy.remove_checkpoint(path)
        seen[-1]["left"] = list(tmp_path.glob("*.ckpt"))
    assert seen[0] == seen[1]

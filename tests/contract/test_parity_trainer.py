"""The same module, loaders and seed under lightning.Trainer and FabricLoop: the same bits."""

import pytest
from modules import Classifier, assert_parity, by_epoch, by_step, make_loader, sgd
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR


def every_second_epoch(module):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": 2}}


def plateau(module):
    optimizer = sgd(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


CASES = {
    "shuffle_dropout": {},
    "accumulate_3_of_10": {"accumulate_grad_batches": 3},
    "clip_norm": {"gradient_clip_val": 0.1},
    "clip_value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "val_check_quarter": {"val_check_interval": 0.25},
    "val_check_int": {"val_check_interval": 4},
    "val_across_epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "val_every_2": {"check_val_every_n_epoch": 2},
    "limit_batches": {"limit_train_batches": 5, "limit_val_batches": 2},
    "limit_fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.6},
    "max_steps_mid_epoch": {"max_epochs": -1, "max_steps": 13},
    "max_steps_accumulated": {"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 4},
    "no_sanity": {"num_sanity_val_steps": 0},
    "full_sanity": {"num_sanity_val_steps": -1},
    "overfit": {"overfit_batches": 3},
    "fast_dev_run": {"fast_dev_run": 2},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "bf16_true": {"precision": "bf16-true"},
    "64_true": {"precision": "64-true"},
    "min_epochs": {"min_epochs": 2, "max_epochs": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_option(name):
    words = {"max_epochs": 3, **CASES[name]}
    assert_parity(Classifier, train, val, **words)


@pytest.mark.parametrize("optimizers", [sgd, by_step, by_epoch, every_second_epoch, plateau])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_optimizers(optimizers, accumulate):
    assert_parity(lambda: Classifier(optimizers), train, val, max_epochs=4, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers(workers):
    assert_parity(Classifier, lambda: make_loader(40, num_workers=workers), val, max_epochs=2)


def test_without_validation():
    assert_parity(Classifier, train, max_epochs=2)

"""Test runs that are resumed for more epochs, and the values of ``resume=`` and ``load=``.

test_exact_resume.py tests runs that are killed within an epoch.
"""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from parameters import once
from runs import assert_same_end, fit, logs_of, same, tree, val_loader, weights_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

from fabric_template import read_logs


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def by_step(module):
    optimizer = momentum(module)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=60)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_epoch(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, 4)]


def plateau(module):
    optimizer = momentum(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def plateau_strict_off(module):
    """Return a ReduceLROnPlateau config with strict=False, so a missing val_loss causes only a warning."""
    found = plateau(module)
    scheduler = {"scheduler": found["lr_scheduler"], "strict": False, "monitor": "val_loss"}
    return {"optimizer": found["optimizer"], "lr_scheduler": scheduler}


def plateau_by_step(module):
    optimizer = momentum(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.7, patience=1, threshold=10.0)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "train_loss"},
    }


def compare_with_resume(tmp_path, make_module=Classifier, train=None, val=val_loader, given=None, **options):
    """Compare a run of 4 epochs with a run that is resumed after 2 epochs."""
    options = {"log_every_n_steps": 3, **options}
    whole = fit(tmp_path / "whole", make_module, train, val, given=given, max_epochs=4, **options)
    fit(tmp_path / "parts", make_module, train, val, given=given, max_epochs=2, **options)
    resumed = fit(
        tmp_path / "parts", make_module, train, val, seed=99, given=given, resume="last", max_epochs=4, **options
    )
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "parts")
    assert tree(tmp_path / "whole") == tree(tmp_path / "parts")
    return whole, resumed


def classifier(optimizers):
    return lambda: Classifier(optimizers, on_step=True)


@pytest.mark.parametrize(
    ("optimizers", "accumulate"), once([momentum, by_step, by_epoch, plateau, plateau_by_step], [1, 3])
)
def test_each_learning_rate_scheduler_continues_exactly_in_a_resumed_run(tmp_path, optimizers, accumulate):
    compare_with_resume(tmp_path, classifier(optimizers), accumulate_grad_batches=accumulate)


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss which is not available")
def test_a_resumed_run_passes_the_last_validation_metric_to_reduce_lr_on_plateau(tmp_path):
    """In an epoch without validation, the scheduler reads the value from the saved run."""
    whole, _ = compare_with_resume(tmp_path, classifier(plateau_strict_off), check_val_every_n_epoch=2)
    assert whole[0].lr_scheduler_configs[0].scheduler.num_bad_epochs == 0


def test_a_run_with_a_training_step_function_resumes_exactly(tmp_path):
    def step(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    make = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))  # noqa: E731
    given = lambda net: {"optimizer": momentum(net), "training_step": step, "validation_step": step}  # noqa: E731
    compare_with_resume(tmp_path, make, given=given)


def test_resuming_mid_epoch_starts_with_the_next_batch(tmp_path):
    """No hook of an earlier batch is called again."""
    seen = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(f"epoch {trainer.current_epoch}")

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(batch_idx)
            if batch_idx == 4 and not tmp_path.joinpath("copy").exists():
                shutil.copytree(tmp_path / "run", tmp_path / "copy")

    options = {"max_epochs": 1, "save_every_n_steps": 2, "callbacks": [Watch()]}
    fit(tmp_path / "run", train=lambda: make_loader(24), **options)
    assert seen == ["epoch 0", 0, 1, 2, 3, 4, 5]
    seen.clear()
    loop, _, history = fit(tmp_path / "copy", train=lambda: make_loader(24), resume="last", **options)
    assert seen == [4, 5]
    assert (loop.current_epoch, loop.global_step, len(history)) == (1, 6, 1)


def test_resume_accepts_last_auto_or_the_path_of_a_checkpoint(tmp_path):
    options = {"monitor": "val_loss", "save_top_k": 1}
    whole = fit(tmp_path / "whole", val=val_loader, max_epochs=4, **options)
    fit(tmp_path / "a", val=val_loader, max_epochs=2, **options)
    for resume in ("last", "auto", tmp_path / "path/checkpoints/run/version_0/last.ckpt"):
        root = tmp_path / ("path" if isinstance(resume, Path) else resume)
        shutil.copytree(tmp_path / "a", root)
        given = str(resume) if isinstance(resume, Path) else resume
        assert_same_end(whole, fit(root, val=val_loader, seed=9, resume=given, max_epochs=4, **options))
        assert tree(root) == tree(tmp_path / "whole")


def test_a_run_resumes_exactly_after_its_checkpoint_and_metrics_csv_were_moved(tmp_path):
    """The test moves metrics.csv together with the checkpoint."""
    whole = fit(tmp_path / "whole", val=val_loader, max_epochs=3)
    fit(tmp_path / "a", val=val_loader, max_epochs=2)
    shutil.move(tmp_path / "a/checkpoints/run/version_0/last.ckpt", tmp_path / "moved.ckpt")
    shutil.move(tmp_path / "a/logs/run/version_0/metrics.csv", tmp_path)
    resumed = fit(tmp_path / "b", val=val_loader, seed=4, resume=tmp_path / "moved.ckpt", max_epochs=3)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "b") == logs_of(tmp_path / "whole")


def test_resume_best_drops_the_csv_rows_after_the_best_epoch(tmp_path):
    class Worse(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", abs(self.current_epoch - 1.0))

    options = {"val": val_loader, "monitor": "val_loss"}
    fit(tmp_path, Worse, max_epochs=4, **options)
    _, _, history = fit(tmp_path, Worse, seed=3, resume="best", max_epochs=3, **options)
    assert history["epoch"].tolist() == [0, 1, 2]
    assert history["val_loss"].tolist() == [1.0, 0.0, 1.0]
    assert read_logs(tmp_path / "logs")["epoch"].tolist() == [0, 1, 2]


def test_resume_refuses_a_run_that_has_already_trained_for_more_than_max_epochs(tmp_path):
    fit(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=r"current_epoch=2, but you have set Trainer\(max_epochs=1\)"):
        fit(tmp_path, resume="last", max_epochs=1)


def test_load_restores_only_the_weights(tmp_path):
    _, trained, _ = fit(tmp_path, max_epochs=2)
    found = {}

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            found["weights"] = {k: v.clone() for k, v in module.state_dict().items()}
            found["optimizer"] = dict(trainer.optimizers[0].state)
            found["place"] = (trainer.current_epoch, trainer.global_step)

    path = tmp_path / "checkpoints/run/version_0/last.ckpt"
    before = path.read_bytes()
    loop, _, history = fit(tmp_path, seed=5, load=str(path), max_epochs=1, callbacks=[Watch()])
    assert same(found["weights"], dict(trained.state_dict()))
    assert found["optimizer"] == {}
    assert found["place"] == (0, 0)
    assert (loop.current_epoch, loop.global_step, history["epoch"].tolist()) == (1, 10, [0])
    assert path.read_bytes() == before
    assert Path(loop.log_dir).name == "version_1"

    def trained_before():
        module = Classifier()
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        return module

    # A run with load= must end with the same weights as a run whose module had the loaded weights from the start.
    expected = fit(tmp_path / "b", trained_before, seed=5, max_epochs=1)
    assert same(weights_of(expected[1]), weights_of(loop.lightning_module))

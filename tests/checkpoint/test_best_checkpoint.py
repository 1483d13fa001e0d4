"""Test which checkpoints are kept as the best ones. Trainer's ModelCheckpoint is the reference."""

import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import Classifier, make_loader, quiet, run_trainer
from parameters import halve, once
from runs import Snapshots, assert_same_end, fit, logs_of, same, tree, val_loader, with_files

from fabric_template import FabricLoop, MiniLoop

# Each training epoch has eight batches of four samples.
EPOCH = {"train": lambda: make_loader(32), "val": val_loader, "num_sanity_val_steps": 0}


def scored(*scores, every=2):
    """Return a model class whose n-th validation logs the n-th score."""

    class Scored(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("score", float(scores[max(self.trainer.global_step // every - 1, 0)]))

    return Scored


def files_of(root):
    """Return {step: path} of all checkpoints except last.ckpt."""
    paths = [path for path in root.rglob("*.ckpt") if path.name != "last.ckpt"]
    return {torch.load(path, weights_only=False)["global_step"]: path for path in paths}


@pytest.mark.parametrize(("top_k", "mode"), [(1, "min"), (2, "max")])
def test_fit_keeps_the_same_best_checkpoints_as_trainer(tmp_path, mode, top_k):
    make, options = scored(5, 1, 3, 4, 2, 6, 0.5, 9), {"val_check_interval": 0.25, "max_epochs": 2}
    callback = ModelCheckpoint(tmp_path / "trainer", monitor="score", mode=mode, save_top_k=top_k)
    saving = {"enable_checkpointing": True, "callbacks": [callback], "num_sanity_val_steps": 0}
    run_trainer(make, EPOCH["train"], val_loader, **options, **saving)
    loop, *_ = fit(tmp_path / "loop", make, monitor="score", mode=mode, save_top_k=top_k, **EPOCH, **options)
    theirs, ours = files_of(tmp_path / "trainer"), files_of(tmp_path / "loop")
    assert sorted(theirs) == sorted(ours)
    for step, path in theirs.items():
        one, other = (torch.load(file, weights_only=False) for file in (path, ours[step]))
        assert same(dict(one["state_dict"]), dict(other["state_dict"])), step
        assert same(one["optimizer_states"], other["optimizer_states"]), step
    saver = loop.checkpoint_callback
    assert saver.best_model_score == callback.best_model_score
    assert torch.load(saver.best_model_path, weights_only=True)["global_step"] == (14 if mode == "min" else 16)
    reader = FabricLoop(**with_files(tmp_path / "loop"), mode=mode)
    reader.validate(Classifier(), val_loader(), load="best", verbose=False)
    assert reader.ckpt_path == saver.best_model_path


def test_a_run_killed_after_a_validation_resumes_exactly(tmp_path):
    options = {**EPOCH, "monitor": "val_loss", "save_top_k": 2, "max_epochs": 2}
    options |= {"val_check_interval": 3, "accumulate_grad_batches": 2}
    whole = fit(tmp_path / "run", callbacks=[Snapshots(tmp_path / "run", tmp_path / "killed")], **options)
    # The newest checkpoint of each copied folder was saved during a validation: after 3 batches, or after 14 batches.
    for batches in (3, 15):
        root = tmp_path / "killed" / str(batches)
        assert_same_end(whole, fit(root, seed=9, resume="last", **options))
        assert logs_of(root) == logs_of(tmp_path / "run")
        assert tree(root) == tree(tmp_path / "run")


def test_monitoring_an_epoch_mean_saves_one_checkpoint_per_epoch(tmp_path):
    loop, _, history = fit(
        tmp_path, max_epochs=2, val_check_interval=2, monitor="train_loss_epoch", save_top_k=-1, **EPOCH
    )
    names = sorted(path.name for path in tmp_path.rglob("epoch=*.ckpt"))
    values = history["train_loss"]
    assert names == [f"epoch={e}-step={8 * e + 8}-train_loss_epoch={values[e]:.4g}.ckpt" for e in (0, 1)]


@pytest.mark.parametrize(("top_k", "kept"), [(1, 1), (-1, 2)])
def test_a_nan_score_is_never_the_best_score(tmp_path, top_k, kept):
    make = scored(math.nan, 3, math.nan, 2, every=8)
    loop, *_ = fit(tmp_path, make, monitor="score", mode="min", save_top_k=top_k, max_epochs=4, **EPOCH)
    assert loop.checkpoint_callback.best_model_score == 2
    assert torch.load(loop.checkpoint_path("best"), weights_only=True)["global_step"] == 32
    assert len([path for path in tmp_path.rglob("*.ckpt") if path.name != "last.ckpt"]) == kept
    assert FabricLoop(**quiet()).checkpoint_path("best") is None


def test_a_run_stopped_during_validation_keeps_its_best_checkpoints(tmp_path):

    class Stops(Callback):
        def on_validation_end(self, trainer, module):
            trainer.should_stop = trainer.should_stop or trainer.global_step == 4

    options = {**EPOCH, "val_check_interval": 2, "monitor": "score", "mode": "min", "save_top_k": 3, "max_epochs": 1}
    fit(tmp_path, scored(5, 1, 3, 4), callbacks=[Stops()], **options)
    steps = {step: path.name for step, path in files_of(tmp_path).items()}
    assert steps == {2: "epoch=0-step=2-score=5.ckpt", 4: "epoch=0-step=4-score=1.ckpt"}
    fit(tmp_path, scored(5, 1, 3, 4), resume="last", **options)
    assert sorted(files_of(tmp_path)) == [4, 6, 8]


class Two(Classifier):
    """A model that logs the n-th loss and the n-th accuracy in the n-th epoch."""

    losses, accuracies = (5.0, 4.0, 3.0, 3.5), (0.125, 0.5, 0.375, 0.25)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"loss": self.losses[self.current_epoch], "acc": self.accuracies[self.current_epoch]})


LOSS, ACC = {"monitor": "loss"}, {"monitor": "acc"}


@pytest.mark.parametrize(
    ("first", "second", "best"),
    [
        (LOSS, ACC, {3: 0.375}),
        (ACC, LOSS, {3: 3.0}),
        (LOSS, {"monitor": "loss", "mode": "max"}, {4: 3.5}),
        (ACC, {"monitor": "acc", "mode": "min"}, {4: 0.25}),
        ({}, ACC, {3: 0.375}),
        (LOSS, {}, {2: 4.0}),
        (ACC, {}, {2: 0.5}),
        (LOSS, LOSS, {3: 3.0}),
        (ACC, ACC, {2: 0.5}),
    ],
    ids=str,
)
def test_a_run_resumed_with_a_new_monitor_ignores_scores_of_the_old_monitor(tmp_path, first, second, best):
    fit(tmp_path, Two, max_epochs=2, **EPOCH, **first)
    loop, *_ = fit(tmp_path, Two, max_epochs=4, resume="last", **EPOCH, **second)
    saver, path = loop.checkpoint_callback, loop.checkpoint_path("best")
    ((epoch, score),) = best.items()
    assert (saver.best_model_score, saver.best_model_path) == (score, str(path))
    assert torch.load(path, weights_only=True)["global_step"] == 8 * epoch
    assert fit(tmp_path, Two, max_epochs=1, load="best", **EPOCH, **second)[0].ckpt_path == str(path)


@pytest.mark.parametrize(("loops", "save_top_k"), once(["FF", "FM", "MF", "MM"], [1, 2, -1]))
def test_best_checkpoints_remain_if_a_run_resumes_without_the_monitor_option(loops, save_top_k):
    """If monitor= is passed again later, new checkpoints compete with the earlier best checkpoints."""

    def run(index, max_epochs, monitor=None, resume=None):
        options = {"max_epochs": max_epochs, "monitor": monitor, "accelerator": "cpu"}
        if loops[index % 2] == "F":
            options |= {"enable_progress_bar": False, "enable_model_summary": False}
            options |= {} if monitor is None else {"save_top_k": save_top_k}
        loop = {"F": FabricLoop, "M": MiniLoop}[loops[index % 2]](**options)
        loop.fit(Two(), make_loader(16), make_loader(8), resume=resume)

    def best_epoch():
        _, checkpoint = MiniLoop()._find_start(None, "last")
        names = checkpoint["fabric_template"]["checkpoints"]["kept"]
        path = Path("checkpoints/run/version_0", next(iter(names)))
        return torch.load(path, weights_only=True)["epoch"], sorted(names.values())[0]

    run(0, 2, "loss")
    run(1, 3, resume="last")
    assert best_epoch() == (1, 4.0)
    run(0, 4, "loss", resume="last")
    assert best_epoch() == (3, 3.5)


@pytest.mark.parametrize(("first", "second"), halve([1, 2, -1], [1, 2, 3, -1]))
def test_resuming_with_a_different_save_top_k_keeps_the_best_checkpoints(tmp_path, first, second):
    """New checkpoints compete only with the checkpoints that the first run did not delete."""
    scores = [5, 3, 4, 2.5, 3.5, 1]
    options = {**EPOCH, "monitor": "score", "mode": "min"}
    fit(tmp_path, scored(*scores, every=8), max_epochs=3, save_top_k=first, **options)
    fit(tmp_path, scored(*scores, every=8), max_epochs=6, resume="last", save_top_k=second, **options)
    kept = scores[:3] if first == -1 else sorted(scores[:3])[:first]
    for score in scores[3:]:
        if second == -1 or len(kept) < second or score < sorted(kept)[second - 1]:
            kept = sorted([*kept, score])[: None if second == -1 else second]
    assert sorted(files_of(tmp_path)) == sorted(8 * (scores.index(score) + 1) for score in kept)

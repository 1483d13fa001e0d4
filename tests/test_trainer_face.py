"""What was written for Trainer finds its words here: hooks, checkpoints and attributes as under Trainer."""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Classifier, assert_same_weights, make_loader, run_loop, run_trainer
from runs import fit, val_loader


def plain_loader():
    return make_loader(24, shuffle=False)


# ---- hooks


class Listening(Classifier):
    """Notes what the checkpoint hooks are shown."""

    def on_save_checkpoint(self, checkpoint):
        self.saved = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])

    def on_load_checkpoint(self, checkpoint):
        self.loaded = (sorted(checkpoint), checkpoint["epoch"], checkpoint["global_step"])


def test_checkpoint_hooks_are_shown_trainers_keys(tmp_path):
    """... at the end of an epoch with the number of the epoch that ended; what we add stays out of their sight."""
    callback = ModelCheckpoint(dirpath=tmp_path / "trainer", filename="x")
    _, theirs = run_trainer(
        Listening, plain_loader, val_loader, max_epochs=2, enable_checkpointing=True, callbacks=[callback]
    )
    _, ours, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=2)
    assert ours.saved == theirs.saved
    assert ours.saved[1:] == (1, 12)
    _, again, _ = fit(tmp_path, Listening, plain_loader, val_loader, max_epochs=3, resume="last")
    assert again.loaded == ours.saved


def test_a_hook_set_on_the_object_is_called():
    """... also one that wraps the empty one that it inherits, as spies do."""
    seen = []

    def make():
        module = Classifier()
        inherited = module.on_train_epoch_end

        def spy():
            seen.append("on_train_epoch_end")
            return inherited()

        spy.__module__ = inherited.__module__  # as functools.wraps does
        module.on_train_epoch_end = spy
        return module

    run_loop(make, plain_loader, max_epochs=2)
    assert seen == ["on_train_epoch_end"] * 2


# ---- Trainer's own checkpoints


def test_resume_from_a_model_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    """A ModelCheckpoint keeps the files, the loop keeps none: still its files go on to the same bits."""
    straight = run_loop(Classifier, make_loader, val_loader, max_epochs=3)[1]
    callback = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=7, save_top_k=-1)
    run_loop(Classifier, make_loader, val_loader, max_epochs=3, enable_checkpointing=True, callbacks=[callback])
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert [path.stem for path in paths] == ["epoch=0-step=7", "epoch=1-step=14", "epoch=2-step=21", "epoch=2-step=28"]
    for path in paths:
        torch.manual_seed(99)
        _, module = run_loop(Classifier, make_loader, val_loader, max_epochs=3, fit={"resume": path})
        assert_same_weights(straight, module)

"""Manual optimization that was killed continues after the last step, with the same bits."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Gan, make_loader
from runs import Snapshots, assert_same_end, fit, logs_of


def loader():
    return make_loader(20)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "plain"])
def test_killed_at_every_batch(tmp_path, toggles, every):
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": every}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    make = lambda: Gan(toggles)  # noqa: E731
    whole = fit(whole_root, make, loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in (every, 4, 6, 9):
        root = copies / str(batches)
        assert_same_end(whole, fit(root, make, loader, seed=99, resume="last", **words))
        assert logs_of(root) == logs_of(whole_root), f"killed before batch {batches}"


class Saved(Callback):
    """Notes which step last.ckpt is of, before each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        path = Path("checkpoints/run/version_0/last.ckpt")
        if path.exists():
            self.seen.append(torch.load(path, weights_only=True)["global_step"])


def test_save_every_n_steps_where_batches_step_several_times(tmp_path):
    """Batches step once and twice in turn, so that the count passes some multiples."""
    saved = Saved()
    fit(".", Gan, loader, callbacks=[saved], max_epochs=1, save_every_n_steps=2)
    assert saved.seen == [3, 4, 6]

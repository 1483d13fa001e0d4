"""A checkpoint that does not fit the run is refused in one line, and no callback removes files outside its folder."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from modules import Classifier
from runs import fit, tree, val_loader

from fabric_template.checkpoint.checkpoint_io import CheckpointError, read_checkpoint


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_modelcheckpoint_removes_nothing_outside_of_its_folder(tmp_path):
    def callbacks():
        return [
            EarlyStopping("val_loss"),
            ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_top_k=1, save_last=True),
        ]

    fit(tmp_path, val=val_loader, max_epochs=1, callbacks=callbacks())
    path, secret = tmp_path / "kept/last.ckpt", tmp_path / "secret.ckpt"
    secret.write_text("kept")
    checkpoint = torch.load(path)
    stopping, saving = checkpoint["callbacks"]
    (best,) = checkpoint["callbacks"][saving]["best_k_models"]

    def refused(key, complaint, **words):
        altered = copy.deepcopy(checkpoint)
        altered["callbacks"][key] |= words
        torch.save(altered, tmp_path / "altered.ckpt")
        before = tree(tmp_path)
        with pytest.raises(CheckpointError) as caught:
            fit(tmp_path, val=val_loader, max_epochs=3, callbacks=callbacks(), resume=tmp_path / "altered.ckpt")
        assert f"altered.ckpt' does not fit this run: {complaint}" in str(caught.value)
        assert [name for name in tree(tmp_path) if "hparams" not in name] == [n for n in before if "hparams" not in n]

    away = f"{tmp_path}/kept/../secret.ckpt"
    models = {best: torch.tensor(1e-9), away: torch.tensor(9.0)}
    words = f"ModelCheckpoint cannot take what it holds (its files[1] is {away[:60]!r}, expected a file in "
    refused(saving, words, best_k_models=models, kth_best_model_path=away)
    refused(saving, words, last_model_path=away)
    words = "ModelCheckpoint cannot take what it holds (its kth_best_model_path is "
    refused(saving, words, kth_best_model_path=f"{tmp_path}/kept/notes.ckpt")
    refused(
        stopping,
        "EarlyStopping cannot take what it holds (it.wait_count is 'x', expected a finite number,",
        wait_count="x",
    )
    fit(tmp_path, val=val_loader, max_epochs=3, callbacks=callbacks(), resume=path)


def test_earlystopping_that_has_stopped_takes_what_it_was_before(tmp_path):
    """Why it stopped is a text by then, and was None in the best epoch's file."""
    stops = EarlyStopping("val_loss", patience=1, stopping_threshold=1e9)
    loop, module, _ = fit(tmp_path, val=val_loader, max_epochs=3, callbacks=[stops], monitor="val_loss")
    assert stops.stopping_reason_message.startswith("Stopping threshold reached: val_loss")
    stops.stopping_reason_message = "of a later epoch"
    path = loop.checkpoint_path("best")
    file = read_checkpoint(path)
    (key,) = file["callbacks"]
    file["callbacks"][key]["stopping_reason_message"] = None
    torch.save(file, path)
    (found,) = loop.validate(module, val_loader(), load="best", verbose=False)
    assert (stops.stopping_reason_message, list(found)) == (None, ["val_loss", "val_acc"])


def test_weights_that_are_none(tmp_path):
    fit(tmp_path, max_epochs=1)
    path = tmp_path / "checkpoints/run/version_0/last.ckpt"
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["net.0.weight"] = "x"
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=r"'net.0.weight' has no shape in the file, \(16, 8\) in the model"):
        fit(tmp_path, Classifier, max_epochs=2, resume=path)

"""Trainer's words in the four verbs: ckpt_path and weights_only mean what they mean there; files that are written beside."""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, assert_same_weights, make_loader
from runs import fit, loud, val_loader

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO
from fabric_template.errors import CheckpointError, ConfigurationError


class Judged(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def given(loop, verb, **words):
    """What a verb answers with a module of other weights."""
    torch.manual_seed(7)
    words = words if verb == "predict" else {"verbose": False, **words}
    data = [batch[0] for batch in val_loader()] if verb == "predict" else val_loader()
    return getattr(loop, verb)(Judged(), data, **words)


@pytest.fixture
def trained(tmp_path):
    return fit(tmp_path, Judged, val=val_loader, max_epochs=2, monitor="val_loss")[0]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("path", ["last", "best", "path", None])
def test_ckpt_path_is_load_in_an_evaluation(trained, verb, path):
    path = trained.checkpoint_path("last") if path == "path" else path
    answers = [given(trained, verb, **{word: path}) for word in ("ckpt_path", "load")]
    if verb == "predict":
        answers = [torch.cat(answer).tolist() for answer in answers]
    assert answers[0] == answers[1]
    assert (trained.ckpt_path is None) == (path is None)


def test_ckpt_path_is_resume_in_fit(tmp_path, trained):
    whole = fit(tmp_path / "whole", Judged, val=val_loader, max_epochs=3)
    loop, module = FabricLoop(**loud(tmp_path, max_epochs=3)), Judged()
    history = loop.fit(module, make_loader(), val_loader(), ckpt_path="last")
    assert_same_weights(whole[1], module)
    assert history["epoch"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [pl.Trainer, FabricLoop])
def test_the_last_of_nothing_is_a_word_to_set_and_forget(tmp_path, kind):
    loop = kind(**loud(tmp_path, max_epochs=1, logger=False))
    with pytest.warns(UserWarning, match=r'\.fit\(ckpt_path="last"\) is set, but there is no last checkpoint avail'):
        loop.fit(Classifier(), make_loader(), val_loader(), ckpt_path="last", weights_only=None)
    assert loop.global_step == 10


def test_weights_only_says_it_for_one_call(tmp_path, trained):
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": Judged().state_dict(), "note": Path}, path)
    with pytest.raises(CheckpointError, match="trusted=True"):
        given(trained, "validate", ckpt_path=path)
    with pytest.warns(UserWarning, match="loaded all the same"):
        given(trained, "validate", ckpt_path=path, weights_only=False)
    trusting = FabricLoop(**loud(tmp_path, trusted=True))
    with pytest.raises(CheckpointError, match="trusted=True"):
        given(trusting, "validate", ckpt_path=path, weights_only=True)


def test_two_words_for_one_file_are_refused(trained):
    with pytest.raises(ConfigurationError, match=r"^validate got ckpt_path= and load=: expected one of them$"):
        given(trained, "validate", ckpt_path="last", load="last")
    with pytest.raises(ConfigurationError, match=r"^fit got ckpt_path= and resume=: expected one of them$"):
        trained.fit(Judged(), make_loader(), ckpt_path="last", resume="last")


# ---- AsyncCheckpointIO


@pytest.mark.parametrize("as_list", [True, False])
def test_async_files_are_ours_and_there_at_the_end(tmp_path, as_list):
    io = AsyncCheckpointIO()
    sides = [fit(tmp_path / "plain", val=val_loader, max_epochs=2, monitor="val_loss")]
    plugins = [io] if as_list else io
    sides += [fit(tmp_path / "async", val=val_loader, max_epochs=2, monitor="val_loss", plugins=plugins)]
    for word in ("last", "best"):
        one, other = (torch.load(side[0].checkpoint_path(word), weights_only=True) for side in sides)
        assert one.keys() == other.keys()
        assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in one["state_dict"])
    _, module, _ = fit(tmp_path / "async", val=val_loader, max_epochs=3, resume="last", plugins=AsyncCheckpointIO())
    assert_same_weights(fit(tmp_path / "whole", val=val_loader, max_epochs=3)[1], module)
    fit(tmp_path / "again", val=val_loader, max_epochs=1, plugins=io)  # it serves another fit


@pytest.mark.filterwarnings("ignore:could not save")  # where the next save hears of it
def test_what_could_not_be_written_beside_it_is_raised_at_the_end(tmp_path):
    class Full(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError,
        match="training has come to its end, but not everything is on disk: .*(No space|the disk is full)",
    ):
        fit(tmp_path, max_epochs=1, plugins=AsyncCheckpointIO(Full()))


def test_every_word_of_trainer_at_its_default(tmp_path):
    defaults = {name: word.default for name, word in inspect.signature(pl.Trainer).parameters.items()}
    loop = FabricLoop(**defaults | {"accelerator": "cpu", "default_root_dir": tmp_path})
    assert loop.config == FabricLoop(accelerator="cpu", default_root_dir=tmp_path).config
    for word, value in {"use_distributed_sampler": False, "sync_batchnorm": True, "model_registry": "lit:3"}.items():
        with pytest.raises(TypeError, match=f"FabricLoop has no argument {word}: "):
            FabricLoop(**defaults | {word: value})

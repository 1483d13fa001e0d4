"""Test the arguments of Trainer's fit, validate, test and predict, and its default options."""

import inspect
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, make_loader
from runs import fit, tree, val_loader, with_files

from fabric_template import FabricLoop
from fabric_template.errors import CheckpointError, ConfigurationTypeError


class WithTest(Classifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def results_of(loop, call, **given):
    """Return the result of a method such as validate for an untrained module."""
    torch.manual_seed(7)
    if call == "predict":
        return torch.cat(loop.predict(WithTest(), [batch[0] for batch in val_loader()], **given)).tolist()
    return getattr(loop, call)(WithTest(), val_loader(), verbose=False, **given)


@pytest.fixture
def trained(tmp_path):
    return fit(tmp_path, WithTest, val=val_loader, max_epochs=2, monitor="val_loss")[0]


@pytest.mark.parametrize(
    ("call", "path"), [("validate", "last"), ("test", "best"), ("predict", "path"), ("test", None)]
)
def test_ckpt_path_is_an_alias_of_the_load_argument(trained, call, path):
    path = trained.checkpoint_path("last") if path == "path" else path
    results = [results_of(trained, call, **{argument: path}) for argument in ("ckpt_path", "load")]
    assert results[0] == results[1]
    assert (trained.ckpt_path is None) == (path is None)


@pytest.mark.parametrize("kind", [pl.Trainer, FabricLoop])
def test_ckpt_path_last_starts_a_new_run_if_no_checkpoint_exists(tmp_path, kind):
    loop = kind(**with_files(tmp_path, max_epochs=1, logger=False))
    # In Lightning 2.5, Trainer.fit has no argument weights_only.
    more = {"weights_only": None} if "weights_only" in inspect.signature(kind.fit).parameters else {}
    assert more or kind is pl.Trainer
    with pytest.warns(UserWarning, match=r'\.fit\(ckpt_path="last"\) is set, but there is no last checkpoint avail'):
        loop.fit(Classifier(), make_loader(), val_loader(), ckpt_path="last", **more)
    assert loop.global_step == 10


def test_weights_only_false_loads_checkpoints_that_contain_arbitrary_objects(tmp_path, trained):
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": WithTest().state_dict(), "callbacks": {"Mine": {"kind": Path}}}, path)
    with pytest.raises(CheckpointError, match="pass weights_only=False"):
        results_of(trained, "validate", ckpt_path=path)
    assert results_of(trained, "validate", ckpt_path=path, weights_only=False)


def test_async_checkpoint_io_saves_the_same_weights_as_the_default_checkpoint_io(tmp_path):
    """AsyncCheckpointIO wraps the CheckpointIO of FabricLoop."""
    plugins = {"plain": None, "async": AsyncCheckpointIO()}
    saved = {}
    for name, plugin in plugins.items():
        loop = fit(tmp_path / name, val=val_loader, max_epochs=2, monitor="val_loss", plugins=plugin)[0]
        saved[name] = torch.load(loop.checkpoint_path("best"), weights_only=True)["state_dict"]
    assert all(torch.equal(saved["plain"][name], saved["async"][name]) for name in saved["plain"])


def test_fabric_loop_accepts_every_trainer_option_with_its_default_value(tmp_path):
    defaults = {name: option.default for name, option in inspect.signature(pl.Trainer).parameters.items()}
    loop = FabricLoop(**defaults | {"accelerator": "cpu", "default_root_dir": tmp_path})
    assert loop.config == FabricLoop(accelerator="cpu", default_root_dir=tmp_path).config
    others = {"use_distributed_sampler": False, "enable_autolog_hparams": False}
    for name, value in {**others, "sync_batchnorm": True, "model_registry": "lit:3"}.items():
        with pytest.raises(TypeError, match=f"^FabricLoop: unknown option '{name}'\\. (Leave it out|Call|Download)"):
            FabricLoop(**defaults | {name: value})


LIMITS = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]


@pytest.mark.parametrize("value", [0, 1, 2, 7, 0.0, 0.3, 1.0, 2.0, 5.0, 1.2, 2.5, -1, -0.5, float("inf"), float("nan")])
@pytest.mark.parametrize("name", [*LIMITS, "val_check_interval", "overfit_batches"])
def test_limit_options_have_the_same_meaning_as_in_trainer(name, value):
    """Floats up to 1.0 are fractions. Larger floats must be whole numbers of batches."""
    results = []
    for kind in (pl.Trainer, FabricLoop):
        try:
            found = getattr(kind(accelerator="cpu", logger=False, **{name: value}), name)
            results.append((found, type(found)))
        except ValueError:
            results.append("refused")
        except pl.utilities.exceptions.MisconfigurationException:
            results.append("refused")
    if name == "val_check_interval" and value in (0, 0.0):
        # FabricLoop refuses an interval of zero batches. Trainer accepts it, but its fit method then divides by zero.
        results[0] = "refused" if isinstance(value, int) else results[0]
    if name == "overfit_batches" and isinstance(value, float) and value > 1:
        # FabricLoop refuses a float above 1. Trainer accepts it, but then trains on all batches.
        results[0] = "refused"
    assert results[1] == results[0]


NUMPY = {
    "max_epochs": np.int64(2),
    "max_steps": np.int32(5),
    "limit_train_batches": np.float64(0.5),
    "limit_val_batches": np.float32(2),
    "val_check_interval": np.uint8(1),
    "accumulate_grad_batches": np.int16(2),
    "gradient_clip_val": np.float16(0.5),
    "log_grad_norm": np.True_,
    "save_last": np.bool_(True),
    "save_top_k": torch.tensor(2),
    "monitor": np.str_("val_loss"),
    "version": np.int64(3),
    "seed": torch.tensor(1),
    "devices": np.int64(1),
    "num_nodes": np.int8(1),
}


def test_options_given_as_numpy_numbers_are_converted_to_python_numbers(tmp_path):
    plain = {name: value.item() for name, value in NUMPY.items()}
    loops = []
    for folder, options in (("plain", plain), ("numpy", NUMPY)):
        loops.append(fit(tmp_path / folder, val=val_loader, **options)[0])
    assert [type(value) for value in vars(loops[1].config).values()] == [
        type(value) for value in vars(loops[0].config).values()
    ]
    assert tree(tmp_path / "plain") == tree(tmp_path / "numpy")
    # hparams.yaml must contain Python numbers, because YAML cannot represent NumPy numbers.
    texts = [(tmp_path / folder / "logs/run/version_3/hparams.yaml").read_text() for folder in ("plain", "numpy")]
    assert texts[0].replace("/plain", "/numpy") == texts[1]


@pytest.mark.parametrize("value", [np.float64(2.5), np.array([2, 3]), np.str_("3"), np.True_, np.datetime64("2020")])
def test_a_numpy_max_epochs_that_is_not_a_whole_number_is_refused(value):
    with pytest.raises(ConfigurationTypeError, match="^max_epochs: got .*expected a number of epochs"):
        FabricLoop(max_epochs=value)

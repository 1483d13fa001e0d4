"""Test that NumPy values in a checkpoint are restored exactly, and can be read by Trainer."""

import collections

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, assert_same_weights, make_loader, quiet
from runs import fit, same, with_files
from torch.optim import lr_scheduler as schedulers

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import (
    NUMPY_KEY,
    AtomicCheckpointIO,
    read_checkpoint,
    replace_numpy,
    restore_numpy,
)
from fabric_template.errors import CheckpointError

LAST = "checkpoints/run/version_0/last.ckpt"
SCALARS = [
    *(np.float64(0.1), np.float32(0.1), np.float16("nan"), np.int8(-3), np.uint64(2**63)),
    *(np.bool_(True), np.complex64(1 - 2j), np.str_("ß"), np.bytes_(b"a")),
    *(np.datetime64("2024-02-29"), np.datetime64(5, "ns"), np.timedelta64(3, "h")),
]
ARRAYS = [
    *(np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.ones(4)[::-2]),
    *(np.array(3.5), np.empty((0, 2), "f4"), np.array([True, False]), np.arange(3, dtype=">i2")),
    *(np.array(["a", "bcd"]), np.array([[b"x"]]), np.array(["2024-02-29"], "M8[s]")),
    np.arange(3, dtype="u2"),
]


def assert_same_value(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", SCALARS + ARRAYS, ids=repr)
def test_a_numpy_value_is_restored_bit_for_bit(tmp_path, value):
    path = tmp_path / "a.ckpt"
    places = {
        "dict": {"a": value, 3: [value]},
        "tuple": (1, (value,)),
        "deque": collections.deque([value], 2),
        "ordered": collections.OrderedDict(a=value),
        "default": collections.defaultdict(list, a=[value]),
    }
    AtomicCheckpointIO().save_checkpoint({"state": places, "epoch": 3}, path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert not [name for name in names if name.startswith("numpy")]
    found = read_checkpoint(path)
    assert list(found) == ["state", "epoch"]
    for name, container in found["state"].items():
        assert type(container) is type(places[name])
    found = found["state"]
    restored = [found["dict"]["a"], found["dict"][3][0], found["tuple"][1][0], found["deque"][0]]
    for item in [*restored, found["ordered"]["a"], found["default"]["a"][0]]:
        assert_same_value(item, value)
    assert found["deque"].maxlen == 2


def test_saving_numpy_values_leaves_the_original_state_unchanged():
    state = {"a": [np.float32(1)], "b": {"c": torch.ones(1)}}
    plain = replace_numpy({"state": state})
    assert type(state["a"][0]) is np.float32
    assert type(plain["state"]["a"][0]) is float
    assert plain["state"]["b"] is state["b"]
    assert replace_numpy({"epoch": 3}) == {"epoch": 3}


def test_numpy_numbers_in_sets_and_dict_keys_are_restored(tmp_path):
    saved = {"set": {np.int64(1), 2}, "keys": {np.int64(5): np.float32(1), "a": 1}}
    AtomicCheckpointIO().save_checkpoint(saved, tmp_path / "a.ckpt")
    found = read_checkpoint(tmp_path / "a.ckpt")
    assert found == {"set": {1, 2}, "keys": {5: 1.0, "a": 1}}
    assert type(found["keys"][5]) is np.float32


def test_a_list_that_contains_itself_can_be_written_to_a_checkpoint(tmp_path):
    inside = [1]
    inside.append(inside)
    AtomicCheckpointIO().save_checkpoint({"a": inside, "b": np.float64(2)}, tmp_path / "a.ckpt")
    found = read_checkpoint(tmp_path / "a.ckpt")
    assert found["a"][1] is found["a"]
    assert found["b"] == 2.0


@pytest.mark.parametrize(
    "dtypes", [{"a": "O"}, {"a": "V8"}, {"a": "<f4,<f8"}, {"a": 3}, {"b": "<f4"}, {"a": {0: "<f4"}}, 5]
)
def test_a_saved_numpy_value_with_an_invalid_dtype_is_refused(dtypes):
    with pytest.raises(CheckpointError, match="invalid NumPy dtype"):
        restore_numpy({"a": 1.0, NUMPY_KEY: dtypes})


# Runs whose optimizers or modules contain NumPy values


def sgd(module, rate):
    return torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)


def exponential(module):
    """Return SGD, and a scheduler that repeatedly multiplies the learning rate, so that rounding is visible."""
    optimizer = sgd(module, np.float32(0.1))
    return [optimizer], [schedulers.ExponentialLR(optimizer, np.float32(0.7))]


def function(module):
    optimizer = sgd(module, np.linspace(0.05, 0.1, 3)[1])
    return [optimizer], [schedulers.LambdaLR(optimizer, lambda epoch: np.float32(0.9) ** epoch)]


def one_cycle(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=np.float64(0.1))
    scheduler = schedulers.OneCycleLR(optimizer, np.float64(0.05), total_steps=60)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def plateau(module):
    optimizer = sgd(module, np.float16(0.1))
    scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=np.float32(0.3), patience=0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train_loss"}


OPTIMIZERS = [exponential, function, one_cycle, plateau]


class Average(Callback):
    """A callback that keeps running sums in NumPy."""

    def __init__(self):
        self.sums, self.count, self.names = np.zeros((2, 3), "f4"), np.int32(0), np.array(["a"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.sums = self.sums * np.float32(0.9) + module.net[-1].bias.detach().numpy()[:3]
        self.count += np.int32(1)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


class SavesArray(Classifier):
    """A model that adds an array to the checkpoint in a hook."""

    losses = np.zeros(0)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses = np.append(self.losses, loss.item())
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"]


@pytest.mark.filterwarnings("ignore:.*is not in the range")
@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_a_resumed_run_keeps_the_precision_of_numpy_values(tmp_path, optimizers):
    def run(name, max_epochs, resume=None):
        average = Average()
        options = {"max_epochs": max_epochs, "callbacks": [average], "resume": resume}
        make = lambda: SavesArray(optimizers)  # noqa: E731
        loop, module, _ = fit(tmp_path / name, make, seed=1 if resume is None else 9, **options)
        groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        return module, average, rates

    whole, whole_average, whole_rates = run("whole", 4)
    run("parts", 2)
    module, average, rates = run("parts", 4, "last")
    assert_same_weights(module, whole)
    assert [repr(rate) for rate in rates] == [repr(rate) for rate in whole_rates]
    assert_same_value(average.sums, whole_average.sums)
    assert_same_value(average.count, whole_average.count)
    assert_same_value(average.names, whole_average.names)
    assert_same_value(module.losses, whole.losses)


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_trainer_can_resume_from_a_fabric_loop_checkpoint_with_numpy_values(tmp_path, optimizers):
    fit(tmp_path, lambda: Classifier(optimizers), max_epochs=2)
    module = Classifier(optimizers)
    trainer = pl.Trainer(**quiet(max_epochs=3))
    trainer.fit(module, make_loader(), ckpt_path=tmp_path / LAST)
    assert trainer.current_epoch == 3


def test_numpy_values_are_unchanged_after_loop_save_and_loop_load(tmp_path):
    loop, net = FabricLoop(**with_files(tmp_path)), torch.nn.Linear(2, 2)
    optimizer = sgd(net, np.float32(0.1))
    state = {"net": net, "optimizer": optimizer, "errors": np.arange(3.0), "best": np.float64(1)}
    loop.save(tmp_path / "a.ckpt", state)
    other = sgd(net, 0.5)
    found = loop.load(tmp_path / "a.ckpt", {"net": net, "optimizer": other})
    assert same(found["errors"].tolist(), [0.0, 1.0, 2.0])
    assert_same_value(found["best"], np.float64(1))
    assert_same_value(other.param_groups[0]["lr"], np.float32(0.1))


class Structured(Callback):
    def state_dict(self):
        return {"values": np.zeros(2, [("a", "f4"), ("b", "i8")])}


def test_an_error_while_resuming_shows_which_numpy_array_cannot_be_restored(tmp_path):
    fit(tmp_path, max_epochs=1, callbacks=[Structured()])
    with pytest.raises(CheckpointError, match=r"numpy.* in the part 'callbacks/Structured/values'"):
        fit(tmp_path, max_epochs=2, resume="last", callbacks=[Structured()])

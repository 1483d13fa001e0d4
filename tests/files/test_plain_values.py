"""What is saved can be read back: plain values of every kind at every place of a checkpoint, and what has none is named."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import pathlib
import types
import typing
import uuid
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from runs import loud
from torch import nn

from fabric_template import FabricLoop, TensorLoader
from fabric_template.files import ordinary, plain, reading
from fabric_template.files.errors import CheckpointError
from fabric_template.files.reading import load_header, read_checkpoint
from fabric_template.files.storage import AtomicCheckpointIO

LAST = "checkpoints/run/version_0/last.ckpt"


class Color(enum.Enum):
    RED = 1
    BLUE = (0, 0, 255)


class Mode(str, enum.Enum):
    MIN = "min"


@dataclasses.dataclass
class Config:
    width: int = 3


class Pair(typing.NamedTuple):
    low: int
    high: int


VALUES = {
    "float64": np.float64(0.1), "float32": np.float32(0.1), "int64": np.int64(3), "bool_": np.bool_(True),
    "complex64": np.complex64(1j), "datetime64": np.datetime64("2020-01-01", "ns"), "timedelta64": np.timedelta64(3, "s"),
    "array": np.arange(6.0).reshape(2, 3), "view": np.arange(6).reshape(2, 3).T[::-1], "scalar array": np.array(3.0),
    "bools": np.array([True, False]), "times": np.array(["2020", "2021"], dtype="M8[s]"),
    "big-endian": np.arange(3, dtype=">f4"), "empty": np.zeros((0, 2)),
    "enum": Color.RED, "enum of a tuple": Color.BLUE, "enum of text": Mode.MIN,
    "date": datetime.date(2020, 1, 2), "time": datetime.time(1, 2, 3), "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
    "zoned": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    "utc": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc), "timedelta": datetime.timedelta(1, 2, 3),
    "Decimal": decimal.Decimal("1.10"), "Fraction": fractions.Fraction(1, 3), "UUID": uuid.UUID(int=3),
    "deque": collections.deque([1, np.int64(2)], maxlen=4), "defaultdict": collections.defaultdict(list, {"a": [1.0]}),
    "OrderedDict": collections.OrderedDict(b=np.int64(1), a=2), "Counter": collections.Counter(a=np.int64(2)),
    "set": {1, "a", np.int64(7)}, "plain set": {1, 2}, "frozenset": frozenset({1, (2, 3)}), "range": range(1, 9, 2),
    "slice": slice(1, None), "Path": pathlib.Path("a/b"), "PurePosixPath": pathlib.PurePosixPath("a"),
    "PureWindowsPath": pathlib.PureWindowsPath("a"), "Namespace": argparse.Namespace(a=np.int64(1)),
    "SimpleNamespace": types.SimpleNamespace(a=[pathlib.Path("x")]), 
    "bytes": b"", "some bytes": b"\xff\0", "bytearray": bytearray(b"\xff"), "TorchVersion": torch.__version__,
    "complex": 1j, "dtype": torch.bfloat16, "device": torch.device("cpu"), "Size": torch.Size([2]), "text": "\u00e9\n",
    "keys": {np.int64(1): 2, Color.BLUE: "blue", (1, 2): None}, "deep": [{"a": ({"b": [np.float64(2)]},)}],
    "tensor": torch.ones(2), "expanded": torch.ones(1).expand(3), "tuple": (1, (2.0, None)),
}  # fmt: skip

# no plain value: (how it is named, what it is kept as among the hyperparameters)
ODD = {
    "dataclass": (Config(), "a Config", {"width": 3}),
    "namedtuple": (Pair(1, 2), "a Pair", (1, 2)),
    "partial": (functools.partial(max, 1), "a partial", None),
    "class": (nn.ReLU, "the class ReLU", None),
    "function": (torch.relu, "the function relu", None),
    "lambda": (lambda: 1, "the function <lambda>", None),
    "module": (nn.Linear(1, 1), "a Linear", None),
    "python module": (types, "the module types", None),
    "generator": ((i for i in "a"), "the generator <genexpr>", None),
    "long double": (np.longdouble(1), "a longdouble", None),
    "defaultdict of a lambda": (collections.defaultdict(lambda: 1, a=2), "a defaultdict", {"a": 2}),
}


def alike(one, other):
    """Equal in kind, too, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return alike(list(one), list(other)) and alike(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, collections.deque):
        return alike(list(one), list(other)) and one.maxlen == other.maxlen
    if isinstance(one, argparse.Namespace | types.SimpleNamespace):
        return alike(vars(one), vars(other))
    if isinstance(one, collections.defaultdict) and one.default_factory is not other.default_factory:
        return False
    return one == other


def test_the_table_has_every_kind():
    assert {type(value) for value in VALUES.values()} >= {kind for kind, _, _ in plain._KINDS.values()}


@pytest.mark.parametrize("name", VALUES)
def test_a_file_brings_a_value_back(name):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"it": VALUES[name]}, "a.ckpt")
    assert alike(io.load_checkpoint("a.ckpt"), {"it": VALUES[name]})
    torch.load("a.ckpt", weights_only=True)["it"]  # any reader makes something of it


class Places(pl.LightningModule):
    """Values at each place where a user may put them; `found` is what came back."""

    def __init__(self, **hyperparameters):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.found = nn.Linear(2, 1), {}

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            [{"params": self.net.parameters(), "mine": list(VALUES.values())}], lr=np.float64(0.1)
        )
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 9))]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = dict(VALUES)

    def on_load_checkpoint(self, checkpoint):
        self.found["module"] = checkpoint["mine"]
        self.found["hyperparameters"] = checkpoint["hyper_parameters"]


class Remembers(pl.Callback):
    def state_dict(self):
        return dict(VALUES)

    def load_state_dict(self, state):
        self.found = state


class Holds(pl.Callback):
    """A state of one value, from the second epoch on where that is asked for."""

    def __init__(self, value, later=False):
        self.value, self.later, self.epochs = value, later, itertools.count(1)

    def on_train_epoch_start(self, trainer, module):
        self.epoch = next(self.epochs)

    def state_dict(self):
        return {"deep": [{"it": None if self.later and self.epoch < 2 else self.value}]}

    def load_state_dict(self, state):
        self.found = state["deep"][0]["it"]


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    training_step = Places.training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint):
        self.found = checkpoint.get("hyper_parameters")

    def train_dataloader(self):
        return TensorLoader(torch.ones(4, 2), batch_size=2)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return TensorLoader(torch.ones(4, 2), batch_size=2)

    state_dict, load_state_dict = Remembers.state_dict, Remembers.load_state_dict


def make_loop(epochs, *callbacks, **words):
    return FabricLoop(**loud(max_epochs=epochs, logger=False, callbacks=list(callbacks), **words))


def test_values_of_every_kind_come_back_from_every_place():
    make_loop(1, Remembers()).fit(Places(**VALUES), datamodule=Data())
    module, callback, data = Places(**VALUES), Remembers(), Data()
    loop = make_loop(2, callback)
    loop.fit(module, datamodule=data, resume="last")
    found = {**module.found, "callback": callback.found, "datamodule": data.found}
    assert {place: alike(values, VALUES) for place, values in found.items()} == dict.fromkeys(found, True)
    group = loop.optimizers[0].param_groups[0]
    assert alike(group["mine"], list(VALUES.values()))
    assert alike(group["lr"], np.float64(0.1) * np.cos(2 / 9))
    assert alike(loop.lr_scheduler_configs[0].scheduler.base_lrs, [np.float64(0.1)])


def test_lightning_reads_such_a_file():
    callback = Remembers()
    make_loop(1, Remembers()).fit(Places(**VALUES), datamodule=Data())
    module = Places.load_from_checkpoint(LAST, weights_only=True)
    assert (module.hparams["float64"], module.hparams["Path"], module.hparams["enum"]) == (0.1, "a/b", 1)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, callbacks=[callback], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Places(**VALUES), datamodule=Data(), ckpt_path=LAST, weights_only=True)
    assert trainer.global_step == 4
    assert callback.found["deque"] == [1, 2]


@pytest.mark.parametrize("name", ODD)
def test_what_has_no_plain_value_is_named_at_the_first_save(name):
    value, words, _ = ODD[name]
    with pytest.raises(ValueError, match="can be read back with") as caught:
        make_loop(3, Holds(value)).fit(Small())
    assert f"callbacks['Holds']['deep'][0]['it'] is {words}: save plain values" in str(caught.value), caught.value
    assert "\n" not in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = read_checkpoint(LAST, trusted=True)  # nothing is lost
    assert state["global_step"] == 2


@pytest.mark.parametrize("value", [Config(5), Config], ids=["object", "class"])
def test_a_class_that_the_program_allows_is_kept(value):
    callback = Holds(value)
    with pytest.raises(ValueError, match=r"add_safe_globals\(\[...\]\)"):
        make_loop(1, Holds(value)).fit(Small())
    with torch.serialization.safe_globals([Config]):  # the file that was saved by then can be read
        make_loop(2, callback).fit(Small(), resume="last")
        assert callback.found == value
        make_loop(3, callback).fit(Small(), resume="last")


def test_a_loop_that_trusts_its_files_keeps_all_that_can_be_pickled():
    callback = Holds([Config(5), nn.ReLU])
    make_loop(1, Holds([Config(5), nn.ReLU]), trusted=True).fit(Small())
    with pytest.warns(UserWarning, match="because of trusted=True"):
        make_loop(2, callback, trusted=True).fit(Small(), resume="last")
    assert callback.found == [Config(5), nn.ReLU]


def test_a_later_save_warns_and_training_goes_on():
    loop = make_loop(3, Holds(nn.ReLU, later=True))
    with pytest.warns(UserWarning, match=r"callbacks\['Holds'\]\['deep'\]\[0\]\['it'\] is the class ReLU") as caught:
        loop.fit(Small())
    assert (loop.current_epoch, len(caught)) == (3, 1)


def test_hyperparameters_without_a_plain_value_are_named_before_training():
    seen = []

    class Looks(pl.Callback):
        def setup(self, trainer, module, stage):
            seen.append("setup")

    def make():
        module = Small()
        values = {name: value for name, (value, _, _) in ODD.items()}
        module.hparams.update({**values, "rate": np.float64(0.5), "inner": {"act": nn.ReLU, "dim": 3}})
        return module

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: seen.append(str(message))
        make_loop(1, Looks()).fit(make())
    assert not caught
    text, then = seen  # once, before anything else
    assert then == "setup"
    for name, (_, words, kept_as) in ODD.items():
        what = "is left out" if kept_as is None else f"is kept as a {type(kept_as).__name__}"
        assert f"{name} ({words}) {what}" in text, text
    assert "inner['act'] (the class ReLU) is left out" in text
    module = make()
    with pytest.warns(UserWarning, match="hyperparameters"):
        make_loop(2).fit(module, resume="last")
    kept = {name: kept for name, (_, _, kept) in ODD.items() if kept is not None}
    assert alike(module.found, {**kept, "rate": np.float64(0.5), "inner": {"dim": 3}})


def test_the_parts_of_a_loop_keep_kinds_too():
    loop = FabricLoop(accelerator="cpu", logger=False)
    net = nn.Linear(2, 1)
    loop.save("own.ckpt", {"net": net, "step": np.int64(3), "seen": {"days": {datetime.date(2020, 1, 2)}}})
    assert alike(
        loop.load("own.ckpt", {"net": net}), {"step": np.int64(3), "seen": {"days": {datetime.date(2020, 1, 2)}}}
    )


@pytest.mark.parametrize(
    "note",
    [
        3, {"kind": []}, {"kind": ["os.system"]}, {"kind": ["Path", 1, 2]}, {"in": {"gone": {"kind": ["Path"]}}},
        {"in": {"it": {"kind": ["numpy", "V999999999"]}}}, {"in": {"it": {"kind": ["numpy", "<U999999999"]}}},
        {"in": {"it": {"kind": ["array", "<f8"]}}}, {"in": {"it": {"kind": ["Decimal"]}}}, {"keys": 3}, {"in": [1]},
        {"kind": ["defaultdict", []]}, {"in": {"it": {"kind": ["timedelta"]}}}, {"in": {"it": {"kind": ["enum", "os"]}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_note_that_does_not_fit_is_refused_in_one_line(note):
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        plain.restore({"it": "text"}, note)
    assert "\n" not in str(caught.value)


def test_a_note_brings_no_object_but_members_of_enums_that_are_imported():
    for names in (
        ["os", "system", "x"],
        ["nowhere", "Color", "RED"],
        [__name__, "Config", "width"],
        [__name__, "Color", "name"],
    ):
        assert plain.restore(1, {"kind": ["enum", *names]}) == 1
    assert plain.restore(1, {"kind": ["enum", __name__, "Color", "RED"]}) is Color.RED


def is_surely_read(stored):
    size = ordinary.ordinary_bytes(stored)
    return size is not None and size < ordinary.SMALL


def test_what_is_surely_read_is_read(tmp_path):
    """And an ordinary state is such a thing, so that a run need not read its first file back."""
    sure = {
        "state": {"w": nn.Parameter(torch.ones(2, 3)), "running": torch.ones(2).to(torch.bfloat16), "seen": torch.tensor(3)},
        "module": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(), "views": [torch.arange(9)[::2]] * 2,
        "expanded": torch.ones(()).expand(1), "tuple": (1, 0.5, None, True, "text", -(2**500)),
    }  # fmt: skip
    unsure = {
        "sparse": torch.ones(2).to_sparse(), "complex": torch.ones(2, dtype=torch.complex64), "bytes": b"a", "set": {1},
        "meta": torch.ones(2, device="meta"), "large": 2**9999, "float8": torch.ones(2).to(torch.float8_e5m2),
        "views of much": [(whole := torch.ones(2**22)), *(whole[i:] for i in range(4))],
    }  # fmt: skip
    for name, value in sure.items():
        torch.save({"it": value}, tmp_path / "a.ckpt")
        read_checkpoint(tmp_path / "a.ckpt")
        assert is_surely_read({"it": value}), name
    assert [name for name, value in unsure.items() if is_surely_read({"it": value})] == []
    for name, value in VALUES.items():
        stored, _, _ = plain.store({"it": value})
        if is_surely_read(stored):
            torch.save(stored, tmp_path / "a.ckpt")
            assert read_checkpoint(tmp_path / "a.ckpt").keys() == {"it"}, name


@pytest.mark.parametrize(("sparse", "reads"), [(False, 0), (True, 1)])
def test_a_first_file_is_read_back_where_its_kinds_do_not_tell(monkeypatch, sparse, reads):
    read = []
    monkeypatch.setattr(reading, "load_header", lambda path: read.append(path) or load_header(path))
    module = Small()
    module.register_buffer("mask", torch.ones(2).to_sparse() if sparse else torch.ones(2))
    make_loop(3).fit(module)
    assert len(read) == reads

"""Test that reading a checkpoint runs no code from the file and detects every kind of damage."""

import collections
import copy
import dataclasses
import datetime
import enum
import functools
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from modules import Classifier, assert_same_weights
from parameters import sample
from runs import fit, same
from torch import nn

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from fabric_template.checkpoint.reader import is_placeholder
from fabric_template.errors import CheckpointError, DamagedCheckpointError

LAST = "checkpoints/run/version_0/last.ckpt"


class Color(enum.Enum):
    RED = "red"


class Point(collections.namedtuple("Point", "x y")):
    """A named tuple, which only a reader with weights_only=False creates."""


class Outer:
    """A class with nested classes, which pickle protocol 2 refers to through a call to getattr."""

    class Kind(enum.Enum):
        FIRST = 1

    @dataclasses.dataclass
    class Config:
        size: int = 3

    class Table(dict):
        pass

    class Rows(list):
        class Inner(list):
            pass

    def scale(self, value):
        return value


class MarksFile:
    """An object whose pickle contains a call that creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class MarksFileInState:
    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        os.mkdir(state["path"])


def write_and_read(value, path, **options):
    torch.save(value, path, **options)
    return read_checkpoint(path)


def write_pickle(content, path, storages=()):
    """Write a file in the format of torch.save with the given pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3")
        archive.writestr("archive/byteorder", "little")
        for number, storage in enumerate(storages):
            archive.writestr(f"archive/data/{number}", storage)


# Reading plain values and tensors from a checkpoint

PLAIN = {
    "numbers": [1, -(10**40), 0.5, float("inf"), 1j, True, None],
    "strings": ["", "ß\n", b"", b"a\xff", bytearray(b"\x80")],
    "containers": {1: (2, (3,)), (1, "a"): {4, "b"}, None: frozenset([5]), "range": range(2, 9, 3)},
    "ordered": collections.OrderedDict(b=1, a=[2]),
    "default": collections.defaultdict(list, {"a": [1]}),
    "deque": collections.deque([1, 2], maxlen=3),
    "counter": collections.Counter("aab"),
    "times": [datetime.timedelta(1, 2), datetime.date(2024, 2, 29), datetime.time(3, 4)],
    "zone": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
    "path": Path("data/train"),
    "types": [int, dict, torch.float64, torch.float8_e5m2, torch.sparse_coo],
    "torch": [torch.Size([2, 3]), torch.device("cuda", 1)],
}
MATRIX = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "views": [MATRIX, MATRIX.t(), MATRIX[1:, ::2], torch.ones(1).expand(5)],
    "empty": [torch.empty(0, 3), torch.tensor(3)],
    "dtypes": [MATRIX.bfloat16(), MATRIX > 3, MATRIX.to(torch.uint16), MATRIX.to(torch.complex64)],
    "lazy": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag],
    "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "state": nn.BatchNorm1d(3).state_dict(),
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_values_and_tensors_in_a_checkpoint_are_read_unchanged(tmp_path, protocol):
    saved = {"plain": PLAIN, "tensors": TENSORS}
    found = write_and_read(saved, tmp_path / "a.ckpt", pickle_protocol=protocol)
    assert type(found) is dict
    assert same(found, saved)
    for name, value in PLAIN.items():
        assert type(found["plain"][name]) is type(value)
    views = found["tensors"]["views"]
    assert views[0].data_ptr() == views[1].data_ptr()
    assert [view.stride() for view in views] == [view.stride() for view in TENSORS["views"]]
    assert type(found["tensors"]["parameter"]) is nn.Parameter
    assert found["tensors"]["state"]._metadata == TENSORS["state"]._metadata


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_tensors_in_a_checkpoint_are_read_unchanged(tmp_path, layout):
    layout = getattr(torch, layout)
    found = write_and_read({"a": MATRIX.to_sparse(layout=layout)}, tmp_path / "a.ckpt")["a"]
    assert found.layout == layout
    assert torch.equal(found.to_dense(), MATRIX)


def test_reading_a_checkpoint_drops_the_python_attributes_of_a_tensor(tmp_path):
    weight, buffer = nn.Parameter(torch.ones(2)), torch.zeros(2)
    weight.scale, buffer.names_of_rows = 3, ["a", "b"]
    found = write_and_read({"weight": weight, "buffer": buffer}, tmp_path / "a.ckpt")
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["buffer"], buffer)
    assert not hasattr(found["weight"], "scale")


# Objects in a checkpoint that are not created when the file is read


def objects(folder):
    return {
        "class": nn.ReLU,
        "module": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        "function": nn.functional.relu,
        "method": nn.Linear(1, 1).forward,
        "partial": functools.partial(nn.Linear, 2),
        "enum": [Color.RED, {Color.RED: 1}],
        "named tuple": Point(1, 2),
        "class in a class": Outer.Config,
        "enum in a class": [Outer.Kind.FIRST, {Outer.Kind.FIRST: 1}],
        "data class in a class": Outer.Config(4),
        "dict in a class": Outer.Table(a=1),
        "list in two classes": Outer.Rows.Inner([1, Outer.Rows([2])]),
        "method of a class": [Outer.scale, Outer().scale],
        "numpy": [np.arange(3), np.dtype("f4"), np.float32],
        "call": MarksFile(folder / "call"),
        "state": MarksFileInState(folder / "state"),
        "optimizer": torch.optim.Adam([torch.ones(1)]),
        "generator": torch.Generator(),
    }


class WithObjects(Classifier):
    def __init__(self, **values):
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:Attribute 'module' is an instance of `nn.Module`")
def test_a_run_with_any_type_of_hyperparameter_resumes_exactly(tmp_path):
    def make():
        # Leave out "call" and "state". Lightning copies hyperparameters,
        # and a copy of either value would execute a function call.
        values = {name: v for name, v in objects(tmp_path).items() if name not in ("call", "state")}
        return WithObjects(**values)

    whole = fit(tmp_path / "whole", make, max_epochs=3)
    fit(tmp_path / "parts", make, max_epochs=1)
    resumed = fit(tmp_path / "parts", make, seed=99, max_epochs=3, resume="last")
    assert_same_weights(resumed[1], whole[1])
    assert resumed[0].global_step == whole[0].global_step


@pytest.mark.parametrize("kind", objects(Path()))
@pytest.mark.parametrize("protocol", [2, 5])
def test_reading_a_checkpoint_does_not_unpickle_objects_in_the_hyperparameters(tmp_path, kind, protocol):
    saved = {"hyper_parameters": {"value": objects(tmp_path)[kind], "rate": 0.1}}
    found = write_and_read(saved, tmp_path / "a.ckpt", pickle_protocol=protocol)
    value = found["hyper_parameters"]["value"]
    value = value[0] if type(value) is list else value
    assert is_placeholder(value)
    assert found["hyper_parameters"]["rate"] == 0.1
    assert is_placeholder(copy.deepcopy(value))
    for use in (str.upper, len, list, float, lambda given: given.name):
        with pytest.raises((AttributeError, TypeError)):
            use(value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("part", ["state_dict", "callbacks", "optimizer_states", "mine"])
def test_accessing_a_checkpoint_entry_that_contains_a_custom_object_raises_an_error(tmp_path, part):
    found = write_and_read({part: {"a": [{"b": Color.RED}]}, "epoch": 3}, tmp_path / "a.ckpt")
    assert found["epoch"] == 3
    for read in (lambda: found[part], lambda: found.get(part), lambda: found.pop(part)):
        with pytest.raises(CheckpointError, match=rf"Color in the part '{part}/a/0/b'.*weights_only=False"):
            read()
    assert read_checkpoint(tmp_path / "a.ckpt", weights_only=False)[part]["a"] == [{"b": Color.RED}]


class Colored(Callback):
    """A callback with an Enum in its state, which a resumed run refuses to unpickle."""

    def __init__(self):
        self.color = Color.RED

    def state_dict(self):
        return {"color": self.color}


class SavesColor(Classifier):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["color"] = Color.RED


class ReadsColor(SavesColor):
    def on_load_checkpoint(self, checkpoint):
        self.color = checkpoint.get("color")


def test_an_error_while_resuming_shows_the_key_and_class_of_a_saved_object(tmp_path):
    fit(tmp_path, ReadsColor, max_epochs=1)
    with pytest.raises(CheckpointError, match=r"Color in the part 'color'"):
        fit(tmp_path, ReadsColor, max_epochs=2, resume="last")
    assert fit(tmp_path, SavesColor, max_epochs=2, resume="last")[0].current_epoch == 2


def test_resuming_is_refused_if_a_callback_state_contains_a_custom_object(tmp_path):
    options = {"callbacks": [Colored()]}
    fit(tmp_path, max_epochs=1, **options)
    with pytest.raises(CheckpointError, match=r"Color in the part 'callbacks/Colored/color'"):
        fit(tmp_path, max_epochs=2, resume="last", **options)
    # load="last" accepts this checkpoint, because load= reads only the weights.
    assert fit(tmp_path, max_epochs=1, load="last", **options)[0].current_epoch == 1


def test_a_pickled_module_is_refused_as_a_checkpoint(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"got an instance of torch\.nn\..*Linear, expected a dict"):
        read_checkpoint(tmp_path / "a.ckpt")


def test_read_checkpoint_reads_any_object_if_weights_only_is_false(tmp_path):
    torch.save({"mine": functools.partial}, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt", weights_only=False)["mine"] is functools.partial


# Maliciously crafted checkpoint files


def call(name, *args):
    """Return the opcodes of a pickle that calls a function."""
    module, _, function = name.rpartition(".")
    content = pickle.dumps(args, 2)[2:-1]
    return f"c{module}\n{function}\n".encode() + content + b"R"


def tensor(storage=b"", dtype="Float", length=4, offset=0, size=(4,), stride=(1,)):
    """Return the opcodes of a tensor that refers to the first storage."""
    saved = b"(X\x07\x00\x00\x00storagectorch\n" + dtype.encode() + b"Storage\nX\x01\x00\x00\x000X"
    saved += b"\x03\x00\x00\x00cpu" + pickle.dumps(length, 2)[2:-1] + b"tQ"
    numbers = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, size, stride, False))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + saved + numbers + b"NtR"


CALLS = [
    ("os.mkdir", "marked"),
    ("posix.mkdir", "marked"),
    ("builtins.eval", "__import__('os').mkdir('marked')"),
    ("builtins.exec", "__import__('os').mkdir('marked')"),
    ("__builtin__.eval", "__import__('os').mkdir('marked')"),
    ("torch.serialization.os.mkdir", "marked"),
    ("torch.utils._config_module.exec", "import os; os.mkdir('marked')"),
    ("torch.storage._load_from_bytes", b"none"),
    ("torch.load", "a.ckpt"),
    ("torch.classes.load_library", "a.so"),
    ("torch.hub.load", "some/model", "model"),
    ("pathlib.Path.mkdir", Path("marked")),
    ("importlib.import_module", "antigravity"),
    ("functools.reduce", 1, [2]),
    ("operator.methodcaller", "mkdir"),
    ("numpy.memmap", "marked", "u1", "w+", 0, (1,)),
    ("numpy.core.multiarray.scalar", "f8", b"12345678"),
    ("fabric_template.files.write_file", Path("marked"), b""),
]


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function[0])
def test_reading_a_checkpoint_calls_no_function_named_in_the_file(tmp_path, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    write_pickle(b"\x80\x02}X\x01\x00\x00\x00a" + call(*function) + b"s.", "a.ckpt")
    with pytest.raises(CheckpointError, match="in the part 'a'"):
        read_checkpoint("a.ckpt")["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


STATE = b"X\x01\x00\x00\x00xK\x01s"
SPARSE = "torch._utils._rebuild_sparse_tensor"
REFUSED = {
    "state of a tensor": tensor() + b"}" + STATE + b"b",
    "state of a class": b"ccollections\nOrderedDict\n}" + STATE + b"b",
    "state of a torch class": b"ctorch\nTensor\n}" + STATE + b"b",
    "items of a class": b"cbuiltins\ndict\nK\x01K\x02s",
    "call to a class": b"cbuiltins\nlist\n(K\x01tR",
    "state of a function": b"ctorch._utils\n_rebuild_tensor_v2\n}" + STATE + b"b",
    "extension": b"\x82\x01",
    "call to an object": b"K\x05)R",
    "larger storage": tensor(length=1 << 20),
    "different storage type": tensor(dtype="Double"),
    "negative length": tensor(length=-1),
    "larger tensor": tensor(size=(5,)),
    "offset": tensor(offset=3),
    "stride": tensor(stride=(2,)),
    "negative stride": tensor(offset=3, stride=(-1,)),
    "negative size": tensor(size=(-1,)),
    "overflow": tensor(size=(2**62, 2**62), stride=(2**62, 1)),
    "huge offset": tensor(offset=2**70),
    "size without stride": tensor(size=(2, 2)),
    "size as text": tensor(size="4"),
    "no storage": b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00)) NtR".replace(b" ", b"\x89"),
    "parameter from text": call("torch._utils._rebuild_parameter", "a", True, None),
    "sparse without tensors": call(SPARSE, torch.sparse_coo, (1, 2, (3,))),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_checkpoint_with_a_crafted_pickle_is_refused(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    write_pickle(b"\x80\x02}X\x01\x00\x00\x00a" + REFUSED[kind] + b"s.", path, [bytes(16)])
    with pytest.raises(CheckpointError):
        read_checkpoint(path)["a"]
    assert nn.Linear(1, 1).weight.dim() == 2
    assert collections.OrderedDict(a=1)["a"] == 1


@pytest.mark.parametrize("depth", [1, 5000])
def test_an_error_names_the_class_of_an_unreadable_object_in_a_dict(tmp_path, depth):
    key = b")" + b"\x85" * depth
    content = b"\x80\x02}X\x01\x00\x00\x00a}" + key + b"cunknown\nObject\nss."
    write_pickle(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="unknown.Object in the part 'a/tuple'"):
        read_checkpoint(tmp_path / "a.ckpt")["a"]


def test_a_checkpoint_with_sparse_indices_out_of_range_is_refused(tmp_path):
    outside = torch.tensor([[10**9]])
    made = torch.sparse_coo_tensor(outside, torch.ones(1), (4,), check_invariants=False)
    torch.save({"state_dict": {"a": made}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="content cannot be read"):
        read_checkpoint(tmp_path / "a.ckpt")


class ObjectArray:
    """A NumPy array of objects whose pickle claims that its pointers are numbers."""

    def __reduce__(self):
        class_of_array = np.ndarray
        state = (1, (2,), np.dtype([("a", "f8")]), False, b"\x41" * 16)
        return np.empty(0).__reduce__()[0], (class_of_array, (0,), b"b"), state


@pytest.mark.parametrize("part", ["hyper_parameters", "callbacks", "state_dict"])
def test_reading_a_checkpoint_does_not_unpickle_a_maliciously_crafted_numpy_array(tmp_path, part):
    found = write_and_read({part: {"a": ObjectArray(), "b": np.float64(1)}}, tmp_path / "a.ckpt")
    values = list(dict.values(found))[0]
    assert all(map(is_placeholder, values.values()))


# Damaged checkpoint files


def saved_file(folder):
    path = folder / "a.ckpt"
    torch.save({"state_dict": {"a": torch.arange(5.0), "b": torch.ones(3)}, "epoch": 3}, path)
    return path, path.read_bytes()


@pytest.mark.parametrize(("bit", "weights_only"), sample(5, [0, 3, 4, 7], [True, False]))
def test_a_flipped_bit_in_a_checkpoint_is_detected_or_harmless(tmp_path, bit, weights_only):
    path, content = saved_file(tmp_path)
    expected = read_checkpoint(path)
    count_of_damages = 0
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            assert same(read_checkpoint(path, weights_only), expected), position
        except DamagedCheckpointError:
            count_of_damages += 1
    assert len(content) > count_of_damages > len(content) // 4


def test_a_truncated_checkpoint_is_reported_as_damaged(tmp_path):
    path, content = saved_file(tmp_path)
    for size in range(0, len(content), 13):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedCheckpointError):
            read_checkpoint(path)


def test_resume_skips_a_checkpoint_with_a_damaged_zip_index(tmp_path):
    """The directory at the end of a zip archive lists the names and positions of its entries."""
    options = {"monitor": "train_loss", "save_top_k": -1}
    fit(tmp_path, max_epochs=2, **options)
    last = tmp_path / LAST
    content = bytearray(last.read_bytes())
    # Flip a bit in the compression method of the zip index's last entry.
    content[content.rindex(b"PK\x01\x02") + 10] ^= 8
    last.write_bytes(content)
    with pytest.warns(UserWarning, match=r"last\.ckpt.*Using the previous checkpoint instead"):
        loop, *_ = fit(tmp_path, max_epochs=3, resume="last", **options)
    assert loop.current_epoch == 3


def test_a_compressed_checkpoint_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/data/0", bytes(10**7))
    with pytest.raises(DamagedCheckpointError, match="compressed"):
        read_checkpoint(path)


def test_a_checkpoint_with_overlapping_zip_entries_is_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    write_pickle(pickle.dumps({}, 2), path, [bytes(5000), bytes(5000)])
    content = path.read_bytes()
    # Add ten entries to the zip directory, all of which refer to the second storage.
    entry = content.rindex(b"PK\x01\x02")
    directory = content[content.index(b"PK\x01\x02") : content.rindex(b"PK\x05\x06")]
    many = b"".join(content[entry : entry + 46] + b"archive/data/%d" % n for n in range(10))
    position = content.index(directory)
    end = content[content.rindex(b"PK\x05\x06") :]
    count, size = 13, len(directory) + len(many)
    end = end[:8] + count.to_bytes(2, "little") * 2 + size.to_bytes(4, "little") + end[16:]
    path.write_bytes(content[:position] + directory + many + end)
    with pytest.raises(DamagedCheckpointError, match="larger than the file"):
        read_checkpoint(path)


def test_an_error_explains_how_to_convert_a_checkpoint_in_the_old_torch_format(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"epoch": 3}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"that torch used before version 1\.6.*torch\.save\(torch\.load"):
        read_checkpoint(path)
    assert read_checkpoint(path, weights_only=False) == {"epoch": 3}
    AtomicCheckpointIO().save_checkpoint(torch.load(path, weights_only=True), path)
    assert read_checkpoint(path) == {"epoch": 3}


def test_load_checkpoint_moves_tensors_to_map_location(tmp_path):
    torch.save({"a": MATRIX}, tmp_path / "a.ckpt")
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, place: None):
        found = AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", map_location=location)
        assert found["a"].shape == MATRIX.shape
        assert found["a"].is_meta != callable(location)


def test_an_npz_file_is_refused_as_a_checkpoint(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(2))
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(tmp_path / "a.npz")

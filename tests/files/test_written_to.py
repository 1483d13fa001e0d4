"""A file that another program cuts off while its tensors lie on the disk, or between two readings: an error, and no SIGBUS.

Cut at a known call, in processes of their own, which a page that is gone would kill.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from externally import externally
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, by_epoch, make_data, quiet
from splitting import split_file

from fabric_template import FabricLoop
from fabric_template.files import bring, shards
from fabric_template.files.errors import CheckpointError
from fabric_template.files.reading import read_checkpoint

mapped = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux only")
CUT = (
    "'one.ckpt' was written to while it was read ({:,} bytes before, 8,192 now): use another file, or type the same again once"
    " it is whole"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A checkpoint of many pages, and the same in pieces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.save({"state_dict": Wide().state_dict()}, "one.ckpt")
    split_file(Path("one.ckpt"), Path("split.ckpt"), ranks=2)


class Wide(Classifier):
    """With 256 KB of weights."""

    def __init__(self):
        super().__init__(by_epoch, hidden=2**13)


def cut(path, size=8192):
    os.truncate(path, size)


def then(module, name, after):
    """Do something once a function of a module has returned."""
    real = getattr(module, name)

    def call(*args, **words):
        result = real(*args, **words)
        after()
        return result

    setattr(module, name, call)


def told(function, *args, **words):
    """What is said of it."""
    with pytest.raises(CheckpointError) as caught:
        function(*args, **words)
    return str(caught.value)


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def load(rank, path, module, name, change):
    def on_rank_zero():
        torch.distributed.barrier()
        if rank == 0:
            change()
        torch.distributed.barrier()

    then(module, name, on_rank_zero)
    loop = FabricLoop(strategy=ModelParallelStrategy(shard, 2, 1), devices=2, **quiet())
    torch.save(told(loop.validate, Wide(), [torch.zeros(1)], load=path), f"told{rank}.pt")


def join(rank, path, module, name, change):
    then(module, name, change)
    torch.save(told(shards.whole, read_checkpoint(path), path), "told0.pt")


def ended(function, *args, ranks):
    codes, errors = externally(function, *args, ranks=ranks, is_launched=ranks > 1)
    assert codes == [0] * ranks, errors
    return [torch.load(f"told{rank}.pt", weights_only=True) for rank in range(ranks)]


@mapped
def test_one_file_that_ranks_have_mapped():
    """Each takes its part of it, page by page."""
    size = Path("one.ckpt").stat().st_size
    for line in ended(load, "one.ckpt", bring, "_targets", lambda: cut("one.ckpt"), ranks=2):
        assert line == CUT.format(size)


def by_plugin(rank):
    words = quiet(devices=2)
    FabricLoop(strategy=ModelParallelStrategy(shard, 2, 1), **words).validate(
        Wide(), [make_data()[:4]], load="one.ckpt"
    )
    torch.distributed.barrier()
    if rank == 0:
        state = {"state_dict": {name: torch.ones_like(value) for name, value in Wide().state_dict().items()}, "more": 1}
        with open("one.ckpt", "wb") as file:  # the same file, with other bytes in it
            torch.save(state, file)
    torch.distributed.barrier()
    strategy, model = ModelParallelStrategy(shard, 2, 1, save_distributed_checkpoint=False), Wide()
    loop = FabricLoop(strategy=strategy, plugins=[AsyncCheckpointIO()], **words)
    loop.validate(model, [make_data()[:4]], load="one.ckpt")
    torch.save(bool((model.net[0].weight.full_tensor() == 1).all()), f"told{rank}.pt")


def test_one_that_a_plugin_reads_once_it_was_written_anew():
    """It is another file then than the one that a run before has left on the disk."""
    assert ended(by_plugin, ranks=2) == [True, True]


PIECE = "step=0.shards/__1_0.distcp"
CHANGES = {
    "cut": (lambda: cut(PIECE), "ends within a tensor: use another checkpoint"),
    "gone": (lambda: os.unlink(PIECE), "Checkpoint file not found"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_piece_that_goes_once_it_was_checked(how):
    """Between its checksum and its tensors."""
    change, words = CHANGES[how]
    piece = Path(PIECE).read_bytes()
    for line in ended(load, "split.ckpt", bring, "check_pieces", change, ranks=2)[1:]:
        assert words in line
        assert PIECE in line
    Path(PIECE).write_bytes(piece)
    (line,) = ended(join, "split.ckpt", shards, "check_pieces", change, ranks=1)
    assert words in line
    assert PIECE in line

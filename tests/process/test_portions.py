"""checkpoint="sharded" under DDP on two and three ranks (gloo): pieces with the values of one file, which every run reads.

The ranks come by themselves, as under torchrun; each writes what it has found, and it is read here.
"""

import threading
import warnings
from pathlib import Path

import pytest
import torch
from externally import externally
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, by_epoch, make_loader
from runs import Snapshots, copied, loud, same, tree
from torch import nn

from fabric_template import FabricLoop
from fabric_template.core.errors import Misuse
from fabric_template.files.reading import read_checkpoint
from fabric_template.files.shards import whole
from fabric_template.files.storage import AtomicCheckpointIO
from fabric_template.process.choose import newest_good
from fabric_template.tools.cli import main
from fabric_template.tools.convert import convert

HOME = "checkpoints/run/version_0"
WORDS = {"max_epochs": 3, "monitor": "val_loss", "save_every_n_steps": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Net(Classifier):
    """With buffers, which differ between the ranks at the end of a step: rank zero's count."""

    def __init__(self):
        super().__init__(by_epoch)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


class Changed(Net):
    """A hook that changes what is saved, as a module does that saves adapters only."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_save_checkpoint(self, checkpoint):
        self.change(self, checkpoint)


def fit(root, strategy="ddp", ranks=2, resume=None, seed=1, model=None, **words):
    """A run; what has come of it, whole: weights, moments, metrics, steps."""
    seed_everything(seed, verbose=False)
    model = Net() if model is None else model
    loop = FabricLoop(strategy=strategy, **{**loud(root), "devices": ranks, **WORDS, **words})
    seed_everything(1, verbose=False)
    val = make_loader(18, shuffle=False, seed=5)
    loop.fit(model, make_loader(40), val, resume=resume)
    metrics = {key: float(value) for key, value in loop.callback_metrics.items()}
    weights, moments = together(dict(model.state_dict())), together(loop.optimizers[0].state_dict()["state"])
    return weights, moments, metrics, loop.global_step


def together(item):
    """The same nest with whole tensors."""
    if isinstance(item, dict):
        return {key: together(value) for key, value in item.items()}
    return item.full_tensor() if hasattr(item, "full_tensor") else item


def shared(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def on_two(rank):
    shards = {"checkpoint": "sharded"}
    full, first = fit("file"), None
    found = {"pieces": same(fit("pieces", callbacks=[Snapshots("pieces", "snaps")], **shards), full)}
    found["behind"] = same(fit("behind", plugins=AsyncCheckpointIO(), **shards), full)
    for batches in (5, 9):  # the end of an epoch, the middle of the next
        found[batches] = same(
            fit(copied(rank, f"snaps/{batches}", f"from{batches}"), resume="auto", seed=5, **shards), full
        )
    # on from pieces: one file, one file that a thread writes
    more = {"resume": "last", "seed": 5, "max_epochs": 4}
    on = fit(copied(rank, "pieces", "to_file"), **more)
    found["to_async"] = same(fit(copied(rank, "pieces", "to_async"), plugins=AsyncCheckpointIO(), **more), on)
    found["to_pieces"] = same(fit(copied(rank, "file", "to_pieces"), **more, **shards), on)
    # a model in parts goes on from pieces, from one file, and from one that was made into pieces
    ways = {"to_parts": "pieces", "from_file": "file", "from_split": "file"}
    roots = [copied(rank, source, way) for way, source in ways.items()]
    split = f"from_split/{HOME}/split.ckpt"
    if rank == 0:
        convert(Path("from_split", HOME, "last.ckpt"), Path(split), pieces=2)
    torch.distributed.barrier()
    for root in roots:
        words = {**more, "resume": split if root == "from_split" else "last"}
        ended = fit(root, ModelParallelStrategy(shared, 2, 1), **words)
        first = ended if root == "to_parts" else first
        found[root] = same(ended, first) and ended[-1] == 20
    torch.save(found, f"found{rank}.pt")


def test_the_same_files_by_two_ranks():
    """The values of one file, by halves; killed and resumed to the bit; read by DDP, FSDP2, one process, verify, convert."""
    codes, errors = externally(on_two)
    assert codes == [0, 0], errors
    names = ("pieces", "behind", 5, 9, "to_async", "to_pieces", "to_parts", "from_file", "from_split")
    for rank in range(2):
        assert torch.load(f"found{rank}.pt", weights_only=True) == dict.fromkeys(names, True)
    one = read_checkpoint(f"file/{HOME}/last.ckpt")
    pieces = ["step=15.shards/__0_0.distcp", "step=15.shards/__1_0.distcp"]
    for root in ("pieces", "behind", "from5", "from9"):
        path = f"{root}/{HOME}/last.ckpt"
        assert set(pieces) <= set(tree(f"{root}/{HOME}"))
        together = whole(read_checkpoint(path), path)
        assert same(together["state_dict"], one["state_dict"])
        assert same(together["optimizer_states"], one["optimizer_states"])
        for piece in pieces:
            assert Path(root, HOME, piece).read_bytes() == Path("pieces", HOME, piece).read_bytes()
    small = read_checkpoint(f"pieces/{HOME}/last.ckpt")
    kept = [key for key, value in small["state_dict"].items() if isinstance(value, torch.Tensor)]
    assert kept == ["net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"]
    weights = sum(value.nbytes for key, value in one["state_dict"].items() if key not in kept)
    sizes = [size for size, _ in small["fabric_template.shards"]["pieces"].values()]
    assert sum(sizes) == 3 * weights  # and two moments
    assert max(sizes) < 0.6 * sum(sizes)
    assert {name.split("/")[0] for name in tree(f"to_async/{HOME}")} >= {"best.ckpt", "last.ckpt"}

    (alone,) = FabricLoop(**loud("pieces")).validate(Net(), make_loader(18), load="last", verbose=False)
    assert alone["val_loss"] > 0
    assert main(["verify", "pieces"]) == 0
    assert main(["convert", f"pieces/{HOME}/last.ckpt", "--out", "one.ckpt"]) == 0
    assert same(dict(Net.load_from_checkpoint("one.ckpt").state_dict()), one["state_dict"])
    Path("pieces", HOME, pieces[1]).unlink()
    with pytest.warns(UserWarning, match=r"__1_0.distcp' is missing.* It is set aside as .*last.ckpt.damaged'"):
        assert newest_good([Path("pieces", HOME)]).name == "best.ckpt"


def test_one_file_as_pieces(capsys):
    """And back: the same values; the pieces as long as they can be; what is typed wrongly is one line."""
    fit("alone", "auto", ranks=1, max_epochs=1)
    path = f"alone/{HOME}/last.ckpt"
    for pieces in (3, 20):  # of sixteen rows
        assert main(["convert", path, "--pieces", str(pieces), "--out", f"in{pieces}.ckpt"]) == 0
        assert main(["verify", f"in{pieces}.ckpt"]) == 0
        assert main(["convert", f"in{pieces}.ckpt", "--out", f"again{pieces}.ckpt"]) == 0
        assert same(read_checkpoint(f"again{pieces}.ckpt"), read_checkpoint(path))
    assert tree("step=10.shards") == [f"__{rank}_0.distcp" for rank in range(3)]
    assert main(["convert", "in3.ckpt", "--pieces", "2"]) == 0  # for another number of ranks
    assert same(whole(read_checkpoint("in3-pieces.ckpt"), "in3-pieces.ckpt"), read_checkpoint(path))
    assert main(["convert", path]) == main(["convert", path, "--pieces", "0"]) == 2
    told = capsys.readouterr().err
    assert "it is one file already, which every run reads; type --pieces 4 for four pieces" in told
    assert "--pieces 0: expected a number of ranks >= 1" in told


class Held(AtomicCheckpointIO):
    """Writes once training is over."""

    over = threading.Event()

    def save_checkpoint(self, *args, **words):
        self.over.wait()
        super().save_checkpoint(*args, **words)


class Behind(AsyncCheckpointIO):
    """A thread's files, of which the first is begun as training ends."""

    def teardown(self):
        self.checkpoint_io.over.set()
        super().teardown()


def test_pieces_that_no_file_names_once_a_thread_has_written():
    """One file takes their place after the last look at them: they are removed on the way out."""
    fit("alone", "auto", ranks=1, max_epochs=1, monitor=None)
    path = f"alone/{HOME}/last.ckpt"
    assert main(["convert", path, "--pieces", "2", "--out", f"alone/{HOME}/split.ckpt"]) == 0
    Path("alone", HOME, "split.ckpt").rename(path)
    assert tree(f"alone/{HOME}") == ["last.ckpt", "step=10.shards/__0_0.distcp", "step=10.shards/__1_0.distcp"]
    words = {"plugins": Behind(Held(in_run=True)), "monitor": None, "save_every_n_steps": None, "max_epochs": 2}
    fit("alone", "auto", ranks=1, resume="last", **words)
    assert tree(f"alone/{HOME}") == ["last.ckpt"]
    assert read_checkpoint(path)["global_step"] == 20


def on_three(rank):
    full = fit("three", ranks=3)
    torch.save(same(fit("thirds", ranks=3, checkpoint="sharded"), full), f"found{rank}.pt")


def test_three_ranks():
    """Sixteen rows in three parts, three numbers in three, and none in a third that is left over."""
    codes, errors = externally(on_three, ranks=3)
    assert codes == [0, 0, 0], errors
    assert [torch.load(f"found{rank}.pt", weights_only=True) for rank in range(3)] == [True] * 3
    path = f"thirds/{HOME}/last.ckpt"
    assert same(
        whole(read_checkpoint(path), path)["state_dict"], read_checkpoint(f"three/{HOME}/last.ckpt")["state_dict"]
    )


# ---- hooks that change what is saved


def without_weights(module, checkpoint):
    del checkpoint["state_dict"]


def only_the_last(module, checkpoint):
    checkpoint["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if "net.4" in key}


def on_one_rank(module, checkpoint):
    if module.global_rank == 0:
        del checkpoint["state_dict"]["net.4.weight"]


def gathered(module, checkpoint):
    weights = checkpoint["state_dict"]
    checkpoint["state_dict"] = {
        key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in weights.items()
    }


HOOKS = {"without": without_weights, "last": only_the_last, "one_rank": on_one_rank}
WAYS = {
    "file": ("ddp", {}),
    "portions": ("ddp", {"checkpoint": "sharded"}),
    "behind": ("ddp", {"checkpoint": "sharded", "plugins": AsyncCheckpointIO()}),
    "parts": ("fsdp", {}),
    "parts_behind": ("fsdp", {"plugins": AsyncCheckpointIO()}),
}


def changed(rank):
    told = {}
    for way, (kind, words) in WAYS.items():
        for name, hook in HOOKS.items():
            strategy = kind if kind == "ddp" else ModelParallelStrategy(shared, 2, 1)
            words = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "monitor": None, **words}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    fit(f"{way}_{name}", strategy, model=Changed(hook), **words)
                except ValueError as error:
                    told[way, name] = str(error)
            told.setdefault((way, name), [str(one.message) for one in caught if "could not save" in str(one.message)])
    steps = [fit("on", ModelParallelStrategy(shared, 2, 1), model=Changed(gathered), max_epochs=epochs, resume=resume)[-1]
             for epochs, resume in ((1, None), (2, "last"))]  # fmt: skip
    torch.save((told, steps), f"found{rank}.pt")


def test_what_a_hook_leaves_is_what_is_saved():
    """As under Trainer; one that does so on one rank only is a clear error where each rank writes its part."""
    codes, errors = externally(changed)
    assert codes == [0, 0], errors
    told, steps = torch.load("found0.pt", weights_only=True)
    assert steps == [5, 10]
    assert read_checkpoint(f"on/{HOME}/last.ckpt")["state_dict"]["net.0.weight"].shape == (16, 8)  # in the small file
    for way in WAYS:
        for name in HOOKS:
            path = Path(f"{way}_{name}/{HOME}/last.ckpt")
            if name == "one_rank" and way != "file":
                assert not path.exists()
                assert (
                    "only one of rank 0 and rank 1 has 'state_dict.net.4.weight' in its state: on_save_checkpoint has to"
                    " change a checkpoint in the same way on all ranks; nothing was written" in told[way, name]
                )
                continue
            assert told[way, name] == []
            found = whole(read_checkpoint(path), path)
            weights = found.get("state_dict")
            assert (weights is None) == (name == "without")
            if name == "last":
                assert sorted(weights) == ["net.4.bias", "net.4.weight"]
            # Adam's moments of each of the six parameters are there all the same
            assert [len(state["exp_avg"].shape) for state in found["optimizer_states"][0]["state"].values()] == [
                2, 1, 1, 1, 2, 1,
            ]  # fmt: skip


# ---- what cannot be


def test_refused_when_the_loop_is_made(tmp_path):
    two = {"accelerator": "cpu", "devices": 2, "checkpoint": "sharded"}
    with pytest.raises(
        Misuse, match=r"^plugins=TorchCheckpointIOs?.* with checkpoint='sharded': .* write plugins=AsyncCh"
    ):
        FabricLoop(strategy=DDPStrategy(), plugins=type("TorchCheckpointIOs", (TorchCheckpointIO,), {})(), **two)
    strategy = ModelParallelStrategy(shared, 2, 1, save_distributed_checkpoint=False)
    with pytest.raises(
        Misuse, match=r"^checkpoint='sharded' with strategy=.*save_distributed_checkpoint=False.* leave one"
    ):
        FabricLoop(strategy=strategy, **two)
    with pytest.raises(Misuse, match="^checkpoint='pieces': expected None or \"sharded\"$"):
        FabricLoop(checkpoint="pieces")
    assert list(tmp_path.iterdir()) == []


def test_one_process_writes_one_file():
    fit("alone", "auto", ranks=1, checkpoint="sharded", plugins=AsyncCheckpointIO())
    assert tree(f"alone/{HOME}") == ["best.ckpt", "last.ckpt"]

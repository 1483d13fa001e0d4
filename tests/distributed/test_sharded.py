"""Models in parts on two ranks (gloo): FSDP2 with DDP's weights, tensor parallelism, checkpoints in pieces that any run reads.

The ranks come by themselves, as under torchrun; each writes what it has found, and it is read here.
"""

import warnings
from pathlib import Path

import lightning.fabric.strategies as fabrics
import lightning.pytorch as pl
import pytest
import torch
from externally import externally
from fabric_template.files.shards import index_of, whole
from fabric_template.process.choose import newest_good
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, by_epoch, make_loader, quiet, sgd
from runs import Snapshots, copied, loud, same, tree
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.errors import CheckpointError, ConfigurationError, DamagedError
from fabric_template.tools.cli import main

TWO = {"accelerator": "cpu", "devices": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for part in model.modules():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def split(model, mesh):
    """Tensor parallelism: the first layer by columns, the last by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh["tensor_parallel"], {"net.0": ColwiseParallel(), "net.3": RowwiseParallel()})


def fsdp(**words):
    return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, **words)


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


def whole_state(item):
    """The same nest with whole tensors."""
    if isinstance(item, dict):
        return {key: whole_state(value) for key, value in item.items()}
    return item.full_tensor() if hasattr(item, "full_tensor") else item


def trained(strategy, make, seed=1, root=None, resume=None, validates=True, given=None, **words):
    """Fit; what has come of it: weights and optimizer states, whole, the metrics and the loop."""
    pl.seed_everything(seed, verbose=False)
    model = make()
    words = {"devices": 2, "max_epochs": 2, **(quiet() if root is None else loud(root)), **words}
    loop = FabricLoop(strategy=strategy, **words)
    pl.seed_everything(1, verbose=False)
    loop.fit(model, train(), val() if validates else None, resume=resume, **(given or {}))
    states = [whole_state(optimizer.state_dict()["state"]) for optimizer in loop.optimizers]
    net = model if isinstance(model, nn.Module) else model.net
    return whole_state(net.state_dict()), states, {k: float(v) for k, v in loop.callback_metrics.items()}, loop, model


def furthest(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


class Adam(Classifier):
    def __init__(self):
        super().__init__(by_epoch)


class ByHand(Adam):
    """Steps every second batch, with its own clipping."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Meta(Classifier):
    """Makes its layers where they take no memory; each rank gets its part of them only."""

    def __init__(self):
        super().__init__(sgd)

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))


class Trainers(Classifier):
    """Written for Trainer's strategy: it shards itself by its mesh."""

    def __init__(self):
        super().__init__(sgd)

    def configure_model(self):
        shard(self, self.device_mesh)


class Object:
    """A plain object with steps, for rung 3."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def by_functions(net):
    return {
        "training_step": lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    }


# ---- the weights of DDP

CASES = {
    "plain": (Adam, {}),
    "accumulate": (Adam, {"accumulate_grad_batches": 3}),
    "clip_value": (Adam, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clip_norm": (Adam, {"gradient_clip_val": 0.1}),
    "bf16_mixed": (Adam, {"precision": "bf16-mixed"}),
    "bf16_true": (Adam, {"precision": "bf16-true"}),
    "by_hand": (ByHand, {}),
    "object": (Object, {"validates": False}),
}


def counting(done):
    """Let each sum of gradients over the ranks be noted, by whichever name torch calls it."""
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if (real := getattr(torch.distributed, name, None)) is not None:
            setattr(
                torch.distributed, name, lambda *args, real=real, **words: (done.append(1), real(*args, **words))[1]
            )


def against_ddp(rank):
    counting(reduced := [])
    found = {}
    for name, (make, words) in CASES.items():
        weights, states, metrics, *_ = trained("ddp", make, **words)
        reduced.clear()
        # each rank begins with weights of its own, and is given rank zero's, as DDP gives them
        ours, our_states, our_metrics, loop, model = trained(fsdp(), make, seed=1 + rank, **words)
        found[name] = furthest(weights, ours), metrics == our_metrics, len(reduced)
        if name == "plain":
            before = metrics["val_loss"]
            found["again"] = loop.validate(model, val(), verbose=False)[0]["val_loss"] == before
            more = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
            more.fit(model, train())  # a second fit of what is in parts already
            found["more"] = more.global_step
    net = nn.Sequential(nn.Linear(8, 3))
    loop = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
    loop.fit(net, train(), **by_functions(net))
    found["functions"] = type(net[0].weight).__name__
    found["predicted"] = len(loop.predict(net, val(), predict_step=lambda net, batch: net(batch[0])))
    found["trainers"] = trained(pl.strategies.ModelParallelStrategy(2, 1), Trainers)[2] == trained("ddp", Classifier)[2]
    found["meta"] = trained(fsdp(), Meta, seed=1 + rank, max_epochs=1)[0]["net.0.weight"]
    torch.save(found, f"found{rank}.pt")


def test_fsdp2_has_the_weights_of_ddp():
    """Exactly, but for the norm of all gradients, which is added up in another order; and gradients go over once a window."""
    codes, errors = externally(against_ddp)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        exact = {name: found[name][:2] for name in CASES if name not in ("clip_norm", "by_hand")}
        assert exact == dict.fromkeys(exact, (0.0, True))
        assert max(found["clip_norm"][0], found["by_hand"][0]) < 1e-6
        # 10 batches of two ranks are 10 windows of one, or 4 of three and the epoch's last two; of 2 layers each
        assert (found["plain"][2], found["accumulate"][2]) == (20, 8)
        assert (found["again"], found["more"], found["functions"], found["predicted"]) == (True, 5, "DTensor", 3)
        assert found["trainers"]
        assert len({tuple(row) for row in found["meta"].tolist()}) == 16  # each rank has drawn rows of its own


# ---- tensor parallelism


class Seeing(Classifier):
    """Notes what it is given."""

    def __init__(self):
        super().__init__(sgd, dropout=0.0)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


PAIRED = {"plain": {}, "clip": {"gradient_clip_val": 0.1}}


def in_tensor_parallel(rank):
    found = {}
    for name, words in PAIRED.items():
        strategy = ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)
        found[name], _, _, _, model = trained(strategy, Seeing, seed=1 + rank, **words)
    found["seen"], found["kinds"] = model.seen, [type(value).__name__ for value in model.state_dict().values()]
    torch.save(found, f"found{rank}.pt")


def test_tensor_parallelism():
    """Two ranks that train one model: the samples and, to the last bits, the weights of one."""
    codes, errors = externally(in_tensor_parallel)
    assert codes == [0, 0], errors
    one, other = (torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2))
    assert same(one, other)
    for name, words in PAIRED.items():
        alone, _, _, _, model = trained("auto", Seeing, devices=1, **words)
        assert furthest(alone, one[name]) < 1e-6
    assert one["seen"] == model.seen
    assert one["kinds"] == ["DTensor"] * 4


# ---- what cannot be


def alone(model, mesh):
    """Shards one layer and forgets the other."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.net[0], mesh=mesh["data_parallel"])
    return model


def refused(rank):
    found = []
    for parallelize in (alone, lambda model, mesh: model, lambda model, mesh: nn.Linear(1, 1)):
        loop = FabricLoop(strategy=ModelParallelStrategy(parallelize, 2, 1), **quiet(devices=2, max_epochs=1))
        with pytest.raises(ConfigurationError) as caught:
            loop.fit(Classifier(), train())
        found.append(str(caught.value))
    torch.save(found, f"found{rank}.pt")


def test_what_would_be_trained_apart_is_refused():
    codes, errors = externally(refused)
    assert codes == [0, 0], errors
    left, nothing, other = torch.load("found1.pt", weights_only=True)
    assert left == (
        "parallelize_fn left 'net.3.weight' of Classifier whole in each of the 2 data-parallel groups, which would train it"
        " apart: write fully_shard(model, mesh=mesh['data_parallel']) with the whole model as its last line"
    )
    assert nothing.startswith("parallelize_fn has sharded nothing of Classifier: write fully_shard(model, ")
    assert other.startswith(
        "parallelize_fn returned another object than Classifier, a Linear: expected the model that it"
    )


def test_refused_before_the_launch(tmp_path):
    net = nn.Linear(8, 3)
    given = {"training_step": lambda net, batch: net(batch[0]).sum(), "optimizer": torch.optim.SGD(net.parameters())}
    with pytest.raises(
        ConfigurationError,
        match=r"^fit got optimizer= and strategy=ModelParallelStrategy.* write optimizer=lambda model",
    ):
        FabricLoop(strategy=fsdp(), **TWO).fit(net, train(), **given)
    averaging = pl.callbacks.StochasticWeightAveraging(0.1)
    with pytest.raises(
        ConfigurationError, match=r"^StochasticWeightAveraging with strategy=ModelParallelStrategy.* leave it out"
    ):
        FabricLoop(strategy=fsdp(), callbacks=averaging, **TWO).fit(Classifier(), train())
    with pytest.raises(
        ConfigurationError, match=r"^strategy=DDPStrategy\(static_graph=True\) with accumulate_grad_batches=2: .* leave"
    ):
        FabricLoop(strategy=DDPStrategy(static_graph=True), accumulate_grad_batches=2, **TWO).fit(Classifier(), train())
    words = r"^strategy=DDPStrategy\(ddp_comm_hook=\.\.\.\): .* no such word .* leave it out$"
    with pytest.raises(TypeError, match=words):
        FabricLoop(strategy=DDPStrategy(ddp_comm_hook=print), **TWO)
    for io, name in (
        (TorchCheckpointIO(), r"TorchCheckpointIO\(\)"),
        (AsyncCheckpointIO(TorchCheckpointIO()), r"AsyncCheckpointIO\(TorchCheckpointIO\(\)\)"),
    ):
        with pytest.raises(
            ConfigurationError, match=f"^plugins={name} with strategy=ModelParallelStrategy.* write plugins=AsyncCh"
        ):
            FabricLoop(strategy=fsdp(), plugins=[io], **TWO)
    for strategy in ("deepspeed", "deepspeed_stage_2", fabrics.FSDPStrategy()):
        with pytest.raises(ConfigurationError, match="write strategy=ModelParallelStrategy"):
            FabricLoop(strategy=strategy, **TWO)
    assert list(tmp_path.iterdir()) == []


# ---- checkpoints in pieces


def resumed(rank):
    words = {"max_epochs": 3, "monitor": "val_loss", "save_every_n_steps": 2}
    strategies = {"fsdp": fsdp, "ddp": lambda: "ddp", "whole": lambda: fsdp(save_distributed_checkpoint=False)}
    full = trained(fsdp(), Adam, root="full", callbacks=[Snapshots("full", "snaps")], **words)
    found = {}
    for batches in (5, 9):  # the end of an epoch, the middle of the next
        root = copied(rank, f"snaps/{batches}", f"from{batches}")
        again = trained(fsdp(), Adam, seed=5, root=root, resume="auto", **words)
        found[f"{batches}"] = same(again[:3], full[:3]), again[3].global_step
    first = None
    for name, make in strategies.items():  # the same ranks, otherwise shared out, and on from there
        root = copied(rank, "full", f"to_{name}")
        more = {"max_epochs": 4, "plugins": AsyncCheckpointIO() if name == "whole" else None}
        now = trained(make(), Adam, seed=5, root=root, resume="last", **{**words, **more})
        first = first or now
        found[name] = same(now[:3], first[:3]), now[3].global_step
    threaded = trained(fsdp(), Adam, root="threaded", plugins=AsyncCheckpointIO(), **words)
    found["threaded"] = same(threaded[:3], full[:3])
    found["window"] = saved_in_a_window()
    torch.save(found, f"found{rank}.pt")


def saved_in_a_window():
    """What is said and kept where a validation comes in the middle of a window."""
    words = {
        "root": "window",
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
        "save_last": True,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = trained(fsdp(), Adam, monitor="val_loss", limit_train_batches=4, **words)[3]
        trained(fsdp(), Adam, monitor="val_loss", resume="best", **{**words, "max_epochs": 2})
    told = [str(one.message) for one in caught if "window" in str(one.message)]
    return told, loop._run.trained.name, loop._run.keeper.saved_step


def test_checkpoints_in_pieces():
    """A small file that names them; exact resume, also in an epoch's middle; read by DDP, and by one process alone."""
    codes, errors = externally(resumed)
    assert codes == [0, 0], errors
    home = "checkpoints/run/version_0"
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert {found[name] for name in ("5", "9")} == {(True, 15)}
        assert {found[name] for name in ("fsdp", "ddp", "whole")} == {(True, 20)}
        assert found["threaded"]
    told, name, step = torch.load("found0.pt", weights_only=True)["window"]
    assert (name, step) == ("Adam", 2)
    assert told[0].endswith("as a model in parts has gradients then that no checkpoint can hold;"
                            " write val_check_interval= with a multiple of 2")  # fmt: skip
    assert "was saved in a window of accumulate_grad_batches, without a sharded model's gradients ('window/" in told[1]
    # two files of one state name the same pieces, which are there; no others are
    assert [name for name in tree(f"full/{home}") if "shards" in name][-2:] == [
        "step=15.shards/__0_0.distcp", "step=15.shards/__1_0.distcp",
    ]  # fmt: skip
    assert {name.split("/")[0] for name in tree(f"full/{home}")} <= {
        "best.ckpt", "last.ckpt", "step=15.shards", *{f"step={step}.shards" for step in (5, 10)},
    }  # fmt: skip
    # An interrupted run, and a run whose threads write, leave the same bytes.
    for root in ("from5", "from9", "threaded"):
        for piece in ("__0_0.distcp", "__1_0.distcp"):
            path = f"{home}/step=15.shards/{piece}"
            assert Path("full", path).read_bytes() == Path(root, path).read_bytes()
    for root in ("to_ddp", "to_whole"):  # a whole last.ckpt names no pieces any more, the best one of before does
        assert {name.split("/")[0] for name in tree(f"{root}/{home}")} == {"best.ckpt", "last.ckpt", "step=10.shards"}
    last = f"full/{home}/last.ckpt"
    small, weights = read_checkpoint(last), whole(read_checkpoint(last), last)
    assert set(small["state_dict"].values()) == {"in the pieces beside this file"}
    assert {name: tuple(value.shape) for name, value in weights["state_dict"].items()} == {
        "net.0.weight": (16, 8), "net.0.bias": (16,), "net.3.weight": (3, 16), "net.3.bias": (3,),
    }  # fmt: skip
    model = Adam()
    (alone,) = FabricLoop(**loud("full")).validate(model, val(), load="last", verbose=False)
    assert same(dict(model.state_dict()), weights["state_dict"])
    assert alone["val_loss"] > 0

    # one file, in Lightning's layout
    torch.save(whole(read_checkpoint(last), last), "one.ckpt")
    assert same(dict(Adam.load_from_checkpoint("one.ckpt").state_dict()), weights["state_dict"])
    assert same(read_checkpoint("one.ckpt")["optimizer_states"], weights["optimizer_states"])

    # verify, and "auto", know them
    assert main(["verify", "full"]) == 0
    piece = f"full/{home}/step=15.shards/__1_0.distcp"
    data = bytearray(Path(piece).read_bytes())
    data[len(data) // 2] ^= 1
    Path(piece).write_bytes(data)
    with pytest.raises(DamagedError):
        FabricLoop(**loud("full")).validate(Adam(), val(), load="last", verbose=False)
    with pytest.warns(UserWarning, match=r"another checksum.* It is set aside as .*last.ckpt.damaged'"):
        assert newest_good([Path(f"full/{home}")]).name == "best.ckpt"


ALTERED = {
    "folder": lambda index: index.update(folder="../other.shards"),
    "piece": lambda index: index["pieces"].update({"../x": [1, 1]}),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_list_of_pieces_is_refused(name):
    index = {"folder": "step=1.shards", "pieces": {"__0_0.distcp": [200, 1]}, "tensors": [
        {"at": ["state_dict", "w"], "dtype": "float32", "size": [4, 8], "chunks": [["__0_0.distcp", 0, 128, [0, 0], [4, 8]]]}
    ]}  # fmt: skip
    checkpoint = {"epoch": 1, "fabric_template.shards": index, "state_dict": {
        "w": "in the pieces beside this file; one file of all: fabric-template convert"}}  # fmt: skip
    assert index_of(checkpoint, "last.ckpt") is index
    ALTERED[name](index)
    with pytest.raises(CheckpointError, match=r"^'last.ckpt' cannot be used: .*; it was altered: use another file$"):
        index_of(checkpoint, "last.ckpt")

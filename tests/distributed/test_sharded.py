"""Test FSDP2 and tensor parallelism with two gloo processes.

The processes are started as under torchrun. Each process writes its results to a file that the test reads.
"""

import resource
import signal
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from modules import Classifier, by_epoch, make_loader, needs_fsdp2, quiet, sgd, shard_module
from processes import run_processes
from runs import Snapshots, copy_on_rank_0, same, with_files
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.checkpoint.distributed import SHARDS_KEY, verify_shards
from fabric_template.errors import CheckpointError, ConfigurationError

TWO = {"accelerator": "cpu", "devices": 2}


def shard(model, mesh):
    for part in model.modules():
        if isinstance(part, nn.Linear):
            shard_module(part, mesh)
    return shard_module(model, mesh)


def split(model, mesh):
    """Shard the first layer by columns and the last layer by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh["tensor_parallel"], {"net.0": ColwiseParallel(), "net.3": RowwiseParallel()})


def fsdp(**options):
    return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, **options)


def train():
    return make_loader(40)


def val():
    return make_loader(18, shuffle=False, seed=5)


def whole_state(item):
    if isinstance(item, dict):
        return {key: whole_state(value) for key, value in item.items()}
    return item.full_tensor() if hasattr(item, "full_tensor") else item


def trained(strategy, make, seed=1, root=None, resume=None, validates=True, given=None, **options):
    """Train a model.

    Return unsharded weights and optimizer states, metrics, the loop and the model.
    """
    pl.seed_everything(seed, verbose=False)
    model = make()
    options = {"devices": 2, "max_epochs": 2, **(quiet() if root is None else with_files(root)), **options}
    loop = FabricLoop(strategy=strategy, **options)
    pl.seed_everything(1, verbose=False)
    loop.fit(model, train(), val() if validates else None, resume=resume, **(given or {}))
    states = [whole_state(optimizer.state_dict()["state"]) for optimizer in loop.optimizers]
    net = model if isinstance(model, nn.Module) else model.net
    return whole_state(net.state_dict()), states, {k: float(v) for k, v in loop.callback_metrics.items()}, loop, model


def largest_difference(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


class Adam(Classifier):
    def __init__(self):
        super().__init__(by_epoch)


class ByHand(Adam):
    """A module with manual optimization that takes a step in every second batch and clips gradients itself."""

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
    """A module that creates its layers on the meta device."""

    def __init__(self):
        super().__init__(sgd)

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))


class Trainers(Classifier):
    """A module written for Trainer. It shards itself in configure_model()."""

    def __init__(self):
        super().__init__(sgd)

    def configure_model(self):
        shard(self, self.device_mesh)


class Object:
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


# Comparison of FSDP2 with DDP

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


def record_reductions(done):
    """Record each gradient reduction. The name of the reduction function depends on the torch version."""
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if (real := getattr(torch.distributed, name, None)) is not None:
            setattr(
                torch.distributed, name, lambda *args, real=real, **options: (done.append(1), real(*args, **options))[1]
            )


def compare_with_ddp(rank):
    record_reductions(reduced := [])
    found = {}
    for name, (make, options) in CASES.items():
        weights, states, metrics, *_ = trained("ddp", make, **options)
        reduced.clear()
        # Each process starts with a different seed, but must get the weights of the first process, as with DDP.
        ours, our_states, our_metrics, loop, model = trained(fsdp(), make, seed=1 + rank, **options)
        found[name] = largest_difference(weights, ours), metrics == our_metrics, len(reduced)
        if name == "plain":
            before = metrics["val_loss"]
            found["again"] = loop.validate(model, val(), verbose=False)[0]["val_loss"] == before
            more = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
            more.fit(model, train())
            found["more"] = more.global_step
    net = nn.Sequential(nn.Linear(8, 3))
    loop = FabricLoop(strategy=fsdp(), **quiet(devices=2, max_epochs=1))
    loop.fit(net, train(), **by_functions(net))
    found["functions"] = type(net[0].weight).__name__
    found["predicted"] = len(loop.predict(net, val(), predict_step=lambda net, batch: net(batch[0])))
    found["trainers"] = trained(pl.strategies.ModelParallelStrategy(2, 1), Trainers)[2] == trained("ddp", Classifier)[2]
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    found["meta"] = trained(fsdp(), Meta, max_epochs=1)[0]["net.0.weight"]
    torch.save(found, f"found{rank}.pt")


@needs_fsdp2
def test_fsdp2_gives_the_same_weights_as_ddp():
    """Only runs that clip by norm may differ, because of rounding.

    Gradients are reduced once per optimizer step.
    """
    codes, errors = run_processes(compare_with_ddp)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        exact = {name: found[name][:2] for name in CASES if name not in ("clip_norm", "by_hand")}
        assert exact == dict.fromkeys(exact, (0.0, True))
        assert max(found["clip_norm"][0], found["by_hand"][0]) < 1e-6
        # Each step reduces the gradients of two layers. In two epochs
        # of five batches, there are 10 steps, or 4 with accumulation.
        assert (found["plain"][2], found["accumulate"][2]) == (20, 8)
        assert (found["again"], found["more"], found["functions"], found["predicted"]) == (True, 5, "DTensor", 3)
        assert found["trainers"]
        assert found["meta"].isfinite().all()


# Comparison of tensor parallelism with one process


class Seeing(Classifier):
    def __init__(self):
        super().__init__(sgd, dropout=0.0)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].sum().item())
        return super().training_step(batch, batch_idx)


PAIRED = {"plain": {}, "clip": {"gradient_clip_val": 0.1}}


def train_with_tensor_parallelism(rank):
    found = {}
    for name, options in PAIRED.items():
        strategy = ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)
        found[name], _, _, _, model = trained(strategy, Seeing, seed=1 + rank, **options)
    found["seen"], found["kinds"] = model.seen, [type(value).__name__ for value in model.state_dict().values()]
    torch.save(found, f"found{rank}.pt")


def test_tensor_parallelism_gives_the_same_weights_as_one_process():
    """With tensor parallelism, both processes get the same samples."""
    codes, errors = run_processes(train_with_tensor_parallelism)
    assert codes == [0, 0], errors
    one, other = (torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2))
    assert same(one, other)
    for name, options in PAIRED.items():
        alone, _, _, _, model = trained("auto", Seeing, devices=1, **options)
        assert largest_difference(alone, one[name]) < 1e-6
    assert one["seen"] == model.seen
    assert one["kinds"] == ["DTensor"] * 4


# Gradient norms of sharded models


def log_gradient_norms(rank):
    options = {"log_grad_norm": True, "log_every_n_steps": 1, "max_epochs": 1}
    tensor_parallel = ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)
    for name, strategy in {"ddp": "ddp", "fsdp": fsdp(), "tensor": tensor_parallel}.items():
        trained(strategy, Seeing, root=name, **options)


@needs_fsdp2
def test_log_grad_norm_logs_the_norm_over_all_shards():
    """Each process holds only a shard of each gradient."""
    codes, errors = run_processes(log_gradient_norms)
    assert codes == [0, 0], errors
    trained("auto", Seeing, root="alone", devices=1, log_grad_norm=True, log_every_n_steps=1, max_epochs=1)
    norms = {}
    for name in ("ddp", "fsdp", "tensor", "alone"):
        lines = Path(name, "logs/run/version_0/steps.csv").read_text().splitlines()
        column = lines[0].split(",").index("grad_norm")
        norms[name] = [float(line.split(",")[column]) for line in lines[1:]]
    assert len(norms["fsdp"]) == 5
    assert len(norms["tensor"]) == 10
    assert norms["fsdp"] == pytest.approx(norms["ddp"], rel=1e-4)
    assert norms["tensor"] == pytest.approx(norms["alone"], rel=1e-4)


# Sharded models and optimizers that fit refuses


def forget_a_layer(model, mesh):
    shard_module(model.net[0], mesh)
    return model


def refused(rank):
    found = []
    for parallelize in (forget_a_layer, lambda model, mesh: model, lambda model, mesh: nn.Linear(1, 1)):
        loop = FabricLoop(strategy=ModelParallelStrategy(parallelize, 2, 1), **quiet(devices=2, max_epochs=1))
        with pytest.raises(ConfigurationError) as caught:
            loop.fit(Classifier(), train())
        found.append(str(caught.value))
    torch.save(found, f"found{rank}.pt")


def test_fsdp2_refuses_a_model_that_is_not_sharded_completely():
    codes, errors = run_processes(refused)
    assert codes == [0, 0], errors
    forgotten, nothing, other = torch.load("found1.pt", weights_only=True)
    assert "whose parameter 'net.3.weight' is not sharded. Each of the 2 data-parallel processes" in forgotten
    assert "without sharded parameters. Call fully_shard(model, " in nothing
    assert "parallelize_fn: returned a new Linear, expected the same Classifier object" in other


def test_fit_refuses_an_optimizer_created_before_the_model_is_sharded(tmp_path):
    net = nn.Linear(8, 3)
    given = {"training_step": lambda net, batch: net(batch[0]).sum(), "optimizer": torch.optim.SGD(net.parameters())}
    with pytest.raises(
        ConfigurationError, match="got an optimizer object together with ModelParallelStrategy.* Write optimizer=lambda"
    ):
        FabricLoop(strategy=fsdp(), **TWO).fit(net, train(), **given)
    assert list(tmp_path.iterdir()) == []


# Checkpoints of sharded models

FOLDER = "checkpoints/run/version_0"
SAVING = {"max_epochs": 2, "monitor": "val_loss", "save_every_n_steps": 4}


def save_and_resume(rank):
    full = trained(fsdp(), Adam, root="full", callbacks=[Snapshots("full", "snaps", (5, 9))], **SAVING)
    found = {}
    # Resume copies of the run from the end of an epoch and from the middle of the next epoch.
    for batches in (5, 9):
        root = copy_on_rank_0(rank, f"snaps/{batches}", f"from{batches}")
        again = trained(fsdp(), Adam, seed=5, root=root, resume="auto", **SAVING)
        found[f"{batches}"] = same(again[:3], full[:3]), again[3].global_step
    strategies = {"fsdp": fsdp, "ddp": lambda: "ddp", "whole": lambda: fsdp(save_distributed_checkpoint=False)}
    first = None
    # Resume copies of the finished FSDP2 run with FSDP2, with DDP, and with FSDP2 that saves unsharded checkpoints.
    for name, make in strategies.items():
        root = copy_on_rank_0(rank, "full", f"to_{name}")
        now = trained(make(), Adam, seed=5, root=root, resume="last", **{**SAVING, "max_epochs": 3})
        first = first or now
        found[name] = same(now[:3], first[:3]), now[3].global_step
    root = copy_on_rank_0(rank, "to_ddp", "back")
    back = trained(fsdp(), Adam, seed=5, root=root, resume="last", **{**SAVING, "max_epochs": 4})
    found["back"] = back[3].global_step
    torch.save(found, f"found{rank}.pt")


@needs_fsdp2
def test_a_run_resumes_exactly_from_sharded_checkpoints():
    """A DDP run and a single process can also load the sharded checkpoints."""
    codes, errors = run_processes(save_and_resume)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert {found[name] for name in ("5", "9")} == {(True, 10)}
        assert {found[name] for name in ("fsdp", "ddp", "whole")} == {(True, 15)}
        assert found["back"] == 20
    names = sorted(path.name for path in Path("full", FOLDER).iterdir() if path.name != ".lock")
    best = [name for name in names if name.startswith("best.ckpt.step=")]
    # Each checkpoint has one folder of shards, and no other folder is left.
    assert names == ["best.ckpt", *best, "last.ckpt", "last.ckpt.step=10"]
    assert len(best) == 1
    assert not list(Path("to_ddp", FOLDER).glob("last.ckpt.*"))

    last = Path("full", FOLDER, "last.ckpt")
    small = read_checkpoint(last)
    assert set(small["state_dict"].values()) == {"sharded"}
    verify_shards(last, small[SHARDS_KEY])
    model = Adam()
    (alone,) = FabricLoop(**with_files("full")).validate(model, val(), load="last", verbose=False)
    assert alone["val_loss"] > 0
    net = read_checkpoint(Path("to_ddp", FOLDER, "last.ckpt"))["state_dict"]
    assert {name: value.shape for name, value in net.items()} == {n: v.shape for n, v in model.state_dict().items()}

    # If a file of shards is missing, load="last" uses the previous checkpoint.
    shard = last.with_name("last.ckpt.step=10") / "__0_0.distcp"
    shard.unlink()
    with pytest.warns(UserWarning, match="is missing.* Using the previous checkpoint instead"):
        (loop := FabricLoop(**with_files("full"))).validate(model, val(), load="last", verbose=False)
    assert Path(loop.ckpt_path).name == "best.ckpt"


ALTERED = {
    "folder": {"folder": "../other", "files": {}},
    "file": {"folder": "last.ckpt.step=1", "files": {"../x": 1}},
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_checkpoint_that_names_files_outside_its_folder_is_refused(name):
    with pytest.raises(CheckpointError, match="refers to files outside of its folder"):
        verify_shards("last.ckpt", ALTERED[name])


def fill_the_disk(rank):
    """After the fourth step, make the second process fail when it writes a large file."""

    class Fails(Adam):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4096, 3))

        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 4 and self.global_rank == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    warnings.simplefilter("ignore")
    try:
        trained(fsdp(), Fails, root=".", save_every_n_steps=2)
    except CheckpointError as error:
        Path(f"error{rank}").write_text(str(error))


@needs_fsdp2
@pytest.mark.soak
def test_the_previous_checkpoint_is_kept_if_a_process_cannot_write_its_shards():
    codes, errors = run_processes(fill_the_disk)
    assert codes == [0, 0], errors
    for rank in range(2):
        assert "process 1: " in Path(f"error{rank}").read_text()
    checkpoint = read_checkpoint(f"{FOLDER}/last.ckpt")
    assert checkpoint["global_step"] == 4
    verify_shards(f"{FOLDER}/last.ckpt", checkpoint[SHARDS_KEY])
    assert [path.name for path in Path(FOLDER).glob("last.ckpt.*")] == ["last.ckpt.step=4"]

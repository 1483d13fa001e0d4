"""What DDP's ranks do not have alike (gloo, two and three ranks): an optimizer's state, buffers, weights, hooks.

Each is saved as it is, or said, or refused. The ranks write what they have found, and it is read here.
"""

import warnings
from contextlib import suppress

import pytest
import torch
from externally import externally
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from modules import Classifier, by_epoch, make_loader
from runs import Snapshots, copied, loud, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from fabric_template import FabricLoop, MiniLoop
from fabric_template.core.buckets import Buckets

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own use of what it has deprecated
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

HOME = "checkpoints/run/version_0"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Ranks are forked: they write beside each other, and have one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Net(Classifier):
    """With the optimizer that it is given."""

    def __init__(self, make):
        super().__init__(by_epoch)
        self.make = make
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def configure_optimizers(self):
        return self.make(self.parameters())


class Hooked(DDPStrategy):
    """With a communication hook."""

    def __init__(self, register):
        super().__init__()
        self.register = register

    def setup_module(self, module):
        ddp = super().setup_module(module)
        self.register(ddp)
        return ddp


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def zero(parameters, **words):
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01, **words)


def fit(root, make=adam, resume=None, seed=1, kind=Net, ranks=2, loop=FabricLoop, **words):
    """A run: its weights, and what it has warned of."""
    seed_everything(seed, verbose=False)
    model = kind(make)
    more = {} if loop is MiniLoop else {**loud(root), "save_every_n_steps": 2}
    words = {"strategy": "ddp", "devices": ranks, "max_epochs": 3, **more, **words}
    seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop(**words).fit(model, make_loader(40), make_loader(18, shuffle=False, seed=5), resume=resume)
    return dict(model.state_dict()), [str(one.message) for one in told]


def moments(root):
    """What a file says of the first optimizer."""
    return torch.load(f"{root}/{HOME}/last.ckpt", weights_only=True)["optimizer_states"][0]["state"]


class Fails(Callback):
    """Ends a run behind so many batches, on every rank."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.batches:
            raise ArithmeticError("on every rank")


def redundant(rank):
    found = {}
    plain, _ = fit("adam", callbacks=[Snapshots("adam", "snaps")])
    ways = {
        "file": {},
        "pieces": {"checkpoint": "sharded"},
        "behind": {"checkpoint": "sharded", "plugins": AsyncCheckpointIO()},
    }
    for name, words in ways.items():
        is_still = name != "behind"  # else threads write and remove files while they are copied
        weights, _ = fit(name, zero, callbacks=[Snapshots(name, f"{name}_snaps")] * is_still, **words)
        found[name] = same(weights, plain) and same(moments(name), moments("adam"))
        for batches in (5, 9) if name == "pieces" else (9,):  # an epoch's end, the middle of the next
            if is_still:
                root = copied(rank, f"{name}_snaps/{batches}", f"{name}{batches}")
            else:
                with suppress(ArithmeticError):
                    fit(root := f"{name}{batches}", zero, callbacks=[Fails(batches)], **words)
            weights, _ = fit(root, zero, resume="auto", seed=7, **words)
            found[name] &= same(weights, plain) and same(moments(root), moments("adam"))
    for batches, start, other in ((9, "snaps", zero), (5, "file_snaps", adam), (9, "pieces_snaps", adam)):
        root = copied(rank, f"{start}/{batches}", f"{start}{batches}other")
        weights, said = fit(root, other, resume="auto", seed=7)
        found["changed"] = found.get("changed", True) and same(weights, plain) and same(moments(root), moments("adam"))
        found["changed"] &= not any("other" in line for line in said)
    buckets, _ = fit("buckets", lambda parameters: zero(parameters, parameters_as_bucket_view=True))
    found["buckets"] = same(buckets, plain) and same(moments("buckets"), moments("adam"))
    words = {"loop": MiniLoop, "accelerator": "cpu", "name": "mini"}
    one, _ = fit("", default_root_dir="mini_adam", **words)
    two, _ = fit("", zero, default_root_dir="mini_zero", **words)
    found["mini"] = same(one, two)
    torch.save(found, f"found{rank}.pt")


def on_three(rank):
    ends = [fit(f"{name}/9", make, resume="auto", ranks=3)[0] for name, make in THREE.items()]
    torch.save({"same": same(*ends)}, f"three{rank}.pt")


THREE = {"snaps": adam, "file_snaps": zero}


def test_an_optimizer_with_a_part_on_each_rank():
    """ZeroRedundancyOptimizer: the weights and files of the optimizer in it, resumed, also by that or by three ranks."""
    codes, errors = externally(redundant)
    assert codes == [0, 0], errors
    for rank in range(2):
        found = torch.load(f"found{rank}.pt", weights_only=True)
        assert found == dict.fromkeys(("file", "pieces", "behind", "changed", "buckets", "mini"), True)
    codes, errors = externally(on_three, ranks=3)
    assert codes == [0, 0, 0], errors
    assert [torch.load(f"three{rank}.pt", weights_only=True) for rank in range(3)] == [{"same": True}] * 3


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def refused(rank):
    told = []
    overlapping = (lambda parameters: zero(parameters, overlap_with_ddp=True)), {}
    for make, words in (overlapping, (zero, {"strategy": ModelParallelStrategy(sharded, 2, 1)})):
        try:
            fit("refused", make, **words)
        except ValueError as error:
            told.append(str(error))
    torch.save(told, f"told{rank}.pt")


def test_one_that_would_train_nothing_is_refused():
    """By its name, before the first step."""
    codes, errors = externally(refused)
    assert codes == [0, 0], errors
    for rank in range(2):
        assert torch.load(f"told{rank}.pt", weights_only=True) == [
            "ZeroRedundancyOptimizer(overlap_with_ddp=True): a hook of DDP's trains then, and the steps that the loop takes do"
            " nothing: leave overlap_with_ddp out",
            "ZeroRedundancyOptimizer with strategy=ModelParallelStrategy(...), whose ranks have their part of each moment"
            " already: write the optimizer itself, such as torch.optim.Adam(model.parameters())",
        ]


def own_buffers(rank):
    def own():
        return DDPStrategy(broadcast_buffers=False)

    full, _ = fit("full", callbacks=[Snapshots("full", "snaps")], strategy=own())
    found = {}
    for batches in (3, 5, 9):
        weights, _ = fit(copied(rank, f"snaps/{batches}", f"from{batches}"), resume="auto", seed=7, strategy=own())
        found[batches] = same(weights, full)
    torch.save((full["net.1.running_mean"], found), f"found{rank}.pt")


def test_buffers_that_nobody_gives_the_others():
    """Each rank's BatchNorm goes on with its own statistics."""
    codes, errors = externally(own_buffers)
    assert codes == [0, 0], errors
    (mean, found), (other, other_found) = [torch.load(f"found{rank}.pt", weights_only=True) for rank in range(2)]
    assert not torch.equal(mean, other)
    assert found == other_found == {3: True, 5: True, 9: True}


def local_sgd(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4, warmup_steps=2))


def alone(ddp):
    state = post_localSGD_hook.PostLocalSGDState(None, torch.distributed.new_subgroups(1)[0], start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def compressed(ddp):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def apart(rank):
    local, more = {"make": local_sgd}, {"resume": "last", "max_epochs": 4}
    told = {"file": fit("file", strategy=Hooked(alone), **local)[1]}
    told["on"] = fit("file", strategy=Hooked(alone), **local, **more)[1]
    told["power"] = fit("power", strategy=Hooked(compressed))[1]
    told["power on"] = fit("power", strategy=Hooked(compressed), **more)[1]
    for name, more in {"pieces": {}, "behind": {"plugins": AsyncCheckpointIO()}}.items():
        try:
            fit(name, checkpoint="sharded", strategy=Hooked(alone), **local, **more)
        except Exception as error:
            told[name] = str(error)
    torch.save(told, f"told{rank}.pt")


def test_ranks_with_weights_of_their_own():
    """A checkpoint has rank zero's, a line says so; of parts none is saved. A hook's state begins anew, and a line says so."""
    codes, errors = externally(apart)
    assert codes == [0, 0], errors
    why = "(DDP keeps them alike; local SGD, some communication hooks and a backward beside DDP do not)"
    differ = (
        "rank 1 has other weights or moments than rank 0, whose checkpoints hold: after a resume all ranks have rank 0's, and"
        f" go on with other numbers than without it {why}"
    )
    hook = (
        "resume: DDP's communication hook {0}_hook has a {1}State, which no checkpoint holds: it begins anew, and this run"
        " does not go on to the bit"
    )
    told, others = [torch.load(f"told{rank}.pt", weights_only=True) for rank in range(2)]
    lines = {name: [line for line in told[name] if "rank" in line or "hook" in line] for name in told}
    assert lines["file"] == [differ]
    assert lines["on"] == [hook.format("post_localSGD", "PostLocalSGD"), differ]
    assert lines["power"] == []
    assert lines["power on"] == [hook.format("powerSGD", "PowerSGD")]
    assert others == {
        "file": [],
        "on": [],
        "power": [],
        "power on": [],
        "pieces": told["pieces"],
        "behind": told["behind"],
    }
    for name in ("pieces", "behind"):
        assert told[name] == (
            f"training has come to its end, but not everything is on disk: could not save '{name}/{HOME}/last.ckpt': rank 1 has"
            f" other weights or moments than rank 0, and each would write its part of them {why}: leave out"
            " checkpoint='sharded'; the old file is unchanged. Mend that, or save to another folder."
        )


class Bits(torch.Tensor):
    """Numbers that are computed from others, as moments in 8 bits are; gives none of them singly."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    def __reduce_ex__(self, protocol):
        return Bits, (self.codes,)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), words=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(function)


class InBits(torch.optim.SGD):
    """Keeps some."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("bits", Bits(torch.zeros(40, dtype=torch.uint8)))
        return loss


class Odd(Net):
    """One number out of a table, whose neighbour is five further."""

    def __init__(self, make):
        super().__init__(make)
        self.scale = nn.Parameter(torch.ones(3, 5)[:1, 0])

    def forward(self, x):
        return super().forward(x) * self.scale


def odd(rank):
    def bits(parameters):
        return InBits(parameters, lr=0.1)

    told = {"odd": fit("odd", kind=Odd)[1], "bits": fit("bits", bits, trusted=True)[1]}
    torch.save({name: [line for line in lines if "sav" in line] for name, lines in told.items()}, f"told{rank}.pt")


def test_what_cannot_be_looked_at_as_bytes():
    """It is saved like all else."""
    codes, errors = externally(odd)
    assert codes == [0, 0], errors
    assert [torch.load(f"told{rank}.pt", weights_only=True) for rank in range(2)] == [{"odd": [], "bits": []}] * 2
    files = [torch.load(f"{name}/{HOME}/last.ckpt", weights_only=False) for name in ("odd", "bits")]
    assert [file["global_step"] for file in files] == [15, 15]
    assert type(files[1]["optimizer_states"][0]["state"][0]["bits"]) is Bits


def test_buckets_of_what_is_no_ddp():
    """A strategy without a group of torch's goes on with a run, too."""
    buckets = Buckets(nn.Linear(2, 1), 1)
    buckets.begin({"batches_that_stepped": 3}, lambda loss: None)
    assert buckets.order == []

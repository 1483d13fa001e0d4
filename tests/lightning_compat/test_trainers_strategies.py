"""The names and objects of strategies that Trainer takes: Fabric's are made of them, or named in the refusal."""

from datetime import timedelta

import lightning.fabric.strategies as fabrics
import lightning.pytorch.strategies as trainers
import pytest
import torch
from fabric_template.trainer.strategies import as_fabrics
from lightning.pytorch.plugins import MixedPrecision
from modules import Classifier, assert_same_weights, make_loader, run_loop, run_trainer, sgd

from fabric_template import FabricLoop
from fabric_template.errors import ConfigurationError


@pytest.mark.parametrize("name", sorted(name for name in trainers.StrategyRegistry if name.startswith("ddp")))
def test_every_name_of_ddp(name):
    """With the words that it stands for."""
    expected = trainers.StrategyRegistry.get(name)
    found = FabricLoop(accelerator="cpu", devices=2, strategy=name).fabric.strategy
    assert type(found) is fabrics.DDPStrategy
    assert (found._start_method, found._ddp_kwargs.get("find_unused_parameters", False)) == (
        expected._start_method, expected._ddp_kwargs.get("find_unused_parameters", False),
    )  # fmt: skip


def test_an_object_keeps_its_words():
    words = {
        "process_group_backend": "gloo",
        "timeout": timedelta(seconds=7),
        "start_method": "fork",
        "static_graph": True,
    }
    found = as_fabrics(trainers.DDPStrategy(**words))
    assert type(found) is fabrics.DDPStrategy
    assert (found.process_group_backend, found._timeout, found._start_method) == ("gloo", timedelta(seconds=7), "fork")
    assert found._ddp_kwargs == {"static_graph": True}
    assert found.parallel_devices is found.cluster_environment is None


class Unused(Classifier):
    """Has a parameter that no loss depends on: DDP ends such a run unless it is told to look for them."""

    def __init__(self):
        super().__init__(sgd)
        self.idle = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("as_object", [False, True])
def test_the_same_numbers(monkeypatch, as_object):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make = lambda: (  # noqa: E731
        trainers.DDPStrategy(start_method="fork", find_unused_parameters=True)
        if as_object
        else "ddp_fork_find_unused_parameters_true"
    )
    words = {"devices": 2, "max_epochs": 1}
    _, expected = run_trainer(Unused, lambda: make_loader(16), strategy=make(), **words)
    _, found = run_loop(Unused, lambda: make_loader(16), strategy=make(), **words)
    assert_same_weights(expected, found)


def test_one_device():
    found = FabricLoop(accelerator="cpu", strategy=trainers.SingleDeviceStrategy("cpu")).fabric.strategy
    assert type(found) is fabrics.SingleDeviceStrategy
    assert found.root_device == torch.device("cpu")


class Mine(trainers.DDPStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (trainers.FSDPStrategy(),
         "strategy=FSDPStrategy: it is FSDP's first form, which torch replaces by fully_shard: write"
         " strategy=ModelParallelStrategy(parallelize_fn, data_parallel_size=...) of lightning.fabric.strategies, with"
         " fully_shard(model, mesh=mesh['data_parallel']) in parallelize_fn(model, mesh), or strategy='ddp'"),
        (Mine(),
         "strategy=Mine(...) is made for Trainer: expected one of lightning.fabric.strategies, or a name (ddp, ddp_spawn,"
         " ddp_notebook, ...)"),
        (trainers.DDPStrategy(ddp_comm_hook=print),
         "strategy=DDPStrategy(ddp_comm_hook=...): Fabric has no such word, leave it out"),
        (trainers.DDPStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")),
         "strategy=DDPStrategy(...) brings what is said here by precision=: write FabricLoop(precision=...)"),
    ],
    ids=["fsdp", "own", "hook", "precision"],
)  # fmt: skip
def test_what_would_be_lost_is_refused(strategy, words):
    with pytest.raises(ConfigurationError) as caught:
        FabricLoop(strategy=strategy)
    assert str(caught.value) == words

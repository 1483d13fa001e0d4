"""Trainer's strategies and precision plugins, by name or as objects, become Fabric's."""

from datetime import timedelta

import lightning.fabric.strategies as fabrics
import lightning.pytorch.strategies as trainers
import pytest
import torch
from lightning.fabric.plugins import precision as fabric_precision
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from modules import Classifier, assert_same_weights, make_loader, run_loop, run_trainer, sgd

from fabric_template import FabricLoop
from fabric_template.distributed.strategies import convert_plugins, convert_strategy
from fabric_template.errors import ConfigurationError


@pytest.mark.parametrize("name", sorted(name for name in trainers.StrategyRegistry if name.startswith("ddp")))
def test_every_name_of_ddp(name):
    expected = trainers.StrategyRegistry.get(name)
    found = FabricLoop(accelerator="cpu", devices=2, strategy=name).fabric.strategy
    assert type(found) is fabrics.DDPStrategy
    assert (found._start_method, found._ddp_kwargs.get("find_unused_parameters", False)) == (
        expected._start_method, expected._ddp_kwargs.get("find_unused_parameters", False),
    )  # fmt: skip


def test_an_object_keeps_its_arguments():
    arguments = {
        "process_group_backend": "gloo",
        "timeout": timedelta(seconds=7),
        "start_method": "fork",
        "static_graph": True,
    }
    found = convert_strategy(trainers.DDPStrategy(**arguments))
    assert type(found) is fabrics.DDPStrategy
    assert (found.process_group_backend, found._timeout, found._start_method) == ("gloo", timedelta(seconds=7), "fork")
    assert found._ddp_kwargs == {"static_graph": True}
    assert found.parallel_devices is found.cluster_environment is None


class Unused(Classifier):
    """Has a parameter that no loss depends on, for which DDP needs find_unused_parameters."""

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
    options = {"devices": 2, "max_epochs": 1}
    _, expected = run_trainer(Unused, lambda: make_loader(16), strategy=make(), **options)
    _, found = run_loop(Unused, lambda: make_loader(16), strategy=make(), **options)
    assert_same_weights(expected, found)


def test_one_device():
    found = FabricLoop(accelerator="cpu", strategy=trainers.SingleDeviceStrategy("cpu")).fabric.strategy
    assert type(found) is fabrics.SingleDeviceStrategy
    assert found.root_device == torch.device("cpu")


class Mine(trainers.DDPStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            trainers.FSDPStrategy(),
            "got FSDPStrategy, which FabricLoop does not run. Use strategy=ModelParallelStrategy",
        ),
        (Mine(), "got Mine, which is made for Trainer, expected a strategy of lightning.fabric.strategies or a name"),
        (trainers.DDPStrategy(ddp_comm_hook=print), r"got DDPStrategy\(ddp_comm_hook=...\).* Leave it out"),
        (
            trainers.DDPStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")),
            r"got DDPStrategy\(precision_plugin=...\).* the precision and plugins are options of FabricLoop",
        ),
    ],
    ids=["fsdp", "own", "hook", "precision"],
)
def test_strategies_without_equivalent_are_refused(strategy, message):
    with pytest.raises(ConfigurationError, match=message):
        FabricLoop(strategy=strategy)


def test_precision_plugins():
    (double,) = convert_plugins(DoublePrecision())
    assert type(double) is fabric_precision.DoublePrecision

    class Own(DoublePrecision):
        pass

    with pytest.raises(ConfigurationError, match="plugins: got Own, which is made for Trainer"):
        FabricLoop(plugins=[Own()])

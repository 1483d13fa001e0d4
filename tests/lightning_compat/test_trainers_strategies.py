"""Test that Trainer's strategies and precision plugins are converted to Fabric's."""

from datetime import timedelta

import lightning.fabric.strategies as fabrics
import lightning.pytorch.strategies as trainers
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from modules import Classifier, assert_parity, make_loader
from runs import val_loader

from fabric_template import FabricLoop
from fabric_template.distributed.strategies import convert_strategy
from fabric_template.errors import ConfigurationError


@pytest.mark.parametrize("name", sorted(name for name in trainers.StrategyRegistry if name.startswith("ddp")))
def test_each_ddp_strategy_name_selects_the_same_strategy_as_with_trainer(name):
    expected = trainers.StrategyRegistry.get(name)
    found = FabricLoop(accelerator="cpu", devices=2, strategy=name).fabric.strategy
    assert type(found) is fabrics.DDPStrategy
    settings = [(each._start_method, each._ddp_kwargs.get("find_unused_parameters")) for each in (expected, found)]
    assert settings[0] == settings[1]


def test_strategy_objects_of_trainer_are_converted_to_fabric_strategies():
    arguments = {"process_group_backend": "gloo", "timeout": timedelta(seconds=7), "start_method": "fork"}
    found = convert_strategy(trainers.DDPStrategy(**arguments, static_graph=True))
    assert type(found) is fabrics.DDPStrategy
    assert (found.process_group_backend, found._timeout, found._start_method) == ("gloo", timedelta(seconds=7), "fork")
    assert found._ddp_kwargs == {"static_graph": True}
    found = FabricLoop(accelerator="cpu", strategy=trainers.SingleDeviceStrategy("cpu")).fabric.strategy
    assert type(found) is fabrics.SingleDeviceStrategy
    assert found.root_device == torch.device("cpu")


class Mine(trainers.DDPStrategy):
    pass


class OwnPrecision(DoublePrecision):
    pass


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("deepspeed", "got deepspeed, which FabricLoop does not support. .* write strategy=ModelParallelStrategy"),
        (trainers.FSDPStrategy(), "got FSDPStrategy, which FabricLoop does not support"),
        (
            Mine(),
            "got a Trainer Mine that FabricLoop cannot convert. Write a strategy from lightning",
        ),
        (
            trainers.DDPStrategy(ddp_comm_hook=print),
            "got a Trainer DDPStrategy that FabricLoop cannot convert",
        ),
        (
            trainers.DDPStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")),
            "got a Trainer DDPStrategy that FabricLoop cannot convert",
        ),
    ],
    ids=["deepspeed", "fsdp", "own", "hook", "precision"],
)
def test_strategies_that_fabric_loop_does_not_support_are_refused(strategy, message):
    with pytest.raises(ConfigurationError, match=message):
        FabricLoop(strategy=strategy)


@pytest.mark.parametrize(
    "plugin",
    [Precision(), DoublePrecision(), MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true")],
    ids=["32", "64", "mixed", "half"],
)
def test_precision_plugins_give_the_same_weights_as_with_trainer(plugin):
    trainer, loop = assert_parity(
        Classifier, make_loader, val_loader, plugins=[plugin], max_epochs=2, gradient_clip_val=0.5
    )
    assert trainer.precision == loop.precision


def test_a_custom_precision_plugin_for_trainer_is_refused():
    with pytest.raises(ConfigurationError, match="plugins: got OwnPrecision, which only Trainer supports"):
        FabricLoop(plugins=[OwnPrecision()])

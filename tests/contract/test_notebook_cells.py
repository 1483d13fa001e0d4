"""Test what both loops print and restore if fit is called several times in one process, as in a notebook."""

import importlib
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from modules import assert_same_weights
from torch import nn

import fabric_template.mini
from fabric_template import FabricLoop, MiniLoop

LOOPS = {"MiniLoop": (MiniLoop, {}), "FabricLoop": (FabricLoop, {"enable_model_summary": False})}


@pytest.fixture
def notebook(monkeypatch):
    """Make the loops behave as in a notebook, where a progress bar is drawn after 0.2 seconds."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))


def fit(loop, action=None, at=None, seconds=0.0, **arguments):
    torch.manual_seed(0)
    net, steps = nn.Linear(3, 1), []

    def step(model, batch):
        steps.append(1)
        time.sleep(seconds)
        if len(steps) == at:
            action()
        return model(batch).square().mean()

    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train, val = torch.randn(5, 4, 3), torch.randn(2, 4, 3)
    steps_of_loop = {"training_step": step, "validation_step": lambda model, batch: model(batch).square().mean()}
    loop.fit(net, list(train), list(val), optimizer=optimizer, **steps_of_loop, **arguments)
    return net


def divide_by_zero():
    raise ZeroDivisionError


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.usefixtures("notebook")
def test_a_failed_run_leaves_no_progress_bar_in_the_output_of_the_next_run(capsys):
    # Keep a reference to the error, as a notebook does. Its frames refer to the progress bar.
    with pytest.raises(ZeroDivisionError) as error:
        fit(MiniLoop(max_epochs=1, accelerator="cpu"), divide_by_zero, at=4, seconds=0.15)
    capsys.readouterr()
    fit(MiniLoop(max_epochs=1, accelerator="cpu"), seconds=0.15)
    output = capsys.readouterr().out
    assert error.type is ZeroDivisionError
    assert "epoch 0:  40%" in output
    # A second bar would be drawn on a line of its own.
    assert output.count("\n") == 2
    assert "\x1b" not in output


@pytest.mark.usefixtures("notebook")
def test_ctrl_c_removes_the_progress_bar_and_prints_what_to_do(capsys):
    fit(MiniLoop(max_epochs=3, accelerator="cpu"), interrupt, at=4, seconds=0.15)
    bar, message = capsys.readouterr().out.rsplit("\r", 1)
    assert "epoch 0:  40%" in bar
    assert message == (
        "Ctrl-C: training stops in epoch 0, after step 3. No checkpoint was saved."
        " To start again, create the model and the optimizer again.\n"
    )


@pytest.mark.parametrize("is_notebook", [True, False])
def test_a_row_printed_within_an_epoch_does_not_show_the_progress_bar_too_early(is_notebook, capsys, request):
    if is_notebook:
        request.getfixturevalue("notebook")
    seconds = 0.0 if is_notebook else 0.1
    fit(MiniLoop(max_epochs=2, accelerator="cpu", validate_every_n_steps=2), seconds=seconds)
    output = capsys.readouterr()
    assert "epoch 0:" not in output.out + output.err
    assert output.out.count("\n") == 6


def test_an_existing_mini_loop_resumes_after_its_module_is_reloaded(tmp_path, monkeypatch, recwarn):
    expected = fit(MiniLoop(max_epochs=3, accelerator="cpu", name="whole"))
    Path("edited_loop.py").write_bytes(Path(fabric_template.mini.__file__).read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("edited_loop")
    loop = module.MiniLoop(max_epochs=1, accelerator="cpu")
    importlib.reload(module)
    fit(loop)
    loop.max_epochs = 3
    found = fit(loop, resume="last")
    assert loop.global_step == 15
    assert_same_weights(expected, found)
    assert not [str(warning.message) for warning in recwarn if "checkpoint:" in str(warning.message)]


@pytest.mark.parametrize("kind", LOOPS)
def test_an_optimizer_of_an_earlier_model_is_refused_with_the_reason(kind):
    loop_class, options = LOOPS[kind]
    loop = loop_class(max_epochs=1, accelerator="cpu", **options)
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer: got .*parameters (of|from) another model"):
        loop.fit(nn.Linear(3, 1), [torch.ones(1, 3)], optimizer=optimizer, training_step=lambda net, batch: 0)


@pytest.mark.parametrize("kind", LOOPS)
def test_load_best_uses_the_last_run_of_the_same_loop_even_if_another_run_is_newer(kind):
    loop_class, options = LOOPS[kind]
    options = {"accelerator": "cpu", "monitor": "val_loss", **options}
    first, second = loop_class(max_epochs=1, **options), loop_class(max_epochs=3, **options)
    expected, newest = fit(first), fit(second)
    for loop, weights in ((first, expected), (second, newest), (loop_class(**options), newest)):
        net = nn.Linear(3, 1)
        loop.validate(net, [torch.ones(1, 3)], validation_step=lambda net, batch: net(batch).mean(), load="best")
        assert_same_weights(weights, net)

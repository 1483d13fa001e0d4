"""A resume warns of another batch size or optimizer class, and refuses an optimizer that cannot take the state."""

import warnings

import pytest
import torch
from modules import Classifier, make_loader
from runs import fit
from torch.optim import SGD, Adam, Adamax, AdamW, RMSprop

from fabric_template import CheckpointError


def train(**words):
    return lambda: make_loader(**{"num": 24, **words})


def of_kind(kind):
    return lambda: Classifier(lambda module: kind(module.parameters(), lr=0.01))


def said(tmp_path, before, now):
    """The lines of a resume of a run of one epoch."""
    fit(tmp_path, **{"train": train(), "max_epochs": 1, **before})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, **{"train": train(), "max_epochs": 2, "resume": "last", **now})
    return [str(warning.message) for warning in caught if "other than in the run" in str(warning.message)]


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {"train": train(batch_size=8)}, "batches 3 (was 6); batch_size 8 (was 4)"),
        ({"make_module": of_kind(AdamW)}, {"make_module": of_kind(Adam)}, "optimizers Adam (was AdamW)"),
    ],
    ids=["batch size", "optimizer class"],
)
def test_what_differs_is_named(tmp_path, before, now, differs):
    assert said(tmp_path, before, now) == [
        f"resume: other than in the run that goes on: {differs}. It goes on with what it has now, and not with the numbers"
        " that it would have had"
    ]


@pytest.mark.parametrize(
    "now",
    [{}, {"train": train(num_workers=1)}, {"max_epochs": 3}, {"val": train()}, {"name": "run", "log_every_n_steps": 1}],
    ids=["same", "workers", "epochs", "validation", "words"],
)
def test_what_is_no_difference(tmp_path, now):
    assert said(tmp_path, {}, now) == []


class Mine(Adam):
    pass


def test_another_optimizer_is_refused(tmp_path):
    """... with both kinds, also where its state would fit at first sight; a class derived from it is not another one."""
    before = {"make_module": of_kind(Adam)}
    for kind in (SGD, Adamax, RMSprop):
        with pytest.raises(CheckpointError) as error:
            said(tmp_path / kind.__name__, before, {"make_module": of_kind(kind)})
        path = tmp_path / kind.__name__ / "checkpoints/run/version_0/last.ckpt"
        assert str(error.value) == (
            f"resume='{path}': the file is of a run with the optimizer Adam, this one has {kind.__name__}: go on with Adam,"
            " or write load= in the place of resume= to start a new run from the weights"
        )
    assert "optimizers Mine (was Adam)" in said(tmp_path / "derived", before, {"make_module": of_kind(Mine)})[0]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop])
def test_the_same_optimizer_is_taken(tmp_path, kind):
    """Also one that has no word "differentiable", which torch adds to its defaults as it loads a state."""
    begun, _, _ = fit(tmp_path, of_kind(kind), train(), max_epochs=1)
    loop, _, _ = fit(tmp_path, of_kind(kind), train(), max_epochs=2, resume="last")
    assert loop.current_epoch == 2
    assert loop.optimizers[0].defaults.keys() == begun.optimizers[0].defaults.keys()  # of groups that are added later

"""What a run is made of stands in its checkpoints; what is other at a resume is named in one line, or refused."""

import warnings

import pytest
import torch
from modules import Classifier, by_epoch, by_step, make_loader, run_trainer
from runs import fit
from torch.optim import SGD, Adam, Adamax, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

from fabric_template import CheckpointError, TensorLoader
from fabric_template.files import fingerprint


def train(**words):
    return lambda: make_loader(**{"num": 24, **words})


def of_kind(kind, scheduler=None):
    def make(module):
        optimizer = kind(module.parameters(), lr=0.01)
        return [optimizer], [scheduler(optimizer)] if scheduler else []

    return lambda: Classifier(make)


def tensors():
    return TensorLoader(torch.ones(24, 8), torch.zeros(24).long(), batch_size=4)


def said(tmp_path, before, now):
    """The lines of a resume of a run of one epoch."""
    fit(tmp_path, **{"train": train(), "max_epochs": 1, **before})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, **{"train": train(), "max_epochs": 2, "resume": "last", **now})
    return [str(warning.message) for warning in caught if "other than in the run" in str(warning.message)]


SIZED = "DataLoader(TensorDataset, RandomSampler)"


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {"train": train(batch_size=8)}, "batches 3 (was 6); batch_size 8 (was 4)"),
        ({}, {"train": train(num=32)}, "batches 8 (was 6); samples 32 (was 24)"),
        ({}, {"train": train(shuffle=False)}, f"loader DataLoader(TensorDataset, SequentialSampler) (was {SIZED})"),
        ({"train": tensors}, {}, f"loader {SIZED} (was TensorLoader())"),
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches 2 (was 1)"),
        ({}, {"precision": "bf16-mixed"}, "precision bf16-mixed (was 32-true)"),
        ({"make_module": lambda: Classifier(by_epoch)}, {"make_module": of_kind(Adam)},
         "schedulers none (was CosineAnnealingLR)"),
        ({"make_module": lambda: Classifier(by_step)},
         {"make_module": of_kind(SGD, lambda o: CosineAnnealingLR(o, 3))}, "schedulers CosineAnnealingLR (was StepLR)"),
        ({"make_module": of_kind(AdamW)}, {"make_module": of_kind(Adam)}, "optimizers Adam (was AdamW)"),
    ],
    ids=["batch_size", "samples", "sampler", "kind", "accumulation", "precision", "no_scheduler", "scheduler",
         "kin"],
)  # fmt: skip
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


def test_versions(tmp_path, monkeypatch):
    now = fingerprint.VERSIONS["torch"].split(".")
    for version, lines in ((f"{now[0]}.{now[1]}.77", []), ("1.13.9+cpu", [f"torch {now[0]}.{now[1]} (was 1.13)"])):
        root = tmp_path / f"from_{version}"
        with monkeypatch.context() as patch:
            patch.setitem(fingerprint.VERSIONS, "torch", version)
            fit(root, train=train(), max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(root, train=train(), max_epochs=2, resume="last")
        found = [str(warning.message) for warning in caught if "other than" in str(warning.message)]
        assert [line.split(": ")[2].split(". It")[0] for line in found] == lines


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


def test_another_optimizer_than_trainers_file_has(tmp_path):
    trainer, _ = run_trainer(of_kind(Adam), train(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"another optimizer than SGD \(no dampening, momentum in it\): go on"):
        fit(tmp_path, of_kind(SGD), train(), resume=tmp_path / "a.ckpt", max_epochs=2)


def test_it_is_of_plain_values(tmp_path):
    fit(tmp_path, lambda: Classifier(by_step), train(), max_epochs=1)
    found = torch.load(tmp_path / "checkpoints/run/version_0/last.ckpt", weights_only=True)["fabric_template"]
    assert list(found["fingerprint"]["versions"]) == ["python", "torch", "lightning", "fabric_template"]
    settings = found["fingerprint"]["settings"]
    assert {name: settings[name] for name in ("SGD.lr", "SGD.momentum", "StepLR.gamma", "StepLR.step_size")} == {
        "SGD.lr": "0.1", "SGD.momentum": "0.9", "StepLR.gamma": "0.7", "StepLR.step_size": "3",
    }  # fmt: skip
    assert {**found["fingerprint"], "versions": None, "settings": None} == {
        "accumulate_grad_batches": 1,
        "precision": "32-true",
        "optimizers": [["SGD"]],
        "schedulers": ["StepLR"],
        "settings": None,
        "processes": 1,
        "versions": None,
        "batches": 6,
        "data": [{"loader": SIZED, "samples": 24, "batch_size": 4}],
    }


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop])
def test_the_same_optimizer_is_taken(tmp_path, kind):
    """Also one that has no word "differentiable", which torch adds to its defaults as it loads a state."""
    begun, _, _ = fit(tmp_path, of_kind(kind), train(), max_epochs=1)
    loop, _, _ = fit(tmp_path, of_kind(kind), train(), max_epochs=2, resume="last")
    assert loop.current_epoch == 2
    assert loop.optimizers[0].defaults.keys() == begun.optimizers[0].defaults.keys()  # of groups that are added later

"""What a file holds for an optimizer, a scheduler or a callback fits what these hold by themselves, or one line says so."""

import copy
import io
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from modules import Classifier
from runs import fit, same, tree, val_loader
from torch.optim import lr_scheduler

from fabric_template.files.fitting import put_into_optimizer, put_into_scheduler
from fabric_template.files.reading import CheckpointError, DamagedError, load_header, read_checkpoint

OPTIMIZERS = [
    name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name not in ("Optimizer", "LBFGS")
]
SCHEDULERS = {
    "StepLR": {"step_size": 3}, "MultiStepLR": {"milestones": [3, 5]}, "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2}, "LambdaLR": {"lr_lambda": lambda epoch: 0.9}, "ReduceLROnPlateau": {},
    "LinearLR": {}, "PolynomialLR": {},
}  # fmt: skip


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1), torch.nn.Conv1d(1, 3, 2)
    )


def plain(state):
    """What comes back of it from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def optimizer_of(name):
    parameters = [p for p in net().parameters() if name != "Muon" or p.dim() == 2]
    optimizer = getattr(torch.optim, name)(parameters, **({"momentum": 0.9} if name == "SGD" else {}))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter).to_sparse() if name == "SparseAdam" else torch.ones_like(parameter)
    return optimizer


def odd(value):
    """Tensors of its shape that no step can write to."""
    if not isinstance(value, torch.Tensor):
        return []
    return [value.to(torch.complex64), *([value.flatten()[:1].expand(value.shape)] if value.numel() > 1 else [])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_its_own_state_and_no_other(name):
    optimizer = optimizer_of(name)
    optimizer.step()
    state = plain(optimizer.state_dict())
    put_into_optimizer(other := optimizer_of(name), copy.deepcopy(state), "a.ckpt")
    assert same(other.state_dict(), state)
    if name == "SparseAdam":  # which cannot be tried on a small parameter
        return
    first = next(iter(state["state"]))
    for key, value in state["state"][first].items():
        for instead in [None, "x", torch.zeros(9, 9), *odd(value)] if value is not None else []:
            altered = copy.deepcopy(state)
            altered["state"][first][key] = instead
            if instead is None:
                if len(altered["state"][first]) == 1:  # nothing at all: it begins anew
                    continue
                del altered["state"][first][key]
            with pytest.raises(
                CheckpointError, match=f"^'a.ckpt' does not fit this run: {name} cannot take what it holds"
            ):
                put_into_optimizer(optimizer_of(name), altered, "a.ckpt")
    for key in state["param_groups"][0]:
        altered = copy.deepcopy(state)
        altered["param_groups"][0][key] = {"a": 1}
        if isinstance(state["param_groups"][0][key], int | float | tuple | list):
            with pytest.raises(
                CheckpointError, match=f"^'a.ckpt' does not fit this run: {name} cannot take what it holds"
            ):
                put_into_optimizer(optimizer_of(name), altered, "a.ckpt")


@pytest.mark.parametrize("rates", [(torch.tensor(0.1), 0.2), (0.1, torch.tensor(0.2))])
def test_a_rate_is_a_number_or_a_tensor_of_one(rates):
    """StochasticWeightAveraging puts a number where a rate in a tensor had been noted, and the file holds that."""
    made, noted = rates
    optimizer, other = (torch.optim.Adam(net().parameters(), lr=made, foreach=False) for _ in range(2))
    for one in (optimizer, other):
        one.param_groups[0]["initial_lr"] = made
    optimizer.param_groups[0]["initial_lr"] = noted
    put_into_optimizer(other, plain(optimizer.state_dict()), "a.ckpt")
    assert other.param_groups[0]["initial_lr"] == noted
    scheduler, again = (lr_scheduler.ReduceLROnPlateau(one) for one in (optimizer, other))
    scheduler._last_lr = [noted]  # as where somebody has put it into the group by hand
    put_into_scheduler(again, plain(scheduler.state_dict()), "a.ckpt")
    assert again._last_lr == [noted]
    for wrong in ("x", None, torch.zeros(2)):
        optimizer.param_groups[0]["initial_lr"] = wrong
        with pytest.raises(CheckpointError, match=r"initial_lr is .*, expected a number, or a tensor of one"):
            put_into_optimizer(other, plain(optimizer.state_dict()), "a.ckpt")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_its_own_state_and_no_method(name):
    def make():
        optimizer = optimizer_of("SGD")
        return optimizer, getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])

    optimizer, scheduler = make()
    for _ in range(7):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = plain(scheduler.state_dict())
    _, other = make()
    put_into_scheduler(other, copy.deepcopy(state), "a.ckpt")
    assert same(other.state_dict(), scheduler.state_dict())
    for wrong in (
        {"last_epoch": "x"},
        {"last_epoch": None},
        {"last_epoch": float("inf")},
        {"_last_lr": [0.1, 0.1]},
        {"step": 3},
        {"optimizer": "x"},
    ):
        _, other = make()
        with pytest.raises(CheckpointError, match=f"^'a.ckpt' does not fit this run: {name} cannot take what it holds"):
            put_into_scheduler(other, {**state, **wrong}, "a.ckpt")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_modelcheckpoint_removes_nothing_outside_of_its_folder(tmp_path):
    def callbacks():
        return [
            EarlyStopping("val_loss"),
            ModelCheckpoint(tmp_path / "kept", monitor="val_loss", save_top_k=1, save_last=True),
        ]

    fit(tmp_path, val=val_loader, max_epochs=1, callbacks=callbacks())
    path, secret = tmp_path / "kept/last.ckpt", tmp_path / "secret.ckpt"
    secret.write_text("kept")
    checkpoint = torch.load(path)
    stopping, saving = checkpoint["callbacks"]
    (best,) = checkpoint["callbacks"][saving]["best_k_models"]

    def refused(key, complaint, **words):
        altered = copy.deepcopy(checkpoint)
        altered["callbacks"][key] |= words
        torch.save(altered, tmp_path / "altered.ckpt")
        before = tree(tmp_path)
        with pytest.raises(CheckpointError) as caught:
            fit(tmp_path, val=val_loader, max_epochs=3, callbacks=callbacks(), resume=tmp_path / "altered.ckpt")
        assert f"altered.ckpt' does not fit this run: {complaint}" in str(caught.value)
        assert [name for name in tree(tmp_path) if "hparams" not in name] == [n for n in before if "hparams" not in n]

    away = f"{tmp_path}/kept/../secret.ckpt"
    models = {best: torch.tensor(1e-9), away: torch.tensor(9.0)}
    words = f"ModelCheckpoint cannot take what it holds (its files[1] is {away[:60]!r}, expected a file in "
    refused(saving, words, best_k_models=models, kth_best_model_path=away)
    refused(saving, words, last_model_path=away)
    words = "ModelCheckpoint cannot take what it holds (its kth_best_model_path is "
    refused(saving, words, kth_best_model_path=f"{tmp_path}/kept/notes.ckpt")
    refused(
        stopping,
        "EarlyStopping cannot take what it holds (it.wait_count is 'x', expected a finite number,",
        wait_count="x",
    )
    fit(tmp_path, val=val_loader, max_epochs=3, callbacks=callbacks(), resume=path)


def test_earlystopping_that_has_stopped_takes_what_it_was_before(tmp_path):
    """Why it stopped is a text by then, and was None in the best epoch's file."""
    stops = EarlyStopping("val_loss", patience=1, stopping_threshold=1e9)
    loop, module, _ = fit(tmp_path, val=val_loader, max_epochs=3, callbacks=[stops], monitor="val_loss")
    assert stops.stopping_reason_message.startswith("Stopping threshold reached: val_loss")
    stops.stopping_reason_message = "of a later epoch"
    path = loop.checkpoint_path("best")
    file = read_checkpoint(path)
    (key,) = file["callbacks"]
    file["callbacks"][key]["stopping_reason_message"] = None
    torch.save(file, path)
    (found,) = loop.validate(module, val_loader(), load="best", verbose=False)
    assert (stops.stopping_reason_message, list(found)) == (None, ["val_loss", "val_acc"])


def test_weights_that_are_none(tmp_path):
    fit(tmp_path, max_epochs=1)
    path = tmp_path / "checkpoints/run/version_0/last.ckpt"
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["net.0.weight"] = "x"
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match=r"'net.0.weight' has no shape in the file, \(16, 8\) in the model"):
        fit(tmp_path, Classifier, max_epochs=2, resume=path)


# ---- what reading takes


def archive_of(path, *more):
    """A file of a tensor, with more parts before or after its own."""
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = [(name, archive.read(name)) for name in archive.namelist()]
    pickled = parts[0][1]
    parts = [
        *((name, pickled) for name in more if name < "b"),
        *parts,
        *((name, pickled) for name in more if name > "b"),
    ]
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        for name, content in parts:
            archive.writestr(zipfile.ZipInfo(name), content)


@pytest.mark.parametrize("more", ["a/data.pkl", "x/data.pkl", "archive/DATA.pkl", "data.pkl", "x/y/data.pkl", "a"])
def test_one_folder_in_the_archive(tmp_path, more):
    archive_of(tmp_path / "archive.ckpt")
    assert same(read_checkpoint(tmp_path / "archive.ckpt"), {"w": torch.ones(2)})
    archive_of(tmp_path / "archive.ckpt", more)
    for read in (read_checkpoint, load_header):
        with pytest.raises(DamagedError, match="its directory is not one that torch.save writes"):
            read(tmp_path / "archive.ckpt")


def test_a_pickle_further_down_is_not_read(tmp_path):
    archive_of(tmp_path / "archive.ckpt", "archive/a/data.pkl")
    assert same(read_checkpoint(tmp_path / "archive.ckpt"), {"w": torch.ones(2)})


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(10**9), torch.zeros(9).as_strided((10**8,), (0,)), torch.zeros(9).as_strided((9, 10**8), (1, 0))],
    ids=["expanded", "stride", "rows"],
)  # fmt: skip
def test_a_tensor_larger_than_its_file(tmp_path, tensor):
    path = Path(tmp_path, "a.ckpt")
    torch.save({"w": tensor}, path)
    with pytest.raises(
        CheckpointError, match=r"holds tensors of \d+ MB in 0.\d MB, as their elements share memory \(expand\); refused"
    ):
        read_checkpoint(path)


def test_honest_views_are_read(tmp_path):
    base = torch.arange(2.0**20)
    shared = {f"layer{i}": base for i in range(40)}  # tied: 160 MB in 4
    saved = {**shared, "t": base.reshape(1024, 1024).t(), "part": base[3:9:2], "many": torch.ones(3).expand(1000, 3)}
    torch.save(saved, tmp_path / "a.ckpt")
    assert same(read_checkpoint(tmp_path / "a.ckpt"), saved)

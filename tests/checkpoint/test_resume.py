"""Resume: 2 + 2 epochs are 4, and killed anywhere is never interrupted, bit for bit."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from modules import Classifier, make_data, make_loader
from runs import Plain, Snapshots, assert_same_end, fit, logs_of, same, tree, val_loader, weights_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from fabric_template import TensorLoader, read_logs


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def by_step(module):
    optimizer = momentum(module)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=60)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_epoch(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, 4)]


def every_third_step(module):
    optimizer = momentum(module)
    scheduler = StepLR(optimizer, 1, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 3}}


def plateau(module):
    optimizer = momentum(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def plateau_strict_off(module):
    """Nothing to follow in the first epoch is no error; Lightning warns."""
    found = plateau(module)
    scheduler = {"scheduler": found["lr_scheduler"], "strict": False, "monitor": "val_loss"}
    return {"optimizer": found["optimizer"], "lr_scheduler": scheduler}


def plateau_by_step(module):
    optimizer = momentum(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.7, patience=1, threshold=10.0)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "train_loss"},
    }


def classifier(optimizers=None):
    return lambda: Classifier(optimizers, on_step=True)


def tensor_loader():
    data = make_data(40)
    return TensorLoader(*data.tensors, batch_size=4, shuffle=True)


def tensor_loader_with_generator():
    return TensorLoader(*make_data(40).tensors, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7))


def loader_with_generator():
    return make_loader(generator=torch.Generator().manual_seed(7))


def sampler_with_generator(workers=0):
    data = make_data(40)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(7))
    return DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)


def weighted_sampler():
    data = make_data(40)
    return DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(torch.arange(40) + 1.0, 40))


def two_and_two(tmp_path, make_module=Classifier, train=None, val=val_loader, given=None, **words):
    """Train 4 epochs, and 2 + 2 with another seed in between; both must end the same, files included."""
    words = {"log_every_n_steps": 3, **words}
    whole = fit(tmp_path / "whole", make_module, train, val, given=given, max_epochs=4, **words)
    fit(tmp_path / "parts", make_module, train, val, given=given, max_epochs=2, **words)
    resumed = fit(
        tmp_path / "parts", make_module, train, val, seed=99, given=given, resume="last", max_epochs=4, **words
    )
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "whole") == logs_of(tmp_path / "parts")
    assert tree(tmp_path / "whole") == tree(tmp_path / "parts")
    return whole, resumed


# ---- 2 + 2 = 4


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("optimizers", [by_step, plateau])
def test_whole_epochs(tmp_path, optimizers, workers, accumulate):
    train = lambda: make_loader(num_workers=workers)  # noqa: E731
    two_and_two(tmp_path, classifier(optimizers), train, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("optimizers", [momentum, by_epoch, every_third_step, plateau_by_step])
def test_other_schedulers(tmp_path, optimizers):
    two_and_two(tmp_path, classifier(optimizers), accumulate_grad_batches=3)


@pytest.mark.parametrize(
    "train",
    [
        tensor_loader,
        tensor_loader_with_generator,
        loader_with_generator,
        sampler_with_generator,
        lambda: sampler_with_generator(workers=2),
        weighted_sampler,
        lambda: make_loader(num_workers=2, persistent_workers=True),
        lambda: [make_loader(), make_loader(20, seed=3)],
    ],
    ids=[
        "TensorLoader", "TensorLoader+generator", "generator", "sampler", "sampler+workers", "weighted", "persistent",
        "two_loaders",
    ],
)  # fmt: skip
def test_loaders(tmp_path, train, request):
    if "two_loaders" in request.node.name:

        class Both(Classifier):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch[0], batch_idx) + super().training_step(batch[1], batch_idx)

        two_and_two(tmp_path, lambda: Both(by_step), train)
    else:
        two_and_two(tmp_path, classifier(by_step), train)


@pytest.mark.parametrize("val", [None, lambda: make_loader(18, seed=5, generator=torch.Generator().manual_seed(2))])
def test_validation_loaders(tmp_path, val):
    """No validation at all; and a shuffled one whose generator goes on, too."""
    two_and_two(tmp_path, val=val, num_sanity_val_steps=2)


def test_plain_object(tmp_path):
    two_and_two(tmp_path, Plain)


def test_step_functions(tmp_path):
    def step(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    make = lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))  # noqa: E731
    given = lambda net: {"optimizer": momentum(net), "training_step": step, "validation_step": step}  # noqa: E731
    two_and_two(tmp_path, make, given=given)


@pytest.mark.parametrize(
    "words",
    [
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"limit_train_batches": 5, "limit_val_batches": 2},
        {"gradient_clip_val": 0.1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"monitor": "val_loss", "save_top_k": 2},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_options(tmp_path, words):
    two_and_two(tmp_path, classifier(by_step), **words)


class MadeIn(Callback):
    """Notes in which epoch the loaders were made that are made anew, as a file in the middle of an epoch has it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.current_epoch == 1:
            trainer.save_checkpoint("middle.ckpt")
            self.found = torch.load("middle.ckpt")["fabric_template"]["loaders_epoch"]


def test_loaders_that_a_resume_makes_early_are_due_as_before(tmp_path):
    """The validation of epoch 1 makes its loader when it comes, in a run that goes on from epoch 0, too."""
    words = {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    for epochs, resume in ((1, None), (2, "last")):
        notes = MadeIn()
        fit(tmp_path / "two", resume=resume, val=val_loader, max_epochs=epochs, callbacks=[notes], **words)
    fit(tmp_path / "whole", val=val_loader, max_epochs=2, callbacks=[whole := MadeIn()], **words)
    assert (notes.found, whole.found) == ({"train": 1}, {"train": 1})


class Noisy(Classifier):
    """Draws from every library's random numbers, in hooks, too."""

    def on_train_epoch_start(self):
        random.random(), np.random.rand(), torch.rand(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("noise", np.random.rand() + random.random(), on_step=True, on_epoch=True)
        return loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def test_random_numbers_of_every_library(tmp_path):
    two_and_two(tmp_path, Noisy)


# ---- killed in the middle of an epoch


def test_killed_at_every_batch(tmp_path):
    """2 epochs of 6 batches, killed before each batch but the first, and resumed."""
    kill_everywhere(tmp_path, classifier(by_step), lambda: make_loader(24))


ACROSS = {"val_check_interval": 4, "check_val_every_n_epoch": None}


@pytest.mark.parametrize(
    ("make", "train", "words", "where"),
    [
        (Noisy, lambda: make_loader(24), {}, range(1, 12)),
        (Plain, lambda: make_loader(24), {}, (1, 4, 6, 11)),
        (classifier(plateau), lambda: make_loader(24, num_workers=2), {}, (1, 5, 8)),
        (classifier(by_step), lambda: make_loader(24, num_workers=2, persistent_workers=True), {}, (4, 8)),
        (classifier(), lambda: sampler_with_generator(), {"limit_train_batches": 6}, (2, 6, 9)),
        (classifier(), tensor_loader_with_generator, {"limit_train_batches": 6}, (2, 6, 9)),
        (classifier(by_epoch), lambda: make_loader(24), {"accumulate_grad_batches": 2}, range(1, 12)),
        (classifier(by_epoch), lambda: make_loader(24), {"accumulate_grad_batches": 4}, range(1, 12)),
        (classifier(), lambda: make_loader(24), {"val_check_interval": 0.5}, (2, 3, 4, 6, 7, 9, 11)),
        (classifier(), lambda: make_loader(24), ACROSS, range(1, 12)),
        (Plain, lambda: make_loader(24), {"val_check_interval": 4}, (3, 4, 5, 7, 11)),
        (classifier(plateau_by_step), lambda: make_loader(24), {"save_every_n_steps": 2}, range(1, 12)),
    ],
    ids=[
        "random_libraries", "plain", "workers", "persistent", "sampler", "TensorLoader", "accumulate_2", "accumulate_4",
        "validation_inside", "validation_across", "plain_validation_inside", "every_2_steps",
    ],
)  # fmt: skip
def test_killed(tmp_path, make, train, words, where):
    kill_everywhere(tmp_path, make, train, where, **words)


def kill_everywhere(tmp_path, make, train, where=range(1, 12), **words):
    words = {"max_epochs": 2, "log_every_n_steps": 2, "save_every_n_steps": 1, **words}
    whole_root, copies = tmp_path / "whole", tmp_path / "killed"
    whole = fit(whole_root, make, train, val_loader, callbacks=[Snapshots(whole_root, copies)], **words)
    for batches in where:
        root = copies / str(batches)
        has_checkpoint = (root / "checkpoints/run/version_0/last.ckpt").exists()
        if not has_checkpoint:  # killed in the first window
            assert batches < max(words.get("accumulate_grad_batches", 1), words["save_every_n_steps"])
            continue
        resumed = fit(root, make, train, val_loader, seed=99, resume="last", **words)
        assert_same_end(whole, resumed)
        assert logs_of(root) == logs_of(whole_root), f"killed after {batches} batches"
        assert tree(root) == tree(whole_root)


def test_mid_epoch_position(tmp_path):
    """The checkpoint says where it was written; the resumed run begins at the next batch and no hook fires twice."""
    seen = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(f"epoch {trainer.current_epoch}")

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(batch_idx)
            if batch_idx == 4 and not tmp_path.joinpath("copy").exists():
                shutil.copytree(tmp_path / "run", tmp_path / "copy")

    words = {"max_epochs": 1, "save_every_n_steps": 2, "callbacks": [Watch()]}
    fit(tmp_path / "run", train=lambda: make_loader(24), **words)
    assert seen == ["epoch 0", 0, 1, 2, 3, 4, 5]
    seen.clear()
    loop, _, history = fit(tmp_path / "copy", train=lambda: make_loader(24), resume="last", **words)
    assert seen == [4, 5]
    assert (loop.current_epoch, loop.global_step, len(history)) == (1, 6, 1)


def test_killed_with_torchmetrics(tmp_path):
    """A torchmetrics object goes on with what it had seen of the epoch."""
    import torchmetrics

    class Measured(Classifier):
        def __init__(self):
            super().__init__(by_step)
            self.acc = torchmetrics.Accuracy("multiclass", num_classes=3)

        def training_step(self, batch, batch_idx):
            self.acc(self(batch[0]), batch[1])
            self.log("acc", self.acc, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    kill_everywhere(tmp_path, Measured, lambda: make_loader(24), (1, 4, 9))


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric val_loss which is not available")
def test_plateau_where_few_epochs_validate(tmp_path):
    """The scheduler of an epoch without validation reads the last one's value, also when that was before the pause."""
    whole, _ = two_and_two(tmp_path, classifier(plateau_strict_off), check_val_every_n_epoch=2)
    assert whole[0].lr_scheduler_configs[0].scheduler.num_bad_epochs == 0


# ---- the words of resume= and load=


def test_words(tmp_path):
    words = {"monitor": "val_loss", "save_top_k": 1}
    whole = fit(tmp_path / "whole", val=val_loader, max_epochs=4, **words)
    fit(tmp_path / "a", val=val_loader, max_epochs=2, **words)
    for resume in ("last", "auto", tmp_path / "path/checkpoints/run/version_0/last.ckpt"):
        root = tmp_path / ("path" if isinstance(resume, Path) else resume)
        shutil.copytree(tmp_path / "a", root)
        given = str(resume) if isinstance(resume, Path) else resume
        assert_same_end(whole, fit(root, val=val_loader, seed=9, resume=given, max_epochs=4, **words))
        assert tree(root) == tree(tmp_path / "whole")


def test_a_path_from_elsewhere(tmp_path):
    """A checkpoint that was moved with its log: a new version, whose metrics.csv begins with the rows of the old one."""
    whole = fit(tmp_path / "whole", val=val_loader, max_epochs=3)
    fit(tmp_path / "a", val=val_loader, max_epochs=2)
    shutil.move(tmp_path / "a/checkpoints/run/version_0/last.ckpt", tmp_path / "moved.ckpt")
    shutil.move(tmp_path / "a/logs/run/version_0/metrics.csv", tmp_path)
    resumed = fit(tmp_path / "b", val=val_loader, seed=4, resume=tmp_path / "moved.ckpt", max_epochs=3)
    assert_same_end(whole, resumed)
    assert logs_of(tmp_path / "b") == logs_of(tmp_path / "whole")


def test_best_goes_on_from_the_best_epoch(tmp_path):
    """A module that gets worse from its third epoch on: "best" continues after the second, the later rows are cut."""

    class Worse(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", abs(self.current_epoch - 1.0))

    words = {"val": val_loader, "monitor": "val_loss"}
    fit(tmp_path, Worse, max_epochs=4, **words)
    _, _, history = fit(tmp_path, Worse, seed=3, resume="best", max_epochs=3, **words)
    assert history["epoch"].tolist() == [0, 1, 2]
    assert history["val_loss"].tolist() == [1.0, 0.0, 1.0]
    assert read_logs(tmp_path / "logs")["epoch"].tolist() == [0, 1, 2]


def test_auto_starts_anew_where_there_is_nothing(tmp_path):
    expected = fit(tmp_path / "a", max_epochs=1)
    assert_same_end(expected, fit(tmp_path / "b", resume="auto", max_epochs=1))


def test_same_loop_goes_on(tmp_path):
    """In a notebook: the same loop object with resume="last"; and with another limit, a new one."""
    loop, module, _ = fit(tmp_path, max_epochs=2)
    history = loop.fit(module, make_loader(), resume="last")
    assert history["epoch"].tolist() == [0, 1]
    assert len(read_logs(tmp_path / "logs")) == 2


def test_at_max_epochs_does_nothing(tmp_path):
    loop, module, history = fit(tmp_path, val=val_loader, max_epochs=2)
    before = {path: Path(tmp_path, path).read_bytes() for path in tree(tmp_path)}
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            seen.append("train")

        def on_validation_start(self, trainer, module):
            seen.append("validation")

    again, other, rows = fit(tmp_path, val=val_loader, seed=9, resume="last", max_epochs=2, callbacks=[Watch()])
    assert seen == []
    assert same(weights_of(module), weights_of(other))
    assert (again.current_epoch, again.global_step) == (2, loop.global_step)
    assert rows.to_csv() == history.to_csv()
    after = {path: Path(tmp_path, path).read_bytes() for path in tree(tmp_path)}
    assert list(after) == list(before)
    metrics = "logs/run/version_0/metrics.csv"
    assert after[metrics] == before[metrics]


def test_beyond_max_epochs_is_refused(tmp_path):
    fit(tmp_path, max_epochs=2)
    with pytest.raises(
        ValueError, match=r"current_epoch=2, but you have set Trainer\(max_epochs=1\): write max_epochs=3"
    ):
        fit(tmp_path, resume="last", max_epochs=1)


def test_same_version_and_the_next(tmp_path):
    fit(tmp_path, max_epochs=1)
    fit(tmp_path, resume="last", max_epochs=2)
    fit(tmp_path, max_epochs=1)
    assert tree(tmp_path) == [
        "checkpoints/run/version_0/last.ckpt",
        "checkpoints/run/version_1/last.ckpt",
        "logs/run/version_0/config.yaml",
        "logs/run/version_0/hparams.yaml",
        "logs/run/version_0/metrics.csv",
        "logs/run/version_1/config.yaml",
        "logs/run/version_1/hparams.yaml",
        "logs/run/version_1/metrics.csv",
    ]
    rows = read_logs(tmp_path / "logs")
    assert rows[["version", "epoch", "step"]].values.tolist() == [[0, 0, 10], [0, 1, 20], [1, 0, 10]]


def test_load_takes_weights_only(tmp_path):
    _, trained, _ = fit(tmp_path, max_epochs=2)
    found = {}

    class Watch(Callback):
        def on_train_start(self, trainer, module):
            found["weights"] = {k: v.clone() for k, v in module.state_dict().items()}
            found["optimizer"] = dict(trainer.optimizers[0].state)
            found["place"] = (trainer.current_epoch, trainer.global_step)

    path = tmp_path / "checkpoints/run/version_0/last.ckpt"
    before = path.read_bytes()
    loop, _, history = fit(tmp_path, seed=5, load=str(path), max_epochs=1, callbacks=[Watch()])
    assert same(found["weights"], dict(trained.state_dict()))
    assert found["optimizer"] == {}
    assert found["place"] == (0, 0)
    assert (loop.current_epoch, loop.global_step, history["epoch"].tolist()) == (1, 10, [0])
    assert path.read_bytes() == before
    assert Path(loop.log_dir).name == "version_1"

    def trained_before():
        module = Classifier()
        module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        return module

    # and the numbers are those of a run that began with these weights
    expected = fit(tmp_path / "b", trained_before, seed=5, max_epochs=1)
    assert same(weights_of(expected[1]), weights_of(loop.lightning_module))


def test_early_stopping_goes_on(tmp_path):
    """Patience counted before the pause counts after it."""

    class Flat(Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    def run(root, epochs, **words):
        stop = EarlyStopping("val_loss", patience=4)
        return stop, fit(root, Flat, val=val_loader, max_epochs=epochs, callbacks=[stop], **words)

    whole, expected = run(tmp_path / "whole", 9)
    run(tmp_path / "parts", 3)
    stop, resumed = run(tmp_path / "parts", 9, seed=8, resume="last")
    assert expected[0].current_epoch == 5
    assert stop.state_dict().keys() == whole.state_dict().keys()
    assert all(same(v, whole.state_dict()[k]) for k, v in stop.state_dict().items())
    assert stop.stopped_epoch == whole.stopped_epoch == 4
    assert_same_end(expected, resumed)


def test_tuples_as_dataset(tmp_path):
    """A dataset that is no tensor dataset, with a last batch that is shorter."""

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 22

        def __getitem__(self, i):
            return torch.full((8,), i / 22), i % 3

    two_and_two(tmp_path, classifier(by_step), lambda: DataLoader(Squares(), batch_size=4, shuffle=True))
    assert isinstance(make_data(), TensorDataset)

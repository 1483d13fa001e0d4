"""Position: a run goes on in the middle of a pass with the batches, and the random numbers, of one that never stopped."""

import contextlib
import random
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from modules import Classifier, make_data, run_trainer
from runs import Snapshots, assert_same_end, fit, logs_of, same, tree
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class Counted(Dataset):
    """Samples with noise from the random numbers named; counts how often each was loaded, across processes."""

    def __init__(self, num=48, noise=()):
        self.data, self.noise = make_data(num), noise
        self.loaded = torch.zeros(num, dtype=torch.int64).share_memory_()
        self.own = {name: GENERATORS[name]() for name in noise if name in GENERATORS}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.loaded[index] += 1
        x, y = self.data[index]
        return x + 0.1 * sum(self.draw(name) for name in self.noise), y

    def draw(self, name):
        if name == "python":
            return random.gauss(0, 1)
        if name == "seed":
            return torch.initial_seed() % 1000 / 1000
        if name == "numpy":
            return np.random.randn()
        if name == "torch":
            return torch.randn(()).item()
        if name == "torch_generator":
            return torch.rand((), generator=self.own[name]).item()
        return self.own[name].random() if name != "numpy_state" else self.own[name].rand()


LIBRARIES = ("python", "numpy", "torch")
GENERATORS = {
    "numpy_generator": lambda: np.random.default_rng(3),
    "torch_generator": lambda: torch.Generator().manual_seed(3),
    "python_generator": lambda: random.Random(3),
    "numpy_state": lambda: np.random.RandomState(3),
}


def loader_of(num=48, noise=(), batch_size=4, shuffle=True, **words):
    return DataLoader(Counted(num, noise), batch_size=batch_size, shuffle=shuffle, **words)


def one_cycle(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=200)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_step():
    return Classifier(one_cycle, on_step=True)


class Kept:
    """Makes loaders, and keeps the last."""

    def __init__(self, make):
        self.make = make

    def __call__(self):
        self.last = self.make()
        return self.last


def killed(tmp_path, make, where, module=by_step, val=None, **words):
    """A whole run; runs resumed from what a kill would leave before some of its batches, each as good as the whole one.

    Yields (batch, the loaders of the resumed run) for each.
    """
    words = {"max_epochs": 2, "log_every_n_steps": 1, "save_every_n_steps": 1, **words}
    whole = fit(
        tmp_path / "whole", module, make, val, callbacks=[Snapshots(tmp_path / "whole", tmp_path / "at")], **words
    )
    for batch in where:
        root, train = tmp_path / "at" / str(batch), Kept(make)
        resumed = fit(root, module, train, val, seed=99, resume="last", **words)
        assert_same_end(whole, resumed)
        assert logs_of(root) == logs_of(tmp_path / "whole"), f"killed before batch {batch}"
        assert tree(root) == tree(tmp_path / "whole")
        yield batch, train.last


def loaded(loader):
    return int(loader.dataset.loaded.sum())


def test_all_over(tmp_path):
    """3 epochs of 8 steps of 2 batches each, dropout, 2 workers that draw random numbers, shuffled: kills all over."""
    make = lambda: loader_of(32, LIBRARIES, 2, num_workers=2)  # noqa: E731
    words = {"max_epochs": 3, "accumulate_grad_batches": 2}
    for batch, loader in killed(tmp_path, make, (2, 8, 14, 16, 18, 26, 32, 38, 46), **words):
        assert loaded(loader) == 2 * (48 - batch)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 3, "prefetch_factor": 1, "persistent_workers": True, "generator": 5},
        {"generator": 5},
    ],
    ids=["here", "workers", "persistent", "three", "generator"],
)
def test_random_items(tmp_path, words):
    """What items drew before the kill counts after it, wherever they were drawn; nothing is loaded twice."""

    def make():
        own = {"generator": torch.Generator().manual_seed(words["generator"])} if "generator" in words else {}
        return loader_of(noise=(*LIBRARIES, *GENERATORS), **{**words, **own})

    for batch, loader in killed(tmp_path, make, (7, 18)):
        assert loaded(loader) == 4 * (24 - batch)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("was", "now", "at"), [(0, 2, 7), (2, 0, 7), (2, 0, 12), (2, 3, 12), (3, 2, 7)])
def test_another_number_of_workers_that_stay(tmp_path, was, now, at):
    """The batches are the same ones, it is said what is not, and a run that was resumed so can be resumed again."""
    words = {"max_epochs": 3, "log_every_n_steps": 1, "save_every_n_steps": 1}

    def make(workers):
        stay = {"num_workers": workers, "persistent_workers": True} if workers else {}
        return lambda: loader_of(batch_size=4, **stay)

    snapshots = Snapshots(tmp_path / "whole", tmp_path / "at")
    whole = fit(tmp_path / "whole", by_step, make(was), callbacks=[snapshots], **words)
    root = tmp_path / "at" / str(at)
    snapshots = Snapshots(root, tmp_path / "again")
    told = rf"num_workers={now} was {was} in the run that goes on: the batches are the same"
    keeps_states = at == 7 or was  # between epochs only workers that stay have numbers of their own
    with pytest.warns(UserWarning, match=told) if keeps_states else contextlib.nullcontext():
        resumed = fit(root, by_step, make(now), seed=99, resume="last", callbacks=[snapshots], **words)
    rest = slice(0, 3 if was and now else 1)  # without workers the next epoch draws another order, resumed or not
    assert same(*[run[2].drop(columns="time")[rest].to_dict("list") for run in (whole, resumed)])
    for later in (2, 20 - at):  # in the pass that was gone on with, and in a later one
        again = fit(tmp_path / "again" / str(later), by_step, make(now), seed=98, resume="last", **words)
        assert_same_end(resumed, again)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_is_cut_short(tmp_path, workers):
    """Batches that workers loaded ahead and nobody asked for have drawn random numbers, too."""
    words = {"num_workers": 2, "persistent_workers": True} if workers else {}
    make = lambda: loader_of(noise=LIBRARIES, **words)  # noqa: E731
    for _ in killed(tmp_path, make, (2, 5, 14), limit_train_batches=5, max_epochs=3):
        pass


def seed_by_worker(worker_id):
    info = torch.utils.data.get_worker_info()
    info.dataset.own["numpy_generator"] = np.random.default_rng([worker_id, info.seed])
    random.seed(torch.initial_seed() + 7)


class AtOnce(Counted):
    def __getitems__(self, indices):
        if not indices:
            raise ValueError("nothing to load")
        return [self[index] for index in indices]


class Lazily(torch.utils.data.Sampler):
    """Draws each index when it is asked for, without end."""

    def __init__(self, num):
        self.num, self.generator = num, torch.Generator().manual_seed(4)

    def __iter__(self):
        while True:
            yield int(torch.randint(self.num, (), generator=self.generator))


class Finitely(Lazily):
    """No length, but an end."""

    def __iter__(self):
        yield from torch.randperm(self.num, generator=self.generator).tolist()


def lazily(kind=Lazily, **words):
    data = Counted(noise=LIBRARIES)
    return DataLoader(data, batch_size=4, sampler=kind(48), **words)


def batches_of_indices(**words):
    data = Counted(noise=LIBRARIES)
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True), **words)


class InBatches(Counted):
    """Its items are batches."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x, y = zip(*[super(InBatches, self).__getitem__(4 * index + i) for i in range(4)], strict=True)
        return torch.stack(x), torch.stack(y)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_without_batches(tmp_path, persistent):
    """To keep the turns of its workers, some are sent the item before again."""
    words = {"batch_size": None, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    make = lambda: DataLoader(InBatches(noise=(*LIBRARIES, *GENERATORS)), **words)  # noqa: E731
    for batch, loader in killed(tmp_path, make, (7, 18)):
        assert loaded(loader) == 4 * (24 - batch + batch % 2)


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: loader_of(
                noise=("python", "torch", "numpy_generator"), num_workers=2, worker_init_fn=seed_by_worker
            ),
            {},
        ),
        (lambda: DataLoader(AtOnce(48, LIBRARIES), 4, shuffle=True, num_workers=2), {}),
        (lambda: loader_of(noise=LIBRARIES, num_workers=1, multiprocessing_context="spawn"), {"max_epochs": 1}),
        (lambda: lazily(), {"limit_train_batches": 8}),
        (lambda: lazily(num_workers=2), {"limit_train_batches": 8}),
        (lambda: lazily(Finitely), {}),
        (lambda: lazily(Finitely, num_workers=2), {}),
        (batches_of_indices, {}),
        (lambda: batches_of_indices(num_workers=2), {}),
    ],
    ids=[
        "worker_init_fn",
        "getitems",
        "spawn",
        "lazily",
        "lazily+workers",
        "no_length",
        "no_length+workers",
        "batches",
        "batches+workers",
    ],
)
def test_loaders(tmp_path, make, words):
    in_pass = words.get("limit_train_batches", 12)
    where = (1,) if "spawn" in str(tmp_path) else (5, in_pass + 1)
    for batch, loader in killed(tmp_path, make, where, **words):
        if loader.num_workers and words:  # what workers load ahead at the end of a pass is thrown away
            continue
        assert loaded(loader) == 4 * (in_pass * words.get("max_epochs", 2) - batch)


# ---- steps that take their batches themselves


class Takes(Classifier):
    """As many batches in a step as it likes, the last step what is left."""

    def __init__(self, most):
        super().__init__(one_cycle, on_step=True, batch_size=4)
        self.most = most

    def training_step(self, dataloader_iter):
        batches = [batch for batch, *_ in islice(dataloader_iter, self.most)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self.log("batches", float(len(batches)), on_step=True, batch_size=4)
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("most", "words"), [(1, {}), (2, {}), (3, {"limit_train_batches": 8}), (5, {})])
def test_steps_that_take_several_batches(tmp_path, most, words, workers):
    """What was fetched counts, not how often the step was called."""
    make = lambda: loader_of(noise=LIBRARIES, num_workers=workers)  # noqa: E731
    in_pass = words.get("limit_train_batches", 12)
    calls = -(-in_pass // most)
    where = (calls - 1, calls, calls + 1)[: 2 if workers else 3]
    for call, loader in killed(tmp_path, make, where, lambda: Takes(most), **words):
        epochs, rest = divmod(call, calls)
        assert loaded(loader) == 4 * (in_pass * (2 - epochs) - rest * most) or workers and words  # loaded ahead


def test_a_file_of_the_last_batch_of_a_step_that_takes_several(tmp_path):
    """Saved behind the last batch, but before the epoch's end: no step is made with nothing."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "end.ckpt")

    whole = fit(tmp_path / "whole", lambda: Takes(2), loader_of, max_epochs=2, callbacks=[Saves()])
    shutil.copy(tmp_path / "whole/logs/run/version_0/metrics.csv", tmp_path)  # the history goes with the file
    words = {"max_epochs": 2, "resume": tmp_path / "end.ckpt"}
    assert_same_end(whole, fit(tmp_path / "again", lambda: Takes(2), loader_of, seed=99, **words))


# ---- several loaders


class Summed(Classifier):
    """Trains on whatever the loaders give together."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch[0], torch.Tensor):
            return super().training_step(batch, batch_idx)
        return sum(super(Summed, self).training_step(part, batch_idx) for part in batch if part is not None)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])  # the others are refused, as by Trainer
def test_several_loaders(tmp_path, mode, workers):
    """The shorter one begins again in the middle of the pass, with random numbers of that moment."""
    both = []

    def make():
        both[:] = [loader_of(24, LIBRARIES, num_workers=workers), loader_of(16, LIBRARIES)]
        return CombinedLoader(both, mode)

    in_pass = {"max_size_cycle": 6, "min_size": 4, "max_size": 6}[mode]
    for batch, _ in killed(tmp_path, make, (5, in_pass + 3), lambda: Summed(one_cycle)):
        left = [index for epoch in range(2) for index in range(in_pass)][batch:]
        expected = {
            "max_size_cycle": (len(left), len(left)),
            "min_size": (len(left), len(left)),
            "max_size": (len(left), sum(index < 4 for index in left)),
        }[mode]
        got = tuple(loaded(loader) // 4 for loader in both)
        assert got[1] == expected[1]
        assert got[0] == expected[0] or workers and mode == "min_size"  # it had loaded ahead


# ---- loaders that look after themselves, and those that cannot


class Stream(IterableDataset):
    """Counts what it gives, in batches' rows; can be asked where it is."""

    def __init__(self, num=48, noise=()):
        self.data = Counted(num, noise)
        self.loaded = self.data.loaded
        self.at = 0

    def __iter__(self):
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0


class StatefulStream(Stream):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:.*DataLoader is asked again")
def test_a_pass_begins_with_the_batch_that_is_looked_at_ahead(tmp_path):
    """One loader has no length, so the other one, with workers, begins again before its last batch is trained.

    A checkpoint in between is of the pass before: of its random numbers and its workers.
    """

    def make():
        longer = DataLoader(Stream(20), batch_size=4)
        return CombinedLoader([longer, loader_of(8, LIBRARIES, num_workers=2)], "max_size_cycle")

    assert len(list(killed(tmp_path, make, (2, 4), lambda: Summed(one_cycle), max_epochs=1))) == 2


class OwnState:
    """A loader of one's own that knows where it is."""

    def __init__(self):
        self.dataset, self.at, self.order = Counted(), 0, None

    def __len__(self):
        return 12

    def __iter__(self):
        if self.at in (0, 12):
            self.at, self.order = 0, torch.randperm(48).tolist()
        while self.at < 12:
            self.at += 1
            items = [self.dataset[i] for i in self.order[4 * self.at - 4 : 4 * self.at]]
            yield torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    def state_dict(self):
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StatefulDataLoader(Counted(), 4, shuffle=True), {}),
        (lambda: StatefulDataLoader(Counted(), 4, shuffle=True, num_workers=2), {}),
        (lambda: StatefulDataLoader(Counted(), 4, shuffle=True, num_workers=2, persistent_workers=True), {}),
        (lambda: StatefulDataLoader(Counted(), 4, shuffle=True), {"limit_train_batches": 7}),
        (lambda: StatefulDataLoader(StatefulStream(), 4), {}),
        (lambda: StatefulDataLoader(StatefulStream(), 4, num_workers=1), {}),
        (OwnState, {}),
    ],
    ids=["map", "map+workers", "map+workers_stay", "cut_short", "stream", "stream+workers", "own"],
)
def test_loaders_with_state(tmp_path, make, words):
    """They are asked where they are, also one batch behind where the loop looks ahead, and go on by themselves."""
    in_pass = words.get("limit_train_batches", 12)
    for batch, loader in killed(tmp_path, make, (5, in_pass + 3), **words):
        again = loaded(loader) - 4 * (in_pass * 2 - batch)
        assert again == 0 or batch == in_pass and again == 8  # between epochs its workers may load ahead for nothing


ASKED = (
    r"DataLoader is asked again for the 5 batches of this epoch .* \(torchdata's StatefulDataLoader\) goes on by itself"
)


@pytest.mark.filterwarnings("ignore:.*DataLoader is asked again")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loaders_without_state(tmp_path, workers):
    """They are asked for everything again, and it is said what that costs; what they draw is the same then."""
    make = lambda: DataLoader(Stream(48 // max(workers, 1), LIBRARIES), 4, num_workers=workers)  # noqa: E731
    runs = killed(tmp_path, make, (5, 12, 17))
    with pytest.warns(UserWarning, match=ASKED):
        _, loader = next(runs)
    assert loaded(loader) == 4 * 24
    _, loader = next(runs)  # between two epochs: nothing to ask for, and no warning
    assert loaded(loader) == 4 * 12
    _, loader = next(runs)
    assert loaded(loader) == 4 * 12


@pytest.mark.filterwarnings("ignore:.*DataLoader is asked again")
def test_streams_in_workers_that_stay(tmp_path):
    """Their batches are the same; random numbers are only in the pass with which the workers began, and it is said so."""

    def stream(noise):
        return lambda: DataLoader(Stream(noise=noise), 4, num_workers=1, persistent_workers=True)

    told = r"random numbers that its workers draw begin anew \(persistent_workers=True\); leave persistent_workers out"
    next(killed(tmp_path / "noisy", stream(LIBRARIES), (5,)))
    runs = killed(tmp_path / "quiet", stream(("seed",)), (12, 17))
    with pytest.warns(UserWarning, match=f"resume: {told}"):
        next(runs)
    with pytest.warns(UserWarning, match=f"DataLoader is asked again for the 5 batches .*. And {told}"):
        next(runs)


def test_batches_in_any_order(tmp_path):
    """Which are trained depends on which worker is faster: nothing can go on exactly, and it is said so."""
    make = lambda: loader_of(num_workers=2, in_order=False)  # noqa: E731
    words = {"max_epochs": 2, "save_every_n_steps": 1}
    whole = tmp_path / "whole"
    fit(whole, by_step, make, callbacks=[Snapshots(whole, tmp_path)], **words)
    told = r"is asked again for the 5 batches .*depends on which worker is faster \(in_order=False\), .*; leave in_order out"
    with pytest.warns(UserWarning, match=told):
        loop, *_ = fit(tmp_path / "5", by_step, make, resume="last", **words)
    assert (loop.current_epoch, loop.global_step) == (2, 24)
    loop, *_ = fit(tmp_path / "12", by_step, make, resume="last", **words)  # between two epochs: no warning
    assert (loop.current_epoch, loop.global_step) == (2, 24)


@pytest.mark.parametrize("noise", [LIBRARIES, ("seed",)], ids=["libraries", "seed"])
def test_validation_with_workers_that_stay(tmp_path, noise):
    """Theirs is a seed drawn once, as they began: a resumed run draws none in the middle of training."""
    val = lambda: loader_of(16, noise, num_workers=2, persistent_workers=True)  # noqa: E731
    for _ in killed(tmp_path, loader_of, (5, 12), val=val):
        pass


# ---- a run that goes on with other loaders


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
def test_another_number_of_workers(tmp_path, before, after):
    """The batches are the same; it is said that random numbers drawn in loading are not."""
    workers = [before, after]
    runs = killed(tmp_path, lambda: loader_of(num_workers=workers.pop(0)), (7,))
    with pytest.warns(
        UserWarning, match=f"num_workers={after} was {before} in the run that goes on: the batches are the same"
    ):
        _, loader = next(runs)
    assert loaded(loader) == 4 * (24 - 7)


def test_another_number_of_loaders(tmp_path):
    fit(tmp_path, lambda: Summed(), lambda: [loader_of(), loader_of()], max_epochs=1)
    words = r"of a run with 2 loaders, this one has 1: give the same loaders, or use load="
    with pytest.warns(UserWarning, match=r"1 loaders \(were 2\)"), pytest.raises(ValueError, match=words):
        fit(tmp_path, lambda: Summed(), loader_of, resume="last", max_epochs=2)


def test_a_run_that_began_in_mid_epoch_with_a_file_of_trainer(tmp_path):
    """Such a file has no position: the rest of the epoch is of a new pass, of which fewer batches are done than count."""
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    run_trainer(by_step, loader_of, enable_checkpointing=True, callbacks=[saver], max_epochs=2)
    words = {"max_epochs": 2, "save_every_n_steps": 1}
    root, at = tmp_path / "whole", tmp_path / "at"
    whole = fit(root, by_step, loader_of, resume=tmp_path / "step=5.ckpt", callbacks=[Snapshots(root, at)], **words)
    for batch in (3, 7, 9):
        assert_same_end(whole, fit(at / str(batch), by_step, loader_of, seed=99, resume="last", **words))


def test_a_file_saved_before_a_resumed_run_goes_on(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "first.ckpt")

        def on_train_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "second.ckpt")

    words = {"max_epochs": 2, "log_every_n_steps": 1}
    whole = fit(tmp_path / "whole", by_step, loader_of, callbacks=[Saves()], **words)
    shutil.copy(tmp_path / "whole/logs/run/version_0/metrics.csv", tmp_path)
    for name in ("first", "second"):
        path = tmp_path / f"{name}.ckpt"
        assert_same_end(
            whole, fit(tmp_path / name, by_step, loader_of, seed=99, resume=path, callbacks=[Saves()], **words)
        )


def test_a_run_that_kept_no_position(tmp_path):
    """Saved by hand in a run that keeps no checkpoints: the rest of the epoch is of a new pass, and it is said so."""

    class ByHand(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "hand.ckpt")

    words = {"max_epochs": 1, "enable_checkpointing": False, "callbacks": [ByHand()]}
    fit(tmp_path, train=loader_of, **words)
    with pytest.warns(UserWarning, match="does not say which batches of its epoch are done"):
        loop, _, _ = fit(tmp_path, train=loader_of, resume=tmp_path / "hand.ckpt", max_epochs=1)
    assert (loop.current_epoch, loop.global_step) == (1, 12)

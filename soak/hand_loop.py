"""A training loop written by hand, which random_runs.py compares with FabricLoop and MiniLoop.

It trains an nn.Module with step functions, or an object with step methods, as an experienced engineer would write it
for one case. It knows nothing of the package.
"""

import contextlib
import inspect
import itertools
import os

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


def modules_of(value):
    """Yield the modules in an object, in its attributes, and in lists and dicts of them."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from modules_of(part)
    elif isinstance(value, dict):
        yield from modules_of(list(value.values()))
    elif hasattr(value, "training_step"):
        yield from modules_of(vars(value))


def find_step(program, name):
    """Return a step as a function of (batch, batch_idx), or None."""
    function = program.get("fit", {}).get(name)
    if function is None:
        step = getattr(program["model"], name, None)
    else:
        model = program["model"]

        def step(*args):
            return function(model, *args)

    if step is None:
        return None
    number = len(inspect.signature(function or step).parameters) - (function is not None)
    return step if number > 1 else lambda batch, batch_idx: step(batch)


def parse_optimizer(value):
    """Return (optimizer, list of scheduler configurations) of a value of configure_optimizers."""
    schedulers, defaults = [], {"interval": "epoch", "frequency": 1, "monitor": "val_loss"}
    if isinstance(value, dict):
        given = value.get("lr_scheduler", [])
        value, schedulers = value["optimizer"], given if isinstance(given, list) else [given]
    elif isinstance(value, tuple):
        value, schedulers = value[0][0], value[1]
    elif isinstance(value, list):
        value = value[0]
    configs = [given if isinstance(given, dict) else {"scheduler": given} for given in schedulers]
    return value, [{**defaults, **config} for config in configs]


def length_of(loader):
    """Return the number of batches, or infinity if it is unknown."""
    if isinstance(loader, CombinedLoader):
        choose = min if loader._mode == "min_size" else max
        return choose(map(length_of, loader.flattened))
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def batches_of(loader):
    """Yield the batches of a loader, or of several loaders together."""
    if isinstance(loader, CombinedLoader):
        for batch, _, _ in loader:
            yield batch
    else:
        yield from loader


class Loss:
    """The mean of a loss, weighted by batch size, in the precision of a metric."""

    def __init__(self):
        self.total, self.weight = torch.zeros(()), 0

    def add(self, output, batch):
        value = output["loss"] if isinstance(output, dict) else output
        try:
            size = extract_batch_size(batch)
        except MisconfigurationException:
            size = 1
        self.total = self.total + value.detach().to(self.total.dtype) * size
        self.weight += size

    def mean(self):
        return (self.total / self.weight).item() if self.weight else float("nan")


class HandLoop:
    """Train a program's model. ``rows`` contains the means of each epoch."""

    def __init__(self, program, ranks=1, rank=0):
        self.options = program.get("options", {})
        self.ranks, self.rank = ranks, rank
        self.precision = self.options.get("precision", "32-true")
        self.accumulate = self.options.get("accumulate_grad_batches", 1)
        self.model = program["model"]
        self.networks = list(modules_of(self.model))
        for network in self.networks:
            self._prepare(network)
        self.training_step = find_step(program, "training_step")
        self.validation_step = find_step(program, "validation_step")
        given = program.get("fit", {}).get("optimizer")
        given = self.model.configure_optimizers() if given is None else given
        self.optimizer, self.schedulers = parse_optimizer(given)
        self.train_loader = self._share(program["train"], shuffle=True)
        self.val_loader = self._share(program["val"], shuffle=False)
        self.metrics, self.rows, self.loss = {}, [], Loss()
        self.epoch = self.global_step = 0

    def _prepare(self, network):
        if self.precision in DTYPES:
            network.to(DTYPES[self.precision])
        if all(not module.training for module in network.modules()):
            network.train()

    def _share(self, loader, shuffle):
        """Combine loaders. Distribute the samples of a loader among the processes."""
        is_several = isinstance(loader, dict | list) and any(
            isinstance(part, DataLoader)
            for part in (loader.values() if isinstance(loader, dict) else loader)
        )
        if is_several:
            loader = CombinedLoader(loader, "max_size_cycle")
        if self.ranks == 1 or not isinstance(loader, DataLoader):
            return loader
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            return loader
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        sampler = DistributedSampler(
            loader.dataset, self.ranks, self.rank, shuffle=shuffle, seed=seed
        )
        names = ("batch_size", "num_workers", "collate_fn", "drop_last", "generator")
        options = {name: getattr(loader, name) for name in names}
        return DataLoader(loader.dataset, sampler=sampler, **options)

    def fit(self):
        while self.epoch < self.options.get("max_epochs", 1000) and not self.is_done():
            self.train_epoch()
            self.epoch += 1
        if self.loss.weight:
            self.end_row()

    def is_done(self):
        return 0 <= self.options.get("max_steps", -1) <= self.global_step

    def train_epoch(self):
        in_window = 0
        for batch_idx, batch, is_last in self.batches(self.train_loader):
            is_step = is_last or in_window + 1 == self.accumulate
            self.train_batch(batch, batch_idx, in_window == 0, is_step)
            in_window = 0 if is_step else in_window + 1
            if is_step and self.is_validation_due(batch_idx):
                self.validate()
                self.end_row()
            if is_step:
                self.step_schedulers("step", batch_idx + 1, is_plateau=True)
            if self.is_done():
                break
        if self.is_validation_due(None):
            self.validate()
        self.step_schedulers("epoch", self.epoch + 1)
        if not self.options.get("validate_every_n_steps"):
            self.end_row()

    def end_row(self):
        self.metrics["train_loss"] = self.loss.mean()
        self.loss = Loss()
        self.rows.append({"epoch": self.epoch, "step": self.global_step, **self.metrics})

    def is_validation_due(self, batch_idx):
        """Return whether to validate after a batch, or with None at the end of an epoch."""
        every = self.options.get("validate_every_n_steps")
        if every is not None:
            return batch_idx is not None and self.global_step % every == 0
        return batch_idx is None

    def batches(self, loader):
        """Yield (index, batch, whether it is the last one) up to limit_train_batches."""
        for part in (
            loader,
            getattr(loader, "sampler", None),
            getattr(loader, "batch_sampler", None),
        ):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        iterator = batches_of(loader)
        length = limit = length_of(loader)
        if "limit_train_batches" in self.options:
            wanted = self.options["limit_train_batches"]
            limit = min(length, int(wanted * length) if isinstance(wanted, float) else wanted)
        if length < float("inf"):
            for batch_idx, batch in enumerate(itertools.islice(iterator, limit)):
                yield batch_idx, batch, batch_idx + 1 == limit
            return
        # The end of a loader without a length is known only after a look at the next batch.
        batch, batch_idx = next(iterator, None), 0
        while batch is not None:
            following = next(iterator, None) if batch_idx + 1 < limit else None
            yield batch_idx, batch, following is None
            batch, batch_idx = following, batch_idx + 1

    @contextlib.contextmanager
    def precision_context(self):
        """Run a step under autocast, or with another default dtype."""
        if self.precision == "bf16-mixed":
            with torch.autocast("cpu", torch.bfloat16):
                yield
            return
        default = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES.get(self.precision, default))
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def convert(self, batch):
        """Convert the floating-point tensors of a batch to the dtype of the precision."""
        dtype = DTYPES.get(self.precision)
        if dtype is None:
            return batch

        def convert(tensor):
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(batch, torch.Tensor, convert)

    def train_batch(self, batch, batch_idx, is_first, is_step):
        batch = self.convert(batch)

        def closure():
            with self.precision_context():
                output = self.training_step(batch, batch_idx)
            if is_first:
                self.optimizer.zero_grad()
            loss = output["loss"] if isinstance(output, dict) else output
            self.loss.add(output, batch)
            (loss / self.accumulate).backward()
            if is_step:
                self.clip()
            return loss

        if not is_step:
            closure()
            return
        self.optimizer.step(closure)
        self.global_step += 1
        self.step_schedulers("step", batch_idx + 1, is_plateau=False)

    def clip(self):
        value = self.options.get("gradient_clip_val")
        if not value:
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.options.get("gradient_clip_algorithm") == "value":
            nn.utils.clip_grad_value_(parameters, value)
        else:
            nn.utils.clip_grad_norm_(parameters, value)

    def step_schedulers(self, interval, count, is_plateau=None):
        for config in self.schedulers:
            scheduler = config["scheduler"]
            if config["interval"] != interval or count % config["frequency"]:
                continue
            if is_plateau is not None and isinstance(scheduler, ReduceLROnPlateau) != is_plateau:
                continue
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self.metrics[config["monitor"]])
            else:
                scheduler.step()

    def validate(self):
        if self.val_loader is None:
            return
        modules = [module for network in self.networks for module in network.modules()]
        modes = [module.training for module in modules]
        for network in self.networks:
            network.eval()
        loss = Loss()
        with torch.no_grad():
            for batch_idx, batch in enumerate(self.val_loader):
                batch = self.convert(batch)
                with self.precision_context():
                    loss.add(self.validation_step(batch, batch_idx), batch)
        self.metrics["val_loss"] = loss.mean()
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode

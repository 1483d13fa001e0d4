"""A hand-written training loop, which random_runs.py compares with FabricLoop and MiniLoop.

The loop trains an nn.Module with step functions, or an object with step methods. The code is what an engineer would write for a
single project. TensorLoader is the only import from fabric_template.
"""

import contextlib
import inspect
import itertools
import os
from functools import partial

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from fabric_template import TensorLoader

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


def modules_of(value):
    """Yield the modules in an object and its attributes, including those in lists and dicts."""
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
    model, function = program["model"], program.get("fit", {}).get(name)
    step = getattr(model, name, None) if function is None else partial(function, model)
    if step is None or len(inspect.signature(step).parameters) > 1:
        return step
    return lambda batch, batch_idx: step(batch)


def parse_optimizer(value):
    """Split a return value of configure_optimizers into (optimizer, list of scheduler configurations)."""
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
    """Return a loader's number of batches, or infinity if the number is unknown."""
    if isinstance(loader, CombinedLoader):
        choose = min if loader._mode == "min_size" else max
        return choose(map(length_of, loader.flattened))
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def set_epoch(loader, epoch):
    if isinstance(loader, CombinedLoader):
        for part in loader.flattened:
            set_epoch(part, epoch)
        return
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)
    for part in {id(part): part for part in (loader, batch_sampler, *samplers)}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def batches_of(loader):
    """Yield the batches of a loader, or the combined batches of several loaders."""
    if isinstance(loader, CombinedLoader):
        for batch, _, _ in loader:
            yield batch
    else:
        yield from loader


class Loss:
    """The mean of a loss over batches, weighted by the batch size."""

    def __init__(self):
        self.total, self.weight = torch.zeros(()), 0

    def add(self, output, batch):
        value = output["loss"] if isinstance(output, dict) else output
        try:
            size = extract_batch_size(batch)
        except MisconfigurationException:
            size = 1
        dtype = torch.promote_types(value.dtype, torch.float32)
        self.total = self.total.to(dtype) + value.detach().to(dtype) * size
        self.weight += size

    def mean(self):
        if torch.distributed.is_initialized():
            pair = torch.stack([self.total, self.total.new_tensor(self.weight)])
            torch.distributed.all_reduce(pair)
            return (pair[0] / pair[1]).item()
        return (self.total / self.weight).item() if self.weight else float("nan")


class Steps(nn.Module):
    """Run a step in forward(), because DDP synchronizes only the gradients of forward()."""

    def __init__(self, networks):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, step, *args):
        return step(*args)


class HandLoop:
    """Train a program's model by hand. ``rows`` contains the mean loss of each epoch."""

    def __init__(self, program, ranks=1, rank=0):
        self.options = program.get("options", {})
        self.ranks, self.rank = ranks, rank
        if "seed" in self.options:
            seed_everything(self.options["seed"], verbose=False)
        if ranks > 1:
            # Like Lightning, start all processes with the same RNG state.
            reset_seed()
        self.precision = self.options.get("precision", "32-true")
        self.accumulate = self.options.get("accumulate_grad_batches", 1)
        self.model = program["model"]
        self.networks = list(modules_of(self.model))
        self._prepare()
        self.training_step = find_step(program, "training_step")
        self.validation_step = find_step(program, "validation_step")
        given = program.get("fit", {}).get("optimizer")
        given = self.model.configure_optimizers() if given is None else given
        self.optimizer, self.schedulers = parse_optimizer(given)
        self.train_loader = self._share(program["train"], shuffle=True)
        self.val_loader = self._share(program["val"], shuffle=False)
        self.metrics, self.rows, self.loss = {}, [], Loss()
        self.steps = Steps(self.networks)
        if ranks > 1:
            self.steps = DistributedDataParallel(self.steps)
        self.epoch = self.global_step = 0
        # A CSV row contains the learning rate of the last step. It contains
        # val_loss only if a validation has run since the previous row.
        self.rate, self.is_validated = float(self.optimizer.param_groups[0]["lr"]), False

    def _prepare(self):
        """Convert the model's dtype. If the whole model is in eval mode, switch it to train mode."""
        modules = [module for network in self.networks for module in network.modules()]
        is_in_eval_mode = not any(module.training for module in modules)
        for network in self.networks:
            if self.precision in DTYPES:
                network.to(DTYPES[self.precision])
            if is_in_eval_mode:
                network.train()

    def _share(self, loader, shuffle):
        """Combine several loaders, and distribute each loader's samples among the processes."""
        parts = loader.values() if isinstance(loader, dict) else loader
        if isinstance(loader, dict | list) and any(isinstance(p, DataLoader) for p in parts):
            loader = CombinedLoader(loader, "max_size_cycle")
        if self.ranks == 1:
            return loader
        if isinstance(loader, CombinedLoader):
            loader.flattened = [self._share(part, shuffle) for part in loader.flattened]
        if isinstance(loader, TensorLoader):
            dataset = TensorDataset(*loader.tensors)
            options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            # Give the DataLoader its own generator. Otherwise, it would
            # draw a global random number, which a TensorLoader does not.
            options["generator"] = torch.Generator()
            shuffle = shuffle or loader.shuffle
            return DataLoader(dataset, sampler=self._sampler(dataset, shuffle), **options)
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader
        return self._share_data_loader(loader, shuffle)

    def _sampler(self, samples, shuffle):
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        is_order = isinstance(samples, Sampler) or not hasattr(samples, "__getitem__")
        kind = DistributedSamplerWrapper if is_order else DistributedSampler
        return kind(samples, num_replicas=self.ranks, rank=self.rank, shuffle=shuffle, seed=seed)

    def _share_data_loader(self, loader, shuffle):
        """Return a loader for this process's samples, as Lightning creates it."""
        order = loader.sampler if loader.batch_size else loader.batch_sampler.sampler
        if isinstance(order, DistributedSampler):
            return loader
        shuffle = shuffle or isinstance(order, RandomSampler)
        is_plain = isinstance(order, RandomSampler | SequentialSampler)
        sampler = self._sampler(loader.dataset if is_plain else order, shuffle)
        names = ("num_workers", "persistent_workers", "collate_fn", "generator")
        options = {name: getattr(loader, name) for name in names}
        if loader.batch_size:
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            return type(loader)(loader.dataset, sampler=sampler, **options)
        own = loader.batch_sampler
        batches = type(own)(sampler, own.batch_size, own.drop_last)
        return type(loader)(loader.dataset, batch_sampler=batches, **options)

    def fit(self, other_loader=None, from_epoch=None):
        """Train the model, with ``other_loader`` from epoch ``from_epoch`` on."""
        while self.epoch < self.options.get("max_epochs", 1000) and not self.is_done():
            if self.epoch == from_epoch:
                self.train_loader = self._share(other_loader, shuffle=True)
            self.train_epoch()
            is_last = self.epoch + 1 == self.options.get("max_epochs", 1000) or self.is_done()
            if is_last and self.loss.weight:
                self.end_row()
            self.epoch += 1

    def is_done(self):
        return 0 <= self.options.get("max_steps", -1) <= self.global_step

    def train_epoch(self):
        in_window = 0
        for batch_idx, batch, is_last in self.batches(self.train_loader):
            is_step = is_last or in_window + 1 == self.accumulate
            self.train_batch(batch, batch_idx, in_window == 0, is_step)
            in_window = 0 if is_step else in_window + 1
            if self.is_validation_due(batch_idx + 1, is_last, is_step):
                self.validate()
                if self.options.get("validate_every_n_steps"):
                    self.end_row()
            if is_step:
                self.step_schedulers("step", batch_idx + 1, is_plateau=True)
            if self.is_done():
                break
        # Validate only after a complete epoch, not after an epoch that max_steps ended early.
        if is_last and self.is_validation_due_at_end():
            self.validate()
        if is_last:
            self.step_schedulers("epoch", self.epoch + 1)
        if not self.options.get("validate_every_n_steps"):
            self.end_row()

    def end_row(self):
        self.metrics["train_loss"] = self.loss.mean()
        self.loss = Loss()
        row = {"epoch": self.epoch, "step": self.global_step, **self.metrics, "lr": self.rate}
        if not self.is_validated:
            row.pop("val_loss", None)
        self.rows.append(row)
        self.is_validated = False

    def is_validation_due(self, batches, is_last, is_step):
        """Return whether to validate after this number of batches of the epoch."""
        every = self.options.get("validate_every_n_steps")
        if every is not None:
            return is_step and self.global_step % every == 0
        if (self.epoch + 1) % self.options.get("check_val_every_n_epoch", 1):
            return False
        interval = self.options.get("val_check_interval")
        if isinstance(interval, dict):
            return True
        if isinstance(interval, float):
            interval = max(1, int(interval * self.limit_of(self.train_loader)))
        return interval is not None and batches % interval == 0

    def is_validation_due_at_end(self):
        if {"validate_every_n_steps", "val_check_interval"} & self.options.keys():
            return False
        return (self.epoch + 1) % self.options.get("check_val_every_n_epoch", 1) == 0

    def limit_of(self, loader):
        """Return the number of batches in a training epoch, at most limit_train_batches."""
        length = length_of(loader)
        wanted = self.options.get("limit_train_batches")
        if wanted is None:
            return length
        return min(length, int(wanted * length) if isinstance(wanted, float) else wanted)

    def batches(self, loader):
        """Yield a tuple (index, batch, is_last) for each of the first limit_train_batches batches."""
        set_epoch(loader, self.epoch)
        iterator = batches_of(loader)
        length, limit = length_of(loader), self.limit_of(loader)
        if length < float("inf"):
            for batch_idx, batch in enumerate(itertools.islice(iterator, limit)):
                yield batch_idx, batch, batch_idx + 1 == limit
            if limit == length and not isinstance(loader, CombinedLoader):
                # Call next() again to run the code after the loader's last yield, as a for loop does.
                next(iterator, None)
            return
        # Without a length, only reading the next batch shows whether the current batch is the last one.
        batch, batch_idx = next(iterator, None), 0
        while batch is not None:
            following = next(iterator, None) if batch_idx + 1 < limit else None
            yield batch_idx, batch, following is None
            batch, batch_idx = following, batch_idx + 1

    @contextlib.contextmanager
    def precision_context(self):
        """Run a step under autocast or with a different default dtype."""
        if self.precision == "bf16-mixed":
            # Like Lightning, do not cache weights that autocast has converted.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                yield
            return
        default = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES.get(self.precision, default))
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def convert(self, batch):
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
                output = self.steps(self.training_step, batch, batch_idx)
            if is_first:
                self.optimizer.zero_grad()
            loss = output["loss"] if isinstance(output, dict) else output
            self.loss.add(output, batch)
            loss = loss / self.accumulate
            loss.backward()
            if is_step:
                self.clip()
            return loss

        if not is_step:
            # Before the last batch of an accumulation window, no_sync() prevents DDP from averaging the gradients.
            with self.steps.no_sync() if self.ranks > 1 else contextlib.nullcontext():
                closure()
            return
        self.rate = float(self.optimizer.param_groups[0]["lr"])
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
        set_epoch(self.val_loader, self.epoch)
        modules = [module for network in self.networks for module in network.modules()]
        modes = [module.training for module in modules]
        for network in self.networks:
            network.eval()
        loss = Loss()
        with torch.no_grad():
            limit = self.options.get("limit_val_batches")
            if isinstance(limit, float):
                limit = int(limit * len(self.val_loader))
            for batch_idx, batch in enumerate(itertools.islice(self.val_loader, limit)):
                batch = self.convert(batch)
                with self.precision_context():
                    loss.add(self.steps(self.validation_step, batch, batch_idx), batch)
        self.metrics["val_loss"], self.is_validated = loss.mean(), True
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode

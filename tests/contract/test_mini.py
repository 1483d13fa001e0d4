"""MiniLoop, the one file: plain PyTorch's bits, Trainer's bits, FabricLoop's files; killed, interrupted, copied, alone."""

import ast
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
import torchmetrics
from externally import externally
from interpreter import ready
from modules import (
    Classifier,
    assert_same_metrics,
    assert_same_weights,
    by_epoch,
    by_step,
    make_data,
    make_loader,
    run_trainer,
    sgd,
)
from runs import Plain
from test_parity_modules import Closure, WithMetrics
from test_parity_plain import CASES as PLAIN
from test_parity_plain import EPOCHS, RUNGS, make_net
from test_parity_trainer import every_second_epoch, plateau
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import fabric_template.mini
from fabric_template import FabricLoop, MiniLoop, TensorLoader

FILE = Path(fabric_template.mini.__file__)
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
WORDS = {"MiniLoop": {}, "FabricLoop": QUIET}


def val_loader():
    return make_loader(18, shuffle=False, seed=5)


def run_mini(make_module, make_train, make_val=None, seed=1, fit=None, **words):
    pl.seed_everything(seed, verbose=False)
    module = make_module()
    loop = MiniLoop(accelerator="cpu", **words)
    loop.fit(module, make_train(), make_val() if make_val else None, **(fit or {}))
    return loop, module


def assert_trainers_bits(make_module, make_train=make_loader, make_val=val_loader, **words):
    trainer, expected = run_trainer(make_module, make_train, make_val, **words)
    loop, module = run_mini(make_module, make_train, make_val, **words)
    assert_same_weights(expected, module)
    assert_same_metrics(trainer, loop)
    assert (trainer.current_epoch, trainer.global_step) == (loop.current_epoch, loop.global_step)


# ---- plain PyTorch


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("case", sorted(PLAIN.keys() - {"clipped_by_value"}))
def test_the_bits_of_the_loop_that_everybody_writes(case, rung):
    plain_loop, make_optimizer, dropout, shuffle, words = PLAIN[case]
    torch.manual_seed(1)
    expected = make_net(dropout)
    plain_loop(expected, make_loader(40, shuffle=shuffle))
    random_after = torch.rand(4)

    torch.manual_seed(1)
    net = make_net(dropout)
    (model,), arguments = RUNGS[rung](net, make_optimizer)
    loop = MiniLoop(max_epochs=EPOCHS, accelerator="cpu", **words)
    loop.fit(model, make_loader(40, shuffle=shuffle), **arguments)
    assert_same_weights(expected, net)
    assert torch.equal(torch.rand(4), random_after)  # as many random numbers were drawn
    updates = {"accumulated": 12, "accumulated_and_clipped": 12}.get(case, 30)
    assert (loop.current_epoch, loop.global_step) == (EPOCHS, updates)


def test_a_tensor_loader_is_asked_as_often_as_by_the_plain_loop():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 8, generator=generator), torch.randint(3, (40,), generator=generator)
    plain_loop, make_optimizer, *_ = PLAIN["momentum_dropout_shuffle"]
    torch.manual_seed(1)
    expected = make_net(0.5)
    plain_loop(expected, TensorLoader(x, y, batch_size=4, shuffle=True))
    torch.manual_seed(1)
    net = make_net(0.5)
    loader = TensorLoader(x, y, batch_size=4, shuffle=True)
    MiniLoop(max_epochs=EPOCHS, accelerator="cpu").fit(net, loader, **RUNGS["functions"](net, make_optimizer)[1])
    assert_same_weights(expected, net)


# ---- Trainer

TRAINER = {
    "plain": {},
    "accumulate_3_of_10": {"accumulate_grad_batches": 3},
    "clip_norm": {"gradient_clip_val": 0.1},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "bf16_true": {"precision": "bf16-true"},
    "64_true": {"precision": "64-true"},
    "accumulated_and_clipped": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
}


@pytest.mark.parametrize("name", TRAINER)
def test_trainers_bits_with_each_word(name):
    assert_trainers_bits(Classifier, max_epochs=3, **TRAINER[name])


def plateau_by_step(module):
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
    return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizers", [sgd, by_step, by_epoch, every_second_epoch, plateau, plateau_by_step])
def test_trainers_bits_with_each_shape_of_optimizers(optimizers, accumulate):
    assert_trainers_bits(lambda: Classifier(optimizers), max_epochs=4, accumulate_grad_batches=accumulate)


class Hooked(Classifier):
    """Logs in hooks, draws random numbers in them, steps and schedules by itself."""

    def on_train_start(self):
        torch.rand(1)

    def on_train_epoch_start(self):
        torch.rand(2)

    def on_train_batch_start(self, batch, batch_idx):
        torch.rand(1)

    def on_before_optimizer_step(self, optimizer):
        self.log("grad", self.net[0].weight.grad.norm())

    def on_validation_epoch_end(self):
        self.log("val_twice", self.trainer.callback_metrics["val_loss"] * 2)

    def on_train_epoch_end(self):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        assert "train_loss_epoch" in self.trainer.callback_metrics

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        scheduler.step()


class NotSized(IterableDataset):
    """Draws as it goes, and has no length."""

    def __iter__(self):
        for x, y in make_data(22):
            yield x + torch.rand(8), y


class Reductions(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for how in ("sum", "min", "max"):
            self.log(f"of_{how}", loss, on_step=False, on_epoch=True, reduce_fx=how)
        self.log("last", float(batch_idx))
        return None if batch_idx == 3 else {"loss": loss}


class Collected(WithMetrics):
    """The names that a module gets from a MetricCollection, and a metric that is logged per step, too."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("train_loss", loss)
        return loss


class Data(pl.LightningDataModule):
    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        self.train, self.val = make_data(40), make_data(18, seed=5)

    def train_dataloader(self):
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 4)


@pytest.mark.parametrize("module", [Hooked, Reductions, Collected, Closure], ids=lambda kind: kind.__name__)
def test_trainers_bits_with_modules_that_do_more(module):
    if module is Hooked:
        assert_trainers_bits(lambda: Hooked(by_epoch), max_epochs=3)
    else:
        assert_trainers_bits(module, max_epochs=3)


class OwnLog(Classifier):
    """Its own log, through which log_dict goes, too; it ends in Lightning's, and asks what runs."""

    def log(self, name, value, **words):
        is_check = self.trainer.state.stage == "sanity_check"  # Trainer's is an enum of strings
        assert is_check == self.trainer.sanity_checking
        stage = "own" if self.trainer.state.stage in ("train", "validate") else "check"
        super().log(name if name == "train_loss" else f"{stage}/{name}", value, **words)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"double": 2 * loss, "triple": 3 * loss}, on_step=True, on_epoch=True)
        assert self.trainer.val_check_interval == self.trainer.limit_train_batches == 1.0
        return loss


class WithDropout(Classifier):
    """Validates with its dropout at work, as its own hook says."""

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.net[2].train()


@dataclass(slots=True)
class Pair:
    """A batch of a class of its own."""

    name: str
    x: torch.Tensor
    y: torch.Tensor


class Pairs(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch.x, batch.y), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch.x, batch.y), batch_idx)


def make_pairs():
    collate = torch.utils.data.default_collate
    return DataLoader(make_data(18), 4, shuffle=True, collate_fn=lambda items: Pair("pair", *collate(items)))


class Again:
    """Its own iterator, which shuffles whenever it is asked for one: Trainer asks once more, and never on the way."""

    def __init__(self):
        self.x, self.y = make_data(18).tensors

    def __iter__(self):
        self.batches = list(torch.randperm(18).split(4))
        return self

    def __next__(self):
        if not self.batches:
            raise StopIteration
        chosen = self.batches.pop()
        return self.x[chosen], self.y[chosen]


class Sized(Again):
    def __len__(self):
        return 5


@pytest.mark.parametrize(
    ("module", "loader"),
    [(OwnLog, make_loader), (WithDropout, make_loader), (Pairs, make_pairs), (Classifier, Again), (Classifier, Sized)],
    ids=["own_log", "own_eval", "own_batches", "own_iterator", "own_sized_iterator"],
)
def test_trainers_bits_with_what_packages_do(module, loader):
    assert_trainers_bits(module, loader, loader, max_epochs=3)


def test_trainers_bits_with_a_loader_that_has_no_length():
    assert_trainers_bits(
        Classifier, lambda: DataLoader(NotSized(), batch_size=4), max_epochs=3, accumulate_grad_batches=2
    )


def test_trainers_bits_with_a_generator_that_the_loader_draws_from():
    """A sampler asked once more for a batch behind the last one would draw another order: nobody asks."""

    def own_generator():
        return DataLoader(make_data(40), 4, shuffle=True, generator=torch.Generator().manual_seed(3))

    assert_trainers_bits(Classifier, own_generator, own_generator, max_epochs=3)


def test_trainers_bits_with_a_datamodule():
    assert_trainers_bits(Classifier, Data, None, max_epochs=2)


# ---- what is left on disk, and what goes on from it


def fit(kind, name, epochs, resume=None, make_module=None, **words):
    pl.seed_everything(4, verbose=False)
    module = (make_module or (lambda: Classifier(by_epoch)))()
    loop = {"MiniLoop": MiniLoop, "FabricLoop": FabricLoop}[kind](
        **{
            "accelerator": "cpu",
            "max_epochs": epochs,
            "name": name,
            "seed": 3,
            "monitor": "val_loss",
            **WORDS[kind],
            **words,
        }
    )
    history = loop.fit(module, make_loader(), val_loader(), resume=resume)
    return loop, module, history.drop(columns="time")


@pytest.mark.parametrize("after", WORDS)
@pytest.mark.parametrize("before", WORDS)
def test_a_run_goes_on_in_the_other_loop(before, after):
    _, expected, rows = fit("MiniLoop", "whole", 4)
    fit(before, "parts", 2)
    _, module, again = fit(after, "parts", 4, resume="last")
    assert_same_weights(expected, module)
    pd.testing.assert_frame_equal(again, rows)
    assert os.listdir("logs/parts") == os.listdir("checkpoints/parts") == ["version_0"]
    assert pd.read_csv("logs/parts/version_0/metrics.csv").drop(columns="time").equals(rows)
    best = torch.load("checkpoints/parts/version_0/best.ckpt", weights_only=True)
    assert best["epoch"] == rows["val_loss"].idxmin()


@pytest.mark.parametrize("kind", WORDS)
def test_trainer_goes_on_from_it(kind):
    _, module, _ = fit(kind, "run", 2)
    path = "checkpoints/run/version_0/last.ckpt"
    trainer, other = run_trainer(
        lambda: Classifier(by_epoch), make_loader, val_loader, max_epochs=2, fit={"ckpt_path": path}
    )
    assert (trainer.current_epoch, trainer.global_step) == (2, 20)
    assert_same_weights(module, other)
    trainer, _ = run_trainer(
        lambda: Classifier(by_epoch), make_loader, val_loader, max_epochs=3, fit={"ckpt_path": path}
    )
    assert (trainer.current_epoch, trainer.global_step) == (3, 30)
    assert_same_weights(module, Classifier.load_from_checkpoint(path, weights_only=True))


class Returning(Classifier):
    """Logs nothing."""

    def log(self, *args, **words):
        pass


def test_the_same_rows_and_columns_as_fabric_loop():
    for module in (None, WithMetrics, Plain, Returning):
        _, _, one = fit("MiniLoop", "one", 2, make_module=module, monitor=None)
        _, _, other = fit("FabricLoop", "other", 2, make_module=module, monitor=None)
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_what_lies_on_disk():
    fit("MiniLoop", "run", 2)
    fit("MiniLoop", "run", 1)
    fit("MiniLoop", "run", 1, version=7)
    found = sorted(path.as_posix() for kind in ("logs", "checkpoints") for path in Path(kind).rglob("*.*"))
    assert found == sorted(
        f"{kind}/run/version_{n}/{name}"
        for kind, names in {
            "logs": (".lock", "hparams.yaml", "metrics.csv"),
            "checkpoints": ("best.ckpt", "last.ckpt"),
        }.items()
        for n in (0, 1, 7)
        for name in names
    )


def test_load_takes_the_weights_only_and_validate_measures_them():
    loop, module, rows = fit("MiniLoop", "run", 2)
    other = Classifier(by_epoch)
    [found] = MiniLoop(name="run", accelerator="cpu").validate(other, val_loader(), load="last")
    assert_same_weights(module, other)
    assert found == {name: rows[name].iloc[-1] for name in ("val_loss", "val_acc")}
    again = MiniLoop(name="run", max_epochs=1, accelerator="cpu")
    again.fit(other, make_loader(), load="best")
    assert (again.current_epoch, again.log_dir) == (1, str(Path("logs/run/version_1").resolve()))


class Counting(Classifier):
    """Keeps in the checkpoint what is its own."""

    count = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.count += 1
        assert self.trainer.callback_metrics["train_loss"] == self.trainer.callback_metrics["train_loss_step"]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint):
        self.count = checkpoint["count"]


def test_a_module_keeps_its_own_in_the_checkpoint():
    fit("MiniLoop", "run", 1, make_module=Counting)
    _, module, _ = fit("MiniLoop", "run", 3, make_module=Counting, resume="last")
    assert module.count == 30


def test_a_finished_run_stays_finished():
    _, module, rows = fit("MiniLoop", "run", 2)
    before = Path("logs/run/version_0/metrics.csv").read_bytes()
    _, again, same_rows = fit("MiniLoop", "run", 2, resume="auto")
    assert_same_weights(module, again)
    pd.testing.assert_frame_equal(rows, same_rows)
    assert Path("logs/run/version_0/metrics.csv").read_bytes() == before


# ---- ended from outside


class Killed(Classifier):
    """In the midst of a step, by itself: at the same place on each machine."""

    def __init__(self, step):
        super().__init__(by_epoch)
        self.last = step

    def on_train_batch_end(self, *_):
        if self.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(rank, step):
    _, module, _ = fit("MiniLoop", "killed", 4, resume="auto", make_module=lambda: Killed(step))
    torch.save(module.state_dict(), "end.pt")


def test_killed_anywhere_it_ends_with_the_same_weights_and_rows():
    """Before anything is saved, and twice later."""
    _, expected, rows = fit("MiniLoop", "whole", 4)
    for step, code in ((5, -signal.SIGKILL), (17, -signal.SIGKILL), (25, -signal.SIGKILL), (None, 0)):
        codes, errors = externally(run_killed, step, ranks=1, is_launched=False)
        assert codes == [code], errors
    torch.testing.assert_close(torch.load("end.pt", weights_only=True), expected.state_dict(), rtol=0, atol=0)
    *_, newest = sorted(
        Path("logs/killed").iterdir()
    )  # one that was killed before its first epoch's end has left its folder
    assert pd.read_csv(newest / "metrics.csv").drop(columns="time").equals(rows)


def test_ctrl_c_ends_it_behind_the_step_and_it_goes_on_from_the_last_whole_epoch(capfd):
    class Interrupted(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            if (self.current_epoch, batch_idx) == (2, 3):
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    loop, module, rows = fit("MiniLoop", "run", 4, make_module=lambda: Interrupted(by_epoch))
    assert (loop.current_epoch, loop.global_step, len(rows)) == (2, 24, 2)
    assert "resume='last'" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert module.training
    assert torch.is_grad_enabled()
    _, expected, whole = fit("MiniLoop", "whole", 4)
    _, again, rows = fit("MiniLoop", "run", 4, resume="last")
    assert_same_weights(expected, again)
    pd.testing.assert_frame_equal(whole, rows)


# ---- several processes


class Ranked(Classifier):
    def __init__(self):
        super().__init__(sgd)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_two_processes_have_trainers_bits(strategy):
    words = {"max_epochs": 2, "devices": 2, "accumulate_grad_batches": 2}
    _, expected = run_trainer(Ranked, make_loader, val_loader, strategy="ddp_fork", **words)
    loop, module = run_mini(Ranked, make_loader, val_loader, strategy=strategy, monitor="val_loss", **words)
    assert_same_weights(expected, module)
    assert (loop.current_epoch, loop.global_step, len(loop.history)) == (2, 6, 2)
    if strategy == "ddp_spawn":  # whose processes import everything: once is enough
        return
    run_mini(Ranked, make_loader, val_loader, strategy=strategy, name="parts", seed=1, **{**words, "max_epochs": 1})
    _, again = run_mini(
        Ranked, make_loader, val_loader, strategy=strategy, name="parts", fit={"resume": "last"}, **words
    )
    assert_same_weights(expected, again)


# ---- alone


def test_it_imports_torch_fabric_and_the_standard_library_only():
    found = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(".".join(node.module.split(".")[:2]))
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
    others = found - set(sys.stdlib_module_names) - {"collections.abc"}
    assert others == {"torch", "torch.utils", "lightning.fabric", "numpy", "pandas", "tqdm", "yaml"} & others
    assert "lightning.fabric" in others


ALONE = """
import sys
import lightning.fabric, torch.utils.data  # the package lightning imports lightning.pytorch by itself
blocked = "fabric_template", "lightning.pytorch", "pytorch_lightning", "pandas"
for name in [name for name in sys.modules if name.startswith(blocked)]:
    del sys.modules[name]
for name in blocked:
    sys.modules[name] = None
{how}
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(12, 2), torch.randn(12, 1))
def fit(epochs, resume=None):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
    loop = MiniLoop(max_epochs=epochs, accelerator="cpu", seed=1)
    rows = loop.fit(net, DataLoader(data, 4, shuffle=True), DataLoader(data, 4), resume=resume, training_step=step,
                    validation_step=step, optimizer=torch.optim.Adam(net.parameters()))
    return loop, net, rows
fit(2)
loop, net, rows = fit(3, resume="last")
assert [row["epoch"] for row in rows] == [0, 1, 2], rows
[found] = loop.validate(net, DataLoader(data, 4), validation_step=lambda net, batch: net(batch[0]).mean())
assert list(found) == ["val_loss"], found
print("well")
"""


def test_only_the_file_in_an_empty_folder_under_any_name_or_pasted(tmp_path):
    Path("my_own_loop.py").write_bytes(FILE.read_bytes())
    words = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    ways = [
        ALONE.format(how=how) for how in ("from my_own_loop import MiniLoop", "exec(open('my_own_loop.py').read())")
    ]
    twice = "".join(f"exec({way!r}, {{'__name__': '__main__'}})\n" for way in ways)
    done = subprocess.run(ready([sys.executable, "-c", twice]), **words)
    assert done.stdout.count("well\n") == 2, done.stderr


# ---- what it refuses, before anything is written


class ByHand(Classifier):
    automatic_optimization = False


class OwnBackward(Classifier):
    def backward(self, loss):
        loss.backward()


class Nothing(nn.Module):
    pass


REFUSED = {
    "by hand": (lambda: MiniLoop().fit(ByHand(), make_loader()), TypeError, "ByHand optimizes by hand, which MiniLoop leaves to"
                " FabricLoop: use that"),
    "hooks": (lambda: MiniLoop().fit(OwnBackward(), make_loader()), TypeError, "OwnBackward has backward, which MiniLoop leaves"
              " to FabricLoop: use that"),
    "no step": (lambda: MiniLoop().fit(Nothing(), make_loader()), TypeError, "fit got no training_step: expected one of"
                " Nothing, or as an argument of fit"),
    "several": (lambda: MiniLoop(accelerator="cpu").fit(Classifier(), [make_loader(), make_loader()]), TypeError, "MiniLoop"
                " got a list as its train loader: expected one iterable of batches, in several processes a torch DataLoader;"
                " FabricLoop takes others"),
    "by name": (lambda: MiniLoop(accelerator="cpu").fit(Classifier(), make_loader(), {"a": make_loader()}), TypeError,
                "MiniLoop got a dict as its val loader: expected one iterable of batches"),
    "a tensor": (lambda: MiniLoop(accelerator="cpu").fit(Classifier(), torch.ones(4, 2)), TypeError, "MiniLoop"
                 " got a Tensor as its train loader: expected one iterable of batches"),
    "mode": (lambda: MiniLoop(mode="best"), ValueError, "expected mode 'min' or 'max', accumulate_grad_batches >= 1, a"
             " folder as name"),
    "resume": (lambda: MiniLoop(accelerator="cpu").fit(Classifier(), make_loader(), resume="last"), ValueError, "resume='last':"
               " there is no "),
    "optimizer": (lambda: MiniLoop(accelerator="cpu").fit(Classifier(lambda module: "adam"), make_loader()), TypeError,
                  "configure_optimizers gave 'adam': expected one optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    call, kind, words = REFUSED[name]
    with pytest.raises(kind) as error:
        call()
    assert words in str(error.value)
    assert os.listdir(".") == []


def test_a_version_that_is_there_is_not_written_over():
    run_mini(Classifier, make_loader, max_epochs=1, version=0)
    before = {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"last.ckpt' is of another run: go on with resume='last', or leave version= out"
    ):
        run_mini(Classifier, make_loader, max_epochs=1, version=0)
    assert before == {path: path.read_bytes() for path in Path().rglob("*.*") if path.is_file()}
    loop, _ = run_mini(Classifier, make_loader, max_epochs=2, version=0, fit={"resume": "auto"})
    assert len(loop.history) == 2


def test_an_epoch_whose_rest_a_hook_leaves_out_is_refused():
    class LeavesOut(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    with pytest.raises(
        TypeError, match="on_train_batch_start returned -1, to leave out an epoch's rest: use FabricLoop"
    ):
        run_mini(LeavesOut, make_loader, max_epochs=1)


def test_a_monitor_that_was_not_logged_costs_no_epoch():
    with pytest.raises(ValueError, match=r"monitor='val_los' was not logged: expected one of .*last.ckpt is saved"):
        run_mini(Classifier, make_loader, val_loader, monitor="val_los", max_epochs=2)
    loop, _ = run_mini(Classifier, make_loader, val_loader, max_epochs=2, fit={"resume": "last"})
    assert len(loop.history) == 2


def test_in_a_thread_it_trains_without_a_handler_of_its_own():
    done = []
    thread = threading.Thread(target=lambda: done.append(run_mini(Classifier, make_loader, max_epochs=1)))
    thread.start()
    thread.join()
    assert len(done) == 1


class Sized(Classifier):
    """Says how much each value weighs, once as a float."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("float", loss, on_epoch=True, batch_size=float(2 + batch_idx))
        self.log("int", loss, on_epoch=True, batch_size=2 + batch_idx)
        return loss


def test_a_batch_size_need_not_be_an_int(tmp_path):
    """A value that counts by a sum of weights, which is a float."""
    loop = MiniLoop(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path)
    loop.fit(Sized(), make_loader(16))
    found = loop.callback_metrics
    assert found["float_epoch"] == found["int_epoch"]

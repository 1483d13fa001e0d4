"""A hundred plausible wrong inputs: each is answered by one line that says what to write, before anything is written."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from modules import Classifier, make_data, make_loader
from runs import Plain, loud, tree
from torch import nn
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, TensorLoader, plot_logs, read_logs

# What each is answered with, the whole line, as `name: Kind: words`; "..." at its end: Fabric's own words go on.
ANSWERS = dict(line.split(": ", 1) for line in Path(__file__).with_name("wrong_inputs.txt").read_text().splitlines())

# Neither ValueError nor TypeError, on purpose: a package that is missing, and code written for Trainer that catches its kinds.
OTHER_KINDS = {"accelerator_missing": ModuleNotFoundError, "optimizer_two": RuntimeError}


def words(**given):
    """A loop with a wrong word."""
    return lambda root: FabricLoop(**{**loud(root), **given})


def fit(*args, loop=None, owner=None, train=None, **given):
    """A fit with a wrong argument, the others being right."""

    def call(root):
        model = args[0] if args else (owner or Plain)()
        rest = args[1:] if len(args) > 1 else [(train or make_loader)()]
        FabricLoop(**loud(root, max_epochs=1, **(loop or {}))).fit(model, *rest, **given)

    return call


def net_and_step(**given):
    """A fit of a net with step functions, one argument of which is wrong."""

    def call(root):
        net = nn.Linear(8, 3)
        step = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
        known = {"training_step": step, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
        made = {name: value(net) if getattr(value, "of_net", False) else value for name, value in given.items()}
        FabricLoop(**loud(root, max_epochs=1)).fit(net, make_loader(), **{**known, **made})

    return call


def of_net(function):
    function.of_net = True
    return function


def with_method(**methods):
    """A fit of an object with a wrong method."""

    def call(root):
        owner = type("Own", (Plain,), methods)()
        val = make_loader() if "validation_step" in methods else None
        FabricLoop(**loud(root, max_epochs=1)).fit(owner, make_loader(), val)

    return call


def configured(configure):
    """A fit of a module with another configure_optimizers."""
    return with_method(configure_optimizers=configure)


def verb(name, *args, owner=None, **given):
    """Another verb with a wrong argument."""

    def call(root):
        made = [make_loader() if arg == "loader" else arg for arg in args]
        getattr(FabricLoop(**loud(root)), name)((owner or Plain)(), *made, **given)

    return call


def part(function):
    """Rung 1 with a wrong argument."""
    return lambda root: function(FabricLoop(**loud(root)), root)


def file(name, content, verb="resume", owner=Plain):
    """A resume from what is no checkpoint."""

    def call(root):
        path = Path(f"files/{name}")
        path.parent.mkdir(exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        FabricLoop(**loud(root, max_epochs=1)).fit(owner(), make_loader(), **{verb: path})

    return call


SGD = torch.optim.SGD
XY = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))


class Data:
    def train_dataloader(self):
        return make_loader()


CASES = {
    # ---- the words of the loop
    "max_epochs_text": words(max_epochs="3"),
    "max_epochs_float": words(max_epochs=2.5),
    "max_epochs_negative": words(max_epochs=-2),
    "max_steps_none": words(max_steps=None),
    "max_time_words": words(max_time="10m"),
    "max_time_seconds": words(max_time=60),
    "max_time_keywords": words(max_time={"mins": 3}),
    "limit_too_large": words(limit_train_batches=1.5),
    "limit_percent": words(limit_val_batches="10%"),
    "val_check_interval_zero": words(val_check_interval=0),
    "val_check_interval_above_one": words(val_check_interval=1.5),
    "check_val_zero": words(check_val_every_n_epoch=0),
    "accumulate_zero": words(accumulate_grad_batches=0),
    "accumulate_schedule": words(accumulate_grad_batches={0: 2}),
    "clip_text": words(gradient_clip_val="1.0"),
    "clip_negative": words(gradient_clip_val=-1),
    "clip_algorithm": words(gradient_clip_algorithm="l2"),
    "monitor_list": words(monitor=["val_loss"]),
    "mode": words(monitor="val_acc", mode="maximum"),
    "top_k": words(monitor="val_acc", save_top_k=-2),
    "top_k_without_monitor": words(save_top_k=3),
    "save_every_zero": words(save_every_n_steps=0),
    "name_empty": words(name=""),
    "name_path": words(name="runs/digits"),
    "name_none": words(name=None),
    "version_path": words(version="../x"),
    "version_float": words(version=1.5),
    "version_negative": words(version=-1),
    "logger_csv": words(logger="csv"),
    "logger_tensorboard": words(logger="tensorboard"),
    "logger_object": words(logger=object()),
    "logger_class": words(logger=pd.DataFrame),
    "loggers_number": words(loggers=[1]),
    "logger_and_loggers": words(logger=True, loggers=[]),
    "callbacks_text": words(callbacks="early_stopping"),
    "callbacks_class": words(callbacks=[EarlyStopping]),
    "callbacks_function": words(callbacks=[print]),
    "callbacks_none": words(callbacks=[None]),
    "callbacks_dict": words(callbacks={"early": EarlyStopping("val_loss")}),
    "seed_text": words(seed="42"),
    "seed_negative": words(seed=-1),
    "compile_text": words(compile="inductor"),
    "profiler": words(profiler="fast"),
    "deterministic": words(deterministic="yes"),
    "precision_fp16": words(precision="fp16"),
    "precision_eight": words(precision=8),
    "accelerator_unknown": words(accelerator="cuda:0"),
    "accelerator_missing": words(accelerator="tpu"),
    "devices_text": words(devices="two"),
    "devices_zero": words(devices=0),
    "strategy": words(strategy="horovod"),
    "num_nodes": words(num_nodes=0),
    "plugins": words(plugins="amp"),
    "fabric_text": words(fabric="cpu"),
    "fabric_trainer": lambda root: FabricLoop(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)),
    "fabric_class": lambda root: FabricLoop(Fabric),
    "epochs_positional": lambda root: FabricLoop(10),
    "fabric_and_precision": lambda root: FabricLoop(Fabric(accelerator="cpu"), precision="bf16-mixed"),
    "root_number": words(default_root_dir=3),
    "root_file": lambda root: FabricLoop(**loud(Path("file.txt").write_text("x") and "file.txt", max_epochs=1)).fit(
        Plain(), make_loader()
    ),
    "root_url": words(default_root_dir="s3://bucket/runs"),
    "log_every_float": words(log_every_n_steps=0.5),
    "sanity": words(num_sanity_val_steps=-2),
    "overfit": words(overfit_batches=2.0),
    "fast_dev_run_text": words(fast_dev_run="yes"),
    "reload": words(reload_dataloaders_every_n_epochs=-1),
    "inference_mode": words(inference_mode="no"),
    "progress_bar": words(enable_progress_bar="no"),
    "benchmark": words(benchmark="auto"),
    "detect_anomaly": words(detect_anomaly=1),
    "word_epochs": words(epochs=3),
    "word_max_epoch": words(max_epoch=3),
    "word_lr": words(lr=0.1),
    "word_gpus": words(gpus=1),
    "word_resume": words(resume_from_checkpoint="last.ckpt"),
    "word_callback": words(callback=[]),
    "word_amp": words(amp=True),
    "word_of_trainer": words(sync_batchnorm=True),
    # ---- the model
    "model_class": fit(Plain),
    "model_lightning_class": fit(Classifier),
    "model_path": fit("last.ckpt"),
    "model_none": fit(None),
    "model_list": fit([nn.Linear(8, 3)]),
    "model_function": fit(lambda x: x),
    "model_bare_net": fit(nn.Linear(8, 3)),
    "step_without_batch": with_method(training_step=lambda self: None),
    "step_with_four": with_method(training_step=lambda self, batch, batch_idx, optimizer, epoch: None),
    "step_is_text": with_method(training_step="step"),
    "step_is_static": with_method(training_step=torch.zeros(())),
    "validation_without_batch": with_method(validation_step=lambda self: None),
    "validation_with_four": with_method(validation_step=lambda self, batch, batch_idx, dataloader_idx, more: None),
    "function_text": net_and_step(training_step="step"),
    "function_without_net": net_and_step(training_step=lambda batch: None),
    "function_with_five": net_and_step(training_step=lambda net, batch, batch_idx, epoch, more: None),
    "function_of_validation": net_and_step(validation_step=lambda batch: None, val_dataloaders=[XY]),
    "function_called": net_and_step(training_step=torch.zeros(())),
    # ---- loaders
    "loader_dataset": fit(Plain(), make_data()),
    "loader_path": fit(Plain(), "data/train"),
    "loader_pathlib": fit(Plain(), Path("data/train")),
    "loader_tensor": fit(Plain(), torch.zeros(8, 8)),
    "loader_array": fit(Plain(), np.zeros((8, 8))),
    "loader_pair_of_tensors": fit(Plain(), XY),
    "loader_dict_of_tensors": fit(Plain(), {"x": XY[0], "y": XY[1]}),
    "loader_frame": fit(Plain(), pd.DataFrame({"x": [1.0], "y": [0]})),
    "loader_class": fit(Plain(), DataLoader),
    "loader_function": fit(Plain(), make_loader),
    "loader_number": fit(Plain(), 32),
    "loader_true": fit(Plain(), True),
    "loader_empty_dict": fit(Plain(), {}),
    "loader_list_of_none": fit(Plain(), [None]),
    "loader_with_none": fit(Plain(), [make_loader(), None]),
    "val_dataset": fit(Plain(), make_loader(), make_data()),
    "val_path": fit(Plain(), make_loader(), "data/val"),
    "val_tensors": fit(Plain(), make_loader(), XY),
    "datamodule_class": fit(Plain(), None, datamodule=Data),
    "datamodule_loader": fit(Plain(), None, datamodule=make_loader()),
    "datamodule_without": fit(Plain(), None, datamodule=object()),
    "datamodule_and_loader": fit(Plain(), make_loader(), datamodule=Data()),
    "loaders_positional_optimizer": lambda root: fit(net := Plain(), make_loader(), SGD(net.net.parameters(), lr=0.1))(
        root
    ),
    # ---- optimizers
    "optimizer_class": net_and_step(optimizer=SGD),
    "optimizer_text": net_and_step(optimizer="adam"),
    "optimizer_partial": net_and_step(optimizer=functools.partial(SGD, lr=0.1)),
    "optimizer_rate": net_and_step(optimizer=0.1),
    "optimizer_of_another_model": net_and_step(optimizer=SGD(nn.Linear(8, 3).parameters(), lr=0.1)),
    "optimizer_scheduler": net_and_step(
        optimizer=of_net(lambda net: torch.optim.lr_scheduler.StepLR(SGD(net.parameters(), lr=0.1), 1))
    ),
    "optimizer_two": with_method(configure_optimizers=lambda self: [SGD(self.net.parameters(), lr=0.1) for _ in "ab"]),
    "optimizer_keys": net_and_step(optimizer=of_net(lambda net: {"optim": SGD(net.parameters(), lr=0.1)})),
    "configure_text": configured(lambda self: "adam"),
    "configure_of_another_model": configured(lambda self: SGD(nn.Linear(8, 3).parameters(), lr=0.1)),
    "configure_plateau": configured(
        lambda self: {
            "optimizer": (optimizer := SGD(self.net.parameters(), lr=0.1)),
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        }
    ),
    "configure_interval": configured(
        lambda self: {
            "optimizer": (optimizer := SGD(self.net.parameters(), lr=0.1)),
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "batch"},
        }
    ),
    # ---- resume and load
    "resume_true": fit(resume=True),
    "resume_number": fit(resume=3),
    "resume_word": fit(resume="latest"),
    "resume_bytes": fit(resume=b"last.ckpt"),
    "resume_dict": fit(resume={"state_dict": {}}),
    "resume_missing": fit(resume="checkpoints/no.ckpt"),
    "resume_last_of_nothing": fit(resume="last"),
    "resume_url": fit(resume="s3://bucket/last.ckpt"),
    "resume_folder": fit(resume="."),
    "resume_and_load": fit(resume="last", load="best"),
    "load_true": fit(load=True),
    "load_auto": fit(load="auto"),
    "load_state_dict": fit(load=nn.Linear(8, 3).state_dict()),
    "load_model": fit(load=nn.Linear(8, 3)),
    "resume_text_file": file("last.ckpt", b"not a checkpoint\n"),
    "resume_empty_file": file("last.ckpt", b""),
    "resume_csv": file("metrics.csv", b"epoch,step\n0,1\n"),
    "resume_weights_only": file("w.pt", lambda path: torch.save(nn.Linear(8, 3).state_dict(), path)),
    "load_of_another_model": file("w.pt", lambda path: torch.save(nn.Linear(5, 3).state_dict(), path), verb="load"),
    "load_list": file("w.pt", lambda path: torch.save([1, 2], path), verb="load"),
    "load_whole_model": file("w.pt", lambda path: torch.save(nn.Linear(8, 3), path), verb="load"),
    "load_json": file("w.json", json.dumps({"w": 1}).encode(), verb="load"),
    # ---- the other verbs
    "validate_nothing": lambda root: FabricLoop(**loud(root)).validate(),
    "validate_without_loader": verb("validate"),
    "validate_dataset": verb("validate", make_data()),
    "validate_load_auto": verb("validate", "loader", load="auto"),
    "test_without_step": verb("test", "loader"),
    "predict_without_step": verb("predict", "loader"),
    "predict_path": verb("predict", "data/test", owner=Classifier),
    "predict_load_missing": verb("predict", "loader", owner=Classifier, load="best"),
    # ---- rung 1 and the tools
    "parts_setup_text": part(lambda loop, root: loop.setup("net")),
    "parts_setup_optimizer": part(lambda loop, root: loop.setup(nn.Linear(8, 3), "adam")),
    "parts_setup_loader_second": part(lambda loop, root: loop.setup(nn.Linear(8, 3), make_loader())),
    "parts_backward_number": part(lambda loop, root: loop.backward(0.5)),
    "parts_log_text": part(lambda loop, root: loop.log_dict("loss")),
    "parts_log_vector": part(lambda loop, root: loop.log_dict({"epoch": 0, "loss": torch.zeros(2)})),
    "parts_save_swapped": part(lambda loop, root: loop.save({"net": nn.Linear(8, 3)}, f"{root}/mine.ckpt")),
    "parts_save_function": part(lambda loop, root: loop.save("odd.ckpt", {"note": len, "more": lambda: 0})),
    "parts_load_missing": part(lambda loop, root: loop.load("no.ckpt", {})),
    "tensors_none": lambda root: TensorLoader(),
    "tensors_lists": lambda root: TensorLoader([1, 2], [3, 4]),
    "tensors_lengths": lambda root: TensorLoader(torch.zeros(4), torch.zeros(3)),
    "tensors_batch_size_positional": lambda root: TensorLoader(*XY, 32),
    "tensors_batch_size_text": lambda root: TensorLoader(*XY, batch_size="32"),
    "tensors_scalar": lambda root: TensorLoader(torch.tensor(1.0)),
    "read_logs_missing": lambda root: read_logs("no/such/folder"),
    "read_logs_frame": lambda root: read_logs(pd.DataFrame({"epoch": [0]})),
    "plot_logs_metric": lambda root: plot_logs(pd.DataFrame({"epoch": [0], "val_loss": [1.0]}), metrics=["val_los"]),
    "plot_logs_number": lambda root: plot_logs(3),
}


def answer_to(call, folder):
    """The error as one line; paths and addresses, which are others each time, by a word."""
    root = folder / "root"
    try:
        call(str(root))
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+", "ADDRESS", str(error)).replace(str(root), "ROOT").replace(str(folder), "FOLDER")
        return error, f"{type(error).__name__}: {text}", tree(root) if root.exists() else []
    return None, "no error", []


@pytest.mark.parametrize("name", CASES)
def test_it_is_answered_by_one_line_before_anything_is_written(name, tmp_path):
    error, answer, left = answer_to(CASES[name], tmp_path)
    expected = ANSWERS[name]
    assert answer == expected or (expected.endswith("...") and answer.startswith(expected[:-3]))
    assert isinstance(error, OTHER_KINDS.get(name, (ValueError, TypeError)))
    assert "\n" not in answer
    assert left == []


def test_every_answer_has_its_case():
    assert list(ANSWERS) == list(CASES)
    assert len(CASES) >= 105
    assert len(OTHER_KINDS) <= 5

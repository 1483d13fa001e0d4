"""Test that each wrong input raises a one-line error with the fix before anything is written."""

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
from runs import Plain, tree, with_files
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from fabric_template import FabricLoop, TensorLoader, plot_logs, read_logs

# Each line has the form "case: Class: message". A message that ends with "..." is compared only up
# to that point, because the rest depends on the versions of Lightning and torch.
ERRORS = dict(line.split(": ", 1) for line in Path(__file__).with_name("wrong_inputs.txt").read_text().splitlines())

# Two cases raise neither ValueError nor TypeError. One reports a missing
# package. The other raises the class that code written for Trainer catches.
OTHER_KINDS = {"accelerator_missing": ModuleNotFoundError, "optimizer_two": RuntimeError}


def options(**given):
    """Return a function that creates a loop with a wrong option."""
    return lambda root: FabricLoop(**{**with_files(root), **given})


def fit(*args, **given):
    """Return a function that calls fit with a wrong model, loader or other argument."""

    def call(root):
        model, *loaders = args or (Plain(),)
        FabricLoop(**with_files(root, max_epochs=1)).fit(model, *(loaders or [make_loader()]), **given)

    return call


def fit_functions(**given):
    """Return a function that calls fit with step functions and one wrong argument."""

    def training_step(net, batch):
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    def call(root):
        net = nn.Linear(8, 3)
        right = {"training_step": training_step, "optimizer": SGD(net.parameters(), lr=0.1)}
        FabricLoop(**with_files(root, max_epochs=1)).fit(net, make_loader(), **{**right, **given})

    return call


def partly_of_another(net, other=None):
    """Return an optimizer that has parameters of the network and of another network."""
    others = nn.Linear(4, 2).parameters() if other is None else [other]
    return SGD([*net.parameters(), *others], lr=0.1)


def with_method(**methods):
    """Return a function that calls fit with an object that has a wrong method."""

    def call(root):
        val = make_loader() if "validation_step" in methods else None
        model = type("Network", (Plain,), methods)()
        FabricLoop(**with_files(root, max_epochs=1)).fit(model, make_loader(), val)

    return call


def call_of(name, *args, model=Plain, **given):
    """Return a function that calls a method such as validate with a wrong argument."""

    def call(root):
        made = [make_loader() if arg == "loader" else arg for arg in args]
        getattr(FabricLoop(**with_files(root)), name)(model(), *made, **given)

    return call


def level_1(function):
    """Return a function that calls a method such as loop.setup with a wrong argument."""
    return lambda root: function(FabricLoop(**with_files(root)), root)


def file(name, content, argument="resume"):
    """Return a function that resumes or loads a file that is not a checkpoint of this model."""

    def call(root):
        path = Path("files", name)
        path.parent.mkdir(exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content)
        fit(**{argument: path})(root)

    return call


def plateau(self):
    optimizer = SGD(self.net.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer)}


def by_batch(self):
    optimizer = SGD(self.net.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "batch"}}


SGD = torch.optim.SGD
XY = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))


class DataModule:
    def train_dataloader(self):
        return make_loader()


CASES = {
    # ---- wrong options of the loop
    "max_epochs_text": options(max_epochs="3"),
    "max_epochs_float": options(max_epochs=2.5),
    "max_epochs_negative": options(max_epochs=-2),
    "max_steps_none": options(max_steps=None),
    "max_time_words": options(max_time="10m"),
    "max_time_seconds": options(max_time=60),
    "max_time_keywords": options(max_time={"mins": 3}),
    "limit_too_large": options(limit_train_batches=1.5),
    "limit_percent": options(limit_val_batches="10%"),
    "val_check_interval_zero": options(val_check_interval=0),
    "val_check_interval_above_one": options(val_check_interval=1.5),
    "check_val_zero": options(check_val_every_n_epoch=0),
    "accumulate_zero": options(accumulate_grad_batches=0),
    "accumulate_schedule": options(accumulate_grad_batches={0: 2}),
    "clip_text": options(gradient_clip_val="1.0"),
    "clip_negative": options(gradient_clip_val=-1),
    "clip_algorithm": options(gradient_clip_algorithm="l2"),
    "monitor_list": options(monitor=["val_loss"]),
    "mode": options(monitor="val_acc", mode="maximum"),
    "top_k": options(monitor="val_acc", save_top_k=-2),
    "top_k_without_monitor": options(save_top_k=3),
    "save_every_zero": options(save_every_n_steps=0),
    "name_empty": options(name=""),
    "name_path": options(name="runs/digits"),
    "name_none": options(name=None),
    "version_path": options(version="../x"),
    "version_float": options(version=1.5),
    "version_negative": options(version=-1),
    "logger_comet": options(logger="comet"),
    "logger_object": options(logger=DataModule()),
    "logger_class": options(logger=pd.DataFrame),
    "loggers_number": options(loggers=[1]),
    "logger_and_loggers": options(logger=True, loggers=[]),
    "callbacks_text": options(callbacks="early_stopping"),
    "callbacks_class": options(callbacks=[EarlyStopping]),
    "callbacks_function": options(callbacks=[make_loader]),
    "callbacks_none": options(callbacks=[None]),
    "callbacks_dict": options(callbacks={"early": EarlyStopping("val_loss")}),
    "seed_text": options(seed="42"),
    "seed_negative": options(seed=-1),
    "compile_text": options(compile="inductor"),
    "profiler": options(profiler="fast"),
    "deterministic": options(deterministic="yes"),
    "precision_fp16": options(precision="fp16"),
    "precision_eight": options(precision=8),
    "accelerator_unknown": options(accelerator="cuda:0"),
    "accelerator_missing": options(accelerator="tpu"),
    "devices_text": options(devices="two"),
    "devices_zero": options(devices=0),
    "strategy": options(strategy="horovod"),
    "num_nodes": options(num_nodes=0),
    "plugins": options(plugins="amp"),
    "fabric_text": options(fabric="cpu"),
    "fabric_trainer": lambda root: FabricLoop(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)),
    "fabric_class": lambda root: FabricLoop(Fabric),
    "epochs_positional": lambda root: FabricLoop(10),
    "fabric_and_precision": lambda root: FabricLoop(Fabric(accelerator="cpu"), precision="bf16-mixed"),
    "root_number": options(default_root_dir=3),
    "root_file": lambda root: FabricLoop(
        **with_files(Path("file.txt").write_text("x") and "file.txt", max_epochs=1)
    ).fit(Plain(), make_loader()),
    "root_url": options(default_root_dir="s3://bucket/runs"),
    "log_every_float": options(log_every_n_steps=0.5),
    "sanity": options(num_sanity_val_steps=-2),
    "overfit": options(overfit_batches=2.0),
    "fast_dev_run_text": options(fast_dev_run="yes"),
    "reload": options(reload_dataloaders_every_n_epochs=-1),
    "inference_mode": options(inference_mode="no"),
    "progress_bar": options(enable_progress_bar="no"),
    "benchmark": options(benchmark="auto"),
    "detect_anomaly": options(detect_anomaly=1),
    "option_epochs": options(epochs=3),
    "option_max_epoch": options(max_epoch=3),
    "option_lr": options(lr=0.1),
    "option_gpus": options(gpus=1),
    "option_resume": options(resume_from_checkpoint="last.ckpt"),
    "option_callback": options(callback=[]),
    "option_amp": options(amp=True),
    "option_of_trainer": options(sync_batchnorm=True),
    # ---- wrong models and step functions
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
    "function_text": fit_functions(training_step="step"),
    "function_without_net": fit_functions(training_step=lambda batch: None),
    "function_with_five": fit_functions(training_step=lambda net, batch, batch_idx, epoch, more: None),
    "function_of_validation": fit_functions(validation_step=lambda batch: None, val_dataloaders=[XY]),
    "function_called": fit_functions(training_step=torch.zeros(())),
    # ---- wrong loaders and datamodules
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
    "datamodule_class": fit(Plain(), None, datamodule=DataModule),
    "datamodule_loader": fit(Plain(), None, datamodule=make_loader()),
    "datamodule_without": fit(Plain(), None, datamodule=object()),
    "datamodule_and_loader": fit(Plain(), make_loader(), datamodule=DataModule()),
    "loaders_positional_optimizer": fit(Plain(), make_loader(), SGD(nn.Linear(8, 3).parameters(), lr=0.1)),
    # ---- wrong optimizers and schedulers
    "optimizer_class": fit_functions(optimizer=SGD),
    "optimizer_text": fit_functions(optimizer="adam"),
    "optimizer_partly_of_another_model": fit_functions(optimizer=lambda net: partly_of_another(net)),
    "optimizer_tensor": fit_functions(optimizer=lambda net: partly_of_another(net, torch.zeros(2, requires_grad=True))),
    "scheduler_class": fit_functions(scheduler=StepLR),
    "scheduler_partial": fit_functions(scheduler=functools.partial(StepLR, step_size=1)),
    "scheduler_of_another_optimizer": fit_functions(scheduler=StepLR(SGD(nn.Linear(8, 3).parameters(), lr=0.1), 1)),
    "configure_partly_of_another_model": with_method(configure_optimizers=lambda self: partly_of_another(self.net)),
    "optimizer_rate": fit_functions(optimizer=0.1),
    "optimizer_of_another_model": fit_functions(optimizer=SGD(nn.Linear(8, 3).parameters(), lr=0.1)),
    "optimizer_scheduler": fit_functions(optimizer=StepLR(SGD(nn.Linear(8, 3).parameters(), lr=0.1), 1)),
    "optimizer_two": with_method(configure_optimizers=lambda self: [SGD(self.net.parameters(), lr=0.1) for _ in "ab"]),
    "optimizer_keys": fit_functions(optimizer={"optim": SGD(nn.Linear(8, 3).parameters(), lr=0.1)}),
    "configure_text": with_method(configure_optimizers=lambda self: "adam"),
    "configure_of_another_model": with_method(
        configure_optimizers=lambda self: SGD(nn.Linear(8, 3).parameters(), lr=0.1)
    ),
    "configure_plateau": with_method(configure_optimizers=plateau),
    "configure_interval": with_method(configure_optimizers=by_batch),
    # ---- wrong values of resume and load
    "resume_true": fit(resume=True),
    "resume_number": fit(resume=3),
    "resume_unknown_text": fit(resume="latest"),
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
    "resume_without_counters": file("w.pt", lambda path: torch.save({"state_dict": {}, "optimizer_states": []}, path)),
    "load_of_another_model": file("w.pt", lambda path: torch.save(nn.Linear(5, 3).state_dict(), path), argument="load"),
    "load_list": file("w.pt", lambda path: torch.save([1, 2], path), argument="load"),
    "load_whole_model": file("w.pt", lambda path: torch.save(nn.Linear(8, 3), path), argument="load"),
    "load_json": file("w.json", json.dumps({"w": 1}).encode(), argument="load"),
    # ---- wrong calls of validate, test and predict
    "validate_nothing": lambda root: FabricLoop(**with_files(root)).validate(),
    "validate_without_loader": call_of("validate"),
    "validate_dataset": call_of("validate", make_data()),
    "validate_load_auto": call_of("validate", "loader", load="auto"),
    "test_without_step": call_of("test", "loader"),
    "predict_without_step": call_of("predict", "loader"),
    "predict_path": call_of("predict", "data/test", model=Classifier),
    "predict_load_missing": call_of("predict", "loader", model=Classifier, load="best"),
    # ---- wrong calls in hand-written loops, and wrong arguments of the tools
    "level_1_setup_text": level_1(lambda loop, root: loop.setup("net")),
    "level_1_setup_swapped": level_1(lambda loop, root: loop.setup(SGD(nn.Linear(8, 3).parameters(), lr=0.1))),
    "level_1_setup_optimizer": level_1(lambda loop, root: loop.setup(nn.Linear(8, 3), "adam")),
    "level_1_setup_loader_second": level_1(lambda loop, root: loop.setup(nn.Linear(8, 3), make_loader())),
    "level_1_backward_number": level_1(lambda loop, root: loop.backward(0.5)),
    "level_1_log_text": level_1(lambda loop, root: loop.log_dict("loss")),
    "level_1_log_vector": level_1(lambda loop, root: loop.log_dict({"epoch": 0, "loss": torch.zeros(2)})),
    "level_1_save_swapped": level_1(lambda loop, root: loop.save({"net": nn.Linear(8, 3)}, f"{root}/mine.ckpt")),
    "level_1_save_function": level_1(lambda loop, root: loop.save("odd.ckpt", {"note": len, "more": lambda: 0})),
    "level_1_load_missing": level_1(lambda loop, root: loop.load("no.ckpt", {})),
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


def error_of(call, folder):
    """Return (error, "Class: message", files that exist afterwards).

    Paths and addresses are replaced by fixed names.
    """
    root = folder / "root"
    try:
        call(str(root))
    except Exception as error:
        text = re.sub(r"0x[0-9a-f]+", "ADDRESS", str(error)).replace(str(root), "ROOT").replace(str(folder), "FOLDER")
        return error, f"{type(error).__name__}: {text}", tree(root) if root.exists() else []
    return None, "no error", []


@pytest.mark.parametrize("name", CASES)
def test_each_wrong_input_raises_a_one_line_error_before_anything_is_written(name, tmp_path):
    error, line, files = error_of(CASES[name], tmp_path)
    expected = ERRORS[name]
    if expected.endswith("..."):
        line = line[: len(expected) - 3] + "..."
    assert line == expected
    assert isinstance(error, OTHER_KINDS.get(name, (ValueError, TypeError)))
    assert "\n" not in line
    assert files == []


def test_wrong_inputs_txt_lists_exactly_the_tested_cases():
    assert list(ERRORS) == list(CASES)

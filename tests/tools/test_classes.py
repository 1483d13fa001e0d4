"""Callbacks and loggers by their classes, the help of a class, and files of LightningCLI: found, built, or told in a line."""

from pathlib import Path

import pytest
import yaml
from test_cli import FIT, LIT, QUIET, refused, run, typed  # noqa: F401

STOP = ["--callbacks+=EarlyStopping", "--callbacks.monitor=val_loss"]
OWN = """
class Hears:
    def __init__(self, word: str = "nothing"):
        self.word = word

    def on_train_start(self, loop, model):
        print("heard", self.word)
"""


@pytest.fixture
def own():
    Path("lit.py").write_text(LIT + OWN)


def test_callbacks_by_their_class_in_their_order(capsys, own):
    words = [*STOP, "--callbacks.stopping_threshold", 100, "--callbacks+=lit:Hears", "--callbacks.word", "hello"]
    words += ["--callbacks+", "Timer", "--callbacks.duration=00:01:00:00"]
    code, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 5, *words)
    assert (code, "heard hello\n" in out) == (0, True)
    assert "1 epoch, 4 steps" in out  # stopped early
    go_on = out.partition("go on       fabric-template ")[2].partition("\n")[0]
    assert go_on.endswith(
        "--max_epochs 10 --callbacks+=EarlyStopping --callbacks.monitor=val_loss --callbacks.stopping_threshold=100"
        " --callbacks+=lit:Hears --callbacks.word=hello --callbacks+=Timer --callbacks.duration=00:01:00:00"
    )
    found = yaml.safe_load(Path("logs/run/version_0/config.yaml").read_text())["callbacks"]
    assert [one["class_path"].rpartition(".")[2] for one in found] == ["EarlyStopping", "Hears", "Timer"]
    assert run(capsys, *go_on.split())[0] == 0


def test_callbacks_of_files_and_those_that_are_typed(capsys, own):
    Path("run.yaml").write_text("callbacks:\n- class_path: lit.Hears\n  init_args: {word: file}\n")
    _, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--config", "run.yaml")
    assert "heard file\n" in out
    _, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--config", "run.yaml", "--callbacks+", "lit.Hears")
    assert "heard file\nheard nothing\n" in out
    _, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--config", "run.yaml", "--callbacks", "null")
    assert "heard" not in out


def test_what_a_file_says_of_callbacks_is_a_class(capsys):
    for text, told in {"[3]": "3", "[{class_path: 4}]": "{'class_path': 4}", "{a: 1}": "{'a': 1}"}.items():
        Path("run.yaml").write_text(f"callbacks: {text}\n")
        assert refused(capsys, *FIT, "--config", "run.yaml") == (
            f"--callbacks: {told} is no class: expected its path, or class_path: and init_args: with what it takes"
        )


def test_a_logger_by_its_class(capsys):
    words = ["--logger", "TensorBoardLogger", "--logger.save_dir", "boards", "--logger.name=mine"]
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, *words)[0] == 0
    assert [path.name.partition(".")[0] for path in Path("boards/mine/version_0").iterdir()].count("events") == 1
    assert not Path("logs").exists()
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--logger", "false")[0] == 0
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--callbacks+=EarlyStoping"], "--callbacks=EarlyStoping: lightning.pytorch.callbacks has no such class: did you mean"
         " EarlyStopping; one of yours is package.module.Class"),
        (["--callbacks+=EarlyStopping"], "--callbacks.monitor is missing: EarlyStopping needs it;"
         " --callbacks.help=EarlyStopping lists what it takes"),
        ([*STOP, "--callbacks.patiense=3"], "--callbacks.patiense: EarlyStopping has no such argument;"
         " --callbacks.help=EarlyStopping lists what it takes"),
        ([*STOP, "--callbacks.patience=x"], "--callbacks.patience=x: EarlyStopping expects int"),
        ([*STOP, "--callbacks.mode=x"], "`mode` can be min, max, got x"),
        (["--callbacks=EarlyStopping", *STOP[1:], "--callbacks.mode=x"], "`mode` can be min, max, got x"),
        (["--callbacks.monitor=x"], "--callbacks.monitor=x before any class: expected --callbacks+=Class first, then its"
         " arguments"),
        (["--callbacks=lit.No"], "--callbacks lit.No: there is no class 'No' in '{lit}'; it has Lit, Data, Broken, Picky"),
        (["--callbacks+=ModelCheckpoint", "--enable_checkpointing=false"], "FabricLoop was configured with"
         " `--enable_checkpointing=False` but found `ModelCheckpoint` in callbacks list: leave one of them out"),
        (["--logger", "tensorboard"], "--logger=tensorboard: lightning.pytorch.loggers has no such class: did you mean"
         " TensorBoardLogger; one of yours is package.module.Class"),
    ],
)  # fmt: skip
def test_what_is_no_class_or_no_argument(capsys, argv, line):
    assert refused(capsys, *FIT, *argv) == line.replace("{lit}", str(Path("lit.py").resolve()))
    assert sorted(path.name for path in Path().iterdir() if path.suffix) == ["lit.py"]


def test_the_help_of_a_class(capsys):
    code, out, _ = run(capsys, *FIT, "--model.help")
    text = " ".join(out.split())
    assert code == 0
    assert "fit --model lit:Lit [--model.argument value ...]" in text
    assert "--model.hidden HIDDEN Width of the layer between. (type: int, default: 3)" in text
    assert "--max_epochs" not in text
    assert run(capsys, "fit", "--model.help", "lit:Lit")[1] == out
    assert run(capsys, "fit", "--model.help=lit:Lit")[1] == out
    text = " ".join(run(capsys, "validate", "--data.help", "lit.Data", "--model", "lit.Lit")[1].split())
    assert "--data.batch_size BATCH_SIZE (type: int, default: 8)" in text
    text = " ".join(run(capsys, "fit", "--model.help")[1].split())
    assert "--model.hidden HIDDEN" in text  # the digits'
    assert "quantity to be monitored. (required, type: str)" in " ".join(
        run(capsys, *FIT, "--callbacks.help=EarlyStopping")[1].split()
    )


def test_the_same_class_in_two_files_joins_its_arguments_at_every_depth(capsys):
    Path("a.yaml").write_text(
        "model:\n  class_path: lit.Lit\n  init_args:\n    hidden: 4\n"
        "    act: {class_path: torch.nn.PReLU, init_args: {init: 0.5}}\n"
    )
    Path("b.yaml").write_text(
        "model:\n  class: lit:Lit\n  act: {class_path: torch.nn.PReLU, init_args: {num_parameters: 4}}\ndata: lit:Data\n"
    )
    Path("c.yaml").write_text("model:\n  act: {class_path: torch.nn.ELU}\n")
    files = ["--config", "a.yaml", "--config", "b.yaml"]
    found = yaml.safe_load(run(capsys, "fit", *files, "--print_config")[1])["model"]
    assert (found["hidden"], found["act"]["init_args"]["init"], found["act"]["init_args"]["num_parameters"]) == (
        4,
        0.5,
        4,
    )
    found = yaml.safe_load(run(capsys, "fit", *files, "--config", "c.yaml", "--print_config")[1])["model"]
    assert (found["hidden"], found["act"]["class_path"], "init" in found["act"]["init_args"]) == (
        4,
        "torch.nn.ELU",
        False,
    )
    found = yaml.safe_load(run(capsys, "fit", *files, "--model", "lit.Lit", "--print_config")[1])["model"]
    assert (found["class"], found["hidden"]) == ("lit.Lit", 4)  # the same class in other letters


def test_a_file_of_lightning_cli_is_told_all_its_words_at_once(capsys):
    Path("cli.yaml").write_text(
        "seed_everything: 3\ntrainer:\n  max_epochs: 3\n  sync_batchnorm: true\n  callbacks: null\n"
        "optimizer: {class_path: torch.optim.Adam}\nlr_scheduler: null\nckpt_path: null\n"
        "model: {class_path: lit.Lit}\ndata: lit.Data\n"
    )
    told = (
        refused(capsys, "fit", "--config", "cli.yaml").removeprefix("fit has no option ").split("; fit has no option ")
    )
    assert told == [
        "--seed_everything: it is called seed here",
        "--trainer: its words stand by themselves here: max_epochs: 10 without trainer: above it",
        "--optimizer: the model's configure_optimizers makes it, of arguments of the model",
        "--lr_scheduler: the model's configure_optimizers returns it beside the optimizer",
        "--ckpt_path: give the path to fit as --resume= (continue the run) or --load= (weights only)",
        "--sync_batchnorm: call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before fit",
    ]
    assert refused(capsys, "fit", "--trainer.max_epochs", "3") == (
        "fit has no option --trainer.max_epochs: did you mean --max_epochs?"
    )

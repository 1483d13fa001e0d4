"""Test the command line's help, options, config files, runs, predictions and error messages."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from clock import DURATION
from docstring_parser.attrdoc import AttributeDocstrings
from interpreter import fork_command, forking_python
from runs import without_time

from fabric_template import FabricLoop, LoopConfig
from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.tools import cli

REPOSITORY = Path(__file__).resolve().parents[2]
LIT = """
import signal
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(nn.Module):
    '''Something to train.

    Args:
        hidden: Width of the layer between.
        lr: Learning rate.
    '''

    def __init__(self, hidden: int = 3, lr: float = 0.1, act: nn.Module | None = None):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, hidden), act or nn.Identity(), nn.Linear(hidden, 1))

    def training_step(self, batch):
        return (self.net(batch[0]) - 1).pow(2).mean()

    validation_step = test_step = training_step

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data:
    def __init__(self, batch_size: int = 8):
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Broken(Lit):
    def training_step(self, batch):
        raise ValueError("inside the step")


class Picky(Lit):
    def __init__(self, size: int = 0):
        raise ValueError("inside the constructor")


class Wide(Lit):
    def predict_step(self, batch):
        return {"score": self.net(batch[0])[:, 0], "both": batch[0][:, :2].double(), "name": ["a"] * len(batch[0])}


class Pair(NamedTuple):
    label: torch.Tensor
    logits: torch.Tensor


class Shaped(Lit):
    '''Returns predictions of the given shape.'''

    def __init__(self, shape: str):
        super().__init__()
        self.shape = shape

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        logits = batch[0]
        label = logits.argmax(1) + 10 * dataloader_idx
        shapes = {
            "tuple": (label, logits[:, :2]),
            "fields": Pair(label, logits[:, 0]),
            "dicts": [{"box": row[:2], "score": row[0]} for row in logits],
            "mean": float(logits.mean()),
            "lengths": (label, logits[0, :2]),
        }
        return shapes.get(self.shape, label)


class TwoLoaders(Data):
    def predict_dataloader(self):
        return [self.val_dataloader(), self.val_dataloader()]


class Stops(Lit):
    def training_step(self, batch):
        signal.raise_signal(signal.SIGINT)
        return super().training_step(batch)


class Hears:
    def __init__(self, text: str = "nothing"):
        self.text = text

    def on_train_start(self, loop, model):
        print("heard", self.text)
"""


find_attribute_docstrings = AttributeDocstrings.get_attr_docs


@functools.cache
def find_attribute_docstrings_once(component):
    return find_attribute_docstrings(AttributeDocstrings(), component)


@pytest.fixture(autouse=True)
def quick_commands(monkeypatch):
    """Parse the source of each class only once."""
    monkeypatch.setattr(AttributeDocstrings, "get_attr_docs", lambda _, kind: find_attribute_docstrings_once(kind))


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    """Run each test in a folder that contains lit.py, a user's module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fabric-template"])
    Path("lit.py").write_text(LIT)
    yield
    sys.modules.pop("lit", None)


FIT = ["fit", "--model", "lit:Lit", "--data", "lit:Data", "--accelerator", "cpu", "--devices", "1"]
QUIET = ["--enable_model_summary", "false"]
PREDICT = ["predict", "--model", "lit:Shaped", *FIT[3:]]


def run(capsys, *argv):
    """Run a command. Return its exit code, stdout and stderr."""
    code = cli.main([str(argument) for argument in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, *argv):
    """Return the single line that a refused command prints to stderr."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip().removeprefix("fabric-template: ")


def weights(place):
    return read_checkpoint(f"checkpoints/{place}/last.ckpt")["state_dict"]


# The output of --help, and imports


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_every_command(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(cli.COMMANDS)


def test_help_and_the_commands_plot_and_runs_do_not_import_torch():
    """Importing torch takes seconds."""
    code = """
import sys
from fabric_template.tools import cli
from fabric_template.tools.plots import save_picture
for argv in [*([name, "--help"] for name in cli.COMMANDS), ["runs", "empty"]]:
    assert cli.main(argv) == 0
    assert not {"torch", "lightning", "pandas", "matplotlib"} & {*sys.modules}, argv
assert cli.main(["plot"]) == 0
assert "matplotlib" in sys.modules
assert not {"torch", "lightning", "pytorch_lightning"} & {*sys.modules}
"""
    Path("empty").mkdir()
    Path("logs/run/version_0").mkdir(parents=True)
    Path("logs/run/version_0/metrics.csv").write_text("epoch,step,val_loss\n0,1,0.5\n")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_imported_from_the_package(capsys):
    import fabric_template

    assert {*fabric_template.__all__} <= {*dir(fabric_template)}
    assert all(getattr(fabric_template, name) is not None for name in fabric_template.__all__)
    with pytest.raises(AttributeError, match="module 'fabric_template' has no attribute 'FabricLop'"):
        _ = fabric_template.FabricLop
    assert run(capsys, "--version") == (0, f"fabric_template {fabric_template.__version__}\n", "")


def test_help_of_fit_documents_every_option(capsys):
    text = " ".join(run(capsys, "fit", "--help")[1].split())
    names = [*LoopConfig.__dataclass_fields__, "precision", "resume", "load", "config", "run"]
    assert all(f"--{name} " in text for name in names)
    assert "--max_epochs MAX_EPOCHS Stop after this many epochs. -1 means no limit." in text
    text = " ".join(run(capsys, "fit", "--model.help=lit:Lit")[1].split())
    assert "--model.hidden HIDDEN Width of the layer between. (type: int, default: 3)" in text


# Options of the fit command


def test_the_fit_command_has_options_for_the_loop_the_model_and_the_data(capsys):
    options = ["--max_epochs", 2, "--precision", "bf16-mixed", "--model.hidden", 7, "--data.batch_size", 16]
    code, out, _ = run(capsys, *FIT, *QUIET, *options)
    assert (code, "trained     Lit on Data: 2 epochs, 4 steps" in out) == (0, True)
    assert weights("run/version_0")["net.0.weight"].shape == (7, 4)
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--model.act", "torch.nn.PReLU")[0] == 0
    assert "net.1.weight" in weights("run/version_1")


def test_the_fit_command_accepts_callbacks_by_class_and_loggers_by_name(capsys):
    argv = ["--callbacks+=EarlyStopping", "--callbacks.monitor=val_loss", "--callbacks.stopping_threshold", 100]
    argv += ["--callbacks+=lit:Hears", "--callbacks.text", "hello", "--logger", "tensorboard", "--max_epochs", 5]
    code, out, _ = run(capsys, *FIT, *QUIET, *argv)
    assert (code, "heard hello\n" in out, "1 epoch, 4 steps" in out) == (0, True, True)
    assert len([*Path("logs/run/version_0").rglob("events*")]) == 1


# The summary that the fit command prints at its end


def lines(out):
    """Return {heading: text} of the lines that fit prints when it ends."""
    return dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", out, re.MULTILINE))


def test_the_fit_command_trains_the_digits_demo_if_no_model_is_given(capsys):
    code, out, _ = run(capsys, "fit", "--max_epochs", 1, "--accelerator", "cpu", "--devices", 1, *QUIET)
    shown, folder = lines(out), "logs/digits/version_0"
    assert code == 0
    assert re.fullmatch(rf"DigitsClassifier on DigitsData: 1 epoch, 20 steps, {DURATION}", shown["trained"])
    assert re.fullmatch(r"val_acc 0\.\d+ in epoch 0", shown["best"])
    assert shown["log"] == f"{folder}/metrics.csv"
    assert all(Path(shown[name]).stat().st_size for name in ("log", "checkpoint"))
    assert shown["resume"] == f"fabric-template fit --run {folder} --resume last"
    code, out, _ = run(capsys, *shlex.split(shown["resume"])[1:], "--max_epochs", 2)
    assert (code, "2 epochs, 40 steps" in out) == (0, True)


def test_an_interrupted_fit_prints_the_command_that_continues_the_run(capsys):
    code, _, err = run(capsys, "fit", "--model=lit:Stops", *FIT[3:], *QUIET, "--save_every_n_steps", 1)
    assert code == 130
    command = "fabric-template fit --run logs/run/version_0 --resume last"
    assert err.endswith(f"\nThe run was interrupted. Resume it with\n{command}\n")


# Repeating, selecting and resuming a run

OPTIONS = ["--max_epochs", 2, "--model.hidden", 6, "--data.batch_size", 16, "--seed", 7, "--monitor", "val_loss"]
FOLDER = ["--run", "logs/run/version_0"]


def assert_same_run(one, other):
    """Compare weights bit for bit, and CSV rows except for their times."""
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert without_time(Path("logs", one, "metrics.csv")) == without_time(Path("logs", other, "metrics.csv"))


def config_of(place):
    return yaml.safe_load(Path("logs", place, "config.yaml").read_text("utf-8"))


def test_the_fit_command_repeats_a_run_exactly_from_its_config_yaml(capsys):
    argv = [*FIT, *QUIET, *OPTIONS, "--callbacks+=lit:Hears"]
    Path("run.yaml").write_text(run(capsys, *argv, "--print_config")[1])
    assert run(capsys, *argv)[0] == 0
    found = config_of("run/version_0")
    assert {*LoopConfig.__dataclass_fields__} <= {*found}
    assert found["model"] == {"class_path": "lit.Lit", "init_args": {"hidden": 6, "lr": 0.1, "act": None}}
    assert found["callbacks"] == [{"class_path": "lit.Hears", "init_args": {"text": "nothing"}}]
    torch.rand(3)
    repeats = [["--config", "run.yaml"], FOLDER]
    for version, repeat in enumerate(repeats, start=1):
        assert run(capsys, "fit", *repeat)[0] == 0
        assert_same_run("run/version_0", f"run/version_{version}")


# Each entry is (an argument of the model with its default value, a check of the value that the model gets).
ARGUMENTS = [
    ("a: type[nn.Module] = nn.ReLU", "a is nn.ReLU"),
    ("b=nn.GELU", "b is nn.GELU"),
    ("c: list[type[nn.Module]] = [nn.ReLU, nn.GELU]", "c == [nn.ReLU, nn.GELU]"),
    ("d=nn.ReLU()", "isinstance(d, nn.ReLU)"),
    ("e=torch.relu", "e is torch.relu"),
    ("f: collections.abc.Callable = torch.tanh", "f is torch.tanh"),
    ("g=lambda x: x", "g(3) == 3"),
    ("h: Color = Color.RED", "h is Color.RED"),
    ("i=Color.RED", "i is Color.RED"),
    ("j: pathlib.Path = pathlib.Path('d')", "j == pathlib.Path('d')"),
    ("k=pathlib.Path('d')", "k == pathlib.Path('d')"),
    ("l: torch.dtype = torch.float64", "l is torch.float64"),
    ("m=torch.device('cpu')", "m == torch.device('cpu')"),
    ("n: set[int] = {1, 2}", "n == {1, 2}"),
    ("o={1, 2}", "o == {1, 2}"),
    ("p=(1, 2)", "p == (1, 2)"),
    ("q: float = float('inf')", "q == float('inf')"),
    ("r=float('-inf'), s: float = float('nan')", "r < 0 and s != s"),
    ("t: str = '1e-3', u='yes', v: str = 'null'", "(t, u, v) == ('1e-3', 'yes', 'null')"),
    ("w={'a': nn.ReLU}", "w == {'a': nn.ReLU}"),
]


def test_the_fit_command_repeats_a_run_whose_model_has_default_arguments_of_many_types(capsys):
    given = ", ".join(argument for argument, _ in ARGUMENTS)
    lines = ["import collections, enum, pathlib, torch", "from torch import nn", "from lit import Lit"]
    lines += ["class Color(enum.Enum):", "    RED = 1", "class Any(Lit):", f"    def __init__(self, {given}):"]
    lines += ["        super().__init__()", *(f"        assert {check}" for _, check in ARGUMENTS)]
    Path("any_default.py").write_text("\n".join(lines))
    argv = ["fit", "--model=any_default:Any", "--data=lit:Data", "--max_epochs", 1, "--seed", 1, *QUIET]
    assert run(capsys, *argv)[0] == 0
    assert run(capsys, "fit", *FOLDER)[0] == 0
    assert_same_run("run/version_0", "run/version_1")


@pytest.mark.parametrize("command", ["fit", "validate", "profile"])
def test_help_shows_no_python_reprs_of_functions_or_objects(capsys, command):
    assert not re.search(r"<function|object at", run(capsys, command, "--help")[1])


def test_options_and_later_config_files_override_earlier_config_files(capsys):
    text = "model: {class_path: lit.Lit, init_args: {hidden: 5, lr: 0.2}}\ndata: lit.Data\nmax_epochs: 7\nname: a\n"
    Path("a.yaml").write_text(text)
    Path("b.yaml").write_text("model: {class_path: lit.Lit, init_args: {hidden: 6}}\nmax_epochs: 1\n")
    argv = ["fit", "--name", "typed", "--config", "a.yaml", "--config", "b.yaml", "--model.lr", 0.3, "--print_config"]
    found = yaml.safe_load(run(capsys, *argv)[1])
    assert (found["max_epochs"], found["name"]) == (1, "typed")
    assert found["model"] == {"class_path": "lit.Lit", "init_args": {"hidden": 6, "lr": 0.3, "act": None}}


def test_the_run_option_selects_the_run_to_load(capsys):
    assert run(capsys, *FIT, *QUIET, *OPTIONS)[0] == 0
    # Train a newer run of a different model, which the commands below must not use.
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    code, out, err = run(capsys, "validate", *FOLDER, "--load", "best")
    row = Path("logs/run/version_0/metrics.csv").read_text().splitlines()[-1]
    assert (code, err) == (0, "")
    assert float(re.search(r"val_loss +([\d.]+)", out)[1]) == pytest.approx(float(row.split(",")[3]), rel=1e-6)
    code, out, err = run(capsys, "test", *FOLDER)
    assert (code, "test_loss" in out) == (0, True)
    assert err == "fabric-template: the weights were untrained. To use the weights of the last fit, add --load best\n"
    assert "predicted   4 batches" in run(capsys, "predict", *FOLDER, "--data.batch_size", 8, "--load", "best")[1]
    assert not Path("logs/run/version_2").exists()


def test_the_fit_command_can_resume_a_run_or_load_its_weights(capsys):
    run(capsys, *FIT, *QUIET, *OPTIONS)
    first = Path("logs/run/version_0/config.yaml").read_bytes()
    # Train a newer run of a different model, which the commands below must not use.
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    code, out, _ = run(capsys, "fit", *FOLDER, "--resume", "last", "--max_epochs", 4)
    assert (code, "4 epochs, 8 steps" in out, "logs/run/version_0/metrics.csv" in out) == (0, True, True)
    assert Path("logs/run/version_0/config.yaml").read_bytes() == first
    assert run(capsys, "fit", *FOLDER, "--load", "last", "--max_epochs", 1)[0] == 0
    assert config_of("run/version_2")["load"].endswith("checkpoints/run/version_0/last.ckpt")
    assert run(capsys, "fit", "--run", "logs/run/version_2")[0] == 0
    assert_same_run("run/version_2", "run/version_3")


def test_fit_with_the_run_option_lists_arguments_that_the_run_did_not_save(capsys):
    assert "did not save" not in run(capsys, *FIT, *QUIET, "--max_epochs", 1)[2] + run(capsys, "fit", *FOLDER)[2]
    module = sys.modules["lit"]
    loop = FabricLoop(max_epochs=1, name="own", accelerator="cpu", enable_progress_bar=False)
    loop.fit(module.Lit(hidden=8, lr=0.1), datamodule=module.Data())
    arguments = ["fit", "--run", "logs/own/version_0", "--model.lr", 0.1, "--model.act", "null"]
    text = "--run: the run did not save the values of --model.hidden, --data.batch_size, so this command uses"
    assert text in run(capsys, *arguments)[2]
    assert "did not save" not in run(capsys, *arguments, "--model.hidden", 8, "--data.batch_size", 8)[2]


# Mistakes in commands and config files


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["fut"], f"got the command fut, expected one of {', '.join(cli.COMMANDS)}."),
        (["fit", "--max_epoch", "3"], "nrecognized arguments: --max_epoch 3. Did you mean --max_epochs?"),
        (["fit", "--max_epochs"], "argument --max_epochs: expected one argument"),
        ([*FIT, "--max_epochs", "ten"], '"max_epochs": Does not validate against any'),
        ([*FIT, "--seed=-1"], "seed: got -1, expected"),
        ([*FIT, "--model.depth", "3"], "Problem with given class_path 'lit.Lit': Option 'depth' is not accepted"),
        (["fit", "--data", "lit:Data"], "--model: got no class, expected --model package.module:Class."),
        (["fit", "--model", "lit:Lot"], "Problem with given class_path 'lit.Lot': module 'lit' has no"),
        ([*FIT, "--accelerator", "tpux"], "You selected an invalid accelerator name: `accelerator='tpux'`."),
        (["fit", "--config", "no.yaml"], '"config": File does not exist'),
        (["fit", "--run", "none"], "none, expected the folder of a run"),
        (["profile", *FIT[1:], "--out", "new/x.txt"], "--out: got new/x.txt, expected a file name that ends in .png, .pdf or"),
        (["tune", *FIT[1:], "--out", "."], "--out: got ., expected the name of a file."),
        ([*FIT, "--callbacks+=EarlyStopping"], "Problem with given class_path 'lightning.pytorch.callbacks.EarlyStopping': "),
    ],
)  # fmt: skip
def test_an_invalid_command_prints_a_one_line_error_and_writes_nothing(capsys, argv, expected):
    assert expected in refused(capsys, *argv)
    assert not {"logs", "checkpoints"} & {path.name for path in Path().iterdir()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: {1\n", "expected YAML (while parsing a flow mapping"),
        ("# nothing\n", "expected options such as max_epochs: 5."),
        ("max_epochs=3\n", "expected options such as max_epochs: 5."),
        ("trainer:\n  max_epochs: 3\n", "with a trainer section, which only LightningCLI reads."),
        ("# caf\xe9\nseed: 1\n", "expected a text file. Save the file in UTF-8."),
    ],
)
def test_an_error_about_a_mistake_in_a_config_file_mentions_the_file(capsys, text, expected):
    Path("mine.yaml").write_text(text, "latin-1")
    error = refused(capsys, *FIT, "--config", "mine.yaml")
    assert "--config: got mine.yaml" in error
    assert expected in error


@pytest.mark.parametrize("content", [b"", b"seed: [1\n", b"\xff\xfe\x00", b"- 1\n"])
def test_an_error_about_a_damaged_config_yaml_of_a_run_mentions_the_file(capsys, content):
    Path("old").mkdir()
    Path("old/config.yaml").write_bytes(content)
    error = refused(capsys, "fit", "--run", "old")
    assert re.search(r"--run: got .*old/config\.yaml, expected ", error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_epoch: 3\n", "Option 'max_epoch' is not accepted. Did you mean --max_epochs?"),
        ("callbacks:\n- class_path: Nope\n  init_args: {a: 1}\n", '"callbacks": Does not validate against any'),
    ],
)
def test_an_error_about_an_option_in_a_config_file_names_the_option(capsys, text, expected):
    Path("mine.yaml").write_text(text)
    assert expected in refused(capsys, *FIT, "--config", "mine.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "callbacks:\n- class_path: Timer\n- class_path: lit.Hears\n",
        '{"callbacks": [{"class_path": "Timer"}, {"class_path": "lit.Hears", "init_args": {}}]}',
    ],
)
def test_a_config_file_may_contain_the_name_of_a_lightning_callback(capsys, text):
    Path("mine.yaml").write_text(text)
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--config", "mine.yaml")[0] == 0
    names = [callback["class_path"] for callback in config_of("run/version_0")["callbacks"]]
    assert names == ["lightning.pytorch.callbacks.Timer", "lit.Hears"]


def test_errors_in_user_code_keep_their_traceback():
    with pytest.raises(ValueError, match="inside the step"):
        cli.main(["fit", "--model", "lit:Broken", *FIT[3:], *QUIET])
    with pytest.raises(ValueError, match="inside the constructor"):
        cli.main(["fit", "--model", "lit:Picky", *FIT[3:]])


# The predict and verify commands


def test_the_predict_command_writes_its_results_to_a_csv_or_pt_file(capsys):
    argv = ["predict", "--model", "lit:Wide", *FIT[3:], "--seed", 1, "--out"]
    for out in ("new/preds.csv", "preds.pt"):
        assert run(capsys, *argv, out)[0] == 0
    scores = torch.cat([batch["score"] for batch in torch.load("preds.pt")]).tolist()
    header, *rows = Path("new/preds.csv").read_text().splitlines()
    assert (header, len(rows)) == ("score,both_0,both_1,name", 32)
    assert torch.tensor([float(row.split(",")[0]) for row in rows]).tolist() == scores
    assert refused(capsys, *argv, "x.json") == "--out: got x.json, expected a file name that ends in .csv or .pt."


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ("tuple", "prediction_0,prediction_1_0,prediction_1_1"),
        ("fields", "label,logits"),
        ("dicts", "prediction_box,prediction_score"),
    ],
)
def test_predictions_of_several_values_have_one_row_per_sample(shape, columns, capsys):
    code, *_ = run(capsys, *PREDICT, "--model.shape", shape, "--out", "preds.csv")
    header, *rows = Path("preds.csv").read_text().splitlines()
    assert (code, header, len(rows)) == (0, columns, 32)
    assert "tensor" not in "".join(rows)


def test_predictions_of_several_loaders_have_a_column_with_the_loader_index(capsys):
    two = ["--model.shape", "label", "--data", "lit:TwoLoaders", "--out", "preds.csv"]
    code, out, _ = run(capsys, *PREDICT, *two)
    header, *rows = Path("preds.csv").read_text().splitlines()
    loaders, labels = zip(*(map(int, row.split(",")) for row in rows), strict=True)
    assert (code, header, loaders) == (0, "loader,prediction", (0,) * 32 + (1,) * 32)
    assert [label // 10 for label in labels] == [*loaders]
    assert f"predicted   {2 * 32 // 8} batches" in out


@pytest.mark.parametrize("shape", ["mean", "lengths"])
def test_predictions_that_a_csv_file_cannot_contain_are_saved_to_a_pt_file(shape, capsys):
    code, _, error = run(capsys, *PREDICT, "--model.shape", shape, "--out", "preds.csv")
    assert code == 2
    assert "--out: got predictions that a CSV file cannot contain" in error
    assert len(torch.load("preds.pt")) == 32 // 8


def test_the_predict_command_refuses_several_processes(capsys):
    where = ["--devices", 2, "--strategy", "ddp_fork", "--out", "preds.csv"]
    error = refused(capsys, *PREDICT, "--model.shape", "label", *where)
    assert error.endswith("predicts only some of the samples. Add --devices 1.")


def test_the_verify_command_reports_damaged_checkpoints(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--monitor", "val_loss")
    folder = Path("checkpoints/run/version_0")
    best = f"intact      {folder}/best.ckpt\n"
    assert run(capsys, "verify", "checkpoints") == (0, f"{best}intact      {folder}/last.ckpt\n", "")
    Path("saved").mkdir()
    Path("saved/linked").symlink_to(folder.absolute())
    assert run(capsys, "verify", "saved")[1].count("intact      saved/linked/") == 2
    data = bytearray((folder / "last.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "last.ckpt").write_bytes(data)
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert out.startswith(f"{best}damaged     {folder}/last.ckpt: the file is damaged")
    Path("saved/deleted.ckpt").symlink_to("nothing.ckpt")
    code, out, _ = run(capsys, "verify", "saved")
    assert (code, out.count("saved/")) == (1, 3)
    assert out.startswith("unreadable  saved/deleted.ckpt: No such file or directory\n")
    assert run(capsys, "verify", "nothing.ckpt")[0] == 2
    Path("empty").mkdir()
    assert refused(capsys, "verify", "empty").startswith("verify: got empty, expected a folder with .ckpt")


def test_fit_on_two_processes_prints_the_summary_once():
    argv = ["fit", "--max_epochs", "1", "--limit_train_batches", "2", "--devices", "2", "--accelerator", "cpu"]
    command = fork_command([sys.executable, "-m", "fabric_template", *argv])
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "FORKING_PYTHON": forking_python()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\nresume ") == 1

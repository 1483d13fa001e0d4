"""The command line: help, options and mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fabric_template.checkpoint.checkpoint_io import read_checkpoint
from fabric_template.tools import cli
from fabric_template.tools.arguments import join_values

REPOSITORY = Path(__file__).resolve().parents[2]
LIT = """
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


def make_wide(factor: int = 2):
    return Lit(hidden=3 * factor)


class Hears:
    def __init__(self, word: str = "nothing"):
        self.word = word

    def on_train_start(self, loop, model):
        print("heard", self.word)
"""


@pytest.fixture(autouse=True)
def typed(monkeypatch):
    """A shell in a folder with a module of the user."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fabric-template"])
    Path("lit.py").write_text(LIT)
    yield
    sys.modules.pop("lit", None)


FIT = ["fit", "--model", "lit:Lit", "--data", "lit:Data", "--accelerator", "cpu", "--devices", "1"]
QUIET = ["--enable_model_summary", "false"]


def run(capsys, *argv):
    """Return exit code, stdout and stderr."""
    code = cli.main([str(word) for word in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, *argv):
    """Return the one line on stderr of what is refused."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err.strip().removeprefix("fabric-template: ")


def weights(place):
    return read_checkpoint(f"checkpoints/{place}/last.ckpt")["state_dict"]


# Help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(cli.COMMANDS)


def test_no_help_imports_torch():
    """A fresh Python: `import torch` takes seconds, help must not."""
    code = """
import sys
from fabric_template.tools import cli
from fabric_template.tools.arguments import join_values
for name in cli.COMMANDS:
    assert cli.main([name, "--help"]) == 0
    assert not {"torch", "lightning", "pandas", "matplotlib"} & {*sys.modules}, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_the_package_is_lazy_and_complete():
    import fabric_template

    assert {*fabric_template.__all__} <= {*dir(fabric_template)}
    assert all(getattr(fabric_template, name) is not None for name in fabric_template.__all__)
    with pytest.raises(AttributeError, match="module 'fabric_template' has no attribute 'FabricLop'"):
        _ = fabric_template.FabricLop


def test_fit_help_has_every_option_with_its_documentation(capsys):
    from fabric_template import LoopConfig

    code, out, _ = run(capsys, "fit", "--help")
    text = " ".join(out.split())
    assert code == 0
    assert all(f"--{name} " in text for name in LoopConfig.__dataclass_fields__)
    assert "--max_epochs MAX_EPOCHS Stop after this many epochs. -1: no limit." in text
    assert all(f"--{name} " in text for name in ("precision", "resume", "load", "config", "run"))


@pytest.mark.parametrize(
    "argv",
    [
        [*FIT, "--help"],
        [*FIT, "--model.help", "--max_epochs", "3"],
        ["fit", "--model.help", "lit:Lit"],
        ["predict", "--model.help=lit.Lit"],
    ],
)
def test_the_help_of_a_model_has_its_own_arguments(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert "--model.hidden HIDDEN Width of the layer between. (type: int, default: 3)" in " ".join(out.split())
    assert ("--max_epochs MAX" in out) == ("--help" in argv)


def test_version(capsys):
    from fabric_template import __version__

    assert run(capsys, "--version") == (0, f"fabric_template {__version__}\n", "")


# Options


def test_options_of_model_data_and_fabric(capsys):
    options = ["--max_epochs", 2, "--precision", "bf16-mixed", "--model.hidden", 7, "--data.batch_size", 16]
    code, out, _ = run(capsys, *FIT, *QUIET, *options)
    assert code == 0
    assert "trained     Lit on Data: 2 epochs, 4 steps" in out
    assert weights("run/version_0")["net.0.weight"].shape == (7, 4)


def test_dotted_paths_functions_and_objects_as_arguments(capsys):
    argv = ["fit", "--model=lit.make_wide", "--model.factor=3", "--data=lit.Data", "--max_epochs=1", *QUIET]
    assert run(capsys, *argv)[0] == 0
    assert weights("run/version_0")["net.0.weight"].shape == (9, 4)
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--model.act", "torch.nn.PReLU")[0] == 0
    assert "net.1.weight" in weights("run/version_1")


def test_the_seed_decides_the_first_weights(capsys):
    for name in ("a", "b"):
        torch.rand(3)
        assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--seed", 5, "--name", name)[0] == 0
    a, b = weights("a/version_0"), weights("b/version_0")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_switch_needs_no_value(capsys):
    code, out, _ = run(capsys, *FIT, "--fast_dev_run", *QUIET)
    assert code == 0
    assert "1 epoch, 1 step," in out
    assert not Path("logs").exists()
    assert not Path("checkpoints").exists()


def test_validate_test_and_predict(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1)
    code, out, err = run(capsys, "validate", *FIT[1:], "--load", "last")
    assert (code, err, "val_loss" in out) == (0, "", True)
    code, out, err = run(capsys, "test", *FIT[1:])
    assert (code, "test_loss" in out) == (0, True)
    assert err == "fabric-template: the weights are new; --load best takes those of the last fit\n"
    code, out, _ = run(capsys, "predict", *FIT[1:], "--load", "last")
    assert (code, "predicted   4 batches; the first: tensor([0, 0, 0" in out) == (0, True)


# Mistakes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fut"], f"got the command fut, expected one of {', '.join(cli.COMMANDS)}."),
        (["fit", "--max_epoch", "3"], "--max_epoch: fabric-template fit has no such option. Did you mean --max_epochs?"),
        (["validate", "--zzzz", "x"], "--zzzz: fabric-template validate has no such option. fabric-template validate"),
        (["fit", "ten"], "Unrecognized arguments: ten"),
        (["fit", "--max_epochs"], "argument --max_epochs: expected one argument"),
        (["verify"], "fabric-template verify needs path."),
        ([*FIT, "--max_epochs", "ten"], "--max_epochs: got ten, expected null or int."),
        ([*FIT, "--seed=-1"], "--seed: got -1, expected"),
        ([*FIT, "--model.depth", "3"], "--model.depth is no argument of lit.Lit. --model.help=lit.Lit lists all."),
        ([*FIT, "--model.hidden", "wide"], "--model.hidden: got wide, expected int."),
        ([*FIT[:3], "--data.batch_size", "3"], "--data.batch_size: got no --data, expected --data package.module:Class."),
        (["fit", "--data", "lit:Data"], "--model: got no class, expected --model package.module:Class."),
        (["fit", "--model", "lit"], "--model: got lit, expected package.module:Class."),
        (["fit", "--model", "lit:Lot"], "--model: got lit:Lot, expected a class in the module lit. Did you mean Lit?"),
        (["fit", "--model", "lot.net:Lit"], "--model: got lot.net:Lit, expected a class in the module lot.net."),
        (["fit", "--model", "demos.gna"], "--model: got demos.gna, expected a class in the module demos. The demos are"),
        ([*FIT, "--accelerator", "tpux"], "You selected an invalid accelerator name: `accelerator='tpux'`."),
        (["fit", "--data.batch_size", "0"], "DigitsData(batch_size): got 0, expected at least 1."),
        (["fit", "--config", "no.yaml"], "--config: got no.yaml, expected a YAML file ([Errno 2] No such file"),
        (["fit", "--config", "lit.py"], "--config: got lit.py, expected a YAML file (mapping values are not allowed"),
        (["fit", "--run", "none"], "--run: got none/config.yaml, expected a YAML file ([Errno 2] No such file"),
        ([*FIT, "--callbacks+=EarlyStoping"], "--callbacks: got EarlyStoping, expected a class in the module"
         " lightning.pytorch.callbacks. Did you mean EarlyStopping?"),
        ([*FIT, "--callbacks+=EarlyStopping"], "--callbacks.monitor is required by"),
        ([*FIT, "--callbacks+=Timer", "--callbacks.durtion=3"], "--callbacks.durtion is no argument of"),
        ([*FIT, "--callbacks+=lit:Hears", "--callbacks.word=[1]"], "--callbacks.word: got [1], expected str."),
        ([*FIT, "--callbacks.monitor=x"], "--callbacks.monitor: got no --callbacks, expected --callbacks"),
        ([*FIT, "--callbacks+=EarlyStopping", "--callbacks.monitor=x", "--callbacks.mode=x"], "`mode` can be min, max"),
        ([*FIT, "--logger", "tensorboard"], "--logger: got tensorboard, expected a class in the module"
         " lightning.pytorch.loggers. Did you mean TensorBoardLogger?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_writes_nothing(capsys, argv, words):
    assert refused(capsys, *argv).startswith(words)
    assert not Path("logs").exists()
    assert not Path("checkpoints").exists()


def test_missing_data_names_the_option(capsys):
    assert refused(capsys, *FIT[:3]).endswith("; or give --data package.module:Class")


def test_errors_in_code_of_the_user_keep_their_traceback():
    with pytest.raises(ValueError, match="inside the step"):
        cli.main(["fit", "--model", "lit:Broken", *FIT[3:], *QUIET])
    with pytest.raises(ValueError, match="inside the constructor"):
        cli.main(["fit", "--model", "lit:Picky", *FIT[3:]])
    Path("lit.py").write_text("import nothing_of_this_name\n")
    sys.modules.pop("lit")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        cli.main(FIT)


# Callbacks, loggers, verify


def test_callbacks_by_their_class_in_their_order(capsys):
    argv = ["--callbacks+=EarlyStopping", "--callbacks.monitor=val_loss", "--callbacks.stopping_threshold", 100]
    argv += ["--callbacks+=lit:Hears", "--callbacks.word", "hello", "--callbacks+", "Timer"]
    code, out, _ = run(capsys, *FIT, *QUIET, "--max_epochs", 5, *argv, "--callbacks.duration=00:01:00:00")
    assert (code, "heard hello\n" in out, "1 epoch, 4 steps" in out) == (0, True, True)


def test_a_logger_by_its_class(capsys):
    argv = ["--logger", "TensorBoardLogger", "--logger.save_dir", "boards", "--logger.name=mine"]
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, *argv)[0] == 0
    assert [path.name.partition(".")[0] for path in Path("boards/mine/version_0").iterdir()].count("events") == 1
    assert run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--logger", "false")[0] == 0
    assert not Path("logs").exists()


def test_verify(capsys):
    run(capsys, *FIT, *QUIET, "--max_epochs", 1, "--monitor", "val_loss")
    folder = Path("checkpoints/run/version_0")
    whole = f"whole       {folder}/best.ckpt\n"
    assert run(capsys, "verify", "checkpoints") == (0, f"{whole}whole       {folder}/last.ckpt\n", "")
    data = bytearray((folder / "last.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "last.ckpt").write_bytes(data)
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert out.startswith(f"{whole}damaged     {folder}/last.ckpt: the file is damaged")
    (folder / "last.ckpt").write_bytes(data[:100])
    assert run(capsys, "verify", folder / "last.ckpt")[0] == 1
    assert run(capsys, "verify", "nothing.ckpt")[0] == 2
    Path("empty").mkdir()
    assert refused(capsys, "verify", "empty").startswith("verify: got empty, expected a folder with .ckpt")


def test_a_tool_makes_a_training_again_with_other_options(capsys):
    """What tune gets: a function that makes loop, model and data, and the arguments that it may change."""
    found = []

    def try_options(build, arguments, *, seconds: float = 1.0, only: list[str] | None = None) -> int:
        """Try.

        Args:
            build: Makes loop, model and data.
            arguments: What the classes take.
            seconds: How long.
            only: What to try.
        """
        for options in ({}, {"precision": "bf16-mixed", "data.batch_size": 16, "model.act": None}):
            loop, model, data = build(options)
            found.append((loop.fabric.strategy.precision.precision, data.batch_size, type(model).__name__))
        found.append((arguments, seconds, only))
        return 3

    argv = [*FIT[1:], *QUIET, "--data.batch_size=4", "--seconds", "2", "--only", "workers", "precision"]
    assert cli.LoopCommand("tune", try_options).run(argv) == 3
    arguments = {"model.hidden": 3, "model.lr": 0.1, "model.act": None, "data.batch_size": 4}
    assert found == [("32-true", 4, "Lit"), ("bf16-mixed", 16, "Lit"), (arguments, 2.0, ["workers", "precision"])]


def test_a_command_without_options():
    assert join_values([], []) == []

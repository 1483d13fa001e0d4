"""export: each format is loaded back by its own library and answers as the model does; what cannot be exported is one line."""

import io
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from test_cli import LIT, refused, run
from torch import nn

from fabric_template import FabricLoop
from fabric_template.files.errors import CheckpointError
from fabric_template.tools.export import export
from fabric_template.tools.formats import difference

QUIET = ["--accelerator", "cpu", "--enable_progress_bar", "false", "--enable_model_summary", "false", "--seed", 3]


def by_onnx(path, *inputs):
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, (one.numpy() for one in inputs), strict=True))
    return torch.from_numpy(session.run(None, given)[0])


LOADED = {
    "torch.export": (".pt2", lambda path, *inputs: torch.export.load(path).module()(*inputs)),
    "onnx": (".onnx", by_onnx),
    "torchscript": (".ts", lambda path, *inputs: torch.jit.load(path)(*inputs)),
}
needs_onnx = pytest.mark.skipif(
    any(__import__("importlib.util").util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs the extra `export`: onnx, onnxscript, onnxruntime",
)
EVERY = ["torch.export", pytest.param("onnx", marks=needs_onnx), "torchscript"]


class Net(nn.Module):
    """With what is other in training: dropout, and statistics that a batch changes."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))

    def forward(self, x):
        return self.head(self.encoder(x))


class LitNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [Net, LitNet])
@pytest.mark.parametrize("format", EVERY)
def test_a_model_at_hand(format, make):
    model, batch = make(), (torch.randn(9, 4), torch.zeros(9))  # its forward takes the first of the two
    before = {name: value.clone() for name, value in model.state_dict().items()}
    suffix, load = LOADED[format]
    done = export(model, f"new/net{suffix}", format=format, example=batch)
    assert (done.path, done.format, done.of, done.takes) == (
        Path(f"new/net{suffix}"), format, make.__name__, {"x": "float32 (n, 4)"},
    )  # fmt: skip
    assert done.batch == "any number n of samples"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [path.name for path in Path("new").iterdir()] == [f"net{suffix}"]
    model.eval()
    x = torch.randn(7, 4)
    tolerance = 1e-6 if format == "onnx" else 0  # bits
    torch.testing.assert_close(load(str(done.path), x), model(x).detach(), rtol=tolerance, atol=tolerance)
    assert done.apart <= tolerance
    assert (done.apart == 0) == ("the same bits as the model's" in str(done))


def test_weights_alone():
    """Bits, of tensors that share memory and of numbers that are none, too; our own reader takes the file."""
    model = Net()
    model.tied = nn.Linear(4, 6)
    model.tied.weight = model.encoder[0].weight
    with torch.no_grad():
        model.tied.bias[0] = float("nan")
    model.small = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16).t())
    done = export(model, "net.safetensors")
    found = pytest.importorskip("safetensors.torch").load_file("net.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert found["small"].dtype == torch.bfloat16
    assert all(difference(value, found[name]) == 0 for name, value in model.state_dict().items())
    assert done.lines()["use"] == "model.load_state_dict(safetensors.torch.load_file('net.safetensors'))"
    again = export(model, "again.safetensors", checkpoint="net.safetensors", submodule="encoder")
    assert again.of == "Net, its encoder (Sequential)"
    assert Path("again.safetensors").stat().st_size < Path("net.safetensors").stat().st_size


def test_a_part_gets_what_the_model_gives_it():
    model, batch = Net(), torch.randn(5, 4)
    done = export(model, "head.pt2", example=batch, submodule="head")
    assert done.takes == {"input": "float32 (n, 6)"}
    assert (
        export(model, "head.pt2", example=torch.randn(3, 6), submodule="head").takes == done.takes
    )  # its own, that is
    with pytest.raises(
        ValueError, match=r"Net does not call Linear when it is given a batch \(RuntimeError: (addmm: )?mat1 and mat2"
    ):
        export(model, "head.pt2", example=torch.randn(3, 5), submodule="head.1")
    with pytest.raises(ValueError, match=r"submodule='body' is no part of the model: it has encoder, encoder.0, "):
        export(model, "head.pt2", example=batch, submodule="body")


class Steps:
    """A plain object: it holds modules, and has no forward."""

    def __init__(self):
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def predict_step(self, batch):
        return self.head(self.body(batch["x"]))


def test_an_object_without_forward_has_parts():
    with pytest.raises(ValueError, match=r"Steps has no forward: export a part of it, submodule= one of body, head$"):
        export(Steps(), "steps.pt2", example={"x": torch.ones(3, 4)})
    assert export(Steps(), "steps.pt2", example={"x": torch.ones(3, 4)}, submodule="head").takes == {
        "input": "float32 (n, 6)"
    }
    torch.save(Steps().body.state_dict(), "body.pt")
    with pytest.raises(
        CheckpointError, match=r"'body.pt' is of another model: 6 differences: missing 'body.weight'; missing"
    ):
        export(Steps(), "steps.pt2", example={"x": torch.ones(3, 4)}, submodule="head", checkpoint="body.pt")


def test_a_dict_is_taken_by_name_without_what_only_a_loss_needs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, ids, mask=None, labels=None):
            assert labels is None
            return {"scores": self.net(ids) * (1 if mask is None else mask)}

    batch = {"labels": torch.ones(6), "mask": torch.ones(6, 1), "ids": torch.ones(6, 4), "names": ["a"] * 6}
    for file in ("named.pt2", "named.ts"):
        assert export(Named(), file, example=batch).takes == {"ids": "float32 (n, 4)", "mask": "float32 (n, 1)"}


def test_random_numbers_in_a_forward_are_the_same_for_both():
    class Noisy(Net):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model, before = Noisy(), torch.get_rng_state()
    for file in ("noisy.ts", "noisy.pt2"):
        assert export(model, file, example=torch.ones(3, 4)).apart == 0
        assert torch.equal(torch.get_rng_state(), before)  # none of the program's own is used up


class Counts(Net):
    calls = 0.0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


class Branches(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Fixed(Net):
    def forward(self, x):
        return super().forward(x) + torch.arange(float(int(x.shape[0])))[:, None]


def test_what_answers_otherwise_or_cannot_be_followed_is_not_written():
    x = torch.ones(3, 4)
    with pytest.raises(
        ValueError, match=r"loaded back, it answers otherwise than the model, by .* of the largest output; noth"
    ):
        export(Counts(), "net.ts", example=x)
    with pytest.raises(
        ValueError, match=r"torch.export cannot take Branches \(.*Another format may \(safetensors, onnx"
    ):
        export(Branches(), "net.pt2", example=x)
    with pytest.warns(torch.jit.TracerWarning):
        assert export(Fixed(), "fixed.ts", example=torch.ones(3, 4)).batch == "3 samples, no other number"
    assert [path.name for path in Path().iterdir()] == ["fixed.ts"]


def test_a_wrapped_model_is_the_bare_one():
    model = Net()
    names = {
        "the model": export(model, "a.safetensors"),
        "compiled": export(torch.compile(model, backend="eager"), "b.safetensors"),
    }
    fabric = FabricLoop(accelerator="cpu", logger=False).fabric
    names["Fabric's"] = export(fabric.setup_module(model), "c.safetensors")
    assert len({done.path.read_bytes() for done in names.values()}) == 1
    torch.save(
        {"state_dict": {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}}, "compiled.ckpt"
    )
    assert (
        export(Net(), "d.safetensors", checkpoint="compiled.ckpt").path.read_bytes()
        == Path("a.safetensors").read_bytes()
    )


def test_a_missing_package_is_named(monkeypatch):
    for package in ("onnx", "onnxscript", "safetensors"):
        monkeypatch.setitem(__import__("sys").modules, package, None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"format='safetensors' needs safetensors: pip install safetensors$"):
        export(Net(), "net.safetensors")
    with pytest.raises(ValueError, match=r"format='onnx' needs onnx and onnxscript.*: pip install onnx onnxscript"):
        export(Net(), "net.onnx", example=torch.ones(3, 4))


WRONG = {
    "no model": (lambda: export(Net, "net.pt2"), r"export got the class Net: expected a model, export\(MyModel\(\), "),
    "no format": (lambda: export(Net(), "net"), r"'a name without an ending' says no format: expected format= one of"),
    "unknown": (lambda: export(Net(), "net.h5", "keras"), r"format='keras' is unknown: expected one of safetensors"),
    "another's name": (lambda: export(Net(), "net.ts", "torch.export"), r"in a file that ends in .ts: expected .pt2"),
    "a folder": (lambda: export(Net(), "/", "torchscript"), r"out='/' is a folder: give the file to write, such as model.ts"),
    "no example": (lambda: export(Net(), "net.pt2"), r"needs an example input .* example= in Python; .* --input 1,64"),
    "wrong example": (lambda: export(Net(), "net.pt2", example=torch.ones(2, 3)), r"Net cannot be called with the example \("),
    "no checkpoint": (lambda: export(Net(), "net.pt2", checkpoint="no.ckpt"), r"Checkpoint file not found: no.ckpt"),
    "a place": (lambda: export(Net(), "/proc/x/net.pt2", example=torch.ones(2, 4)), r"'/proc/x/net.pt2' cannot be written: "),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(what):
    call, said = WRONG[what]
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert list(Path().iterdir()) == []


def test_the_checkpoint_itself_is_not_written_over_and_a_program_in_it_is_not_run():
    torch.save({"state_dict": Net().state_dict()}, "net.pt2")
    before = Path("net.pt2").read_bytes()
    with pytest.raises(ValueError, match=r"out='net.pt2' is the checkpoint itself: give another file to write"):
        export(Net(), "net.pt2", example=torch.ones(3, 4), checkpoint="net.pt2")
    Path("half.ckpt").write_bytes(before[:-100])
    with pytest.raises(CheckpointError, match=r"'half.ckpt' is damaged"):
        export(Net(), "out.pt2", example=torch.ones(3, 4), checkpoint="half.ckpt")
    torch.save({"state_dict": Net().state_dict(), "spy": io.StringIO}, "spy.ckpt")
    with pytest.raises(CheckpointError, match=r"'spy.ckpt' wants the class or function _io.StringIO.*; refused"):
        export(Net(), "out.pt2", example=torch.ones(3, 4), checkpoint="spy.ckpt")
    assert sorted(path.name for path in Path().iterdir()) == ["half.ckpt", "net.pt2", "spy.ckpt"]


# ---- as it is typed


@pytest.fixture
def trained(capsys):
    Path("lit.py").write_text(f"{LIT}\n\nclass Called(Lit):\n    def forward(self, x):\n        return self.net(x)\n")
    fit = [
        "fit",
        "--model",
        "lit:Called",
        "--data",
        "lit:Data",
        "--model.hidden",
        5,
        "--max_epochs",
        1,
        "--name",
        "run",
    ]
    assert run(capsys, *fit, *QUIET, "--monitor", "val_loss")[0] == 0
    return "checkpoints/run/version_0/best.ckpt"


def test_a_checkpoint_of_a_run_is_enough(capsys, trained):
    """Its model with its arguments, and an example of its data, are what config.yaml beside the logs says."""
    code, out, _ = run(capsys, "export", trained, "--format", "torch.export")
    assert code == 0
    assert re.fullmatch(
        r"exported    best\.pt2 \(torch\.export, 0\.\d+ MB\): Called\n"
        r"weights     checkpoints/run/version_0/best\.ckpt\n"
        r"takes       x float32 \(n, 4\); any number n of samples\n"
        r"checked     loaded back: the same bits as the model's\n"
        r"use         torch\.export\.load\('best\.pt2'\)\.module\(\)\(x\)\n",
        out,
    )
    weights = torch.load(trained, weights_only=True)["state_dict"]
    net = nn.Sequential(nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 1))
    net.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    x = torch.randn(6, 4)
    assert torch.equal(torch.export.load("best.pt2").module()(x), net(x))
    for words in (["--run", "logs/run/version_0"], ["best", "--run", "logs/run/version_0"],
                  ["last", "--model", "lit:Called", "--model.hidden", 5, "--name", "run", "--input", "2,4"]):  # fmt: skip
        assert run(capsys, "export", *words, "--out", "again.pt2")[0] == 0
        assert torch.equal(torch.export.load("again.pt2").module()(x), net(x))
    assert run(capsys, "export", trained, "--out", "part.pt2", "--submodule", "net.2")[0] == 0
    assert torch.export.load("part.pt2").module()(torch.ones(3, 5)).shape == (3, 1)
    pytest.importorskip("safetensors")
    assert run(capsys, "export", trained, "--format=safetensors")[0] == 0
    same = ["validate", "--model", "lit:Called", "--data", "lit:Data", "--model.hidden", 5, *QUIET, "--load"]
    assert run(capsys, *same, "best.safetensors")[1] == run(capsys, *same, trained)[1]


def test_a_run_of_a_script_knows_its_class_and_no_data(capsys):
    """What its folder does not know is not asked for where nobody needs it; a model that it cannot make is typed."""
    import lit

    data, words = lit.Data(), {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    for name, model in (("same", lit.Lit()), ("other", lit.make_wide())):
        FabricLoop(max_epochs=1, name=name, **words).fit(model, data.train_dataloader())
    capsys.readouterr()
    there = "checkpoints/{}/version_0/last.ckpt"
    assert run(capsys, "export", there.format("same"), "--out", "x.pt2", "--submodule", "net", "--input", "2,4")[0] == 0
    assert "needs an example input" in run(capsys, "export", there.format("same"), "--out", "y.pt2")[2]
    code, _, said = run(
        capsys, "export", there.format("other"), "--out", "y.pt2", "--submodule", "net", "--input", "2,4"
    )
    assert (
        "'checkpoints/other/version_0/last.ckpt' does not fit the model as its run's config.yaml has it: 3 differe"
        in said
    )
    assert said.endswith("; type --model package.module:Class, or a function that makes it\n")
    own = ["--model", "lit:make_wide", "--out", "y.pt2", "--submodule", "net", "--input", "2,4"]
    assert run(capsys, "export", there.format("other"), *own)[0] == 0
    assert sorted(path.name for path in Path().glob("*.pt2")) == ["x.pt2", "y.pt2"]


def test_what_is_typed_and_cannot_be_done(capsys, trained):
    before = sorted(Path().rglob("*"))
    for words, said in {
        (): "usage: ",
        ("best",): "export as what? Type --format safetensors, torch.export, onnx or torchscript",
        ("best", "--format", "torch.export"): "export best: there is no such checkpoint in 'checkpoints/digits'; type the",
        ("--format", "torch.export"): "export which checkpoint? Type its path, or --run logs/<name>/version_<n> for the best",
        ("no.ckpt", "--format", "torch.export"): "export no.ckpt: there is no such file; type the path of a checkpoint",
        ("lit.py", "--format", "torch.export"): "export lit.py: whose weights are these? There is no run beside it: type --run",
        ("a.ckpt", "b.ckpt"): "export takes one checkpoint: a.ckpt and b.ckpt are two",
        (trained, "--format", "keras"): "export: --format=keras is unknown: expected one of safetensors, torch.export, onnx",
        (trained, "--format"): "--format has no value: expected --format VALUE",
        (trained, "--out", "x.pt2", "--input", "2x4"): "--input 2x4: expected sizes, such as 1,64, and behind a colon a dtype",
        (trained, "--out", "x.pt2", "--input", "2,4:text"): "--input 2,4:text: expected sizes",
        (trained, "--out", "x.pt2", "--submodule", "nett"): "export: --submodule=nett is no part of the model: it has net",
        (trained, "--out", "x.pt2", "--sub", "net"): "export has no option --sub: ",
        (trained, "--out", "x.pt2", "--model", "lit:Called"): "repeat the --model.* options that its fit was given, or give",
        ("best", "--model", "lit:Lit", "--name", "nobody", "--out", "x.pt2"): "export best: there is no such checkpoint in ",
        (trained, "--model", "lit:Lit", "--model.hidden", "5", "--out", "x.pt2"): "needs an example input",
    }.items():  # fmt: skip
        if words:
            assert said in refused(capsys, "export", *words), words
        else:
            assert run(capsys, "export")[1].startswith(said)
    assert [path for path in sorted(Path().rglob("*")) if path not in before and "__pycache__" not in str(path)] == []

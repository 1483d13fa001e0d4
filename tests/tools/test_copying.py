"""Copies as they are written: the folder, the single file, parts; the licence, the first line and the manifest with them."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from test_cli import REPOSITORY, refused, run, typed  # noqa: F401
from upstreams import Newer, repository, tree

from fabric_template.tools import copying
from fabric_template.tools.licence import LICENCE
from fabric_template.tools.parts import PARTS, ROOMS

PACKAGE = REPOSITORY / "fabric_template"


def line(out, word):
    return re.search(rf"^{word} +(.*)$", out, re.MULTILINE)[1]


def own(path):
    """A copied file without its first line."""
    first, rest = path.read_text().split("\n", 1)
    assert first.startswith("# From fabric_template 0.1.0: ")
    return rest


# ---- the folder


def test_copy_and_diff(capsys):
    code, out, _ = run(capsys, "copy", "src/my_loop")
    assert code == 0
    assert out.splitlines()[1:] == [
        "use         from my_loop import FabricLoop",
        "try         cd src && python -m my_loop fit",
        "compare     fabric-template diff src/my_loop",
        "update      fabric-template update src/my_loop",
    ]
    assert not list(Path("src").rglob("__pycache__"))
    assert run(capsys, "diff", "src/my_loop") == (0, "", "")

    loop = Path("src/my_loop/loop.py")
    loop.write_text(loop.read_text() + "# mine")
    Path("src/my_loop/extra.py").write_text("x = 1\n")
    Path("src/my_loop/tools/plots.py").unlink()
    code, out, _ = run(capsys, "diff", "src/my_loop")
    assert code == 1
    assert "# extra.py: added by you\n--- /dev/null\n+++ src/my_loop/extra.py\n@@ -0,0 +1 @@\n+x = 1\n" in out
    assert "# loop.py: changed by you\n--- fabric_template/loop.py\t0.1.0\n+++ src/my_loop/loop.py\n" in out
    assert "+# mine\n\\ No newline at end of file\n" in out
    assert "# tools/plots.py: deleted by you\n--- fabric_template/tools/plots.py\t0.1.0\n+++ /dev/null\n" in out

    assert refused(capsys, "copy", "src/my_loop").startswith(
        "copy src/my_loop: the folder is there already, nothing was written: give another one; --force"
    )
    assert loop.read_text().endswith("# mine")
    assert run(capsys, "copy", "src/my_loop", "--force")[0] == 0
    assert not loop.read_text().endswith("# mine")
    assert Path("src/my_loop/extra.py").exists()


def test_each_file_says_where_it_is_from_and_the_manifest_what_it_was():
    copying.copy_package("mine")
    known = json.loads(Path("mine/fabric_template.json").read_text())
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} | {"LICENSE"}
    assert {key: known[key] for key in known if key != "sha256"} == {"fabric_template": "0.1.0", "copy": "folder"}
    assert known["sha256"] == {n: hashlib.sha256(Path("mine", n).read_bytes()).hexdigest() for n in files}
    assert tree("mine").keys() == files | {"fabric_template.json", "fabric_template.tar.gz"}
    for name in files - {"LICENSE"}:
        assert Path("mine", name).read_text() == (
            f"# From fabric_template 0.1.0: {name} (MIT licence: see LICENSE)\n" + (PACKAGE / name).read_text()
        )
    with tarfile.open("mine/fabric_template.tar.gz") as base:
        assert {m.name: base.extractfile(m).read() for m in base} == {n: Path("mine", n).read_bytes() for n in files}
    assert Path("mine/fabric_template.tar.gz").stat().st_size < 450_000
    copying.copy_package("again")
    assert tree("again") == tree("mine")  # the same, to the bit
    copying.copy_package("again")  # which may be said twice
    assert tree("again") == tree("mine")


def test_the_licence_needs_no_file():
    """Of a copy that somebody took without it; and it is the repository's."""
    assert LICENCE == (REPOSITORY / "LICENSE").read_text() == (PACKAGE / "LICENSE").read_text()
    code = "import sys; from bare.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    copying.copy_package("bare")
    Path("bare/LICENSE").unlink()
    for words in (["--mini", "train_loop.py"], ["mine"], ["--parts", "tensors", "bits"]):
        done = subprocess.run([sys.executable, "-c", code, "copy", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert Path("mine/LICENSE").read_text() == Path("bits/LICENSE").read_text() == LICENCE
    assert own(Path("mine/loop.py")) == (PACKAGE / "loop.py").read_text()  # one first line, not two
    assert Path("train_loop.py").read_text().count("Permission is hereby granted") == 1


def test_a_copy_has_the_licence_and_a_renewed_one_loses_nothing(capsys):
    """Not even twice; and what was not changed is not kept."""
    run(capsys, "copy", "mine")
    licence = Path("mine/LICENSE").read_text()
    assert licence == (REPOSITORY / "LICENSE").read_text()
    assert "MIT License" in licence
    for n, text in enumerate(["# first\n", "# second\n"]):
        Path("mine/loop.py").write_text(text)
        Path("mine/demos/digits.py").write_text(text)
        code, out, _ = run(capsys, "copy", "mine", "--force")
        assert (code, line(out, "kept")) == (0, f"mine/.before_{n} has those that were other before")
        kept = {path.relative_to(f"mine/.before_{n}").as_posix() for path in Path(f"mine/.before_{n}").rglob("*.py")}
        assert kept == {"loop.py", "demos/digits.py"}
    assert [Path(f"mine/.before_{n}/loop.py").read_text() for n in (0, 1)] == ["# first\n", "# second\n"]
    assert run(capsys, "diff", "mine") == (0, "", "")
    assert "kept" not in run(capsys, "copy", "mine", "--force")[1]
    assert not Path("mine/.before_2").exists()


def test_what_copy_refuses(capsys):
    Path("other").mkdir()
    Path("other/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    assert refused(capsys, "copy", "my-loop") == (
        "copy my-loop: 'my-loop' cannot be imported: expected a name such as my_loop"
    )
    assert refused(capsys, "copy", "file", "--force") == "copy file: a file has this name: give another folder"
    assert refused(capsys, "copy", "other", "--force") == (
        "copy other --force: this folder is no copy of the package (it has no loop.py)"
    )
    assert "this is where the package itself lies" in refused(capsys, "copy", REPOSITORY / "fabric_template", "--force")
    assert "there is no copy of the package there" in refused(capsys, "diff", "other")
    assert sorted(path.name for path in Path("other").iterdir()) == ["notes.txt"]


def test_what_a_gitignore_would_leave_out_is_said(capsys):
    Path(".gitignore").write_text("data/\n*.gz\n")
    assert "ignored" not in run(capsys, "copy", "before")[1]  # no repository
    repository()
    out = run(capsys, "copy", "mine")[1]
    count = len(list((PACKAGE / "data").glob("*.py"))) + 1
    assert re.fullmatch(rf"mine/data/\S+, mine/data/\S+, mine/data/\S+ and {count - 3} more: by a .gitignore; git add -f takes"
                        " them", line(out, "ignored")), out  # fmt: skip
    assert line(run(capsys, "copy", "--mini", "train_loop.py")[1], "ignored") == (
        "train_loop.fabric_template.tar.gz: by a .gitignore; git add -f takes them"
    )


# ---- the single file


def test_the_single_file_is_copied_compared_and_renewed(capsys):
    file = Path("src/train_loop.py")
    for _ in range(2):  # one that is the same may be there
        code, out, _ = run(capsys, "copy", "--mini", file)
        assert (code, out.splitlines()) == (
            0,
            [
                "copied      MiniLoop to src/train_loop.py; it is yours now",
                "use         from train_loop import MiniLoop",
                "compare     fabric-template diff src/train_loop.py",
                "update      fabric-template update src/train_loop.py",
            ],
        )
    original = file.read_text()
    header, notice = original.partition("from __future__")[0], original.partition("# MIT License\n")[2]
    assert header.startswith(
        "# From fabric_template 0.1.0: mini.py (MIT licence: see the end of this file)\n"
        "# SPDX-License-Identifier: MIT\n# Copyright (c) 2026 the fabric_template authors. The licence's text"
    )
    assert "# MIT License\n" + notice == "".join(f"# {row}".rstrip() + "\n" for row in LICENCE.splitlines())
    assert own(file).startswith((PACKAGE / "mini.py").read_text())
    assert run(capsys, "diff", file) == (0, "", "")
    file.write_bytes(original.replace("\n", "\r\n").encode())  # as git may write it: nothing of it is changed
    assert run(capsys, "diff", file) == (0, "", "")

    for n, mark in enumerate(("# first\n", "# second\n")):
        file.write_text(original + mark)
        code, out, _ = run(capsys, "diff", file)
        assert code == 1
        assert out.startswith(
            "# train_loop.py: changed by you\n--- fabric_template/mini.py\t0.1.0\n+++ src/train_loop.py\n"
        )
        assert [row for row in out.splitlines(True)[3:] if row.startswith(("+", "-"))] == [f"+{mark}"]
        assert refused(capsys, "copy", "--mini", file) == (
            "copy --mini src/train_loop.py: a copy that differs is there, nothing was written: give another name, or type"
            " copy --mini src/train_loop.py --force, which renews it and keeps the old one beside it;"
            " diff src/train_loop.py shows what that one has changed, update src/train_loop.py brings what is new into it"
        )
        assert file.read_text() == original + mark
        code, out, _ = run(capsys, "copy", "--mini", file, "--force")
        assert (code, line(out, "kept")) == (0, f"src/train_loop.py.before_{n} is what was there before")
        assert (file.read_text(), Path(f"{file}.before_{n}").read_text()) == (original, original + mark)
    assert "kept" not in run(capsys, "copy", "--mini", file, "--force")[1]
    assert len(list(Path("src").iterdir())) == 5  # the file, its manifest, two that were there before


def test_what_the_copy_of_the_single_file_refuses(capsys):
    Path("mine.py").write_text("from train_loop import MiniLoop\n")
    Path("src").mkdir()
    assert refused(capsys, "copy", "--mini", "mine.py", "--force") == (
        "copy --mini mine.py: a file that is no copy of it is there, nothing was written: give another name"
    )
    assert refused(capsys, "copy", "--mini", "src") == (
        "copy --mini src: this is a folder: give the file to write, such as src/train_loop.py"
    )
    for name in ("train-loop.py", "train_loop", "train_loop.txt"):
        assert refused(capsys, "copy", "--mini", name) == (
            f"copy --mini {name}: '{name}' cannot be imported: expected a name such as train_loop.py"
        )
    assert "this is where the package itself lies" in refused(capsys, "copy", "--mini", PACKAGE / "mini.py", "--force")
    assert "mine.py/loop.py: cannot be written: " in refused(capsys, "copy", "--mini", "mine.py/loop.py")
    assert refused(capsys, "copy", "loop.py") == (
        "copy loop.py: the package is a folder: for the single file type copy --mini loop.py"
    )
    for name in ("mine.py", "none.py"):
        assert refused(capsys, "diff", name) == (
            f"diff {name}: there is no copy of the single file there: give the path of one"
        )
    assert {path.name for path in Path().iterdir()} == {"lit.py", "mine.py", "src"}


# ---- parts


def test_a_part_is_its_file_and_what_that_imports(capsys):
    code, out, _ = run(capsys, "copy", "--parts", "csv", "src/bits")
    assert (code, out.splitlines()) == (
        0,
        [
            "copied      files/disk.py, record/logger.py, record/parsing.py, record/tables.py to src/bits; they are yours now",
            "use         import bits.record.logger",
            "compare     fabric-template diff src/bits",
            "update      fabric-template update src/bits",
        ],
    )
    modules = {"files/disk.py", "record/logger.py", "record/parsing.py", "record/tables.py"}
    inits = {"__init__.py", "files/__init__.py", "record/__init__.py"}
    beside = {"LICENSE", "fabric_template.json", "fabric_template.tar.gz"}
    assert tree("src/bits").keys() == {*modules, *inits, *beside}
    known = json.loads(Path("src/bits/fabric_template.json").read_text())
    assert (known["copy"], known["parts"]) == ("parts", ["csv"])
    assert known["sha256"].keys() == {*modules, *inits, "LICENSE"}
    for name in modules:
        assert own(Path("src/bits", name)) == (PACKAGE / name).read_text()
    assert run(capsys, "diff", "src/bits") == (0, "", "")


def test_more_parts_come_to_those_that_are_there_and_what_you_changed_stays(capsys):
    run(capsys, "copy", "--parts", "csv", "bits")
    logger = Path("bits/record/logger.py")
    logger.write_text(logger.read_text() + "# mine\n")
    code, out, _ = run(capsys, "copy", "--parts", "tensors,csv", "bits")
    assert (code, line(out, "copied")) == (0, "data/tensors.py to bits; they are yours now")
    assert logger.read_text().endswith("# mine\n")
    assert json.loads(Path("bits/fabric_template.json").read_text())["parts"] == ["csv", "tensors"]
    code, out, _ = run(capsys, "diff", "bits")
    assert [row for row in out.splitlines() if row.startswith("#")] == ["# record/logger.py: changed by you"]
    assert line(run(capsys, "copy", "--parts", "csv", "bits")[1], "copied") == "nothing new to bits; they are yours now"
    code, out, _ = run(capsys, "copy", "--parts", "csv", "bits", "--force")
    assert line(out, "kept") == "bits/.before_0 has those that were other before"
    assert tree("bits/.before_0") == {
        "record/logger.py": (PACKAGE / "record/logger.py").read_bytes() + b"# mine\n"
    } or (tree("bits/.before_0")["record/logger.py"].endswith(b"# mine\n"))
    assert run(capsys, "diff", "bits") == (0, "", "")


def test_more_parts_bring_nothing_back_that_you_have_deleted_or_renamed(capsys):
    run(capsys, "copy", "--parts", "csv,locks", "bits")
    Path("bits/files/locks.py").unlink()
    Path("bits/record/tables.py").rename("bits/record/my_tables.py")
    out = run(capsys, "copy", "--parts", "tensors", "bits")[1]
    assert line(out, "copied") == "data/tensors.py to bits; they are yours now"
    assert [row for row in run(capsys, "diff", "bits")[1].splitlines() if row.startswith("# ")] == [
        "# files/locks.py: deleted by you"
    ]
    out = run(capsys, "copy", "--parts", "locks", "bits")[1]  # but where you ask for it
    assert line(out, "copied") == "files/locks.py to bits; they are yours now"
    assert run(capsys, "diff", "bits") == (0, "", "")
    assert not Path("bits/record/tables.py").exists()


def test_parts_go_into_a_package_of_yours_where_no_file_is_in_their_way(capsys):
    Path("src/data").mkdir(parents=True)
    Path("src/__init__.py").write_text("mine = True\n")
    Path("src/data/tensors.py").write_text("mine = True\n")
    run(capsys, "copy", "--parts", "csv", "src")
    assert Path("src/__init__.py").read_text() == "mine = True\n"
    assert run(capsys, "diff", "src") == (0, "", "")  # what is yours is none of it
    before = tree("src")
    assert refused(capsys, "copy", "--parts", "tensors", "src") == (
        "copy --parts tensors src: data/tensors.py: there already, nothing was written: give a folder of its own, such as"
        " src/parts; --force keeps what is there beside it, in .before_<n>"
    )
    assert tree("src") == before


def test_a_part_of_one_file_can_be_a_file(capsys):
    code, out, _ = run(capsys, "copy", "--parts", "tensors", "my_tensors.py")
    assert (code, out.splitlines()[:2]) == (
        0,
        ["copied      data/tensors.py to my_tensors.py; it is yours now", "use         import my_tensors"],
    )
    text = Path("my_tensors.py").read_text()
    assert text.startswith("# From fabric_template 0.1.0: data/tensors.py (MIT licence: see the end of this file)\n")
    assert own(Path("my_tensors.py")).startswith((PACKAGE / "data/tensors.py").read_text())
    assert text.endswith("# SOFTWARE.\n")
    assert run(capsys, "diff", "my_tensors.py") == (0, "", "")
    assert refused(capsys, "copy", "--parts", "csv", "csv_logger.py") == (
        "copy --parts csv csv_logger.py: these are 4 files: give a folder, such as csv_logger"
    )


def test_what_parts_refuse(capsys):
    names, rooms = ", ".join(PARTS), ", ".join(ROOMS)
    assert refused(capsys, "copy", "--parts", "cvs", "bits") == (
        f"--parts cvs: there is no such part: expected {names}, or a room: {rooms}"
    )
    assert refused(capsys, "copy", "--parts", "", "bits").startswith("copy --parts bits: no part is named: expected ")
    assert refused(capsys, "copy", "--mini", "--parts", "csv", "bits") == (
        "copy --mini --parts: expected one of them: the single file is whole"
    )
    run(capsys, "copy", "mine")
    assert refused(capsys, "copy", "--parts", "csv", "mine") == (
        "copy --parts csv mine: a copy of the whole folder is there: it has them already"
    )
    assert not Path("bits").exists()


def test_parts_of_two_versions_do_not_go_together(capsys, tmp_path, monkeypatch):
    run(capsys, "copy", "--parts", "csv", "bits")
    newer = Newer(tmp_path / "newer")
    newer.edit("record/tables.py", '"""Tables', '"""New: Tables')
    newer.install(monkeypatch)
    before = tree("bits")
    assert refused(capsys, "copy", "--parts", "tensors", "bits") == (
        "copy --parts tensors bits: the parts that are there are of 0.1.0, these are of 0.2.0, nothing was written:"
        " type update bits first"
    )
    assert tree("bits") == before


# ---- without us, and with torch and Lightning alone

ALONE = """
import sys
sys.path[:0] = ["", "site"]
for name in ("fabric_template", "pandas", "matplotlib", "sklearn", "jsonargparse"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
import torch
torch.set_num_threads(1)
from my_loop import FabricLoop, TensorLoader
from train_loop import MiniLoop
from bits.data.tensors import TensorLoader as Bits

def step(net, batch):
    return net(batch[0]).square().mean()

def trained(loop_class, loader, name, epochs, **words):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    batches, optimizer = loader(torch.arange(16.0).view(8, 2) / 16, batch_size=4), torch.optim.SGD(net.parameters(), lr=0.1)
    loop = loop_class(max_epochs=epochs, name=name, monitor="val_loss", accelerator="cpu", devices=1)
    loop.fit(net, batches, batches, optimizer=optimizer, training_step=step, validation_step=step, **words)
    return net.weight

for loop_class, loader in ((FabricLoop, TensorLoader), (MiniLoop, Bits)):
    whole = trained(loop_class, loader, f"whole_{loop_class.__name__}", 2)
    trained(loop_class, loader, loop_class.__name__, 1)
    assert torch.equal(trained(loop_class, loader, loop_class.__name__, 2, resume="last"), whole)
print("trained")
"""


def test_copies_train_and_go_on_with_torch_and_lightning_alone():
    copying.copy_package("my_loop")
    copying.copy_mini("train_loop.py")
    copying.copy_parts(["tensors"], "bits")
    installed = Path(torch.__file__).parents[1]
    Path("site").mkdir()
    for path in installed.iterdir():
        if not re.match(
            "(pandas|matplotlib|mpl_toolkits|sklearn|scikit_learn|jsonargparse|seaborn)", path.name.lower()
        ):
            Path("site", path.name).symlink_to(path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    command = [sys.executable, "-S", "-c", ALONE]  # without what is installed, but for what is linked
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.endswith("trained\n"), done.stderr[-3000:]

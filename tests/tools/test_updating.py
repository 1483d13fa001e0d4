"""A copy that was edited, and a new version: both are in it afterwards, and nothing of anybody is lost."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import REPOSITORY, refused, run, typed  # noqa: F401
from upstreams import Newer, commit, edit, git, repository, tree

from fabric_template.tools import copying, merging
from fabric_template.tools.updating import update_copy

MANIFEST = {"fabric_template.json", "fabric_template.tar.gz"}


@pytest.fixture(autouse=True)
def no_settings_of_ours(monkeypatch):
    """Git as it comes, not as somebody has set it up for himself."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


@pytest.fixture
def newer(tmp_path):
    return Newer(tmp_path / "upstream")


@pytest.fixture
def bits():
    """A small copy, of four files, in a repository."""
    copying.copy_parts(["csv", "tensors"], "src/bits")
    repository()
    return Path("src/bits")


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


# ---- the measure: three edits, a new version with changes in the same files, one of them in the same lines


def test_edits_survive_a_new_version_and_one_conflict_is_marked(capsys, newer):
    run(capsys, "copy", "my_project/training")
    ours = Path("my_project/training")
    edit(
        ours / "core/update.py",
        "from functools import cached_property, partial\n",
        "from functools import cached_property, partial\nfrom math import inf  # mine\n",
    )
    edit(ours / "record/bar.py", '"""Bar:', '"""My bar:')
    edit(ours / "core/said.py", "import sys\n", "import sys  # mine\n")
    repository()
    before = tree(ours)

    with (newer.package / "core/update.py").open("a") as file:
        file.write("\n\nUPSTREAM = 1\n")
    with (newer.package / "record/bar.py").open("a") as file:
        file.write("\n\nUPSTREAM = 2\n")
    newer.edit("core/said.py", "import sys\n", "import sys  # upstream\n")
    newer.edit("data/tensors.py", '"""Tensors:', '"""New: Tensors:')
    newer.edit("__init__.py", '__version__ = "0.1.0"', '__version__ = "0.2.0"')

    # as it is typed, with the new version installed
    environment = {**os.environ, "PYTHONPATH": str(newer.package.parent)}
    command = [sys.executable, "-m", "fabric_template", "update", "my_project/training"]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, env=environment)
    assert (dry.returncode, tree(ours)) == (1, before)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "updated     my_project/training from 0.1.0 to 0.2.0",
        "replaced    __init__.py, data/tensors.py",
        "merged      core/update.py, record/bar.py",
        "conflict    core/said.py: line 6: changed by you and upstream",
        "next        choose between the lines at <<<<<<<, run your tests, commit",
    ]
    assert f"```text\n{done.stdout}```\n" in (REPOSITORY / "docs/copying.md").read_text()
    assert dry.stdout.splitlines() == [
        "dry run     my_project/training from 0.1.0 to 0.2.0",
        *done.stdout.splitlines()[1:-1],
    ]

    after = tree(ours)
    assert changed(before, after) == {
        "__init__.py", "data/tensors.py", "core/update.py", "record/bar.py", "core/said.py", *MANIFEST,
    }  # fmt: skip
    versions = lambda text: text.replace(b"# From fabric_template 0.1.0: ", b"# From fabric_template 0.2.0: ")  # noqa: E731
    assert after["core/update.py"] == versions(before["core/update.py"]) + b"\n\nUPSTREAM = 1\n"
    assert after["record/bar.py"] == versions(before["record/bar.py"]) + b"\n\nUPSTREAM = 2\n"
    assert after["data/tensors.py"] == versions(before["data/tensors.py"]).replace(b'"""Tensors', b'"""New: Tensors')
    both = b"<<<<<<< core/said.py (yours)\nimport sys  # mine\n=======\nimport sys  # upstream\n>>>>>>> fabric_template 0.2.0\n"
    assert after["core/said.py"] == versions(before["core/said.py"]).replace(b"import sys  # mine\n", both)

    # and the next update begins from there
    said = ours / "core/said.py"
    said.write_bytes(after["core/said.py"].replace(both, b"import sys  # mine and upstream\n"))
    commit()
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (again.returncode, again.stdout) == (0, "the same    my_project/training has all of 0.2.0\n")
    diff = subprocess.run(
        [*command[:3], "diff", "my_project/training"], capture_output=True, text=True, env=environment
    )
    assert [row for row in diff.stdout.splitlines() if row.startswith(("+", "-", "# "))][:9] == [
        "# core/said.py: changed by you", "--- fabric_template/core/said.py\t0.2.0", "+++ my_project/training/core/said.py",
        "-import sys  # upstream", "+import sys  # mine and upstream",
        "# core/update.py: changed by you", "--- fabric_template/core/update.py\t0.2.0",
        "+++ my_project/training/core/update.py",
        "+from math import inf  # mine",
    ]  # fmt: skip


# ---- diff tells the two apart


def test_diff_tells_what_you_changed_from_what_upstream_changed(capsys, bits, newer, monkeypatch):
    edit(bits / "data/tensors.py", '"""Tensors', '"""My tensors')
    newer.edit("data/tensors.py", "from __future__", "# upstream\nfrom __future__")
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    code, out, _ = run(capsys, "diff", "src/bits")
    said = [row for row in out.splitlines() if row.startswith(("# ", "---", "+++"))]
    yours, theirs = said[3:6], [*said[:3], *said[6:]]
    assert (code, yours) == (
        1,
        [
            "# data/tensors.py: changed by you",
            "--- fabric_template/data/tensors.py\t0.1.0",
            "+++ src/bits/data/tensors.py",
        ],
    )
    assert theirs == [
        "# __init__.py: changed in fabric_template 0.2.0",
        "--- fabric_template/__init__.py\t0.1.0",
        "+++ fabric_template/__init__.py\t0.2.0",
        "# data/tensors.py: changed in fabric_template 0.2.0",
        "--- fabric_template/data/tensors.py\t0.1.0",
        "+++ fabric_template/data/tensors.py\t0.2.0",
        "# files/disk.py: changed in fabric_template 0.2.0",
        "--- fabric_template/files/disk.py\t0.1.0",
        "+++ fabric_template/files/disk.py\t0.2.0",
    ]
    only = {word: run(capsys, "diff", "src/bits", word)[1] for word in ("--yours", "--upstream")}
    assert [row for row in only["--yours"].splitlines() if row.startswith(("# ", "---", "+++"))] == yours
    assert [row for row in only["--upstream"].splitlines() if row.startswith(("# ", "---", "+++"))] == theirs
    # what is printed is a patch
    Path("mine.patch").write_text(only["--yours"])
    git("apply", "--check", "--reverse", "-p0", "mine.patch")


def test_a_copy_without_a_manifest_is_compared_as_ever_and_not_updated(capsys):
    run(capsys, "copy", "mine")
    run(capsys, "copy", "--mini", "train_loop.py")
    for name in ("mine/fabric_template.json", "train_loop.fabric_template.json"):
        Path(name).unlink()
    for path in [*Path("mine").rglob("*.py"), Path("train_loop.py")]:  # as those of before have no first line
        path.write_text(path.read_text().split("\n", 1)[1])
    assert run(capsys, "diff", "mine") == run(capsys, "diff", "train_loop.py") == (0, "", "")
    edit(Path("mine/loop.py"), '"""FabricLoop', '"""My FabricLoop')
    assert run(capsys, "diff", "mine")[1].startswith("--- fabric_template/loop.py\n+++ mine/loop.py\n@@ -1,")
    assert refused(capsys, "update", "mine") == (
        "update mine: there is no 'fabric_template.json', which says what was copied: it is a copy by hand or an old one, or"
        " none. diff mine shows what is other; copy --force renews it, and keeps your changes beside it"
    )


# ---- what you have added, deleted, renamed; what upstream has


def test_what_is_added_deleted_and_renamed_on_either_side(capsys, newer, monkeypatch):
    copying.copy_package("mine")
    mine = Path("mine")
    (mine / "extra.py").write_text("mine = True\n")
    (mine / "core/both.py").write_text("mine = True\n")
    (mine / "tools/page.py").unlink()
    shutil.rmtree(mine / "demos")
    (mine / "record/bar.py").rename(mine / "record/my_bar.py")
    edit(mine / "record/my_bar.py", '"""Bar:', '"""My bar:')
    edit(mine / "record/screen.py", '"""Screen:', '"""My screen:')
    repository()
    before = tree(mine)

    newer.edit("tools/page.py", '"""Page:', '"""New page:')
    (newer.package / "demos/another.py").write_text('"""Another."""\n')
    (newer.package / "core/fresh.py").write_text('"""Fresh."""\n')
    (newer.package / "core/both.py").write_text('"""Both."""\n')
    with (newer.package / "record/bar.py").open("a") as file:
        file.write("\n\nUPSTREAM = 2\n")
    (newer.package / "record/screen.py").unlink()
    (newer.package / "core/timing.py").unlink()
    newer.install(monkeypatch)
    code, out, _ = run(capsys, "update", "mine")
    assert (code, out.splitlines()) == (
        1,
        [
            "updated     mine from 0.1.0 to 0.2.0",
            "replaced    __init__.py",
            "merged      record/my_bar.py",
            "added       core/fresh.py",
            "deleted     core/timing.py",
            "renamed     record/bar.py is record/my_bar.py here",
            "stays away  demos/another.py, tools/page.py",
            "kept        record/screen.py: gone from 0.2.0, but you have changed it: it is yours",
            "conflict    core/both.py: line 1: changed by you and upstream",
            "next        choose between the lines at <<<<<<<, run your tests, commit",
        ],
    )
    after = tree(mine)
    assert changed(before, after) == {
        "__init__.py", "record/my_bar.py", "core/fresh.py", "core/timing.py", "core/both.py", *MANIFEST,
    }  # fmt: skip
    text = after["record/my_bar.py"].decode()
    assert text.startswith('# From fabric_template 0.2.0: record/bar.py (MIT licence: see LICENSE)\n"""My bar:')
    assert text.endswith("\n\nUPSTREAM = 2\n")
    assert b"mine = True\n" in after["core/both.py"]
    # the next one knows all of it: nothing comes back, nothing is asked again
    (mine / "core/both.py").write_text("mine = True\n")
    commit()
    assert run(capsys, "update", "mine") == (0, "the same    mine has all of 0.2.0\n", "")
    code, out, _ = run(capsys, "diff", "mine")
    assert [row for row in out.splitlines() if row.startswith("# ") and "demos/" not in row] == [
        "# core/both.py: changed by you",
        "# extra.py: added by you",
        "# record/my_bar.py: changed by you",
        "# record/screen.py: added by you",
        "# tools/page.py: deleted by you",
    ]


def test_the_single_file_also_under_a_new_name(capsys, newer, monkeypatch):
    run(capsys, "copy", "--mini", "src/train_loop.py")
    edit(Path("src/train_loop.py"), "import csv\n", "import csv  # mine\n")
    Path("src/train_loop.py").rename("src/loop2.py")
    repository()
    newer.edit("mini.py", "PLAIN = bool", "UPSTREAM = 1\nPLAIN = bool")
    newer.install(monkeypatch)
    before = tree("src")
    code, out, _ = run(capsys, "update", "src/loop2.py")
    assert (code, out.splitlines()) == (
        0,
        [
            "updated     src/loop2.py from 0.1.0 to 0.2.0",
            "merged      loop2.py",
            "renamed     mini.py is loop2.py here",
        ],
    )
    after = tree("src")
    assert changed(before, after) == {
        "loop2.py",
        "train_loop.fabric_template.json",
        "train_loop.fabric_template.tar.gz",
    }
    text = after["loop2.py"].decode()
    assert "import csv  # mine\n" in text
    assert "UPSTREAM = 1\n" in text
    assert text.endswith("# SOFTWARE.\n")
    commit()
    assert run(capsys, "update", "src") == (0, "the same    src has all of 0.2.0\n", "")  # the one copy in that folder
    run(capsys, "copy", "--mini", "src/another.py")
    assert refused(capsys, "update", "src").endswith("has several copies: give one of " + ", ".join(
        str(Path("src", name).resolve()) for name in ("another.py", "loop2.py")
    ))  # fmt: skip


def test_another_copy_beside_or_inside_is_another_copy(capsys, newer, monkeypatch):
    """It is not taken for a file of this one under a new name, nor for one that you have added."""
    run(capsys, "copy", "--parts", "csv", "app")
    run(capsys, "copy", "app/training")
    for name in ("one", "two"):
        run(capsys, "copy", "--mini", f"app/{name}.py")
    assert run(capsys, "diff", "app/training") == (0, "", "")
    Path("app/files/disk.py").unlink()
    Path("app/one.py").unlink()
    repository()
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.edit("mini.py", "PLAIN = bool", "UPSTREAM = 1\nPLAIN = bool")
    newer.install(monkeypatch)
    before = tree("app")
    assert run(capsys, "update", "app")[1].splitlines()[1:] == ["replaced    __init__.py", "stays away  files/disk.py"]
    assert run(capsys, "update", "app/one.py")[1].splitlines()[1:] == ["stays away  one.py"]
    left = changed(before, tree("app"))
    assert left == {"__init__.py", *MANIFEST, *(f"one.{name}" for name in MANIFEST)}


def test_a_part_that_is_one_file_no_longer(capsys, newer, monkeypatch):
    run(capsys, "copy", "--parts", "tensors", "my_tensors.py")
    repository()
    path = newer.package / "data/tensors.py"
    path.write_text(path.read_text() + "\nfrom ..core.errors import Misuse\n")
    newer.install(monkeypatch)
    assert refused(capsys, "update", "my_tensors.py") == (
        "data/tensors.py of fabric_template 0.2.0 needs others (core/errors.py, data/tensors.py): take it as a folder, copy"
        " --parts"
    )
    path.unlink()
    assert refused(capsys, "update", "my_tensors.py") == (
        "fabric_template 0.2.0 has no data/tensors.py: what you have of it goes on as it is"
    )


def test_line_ends_stay_as_they_are(capsys, bits, newer, monkeypatch):
    """All of another system's, or some; also of what is replaced."""
    disk, tensors = bits / "files/disk.py", bits / "data/tensors.py"
    disk.write_bytes(disk.read_bytes().replace(b"\n", b"\r\n"))
    lines = tensors.read_bytes().splitlines(keepends=True)
    lines[8:11] = [line.replace(b"\n", b"\r\n") for line in lines[8:11]]
    tensors.write_bytes(b"".join([*lines, b"mine = 1"]))  # and no end of line at the end
    commit()
    assert [row for row in run(capsys, "diff", "src/bits")[1].splitlines() if row.startswith("# ")] == [
        "# data/tensors.py: changed by you"
    ]
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.edit("data/tensors.py", '"""Tensors', '"""New: Tensors')
    newer.install(monkeypatch)
    before = tree(bits)
    assert run(capsys, "update", "src/bits")[0] == 0
    after = tree(bits)
    first = (b"fabric_template 0.1.0", b"fabric_template 0.2.0")
    assert after["files/disk.py"] == before["files/disk.py"].replace(*first).replace(b'"""Disk', b'"""The disk')
    assert after["data/tensors.py"] == before["data/tensors.py"].replace(*first).replace(
        b'"""Tensors', b'"""New: Tensors'
    )


def test_a_first_line_that_you_took_out_stays_out(bits, newer, monkeypatch):
    disk = bits / "files/disk.py"
    disk.write_text(disk.read_text().split("\n", 1)[1])
    commit()
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    assert update_copy("src/bits").is_clean
    assert disk.read_text() == (newer.package / "files/disk.py").read_text()


# ---- what is refused, and what to type


def test_refused_where_git_could_not_give_it_back(capsys, newer, monkeypatch):
    copying.copy_parts(["csv"], "bits")
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    before = tree("bits")
    assert refused(capsys, "update", "bits") == (
        "update bits: this is in no git repository, nothing was written: type git init && git add . && git commit -m 'before'"
        " first, so that git diff shows what the update does, or --force, which keeps what it changes beside it, in .before_<n>"
    )
    repository()
    disk = Path("bits/files/disk.py")
    disk.write_text(disk.read_text() + "# mine\n")
    before = tree("bits")
    assert refused(capsys, "update", "bits") == (
        "update bits: git has not all of it, nothing was written ( M bits/files/disk.py): commit first, so that git diff shows"
        " what the update does; or type --force, which keeps what it changes beside it, in .before_<n>"
    )
    assert tree("bits") == before
    Path(".gitignore").write_text("*.json\n")
    git("rm", "-q", "--cached", "bits/fabric_template.json")
    commit()
    assert "(!! bits/fabric_template.json; those with !! are ignored, git add -f takes them)" in refused(
        capsys, "update", "bits"
    )
    code, out, _ = run(capsys, "update", "bits", "--force")
    assert (code, out.splitlines()[3:]) == (0, ["backup      .before_0 has what was there before"])
    kept = tree("bits/.before_0")
    assert kept == {name: before[name] for name in ("__init__.py", "files/disk.py", *MANIFEST)}
    assert disk.read_text().endswith("# mine\n")


def test_what_update_refuses(capsys, bits, newer, monkeypatch):
    def words(path="src/bits", *more):
        before = tree("src")
        said = refused(capsys, "update", path, *more)
        assert tree("src") == before
        return said

    for path in ("nowhere", "nowhere/at/all"):
        assert words(path) == f"update {path}: there is nothing: give the folder of a copy, or a copied file"
    for path in ("src/bits/data", "src/bits/data/tensors.py"):
        assert words(path) == f"update {path}: this is inside of a copy: give its folder, '{bits.resolve()}'"
    assert (
        refused(capsys, "diff", path) == f"diff {path}: this is inside of a copy: give its folder, '{bits.resolve()}'"
    )
    assert words("src").startswith("update src: there is no 'fabric_template.json', which says what was copied")
    assert "this is where the package itself lies" in words(Path(copying.PACKAGE))
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch, "0.0.9")
    assert words() == (
        "update src/bits: the copy is of 0.1.0, installed is 0.0.9: pip install -U fabric-template; --force goes back all the"
        " same"
    )
    newer.edit("__init__.py", '"0.0.9"', '"0.2.0"')
    disk = bits / "files/disk.py"
    text = disk.read_text()
    disk.write_text(text + "<<<<<<< yours\na\n=======\nb\n>>>>>>> theirs\n")
    commit()
    line = text.count("\n") + 1
    assert words() == (
        f"'files/disk.py' has a conflict in line {line} that is not solved yet: solve it, commit, and update then"
    )
    disk.write_text(text)
    commit()
    # one file put back behind the manifest's back
    assert run(capsys, "update", "src/bits")[0] == 0
    disk.write_text(text)
    commit()
    newer.edit("files/disk.py", '"""The disk', '"""A disk')
    assert words() == (
        "'files/disk.py' is of 0.1.0 by its first line, the manifest has it of 0.2.0: were some files put back and others not?"
        " Put all of them back by git, fabric_template.json too; or delete that line if all of it is meant so"
    )
    # a manifest that is damaged, of another copy, or reaches out of its folder
    known = json.loads((bits / "fabric_template.json").read_text())
    for broken in ("{", "[]", json.dumps({**known, "sha256": {"../x.py": "0"}})):
        (bits / "fabric_template.json").write_text(broken)
        assert "fabric_template.json' is no manifest of a copy" in words()
        assert "is no manifest of a copy" in refused(capsys, "diff", "src/bits")
    (bits / "fabric_template.json").write_text(json.dumps({**known, "sha256": {**known["sha256"], "LICENSE": "0"}}))
    assert "are not of one copy (LICENSE): take it back from git, or renew the copy: copy --force" in words()
    (bits / "fabric_template.json").write_text(json.dumps(known))
    (bits / "fabric_template.tar.gz").write_bytes(b"not one")
    assert "the files as they were copied, cannot be read" in words()
    assert run(capsys, "copy", "--parts", "csv,tensors", "src/bits", "--force")[0] == 0
    commit()
    assert run(capsys, "update", "src/bits")[0] == 0


def test_a_renamed_file_is_to_be_committed_like_the_others(capsys, bits, newer, monkeypatch):
    (bits / "data/tensors.py").rename(bits / "data/mine.py")
    git("add", "-A")
    git("commit", "-q", "-m", "renamed")
    with (bits / "data/mine.py").open("a") as file:
        file.write("# mine\n")
    newer.edit("data/tensors.py", '"""Tensors', '"""New: Tensors')
    newer.install(monkeypatch)
    before = tree(bits)
    assert "nothing was written ( M src/bits/data/mine.py)" in refused(capsys, "update", "src/bits")
    assert tree(bits) == before


def test_what_a_part_no_longer_imports_stays_and_is_updated(capsys, bits, newer, monkeypatch):
    """You may have come to need it."""
    for name in ("logger", "tables"):
        path = newer.package / f"record/{name}.py"
        path.write_text(path.read_text().replace("from ..files.disk import", "from files.disk import"))
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    before = tree(bits)
    code, out, _ = run(capsys, "update", "src/bits")
    assert (code, out.splitlines()[1]) == (
        0,
        "replaced    __init__.py, files/disk.py, record/logger.py, record/tables.py",
    )
    assert tree(bits).keys() == before.keys()


def test_what_the_disk_refuses_is_a_line_and_all_is_as_it_was(capsys, bits, newer, monkeypatch):
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    before, real = tree(bits), os.replace

    def refuses(source, target):
        if str(target).endswith("files/disk.py") and "new-" in str(source):
            raise PermissionError(13, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuses)
    assert refused(capsys, "update", "src/bits") == (
        "update src/bits: cannot be written: Permission denied; all is as it was: mend it, and type it again"
    )
    assert tree(bits) == before


def test_without_git_it_says_so(capsys, bits, newer, monkeypatch):
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    monkeypatch.setenv("PATH", str(bits))
    before = tree(bits)
    assert refused(capsys, "update", "src/bits") == (
        "git is not there, which merges what you and what upstream have changed: install it (apt install git, brew install git,"
        " git-scm.com); nothing was written"
    )
    assert tree(bits) == before
    with pytest.raises(ValueError, match="git is not there"):
        merging.merged(b"a", b"b", b"c", ("yours", "old", "new"))


def test_what_git_cannot_merge_is_named(capsys, bits, newer, monkeypatch):
    disk = bits / "files/disk.py"
    disk.write_bytes(disk.read_bytes().replace(b"\n", b"\n\0", 1))  # git looks at the first 8,000 bytes
    commit()
    newer.edit("files/disk.py", '"""Disk', '"""The disk')
    newer.install(monkeypatch)
    before = tree(bits)
    assert "files/disk.py (yours): git says: error: Cannot merge binary files" in refused(capsys, "update", "src/bits")
    assert tree(bits) == before


def test_a_copy_does_not_update_itself_but_shows_what_is_changed_in_it():
    """Typed with the copy's own command line: there is no other version in it."""
    copying.copy_package("mine")
    edit(Path("mine/loop.py"), '"""FabricLoop', '"""My FabricLoop')
    words = {"capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", "mine", "diff", "mine"], **words)
    assert (done.returncode, done.stdout.count("\n# "), done.stdout[:27]) == (1, 0, "# loop.py: changed by you\n-")
    done = subprocess.run([sys.executable, "-m", "mine", "update", "mine"], **words)
    assert (done.returncode, "type it with the fabric_template that is installed" in done.stderr) == (2, True)


def test_the_commands_of_the_page_are_typed_one_after_the_other(capsys, newer, monkeypatch):
    """In a project with its repository, and with a new version between copying and keeping up."""
    page = (REPOSITORY / "docs/copying.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    first, later = ([row.split("  #")[0].split()[1:] for row in block.splitlines()] for block in blocks)
    for words in first:
        assert run(capsys, *words)[0] == 0, words
    repository()
    newer.edit("data/tensors.py", '"""Tensors', '"""New: Tensors')
    newer.install(monkeypatch)
    codes = [(words[0], run(capsys, *words)[0]) for words in later]
    assert codes == [("diff", 1), ("diff", 0), ("update", 0), ("update", 0)]
    assert "New: Tensors" in Path("my_project/training/data/tensors.py").read_text()
    said = re.search(r"`(# From .*)`; ?|`(# From .*)`", page)
    assert Path("my_project/training/core/train.py").read_text().startswith(f"{said[1] or said[2]}\n")
    sizes = [
        Path("my_project", name).stat().st_size
        for name in ("train_loop.fabric_template.tar.gz", "training/fabric_template.tar.gz")
    ]
    assert sizes[0] < 20_000
    assert sizes[1] < 450_000

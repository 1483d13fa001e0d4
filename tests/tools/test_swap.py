"""SIGKILL at each change of the disk in an update: the old tree or the new one, or one that says what to type, which ends it.

And each failing by an error: then all is as it was.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_cli import refused, run, typed  # noqa: F401
from upstreams import Newer, edit, repository, tree

from fabric_template.tools import copying
from fabric_template.tools.comparing import diff_package
from fabric_template.tools.manifest import Place
from fabric_template.tools.swap import SHUT, _held, finish, swap
from fabric_template.tools.updating import update_copy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))
from layer import Fault, Layer  # noqa: E402

STAGING = ".fabric_template.swap"


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """A copy of four files that somebody has edited, and what an update makes of it: one of each kind of change."""
    copying.copy_parts(["csv", "tensors"], "old/bits")
    bits = Path("old/bits")
    edit(bits / "record/tables.py", '"""Tables', '"""My tables')
    (bits / "gone").mkdir()
    (bits / "gone/mine.py").write_text("mine = 1\n")
    newer = Newer(tmp_path / "upstream")
    with (newer.package / "record/tables.py").open("a") as file:
        file.write("\n\nUPSTREAM = 1\n")
    newer.edit("data/tensors.py", '"""Tensors', '"""New: Tensors')
    newer.edit(
        "record/tables.py", "from ..files.disk import", "from ..files.fresh import X as X\nfrom ..files.disk import"
    )
    (newer.package / "files/fresh.py").write_text("X = 1\n")
    newer.edit("record/logger.py", '"""The CSV', '"""New: the CSV')
    newer.install(monkeypatch)
    shutil.copytree("old", "new")
    update_copy("new/bits", force=True)
    shutil.rmtree("new/bits/.before_0")
    shutil.rmtree("new/bits/gone")  # which stands for a file that upstream has no more
    return tree("old/bits"), tree("new/bits")


def update_of(trees):
    """What `swap` is asked for by that update."""
    old, new = trees
    return {name: data for name, data in new.items() if old.get(name) != data}, [
        name for name in old if name not in new
    ]


def fresh(number):
    shutil.copytree("old/bits", f"try_{number}/bits")
    return Path(f"try_{number}/bits")


def in_a_child(work):
    """Run it in a process of its own; its exit code, or the signal that ended it, negative."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Watching(Layer):
    """Notes what touches the disk: the number of the touch, the operation and the path."""

    def __init__(self, root):
        super().__init__(root)
        self.seen = []

    def before(self, operation, path, size):
        self.seen.append((self.count, operation, Path(path).relative_to(self.root).as_posix()))


def touches(trees, reads=False):
    """Those of a swap that change something: a few of those that prepare it, and all from the journal on."""
    bits = fresh("watched").resolve()
    with Watching(bits) as layer:
        swap(Place(bits), *update_of(trees))
    assert tree(bits) == trees[1]
    shutil.rmtree(bits.parent)
    is_journal = [(n, what, path) for n, what, path in layer.seen if path.startswith(f"{STAGING}/.journal.json.")]
    decided = next(number for number, operation, _ in is_journal if operation == "replace")
    assert len([1 for number, *_ in layer.seen if number > decided]) > 12
    changes = [touch for touch in layer.seen if touch[1] != "open" or (reads and touch[0] >= decided)]
    return [touch for touch in changes if touch[0] < decided][::5] + [touch for touch in changes if touch[0] >= decided]


def shut(trees):
    """The touch behind the one that shuts the door."""
    changes = pairwise(touches(trees))
    return next(after[0] for before, after in changes if before[1:] == ("replace", f"{STAGING}/new-0"))


def test_killed_at_each_change_of_the_disk(trees):
    old, new = trees
    assert (old.keys() - new.keys(), new.keys() - old.keys()) == ({"gone/mine.py"}, {"files/fresh.py"})
    seen = set()
    for number, *_ in touches(trees):
        bits = fresh(number)

        def killed(bits=bits, number=number):
            with Fault(bits.resolve(), number, "SIGKILL"):
                swap(Place(bits.resolve()), *update_of(trees))

        assert in_a_child(killed) == -signal.SIGKILL
        left = {name: data for name, data in tree(bits).items() if not name.startswith(STAGING)}
        is_shut = left["__init__.py"] == SHUT.encode()
        assert is_shut or left in (old, new), number
        diff_package(bits)  # which ends it, whatever it was
        assert tree(bits) in (old, new), number
        assert tree(bits) == new or not is_shut, number
        seen.add(("shut" if is_shut else "old" if left == old else "new", tree(bits) == new))
    assert seen == {("old", False), ("old", True), ("shut", True), ("new", True)}


def test_a_tree_that_is_half_new_cannot_be_imported_and_says_what_to_type(trees):
    bits, number = fresh("half"), shut(trees) + 2

    def killed():
        with Fault(bits.resolve(), number, "SIGKILL"):
            swap(Place(bits.resolve()), *update_of(trees))

    in_a_child(killed)
    done = subprocess.run([sys.executable, "-c", "import bits"], cwd="try_half", capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: an update of this folder was interrupted before its end: type `fabric-template diff` with the folder's"
        " path, which ends it first"
    )


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_failing_at_each_change_of_the_disk(trees, kind):
    """An error, once (EIO) or from there on (a full disk, on which files can still be renamed and deleted)."""
    old, new = trees
    for number, *_ in touches(trees, reads=True)[:: 2 if kind == "EIO" else 6]:
        bits = fresh(f"{kind}_{number}")
        try:
            with Fault(bits.resolve(), number, kind):
                swap(Place(bits.resolve()), *update_of(trees))
        except OSError:
            assert tree(bits) == old or (bits / STAGING / "journal.json").is_file(), number
        finish(Place(bits.resolve()))
        assert tree(bits) in (old, new), number


def test_update_copy_and_diff_end_what_was_killed(capsys, trees):
    """As it is typed: each of the three first ends what is there, and then does its work."""
    old, new = trees
    for number in (5, shut(trees) + 1):
        for verb in ("diff", "update", "copy"):
            bits = fresh(f"{verb}_{number}")

            def killed(bits=bits, number=number):
                with Fault(bits.resolve(), number, "SIGKILL"):
                    swap(Place(bits.resolve()), *update_of(trees))

            in_a_child(killed)
            words = {"diff": [], "update": ["--force"], "copy": ["--parts", "csv"]}[verb]
            code, _, err = run(capsys, verb, *words, bits)
            # an old copy has no place for parts of a new version; there nothing had begun
            assert (code, err[:5]) == (2, "fabri") if (verb, number) == ("copy", 5) else err == ""
            assert not (bits / STAGING).exists()
            if verb == "update":
                after = {name: data for name, data in tree(bits).items() if not name.startswith((".before_", "gone"))}
                assert after == new


def test_the_whole_command_killed_by_hand(trees):
    """Not a swap alone: git and all, at some instants of a real update."""
    old, new = trees
    os.chdir("old")
    repository()
    os.chdir("..")
    ends = set()
    for number in range(3, 125, 20):
        bits = Path(f"try_{number}")
        shutil.copytree("old", bits)
        bits = bits / "bits"

        def killed(bits=bits, number=number):
            with Fault(bits.resolve(), number, "SIGKILL"):
                update_copy(bits)

        in_a_child(killed)
        diff_package(bits)
        after = tree(bits)
        assert after in (old, {**new, "gone/mine.py": old["gone/mine.py"]}), number
        ends.add(after != old)
    assert ends == {True, False}


def test_what_was_changed_between_a_kill_and_the_end_is_kept(trees):
    bits, number = fresh("edited"), shut(trees)

    def killed():
        with Fault(bits.resolve(), number, "SIGKILL"):
            swap(Place(bits.resolve()), *update_of(trees))

    in_a_child(killed)
    assert (bits / "__init__.py").read_text() == SHUT
    (bits / "data/tensors.py").write_text("mine = 2\n")
    assert finish(Place(bits.resolve()))
    after = tree(bits)
    assert after.pop("data/tensors.py.before") == b"mine = 2\n"
    assert after == trees[1]


def test_what_was_put_back_after_a_kill_stays_put_back(trees):
    """By `git checkout`, which is what one does: all of it, or what was changed by then; no tree of both comes of it."""
    old, _ = trees
    first = shut(trees)
    for number in [number for number, *_ in touches(trees) if number >= first][::3]:
        bits = fresh(f"put_back_{number}")

        def killed(bits=bits, number=number):
            with Fault(bits.resolve(), number, "SIGKILL"):
                swap(Place(bits.resolve()), *update_of(trees))

        in_a_child(killed)
        half = tree(bits)
        for name, data in old.items():  # of new files git knows nothing
            (bits / name).parent.mkdir(exist_ok=True)
            (bits / name).write_bytes(data)
        diff_package(bits)
        after = tree(bits)
        assert after == old or (after == {**old, "files/fresh.py": half["files/fresh.py"]}), number


def test_two_at_a_time_are_one_too_many(capsys, trees):
    """Also not one that reads: it could take a swap that goes on for one that was killed."""
    place = Place(fresh("twice").resolve())
    with _held(place.staging):
        for words in (["diff"], ["update"], ["copy", "--parts", "csv"]):
            assert refused(capsys, *words, place.folder) == (
                f"'{place.folder}' is being changed by another copy or update: wait for its end"
            )
    assert tree(place.folder) == trees[0]


def test_a_copy_that_is_killed_is_not_there_or_whole(tmp_path):
    copying.copy_parts(["tensors"], "whole")
    whole = tree("whole")
    for number in range(1, 60, 10):
        target = Path(f"try_{number}").resolve()

        def killed(target=target, number=number):
            with Fault(target, number, "SIGKILL"):
                copying.copy_parts(["tensors"], target)

        in_a_child(killed)
        copying.copy_parts(["tensors"], target)
        assert tree(target) == whole, number


def test_links_and_modes(trees):
    bits = fresh("modes")
    os.chmod(bits / "data/tensors.py", 0o640)
    swap(Place(bits.resolve()), *update_of(trees))
    assert (bits / "data/tensors.py").stat().st_mode & 0o777 == 0o640
    linked = fresh("links")
    (linked / "data/tensors.py").unlink()
    (linked / "data/tensors.py").symlink_to(bits.resolve() / "data/tensors.py")
    before = tree(linked)
    with pytest.raises(ValueError, match="is a link: put a file in its place, nothing was written"):
        swap(Place(linked.resolve()), {"data/tensors.py": b"x"})
    assert tree(linked) == before


def test_the_journal_is_what_it_is_decided_by(trees):
    """Prepared and no journal: nothing has happened."""
    bits = fresh("prepared")
    (bits / STAGING).mkdir()
    (bits / STAGING / "new-0").write_text("half of a f")
    assert finish(Place(bits.resolve()))
    assert tree(bits) == trees[0]
    assert not finish(Place(bits.resolve()))
    assert json.dumps(sorted(tree(bits))) == json.dumps(sorted(trees[0]))


def test_a_single_file_in_a_package_of_yours_leaves_its_door_alone():
    Path("src").mkdir()
    Path("src/__init__.py").write_text("mine = 1\n")
    before = os.stat("src/__init__.py")
    copying.copy_mini("src/train_loop.py")
    assert os.stat("src/__init__.py").st_ino == before.st_ino

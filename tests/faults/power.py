"""A power cut at any moment of a run, as a disk may answer it: what was not synced may be gone, torn, or there.

`record` runs a training once and returns what the disk could hold after a cut at each moment; `check` puts one of these
states into a folder and asks for what must hold: every save that had returned is still there, and the run is finished from it
as if nothing had been.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from layer import Layer
from victim import difference, end_of, train

from fabric_template.checkpoint.checkpoint_io import AtomicCheckpointIO, CheckpointError, read_checkpoint

KINDS = ("killed", "nothing", "names", "torn")


@dataclass(frozen=True)
class State:
    """What a disk holds after a cut: the files, and how far the last save was that had returned by then."""

    kind: str
    moment: str
    files: tuple  # (path, content); None is the content of a folder
    saved: int


class PowerCut(Layer):
    """Keeps, beside the files as they are, what of them is certain to survive: synced contents, and names in synced folders.

    killed: no cut, only the process dies: all is as it was written.
    nothing: only what is certain survives.
    names: all names survive, but of the contents only what was synced; as when a rename is on disk before its file's data.
    torn: all names, and half of what was written since the last sync.
    """

    def __init__(self, root):
        super().__init__(root)
        self.contents: dict[int, bytes] = {}  # by inode
        self.names: dict[str, dict[str, int]] = {self.root: {}}
        self.saved = 0
        self.states: dict[tuple, State] = {}

    def before(self, operation, path, size):
        if operation == "open" and not os.path.exists(path):
            self._is_new = path

    def after(self, operation, path, fd):
        if operation == "open" and getattr(self, "_is_new", None) == path:
            self.contents.pop(os.stat(path).st_ino, None)  # the number of a file that is gone
            self._is_new = None
        if operation == "fsync":
            place = self.folders[fd]
            if os.path.isdir(place):
                self.names[place] = {entry.name: entry.inode() for entry in os.scandir(place)}
            else:
                self.contents[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
        # states between two writes to a temporary file differ in nothing that a reader looks at
        if operation != "write" or not path.endswith(".tmp"):
            self.note(f"{operation} {os.path.relpath(path, self.root)}")

    def note(self, moment):
        """Keep the states that a cut right now could leave."""
        for kind in KINDS:
            files = tuple(
                (name, _in_any_root(content, self.root.encode(), b"ROOT") if name.endswith(".yaml") else content)
                for name, content in sorted(self._certain(self.root, "") if kind == "nothing" else self._current(kind))
            )
            self.states.setdefault((files, self.saved), State(kind, moment, files, self.saved))

    def _certain(self, folder, prefix):
        inodes = {entry.inode(): entry for entry in os.scandir(folder)} if os.path.isdir(folder) else {}
        for name, inode in self.names.get(folder, {}).items():
            inner, here = os.path.join(folder, name), inodes.get(inode)
            if inner in self.names or (here is not None and here.is_dir()):
                yield prefix + name, None
                yield from self._certain(inner, f"{prefix}{name}/")
            else:
                yield prefix + name, self.contents.get(inode, b"")

    def _current(self, kind):
        for path in Path(self.root).rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_dir():
                yield name, None
                continue
            now, synced = path.read_bytes(), self.contents.get(path.stat().st_ino, b"")
            if kind == "killed":
                yield name, now
            elif kind == "names":
                yield name, synced
            else:
                yield name, now[: (len(synced) + len(now) + 1) // 2] if now.startswith(synced) else now[: len(now) // 2]


def _in_any_root(content, root, other):
    """config.yaml and hparams.yaml name the run's folder, and a finished run does not write them again."""
    return content and content.replace(root, other)


def record(root, **words):
    """Train once; returns the end of the run, and the states that a cut at any moment could have left."""
    with PowerCut(root) as cut:
        save = AtomicCheckpointIO.save_checkpoint

        def noting(self, checkpoint, path, storage_options=None):
            save(self, checkpoint, path, storage_options)
            if Path(path).name == "last.ckpt":
                cut.saved = checkpoint["global_step"]
                cut.note("a save has returned")

        AtomicCheckpointIO.save_checkpoint = noting
        try:
            train(root, **words)
        finally:
            AtomicCheckpointIO.save_checkpoint = save
    return end_of(root), list(cut.states.values())


def check(whole, state, root, **words):
    """What went wrong after this cut, in words; None if nothing did."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in state.files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if content is None else path.write_bytes(
            _in_any_root(content, b"ROOT", str(root).encode()) if path.suffix == ".yaml" else content
        )
    try:
        if state.saved:
            found = max((read_checkpoint(path)["global_step"] for path in root.rglob("last.ckpt")), default=None)
            if found is None or found < state.saved:
                return f"last.ckpt of step {state.saved} was saved, that of step {found} is there"
        train(root, **words)
        return difference(whole, end_of(root))
    except (CheckpointError, OSError) as error:
        return str(error)

"""A power cut at any moment, on a disk that does no more than POSIX promises.

What was fsynced is there. Of all else any part may be: a file's content whole, cut, empty or zeros; a name as it
was at any time since its folder was fsynced, whatever became of the other names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes import codec
from probes.codec import RecordError
from probes.records import Batch
from probes.spool import SYNC_EVERY_S, Spool
from tests.probes.batches import a_batch

Choose = Callable[[list[Any]], Any]


class PowerCut(BaseException):
    """Nothing of the program runs after it."""


class Inode:
    def __init__(self, content: bytes = b"", *, synced: bool = False) -> None:
        self.content = content
        self.synced = synced

    def after_a_cut(self, choose: Choose) -> bytes:
        if self.synced:
            return self.content
        half = len(self.content) // 2
        torn = self.content[:half] + bytes(len(self.content) - half)
        return choose([self.content, b"", self.content[:half], bytes(len(self.content)), torn])


class Disk:
    """Watches what a program does to the files below ``root``, which are real, and knows what a power cut may
    leave. ``operations``: how many of them (writes, renames, deletions, fsyncs) until the cut."""

    def __init__(self, root: Path, operations: int) -> None:
        self.root = root
        self.operations = operations
        self.open_files: dict[int, Inode | Path] = {}
        self.names: dict[Path, Inode] = {
            path: Inode(path.read_bytes(), synced=True) for path in root.rglob("*") if path.is_file()
        }
        self.since_sync: dict[Path, list[Inode | None]] = {path: [one] for path, one in self.names.items()}

    def _operation(self) -> None:
        self.operations -= 1
        if self.operations < 0:
            raise PowerCut

    def _name(self, path: Path, inode: Inode | None) -> None:
        self.since_sync.setdefault(path, [None]).append(inode)
        if inode is None:
            self.names.pop(path, None)
        else:
            self.names[path] = inode

    def open(self, real: Any, path: Any, flags: int, mode: int = 0o777) -> int:
        place = Path(path)
        ours = place.is_relative_to(self.root)
        creates = ours and flags & os.O_CREAT and place not in self.names
        file = int(real(path, flags, mode))
        if creates:
            self._name(place, Inode())
        if ours:
            assert creates or not flags & os.O_TRUNC, "a file that may be on the disk is never written over"
            self.open_files[file] = self.names.get(place, place)
        return file

    def write(self, real: Any, file: int, content: bytes) -> int:
        if isinstance(inode := self.open_files.get(file), Inode):
            self._operation()
            assert not inode.synced
            inode.content += bytes(content)
        return int(real(file, content))

    def fsync(self, real: Any, file: int) -> None:
        self._operation()
        found = self.open_files.get(file)
        if isinstance(found, Inode):
            found.synced = True
        elif found is not None and found.is_dir():
            for path in [path for path in self.since_sync if path.parent == found]:
                self.since_sync[path] = [self.names.get(path)]

    def close(self, real: Any, file: int) -> None:
        self.open_files.pop(file, None)
        real(file)

    def replace(self, real: Any, source: Any, target: Any) -> None:
        self._operation()
        real(source, target)
        self._name(Path(target), self.names[Path(source)])
        self._name(Path(source), None)

    def unlink(self, real: Any, path: Any) -> None:
        self._operation()
        real(path)
        self._name(Path(path), None)

    def after_a_cut(self, root: Path, choose: Choose) -> None:
        """Make the folder as the next boot may find it."""
        contents: dict[int, bytes] = {}
        for path, states in self.since_sync.items():
            inode = choose(states)
            if inode is not None:
                place = root / path.relative_to(self.root)
                place.parent.mkdir(parents=True, exist_ok=True)
                content = contents.setdefault(id(inode), inode.after_a_cut(choose))
                place.write_bytes(content)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "close", "replace", "unlink", "fsync"):
                real, ours = getattr(os, name), getattr(self, name)
                patch.setattr(os, name, lambda *args, real=real, ours=ours: ours(real, *args))
            yield


class Server:
    """Keeps each batch once, by its name, and takes nothing that is torn."""

    def __init__(self) -> None:
        self.batches: dict[tuple[str, str, int], Batch] = {}

    def take(self, wire: bytes) -> None:
        batch = codec.decode(wire)
        name = (batch.boot_id, batch.agent, batch.seq)
        assert self.batches.setdefault(name, batch) == batch, "two batches of one name"


def is_broken(wire: bytes) -> bool:
    try:
        codec.unpack(wire)
    except RecordError:
        return True
    return False


def _let_go(spool: Spool) -> None:
    """What the kernel does with the lock of a killed agent; its number may be another's a moment later."""
    if spool._guard >= 0:
        os.close(spool._guard)
        spool._guard = -1


def live(
    folder: Path,
    guards: list[Spool],
    boot: int,
    acts: list[str],
    server: Server,
    put: list[Batch],
    safe: list[Batch],
) -> None:
    """One boot of a node. ``put`` gets what was put, ``safe`` what must be there after the cut, ``guards`` the lock
    of the agent that runs."""
    clock = itertools.count(step=SYNC_EVERY_S)
    spool = Spool(folder)
    guards.append(spool)
    drain(spool, Server())  # whatever is torn is set aside, and the rest can be read
    for act in acts:
        match act:
            case "kill":
                _let_go(guards.pop())
                spool = Spool(folder)
                guards.append(spool)
            case "put":
                batch = a_batch(
                    spool.next_seq,
                    agent=spool.agent,
                    boot_id=f"boot-{boot}",
                    node=f"node {len(put)}",  # no two alike
                )
                put.append(batch)
                spool.put(batch)
            case "send" | "send, answer lost" if pending := spool.pending():
                wire = spool.read(pending[0])
                assert wire is not None
                server.take(wire)
                if act == "send":
                    spool.remove(pending[0])
            case "refuse" if pending := spool.pending():
                spool.refuse(pending[0], "400")
            case "settle":
                waiting = {spool.read(seq) for seq in spool.pending()}
                spool.settle(next(clock))
                safe += [codec.decode(wire) for wire in waiting if wire is not None]
            case _:
                pass


ACTS = st.lists(
    st.sampled_from(["put", "put", "put", "send", "send, answer lost", "refuse", "settle", "kill"]),
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(st.tuples(ACTS, st.integers(0, 150)), min_size=1, max_size=3), data=st.data())
def test_after_a_power_cut_what_was_synced_is_there_once_and_nothing_torn_is_sent(
    lives: list[tuple[list[str], int]], data: st.DataObject
) -> None:
    def choose(options: list[Any]) -> Any:
        return options[data.draw(st.integers(0, len(options) - 1))]

    server, put, refused = Server(), list[Batch](), list[str]()
    safe: list[Batch] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        folder = Path(place) / "0"
        folder.mkdir()
        for boot, (acts, operations) in enumerate(lives):
            disk = Disk(folder, operations)
            guards = list[Spool]()
            with disk.watched(), contextlib.suppress(PowerCut):
                live(folder, guards, boot, acts, server, put, safe)
            for spool in guards:
                _let_go(spool)
            refused += [path.stem for path in (folder / "refused").glob("*.batch")]
            folder = Path(place) / str(boot + 1)
            folder.mkdir()
            disk.after_a_cut(folder, choose)
            safe = [batch for batch in safe if f"{batch.seq:020}" not in refused]

        broken = {path.stem for path in folder.glob("*.batch") if is_broken(path.read_bytes())}
        kept = {path.stem for path in [*folder.glob("*.batch"), *folder.glob("*.sent")]}
        broken |= {p.stem for p in folder.glob("*.tmp") if is_broken(p.read_bytes()) and p.stem not in kept}
        broken -= {"state"}
        last = Spool(folder)
        before = last.counts.bad
        drain(last, server, remove=True)
        assert last.counts.bad == before + len(broken)
        assert {path.stem for path in (folder / "bad").glob("*.batch")} >= broken
        batch = a_batch(last.next_seq, agent=last.agent, boot_id="boot-last")
        last.put(batch)
        drain(last, server, remove=True)
        last.close()
    stored = list(server.batches.values())
    assert stored.count(batch) == 1
    assert all(one in put or one == batch for one in stored)
    assert [one for one in safe if one not in stored] == []


def drain(spool: Spool, server: Server, *, remove: bool = False) -> None:
    for seq in spool.pending():
        if (wire := spool.read(seq)) is not None:
            server.take(wire)
            if remove:
                spool.remove(seq)

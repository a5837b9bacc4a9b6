"""What kind of code stands at an address of a process: the interpreter, its garbage collector, or a library.

Only the interpreter's own files are opened, and those of the standard library's modules: of all others the name is
enough.
"""

from __future__ import annotations

import bisect
import logging
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from probes import elf, procfs
from probes.host.labels import LONGEST

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What kind of code it is, and of native code the library's name."""

    kind: str
    library: str = ""


KERNEL = Kind("kernel")
GC = Kind("gc")
PYTHON = Kind("python")
INTERPRETER = Kind("interpreter")
"""Python or its garbage collector: the file has no symbols that tell them apart."""
UNKNOWN = Kind("unknown")
NATIVE = "native"

COLLECTOR = re.compile(
    # Modules/gcmodule.c (3.11), Python/gc.c (3.12 to 3.14), Python/gc_free_threading.c (3.13, 3.14). Most are
    # inlined into others; which ones differs from build to build.
    rb"(?:gc_collect_(?:main|generations|with_callback|young|increment|full|region|internal)"
    rb"|gc_(?:list|mark|visit|propagate|prime|abort_mark|clear_alive|restore|maybe)_\w{1,60}"
    rb"|deduce_unreachable\w{0,20}|update_refs|subtract_refs|restore_refs|remove_unreachable"
    rb"|visit_(?:decref|decref_unreachable|reachable|move|add_to_container|clear_unreachable)"
    rb"|move_(?:unreachable|legacy_finalizers|legacy_finalizer_reachable|to_reachable)"
    rb"|untrack_(?:tuples|dicts)|_PyTuple_MaybeUntrack|_PyDict_MaybeUntrack|clear_unreachable_mask"
    rb"|handle_(?:weakrefs|weakref_callbacks|legacy_finalizers|resurrected_objects)"
    rb"|clear_weakrefs|find_weakref_callbacks|call_weakref_callbacks|finalize_garbage|delete_garbage"
    rb"|mark_(?:all_reachable|at_start|stacks|global_roots|reachable|heap_visitor|alive_\w{1,40}|root_reachable)"
    rb"|expand_region_transitively_reachable|completed_scavenge|scan_heap_visitor|process_delayed_frees"
    rb"|merge_all_queued_objects|invoke_gc_callback|clear_freelists|clear_all_freelists|_PyGC_ClearAllFreeLists"
    rb"|_PyGC_VisitStackRef|_PyGC_VisitFrameStack|_PyFrame_Traverse|_?PyObject_VisitManagedDict|tupletraverse"
    rb"|_mi_abandoned_pool_visit_blocks|_mi_heap_area_visit_blocks|mi_heap_visit_blocks"
    # tp_traverse: called by the collector, and by next to nothing else
    rb"|\w{1,80}_traverse)"
    rb"(?:\.(?:part|isra|constprop|cold|lto_priv|llvm|warm)(?:\.\d{1,20})?){0,6}\0"
)
"""Functions that run in the collector and hardly ever elsewhere, with what compilers append to names."""
_CENTRE = ("gc_collect_main", "gc_collect_internal", "visit_decref", "update_refs")
"""A table of symbols that has none of these is none of a whole interpreter."""
_EVALUATES = re.compile(rb"_PyEval_EvalFrameDefault\0")
_INTERPRETER = re.compile(r"(?:lib)?python\d(?:\.\d+)?[a-z]*(?:-dbg)?(?:\.so[.\d]*)?")
_STANDARD_MODULE = re.compile(r".*/python\d\.\d+[a-z]*/lib-dynload/[^/]+\.so")
_EXECUTABLE = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ..x. ([0-9a-f]{1,16}) \S+ \d+ *(.*)$", re.MULTILINE
)
_DELETED = " (deleted)"
ANONYMOUS = "[anonymous]"
"""Code that no file holds: made while the program runs."""

KEPT_FILES = 64
KEPT_ADDRESSES = 20_000
"""Remembered per process; beyond it they are found anew."""
MAPS_EVERY_S = 30.0
"""Mappings are read again after this: a library may have taken the place of another."""
LOOKING_S = 0.5
"""So long files may be looked into per instant. All of a node's are done in a fifth of that; those that are made to
take seconds, or lie on a file system that is slow, come in turn."""


@dataclass(frozen=True)
class _Code:
    """What stands in one file: ``whole``, but for the collector between the offsets."""

    whole: Kind
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def kind_at(self, offset: int) -> Kind:
        place = bisect.bisect_right(self.starts, offset) - 1
        return GC if place >= 0 and offset < self.ends[place] else self.whole


@dataclass
class _Space:
    """One life of a process between two calls of execve."""

    life: tuple[int, int]
    read_at: float = -MAPS_EVERY_S
    starts: list[int] = field(default_factory=list)
    mappings: list[procfs.Mapping] = field(default_factory=list)
    codes: dict[int, _Code] = field(default_factory=dict)
    """By the number of the mapping."""
    kinds: dict[int, Kind] = field(default_factory=dict)
    """By address."""


class Codes:
    """What code stands where. Not safe for several threads."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._spaces: dict[int, _Space] = {}
        self._files: OrderedDict[tuple[int, int, int, int], _Code] = OrderedDict()
        """By identity: device, inode, size, time of the last change."""
        self.blind: dict[str, str] = {}
        """Interpreter in whose file the collector cannot be told apart → why."""
        self._looked_at, self._looked_s = 0.0, 0.0
        """The instant in which files were last looked into, and for how long."""

    def keep(self, pids: set[int]) -> None:
        """Forget all other processes."""
        for pid in self._spaces.keys() - pids:
            del self._spaces[pid]

    def begin(self, pid: int, now: float) -> None:
        """Addresses of this process are asked for next: look whether it runs another program by now."""
        life = self._life(pid)
        space = self._spaces.get(pid)
        if life is None:  # it has ended: what is known of it holds for its last samples
            return
        if space is None or space.life != life:
            self._spaces[pid] = _Space(life)
        elif now - space.read_at >= MAPS_EVERY_S:
            self._read(pid, space, now)

    def kind_at(self, pid: int, address: int, now: float) -> Kind:
        """``now`` as in :meth:`begin`: mappings are read once per instant, if an address is in no known one."""
        space = self._spaces.get(pid)
        if space is None:
            return UNKNOWN
        kind = space.kinds.get(address)
        if kind is None:
            kind = self._find(pid, space, address, now)
            if len(space.kinds) >= KEPT_ADDRESSES:
                space.kinds.clear()
            if kind != UNKNOWN:  # a library may be mapped there by the next reading
                space.kinds[address] = kind
        return kind

    def _life(self, pid: int) -> tuple[int, int] | None:
        """Where the program's code and its stack begin: random for each execve, where addresses are."""
        fields = (procfs.read(f"{self._proc}/{pid}/stat") or b"").rpartition(b")")[2].split()
        if len(fields) < 26 or fields[0] in (b"Z", b"X"):
            return None
        return int(fields[23]), int(fields[25])  # startcode, startstack: proc_pid_stat(5), 26 and 28

    def _read(self, pid: int, space: _Space, now: float) -> None:
        raw = procfs.read(f"{self._proc}/{pid}/maps", procfs.MAPS_LIMIT)
        space.read_at = now
        if not raw:
            return
        found = _EXECUTABLE.findall(raw)
        space.mappings = [
            procfs.Mapping(int(start, 16), int(end, 16), int(offset, 16), path)
            for start, end, offset, path in found
        ]
        space.starts = [mapping.start for mapping in space.mappings]
        space.codes.clear()
        space.kinds.clear()

    def _find(self, pid: int, space: _Space, address: int, now: float) -> Kind:
        place = _mapping_at(space, address)
        if place is None and space.read_at != now:
            self._read(pid, space, now)
            place = _mapping_at(space, address)
        if place is None:
            return UNKNOWN
        mapping = space.mappings[place]
        code = space.codes.get(place)
        if code is None:
            code = self._code(pid, mapping, now)
            if code is None:
                return UNKNOWN
            space.codes[place] = code
        return code.kind_at(address - mapping.start + mapping.offset)

    def _code(self, pid: int, mapping: procfs.Mapping, now: float) -> _Code | None:
        """What stands in what is mapped; None where that is to be looked at in a later instant."""
        path = os.fsdecode(mapping.path).removesuffix(_DELETED)
        name = path.rpartition("/")[2]
        native = _Code(Kind(NATIVE, _label(name) or ANONYMOUS))
        if not path.startswith("/"):
            return native
        is_named = _INTERPRETER.fullmatch(name) is not None
        if not is_named and not _STANDARD_MODULE.fullmatch(path) and path != self._program(pid):
            return native
        if self._looked_at != now:
            self._looked_at, self._looked_s = now, 0.0
        if self._looked_s >= LOOKING_S:
            return None
        began = time.monotonic()
        try:
            return self._code_in(procfs.mapped_file(self._proc, pid, mapping), path, is_named, native)
        except OSError as error:
            return self._unreadable(path, is_named, native, error.strerror or str(error))
        finally:
            self._looked_s += time.monotonic() - began

    def _code_in(self, file: Path, path: str, is_named: bool, native: _Code) -> _Code:
        """What stands in a file; what was found out of it is remembered, also that it cannot be read."""
        about = file.stat()
        identity = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
        code = self._files.get(identity)
        if code is None:
            try:
                code = self._look(file, path, is_named) or native
            except elf.ElfUnreadable as error:
                why = str(error).removeprefix(f"{file}: ")
                code = self._unreadable(path, is_named, native, why)
        self._files[identity] = code
        self._files.move_to_end(identity)
        if len(self._files) > KEPT_FILES:
            self._files.popitem(last=False)
        return code

    def _unreadable(self, path: str, is_named: bool, native: _Code, why: str) -> _Code:
        log.info("symbols of %s cannot be read: %s", _label(path), why)
        if not is_named:
            return native
        self._cannot_tell(path, f"it cannot be read: {_label(why)}")
        return _Code(INTERPRETER)

    def _program(self, pid: int) -> str:
        try:
            return str((self._proc / str(pid) / "exe").readlink()).removesuffix(_DELETED)
        except OSError:
            return ""

    def _look(self, file: Path, path: str, is_named: bool) -> _Code | None:
        """What stands in this file; None if it is neither an interpreter nor one of its modules."""
        if _STANDARD_MODULE.fullmatch(path):
            return _parted(PYTHON, elf.code_of(file, COLLECTOR, exported=False) or [])
        inside = elf.code_of(file, COLLECTOR, exported=False)
        if not is_named and not any(
            elf.code_of(file, _EVALUATES, exported=exported) for exported in (True, False)
        ):
            return None
        if inside is not None and any(one.name.partition(".")[0] in _CENTRE for one in inside):
            return _parted(PYTHON, inside)
        self._cannot_tell(path, "it has no symbols (.symtab)")
        return _Code(INTERPRETER)

    def _cannot_tell(self, path: str, why: str) -> None:
        if len(self.blind) < KEPT_FILES:
            self.blind[_label(path, 200)] = why


def _parted(whole: Kind, collector: list[elf.Function]) -> _Code:
    ranges = sorted({(one.offset, one.offset + one.size) for one in collector})
    return _Code(whole, tuple(start for start, _ in ranges), tuple(end for _, end in ranges))


def _mapping_at(space: _Space, address: int) -> int | None:
    place = bisect.bisect_right(space.starts, address) - 1
    return place if place >= 0 and address < space.mappings[place].end else None


def _label(name: str, longest: int = LONGEST) -> str:
    """A name out of a process's mappings, which may hold anything, as a label."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:longest]

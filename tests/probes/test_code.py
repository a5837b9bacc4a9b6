"""What kind of code stands at an address: by names of functions and libraries, and of files that are broken."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from probes import elf, procfs
from probes.host import code
from probes.host.code import (
    COLLECTOR,
    GC,
    INTERPRETER,
    KEPT_ADDRESSES,
    MAPS_EVERY_S,
    PYTHON,
    UNKNOWN,
    Codes,
    Kind,
)


@pytest.mark.parametrize(
    "name",
    [
        *("gc_collect_main", "gc_collect_main.constprop.0", "deduce_unreachable.isra.0.cold", "visit_decref"),
        *(
            "visit_reachable.lto_priv.3",
            "dict_traverse",
            "tupletraverse",
            "subtype_traverse",
            "untrack_tuples",
        ),
        *("gc_collect_increment", "mark_all_reachable", "move_to_reachable", "gc_list_merge.part.0"),
        *("gc_visit_heaps", "mark_alive_stack_push", "deduce_unreachable_heap", "invoke_gc_callback.isra.0"),
    ],
)
def test_functions_of_the_collector(name: str) -> None:
    assert COLLECTOR.match(name.encode() + b"\0")


@pytest.mark.parametrize(
    "name",
    [
        *("PyGC_Collect", "gc_get_objects", "gc_is_tracked", "symtable_visit_expr", "compiler_visit_stmt"),
        *("_PyCapsule_SetTraverse", "dict_dealloc", "PyObject_GC_Del", "_PyObject_GC_New", "clear_locals"),
        *("finalize_modules", "visit_decrefs", "my_traverser", "handle_signals.part.0.isra.0", "gc_collect"),
    ],
)
def test_functions_that_run_elsewhere(name: str) -> None:
    assert not COLLECTOR.match(name.encode() + b"\0")


def of(library: ctypes.CDLL, function: str) -> int:
    address = ctypes.cast(library[function], ctypes.c_void_p).value
    assert address is not None
    return address


def test_this_process_is_told_as_it_is() -> None:
    pid, codes = os.getpid(), Codes()
    codes.begin(pid, 1.0)
    assert codes.kind_at(pid, of(ctypes.pythonapi, "PyObject_Str"), 1.0) in (PYTHON, INTERPRETER)
    library = codes.kind_at(pid, of(ctypes.CDLL(None), "getenv"), 1.0)
    assert library.kind == "native"
    assert library.library.startswith("lib")
    assert codes.kind_at(pid, 16, 1.0) == UNKNOWN
    assert codes.kind_at(os.getpid() + 1, 16, 1.0) == UNKNOWN


def test_the_collector_stands_where_its_symbols_say() -> None:
    maps = Path("/proc/self/maps").read_bytes()
    names = (rb"/[^\n]*/libpython3[^/\n]*", rb"/[^\n]*/python3[^/\n]*")
    mappings = (procfs.mapping_of(maps, name, executable=True) for name in names)
    mapping = next((one for one in mappings if one is not None), None)
    assert mapping is not None
    file = Path(os.fsdecode(mapping.path))
    functions = elf.code_of(file, COLLECTOR, exported=False) or []
    found = next((one for one in functions if one.name == "visit_decref"), None)
    pid, codes = os.getpid(), Codes()
    codes.begin(pid, 1.0)
    if found is None:  # it is stripped, as those of distributions
        assert codes.kind_at(pid, mapping.start, 1.0) == INTERPRETER
        assert set(codes.blind.values()) == {"it has no symbols (.symtab)"}
        return
    first = mapping.start - mapping.offset + found.offset
    assert codes.kind_at(pid, first, 1.0) == GC
    assert codes.kind_at(pid, first + found.size - 1, 1.0) == GC
    assert codes.blind == {}


# --- made-up processes -------------------------------------------------------------------------------------


class Made:
    """A process in a made-up /proc, whose files are those of a folder."""

    pid = 77

    def __init__(self, folder: Path) -> None:
        self.proc, self.files = folder / "proc", folder / "files"
        self.home = self.proc / str(self.pid)
        self.home.mkdir(parents=True)
        self.files.mkdir()
        (self.home / "root").symlink_to(self.files)
        self.codes = Codes(self.proc)
        self.runs(1)

    def runs(self, image: int) -> None:
        """Another program since now."""
        fields = ["S", *["0"] * 22, str(image), "0", str(image), "0", "0"]
        (self.home / "stat").write_text(f"{self.pid} (a) b) {' '.join(fields)}\n")

    def maps(self, *paths: bytes) -> None:
        """One page of code of each, from 0x1000 on."""
        lines = [
            b"%x-%x r-xp 00000000 08:01 42   %s\n" % (at << 12, (at + 1) << 12, path)
            for at, path in enumerate(paths, 1)
        ]
        (self.home / "maps").write_bytes(b"".join(lines))

    def kind(self, address: int, now: float = 1.0) -> Kind:
        self.codes.begin(self.pid, now)
        return self.codes.kind_at(self.pid, address, now)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_libraries_go_by_their_names_whatever_these_are(made: Made) -> None:
    made.maps(
        b"/opt/libtorch_cpu.so",
        b"",
        b"[vdso]",
        b"/a/b\\012c\xff<script>",
        b"/x/" + b"n" * 200,
        b"/tmp/gone.so (deleted)",
    )
    names = [made.kind(at << 12) for at in range(1, 7)]
    assert names == [
        Kind("native", "libtorch_cpu.so"),
        Kind("native", "[anonymous]"),
        Kind("native", "[vdso]"),
        Kind("native", "b\\012c�<script>"),
        Kind("native", "n" * 64),
        Kind("native", "gone.so"),
    ]
    assert made.kind(0x800) == UNKNOWN
    assert made.kind(0x7000) == UNKNOWN


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\2\1\1" + bytes(57), b"#!/bin/sh\n" * 100, None]
)
def test_an_interpreter_that_cannot_be_read_is_said(made: Made, content: bytes | None) -> None:
    file = made.files / "python3.11"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    made.maps(b"/python3.11", b"/not/there/libpython3.11.so")
    assert made.kind(0x1000) == INTERPRETER
    assert made.codes.blind.keys() == {"/python3.11"}
    assert made.codes.blind["/python3.11"].startswith(("it cannot be read: not a", "it has no symbols"))
    assert made.kind(0x2000) == INTERPRETER
    assert made.codes.blind["/not/there/libpython3.11.so"] == "it cannot be read: No such file or directory"


def with_functions(**functions: int) -> bytes:
    """An ELF library, loaded whole at 0x10000, with functions of 16 bytes each at these offsets in the file."""
    names, symbols = b"\0", bytes(24)
    for name, offset in functions.items():
        symbols += struct.pack("<IBBHQQ", len(names), 2, 0, 1, 0x10000 + offset, 16)
        names += name.encode() + b"\0"
    sections_at = 64 + 56
    symbols_at = sections_at + 3 * 64
    names_at, size = symbols_at + len(symbols), max(4096, symbols_at + len(symbols) + len(names))
    header = b"\x7fELF\2\1\1" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 3, 2)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x10000, 0, size, size, 4096)
    table = struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, symbols_at, len(symbols), 2, 0, 8, 24)
    strings = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    return (header + segment + bytes(64) + table + strings + symbols + names).ljust(size, b"\0")


def test_the_collector_is_between_the_bounds_of_its_functions(made: Made) -> None:
    made.maps(b"/libpython3.11.so.1.0")
    library = with_functions(gc_collect_main=0x900, visit_decref=0x920, PyObject_Str=0x930)
    (made.files / "libpython3.11.so.1.0").write_bytes(library)
    collects = [address for address in range(0x18F0, 0x1950) if made.kind(address) == GC]
    assert collects == [*range(0x1900, 0x1910), *range(0x1920, 0x1930)]
    assert made.kind(0x1930) == PYTHON
    assert made.codes.blind == {}


def test_more_functions_than_any_interpreter_has_are_not_remembered(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.maps(b"/libpython3.11.so.1.0")
    file = made.files / "libpython3.11.so.1.0"
    file.write_bytes(with_functions(gc_collect_main=0x900, visit_decref=0x920, PyObject_Str=0x930))
    monkeypatch.setattr(elf, "MOST_FUNCTIONS", 2)
    assert len(elf.code_of(file, COLLECTOR, exported=False) or []) == 2
    monkeypatch.setattr(elf, "MOST_FUNCTIONS", 1)
    assert made.kind(0x1900) == INTERPRETER
    assert list(made.codes.blind.values()) == ["it cannot be read: more than 1 functions of such names"]


def test_symbols_without_the_heart_of_the_collector_are_none(made: Made) -> None:
    made.maps(b"/libpython3.11.so.1.0")
    (made.files / "libpython3.11.so.1.0").write_bytes(with_functions(dict_traverse=0x900))
    assert made.kind(0x1900) == INTERPRETER
    assert list(made.codes.blind) == ["/libpython3.11.so.1.0"]


def test_a_file_is_looked_into_once_also_where_it_cannot_be_read(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    code_of = elf.code_of

    def counted(file: Path, *arguments: Any, **named: Any) -> Any:
        looked.append(file)
        return code_of(file, *arguments, **named)

    monkeypatch.setattr(elf, "code_of", counted)
    (made.files / "python3.11").write_bytes(b"\x7fELF" + b"\xff" * 4096)
    made.maps(*[b"/python3.11"] * 5)
    for now in (1.0, 1.0 + MAPS_EVERY_S):
        for place in range(1, 6):
            assert made.kind(place << 12, now) == INTERPRETER
    assert len(looked) == 1
    (made.files / "python3.11").write_bytes(with_functions(gc_collect_main=0x900))
    assert made.kind(0x1900, 1.0 + 2 * MAPS_EVERY_S) == GC, "it is another file by now"


def test_files_that_take_long_come_in_turn(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "LOOKING_S", 1e-9)
    names = [b"/python3.%d" % number for number in (9, 10, 11)]
    for name in names:
        (made.files / name.decode()[1:]).write_bytes(with_functions(gc_collect_main=0x900))
    made.maps(*names)
    addresses = [0x1900, 0x2900, 0x3900]
    assert [made.kind(address, 1.0) for address in addresses] == [GC, UNKNOWN, UNKNOWN]
    assert [made.kind(address, 2.0) for address in addresses] == [GC, GC, UNKNOWN]
    assert [made.kind(address, 3.0) for address in addresses] == [GC, GC, GC]


def test_a_library_is_not_opened_and_a_program_that_holds_no_interpreter_is_none(made: Made) -> None:
    (made.files / "trainer").write_bytes(Path("/bin/true").read_bytes())
    (made.home / "exe").symlink_to("/trainer")
    made.maps(b"/trainer", b"/not/there/libtorch_cpu.so")
    assert made.kind(0x1000) == Kind("native", "trainer")
    assert made.kind(0x2000) == Kind("native", "libtorch_cpu.so")
    assert made.codes.blind == {}


def test_another_program_is_looked_at_anew(made: Made) -> None:
    made.maps(b"/a.so")
    assert made.kind(0x1000) == Kind("native", "a.so")
    made.maps(b"/b.so")
    assert made.kind(0x1000) == Kind("native", "a.so"), "it is not known that anything changed"
    made.runs(2)
    assert made.kind(0x1000) == Kind("native", "b.so")


def test_mappings_are_read_again_for_an_unknown_address_and_after_a_while(made: Made) -> None:
    made.maps(b"/a.so")
    assert made.kind(0x1000) == Kind("native", "a.so")
    made.maps(b"/b.so", b"/c.so")
    assert made.kind(0x2000, 1.0) == UNKNOWN, "once per instant"
    assert made.kind(0x2000, 2.0) == Kind("native", "c.so")
    made.maps(b"/d.so")
    assert made.kind(0x1000, 2.0 + MAPS_EVERY_S) == Kind("native", "d.so")


def test_what_is_known_of_one_that_has_ended_holds(made: Made) -> None:
    made.maps(b"/a.so")
    assert made.kind(0x1000) == Kind("native", "a.so")
    (made.home / "stat").unlink()
    (made.home / "maps").unlink()
    assert made.kind(0x1000, 100.0) == Kind("native", "a.so")
    made.codes.keep(set())
    assert made.kind(0x1000, 101.0) == UNKNOWN


def test_addresses_are_remembered_up_to_a_bound(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "KEPT_ADDRESSES", 10)
    assert KEPT_ADDRESSES > 10
    made.maps(b"/a.so")
    for address in range(0x1000, 0x1000 + 100):
        assert made.kind(address) == Kind("native", "a.so")
    assert len(made.codes._spaces[made.pid].kinds) <= 10

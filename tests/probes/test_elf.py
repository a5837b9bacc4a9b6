"""Symbols by pattern or name: against what `nm` says, and against files that are broken in every way."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes import elf
from probes.elf import ElfUnreadable
from probes.nccl.gloo import PATTERNS, PREFIX
from tests.probes import pytorch

SOURCE = r"""
namespace acme {
struct Ring {
  __attribute__((noinline)) int reduce(int n) { return n + 1; }
  __attribute__((noinline)) int reduce(long n) { return n + 2; }
  __attribute__((noinline)) int gather(int n) { return n + 3; }
};
int table = 4;
}
extern "C" int acme_plain(int n) { return n; }
extern "C" int acme_alias(int n) __attribute__((alias("acme_plain")));
int missing(int);
int use(int n) {
  acme::Ring ring;
  return ring.reduce(n) + ring.reduce(long(n)) + ring.gather(n) + acme::table + missing(n);
}
"""


def nm(library: Path, *options: str) -> dict[str, int]:
    """Symbol → address, of functions that the library defines."""
    lines = subprocess.run(["nm", *options, library], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in lines.splitlines())
    return {row[2].partition("@")[0]: int(row[0], 16) for row in rows if len(row) == 3 and row[1] in "TtWw"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    (folder / "ring.cpp").write_text(SOURCE)
    built = folder / "libring.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", built, folder / "ring.cpp"], check=True)
    return built


def test_functions_are_found_by_the_pattern_of_their_names(library: Path) -> None:
    found = elf.functions(library, "_ZN4acme4Ring", {"reduce": r"6reduceE\w", "gather": "6gatherEi"})
    truth = nm(library)
    assert found == {
        "reduce": {name: truth[name] for name in ("_ZN4acme4Ring6reduceEi", "_ZN4acme4Ring6reduceEl")},
        "gather": {"_ZN4acme4Ring6gatherEi": truth["_ZN4acme4Ring6gatherEi"]},
    }


def test_a_stripped_library_still_gives_what_it_exports(library: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", stripped, library], check=True)
    found = elf.functions(stripped, "acme_", {"plain": "plain"})
    assert found == {"plain": {"acme_plain": nm(stripped, "-D")["acme_plain"]}}


def test_aliases_of_one_address_come_once(library: Path) -> None:
    found = elf.functions(library, "acme_", {"any": r"\w+"})["any"]
    assert list(found.values()) == [nm(library)["acme_plain"]]


def test_a_pattern_matches_whole_names_only(library: Path) -> None:
    assert elf.functions(library, "_ZN4acme4Ring", {"part": "6reduce"}) == {"part": {}}


def test_what_is_no_function_or_not_defined_here_is_left_out(library: Path) -> None:
    assert elf.functions(library, "_Z", {"data": "N4acme5tableE", "missing": "7missingi"}) == {
        "data": {},
        "missing": {},
    }


def test_gloo_s_functions_in_the_installed_pytorch_are_found_once_each() -> None:
    library = pytorch.folder() / "lib" / "libtorch_cpu.so"
    found = elf.functions(library, PREFIX, PATTERNS)
    truth = nm(library, "-D")
    assert {what: len(matches) for what, matches in found.items()} == dict.fromkeys(PATTERNS, 1)
    for matches in found.values():
        for mangled, address in matches.items():
            assert truth[mangled] == address


def test_a_variable_is_found_where_nm_has_it_and_where_it_is_mapped(library: Path) -> None:
    found = elf.variable(library, ("none", "_ZN4acme5tableE"))
    lines = subprocess.run(
        ["nm", "-D", library], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    (address,) = (int(line.split()[0], 16) for line in lines if line.endswith("_ZN4acme5tableE"))
    assert found is not None
    assert found.address == address
    offset, start = next((o, a) for o, a in found.segments if a <= address)
    assert found.address_in(0x7F0000000000, offset - offset % elf.PAGE) == (
        0x7F0000000000 + address - (start - start % elf.PAGE)
    )
    assert found.address_in(0x7F0000000000, 0x123000) is None, "no segment begins there"


def test_functions_and_undefined_names_are_no_variables(library: Path) -> None:
    assert elf.variable(library, ("acme_plain", "_Z7missingi")) is None


def test_code_is_found_where_it_lies_in_the_file(tmp_path: Path) -> None:
    """Of a program that is linked to a fixed address, and whose segments lie elsewhere in the file."""
    source = (
        'void marked_traverse(void) { __asm__(".ascii \\"HERE IT IS\\""); }\nint main(void) { return 0; }\n'
    )
    program = tmp_path / "program"
    subprocess.run(
        ["gcc", "-no-pie", "-Wl,-Ttext-segment=0x7000000", "-x", "c", "-o", program, "-"],
        input=source.encode(),
        check=True,
    )
    found = elf.code_of(program, re.compile(rb"\w+_traverse\0"), exported=False)
    assert found is not None
    (one,) = found
    assert one.name == "marked_traverse"
    assert program.read_bytes().count(b"HERE IT IS") == 1
    assert b"HERE IT IS" in program.read_bytes()[one.offset : one.offset + one.size]
    assert elf.code_of(program, re.compile(rb"marked\0"), exported=False) == [], "whole names only"
    assert elf.code_of(program, re.compile(rb"\w+_traverse\0"), exported=True) == [], "it is not exported"
    subprocess.run(["strip", program], check=True)
    assert elf.code_of(program, re.compile(rb"\w+_traverse\0"), exported=False) is None


# --- broken files


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        elf.functions(tmp_path / "gone.so", "_Z", {"any": ".*"})


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\0" * 4096, b"\x7fELF" + b"\xff" * 4096]
)
def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "not-a-library.so"
    file.write_bytes(content)
    with pytest.raises(ElfUnreadable, match="not-a-library"):
        elf.functions(file, "_Z", {"any": ".*"})


def test_a_pipe_under_a_library_s_name_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.so")
    for read in (
        lambda file: elf.functions(file, "_Z", {"any": ".*"}),
        lambda file: elf.variable(file, ("x",)),
    ):
        with pytest.raises(ElfUnreadable, match=r"pipe\.so: not a regular file"):
            read(tmp_path / "pipe.so")


def test_what_took_the_place_of_a_file_that_was_looked_at_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device, say, which may do anything when it is opened."""
    file = tmp_path / "library.so"
    opened: list[str] = []
    original = os.open

    def swapped(path: str | Path, flags: int, *rest: int) -> int:
        handle = original(path, flags, *rest)
        if Path(path) == file:
            file.unlink()
            os.mkfifo(file)
        if not flags & os.O_PATH:
            opened.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        return handle

    file.write_bytes(b"no library")
    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(ElfUnreadable, match="not a readable ELF file"):
        elf.variable(file, ("x",))
    assert opened == [f"{file} (deleted)"]
    with pytest.raises(ElfUnreadable, match="not a regular file"):
        elf.variable(file, ("x",))
    assert len(opened) == 1, "the pipe was not opened"


def test_a_table_of_gigabytes_is_refused_before_it_is_read(library: Path, tmp_path: Path) -> None:
    raw = bytearray(library.read_bytes())
    sections = int.from_bytes(raw[40:48], "little")
    for number in range(int.from_bytes(raw[60:62], "little")):
        header = sections + 64 * number
        if int.from_bytes(raw[header + 4 : header + 8], "little") in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            raw[header + 32 : header + 40] = (24 << 26).to_bytes(8, "little")  # sh_size
    file = tmp_path / "sparse.so"
    file.write_bytes(raw)
    os.truncate(file, 8 << 30)
    with pytest.raises(ElfUnreadable, match="larger than 1024 MiB"):
        elf.functions(file, "_Z", {"any": ".*"})
    with pytest.raises(ElfUnreadable, match="larger than 64 MiB"):
        elf.variable(file, ("x",))
    with pytest.raises(ElfUnreadable, match="larger than 16 MiB"):
        elf.code_of(file, re.compile(rb"x\0"), exported=False)


def test_a_32_bit_library_is_refused(library: Path, tmp_path: Path) -> None:
    raw = bytearray(library.read_bytes())
    raw[4] = 1  # EI_CLASS = ELFCLASS32
    file = tmp_path / "small.so"
    file.write_bytes(raw)
    with pytest.raises(ElfUnreadable):
        elf.functions(file, "_Z", {"any": ".*"})


def _read_or_refuse(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with contextlib.suppress(ElfUnreadable):  # anything else that it raises fails the test
        found = elf.functions(file, "_Z", {"any": r"\w*", "reduce": r"N4acme4Ring6reduceE\w"})
        assert set(found) == {"any", "reduce"}
    with contextlib.suppress(ElfUnreadable):
        elf.variable(file, ("_ZN4acme5tableE",))
    for exported in (True, False):
        with contextlib.suppress(ElfUnreadable):
            elf.code_of(file, re.compile(rb"\w{1,80}\0"), exported=exported)


FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_a_truncated_library_is_refused_or_read(library: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = library.read_bytes()
    size = data.draw(st.integers(0, len(raw)))
    _read_or_refuse(tmp_path / "cut.so", raw[:size])


@FUZZ
@given(data=st.data())
def test_a_library_with_broken_headers_is_refused_or_read(
    library: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Bytes are changed where they hurt: the file's header and the table of sections at its end."""
    raw = bytearray(library.read_bytes())
    sections = int.from_bytes(raw[40:48], "little")  # e_shoff
    places = st.integers(0, 63) | st.integers(sections, len(raw) - 1) | st.integers(0, len(raw) - 1)
    values = st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)
    for place, value in data.draw(st.lists(st.tuples(places, values), min_size=1, max_size=8)):
        raw[place] = value
    _read_or_refuse(tmp_path / "broken.so", bytes(raw))


@FUZZ
@given(data=st.data())
def test_a_library_with_senseless_sections_is_refused_or_read(
    library: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Whole fields of section headers are replaced: type, offset, size, link."""
    raw = bytearray(library.read_bytes())
    sections, count = int.from_bytes(raw[40:48], "little"), int.from_bytes(raw[60:62], "little")
    fields = st.sampled_from([(0, 4), (4, 4), (24, 8), (32, 8), (40, 4)])
    numbers = st.sampled_from([0, 1, 2, 3, 11, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    change = st.tuples(st.integers(0, count - 1), fields, numbers | st.integers(0, len(raw)))
    for section, (offset, width), number in data.draw(st.lists(change, min_size=1, max_size=4)):
        at = sections + 64 * section + offset
        raw[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    _read_or_refuse(tmp_path / "senseless.so", bytes(raw))


def test_symbols_that_would_lie_beyond_the_file_are_refused(library: Path, tmp_path: Path) -> None:
    raw = bytearray(library.read_bytes())
    sections = int.from_bytes(raw[40:48], "little")
    for number in range(int.from_bytes(raw[60:62], "little")):  # e_shnum, 64 bytes each
        header = sections + 64 * number
        if int.from_bytes(raw[header + 4 : header + 8], "little") in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            raw[header + 24 : header + 32] = (len(raw) - 25).to_bytes(8, "little")  # sh_offset
    with pytest.raises(ElfUnreadable, match="beyond the end"):
        _write_and_read(tmp_path / "beyond.so", bytes(raw))


def _write_and_read(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    elf.functions(file, "_Z", {"any": r"\w*"})

"""Where functions and variables stand in an ELF file: symbols by pattern of their mangled names, or by name."""

from __future__ import annotations

import itertools
import os
import re
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

STT_OBJECT, STT_FUNC = 1, 2
SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: st_name, st_info, st_other, st_shndx, st_value, st_size (System V ABI, chapter 4)."""

CHUNK = SYMBOL.size * (1 << 18)
"""Bytes read at a time, a whole number of symbols."""
LONGEST_NAME = 1 << 16
MAX_SECTIONS = 1 << 16
LARGEST_TABLE = 1 << 30
"""Bytes of one table of symbols or names. Those of libtorch_cpu with all its symbols are a tenth of it; a file of a
job can claim anything."""
LARGEST_DYNAMIC_TABLE = 64 << 20
LARGEST_TABLE_OF_ALL = 16 << 20
"""… of a file all of whose symbols are looked at: CPython's tables are below 1 MiB."""
MOST_FUNCTIONS, MOST_SEGMENTS = 20_000, 64
"""Looked at where each is remembered: CPython's collector has some 200, in four segments of its file."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class ElfUnreadable(ValueError):
    """Not an ELF library that can be read; the message says why."""


def functions(library: Path, prefix: str, patterns: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Find functions by their mangled names.

    ``prefix``: what all wanted names begin with, literally; ``patterns``: key → regular expression for the
    rest, which must match whole. Returns key → {mangled name: address in the file's own address space},
    aliases of one address once. Looks into ``.symtab`` and ``.dynsym``. libtorch_cpu has 530,000 symbols
    with 60 MB of names: the prefix is searched in the string table, and only hits are looked at.

    Raises :class:`ElfUnreadable`, or OSError when the file cannot be opened.
    """
    compiled = {key: re.compile(pattern.encode()) for key, pattern in patterns.items()}
    found: dict[str, dict[str, int]] = {key: {} for key in patterns}
    with _regular(library) as file:
        for symbols_at, symbols_end, strings_at, strings_end in _symbol_tables(file, library):
            wanted = dict(_names(file, strings_at, strings_end, prefix.encode(), compiled))
            if not wanted:
                continue
            for _, chunk in _chunks(file, symbols_at, symbols_end, 0):
                for at, info, _, section, address, _ in SYMBOL.iter_unpack(chunk):
                    if at in wanted and section and info & 0xF == STT_FUNC:
                        key, mangled = wanted[at]
                        if address not in found[key].values():
                            found[key][mangled] = address
    return found


@dataclass(frozen=True)
class Function:
    """A function of an ELF file by where its code lies in the file."""

    offset: int
    size: int
    name: str


def code_of(file_path: Path, name: re.Pattern[bytes], *, exported: bool) -> list[Function] | None:
    """The functions whose names match ``name`` (their ends included: it must match the NUL behind a name) and whose
    code is in the file. None where the file has no table: ``.symtab``, which stripping takes away and which alone
    has static functions, or with ``exported`` ``.dynsym``. Raises as :func:`functions`."""
    found: list[Function] = []
    with _regular(file_path) as file:
        kind = "SHT_DYNSYM" if exported else "SHT_SYMTAB"
        tables = _symbol_tables(file, file_path, (kind,), LARGEST_TABLE_OF_ALL)
        loaded = _loaded(file, file_path)
        for symbols_at, symbols_end, strings_at, strings_end in tables[:1]:  # there is but one of a kind
            strings = b"".join(chunk for _, chunk in _chunks(file, strings_at, strings_end, 0))
            for _, chunk in _chunks(file, symbols_at, symbols_end, 0):
                for at, info, _, section, address, size in SYMBOL.iter_unpack(chunk):
                    if not section or info & 0xF != STT_FUNC or not size:
                        continue
                    match = name.match(strings, at)
                    if match is None:
                        continue
                    if len(found) == MOST_FUNCTIONS:
                        raise ElfUnreadable(
                            f"{file_path}: more than {MOST_FUNCTIONS} functions of such names"
                        )
                    for offset, start, length in loaded:
                        if start <= address < start + length:
                            text = match[0].rstrip(b"\0").decode("ascii", "replace")
                            found.append(Function(address - start + offset, size, text))
                            break
    return found if tables else None


@dataclass(frozen=True)
class Variable:
    """A variable that an ELF file defines for the dynamic linker."""

    address: int
    """In the file's own address space."""
    segments: tuple[tuple[int, int], ...]
    """(offset in the file, address) of what is loaded."""

    def address_in(self, start: int, offset: int) -> int | None:
        """Its address in a process that has the file's byte ``offset`` mapped at ``start`` (both on a page)."""
        for at, address in self.segments:
            if at - at % PAGE == offset:
                return start - (address - address % PAGE) + self.address
        return None


def variable(file_path: Path, names: Collection[str]) -> Variable | None:
    """The variable of one of these names in the file's dynamic symbols; None when it defines none (a program that
    is linked statically has no such symbols). Raises as :func:`functions`."""
    wanted = tuple(name.encode() + b"\0" for name in names)
    with _regular(file_path) as file:
        tables = _symbol_tables(file, file_path, ("SHT_DYNSYM",), LARGEST_DYNAMIC_TABLE)
        for symbols_at, symbols_end, strings_at, strings_end in tables:
            strings = b"".join(chunk for _, chunk in _chunks(file, strings_at, strings_end, 0))
            for _, chunk in _chunks(file, symbols_at, symbols_end, 0):
                for at, info, _, section, address, _ in SYMBOL.iter_unpack(chunk):
                    if section and info & 0xF == STT_OBJECT and strings.startswith(wanted, at):
                        return Variable(address, _segments(file, file_path))
    return None


@contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a job. A pipe under its name would keep the opener waiting, and a device may do anything."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)  # which opens neither
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ElfUnreadable(f"{path}: not a regular file")
        # The job may have put another thing in its place by now: this is the one that was looked at.
        opened = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    with os.fdopen(opened, "rb") as file:
        yield file


def _segments(file: BinaryIO, path: Path) -> tuple[tuple[int, int], ...]:
    try:
        segments = ELFFile(file).iter_segments(type="PT_LOAD")
        return tuple((segment["p_offset"], segment["p_vaddr"]) for segment in segments)
    except (ELFError, AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ElfUnreadable(f"{path}: not a readable ELF file: {error}") from error


def _loaded(file: BinaryIO, path: Path) -> list[tuple[int, int, int]]:
    """(offset in the file, address, bytes) of what is loaded from it."""
    try:
        segments = ELFFile(file).iter_segments(type="PT_LOAD")
        return [
            (segment["p_offset"], segment["p_vaddr"], segment["p_filesz"])
            for segment in itertools.islice(segments, MOST_SEGMENTS)
        ]
    except (ELFError, AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ElfUnreadable(f"{path}: not a readable ELF file: {error}") from error


def _chunks(file: BinaryIO, start: int, end: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of pieces of a file, each beginning ``overlap`` before the last one's end. Read, not
    mapped: the file is the job's, and one that shrinks under a mapping kills the process that looks."""
    at = start
    while at < end:
        chunk = os.pread(file.fileno(), min(CHUNK, end - at), at)
        if len(chunk) < min(CHUNK, end - at):
            raise ElfUnreadable(f"{file.name}: became shorter while it was read")
        yield at, chunk
        at += len(chunk) - (overlap if at + len(chunk) < end else 0)


def _symbol_tables(
    file: BinaryIO,
    library: Path,
    kinds: Collection[str] = ("SHT_SYMTAB", "SHT_DYNSYM"),
    largest: int = LARGEST_TABLE,
) -> list[tuple[int, int, int, int]]:
    """(start, end) of each symbol table and (start, end) of its names, as offsets in the file."""
    length = os.fstat(file.fileno()).st_size
    try:
        elf = ELFFile(file)
        if elf.elfclass != 64 or not elf.little_endian:
            raise ElfUnreadable(f"{library}: only 64-bit little-endian libraries are read")
        if elf.num_sections() > MAX_SECTIONS:
            raise ElfUnreadable(f"{library}: claims to have {elf.num_sections()} sections")
        tables = []
        for section in elf.iter_sections():
            if section["sh_type"] in kinds:
                strings = elf.get_section(section["sh_link"])
                start, size = section["sh_offset"], section["sh_size"]
                names = strings["sh_offset"]
                tables.append((start, start + size - size % SYMBOL.size, names, names + strings["sh_size"]))
                if max(tables[-1]) > length:
                    raise ElfUnreadable(f"{library}: a symbol table lies beyond the end of the file")
                if max(size, strings["sh_size"]) > largest:
                    raise ElfUnreadable(f"{library}: a symbol table is larger than {largest >> 20} MiB")
    except ElfUnreadable:
        raise
    except (ELFError, AttributeError, LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        raise ElfUnreadable(f"{library}: not a readable ELF file: {error}") from error
    return tables


def _names(
    file: BinaryIO, start: int, end: int, prefix: bytes, patterns: Mapping[str, re.Pattern[bytes]]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """(offset in the string table, (key, name)) of each name that matches; some twice."""
    for base, chunk in _chunks(file, start, end, LONGEST_NAME):
        at = chunk.find(b"\0" + prefix)
        while at != -1:
            stop = chunk.find(b"\0", at + 1)
            if stop == -1:
                break  # whole in the next chunk, or longer than any name
            rest = chunk[at + 1 + len(prefix) : stop]
            for key, pattern in patterns.items():
                if pattern.fullmatch(rest):
                    yield base + at + 1 - start, (key, (prefix + rest).decode("ascii", "replace"))
            at = chunk.find(b"\0" + prefix, stop)

"""Where functions stand in a shared library: symbols by pattern of their mangled names."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

STT_FUNC = 2
SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: st_name, st_info, st_other, st_shndx, st_value, st_size (System V ABI, chapter 4)."""

CHUNK = SYMBOL.size * (1 << 18)
"""Bytes read at a time, a whole number of symbols."""
LONGEST_NAME = 1 << 16


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
    with library.open("rb") as file:
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


def _symbol_tables(file: BinaryIO, library: Path) -> list[tuple[int, int, int, int]]:
    """(start, end) of each symbol table and (start, end) of its names, as offsets in the file."""
    length = os.fstat(file.fileno()).st_size
    try:
        elf = ELFFile(file)
        if elf.elfclass != 64 or not elf.little_endian:
            raise ElfUnreadable(f"{library}: only 64-bit little-endian libraries are read")
        tables = []
        for section in elf.iter_sections():
            if section["sh_type"] in ("SHT_SYMTAB", "SHT_DYNSYM"):
                strings = elf.get_section(section["sh_link"])
                start, size = section["sh_offset"], section["sh_size"]
                names = strings["sh_offset"]
                tables.append((start, start + size - size % SYMBOL.size, names, names + strings["sh_size"]))
                if max(tables[-1]) > length:
                    raise ElfUnreadable(f"{library}: a symbol table lies beyond the end of the file")
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

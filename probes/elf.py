"""Where functions stand in a shared library: symbols by pattern of their mangled names."""

from __future__ import annotations

import mmap
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


class ElfUnreadable(ValueError):
    """Not an ELF library that can be read; the message says why."""


def functions(library: Path, prefix: str, patterns: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Find functions by their mangled names.

    ``prefix``: what all wanted names begin with, literally; ``patterns``: key → regular expression for the
    rest, which must match whole. Returns key → {mangled name: address in the file's own address space},
    aliases of one address once. Looks into ``.symtab`` and ``.dynsym``. libtorch_cpu has 530,000 symbols
    with 60 MB of names: the prefix is searched in the mapped string table, and only hits are looked at.

    Raises :class:`ElfUnreadable`, or OSError when the file cannot be opened.
    """
    compiled = {key: re.compile(pattern.encode()) for key, pattern in patterns.items()}
    found: dict[str, dict[str, int]] = {key: {} for key in patterns}
    with library.open("rb") as file:
        tables = _symbol_tables(file, library)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for symbols_at, symbols_end, strings_at, strings_end in tables:
                wanted = dict(_names(data, strings_at, strings_end, prefix.encode(), compiled))
                if not wanted:
                    continue
                table = memoryview(data)[symbols_at:symbols_end]
                for at, info, _, section, address, _ in SYMBOL.iter_unpack(table):
                    if at in wanted and section and info & 0xF == STT_FUNC:
                        key, mangled = wanted[at]
                        if address not in found[key].values():
                            found[key][mangled] = address
                table.release()
    return found


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
    data: mmap.mmap, start: int, end: int, prefix: bytes, patterns: Mapping[str, re.Pattern[bytes]]
) -> Iterator[tuple[int, tuple[str, str]]]:
    at = data.find(b"\0" + prefix, start, end)
    while at != -1:
        stop = data.find(b"\0", at + 1, end)
        if stop == -1:
            return
        rest = data[at + 1 + len(prefix) : stop]
        for key, pattern in patterns.items():
            if pattern.fullmatch(rest):
                yield at + 1 - start, (key, (prefix + rest).decode("ascii", "replace"))
        at = data.find(b"\0" + prefix, stop, end)

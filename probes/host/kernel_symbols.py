"""Names of the kernel's functions by address: /proc/kallsyms, read when the first name is wanted."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

TEXT = frozenset(b"tTwW")
"""Types of symbols that are functions (nm(1))."""
ADDRESS, TYPE, NAME = slice(0, 16), 17, 19
"""Columns of a line: ``ffffffff81000080 T entry_SYSCALL_64``, in a module ``\\t[name]`` after it."""
SUFFIX = re.compile(r"\.(?:isra|constprop|part|cold|llvm|lto_priv)\b.*")
"""What compilers append to a function that they changed or took apart."""
HEAD_BYTES = 1 << 16
"""Of the file: some 1,500 symbols, the first functions among them."""
HIDDEN = (
    "the kernel hides the addresses of its functions: sysctl kernel.kptr_restrict=1, and run the agent with "
    "CAP_SYSLOG"
)


class SymbolsHidden(RuntimeError):
    """The kernel does not tell where its functions are; the message says why and what to do."""


class KernelSymbols:
    """Functions of the running kernel and its modules. Holds some 4 MB once it has been asked."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._addresses = array("Q")
        self._offsets = array("I")
        self._names = b""
        self._modules = b""

    def why_none(self) -> str:
        """Why the kernel does not tell its functions' names, and what to do; "" when it does. Reads little."""
        try:
            with (self._proc / "kallsyms").open("rb") as file:
                head = file.read(HEAD_BYTES).splitlines()[:-1]
        except OSError as error:
            return str(_unreadable(error))
        return "" if any(int(line[ADDRESS], 16) for line in _functions(head)) else HIDDEN

    def names(self, addresses: Iterable[int]) -> list[str]:
        """Name of the function that each address lies in, without what compilers append; "" for one below all.

        Raises :class:`SymbolsHidden`.
        """
        modules = self._loaded()
        if not self._addresses or modules != self._modules:
            self._read()
            self._modules = modules
        return [self._name(address) for address in addresses]

    def _name(self, address: int) -> str:
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return ""
        start = self._offsets[place]
        name = self._names[start : self._names.index(b"\n", start)]
        return SUFFIX.sub("", name.decode("ascii", "replace"))

    def _loaded(self) -> bytes:
        """Which modules are loaded where; their use counts change all the time and are left out."""
        try:
            lines = (self._proc / "modules").read_bytes().splitlines()
        except OSError:  # a kernel without modules
            return b""
        return b"\n".join(b" ".join(line.split()[::5]) for line in lines)

    def _read(self) -> None:
        addresses, offsets, names = array("Q"), array("I"), bytearray()
        try:
            with (self._proc / "kallsyms").open("rb") as file:
                for line in _functions(file):
                    addresses.append(int(line[ADDRESS], 16))
                    offsets.append(len(names))
                    names += line[NAME:].split(None, 1)[0] + b"\n"
        except OSError as error:
            raise _unreadable(error) from error
        if not any(addresses):
            raise SymbolsHidden(HIDDEN)
        order = sorted(
            range(len(addresses)), key=addresses.__getitem__
        )  # modules come in the order of their loading
        self._addresses = array("Q", (addresses[place] for place in order))
        self._offsets = array("I", (offsets[place] for place in order))
        self._names = bytes(names)


def _functions(lines: Iterable[bytes]) -> Iterator[bytes]:
    return (line for line in lines if len(line) > NAME and line[TYPE] in TEXT)


def _unreadable(error: OSError) -> SymbolsHidden:
    return SymbolsHidden(f"the kernel's function names cannot be read ({error}): CONFIG_KALLSYMS, root")

"""Pickles of plain data: dicts, lists, tuples, strings, numbers, booleans and None, and nothing else.

A pickle is a program for a small stack machine (CPython's Modules/pickletools documents it opcode by opcode). This
one knows only the opcodes that build plain data. There is no code here that finds a class, calls anything, or loads
a persistent id, so nothing in a file can ask for it; and what is built is bounded before it is built.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_BYTES = 256 << 20
"""Largest pickle. A ring of 20,000 collectives with stacks is about 40 MB."""
MAX_OPCODES = 16_000_000
"""Most opcodes. Each builds at most one object of 64 bytes beside the text that stands in the file: 1 GB at the
very most; a ring of 20,000 collectives takes 2 million."""
MAX_INTEGER_BYTES = 8
"""Longest integer: 64 bits hold every number of a dump."""


class RefusedPickle(ValueError):
    """A pickle that is not plain data, damaged, cut short or too large: the message says which, and where."""


_MARK = object()
_INT32, _UINT16, _UINT32 = struct.Struct("<i"), struct.Struct("<H"), struct.Struct("<I")
_UINT64, _DOUBLE = struct.Struct("<Q"), struct.Struct(">d")

_REFUSED = {
    "c": "a class or function (GLOBAL)",
    "\x93": "a class or function (STACK_GLOBAL)",
    "\x82": "a class or function (EXT1)",
    "\x83": "a class or function (EXT2)",
    "\x84": "a class or function (EXT4)",
    "R": "a call (REDUCE)",
    "i": "an instance of a class (INST)",
    "o": "an instance of a class (OBJ)",
    "\x81": "an instance of a class (NEWOBJ)",
    "\x92": "an instance of a class (NEWOBJ_EX)",
    "b": "the state of an object (BUILD)",
    "P": "a persistent id (PERSID)",
    "Q": "a persistent id (BINPERSID)",
    "\x97": "a buffer outside the file (NEXT_BUFFER)",
}


def loads(data: bytes) -> Any:
    """The plain data in a pickle of any protocol from 2 on. Raises :class:`RefusedPickle`."""
    if len(data) > MAX_BYTES:
        raise RefusedPickle(f"a pickle of {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    machine = _Machine(data)
    try:
        return machine.run()
    except (struct.error, IndexError) as error:
        if isinstance(error, struct.error) or machine.at >= len(data):
            raise RefusedPickle(f"the pickle is cut short at byte {len(data)}") from error
        raise RefusedPickle(f"the pickle is damaged before byte {machine.at}") from error
    except UnicodeDecodeError as error:
        raise RefusedPickle(f"the pickle holds text that is not UTF-8 before byte {machine.at}") from error
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, RefusedPickle):
            raise
        raise RefusedPickle(f"the pickle is damaged before byte {machine.at}: {error}") from error


class _Machine:
    """The stack machine. ``at`` is the next byte."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, act = self._data, _ACTIONS
        for _ in range(MAX_OPCODES):
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self._result()
            action = act.get(code)
            if action is None:
                raise RefusedPickle(self._unknown(chr(code)))
            action(self)
        raise RefusedPickle(f"the pickle has more than {MAX_OPCODES:,} opcodes")

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise RefusedPickle(
                f"the pickle is damaged: it ends at byte {self.at} with more or less than one value"
            )
        return self._stack[0]

    def _unknown(self, code: str) -> str:
        if code in _REFUSED:
            return f"the pickle asks for {_REFUSED[code]} at byte {self.at - 1}: only plain data is read"
        return f"the pickle has an opcode {code!r} at byte {self.at - 1} that plain data does not need"

    def _take(self, count: int) -> bytes:
        found = self._data[self.at : self.at + count]
        self.at += count
        if len(found) < count:
            self.at = len(self._data)
            raise RefusedPickle(f"the pickle is cut short at byte {self.at}")
        return found

    def _number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return value

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise RefusedPickle(f"the pickle is damaged before byte {self.at}: a value is missing")
        return value

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise RefusedPickle(f"the pickle is damaged before byte {self.at}: a mark is missing")
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def text(self, form: struct.Struct | None) -> None:
        size = self._byte() if form is None else self._number(form)
        self._push(self._take(size).decode("utf-8"))

    def raw(self, form: struct.Struct | None) -> None:
        size = self._byte() if form is None else self._number(form)
        self._push(self._take(size))

    def long(self) -> None:
        size = self._byte()
        if size > MAX_INTEGER_BYTES:
            raise RefusedPickle(f"the pickle holds an integer of {size} bytes before byte {self.at}")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def items(self, pairs: list[Any]) -> None:
        target = self._top(dict)
        if len(pairs) % 2:
            raise RefusedPickle(f"the pickle is damaged before byte {self.at}: a key without a value")
        for key in pairs[::2]:
            if type(key) not in (str, int):  # also: hashing a tuple nested a million deep ends the process
                raise RefusedPickle(f"the pickle has a key that is no text before byte {self.at}")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise RefusedPickle(f"the pickle is damaged before byte {self.at}: no {kind.__name__} to fill")
        return self._stack[-1]

    def put(self, key: int) -> None:
        value = self._stack[-1]
        if value is _MARK:
            raise RefusedPickle(f"the pickle is damaged before byte {self.at}: a value is missing")
        self._memo[key] = value

    def get(self, key: int) -> None:
        if key not in self._memo:
            raise RefusedPickle(
                f"the pickle is damaged before byte {self.at}: nothing was kept as number {key}"
            )
        self._push(self._memo[key])

    def protocol(self) -> None:
        number = self._byte()
        if number > 5:
            raise RefusedPickle(f"a pickle of protocol {number}; protocols up to 5 are known")

    def frame(self) -> None:
        self._number(_UINT64)  # a hint for readers that buffer

    def tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def mark(self) -> None:
        self._push(_MARK)

    def memoize(self) -> None:
        self.put(len(self._memo))


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m._push(value)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "\x80": _Machine.protocol,
        "\x95": _Machine.frame,
        "(": _Machine.mark,
        "N": _constant(None),
        "\x88": _constant(True),
        "\x89": _constant(False),
        "K": lambda m: m._push(m._byte()),
        "M": lambda m: m._push(m._number(_UINT16)),
        "J": lambda m: m._push(m._number(_INT32)),
        "\x8a": _Machine.long,
        "G": lambda m: m._push(m._number(_DOUBLE)),
        "\x8c": lambda m: m.text(None),
        "X": lambda m: m.text(_UINT32),
        "\x8d": lambda m: m.text(_UINT64),
        "C": lambda m: m.raw(None),
        "B": lambda m: m.raw(_UINT32),
        "}": lambda m: m._push({}),
        "]": lambda m: m._push([]),
        ")": _constant(()),
        "t": lambda m: m._push(tuple(m._since_mark())),
        "\x85": lambda m: m.tuple(1),
        "\x86": lambda m: m.tuple(2),
        "\x87": lambda m: m.tuple(3),
        "a": lambda m: m.extend([m._pop()]),
        "e": lambda m: m.extend(m._since_mark()),
        "s": lambda m: m.items([m._pop(), m._pop()][::-1]),
        "u": lambda m: m.items(m._since_mark()),
        "q": lambda m: m.put(m._byte()),
        "r": lambda m: m.put(m._number(_UINT32)),
        "\x94": _Machine.memoize,
        "h": lambda m: m.get(m._byte()),
        "j": lambda m: m.get(m._number(_UINT32)),
    }.items()
}

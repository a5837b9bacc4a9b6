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
        if isinstance(error, struct.error) or machine.at + 1 >= len(data):
            raise RefusedPickle(f"the pickle is cut short at byte {len(data)}") from error
        raise RefusedPickle(f"the pickle is damaged before byte {machine.at}") from error
    except KeyError as error:
        raise RefusedPickle(
            f"the pickle is damaged at byte {machine.at}: it kept no number {error}"
        ) from error
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
        """The value that the program leaves. Opcodes that make up nine tenths of a dump stand here themselves."""
        data, stack, memo, act = self._data, self._stack, self._memo, _ACTIONS
        at = 0
        for _ in range(MAX_OPCODES):
            self.at = at
            code = data[at]
            if code == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == 0x71:  # BINPUT
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT32.unpack_from(data, at + 1)[0]])
                at += 5
            elif code == 0x72:  # LONG_BINPUT
                memo[_UINT32.unpack_from(data, at + 1)[0]] = stack[-1]
                at += 5
            elif code == 0x28:  # MARK
                stack.append(_MARK)
                at += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif code == 0x4E:  # NONE
                stack.append(None)
                at += 1
            elif code == 0x2E:  # STOP
                self.at = at + 1
                return self._result()
            else:
                action = act.get(code)
                self.at = at + 1
                if action is None:
                    raise RefusedPickle(self._unknown(chr(code)))
                action(self)
                at = self.at
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
            if (
                type(key) is not str and type(key) is not int
            ):  # also: hashing a tuple nested a million deep ends the process
                raise RefusedPickle(f"the pickle has a key that is no text before byte {self.at}")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise RefusedPickle(f"the pickle is damaged before byte {self.at}: no {kind.__name__} to fill")
        return self._stack[-1]

    def protocol(self) -> None:
        number = self._byte()
        if number > 5:
            raise RefusedPickle(f"a pickle of protocol {number}; protocols up to 5 are known")

    def frame(self) -> None:
        self._number(_UINT64)  # a hint for readers that buffer

    def tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda m: m._push(value)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "\x80": _Machine.protocol,
        "\x95": _Machine.frame,
        "\x88": _constant(True),
        "\x89": _constant(False),
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
        "\x94": _Machine.memoize,
    }.items()
}

"""What is read when somebody looks, and then kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
Name = TypeVar("Name")
Value = TypeVar("Value")


class Once(Generic[T]):
    """Asked again, it answers at once. Made by the thousand: making a ``functools.cache`` takes 35 µs."""

    __slots__ = ("_answer", "_read")

    def __init__(self, read: Callable[..., T], *arguments: object) -> None:
        self._read: tuple[Callable[..., T], tuple[object, ...]] | None = (read, arguments)
        self._answer: T

    def __call__(self) -> T:
        """Raises what ``read`` raises."""
        unread = self._read  # another thread may answer meanwhile
        if unread is not None:
            read, arguments = unread
            self._answer = read(*arguments)
            self._read = None  # and with it what it was read from
        return self._answer


class Later(Mapping[Name, Value]):
    """A mapping of which nothing is known before somebody looks."""

    __slots__ = ("_once",)

    def __init__(self, read: Callable[..., Mapping[Name, Value]], *arguments: object) -> None:
        self._once = Once(read, *arguments)

    def __getitem__(self, name: Name) -> Value:
        return self._once()[name]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._once())

    def __len__(self) -> int:
        return len(self._once())

    def __repr__(self) -> str:
        return repr(self._once())

"""A made-up /proc and a clock that tests move: for what real processes cannot be made to do at will."""

from __future__ import annotations

from pathlib import Path

MAPS = "7f0000000000-7f0000001000 r-xp 00000000 00:1f 4242                       {path}\n"


class FakeProc:
    """Writes processes as /proc shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._generation = 0

    def put(
        self,
        pid: int,
        env: dict[str, str],
        *,
        parent: int = 1,
        start: int = 100,
        name: str = "python3",
        flags: int = 0,
        image: int = 0x7FFE0000,
        library: str | None = "/lib/libtorch_cpu.so",
        size: int = 0,
    ) -> None:
        """A process; one of the same pid that was there before is gone, as by pid reuse."""
        self._generation += 1
        folder = self.root / f"new-{self._generation}"
        folder.mkdir(parents=True)
        fields = ["S", str(parent), *["0"] * 4, str(flags), *["0"] * 12, str(start), str(size), *["0"] * 24]
        fields.append(str(image))
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)} 0 0\n")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in env.items()))
        (folder / "maps").write_text(MAPS.format(path=library) if library else "")
        place = self.root / str(pid)
        if place.exists():  # kept aside, so that the file system gives the new one another inode
            place.rename(self.root / f"old-{self._generation}")
        folder.rename(place)

    def map(self, pid: int, library: str) -> None:
        """The process has this mapped now."""
        (self.root / str(pid) / "maps").write_text(MAPS.format(path=library))

    def resize(self, pid: int, size: int) -> None:
        """Its address space has another size now."""
        stat = self.root / str(pid) / "stat"
        head, _, rest = stat.read_text().rpartition(")")
        fields = rest.split()
        fields[20] = str(size)
        stat.write_text(f"{head}) {' '.join(fields)}\n")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

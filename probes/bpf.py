"""The way to BPF: find BCC and kernel headers, compile, attach, and say what is not available.

BCC's Python bindings come from the distribution (``python3-bpfcc``), whatever Python runs us: they are plain
Python over a C library, and are loaded from where the distribution puts them. Where the running kernel's
headers are missing, any installed kernel headers serve, because our programs read no kernel structs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import logging
import os
import platform
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from probes.procfs import HOST_PID_WORDS, in_initial_pid_namespace

log = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent.parent / "bpf"
BINDINGS = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib/python3/site-packages"))
HEADERS = Path("/usr/src")
CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF = 21, 38, 39
"""include/uapi/linux/capability.h; the two newer ones (Linux 5.8) together stand for the first."""
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
"""Number of bpf(2), by machine."""
_BPF_MAP_CREATE, _BPF_MAP_TYPE_ARRAY = 0, 2
"""include/uapi/linux/bpf.h"""
TRACEFS = Path("/sys/kernel/tracing")


class BpfUnavailable(RuntimeError):
    """Live watching is not possible here; the message says why and what to do about it."""


def kernel_release() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def possible_cpus() -> int:
    """Number of CPUs the kernel may ever bring up: the size of per-CPU arrays indexed by CPU."""
    ranges = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(re.split(r"[,-]", ranges)[-1]) + 1


def bindings() -> ModuleType:
    """The module ``bcc`` of the distribution. Raises :class:`BpfUnavailable`."""
    if "bcc" in sys.modules:
        return sys.modules["bcc"]
    for folder in BINDINGS:
        if (folder / "bcc" / "libbcc.py").exists():
            # Only for this import: the distribution's other packages must not shadow ours.
            sys.path.append(str(folder))
            try:
                return importlib.import_module("bcc")
            except (ImportError, OSError, AttributeError) as error:
                raise BpfUnavailable(f"BCC in {folder} does not load: {error}") from error
            finally:
                sys.path.remove(str(folder))
    raise BpfUnavailable(
        "BCC is not installed: apt-get install python3-bpfcc (the PyPI package named bcc is something else)"
    )


def require_root() -> None:
    """Raises :class:`BpfUnavailable` unless this process may load BPF programs."""
    if os.geteuid() != 0:
        raise BpfUnavailable("watching a node needs root: run with sudo")
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    if not held >> CAP_SYS_ADMIN & 1 and not (held >> CAP_BPF & 1 and held >> CAP_PERFMON & 1):
        raise BpfUnavailable(
            "root without the capabilities CAP_BPF and CAP_PERFMON, as in a container: give them to it, or run it "
            "privileged"
        )
    number = BPF_SYSCALL.get(platform.machine())
    if number is None:
        return
    # Capabilities of a user namespace are none here: the kernel is asked.
    libc = ctypes.CDLL(None, use_errno=True)
    array_of_one = struct.pack("=IIIII", _BPF_MAP_TYPE_ARRAY, 4, 4, 1, 0).ljust(72, b"\0")
    map_ = libc.syscall(number, _BPF_MAP_CREATE, array_of_one, len(array_of_one))
    if map_ < 0:
        reason = os.strerror(ctypes.get_errno())
        raise BpfUnavailable(
            f"the kernel refuses BPF ({reason}): a user namespace, a container's seccomp profile, or kernel "
            "lockdown forbids it; run the agent on the node itself, or privileged"
        )
    os.close(map_)


def require_tracefs() -> None:
    """Mount tracefs where it is not. Raises :class:`BpfUnavailable`."""
    if (TRACEFS / "events").is_dir() or Path("/sys/kernel/debug/tracing/events").is_dir():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tracefs", str(TRACEFS).encode(), b"tracefs", 0, None) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise BpfUnavailable(
            f"tracefs is not mounted and cannot be ({reason}): mount -t tracefs nodev {TRACEFS}"
        )


def has_tracepoint(category: str, name: str) -> bool:
    """Whether the running kernel has this tracepoint."""
    return any(
        (root / "events" / category / name).is_dir() for root in (TRACEFS, Path("/sys/kernel/debug/tracing"))
    )


def kernel_headers(cache: Path) -> Path | None:
    """A folder of kernel headers that BCC can use, or None to let BCC find the running kernel's own.

    Debian and Ubuntu split a kernel's headers over two folders (``…-common`` or the plain version, and the
    flavour's); ``cache`` gets a folder of links that joins them. Raises :class:`BpfUnavailable`.
    """
    given = os.environ.get("BCC_KERNEL_SOURCE")
    if given:
        return Path(given)
    if (Path("/lib/modules") / platform.release() / "build" / "include").is_dir():
        return None
    if Path("/sys/kernel/kheaders.tar.xz").exists():
        return None
    arch = "x86" if platform.machine() == "x86_64" else "arm64"
    flavours = [
        folder
        for folder in HEADERS.glob("linux-headers-*")
        if (folder / "include" / "generated" / "autoconf.h").exists()
    ]
    for flavour in sorted(flavours, key=_version, reverse=True):
        parts = [flavour]
        for candidate in HEADERS.glob("linux-headers-*"):
            stem = candidate.name.removesuffix("-common")
            if candidate != flavour and flavour.name.startswith(stem):
                parts.append(candidate)
        joined = cache / f"headers-{flavour.name}"
        _join(joined, parts, Path("include"))
        _join(joined, parts, Path("arch") / arch / "include")
        if (joined / "include" / "linux" / "kconfig.h").exists():
            return joined
    raise BpfUnavailable(
        "no kernel headers found: apt-get install linux-headers-amd64 (Debian) or linux-headers-generic (Ubuntu); "
        "they need not be those of the running kernel"
    )


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def _join(target: Path, parts: list[Path], inside: Path) -> None:
    (target / inside).mkdir(parents=True, exist_ok=True)
    for part in parts:
        for entry in (part / inside).iterdir() if (part / inside).is_dir() else ():
            link = target / inside / entry.name
            if not link.is_symlink():
                link.symlink_to(entry)


_loads = itertools.count(1)


def next_load() -> int:
    """A number for programs that share maps, never given before in this process: it stands in the maps' names, in
    the place of ``LOAD``.

    BCC keeps maps that programs share by name for as long as the process lives, with the descriptor's number as it
    was first (found on 0.26: loaded again, the second program got whatever had that number by then, or none). So no
    name is used twice.
    """
    return next(_loads)


class Kernel:
    """Compiles our programs. One per agent: maps shared by programs live as long as it does."""

    def __init__(self, cache: Path) -> None:
        require_root()
        if not in_initial_pid_namespace():
            raise BpfUnavailable(HOST_PID_WORDS)
        require_tracefs()
        self.bcc = bindings()
        self._made: list[Any] | None = None
        """Compiled within :meth:`all_or_nothing`."""
        headers = kernel_headers(cache)
        if headers is not None:
            os.environ["BCC_KERNEL_SOURCE"] = str(headers)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """What is compiled within and then fails is taken out of the kernel: BCC itself keeps it to the end."""
        made: list[Any] = []
        self._made = made
        try:
            yield
        except BaseException:
            for bpf in made:
                with contextlib.suppress(Exception):
                    bpf.cleanup()
            raise
        finally:
            self._made = None

    def compile(self, source: str, defines: Mapping[str, int | None], load: int) -> Any:
        """Compile ``bpf/<source>`` and load what it attaches by itself (raw tracepoints).

        ``defines``: macros; None means defined without a value. ``load``: see :func:`next_load`. Returns BCC's
        ``BPF`` object; its ``cleanup()`` detaches everything. Raises :class:`BpfUnavailable` with
        the compiler's or the kernel's words.
        """
        flags = [f"-I{SOURCES}", "-Wno-macro-redefined", "-Wno-unknown-attributes"]
        flags += [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in defines.items()]
        bpf = self.bcc.BPF.__new__(self.bcc.BPF)
        try:
            text = (SOURCES / source).read_bytes().replace(b"_LOAD", b"_%d" % load)
            bpf.__init__(text=text, cflags=flags)
            if self._made is not None:
                self._made.append(bpf)
            return bpf
        except Exception as error:  # BCC raises bare Exception
            with contextlib.suppress(Exception):  # what it had attached by then
                bpf.cleanup()
            raise BpfUnavailable(
                f"bpf/{source} does not load on kernel {platform.release()}: {error}"
            ) from error

"""What tests have a worker do. In a module of its own: the worker imports it."""

import os
import time
from pathlib import Path


class Unsendable(Exception):
    """Cannot be made again from its words alone."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}")


def pid() -> int:
    return os.getpid()


def environment() -> dict[str, str]:
    return dict(os.environ)


def fail(error: Exception) -> None:
    raise error


def fail_unsendably() -> None:
    raise Unsendable(7, "no way back")


def die_the_first_time(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return "alive"


def note(mark: Path, word: str) -> None:
    """Takes a moment."""
    with mark.open("a") as log:
        log.write(word)
    time.sleep(0.2)


def die(mark: Path) -> None:
    with mark.open("a") as log:
        log.write("x")
    os._exit(9)


def hang(mark: Path) -> None:
    mark.write_text(str(os.getpid()))
    time.sleep(600)


def hang_diagnosing(store_url: str, job: str, *, now_ns: int) -> None:
    """In the place of ``diagnose_job``: the job's name is where to say so."""
    hang(Path(job))


def chatter(size: int) -> str:
    print("this is no answer")
    return "x" * size

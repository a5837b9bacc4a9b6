"""`make bench`: every measurement, one after the other; or those that are named: `python -m bench overhead`.

`faults` takes hours and is done only when it is named; what follows its name goes to it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable

from bench import (
    accuracy,
    acknowledge,
    error_control,
    faults,
    importing,
    kills,
    overhead,
    reading,
    trap,
    verdicts,
)

ALL: dict[str, Callable[[], None]] = {
    "trap": trap.main,
    "overhead": overhead.main,
    "accuracy": accuracy.main,
    "verdicts": verdicts.main,
    "reading": reading.main,
    "error_control": error_control.main,
    "acknowledge": acknowledge.main,
    "kills": kills.main,
    "importing": importing.main,
}


def main() -> None:
    if sys.argv[1:2] == ["faults"]:
        faults.main(sys.argv[2:])
        return
    chosen = sys.argv[1:] or list(ALL)
    unknown = [name for name in chosen if name not in ALL]
    if unknown:
        sys.exit(f"no such measurement: {', '.join(unknown)}; there are {', '.join(ALL)}, faults")
    print(f"Linux {platform.release()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    for name in chosen:
        print(f"\n== {name}: {(sys.modules[f'bench.{name}'].__doc__ or '').splitlines()[0]}")
        ALL[name]()


if __name__ == "__main__":
    main()

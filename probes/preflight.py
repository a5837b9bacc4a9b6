"""Whether this machine can be watched, found out in a process that ends: trying loads the compiler of BPF programs
(some 150 MB), which a server has no use for.

    python -m probes.preflight CACHE        prints why it cannot; nothing when it can
"""

from __future__ import annotations

import sys
from pathlib import Path

from probes.bpf import BpfUnavailable, Kernel
from probes.host.thread_time import ThreadTimeProbe


def why_not_live(cache: Path) -> str:
    """Why live watching is not possible here; empty when it is. Loads a probe and takes it away again."""
    try:
        ThreadTimeProbe(Kernel(cache)).close()
    except (BpfUnavailable, OSError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(why_not_live(Path(sys.argv[1])))

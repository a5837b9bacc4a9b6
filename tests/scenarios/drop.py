"""Loses some of the packets that come in on a network interface, by chance (an XDP program): for a fault.

Says ``ready`` once the program is loaded, attaches it when a line comes in, says ``drops``, and ends with its
input.
"""

from __future__ import annotations

import sys
from pathlib import Path

from probes.bpf import Kernel

PROGRAM = """
#include <uapi/linux/bpf.h>
int lose(struct xdp_md *packet) {
    return bpf_get_prandom_u32() % 100 < PERCENT ? XDP_DROP : XDP_PASS;
}
"""
SKB_MODE = 2
"""XDP_FLAGS_SKB_MODE of include/uapi/linux/if_link.h: every interface can do it."""


def main() -> None:
    interface, percent, folder = sys.argv[1:]
    bcc = Kernel(Path(folder)).bcc
    program = bcc.BPF(text=PROGRAM, cflags=[f"-DPERCENT={percent}", "-Wno-unknown-attributes"])
    lose = program.load_func("lose", bcc.BPF.XDP)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    program.attach_xdp(interface, lose, SKB_MODE)
    print("drops", flush=True)
    sys.stdin.read()
    program.remove_xdp(interface, SKB_MODE)


if __name__ == "__main__":
    main()

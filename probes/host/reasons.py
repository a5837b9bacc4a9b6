"""What a blocked thread waits for: told from the functions in its kernel stack.

Names differ between kernel versions, so the rules go by parts of names that have stayed: subsystems and system
calls rather than the helper that happens to call ``schedule``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

STORAGE_READ = "storage-read"
STORAGE_WRITE = "storage-write"
NETWORK_RECEIVE = "network-receive"
NETWORK_SEND = "network-send"
FUTEX = "futex"
SLEEP = "sleep"
PAGE_FAULT = "page-fault"
RECLAIM = "reclaim"
PIPE_READ = "pipe-read"
PIPE_WRITE = "pipe-write"
POLL = "poll"
CHILD = "child"
KERNEL_LOCK = "kernel-lock"
STOPPED = "stopped"
OTHER = "other"

REASONS = (
    "",
    STORAGE_READ,
    STORAGE_WRITE,
    NETWORK_RECEIVE,
    NETWORK_SEND,
    FUTEX,
    SLEEP,
    PAGE_FAULT,
    RECLAIM,
    PIPE_READ,
    PIPE_WRITE,
    POLL,
    CHILD,
    KERNEL_LOCK,
    STOPPED,
    OTHER,
)
"""By their numbers in the kernel; as many as bpf/thread_time.h has room for. Number 0: not known (yet)."""
UNKNOWN = 0


CALLS = {
    "x86_64": {
        FUTEX: (202,),
        POLL: (7, 23, 232, 270, 271, 281, 441),
        SLEEP: (35, 230),
        CHILD: (61, 247),
    },
    "aarch64": {FUTEX: (98,), POLL: (22, 72, 73, 441), SLEEP: (101, 115), CHILD: (95, 260)},
}
"""System calls that sleep interruptibly for one reason only, by machine (arch/x86/entry/syscalls/syscall_64.tbl,
include/uapi/asm-generic/unistd.h): futex; poll, select, epoll_wait, pselect6, ppoll, epoll_pwait, epoll_pwait2;
nanosleep, clock_nanosleep; wait4, waitid."""
SYSCALL_NUMBER = {"x86_64": 120, "aarch64": 280}
"""Where the number of a thread's system call stands in ``struct pt_regs`` (``orig_ax``, ``syscallno``), which is
ABI (arch/*/include/asm/ptrace.h)."""


class Rule(NamedTuple):
    reason: str
    frames: re.Pattern[str]


def _rule(reason: str, *patterns: str) -> Rule:
    return Rule(reason, re.compile("|".join(patterns)))


_STORAGE = "storage"
"""Reads or writes: which of the two, frames further out tell."""

ANYWHERE = (
    # These say more than whatever they wait in.
    _rule(STOPPED, r"do_signal_stop|ptrace_stop|do_jobctl_trap|do_freezer_trap|__refrigerator"),
    _rule(
        RECLAIM,
        r"try_to_free_(?:mem_cgroup_)?pages|mem_cgroup_handle_over_high|mem_cgroup_oom|out_of_memory",
        r"try_to_compact_pages|throttle_direct_reclaim|reclaim_throttle|shrink_(?:node|zone|lruvec|inactive_list)",
    ),
    _rule(FUTEX, r"futex_lock_pi|futex_wait_requeue_pi"),  # inside they look like a kernel's mutex
)

INNERMOST_FIRST = (
    _rule(FUTEX, r"futex", r"do_semtimedop|do_semop"),
    _rule(
        KERNEL_LOCK,
        r"^_*(?:ww_)?mutex_lock|rwsem_|^_*down(?:_|$)|percpu_(?:rwsem|down)|rt_mutex|rtlock|rt_spin_lock",
        r"synchronize_s?rcu|wait_rcu_gp|locks_lock_inode|flock_lock|posix_lock_inode|do_lock_file_wait",
    ),
    _rule(SLEEP, r"nanosleep", r"^msleep|^usleep_range", r"sys_pause|sigsuspend|sigtimedwait|timerfd_read"),
    _rule(
        POLL,
        r"ep_poll|epoll|do_select|do_sys_poll|poll_schedule_timeout|^do_poll|io_cqring_wait",
        r"inotify_read|fanotify_read|signalfd_read",
    ),
    _rule(CHILD, r"^do_wait$|wait4|waitid|wait_for_vfork_done|^kernel_clone$|^_?do_fork$"),
    _rule(
        PIPE_READ,
        r"pipe_read|^wait_for_partner|^fifo_open|^ipipe_prep|splice_from_pipe",
        r"unix_\w*(?:recv|read|accept|data_wait)|tty_read|eventfd_read|mq_timedreceive|do_msgrcv|^wq_sleep",
    ),
    _rule(
        PIPE_WRITE,
        r"pipe_write|^opipe_prep|splice_to_pipe|^wait_for_space",
        r"unix_\w*(?:send|connect|wait_for_peer)|tty_write|eventfd_write|mq_timedsend|do_msgsnd",
    ),
    _rule(
        NETWORK_RECEIVE,
        r"^_*(?:tcp|udp|udpv6|raw|rawv6|packet|netlink|mptcp|sctp|smc|rds|vsock|tls)_\w*(?:recv|accept|splice_read)",
        r"inet_csk_accept|inet6?_(?:accept|recvmsg)|inet_wait_for_connect|inet_stream_connect|^sk_wait_data",
        r"sock_recvmsg|sock_read_iter|sys_recv|sys_accept|sys_connect|do_accept",
    ),
    _rule(
        NETWORK_SEND,
        r"^_*(?:tcp|udp|udpv6|raw|rawv6|packet|netlink|mptcp|sctp|smc|rds|vsock|tls)_\w*(?:send|close)",
        r"sk_stream_wait|inet6?_(?:sendmsg|release)|sock_sendmsg|sock_write_iter|sys_send(?:to|msg|mmsg)",
    ),
    _rule(
        _STORAGE,
        r"^io_schedule|folio_wait|folio_lock|wait_on_page|lock_page|wait_on_bit|bit_wait|wait_on_buffer|sync_buffer",
        r"submit_bio|^_*(?:blk|blkdev|bio|bdev|iomap|mpage|dio|dm|md|raid\w*|nvme|scsi|throtl|wbt|rq_qos)_",
        r"^_*(?:jbd2?|journal|ext[234]|xfs|xlog|btrfs|f2fs|zfs|zpl|zio|txg|dmu|ntfs\w*|fat|erofs|squashfs|ovl)_",
        r"^_*(?:nfs\w*|rpc|cifs|smb2?|ceph|fuse|virtio_fs|ll|osc|ptlrpc|cl|gpfs\w*|v9fs|p9|afs|ocfs2|gfs2|bch)_",
        r"request_wait_answer|cxiWaitEvent|^start_this_handle|log_wait_commit|wait_transaction_locked",
        r"do_get_write_access|balance_dirty|writeback|filemap_|read_pages|page_cache_\w*(?:ra|readahead)|read_cache",
        r"swap_read|swap_write|sync_inode|fsync|sync_file|syncfs|sys_sync|wait_on_inode|freeing_inode|d_alloc_parallel",
        r"sb_start_write|dquot_|read_events|do_io_getevents",
    ),
)

WRITES = re.compile(
    r"(?<!readv_)write|fsync|fdatasync|sync_file|sync_inode|sync_dirty|sync_buffers|sys_sync|msync|syncfs|^_*jbd2?_|journal"
    r"|log_force|log_wait|start_this_handle|transaction|current_trans|txg_|truncate|fallocate|unlink|rename|mkdir"
    r"|rmdir|mknod|symlink|setattr|update_time|dirty|issue_flush|(?:file|fuse|filp)_flush|filp_close"
)
"""Any of these makes a wait for storage one of writing."""

FAULT = re.compile(
    r"^_*(?:exc|do|do_async)_page_fault|do_user_addr_fault|handle_mm_fault|faultin_page|do_mem_abort"
    r"|do_translation_fault|kvm_async_pf|do_swap_page|handle_userfault|migration_entry_wait"
)
"""Any of these makes a wait for storage one for a page that the program touched."""


def reason_of(stack: Sequence[str]) -> str:
    """Why a thread is blocked that sleeps in these functions, the innermost first; ``OTHER`` where no rule fits."""
    for rule in ANYWHERE:
        if any(rule.frames.search(name) for name in stack):
            return rule.reason
    fault = any(FAULT.search(name) for name in stack)
    for name in stack:
        for rule in INNERMOST_FIRST:
            if rule.frames.search(name):
                if rule.reason != _STORAGE:
                    return rule.reason
                if fault:
                    return PAGE_FAULT
                return STORAGE_WRITE if any(WRITES.search(outer) for outer in stack) else STORAGE_READ
    return PAGE_FAULT if fault else OTHER

/*
 * signals: who sent which signal to a watched process, stops and continuations as its parent is told of them,
 * the end of its main thread, and victims of the out-of-memory killer.
 *
 * Attaches  tracepoints signal:signal_generate and, where the kernel has it, oom:mark_victim; raw tracepoint
 *           sched_process_exit.
 * Read by   probes/host/signals.py, each second: ring buffer `signal_events`, `signals_lost`.
 * Filled by user space: `watched_processes`.
 * Cost      a signal of another kind: a shift and a compare; of these kinds and to a process that is not watched:
 *           two hash look-ups. See docs/probes/signals.md.
 *
 * Compile-time: HAVE_OOM (the kernel has oom:mark_victim), SIGNALS (bit n-1: signal n is of interest).
 */
#include <uapi/linux/ptrace.h>

#define CHLD 17 /* the same on all machines but MIPS, PA-RISC and Alpha: arch/x86/include/uapi/asm/signal.h */

enum kind { SENT = 1, CHILD = 2, EXIT = 3, VICTIM = 4 };

struct event {
  u64 at;
  u64 cgroup; /* of the sender, in version 2 */
  u32 kind;
  u32 target;  /* thread that the signal is for */
  u32 process; /* watched process that this is about */
  u32 sender;  /* process */
  u32 uid;
  s32 signal;
  s32 code;
  s32 result; /* 0 delivered, 1 ignored, 2 already pending, 3 and 4 lost: enum in include/trace/events/signal.h */
  char comm[16]; /* of the sending thread */
};

BPF_HASH(watched_processes, u32, u32, 4096);
BPF_RINGBUF_OUTPUT(signal_events, 16); /* pages: 900 events */
BPF_ARRAY(signals_lost, u64, 1);

static __always_inline void tell(u32 kind, u32 process, u32 target, s32 signal, s32 code, s32 result) {
  struct event *event = signal_events.ringbuf_reserve(sizeof(struct event));
  if (!event) {
    int zero = 0;
    u64 *count = signals_lost.lookup(&zero);
    if (count)
      __sync_fetch_and_add(count, 1);
    return;
  }
  event->at = bpf_ktime_get_ns();
  event->cgroup = bpf_get_current_cgroup_id();
  event->kind = kind;
  event->target = target;
  event->process = process;
  event->sender = bpf_get_current_pid_tgid() >> 32;
  event->uid = bpf_get_current_uid_gid();
  event->signal = signal;
  event->code = code;
  event->result = result;
  bpf_get_current_comm(event->comm, sizeof(event->comm));
  signal_events.ringbuf_submit(event, 1 /* BPF_RB_NO_WAKEUP: it is read once a second */);
}

/* Programs of tracepoints end with 1: 0 would keep the event from perf's users. */
TRACEPOINT_PROBE(signal, signal_generate) {
  u32 number = args->sig - 1;
  if (number >= 64 || !(SIGNALS >> number & 1))
    return 1;
  u64 current = bpf_get_current_pid_tgid();
  u32 self = current >> 32, thread = current, target = args->pid;
  if (args->sig == CHLD) {
    /* A process tells its parent, from its own thread, that it has stopped, goes on, or has ended. */
    if (watched_processes.lookup(&self))
      tell(CHILD, self, target, args->sig, args->code, args->result);
    return 1;
  }
  if (watched_processes.lookup(&target))
    tell(SENT, target, target, args->sig, args->code, args->result);
  else if (target == thread && watched_processes.lookup(&self))
    /* A thread other than the main one, for itself: abort(), or what it did to memory. */
    tell(SENT, self, target, args->sig, args->code, args->result);
  return 1;
}

RAW_TRACEPOINT_PROBE(sched_process_exit) {
  u64 current = bpf_get_current_pid_tgid();
  u32 self = current >> 32;
  if (self == (u32)current && watched_processes.lookup(&self))
    tell(EXIT, self, self, 0, 0, 0);
  return 0;
}

#ifdef HAVE_OOM
TRACEPOINT_PROBE(oom, mark_victim) {
  u32 victim = args->pid;
  if (watched_processes.lookup(&victim))
    tell(VICTIM, victim, victim, 0, 0, 0);
  return 1;
}
#endif

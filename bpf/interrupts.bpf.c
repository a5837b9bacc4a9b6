/*
 * interrupts: time in hardware interrupts by interrupt number and in softirqs by vector, by CPU, and of whom it was
 * taken: from a rank whose thread had the CPU; and the softirqs that ran in the CPU's ksoftirqd.
 *
 * Attaches  raw tracepoints irq_handler_entry/exit, softirq_entry/exit and, where the kernel has them,
 *           call_function_entry/exit, call_function_single_entry/exit. `received` is attached to net:netif_receive_skb by user space, for a second at a time, only while
 *           receiving takes a CPU much time: it counts packets by device.
 * Read by   probes/host/interrupts.py, each second: `cpus`, `ranks`, and `devices` after such a second.
 * Filled by user space: the keys of `ranks`, and `ksoftirqd` in `cpus`.
 * Cost      an entry one array row and the clock; an exit that too, and one hash look-up where a process has the
 *           CPU. See docs/probes/interrupts.md.
 *
 * A hardware interrupt may come in the middle of a softirq, and its time is taken off the softirq's. Neither nests
 * in its own kind. No interrupt moves to another CPU, so what is in progress stands in the CPU's own row.
 *
 * Compile-time: HAVE_CALL, HAVE_RECEIVE (the kernel has these tracepoints).
 */
#include <uapi/linux/ptrace.h>

#define VECTORS 16 /* a power of two: NR_SOFTIRQS is 10, include/linux/interrupt.h */
#define NUMBERS 64 /* interrupt numbers remembered per CPU */
#define OF_RANK 8  /* and per CPU of a rank */
#define TRIES 4
#define CALL 0xfffffffe /* stands for a call from another CPU, an interrupt without a number */
#define DEVICES 8

struct number {
  u32 taken; /* interrupt number + 1; 0: the row is free */
  u32 count;
  u64 ns;
};

struct softirq {
  u64 ns;
  u64 count;
};

struct cpu {
  u64 hard_at; /* in progress since; 0: none is, or its beginning was not seen */
  u64 soft_at;
  u64 hard_in_soft; /* hardware interrupts during the softirq in progress */
  u64 unplaced_ns;  /* of interrupts that found no row */
  u32 unplaced;
  u32 ksoftirqd; /* its thread id on this CPU */
  struct softirq soft[2 * VECTORS]; /* in whatever was interrupted, then in ksoftirqd */
  struct number hard[NUMBERS];
};

struct rank {
  u64 unplaced_ns;
  u64 soft[VECTORS];
  struct number hard[OF_RANK];
};

BPF_PERCPU_ARRAY(cpus, struct cpu, 1);
BPF_TABLE("percpu_hash", u32, struct rank, ranks, 64);

static __always_inline struct cpu *this_cpu(void) {
  int zero = 0;
  return cpus.lookup(&zero);
}

static __always_inline struct rank *interrupted_rank(u64 id) {
  u32 tgid = id >> 32;
  return tgid ? ranks.lookup(&tgid) : 0; /* the idle CPU's is 0 */
}

static __always_inline int hard_begins(void) {
  struct cpu *here = this_cpu();
  if (here)
    here->hard_at = bpf_ktime_get_ns();
  return 0;
}

static __always_inline int hard_ends(u32 number) {
  struct cpu *here = this_cpu();
  if (!here || !here->hard_at)
    return 0;
  u64 ns = bpf_ktime_get_ns() - here->hard_at;
  here->hard_at = 0;
  if (here->soft_at)
    here->hard_in_soft += ns;
  bool placed = false;
#pragma unroll
  for (u32 i = 0; i < TRIES; i++) {
    struct number *row = &here->hard[(number + i) & (NUMBERS - 1)];
    if (!placed && (!row->taken || row->taken == number + 1)) {
      row->taken = number + 1;
      row->count++;
      row->ns += ns;
      placed = true;
    }
  }
  if (!placed) {
    here->unplaced_ns += ns;
    here->unplaced++;
  }
  struct rank *rank = interrupted_rank(bpf_get_current_pid_tgid());
  if (!rank)
    return 0;
#pragma unroll
  for (u32 i = 0; i < TRIES; i++) {
    struct number *row = &rank->hard[(number + i) & (OF_RANK - 1)];
    if (!row->taken || row->taken == number + 1) {
      row->taken = number + 1;
      row->count++;
      row->ns += ns;
      return 0;
    }
  }
  rank->unplaced_ns += ns;
  return 0;
}

/* args: int irq, struct irqaction *action (exit: int ret too) */
RAW_TRACEPOINT_PROBE(irq_handler_entry) { return hard_begins(); }
RAW_TRACEPOINT_PROBE(irq_handler_exit) { return hard_ends((u32)ctx->args[0]); }

#ifdef HAVE_CALL
/* args: int vector */
RAW_TRACEPOINT_PROBE(call_function_entry) { return hard_begins(); }
RAW_TRACEPOINT_PROBE(call_function_exit) { return hard_ends(CALL); }
RAW_TRACEPOINT_PROBE(call_function_single_entry) { return hard_begins(); }
RAW_TRACEPOINT_PROBE(call_function_single_exit) { return hard_ends(CALL); }
#endif

/* args: unsigned int vec_nr */
RAW_TRACEPOINT_PROBE(softirq_entry) {
  struct cpu *here = this_cpu();
  if (!here)
    return 0;
  here->hard_in_soft = 0;
  here->soft_at = bpf_ktime_get_ns();
  return 0;
}

RAW_TRACEPOINT_PROBE(softirq_exit) {
  u32 vector = (u32)ctx->args[0] & (VECTORS - 1);
  struct cpu *here = this_cpu();
  if (!here || !here->soft_at)
    return 0;
  u64 ns = bpf_ktime_get_ns() - here->soft_at - here->hard_in_soft;
  here->soft_at = 0;
  u64 id = bpf_get_current_pid_tgid();
  u32 tid = (u32)id;
  if (tid && tid == here->ksoftirqd) {
    here->soft[VECTORS + vector].ns += ns;
    here->soft[VECTORS + vector].count++;
    return 0;
  }
  here->soft[vector].ns += ns;
  here->soft[vector].count++;
  struct rank *rank = interrupted_rank(id);
  if (rank)
    rank->soft[vector] += ns;
  return 0;
}

#ifdef HAVE_RECEIVE
struct device {
  u64 name[2]; /* IFNAMSIZ is 16; compared as numbers */
  u64 packets;
};

struct devices {
  u64 unplaced; /* packets from devices that found no row */
  struct device rows[DEVICES];
};

BPF_PERCPU_ARRAY(devices, struct devices, 1);

int received(struct tracepoint__net__netif_receive_skb *args) {
  int zero = 0;
  struct devices *here = devices.lookup(&zero);
  if (!here)
    return 1; /* 0 would keep the event from perf's users */
  u64 name[2] = {};
  TP_DATA_LOC_READ_STR(&name, name, sizeof(name));
#pragma unroll
  for (u32 i = 0; i < DEVICES; i++) {
    struct device *row = &here->rows[i];
    if (!row->packets) {
      row->name[0] = name[0];
      row->name[1] = name[1];
    }
    if (row->name[0] == name[0] && row->name[1] == name[1]) {
      row->packets++;
      return 1;
    }
  }
  here->unplaced++;
  return 1;
}
#endif

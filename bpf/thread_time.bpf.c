/* thread_time: where a watched thread's time goes: on a CPU, runnable, blocked, and by what and until woken by whom;
 * interrupts; and who had the CPU while it was runnable.
 *
 * Attaches  raw tracepoints sched_switch, sched_waking, sched_migrate_task, sched_process_exit,
 *           irq_handler_entry/exit, softirq_entry/exit, local_timer_entry/exit (where the kernel has it).
 *           Only tracepoint arguments are used; task_struct pointers serve as names of threads and are
 *           never followed, so headers of another kernel do no harm.
 * Read by   probes/host/thread_time.py, each second: `threads` (heartbeat), `occupants`, `wakes`; `unclassified`, the
 *           kernel stacks that it has not seen (the stack itself is in `stacks`), and `late`, the time blocked in those.
 * Filled by other probes, which add a thread to `threads` when they see it (bpf/gloo.bpf.c); and from
 *           `wanted`, where user space names threads that run no probe: they are added when they next switch.
 *           `companions` (process -> its communication threads) is user space's, for the others' cuts, and so is
 *           `control`: flags that cost no look-up of their own, and switch off who had the CPU, and why and who woke.
 *           `reasons`: stack -> what a thread waits for that sleeps in it; `calls`: system call -> the same, where the call
 *           alone says it.
 * Cost      per switch of an unwatched thread two hash look-ups and some array rows; a kernel stack for each block of a
 *           thread of which it is asked why it blocks, where the system call does not say it; see docs/probes.
 *
 * Compile-time: CPUS (possible CPUs), HAVE_PREV_STATE (sched_switch passes prev_state: Linux >= 5.18), and with it
 * SYSCALL_NUMBER (where a system call's number stands in struct pt_regs, which is ABI).
 */
#include "thread_time.h"
#include "thread_time_rows.h"

#define LOG 64 /* stays remembered per CPU; a wait across more of them leaves an uncredited rest */
#define LOOK_BACK 4
#define STACKS 8192
#define SPAN_NS 2000000ULL /* stays of one process within this are one: threads that hand over to each other */

BPF_TABLE_PUBLIC("hash", u64, struct thread, threads_LOAD, MAX_THREADS);
BPF_TABLE_PUBLIC("hash", u32, struct companions, companions_LOAD, 1024);
BPF_TABLE_PUBLIC("array", u32, struct cpu, cpus_LOAD, CPUS);
BPF_ARRAY(stays, struct stay, CPUS *LOG);
BPF_TABLE("lru_hash", struct occupant_key, struct occupant, occupants, 2048);
BPF_HASH(wanted, u32, u32, 1024); /* tid -> role */
BPF_TABLE_PUBLIC("array", u32, struct control, control_LOAD, 1);
BPF_TABLE("stacktrace", int, struct stack, stacks, STACKS);
BPF_HASH(reasons, s32, u32, STACKS);
BPF_HASH(unclassified, s32, u32, 1024);
BPF_ARRAY(calls, u32, 512);
BPF_HASH(late, struct late_key, u64, 1024);
BPF_TABLE("lru_hash", struct wake_key, struct wake, wakes, 4096);

/* Credit [from, to] on `cpu` to those who had it. */
static __always_inline void credit(u32 tid, u32 cpu, u64 from, u64 to) {
  struct cpu *log = cpus_LOAD.lookup(&cpu);
  if (!log || cpu >= CPUS)
    return;
  u32 head = log->head;
  for (u32 i = 1; i <= LOG; i++) {
    u32 slot = cpu * LOG + ((head - i) & (LOG - 1));
    struct stay *stay = stays.lookup((int *)&slot);
    if (!stay)
      return;
    u64 start = stay->start, end = stay->end, ran = stay->ran;
    if (end <= from) {
      if (start + SPAN_NS <= from) /* and so are all that began before it */
        return;
      continue;
    }
    if (start < from || end > to) { /* in part: as if it had run evenly */
      u64 whole = end - start;
      u64 part = (end < to ? end : to) - (start > from ? start : from);
      if (start >= to || !whole)
        continue;
      ran = whole == ran ? part : ran * part / whole;
    }
    struct occupant_key key = {.tid = tid, .tgid = stay->tgid};
    struct occupant *sum = occupants.lookup(&key);
    u64 last = end < to ? end : to;
    if (sum) {
      __sync_fetch_and_add(&sum->ns, ran);
      if (last > sum->last) { /* a pid used again goes by the name of whoever had the CPU last */
        sum->last = last;
        sum->cgroup = stay->cgroup;
        __builtin_memcpy(sum->comm, stay->comm, sizeof(sum->comm));
      }
    } else {
      struct occupant first = {.ns = ran, .last = last, .cgroup = stay->cgroup};
      __builtin_memcpy(first.comm, stay->comm, sizeof(first.comm));
      occupants.update(&key, &first);
    }
  }
}

/* Write down that the current process, which leaves `cpu`, had it since the last switch. */
static __always_inline void remember(struct cpu *log, u32 cpu, u32 tgid, u64 now) {
  u64 since = log->switched;
  log->switched = now;
  if (!since || now <= since)
    return;
  for (u32 i = 1; i <= LOOK_BACK; i++) {
    u32 slot = cpu * LOG + ((log->head - i) & (LOG - 1));
    struct stay *stay = stays.lookup((int *)&slot);
    if (stay && stay->tgid == tgid && now - stay->start <= SPAN_NS) {
      stay->ran += now - since;
      stay->end = now;
      return;
    }
  }
  u32 slot = cpu * LOG + (log->head & (LOG - 1));
  struct stay *stay = stays.lookup((int *)&slot);
  if (!stay)
    return;
  stay->start = since;
  stay->end = now;
  stay->ran = now - since;
  stay->tgid = tgid;
  if (tgid) { /* the idle task needs no name */
    stay->cgroup = bpf_get_current_cgroup_id();
    bpf_get_current_comm(&stay->comm, sizeof(stay->comm));
  }
  log->head++;
}

/* Of a stack that user space has not looked at, it is told. */
static __always_inline u32 reason_of(s32 stack) {
  if (stack < 0)
    return NO_STACK - stack;
  u32 *known = reasons.lookup(&stack);
  if (known)
    return *known;
  u32 seen = 1;
  unclassified.update(&stack, &seen);
  return UNKNOWN;
}

/* Where the current thread is about to block: its kernel stack, or, for a fiftieth of its cost, the reason that its
 * system call is alone. That holds for interruptible sleep only: else it may be a page that the call touched, a lock
 * of the kernel's, or a signal that stops it. NO_STACK when there is no room for the stack. */
static __always_inline s32 stack_of(void *ctx, u32 state) {
#ifdef SYSCALL_NUMBER
  if ((state & STATES) == INTERRUPTIBLE) {
    u32 call = 0;
    u64 regs = (u64)bpf_task_pt_regs(bpf_get_current_task_btf());
    bpf_probe_read_kernel(&call, sizeof(call), (void *)(regs + SYSCALL_NUMBER));
    u32 *reason = calls.lookup((int *)&call);
    if (reason && *reason)
      return NO_STACK - *reason;
  }
#endif
  s32 stack = stacks.get_stackid(ctx, BPF_F_FAST_STACK_CMP);
  if (stack < 0) /* its place is another one's: without its first frame it has another place */
    stack = stacks.get_stackid(ctx, BPF_F_FAST_STACK_CMP | 1);
  return stack < 0 ? NO_STACK : stack;
}

static __always_inline void switched_out(volatile struct thread *t, u64 now, u32 cpu, bool blocked,
                                         u32 block_state, u64 interrupted, s32 stack) {
  u32 reason = reason_of(stack);
  t->seq++;
  t->running += now - t->at;
  t->interrupted += interrupted;
  t->at = now;
  t->cpu = cpu;
  t->queued_before = 0;
  t->queued_at = now;
  t->block_state = block_state;
  t->stack = stack;
  t->reason = reason;
  t->state = blocked ? BLOCKED : RUNNABLE; /* last: sched_waking on another CPU goes by it */
  t->seq++;
}

/* Returns how long it slept. */
static __always_inline u64 end_block(volatile struct thread *t, u64 now) {
  u64 slept = now > t->at ? now - t->at : 0;
  s32 stack = t->stack;
  u32 reason = t->reason;
  if (reason == UNKNOWN && stack >= 0) {
    reason = reason_of(stack); /* user space has looked at it meanwhile */
    if (reason == UNKNOWN) {
      struct late_key key = {.tid = t->tid, .stack = stack};
      u64 *sum = late.lookup(&key);
      if (sum)
        __sync_fetch_and_add(sum, slept);
      else
        late.update(&key, &slept);
    }
  }
  t->blocked += slept;
  t->blocked_by[reason & (REASONS - 1)] += slept;
  if (t->block_state & UNINTERRUPTIBLE)
    t->uninterruptible += slept;
  t->at += slept;
  return slept;
}

/* The current thread, or an interrupt on its CPU, has ended the sleep of `t`. */
static __always_inline void woke(volatile struct thread *t, u64 slept) {
  u32 cpu = bpf_get_smp_processor_id();
  u64 id = bpf_get_current_pid_tgid();
  struct cpu *here = cpus_LOAD.lookup(&cpu);
  if (!here || here->depth) /* current is whoever was interrupted */
    id = 0;
  struct wake_key key = {.tid = t->tid, .stack = t->stack, .tgid = id >> 32, .waker = (u32)id};
  struct wake *sum = wakes.lookup(&key);
  if (sum) {
    __sync_fetch_and_add(&sum->slept, slept);
    return;
  }
  struct wake first = {.slept = slept};
  if (id)
    bpf_get_current_comm(&first.comm, sizeof(first.comm));
  wakes.update(&key, &first);
}

static __always_inline void switched_in(volatile struct thread *t, u64 now, u32 cpu, bool occupants_wanted) {
  u64 from = 0, middle = 0;
  u32 before = 0;
  t->seq++;
#ifdef HAVE_PREV_STATE
  bool slept = t->state == BLOCKED && !t->woken;
#else
  bool slept = false; /* no waking came: it had been preempted */
#endif
  if (slept) {
    end_block(t, now);
  } else {
    from = t->at;
    t->runnable += now > from ? now - from : 0;
    /* a waking seen before its switch-out: runnable all along, on the CPU that it left */
    middle = t->queued_at;
    before = t->queued_before ? t->cpu_before : cpu;
  }
  t->at = now > t->at ? now : t->at;
  t->woken = 0;
  t->state = RUNNING;
  t->cpu = cpu;
  t->seq++;
  if (from && occupants_wanted) {
    u32 tid = t->tid;
    if (before != cpu && middle > from) {
      credit(tid, before, from, middle);
      from = middle;
    }
    credit(tid, cpu, from, now);
  }
}

/* Watch the thread that is leaving the CPU if user space asked for it. */
static __always_inline void watch_if_wanted(void *ctx, u64 task, u64 id, u64 now, u32 cpu, bool blocked,
                                             u32 block_state, u32 reasons_wanted) {
  u32 tid = (u32)id;
  u32 *role = wanted.lookup(&tid);
  if (!role)
    return;
  s32 stack = blocked && reasons_wanted >> (*role & 31) & 1 ? stack_of(ctx, block_state) : NO_STACK;
  struct thread fresh = {.since = now,
                         .at = now,
                         .state = blocked ? BLOCKED : RUNNABLE,
                         .block_state = block_state,
                         .queued_at = now,
                         .cpu = cpu,
                         .tid = tid,
                         .tgid = id >> 32,
                         .role = *role,
                         .stack = stack,
                         .reason = reason_of(stack)};
  threads_LOAD.update(&task, &fresh);
  wanted.delete(&tid);
}

/* args: bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state */
RAW_TRACEPOINT_PROBE(sched_switch) {
  u64 now = bpf_ktime_get_ns();
  u32 cpu = bpf_get_smp_processor_id();
  u64 prev = ctx->args[1], next = ctx->args[2];
  u64 id = bpf_get_current_pid_tgid(); /* the tracepoint fires before the switch: current is prev */

  int zero = 0;
  struct control *asked = control_LOAD.lookup(&zero);
  bool occupants_wanted = asked && !asked->no_occupants;
  u64 interrupted = 0;
  struct cpu *log = cpus_LOAD.lookup(&cpu);
  if (log && cpu < CPUS) {
    if (occupants_wanted)
      remember(log, cpu, id >> 32, now);
    else
      log->switched = 0; /* nothing is credited for the time in between when it is wanted again */
    interrupted = log->interrupted;
    log->interrupted = 0;
    /* No interrupt spans a switch: what was counted while only its entry was attached must not stay. */
    log->depth = 0;
  }

  bool preempted = ctx->args[0];
#ifdef HAVE_PREV_STATE
  u32 state = (u32)ctx->args[3];
  bool blocked = state != 0 && !preempted;
#else
  /* Not told: count it as blocked until a waking comes; a switch-in without one was preemption. */
  u32 state = 0;
  bool blocked = !preempted;
#endif
  struct thread *out = threads_LOAD.lookup(&prev);
  if (out) {
    if (out->tid != (u32)id) { /* a task_struct used again: its thread has gone */
      threads_LOAD.delete(&prev);
    } else {
      bool why = blocked && asked && asked->reasons >> (out->role & 31) & 1;
      s32 stack = why ? stack_of(ctx, state) : NO_STACK;
      switched_out(out, now, cpu, blocked, state, interrupted, stack);
    }
  }
  if (asked && asked->wanted && !out)
    watch_if_wanted(ctx, prev, id, now, cpu, blocked, state, asked->reasons);
  struct thread *in = threads_LOAD.lookup(&next);
  if (log && cpu < CPUS)
    log->watched = in != 0;
  if (in) /* whom a helper waited for is not sent: it would only take the room of those for whom ranks waited */
    switched_in(in, now, cpu, occupants_wanted && in->role != HELPER);
  return 0;
}

/* args: struct task_struct *p */
RAW_TRACEPOINT_PROBE(sched_waking) {
  u64 task = ctx->args[0];
  volatile struct thread *t = threads_LOAD.lookup(&task);
  if (!t)
    return 0;
  u64 now = bpf_ktime_get_ns();
  if (t->state == BLOCKED) {
    t->seq++;
    u64 slept = end_block(t, now);
    t->queued_at = t->at;
    t->woken = 0;
    t->state = RUNNABLE;
    t->seq++;
    int zero = 0;
    struct control *asked = control_LOAD.lookup(&zero);
    if (asked && asked->reasons >> (t->role & 31) & 1)
      woke(t, slept);
  } else if (t->state == RUNNING) {
    t->woken = now;
  }
  return 0;
}

/* args: struct task_struct *p, int dest_cpu */
RAW_TRACEPOINT_PROBE(sched_migrate_task) {
  u64 task = ctx->args[0];
  volatile struct thread *t = threads_LOAD.lookup(&task);
  if (!t || t->state == RUNNING)
    return 0;
  u32 to = (u32)ctx->args[1];
  if (to == t->cpu)
    return 0;
  u64 now = bpf_ktime_get_ns();
  t->cpu_before = t->cpu;
  t->queued_before = t->queued_at;
  t->cpu = to;
  t->queued_at = now;
  return 0;
}

/* args: struct task_struct *p */
RAW_TRACEPOINT_PROBE(sched_process_exit) {
  u64 task = ctx->args[0]; /* the current thread; it switches out once more, and must not be added then */
  u32 tid = (u32)bpf_get_current_pid_tgid();
  wanted.delete(&tid);
  threads_LOAD.delete(&task);
  return 0;
}

/* The depth is counted on every CPU, since who wakes a watched thread may be an interrupt of any; the time only where
 * a watched thread has the CPU. */
static __always_inline int interrupt_begins(void) {
  u32 cpu = bpf_get_smp_processor_id();
  struct cpu *here = cpus_LOAD.lookup(&cpu);
  if (here && here->depth++ == 0)
    here->interrupted_at = here->watched ? bpf_ktime_get_ns() : 0;
  return 0;
}

static __always_inline int interrupt_ends(void) {
  u32 cpu = bpf_get_smp_processor_id();
  struct cpu *here = cpus_LOAD.lookup(&cpu);
  if (!here || here->depth == 0) /* attached in the middle of one */
    return 0;
  if (--here->depth || !here->interrupted_at)
    return 0;
  here->interrupted += bpf_ktime_get_ns() - here->interrupted_at;
  return 0;
}

RAW_TRACEPOINT_PROBE(irq_handler_entry) { return interrupt_begins(); }
RAW_TRACEPOINT_PROBE(irq_handler_exit) { return interrupt_ends(); }
RAW_TRACEPOINT_PROBE(softirq_entry) { return interrupt_begins(); }
RAW_TRACEPOINT_PROBE(softirq_exit) { return interrupt_ends(); }
#ifdef HAVE_LOCAL_TIMER
RAW_TRACEPOINT_PROBE(local_timer_entry) { return interrupt_begins(); }
RAW_TRACEPOINT_PROBE(local_timer_exit) { return interrupt_ends(); }
#endif

/* State of a watched thread, shared by the probes that cut its time. Included by every program that
 * reads or writes the map `threads`. Times are CLOCK_MONOTONIC nanoseconds (bpf_ktime_get_ns). */
#ifndef SYSOM_THREAD_TIME_H
#define SYSOM_THREAD_TIME_H

/* Maps that several programs use have a name of their own with every load: probes/bpf.py puts its number in the
 * place of LOAD, and says why. */

enum thread_state { RUNNING = 1, RUNNABLE = 2, BLOCKED = 3 };
enum thread_role { DRIVING = 0, COMMUNICATION = 1, HELPER = 2 };

#define MAX_THREADS 1024 /* of all ranks of a node; a small table stays in the cache */
#define MAX_COMPANIONS 16
#define REASONS 16 /* what a thread waits for, as probes/host/reasons.py numbers them; a power of two */
#define UNKNOWN 0  /* the reason of a stack that user space has not looked at */
#define NO_STACK (-1)
#define INTERRUPTIBLE 1
#define UNINTERRUPTIBLE 2
#define STATES 15 /* TASK_INTERRUPTIBLE and so on, include/linux/sched.h: part of the tracepoint's ABI; and their mask */

/* running + runnable + blocked == at - since, and blocked == the sum of blocked_by, at every moment at which seq is
 * even. */
struct thread {
  u64 seq; /* odd while the thread's own CPU changes the entry */
  u64 since;
  u64 at; /* last change of state */
  u64 running;
  u64 runnable;
  u64 blocked;
  u64 uninterruptible; /* part of blocked */
  u64 interrupted;     /* part of running */
  u64 woken;           /* a waking that came before the switch-out that it ends; else 0 */
  u64 queued_at;       /* runnable on `cpu` since */
  u64 queued_before;   /* and on `cpu_before` since, until queued_at; else 0 */
  u64 cut_at;          /* a driving thread's last cut at an arrival */
  u32 state;
  u32 block_state;
  u32 cpu;
  u32 cpu_before;
  u32 tid;
  u32 tgid;
  u32 role;
  s32 stack;  /* of the block in progress or the last one: an id of the map `stacks`; below 0: -1 - reason */
  u32 reason; /* of that block, as far as it was known when it began */
  u32 pad;
  u64 blocked_by[REASONS]; /* parts of blocked */
};

/* What happens on one CPU; a cache line each, since CPUs write their own all the time. */
struct cpu {
  u64 switched; /* last switch on this CPU */
  u32 head;     /* of its part of `stays` */
  u32 depth;    /* of interrupts in progress */
  u64 interrupted_at;
  u64 interrupted; /* since the last switch: the thread that has the CPU gets it when it leaves */
  u32 watched;     /* a watched thread has this CPU: else interrupts are not looked at */
  u32 pad0;
  u64 pad[3];
};

/* One row of a thread's time as user space reads it, the time in progress included. */
struct cut {
  u64 since;
  u64 at;
  u64 running;
  u64 runnable;
  u64 blocked;
  u64 uninterruptible;
  u64 interrupted;
  u32 tid;
  u32 role;
  u64 blocked_by[REASONS];
};

/* What user space asks of the programs; row 0 of the map `control`. */
struct control {
  u32 wanted;       /* above 0 while the map `wanted` holds anything */
  u32 no_occupants; /* who had the CPU is not written down */
  u32 paused;       /* the scheduler's tracepoints are detached: no thread's state is known */
  u32 reasons;      /* threads of which role are asked why they block, and who woke them: 1 << role */
};

/* The communication threads of a process, by their keys in `threads`; user space keeps the list. */
struct companions {
  u64 task[MAX_COMPANIONS];
};

/* Read a thread's entry as it stands, from any CPU. Fails (returns 0) when the entry kept changing. */
static __always_inline int cut_now(volatile struct thread *t, struct cut *out) {
  for (int i = 0; i < 4; i++) {
    u64 seq = t->seq;
    u64 at = t->at;
    u32 state = t->state, reason = t->reason;
    u64 now = bpf_ktime_get_ns();
    if (now < at) /* another CPU's clock may be some nanoseconds ahead */
      now = at;
    u64 running = state == RUNNING ? now - at : 0;
    u64 runnable = state == RUNNABLE ? now - at : 0;
    u64 blocked = now - at - running - runnable;
    out->since = t->since;
    out->at = now;
    out->running = t->running + running;
    out->runnable = t->runnable + runnable;
    out->blocked = t->blocked + blocked;
    out->uninterruptible = t->uninterruptible;
    out->interrupted = t->interrupted;
    out->tid = t->tid;
    out->role = t->role;
#pragma unroll
    for (u32 r = 0; r < REASONS; r++) /* by no index of a variable: old verifiers take none on the stack */
      out->blocked_by[r] = t->blocked_by[r] + (r == reason ? blocked : 0);
    if (!(seq & 1) && seq == t->seq)
      return 1;
  }
  return 0;
}

#endif

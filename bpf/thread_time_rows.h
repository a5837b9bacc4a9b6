/* Keys and rows of the maps that thread_time keeps for itself and for user space: who had the CPU, in which kernel
 * stacks threads block, and who wakes them. Times are CLOCK_MONOTONIC nanoseconds. */
#ifndef SYSOM_THREAD_TIME_ROWS_H
#define SYSOM_THREAD_TIME_ROWS_H

#define DEPTH 48 /* frames from the innermost on: beyond, what led there is not seen */

/* A process had a CPU for `ran` between `start` and `end`: one stay, or several short ones with others between. */
struct stay {
  u64 start;
  u64 end;
  u64 ran;
  u64 cgroup;
  u32 tgid;
  u32 pad;
  char comm[16];
};

struct occupant_key {
  u32 tid;  /* the thread that waited */
  u32 tgid; /* the process that ran */
};

struct occupant {
  u64 ns;
  u64 last; /* it had the CPU until then: a process that started later is another one with its pid */
  u64 cgroup;
  char comm[16];
};

struct stack {
  u64 ip[DEPTH];
};

struct late_key {
  u32 tid;
  s32 stack;
};

struct wake_key {
  u32 tid; /* the thread that slept, … */
  s32 stack; /* … in this stack */
  u32 tgid;  /* who woke it; 0, 0: an interrupt */
  u32 waker;
};

struct wake {
  u64 slept;
  char comm[16]; /* of the waker */
};

#endif

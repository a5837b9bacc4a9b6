/* gloo: every collective of PyTorch's gloo backend (c10d::ProcessGroupGloo in libtorch_cpu.so): arrival,
 * end, communicator, sequence number, op, size; and a cut of the rank's thread times at both.
 *
 * Attaches  entry uprobes, per rank process, found by symbol pattern (probes/nccl/gloo.py):
 *             AsyncWork::AsyncWork             runs in the driving thread at enqueue     -> arrival
 *             AsyncWork::finishWorkGloo        runs in gloo's run loop when it has ended -> end
 *             AsyncWork::finishWorkGlooError   the same, when it failed                  -> end, failed
 *             ProcessGroupGloo::getContext     only until a new context's group is known -> identity
 *           No uretprobe anywhere: gloo throws, and an exception cannot pass a uretprobe's trampoline.
 * Read by   probes/nccl/gloo.py: ring buffer `gloo_events`, `lost`, `traps`.
 * Filled by probes/nccl/gloo.py: `detailed`, processes of which a capture is made: their times are cut at every
 *           arrival and end, and each of their communication threads is cut by itself (struct own).
 * Cost      one trap (some microseconds, not seen by the kernel's BPF statistics) per arrival and end.
 *
 * Compile-time: offsets in c10d::Backend and c10::TensorImpl (probes/nccl/layout.py says where from).
 */
#include <uapi/linux/ptrace.h>
#include "thread_time.h"

BPF_TABLE("extern", u64, struct thread, threads_LOAD, MAX_THREADS);
BPF_TABLE("extern", u32, struct companions, companions_LOAD, 1024);
BPF_TABLE("extern", u32, struct cpu, cpus_LOAD, CPUS);
BPF_TABLE("extern", u32, struct control, control_LOAD, 1);

#define MERGE_NS 5000000ULL /* cuts closer than this are merged */
#define UID 64
#define DESC 32
#define TENSORS 8

enum kind { ARRIVAL = 1, END = 2, FAILED = 3, OWN = 4 };

struct group {
  u64 backend;
  u32 rank;
  u32 size;
  u64 uid_length;
  char uid[UID];
  u64 desc_length;
  char desc[DESC];
};

struct event {
  u64 at;
  u64 work;
  u32 kind;
  u32 tgid;
  u32 cuts;
  u32 tid;
  u64 context;
  u64 seq;
  s64 elements; /* of all input tensors; -1 when they could not be read */
  u64 dimensions; /* of the first input tensor, to check the layout: sizes, then elements */
  s64 sizes[5];
  s64 first_elements;
  u32 tensors;
  u32 dtype; /* c10::ScalarType of the first */
  u32 op;
  u32 pad;
  u32 context_rank; /* as gloo::Context has them */
  u32 context_size;
  struct cut cut[2]; /* the driving thread; the sum over the communication threads */
  struct group group; /* uid_length == 0: not asked for or not readable */
};

/* During a capture: each communication thread of a process at one instant. A row of 0 is none. */
struct own {
  u64 at;
  u64 work;
  u32 kind;
  u32 tgid;
  u32 cuts;
  u32 tid;
  struct cut cut[MAX_COMPANIONS];
};

/* A collective that has begun: addresses of works are unique within a process only. */
struct work_key {
  u64 work;
  u64 tgid;
};

struct work {
  u64 driving; /* task of the driving thread, a key of `threads` */
  u32 cut;     /* its arrival was cut: cut its end too */
  u32 pad;
};

BPF_RINGBUF_OUTPUT(gloo_events, 2048); /* pages: 12,000 events, some seconds of a full node whose agent waits */
BPF_TABLE("lru_hash", struct work_key, struct work, works, 16384);
/* By thread, never deleted on exit: the oldest make room. */
BPF_TABLE("lru_hash", u32, struct group, groups, 1024);
BPF_TABLE("hash", u32, u64, detailed, 1024); /* process -> until when (it ends by itself if nobody ends it) */
BPF_ARRAY(lost, u64, 1);
BPF_PERCPU_ARRAY(traps, u64, 1);
/* An entry is made here and copied into `threads` whole: it is too large for the stack, and this program may be
 * preempted, so a scratch place per CPU would be shared. */
BPF_ARRAY(blank, struct thread, 1);
BPF_HASH(newcomers, u32, struct thread, 256);

static __always_inline void count_trap(void) {
  int zero = 0;
  u64 *count = traps.lookup(&zero);
  if (count)
    (*count)++;
}

static __always_inline void count_lost(void) {
  int zero = 0;
  u64 *count = lost.lookup(&zero);
  if (count)
    __sync_fetch_and_add(count, 1);
}

static __always_inline bool in_detail(u32 tgid, u64 now) {
  u64 *until = detailed.lookup(&tgid);
  return until && now < *until;
}

/* The thread's entry, made when it is new; none while thread times are not kept. */
static __always_inline struct thread *watch(u32 role, u64 now) {
  int zero = 0;
  struct control *asked = control_LOAD.lookup(&zero);
  if (!asked || asked->paused)
    return 0;
  u64 task = bpf_get_current_task();
  u64 id = bpf_get_current_pid_tgid();
  struct thread *t = threads_LOAD.lookup(&task);
  if (t && t->tid == (u32)id)
    return t;
  u32 tid = (u32)id;
  struct thread *none = blank.lookup(&zero);
  if (!none)
    return 0;
  newcomers.update(&tid, none);
  struct thread *fresh = newcomers.lookup(&tid);
  if (!fresh)
    return 0;
  fresh->since = now;
  fresh->at = now;
  fresh->state = RUNNING;
  fresh->cpu = bpf_get_smp_processor_id();
  fresh->tid = tid;
  fresh->tgid = id >> 32;
  fresh->role = role;
  fresh->stack = NO_STACK;
  threads_LOAD.update(&task, fresh);
  newcomers.delete(&tid);
  return threads_LOAD.lookup(&task);
}

/* The communication threads of this process together. Fails when one of them cannot be read now. */
static __always_inline int cut_companions(u32 tgid, struct cut *sum) {
  struct companions *list = companions_LOAD.lookup(&tgid);
  if (!list)
    return 0;
  for (int i = 0; i < MAX_COMPANIONS; i++) {
    u64 task = list->task[i];
    struct cut one = {};
    if (!task)
      break;
    struct thread *t = threads_LOAD.lookup(&task);
    if (!t || !cut_now(t, &one))
      return 0;
    if (one.since > sum->since)
      sum->since = one.since;
    sum->at = one.at;
    sum->running += one.running;
    sum->runnable += one.runnable;
    sum->blocked += one.blocked;
    sum->uninterruptible += one.uninterruptible;
    sum->interrupted += one.interrupted;
#pragma unroll
    for (u32 r = 0; r < REASONS; r++)
      sum->blocked_by[r] += one.blocked_by[r];
  }
  sum->role = COMMUNICATION;
  return sum->at != 0;
}

/* Each communication thread of this process by itself. */
static __always_inline void cut_each(u32 tgid, u64 at) {
  struct companions *list = companions_LOAD.lookup(&tgid);
  if (!list)
    return;
  struct own *o = gloo_events.ringbuf_reserve(sizeof(struct own));
  if (!o) {
    count_lost();
    return;
  }
  o->at = at;
  o->work = 0;
  o->kind = OWN;
  o->tgid = tgid;
  o->cuts = MAX_COMPANIONS;
  o->tid = 0;
  for (int i = 0; i < MAX_COMPANIONS; i++) {
    o->cut[i].since = 0;
    u64 task = list->task[i];
    struct thread *t = task ? threads_LOAD.lookup(&task) : 0;
    if (t && !cut_now(t, &o->cut[i]))
      o->cut[i].since = 0;
  }
  gloo_events.ringbuf_submit(o, BPF_RB_NO_WAKEUP);
}

/* Cut the driving thread and the communication threads at one instant, and stamp the event with it. */
static __always_inline void cut_both(struct event *e, struct thread *driving, bool detail) {
  if (!cut_now(driving, &e->cut[0]))
    return;
  u32 cpu = driving->cpu;
  struct cpu *here = driving->state == RUNNING ? cpus_LOAD.lookup(&cpu) : 0;
  if (here) /* since it came to this CPU; a block or preemption adds it to the thread */
    e->cut[0].interrupted += here->interrupted;
  e->at = e->cut[0].at;
  e->cuts = 1;
  if (detail)
    cut_each(e->tgid, e->at);
  else if (cut_companions(e->tgid, &e->cut[1])) {
    e->cut[1].at = e->at; /* some hundred nanoseconds apart */
    e->cuts = 2;
  }
}

static __always_inline struct event *reserve(void) {
  struct event *e = gloo_events.ringbuf_reserve(sizeof(struct event));
  if (!e)
    count_lost();
  return e;
}

/* ProcessGroupGloo::getContext(unsigned): returns an object, so `this` is the second argument. */
int gloo_get_context(struct pt_regs *ctx) {
  u32 tid = (u32)bpf_get_current_pid_tgid();
  struct group g = {};
  u64 chars = 0;
  count_trap();
  g.backend = PT_REGS_PARM2(ctx);
  bpf_probe_read_user(&g.rank, sizeof(g.rank), (void *)(g.backend + BACKEND_RANK));
  bpf_probe_read_user(&g.size, sizeof(g.size), (void *)(g.backend + BACKEND_SIZE));
  bpf_probe_read_user(&chars, sizeof(chars), (void *)(g.backend + BACKEND_UID));
  bpf_probe_read_user(&g.uid_length, sizeof(g.uid_length), (void *)(g.backend + BACKEND_UID + 8));
  bpf_probe_read_user(&g.uid, sizeof(g.uid), (void *)chars);
  bpf_probe_read_user(&chars, sizeof(chars), (void *)(g.backend + BACKEND_DESC));
  bpf_probe_read_user(&g.desc_length, sizeof(g.desc_length), (void *)(g.backend + BACKEND_DESC + 8));
  bpf_probe_read_user(&g.desc, sizeof(g.desc), (void *)chars);
  groups.update(&tid, &g);
  return 0;
}

/* AsyncWork::AsyncWork(this, const shared_ptr<gloo::Context>&, vector<vector<Tensor>>&, OpType, uint64_t seq,
 *                      [milliseconds timeout,] const char *title, const optional<vector<Tensor>> &inputs) */
static __always_inline int arrival(struct pt_regs *ctx, u64 inputs) {
  u64 now = bpf_ktime_get_ns();
  u64 id = bpf_get_current_pid_tgid();
  u32 tid = (u32)id;
  count_trap();
  struct thread *t = watch(DRIVING, now);
  struct work begun = {.driving = bpf_get_current_task()};

  struct event *e = reserve();
  if (!e)
    return 0;
  __builtin_memset(e, 0, sizeof(*e));
  e->at = now;
  e->kind = ARRIVAL;
  e->tgid = id >> 32;
  e->tid = tid;
  e->work = PT_REGS_PARM1(ctx);
  e->op = (u8)PT_REGS_PARM4(ctx);
  e->seq = PT_REGS_PARM5(ctx);
  bpf_probe_read_user(&e->context, sizeof(e->context), (void *)PT_REGS_PARM2(ctx));
  bpf_probe_read_user(&e->context_rank, 8, (void *)e->context); /* gloo::Context begins with rank, size */

  /* Unknown, until read: some tensors, of -1 elements. None at all (a barrier) is known to be no bytes. */
  e->elements = -1;
  e->tensors = 1;
  struct { u64 begin, end, capacity; u64 engaged; } vector = {};
  if (bpf_probe_read_user(&vector, sizeof(vector), (void *)inputs) == 0 && (vector.engaged & 0xff) == 0)
    e->tensors = 0;
  if ((vector.engaged & 0xff) == 1 && vector.end >= vector.begin &&
      vector.end - vector.begin <= TENSORS * 8) {
    u64 impl = 0;
    e->elements = 0;
    e->tensors = (vector.end - vector.begin) / 8;
    for (int i = 0; i < TENSORS; i++) {
      if (vector.begin + i * 8 >= vector.end)
        break;
      s64 elements = -1;
      bpf_probe_read_user(&impl, sizeof(impl), (void *)(vector.begin + i * 8));
      if (bpf_probe_read_user(&elements, sizeof(elements), (void *)(impl + TENSOR_ELEMENTS))) {
        e->elements = -1;
        break;
      }
      e->elements += elements;
      if (i == 0) {
        e->first_elements = elements;
        bpf_probe_read_user(&e->dimensions, 48, (void *)(impl + TENSOR_SIZES)); /* dimensions, sizes[5] */
        bpf_probe_read_user(&e->dtype, 2, (void *)(impl + TENSOR_DTYPE));
      }
    }
  }

  struct group *g = groups.lookup(&tid);
  if (g) {
    e->group = *g;
    groups.delete(&tid);
  }
  bool detail = in_detail(e->tgid, now);
  if (t && (detail || now - t->cut_at >= MERGE_NS)) {
    t->cut_at = now;
    begun.cut = 1;
    cut_both(e, t, detail);
  }
  struct work_key key = {.work = e->work, .tgid = id >> 32};
  gloo_events.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
  works.update(&key, &begun);
  return 0;
}

int gloo_arrival_7(struct pt_regs *ctx) { /* title in r9 */
  u64 inputs = 0;
  bpf_probe_read_user(&inputs, sizeof(inputs), (void *)(PT_REGS_SP(ctx) + 8));
  return arrival(ctx, inputs);
}

int gloo_arrival_8(struct pt_regs *ctx) { /* timeout in r9, title on the stack */
  u64 inputs = 0;
  bpf_probe_read_user(&inputs, sizeof(inputs), (void *)(PT_REGS_SP(ctx) + 16));
  return arrival(ctx, inputs);
}

static __always_inline int end(struct pt_regs *ctx, u32 kind) {
  u64 now = bpf_ktime_get_ns();
  u64 id = bpf_get_current_pid_tgid();
  u64 work = PT_REGS_PARM1(ctx);
  struct work_key key = {.work = work, .tgid = id >> 32};
  count_trap();
  watch(COMMUNICATION, now);
  struct work *begun = works.lookup(&key);

  struct event *e = reserve();
  if (!e) {
    works.delete(&key);
    return 0;
  }
  __builtin_memset(e, 0, sizeof(*e));
  e->at = now;
  e->kind = kind;
  e->tgid = id >> 32;
  e->tid = (u32)id;
  e->work = work;
  if (begun && begun->cut) {
    u64 driving = begun->driving;
    struct thread *d = threads_LOAD.lookup(&driving);
    if (d)
      cut_both(e, d, in_detail(e->tgid, now));
  }
  gloo_events.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
  works.delete(&key);
  return 0;
}

int gloo_end(struct pt_regs *ctx) { return end(ctx, END); }
int gloo_failed(struct pt_regs *ctx) { return end(ctx, FAILED); }

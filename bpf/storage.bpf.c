/*
 * storage: requests to block devices: how many, how large and how long, by device, operation and process.
 *
 * Attaches  raw tracepoints block_rq_issue, block_rq_complete; block_rq_insert and block_rq_requeue where the kernel has
 *           them; and the classic tracepoint block:block_rq_issue, in front of the raw one. User space attaches them, in
 *           this order: the classic one tells what the request is, the raw one its address, which serves as its name
 *           and is never followed.
 * Read by   probes/host/storage.py, each second, which empties `sums`, then looks at what is in flight in `requests`,
 *           where it removes idle entries when there are many, and what nobody will complete.
 * Cost      two hash look-ups at each of insertion, issue and completion at most. The kernel uses the same addresses
 *           again and again, so an entry stays when its request completes: to remove and make it costs 1 µs more. See
 *           docs/probes/storage.md.
 *
 * Completions come in interrupts, and the kernel runs no classic tracepoint's program while it runs another one of the
 * same CPU: such completions would never be seen. Raw ones are kept out by themselves only.
 * Whoever inserts a request into a queue owns it; where it goes to the device directly, whoever issues it.
 *
 * Compile-time: HAVE_INSERT, HAVE_REQUEUE, REQUEST (which argument it is: the second before Linux 5.11).
 */
#include <uapi/linux/ptrace.h>

enum operation { READ_OP = 0, WRITE_OP = 1, FLUSH_OP = 2, DISCARD_OP = 3, NONE = 4 };

/* With neither time it is an idle entry. */
struct request {
  u64 inserted; /* into a queue; 0: it went to the device directly */
  u64 issued;   /* to the device; 0: not yet */
  u32 tgid;
  u32 dev;
  u32 operation;
  u32 bytes;
  u32 left; /* of these: a request may be completed in parts */
  char comm[16];
  u32 pad;
};

/* What is being issued on this CPU: one tracepoint tells it to the other. */
struct described {
  u32 tid; /* by this thread; 0: nothing */
  u32 dev;
  u32 operation;
  u32 bytes;
};

struct whose {
  u32 dev;
  u32 operation;
  u32 tgid;
  u32 pad;
};

struct sum {
  u64 requests;
  u64 bytes;
  u64 ns;        /* from issue to completion */
  u64 queued_ns; /* from insertion to issue */
  u64 max_ns;
  u64 errors;
  char comm[16];
};

BPF_HASH(requests, u64, struct request, 8192);
BPF_PERCPU_ARRAY(description, struct described, 1);
BPF_HASH(sums, struct whose, struct sum, 1024);
BPF_ARRAY(unplaced, u64, 1); /* requests that found no room, were not described, or whose completion was missed */

static __always_inline void lose(void) {
  int zero = 0;
  u64 *count = unplaced.lookup(&zero);
  if (count)
    __sync_fetch_and_add(count, 1);
}

/* include/trace/events/block.h, blk_fill_rwbs: an F in front of a W is a flush that comes before the write, which the
 * kernel sends as a request of its own. */
static __always_inline u32 operation_of(char first, char second) {
  if (first == 'R')
    return READ_OP;
  if (first == 'W' || (first == 'F' && second == 'W'))
    return WRITE_OP;
  if (first == 'F')
    return FLUSH_OP;
  return first == 'D' ? DISCARD_OP : NONE; /* zones, and commands that are no requests for data */
}

/* The entry of a request at its beginning, with the current process as its owner. */
static __always_inline struct request *take(u64 address) {
  struct request *entry = requests.lookup(&address);
  if (!entry) {
    struct request fresh = {};
    requests.update(&address, &fresh);
    entry = requests.lookup(&address);
  }
  if (!entry) {
    lose();
    return 0;
  }
  if (entry->issued) /* its completion was missed */
    lose();
  entry->inserted = entry->issued = 0;
  entry->tgid = bpf_get_current_pid_tgid() >> 32;
  bpf_get_current_comm(&entry->comm, sizeof(entry->comm));
  return entry;
}

int describe(struct tracepoint__block__block_rq_issue *args) {
  int zero = 0;
  struct described *here = description.lookup(&zero);
  if (!here)
    return 1; /* 0 would keep the event from perf's users */
  here->tid = (u32)bpf_get_current_pid_tgid();
  here->dev = args->dev;
  here->operation = operation_of(args->rwbs[0], args->rwbs[1]);
  here->bytes = args->bytes;
  return 1;
}

int issued(struct bpf_raw_tracepoint_args *ctx) {
  u64 address = ctx->args[REQUEST], id = bpf_get_current_pid_tgid();
  int zero = 0;
  struct described *here = description.lookup(&zero);
  if (!here)
    return 0;
  u32 by = here->tid;
  here->tid = 0;
  struct request *entry = requests.lookup(&address);
  if (by != (u32)id || !here->dev || here->operation == NONE) {
    if (by != (u32)id)
      lose();
    if (entry)
      entry->inserted = entry->issued = 0;
    return 0;
  }
  if (!entry || !entry->inserted || entry->issued)
    entry = take(address);
  if (!entry)
    return 0;
  entry->dev = here->dev;
  entry->operation = here->operation;
  entry->bytes = entry->left = here->bytes;
  entry->issued = bpf_ktime_get_ns();
  return 0;
}

#ifdef HAVE_INSERT
int inserted(struct bpf_raw_tracepoint_args *ctx) {
  struct request *entry = take(ctx->args[REQUEST]);
  if (entry)
    entry->inserted = bpf_ktime_get_ns();
  return 0;
}
#endif

#ifdef HAVE_REQUEUE
int requeued(struct bpf_raw_tracepoint_args *ctx) {
  u64 address = ctx->args[REQUEST];
  struct request *known = requests.lookup(&address);
  if (known && known->issued) { /* the device did not take it */
    if (!known->inserted)
      known->inserted = known->issued;
    known->issued = 0;
  }
  return 0;
}
#endif

/* args: struct request *rq, blk_status_t error, unsigned int nr_bytes */
int completed(struct bpf_raw_tracepoint_args *ctx) {
  u64 address = ctx->args[0];
  struct request *known = requests.lookup(&address);
  if (!known || !known->issued) /* issued before the probe came; or never: it only asked for a flush */
    return 0;
  u32 bytes = (u32)ctx->args[2];
  if (bytes < known->left) {
    known->left -= bytes;
    return 0;
  }
  u64 ns = bpf_ktime_get_ns() - known->issued;
  struct whose whose = {.dev = known->dev, .operation = known->operation, .tgid = known->tgid};
  struct sum *sum = sums.lookup(&whose);
  if (!sum) {
    struct sum first = {};
    __builtin_memcpy(first.comm, known->comm, sizeof(first.comm));
    sums.insert(&whose, &first);
    sum = sums.lookup(&whose);
  }
  if (sum) {
    __sync_fetch_and_add(&sum->requests, 1);
    __sync_fetch_and_add(&sum->bytes, known->bytes);
    __sync_fetch_and_add(&sum->ns, ns);
    if (known->inserted)
      __sync_fetch_and_add(&sum->queued_ns, known->issued - known->inserted);
    if ((u32)ctx->args[1])
      __sync_fetch_and_add(&sum->errors, 1);
    if (ns > sum->max_ns)
      sum->max_ns = ns;
  } else {
    lose();
  }
  known->inserted = known->issued = 0;
  return 0;
}

/*
 * memory: time that threads spend in finding memory: direct reclaim, reclaim for a control group's limit, reclaim of
 * one NUMA node, compaction; wakings of kswapd; processes that are killed for want of memory.
 *
 * Attaches  tracepoints vmscan:mm_vmscan_direct_reclaim_begin/end, mm_vmscan_memcg_reclaim_begin/end,
 *           mm_vmscan_node_reclaim_begin/end, mm_vmscan_kswapd_wake, compaction:mm_compaction_begin/end,
 *           oom:mark_victim: those that the kernel has.
 * Read by   probes/host/memory.py, each second, which empties `spent`, `kswapd` and `victims`, then looks at what is in
 *           progress in `begun`.
 * Cost      nothing while there is memory enough: they fire only where a thread has to look for it, which takes tens
 *           of microseconds at least. See docs/probes/memory.md.
 *
 * Compile-time: HAVE_DIRECT, HAVE_MEMCG, HAVE_NODE, HAVE_COMPACTION, HAVE_KSWAPD, HAVE_VICTIM, and HAVE_VICTIM_MEMORY
 * where the last tells the victim's name and memory.
 */
#include <uapi/linux/ptrace.h>

enum kind { DIRECT = 0, MEMCG = 1, NODE = 2, COMPACTION = 3 };

struct work {
  u32 tid;
  u32 kind;
};

struct begun {
  u64 at;
  u32 tgid;
  char comm[16];
  u32 pad;
};

struct who {
  u32 tgid;
  u32 tid;
  u32 kind;
  u32 pad;
};

struct spent {
  u64 ns;
  u64 times;
  u64 pages; /* found */
  char comm[16];
};

struct victim {
  u32 tid;
  u32 asker; /* whose want of memory it was */
  u64 anonymous_kb;
  char comm[16];
  char asker_comm[16];
};

BPF_HASH(begun, struct work, struct begun, 1024);
BPF_HASH(spent, struct who, struct spent, 1024);
BPF_HASH(kswapd, u32, u64, 256); /* NUMA node -> wakings */
BPF_HASH(victims, u64, struct victim, 64);
BPF_ARRAY(unplaced, u64, 1); /* what found no room above */

static __always_inline void lose(void) {
  int zero = 0;
  u64 *count = unplaced.lookup(&zero);
  if (count)
    __sync_fetch_and_add(count, 1);
}

/* Programs end with 1: 0 would keep the event from perf's users. */
static __always_inline int begins(u32 kind) {
  u64 id = bpf_get_current_pid_tgid();
  struct work key = {.tid = (u32)id, .kind = kind};
  struct begun now = {.at = bpf_ktime_get_ns(), .tgid = id >> 32};
  bpf_get_current_comm(&now.comm, sizeof(now.comm));
  if (begun.update(&key, &now))
    lose();
  return 1;
}

static __always_inline int ends(u32 kind, u64 pages) {
  u64 id = bpf_get_current_pid_tgid();
  struct work key = {.tid = (u32)id, .kind = kind};
  struct begun *since = begun.lookup(&key);
  if (!since) /* attached in its midst */
    return 1;
  u64 ns = bpf_ktime_get_ns() - since->at;
  struct who who = {.tgid = id >> 32, .tid = (u32)id, .kind = kind};
  struct spent *sum = spent.lookup(&who);
  if (sum) { /* a thread's own row: nobody else adds to it */
    sum->ns += ns;
    sum->times++;
    sum->pages += pages;
  } else {
    struct spent first = {.ns = ns, .times = 1, .pages = pages};
    __builtin_memcpy(first.comm, since->comm, sizeof(first.comm));
    if (spent.update(&who, &first))
      lose();
  }
  begun.delete(&key);
  return 1;
}

#ifdef HAVE_DIRECT
TRACEPOINT_PROBE(vmscan, mm_vmscan_direct_reclaim_begin) { return begins(DIRECT); }
TRACEPOINT_PROBE(vmscan, mm_vmscan_direct_reclaim_end) { return ends(DIRECT, args->nr_reclaimed); }
#endif
#ifdef HAVE_MEMCG
TRACEPOINT_PROBE(vmscan, mm_vmscan_memcg_reclaim_begin) { return begins(MEMCG); }
TRACEPOINT_PROBE(vmscan, mm_vmscan_memcg_reclaim_end) { return ends(MEMCG, args->nr_reclaimed); }
#endif
#ifdef HAVE_NODE
TRACEPOINT_PROBE(vmscan, mm_vmscan_node_reclaim_begin) { return begins(NODE); }
TRACEPOINT_PROBE(vmscan, mm_vmscan_node_reclaim_end) { return ends(NODE, args->nr_reclaimed); }
#endif
#ifdef HAVE_COMPACTION
TRACEPOINT_PROBE(compaction, mm_compaction_begin) { return begins(COMPACTION); }
TRACEPOINT_PROBE(compaction, mm_compaction_end) { return ends(COMPACTION, 0); }
#endif

#ifdef HAVE_KSWAPD
TRACEPOINT_PROBE(vmscan, mm_vmscan_kswapd_wake) {
  u32 node = args->nid;
  kswapd.increment(node);
  return 1;
}
#endif

#ifdef HAVE_VICTIM
TRACEPOINT_PROBE(oom, mark_victim) {
  u64 now = bpf_ktime_get_ns();
  struct victim victim = {.tid = args->pid, .asker = bpf_get_current_pid_tgid() >> 32};
  bpf_get_current_comm(&victim.asker_comm, sizeof(victim.asker_comm));
#ifdef HAVE_VICTIM_MEMORY
  victim.anonymous_kb = args->anon_rss;
  TP_DATA_LOC_READ_STR(&victim.comm, comm, sizeof(victim.comm));
#endif
  if (victims.update(&now, &victim))
    lose();
  return 1;
}
#endif

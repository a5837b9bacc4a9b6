/*
 * on_cpu: where ranks' threads run: counts of samples by thread and user instruction pointer.
 *
 * Attaches  one perf event per CPU, opened by user space: the software clock (PERF_COUNT_SW_CPU_CLOCK), which virtual
 *           machines have too, 49 times a second; not while the CPU is idle.
 * Read by   probes/host/on_cpu.py, each second, which empties `samples`; `unplaced`.
 * Filled by user space: `ranks`.
 * Cost      one hash look-up where no rank has the CPU, two where one has. See docs/probes/on_cpu.md.
 */
#include <uapi/linux/ptrace.h>
#include <uapi/linux/bpf_perf_event.h>

#define IN_KERNEL 1 /* no address of a program: stands for all of the kernel's */

struct where {
  u32 tgid;
  u32 tid;
  u64 ip; /* in the program, or IN_KERNEL */
};

BPF_HASH(ranks, u32, u32, 1024); /* processes of ranks */
BPF_HASH(samples, struct where, u64, 16384);
BPF_ARRAY(unplaced, u64, 1); /* samples that found no room */

int sampled(struct bpf_perf_event_data *ctx) {
  u64 id = bpf_get_current_pid_tgid();
  u32 tgid = id >> 32;
  if (!ranks.lookup(&tgid))
    return 0;
  struct where where = {.tgid = tgid, .tid = (u32)id, .ip = PT_REGS_IP(&ctx->regs)};
  if (where.ip >> 63) /* the upper half is the kernel's on all 64-bit machines */
    where.ip = IN_KERNEL;
  u64 *count = samples.lookup(&where), one = 1;
  if (count) {
    __sync_fetch_and_add(count, 1);
  } else if (samples.update(&where, &one)) {
    int zero = 0;
    u64 *lost = unplaced.lookup(&zero);
    if (lost)
      __sync_fetch_and_add(lost, 1);
  }
  return 0;
}

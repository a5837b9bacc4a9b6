/*
 * tcp: segments sent again, resets, and entries into loss recovery by connection; packets dropped by reason.
 *
 * Attaches  those of the tracepoints tcp:tcp_retransmit_skb, tcp_receive_reset, tcp_send_reset and
 *           tcp_cong_state_set, and of the raw tracepoint kfree_skb, that the kernel has.
 * Read by   probes/host/tcp.py, each second: `tcp_flows` (emptied), `packet_drops`.
 * Cost      nothing while no packet is lost; a drop without a reason a compare, one with a reason an addition.
 *           See docs/probes/tcp.md.
 *
 * Addresses are IPv6; those of IPv4 are mapped (::ffff:a.b.c.d), as the tracepoints do themselves.
 *
 * Compile-time: HAVE_RETRANSMIT, HAVE_RETRANSMIT_ERROR (it says whether sending failed), HAVE_RECEIVE_RESET,
 * HAVE_SEND_RESET, SEND_RESET_SOCKADDR (its addresses are two sockaddr, Linux >= 6.10), HAVE_CONGESTION,
 * NOT_SPECIFIED (kfree_skb has a reason; this is the number of "none given", below which nothing was dropped).
 */
#include <uapi/linux/ptrace.h>

#define RECOVERY 3 /* enum tcp_ca_state, include/uapi/linux/tcp.h */
#define LOSS 4
#define REASONS 256
#define INET 2
#define INET6 10

struct flow {
  u8 local[16];
  u8 peer[16];
  u16 local_port;
  u16 peer_port;
};

struct counts {
  u32 retransmits;
  u32 failed; /* segments that could not be sent again: no route, no memory */
  u32 resets_received;
  u32 resets_sent;
  u32 recoveries;
  u32 losses;
};

struct drops {
  u64 by_reason[REASONS]; /* the last one: all others */
};

BPF_TABLE("lru_hash", struct flow, struct counts, tcp_flows, 2048);
BPF_ARRAY(packet_drops, struct drops, 1);

static __always_inline struct counts *counts_of(struct flow *flow) {
  struct counts none = {};
  return tcp_flows.lookup_or_try_init(flow, &none);
}

/* Programs of tracepoints end with 1: 0 would keep the event from perf's users. */
#define FLOW_OF(args)                                                  \
  struct flow flow = {};                                               \
  bpf_probe_read_kernel(flow.local, sizeof(flow.local), args->saddr_v6); \
  bpf_probe_read_kernel(flow.peer, sizeof(flow.peer), args->daddr_v6);   \
  flow.local_port = args->sport;                                       \
  flow.peer_port = args->dport;                                        \
  struct counts *counts = counts_of(&flow);                            \
  if (!counts)                                                         \
    return 1;

#ifdef HAVE_RETRANSMIT
TRACEPOINT_PROBE(tcp, tcp_retransmit_skb) {
  FLOW_OF(args)
#ifdef HAVE_RETRANSMIT_ERROR
  if (args->err) {
    __sync_fetch_and_add(&counts->failed, 1);
    return 1;
  }
#endif
  __sync_fetch_and_add(&counts->retransmits, 1);
  return 1;
}
#endif

#ifdef HAVE_RECEIVE_RESET
TRACEPOINT_PROBE(tcp, tcp_receive_reset) {
  FLOW_OF(args)
  __sync_fetch_and_add(&counts->resets_received, 1);
  return 1;
}
#endif

#ifdef HAVE_SEND_RESET
#ifdef SEND_RESET_SOCKADDR
enum sk_rst_reason { UNUSED_REASON }; /* a field of the tracepoint; older headers do not have it */

static __always_inline void mapped(u8 *address, const u8 *from) {
  address[10] = address[11] = 0xff;
  bpf_probe_read_kernel(address + 12, 4, from);
}
#endif

TRACEPOINT_PROBE(tcp, tcp_send_reset) {
  if (!args->skaddr) /* to a port where nobody listens: no connection of anybody */
    return 1;
#ifdef SEND_RESET_SOCKADDR
  struct flow flow = {};
  u8 local[28], peer[28]; /* struct sockaddr_in or sockaddr_in6: family, port, then the address */
  bpf_probe_read_kernel(local, sizeof(local), args->saddr);
  bpf_probe_read_kernel(peer, sizeof(peer), args->daddr);
  u16 family = *(u16 *)local;
  if (family == INET) {
    mapped(flow.local, args->saddr + 4);
    mapped(flow.peer, args->daddr + 4);
  } else if (family == INET6) {
    bpf_probe_read_kernel(flow.local, sizeof(flow.local), args->saddr + 8);
    bpf_probe_read_kernel(flow.peer, sizeof(flow.peer), args->daddr + 8);
  } else {
    return 1;
  }
  flow.local_port = local[2] << 8 | local[3];
  flow.peer_port = peer[2] << 8 | peer[3];
  struct counts *counts = counts_of(&flow);
  if (!counts)
    return 1;
#else
  FLOW_OF(args)
#endif
  __sync_fetch_and_add(&counts->resets_sent, 1);
  return 1;
}
#endif

#ifdef HAVE_CONGESTION
TRACEPOINT_PROBE(tcp, tcp_cong_state_set) {
  u32 state = args->cong_state;
  if (state != RECOVERY && state != LOSS)
    return 1;
  FLOW_OF(args)
  if (state == LOSS)
    __sync_fetch_and_add(&counts->losses, 1);
  else
    __sync_fetch_and_add(&counts->recoveries, 1);
  return 1;
}
#endif

#ifdef NOT_SPECIFIED
RAW_TRACEPOINT_PROBE(kfree_skb) {
  u32 reason = (u32)ctx->args[2];
  if (reason <= NOT_SPECIFIED)
    return 0;
  int zero = 0;
  struct drops *drops = packet_drops.lookup(&zero);
  if (!drops)
    return 0;
  if (reason >= REASONS)
    reason = REASONS - 1;
  __sync_fetch_and_add(&drops->by_reason[reason & (REASONS - 1)], 1);
  return 0;
}
#endif

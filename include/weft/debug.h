/* debug.h - what tools and tests ask of one call on a GPU: phases left out, a trace, delays. A call that asks for
 * nothing here runs kernels that know nothing of it. Not part of the stable ABI; may change in any version.
 */
#ifndef WEFT_DEBUG_H
#define WEFT_DEBUG_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a call consists of, behind its routing plan. A direction has the phases of its own tasks. */
typedef enum weft_phase {
  WEFT_PHASE_PULL = 1,            /* several ranks: rows of tokens are brought from their owners */
  WEFT_PHASE_COMBINE = 2,         /* rows of a token are summed and brought home */
  WEFT_PHASE_GATE_UP = 4,         /* forward: z and a'; backward: z, where it is made again */
  WEFT_PHASE_DOWN = 8,            /* forward: o */
  WEFT_PHASE_DOWN_DGRAD = 16,     /* backward: dz */
  WEFT_PHASE_GATE_UP_DGRAD = 32,  /* backward: dx */
  WEFT_PHASE_DOWN_WGRAD = 64,     /* backward: d down */
  WEFT_PHASE_GATE_UP_WGRAD = 128, /* backward: d gate_up */
  WEFT_PHASE_ALL = 255
} weft_phase;

/* Whose time a record of a trace is. Waits for what a task needs count as its time. */
typedef enum weft_trace_kind {
  WEFT_TRACE_GATE_UP = 0, /* tiles of matrix tasks, from when a CTA takes one until its stores are under way */
  WEFT_TRACE_DOWN = 1,
  WEFT_TRACE_DOWN_DGRAD = 2,
  WEFT_TRACE_GATE_UP_DGRAD = 3,
  WEFT_TRACE_DOWN_WGRAD = 4,
  WEFT_TRACE_GATE_UP_WGRAD = 5,
  WEFT_TRACE_PULL = 6,       /* tickets of communication */
  WEFT_TRACE_PULLS_DONE = 7, /* telling the peers that this rank has pulled */
  WEFT_TRACE_COMBINE = 8,
  WEFT_TRACE_SUM_TOKENS = 9,
  WEFT_TRACE_DRAIN = 10, /* waiting for the peers' pulls */
  WEFT_TRACE_LOAD = 11   /* a load warp of a CTA, from the CTA's start to its last load */
} weft_trace_kind;

typedef struct weft_trace_record {
  uint64_t begin_ns; /* of the device's global timer */
  uint64_t end_ns;
  int32_t kind; /* weft_trace_kind */
  int32_t rank;
  int32_t sm;
  int32_t warp; /* of its CTA */
} weft_trace_record;

typedef struct weft_debug {
  size_t struct_size;
  uint32_t skipped_phases; /* a sum of weft_phase that this call leaves out, one rank only. What they would have made is
                              taken as an earlier call left it in the workspace; this call's results mean nothing */
  uint32_t max_delay_ns;   /* > 0: roles of the kernels sleep now and then, up to this long, before they take a task and
                              between their work and the flag that tells of it; at most 1,000,000 */
  uint32_t delay_seed;     /* which of them sleep, and how long */
  void* trace;             /* device memory or NULL: records of the call's kernels. The first record's begin_ns counts
                              those that followed, of all calls since the caller cleared it; what exceeds trace_bytes is
                              counted and not written */
  int64_t trace_bytes;
} weft_debug;

#ifdef __cplusplus
}
#endif

#endif /* WEFT_DEBUG_H */

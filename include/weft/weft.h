/* weft.h - the public C ABI of Weft: one expert-parallel mixture-of-experts layer, one call a direction.
 *
 * The layer of one token t with experts E_t (its top-k routes) and router weights w:
 *     z = [g; u] = W_gate_up x_t        a' = w * silu(g) * u        y_t = sum over E_t of W_down a'
 * The router weight enters before the down projection, so combine is a plain sum (docs/design.md).
 *
 * Conventions
 *   - Every struct begins with `struct_size`; set it with WEFT_INIT. A library refuses a struct that is not of its own
 *     size, as one of a caller that was built against another version.
 *   - Every function that can fail returns weft_status; weft_last_error() then has the words (per thread).
 *   - On a GPU backend forward and backward are ordered in `stream`, allocate nothing and never synchronise the device
 *     with the host; with several ranks a call returns once all ranks have made it. On the CPU backend a call returns
 *     when the rank's outputs are complete.
 *   - A layer on a GPU belongs to the device that was current when it was created, and so do all layers of its group.
 *   - All ranks of a group make the same collective calls (create, forward, backward) in the same order. A rank that
 *     refuses a call tells its peers, so that all of them return an error and none hangs.
 *   - A rank makes one call at a time: calls on one weft_group or its layers must not run at once from several threads.
 *   - Matrices are row-major and dense. T = tokens of this rank, H = hidden, I = intermediate, E = experts,
 *     e = E / ep_size local experts, K = top-k. Expert x lives on rank x / e.
 */
#ifndef WEFT_WEFT_H
#define WEFT_WEFT_H

#include <stddef.h>
#include <stdint.h>

#include "weft/debug.h"

#if defined(_WIN32)
#define WEFT_API
#else
#define WEFT_API __attribute__((visibility("default")))
#endif

#define WEFT_VERSION_MAJOR 0
#define WEFT_VERSION_MINOR 1
#define WEFT_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

typedef enum weft_status {
  WEFT_OK = 0,
  WEFT_INVALID_ARGUMENT = 1, /* a value, shape, pointer or dtype is wrong; the words say which and what is allowed */
  WEFT_UNSUPPORTED = 2,      /* valid, but not on this backend, device or precision; the words give the remedy */
  WEFT_OUT_OF_MEMORY = 3,    /* no more memory, or threads on the CPU; the words say what was asked for */
  WEFT_PEER_REFUSED = 4,     /* another rank refused this collective call; its words are repeated. Group stays usable */
  WEFT_STALLED = 5,          /* a peer did not arrive before the deadline; the words name rank, task and flag */
  WEFT_INTERNAL = 6          /* a fault in Weft itself */
} weft_status;

typedef enum weft_backend { WEFT_BACKEND_CPU = 0, WEFT_BACKEND_CUDA = 1 } weft_backend;

/* Numerics of the whole layer; the list and what each rounds lies in src/numeric/recipe.hpp. */
typedef enum weft_precision {
  WEFT_PRECISION_FP64 = 0,    /* double everywhere; CPU only: the yardstick of the tests */
  WEFT_PRECISION_FP32 = 1,    /* float everywhere; CPU only */
  WEFT_PRECISION_BF16 = 2,    /* bf16 operands, fp32 accumulation */
  WEFT_PRECISION_FP8 = 3,     /* e4m3 operands, 1x128 activations and 128x128 weights, fp32 promotion every 128 */
  WEFT_PRECISION_FP8_BWD = 4, /* bf16 forward, fp8 backward */
  WEFT_PRECISION_MXFP8 = 5    /* e4m3 operands with one e8m0 scale per 1x32 (OCP MX) */
} weft_precision;

typedef enum weft_dtype { WEFT_DTYPE_FP64 = 0, WEFT_DTYPE_FP32 = 1, WEFT_DTYPE_BF16 = 2 } weft_dtype;

/* What a forward keeps for its backward. */
typedef enum weft_save {
  WEFT_SAVE_GATE_UP = 0, /* z of the routed rows of one pass in the caller's `saved` buffer */
  WEFT_SAVE_INPUTS = 1   /* nothing: backward brings x again and recomputes z, unless the workspace still has both */
} weft_save;

typedef enum weft_schedule {
  WEFT_SCHEDULE_AUTO = 0,       /* OVERLAPPED on a GPU, PHASED on the CPU */
  WEFT_SCHEDULE_OVERLAPPED = 1, /* one stream of tasks with ready flags */
  WEFT_SCHEDULE_PHASED = 2      /* the same task bodies, stage by stage: the debug path, bitwise equal */
} weft_schedule;

/* Where a backward took its rows from (weft_backward_args.source). What a forward leaves is one pass: a call of several
 * is WEFT_SOURCE_RECOMPUTED, which a GPU, whose host does not know the passes, tells only where nothing was saved. */
typedef enum weft_backward_source {
  WEFT_SOURCE_SAVED = 0,     /* z from `saved`, x brought again (a GPU's single rank reads it where it lies) */
  WEFT_SOURCE_WORKSPACE = 1, /* z, and x where it was brought, still lay in the workspace: only dy is brought */
  WEFT_SOURCE_RECOMPUTED = 2 /* x brought again, z recomputed */
} weft_backward_source;

typedef struct weft_config {
  size_t struct_size;
  weft_backend backend;
  weft_precision precision;
  int64_t hidden;       /* H; a multiple of 64 in bf16 and mxfp8, of 128 in fp8 and fp8_bwd, of 1 in fp32 and fp64;
                           at most 2^20 */
  int64_t intermediate; /* I; likewise */
  int32_t num_experts;  /* E over all ranks; a multiple of ep_size, at most 2^16 */
  int32_t top_k;        /* K; 1 to min(E, 32) */
  int64_t max_tokens;   /* most tokens a rank brings to one call; the same on every rank */
  int32_t ep_size;      /* ranks in the expert-parallel group, 1 to 64; on GPUs 1 to 8 */
  int32_t ep_rank;      /* this rank */
  double clamp_limit;   /* > 0: g = min(g, limit), u = clamp(u, -limit, limit) before SwiGLU; 0: none */
  weft_save save;
  weft_schedule schedule;
  int64_t capacity_rows; /* pool rows worked on at once, padding of experts to blocks of 128 included; more rows run in
                            several passes. 0: 1.25 * max_tokens * K and a block an expert */
  int32_t num_workers;   /* CPU: threads for matrix tasks a rank in OVERLAPPED; GPU: SMs to use; at most 1024.
                            0: default: of a GPU all SMs, or this rank's share if ranks of the group share it */
  double deadline_s;     /* longest wait for a peer, seconds; 0: 300 */
} weft_config;

/* Bytes a configuration needs, known before anything is allocated and independent of the routing. */
typedef struct weft_sizes {
  size_t struct_size;
  int64_t workspace_bytes;         /* caller's scratch; one may serve all layers of a stream */
  int64_t forward_workspace_bytes; /* the part of it that a forward needs, for callers without a backward */
  int64_t saved_bytes;             /* caller's `saved` buffer of one forward; 0 with WEFT_SAVE_INPUTS */
  int64_t symmetric_bytes;         /* data that peers map; owned by the group, shared by its layers */
  int64_t symmetric_flag_bytes;    /* flags that peers map; owned by the group */
  int64_t capacity_rows;           /* the effective capacity, whole blocks of 128 rows */
} weft_sizes;

typedef struct weft_group weft_group; /* the ranks of one expert-parallel group and the memory they share */
typedef struct weft_layer weft_layer; /* one configuration on one rank; cheap, holds no weights */

/* Inputs of a forward and of its backward. Expert weights come as `gate_up`, or as `gate` and `up` apart. */
typedef struct weft_inputs {
  size_t struct_size;
  int64_t num_tokens;        /* T of this call: 0 to max_tokens, may differ by rank */
  const void* x;             /* [T, H] in the data dtype: bf16, or fp32 / fp64 in those precisions */
  const int32_t* topk_idx;   /* [T, K] global expert of each route; -1 masks a route; an expert may repeat */
  const float* topk_weights; /* [T, K] router weights, fp32 */
  const void* gate_up;       /* [e, 2I, H] data dtype, the first I rows gate; or NULL with the next two */
  const void* gate;          /* [e, I, H] */
  const void* up;            /* [e, I, H] */
  const void* down;          /* [e, H, I] */
} weft_inputs;

/* What a call writes - results, `saved`, workspace - lies apart from what it reads. */
typedef struct weft_forward_args {
  size_t struct_size;
  const weft_inputs* inputs;
  void* y;         /* out [T, H], data dtype */
  void* saved;     /* out, saved_bytes: z of the routed rows; NULL with WEFT_SAVE_INPUTS */
  void* workspace; /* at least forward_workspace_bytes, 256-byte aligned; contents need not be initialised */
  int64_t workspace_bytes;
  uint64_t generation;     /* out: tag of what the workspace now holds; hand it to the backward */
  void* stream;            /* GPU: cudaStream_t; CPU: NULL */
  const weft_debug* debug; /* GPU: what tools ask of this call, or NULL */
} weft_forward_args;

/* A gradient that is not wanted skips the work that only it needs. dx and dtopk_weights take all ranks to compute, so
 * all ranks want the same of them, also one without tokens, whose pointers may be NULL. Weight gradients are each
 * rank's own affair: NULL means not wanted; they have the layout of the weights. */
typedef struct weft_backward_args {
  size_t struct_size;
  const weft_inputs* inputs; /* the forward's, unchanged */
  const void* dy;            /* [T, H] data dtype */
  const void* saved;         /* the forward's `saved`; NULL with WEFT_SAVE_INPUTS */
  uint64_t generation;       /* the forward's tag, if only Weft wrote to this workspace since; 0: trust nothing in it */
  int32_t want_dx;           /* non-zero: compute dx; the same on all ranks */
  int32_t want_dtopk_weights; /* likewise */
  void* dx;                   /* out [T, H] data dtype */
  float* dtopk_weights;       /* out [T, K] fp32; masked routes get 0 */
  void* dgate_up;             /* out [e, 2I, H] in grad_dtype, or NULL */
  void* dgate;                /* out [e, I, H], used when the weights came apart */
  void* dup;                  /* out [e, I, H] */
  void* ddown;                /* out [e, H, I] in grad_dtype, or NULL */
  weft_dtype grad_dtype;      /* of the weight gradients: the data dtype or fp32 */
  int32_t accumulate;         /* non-zero: add into dgate_up / dgate / dup / ddown, which must then be fp32 or fp64 */
  void* workspace;
  int64_t workspace_bytes;
  weft_backward_source source; /* out: which of the three ways this backward went */
  void* stream;
  const weft_debug* debug; /* as in a forward */
} weft_backward_args;

/* Sets every byte to zero and struct_size: weft_config c; WEFT_INIT(c); */
#define WEFT_INIT(s)                                                                   \
  do {                                                                                 \
    unsigned char* weft_bytes_ = (unsigned char*)&(s);                                 \
    for (size_t weft_i_ = 0; weft_i_ < sizeof(s); ++weft_i_) weft_bytes_[weft_i_] = 0; \
    (s).struct_size = sizeof(s);                                                       \
  } while (0)

/* Words of this thread's last failed call; "" if none. Valid until the thread's next call. */
WEFT_API const char* weft_last_error(void);
WEFT_API const char* weft_version(void);

/* WEFT_OK if this build and machine can run `config`; otherwise the status, and the reason with its remedy in
 * weft_last_error(). Needs no group. */
WEFT_API weft_status weft_supports(const weft_config* config);
/* The same for forward and backward together: a backend may have the one before the other. */
WEFT_API weft_status weft_supports_training(const weft_config* config);
WEFT_API weft_status weft_query_sizes(const weft_config* config, weft_sizes* sizes);

/* The data dtype of a precision: fp64, fp32, and bf16 for all others. Of a value that is no precision: bf16, and the
 * error is in weft_last_error(). */
WEFT_API weft_dtype weft_data_dtype(weft_precision precision);

/* All ep_size ranks in this process (virtual ranks; ep_size = 1 is the one-rank group). groups: out [ep_size]. */
WEFT_API weft_status weft_group_create_local(int32_t ep_size, weft_group** groups);
/* One rank a process on one machine, over POSIX shared memory. `name` is the same on all ranks and unused by any
 * living group; collective, returns when all ranks are there or the deadline (seconds, 0: 300) has passed. */
WEFT_API weft_status weft_group_create_shared(const char* name, int32_t ep_rank, int32_t ep_size, double deadline_s,
                                              weft_group** group);
/* Not collective. Destroy the group's layers first. Waits until nothing runs on its GPU; memory there that a peer still
 * maps is freed when that peer has destroyed its group too. */
WEFT_API void weft_group_destroy(weft_group* group);

/* Collective: all ranks must bring the same configuration but for ep_rank; where they do not, all return an error
 * that names the differing field and values. Grows the group's symmetric memory to what the configuration needs. */
WEFT_API weft_status weft_layer_create(const weft_config* config, weft_group* group, weft_layer** layer);
WEFT_API void weft_layer_destroy(weft_layer* layer);
/* What a GPU has found wrong in calls that have run so far (an index out of range, a stall): the status, once. The next
 * call would return it too. Does not wait for the stream. On the CPU backend always WEFT_OK. */
WEFT_API weft_status weft_layer_check(weft_layer* layer);

WEFT_API weft_status weft_forward(weft_layer* layer, weft_forward_args* args);
WEFT_API weft_status weft_backward(weft_layer* layer, weft_backward_args* args);

/* Collective: answers whatever call the peers make next with "this rank cannot" and `reason`, so that they return
 * WEFT_PEER_REFUSED with these words instead of waiting. For bindings that find bad input before they can call; the
 * functions above do it by themselves when they return an error of their own arguments. Does not wait for the peers,
 * unless they have yet to read this rank's refusal before: then at most deadline_s seconds (0: 300). */
WEFT_API weft_status weft_refuse(weft_group* group, const char* reason, double deadline_s);

/* Collective: the largest of the numbers of tokens that the ranks bring, where they have yet to agree on max_tokens. A
 * rank that finds its input wrong before answers with weft_refuse. */
WEFT_API weft_status weft_group_max_tokens(weft_group* group, int64_t num_tokens, double deadline_s,
                                           int64_t* max_tokens);

/* Several ranks of one process together, for virtual ranks: each on a thread of its own. On a GPU they are launched as
 * one, in a stream of their own, which is ordered in each args->stream as the call is. Arrays of length n. Returns the
 * status and words of the first rank that failed by itself, else of the first that failed because of a peer. */
WEFT_API weft_status weft_layer_create_all(const weft_config* const* configs, weft_group* const* groups, int32_t n,
                                           weft_layer** layers);
WEFT_API weft_status weft_forward_all(weft_layer* const* layers, weft_forward_args* const* args, int32_t n);
WEFT_API weft_status weft_backward_all(weft_layer* const* layers, weft_backward_args* const* args, int32_t n);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_WEFT_H */

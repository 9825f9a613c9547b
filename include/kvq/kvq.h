/* SPDX-License-Identifier: Apache-2.0
 *
 * libkvq: a language model's KV cache at 2 to 4 bits per number, and attention computed on the packed form.
 *
 *   kvq_create(&config, &cache);
 *   kvq_seq_create(cache, &seq);
 *   for each layer: kvq_prefill_commit(cache, seq, &chunk, stream);         the prompt; KVQ_PREFILL_FINAL with its last chunk
 *   for each generated token:
 *     kvq_step_begin(cache, &seq, &one, 1, 0, &step);
 *     for each layer: kvq_append(cache, step, layer, &k, &v, NULL, stream);
 *                     kvq_attend(cache, step, layer, &q, &out, NULL, NULL, stream);
 *     kvq_step_end(cache, step, NULL, NULL);
 *   kvq_destroy(cache);
 *
 * examples/quickstart.c is that as a program.  A step may serve many sequences and add many tokens to each.
 *
 * Conventions that hold for every function below; a doc block repeats only what differs.
 *
 *   Status     Functions return int32_t: KVQ_OK (0) or a negative KVQ_E_*.  After a failure kvq_error_detail() gives the
 *              calling thread one sentence: which argument, which value, what was allowed.  Any function may also return
 *              KVQ_E_INVALID for a NULL pointer or a struct_size that is none, and KVQ_E_NOMEM.
 *   Atomicity  A failing call leaves the cache, its sequences and every output as they were.
 *   Ownership  The caller owns every buffer that it passes.  Inputs are read only during the call and are never changed.
 *   Memory     Pointers are to host memory; only tensors, token scores and the output of attention may lie on the device.
 *              A cache takes its memory from its allocator.  Functions without a cache take scratch from malloc and free it.
 *   Units      Lengths and positions in tokens (positions from 0), sizes in bytes, strides in elements.
 *   Threads    Calls that touch different sequences of one cache may run at once; one sequence (or one step) must be used
 *              by one thread at a time, and a violation that is noticed returns KVQ_E_BUSY.  Functions without a
 *              cache argument are thread safe.  kvq_destroy must not run beside other calls on the same cache.
 *   Bits       Packed bytes depend on the input only, on no machine, backend or thread.  On the CPU so does attention: the number
 *              of threads, the other sequences and the other tokens of a step do not change a bit.  Another instruction set or
 *              backend may round differently, within section 9.
 *   Stream     `stream` is a CUDA stream for the CUDA backend.  The CPU backend ignores it and is always synchronous.
 *   Shapes     Arrays are row-major, written [outermost][...][innermost]; the innermost axis is contiguous.
 *   Structs    Set struct_size = sizeof(the struct) and zero the rest: a zero field means its default.  A shorter struct is
 *              read as if the missing fields were zero; a longer one is accepted if its unknown tail is zero.
 *   Strings    UTF-8, zero-terminated.  Functions that write text or bytes take (buf, cap, needed): *needed always receives
 *              the full size in bytes (for text including the final zero); if cap is too small nothing is written and
 *              KVQ_E_SIZE is returned.  buf may be NULL when cap is 0; needed may be NULL.
 *
 * Formats, policies and tolerances are specified in conformance/SPEC.md; "section" below means a section of that page.
 */
#ifndef KVQ_KVQ_H
#define KVQ_KVQ_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KVQ_API __declspec(dllexport)
#elif defined(__GNUC__)
#define KVQ_API __attribute__((visibility("default")))
#else
#define KVQ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVQ_VERSION_MAJOR 0
#define KVQ_VERSION_MINOR 1
#define KVQ_VERSION_PATCH 0

/* ------------------------------------------------------------------------------------------------ statuses */

#define KVQ_OK 0
/* -1x: an argument */
#define KVQ_E_INVALID (-10)     /* a value outside what is allowed */
#define KVQ_E_SIZE (-11)        /* an output buffer is too small; *needed says how large it must be */
#define KVQ_E_NONFINITE (-12)   /* NaN or infinity in K, V or Q */
/* -2x: state */
#define KVQ_E_STATE (-20)       /* the call does not fit the state of the sequence, step or cache */
#define KVQ_E_STALE (-21)       /* an id whose sequence or step has ended, or of another cache */
#define KVQ_E_BUSY (-22)        /* the sequence or step is in use by another thread */
/* -3x: memory and capacity */
#define KVQ_E_NOMEM (-30)       /* the allocator returned NULL */
#define KVQ_E_FULL (-31)        /* a limit of the configuration is reached */
/* -4x: data and format */
#define KVQ_E_CORRUPT (-40)     /* bytes that no encoder writes */
#define KVQ_E_CONFIG (-41)      /* a blob made for another configuration; the detail names the field */
/* -5x: device */
#define KVQ_E_DEVICE (-50)      /* no such device, or the device failed */
/* -6x: unsupported */
#define KVQ_E_UNSUPPORTED (-60) /* legal, but not offered by this build or backend; the detail says why */
/* -9x: defects */
#define KVQ_E_INTERNAL (-90)    /* a defect of the library: please report it with the detail */

/* ------------------------------------------------------------------------------------------------ constants */

#define KVQ_DTYPE_F32 0
#define KVQ_DTYPE_F16 1
#define KVQ_DTYPE_BF16 2
#define KVQ_DTYPE_F64 3

#define KVQ_MEMORY_HOST 0
#define KVQ_MEMORY_DEVICE 1

#define KVQ_BACKEND_CPU 0
#define KVQ_BACKEND_CUDA 1

#define KVQ_ROPE_HALF 0     /* pair i is the channels (i, i + rotary_dim/2) */
#define KVQ_ROPE_ADJACENT 1 /* pair i is the channels (2i, 2i + 1) */

#define KVQ_TENSOR_K 0
#define KVQ_TENSOR_V 1

#define KVQ_LOG_ERROR 0
#define KVQ_LOG_WARNING 1
#define KVQ_LOG_INFO 2

#define KVQ_ALL_LAYERS UINT32_MAX

typedef struct kvq_cache kvq_cache;
typedef uint64_t kvq_seq;  /* a sequence of one cache: slot and generation; 0 is never a sequence */
typedef uint64_t kvq_step; /* a step of one cache: slot and generation; 0 is never a step */

/* ------------------------------------------------------------------------------------------------ structs */

/* What the cache asks for memory.  Every byte that a cache holds comes from here, its own object included.
 * `alloc` returns memory aligned to `align` (a power of two, at most 4096) or NULL; `release` gets the same size and align.
 * Both may be called from any thread that uses the cache and must be thread safe; they must not call libkvq. */
typedef struct kvq_allocator {
  uint32_t struct_size;
  uint32_t reserved;
  void *user;
  void *(*alloc)(void *user, size_t size, size_t align);
  void (*release)(void *user, void *ptr, size_t size, size_t align);
} kvq_allocator;

/* Geometry of one layer. */
typedef struct kvq_layer {
  uint32_t struct_size;
  uint32_t kv_heads;     /* 1..4096 */
  uint32_t q_heads;      /* a multiple of kv_heads, at most 64 * kv_heads */
  uint32_t dim_k;        /* channels of K and Q per head: even, 2..1024 */
  uint32_t dim_v;        /* channels of V per head: 0 means dim_k; even, 2..1024 */
  uint32_t rope_layout;  /* KVQ_ROPE_*: how the channels of K pair up (PN-Mix section 3, Block-GTQ section 3) */
  uint32_t rotary_dim;   /* rotary channels of K: even, at most dim_k; 0 means dim_k */
  uint32_t rotary_first; /* first rotary channel: even, rotary_first + rotary_dim <= dim_k */
  uint32_t window;       /* attention sees the newest `window` positions, the query's own included; 0: all (see kvq_seq_truncate) */
  uint32_t kv_source;    /* 0: the layer stores its own K and V; n + 1: it reads those of the earlier layer n */
} kvq_layer;

/* What a recipe takes and a text cannot hold: choices for every layer and head (section 6, "options").  Arrays are flat, all layers
 * in turn, those that read another layer's cache included.  What the recipe has no use for must be NULL with count 0.  With bits or
 * scores the policy is frozen from the beginning and needs no statistics. */
typedef struct kvq_recipe_data {
  uint32_t struct_size;
  uint32_t reserved;
  const uint8_t *bits;     /* widths of K, [layer][kv_head][dim_k] (dim_k/2 where the codec goes by pair): chanmix, blockgtq, pair-widths */
  const double *scores;    /* of K's pairs, [layer][kv_head][dim_k/2], finite, >= 0: blockgtq and pair-widths, instead of statistics */
  const uint64_t *budgets; /* pmkvq: bytes of the packed tokens of one sequence, [layer] */
  uint64_t n_bits, n_scores, n_budgets; /* entries of the arrays: checked */
} kvq_recipe_data;

/* Configuration of a cache. */
typedef struct kvq_config {
  uint32_t struct_size;
  uint32_t backend;         /* KVQ_BACKEND_* */
  uint32_t device;          /* ordinal of the device; 0 for the CPU */
  uint32_t n_layers;        /* 1..65535 */
  const kvq_layer *layers;  /* [n_layer_structs], spaced by layers[0].struct_size */
  uint32_t n_layer_structs; /* n_layers, or 1: all layers are alike */
  uint32_t n_threads;       /* threads of attention calls on the CPU, at most 1024; 0 or 1: only the calling thread, none is made */
  const char *recipe;       /* recipe text, see kvq_recipe_parse; NULL: "kvq-3" */
  uint64_t max_bytes;       /* limit of bytes_used; 0: none.  Beyond it calls return KVQ_E_FULL */
  uint64_t max_tokens;      /* limit of tokens of one sequence; 0: 2^32 - 1, which is the most */
  uint32_t max_sequences;   /* sequences that exist, and steps that are open, at once: at most 2^20; 0: 4096 */
  uint32_t n_callers;       /* kvq_attend calls over head ranges that may run at once in one step: at most 64; 0: 1.  CPU only */
  const kvq_allocator *allocator; /* NULL: malloc and free.  Copied: the struct may go, `user` must live as long as the cache */
  void *log_user;
  void (*log)(void *user, int32_t level, const char *message); /* NULL: silent.  Called by the thread that makes the call */
  const kvq_recipe_data *recipe_data; /* NULL: none.  chanmix and pmkvq need theirs */
  const char *path; /* CPU: one of kvq_backend_info.paths; NULL: the best, or what the environment variable KVQ_CPU names */
} kvq_config;

/* A strided tensor [token][head][channel]; channels are contiguous, and data is aligned to its elements.  Its sizes follow from the
 * call.  Strides are not negative and rows do not overlap: stride 0 means packed, and never that one row serves all. */
typedef struct kvq_tensor {
  uint32_t struct_size;
  uint32_t dtype;       /* KVQ_DTYPE_*; F64 for inputs only */
  uint32_t memory;      /* KVQ_MEMORY_*; DEVICE for K, V, Q and out of a CUDA cache, and for token scores */
  uint32_t reserved;    /* 0 */
  void *data;           /* element [0][0][0]; inputs are not written.  NULL if there are no tokens */
  int64_t token_stride; /* elements between tokens; 0: packed, heads * channels */
  int64_t head_stride;  /* elements between heads; 0: packed, channels */
} kvq_tensor;

/* A chunk of a prompt, for one layer.  Where the policy ranks by queries (pnmix, blockgtq, kvq-*) the first prompt needs Q. */
typedef struct kvq_prefill {
  uint32_t struct_size;
  uint32_t layer;       /* layer index; KVQ_ALL_LAYERS with n_tokens = 0: only the flags, for all layers */
  uint32_t flags;       /* KVQ_PREFILL_* */
  uint32_t n_scores;    /* entries of `scores`: 0 or n_tokens of this chunk */
  uint64_t n_tokens;    /* tokens of the chunk, at most 2^24; 0: none */
  const kvq_tensor *k;  /* [n_tokens][kv_heads][dim_k] */
  const kvq_tensor *v;  /* [n_tokens][kv_heads][dim_v] */
  const kvq_tensor *q;  /* [n_tokens][q_heads][dim_k], after RoPE like K: only for statistics; NULL: none */
  const float *scores;  /* token scores (SemKV): higher is kept more precisely; taken once per chunk, with any layer */
} kvq_prefill;
#define KVQ_PREFILL_FINAL 1u         /* the prompt of this layer (or of ALL_LAYERS) is complete: freeze the policy and pack */
#define KVQ_PREFILL_DEVICE_SCORES 2u /* `scores` lies in device memory (CUDA caches); the call waits for the stream */

/* Options of kvq_attend.  A window that reaches tokens which have been given back (kvq_seq_truncate) is INVALID. */
typedef struct kvq_attend_options {
  uint32_t struct_size;
  uint32_t window;      /* 0: the layer's own window; UINT32_MAX: none; else the newest `window` positions */
  float scale;          /* of the logits; 0: 1/sqrt(dim_k) */
  float softcap;        /* 0: none; else logits become softcap * tanh(logit / softcap), after `scale` */
  const float *sinks;   /* learned sinks [q_heads], natural logits, neither scaled nor capped; NULL: none.  Host memory */
  uint32_t head_first;  /* with head_count: only KV heads [head_first, head_first + head_count), and the query heads that share them */
  uint32_t head_count;  /* 0: all heads; head_first must be 0 then */
} kvq_attend_options;

/* Lengths of a sequence in tokens: total = sinks + packed + tail.  Before its first commit packed is 0.  Dropped tokens are packed. */
typedef struct kvq_lengths {
  uint32_t struct_size;
  uint32_t committed;   /* 1 after the first commit */
  uint64_t total, sinks, packed, tail;
} kvq_lengths;

/* Memory and events of a cache. */
typedef struct kvq_stats {
  uint32_t struct_size;
  uint32_t sequences;      /* that exist now */
  uint64_t bytes_used;     /* held from the allocator now: exactly what it handed out and has not got back */
  uint64_t bytes_peak;     /* largest bytes_used since creation */
  uint64_t page_bytes_raw, page_bytes_packed; /* of which pages */
  uint64_t pages_raw, pages_packed; /* pages in use, shared ones once; a raw page is of one layer, a packed page of all */
  uint64_t tokens;         /* sum of all lengths; a shared token counts once per sequence */
  uint64_t saturated;      /* input elements beyond +-65504, since creation (section 1.4) */
  uint64_t workspace_bytes; /* scratch that one attention call uses, of which nothing depends on the length */
} kvq_stats;

/* What a recipe costs (section 8). */
typedef struct kvq_account {
  uint32_t struct_size;
  uint32_t page_tokens;     /* tokens of a packed page; a backend may hold several of these in one */
  uint64_t packed_tokens, sink_tokens, tail_tokens; /* how `tokens` divide (section 7) */
  uint64_t wire_bytes;      /* sinks and packed tokens, K and V, all heads and layers */
  uint64_t metadata_bytes;  /* masks, width lists, centres, token flags */
  uint64_t tail_bytes;      /* raw tail */
  uint64_t fp16_bytes;      /* the same tokens in fp16 */
  double effective_bits_k, effective_bits_v, effective_bits; /* wire bits per element of sinks and packed tokens */
} kvq_account;

/* What a backend is. */
typedef struct kvq_backend_info {
  uint32_t struct_size;
  uint32_t backend;        /* KVQ_BACKEND_* */
  uint32_t available;      /* 1: caches can be created on it here */
  uint32_t n_devices;
  char name[32];           /* "cpu", "cuda" */
  char path[64];           /* the code path that would run, e.g. "portable" */
  char reason[192];        /* why it is not available; empty if it is */
  char paths[64];          /* CPU: the code paths that run here, best first, with spaces between them */
} kvq_backend_info;

#define KVQ_PATH_NONE 0   /* kvq_create refuses the configuration */
#define KVQ_PATH_FUSED 1  /* attention reads packed pages */
#define KVQ_PATH_DECODE 2 /* pages are decoded to memory first */
/* How a configuration would run. */
typedef struct kvq_support {
  uint32_t struct_size;
  uint32_t path;           /* KVQ_PATH_* */
  int32_t status;          /* what kvq_create would return before it allocates */
  uint32_t reserved;
  char reason[240];        /* the sentence that goes with a path other than FUSED */
} kvq_support;

/* ------------------------------------------------------------------------------------------------ version, errors */

/* Version of the library as major * 10000 + minor * 100 + patch.  Since 0.1. */
KVQ_API uint32_t kvq_version(void);
/* The same as static text, "0.1.0".  Since 0.1. */
KVQ_API const char *kvq_version_string(void);
/* Name of a status as static text ("OK", "INVALID", ...); for an unknown value "UNKNOWN", never NULL.  Since 0.1. */
KVQ_API const char *kvq_status_string(int32_t status);
/* The sentence about the newest failure of a libkvq call in the calling thread, which it keeps.  Statuses: SIZE.  Since 0.1. */
KVQ_API int32_t kvq_error_detail(char *buf, size_t cap, size_t *needed);

/* ------------------------------------------------------------------------------------------------ backends, recipes */

/* Describe backend KVQ_BACKEND_* on this machine, also one that this build lacks.  Statuses: INVALID (no such index).  Since 0.1. */
KVQ_API int32_t kvq_backend_query(uint32_t index, kvq_backend_info *info);

/* Say whether and how `config` would run, without creating anything.
 * Out: support; support->status is what kvq_create would say.  Statuses: INVALID (arguments of this call only).  Since 0.1. */
KVQ_API int32_t kvq_backend_support(const kvq_config *config, kvq_support *support);

/* Name of preset number `index` ("fp16", "kivi-2", ...), static; NULL beyond the last.  Section 8.  Since 0.1. */
KVQ_API const char *kvq_recipe_preset(uint32_t index);

/* Resolve a recipe for a geometry and print it in full.
 *
 * A recipe is a preset name, or fields "k=CODEC;v=CODEC;sinks=N;recent=N;block=N;policy=NAME(key=value,...)" in any order, or a
 * preset name followed by fields that replace its own, e.g. "kvq-2;sinks=4".  CODEC is the text of section 5; masks and width lists
 * that the policy fills are left out, group=D stands for the head dimension, ratios are p/q.  kvq_recipe_data is no part of the text.
 * "policy=drop-tokens(r=p/q)" is a control, no compression: scores and turns are SemKV's, chosen tokens stay in fp16, the others are
 * gone.  They count in lengths and positions; attention does not see them, and their exported values are NaN.
 *
 * In: text; layers [n_layers] (as in kvq_config, all of one struct_size).
 * Out: buf: the canonical text, that parses to the same recipe.
 * Statuses: INVALID (names the key and what is allowed), UNSUPPORTED, SIZE.  Since 0.1. */
KVQ_API int32_t kvq_recipe_parse(const char *text, const kvq_layer *layers, uint32_t n_layers, char *buf, size_t cap,
                                 size_t *needed);

/* Exact bytes of one sequence of `tokens` tokens, committed at once, under a recipe (section 8; a test for every preset).
 * Where the bytes depend on what a policy decides (Block-GTQ: how many widths occur) `data` gives the width lists, or the scores.
 * In: text, layers [n_layers] as above; tokens; data as in kvq_config, or NULL.
 * Out: account.  Statuses: INVALID, STATE (bits or scores needed), UNSUPPORTED.  Since 0.1. */
KVQ_API int32_t kvq_recipe_account(const char *text, const kvq_layer *layers, uint32_t n_layers, uint64_t tokens,
                                   const kvq_recipe_data *data, kvq_account *account);

/* ------------------------------------------------------------------------------------------------ cache and sequences */

/* Create a cache.  Combinations that are not supported fail here, with a reason, and never later.
 * In: config; it and all that it points to are copied.  Out: *cache, to be released by kvq_destroy.
 * Statuses: INVALID, UNSUPPORTED, DEVICE, NOMEM, FULL (max_bytes).  Since 0.1. */
KVQ_API int32_t kvq_create(const kvq_config *config, kvq_cache **cache);

/* Release a cache with all its sequences and steps.  NULL is fine.  Since 0.1. */
KVQ_API void kvq_destroy(kvq_cache *cache);

/* The cache's recipe as canonical text.  Statuses: INVALID, SIZE.  Since 0.1. */
KVQ_API int32_t kvq_cache_recipe(kvq_cache *cache, char *buf, size_t cap, size_t *needed);

/* Create an empty sequence.  Out: *seq.  Statuses: INVALID, FULL (max_sequences), NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_seq_create(kvq_cache *cache, kvq_seq *seq);

/* Create a sequence that begins with the first `keep` tokens of `parent` (UINT64_MAX: all).  Packed pages are shared and never
 * copied unless written; the child has the parent's policy tables, statistics and token flags.
 * Failure: STATE while a step is open on the parent, or while its prompt has layers of different length or some of them FINAL.
 * Out: *child.  Statuses: INVALID (keep > length, or a length that windows do not allow, as in kvq_seq_truncate), STALE, STATE,
 * BUSY, FULL, NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_seq_fork(kvq_cache *cache, kvq_seq parent, uint64_t keep, kvq_seq *child);

/* Forget all tokens from position `length` on (section 7).  Nothing is ever unpacked: a packed page that is cut stays as it is
 * and later tokens follow in new pages.  OK means that the length is `length` exactly.
 * A committed sequence stays committed, with its policy, even at length 0.  In an uncommitted prompt every layer must have at
 * least `length` tokens and all are cut to it.
 *
 * Windows: where every layer that stores K and V has one, packed pages whose tokens all lie more than 256 tokens behind the largest
 * window are given back whenever the sequence grows.  Lengths and positions still count them.  Then INVALID is what would need
 * them: truncating or forking to a length whose windows reach them (other than a length within the sinks), exporting them, and
 * attending with a wider window.
 *
 * Statuses: INVALID (length > the sequence's, or as said), STALE, STATE (a step is open, or some layers of the prompt are FINAL and
 * others not), BUSY.  Since 0.1. */
KVQ_API int32_t kvq_seq_truncate(kvq_cache *cache, kvq_seq seq, uint64_t length);

/* End a sequence and give its pages back.  An open step on it must be ended or aborted first.
 * Statuses: INVALID, STALE, STATE, BUSY.  Since 0.1. */
KVQ_API int32_t kvq_seq_remove(kvq_cache *cache, kvq_seq seq);

/* Lengths of a sequence.  In an uncommitted prompt: tokens that every layer has; tokens of an open step do not count yet.
 * Statuses: INVALID, STALE, BUSY.  Since 0.1. */
KVQ_API int32_t kvq_seq_length(kvq_cache *cache, kvq_seq seq, kvq_lengths *lengths);

/* Hand over a chunk of a prompt for one layer, and with KVQ_PREFILL_FINAL pack it.
 *
 * Chunks of a layer arrive in order; layers may arrive in any order.  They are staged raw, so the bytes never depend on how a
 * prompt was cut.  FINAL with a layer packs that layer at once; the sequence is committed when the last layer is.  All layers
 * must then have the same number of tokens.  FINAL with KVQ_ALL_LAYERS does it for all layers that are not final yet.  Where
 * tokens are chosen by score, which is known behind the last layer only, all layers are packed when the last one is final.
 * At the first commit the sequence's policy is frozen (PN-Mix mask, pair widths, centre), and the cache's (Block-GTQ).
 * Later commits are plain appends, except with SemKV: there every commit is a prompt of its own (section 6).
 *
 * K, V and Q enter by rule 1.4: rounded to fp16, saturating at +-65504, -0 as +0.  A key far from zero with little spread loses
 * what fp16 cannot hold (921 +- 0.05 keeps steps of 0.5).
 * Failure: KVQ_E_NONFINITE names layer, token, head and channel.
 * Statuses: INVALID, NONFINITE, STALE, STATE (a step is open, the layer is FINAL already, layers differ in length, or a policy lacks
 * the queries that it ranks by), BUSY, FULL (max_tokens, max_bytes), NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_prefill_commit(kvq_cache *cache, kvq_seq seq, const kvq_prefill *desc, void *stream);

/* ------------------------------------------------------------------------------------------------ steps */

#define KVQ_STEP_QUERY_ONLY 1u    /* nothing is appended: the queries are those of the newest new_tokens[i] tokens that are there */
#define KVQ_STEP_DEVICE_SCORES 2u /* `scores` of kvq_step_end lies in device memory, written on the stream of the step's newest call */
#define KVQ_STEP_INVARIANT 4u     /* results of a sequence do not depend on the others by a bit, as they never do on the CPU */

/* Begin a step: reserve all memory that it needs, for all sequences or for none.
 *
 * A step adds new_tokens[i] >= 0 tokens to each of n_seqs different sequences, committed or not, in all layers: per layer
 * kvq_append and then kvq_attend, then kvq_step_end.  Its tokens are packed together: sequence 0's first, then sequence 1's...;
 * N = the sum of new_tokens, at most 2^20, is the token count of every tensor of the step.  While it is open the sequences
 * refuse other changes (STATE).  Per-layer calls allocate nothing and take no lock; their streams must live until it is over.
 * Elements that are not finite: in host memory the call refuses them.  In device memory they enter as +0 and nothing waits; when the
 * step has ended, a sequence whose kept tokens had one in K, V or Q, and no other, is marked with the position of the first.  Calls on it
 * are refused (NONFINITE) but kvq_seq_length, kvq_seq_remove, truncating to at most that position, which clears the mark, and such forks.
 *
 * INVARIANT on CUDA: sequences are cut into shares of one size, which a few short ones pay for; UNSUPPORTED once a graph captured calls.
 * A QUERY_ONLY step changes nothing and does not hold its sequences: between its calls they may take chunks of a prompt, other steps
 * and the rest (prompt attention chunk by chunk).  Each attend sees the tokens that the layer has at that moment.
 * In: seqs [n_seqs], new_tokens [n_seqs], flags KVQ_STEP_*; n_seqs may be 0.  Out: *step.
 * Statuses: INVALID (a sequence twice, or N above 2^20), NONFINITE (a sequence is marked), STALE, STATE (a step is open on a sequence,
 * or its prompt is partly FINAL or of unlike layers), BUSY, FULL (max_tokens, max_bytes, max_sequences), NOMEM, UNSUPPORTED.  Since 0.1. */
KVQ_API int32_t kvq_step_begin(kvq_cache *cache, const kvq_seq *seqs, const uint32_t *new_tokens, uint32_t n_seqs, uint32_t flags,
                               kvq_step *step);

/* Store K and V of the step's tokens in one layer, once per layer and step.  A layer that reads another's cache takes none.
 * In: k [N][kv_heads][dim_k] after RoPE, v [N][kv_heads][dim_v]; q [N][q_heads][dim_k] or NULL, only for the statistics of an
 * uncommitted prompt.  All enter by rule 1.4.  Stream: order of device work.
 * Statuses: INVALID, NONFINITE (host memory, or q with statistics), STALE, STATE (twice, or QUERY_ONLY), BUSY, UNSUPPORTED.  Since 0.1. */
KVQ_API int32_t kvq_append(kvq_cache *cache, kvq_step step, uint32_t layer, const kvq_tensor *k, const kvq_tensor *v,
                           const kvq_tensor *q, void *stream);

/* Attention of the step's tokens in one layer, over sinks, packed pages, tail and the step's own tokens with a causal mask.
 *
 *   out = softmax(scale * q . K^T) . V per query head; lse = ln of the sum of exp of the scaled, capped logits, learned
 *   sinks included (section 9).  A query that sees no token gives out 0 and lse -inf (or the learned sink alone).
 * In: q [N][q_heads][dim_k] (enters by rule 1.4); options or NULL.
 * Out: out [N][q_heads][dim_v], F32, F16 or BF16; lse [N][q_heads] float32, in out's memory, or NULL.  Neither may overlap an input.
 * A runtime with threads of its own can share the work out by heads (options): such a call reads and writes only the rows of its heads
 * in q, out, lse and sinks, which are given whole all the same, and its results are the bits of a call for all heads.
 * Threads: layers of a step one after the other; a QUERY_ONLY step takes its sequences for the length of this call.  Up to n_callers
 * calls over head ranges may run at once in a step that is not QUERY_ONLY, if no two write the same heads of the same layer; each
 * runs in the thread that makes it.
 * Statuses: INVALID (also more queries than a sequence that is not empty has tokens, or a window that reaches tokens which have
 * been given back), NONFINITE (q in host memory; QUERY_ONLY: a sequence is marked), STALE, STATE (the layer's append is missing), BUSY,
 * UNSUPPORTED (on the CUDA backend: a head range; a capture while no sequence of the step has packed tokens).  Since 0.1. */
KVQ_API int32_t kvq_attend(kvq_cache *cache, kvq_step step, uint32_t layer, const kvq_tensor *q, const kvq_tensor *out, float *lse,
                           const kvq_attend_options *options, void *stream);

/* End a step: of each sequence's new tokens the first keep[i] become part of it, the others vanish before anything is packed;
 * then what became due is packed.  Every layer must have its append if any keep[i] > 0.
 * In: keep [n_seqs] or NULL (all); scores: of the kept tokens, [sum of keep], sequence by sequence (SemKV needs them once the
 * sequence is committed or its prompt is staged; others ignore them) or NULL.
 * The step is over if and only if the call succeeds.  Elements that were not finite are no failure: see kvq_step_begin.
 * Statuses: INVALID (keep, scores), STALE, STATE, BUSY, NOMEM, FULL.  Since 0.1. */
KVQ_API int32_t kvq_step_end(kvq_cache *cache, kvq_step step, const uint32_t *keep, const float *scores);

/* End a step and forget its tokens: all sequences are as before kvq_step_begin.  Statuses: STALE, BUSY.  Since 0.1. */
KVQ_API int32_t kvq_step_abort(kvq_cache *cache, kvq_step step);

/* End of a turn (SemKV and drop-tokens, section 6): pack the whole tail.  A no-op for other recipes.
 * Statuses: STALE, STATE (before the commit, a step is open, or a later prompt is not complete), BUSY, FULL, NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_end_turn(kvq_cache *cache, kvq_seq seq);

/* ------------------------------------------------------------------------------------------------ policies of a cache */

/* One layer of calibration data: Q and K after RoPE, as a forward pass has them. */
typedef struct kvq_calibration {
  uint32_t struct_size;
  uint32_t layer;
  uint64_t n_tokens;
  const kvq_tensor *k; /* [n_tokens][kv_heads][dim_k] */
  const kvq_tensor *v; /* [n_tokens][kv_heads][dim_v] or NULL */
  const kvq_tensor *q; /* [n_tokens][q_heads][dim_k] or NULL */
} kvq_calibration;

/* Add statistics of calibration text to the cache (exact integer sums: order and cutting do not matter, section 6).
 * For policies that belong to the cache (Block-GTQ); others choose per sequence from its own prompt.  There is no stream: what lies in
 * device memory must be complete.  V is checked and not used.  Threads: beside other calls on the cache; several calls add up.
 * Statuses: INVALID, NONFINITE, UNSUPPORTED (the policy belongs to sequences), STATE (frozen), NOMEM, FULL (scratch).  Since 0.1. */
KVQ_API int32_t kvq_calibrate(kvq_cache *cache, const kvq_calibration *data);

/* Freeze the cache's policy from the statistics so far.
 * Statuses: STATE (already frozen, or a layer without the statistics it needs), UNSUPPORTED (as above), NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_calibrate_finish(kvq_cache *cache);

/* The frozen policy as a blob: width lists, masks, centres.  seq = 0: the cache's policy; else that of a committed sequence.
 * Out: buf, (cap, needed) as usual.  The blob is versioned and names the recipe that it belongs to.
 * Statuses: STALE, STATE (nothing frozen yet), BUSY, SIZE, NOMEM, FULL (scratch).  Since 0.1. */
KVQ_API int32_t kvq_policy_get(kvq_cache *cache, kvq_seq seq, void *buf, size_t cap, size_t *needed);

/* Freeze the policy of the cache (seq = 0) or of a sequence without tokens from a blob instead of from statistics.
 * Statuses: INVALID, CORRUPT, CONFIG (made for another recipe or geometry: names the field), STATE (frozen, or the sequence has
 * tokens), STALE, BUSY, NOMEM, FULL.  Since 0.1. */
KVQ_API int32_t kvq_policy_set(kvq_cache *cache, kvq_seq seq, const void *blob, size_t size);

/* ------------------------------------------------------------------------------------------------ export, statistics */

/* Decoded values of positions [first, first + count) of a committed or uncommitted sequence, as attention uses them, in order of
 * position.  What drop-tokens has dropped is NaN.  Also while a step is open: its tokens are not there yet.
 * In: layer, head (KV head), tensor KVQ_TENSOR_*.  Out: out [count][dim], float32, host memory; bit-exact (section 5).
 * Statuses: INVALID (also positions given back, see kvq_seq_truncate), STALE, BUSY, NOMEM, FULL (scratch).  Since 0.1. */
KVQ_API int32_t kvq_export_values(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t first,
                                  uint64_t count, float *out);

/* Wire bytes (section 5) of one packed block, numbered from 0 in the order of packing.
 * Out: buf, (cap, needed) as usual; *tokens (may be NULL): valid tokens of the block.
 * Statuses: INVALID (no such block, or one that has been given back), STALE, BUSY, SIZE, NOMEM, FULL (scratch).  Since 0.1. */
KVQ_API int32_t kvq_export_wire(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t block,
                                void *buf, size_t cap, size_t *needed, uint64_t *tokens);

/* Memory and event counters of a cache.  Threads: beside any other call, whose changes it may see in part.
 * Statuses: INVALID.  Since 0.1. */
KVQ_API int32_t kvq_stats_get(kvq_cache *cache, kvq_stats *stats);

/* ------------------------------------------------------------------------------------------------ token scores (SemKV) */

/* SemKV section 3.3: eight indicators, and random, from what a runtime has at hand.  They agree with the exact value to 1e-5
 * relative; the selection is exact given the scores.  Pure functions with the same bits on every backend; at most 2^24 tokens a call.
 * All inputs of a call lie in one memory and on one device, and so does `scores`.  In device memory the call only launches on `stream`:
 * a token with an element that is not finite (attention: a key) gets NaN, which a later call that takes the scores refuses. */
#define KVQ_SCORE_DELTA_NORM 0   /* mean over the last m layers of |h(l) - h(l-1)| (Eq. 3) */
#define KVQ_SCORE_COSINE_DELTA 1 /* mean over the last m layers of 1 - cos(h(l), h(l-1)); 0 where a norm is 0 */
#define KVQ_SCORE_NORM 2         /* |h(L)| */
#define KVQ_SCORE_VARIANCE 3     /* variance of the coordinates of h(L), divided by dim */

/* Scores from hidden states: kind KVQ_SCORE_*; hidden [n_hidden] tensors [n_tokens][1][dim], layers ascending, read as float32.  The
 * delta kinds use all of them, m = n_hidden - 1 >= 1; the others the last.  Out: scores [n_tokens].
 * Statuses: INVALID, NONFINITE, UNSUPPORTED, DEVICE.  Since 0.1. */
KVQ_API int32_t kvq_scores_hidden(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim,
                                  float *scores, void *stream);

/* key-norm or value-norm: the mean over layers and KV heads of the norm of a token's row, entered by rule 1.4.
 * In: rows [n_layers] tensors [n_tokens][heads][dim].  Out: scores [n_tokens].  Statuses: as above.  Since 0.1. */
KVQ_API int32_t kvq_scores_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim,
                                 float *scores, void *stream);

/* self-information: -ln p(token i | before) by softmax over logits [n_tokens][1][vocab], row i being the prediction of targets[i].
 * Out: scores [n_tokens].  Statuses: as above, INVALID also for a target beyond vocab (on a device: NaN).  Since 0.1. */
KVQ_API int32_t kvq_scores_self_information(const kvq_tensor *logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab,
                                            float *scores, void *stream);

/* accumulated attention: adds the attention that each key receives to scores [n_keys].
 * In: weights [n_queries][heads][n_keys]; strides tell of another order.  Statuses: as above; it adds all or nothing.  Since 0.1. */
KVQ_API int32_t kvq_scores_attention(const kvq_tensor *weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores,
                                     void *stream);

/* random: float(splitmix64(seed + first + i) >> 40) for i < n_tokens, in memory KVQ_MEMORY_*.  Statuses: as above.  Since 0.1. */
KVQ_API int32_t kvq_scores_random(uint64_t seed, uint64_t first, uint64_t n_tokens, uint32_t memory, float *scores, void *stream);

/* ------------------------------------------------------------------------------------------------ stateless calls */

/* One tensor of one KV head under a codec (section 5): what the conformance vectors call. */
typedef struct kvq_codec {
  uint32_t struct_size;
  uint32_t tensor;       /* KVQ_TENSOR_* */
  const char *text;      /* codec text, complete: with its mask or width list */
  uint32_t dim;          /* channels */
  uint32_t rope_layout;  /* KVQ_ROPE_*; as in kvq_layer, for keys */
  uint32_t rotary_dim;   /* 0: dim */
  uint32_t rotary_first;
  const uint16_t *mu;    /* fp16 centre [dim], with center=1; else NULL */
} kvq_codec;

/* Encode a block of tokens.
 * In: codec; x [tokens][1][dim] in host memory; tokens, at most 2^24.  Out: wire (cap, needed) as usual.
 * Statuses: INVALID (text, shape, token count that is no whole group), NONFINITE, NOMEM, SIZE.  Since 0.1. */
KVQ_API int32_t kvq_codec_encode(const kvq_codec *codec, const kvq_tensor *x, uint64_t tokens, void *wire, size_t cap,
                                 size_t *needed);

/* Decode a block of `tokens` tokens to float32 [tokens][dim].
 * Statuses: INVALID, CORRUPT (bytes that no encoder writes), NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_codec_decode(const kvq_codec *codec, const void *wire, size_t size, uint64_t tokens, float *out);

/* Inputs of a stateless policy decision for one layer and KV head (section 6). */
typedef struct kvq_policy {
  uint32_t struct_size;
  uint32_t q_heads;        /* query heads of the KV head, in q */
  const char *text;        /* see kvq_policy_decide */
  uint32_t dim, rope_layout, rotary_dim, rotary_first; /* of the keys, as in kvq_codec */
  uint64_t n_tokens;       /* of k and q */
  const kvq_tensor *k;     /* [n_tokens][1][dim] or NULL */
  const kvq_tensor *q;     /* [n_tokens][q_heads][dim] or NULL */
  const double *pair_scores; /* fp64 [n_scores]: given scores instead of statistics (blockgtq, pair-widths); or NULL */
  const float *token_scores; /* fp32 [n_scores]: semkv-*; or NULL */
  uint64_t n_scores;
} kvq_policy;

/* Decide what policy->text asks for (section 6; keys in parentheses, NAME(key=value,...)):
 *
 *   pnmix(r, criterion), channel-split(r)    k and q as the criterion asks     mask of pairs or channels
 *   blockgtq(avg, ...), pair-widths(avg, ...)  k and q, or pair_scores [dim/2]   a width per pair, 1 byte each
 *   semkv-prompt(r), semkv-block(r)          token_scores [n_scores]           token flags
 *   kitty(boost)                             k of one group                    mask of channels
 *   center                                   k                                 centre, fp16 [dim]
 *   chanmix(share)                           pair_scores: ranges of channels   a width per channel, 1 byte each
 *   chanmix(r_h)                             pair_scores: scores of heads      mask of heads
 *   pmkvq-shrink(budget, kv_heads, dim_k, dim_v)  n_tokens                     the layer's width, 1 byte
 *   pmkvq-budgets(total, kv_heads, dim_k, dim_v)  n_tokens, pair_scores: layers  bytes of each layer, uint64
 *
 * Masks and flags have 1 bit per unit, lowest first, padded with 0 to a byte; numbers are little-endian.
 * Out: buf (cap, needed) as usual.
 * Statuses: INVALID, STATE (statistics of a side with count 0), NONFINITE, UNSUPPORTED, NOMEM, SIZE.  Since 0.1. */
KVQ_API int32_t kvq_policy_decide(const kvq_policy *policy, void *buf, size_t cap, size_t *needed);

/* Exact statistics of one layer and KV head (section 6): 128-bit sums, low word first. */
typedef struct kvq_pair_sums {
  uint64_t k1[2], k2[2], q1[2], q2[2];
} kvq_pair_sums;
typedef struct kvq_channel_sums {
  uint64_t sum[2];   /* two's complement: sum of x * 2^24 */
  uint64_t abs[2];   /* sum of |x| * 2^24 */
  float min, max;    /* +inf, -inf without tokens */
} kvq_channel_sums;

/* Compute the statistics of policy->k and policy->q (text and scores are ignored).
 * Out: pairs [dim/2], channels of K [dim] (either may be NULL), counts[2] = {nk, nq}.
 * Statuses: INVALID, NONFINITE, NOMEM.  Since 0.1. */
KVQ_API int32_t kvq_policy_stats(const kvq_policy *policy, kvq_pair_sums *pairs, kvq_channel_sums *channels, uint64_t counts[2]);

#ifdef __cplusplus
}
#endif
#endif

// kvq.capi: the functions of kvq.h, as thin as they come.  The package kvq is what people use.
//
// Plain functions keep their name and arguments.  Statuses become exceptions, output arguments become results, buffers come as
// anything with Python's buffer protocol (NumPy arrays), None is NULL.  Functions that write (buf, cap, needed) take one
// writable buffer or None and return how much is needed; if that is more than the buffer holds, nothing was written.
// Functions whose descriptor holds pointers take its fields one by one instead and are called call_*.
// Sizes of arrays are not checked here.
%module(package="kvq", threads="1") capi
%feature("autodoc", "0");

%{
#include <stdlib.h>

#include "buffers.h"
#include "kvq/kvq.h"
#include "shim.h"

/* The exception of failing calls, kvq.Error(status, detail). */
static PyObject *error_class;

static void raise_status(int32_t status) {
  char detail[1024] = "";
  kvq_error_detail(detail, sizeof detail, NULL);
  PyObject *arguments = Py_BuildValue("(is)", (int)status, detail);
  if (arguments) PyErr_SetObject(error_class ? error_class : PyExc_RuntimeError, arguments);
  Py_XDECREF(arguments);
}
%}

%include <stdint.i>
%include <typemaps.i>

// ------------------------------------------------------------------------------------------------ results

// SIZE is no exception: the caller sees from the result how much is needed.
%typemap(out) int32_t {
  if ($1 < 0 && $1 != KVQ_E_SIZE) {
    raise_status($1);
    SWIG_fail;
  }
  $result = NULL;
}
// Output arguments take the place of the status; without any the result is None.
%typemap(ret) int32_t "if (!$result && !PyErr_Occurred()) $result = SWIG_Py_Void();"
%apply uint64_t *OUTPUT { kvq_seq *seq, kvq_seq *child, kvq_step *step, uint64_t *tokens };
%apply uint64_t { kvq_seq, kvq_step };

%typemap(in, numinputs=0) kvq_cache **cache (kvq_cache *created = NULL) "$1 = &created;"
%typemap(argout) kvq_cache **cache {
  $result = SWIG_AppendOutput($result, SWIG_NewPointerObj(*$1, $descriptor(kvq_cache *), 0));
}

// ------------------------------------------------------------------------------------------------ buffers

// One writable buffer or None for (buf, cap, needed).
%typemap(in) (void *buf, size_t cap, size_t *needed) (Py_buffer view = {0}, size_t required = 0) {
  $1 = NULL;
  $2 = 0;
  $3 = &required;
  if ($input != Py_None) {
    if (array_from_buffer($input, "B", 1, &view)) SWIG_fail;
    $1 = ($1_ltype)view.buf;
    $2 = (size_t)view.len;
  }
}
%typemap(freearg) (void *buf, size_t cap, size_t *needed) "PyBuffer_Release(&view$argnum);"
%typemap(argout) (void *buf, size_t cap, size_t *needed) {
  $result = SWIG_AppendOutput($result, PyLong_FromSize_t(required$argnum));
}
%apply (void *buf, size_t cap, size_t *needed) { (char *buf, size_t cap, size_t *needed), (void *wire, size_t cap, size_t *needed) };

// Any bytes for (data, size).
%typemap(in) (const void *blob, size_t size) (Py_buffer view = {0}) {
  if (array_from_buffer($input, "B", 0, &view)) SWIG_fail;
  $1 = view.buf;
  $2 = (size_t)view.len;
}
%typemap(freearg) (const void *blob, size_t size) "PyBuffer_Release(&view$argnum);"
%apply (const void *blob, size_t size) { (const void *wire, size_t size) };

// Tensors and plain arrays; None is NULL.
%define %buffer(CTYPE, NAME, FORMATS, WRITABLE)
%typemap(in) CTYPE NAME (Py_buffer view = {0}) {
  $1 = NULL;
  if ($input != Py_None) {
    if (array_from_buffer($input, FORMATS, WRITABLE, &view)) SWIG_fail;
    $1 = ($1_ltype)view.buf;
  }
}
%typemap(freearg) CTYPE NAME "PyBuffer_Release(&view$argnum);"
%enddef
%buffer(const kvq_seq *, seqs, "QL", 0)
%buffer(const uint32_t *, , "I", 0)
%buffer(const uint16_t *, , "eH", 0)
%buffer(const uint8_t *, , "B", 0)
%buffer(const uint64_t *, , "QL", 0)
%buffer(const float *, , "f", 0)
%buffer(const double *, , "d", 0)
%buffer(float *, , "f", 1)
%buffer(kvq_pair_sums *, pairs, "B", 1)
%buffer(kvq_channel_sums *, channels, "B", 1)
%buffer(uint64_t, counts[2], "QL", 1)

%typemap(in) const kvq_tensor * (Py_buffer view = {0}, kvq_tensor tensor) {
  $1 = NULL;
  if ($input != Py_None) {
    if (tensor_from_buffer($input, 0, &view, &tensor)) SWIG_fail;
    $1 = &tensor;
  }
}
%typemap(in) const kvq_tensor *out (Py_buffer view = {0}, kvq_tensor tensor) {
  if (tensor_from_buffer($input, 1, &view, &tensor)) SWIG_fail;
  $1 = &tensor;
}
%typemap(freearg) const kvq_tensor * "PyBuffer_Release(&view$argnum);"

// A sequence of tensors of one shape.
%define %buffers(TYPEMAP, ITEM, CONVERT)
%typemap(in) TYPEMAP (Py_buffer *views = NULL, ITEM *items = NULL, Py_ssize_t n = 0) {
  const Py_ssize_t length = PySequence_Size($input);
  if (length < 0) SWIG_fail;
  views = (Py_buffer *)calloc((size_t)length + 1, sizeof *views);
  items = (ITEM *)calloc((size_t)length + 1, sizeof *items);
  for (; views && items && n < length; ++n) {
    PyObject *object = PySequence_GetItem($input, n);
    const int failed = !object || CONVERT;
    Py_XDECREF(object);
    if (failed) SWIG_fail;
  }
  $1 = ($1_ltype)items;
  $2 = (uint32_t)n;
}
%typemap(freearg) TYPEMAP {
  while (n$argnum > 0) PyBuffer_Release(&views$argnum[--n$argnum]);
  free(views$argnum);
  free(items$argnum);
}
%enddef
%buffers(%arg((const kvq_tensor *rows, uint32_t n_layers)), kvq_tensor, tensor_from_buffer(object, 0, &views[n], &items[n]))
%buffers(%arg((const kvq_tensor *hidden, uint32_t n_hidden)), kvq_tensor, tensor_from_buffer(object, 0, &views[n], &items[n]))

// A CUDA stream as an integer, or None.
%typemap(in) void *stream "$1 = $input == Py_None ? NULL : PyLong_AsVoidPtr($input);  if (PyErr_Occurred()) SWIG_fail;"

// ------------------------------------------------------------------------------------------------ kvq.h

// Structs without pointers into buffers are classes; struct_size is set by their constructor.
%define %sized(STRUCT)
%extend STRUCT {
  STRUCT() {
    STRUCT *self = (STRUCT *)calloc(1, sizeof(STRUCT));
    if (self) self->struct_size = sizeof(STRUCT);
    return self;
  }
}
%enddef
%sized(kvq_layer)
%sized(kvq_config)
%sized(kvq_lengths)
%sized(kvq_stats)
%sized(kvq_account)
%sized(kvq_backend_info)
%sized(kvq_support)

// The setters store copies; they are called once, and the destructor frees the copies.
%warnfilter(451) kvq_config::recipe;
%warnfilter(451) kvq_config::path;
%extend kvq_config {
  ~kvq_config() {
    free((void *)self->recipe);
    free((void *)self->path);
    free(self);
  }
}

%ignore kvq_tensor;
%ignore kvq_allocator;
%ignore kvq_recipe_data;
%ignore kvq_prefill;
%ignore kvq_attend_options;
%ignore kvq_calibration;
%ignore kvq_codec;
%ignore kvq_policy;
%ignore kvq_pair_sums;
%ignore kvq_channel_sums;
%ignore kvq_config::allocator;
%ignore kvq_config::log;
%ignore kvq_config::log_user;
%ignore kvq_config::recipe_data;
%ignore kvq_recipe_account;
%ignore kvq_create;
%ignore kvq_prefill_commit;
%ignore kvq_attend;
%ignore kvq_calibrate;
%ignore kvq_codec_encode;
%ignore kvq_codec_decode;
%ignore kvq_policy_decide;
%ignore kvq_policy_stats;
%immutable kvq_backend_info::name;
%immutable kvq_backend_info::path;
%immutable kvq_backend_info::reason;
%immutable kvq_support::reason;

%include "kvq/kvq.h"

// A C array of layers, for kvq_config.layers and for kvq_recipe_*.
%include <carrays.i>
%array_class(kvq_layer, LayerArray)

// ------------------------------------------------------------------------------------------------ call_*

%inline %{
static int32_t call_create(kvq_config *config, const uint8_t *bits, uint64_t n_bits, const double *scores, uint64_t n_scores,
                           const uint64_t *budgets, uint64_t n_budgets, kvq_cache **cache) {
  const kvq_recipe_data data = {sizeof data, 0, bits, scores, budgets, n_bits, n_scores, n_budgets};
  config->recipe_data = &data;
  const int32_t status = kvq_create(config, cache);
  config->recipe_data = NULL;
  return status;
}

static int32_t call_recipe_account(const char *text, const kvq_layer *layers, uint32_t n_layers, uint64_t length, const uint8_t *bits,
                                   uint64_t n_bits, const double *scores, uint64_t n_scores, const uint64_t *budgets,
                                   uint64_t n_budgets, kvq_account *account) {
  const kvq_recipe_data data = {sizeof data, 0, bits, scores, budgets, n_bits, n_scores, n_budgets};
  return kvq_recipe_account(text, layers, n_layers, length, &data, account);
}

static int32_t call_prefill(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t flags, uint64_t n_tokens,
                            const kvq_tensor *k, const kvq_tensor *v, const kvq_tensor *q, const float *scores, void *stream) {
  const kvq_prefill desc = {sizeof desc, layer, flags, scores ? (uint32_t)n_tokens : 0, n_tokens, k, v, q, scores};
  return kvq_prefill_commit(cache, seq, &desc, stream);
}

static int32_t call_attend(kvq_cache *cache, kvq_step step, uint32_t layer, const kvq_tensor *q, const kvq_tensor *out, float *lse,
                           uint32_t window, float scale, float softcap, const float *sinks, void *stream) {
  const kvq_attend_options options = {sizeof options, window, scale, softcap, sinks, 0, 0};
  return kvq_attend(cache, step, layer, q, out, lse, &options, stream);
}

static int32_t call_calibrate(kvq_cache *cache, uint32_t layer, uint64_t n_tokens, const kvq_tensor *k, const kvq_tensor *v,
                              const kvq_tensor *q) {
  const kvq_calibration data = {sizeof data, layer, n_tokens, k, v, q};
  return kvq_calibrate(cache, &data);
}

static int32_t call_codec_encode(uint32_t tensor, const char *text, uint32_t dim, uint32_t rope_layout, uint32_t rotary_dim,
                                 uint32_t rotary_first, const uint16_t *mu, const kvq_tensor *x, uint64_t tokens_in_block,
                                 void *wire, size_t cap, size_t *needed) {
  const kvq_codec codec = {sizeof codec, tensor, text, dim, rope_layout, rotary_dim, rotary_first, mu};
  return kvq_codec_encode(&codec, x, tokens_in_block, wire, cap, needed);
}

static int32_t call_codec_decode(uint32_t tensor, const char *text, uint32_t dim, uint32_t rope_layout, uint32_t rotary_dim,
                                 uint32_t rotary_first, const uint16_t *mu, const void *wire, size_t size,
                                 uint64_t tokens_in_block, float *values) {
  const kvq_codec codec = {sizeof codec, tensor, text, dim, rope_layout, rotary_dim, rotary_first, mu};
  return kvq_codec_decode(&codec, wire, size, tokens_in_block, values);
}

static int32_t call_policy_decide(const char *text, uint32_t q_heads, uint32_t dim, uint32_t rope_layout, uint32_t rotary_dim,
                                  uint32_t rotary_first, uint64_t n_tokens, const kvq_tensor *k, const kvq_tensor *q,
                                  const double *pair_scores, const float *token_scores, uint64_t n_scores, void *buf, size_t cap,
                                  size_t *needed) {
  const kvq_policy policy = {sizeof policy, q_heads,  text, dim, rope_layout, rotary_dim, rotary_first,
                             n_tokens,      k,        q,    pair_scores, token_scores, n_scores};
  return kvq_policy_decide(&policy, buf, cap, needed);
}

static int32_t call_policy_stats(uint32_t q_heads, uint32_t dim, uint32_t rope_layout, uint32_t rotary_dim, uint32_t rotary_first,
                                 uint64_t n_tokens, const kvq_tensor *k, const kvq_tensor *q, kvq_pair_sums *pairs,
                                 kvq_channel_sums *channels, uint64_t counts[2]) {
  const kvq_policy policy = {sizeof policy, q_heads, NULL, dim, rope_layout, rotary_dim, rotary_first,
                             n_tokens,      k,       q,    NULL, NULL, 0};
  return kvq_policy_stats(&policy, pairs, channels, counts);
}

/* // ------------------------------------------------------------------------------------------------ loading */

/* Load libkvq; the empty string, or why it failed.  Nothing else may be called before it has succeeded. */
static const char *load(const char *file) {
  static char message[1024];
  message[0] = 0;
  shim_load(file, message, sizeof message);
  return message;
}

/* The exception class of failing calls. */
static void set_error(PyObject *cls) {
  Py_XINCREF(cls);
  Py_XDECREF(error_class);
  error_class = cls;
}
%}

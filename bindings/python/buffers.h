/* Python buffers as what kvq.h takes: strided tensors without copying, and plain arrays.
 *
 * Every function returns 0, or -1 with a Python exception set.  A view that was filled must be released after the call. */
#ifndef KVQ_PYTHON_BUFFERS_H
#define KVQ_PYTHON_BUFFERS_H

#include <Python.h>
#include <string.h>

#include "kvq/kvq.h"

/* KVQ_DTYPE_* of a buffer's format character, or -1.  uint16 carries bf16, which Python has no character for. */
static int buffer_dtype(const char *format) {
  static const struct {
    char format;
    int dtype;
  } dtypes[] = {{'f', KVQ_DTYPE_F32}, {'e', KVQ_DTYPE_F16}, {'H', KVQ_DTYPE_BF16}, {'d', KVQ_DTYPE_F64}};
  if (format[0] == '<' || format[0] == '=' || format[0] == '@') ++format;
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; ++i)
    if (format[0] == dtypes[i].format && !format[1]) return dtypes[i].dtype;
  return -1;
}

/* Elements between neighbours along an axis; 0 says "packed" in kvq.h, which is right where there are no neighbours. */
static int axis_stride(const Py_buffer *view, int axis, int64_t *stride) {
  *stride = 0;
  if (view->shape[axis] <= 1) return 0;
  if (view->strides[axis] == 0 || view->strides[axis] % view->itemsize) {
    PyErr_SetString(PyExc_ValueError, "an array's strides must be multiples of its item size, and not 0: pass a copy");
    return -1;
  }
  *stride = view->strides[axis] / view->itemsize;
  return 0;
}

/* An array [token][head][channel] whose channels are contiguous. */
static int tensor_from_buffer(PyObject *object, int writable, Py_buffer *view, kvq_tensor *tensor) {
  if (PyObject_GetBuffer(object, view, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) return -1;
  const int dtype = buffer_dtype(view->format ? view->format : "B");
  const char *problem = NULL;
  if (view->ndim != 3)
    problem = "an array must have 3 axes: token, head, channel";
  else if (dtype < 0)
    problem = "an array must be float16, float32, float64, or uint16 holding bfloat16";
  else if (view->shape[2] > 1 && view->strides[2] != view->itemsize)
    problem = "an array's channels (its last axis) must be contiguous: pass a copy";
  memset(tensor, 0, sizeof *tensor);
  if (problem)
    PyErr_SetString(PyExc_ValueError, problem);
  else if (!axis_stride(view, 0, &tensor->token_stride) && !axis_stride(view, 1, &tensor->head_stride)) {
    tensor->struct_size = sizeof *tensor;
    tensor->dtype = (uint32_t)dtype;
    tensor->data = view->buf;
    /* With one token and strided heads the token stride is of no interest, and the other way round. */
    return 0;
  }
  PyBuffer_Release(view);
  return -1;
}

/* A contiguous array whose items have one of the given format characters ("B" accepts any bytes). */
static int array_from_buffer(PyObject *object, const char *formats, int writable, Py_buffer *view) {
  if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) return -1;
  const char *format = view->format ? view->format : "B";
  if (format[0] == '<' || format[0] == '=' || format[0] == '@') ++format;
  if (formats[0] == 'B' || (strchr(formats, format[0]) && !format[1])) return 0;
  PyErr_Format(PyExc_ValueError, "an array of item format '%s' where one of '%s' is needed", format, formats);
  PyBuffer_Release(view);
  return -1;
}

#endif

// Prompts on a device: rows that enter, their statistics, and packing.
#include <algorithm>
#include <cstring>

#include "cuda/backend_class.h"
#include "policy/policy.h"
#include "util/entry.h"
#include "util/fp.h"

namespace kvq::cuda {

// ---- rows

// The pieces as kernels take them, behind those that are there; the number of their rows.
static uint32_t add_pieces(std::span<const PageRows> pieces, Vector<DevicePiece> *out) {
  uint32_t start = 0;
  for (const PageRows &piece : pieces) {
    out->push_back({piece.page, piece.first, piece.count, start, 0});
    start += piece.count;
  }
  return start;
}

uint32_t CudaBackend::upload_pieces(const Turn &turn, std::span<const PageRows> pieces, Buffer *buffer) {
  Vector<DevicePiece> host(memory_);
  host.reserve(pieces.size());
  const uint32_t rows = add_pieces(pieces, &host);
  upload(turn, host.data(), host.size() * sizeof(DevicePiece), buffer);
  return rows;
}

Status CudaBackend::check_memory(const void *data, const char *name) {
  const void *&known = known_[reinterpret_cast<uintptr_t>(data) / 256 % known_.size()];
  if (known == data || reads_host_memory_) return KVQ_OK;
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || !attributes.devicePointer)
    return fail(KVQ_E_INVALID, "%s: memory=DEVICE, but device %d cannot read its data at %p", name, device_, data);
  known = data;
  return KVQ_OK;
}

Status CudaBackend::to_device(const Turn &turn, const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim,
                              const char *name, Buffer *buffer, DeviceTensor *out, uint64_t *saturated) {
  const int64_t size = dtype_bytes(x.dtype);
  const int64_t head_stride = x.head_stride ? x.head_stride : dim, token_stride = x.token_stride ? x.token_stride : int64_t(heads) * dim;
  const char *data = static_cast<const char *>(x.data) + int64_t(first) * token_stride * size;
  *out = {data, x.dtype, token_stride, head_stride};
  if (x.memory == KVQ_MEMORY_DEVICE) return check_memory(x.data, name);
  if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "%s: host memory cannot be captured in a CUDA graph", name);
  Vector<uint16_t> rows(size_t(count) * heads * dim, memory_);
  for (uint64_t t = 0; t < count; t++)
    for (uint32_t h = 0; h < heads; h++) {
      const void *row = data + (int64_t(t) * token_stride + h * head_stride) * size;
      const uint32_t bad = enter_row(row, x.dtype, dim, rows.data() + (t * heads + h) * dim, saturated);
      if (bad < dim)
        return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed", name,
                    (unsigned long long)(first + t), h, bad);
    }
  upload(turn, rows.data(), rows.size() * sizeof(uint16_t), buffer);
  *out = {buffer->data(), KVQ_DTYPE_F16, int64_t(heads) * dim, dim};
  return KVQ_OK;
}

Status CudaBackend::read_findings(const Turn &turn, const Findings *device, const char *const (&names)[2], uint64_t first, uint64_t *saturated) {
  Findings found;
  KVQ_CUDA(cudaMemcpyAsync(&found, device, sizeof found, cudaMemcpyDeviceToHost, turn.stream()));
  KVQ_CUDA(cudaStreamSynchronize(turn.stream()));
  return report(found, names, first, saturated);
}

Status CudaBackend::report(const Findings &found, const char *const (&names)[2], uint64_t first, uint64_t *saturated) {
  *saturated += found.saturated;
  if (found.bad == kNothingBad) return KVQ_OK;
  const BadElement bad = bad_element(found.bad);
  return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed",
              names[bad.tensor], (unsigned long long)(first + bad.token), bad.head, bad.channel);
}

Status CudaBackend::store_pieces(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first,
                                 std::span<const PageRows> pieces, uint64_t *saturated) {
  const Turn turn(order_);
  if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "a prompt cannot be captured in a CUDA graph");
  uint64_t count = 0;
  for (const PageRows &piece : pieces) count += piece.count;
  Buffer list(arena_), key_rows(arena_), value_rows(arena_), findings(arena_);
  DeviceTensor keys, values;
  KVQ_TRY(to_device(turn, k, first, count, shape.kv_heads, shape.dim_k, "k", &key_rows, &keys, saturated));
  KVQ_TRY(to_device(turn, v, first, count, shape.kv_heads, shape.dim_v, "v", &value_rows, &values, saturated));
  const uint32_t rows = upload_pieces(turn, pieces, &list);
  KVQ_TRY(clear_findings(turn, &findings));
  KVQ_CUDA(cuda::enter_rows(raw_shape(shape), keys, values, 0, list.as<DevicePiece>(), uint32_t(pieces.size()), rows,
                            findings.as<Findings>(), turn.stream()));
  if (k.memory == KVQ_MEMORY_HOST && v.memory == KVQ_MEMORY_HOST) return KVQ_OK;
  return read_findings(turn, findings.as<Findings>(), {"k", "v"}, first, saturated);
}

Status CudaBackend::check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                               uint64_t *saturated) {
  const Turn turn(order_);
  Buffer rows(arena_), findings(arena_);
  DeviceTensor device;
  KVQ_TRY(to_device(turn, x, first, count, heads, dim, name, &rows, &device, saturated));
  if (x.memory == KVQ_MEMORY_HOST) return KVQ_OK;
  KVQ_TRY(clear_findings(turn, &findings));
  KVQ_CUDA(cuda::check_rows(device, count, heads, dim, findings.as<Findings>(), turn.stream()));
  return read_findings(turn, findings.as<Findings>(), {name, name}, first, saturated);
}

void CudaBackend::enter_rows(const kvq_tensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out) {
  if (x.memory == KVQ_MEMORY_HOST) return Backend::enter_rows(x, count, heads, dim, out);
  const Turn turn(order_);
  const size_t bytes = size_t(count) * heads * dim * sizeof(uint16_t);
  Buffer rows(arena_, bytes), findings(arena_, sizeof(Findings));
  const DeviceTensor device{x.data, x.dtype, x.token_stride, x.head_stride};
  must(enter_dense(device, count, heads, dim, rows.as<uint16_t>(), findings.as<Findings>(), turn.stream()), "enter rows");
  download(turn, rows.data(), bytes, out);
}

void CudaBackend::copy_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) {
  const Turn turn(order_);
  must(copy_raw(raw_shape(shape), from, from_row, to, to_row, count, turn.stream()), "copy rows");
}

void CudaBackend::load_rows(const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) {
  const Turn turn(order_);
  const size_t bytes = size_t(rows.count) * (tensor == KVQ_TENSOR_K ? shape.dim_k : shape.dim_v) * sizeof(uint16_t);
  Buffer list(arena_), dense(arena_, bytes);
  upload_pieces(turn, std::span(&rows, 1), &list);
  must(load_raw(raw_shape(shape), list.as<DevicePiece>(), 1, rows.count, head, tensor, dense.as<uint16_t>(), turn.stream()), "load rows");
  download(turn, dense.data(), bytes, out);
}

// ---- statistics

namespace {

UInt128 join(const Wide &sum) { return UInt128(sum.high) << 64 | sum.low; }

// NaN for 0 and 0xffff: an extreme that nobody wanted, which the comparisons below ignore.
float unorder(uint32_t ordered) {
  const uint16_t o = uint16_t(ordered ^ 0x8000u);
  return half_to_float(uint16_t(o ^ (uint16_t(int16_t(o) >> 15) & 0x7fffu)));
}

void add_channels(const Wide *sums, const uint32_t *ranges, Vector<ChannelSums> *channels) {
  for (size_t c = 0; c < channels->size(); c++) {
    ChannelSums &to = (*channels)[c];
    to.sum += Int128(join(sums[2 * c]));
    to.abs += join(sums[2 * c + 1]);
    to.min = std::min(to.min, unorder(0xffffu - ranges[2 * c]));
    to.max = std::max(to.max, unorder(ranges[2 * c + 1]));
  }
}

}  // namespace

void CudaBackend::add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                                 LayerStatistics *statistics) {
  uint64_t counted = 0;
  if (sum_rows(shape, kv, q, q_first, statistics, &counted) != KVQ_OK) throw DeviceFailure("statistics", failure_detail());
}

Status CudaBackend::check_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, LayerStatistics *statistics,
                                     uint64_t *saturated) {
  return sum_rows(shape, kv, q, 0, statistics, saturated);
}

// Findings, sums and ranges of a call lie together, so that one copy brings them.
Status CudaBackend::sum_rows(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                             LayerStatistics *statistics, uint64_t *saturated) {
  const Turn turn(order_);
  const StatisticsLayout layout{shape.kv_heads, shape.q_heads / shape.kv_heads, shape.dim_k, shape.dim_v};
  const HeadShape keys = shape.head(KVQ_TENSOR_K);
  Vector<uint16_t> pairs(memory_);
  for (uint32_t p = 0; p < shape.dim_k / 2; p++) {
    const Pair pair = pair_channels(keys, p);
    pairs.push_back(uint16_t(pair.u)), pairs.push_back(uint16_t(pair.v));
  }
  const size_t n_sums = size_t(layout.sums()) * shape.kv_heads, n_ranges = size_t(layout.ranges()) * shape.kv_heads;
  Vector<Wide> results(1 + n_sums + (n_ranges * sizeof(uint32_t) + sizeof(Wide) - 1) / sizeof(Wide), memory_);
  const size_t bytes = results.size() * sizeof(Wide);
  static_assert(sizeof(Findings) == sizeof(Wide));
  Buffer list(arena_), table(arena_), device(arena_, bytes), queries(arena_);
  const uint32_t rows = upload_pieces(turn, kv, &list);
  if (rows == 0) return KVQ_OK;
  DeviceTensor query_rows{};
  if (q) KVQ_TRY(to_device(turn, *q, q_first, rows, shape.q_heads, shape.dim_k, "q", &queries, &query_rows, saturated));
  upload(turn, pairs.data(), pairs.size() * sizeof(uint16_t), &table);
  KVQ_CUDA(cudaMemsetAsync(device.data(), 0, bytes, turn.stream()));
  KVQ_TRY(clear_findings(turn, &device));
  Wide *device_sums = device.as<Wide>() + 1;
  KVQ_CUDA(sum_statistics(layout, statistics->wanted, list.as<DevicePiece>(), uint32_t(kv.size()), rows, q ? &query_rows : nullptr,
                          table.as<uint16_t>(), processors_.count, device_sums, reinterpret_cast<uint32_t *>(device_sums + n_sums),
                          device.as<Findings>(), turn.stream()));
  download(turn, device.data(), bytes, results.data());
  KVQ_TRY(report({results[0].low, results[0].high}, {"q", "q"}, q_first, saturated));
  const uint32_t *ranges = reinterpret_cast<const uint32_t *>(results.data() + 1 + n_sums);
  for (uint32_t h = 0; h < shape.kv_heads; h++) {
    HeadStatistics &to = statistics->heads[h];
    const Wide *from = results.data() + 1 + size_t(h) * layout.sums();
    const uint32_t *range = ranges + size_t(h) * layout.ranges();
    for (size_t p = 0; p < to.pairs.size(); p++, from += 4) {
      to.pairs[p].k1 += join(from[0]), to.pairs[p].k2 += join(from[1]);
      to.pairs[p].q1 += join(from[2]), to.pairs[p].q2 += join(from[3]);
    }
    add_channels(from, range, &to.k);
    add_channels(from + 2 * shape.dim_k, range + 2 * shape.dim_k, &to.v);
    to.nk += rows;
    if (q) to.nq += uint64_t(rows) * layout.ratio;
  }
  return KVQ_OK;
}

void CudaBackend::sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums) {
  LayerStatistics statistics(memory_);
  reset_statistics(shape, &statistics);
  statistics.wanted = kKeySums;
  add_statistics(shape, rows, nullptr, 0, &statistics);
  for (uint32_t h = 0; h < shape.kv_heads; h++) sums[h].add(statistics.heads[h].k.data(), statistics.heads[h].nk);
}

// ---- packing

PackPlan CudaBackend::pack_plan(const CudaPageFormat &format) const {
  const RawShape shape{uint32_t(format.k.size()), format.k[0].shape.dim, format.v[0].shape.dim};
  return PackPlan(shape, format.page_tokens, format.tensors, shared_limit_, processors_.count);
}

void CudaBackend::pack(const LayerShape &, const PageFormat &page_format, std::span<const PageRows> from, std::span<const PageRows> to) {
  const CudaPageFormat &format = static_cast<const CudaPageFormat &>(page_format);
  const PackPlan plan = pack_plan(format);
  const Turn turn(order_);
  Buffer list(arena_), scratch(arena_);
  Vector<DevicePiece> host(memory_);
  host.reserve(from.size() + to.size());
  add_pieces(from, &host), add_pieces(to, &host);
  upload(turn, host.data(), host.size() * sizeof(DevicePiece), &list);
  if (!plan.shared) scratch.reserve(plan.bytes * plan.blocks);
  const DevicePiece *sources = list.as<DevicePiece>();
  must(cuda::pack(plan, format.device, sources, uint32_t(from.size()), sources + from.size(), uint32_t(to.size()), scratch.data(), turn.stream()),
       "pack");
}

void CudaBackend::copy_packed(const PageFormat &format, const void *from, void *to) {
  const Turn turn(order_);
  must(cudaMemcpyAsync(to, from, format.bytes, cudaMemcpyDeviceToDevice, turn.stream()), "copy a page");
}

void CudaBackend::narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to, uint32_t count) {
  const CudaPageFormat &wide = static_cast<const CudaPageFormat &>(from_format), &slim = static_cast<const CudaPageFormat &>(to_format);
  const PackPlan plan = pack_plan(slim);
  const Turn turn(order_);
  Buffer scratch(arena_);
  if (!plan.shared) scratch.reserve(plan.bytes * plan.blocks);
  must(narrow(plan, wide.device, from, slim.device, to, count, scratch.data(), turn.stream()), "narrow");
}

void CudaBackend::unpack(const PageFormat &page_format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                         Block *block) {
  const CudaPageFormat &format = static_cast<const CudaPageFormat &>(page_format);
  const TensorFormat &f = format.tensors[2 * head + tensor];
  const size_t n_params = params_of(f, count), n_codes = f.family == Family::raw ? 0 : size_t(count) * f.dim;
  const size_t n_boosted = f.positions ? size_t(count / f.group) * f.dim : 0;
  const size_t codes = block->codes.size(), params = block->params.size(), boosted = block->boosted.size();
  block->tokens += count;
  block->params.resize(params + n_params), block->codes.resize(codes + n_codes), block->boosted.resize(boosted + n_boosted);
  const size_t param_bytes = n_params * sizeof(uint16_t);
  Vector<uint8_t> host(param_bytes + n_codes + n_boosted, memory_);
  const Turn turn(order_);
  Buffer rows(arena_, host.size());
  uint8_t *const data = rows.as<uint8_t>();
  must(cuda::unpack(format.device, page, first, count, head, tensor, {data + param_bytes, rows.as<uint16_t>(), data + param_bytes + n_codes}, turn.stream()),
       "unpack");
  download(turn, data, host.size(), host.data());  // all at once: it is a wait that costs
  const uint8_t *const codes_at = host.data() + param_bytes;
  if (n_params) std::memcpy(block->params.data() + params, host.data(), param_bytes);
  if (n_codes) std::memcpy(block->codes.data() + codes, codes_at, n_codes);
  if (n_boosted) std::memcpy(block->boosted.data() + boosted, codes_at + n_codes, n_boosted);
}

}  // namespace kvq::cuda

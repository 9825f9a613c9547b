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

Status CudaBackend::report(const Findings &found, const char *const (&names)[2], uint64_t first, uint64_t *saturated) {
  *saturated += found.saturated;
  if (found.bad == kNothingBad) return KVQ_OK;
  const BadElement bad = bad_element(found.bad);
  return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed",
              names[bad.tensor], (unsigned long long)(first + bad.token), bad.head, bad.channel);
}

// What a call finds and sums lies together on the device, so that one copy brings it: findings of what enters and of the queries,
// then a layer's sums and ranges where they are asked for.
struct Outcome {
  Outcome(Arena &arena, Memory *memory, const LayerShape &shape, bool with_sums)
      : layout{shape.kv_heads, shape.q_heads / shape.kv_heads, shape.dim_k, shape.dim_v},
        n_sums(with_sums ? size_t(layout.sums()) * shape.kv_heads : 0),
        host(2 + n_sums + (with_sums ? size_t(layout.ranges()) * shape.kv_heads * sizeof(uint32_t) / sizeof(Wide) + 1 : 0), memory), device(arena, bytes()) {}
  size_t bytes() const { return host.size() * sizeof(Wide); }
  Findings *findings(uint32_t i) const { return device.as<Findings>() + i; }
  Findings found(uint32_t i) const { return {host[i].low, host[i].high}; }
  static Wide *sums(Wide *data) { return data + 2; }
  uint32_t *ranges(Wide *data) const { return reinterpret_cast<uint32_t *>(data + 2 + n_sums); }

  StatisticsLayout layout;
  size_t n_sums;
  Vector<Wide> host;
  Buffer device;
};
static_assert(sizeof(Findings) == sizeof(Wide));

Status CudaBackend::begin(const Turn &turn, Outcome *outcome) {
  constexpr size_t kFindings = 2 * sizeof(Findings);
  KVQ_CUDA(cudaMemcpyAsync(outcome->device.data(), nothing_.data(), kFindings, cudaMemcpyDeviceToDevice, turn.stream()));
  if (outcome->n_sums) KVQ_CUDA(cudaMemsetAsync(outcome->device.as<char>() + kFindings, 0, outcome->bytes() - kFindings, turn.stream()));
  return KVQ_OK;
}

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

static void add_sums(Outcome &outcome, uint64_t rows, bool queries, LayerStatistics *statistics) {
  const StatisticsLayout &layout = outcome.layout;
  for (uint32_t h = 0; h < layout.kv_heads; h++) {
    HeadStatistics &to = statistics->heads[h];
    const Wide *from = Outcome::sums(outcome.host.data()) + size_t(h) * layout.sums();
    const uint32_t *range = outcome.ranges(outcome.host.data()) + size_t(h) * layout.ranges();
    for (size_t p = 0; p < to.pairs.size(); p++, from += 4) {
      to.pairs[p].k1 += join(from[0]), to.pairs[p].k2 += join(from[1]);
      to.pairs[p].q1 += join(from[2]), to.pairs[p].q2 += join(from[3]);
    }
    add_channels(from, range, &to.k);
    add_channels(from + 2 * layout.dim_k, range + 2 * layout.dim_k, &to.v);
    to.nk += rows;
    if (queries) to.nq += rows * layout.ratio;
  }
}

Status CudaBackend::store_chunk(const LayerShape &shape, const ChunkRows &chunk, std::span<const PageRows> pieces, LayerStatistics *statistics,
                                uint64_t *saturated) {
  const Turn turn(order_);
  if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "a prompt cannot be captured in a CUDA graph");
  Buffer list(arena_), key_rows(arena_), value_rows(arena_), query_rows(arena_);
  const uint32_t rows = upload_pieces(turn, pieces, &list);
  DeviceTensor k, v, q{};
  KVQ_TRY(to_device(turn, chunk.k, chunk.first, rows, shape.kv_heads, shape.dim_k, "k", &key_rows, &k, saturated));
  KVQ_TRY(to_device(turn, chunk.v, chunk.first, rows, shape.kv_heads, shape.dim_v, "v", &value_rows, &v, saturated));
  if (chunk.q) KVQ_TRY(to_device(turn, *chunk.q, chunk.first, rows, shape.q_heads, shape.dim_k, "q", &query_rows, &q, saturated));
  Outcome outcome(arena_, memory_, shape, statistics);
  KVQ_TRY(begin(turn, &outcome));
  KVQ_CUDA(cuda::enter_rows(raw_shape(shape), k, v, 0, list.as<DevicePiece>(), uint32_t(pieces.size()), rows, outcome.findings(0), turn.stream()));
  if (statistics)
    KVQ_TRY(sum_rows(turn, shape, list, uint32_t(pieces.size()), rows, chunk.q ? &q : nullptr, statistics->wanted, &outcome));
  else if (chunk.q && chunk.q->memory == KVQ_MEMORY_DEVICE)
    KVQ_CUDA(cuda::check_rows(q, rows, shape.q_heads, shape.dim_k, outcome.findings(1), turn.stream()));
  download(turn, outcome.device.data(), outcome.bytes(), outcome.host.data());
  KVQ_TRY(report(outcome.found(0), {"k", "v"}, chunk.first, saturated));
  KVQ_TRY(report(outcome.found(1), {"q", "q"}, chunk.first, saturated));
  if (statistics) add_sums(outcome, rows, chunk.q, statistics);
  return KVQ_OK;
}

Status CudaBackend::check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                               uint64_t *saturated) {
  const Turn turn(order_);
  Buffer rows(arena_), findings(arena_, sizeof(Findings));
  DeviceTensor device;
  KVQ_TRY(to_device(turn, x, first, count, heads, dim, name, &rows, &device, saturated));
  if (x.memory == KVQ_MEMORY_HOST) return KVQ_OK;
  KVQ_CUDA(cudaMemcpyAsync(findings.data(), nothing_.data(), sizeof(Findings), cudaMemcpyDeviceToDevice, turn.stream()));
  KVQ_CUDA(cuda::check_rows(device, count, heads, dim, findings.as<Findings>(), turn.stream()));
  Findings found;
  download(turn, findings.data(), sizeof found, &found);
  return report(found, {name, name}, first, saturated);
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

Status CudaBackend::sum_rows(const Turn &turn, const LayerShape &shape, const Buffer &pieces, uint32_t n_pieces, uint32_t rows,
                             const DeviceTensor *q, uint32_t wanted, Outcome *outcome) {
  const HeadShape keys = shape.head(KVQ_TENSOR_K);
  Vector<uint16_t> pairs(memory_);
  pairs.reserve(shape.dim_k);
  for (uint32_t p = 0; p < shape.dim_k / 2; p++) {
    const Pair pair = pair_channels(keys, p);
    pairs.push_back(uint16_t(pair.u)), pairs.push_back(uint16_t(pair.v));
  }
  Buffer table(arena_);
  upload(turn, pairs.data(), pairs.size() * sizeof(uint16_t), &table);
  Wide *const data = outcome->device.as<Wide>();
  KVQ_CUDA(sum_statistics(outcome->layout, wanted, pieces.as<DevicePiece>(), n_pieces, rows, q, table.as<uint16_t>(), processors_.count,
                          Outcome::sums(data), outcome->ranges(data), outcome->findings(1), turn.stream()));
  return KVQ_OK;
}

// The queries have been checked before.
void CudaBackend::add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                                 LayerStatistics *statistics) {
  const Turn turn(order_);
  const auto sum = [&]() -> Status {
    Buffer list(arena_), queries(arena_);
    DeviceTensor query_rows{};
    uint64_t counted = 0;
    const uint32_t rows = upload_pieces(turn, kv, &list);
    if (rows == 0) return KVQ_OK;
    if (q) KVQ_TRY(to_device(turn, *q, q_first, rows, shape.q_heads, shape.dim_k, "q", &queries, &query_rows, &counted));
    Outcome outcome(arena_, memory_, shape, true);
    KVQ_TRY(begin(turn, &outcome));
    KVQ_TRY(sum_rows(turn, shape, list, uint32_t(kv.size()), rows, q ? &query_rows : nullptr, statistics->wanted, &outcome));
    download(turn, outcome.device.data(), outcome.bytes(), outcome.host.data());
    add_sums(outcome, rows, q, statistics);
    return KVQ_OK;
  };
  if (sum() != KVQ_OK) throw DeviceFailure("statistics", failure_detail());
}

void CudaBackend::sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums) {
  LayerStatistics statistics(memory_);
  reset_statistics(shape, &statistics);
  statistics.wanted = kKeySums;
  add_statistics(shape, rows, nullptr, 0, &statistics);
  for (uint32_t h = 0; h < shape.kv_heads; h++) sums[h].add(statistics.heads[h].k.data(), statistics.heads[h].nk);
}

// ---- packing

PackPlan CudaBackend::pack_plan(const CudaPageFormat &format, bool narrows) const {
  const RawShape shape{uint32_t(format.k.size()), format.k[0].shape.dim, format.v[0].shape.dim};
  return PackPlan(shape, format.page_tokens, format.tensors, shared_limit_, processors_.count, narrows);
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
  const PackPlan plan = pack_plan(slim, true);
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

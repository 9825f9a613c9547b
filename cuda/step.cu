#include "cuda/step.h"

#include <algorithm>
#include <cstring>
#include <memory_resource>
#include <unordered_map>

#include "cuda/attend_fast.h"
#include "cuda/check.h"

namespace kvq::cuda {

StepState::StepState(std::pmr::memory_resource *memory, Arena &arena)
    : plans(arena), tables(arena), partials(arena), tickets(arena), findings(arena), launches(memory), host(memory) {}

namespace {

// Collects the tables of a step.
class Planner {
 public:
  Planner(const StepSource &source, std::span<const LayerShape> shapes, uint32_t processors, StepState *state)
      : source_(source), shapes_(shapes), processors_(processors), state_(*state), memory_(state->host.get_allocator().resource()),
        plans_(memory_), sequences_(memory_), pages_(memory_), rows_(memory_), shares_(memory_), formats_(memory_), positions_(memory_), known_(memory_) {}

  Status run(cudaStream_t stream) {
    state_.launches.assign(shapes_.size(), LayerLaunch());
    state_.queries = 0;
    for (size_t s = 0; s < source_.sequences(); s++) state_.queries += source_.tokens(s);
    for (uint32_t l = 0; l < shapes_.size(); l++) add_layer(l);
    return upload(stream);
  }

 private:
  void add_layer(uint32_t layer);
  void add_sequence(uint32_t layer, size_t s, uint32_t first_query, Plan *plan);
  uint32_t add_pages(uint32_t layer, const PageList &list, SequenceEntry *entry);
  uint32_t place_positions(const PageView &view);
  void choose_kernel(uint32_t layer, Plan *plan);
  void order_classes(const FusedKernel &kernel);
  void choose_splits(uint32_t layer, Plan *plan);
  Status upload(cudaStream_t stream);

  const StepSource &source_;
  std::span<const LayerShape> shapes_;
  uint32_t processors_;
  StepState &state_;
  std::pmr::memory_resource *memory_;
  Vector<Plan> plans_;
  Vector<SequenceEntry> sequences_;  // of the layer
  Vector<PageEntry> pages_;
  Vector<RowEntry> rows_;
  Vector<ShareEntry> shares_;
  struct Classes {
    const CudaPageFormat *format[2] = {nullptr, nullptr};
  };
  Vector<Classes> formats_;  // of the layer's sequences
  Vector<uint32_t> positions_;
  struct Known {
    uint32_t first, count;
  };
  std::pmr::unordered_map<const uint32_t *, Known> known_;  // lists of positions that are in positions_; layers share them
  size_t partials_ = 0;
  uint32_t groups_ = 0;
};

void Planner::add_layer(uint32_t layer) {
  const LayerShape &shape = shapes_[layer];
  Plan plan{};
  const size_t first_row = rows_.size();
  sequences_.clear();
  formats_.clear();
  plan.rows = reinterpret_cast<const RowEntry *>(first_row);  // offsets until upload
  uint32_t token = 0;
  for (size_t s = 0; s < source_.sequences(); s++) {
    const uint32_t tokens = source_.tokens(s);
    if (tokens == 0) continue;
    for (uint32_t t = 0; t < tokens && source_.stores(layer); t++) {
      const PageRows row = source_.row(s, layer, t);
      rows_.push_back({row.page, row.first, 0});
    }
    add_sequence(layer, s, token, &plan);
    token += tokens;
  }
  plan.tokens = uint32_t(rows_.size() - first_row);
  choose_kernel(layer, &plan);
  choose_splits(layer, &plan);
  partials_ = std::max(partials_, size_t(plan.items) * plan.item_rows * (shape.dim_v + 2));
  plans_.push_back(plan);
}

void Planner::add_sequence(uint32_t layer, size_t s, uint32_t first_query, Plan *) {
  const PageList list = source_.pages(s, shapes_[layer].source);
  SequenceEntry entry{};
  entry.page_begin = uint32_t(pages_.size());
  entry.length = uint32_t(source_.length(s, shapes_[layer].source));
  entry.n_queries = source_.tokens(s);
  entry.first_query = first_query;
  entry.pages = add_pages(layer, list, &entry);
  sequences_.push_back(entry);
}

uint32_t Planner::place_positions(const PageView &view) {
  const Known fresh{uint32_t(positions_.size()), view.count};
  const auto [at, is_new] = known_.try_emplace(view.positions, fresh);
  if (is_new || at->second.count < view.count) {
    positions_.insert(positions_.end(), view.positions, view.positions + view.count);
    at->second = fresh;
  }
  return at->second.first + 1;
}

uint32_t Planner::add_pages(uint32_t layer, const PageList &list, SequenceEntry *entry) {
  LayerLaunch &launch = state_.launches[layer];
  Classes classes;
  const uint64_t seen = uint64_t(entry->length) - std::min(entry->length, entry->n_queries) + 1;  // by the oldest query
  for (size_t i = 0; i < list.count; i++) {
    const PageView view = list.get(list.self, shapes_[layer].source, i);
    const auto *format = static_cast<const CudaPageFormat *>(view.format);
    PageEntry page{view.page, view.first, view.count, uint32_t(view.position), 0, kRawKind, 0};
    if (format && !format->raw) {
      if (entry->packed++ == 0) entry->raw_front = uint32_t(i);
      page.kind = classes.format[0] && classes.format[0] != format ? 1 : 0;
      classes.format[page.kind] = format;
      entry->tensors[page.kind] = format->device.tensors;
      launch.stage_bytes = std::max(launch.stage_bytes, format->stage_bytes);
      if (view.positions) page.positions = place_positions(view);
      const uint64_t last = view.positions ? view.positions[view.count - 1] : view.position + view.count - 1;
      page.whole = view.count == format->page_tokens && last < seen;
    }
    pages_.push_back(page);
  }
  if (entry->packed == 0) entry->raw_front = uint32_t(list.count);
  formats_.push_back(classes);
  return uint32_t(list.count);
}

// Can one query serve both classes, and one rotation of the outputs?
bool alike(const CudaPageFormat &a, const CudaPageFormat &b) {
  for (size_t i = 0; i < a.tensors.size(); i++) {
    const TensorFormat &f = a.tensors[i], &g = b.tensors[i];
    const bool centers = a.k[i / 2].mu == b.k[i / 2].mu;
    if (f.group || g.group || f.seed != g.seed || f.rotate != g.rotate || f.region[0].rotation != g.region[0].rotation || !centers) return false;
  }
  return true;
}

void Planner::choose_kernel(uint32_t layer, Plan *plan) {
  const LayerShape &shape = shapes_[layer];
  LayerLaunch &launch = state_.launches[layer];
  plan->item_rows = kRows;
  PagePath paths[2];
  uint32_t n = 0, rows = 0;
  for (size_t s = 0; s < sequences_.size(); s++) {
    const Classes &classes = formats_[s];
    if (classes.format[1] && (classes.format[0]->path == classes.format[1]->path || !alike(*classes.format[0], *classes.format[1]))) return;
    for (const CudaPageFormat *format : classes.format) {
      if (!format || std::find(paths, paths + n, format->path) != paths + n) continue;
      if (format->path == PagePath{} || n == 2) return;
      paths[n++] = format->path;
    }
    rows = std::max(rows, sequences_[s].n_queries * (shape.q_heads / shape.kv_heads));
  }
  if (shape.dim_k != shape.dim_v) return;
  if (rows > kRows) launch.kernel = find_fused(shape.dim_k, paths[0], paths[1], 2);
  if (!launch.kernel) launch.kernel = find_fused(shape.dim_k, paths[0], paths[1], 1);
  if (!launch.kernel) return;
  plan->item_rows = kRows * launch.kernel->row_blocks;
  order_classes(*launch.kernel);
}

// Sequences number their classes as they meet them; the kernel has its own order.
void Planner::order_classes(const FusedKernel &kernel) {
  for (size_t s = 0; s < sequences_.size(); s++) {
    const CudaPageFormat *format = formats_[s].format[0];
    SequenceEntry &entry = sequences_[s];
    if (!format || format->path == kernel.first) continue;
    std::swap(entry.tensors[0], entry.tensors[1]);
    for (uint32_t p = 0; p < entry.packed; p++) pages_[entry.page_begin + entry.raw_front + p].kind ^= 1;
  }
}

// Splits: enough items to fill the processors, each with a page for every warp where the sequence is long enough.
void Planner::choose_splits(uint32_t layer, Plan *plan) {
  const LayerShape &shape = shapes_[layer];
  const uint32_t ratio = shape.q_heads / shape.kv_heads;
  const auto blocks = [&](const SequenceEntry &entry) { return (entry.n_queries * ratio + plan->item_rows - 1) / plan->item_rows; };
  uint64_t work = 0;
  for (size_t s = 0; s < sequences_.size(); s++) work += uint64_t(blocks(sequences_[s])) * shape.kv_heads * sequences_[s].pages;
  const uint64_t share = std::max<uint64_t>(8, (work + processors_ - 1) / processors_);  // pages of an item
  plan->shares = reinterpret_cast<const ShareEntry *>(shares_.size());
  uint32_t items = 0, groups = 0;
  for (size_t s = 0; s < sequences_.size(); s++) {
    SequenceEntry &entry = sequences_[s];
    entry.splits = uint32_t(std::clamp<uint64_t>(entry.pages / share, 1, kMaxSplits));
    entry.group_begin = groups;
    for (uint32_t block = 0; block < blocks(entry); block++)
      for (uint32_t split = 0; split < entry.splits; split++) {
        const uint32_t begin = uint32_t(uint64_t(entry.packed) * split / entry.splits), end = uint32_t(uint64_t(entry.packed) * (split + 1) / entry.splits);
        shares_.push_back({entry, block, split, entry.page_begin + entry.raw_front + begin, end - begin});
      }
    items += blocks(entry) * entry.splits * shape.kv_heads;
    groups += blocks(entry) * shape.kv_heads;
  }
  plan->items = items;
  LayerLaunch &launch = state_.launches[layer];
  launch.items = items;
  launch.pages_per_item = items ? uint32_t(work / items) : 0;
  groups_ = std::max(groups_, groups);
}

template <class T>
size_t append(Vector<char> *to, const Vector<T> &from) {
  const size_t at = (to->size() + 15) / 16 * 16;
  to->resize(at + from.size() * sizeof(T));
  if (!from.empty()) std::memcpy(to->data() + at, from.data(), from.size() * sizeof(T));
  return at;
}

Status Planner::upload(cudaStream_t stream) {
  state_.host.clear();
  const size_t pages = append(&state_.host, pages_), rows = append(&state_.host, rows_);
  const size_t positions = append(&state_.host, positions_), shares = append(&state_.host, shares_);
  if (state_.host.size() > state_.tables.bytes()) state_.tables.reserve(state_.host.size() * 2);
  if (partials_ * sizeof(float) > state_.partials.bytes()) state_.partials.reserve(partials_ * sizeof(float));
  state_.plans.reserve(plans_.size() * sizeof(Plan));
  if (groups_ > state_.tickets_ready) {
    state_.tickets_ready = groups_ * 2;
    state_.tickets.reserve(state_.tickets_ready * sizeof(uint32_t));
    KVQ_CUDA(cudaMemsetAsync(state_.tickets.data(), 0, state_.tickets_ready * sizeof(uint32_t), stream));
  }
  state_.findings.reserve(sizeof(Findings));
  const Findings nothing{kNothingBad, 0};
  char *base = state_.tables.as<char>();
  for (Plan &plan : plans_) {
    plan.rows = reinterpret_cast<const RowEntry *>(base + rows) + reinterpret_cast<uintptr_t>(plan.rows);
    plan.shares = reinterpret_cast<const ShareEntry *>(base + shares) + reinterpret_cast<uintptr_t>(plan.shares);
    plan.pages = reinterpret_cast<const PageEntry *>(base + pages);
    plan.positions = reinterpret_cast<const uint32_t *>(base + positions);
    plan.partials = state_.partials.as<float>();
    plan.tickets = state_.tickets.as<uint32_t>();
  }
  if (!state_.host.empty()) KVQ_CUDA(cudaMemcpyAsync(base, state_.host.data(), state_.host.size(), cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaMemcpyAsync(state_.plans.data(), plans_.data(), plans_.size() * sizeof(Plan), cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaMemcpyAsync(state_.findings.data(), &nothing, sizeof nothing, cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaStreamSynchronize(stream));  // a graph may be replayed on any stream
  return KVQ_OK;
}

}  // namespace

Status plan_step(const StepSource &source, std::span<const LayerShape> shapes, uint32_t processors, cudaStream_t stream, StepState *state) {
  return Planner(source, shapes, processors, state).run(stream);
}

}  // namespace kvq::cuda

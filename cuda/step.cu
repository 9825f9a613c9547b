#include "cuda/step.h"

#include <algorithm>
#include <cstring>

#include "cuda/attend_fast.h"
#include "cuda/check.h"
#include "cuda/prompt.h"
#include "cuda/table.h"

namespace kvq::cuda {

StepState::StepState(std::pmr::memory_resource *memory, Arena &arena)
    : plans(arena), tables(arena), partials(arena), tickets(arena), images(arena), launches(memory), host(memory) {}

namespace {

constexpr size_t kBehindPlans = 65536;

// Collects the tables of a step.
class Planner {
 public:
  Planner(const StepSource &source, std::span<const LayerShape> shapes, const Processors &processors, Arena &arena, StepState *state)
      : source_(source), shapes_(shapes), processors_(processors), arena_(arena), state_(*state), memory_(state->host.get_allocator().resource()),
        plans_(memory_), prompt_plans_(memory_), sequences_(memory_), prompts_(memory_), pages_(memory_), rows_(memory_), shares_(memory_), findings_(memory_), formats_(memory_),
        patches_(memory_), tables_(memory_) {}

  Status run(cudaStream_t stream);

 private:
  struct Classes {
    const CudaPageFormat *format[2] = {nullptr, nullptr};
  };

  void add_layer(uint32_t layer);
  void add_sequence(uint32_t layer, size_t s, uint32_t first_query);
  void add_raw(uint32_t layer, const PageList &list, size_t begin, size_t end);
  Classes add_classes(uint32_t layer, const PageList &list, SequenceEntry *entry);
  void choose_kernel(uint32_t layer, Plan *plan);
  void order_classes(const FusedKernel &kernel);
  void choose_splits(uint32_t layer, Plan *plan);
  void choose_blocks(LayerLaunch *launch, uint64_t items);
  void take_prompts(uint32_t layer);
  Plan plan_prompts(uint32_t layer);
  void share_prompts(uint32_t layer, Plan *plan);
  uint32_t count_splits(uint64_t items, uint32_t tiles) const;
  char *place_tables(size_t plans, size_t all);
  Status upload(cudaStream_t stream);
  Status upload_patches(cudaStream_t stream, Buffer *buffer);

  const StepSource &source_;
  std::span<const LayerShape> shapes_;
  const Processors processors_;
  Arena &arena_;
  StepState &state_;
  std::pmr::memory_resource *memory_;
  Vector<Plan> plans_, prompt_plans_;  // by layer
  Vector<SequenceEntry> sequences_;    // of the layer
  Vector<SequenceEntry> prompts_;      // of all layers: those with many new tokens
  Vector<PageEntry> pages_;          // raw ones
  Vector<RowEntry> rows_;
  Vector<ShareEntry> shares_;
  Vector<Findings> findings_;
  Vector<Classes> formats_;          // of the layer's sequences
  Patches patches_;
  Vector<SequenceTable *> tables_;   // by sequence; nullptr: it has no new tokens
  size_t partials_ = 0;
  size_t images_ = 0;                // bytes, with partial results of prompts
  size_t layer_prompts_ = 0;         // index of the layer's first prompt
  uint32_t groups_ = 0;
};

Status Planner::run(cudaStream_t stream) {
  state_.launches.assign(shapes_.size(), LayerLaunch());
  state_.queries = 0;
  tables_.assign(source_.sequences(), nullptr);
  findings_.assign(source_.sequences(), Findings{kNothingBad, 0});
  for (size_t s = 0; s < source_.sequences(); s++) {
    state_.queries += source_.tokens(s);
    if (source_.tokens(s) == 0) continue;
    std::shared_ptr<PageTable> &table = source_.table(s);
    if (!table) table = make_shared_in<SequenceTable>(memory_, memory_, arena_, shapes_.size());
    tables_[s] = static_cast<SequenceTable *>(table.get());
    tables_[s]->update({source_, s, shapes_}, &patches_);
  }
  for (uint32_t l = 0; l < shapes_.size(); l++) add_layer(l);
  return upload(stream);
}

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
      rows_.push_back({row.page, row.first, uint32_t(s)});
    }
    add_sequence(layer, s, token);
    token += tokens;
  }
  plan.tokens = uint32_t(rows_.size() - first_row);
  take_prompts(layer);
  choose_kernel(layer, &plan);
  choose_splits(layer, &plan);
  partials_ = std::max(partials_, size_t(plan.items) * plan.item_rows * (shape.dim_v + 2));
  plans_.push_back(plan);
  prompt_plans_.push_back(plan_prompts(layer));
}

void Planner::add_sequence(uint32_t layer, size_t s, uint32_t first_query) {
  const uint32_t source = shapes_[layer].source;
  SequenceEntry entry{};
  entry.length = uint32_t(source_.length(s, source));
  const PageList list = source_.pages(s, source);
  entry.n_queries = source_.tokens(s);
  entry.first_query = first_query;
  entry.index = uint32_t(s);
  entry.pages = uint32_t(list.count);
  entry.front = uint32_t(list.front);
  entry.listed = uint32_t(list.packed[0] + list.packed[1]);
  entry.raw_begin = uint32_t(pages_.size());
  entry.table = entry.listed ? tables_[s]->entries(source, list) : nullptr;
  entry.positions = tables_[s]->positions();
  add_raw(source, list, 0, list.front);
  add_raw(source, list, list.front + entry.listed, list.count);
  formats_.push_back(add_classes(layer, list, &entry));
  sequences_.push_back(entry);
}

void Planner::add_raw(uint32_t layer, const PageList &list, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i++) {
    const PageView view = list.get(list.self, layer, i);
    pages_.push_back({view.page, kRawKind, kNotFull, view.first, view.count, uint32_t(view.position), 0});
  }
}

// The formats of the packed pages: one for each class.
Planner::Classes Planner::add_classes(uint32_t layer, const PageList &list, SequenceEntry *entry) {
  LayerLaunch &launch = state_.launches[layer];
  Classes classes;
  for (uint32_t c = 0; c < 2; c++) {
    if (list.packed[c] == 0) continue;
    const PageView view = list.get(list.self, shapes_[layer].source, list.front + (c ? list.packed[0] : 0));
    const auto *format = static_cast<const CudaPageFormat *>(view.format);
    if (format->raw) continue;
    classes.format[c] = format;
    entry->tensors[c] = format->device.tensors;
    entry->packed += uint32_t(list.packed[c]);
    launch.stage_bytes = std::max(launch.stage_bytes, (format->stage_bytes + 127) / 128 * 128);
  }
  return classes;
}

// Sequences with many new tokens leave the layer's others and get a plan of their own.
void Planner::take_prompts(uint32_t layer) {
  const LayerShape &shape = shapes_[layer];
  layer_prompts_ = prompts_.size();
  if (!has_prompt_kernel(shape.dim_k, shape.dim_v, processors_)) return;
  size_t kept = 0;
  for (size_t s = 0; s < sequences_.size(); s++) {
    if (uint64_t(sequences_[s].n_queries) * (shape.q_heads / shape.kv_heads) < kLeastPromptRows) {
      sequences_[kept] = sequences_[s], formats_[kept++] = formats_[s];
      continue;
    }
    sequences_[s].page_tiles = 1;
    for (const CudaPageFormat *format : formats_[s].format)
      if (format) sequences_[s].page_tiles = std::max(sequences_[s].page_tiles, (format->page_tokens + kTile - 1) / kTile);
    prompts_.push_back(sequences_[s]);
  }
  state_.launches[layer].others = kept > 0;
  sequences_.resize(kept), formats_.resize(kept);
}

// Tiles of all prompts, and how many KV heads may have images at a time.
Plan Planner::plan_prompts(uint32_t layer) {
  const LayerShape &shape = shapes_[layer];
  Plan plan{};
  if (prompts_.size() == layer_prompts_) return plan;
  plan.item_rows = kPromptRows;
  plan.n_sequences = uint32_t(prompts_.size() - layer_prompts_);
  plan.sequences = reinterpret_cast<const SequenceEntry *>(layer_prompts_);  // an offset until upload
  for (size_t s = layer_prompts_; s < prompts_.size(); s++) {
    SequenceEntry &entry = prompts_[s];
    entry.first_tile = plan.tiles;
    plan.tiles += entry.pages + entry.listed * (entry.page_tiles - 1);
  }
  const size_t head = std::max<size_t>(1, plan.tiles * tile_image_bytes(prompt_panels(shape.dim_k, shape.dim_v)));
  const uint32_t most = uint32_t(std::clamp<size_t>(kImageBytes / head, 1, shape.kv_heads)), groups = (shape.kv_heads + most - 1) / most;
  plan.heads_at_once = (shape.kv_heads + groups - 1) / groups;  // groups alike
  share_prompts(layer, &plan);
  LayerLaunch &launch = state_.launches[layer];
  launch.prompts.groups = (shape.kv_heads + plan.heads_at_once - 1) / plan.heads_at_once;
  launch.prompts.plan = uint32_t(shapes_.size());
  const size_t images = (head * plan.heads_at_once + 255) / 256 * 256;
  plan.partials = reinterpret_cast<float *>(images);
  images_ = std::max(images_, images + (launch.prompts.splits ? size_t(plan.items) * kPromptRows * (shape.dim_v + 2) * sizeof(float) : 0));
  return plan;
}

// How many items share the pages of a prompt: as many as fill the processors best, with a little less for what each costs, and eight
// tiles at least.  It is the prompt's own matter, so that results do not depend on the step's other sequences.
uint32_t Planner::count_splits(uint64_t items, uint32_t tiles) const {
  uint32_t splits = 1;
  double least = 1e30;
  for (uint32_t n = 1; n <= std::clamp<uint32_t>(tiles / 8, 1, kMaxSplits); n++) {
    const double cost = double((items * n + processors_.count - 1) / processors_.count) / n * (1 + 0.02 * n);
    if (cost < least) least = cost, splits = n;
  }
  return splits;
}

// Blocks with the most to see come first, so that the last ones to run are short.
void Planner::share_prompts(uint32_t layer, Plan *plan) {
  const LayerShape &shape = shapes_[layer];
  plan->shares = reinterpret_cast<const ShareEntry *>(shares_.size());
  for (size_t s = layer_prompts_; s < prompts_.size(); s++) {
    SequenceEntry &entry = prompts_[s];
    const uint64_t rows = uint64_t(entry.n_queries) * (shape.q_heads / shape.kv_heads);
    const uint32_t blocks = uint32_t((rows + kPromptRows - 1) / kPromptRows);
    entry.splits = count_splits(uint64_t(blocks) * shape.kv_heads, entry.pages + entry.listed * (entry.page_tiles - 1));
    state_.launches[layer].prompts.splits |= entry.splits > 1;
    for (uint32_t block = blocks; block-- > 0;)
      for (uint32_t split = 0; split < entry.splits; split++) shares_.push_back({entry, block, split, 0, 0});
    plan->items += blocks * entry.splits * shape.kv_heads;
  }
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
    const CudaPageFormat *low = formats_[s].format[0], *high = formats_[s].format[1];
    if (low && high && (low->path == high->path || !alike(*low, *high))) return;
    for (const CudaPageFormat *format : formats_[s].format) {
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

// Tables number classes as the engine does; the kernel has its own order.
void Planner::order_classes(const FusedKernel &kernel) {
  for (size_t s = 0; s < sequences_.size(); s++) {
    const CudaPageFormat *low = formats_[s].format[0], *high = formats_[s].format[1];
    if (low ? low->path == kernel.first : !high || high->path != kernel.first) continue;
    std::swap(sequences_[s].tensors[0], sequences_[s].tensors[1]);
    sequences_[s].flip = 1;
  }
}

// The shape of blocks: few items get all of a processor's warps, one block each; where there are more items than processors, small
// blocks run side by side.  (Measured on an H200: more cuts than this cost more than the idle end of the last round.)
void Planner::choose_blocks(LayerLaunch *launch, uint64_t items) {
  if (!launch->kernel) return;
  const uint32_t warps = items > processors_.count + processors_.count / 2 ? 4 : 16;
  launch->shape = block_shape(processors_, launch->kernel->limits, launch->stage_bytes, warps);
  launch->blocks = processors_.count * launch->shape.at_once;
}

// Splits: enough items to fill the processors, each with a page for every warp where the sequence is long enough.
void Planner::choose_splits(uint32_t layer, Plan *plan) {
  const LayerShape &shape = shapes_[layer];
  const uint32_t ratio = shape.q_heads / shape.kv_heads;
  const auto blocks = [&](const SequenceEntry &entry) { return (entry.n_queries * ratio + plan->item_rows - 1) / plan->item_rows; };
  uint64_t work = 0;  // pages
  for (const SequenceEntry &entry : sequences_) work += uint64_t(blocks(entry)) * shape.kv_heads * entry.pages;
  const uint64_t share = std::max<uint64_t>(8, (work + processors_.count - 1) / processors_.count);  // pages of an item
  plan->shares = reinterpret_cast<const ShareEntry *>(shares_.size());
  uint32_t items = 0, groups = 0;
  for (size_t s = 0; s < sequences_.size(); s++) {
    SequenceEntry &entry = sequences_[s];
    entry.splits = uint32_t(std::clamp<uint64_t>(entry.pages / share, 1, kMaxSplits));
    entry.group_begin = groups;
    for (uint32_t block = 0; block < blocks(entry); block++)
      for (uint32_t split = 0; split < entry.splits; split++) {
        const uint32_t begin = uint32_t(uint64_t(entry.packed) * split / entry.splits), end = uint32_t(uint64_t(entry.packed) * (split + 1) / entry.splits);
        shares_.push_back({entry, block, split, begin, end - begin});
      }
    items += blocks(entry) * entry.splits * shape.kv_heads;
    groups += blocks(entry) * shape.kv_heads;
  }
  plan->items = items;
  choose_blocks(&state_.launches[layer], items);
  groups_ = std::max(groups_, groups);
}

template <class T>
size_t append(Vector<char> *to, const Vector<T> &from) {
  const size_t at = (to->size() + 15) / 16 * 16;
  to->resize(at + from.size() * sizeof(T));
  if (!from.empty()) std::memcpy(to->data() + at, from.data(), from.size() * sizeof(T));
  return at;
}

Status Planner::upload_patches(cudaStream_t stream, Buffer *buffer) {
  const size_t list = patches_.list.size() * sizeof(Patch);
  buffer->reserve(list + patches_.data.size());
  KVQ_CUDA(cudaMemcpyAsync(buffer->data(), patches_.list.data(), list, cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaMemcpyAsync(buffer->as<char>() + list, patches_.data.data(), patches_.data.size(), cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(apply_patches(buffer->data(), uint32_t(patches_.list.size()), stream));
  return KVQ_OK;
}

// Plans lie at an address that graphs keep; what they point to lies behind them where there is room, so that one copy is enough.
char *Planner::place_tables(size_t plans, size_t all) {
  state_.plans.reserve(plans + kBehindPlans);
  if (all <= state_.plans.bytes()) return state_.plans.as<char>();
  if (all > state_.tables.bytes()) state_.tables.reserve(all * 2);
  return state_.tables.as<char>();
}

Status Planner::upload(cudaStream_t stream) {
  Vector<char> &host = state_.host;
  host.clear();
  plans_.insert(plans_.end(), prompt_plans_.begin(), prompt_plans_.end());
  const size_t plans = append(&host, plans_), pages = append(&host, pages_), rows = append(&host, rows_);
  const size_t shares = append(&host, shares_), findings = append(&host, findings_), prompts = append(&host, prompts_);
  char *base = place_tables(plans_.size() * sizeof(Plan), host.size());
  if (partials_ * sizeof(float) > state_.partials.bytes()) state_.partials.reserve(partials_ * sizeof(float));
  if (images_) state_.images.reserve(images_);
  if (groups_ > state_.tickets_ready) {
    state_.tickets_ready = groups_ * 2;
    state_.tickets.reserve(state_.tickets_ready * sizeof(uint32_t));
    KVQ_CUDA(cudaMemsetAsync(state_.tickets.data(), 0, state_.tickets_ready * sizeof(uint32_t), stream));
  }
  state_.findings = reinterpret_cast<Findings *>(base + findings);
  state_.sequences = findings_.size();
  for (size_t l = 0; l < plans_.size(); l++) {
    Plan &plan = plans_[l];
    plan.rows = reinterpret_cast<const RowEntry *>(base + rows) + reinterpret_cast<uintptr_t>(plan.rows);
    plan.shares = reinterpret_cast<const ShareEntry *>(base + shares) + reinterpret_cast<uintptr_t>(plan.shares);
    plan.pages = reinterpret_cast<const PageEntry *>(base + pages);
    plan.sequences = reinterpret_cast<const SequenceEntry *>(base + prompts) + reinterpret_cast<uintptr_t>(plan.sequences);
    plan.images = state_.images.as<uint8_t>();
    plan.partials = l < shapes_.size() ? state_.partials.as<float>() : reinterpret_cast<float *>(plan.images + reinterpret_cast<uintptr_t>(plan.partials));
    plan.tickets = state_.tickets.as<uint32_t>();
    plan.findings = state_.findings;
    std::memcpy(host.data() + plans + l * sizeof(Plan), &plan, sizeof plan);
  }
  Buffer patches(arena_);
  if (!patches_.list.empty()) KVQ_TRY(upload_patches(stream, &patches));
  if (base != state_.plans.data())
    KVQ_CUDA(cudaMemcpyAsync(state_.plans.data(), host.data(), plans_.size() * sizeof(Plan), cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaMemcpyAsync(base, host.data(), host.size(), cudaMemcpyHostToDevice, stream));
  KVQ_CUDA(cudaStreamSynchronize(stream));  // a graph may be replayed on any stream
  for (size_t s = 0; s < tables_.size() && !patches_.list.empty(); s++)
    if (tables_[s]) tables_[s]->confirm({source_, s, shapes_});
  return KVQ_OK;
}

}  // namespace

Status plan_step(const StepSource &source, std::span<const LayerShape> shapes, const Processors &processors, Arena &arena,
                 cudaStream_t stream, StepState *state) {
  return Planner(source, shapes, processors, arena, state).run(stream);
}

}  // namespace kvq::cuda

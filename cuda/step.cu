#include "cuda/step.h"

#include <algorithm>
#include <cstring>

#include "cuda/attend_fast.h"
#include "cuda/check.h"
#include "cuda/prompt.h"
#include "cuda/table.h"

namespace kvq::cuda {

StepState::StepState(std::pmr::memory_resource *memory, Arena &arena)
    : plans(arena), tables(arena), partials(arena), tickets(arena), sinks(arena), images(arena), ready(memory), launches(memory), first_launch(memory), host(memory) {}

constexpr size_t kBehindPlans = 65536;
constexpr uint32_t kInvariantTiles = 64, kInvariantWarps = 4;  // of an item of an invariant step: good for many sequences

void StepState::reserve(std::span<const LayerShape> shapes, const Processors &processors) {
  uint32_t dim = 0;
  for (const LayerShape &shape : shapes) dim = std::max(dim, shape.dim_v);
  plans.reserve(shapes.size() * sizeof(Plan) + kBehindPlans);
  partials.reserve(size_t(processors.count) * kMostItemRows * (dim + 2) * sizeof(float));
  tickets.reserve(processors.count * sizeof(uint32_t));
  sinks.reserve(kMaxSinks * sizeof(float));
}

namespace {

// Collects the tables of a step.
//
// A layer's sequences share one launch, but for those with many new tokens (prompt.h).  In an invariant step each is planned by
// itself, with splits and blocks of a fixed size, and those share a launch that ask for the same.
class Planner {
 public:
  Planner(const StepSource &source, std::span<const LayerShape> shapes, const Processors &processors, Arena &arena, StepState *state, bool takes_prompts)
      : source_(source), shapes_(shapes), processors_(processors), takes_prompts_(takes_prompts), arena_(arena), state_(*state), memory_(state->host.get_allocator().resource()),
        plans_(memory_), sequences_(memory_), prompts_(memory_), pages_(memory_), rows_(memory_), shares_(memory_), findings_(memory_), formats_(memory_),
        launch_(memory_), patches_(memory_), tables_(memory_) {}

  Status run(cudaStream_t stream);
  bool has_prompts() const { return !prompts_.empty(); }

 private:
  struct Classes {
    const CudaPageFormat *format[2] = {nullptr, nullptr};
  };

  void add_layer(uint32_t layer);
  void add_sequence(uint32_t layer, size_t s, uint32_t first_query);
  void add_raw(uint32_t layer, const PageList &list, size_t begin, size_t end);
  Classes add_classes(uint32_t layer, const PageList &list, SequenceEntry *entry);
  LayerLaunch choose(uint32_t layer, size_t begin, size_t end);
  bool collect_paths(size_t begin, size_t end, PagePath (&paths)[2]) const;
  void choose_kernel(uint32_t layer, size_t begin, size_t end, LayerLaunch *launch);
  void order_classes(size_t begin, size_t end, const FusedKernel &kernel);
  void choose_splits(uint32_t layer, size_t begin, size_t end, LayerLaunch *launch);
  void choose_blocks(LayerLaunch *launch, uint64_t items, uint64_t tiles) const;
  void join(uint32_t layer, size_t sequence, const LayerLaunch &launch);
  void add_plan(uint32_t layer, uint32_t launch);
  bool is_fused(uint32_t layer, size_t s) const;
  bool is_prompt(uint32_t layer, size_t s);
  size_t take_prompts(uint32_t layer);
  void add_prompts(uint32_t layer, size_t begin, size_t end);
  uint32_t count_splits(uint64_t items, uint32_t tiles) const;
  void share_prompt(uint32_t layer, SequenceEntry *entry, Plan *plan, LayerLaunch *launch, uint32_t *split_items);
  Status prepare_kernels();
  uint32_t blocks(uint32_t layer, const SequenceEntry &entry, const LayerLaunch &launch) const {
    const LayerShape &shape = shapes_[layer];
    return (entry.n_queries * (shape.q_heads / shape.kv_heads) + launch.item_rows - 1) / launch.item_rows;
  }
  char *place_tables(size_t plans, size_t all);
  Status upload(cudaStream_t stream);
  Status upload_patches(cudaStream_t stream, Buffer *buffer);

  const StepSource &source_;
  std::span<const LayerShape> shapes_;
  const Processors processors_;
  const bool takes_prompts_;
  Arena &arena_;
  StepState &state_;
  std::pmr::memory_resource *memory_;
  Vector<Plan> plans_;
  Vector<SequenceEntry> sequences_;  // of the layer: prompts behind the others
  Vector<SequenceEntry> prompts_;    // of all layers
  Vector<PageEntry> pages_;          // raw ones
  Vector<RowEntry> rows_;
  Vector<ShareEntry> shares_;
  Vector<Findings> findings_;
  Vector<Classes> formats_;          // of the layer's sequences
  Vector<uint32_t> launch_;          // likewise
  Patches patches_;
  Vector<SequenceTable *> tables_;   // by sequence; nullptr: it has no new tokens
  size_t partials_ = 0;
  size_t images_ = 0;                // bytes, with partial results of prompts
  uint32_t groups_ = 0;
};

Status Planner::run(cudaStream_t stream) {
  state_.launches.clear(), state_.first_launch.clear();
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
  state_.first_launch.push_back(uint32_t(state_.launches.size()));
  KVQ_TRY(prepare_kernels());
  return upload(stream);
}

Status Planner::prepare_kernels() {
  for (const LayerLaunch &launch : state_.launches) {
    if (!launch.kernel || std::find(state_.ready.begin(), state_.ready.end(), launch.kernel) != state_.ready.end()) continue;
    KVQ_CUDA(allow_shared(launch.kernel->function(), processors_.block_bytes));
    state_.ready.push_back(launch.kernel);
  }
  return KVQ_OK;
}

void Planner::add_layer(uint32_t layer) {
  const size_t first_row = rows_.size();
  sequences_.clear(), formats_.clear(), launch_.clear();
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
  const size_t all = sequences_.size(), n = take_prompts(layer);
  const uint32_t first = uint32_t(state_.launches.size());
  state_.first_launch.push_back(first);
  launch_.assign(n, first);
  if (source_.invariant() && n > 0)
    for (size_t s = 0; s < n; s++) join(layer, s, choose(layer, s, s + 1));
  else if (n > 0 || all == 0)
    state_.launches.push_back(choose(layer, 0, n));
  for (uint32_t launch = first; launch < state_.launches.size(); launch++) add_plan(layer, launch);
  add_prompts(layer, n, all);
  plans_[first].rows = reinterpret_cast<const RowEntry *>(first_row);  // an offset until upload
  plans_[first].tokens = uint32_t(rows_.size() - first_row);
}

void Planner::join(uint32_t layer, size_t sequence, const LayerLaunch &launch) {
  Vector<LayerLaunch> &all = state_.launches;
  const auto found = std::find_if(all.begin() + state_.first_launch[layer], all.end(), [&](const LayerLaunch &each) { return each.joins(launch); });
  launch_[sequence] = uint32_t(found - all.begin());
  if (found == all.end()) all.push_back(launch);
}

// The shares of the sequences of a launch.
void Planner::add_plan(uint32_t layer, uint32_t launch) {
  const uint32_t heads = shapes_[layer].kv_heads;
  const LayerLaunch &how = state_.launches[launch];
  Plan plan{};
  plan.shares = reinterpret_cast<const ShareEntry *>(shares_.size());
  plan.item_rows = how.item_rows;
  uint32_t split_items = 0, groups = 0;
  for (size_t s = 0; s < launch_.size(); s++) {
    if (launch_[s] != launch) continue;
    const SequenceEntry &entry = sequences_[s];
    for (uint32_t block = 0; block < blocks(layer, entry, how); block++) {
      for (uint32_t split = 0; split < entry.splits; split++) {
        const uint32_t begin = uint32_t(uint64_t(entry.packed) * split / entry.splits), end = uint32_t(uint64_t(entry.packed) * (split + 1) / entry.splits);
        shares_.push_back({entry, block, split, begin, end - begin, split_items + split * heads, groups});
      }
      plan.items += entry.splits * heads;
      if (entry.splits > 1) split_items += entry.splits * heads, groups += heads;
    }
  }
  if (how.shape.at_once > 1) plan.idle = processors_.count - std::min(processors_.count, plan.items);
  partials_ = std::max(partials_, size_t(split_items) * plan.item_rows * (shapes_[layer].dim_v + 2));
  groups_ = std::max(groups_, groups);
  plans_.push_back(plan);
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
  Classes classes;
  for (uint32_t c = 0; c < 2; c++) {
    if (list.packed[c] == 0) continue;
    const PageView view = list.get(list.self, shapes_[layer].source, list.front + (c ? list.packed[0] : 0));
    const auto *format = static_cast<const CudaPageFormat *>(view.format);
    if (!format->raw || format->path != PagePath{}) classes.format[c] = format;
    if (format->raw) continue;
    entry->tensors[c] = format->device.tensors;
    entry->packed += uint32_t(list.packed[c]);
  }
  return classes;
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

size_t tiles_of(const SequenceEntry &prompt) { return size_t(prompt.pages) + size_t(prompt.listed) * (prompt.page_tiles - 1); }

// How sequences [begin, end) of a layer are attended to in one launch; their splits.
LayerLaunch Planner::choose(uint32_t layer, size_t begin, size_t end) {
  LayerLaunch launch;
  for (size_t s = begin; s < end; s++) launch.settled |= sequences_[s].listed > 0;  // they are all packed alike
  for (size_t s = begin; s < end; s++)
    for (const CudaPageFormat *format : formats_[s].format)
      if (format) launch.stage_bytes = std::max(launch.stage_bytes, (format->stage_bytes + 127) / 128 * 128);
  choose_kernel(layer, begin, end, &launch);
  choose_splits(layer, begin, end, &launch);
  return launch;
}

// The ways to read the packed pages of sequences [begin, end), at most two; false: no fused kernel reads them together.
bool Planner::collect_paths(size_t begin, size_t end, PagePath (&paths)[2]) const {
  uint32_t n = 0;
  for (size_t s = begin; s < end; s++) {
    const CudaPageFormat *low = formats_[s].format[0], *high = formats_[s].format[1];
    if (low && high && (low->path == high->path || !alike(*low, *high))) return false;
    for (const CudaPageFormat *format : formats_[s].format) {
      if (!format || std::find(paths, paths + n, format->path) != paths + n) continue;
      if (format->path == PagePath{} || n == 2) return false;
      paths[n++] = format->path;
    }
  }
  return true;
}

void Planner::choose_kernel(uint32_t layer, size_t begin, size_t end, LayerLaunch *launch) {
  const LayerShape &shape = shapes_[layer];
  PagePath paths[2];
  if (shape.dim_k != shape.dim_v || !collect_paths(begin, end, paths)) return;
  uint32_t rows = 0;
  for (size_t s = begin; s < end; s++) rows = std::max(rows, sequences_[s].n_queries * (shape.q_heads / shape.kv_heads));
  for (uint32_t row_blocks = kMostItemRows / kRows; row_blocks > 0 && !launch->kernel; row_blocks /= 2)
    if (row_blocks == 1 || rows > kRows * row_blocks / 2) launch->kernel = find_fused(shape.dim_k, paths[0], paths[1], row_blocks);
  if (!launch->kernel) return;
  launch->item_rows = kRows * launch->kernel->row_blocks;
  order_classes(begin, end, *launch->kernel);
}

// Tables number classes as the engine does; the kernel has its own order.
void Planner::order_classes(size_t begin, size_t end, const FusedKernel &kernel) {
  for (size_t s = begin; s < end; s++) {
    const CudaPageFormat *low = formats_[s].format[0], *high = formats_[s].format[1];
    if (low ? low->path == kernel.first : !high || high->path != kernel.first) continue;
    std::swap(sequences_[s].tensors[0], sequences_[s].tensors[1]);
    sequences_[s].flip = 1;
  }
}

// What a layer takes with blocks of a shape, in the time that a processor full of warps needs for a tile: blocks run in rounds.  A warp
// alone is slower by kAlone, and every round has its beginning and its end.  (Measured on an H200.)
double block_cost(const Processors &processors, const BlockShape &shape, uint64_t items, uint64_t tiles) {
  constexpr double kAlone = 13, kRound = 35, kWarp = 0.5;  // kWarp: of joining one's results
  const auto round = [&](uint64_t blocks) {
    return kRound + kWarp * shape.warps + std::max(double(blocks * tiles), kAlone * double((tiles + shape.warps - 1) / shape.warps));
  };
  const uint64_t slots = uint64_t(processors.count) * shape.at_once, rest = items % slots;
  return double(items / slots) * round(shape.at_once) + (rest ? round((rest + processors.count - 1) / processors.count) : 0);
}

// tiles: of an item.
void Planner::choose_blocks(LayerLaunch *launch, uint64_t items, uint64_t tiles) const {
  if (!launch->kernel) return;
  double least = 0;
  for (const uint32_t warps : {16u, 8u, 4u, 3u}) {
    if (source_.invariant() && warps != kInvariantWarps) continue;
    const BlockShape shape = block_shape(processors_, launch->kernel->limits, launch->stage_bytes, warps);
    const double cost = block_cost(processors_, shape, items, tiles);
    if (launch->shape.warps == 0 || cost < least) launch->shape = shape, least = cost;
  }
  launch->blocks = processors_.count * launch->shape.at_once;
}

// Splits: enough items to fill the processors, of eight tiles at least.  At most as many items as there are processors have others
// of their sequence beside them.
void Planner::choose_splits(uint32_t layer, size_t begin, size_t end, LayerLaunch *launch) {
  const uint32_t heads = shapes_[layer].kv_heads;
  uint32_t page_tiles = 1;
  uint64_t work = 0, items = 0;  // work and share (of an item): pages
  for (size_t s = begin; s < end; s++) {
    work += uint64_t(blocks(layer, sequences_[s], *launch)) * heads * sequences_[s].pages;
    for (const CudaPageFormat *format : formats_[s].format)
      if (format) page_tiles = std::max(page_tiles, format->page_tokens / kTile);
  }
  const auto pages_of = [&](uint32_t tiles) { return std::max<uint64_t>(1, tiles / page_tiles); };
  const uint64_t share = source_.invariant() ? pages_of(kInvariantTiles) : std::max(pages_of(8), (work + processors_.count - 1) / processors_.count);
  for (size_t s = begin; s < end; s++) {
    SequenceEntry &entry = sequences_[s];
    entry.splits = uint32_t(std::clamp<uint64_t>(entry.pages / share, 1, kMaxSplits));
    items += uint64_t(blocks(layer, entry, *launch)) * entry.splits * heads;
  }
  if (items) choose_blocks(launch, items, (work + items - 1) / items * page_tiles);
}

// ---- prompts

bool Planner::is_fused(uint32_t layer, size_t s) const {
  const LayerShape &shape = shapes_[layer];
  PagePath paths[2];
  return shape.dim_k == shape.dim_v && collect_paths(s, s + 1, paths) && find_fused(shape.dim_k, paths[0], paths[1], 1);
}

// Are a sequence's new tokens many enough, and its images few enough?  Sets its tiles.
bool Planner::is_prompt(uint32_t layer, size_t s) {
  const LayerShape &shape = shapes_[layer];
  SequenceEntry &entry = sequences_[s];
  if (!takes_prompts_ || !has_prompt_kernel(shape.dim_k, shape.dim_v, processors_)) return false;
  const uint32_t least = is_fused(layer, s) ? kLeastFusedRows : kLeastRows;
  if (uint64_t(entry.n_queries) * (shape.q_heads / shape.kv_heads) < least) return false;
  entry.page_tiles = 1;
  for (const CudaPageFormat *format : formats_[s].format)
    if (format) entry.page_tiles = std::max(entry.page_tiles, (format->page_tokens + kTile - 1) / kTile);
  return tiles_of(entry) * tile_image_bytes(prompt_panels(shape.dim_k, shape.dim_v)) <= kImageBytes;
}

// Puts prompts behind the others and returns the number of those.
size_t Planner::take_prompts(uint32_t layer) {
  Vector<SequenceEntry> prompts(memory_);
  size_t kept = 0;
  for (size_t s = 0; s < sequences_.size(); s++) {
    if (is_prompt(layer, s))
      prompts.push_back(sequences_[s]);
    else
      sequences_[kept] = sequences_[s], formats_[kept++] = formats_[s];
  }
  std::copy(prompts.begin(), prompts.end(), sequences_.begin() + ptrdiff_t(kept));
  return kept;
}

// Launches for prompts: as many sequences in each as have room for the images of one KV head.
void Planner::add_prompts(uint32_t layer, size_t begin, size_t end) {
  const LayerShape &shape = shapes_[layer];
  const size_t tile_bytes = tile_image_bytes(prompt_panels(shape.dim_k, shape.dim_v));
  while (begin < end) {
    LayerLaunch launch;
    Plan plan{};
    uint32_t split_items = 0;
    plan.item_rows = launch.item_rows = kPromptRows;
    launch.settled = true;  // images are the same for all codecs
    plan.shares = reinterpret_cast<const ShareEntry *>(shares_.size());  // offsets until upload
    plan.sequences = reinterpret_cast<const SequenceEntry *>(prompts_.size());
    for (; begin < end && (plan.tiles + tiles_of(sequences_[begin])) * tile_bytes <= kImageBytes; begin++) {
      SequenceEntry &entry = sequences_[begin];
      entry.first_tile = plan.tiles;
      plan.tiles += uint32_t(tiles_of(entry)), plan.n_sequences++;
      share_prompt(layer, &entry, &plan, &launch, &split_items);
      prompts_.push_back(entry);
    }
    const size_t head = std::max<size_t>(1, plan.tiles) * tile_bytes;
    const uint32_t most = uint32_t(std::clamp<size_t>(kImageBytes / head, 1, shape.kv_heads));
    launch.prompts.groups = (shape.kv_heads + most - 1) / most;
    plan.heads_at_once = (shape.kv_heads + launch.prompts.groups - 1) / launch.prompts.groups;  // groups alike
    const size_t images = (head * plan.heads_at_once + 255) / 256 * 256;
    plan.partials = reinterpret_cast<float *>(images);
    images_ = std::max(images_, images + size_t(split_items) * kPromptRows * (shape.dim_v + 2) * sizeof(float));
    state_.launches.push_back(launch);
    plans_.push_back(plan);
  }
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
void Planner::share_prompt(uint32_t layer, SequenceEntry *entry, Plan *plan, LayerLaunch *launch, uint32_t *split_items) {
  const uint32_t heads = shapes_[layer].kv_heads, n = blocks(layer, *entry, *launch);
  entry->splits = count_splits(uint64_t(n) * heads, uint32_t(tiles_of(*entry)));
  launch->prompts.splits |= entry->splits > 1;
  for (uint32_t block = n; block-- > 0;) {
    for (uint32_t split = 0; split < entry->splits; split++) shares_.push_back({*entry, block, split, 0, 0, *split_items + split * heads, 0});
    plan->items += entry->splits * heads;
    if (entry->splits > 1) *split_items += entry->splits * heads;
  }
}

// ---- upload

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
  const size_t plans = append(&host, plans_), pages = append(&host, pages_), rows = append(&host, rows_);
  const size_t shares = append(&host, shares_), findings = append(&host, findings_), prompts = append(&host, prompts_);
  char *base = place_tables(plans_.size() * sizeof(Plan), host.size());
  if (images_) state_.images.reserve(images_);
  if (partials_ * sizeof(float) > state_.partials.bytes()) state_.partials.reserve(partials_ * sizeof(float));
  if (groups_ * sizeof(uint32_t) > state_.tickets.bytes()) state_.tickets.reserve(groups_ * sizeof(uint32_t)), state_.tickets_ready = false;
  if (!state_.tickets_ready) KVQ_CUDA(cudaMemsetAsync(state_.tickets.data(), 0, state_.tickets.bytes(), stream));
  state_.tickets_ready = true;
  state_.findings = reinterpret_cast<Findings *>(base + findings);
  state_.sequences = findings_.size();
  for (size_t l = 0; l < plans_.size(); l++) {
    Plan &plan = plans_[l];
    plan.rows = reinterpret_cast<const RowEntry *>(base + rows) + reinterpret_cast<uintptr_t>(plan.rows);
    plan.shares = reinterpret_cast<const ShareEntry *>(base + shares) + reinterpret_cast<uintptr_t>(plan.shares);
    plan.pages = reinterpret_cast<const PageEntry *>(base + pages);
    plan.sequences = reinterpret_cast<const SequenceEntry *>(base + prompts) + reinterpret_cast<uintptr_t>(plan.sequences);
    plan.images = state_.images.as<uint8_t>();
    plan.partials = plan.tiles ? reinterpret_cast<float *>(plan.images + reinterpret_cast<uintptr_t>(plan.partials)) : state_.partials.as<float>();
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
  Planner planner(source, shapes, processors, arena, state, true);
  try {
    return planner.run(stream);
  } catch (const std::bad_alloc &) {
    if (!planner.has_prompts()) throw;
  }
  return Planner(source, shapes, processors, arena, state, false).run(stream);  // without images memory may do
}

}  // namespace kvq::cuda

// Freezing of policies, for the cache and for sequences.
#include "engine/policies.h"

#include "policy/decide.h"
#include "util/entry.h"

namespace kvq {

namespace {

bool lacks_table(const Codec &codec, const HeadShape &shape) { return !codec.has_table && table_entries(codec, shape) > 0; }

// std::pmr containers do not take their memory along when copied.
void copy_head(const HeadStatistics &from, HeadStatistics *to) {
  to->pairs = from.pairs;
  to->k = from.k;
  to->v = from.v;
  to->nk = from.nk;
  to->nq = from.nq;
}

void copy_tables(const LayerTables &from, LayerTables *to) {
  to->k = from.k;
  to->v = from.v;
  to->mu = from.mu;
}

std::span<const uint8_t> table_of(const Codec &codec, const Vector<Vector<uint8_t>> &tables, uint32_t head) {
  if (codec.has_table) return codec.table;
  return head < tables.size() ? std::span<const uint8_t>(tables[head]) : std::span<const uint8_t>();
}

// Raw pages of no sequence.
class ScratchPages {
 public:
  ScratchPages(std::pmr::memory_resource *memory, Backend &backend, size_t page_bytes, uint64_t tokens)
      : backend_(backend), bytes_(page_bytes), pages_(memory) {
    const uint64_t each = backend.raw_page_tokens();
    pages_.reserve(size_t((tokens + each - 1) / each));
    try {
      while (pages_.size() * each < tokens) pages_.push_back(backend.allocate_page(bytes_));
    } catch (...) {
      release();
      throw;
    }
  }
  ~ScratchPages() { release(); }
  ScratchPages(const ScratchPages &) = delete;
  // The first `tokens` rows.
  void rows(uint64_t tokens, Vector<PageRows> *out) const {
    const uint32_t each = backend_.raw_page_tokens();
    out->clear();
    for (uint64_t first = 0; first < tokens; first += each)
      out->push_back({pages_[size_t(first / each)], 0, uint32_t(std::min<uint64_t>(each, tokens - first))});
  }

 private:
  void release() noexcept {
    for (void *page : pages_) backend_.release_page(page, bytes_);
  }
  Backend &backend_;
  size_t bytes_;
  Vector<void *> pages_;
};

}  // namespace

Policies::Policies(std::pmr::memory_resource *memory, const Recipe &recipe, std::span<const LayerShape> shapes, Backend &backend)
    : memory_(memory), recipe_(recipe), shapes_(shapes), backend_(backend), layers_(shapes.size(), memory) {
  for (uint32_t l = 0; l < shapes.size(); l++) {
    const LayerCodecs &codecs = recipe.layers[l];
    for (uint32_t c = 0; c < recipe.classes && stores(l); c++) {
      layers_[l].needs_tables |= lacks_table(codecs.k[c], shapes[l].head(KVQ_TENSOR_K)) ||
                                 lacks_table(codecs.v[c], shapes[l].head(KVQ_TENSOR_V));
      layers_[l].centered |= codecs.k[c].center;
    }
  }
}

Status Policies::prepare() {
  const LayerTables none(memory_);
  for (uint32_t l = 0; l < layers_.size(); l++)
    if (stores(l) && !layers_[l].needs_tables && !layers_[l].centered) {
      KVQ_TRY(make_formats(l, none, &layers_[l].formats));
      if (!recipe_.budgets.empty()) KVQ_TRY(make_chain(l));
    }
  if (recipe_.given.empty()) return KVQ_OK;
  Vector<std::shared_ptr<LayerTables>> tables(layers_.size(), memory_);
  for (uint32_t l = 0; l < layers_.size(); l++) {
    if (!stores(l) || !layers_[l].needs_tables) continue;
    tables[l] = make_shared_in<LayerTables>(memory_, memory_);
    copy_tables(recipe_.given[l], tables[l].get());
  }
  return freeze_all(tables);
}

bool Policies::lacks_tables(uint32_t layer, const LayerTables &tables) const {
  const LayerCodecs &codecs = recipe_.layers[layer];
  const LayerShape &shape = shapes_[layer];
  return (lacks_table(codecs.k[0], shape.head(KVQ_TENSOR_K)) && table_of(codecs.k[0], tables.k, 0).empty()) ||
         (lacks_table(codecs.v[0], shape.head(KVQ_TENSOR_V)) && table_of(codecs.v[0], tables.v, 0).empty());
}

bool Policies::wants_statistics(uint32_t layer, const GivenTables &given) const {
  const Layer &own = layers_[layer];
  return own.needs_tables && policy_needs_statistics(recipe_.policy) && !own.frozen.load(std::memory_order_acquire) &&
         (!given || lacks_tables(layer, (*given)[layer]));
}

std::shared_ptr<LayerStatistics> Policies::new_statistics(uint32_t layer) const {
  auto made = make_shared_in<LayerStatistics>(memory_, memory_);
  reset_statistics(shapes_[layer], made.get());
  made->wanted = policy_wants(recipe_.policy);
  return made;
}

std::shared_ptr<LayerStatistics> Policies::copy_statistics(const LayerStatistics &from) const {
  auto made = make_shared_in<LayerStatistics>(memory_, memory_);
  made->wanted = from.wanted;
  made->heads.reserve(from.heads.size());
  for (const HeadStatistics &head : from.heads) copy_head(head, &made->heads.emplace_back(memory_));
  return made;
}

// ---- formats

Status Policies::make_formats(uint32_t layer, const LayerTables &tables, LayerFormats *formats) {
  return make_formats(layer, recipe_.layers[layer], tables, formats);
}

Status Policies::make_formats(uint32_t layer, const LayerCodecs &codecs, const LayerTables &tables, LayerFormats *formats) {
  const LayerShape &shape = shapes_[layer];
  for (uint32_t c = 0; c < recipe_.classes; c++) {
    Vector<HeadFormat> heads[2] = {Vector<HeadFormat>(memory_), Vector<HeadFormat>(memory_)};
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      const Codec &codec = tensor == KVQ_TENSOR_K ? codecs.k[c] : codecs.v[c];
      heads[tensor].reserve(shape.kv_heads);
      for (uint32_t h = 0; h < shape.kv_heads; h++) {
        const std::span<const uint8_t> table = table_of(codec, tensor == KVQ_TENSOR_K ? tables.k : tables.v, h);
        const std::span<const uint16_t> mu = codec.center ? std::span<const uint16_t>(tables.mu[h]) : std::span<const uint16_t>();
        KVQ_TRY(kvq::make_format(codec, shape.head(tensor), table, mu, &heads[tensor].emplace_back(memory_)));
      }
    }
    formats->of[c] = backend_.make_format(shape, backend_.page_tokens(recipe_.page_tokens), std::move(heads[0]), std::move(heads[1]));
  }
  return KVQ_OK;
}

// ---- PM-KVQ

Status Policies::make_chain(uint32_t layer) {
  Layer &own = layers_[layer];
  LayerCodecs codecs = recipe_.layers[layer];  // without tables: no memory
  own.chain[0] = own.formats;
  for (size_t i = 1; i < std::size(kChainLevels); i++) {
    codecs.k[0].levels = codecs.v[0].levels = kChainLevels[i];
    KVQ_TRY(make_formats(layer, codecs, LayerTables(memory_), &own.chain[i]));
  }
  return KVQ_OK;
}

// Wire bytes of `tokens` packed tokens of all heads as one block each.
static uint64_t wire_bytes(const PageFormat &format, uint64_t tokens) {
  uint64_t bytes = 0;
  for (const HeadFormat &head : format.k) bytes += wire_size(head, uint32_t(tokens));
  for (const HeadFormat &head : format.v) bytes += wire_size(head, uint32_t(tokens));
  return bytes;
}

void Policies::fit_budget(uint32_t layer, uint64_t tokens, LayerFormats *formats) const noexcept {
  if (recipe_.budgets.empty()) return;
  bool reached = false;  // the width that the sequence has
  for (const LayerFormats &width : layers_[layer].chain) {
    reached |= width.of[0] == formats->of[0];
    if (!reached) continue;
    *formats = width;
    if (wire_bytes(*width.of[0], tokens) <= recipe_.budgets[layer]) return;
  }
}

// ---- decisions

// The mean of the keys, where the tables have none.
Status Policies::center(uint32_t layer, std::span<const PageRows> rows, LayerTables *tables) {
  const LayerShape &shape = shapes_[layer];
  if (!tables->mu.empty() && !tables->mu[0].empty()) return KVQ_OK;
  Vector<CenterSum> sums(memory_);
  sums.reserve(shape.kv_heads);
  for (uint32_t h = 0; h < shape.kv_heads; h++) sums.emplace_back(shape.dim_k, memory_);
  backend_.sum_keys(shape, rows, sums);
  tables->mu.resize(shape.kv_heads);
  for (uint32_t h = 0; h < shape.kv_heads; h++) {
    tables->mu[h].resize(shape.dim_k);
    sums[h].mean(tables->mu[h]);
  }
  return KVQ_OK;
}

Status Policies::choose(uint32_t layer, const GivenTables &given, const LayerStatistics *statistics,
                        std::span<const PageRows> rows, LayerFormats *formats, std::shared_ptr<LayerTables> *to_freeze) {
  Layer &own = layers_[layer];
  const bool frozen = own.frozen.load(std::memory_order_acquire);
  const bool open = own.needs_tables || own.centered;  // to what a blob gives
  if (own.formats.of[0] && !(given && open)) return *formats = own.formats, KVQ_OK;
  LayerTables tables(memory_);
  if (given) copy_tables((*given)[layer], &tables);
  if (own.needs_tables && lacks_tables(layer, tables)) {
    if (frozen) {
      copy_tables(*own.tables, &tables);
    } else {
      const std::shared_ptr<LayerStatistics> none = statistics ? nullptr : new_statistics(layer);
      KVQ_TRY(decide_tables(recipe_.policy, recipe_.layers[layer], shapes_[layer], statistics ? *statistics : *none, &tables));
      if (policy_owner(recipe_.policy) == Owner::cache) {
        *to_freeze = make_shared_in<LayerTables>(memory_, memory_);
        copy_tables(tables, to_freeze->get());
      }
    }
  } else if (frozen && tables.mu.empty()) {
    tables.mu = own.tables->mu;
  }
  if (own.centered) KVQ_TRY(center(layer, rows, &tables));
  return make_formats(layer, tables, formats);
}

std::unique_lock<std::mutex> Policies::lock_unfrozen() {
  if (policy_owner(recipe_.policy) != Owner::cache) return {};
  for (const Layer &layer : layers_)
    if (layer.needs_tables && !layer.frozen.load(std::memory_order_acquire)) return std::unique_lock(mutex_);
  return {};
}

void Policies::freeze(uint32_t layer, std::shared_ptr<LayerTables> tables, const LayerFormats &formats) noexcept {
  Layer &own = layers_[layer];
  own.tables = std::move(tables);
  if (!own.centered) own.formats = formats;
  own.statistics.reset();
  own.frozen.store(true, std::memory_order_release);
}

// ---- calibration and blobs

Status Policies::refuse_frozen() const {
  for (uint32_t l = 0; l < layers_.size(); l++)
    if (layers_[l].frozen.load(std::memory_order_acquire)) return fail(KVQ_E_STATE, "the cache's policy is frozen already (layer %u)", l);
  return KVQ_OK;
}

Status Policies::refuse_calibration() const {
  if (policy_owner(recipe_.policy) == Owner::cache) return KVQ_OK;
  return fail(KVQ_E_UNSUPPORTED, "calibration: the recipe '%s' has no policy that belongs to the cache", recipe_.text.c_str());
}

// Staged as raw rows, a piece at a time, and then summed as a prompt is, wherever it lies.  Nobody asks for the values' sums, so keys
// stand for values.
Status Policies::sum_text(const LayerShape &shape, uint64_t n_tokens, const kvq_tensor &k, const kvq_tensor *q, LayerStatistics *sums) {
  constexpr uint64_t kPiece = 16384;  // tokens
  const ScratchPages pages(memory_, backend_, backend_.raw_page_bytes(shape), std::min(n_tokens, kPiece));
  Vector<PageRows> rows(memory_);
  uint64_t saturated = 0;  // is counted where tokens become part of a sequence
  for (uint64_t first = 0; first < n_tokens; first += kPiece) {
    pages.rows(std::min(kPiece, n_tokens - first), &rows);
    KVQ_TRY(backend_.store_chunk(shape, {k, k, q, first}, rows, sums, &saturated));
  }
  return KVQ_OK;
}

Status Policies::calibrate(uint32_t layer, uint64_t n_tokens, const kvq_tensor *k, const kvq_tensor *q) {
  KVQ_TRY(refuse_calibration());
  const std::lock_guard lock(mutex_);
  KVQ_TRY(refuse_frozen());
  if (!stores(layer)) return fail(KVQ_E_INVALID, "layer=%u reads the cache of layer %u", layer, shapes_[layer].source);
  Layer &own = layers_[layer];
  LayerShape shape = shapes_[layer];
  shape.dim_v = shape.dim_k;
  std::shared_ptr<LayerStatistics> sums;
  if (own.statistics) {
    sums = copy_statistics(*own.statistics);
  } else {
    sums = make_shared_in<LayerStatistics>(memory_, memory_);
    reset_statistics(shape, sums.get());
    sums->wanted = policy_wants(recipe_.policy);
  }
  if (k) KVQ_TRY(sum_text(shape, n_tokens, *k, q, sums.get()));
  own.statistics = sums;
  return KVQ_OK;
}

Status Policies::finish_calibration() {
  KVQ_TRY(refuse_calibration());
  const std::lock_guard lock(mutex_);
  KVQ_TRY(refuse_frozen());
  Vector<std::shared_ptr<LayerTables>> tables(layers_.size(), memory_);
  for (uint32_t l = 0; l < layers_.size(); l++) {
    if (!stores(l) || !layers_[l].needs_tables) continue;
    if (!layers_[l].statistics) return fail(KVQ_E_STATE, "layer %u has no statistics: calibrate it first", l);
    tables[l] = make_shared_in<LayerTables>(memory_, memory_);
    KVQ_TRY(decide_tables(recipe_.policy, recipe_.layers[l], shapes_[l], *layers_[l].statistics, tables[l].get()));
  }
  return freeze_all(tables);
}

// Freeze every layer that has something to freeze, or none.
Status Policies::freeze_all(std::span<const std::shared_ptr<LayerTables>> tables) {
  Vector<LayerFormats> formats(layers_.size(), memory_);
  for (uint32_t l = 0; l < layers_.size(); l++)
    if (tables[l] && !layers_[l].centered) KVQ_TRY(make_formats(l, *tables[l], &formats[l]));
  for (uint32_t l = 0; l < layers_.size(); l++)
    if (tables[l]) freeze(l, tables[l], formats[l]);
  return KVQ_OK;
}

Status Policies::read(const void *blob, size_t size, GivenTables *tables) const {
  auto read = make_shared_in<Vector<LayerTables>>(memory_);
  KVQ_TRY(read_policy_blob(blob, size, recipe_.text, shapes_, read.get()));
  *tables = std::move(read);
  return KVQ_OK;
}

Status Policies::set(const void *blob, size_t size) {
  GivenTables given;
  KVQ_TRY(read(blob, size, &given));
  const std::lock_guard lock(mutex_);
  KVQ_TRY(refuse_frozen());
  Vector<std::shared_ptr<LayerTables>> tables(layers_.size(), memory_);
  for (uint32_t l = 0; l < layers_.size(); l++) {
    if (!stores(l) || !(layers_[l].needs_tables || layers_[l].centered)) continue;
    if (lacks_tables(l, (*given)[l])) return fail(KVQ_E_INVALID, "blob: it has no tables for layer %u", l);
    tables[l] = make_shared_in<LayerTables>(memory_, memory_);
    copy_tables((*given)[l], tables[l].get());
  }
  return freeze_all(tables);
}

void Policies::tables_of(uint32_t layer, const PageFormat &format, LayerTables *tables) const {
  const LayerCodecs &codecs = recipe_.layers[layer];
  for (const HeadFormat &head : format.k) {
    tables->k.emplace_back();
    tables->mu.emplace_back(head.mu);
    if (!codecs.k[0].has_table) tables->k.back() = head.table;
  }
  for (const HeadFormat &head : format.v) {
    tables->v.emplace_back();
    if (!codecs.v[0].has_table) tables->v.back() = head.table;
  }
}

Status Policies::write(std::span<const LayerFormats> formats, Vector<uint8_t> *blob) const {
  Vector<LayerTables> tables(memory_);
  tables.reserve(formats.size());
  for (uint32_t l = 0; l < formats.size(); l++) {
    LayerTables &own = tables.emplace_back(memory_);
    if (stores(l)) tables_of(l, *formats[l].of[0], &own);
  }
  return write_policy_blob(recipe_.text, shapes_, tables, blob);
}

Status Policies::get(Vector<uint8_t> *blob) {
  const std::lock_guard lock(mutex_);
  Vector<LayerTables> tables(memory_);
  tables.reserve(layers_.size());
  for (uint32_t l = 0; l < layers_.size(); l++) {
    LayerTables &out = tables.emplace_back(memory_);
    const Layer &own = layers_[l];
    if (!stores(l)) continue;
    if (own.tables) {
      copy_tables(*own.tables, &out);
    } else if (own.formats.of[0]) {
      tables_of(l, *own.formats.of[0], &out);
    } else {
      return fail(KVQ_E_STATE, "seq=0: nothing is frozen for the cache yet (layer %u)", l);
    }
  }
  return write_policy_blob(recipe_.text, shapes_, tables, blob);
}

}  // namespace kvq

// What policies have decided: the cache's frozen tables and calibration, and the page formats made from tables and centres.
//
// The tables of a layer come from the first of: the blob given for the sequence, what is frozen for the cache (kvq_recipe_data, a
// blob, calibration, or the first committed prompt), the statistics of the sequence's own prompt.  What is frozen never changes again.
#pragma once
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>

#include "engine/pages.h"
#include "policy/policy.h"
#include "policy/statistics.h"
#include "recipe/recipe.h"

namespace kvq {

// Page formats of a layer: [0], and with SemKV [1] for the high class.
struct LayerFormats {
  std::shared_ptr<const PageFormat> of[2];
};

using GivenTables = std::shared_ptr<const Vector<LayerTables>>;

class Policies {
 public:
  Policies(std::pmr::memory_resource *memory, const Recipe &recipe, std::span<const LayerShape> shapes, Backend &backend);

  // Make the formats that depend on nothing, and freeze what came with the recipe.  To be called once, after construction.
  Status prepare();

  // Must the tokens of an uncommitted prompt be added to statistics in this layer?
  bool wants_statistics(uint32_t layer, const GivenTables &given) const;
  std::shared_ptr<LayerStatistics> new_statistics(uint32_t layer) const;
  std::shared_ptr<LayerStatistics> copy_statistics(const LayerStatistics &from) const;

  // Held by a commit that may freeze the cache's policy, from choose() to freeze(); empty where nothing is left to freeze.
  std::unique_lock<std::mutex> lock_unfrozen();

  // Decide a layer of a sequence at its first commit.  `rows`: the raw tokens behind the sinks (for the centre).  *frozen: tables
  // that freeze() is to freeze for the cache if the commit succeeds, else empty.
  Status choose(uint32_t layer, const GivenTables &given, const LayerStatistics *statistics, std::span<const PageRows> rows,
                LayerFormats *formats, std::shared_ptr<LayerTables> *to_freeze);
  void freeze(uint32_t layer, std::shared_ptr<LayerTables> tables, const LayerFormats &formats) noexcept;

  // PM-KVQ: go to the widest formats that keep `tokens` packed tokens of a sequence within the layer's budget, or to the narrowest;
  // never to wider ones.  Nothing for other recipes.
  void fit_budget(uint32_t layer, uint64_t tokens, LayerFormats *formats) const noexcept;

  // kvq_calibrate, kvq_calibrate_finish, kvq_policy_set and _get of the cache.  k or q may be nullptr.
  Status calibrate(uint32_t layer, uint64_t n_tokens, const kvq_tensor *k, const kvq_tensor *q);
  Status finish_calibration();
  Status set(const void *blob, size_t size);
  Status get(Vector<uint8_t> *blob);

  // Blobs of sequences: `formats` by layer, empty for layers that read another's pages.
  Status read(const void *blob, size_t size, GivenTables *tables) const;
  Status write(std::span<const LayerFormats> formats, Vector<uint8_t> *blob) const;

 private:
  struct Layer {
    std::atomic<bool> frozen{false};
    std::shared_ptr<LayerTables> tables;          // when frozen
    LayerFormats formats;                         // when nothing is open for a sequence
    LayerFormats chain[std::size(kChainLevels)];  // PM-KVQ: by width
    std::shared_ptr<LayerStatistics> statistics;  // of calibration
    bool needs_tables = false, centered = false;
  };

  bool stores(uint32_t layer) const { return shapes_[layer].source == layer; }
  bool lacks_tables(uint32_t layer, const LayerTables &tables) const;
  Status make_formats(uint32_t layer, const LayerTables &tables, LayerFormats *formats);
  Status make_formats(uint32_t layer, const LayerCodecs &codecs, const LayerTables &tables, LayerFormats *formats);
  Status make_chain(uint32_t layer);
  Status center(uint32_t layer, std::span<const PageRows> rows, LayerTables *tables);
  Status freeze_all(std::span<const std::shared_ptr<LayerTables>> tables);
  Status refuse_frozen() const;
  Status refuse_calibration() const;
  Status sum_text(const LayerShape &shape, uint64_t n_tokens, const kvq_tensor &k, const kvq_tensor *q, LayerStatistics *sums);
  void tables_of(uint32_t layer, const PageFormat &format, LayerTables *tables) const;

  std::pmr::memory_resource *memory_;
  const Recipe &recipe_;
  std::span<const LayerShape> shapes_;
  Backend &backend_;
  Vector<Layer> layers_;
  std::mutex mutex_;
};

}  // namespace kvq

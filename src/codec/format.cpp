// Codecs meet shapes: group=D, tables and centres are checked, and slots are arranged.
#include "codec/descriptor.h"

namespace kvq {
namespace {

Status check_group(Codec *codec, const HeadShape &shape) {
  if (codec->kind != Kind::affine_token) return KVQ_OK;
  if (codec->group == Codec::kGroupIsDim) codec->group = shape.dim;
  if (codec->group == 0 || shape.dim % codec->group)
    return fail(KVQ_E_INVALID, "codec affine-token: group=%u does not divide the head dimension %u", codec->group, shape.dim);
  return KVQ_OK;
}

// A mask that was read from hex bytes has entries up to the end of its last byte, which must be 0.
Status trim_mask(Codec *codec, uint32_t entries) {
  const size_t given = codec->table.size();
  if (given != (entries + 7u) / 8 * 8) return KVQ_OK;
  for (size_t i = entries; i < given; i++)
    if (codec->table[i])
      return fail(KVQ_E_INVALID, "codec %s: mask has bit %zu set, beyond its %u entries", descriptor(codec->kind).name.data(), i,
                  entries);
  codec->table.resize(entries);
  return KVQ_OK;
}

Status check_table(Codec *codec, const HeadShape &shape) {
  const Descriptor &record = descriptor(codec->kind);
  const uint32_t entries = table_entries(*codec, shape);
  const bool mask = record.table_max == 1;
  if (!codec->has_table) return KVQ_OK;
  if (mask) KVQ_TRY(trim_mask(codec, entries));
  if (codec->table.size() != entries)
    return fail(KVQ_E_INVALID, "codec %s: %s has %zu entries; a head dimension of %u needs %u", record.name.data(),
                mask ? "mask" : "bits", codec->table.size(), shape.dim, entries);
  for (size_t i = 0; i < entries; i++)
    if (codec->table[i] < record.table_min || codec->table[i] > record.table_max)
      return fail(KVQ_E_INVALID, "codec %s: entry %zu of %s is %u, not in %u..%u", record.name.data(), i, mask ? "mask" : "bits",
                  codec->table[i], record.table_min, record.table_max);
  return KVQ_OK;
}

Status check_center(const Codec &codec, std::span<const uint16_t> mu, uint32_t dim) {
  if (mu.size() != (codec.center ? dim : 0))
    return fail(KVQ_E_INVALID, "codec %s with center=%d takes a centre of %u channels, not of %zu",
                descriptor(codec.kind).name.data(), codec.center, codec.center ? dim : 0, mu.size());
  for (size_t i = 0; i < mu.size(); i++)
    if ((mu[i] & 0x7c00u) == 0x7c00u) return fail(KVQ_E_INVALID, "mu of channel %zu is not finite", i);
  return KVQ_OK;
}

}  // namespace

Status resolve_codec(Codec *codec, const HeadShape &shape) {
  const Descriptor &record = descriptor(codec->kind);
  KVQ_TRY(check_shape(shape));
  KVQ_TRY(check_group(codec, shape));
  KVQ_TRY(check_table(codec, shape));
  if (codec->center && shape.tensor == KVQ_TENSOR_V)
    return fail(KVQ_E_INVALID, "codec %s: center=1 is for keys only, not for values", record.name.data());
  return record.resolve ? record.resolve(codec, shape) : KVQ_OK;
}

Status make_format(const Codec &codec, const HeadShape &shape, std::span<const uint8_t> table, std::span<const uint16_t> mu,
                   HeadFormat *format) {
  const Descriptor &record = descriptor(codec.kind);
  Codec resolved = codec;
  if (!table.empty()) {
    resolved.table.assign(table.begin(), table.end());
    resolved.has_table = true;
  }
  KVQ_TRY(resolve_codec(&resolved, shape));
  if (!resolved.has_table && table_entries(resolved, shape))
    return fail(KVQ_E_INVALID, "codec %s: key '%s' is missing", record.name.data(), record.table_max == 1 ? "mask" : "bits");
  KVQ_TRY(check_center(resolved, mu, shape.dim));

  format->shape = shape;
  format->table.assign(resolved.table.begin(), resolved.table.end());
  format->mu.assign(mu.begin(), mu.end());
  for (uint16_t &m : format->mu)
    if (m == 0x8000u) m = 0;
  resolved.table.clear();
  resolved.has_table = false;
  format->codec = resolved;
  format->loops = &select_loops();
  format->channel.clear();
  format->classes.clear();
  format->token_params = 0;
  record.arrange(format);
  return KVQ_OK;
}

void arrange_plain(HeadFormat *format, uint32_t levels) {
  for (uint32_t j = 0; j < format->shape.dim; j++) format->channel.push_back(j);
  format->classes.push_back({levels, 0, format->shape.dim, 0});
}

UnitChannels unit_channels(const HeadFormat &format, uint32_t unit) {
  if (descriptor(format.codec.kind).table_unit == TableUnit::channel || format.codec.by_channel) return {{unit, unit}, 1};
  const Pair pair = pair_channels(format.shape, unit);
  return {{pair.u, pair.v}, 2};
}

void arrange_class(HeadFormat *format, uint8_t value, uint32_t levels) {
  const uint32_t first = uint32_t(format->channel.size());
  for (uint32_t unit = 0; unit < format->table.size(); unit++) {
    if (format->table[unit] != value) continue;
    const UnitChannels unit_is = unit_channels(*format, unit);
    format->channel.insert(format->channel.end(), unit_is.channel, unit_is.channel + unit_is.count);
  }
  const uint32_t count = uint32_t(format->channel.size()) - first;
  if (count) format->classes.push_back({levels, first, count, uint32_t(format->classes.size())});
}

}  // namespace kvq

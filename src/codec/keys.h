// The keys of codec texts (section 5), each with its values.
#pragma once
#include "codec/descriptor.h"

namespace kvq::keys {

extern const TextKey levels;              // affine-*, lloyd
extern const TextKey radius, angle;       // polar: levels
extern const TextKey high, low;           // channel-split: levels
extern const TextKey low_bits, high_bits; // pair-mix: the only layout there is, 1 and 3
extern const TextKey group_tokens;        // G, any
extern const TextKey group_tokens_4;      // G divisible by 4
extern const TextKey group_tokens_8;      // G divisible by 8
extern const TextKey group_channels;      // g, or D
extern const TextKey progressive_bits;    // 16, 8, 4 or 2
extern const TextKey midpoint, center;    // 0 or 1, off when absent
extern const TextKey rotate_off, rotate_on;  // 0 or 1, with the default of the name
extern const TextKey seed, scale;
extern const TextKey params_e4m3, params_e5m3;
extern const TextKey unit_channel;
extern const TextKey boost;
extern const TextKey mask;                // hex
extern const TextKey widths;              // a digit per entry

}  // namespace kvq::keys

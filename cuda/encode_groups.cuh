// Width groups whose classes are made of whole 16 slots: rows in registers, a lane has 16 slots of one class.  Rule 2.2 for each class
// of a row, bit for bit as in src/codec.  Compiled without contraction.
#pragma once
#include "cuda/encode_rows.cuh"

namespace kvq::cuda {

constexpr uint32_t kSlots = 16;  // of a lane

KVQ_HD inline bool fits_group_lanes(const TensorFormat &f) {
  const ScaleRule rule = ScaleRule(f.scale_rule);
  if (f.kind != uint8_t(Kind::width_groups) || f.dim % kSlots || (f.dim & (f.dim - 1)) || f.dim > 32 * kSlots) return false;
  if (rule != ScaleRule::matched && rule != ScaleRule::plain) return false;
  for (uint32_t r = 0; r < f.regions; r++)
    if (f.region[r].first % kSlots || f.region[r].count % kSlots || f.region[r].levels > BookGuess::kLevels) return false;
  return true;
}

// The books of the classes, in shared memory.
struct GroupBooks {
  BookGuess *guess;  // [regions]
  __device__ explicit GroupBooks(const Tile &tile) : guess(reinterpret_cast<BookGuess *>(tile.work)) {}
  static KVQ_HD uint32_t bytes() { return kMaxRegions * sizeof(BookGuess); }
  __device__ void load(const TensorFormat &f) const {
    constexpr uint32_t kPieces = sizeof(BookGuess) / sizeof(uint4);
    for (uint32_t i = threadIdx.x; i < f.regions * kPieces; i += blockDim.x)
      reinterpret_cast<uint4 *>(guess)[i] = reinterpret_cast<const uint4 *>(&f.region[i / kPieces].book->guess)[i % kPieces];
    __syncthreads();
  }
};

// A lane's class: `own` of its `count` lanes, whose first is lane `first` of the warp.
struct GroupLane {
  uint32_t region, own, count, power, first;  // power: the largest power of two in count
  uint32_t signs[2];                          // of its slots in both passes, a bit each
  float c, width_factor;
  uint32_t place[kSlots / 2], mu[kSlots / 2];   // of its channels in a row, and their centres: two halves each
  __device__ explicit GroupLane(const TensorFormat &f) {
    const uint32_t lanes = f.dim / kSlots, lane = threadIdx.x % lanes;
    region = region_of(f, lane * kSlots);
    const Region &r = f.region[region];
    own = lane - r.first / kSlots, count = r.count / kSlots, power = 1u << (31 - __clz(count)), first = threadIdx.x % 32 - own;
    for (uint32_t pass = 0; pass < 2; pass++)
      signs[pass] = f.rotate ? uint32_t(splitmix64(sign_seed(f.seed, f.tensor, pass, r.rotation) ^ own / 4) >> own % 4 * 16) & 0xffffu : 0;
    c = float(1.0 / sqrt(double(power * kSlots))), width_factor = float(1.0 / sqrt(double(r.count)));
    for (uint32_t i = 0; i < kSlots / 2; i++) {
      const uint32_t a = f.channel[lane * kSlots + 2 * i], b = f.channel[lane * kSlots + 2 * i + 1];
      place[i] = raw_place(f.dim, a) | raw_place(f.dim, b) << 16;
      mu[i] = f.mu ? f.mu[a] | uint32_t(f.mu[b]) << 16 : 0;
    }
  }
  __device__ void load(const uint16_t *x, float (&y)[kSlots]) const {
#pragma unroll
    for (uint32_t i = 0; i < kSlots / 2; i++) {  // without a centre, less zero
      y[2 * i] = widen(x[place[i] & 0xffff]) - widen(uint16_t(mu[i]));
      y[2 * i + 1] = widen(x[place[i] >> 16]) - widen(uint16_t(mu[i] >> 16));
    }
  }
  // The lanes' parts of the class, neighbours first; complete in its first lane.
  template <class T>
  __device__ T add(T sum) const {
    for (uint32_t d = 1; __any_sync(~0u, d < count); d *= 2) {
      const T other = __shfl_down_sync(~0u, sum, d);
      if (!(own & (2 * d - 1)) && own + d < count) sum = sum + other;
    }
    return sum;
  }
  // tree() over the class, in every lane of it.
  __device__ float tree(float (&v)[kSlots]) const {
#pragma unroll
    for (uint32_t d = 1; d < kSlots; d *= 2)
#pragma unroll
      for (uint32_t i = 0; i < kSlots; i += 2 * d) v[i] = v[i] + v[i + d];
    return __shfl_sync(~0u, add(v[0]), int(first));
  }
  // Both passes of section 3: the first `power` lanes, then the last.
  __device__ void rotate(float (&y)[kSlots]) const {
    for (uint32_t pass = 0; pass < 2; pass++) {
      if (pass && !__any_sync(~0u, count != power)) return;
      const uint32_t from = pass ? count - power : 0, at = own - from;  // beyond `power` where the lane takes no part
      const bool turned = !pass || count != power, takes_part = turned && at < power;
#pragma unroll
      for (uint32_t i = 0; i < kSlots; i++)
        if (turned) y[i] = __uint_as_float(__float_as_uint(y[i]) ^ (signs[pass] >> i & 1u) << 31);
      if (takes_part) butterfly(y);
      __syncwarp();
      for (uint32_t d = 1; __any_sync(~0u, d < power); d *= 2) {
        const bool crosses = takes_part && d < power;
        const uint32_t partner = crosses ? first + from + (at ^ d) : threadIdx.x % 32;
        const float sign = at & d ? -1.0f : 1.0f;
#pragma unroll
        for (uint32_t i = 0; i < kSlots; i++) {
          const float other = __shfl_sync(~0u, y[i], int(partner));
          if (crosses) y[i] = fmaf(y[i], sign, other);  // exact product
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kSlots; i++)
        if (takes_part) y[i] *= c;
    }
  }
};

class GroupRows {
 public:
  static constexpr uint32_t kCodings = kNibbles, kBlocks = 3;
  static constexpr bool kInPlace = false;
  static KVQ_HD uint32_t bytes() { return GroupBooks::bytes(); }
  __device__ explicit GroupRows(const Tile &tile) : rotated_(tile.f.rotate), books_(tile), lane_(tile.f) { books_.load(tile.f); }
  __device__ void encode(const Tile &tile) const {
    const uint32_t lanes = tile.f.dim / kSlots, rows = 32 / lanes, stride = blockDim.x / 32 * rows;
    for (uint32_t begin = threadIdx.x / 32 * rows; begin < tile.count; begin += stride) encode_row(tile, lanes, begin + threadIdx.x % 32 / lanes);
  }

 private:
  __device__ void encode_row(const Tile &tile, uint32_t lanes, uint32_t i) const {
    const TensorFormat &f = tile.f;
    const BookGuess &guess = books_.guess[lane_.region];
    float y[kSlots], v[kSlots];
    lane_.load(tile.row(min(i, tile.count - 1)), y);
#pragma unroll
    for (uint32_t j = 0; j < kSlots; j++) v[j] = y[j] * y[j];
    const float n = sqrtf(lane_.tree(v)), sigma = n * lane_.width_factor;
    if (rotated_) lane_.rotate(y);
    const float buckets = __fdividef(float(BookGuess::kPerSigma), sigma);
    uint32_t code[kSlots], squares = 0;
#pragma unroll
    for (uint32_t j = 0; j < kSlots; j++) {
      code[j] = guess.first[BookGuess::bucket(y[j], buckets)];
      code[j] += y[j] > guess.threshold[code[j]] * sigma;
      squares += uint32_t(guess.magnitude[code[j]]) * guess.magnitude[code[j]];
    }
    squares = lane_.add(squares);
    if (i >= tile.count) return;
    store_codes(tile.codes_of(tile.first + i) + threadIdx.x % lanes * kSlots, code);
    if (lane_.own) return;
    const float h = row_scale(ScaleRule(f.scale_rule), guess.scale, n, sigma, squares, 0);
    tile.store_param(row_param(f, tile.first + i, lane_.region), round_param(h, ParamType(f.param_type)));
  }
  bool rotated_;
  GroupBooks books_;
  GroupLane lane_;
};

}  // namespace kvq::cuda

// The codec of one instruction set; compiled once for each.
#include "codec.h"

#include "cases.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

extern const Kernels KERNELS;
extern const CodecKernels CODEC_KERNELS;

namespace {

// Added to |x| < 2^22 it rounds x to a whole number, ties to even, and leaves that in the lowest bits of the sum.
constexpr float ROUNDS = 12582912.0f;

// How the keys of a page, or its values, are coded.
struct Half {
  int dim, bits;
  bool symmetric;
  int window;  // consecutive slots that share a channel's grid; 0: every slot has one over its channels
  DType dtype, grid_dtype;

  int groups() const { return window ? PAGE / window * dim : PAGE; }
  int mask() const { return (1 << bits) - 1; }
  float top() const { return float(symmetric ? mask() / 2 : mask()); }
  int64_t grid_bytes() const { return int64_t(groups()) * item_size(grid_dtype) * (symmetric ? 1 : 2); }
};

Half keys_of(const Format& f) { return {f.k_dim, f.k_bits, f.symmetric, f.window, f.dtype, f.grid_dtype()}; }
Half values_of(const Format& f) {
  return {f.v_dim, f.v_bits, f.symmetric, f.symmetric ? PAGE : 0, f.dtype, f.grid_dtype()};
}

// Room for one half at a time.
struct Scratch {
  float* numbers;  // [PAGE, dim], also codes
  float* scale;    // [groups]
  float* zero;     // [groups]
  uint8_t* bytes;  // [PAGE, dim]
  int64_t size;

  Scratch(char* at, int dim) {
    constexpr int64_t most_groups = PAGE / 8;  // windows of a channel
    numbers = reinterpret_cast<float*>(at);
    scale = numbers + int64_t(PAGE) * dim;
    zero = scale + round_up(most_groups * dim, PAGE);
    bytes = reinterpret_cast<uint8_t*>(zero + round_up(most_groups * dim, PAGE));
    size = reinterpret_cast<char*>(bytes) + int64_t(PAGE) * dim - at;
  }
};

int64_t scratch_bytes(const Format& f) {
  alignas(64) static char origin;
  return Scratch(&origin, f.k_dim > f.v_dim ? f.k_dim : f.v_dim).size;
}

void widen(Rows rows, const Half& half, float* to) {
  const int64_t row = int64_t(half.dim) * item_size(half.dtype);
  if (rows.stride == row) return KERNELS.load(rows.at, half.dtype, int64_t(PAGE) * half.dim, 1.0f, to);
  for (int slot = 0; slot < PAGE; ++slot) {
    KERNELS.load(rows.at + slot * rows.stride, half.dtype, half.dim, 1.0f, to + slot * half.dim);
  }
}

// The least and the largest of finite numbers, inf and -inf before the first, and how many were not finite.
struct Range {
  Vec low = set(__builtin_inff()), high = set(-__builtin_inff()), others = set(0.0f);

  KVSTRATA_INLINE void include(Vec x) {
    const auto finite = x - x == set(0.0f);
    const Vec for_low = finite ? x : low, for_high = finite ? x : high;
    low = for_low < low ? for_low : low;
    high = for_high > high ? for_high : high;
    others = others + (finite ? set(0.0f) : set(1.0f));
  }
};

// Lowest and highest of every group to `low` and `high`; returns how many numbers are not finite.
int64_t find_ranges(const float* x, const Half& half, float* low, float* high) {
  Vec others = set(0.0f);
  if (half.window == 0) {
    for (int slot = 0; slot < PAGE; ++slot) {
      Range range;
      for (int d = 0; d < half.dim; d += LANES) range.include(load(x + slot * half.dim + d));
      low[slot] = -reduce_max(set(0.0f) - range.low);
      high[slot] = reduce_max(range.high);
      others = others + range.others;
    }
    return int64_t(reduce_add(others));
  }
  for (int group = 0; group < PAGE / half.window; ++group) {
    for (int d = 0; d < half.dim; d += LANES) {
      Range range;
      for (int slot = 0; slot < half.window; ++slot) {
        range.include(load(x + (group * half.window + slot) * half.dim + d));
      }
      store(low + group * half.dim + d, range.low);
      store(high + group * half.dim + d, range.high);
      others = others + range.others;
    }
  }
  return int64_t(reduce_add(others));
}

// The grid as kept, from lows in `zero` and highs in `scale`: to `to`, and in fp32 to `zero` and `scale`.
void make_grid(const Half& half, float* scale, float* zero, char* to) {
  const int groups = half.groups();
  const float top = half.top();
  for (int i = 0; i < groups; ++i) {
    const float low = zero[i], high = scale[i];
    scale[i] = half.symmetric ? (high > -low ? high : -low) / top : (high - low) / top;
    zero[i] = half.symmetric || low > 3.4028235e38f ? 0.0f : low + 0.0f;  // of -0 and 0 either may be the least: keep 0
  }
  KERNELS.store(scale, 1.0f, groups, half.grid_dtype, to);
  KERNELS.load(to, half.grid_dtype, groups, 1.0f, scale);
  for (int i = 0; i < groups; ++i) scale[i] = scale[i] > 0.0f && scale[i] < __builtin_inff() ? scale[i] : 1.0f;
  KERNELS.store(scale, 1.0f, groups, half.grid_dtype, to);
  if (!half.symmetric) KERNELS.store(zero, 1.0f, groups, half.grid_dtype, to + groups * item_size(half.grid_dtype));
}

// Numbers to codes plus `bias`, in the lowest bits of where they were.
void code(const Half& half, const float* scale, const float* zero, int bias, float* x) {
  const Vec top = set(half.top()), bottom = set(half.symmetric ? -half.top() : 0.0f);
  const Vec rounds = set(ROUNDS + float(bias));
  for (int slot = 0; slot < PAGE; ++slot) {
    const int64_t group = half.window ? int64_t(slot / half.window) * half.dim : slot;
    float* row = x + slot * half.dim;
    for (int d = 0; d < half.dim; d += LANES) {
      const Vec s = half.window ? load(scale + group + d) : set(scale[group]);
      const Vec z = half.window ? load(zero + group + d) : set(zero[group]);
      Vec steps = (load(row + d) - z) / s;
      steps = steps == steps ? steps : set(0.0f);
      steps = steps < bottom ? bottom : steps;
      store(row + d, (steps > top ? top : steps) + rounds);
    }
  }
}

uint32_t bits_of(const float* x) {
  uint32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return bits;
}

// Codes [PAGE, dim] to [dim/4][PAGE][4], of which 8 / BITS stand in a byte.
template <int BITS>
void stack_keys(const float* codes, int dim, uint8_t* bytes, char* to) {
  constexpr int planes = 8 / BITS;
  for (int i = 0; i < PAGE * dim; ++i) bytes[i] = uint8_t(bits_of(codes + i) & ((1 << BITS) - 1));
  for (int tile = 0; tile < dim / 4 / planes; ++tile) {
    for (int slot = 0; slot < PAGE; ++slot) {
      uint32_t four = 0;
      for (int plane = 0; plane < planes; ++plane) {
        uint32_t part;
        std::memcpy(&part, bytes + slot * dim + (tile * planes + plane) * 4, 4);
        four |= part << (plane * BITS);
      }
      std::memcpy(to + (tile * PAGE + slot) * 4, &four, 4);
    }
  }
}

// Codes [PAGE, dim] to [16][dim][4], of which 8 / BITS stand in a byte.
template <int BITS>
void stack_values(const float* codes, int dim, char* to) {
  constexpr int planes = 8 / BITS, slots = 4 * planes;
  for (int tile = 0; tile < PAGE / slots; ++tile) {
    for (int d = 0; d < dim; ++d) {
      uint32_t four = 0;
      for (int i = 0; i < slots; ++i) {
        const uint32_t code = bits_of(codes + (tile * slots + i) * dim + d) & ((1 << BITS) - 1);
        four |= code << (8 * (i % 4) + BITS * (i / 4));
      }
      std::memcpy(to + (tile * dim + d) * 4, &four, 4);
    }
  }
}

template <int BITS>
void unstack_keys(const char* from, int dim, uint8_t* bytes) {
  constexpr int planes = 8 / BITS;
  for (int tile = 0; tile < dim / 4 / planes; ++tile) {
    for (int slot = 0; slot < PAGE; ++slot) {
      uint32_t four;
      std::memcpy(&four, from + (tile * PAGE + slot) * 4, 4);
      for (int plane = 0; plane < planes; ++plane) {
        const uint32_t part = four >> (plane * BITS) & 0x01010101u * ((1 << BITS) - 1);
        std::memcpy(bytes + slot * dim + (tile * planes + plane) * 4, &part, 4);
      }
    }
  }
}

template <int BITS>
void unstack_values(const char* from, int dim, uint8_t* bytes) {
  constexpr int planes = 8 / BITS, slots = 4 * planes;
  for (int tile = 0; tile < PAGE / slots; ++tile) {
    for (int i = 0; i < slots; ++i) {
      uint8_t* row = bytes + (tile * slots + i) * dim;
      for (int d = 0; d < dim; ++d) {
        uint32_t four;
        std::memcpy(&four, from + (tile * dim + d) * 4, 4);
        row[d] = uint8_t(four >> (8 * (i % 4) + BITS * (i / 4)) & ((1 << BITS) - 1));
      }
    }
  }
}

// zero + scale * code. Signed codes are stored plus 2^7, or as int8, which `flip` = 2^7 makes the same.
void decode(const Half& half, const float* scale, const float* zero, const uint8_t* bytes, int flip, Rows to) {
  const int bias = half.symmetric ? (half.mask() + 1) / 2 : 0;
  for (int slot = 0; slot < PAGE; ++slot) {
    const int64_t group = half.window ? int64_t(slot / half.window) * half.dim : slot;
    const uint8_t* codes = bytes + slot * half.dim;
    float* row = reinterpret_cast<float*>(to.at + slot * to.stride);
    const float* s = scale + group;
    const float* z = zero + group;
    for (int d = 0; d < half.dim; ++d) row[d] = float((codes[d] ^ flip) - bias) * (half.window ? s[d] : *s);
    if (half.symmetric) continue;
    asm volatile("" ::: "memory");  // a product that stays in a register may be fused with the sum, and not be rounded
    for (int d = 0; d < half.dim; ++d) row[d] += half.window ? z[d] : *z;
  }
}

// Numbers of one half to codes in scratch, and its grid to `grid`; returns how many numbers are not finite.
int64_t code_half(const Half& half, Rows rows, int bias, char* grid, const Scratch& scratch) {
  widen(rows, half, scratch.numbers);
  const int64_t others = find_ranges(scratch.numbers, half, scratch.zero, scratch.scale);
  make_grid(half, scratch.scale, scratch.zero, grid);
  code(half, scratch.scale, scratch.zero, half.symmetric ? bias : 0, scratch.numbers);
  return others;
}

void read_grid(const Half& half, const char* grid, const Scratch& scratch) {
  KERNELS.load(grid, half.grid_dtype, half.groups(), 1.0f, scratch.scale);
  if (half.symmetric) return;
  KERNELS.load(grid + half.groups() * item_size(half.grid_dtype), half.grid_dtype, half.groups(), 1.0f, scratch.zero);
}

int64_t pack(const Format& f, Rows k, Rows v, const Page& to, char* at) {
  const Half keys = keys_of(f), values = values_of(f);
  const Scratch scratch(at, f.k_dim > f.v_dim ? f.k_dim : f.v_dim);
  int64_t others = code_half(keys, k, (keys.mask() + 1) / 2, to.grid, scratch);
  with_bits(keys.bits, [&](auto bits) { stack_keys<bits()>(scratch.numbers, keys.dim, scratch.bytes, to.k); });
  others += code_half(values, v, 0, to.grid + keys.grid_bytes(), scratch);
  with_bits(values.bits, [&](auto bits) { stack_values<bits()>(scratch.numbers, values.dim, to.v); });
  return others;
}

void unpack(const Format& f, const Page& from, Rows k, Rows v, char* at) {
  const Half keys = keys_of(f), values = values_of(f);
  const Scratch scratch(at, f.k_dim > f.v_dim ? f.k_dim : f.v_dim);
  read_grid(keys, from.grid, scratch);
  with_bits(keys.bits, [&](auto bits) { unstack_keys<bits()>(from.k, keys.dim, scratch.bytes); });
  decode(keys, scratch.scale, scratch.zero, scratch.bytes, 0, k);
  read_grid(values, from.grid + keys.grid_bytes(), scratch);
  with_bits(values.bits, [&](auto bits) { unstack_values<bits()>(from.v, values.dim, scratch.bytes); });
  decode(values, scratch.scale, scratch.zero, scratch.bytes, values.symmetric ? (values.mask() + 1) / 2 : 0, v);
}

}  // namespace

const CodecKernels CODEC_KERNELS = {scratch_bytes, pack, unpack};

}  // namespace kvstrata::KVSTRATA_ISA

// Tiles (AMX): eight of up to 16 rows of 64 bytes, whose sizes every thread sets for itself. Where the processor has
// none, the operations are emulated, for tests: with the same results, far more slowly.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define HARDWARE_TILES
#endif

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

struct alignas(64) TileSizes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // bytes of a row of each tile
  uint8_t rows[16] = {};
};

#if defined(HARDWARE_TILES)

// Macros, as the intrinsics take nothing but digits as tiles.
#if defined(__clang__)
#define TILE_SIZES(sizes) _tile_loadconfig(&(sizes))
#else  // GCC's intrinsic names 8 of the 64 bytes that it reads, so GCC may leave the rest unwritten
#define TILE_SIZES(sizes) __asm__ volatile("ldtilecfg\t%0" : : "m"(sizes))
#endif
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ADD_PAIRS(sums, rows, weights) _tile_dpbf16ps(sums, rows, weights)
#define TILE_RELEASE() _tile_release()

// Linux lets a process use tiles once the process has asked.
inline bool has_tiles() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return permitted;
}
inline bool runs_tiles() { return has_tiles(); }

#else

struct Tiles {
  TileSizes sizes;
  uint8_t bytes[8][TILE_ROWS][TILE_BYTES];

  void load(int tile, const void* from, int64_t stride) {
    std::memset(bytes[tile], 0, sizeof bytes[tile]);
    for (int row = 0; row < sizes.rows[tile]; row++)
      std::memcpy(bytes[tile][row], static_cast<const char*>(from) + row * stride, sizes.bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int row = 0; row < sizes.rows[tile]; row++)
      std::memcpy(static_cast<char*>(to) + row * stride, bytes[tile][row], sizes.bytes[tile]);
  }
  // TDPBF16PS: adds the sum of even columns to the sum of odd ones, then to `sums`; numbers that are not normal count
  // as 0.
  void add_pairs(int sums, int rows, int weights) {
    for (int row = 0; row < sizes.rows[sums]; row++) {
      float parts[2][TILE_BYTES / 4] = {};
      for (int pair = 0; pair < sizes.bytes[rows] / 4; pair++)
        for (int half = 0; half < 2; half++) {
          auto x = half_of(bytes[rows][row], pair, half);
          for (int n = 0; n < sizes.bytes[sums] / 4; n++)
            parts[half][n] = normal(std::fma(x, half_of(bytes[weights][pair], n, half), parts[half][n]));
        }
      float total[TILE_BYTES / 4];
      std::memcpy(total, bytes[sums][row], sizeof total);
      for (int n = 0; n < sizes.bytes[sums] / 4; n++) total[n] = normal(total[n] + normal(parts[0][n] + parts[1][n]));
      std::memcpy(bytes[sums][row], total, sizeof total);
    }
  }

 private:
  static float normal(float number) { return std::fabs(number) < FLT_MIN ? 0 * number : number; }
  static float half_of(const uint8_t* row, int pair, int half) {
    auto word = ::load<uint32_t>(row + pair * 4);
    word = half ? word & 0xffff0000u : word << 16;
    return normal(::load<float>(&word));
  }
};

thread_local Tiles tiles;

#define TILE_SIZES(source) (tiles.sizes = (source))
#define TILE_LOAD(tile, from, stride) tiles.load(tile, from, stride)
#define TILE_STORE(tile, to, stride) tiles.store(tile, to, stride)
#define TILE_ADD_PAIRS(sums, rows, weights) tiles.add_pairs(sums, rows, weights)
#define TILE_RELEASE() (void)0

inline bool has_tiles() { return false; }
inline bool runs_tiles() { return true; }

#endif

}  // namespace

// Where the tokens of TreeAttention are: slots through the page table, rows packed by head, loads, writes and the mask.
#pragma once

#include "fp8.cuh"
#include "tree_tile.cuh"

namespace trt_eagle3 {

// What a block works on: rows [row0, row0 + Tile::Rows) of one KV head of one sequence. Row r is token r / G, head r %
// G.
struct TreeBlock {
  int sequence, kv_head, group, row0, rows;
  int past, first_new, kv_end;  // slot of new token 0; one past the last slot that any row sees
  int queries;                  // tokens that are not padding
  int cached;                   // slots below this one are in the cache when the kernel starts
  int kv_begin, clear_begin;    // the first slot that any row sees; that all of them see
  float k_scale, v_scale;       // of the head's bytes, where the cache is FP8
};

__device__ __forceinline__ int token_of(const TreeAttentionParams& p, int row) {
  return p.group_inverse == 0 ? row : __umulhi(row, p.group_inverse);
}

// The first slot that token `token` sees: what lies before is outside the window.
__device__ __forceinline__ int first_seen(const TreeAttentionParams& p, const TreeBlock& b, int token) {
  if (p.window > 0) return max(b.first_new + token - p.window + 1, 0);
  return p.anchor_window > 0 ? max(b.past - p.anchor_window, 0) : 0;
}

// Which rows; their lengths come later, so that what does not depend on those is asked for at the same time.
template <typename Tile>
__device__ __forceinline__ TreeBlock tree_rows(const TreeAttentionParams& p, int pair, int tile) {
  TreeBlock b = {};
  b.sequence = pair / p.num_kv_heads;
  b.kv_head = pair - b.sequence * p.num_kv_heads;
  b.k_scale = kv_scale<Tile::Fp8>(p, 0, b.kv_head);
  b.v_scale = kv_scale<Tile::Fp8>(p, 1, b.kv_head);
  b.group = p.num_heads / p.num_kv_heads;
  b.row0 = tile * Tile::Rows;
  b.rows = min(Tile::Rows, p.num_new * b.group - b.row0);
  return b;
}

__device__ __forceinline__ void set_lengths(const TreeAttentionParams& p, TreeBlock& b, int past, int queries) {
  b.past = past;
  b.queries = min(queries, p.num_new);
  b.first_new = b.past + p.tail - p.num_new;
  const int last = p.mask == MaskKind::kCausal ? min(b.queries, token_of(p, b.row0 + b.rows - 1) + 1) : b.queries;
  b.kv_end = min(b.first_new + last, p.pages_per_row * p.page_size);
  b.kv_begin = first_seen(p, b, token_of(p, b.row0));
  b.clear_begin = first_seen(p, b, token_of(p, b.row0 + b.rows - 1));
  b.cached = p.written != 0 ? min(b.first_new + b.queries, p.pages_per_row * p.page_size) : b.first_new;
}

// The tile of slots with which a block begins; those before are outside every row's window.
template <typename Tile>
__device__ __forceinline__ int first_tile(const TreeBlock& b) {
  return b.kv_begin / Tile::Tokens;
}

// How many of a launch's splits take part in a block's rows. A launch is planned for as many slots as the page table
// has; what a sequence fills of them is cut so that no split takes more rounds than it must, and no more parts are
// merged.
template <typename Tile>
__device__ __forceinline__ int splits_in_use(const TreeBlock& b, int num_splits) {
  const int slots = b.kv_end - first_tile<Tile>(b) * Tile::Tokens;
  const int rounds = max(1, ceil_div(slots, Tile::Tokens * Tile::Groups));
  return ceil_div(rounds, ceil_div(rounds, num_splits));
}

// Cache slot of slot `position` of a sequence. Needs no lengths: a block's first lookups need not wait for those.
__device__ __forceinline__ int cache_slot(const TreeAttentionParams& p, int sequence, int position) {
  const int index = p.page_shift >= 0 ? position >> p.page_shift : position / p.page_size;
  if (index >= p.pages_per_row) return 0;
  const int page = p.page_table[static_cast<int64_t>(sequence) * p.pages_per_row + index];
  return page * p.page_size + position - index * p.page_size;
}

// Writes the new tokens whose first row is one of this block's; all splits of these rows share them. A thread reads its
// first 16 bytes before the main loop and stores them after its first copies, so that no thread waits for either.
template <typename Tile>
struct NewTokens {
  int token, column;
  uint4 key, value;

  // Element `i` of the split's share: a 16-byte piece of a token.
  __device__ __forceinline__ void read(const TreeAttentionParams& p, const TreeBlock& b, int i) {
    token = token_of(p, b.row0 + b.group - 1) + blockIdx.x + i / Tile::Chunks * gridDim.x;
    column = b.kv_head * Tile::D * 2 + i % Tile::Chunks * 16;
    if (token >= min(token_of(p, b.row0 + b.rows + b.group - 1), p.num_new)) token = INT32_MAX;
    if (token == INT32_MAX) return;
    const int64_t source =
        (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_kv_heads * Tile::D * 2 + column;
    key = *reinterpret_cast<const uint4*>(static_cast<const char*>(p.k) + source);
    value = *reinterpret_cast<const uint4*>(static_cast<const char*>(p.v) + source);
  }

  __device__ __forceinline__ void store(const TreeAttentionParams& p, const TreeBlock& b) const {
    if (token >= min(b.queries, b.kv_end - b.first_new)) return;
    const int64_t slot = cache_slot(p, b.sequence, b.first_new + token);
    const int64_t target = slot * p.num_kv_heads * Tile::Chunks + column / 16;
    using T = typename Tile::T;
    store_eight<T, Tile::Fp8>(p.k_cache, target, key, b.k_scale);
    store_eight<T, Tile::Fp8>(p.v_cache, target, value, b.v_scale);
  }

  // Stores this piece, then the thread's others.
  __device__ __forceinline__ void write(const TreeAttentionParams& p, const TreeBlock& b) {
#pragma unroll 1
    for (int i = threadIdx.x; token != INT32_MAX; read(p, b, i)) {
      store(p, b);
      i += Tile::Threads;
    }
  }
};

template <typename Tile>
__device__ __forceinline__ void load_queries(const TreeAttentionParams& p, const TreeBlock& b, uint32_t queries) {
  using T = typename Tile::T;
#pragma unroll 4
  for (int i = threadIdx.x; i < Tile::Rows * Tile::Chunks; i += Tile::Threads) {
    const int row = i / Tile::Chunks;
    const int chunk = i - row * Tile::Chunks;
    const int token = token_of(p, b.row0 + row);
    const int head = b.kv_head * b.group + b.row0 + row - token * b.group;
    const bool inside = row < b.rows;
    const int64_t head_row = (static_cast<int64_t>(b.sequence) * p.num_new + token) * p.num_heads + head;
    copy_async16(queries + tile_offset<Tile::D>(row, chunk, Tile::Rows),
                 static_cast<const T*>(p.q) + (inside ? head_row * Tile::D + chunk * 8 : 0), inside ? 16 : 0);
  }
}

// The mask of the block's tokens as bits: bit c % 32 of word [token - first][c / 32]. No branches around the loads:
// every byte of a word is asked for before any is used.
template <typename Tile>
__device__ __forceinline__ void pack_mask(const TreeAttentionParams& p, const TreeBlock& b, uint32_t* words) {
  if (p.mask == MaskKind::kCausal) return;
  const int first = token_of(p, b.row0);
  const int count = token_of(p, b.row0 + b.rows - 1) + 1 - first;
  const int width = ceil_div(p.tail, 32);
  const uint8_t* mask = p.tree_mask + (static_cast<int64_t>(b.sequence) * p.num_new + first) * p.tail;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * width; i += Tile::Threads) {
    const int token = i / width;
    const int column0 = (i - token * width) * 32;
    const uint8_t* row = mask + token * p.tail;
    uint32_t word = 0;
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const uint32_t shown = row[min(column0 + bit, p.tail - 1)] != 0;
      word |= shown << bit;
    }
    words[i] = column0 + 32 <= p.tail ? word : word & ((1u << (p.tail - column0)) - 1);
  }
}

// Bits of 32 columns of a row of packed words, from any column on; 0 outside the row.
__device__ __forceinline__ uint32_t mask_bits(const uint32_t* row, int width, int column) {
  const int word = column >> 5;
  const uint32_t low = row[min(max(word, 0), width - 1)];
  const uint32_t high = row[min(max(word + 1, 0), width - 1)];
  return __funnelshift_r(word >= 0 && word < width ? low : 0, word + 1 >= 0 && word + 1 < width ? high : 0,
                         column & 31);
}

// Sets the scores that row `row` of the block may not see to -inf. `words` is what pack_mask left; `position` is the
// first slot of the tile, `lane_column` this thread's first column of every 8.
template <int kTiles>
__device__ __forceinline__ void mask_scores(const TreeAttentionParams& p, const TreeBlock& b, const uint32_t* words,
                                            float (&scores)[kTiles][4], int row, int half, int position,
                                            int lane_column) {
  const int token = token_of(p, b.row0 + min(row, b.rows - 1));
  const bool causal = p.mask == MaskKind::kCausal;
  const int clear = causal ? b.first_new + token + 1 : b.past;
  const int begin = first_seen(p, b, token);
  const int end = p.window > 0 ? min(b.kv_end, b.first_new + token + p.window) : b.kv_end;
  const int width = ceil_div(p.tail, 32);
  const uint32_t* shown = words + (token - token_of(p, b.row0)) * width;
#pragma unroll
  for (int j = 0; j < kTiles; j += 4) {
    uint32_t bits = causal ? 0 : mask_bits(shown, width, position + j * 8 - b.past);
    const int cleared = min(max(clear - position - j * 8, 0), 32);  // of these 32 columns
    const int held = min(max(end - position - j * 8, 0), 32);
    const int hidden = min(max(begin - position - j * 8, 0), 32);
    bits |= cleared == 32 ? ~0u : (1u << cleared) - 1;
    bits &= held == 32 ? ~0u : (1u << held) - 1;
    bits = hidden == 32 ? 0 : bits & ~((1u << hidden) - 1);
    bits >>= lane_column;
#pragma unroll
    for (int i = 0; i < 8 && j + i / 2 < kTiles; ++i) {
      if ((bits >> (i / 2 * 8 + i % 2) & 1) == 0) scores[j + i / 2][2 * half + i % 2] = -INFINITY;
    }
  }
}

}  // namespace trt_eagle3

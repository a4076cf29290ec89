// Writing to a paged cache of keys and values, and attention over it.
#include <type_traits>
#include "decode.h"
#include "pairs.h"

namespace {

template <class From, class To> void copy_row(const From* from, To* to, int64_t size) {
    if constexpr (std::is_same_v<From, To>) std::memcpy(to, from, size * sizeof(To));
    else {
        int64_t at = 0;
        for (; at + W <= size; at += W) store(to + at, load(from + at));
        for (; at < size; at++) put(to + at, get(from[at]));
    }
}

template <class T> void write_result(const float* mixed, float total, int64_t size, T* to) {
    int64_t d = 0;
    for (; d + W <= size; d += W) store(to + d, load(mixed + d) / total);
    if (d < size) store_part(to + d, load(mixed + d) / total, int(size - d));
}

}  // namespace

// k, v: [tokens, size] of `dtype`, rows k_stride and v_stride apart; caches: [slots, size] of cache_dtype, contiguous. bad: 1 and the first slot
// outside the cache; then nothing is written.
API void write_kv(int dtype, int cache_dtype, const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* key_cache,
                  void* value_cache, const int64_t* slots, int64_t tokens, int64_t size, int64_t slot_count, int64_t* bad) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= slot_count) { bad[0] = 1; bad[1] = slots[t]; return; }
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) From;
        by_type(cache_dtype, [=](auto* cache_type) {
            typedef decltype(cache_type) To;
            parallel(tokens, size, [=](int64_t first, int64_t last) {
                for (int64_t t = first; t < last; t++) {
                    copy_row((From)k + t * k_stride, (To)key_cache + slots[t] * size, size);
                    copy_row((From)v + t * v_stride, (To)value_cache + slots[t] * size, size);
                }
            });
        });
    });
}

// q, out: [tokens, heads, size] of `dtype`. caches: [blocks, block_size, kv_heads, size] of cache_dtype. All contiguous. tables: int64 (wide) or
// int32, rows table_stride apart. starts: [rows + 1], lengths: [rows]. bad: 1 and the first block outside the cache; then nothing is computed.
API void paged_attention(int dtype, int cache_dtype, const void* q, void* out, const void* key_cache, const void* value_cache,
                         const void* tables, int wide, int64_t table_stride, const int64_t* starts, const int64_t* lengths, int64_t rows,
                         int64_t heads, int64_t kv_heads, int64_t size, int64_t blocks, int64_t block_size, float scale, int64_t* bad) {
    Pages pages{tables, wide != 0, table_stride, blocks, block_size, kv_heads, size};
    std::vector<int64_t> single, tokens, seen;
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < rows; row++) {
        int64_t queries = starts[row + 1] - starts[row];
        if (!queries) continue;
        for (int64_t index = 0; index * block_size < lengths[row]; index++) {
            int64_t block = pages.block(row, index);
            if (block < 0 || block >= blocks) { bad[0] = 1; bad[1] = block; return; }
        }
        if (queries > 1) {
            pieces.push_back({row, starts[row], queries, lengths[row]});
            continue;
        }
        single.push_back(row);
        tokens.push_back(starts[row]);
        seen.push_back(lengths[row]);
    }
    auto read = [=](int64_t token, int64_t head, float* to) {
        by_type(dtype, [=](auto* type) { widen((decltype(type))q + (token * heads + head) * size, size, to, scale); });
    };
    auto write = [=](int64_t token, int64_t head, const float* mixed, float total) {
        by_type(dtype, [=](auto* type) { write_result(mixed, total, size, (decltype(type))out + (token * heads + head) * size); });
    };
    by_type(cache_dtype, [&](auto* type) {
        typedef decltype(type) P;
        decode(pages, (P)key_cache, (P)value_cache, single, tokens, seen, heads / kv_heads, read, write);
        if constexpr (PAIRED && std::is_same_v<P, bf16*>)
            if (dtype == 1) {
                auto read_halves = [=](int64_t token, int64_t head, bf16* to) {
                    std::memcpy(to, (const bf16*)q + (token * heads + head) * size, size * sizeof(bf16));
                    to[size] = {};  // the other half of a unit
                };
                return prefill<PairLines>(pages, (P)key_cache, (P)value_cache, pieces, heads / kv_heads, scale, read_halves, write);
            }
        prefill<FloatLines<std::remove_pointer_t<P>>>(pages, (P)key_cache, (P)value_cache, pieces, heads / kv_heads, scale, read, write);
    });
}

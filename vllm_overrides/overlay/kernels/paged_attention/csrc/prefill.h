// Rows of several queries: a block of tokens with all query heads of one KV head ("lines") against tiles of the context at absolute positions,
// as two register-blocked products. A line's numbers depend on its own query and on the tiles alone, not on the block it is in.
#pragma once
#include <atomic>
#include "../../csrc/blocked.h"
#include "decode.h"

namespace {

constexpr int64_t KEYS = 64;
// Lines whose sums stay in registers together.
constexpr int GROUP = W == 16 ? 12 : 6;

struct Piece { int64_t row, first, queries, length; };  // queries [first, first + queries) of q; the last stands at position length - 1

// Keys as float32 panels [PANEL positions][size][PANEL]; zeros past `count`.
template <class T> void pack_keys(const T* keys, const int64_t* at, int64_t count, int64_t size, float* to) {
    for (int64_t j = 0; j < rounded_up(count, PANEL); j++) {
        float* column = to + j / PANEL * size * PANEL + j % PANEL;
        if (j >= count) {
            for (int64_t d = 0; d < size; d++) column[d * PANEL] = 0;
            continue;
        }
        const T* key = keys + at[j];
        int64_t d = 0;
        for (; d + W <= size; d += W) {
            vf x = load(key + d);
            for (int lane = 0; lane < W; lane++) column[(d + lane) * PANEL] = x[lane];
        }
        for (; d < size; d++) column[d * PANEL] = get(key[d]);
    }
}

// Values as float32 panels [PANEL dimensions][KEYS][PANEL]; zeros past `size`.
template <class T> void pack_values(const T* values, const int64_t* at, int64_t count, int64_t size, float* to) {
    for (int64_t j = 0; j < count; j++) {
        const T* value = values + at[j];
        for (int64_t d = 0; d < rounded_up(size, PANEL); d += W) {
            float* place = to + d / PANEL * KEYS * PANEL + j * PANEL + d % PANEL;
            int64_t left = size - d;
            store(place, left >= W ? load(value + d) : left > 0 ? load_part(value + d, int(left)) : vf{});
        }
    }
}

// to[GROUP][PANEL] = to * scales (null: 0) + left[GROUP][depth] times panel[depth][PANEL]; lines `left_pitch` and `to_pitch` apart.
INLINE void product(const float* left, int64_t left_pitch, const float* panel, int64_t depth, float* to, int64_t to_pitch,
                    const float* scales) {
    vf total[GROUP][2];
#pragma GCC unroll 16
    for (int a = 0; a < GROUP; a++) {
        total[a][0] = scales ? load(to + a * to_pitch) * scales[a] : vf{};
        total[a][1] = scales ? load(to + a * to_pitch + W) * scales[a] : vf{};
    }
    for (int64_t k = 0; k < depth; k++) {
        vf low = load(panel + k * PANEL), high = load(panel + k * PANEL + W);
#pragma GCC unroll 16
        for (int a = 0; a < GROUP; a++) {
            float x = left[a * left_pitch + k];
            total[a][0] += low * x;
            total[a][1] += high * x;
        }
    }
#pragma GCC unroll 16
    for (int a = 0; a < GROUP; a++) {
        store(to + a * to_pitch, total[a][0]);
        store(to + a * to_pitch + W, total[a][1]);
    }
}

// Scores of one line become weights; `seen` of the tile's positions are the line's, the others get 0. Returns
// what its mixture is to be scaled by.
INLINE float weigh(float* row, int64_t seen, int64_t count, float& peak, float& total) {
    int64_t padded = rounded_up(count, W);
    for (int64_t j = seen; j < padded; j++) row[j] = -INFINITY;
    vf most = all(peak);
    for (int64_t j = 0; j < padded; j += W) most = maximum(most, load(row + j));
    float next = largest(most), base = next == -INFINITY ? 0 : next, scale = shrink(peak, next);
    vf sums{};
    for (int64_t j = 0; j < padded; j += W) {
        vf weight = exp(load(row + j) - base);
        store(row + j, weight);
        sums += weight;
    }
    peak = next;
    total = total * scale + sum(sums);
    return scale;
}

// Lines in float32: whatever the type of the queries.
template <class T> class FloatLines {
    const int64_t size, pitch, wide, room;
    Buffer queries, mixed, scores, packed_keys, packed_values, state;
    float *const peak, *const sum, *const scale;

public:
    typedef float Query;
    static constexpr int64_t MOST = 128, TILE = KEYS;

    FloatLines(int64_t lines, int64_t size, float)
        : size(size), pitch(rounded_up(size, W)), wide(rounded_up(size, PANEL)), room(rounded_up(lines, GROUP)), queries(room * pitch),
          mixed(room * wide), scores(room * KEYS), packed_keys(KEYS * size), packed_values(KEYS * wide), state(3 * room), peak(state.at),
          sum(peak + room), scale(sum + room) {}
    float* query(int64_t line) { return queries.at + line * pitch; }
    const float* mixture(int64_t line) { return mixed.at + line * wide; }
    float total(int64_t line) { return sum[line]; }

    void begin(int64_t lines) {
        int64_t padded = rounded_up(lines, GROUP);
        std::fill(queries.at, queries.at + padded * pitch, 0.0f);
        std::fill(mixed.at, mixed.at + padded * wide, 0.0f);
        std::fill(peak, peak + padded, -INFINITY);
        std::fill(sum, sum + padded, 0.0f);
    }
    // The next `width` positions, whose keys and values begin at the elements `at`, as do those that follow; a line sees the first seen(line) of them.
    template <class Seen> void meet(const T* keys, const T* values, const int64_t* at, int64_t width, int64_t, int64_t lines, Seen seen) {
        int64_t padded = rounded_up(lines, GROUP);
        pack_keys(keys, at, width, size, packed_keys.at);
        pack_values(values, at, width, size, packed_values.at);
        for (int64_t j = 0; j < width; j += PANEL)
            for (int64_t line = 0; line < padded; line += GROUP)
                product(queries.at + line * pitch, pitch, packed_keys.at + j * size, size, scores.at + line * KEYS + j, KEYS, nullptr);
        for (int64_t line = 0; line < padded; line++)
            scale[line] = weigh(scores.at + line * KEYS, line < lines ? seen(line) : width, width, peak[line], sum[line]);
        for (int64_t d = 0; d < wide; d += PANEL)
            for (int64_t line = 0; line < padded; line += GROUP)
                product(scores.at + line * KEYS, KEYS, packed_values.at + d * KEYS, width, mixed.at + line * wide + d, wide, scale + line);
    }
};

// Lines: FloatLines or PairLines, of up to MOST lines unless one token has more. read and write as for `decode`, but for what is read: a Query.
template <class Lines, class T, class Read, class Write>
void prefill(const Pages& pages, const T* keys, const T* values, const std::vector<Piece>& pieces, int64_t group, float scale, Read read,
             Write write) {
    if (pieces.empty()) return;
    int64_t size = pages.size, kv_heads = pages.kv_heads, threads = most_threads(), all_queries = 0;
    for (const Piece& piece : pieces) all_queries += piece.queries;
    int64_t block = std::max<int64_t>(1, Lines::MOST / group);
    while (block > 1 && block * group > 32 && all_queries * kv_heads / block < 3 * threads) block /= 2;
    struct Item { int64_t piece, begin, head; };
    std::vector<Item> items;
    for (int64_t piece = 0; piece < int64_t(pieces.size()); piece++)
        // The last queries see most: they come first.
        for (int64_t begin = (pieces[piece].queries - 1) / block * block; begin >= 0; begin -= block)
            for (int64_t head = 0; head < kv_heads; head++) items.push_back({piece, begin, head});
    std::atomic<int64_t> next{0};
    parallel(std::min<int64_t>(threads, items.size()), 1 << 20, [&](int64_t, int64_t) {
        Lines lines(block * group, size, scale);
        int64_t at[2 * Lines::TILE];
        for (int64_t index; (index = next++) < int64_t(items.size());) {
            Item item = items[index];
            const Piece& piece = pieces[item.piece];
            int64_t count = std::min(block, piece.queries - item.begin);
            int64_t token = piece.first + item.begin, position = piece.length - piece.queries + item.begin;
            lines.begin(count * group);
            for (int64_t line = 0; line < count * group; line++)
                read(token + line / group, item.head * group + line % group, lines.query(line));
            for (int64_t from = 0; from < position + count; from += Lines::TILE) {
                const int64_t end = position + count, width = std::min(Lines::TILE, end - from), follow = std::min(Lines::TILE, end - from - width);
                pages.offsets(piece.row, from, from + width + follow, at);
                lines.meet(keys + item.head * size, values + item.head * size, at, width, follow, count * group, [=](int64_t line) {
                    return std::max<int64_t>(0, std::min(position + line / group + 1 - from, width));
                });
            }
            for (int64_t line = 0; line < count * group; line++)
                write(token + line / group, item.head * group + line % group, lines.mixture(line), lines.total(line));
        }
    });
}

}  // namespace

// Rows of one query: all query heads of a KV head share each key and value that is read. The context is cut into tiles at absolute positions;
// their results are combined in the order of the tiles, whoever computed them, so that the numbers do not depend on the threads.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>
#include "../../csrc/buffer.h"

namespace {

constexpr int64_t TILE = 512;
// Positions whose values stay in the first-level cache while every head uses them.
constexpr int64_t STRIPE = 32;

// The pages of a cache [blocks, block_size, kv_heads, size] and the rows' tables of them.
struct Pages {
    const void* tables;
    bool wide;  // int64, else int32
    int64_t table_stride, blocks, block_size, kv_heads, size;

    int64_t block(int64_t row, int64_t index) const {
        int64_t at = row * table_stride + index;
        return wide ? ((const int64_t*)tables)[at] : ((const int32_t*)tables)[at];
    }
    // Where positions [begin, end) of a row begin in the cache, in elements.
    void offsets(int64_t row, int64_t begin, int64_t end, int64_t* to) const {
        int64_t step = kv_heads * size;
        for (int64_t at = begin; at < end;) {
            int64_t within = at % block_size, upto = std::min(end, at - within + block_size);
            int64_t offset = (block(row, at / block_size) * block_size + within) * step;
            for (; at < upto; at++, offset += step) *to++ = offset;
        }
    }
};

// Lane i of the result of `a` (first half of the lanes) and `b`: sums of neighbours, T lanes apart.
constexpr int lane(int i, int t, int upper) {
    int segment = i / t, half = W / t / 2;
    return segment / half * W + segment % half * 2 * t + upper * t + i % t;
}
template <int T, int... I> INLINE vf folded(vf a, vf b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane(I, T, 0)...) + __builtin_shufflevector(a, b, lane(I, T, 1)...);
}
// Lane i: the sum over all lanes of x[i].
template <int N> INLINE vf sums(const vf* x) {
    if constexpr (N == 1) return x[0];
    else return folded<W / N>(sums<N / 2>(x), sums<N / 2>(x + N / 2), std::make_integer_sequence<int, W>());
}

// e^(x - peak), where a peak of -inf (nothing seen, or nothing but -inf) gives 0.
INLINE float shrink(float x, float peak) { return exp(all(x - (peak == -INFINITY ? 0 : peak)))[0]; }

// scores[Q][TILE] of Q queries, `pitch` apart, padded with zeros to a multiple of W.
template <int Q, class T>
void scores_of(const float* q, int64_t pitch, const T* keys, const int64_t* at, int64_t count, int64_t size, float* scores) {
    constexpr int K = W / Q;
    for (int64_t j = 0; j < count; j += K) {
        const T* key[K];
        for (int b = 0; b < K; b++) key[b] = keys + at[std::min(j + b, count - 1)];
        vf total[W] = {};
        int64_t d = 0;
        for (; d + W <= size; d += W) {
            vf k[K];
#pragma GCC unroll 16
            for (int b = 0; b < K; b++) k[b] = load(key[b] + d);
#pragma GCC unroll 16
            for (int a = 0; a < Q; a++) {
                vf x = load(q + a * pitch + d);
#pragma GCC unroll 16
                for (int b = 0; b < K; b++) total[a * K + b] += x * k[b];
            }
        }
        if (d < size) {
            for (int b = 0; b < K; b++) {
                vf k = load_part(key[b] + d, int(size - d));
                for (int a = 0; a < Q; a++) total[a * K + b] += load(q + a * pitch + d) * k;
            }
        }
        float found[W];
        store(found, sums<W>(total));
        for (int a = 0; a < Q; a++)
            for (int b = 0; b < K && j + b < count; b++) scores[a * TILE + j + b] = found[a * K + b];
    }
}

// V vectors of Q heads' mixtures += weights[Q][TILE] of `count` positions times their values. part: lanes of the last vector, 0: all.
template <int Q, int V, class T>
INLINE void mix_vectors(const float* weights, const T* values, const int64_t* at, int64_t count, float* mixed, int64_t pitch, int part) {
    vf total[Q][V];
#pragma GCC unroll 16
    for (int a = 0; a < Q; a++)
#pragma GCC unroll 16
        for (int b = 0; b < V; b++) total[a][b] = load(mixed + a * pitch + b * W);
    for (int64_t j = 0; j < count; j++) {
        vf v[V];
#pragma GCC unroll 16
        for (int b = 0; b < V; b++) v[b] = part ? load_part(values + at[j] + b * W, part) : load(values + at[j] + b * W);
#pragma GCC unroll 16
        for (int a = 0; a < Q; a++)
#pragma GCC unroll 16
            for (int b = 0; b < V; b++) total[a][b] += v[b] * weights[a * TILE + j];
    }
#pragma GCC unroll 16
    for (int a = 0; a < Q; a++)
#pragma GCC unroll 16
        for (int b = 0; b < V; b++) store(mixed + a * pitch + b * W, total[a][b]);
}
template <int Q, class T>
void mix(const float* weights, const T* values, const int64_t* at, int64_t count, int64_t size, float* mixed, int64_t pitch) {
    int64_t d = 0;
    for (; d + 2 * W <= size; d += 2 * W) mix_vectors<Q, 2>(weights, values + d, at, count, mixed + d, pitch, 0);
    for (; d + W <= size; d += W) mix_vectors<Q, 1>(weights, values + d, at, count, mixed + d, pitch, 0);
    if (d < size) mix_vectors<Q, 1>(weights, values + d, at, count, mixed + d, pitch, int(size - d));
}

// f(first of a few heads, how many as a type).
template <class F> INLINE void by_heads(int64_t group, F f) {
    int64_t g = 0;
    if constexpr (W >= 8)
        for (; g + 4 <= group; g += 4) f(g, std::integral_constant<int, 4>());
    for (; g + 2 <= group; g += 2) f(g, std::integral_constant<int, 2>());
    for (; g < group; g++) f(g, std::integral_constant<int, 1>());
}

// What a stretch of the context makes of one query's heads: per head the peak, the sum of the weights, the mixture [pitch].
struct Stretch {
    float *peak, *total, *mixed;
    Stretch(float* at, int64_t group) : peak(at), total(at + rounded_up(group, 16)), mixed(at + 2 * rounded_up(group, 16)) {}
    static int64_t floats(int64_t group, int64_t pitch) { return 2 * rounded_up(group, 16) + rounded_up(group * pitch, 16); }
};

// One tile: `count` positions that begin at the elements `at`. scores: room for [group][TILE].
template <class T>
void tile_of(const float* q, int64_t group, int64_t pitch, const T* keys, const T* values, const int64_t* at, int64_t count, int64_t size,
             float* scores, Stretch to) {
    by_heads(group, [=](int64_t g, auto heads) { scores_of<heads.value>(q + g * pitch, pitch, keys, at, count, size, scores + g * TILE); });
    int64_t padded = rounded_up(count, W);
    for (int64_t g = 0; g < group; g++) {
        float* row = scores + g * TILE;
        std::fill(row + count, row + padded, -INFINITY);
        vf most = load(row);
        for (int64_t j = W; j < padded; j += W) most = maximum(most, load(row + j));
        float peak = largest(most), base = peak == -INFINITY ? 0 : peak;
        vf total{};
        for (int64_t j = 0; j < padded; j += W) {
            vf weight = exp(load(row + j) - base);
            store(row + j, weight);
            total += weight;
        }
        to.peak[g] = peak;
        to.total[g] = sum(total);
    }
    std::fill(to.mixed, to.mixed + group * pitch, 0.0f);
    for (int64_t j = 0; j < count; j += STRIPE)
        by_heads(group, [=](int64_t g, auto heads) {
            mix<heads.value>(scores + g * TILE + j, values, at + j, std::min(STRIPE, count - j), size, to.mixed + g * pitch, pitch);
        });
}

// The stretch `next` appended to `to`.
void append(Stretch to, Stretch next, int64_t group, int64_t pitch) {
    for (int64_t g = 0; g < group; g++) {
        float peak = to.peak[g] > next.peak[g] ? to.peak[g] : next.peak[g];
        float before = shrink(to.peak[g], peak), after = shrink(next.peak[g], peak);
        to.peak[g] = peak;
        to.total[g] = to.total[g] * before + next.total[g] * after;
        for (int64_t d = g * pitch; d < (g + 1) * pitch; d += W)
            store(to.mixed + d, load(to.mixed + d) * before + load(next.mixed + d) * after);
    }
}

// What one thread leaves to be combined: stretches of a (row, KV head) that an earlier thread began, one per tile, and the beginning of one that
// a later thread ends.
struct Cut {
    int64_t segment = -1, tiles = 0, open = -1;
    bool ends = false;
    std::vector<float> later, beginning;
};

// rows: those of one query, `tokens` where it stands in q and `lengths` how many positions it sees; read(token, head, to) gives a query's
// numbers scaled, write(token, head, mixture, total) stores a result.
template <class T, class Read, class Write>
void decode(const Pages& pages, const T* keys, const T* values, const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens,
            const std::vector<int64_t>& lengths, int64_t group, Read read, Write write) {
    int64_t size = pages.size, kv_heads = pages.kv_heads, pitch = rounded_up(size, W), floats = Stretch::floats(group, pitch);
    // Segment i is (row i / kv_heads, KV head i % kv_heads); its tiles are the items [begins[i], begins[i + 1]).
    std::vector<int64_t> begins{0};
    int64_t positions = 0;
    for (int64_t length : lengths) {
        positions += length * kv_heads;
        for (int64_t head = 0; head < kv_heads; head++) begins.push_back(begins.back() + (length + TILE - 1) / TILE);
    }
    int64_t items = begins.back();
    if (!items) return;
    std::vector<Cut> cuts(most_threads());
    auto finish = [&](int64_t segment, Stretch done) {
        for (int64_t g = 0; g < group; g++)
            write(tokens[segment / kv_heads], segment % kv_heads * group + g, done.mixed + g * pitch, done.total[g]);
    };
    parallel(items, positions * group * size * 2 / items, [&](int64_t first, int64_t last) {
        Buffer queries(group * pitch), scores(group * TILE), one(floats), whole(floats);
        int64_t at[TILE], segment = std::upper_bound(begins.begin(), begins.end(), first) - begins.begin() - 1;
        Stretch tile(one.at, group), total(whole.at, group);
        for (int64_t item = first; item < last; segment++) {
            int64_t begin = begins[segment], end = begins[segment + 1], row = segment / kv_heads, head = segment % kv_heads;
            bool begun = item > begin;
            for (int64_t g = 0; g < group; g++) read(tokens[row], head * group + g, queries.at + g * pitch);
            if (begun) {
                Cut& cut = cuts[thread_number()];
                cut.segment = segment;
                cut.tiles = std::min(end, last) - item;
                cut.ends = end <= last;
                cut.later.resize(cut.tiles * floats);
            }
            for (int64_t n = 0; item < std::min(end, last); item++, n++) {
                int64_t from = (item - begin) * TILE, upto = std::min(lengths[row], from + TILE);
                pages.offsets(rows[row], from, upto, at);
                Stretch to = begun ? Stretch(cuts[thread_number()].later.data() + n * floats, group) : item == begin ? total : tile;
                tile_of(queries.at, group, pitch, keys + head * size, values + head * size, at, upto - from, size, scores.at, to);
                if (!begun && item > begin) append(total, tile, group, pitch);
            }
            if (begun) continue;
            if (item == end) finish(segment, total);
            else {
                Cut& cut = cuts[thread_number()];
                cut.open = segment;
                cut.beginning.assign(whole.at, whole.at + floats);
            }
        }
    });
    float* open = nullptr;
    for (Cut& cut : cuts) {
        for (int64_t n = 0; n < cut.tiles; n++) append(Stretch(open, group), Stretch(cut.later.data() + n * floats, group), group, pitch);
        if (cut.tiles && cut.ends) finish(cut.segment, Stretch(open, group));
        if (cut.open >= 0) open = cut.beginning.data();
    }
}

}  // namespace

// Lines of bfloat16 over a cache of bfloat16, where the processor multiplies these: the same as FloatLines with the panels of the linear layers.
#pragma once
#include "prefill.h"

namespace {

typedef Pairs<bf16> Halves;

// 2^x for x <= 0, with 18 bits: the result is rounded to 8. Below -125 it is 0; NaN stays.
INLINE vf power(vf x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which the low bits then are
    vf whole = x + shift, r = x - (whole - shift);
    vf p = r * 9.5828529e-3f + 5.5906426e-2f;  // least relative error on [-1/2, 1/2] with p(0) = 1
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312418e-1f;
    p = p * r + 1.0f;
    return choose(x < all(-125), vf{}, (vf)((vi)p + ((vi)whole << 23)));
}

// The largest number in all lanes.
template <int half = W / 2> INLINE vf largest_everywhere(vf x) {
    if constexpr (half == 0) return x;
    else {
        vi other;
        for (int lane = 0; lane < W; lane++) other[lane] = lane ^ half;
        return largest_everywhere<half / 2>(maximum(x, __builtin_shuffle(x, other)));
    }
}

class PairLines {
    const int64_t size, units, wide, pitch;
    const float scale;
    Rows<bf16> queries;
    Buffer mixed, scores, packed_keys, packed_values, peaks, sums;
    std::vector<const float*> weights;  // in pairs, where a line's scores were
    bool begins = true;

    void pack(const bf16* keys, const bf16* values, const int64_t* at, int64_t width) {
        for (int64_t j = 0; j < width; j += PANEL)
            turned_panel<Halves>([=](int number) { return keys + at[j + number]; }, int(std::min(PANEL, width - j)), size, &packed_keys[j * units]);
        auto part = [=](const bf16* value, int64_t d) {
            return size - d >= W ? load(value + d) : size > d ? load_part(value + d, int(size - d)) : vf{};
        };
        for (int64_t j = 0; j < width; j += 2)
            for (int64_t d = 0; d < wide; d += W) {
                vf low = part(values + at[j], d), high = j + 1 < width ? part(values + at[j + 1], d) : vf{};
                store(&packed_values[d / PANEL * PANEL * TILE / 2 + j / 2 * PANEL + d % PANEL], (vf)((vu)low >> 16 | (vu)high));
            }
    }

    // Scores of a line become weights, 0 where it does not see; its mixture is scaled where the peak is another.
    void weigh(int64_t line, int64_t seen, int64_t width) {
        float *row = &scores[line * SCORES], &peak = peaks[line], *mixture = &mixed[line * pitch];
        const int64_t padded = rounded_up(width, PANEL);
        vi lanes;
        for (int lane = 0; lane < W; lane++) lanes[lane] = lane;
        vf most = all(peak);
        for (int64_t j = 0; j < padded; j += W) {
            vf score = load(row + j) * scale;
            if (j + W > seen) score = choose(lanes < int32_t(seen - j), score, all(-INFINITY));
            store(row + j, score);
            most = maximum(most, score);
        }
        const float next = largest_everywhere(most)[0], base = next == -INFINITY ? 0 : next;
        vf total = load(&sums[line * W]);
        if (next != peak) {
            const float shrunk = power(all(peak - base))[0];
            total *= shrunk;
            if (!begins)
                for (int64_t d = 0; d < wide; d += W) store(mixture + d, load(mixture + d) * shrunk);
            peak = next;
        }
        for (int64_t j = 0; j < padded; j += PANEL) {
            const vf both = Halves::from_two(power(load(row + j) - base), power(load(row + j + W) - base));
            store(row + j / 2, both);
            // As they are multiplied: what rounding does to a weight it does to the sum.
            total += (vf)((vu)both << 16) + (vf)((vu)both & 0xffff0000);
        }
        store(&sums[line * W], total);
    }

public:
    typedef bf16 Query;
    static constexpr int64_t MOST = 192, TILE = 128, SCORES = TILE + W;

    PairLines(int64_t lines, int64_t size, float scale)
        : size(size), units((size + 1) / 2), wide(rounded_up(size, PANEL)), pitch(row_pitch<float>(wide)), scale(scale * 1.44269504f),
          queries(lines, size), mixed(lines * pitch), scores(lines * SCORES), packed_keys(TILE * units), packed_values(TILE / 2 * wide),
          peaks(lines), sums(lines * W) {
        for (int64_t line = 0; line < lines; line++) weights.push_back(&scores[line * SCORES]);
    }
    bf16* query(int64_t line) { return queries[line]; }
    const float* mixture(int64_t line) { return &mixed[line * pitch]; }
    float total(int64_t line) { return sum(load(&sums[line * W])); }

    void begin(int64_t lines) {
        begins = true;
        std::fill(peaks.at, peaks.at + lines, -INFINITY);
        std::fill(sums.at, sums.at + lines * W, 0.0f);
    }
    template <class Seen>
    void meet(const bf16* keys, const bf16* values, const int64_t* at, int64_t width, int64_t follow, int64_t lines, Seen seen) {
        pack(keys, values, at, width);
        const int64_t parts = (lines + TALL - 1) / TALL;
        // In equal parts, as each_product_by_panels.
        auto each_part = [&](const float* panel, auto f) {
            for (int64_t part = 0; part < parts; part++) {
                const int64_t line = lines * part / parts;
                f(line, int(lines * (part + 1) / parts - line), panel, Soon{(const char*)panel, 0});
            }
        };
        for (int64_t j = 0; j < width; j += PANEL)
            each_part(&packed_keys[j * units], [&](int64_t line, int some, const float* panel, Soon soon) {
                some_tile<Halves>(some, (const float* const*)&queries.addresses[line], 0, units, panel, &scores[line * SCORES + j], SCORES, true, soon);
            });
        for (int64_t line = 0; line < lines; line++) weigh(line, seen(line), width);
        // Memory works while values are multiplied.
        const int64_t turns = wide / PANEL * parts;
        int64_t turn = 0, asked = 0;
        for (int64_t d = 0; d < wide; d += PANEL)
            each_part(&packed_values[d * TILE / 2], [&](int64_t line, int some, const float* panel, Soon soon) {
                for (turn++; asked < follow * turn / turns; asked++)
                    for (int64_t each = 0; each < size; each += 64 / int64_t(sizeof(bf16))) {
                        __builtin_prefetch(keys + at[width + asked] + each, 0, 2);
                        __builtin_prefetch(values + at[width + asked] + each, 0, 2);
                    }
                some_tile<Halves>(some, &weights[line], 0, (width + 1) / 2, panel, &mixed[line * pitch + d], pitch, begins, soon);
            });
        begins = false;
    }
};

}  // namespace

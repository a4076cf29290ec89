// The router's choice in one pass, and the routed experts: the weights of each expert in use are read once.
#include <algorithm>
#include <memory>
#include <vector>
#include "../../csrc/products.h"

namespace {

constexpr int64_t PAIRS = 1024;  // of a token and an expert, whose inner values are kept at a time

template <class T> void route(const T* logits, int64_t stride, int64_t tokens, int64_t count, int64_t top_k, bool renormalize, float* weights,
                              int64_t* ids) {
    parallel(tokens, 20 * count, [=](int64_t first, int64_t last) {
        std::vector<float> exps(rounded_up(count, W));
        for (int64_t t = first; t < last; t++) {
            const T* row = logits + t * stride;
            const float low = -INFINITY;
            vf most = all(low);
            int64_t at = 0;
            for (; at + W <= count; at += W) most = maximum(load(row + at), most);
            if (at < count) most = maximum(load_part(row + at, int(count - at), low), most);
            float top = largest(most);
            vf total{};
            for (at = 0; at < count; at += W) {
                vf e = exp((at + W <= count ? load(row + at) : load_part(row + at, int(count - at), low)) - top);
                store(&exps[at], e);
                // A lane past the end is 0, or NaN where all are.
                total += e;
            }
            float whole = sum(total);
            float* best = weights + t * top_k;
            int64_t* chosen = ids + t * top_k;
            if (!(whole > 0)) {  // NaN: no order, but ids that exist
                for (int64_t j = 0; j < top_k; j++) { best[j] = whole; chosen[j] = j; }
                continue;
            }
            int64_t kept = 0;
            for (int64_t e = 0; e < count; e++) {
                float value = exps[e];
                if (kept == top_k && !(value > best[top_k - 1])) continue;
                int64_t j = kept < top_k ? kept++ : top_k - 1;
                for (; j > 0 && value > best[j - 1]; j--) { best[j] = best[j - 1]; chosen[j] = chosen[j - 1]; }
                best[j] = value;
                chosen[j] = e;
            }
            float by = 0;
            if (renormalize)
                for (int64_t j = 0; j < top_k; j++) by += best[j];
            else by = whole;
            for (int64_t j = 0; j < top_k; j++) best[j] /= by;
        }
    });
}

// An expert in use and its pairs [first, last).
struct Group { int64_t expert, first, last; };
struct Pair { int64_t token; float weight; };

template <class T> struct Experts {
    const T *x, *w13, *w2;
    int64_t stride, tokens, hidden, inner;
    T* out;
    std::vector<Group> groups;
    std::vector<Pair> pairs;
    std::unique_ptr<Inputs> inputs;
    std::unique_ptr<float[]> total, gates, ups;
    std::vector<const float*> in, between;
    float* sums;

    // x in float32.
    void convert() {
        inputs = std::make_unique<Inputs>(x, stride, tokens, hidden);
        for (const Pair& pair : pairs) in.push_back(inputs->rows[pair.token]);
    }

    // SiLU(gate) * up of the groups [begin, end), whose pairs start at `base`. A thread takes neighbouring rows of W13; how many depends on the
    // groups' sizes, what a row gives does not.
    void first_product(size_t begin, size_t end, int64_t base) {
        std::vector<int64_t> cost(1);
        for (size_t g = begin; g < end; g++) cost.push_back(cost.back() + inner * (2 + groups[g].last - groups[g].first));
        int64_t wide = rounded_up(inner, W);
        parallel(cost.back(), 2 * hidden, [&](int64_t from, int64_t to) {
            for (size_t g = begin; g < end; g++) {
                const Group& group = groups[g];
                int64_t count = group.last - group.first, each = 2 + count, start = cost[g - begin];
                auto row = [=](int64_t at) { return std::clamp((at - start + each - 1) / each, int64_t(0), inner); };
                int64_t first = row(std::max(from, start)), last = row(std::max(to, start));
                if (first >= last) continue;
                const T* weights = w13 + group.expert * 2 * inner * hidden;
                float *gate = gates.get() + (group.first - base) * wide, *up = ups.get() + (group.first - base) * wide;
                each_product(weights, first, last, hidden, &in[group.first], count,
                             [=](int64_t n, int64_t i, float y) { gate[n * wide + i] = y; });
                each_product(weights + inner * hidden, first, last, hidden, &in[group.first], count,
                             [=](int64_t n, int64_t i, float y) { up[n * wide + i] = y; });
                for (int64_t n = 0; n < count; n++) {
                    float *g = gate + n * wide, *u = up + n * wide;
                    int64_t i = first;
                    for (; i + W <= last; i += W) store(g + i, silu(load(g + i)) * load(u + i));
                    if (i < last) {
                        int left = int(last - i);
                        store_part(g + i, silu(load_part(g + i, left)) * load_part(u + i, left), left);
                    }
                }
            }
        });
    }

    // Adds W2 times that, in the order of the experts. A thread has columns of the result to itself.
    void second_product(size_t begin, size_t end, int64_t base, bool begins, bool ends) {
        parallel(hidden, inner * (groups[end - 1].last - base), [&](int64_t first, int64_t last) {
            if (begins)
                for (int64_t t = 0; t < tokens; t++) std::fill(sums + t * hidden + first, sums + t * hidden + last, 0.0f);
            for (size_t g = begin; g < end; g++) {
                const Group& group = groups[g];
                const Pair* pair = &pairs[group.first];
                each_product(w2 + group.expert * hidden * inner, first, last, inner, &between[group.first - base], group.last - group.first,
                             [=](int64_t n, int64_t row, float y) { sums[pair[n].token * hidden + row] += pair[n].weight * y; });
            }
            if (ends && (void*)sums != (void*)out)
                for (int64_t t = 0; t < tokens; t++) {
                    int64_t at = first;
                    for (; at + W <= last; at += W) store(out + t * hidden + at, load(sums + t * hidden + at));
                    for (; at < last; at++) put(out + t * hidden + at, sums[t * hidden + at]);
                }
        });
    }

    void run() {
        convert();
        if (sizeof(T) == 4) sums = (float*)out;
        else total.reset(sums = new float[tokens * hidden]);
        std::vector<size_t> parts(1);
        int64_t most = 0;
        for (size_t g = 0; g < groups.size(); g++) {
            if (g > parts.back() && groups[g].last - groups[parts.back()].first > PAIRS) parts.push_back(g);
            most = std::max(most, groups[g].last - groups[parts.back()].first);
        }
        parts.push_back(groups.size());
        int64_t wide = rounded_up(inner, W);
        gates.reset(new float[most * wide]);
        ups.reset(new float[most * wide]);
        for (int64_t p = 0; p < most; p++) {
            between.push_back(gates.get() + p * wide);
            std::fill(gates.get() + p * wide + inner, gates.get() + (p + 1) * wide, 0.0f);
        }
        for (size_t part = 0; part + 1 < parts.size(); part++) {
            int64_t base = groups[parts[part]].first;
            first_product(parts[part], parts[part + 1], base);
            second_product(parts[part], parts[part + 1], base, part == 0, part + 2 == parts.size());
        }
    }
};

}  // namespace

// logits: [tokens, count], rows `stride` apart. weights: float32 [tokens, top_k]; ids: the same shape.
API void moe_route(int dtype, const void* logits, int64_t stride, int64_t tokens, int64_t count, int64_t top_k, int renormalize, float* weights,
                   int64_t* ids) {
    by_type(dtype, [=](auto* type) { route((decltype(type))logits, stride, tokens, count, top_k, renormalize != 0, weights, ids); });
}

// x: [tokens, hidden], rows `stride` apart. w13: [count, 2 inner, hidden], w2: [count, hidden, inner], weights and ids: [tokens, top_k], out:
// [tokens, hidden]; all contiguous. bad: set to 1, and nothing else done, where an id is none.
API void moe_experts(int dtype, const void* x, int64_t stride, const void* w13, const void* w2, const float* weights, const int64_t* ids,
                     void* out, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner, int32_t* bad) {
    std::vector<int64_t> start(count + 1);
    for (int64_t p = 0; p < tokens * top_k; p++) {
        if (ids[p] < 0 || ids[p] >= count) { *bad = 1; return; }
        start[ids[p] + 1]++;
    }
    std::vector<Group> groups;
    for (int64_t e = 0; e < count; e++) {
        start[e + 1] += start[e];
        if (start[e + 1] > start[e]) groups.push_back({e, start[e], start[e + 1]});
    }
    std::vector<Pair> pairs(tokens * top_k);
    for (int64_t p = 0; p < tokens * top_k; p++) pairs[start[ids[p]]++] = {p / top_k, weights[p]};
    if (groups.empty() || hidden == 0) return;
    by_type(dtype, [&](auto* type) {
        typedef decltype(type) P;
        typedef std::remove_pointer_t<P> T;
        Experts<T> experts{(P)x, (P)w13, (P)w2, stride, tokens, hidden, inner, (P)out, std::move(groups), std::move(pairs),
                           {}, {}, {}, {}, {}, {}, nullptr};
        experts.run();
    });
}

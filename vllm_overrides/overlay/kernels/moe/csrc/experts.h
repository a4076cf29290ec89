// The routed experts: pairs of a token and an expert sorted by expert, so that the weights of each expert in use are read once.
#pragma once
#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>
#include "../../csrc/products.h"

constexpr int64_t PAIRS = 1024;  // of a token and an expert, whose inner values are kept at a time

// An expert in use and its pairs [first, last).
struct Group { int64_t expert, first, last; };
struct Pair { int64_t token; float weight; };

// What moe_experts was called with.
struct ExpertsCall {
    int64_t tokens, top_k, count, hidden, inner;
    const float* weights;
    const int64_t* ids;
};

// X: what rows are multiplied as; V: the weights' type; panels13, panels2: whether they are in panels. scales13 [count, 2 inner] and scales2 [count, hidden], by which their rows are multiplied,
// or null.
template <class X, class V> struct Experts {
    const V *w13, *w2;
    bool panels13, panels2;
    const float *scales13, *scales2;
    int64_t tokens, hidden, inner;
    float* sums;  // [tokens, hidden]
    std::function<void(int64_t, int64_t)> finish;  // called with columns whose sums are complete
    std::vector<Group> groups;
    std::vector<Pair> pairs;
    std::vector<const X*> in;  // per pair

    // SiLU(gate) * up of the groups [begin, end). A thread takes neighbouring rows of W13; how many depends on the groups' sizes, what a row gives
    // does not.
    void first_product(size_t begin, size_t end, const Rows<float>& gates, const Rows<X>& between) {
        const int64_t base = groups[begin].first;
        const int64_t together = rows_together(panels13);
        std::vector<int64_t> cost(1);
        for (size_t g = begin; g < end; g++) cost.push_back(cost.back() + inner * (2 + groups[g].last - groups[g].first));
        parallel(cost.back(), 2 * hidden, [&](int64_t from, int64_t to) {
            for (size_t g = begin; g < end; g++) {
                const Group& group = groups[g];
                int64_t count = group.last - group.first, each = 2 + count, start = cost[g - begin];
                auto row = [=](int64_t at) { return std::clamp(rounded_up((at - start + each - 1) / each, together), int64_t(0), inner); };
                int64_t first = row(std::max(from, start)), last = row(std::max(to, start));
                if (first >= last) continue;
                const int64_t gate = group.expert * 2 * inner, up = gate + inner, place = group.first - base;
                each_product(w13 + gate * hidden, panels13, first, last, hidden, &in[group.first], count, [&](int64_t n, int64_t at, float* found, int64_t some) {
                    scale(found, some, scales13, gate + at);
                    std::memcpy(gates[place + n] + at, found, some * sizeof(float));
                });
                each_product(w13 + up * hidden, panels13, first, last, hidden, &in[group.first], count, [&](int64_t n, int64_t at, float* found, int64_t some) {
                    scale(found, some, scales13, up + at);
                    const float* g = gates[place + n] + at;
                    X* result = between[place + n] + at;
                    int64_t i = 0;
                    for (; i + W <= some; i += W) store(result + i, silu(load(g + i)) * load(found + i));
                    if (i < some) store_part(result + i, silu(load_part(g + i, int(some - i))) * load_part(found + i, int(some - i)), int(some - i));
                });
            }
        });
    }

    // Adds W2 times that, in the order of the experts. A thread has columns of the result to itself.
    void second_product(size_t begin, size_t end, const Rows<X>& between) {
        const int64_t base = groups[begin].first, together = rows_together(panels2);
        parallel(hidden / together, together * inner * (groups[end - 1].last - base), [&](int64_t first_part, int64_t last_part) {
            const int64_t first = first_part * together, last = last_part * together;
            if (begin == 0)
                for (int64_t t = 0; t < tokens; t++) std::fill(sums + t * hidden + first, sums + t * hidden + last, 0.0f);
            for (size_t g = begin; g < end; g++) {
                const Group& group = groups[g];
                const Pair* pair = &pairs[group.first];
                const int64_t place = group.expert * hidden;
                each_product(w2 + place * inner, panels2, first, last, inner, &between.addresses[group.first - base], group.last - group.first,
                             [&](int64_t n, int64_t at, float* found, int64_t some) {
                                 scale(found, some, scales2, place + at);
                                 float* to = sums + pair[n].token * hidden + at;
                                 const float weight = pair[n].weight;
                                 for (int64_t i = 0; i < some; i++) to[i] += weight * found[i];
                             });
            }
            if (end == groups.size()) finish(first, last);
        });
    }

    void run() {
        std::vector<size_t> parts(1);
        int64_t most = 0;
        for (size_t g = 0; g < groups.size(); g++) {
            if (g > parts.back() && groups[g].last - groups[parts.back()].first > PAIRS) parts.push_back(g);
            most = std::max(most, groups[g].last - groups[parts.back()].first);
        }
        parts.push_back(groups.size());
        const Rows<float> gates(most, inner);
        const Rows<X> between(most, inner);
        for (int64_t p = 0; p < most; p++) std::fill(between[p] + inner, between[p] + between.pitch, X{});
        for (size_t part = 0; part + 1 < parts.size(); part++) {
            first_product(parts[part], parts[part + 1], gates, between);
            second_product(parts[part], parts[part + 1], between);
        }
    }

private:
    static void scale(float* sums, int64_t count, const float* scales, int64_t place) {
        if (scales)
            for (int64_t i = 0; i < count; i++) sums[i] *= scales[place + i];
    }
};

// False, and nothing done, where an id is none. x: [tokens, hidden], rows `stride` apart; out: [tokens, hidden].
template <class T, class V> bool run_experts(const ExpertsCall& call, const T* x, int64_t stride, const V* w13, const float* scales13, const V* w2,
                                             const float* scales2, bool panels13, bool panels2, T* out) {
    const int64_t hidden = call.hidden, count = call.tokens * call.top_k;
    std::vector<int64_t> start(call.count + 1);
    for (int64_t p = 0; p < count; p++) {
        if (call.ids[p] < 0 || call.ids[p] >= call.count) return false;
        start[call.ids[p] + 1]++;
    }
    Experts<Operand<T>, V> experts{w13, w2, panels13, panels2, scales13, scales2, call.tokens, hidden, call.inner, nullptr, {}, {}, std::vector<Pair>(count), {}};
    for (int64_t e = 0; e < call.count; e++) {
        start[e + 1] += start[e];
        if (start[e + 1] > start[e]) experts.groups.push_back({e, start[e], start[e + 1]});
    }
    for (int64_t p = 0; p < count; p++) experts.pairs[start[call.ids[p]]++] = {p / call.top_k, call.weights[p]};
    if (experts.groups.empty() || hidden == 0) return true;
    const Inputs<T> inputs(x, stride, call.tokens, hidden);
    for (const Pair& pair : experts.pairs) experts.in.push_back(inputs[pair.token]);
    const Buffer total(std::is_same<T, float>::value ? 0 : call.tokens * hidden);
    if constexpr (std::is_same<T, float>::value) {
        experts.sums = out;
        experts.finish = [](int64_t, int64_t) {};
    } else {
        experts.sums = total.at;
        experts.finish = [&](int64_t first, int64_t last) {
            for (int64_t t = 0; t < call.tokens; t++) narrow(total.at + t * hidden + first, last - first, out + t * hidden + first);
        };
    }
    experts.run();
    return true;
}

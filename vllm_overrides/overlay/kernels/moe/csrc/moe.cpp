// The router's choice in one pass, and the routed experts with weights of the model's type.
#include "experts.h"

namespace {

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

}  // namespace

// logits: [tokens, count], rows `stride` apart. weights: float32 [tokens, top_k]; ids: the same shape.
API void moe_route(int dtype, const void* logits, int64_t stride, int64_t tokens, int64_t count, int64_t top_k, int renormalize, float* weights,
                   int64_t* ids) {
    by_type(dtype, [=](auto* type) { route((decltype(type))logits, stride, tokens, count, top_k, renormalize != 0, weights, ids); });
}

// x: [tokens, hidden], rows `stride` apart. w13: [count, 2 inner, hidden], w2: [count, hidden, inner], weights and ids: [tokens, top_k], out:
// [tokens, hidden]; all contiguous, w13 and w2 in panels if panels13, panels2. bad: set to 1, and nothing else done, where an id is none.
API void moe_experts(int dtype, const void* x, int64_t stride, const void* w13, const void* w2, int panels13, int panels2, const float* weights,
                     const int64_t* ids, void* out, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden, int64_t inner, int32_t* bad) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        if (!run_experts({tokens, top_k, count, hidden, inner, weights, ids}, (const std::remove_pointer_t<P>*)x, stride,
                         (const std::remove_pointer_t<P>*)w13, nullptr, (const std::remove_pointer_t<P>*)w2, nullptr, panels13 != 0, panels2 != 0, (P)out))
            *bad = 1;
    });
}

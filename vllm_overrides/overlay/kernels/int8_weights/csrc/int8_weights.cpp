// Products with int8 weights: half the bytes of bfloat16. A row's scale is multiplied to its products, so the numbers are as exact as the weights.
#include "../../linear/csrc/linear.h"
#include "../../moe/csrc/experts.h"

// x: [rows, size], rows `stride` apart. weight: [count, size], in panels if `panels`, scale: float32 [count], bias: [count] or null, out: [rows, count].
API void int8_linear(int dtype, const void* x, int64_t stride, const void* weight, int panels, const float* scale, const void* bias, void* out,
                     int64_t rows, int64_t count, int64_t size) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        run_linear((const std::remove_pointer_t<P>*)x, stride, (const i8*)weight, panels != 0, scale, (P)bias, (P)out, rows, count, size);
    });
}

// As moe_experts, w13 and w2 of int8. scales13: float32 [count, 2 inner], scales2: float32 [count, hidden].
API void int8_experts(int dtype, const void* x, int64_t stride, const void* w13, const float* scales13, const void* w2, const float* scales2,
                      int panels13, int panels2, const float* weights, const int64_t* ids, void* out, int64_t tokens, int64_t top_k, int64_t count, int64_t hidden,
                      int64_t inner, int32_t* bad) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        if (!run_experts({tokens, top_k, count, hidden, inner, weights, ids}, (const std::remove_pointer_t<P>*)x, stride, (const i8*)w13, scales13,
                         (const i8*)w2, scales2, panels13 != 0, panels2 != 0, (P)out))
            *bad = 1;
    });
}

// As linear_pack, of int8 for rows of `dtype`.
API void int8_pack(int dtype, void* weight, int64_t count, int64_t size, int64_t part, int32_t* packed) {
    by_type(dtype, [=](auto* type) { *packed = pack<Operand<std::remove_pointer_t<decltype(type)>>>((i8*)weight, count, size, part); });
}

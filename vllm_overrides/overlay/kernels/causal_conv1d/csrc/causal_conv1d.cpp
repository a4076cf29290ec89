// The causal convolution, a block of channels at a time over all tokens of the step: inputs are read where they lie, and only the tails and
// the taps are turned so that neighbouring channels are neighbours in memory.
#include <vector>
#include "../../csrc/vec.h"

namespace {

constexpr int64_t BLOCK = 256;  // channels whose taps and last inputs stay in the first cache
constexpr int64_t UNIT = 64;    // channels that one thread takes at least

struct Rows {
    const int64_t *starts, *slots, *captures;  // captures: (row, offset, slot) each
    int64_t rows, count;
};

template <class T> struct Step {
    const T* x;
    int64_t stride;
    const void* weight;
    int weight_type;
    const float* bias;
    T* pool;
    T* out;
    Rows rows;
    int64_t channels, width;
};

// WIDTH: the number of taps where it is known, else 0.
template <int WIDTH, class T> void block(const Step<T>& step, int64_t first, int64_t count, float* taps, T* tail, const T** inputs) {
    const int64_t width = WIDTH ? WIDTH : step.width, size = width - 1, channels = step.channels;
    by_type(step.weight_type, [&](auto* type) {
        auto weight = (decltype(type))step.weight + first * width;
        for (int64_t c = 0; c < count; c++)
            for (int64_t tap = 0; tap < width; tap++) taps[tap * BLOCK + c] = get(weight[c * width + tap]);
    });
    for (int64_t row = 0; row < step.rows.rows; row++) {
        const int64_t start = step.rows.starts[row], length = step.rows.starts[row + 1] - start;
        if (!length) continue;
        T* stored = step.pool + (step.rows.slots[row] * channels + first) * size;
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < size; i++) tail[i * BLOCK + c] = stored[c * size + i];
        // The i-th input of (tail, piece).
        auto input = [&](int64_t i) { return i < size ? tail + i * BLOCK : step.x + (start + i - size) * step.stride + first; };
        for (int64_t t = 0; t < length; t++) {
            for (int64_t tap = 0; tap < width; tap++) inputs[tap] = input(t + tap);
            T* to = step.out + (start + t) * channels + first;
            int64_t c = 0;
            for (; c + W <= count; c += W) {
                vf total = step.bias ? load(step.bias + first + c) : vf{};
                for (int64_t tap = 0; tap < width; tap++) total += load(taps + tap * BLOCK + c) * load(inputs[tap] + c);
                store(to + c, silu(total));
            }
            if (c < count) {
                int left = int(count - c);
                vf total = step.bias ? load_part(step.bias + first + c, left) : vf{};
                for (int64_t tap = 0; tap < width; tap++)
                    total += load_part(taps + tap * BLOCK + c, left) * load_part(inputs[tap] + c, left);
                store_part(to + c, silu(total), left);
            }
        }
        auto leave = [&](int64_t slot, int64_t offset) {
            T* target = step.pool + (slot * channels + first) * size;
            for (int64_t i = 0; i < size; i++) inputs[i] = input(offset + i);
            for (int64_t c = 0; c < count; c++)
                for (int64_t i = 0; i < size; i++) target[c * size + i] = inputs[i][c];
        };
        for (const int64_t* capture = step.rows.captures; capture < step.rows.captures + 3 * step.rows.count; capture += 3)
            if (capture[0] == row) leave(capture[2], capture[1]);
        leave(step.rows.slots[row], length);
    }
}

template <int WIDTH, class T> void convolve(const Step<T>& step) {
    const int64_t tokens = step.rows.starts[step.rows.rows];
    parallel((step.channels + UNIT - 1) / UNIT, UNIT * (step.width + 10) * tokens, [&](int64_t begin, int64_t end) {
        std::vector<float> taps(step.width * BLOCK);
        std::vector<T> tail(step.width * BLOCK);
        std::vector<const T*> inputs(step.width);
        const int64_t last = end * UNIT < step.channels ? end * UNIT : step.channels;
        for (int64_t first = begin * UNIT; first < last; first += BLOCK)
            block<WIDTH>(step, first, last - first < BLOCK ? last - first : BLOCK, taps.data(), tail.data(), inputs.data());
    });
}

}  // namespace

// x: [T, channels], rows `stride` apart. weight: [channels, width] of weight_type. bias: float32 [channels] or null. pool:
// [slots, channels, width - 1], contiguous. out: [T, channels]. packed: as rows.packed_rows packs `rows` rows and `captures` captures.
API void causal_conv1d(int dtype, const void* x, int64_t stride, int weight_type, const void* weight, const float* bias, void* pool, void* out,
                       const int64_t* packed, int64_t rows, int64_t captures, int64_t channels, int64_t width) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        const Rows of{packed, packed + rows + 1, packed + 2 * rows + 1, rows, captures};
        const Step<std::remove_pointer_t<P>> step{(P)x, stride, weight, weight_type, bias, (P)pool, (P)out, of, channels, width};
        if (width == 4) convolve<4>(step);
        else convolve<0>(step);
    });
}

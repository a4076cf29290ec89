// The gated delta rule, a head of a row at a time: one token by the recurrence, more by chunks that end at absolute multiples of 64.
//
// Both forms walk over columns of the state [K, V]: columns do not mix, so a panel of PANEL columns goes through a whole chunk, from the read of
// the state to its update, inside the first cache. A chunk's triangular system is solved by substitution on its right-hand side.
#include <memory>
#include "../../csrc/buffer.h"

// GCC 12 says it of its own header for AVX-512, where a template reads float16.
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace {

constexpr int64_t CHUNK = 64;  // as in the package's __init__.py
constexpr int64_t PANEL = 2 * W;
constexpr int ROWS = 6;        // of a product's register block: 6 x 2 sums leave room for its operands in 16 registers

template <class T> struct Matrix {  // [tokens, heads, size]
    const T* data;
    int64_t token, head;
    const T* row(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

template <class T> struct Step {
    Matrix<T> q, k, v;
    const float *g, *beta;  // [tokens, heads]
    float *pool, *out;      // [slots, heads, key, value], [tokens, heads, value]
    const int64_t *starts, *slots, *captures, *contexts;
    int64_t rows, count, key_heads, heads, key, value;

    float* state(int64_t slot, int64_t head) const { return pool + (slot * heads + head) * key * value; }
    // f(offset, slot) for the captures of a row.
    template <class F> void each_capture(int64_t row, F f) const {
        for (const int64_t* capture = captures; capture < captures + 3 * count; capture += 3)
            if (capture[0] == row) f(capture[1], capture[2]);
    }
};

// Lines of an odd number of 64 bytes: a column of them is spread over all sets of a cache.
int64_t line(int64_t size) { return (rounded_up(size, 16) / 16 | 1) * 16; }

// x / sqrt(sum(x^2) + 1e-6) * scale.
template <class T> void normalise(const T* x, float* to, int64_t size, float scale) {
    vf total{};
    int64_t at = 0;
    for (; at + W <= size; at += W) { vf part = load(x + at); store(to + at, part); total += part * part; }
    float squares = sum(total);
    for (; at < size; at++) { to[at] = get(x[at]); squares += to[at] * to[at]; }
    const float factor = 1.0f / std::sqrt(squares + 1e-6f) * scale;
    for (at = 0; at + W <= size; at += W) store(to + at, load(to + at) * factor);
    for (; at < size; at++) to[at] *= factor;
}

template <int N, class T> void load_columns(const T* from, int64_t count, vf (&x)[N]) {
    for (int n = 0; n < N; n++) {
        int64_t left = count - n * W;
        x[n] = left >= W ? load(from + n * W) : left > 0 ? load_part(from + n * W, int(left)) : vf{};
    }
}
template <int N> void store_columns(float* to, int64_t count, const vf (&x)[N]) {
    for (int n = 0; n < N; n++) {
        int64_t left = count - n * W;
        if (left >= W) store(to + n * W, x[n]);
        else if (left > 0) store_part(to + n * W, x[n], int(left));
    }
}

// --- one token

// N vectors of columns, of which `count` exist: FULL where that is all.
template <int N, bool FULL, class T>
void step_columns(float* state, const float* q, const float* k, const T* v, float decay, float beta, float* out, int64_t key, int64_t value,
                  int64_t count) {
    const int64_t columns = FULL ? N * W : count;
    vf written[N]{}, read[N]{}, x[N];
    for (int64_t i = 0; i < key; i++) {
        load_columns(state + i * value, columns, x);
        for (int n = 0; n < N; n++) written[n] += x[n] * k[i];
    }
    load_columns(v, columns, x);
    for (int n = 0; n < N; n++) written[n] = beta * (x[n] - decay * written[n]);
    for (int64_t i = 0; i < key; i++) {
        load_columns(state + i * value, columns, x);
        for (int n = 0; n < N; n++) {
            x[n] = x[n] * decay + written[n] * k[i];
            read[n] += x[n] * q[i];
        }
        store_columns(state + i * value, columns, x);
    }
    store_columns(out, columns, read);
}

template <class T> void one_token(const Step<T>& step, int64_t row, int64_t head, float* q, float* k) {
    const int64_t t = step.starts[row], key_head = head / (step.heads / step.key_heads), at = t * step.heads + head;
    const int64_t key = step.key, value = step.value;
    normalise(step.q.row(t, key_head), q, key, 1.0f / std::sqrt(float(key)));
    normalise(step.k.row(t, key_head), k, key, 1.0f);
    const T* v = step.v.row(t, head);
    const float decay = std::exp(step.g[at]), beta = step.beta[at];
    float *state = step.state(step.slots[row], head), *out = step.out + at * value;
    int64_t c = 0;
    for (; c + 4 * W <= value; c += 4 * W) step_columns<4, true>(state + c, q, k, v + c, decay, beta, out + c, key, value, 4 * W);
    for (; c + W <= value; c += W) step_columns<1, true>(state + c, q, k, v + c, decay, beta, out + c, key, value, W);
    if (c < value) step_columns<1, false>(state + c, q, k, v + c, decay, beta, out + c, key, value, value - c);
    step.each_capture(row, [&](int64_t, int64_t slot) { std::memcpy(step.state(slot, head), state, size_t(key * value) * 4); });
}

// --- chunks

// sums[m] += sum over i < depth of a[m * down + i * along] times row i of a panel. The sums are copied so that they stay in registers.
template <int M> INLINE void product(const float* a, int64_t down, int64_t along, const float* panel, int64_t depth, vf (&sums)[M][2]) {
    vf left[M], right[M];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) { left[m] = sums[m][0]; right[m] = sums[m][1]; }
    for (int64_t i = 0; i < depth; i++, a += along, panel += PANEL) {
        const vf first = load(panel), second = load(panel + W);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            left[m] += first * a[m * down];
            right[m] += second * a[m * down];
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) { sums[m][0] = left[m]; sums[m][1] = right[m]; }
}

template <int M> struct Size { static constexpr int value = M; };

// f(first, Size) over register blocks of `count` rows.
template <class F> INLINE void blocks(int64_t count, F f) {
    int64_t m = 0;
    for (; m + ROWS <= count; m += ROWS) f(m, Size<ROWS>());
    if (m + 4 <= count) { f(m, Size<4>()); m += 4; }
    if (m + 2 <= count) { f(m, Size<2>()); m += 2; }
    if (m < count) f(m, Size<1>());
}

// One thread's memory, and the walk over the chunks of one head of one row.
template <class T> class Chunks {
    const Step<T>& step;
    const int64_t key, panels, keys, square;  // keys, square: distances of rows
    Buffer state, q, k, turned, system, attention, decay, sums, written, weighted, inner;
    float since_start[CHUNK], beta[CHUNK];

public:
    explicit Chunks(const Step<T>& of)
        : step(of), key(of.key), panels((of.value + PANEL - 1) / PANEL), keys(line(of.key)), square(line(CHUNK)),
          state(panels * key * PANEL), q(CHUNK * keys), k(CHUNK * keys),
          turned((CHUNK + PANEL) * key), system(CHUNK * square), attention(CHUNK * square),
          decay(CHUNK * square), sums(square), written(CHUNK * PANEL), weighted(CHUNK * PANEL),
          inner(key * PANEL) {}

    void run(int64_t row, int64_t head) {
        float* stored = step.state(step.slots[row], head);
        for (int64_t p = 0; p < panels; p++)
            for (int64_t i = 0; i < key; i++) {
                vf x[2];
                load_columns(stored + i * step.value + p * PANEL, step.value - p * PANEL, x);
                store(panel(p) + i * PANEL, x[0]);
                store(panel(p) + i * PANEL + W, x[1]);
            }
        const int64_t start = step.starts[row], length = step.starts[row + 1] - start;
        for (int64_t at = 0, size; at < length; at += size) {
            size = CHUNK - (step.contexts[row] + at) % CHUNK;
            if (size > length - at) size = length - at;
            chunk(row, head, start + at, at, size);
        }
        for (int64_t p = 0; p < panels; p++) leave(panel(p), stored, p);
    }

private:
    float* panel(int64_t p) { return state.at + p * key * PANEL; }

    // A panel of a state, [K, PANEL], to its columns of [K, V].
    void leave(const float* from, float* to, int64_t p) {
        for (int64_t i = 0; i < key; i++) {
            const vf x[2] = {load(from + i * PANEL), load(from + i * PANEL + W)};
            store_columns(to + i * step.value + p * PANEL, step.value - p * PANEL, x);
        }
    }

    void chunk(int64_t row, int64_t head, int64_t first, int64_t before, int64_t size) {
        read(head, first, size);
        triangle(k.at, beta, system.at, size);
        triangle(q.at, nullptr, attention.at, size);
        for (int64_t p = 0; p < panels; p++) {
            columns(head, first, size, p);
            step.each_capture(row, [&](int64_t offset, int64_t slot) {
                if (offset <= before || offset >= before + size) return;
                advance(panel(p), inner.at, offset - before);
                leave(inner.at, step.state(slot, head), p);
            });
            advance(panel(p), panel(p), size);
            step.each_capture(row, [&](int64_t offset, int64_t slot) {
                if (offset == before + size) leave(panel(p), step.state(slot, head), p);
            });
        }
    }

    // Queries, keys, keys turned to panels of tokens, and the decays.
    void read(int64_t head, int64_t first, int64_t size) {
        const int64_t key_head = head / (step.heads / step.key_heads);
        float running = 0;
        for (int64_t t = 0; t < size; t++) {
            float *to = k.at + t * keys, *lane = turned.at + t / PANEL * key * PANEL + t % PANEL;
            normalise(step.q.row(first + t, key_head), q.at + t * keys, key, 1.0f / std::sqrt(float(key)));
            normalise(step.k.row(first + t, key_head), to, key, 1.0f);
            for (int64_t i = 0; i < key; i++) lane[i * PANEL] = to[i];
            beta[t] = step.beta[(first + t) * step.heads + head];
            running += step.g[(first + t) * step.heads + head];
            since_start[t] = std::exp(running);
        }
        for (int64_t t = size; t % PANEL; t++)
            for (int64_t i = 0; i < key; i++) turned[t / PANEL * key * PANEL + i * PANEL + t % PANEL] = 0;
        pairwise(head, first, size);
    }

    // decay[i][j] = exp(g_{j+1} + ... + g_i) for i >= j, 0 above: of sums, never of a difference of sums.
    void pairwise(int64_t head, int64_t first, int64_t size) {
        vi lanes;
        for (int n = 0; n < W; n++) lanes[n] = n;
        for (int64_t i = 0; i < size; i++) {
            const float g = step.g[(first + i) * step.heads + head];
            for (int64_t j = 0; j < CHUNK; j += W) {
                vi place = lanes + int32_t(j);
                vf total = i ? load(sums.at + j) : vf{};
                total = choose(place < int32_t(i), total + g, total);
                store(sums.at + j, total);
                store(decay.at + i * square + j, j > i ? vf{} : choose(place <= int32_t(i), exp(total), vf{}));
            }
        }
    }

    // to_ij = factor_i decay_ij rows_i.k_j. Neither written nor read right of the block on the diagonal.
    void triangle(const float* rows, const float* factor, float* to, int64_t size) {
        blocks(size, [&](int64_t m, auto of) {
            constexpr int M = decltype(of)::value;
            for (int64_t j = 0; j < m + M; j += PANEL) {
                vf found[M][2]{};
                product<M>(rows + m * keys, keys, 1, turned.at + j * key, key, found);
                for (int r = 0; r < M; r++)
                    for (int n = 0; n < 2; n++) {
                        const int64_t at = (m + r) * square + j + n * W;
                        vf x = found[r][n] * load(decay.at + at);
                        store(to + at, factor ? x * factor[m + r] : x);
                    }
            }
        });
    }

    // What a chunk writes to the columns of panel p, and what it reads of them.
    void columns(int64_t head, int64_t first, int64_t size, int64_t p) {
        const int64_t value = step.value, left = value - p * PANEL;
        const float* before = panel(p);
        blocks(size, [&](int64_t m, auto of) {
            constexpr int M = decltype(of)::value;
            vf wanted[M][2]{}, known[M][2]{};
            product<M>(k.at + m * keys, keys, 1, before, key, wanted);
            for (int r = 0; r < M; r++) {
                vf v[2];
                load_columns(step.v.row(first + m + r, head) + p * PANEL, left, v);
                for (int n = 0; n < 2; n++) wanted[r][n] = beta[m + r] * (v[n] - since_start[m + r] * wanted[r][n]);
            }
            product<M>(system.at + m * square, square, 1, written.at, m, known);
            for (int r = 0; r < M; r++)
                for (int n = 0; n < 2; n++) {
                    vf x = wanted[r][n] - known[r][n];
                    for (int s = 0; s < r; s++) x -= system[(m + r) * square + m + s] * wanted[s][n];
                    wanted[r][n] = x;
                    store(written.at + (m + r) * PANEL + n * W, x);
                }
            vf found[M][2]{};
            product<M>(q.at + m * keys, keys, 1, before, key, found);
            for (int r = 0; r < M; r++)
                for (int n = 0; n < 2; n++) found[r][n] *= since_start[m + r];
            product<M>(attention.at + m * square, square, 1, written.at, m + M, found);
            for (int r = 0; r < M; r++)
                store_columns(step.out + ((first + m + r) * step.heads + head) * value + p * PANEL, left, found[r]);
        });
    }

    // The panel `from` of the state before the chunk -> the one after `count` of its tokens.
    void advance(const float* from, float* to, int64_t count) {
        const float *rest = decay.at + (count - 1) * square, carried = since_start[count - 1];
        for (int64_t t = 0; t < count; t++)
            for (int n = 0; n < 2; n++)
                store(weighted.at + t * PANEL + n * W, load(written.at + t * PANEL + n * W) * rest[t]);
        blocks(key, [&](int64_t m, auto of) {
            constexpr int M = decltype(of)::value;
            vf total[M][2];
            for (int r = 0; r < M; r++)
                for (int n = 0; n < 2; n++) total[r][n] = load(from + (m + r) * PANEL + n * W) * carried;
            product<M>(k.at + m, 1, keys, weighted.at, count, total);
            for (int r = 0; r < M; r++)
                for (int n = 0; n < 2; n++) store(to + (m + r) * PANEL + n * W, total[r][n]);
        });
    }
};

template <class T> void run(const Step<T>& step) {
    const int64_t items = step.rows * step.heads;
    if (!items) return;
    const int64_t work = 3 * step.key * step.value * step.starts[step.rows] / step.rows;
    parallel(items, work, [&](int64_t first, int64_t last) {
        Buffer q(step.key), k(step.key);
        std::unique_ptr<Chunks<T>> chunks;
        // Heads outside, so that every thread gets its part of a long row.
        for (int64_t item = first; item < last; item++) {
            const int64_t row = item % step.rows, head = item / step.rows, length = step.starts[row + 1] - step.starts[row];
            if (length == 1) one_token(step, row, head, q.at, k.at);
            if (length <= 1) continue;
            if (!chunks) chunks = std::make_unique<Chunks<T>>(step);
            chunks->run(row, head);
        }
    });
}

}  // namespace

// q, k: [T, key_heads, key]; v: [T, heads, value]; strides: of tokens and heads of q, k and v. g, beta: float32 [T, heads]. pool: float32
// [slots, heads, key, value]. out: float32 [T, heads, value]. contexts: positions of the rows' first tokens. packed: as rows.packed_rows packs
// `rows` rows and `captures` captures.
API void gated_delta_rule(int dtype, const void* q, const void* k, const void* v, const int64_t* strides, const float* g, const float* beta,
                          float* pool, float* out, const int64_t* contexts, const int64_t* packed, int64_t rows, int64_t captures,
                          int64_t key_heads, int64_t heads, int64_t key, int64_t value) {
    by_type(dtype, [=](auto* type) {
        typedef decltype(type) P;
        run(Step<std::remove_pointer_t<P>>{{(P)q, strides[0], strides[1]}, {(P)k, strides[2], strides[3]}, {(P)v, strides[4], strides[5]},
                                           g, beta, pool, out, packed, packed + rows + 1, packed + 2 * rows + 1, contexts, rows, captures,
                                           key_heads, heads, key, value});
    });
}

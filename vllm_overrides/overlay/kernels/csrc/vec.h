// Vectors of float32 lanes for one instruction set, loads and stores of the three float types, and loops over threads.
// Every .cpp of an operator is compiled once per instruction set; only this file knows which one it is.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#include <omp.h>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define API extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

// LANES: of the variant `wide` of native_build.py, which runs what AVX-512 would, 16 lanes, on processors that lack it.
#if defined(LANES)
constexpr int W = LANES;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

// The arithmetic is float32. i8: of weights, which are multiplied by a scale later.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct i8 { int8_t number; };

// --- one number

INLINE float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

INLINE float get(float x) { return x; }
INLINE float get(i8 x) { return x.number; }
INLINE float get(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
INLINE float get(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000)));  // times 2^112, subnormals too
#endif
}

INLINE void put(float* to, float x) { *to = x; }
INLINE void put(bf16* to, float x) {  // to nearest, ties to even; no NaN becomes infinite
    uint32_t bits = as_bits(x);
    to->bits = x != x ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void put(f16* to, float x) {
#if defined(__F16C__)
    to->bits = uint16_t(_cvtss_sh(x, 0));
#else
    uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) { to->bits = uint16_t(sign | 0x7e00); return; }
    if (rest >= 0x477ff000) { to->bits = uint16_t(sign | 0x7c00); return; }
    if (rest < 0x38800000) {  // subnormal: the adder rounds
        to->bits = uint16_t(sign | (as_bits(as_float(rest) + 0.5f) - as_bits(0.5f)));
        return;
    }
    rest += 0xc8000fff + (rest >> 13 & 1);
    to->bits = uint16_t(sign | rest >> 13);
#endif
}

// --- W numbers; pointers need no alignment

INLINE vf all(float x) { return x - vf{}; }  // x + 0 would be an addition: it is another number for -0
INLINE vf load(const float* from) { vf x; std::memcpy(&x, from, sizeof x); return x; }
INLINE vf load(const bf16* from) {
    vh half; std::memcpy(&half, from, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
#if defined(__AVX512F__)
static_assert(W == 16, "AVX-512's instructions are used for whole vectors");
#elif defined(__AVX2__)
static_assert(W % 8 == 0, "AVX2's instructions are used for eight lanes each");
// The lanes of eight(0), eight(8), ..
template <class F> INLINE vf from_eights(F eight) {
    __m256 eights[W / 8];
    for (int part = 0; part < W / 8; part++) eights[part] = eight(8 * part);
    vf x; std::memcpy(&x, eights, sizeof x); return x;
}
#endif
INLINE vf load(const f16* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && defined(__AVX2__)
    return from_eights([=](int at) __attribute__((always_inline)) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + at))); });
#else
    vf x; for (int lane = 0; lane < W; lane++) x[lane] = get(from[lane]); return x;
#endif
}
INLINE vf load(const i8* from) {  // GCC takes a vector of bytes apart to convert it
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__F16C__) && defined(__AVX2__)
    return from_eights([=](int at) __attribute__((always_inline)) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + at))));
    });
#else
    vb number; std::memcpy(&number, from, sizeof number);
    return __builtin_convertvector(__builtin_convertvector(number, vi), vf);
#endif
}
INLINE void store(float* to, vf x) { std::memcpy(to, &x, sizeof x); }
INLINE void store(bf16* to, vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    vi nan = x != x;
    vh half = __builtin_convertvector((rounded & ~(vu)nan) | (quiet & (vu)nan), vh);
    std::memcpy(to, &half, sizeof half);
}
INLINE void store(f16* to, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__) && defined(__AVX2__)
    __m256 eights[W / 8];
    std::memcpy(eights, &x, sizeof x);
    for (int part = 0; part < W / 8; part++) _mm_storeu_si128((__m128i*)(to + 8 * part), _mm256_cvtps_ph(eights[part], 0));
#else
    for (int lane = 0; lane < W; lane++) put(to + lane, x[lane]);
#endif
}

// The last `count` < W of a row; the other lanes are `rest`, and nothing past the row is touched.
template <class T> INLINE vf load_part(const T* from, int count, float rest = 0) {
    vf x = all(rest);
    for (int lane = 0; lane < count; lane++) x[lane] = get(from[lane]);
    return x;
}
template <class T> INLINE void store_part(T* to, vf x, int count) {
    for (int lane = 0; lane < count; lane++) put(to + lane, x[lane]);
}

INLINE float sum(vf x) { float total = 0; for (int lane = 0; lane < W; lane++) total += x[lane]; return total; }
INLINE vf choose(vi which, vf yes, vf no) { return (vf)(((vi)yes & which) | ((vi)no & ~which)); }
INLINE vf maximum(vf a, vf b) { return choose(a > b, a, b); }
INLINE float largest(vf x) { float most = x[0]; for (int lane = 1; lane < W; lane++) most = x[lane] > most ? x[lane] : most; return most; }

// e^x to 2 units in the last place: Cody and Waite's reduction by ln 2, a polynomial of degree 6. Below -87.3 it is 0, above 88.7 infinite;
// NaN stays.
INLINE vf exp(vf x) {
    vf inside = choose(x < all(88.72283f), x, all(88.72283f));
    inside = choose(inside > all(-87.33654f), inside, all(-87.33654f));
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vf n = (inside * 1.44269504f + shift) - shift;
    vf r = inside - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi whole = __builtin_convertvector(n, vi);
    // 2^n in two factors: 2^128 is no float.
    vi low = whole >> 1, high = whole - low;
    vf y = p * (vf)((low + 127) << 23) * (vf)((high + 127) << 23);
    y = choose(x < all(-87.33654f), vf{}, y);
    y = choose(x > all(88.72283f), all(INFINITY), y);
    return choose(x == x, y, x);
}
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

// --- threads

// Multiplications that are worth a team's start. The sanitizers' variants want teams everywhere.
#if !defined(TEAM_WORK)
#define TEAM_WORK 40000
#endif

// most_threads: as many as PyTorch uses. thread_number: of this thread in its team, 0 outside of one. as_team: f(number, how many) on each.
INLINE int64_t most_threads() { return omp_get_max_threads(); }
#if defined(__SANITIZE_THREAD__)
// The sanitizer does not see how the threads of an OpenMP that was built without it wait for each other.
inline thread_local int64_t place_in_team = -1;
INLINE bool in_team() { return place_in_team >= 0; }
INLINE int64_t thread_number() { return in_team() ? place_in_team : 0; }
template <class F> void as_team(F f) {
    const int64_t count = most_threads();
    auto member = [&](int64_t number) {
        place_in_team = number;
        f(number, count);
        place_in_team = -1;
    };
    std::vector<std::thread> others;
    for (int64_t number = 1; number < count; number++) others.emplace_back(member, number);
    member(0);
    for (std::thread& other : others) other.join();
}
#else
INLINE bool in_team() { return omp_in_parallel(); }
INLINE int64_t thread_number() { return omp_get_thread_num(); }
template <class F> INLINE void as_team(F f) {
#pragma omp parallel
    f(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
}
#endif

// f(first, last) over parts of range(count), on as many threads as PyTorch uses; on one where all is less work than a team's start.
// work: about how many multiplications one of them is.
template <class F> INLINE void parallel(int64_t count, int64_t work, F f) {
    if (count <= 1 || count * work < TEAM_WORK || most_threads() == 1 || in_team()) {
        if (count > 0) f(int64_t(0), count);
        return;
    }
    as_team([&](int64_t part, int64_t parts) {
        const int64_t first = count * part / parts, last = count * (part + 1) / parts;
        if (first < last) f(first, last);
    });
}

// Calls f with a null pointer of the type that `dtype` (native.DTYPES) names.
template <class F> INLINE void by_type(int dtype, F f) {
    if (dtype == 0) f((float*)nullptr);
    else if (dtype == 1) f((bf16*)nullptr);
    else f((f16*)nullptr);
}

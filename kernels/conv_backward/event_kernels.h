// Inner loops of the event-driven convolution backward: spike masks, the gradient's layout, dot products, sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "event_plan.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace spikemark {

template <typename T>
using Vec __attribute__((vector_size(32), may_alias)) = T;

template <typename T>
inline const Vec<T>& load(const T* at) {
    return *reinterpret_cast<const Vec<T>*>(at);
}

// --- spikes ----------------------------------------------------------------------------------------------------

// Bit i is set where values[i] != 0 (NaN counts), i < count <= 64. `binary` is cleared by a value other than 0 and 1.
template <typename T>
inline uint64_t mask_of(const T* values, int64_t count, bool& binary) {
    uint64_t mask = 0, ones = 0;
    int64_t i = 0;
#if defined(__AVX__)
    if constexpr (sizeof(T) == 4) {
        for (; i + 8 <= count; i += 8) {
            const __m256 v = _mm256_loadu_ps(values + i);
            const auto bits = [](__m256 m) { return static_cast<uint64_t>(_mm256_movemask_ps(m)); };
            mask |= bits(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_UQ)) << i;
            ones |= bits(_mm256_cmp_ps(v, _mm256_set1_ps(1.0f), _CMP_EQ_OQ)) << i;
        }
    }
#endif
    for (; i < count; ++i) {
        mask |= static_cast<uint64_t>(values[i] != 0) << i;
        ones |= static_cast<uint64_t>(values[i] == 1) << i;
    }
    binary &= mask == ones;
    return mask;
}

// Calls each(i) for every set bit of a plane's mask, in order.
template <typename Each>
inline void for_each_spike(const uint64_t* mask, int64_t words, const Each& each) {
    for (int64_t word = 0; word < words; ++word)
        for (uint64_t left = mask[word]; left; left &= left - 1) each(word * 64 + __builtin_ctzll(left));
}

// --- layout ----------------------------------------------------------------------------------------------------

#if defined(__AVX__)
// Eight rows of eight floats, transposed.
inline void transpose8(const float* src, int64_t row, __m256 out[8]) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(src + i * row);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        out[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
}
#endif

// dst[cell(i) * width + lane] = src[lane * lane_stride + i * step], lanes < width; the other lanes become 0.
// cell(i) < 0 is left out.
template <typename T, typename Cell>
void interleave(const T* src, int64_t lane_stride, int64_t step, int64_t count, int64_t lanes, int64_t width, T* dst,
                const Cell& cell) {
    if (lanes < width)
        for (int64_t i = 0; i < count; ++i)
            if (cell(i) >= 0) std::memset(dst + cell(i) * width + lanes, 0, (width - lanes) * sizeof(T));
    if (lane_stride == 1) {
        for (int64_t i = 0; i < count; ++i)
            if (cell(i) >= 0) std::memcpy(dst + cell(i) * width, src + i * step, lanes * sizeof(T));
        return;
    }
    int64_t lane = 0;
#if defined(__AVX__)
    if constexpr (sizeof(T) == 4) {
        for (; step == 1 && lane + 8 <= lanes; lane += 8) {
            const T* row = src + lane * lane_stride;
            int64_t i = 0;
            for (; i + 8 <= count; i += 8) {
                __m256 tile[8];
                transpose8(row + i, lane_stride, tile);
                for (int k = 0; k < 8; ++k)
                    if (cell(i + k) >= 0) _mm256_store_ps(dst + cell(i + k) * width + lane, tile[k]);
            }
            for (; i < count; ++i)
                for (int k = 0; k < 8; ++k)
                    if (cell(i) >= 0) dst[cell(i) * width + lane + k] = row[k * lane_stride + i];
        }
    }
#endif
    for (; lane < lanes; ++lane)
        for (int64_t i = 0; i < count; ++i)
            if (cell(i) >= 0) dst[cell(i) * width + lane] = src[lane * lane_stride + i * step];
}

// --- input half: dot products of a spike's gradients with its weights ---------------------------------------------

// sums[e] += the sum of the lanes of v[e].
template <typename T, int E>
inline void add_lanes(const Vec<T> (&v)[E], T* sums) {
#if defined(__AVX__)
    if constexpr (sizeof(T) == 4 && E == 4) {
        const auto pair = [&](int e) { return _mm256_hadd_ps((__m256)v[e], (__m256)v[e + 1]); };
        const __m256 all = _mm256_hadd_ps(pair(0), pair(2));
        const __m128 lanes = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
        _mm_storeu_ps(sums, _mm_add_ps(_mm_loadu_ps(sums), lanes));
        return;
    }
#endif
    for (int e = 0; e < E; ++e) {
        T total = 0;
        for (size_t i = 0; i < 32 / sizeof(T); ++i) total += v[e][i];
        sums[e] += total;
    }
}

// sums[e] += sum over taps and lanes of weight * gradient, for `E` spikes at once: their chains of additions hide each
// other's latency and share the weights' loads.
template <typename T, int VECTORS, int E>
inline void dot(const T* weight, const T* grad, const std::vector<Tap>& taps, const int32_t* cells, T* sums) {
    constexpr int LANES = 32 / sizeof(T), WIDTH = VECTORS * LANES, CHAINS = VECTORS > 1 ? 2 : 1;
    Vec<T> chain[E][CHAINS] = {};
    const T* at[E];
    for (int e = 0; e < E; ++e) at[e] = grad + static_cast<int64_t>(cells[e]) * WIDTH;
    for (const Tap& tap : taps) {
        const T* w = weight + tap.index * WIDTH;
        const int64_t back = -tap.back * WIDTH;
        for (int j = 0; j < VECTORS; ++j) {
            const Vec<T> factor = load(w + j * LANES);
            for (int e = 0; e < E; ++e) chain[e][j % CHAINS] += factor * load(at[e] + back + j * LANES);
        }
    }
    Vec<T> total[E];
    for (int e = 0; e < E; ++e) total[e] = CHAINS == 2 ? chain[e][0] + chain[e][CHAINS - 1] : chain[e][0];
    add_lanes<T, E>(total, sums);
}

template <typename T, int VECTORS>
void dots(const T* weight, const T* grad, const std::vector<Tap>& taps, const int32_t* cells, int64_t count, T* sums) {
    int64_t e = 0;
    for (; e + 4 <= count; e += 4) dot<T, VECTORS, 4>(weight, grad, taps, cells + e, sums + e);
    if (e + 2 <= count) dot<T, VECTORS, 2>(weight, grad, taps, cells + e, sums + e), e += 2;
    if (e < count) dot<T, VECTORS, 1>(weight, grad, taps, cells + e, sums + e);
}

// --- weight half: sums of gradients over spikes -------------------------------------------------------------------

// weight[tap] += sum over spikes of value * gradient, for `TAPS` taps, all of whose sums stay in registers.
template <typename T, int VECTORS, int TAPS>
void gather(T* weight, const T* grad, const Tap* taps, const int32_t* cells, const T* values, int64_t count) {
    constexpr int LANES = 32 / sizeof(T), WIDTH = VECTORS * LANES;
    Vec<T> sum[TAPS][VECTORS] = {};
    int64_t back[TAPS];
    for (int t = 0; t < TAPS; ++t) back[t] = -taps[t].back * WIDTH;
    for (int64_t e = 0; e < count; ++e) {
        const Vec<T> value = values[e] - Vec<T>{};
        const T* at = grad + static_cast<int64_t>(cells[e]) * WIDTH;
        for (int t = 0; t < TAPS; ++t)
            for (int j = 0; j < VECTORS; ++j) sum[t][j] += value * load(at + back[t] + j * LANES);
    }
    for (int t = 0; t < TAPS; ++t)
        for (int j = 0; j < VECTORS; ++j) {
            auto* out = reinterpret_cast<Vec<T>*>(weight + taps[t].index * WIDTH + j * LANES);
            *out += sum[t][j];
        }
}

constexpr int taps_at_once(int vectors) { return vectors == 4 ? 3 : 6; }

template <typename T, int VECTORS, int TAPS = taps_at_once(VECTORS)>
void gather_taps(T* weight, const T* grad, const Tap* taps, int64_t left, const int32_t* cells, const T* values,
                 int64_t count) {
    if constexpr (TAPS > 0) {
        if (left >= TAPS) return gather<T, VECTORS, TAPS>(weight, grad, taps, cells, values, count);
        gather_taps<T, VECTORS, TAPS - 1>(weight, grad, taps, left, cells, values, count);
    }
}

}  // namespace spikemark

// Portable vectors for native kernels: compiler vector types as wide as the machine's registers, loads and stores that
// convert float16 and bfloat16 in registers, stores that bypass the caches, and advice to use huge pages.
//
// What the compiler was told the machine has decides the width: 64 bytes with AVX-512, 32 with AVX, 16 otherwise.
// Everything is element-wise, so the width never changes a result.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace spikemark {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct Half { uint16_t bits; };
struct Bfloat { uint16_t bits; };

// State of type A (float or double) in vectors of kLanes.
template <typename A> struct Lanes;
template <> struct Lanes<float> {
    static constexpr int count = kVectorBytes / 4;
    typedef float Vector __attribute__((vector_size(kVectorBytes)));
    typedef int32_t Mask __attribute__((vector_size(kVectorBytes)));
    typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
    typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
};
template <> struct Lanes<double> {
    static constexpr int count = kVectorBytes / 8;
    typedef double Vector __attribute__((vector_size(kVectorBytes)));
    typedef int64_t Mask __attribute__((vector_size(kVectorBytes)));
};
template <typename A> using Vector = typename Lanes<A>::Vector;
template <typename A> using Mask = typename Lanes<A>::Mask;

template <typename A> inline Vector<A> splat(A value) { return Vector<A>{} + value; }

// float16 <-> float32, to nearest even, for processors without the instructions.
inline float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        float tiny = std::ldexp(static_cast<float>(mantissa), -24);
        std::memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // rounds beyond the largest float16
    if (bits < 0x38800000u) {                        // below the smallest normal: count in units of 2^-24
        float tiny;
        std::memcpy(&tiny, &bits, 4);
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(tiny, 24))));
    }
    uint32_t odd = (bits >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0xfffu + odd) >> 13));
}

// load and store one vector of state from memory of type S; no alignment needed.
inline Vector<float> load(const float* p) { Vector<float> v; std::memcpy(&v, p, sizeof v); return v; }
inline Vector<double> load(const double* p) { Vector<double> v; std::memcpy(&v, p, sizeof v); return v; }
inline Vector<float> load(const Bfloat* p) {
    Lanes<float>::Narrow narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    Lanes<float>::Bits bits = __builtin_convertvector(narrow, Lanes<float>::Bits) << 16;
    Vector<float> v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
inline Vector<float> load(const Half* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vector<float>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX__)
    return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    Vector<float> v;
    for (int i = 0; i < Lanes<float>::count; ++i) v[i] = half_to_float(p[i].bits);
    return v;
#endif
}

// What is written for one vector of state: the bytes as memory of type S holds them.
inline Vector<float> narrow(Vector<float> v, const float*) { return v; }
inline Vector<double> narrow(Vector<double> v, const double*) { return v; }
inline Lanes<float>::Narrow narrow(Vector<float> v, const Bfloat*) {
    Lanes<float>::Bits bits;
    std::memcpy(&bits, &v, sizeof bits);
    Lanes<float>::Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Mask<float> number = v == v;
    Lanes<float>::Bits keep = reinterpret_cast<Lanes<float>::Bits>(number);
    bits = (rounded & keep) | (0x7fc0u & ~keep);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i wide = reinterpret_cast<__m256i>(bits);  // gcc's own conversion takes far more instructions
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    Lanes<float>::Narrow out;
    std::memcpy(&out, &packed, sizeof out);
    return out;
#else
    return __builtin_convertvector(bits, Lanes<float>::Narrow);
#endif
}
inline Lanes<float>::Narrow narrow(Vector<float> v, const Half*) {
    Lanes<float>::Narrow out;
#if defined(__AVX512F__)
    __m256i packed = _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(&out, &packed, sizeof out);
#elif defined(__F16C__) && defined(__AVX__)
    __m128i packed = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(&out, &packed, sizeof out);
#else
    for (int i = 0; i < Lanes<float>::count; ++i) out[i] = float_to_half(v[i]);
#endif
    return out;
}

// Stores past the caches: saves reading the lines that are about to be overwritten. `p` aligned to the bytes stored.
template <typename Bytes> inline void stream_bytes(void* p, const Bytes& bytes) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Bytes) == 64) {
        __m512i v;
        std::memcpy(&v, &bytes, sizeof v);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v);
        return;
    }
#endif
#if defined(__AVX__)
    if constexpr (sizeof(Bytes) == 32) {
        __m256i v;
        std::memcpy(&v, &bytes, sizeof v);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v);
        return;
    }
#endif
#if defined(__SSE2__)
    if constexpr (sizeof(Bytes) == 16) {
        __m128i v;
        std::memcpy(&v, &bytes, sizeof v);
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), v);
        return;
    }
    if constexpr (sizeof(Bytes) == 8) {
        long long v;
        std::memcpy(&v, &bytes, sizeof v);
        _mm_stream_si64(reinterpret_cast<long long*>(p), v);
        return;
    }
#endif
    std::memcpy(p, &bytes, sizeof bytes);
}

template <bool Stream, typename S, typename V> inline void store(S* p, V v) {
    auto bytes = narrow(v, p);
    if constexpr (Stream) stream_bytes(p, bytes);
    else std::memcpy(p, &bytes, sizeof bytes);
}

// Stores past the caches are weakly ordered: other threads may read them only after this.
inline void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// The first n (< lanes) elements only; the other lanes are 0.
template <typename A, typename S> inline Vector<A> load_part(const S* p, int n) {
    S padded[Lanes<A>::count] = {};
    std::memcpy(padded, p, n * sizeof(S));
    return load(padded);
}
template <typename S, typename V> inline void store_part(S* p, V v, int n) {
    auto bytes = narrow(v, p);
    std::memcpy(p, &bytes, n * sizeof(S));
}

// Bit i is set where lane i of the mask is.
template <typename A> inline uint32_t lane_bits(Mask<A> mask) {
#if defined(__AVX__) && !defined(__AVX512F__)
    if constexpr (sizeof(A) == 4) return _mm256_movemask_ps(reinterpret_cast<__m256>(mask));
    else return _mm256_movemask_pd(reinterpret_cast<__m256d>(mask));
#elif defined(__AVX512F__)
    const __m512i lanes = reinterpret_cast<__m512i>(mask), zero = _mm512_setzero_si512();
    if constexpr (sizeof(A) == 4) return _mm512_cmplt_epi32_mask(lanes, zero);
    else return _mm512_cmplt_epi64_mask(lanes, zero);
#elif defined(__SSE2__)
    if constexpr (sizeof(A) == 4) return _mm_movemask_ps(reinterpret_cast<__m128>(mask));
    else return _mm_movemask_pd(reinterpret_cast<__m128d>(mask));
#else
    uint32_t bits = 0;
    for (int i = 0; i < Lanes<A>::count; ++i) bits |= (mask[i] ? 1u : 0u) << i;
    return bits;
#endif
}

// lane_bits of a > b, false for NaN: with AVX-512 a comparison makes bits, not lanes, and the way through lanes costs.
template <typename A> inline uint32_t greater_bits(Vector<A> a, Vector<A> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(A) == 4) {
        return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GT_OQ);
    } else {
        return _mm512_cmp_pd_mask(reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), _CMP_GT_OQ);
    }
#else
    return lane_bits<A>(a > b);
#endif
}

// Lanes as a mask from their bits: lane_bits backwards.
template <typename A> inline Mask<A> lane_mask(uint32_t bits) {
    using Whole = std::remove_reference_t<decltype(Mask<A>{}[0])>;
    Mask<A> each = {};
    for (int lane = 0; lane < Lanes<A>::count; ++lane) each[lane] = Whole{1} << lane;
    return ((Mask<A>{} + static_cast<Whole>(bits)) & each) != 0;
}

// min and max that keep NaN: only a comparison that holds replaces the value.
template <typename A> inline Vector<A> clamp(Vector<A> v, A low, A high) {
    v = v < low ? splat<A>(low) : v;
    return v > high ? splat<A>(high) : v;
}

// Ask for huge pages under a buffer that was just allocated and not yet touched. The first touch of a page costs a
// fault and its clearing: with 4 KiB pages that is several times what the kernels here cost. Only advice.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr int64_t kHuge = int64_t{2} << 20;
    if (bytes < 2 * kHuge) return;
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

}  // namespace spikemark

// Storage types, their conversion to the state type, packs of 16 bytes and streaming access. Included by every
// kernel source. Needs no CUDA header, so that NVRTC needs no include path on any machine.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#ifndef SPIKEMARK_EMULATION  // the emulation header of the tests supplies these two for the CPU
__device__ __forceinline__ float f16_to_f32(u16 bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}
__device__ __forceinline__ u16 f32_to_f16(float wide) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
}
#endif

// The state (and every intermediate) is float, or double for double storage.
template <typename T> struct StateOf { typedef float type; };
template <> struct StateOf<double> { typedef double type; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return f16_to_f32(x.bits); }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> struct Narrow;
template <> struct Narrow<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct Narrow<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct Narrow<f16> { static __device__ __forceinline__ f16 of(float x) { f16 y = {f32_to_f16(x)}; return y; } };
template <> struct Narrow<bf16> {
    // Round to nearest even on the bits: the conversion instruction needs sm_80, and this runs from sm_75 on.
    static __device__ __forceinline__ bf16 of(float x) {
        const u32 bits = __float_as_uint(x);
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const bf16 y = {(u16)(x != x ? 0x7fffu : rounded)};
        return y;
    }
};

// N neighbouring elements. Packs of 16 bytes are loaded and stored in one access that does not linger in caches.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

template <typename T, int N> __device__ __forceinline__ Pack<T, N> load_streaming(const T* from) {
    if constexpr (sizeof(T) * N == 16) {
        union { uint4 raw; Pack<T, N> pack; } both;
        both.raw = __ldcs(reinterpret_cast<const uint4*>(from));
        return both.pack;
    } else {
        return *reinterpret_cast<const Pack<T, N>*>(from);
    }
}

template <typename T, int N> __device__ __forceinline__ void store_streaming(T* to, const Pack<T, N>& pack) {
    if constexpr (sizeof(T) * N == 16) {
        union { uint4 raw; Pack<T, N> pack; } both;
        both.pack = pack;
        __stcs(reinterpret_cast<uint4*>(to), both.raw);
    } else {
        *reinterpret_cast<Pack<T, N>*>(to) = pack;
    }
}

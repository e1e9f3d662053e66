// Average pooling and its gradient shared by the spikes of a window: one pass over memory each, any input layout.
//
// Work goes plane by plane ([H, W] of one sample, step and channel). Outputs are contiguous. Sums are kept in float
// for the narrow types and in double for double, in a fixed order: results do not depend on the thread count.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "_parallel.h"
#include "_strided.h"

namespace {

using spikemark::Strided;

constexpr int64_t PIECE = 16384;  // elements of the large side that one piece of work covers
constexpr int64_t BLOCK = 256;    // windows computed at a time, in L1

struct Float {
    using Bits = float;
    using Wide = float;
    static float load(float v) { return v; }
    static float store(float v) { return v; }
};

struct Double {
    using Bits = double;
    using Wide = double;
    static double load(double v) { return v; }
    static double store(double v) { return v; }
};

struct BFloat16 {
    using Bits = uint16_t;
    using Wide = float;
    static float load(uint16_t bits) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    static uint16_t store(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
        return static_cast<uint16_t>(value != value ? 0x7fc0u | (bits >> 16) : rounded);
    }
};

#if defined(__FLT16_MAX__)
struct Half {
    using Bits = uint16_t;
    using Wide = float;
    static float load(uint16_t bits) {
        _Float16 value;
        std::memcpy(&value, &bits, sizeof value);
        return static_cast<float>(value);
    }
    static uint16_t store(float value) {
        const _Float16 narrow = static_cast<_Float16>(value);
        uint16_t bits;
        std::memcpy(&bits, &narrow, sizeof bits);
        return bits;
    }
};
#else
struct Half {  // the compiler has no 16-bit float: the same conversions by integer arithmetic
    using Bits = uint16_t;
    using Wide = float;
    static float load(uint16_t bits) {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
        uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu, wide;
        if (exponent == 31u) {
            wide = sign | 0x7f800000u | (fraction << 13);
        } else if (exponent != 0) {
            wide = sign | ((exponent + 112u) << 23) | (fraction << 13);
        } else {
            const float value = static_cast<float>(fraction) * (1.0f / 16777216.0f);
            std::memcpy(&wide, &value, sizeof wide);
            wide |= sign;
        }
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    static uint16_t store(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
        if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
        if (bits < 0x38800000u) {  // subnormal: adding a half aligns the fraction and rounds it to even
            float magnitude;
            std::memcpy(&magnitude, &bits, sizeof magnitude);
            magnitude += 0.5f;
            std::memcpy(&bits, &magnitude, sizeof bits);
            return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
        }
        bits += 0xc8000fffu + ((bits >> 13) & 1u);
        return static_cast<uint16_t>(sign | (bits >> 13));
    }
};
#endif

// KW > 0 fixes the window's width at compile time; 0 reads it from `width`.
template <typename E, int KW>
void add_row(const typename E::Bits* in, int64_t step, int64_t width, int64_t count, typename E::Wide* sums) {
    const int64_t kw = KW > 0 ? KW : width;
    if (step == 1) {
        for (int64_t o = 0; o < count; ++o)
            for (int64_t j = 0; j < kw; ++j) sums[o] += E::load(in[o * kw + j]);
    } else {
        for (int64_t o = 0; o < count; ++o)
            for (int64_t j = 0; j < kw; ++j) sums[o] += E::load(in[(o * kw + j) * step]);
    }
}

template <typename E, int KW>
void forward(const void* x, const Strided& shape, int64_t kh, int64_t width, void* y, int threads) {
    using Bits = typename E::Bits;
    using Wide = typename E::Wide;
    const int64_t kw = KW > 0 ? KW : width;
    const int64_t h = shape.size[3] / kh, w = shape.size[4] / kw;
    const int64_t planes = shape.size[0] * shape.size[1] * shape.size[2];
    if (planes == 0 || h == 0 || w == 0) return;
    const int64_t group = std::max<int64_t>(1, PIECE / (shape.size[3] * shape.size[4]));
    const Wide count = static_cast<Wide>(kh * kw);
    spikemark::parallel_for((planes + group - 1) / group, threads, [&](int64_t piece) {
        Wide sums[BLOCK];
        for (int64_t p = piece * group; p < std::min(planes, (piece + 1) * group); ++p) {
            const Bits* plane = static_cast<const Bits*>(x) + shape.offset(p, 3);
            Bits* out = static_cast<Bits*>(y) + p * h * w;
            for (int64_t row = 0; row < h; ++row)
                for (int64_t from = 0; from < w; from += BLOCK) {
                    const int64_t n = std::min(BLOCK, w - from);
                    std::fill(sums, sums + n, Wide(0));
                    for (int64_t i = 0; i < kh; ++i)
                        add_row<E, KW>(plane + (row * kh + i) * shape.stride[3] + from * kw * shape.stride[4],
                                       shape.stride[4], kw, n, sums);
                    for (int64_t o = 0; o < n; ++o) out[row * w + from + o] = E::store(sums[o] / count);
                }
        }
    });
}

template <typename E, int KW>
void backward(const void* grad, const Strided& grads, const void* y, const Strided& means, int64_t height,
              int64_t full_width, int64_t kh, int64_t width, void* result, int threads) {
    using Bits = typename E::Bits;
    using Wide = typename E::Wide;
    const int64_t kw = KW > 0 ? KW : width;
    const int64_t h = grads.size[3], w = grads.size[4];
    const int64_t planes = grads.size[0] * grads.size[1] * grads.size[2];
    if (planes == 0 || height == 0 || full_width == 0) return;
    const int64_t group = std::max<int64_t>(1, PIECE / (height * full_width));
    const Wide count = static_cast<Wide>(kh * kw), limit = count + 1;
    const Bits zero = E::store(Wide(0));
    spikemark::parallel_for((planes + group - 1) / group, threads, [&](int64_t piece) {
        Bits shared[BLOCK];
        for (int64_t p = piece * group; p < std::min(planes, (piece + 1) * group); ++p) {
            const Bits* from_grad = static_cast<const Bits*>(grad) + grads.offset(p, 3);
            const Bits* from_y = static_cast<const Bits*>(y) + means.offset(p, 3);
            Bits* plane = static_cast<Bits*>(result) + p * height * full_width;
            for (int64_t row = 0; row < h; ++row) {
                const Bits* g = from_grad + row * grads.stride[3];
                const Bits* m = from_y + row * means.stride[3];
                Bits* rows = plane + row * kh * full_width;
                for (int64_t from = 0; from < w; from += BLOCK) {
                    const int64_t n = std::min(BLOCK, w - from);
                    for (int64_t o = 0; o < n; ++o) {
                        const Wide raw = Wide(1) / E::load(m[(from + o) * means.stride[4]]);
                        const Wide scale = (raw > limit ? Wide(0) : raw) / count;
                        shared[o] = E::store(E::load(g[(from + o) * grads.stride[4]]) * scale);
                    }
                    for (int64_t i = 0; i < kh; ++i) {
                        Bits* out = rows + i * full_width + from * kw;
                        for (int64_t o = 0; o < n; ++o)
                            for (int64_t j = 0; j < kw; ++j) out[o * kw + j] = shared[o];
                    }
                }
                for (int64_t i = 0; i < kh; ++i)  // columns that no window covers
                    std::fill(rows + i * full_width + w * kw, rows + (i + 1) * full_width, zero);
            }
            std::fill(plane + h * kh * full_width, plane + height * full_width, zero);
        }
    });
}

// Calls run.template operator()<E, KW>() for the dtype's element and the window's width.
template <typename E, typename Run>
void by_width(int64_t kw, const Run& run) {
    switch (kw) {
        case 2: run.template go<E, 2>(); break;
        case 3: run.template go<E, 3>(); break;
        case 4: run.template go<E, 4>(); break;
        default: run.template go<E, 0>();
    }
}

template <typename Run>
int by_dtype(int dtype, int64_t kw, const Run& run) {
    switch (dtype) {
        case 0: by_width<Float>(kw, run); return 0;
        case 1: by_width<Half>(kw, run); return 0;
        case 2: by_width<BFloat16>(kw, run); return 0;
        case 3: by_width<Double>(kw, run); return 0;
        default: return 1;
    }
}

struct Forward {
    const void* x;
    Strided shape;
    int64_t kh, kw;
    void* y;
    int threads;
    template <typename E, int KW>
    void go() const {
        forward<E, KW>(x, shape, kh, kw, y, threads);
    }
};

struct Backward {
    const void* grad;
    Strided grads;
    const void* y;
    Strided means;
    int64_t height, width, kh, kw;
    void* result;
    int threads;
    template <typename E, int KW>
    void go() const {
        backward<E, KW>(grad, grads, y, means, height, width, kh, kw, result, threads);
    }
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// dtype: 0 float32, 1 float16, 2 bfloat16, 3 float64. x has five axes, the last two pooled; y is contiguous.
// Both return 0, or 1 for a dtype that does not exist.
EXPORTED int spikemark_pool(int dtype, const void* x, const int64_t* sizes, const int64_t* strides, int64_t kh,
                            int64_t kw, void* y, int threads) {
    return by_dtype(dtype, kw, Forward{x, Strided(sizes, strides), kh, kw, y, threads});
}

// grad and y have the same sizes; the contiguous result has planes of height x width.
EXPORTED int spikemark_pool_backward(int dtype, const void* grad, const int64_t* grad_sizes,
                                     const int64_t* grad_strides, const void* y, const int64_t* y_sizes,
                                     const int64_t* y_strides, int64_t height, int64_t width, int64_t kh, int64_t kw,
                                     void* result, int threads) {
    return by_dtype(dtype, kw, Backward{grad, Strided(grad_sizes, grad_strides), y, Strided(y_sizes, y_strides), height,
                                        width, kh, kw, result, threads});
}

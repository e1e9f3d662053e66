// Sign and clamp on the bits of IEEE-like floats: one pass over memory, any dtype, any layout of the input.
//
// A magnitude is the number without its sign bit; as integers, magnitudes are ordered as the numbers are, and every
// NaN lies above infinity. So neither function needs to convert narrow types.
#include <algorithm>
#include <cstdint>

#include "_parallel.h"
#include "_strided.h"

namespace {

struct Sign {
    template <typename U>
    static U apply(U bits, U one, U infinity) {
        const U top = static_cast<U>(U(1) << (sizeof(U) * 8 - 1));
        const U magnitude = bits & static_cast<U>(~top);
        const bool kept = magnitude == 0 || magnitude > infinity;  // 0 and NaN are their own sign
        return kept ? bits : static_cast<U>((bits & top) | one);
    }
};

struct Clamp {
    template <typename U>
    static U apply(U bits, U one, U infinity) {
        const U top = static_cast<U>(U(1) << (sizeof(U) * 8 - 1));
        const U magnitude = bits & static_cast<U>(~top);
        const bool beyond = magnitude > one && magnitude <= infinity;
        return beyond ? static_cast<U>((bits & top) | one) : bits;
    }
};

constexpr int64_t PIECE = 16384;  // elements a piece of work: small enough to balance, large enough to hide its start

template <typename Op, typename U>
void walk(const U* x, const spikemark::Strided& shape, U* out, U one, U infinity, int threads) {
    const int64_t width = shape.size[4], step = shape.stride[4];
    const int64_t rows = shape.size[0] * shape.size[1] * shape.size[2] * shape.size[3];
    if (rows == 0 || width == 0) return;
    const int64_t parts = (width + PIECE - 1) / PIECE;             // long rows are cut,
    const int64_t group = std::max<int64_t>(1, PIECE / width);     // short ones taken together
    const int64_t groups = (rows + group - 1) / group;
    spikemark::parallel_for(groups * parts, threads, [&](int64_t piece) {
        const int64_t from = (piece % parts) * PIECE, to = std::min(width, from + PIECE);
        const int64_t first = (piece / parts) * group, last = std::min(rows, first + group);
        for (int64_t row = first; row < last; ++row) {
            const U* in = x + shape.offset(row, 4);
            U* to_row = out + row * width;
            if (step == 1) {
                for (int64_t i = from; i < to; ++i) to_row[i] = Op::apply(in[i], one, infinity);
            } else if (step == 0) {
                std::fill(to_row + from, to_row + to, Op::apply(in[0], one, infinity));
            } else {
                for (int64_t i = from; i < to; ++i) to_row[i] = Op::apply(in[i * step], one, infinity);
            }
        }
    });
}

// dtype: 0 float32, 1 float16, 2 bfloat16, 3 float64. Returns 0, or 1 for a dtype that does not exist.
template <typename Op>
int dispatch(int dtype, const void* x, const int64_t* sizes, const int64_t* strides, void* out, int threads) {
    const spikemark::Strided shape(sizes, strides);
    switch (dtype) {
        case 0:
            walk<Op, uint32_t>(static_cast<const uint32_t*>(x), shape, static_cast<uint32_t*>(out), 0x3f800000u,
                               0x7f800000u, threads);
            return 0;
        case 1:
            walk<Op, uint16_t>(static_cast<const uint16_t*>(x), shape, static_cast<uint16_t*>(out), 0x3c00, 0x7c00,
                               threads);
            return 0;
        case 2:
            walk<Op, uint16_t>(static_cast<const uint16_t*>(x), shape, static_cast<uint16_t*>(out), 0x3f80, 0x7f80,
                               threads);
            return 0;
        case 3:
            walk<Op, uint64_t>(static_cast<const uint64_t*>(x), shape, static_cast<uint64_t*>(out),
                               0x3ff0000000000000ull, 0x7ff0000000000000ull, threads);
            return 0;
        default:
            return 1;
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int spikemark_sign(int dtype, const void* x, const int64_t* sizes, const int64_t* strides, void* out,
                            int threads) {
    return dispatch<Sign>(dtype, x, sizes, strides, out, threads);
}

EXPORTED int spikemark_clamp(int dtype, const void* x, const int64_t* sizes, const int64_t* strides, void* out,
                             int threads) {
    return dispatch<Clamp>(dtype, x, sizes, strides, out, threads);
}

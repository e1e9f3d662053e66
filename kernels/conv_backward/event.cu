// The two halves of a spiking convolution's backward, event-driven: work is done only where the input is not 0.
// Input [N, C, H, W]; gradient channels-last [N, Ho, Wo, O]; weight as [C, taps, O / groups]. Sums run in a fixed
// order, so results repeat bit for bit. Offsets are 64-bit.
#include "storage.cuh"

struct Geometry { int C, H, W, O, Ho, Wo, kh, kw, sh, sw, ph, pw, dh, dw, groups; };

#define GEOMETRY_ARGUMENTS                                                                                             \
    int C, int H, int W, int O, int Ho, int Wo, int kh, int kw, int sh, int sw, int ph, int pw, int dh, int dw,        \
        int groups
#define GEOMETRY_STRUCT \
    const Geometry g = {C, H, W, O, Ho, Wo, kh, kw, sh, sw, ph, pw, dh, dw, groups}

// Row (or column) of the output that tap `tap` maps input row `at` to, or -1 where the stride skips it or it is outside.
__device__ __forceinline__ int output_at(int at, int tap, int stride, int padding, int dilation, int outputs) {
    const int scaled = at + padding - tap * dilation;
    if (scaled < 0 || scaled % stride != 0) return -1;
    const int out = scaled / stride;
    return out < outputs ? out : -1;
}

// A warp owns 32 neighbouring input elements. For each that is not 0, its lanes share the dot product over all taps
// and output channels.
template <typename T_>
__device__ __forceinline__ void event_input(
    const T_* __restrict__ input, const T_* __restrict__ weight, const T_* __restrict__ grad, T_* __restrict__ out,
    i64 total, const Geometry& g, typename StateOf<T_>::type grad_scale) {
    typedef typename StateOf<T_>::type S;
    const i64 here = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x & 31;
    const i64 warp_start = here - lane;
    if (warp_start >= total) return;  // whole warps only
    const int per_group = g.O / g.groups, taps = g.kh * g.kw;
    const S mine = here < total ? widen(input[here]) : S(0);
    u32 events = __ballot_sync(0xffffffffu, mine != S(0));
    S result = S(0);
    while (events) {
        const int owner = __ffs((int)events) - 1;
        events &= events - 1;
        i64 rest = warp_start + owner;
        const int x = (int)(rest % g.W);
        rest /= g.W;
        const int y = (int)(rest % g.H);
        rest /= g.H;
        const int c = (int)(rest % g.C);
        const i64 n = rest / g.C;
        const int first_output = c / (g.C / g.groups) * per_group;
        S sum = S(0);
        for (int ky = 0; ky < g.kh; ++ky) {
            const int yo = output_at(y, ky, g.sh, g.ph, g.dh, g.Ho);
            if (yo < 0) continue;
            for (int kx = 0; kx < g.kw; ++kx) {
                const int xo = output_at(x, kx, g.sw, g.pw, g.dw, g.Wo);
                if (xo < 0) continue;
                const T_* row = grad + ((n * g.Ho + yo) * g.Wo + xo) * g.O + first_output;
                const T_* taps_row = weight + ((i64)c * taps + ky * g.kw + kx) * per_group;
                for (int o = lane; o < per_group; o += 32) sum += widen(taps_row[o]) * widen(row[o]);
            }
        }
        for (int flip = 16; flip; flip >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
        if (lane == owner) result = sum * mine * grad_scale;
    }
    if (here < total) out[here] = Narrow<T_>::of(result);
}

// A block owns one input channel, 128 output channels, up to TAPS taps and a slice of the frames; a thread owns one
// output channel, so nothing is shared and nothing races. Slices are added afterwards, in order.
template <typename T_, int TAPS>
__device__ __forceinline__ void event_weight(
    const T_* __restrict__ input, const T_* __restrict__ grad, typename StateOf<T_>::type* __restrict__ partial,
    i64 frames, i64 slices, const Geometry& g) {
    typedef typename StateOf<T_>::type S;
    const int per_group = g.O / g.groups, taps = g.kh * g.kw;
    const int tiles = (per_group + 127) / 128, tap_groups = (taps + TAPS - 1) / TAPS;
    i64 rest = blockIdx.x;
    const int tap_group = (int)(rest % tap_groups);
    rest /= tap_groups;
    const int tile = (int)(rest % tiles);
    rest /= tiles;
    const int c = (int)(rest % g.C);
    const i64 slice = rest / g.C;
    if (slice >= slices) return;
    const int o = tile * 128 + (int)threadIdx.x;
    const bool active = o < per_group;
    const int channel = c / (g.C / g.groups) * per_group + (active ? o : 0);
    const int lane = threadIdx.x & 31;
    const int area = g.H * g.W;
    S sums[TAPS];
#pragma unroll
    for (int k = 0; k < TAPS; ++k) sums[k] = S(0);
    const i64 begin = frames * slice / slices, end = frames * (slice + 1) / slices;
    for (i64 n = begin; n < end; ++n) {
        const T_* plane = input + (n * g.C + c) * area;
        for (int start = 0; start < area; start += 32) {
            const S mine = start + lane < area ? widen(plane[start + lane]) : S(0);
            u32 events = __ballot_sync(0xffffffffu, mine != S(0));
            while (events) {
                const int owner = __ffs((int)events) - 1;
                events &= events - 1;
                const S value = __shfl_sync(0xffffffffu, mine, owner);
                const int y = (start + owner) / g.W, x = (start + owner) % g.W;
#pragma unroll
                for (int k = 0; k < TAPS; ++k) {
                    const int tap = tap_group * TAPS + k;
                    if (tap >= taps) break;
                    const int yo = output_at(y, tap / g.kw, g.sh, g.ph, g.dh, g.Ho);
                    const int xo = output_at(x, tap % g.kw, g.sw, g.pw, g.dw, g.Wo);
                    if (yo >= 0 && xo >= 0 && active)
                        sums[k] += value * widen(grad[((n * g.Ho + yo) * g.Wo + xo) * g.O + channel]);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
        const int tap = tap_group * TAPS + k;
        if (tap < taps && active)
            partial[((slice * g.C + c) * taps + tap) * per_group + o] = sums[k];
    }
}

#define ALL_OF(SUFFIX, T_, S)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 4) event_input_##SUFFIX(                                         \
        const T_* input, const T_* weight, const T_* grad, T_* out, i64 total, GEOMETRY_ARGUMENTS, S grad_scale) {     \
        GEOMETRY_STRUCT;                                                                                               \
        event_input<T_>(input, weight, grad, out, total, g, grad_scale);                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 4) event_weight_##SUFFIX(                                        \
        const T_* input, const T_* grad, S* partial, i64 frames, i64 slices, GEOMETRY_ARGUMENTS) {                     \
        GEOMETRY_STRUCT;                                                                                               \
        event_weight<T_, 9>(input, grad, partial, frames, slices, g);                                                  \
    }

ALL_OF(float32, float, float)
ALL_OF(float64, double, double)
ALL_OF(float16, f16, float)
ALL_OF(bfloat16, bf16, float)

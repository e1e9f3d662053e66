// The spike response model neuron for CUDA: dense (one thread a neuron), vectorized (16 bytes a thread) and
// compact (spikes as bits, slopes only at spikes). Tensors are [B, T, D], contiguous; a thread owns V
// neighbouring neurons d .. d+V-1 of one sample and walks over time. All offsets are 64-bit.
#include "storage.cuh"

template <typename S> struct Constants { S e_m, e_s, e_g, gain, v_th; };

template <typename S> struct Membrane { S m, s, g, u_last; };

template <typename S> struct Step { bool fired; S delta_u, delta_ut; };

template <typename S> __device__ __forceinline__ Step<S> advance(Membrane<S>& n, S x, const Constants<S>& c) {
    n.m = (n.m + x) * c.e_m;
    n.s = (n.s + x) * c.e_s;
    n.g = (n.g + x) * c.e_g;
    const S u = c.gain * (n.m - n.s);
    const Step<S> step = {u > c.v_th, u - n.u_last, n.g};
    n.u_last = u;
    if (step.fired) n.m = n.s = n.g = n.u_last = S(0);
    return step;
}

// What backward carries from the next spike: its scales, and its responses, which decay as we walk back from it.
template <typename S> struct Adjoint { S scale_w, scale_t, r_m, r_s, r_g; };

template <typename S> __device__ __forceinline__ S clamp_slope(S slope, S lowest) {
    const S inverse = S(-1) / slope;  // -1/0 is -inf (or +inf for -0) and clamps; a NaN stays NaN
    if (inverse != inverse) return inverse;
    return inverse < lowest ? lowest : (inverse > S(0) ? S(0) : inverse);
}

template <typename S>
__device__ __forceinline__ void at_spike(Adjoint<S>& a, S grad, S delta_u, S delta_ut) {
    a.scale_w = clamp_slope(delta_u, S(-4)) * grad;
    a.scale_t = clamp_slope(delta_ut, S(-123456789)) * grad;
    a.r_m = a.r_s = a.r_g = S(1);
}

template <typename S> __device__ __forceinline__ void step_back(Adjoint<S>& a, const Constants<S>& c) {
    a.r_m *= c.e_m;
    a.r_s *= c.e_s;
    a.r_g *= c.e_g;
}

template <typename S> __device__ __forceinline__ S grad_w_of(const Adjoint<S>& a, const Constants<S>& c) {
    return a.scale_w * (c.gain * (a.r_m - a.r_s));
}

template <typename S> __device__ __forceinline__ S grad_t_of(const Adjoint<S>& a) { return a.scale_t * -a.r_g; }

// First element of this thread's neurons: pack number `pack` of all packs, in sample pack / packs_per_sample.
template <int V> __device__ __forceinline__ i64 first_element(i64 pack, i64 T, i64 D) {
    const i64 per_sample = D / V;
    const i64 sample = pack / per_sample;
    return sample * T * D + (pack - sample * per_sample) * V;
}

template <typename T_, int V, int DEPTH>
__device__ __forceinline__ void dense_forward(
    const T_* __restrict__ x, T_* __restrict__ spikes, T_* __restrict__ delta_u, T_* __restrict__ delta_ut,
    i64 packs, i64 T, i64 D, const Constants<typename StateOf<T_>::type>& c) {
    typedef typename StateOf<T_>::type S;
    const i64 pack = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (pack >= packs) return;
    const i64 first = first_element<V>(pack, T, D);
    Membrane<S> state[V] = {};
    Pack<T_, V> ahead[DEPTH];  // the loads of the next DEPTH steps are in flight while these are computed
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
        if (k < T) ahead[k] = load_streaming<T_, V>(x + first + k * D);
    for (i64 t0 = 0; t0 < T; t0 += DEPTH) {
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const i64 t = t0 + k;
            if (t >= T) break;
            const Pack<T_, V> now = ahead[k];
            if (t + DEPTH < T) ahead[k] = load_streaming<T_, V>(x + first + (t + DEPTH) * D);
            Pack<T_, V> out, out_u, out_ut;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const Step<S> step = advance(state[v], widen(now.v[v]), c);
                out.v[v] = Narrow<T_>::of(step.fired ? S(1) : S(0));
                out_u.v[v] = Narrow<T_>::of(step.delta_u);
                out_ut.v[v] = Narrow<T_>::of(step.delta_ut);
            }
            store_streaming<T_, V>(spikes + first + t * D, out);
            store_streaming<T_, V>(delta_u + first + t * D, out_u);
            store_streaming<T_, V>(delta_ut + first + t * D, out_ut);
        }
    }
}

template <typename T_, int V, int DEPTH>
__device__ __forceinline__ void dense_backward(
    const T_* __restrict__ grad_out, const T_* __restrict__ spikes, const T_* __restrict__ delta_u,
    const T_* __restrict__ delta_ut, T_* __restrict__ grad_w, T_* __restrict__ grad_t,
    i64 packs, i64 T, i64 D, const Constants<typename StateOf<T_>::type>& c) {
    typedef typename StateOf<T_>::type S;
    const i64 pack = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (pack >= packs) return;
    const i64 last = first_element<V>(pack, T, D) + (T - 1) * D;
    Adjoint<S> adjoint[V] = {};
    Pack<T_, V> grads[DEPTH], fires[DEPTH], slopes_u[DEPTH], slopes_ut[DEPTH];
    auto fetch = [&](int k, i64 back) {
        const i64 at = last - back * D;
        grads[k] = load_streaming<T_, V>(grad_out + at);
        fires[k] = load_streaming<T_, V>(spikes + at);
        slopes_u[k] = load_streaming<T_, V>(delta_u + at);
        slopes_ut[k] = load_streaming<T_, V>(delta_ut + at);
    };
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
        if (k < T) fetch(k, k);
    for (i64 b0 = 0; b0 < T; b0 += DEPTH) {
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const i64 back = b0 + k;
            if (back >= T) break;
            Pack<T_, V> out_w, out_t;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                Adjoint<S>& a = adjoint[v];
                if (widen(fires[k].v[v]) != S(0))
                    at_spike(a, widen(grads[k].v[v]), widen(slopes_u[k].v[v]), widen(slopes_ut[k].v[v]));
                step_back(a, c);
                out_w.v[v] = Narrow<T_>::of(grad_w_of(a, c));
                out_t.v[v] = Narrow<T_>::of(grad_t_of(a));
            }
            if (back + DEPTH < T) fetch(k, back + DEPTH);
            store_streaming<T_, V>(grad_w + last - back * D, out_w);
            store_streaming<T_, V>(grad_t + last - back * D, out_t);
        }
    }
}

// ---------------------------------------------------------------------------------------------- compact state
// bits:    [B, ceil(T/8), D] bytes; bit t % 8 of byte t / 8 is the spike of step t.
// slopes:  pairs (delta_u, delta_ut) at spikes only, ordered by warp, then step, then neuron of the pack, then
//          lane: a warp reads and writes neighbouring pairs in one go and needs one offset.
// offsets: [warps + 1] first pair of each warp.
// Forward writes each warp's pairs into its own worst-case part of a workspace and counts them; `gather` then
// copies them into an exact-size tensor, which is all that is kept.

struct WarpSlots {
    i64 next;   // first free pair (forward), or one past the last unread one (backward)
    u32 below;  // lanes below this one
};

__device__ __forceinline__ WarpSlots warp_slots(i64 start) {
    const WarpSlots slots = {start, (1u << (threadIdx.x & 31)) - 1u};
    return slots;
}

__device__ __forceinline__ i64 warp_index() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// Where steps come from: simulated from the current, or read from a dense state (to pack one).
template <typename T_, int V> struct Simulated {
    typedef typename StateOf<T_>::type S;
    const T_* x;
    Membrane<S> state[V];
    Pack<T_, V> now;
    __device__ __forceinline__ void load(i64 at) { now = load_streaming<T_, V>(x + at); }
    __device__ __forceinline__ bool step(int v, const Constants<S>& c, Pack<T_, 2>& pair) {
        const Step<S> step = advance(state[v], widen(now.v[v]), c);
        pair.v[0] = Narrow<T_>::of(step.delta_u);
        pair.v[1] = Narrow<T_>::of(step.delta_ut);
        return step.fired;
    }
};

template <typename T_, int V> struct Recorded {
    typedef typename StateOf<T_>::type S;
    const T_ *spikes, *delta_u, *delta_ut;
    Pack<T_, V> fired, u, ut;
    __device__ __forceinline__ void load(i64 at) {
        fired = load_streaming<T_, V>(spikes + at);
        u = load_streaming<T_, V>(delta_u + at);
        ut = load_streaming<T_, V>(delta_ut + at);
    }
    __device__ __forceinline__ bool step(int v, const Constants<S>&, Pack<T_, 2>& pair) {
        pair.v[0] = u.v[v];
        pair.v[1] = ut.v[v];
        return widen(fired.v[v]) != S(0);
    }
};

template <typename T_, int V, typename Source>
__device__ __forceinline__ void compact_state(
    Source& source, T_* __restrict__ spikes, u8* __restrict__ bits, T_* __restrict__ workspace,
    i64* __restrict__ counts, i64 packs, i64 T, i64 D, const Constants<typename StateOf<T_>::type>& c) {
    typedef typename StateOf<T_>::type S;
    const i64 pack = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool active = pack < packs;  // idle lanes of the last warp still take part in the ballots
    const i64 first = active ? first_element<V>(pack, T, D) : 0;
    const i64 sample = active ? pack / (D / V) : 0;
    const i64 first_bit = sample * ((T + 7) / 8) * D + (first - sample * T * D);
    const i64 start = warp_index() * (32 * V * T);
    WarpSlots slots = warp_slots(start);
    Pack<u8, V> byte = {};
    for (i64 t = 0; t < T; ++t) {
        Pack<T_, V> out;
        if (active) source.load(first + t * D);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            Pack<T_, 2> pair;
            const bool fired = active && source.step(v, c, pair);
            const u32 ballot = __ballot_sync(0xffffffffu, fired);
            if (fired) {
                const i64 slot = slots.next + __popc(ballot & slots.below);
                *reinterpret_cast<Pack<T_, 2>*>(workspace + 2 * slot) = pair;
                byte.v[v] = (u8)(byte.v[v] | (1u << (t & 7)));
            }
            slots.next += __popc(ballot);
            out.v[v] = Narrow<T_>::of(fired ? S(1) : S(0));
        }
        if (active && spikes) store_streaming<T_, V>(spikes + first + t * D, out);
        if ((t & 7) == 7 || t == T - 1) {
            if (active) *reinterpret_cast<Pack<u8, V>*>(bits + first_bit + (t >> 3) * D) = byte;
            byte = Pack<u8, V>{};
        }
    }
    if ((threadIdx.x & 31) == 0 && active) counts[warp_index()] = slots.next - start;
}

template <typename T_, int V>
__device__ __forceinline__ void compact_backward(
    const T_* __restrict__ grad_out, const u8* __restrict__ bits, const T_* __restrict__ slopes,
    const i64* __restrict__ offsets, T_* __restrict__ grad_w, T_* __restrict__ grad_t,
    i64 packs, i64 T, i64 D, const Constants<typename StateOf<T_>::type>& c) {
    typedef typename StateOf<T_>::type S;
    const i64 pack = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool active = pack < packs;
    if (warp_index() * 32 >= packs) return;  // whole warps only
    const i64 first = active ? first_element<V>(pack, T, D) : 0;
    const i64 sample = active ? pack / (D / V) : 0;
    const i64 first_bit = sample * ((T + 7) / 8) * D + (first - sample * T * D);
    WarpSlots slots = warp_slots(offsets[warp_index() + 1]);
    Adjoint<S> adjoint[V] = {};
    Pack<u8, V> byte = {};
    for (i64 t = T - 1; t >= 0; --t) {
        if (active && ((t & 7) == 7 || t == T - 1))
            byte = *reinterpret_cast<const Pack<u8, V>*>(bits + first_bit + (t >> 3) * D);
        u32 any = 0;
#pragma unroll
        for (int v = 0; v < V; ++v) any |= byte.v[v];
        Pack<T_, V> grad = {}, out_w, out_t;
        // The gradient is read only where the pack has a spike: the others cannot use it.
        if ((any >> (t & 7)) & 1u) grad = load_streaming<T_, V>(grad_out + first + t * D);
#pragma unroll
        for (int v = V - 1; v >= 0; --v) {
            const bool fired = (byte.v[v] >> (t & 7)) & 1u;
            const u32 ballot = __ballot_sync(0xffffffffu, fired);
            slots.next -= __popc(ballot);
            Adjoint<S>& a = adjoint[v];
            if (fired) {
                const i64 slot = slots.next + __popc(ballot & slots.below);
                const Pack<T_, 2> pair = *reinterpret_cast<const Pack<T_, 2>*>(slopes + 2 * slot);
                at_spike(a, widen(grad.v[v]), widen(pair.v[0]), widen(pair.v[1]));
            }
            step_back(a, c);
            out_w.v[v] = Narrow<T_>::of(grad_w_of(a, c));
            out_t.v[v] = Narrow<T_>::of(grad_t_of(a));
        }
        if (active) {
            store_streaming<T_, V>(grad_w + first + t * D, out_w);
            store_streaming<T_, V>(grad_t + first + t * D, out_t);
        }
    }
}

// One warp copies the pairs of one warp's workspace to their final place.
template <typename T_>
__device__ __forceinline__ void gather_pairs(
    const T_* __restrict__ workspace, const i64* __restrict__ offsets, T_* __restrict__ slopes, i64 warps, i64 capacity) {
    const i64 warp = warp_index();
    if (warp >= warps) return;
    const i64 begin = offsets[warp], count = offsets[warp + 1] - begin;
    for (i64 k = threadIdx.x & 31; k < count; k += 32)
        *reinterpret_cast<Pack<T_, 2>*>(slopes + 2 * (begin + k)) =
            *reinterpret_cast<const Pack<T_, 2>*>(workspace + 2 * (warp * capacity + k));
}

#define SRM_ARGUMENTS(S) i64 packs, i64 T, i64 D, S e_m, S e_s, S e_g, S gain, S v_th
#define SRM_CONSTANTS(S) const Constants<S> c = {e_m, e_s, e_g, gain, v_th}

#define DENSE(NAME, T_, S, V, DEPTH, DEPTH_BACK)                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_forward(                                                 \
        const T_* x, T_* spikes, T_* delta_u, T_* delta_ut, SRM_ARGUMENTS(S)) {                                       \
        SRM_CONSTANTS(S);                                                                                             \
        dense_forward<T_, V, DEPTH>(x, spikes, delta_u, delta_ut, packs, T, D, c);                                    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_backward(                                                \
        const T_* grad_out, const T_* spikes, const T_* delta_u, const T_* delta_ut, T_* grad_w, T_* grad_t,          \
        SRM_ARGUMENTS(S)) {                                                                                           \
        SRM_CONSTANTS(S);                                                                                             \
        dense_backward<T_, V, DEPTH_BACK>(grad_out, spikes, delta_u, delta_ut, grad_w, grad_t, packs, T, D, c);       \
    }

#define COMPACT(NAME, T_, S, V)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_forward(                                                 \
        const T_* x, T_* spikes, u8* bits, T_* workspace, i64* counts, SRM_ARGUMENTS(S)) {                            \
        SRM_CONSTANTS(S);                                                                                             \
        Simulated<T_, V> source = {};                                                                                 \
        source.x = x;                                                                                                 \
        compact_state<T_, V>(source, spikes, bits, workspace, counts, packs, T, D, c);                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_pack(                                                    \
        const T_* spikes, const T_* delta_u, const T_* delta_ut, u8* bits, T_* workspace, i64* counts,                \
        SRM_ARGUMENTS(S)) {                                                                                           \
        SRM_CONSTANTS(S);                                                                                             \
        Recorded<T_, V> source = {};                                                                                  \
        source.spikes = spikes;                                                                                       \
        source.delta_u = delta_u;                                                                                     \
        source.delta_ut = delta_ut;                                                                                   \
        compact_state<T_, V>(source, (T_*)0, bits, workspace, counts, packs, T, D, c);                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME##_backward(                                                \
        const T_* grad_out, const u8* bits, const T_* slopes, const i64* offsets, T_* grad_w, T_* grad_t,             \
        SRM_ARGUMENTS(S)) {                                                                                           \
        SRM_CONSTANTS(S);                                                                                             \
        compact_backward<T_, V>(grad_out, bits, slopes, offsets, grad_w, grad_t, packs, T, D, c);                     \
    }

#define ALL_OF(SUFFIX, T_, S, WIDE, DEPTH_BACK)                                                                                 \
    DENSE(srm_raw_##SUFFIX, T_, S, 1, 1, 1)                                                                           \
    DENSE(srm_scalar_##SUFFIX, T_, S, 1, 4, 4)                                                                        \
    DENSE(srm_vector_##SUFFIX, T_, S, WIDE, 2, DEPTH_BACK)                                                            \
    COMPACT(srm_compact_scalar_##SUFFIX, T_, S, 1)                                                                    \
    COMPACT(srm_compact_vector_##SUFFIX, T_, S, WIDE)                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) srm_gather_##SUFFIX(                                            \
        const T_* workspace, const i64* offsets, T_* slopes, i64 warps, i64 capacity) {                               \
        gather_pairs<T_>(workspace, offsets, slopes, warps, capacity);                                                \
    }

ALL_OF(float32, float, float, 4, 2)
ALL_OF(float64, double, double, 2, 2)
// Eight neurons' four inputs fill the registers: prefetching another step would spill.
ALL_OF(float16, f16, float, 8, 1)
ALL_OF(bfloat16, bf16, float, 8, 1)

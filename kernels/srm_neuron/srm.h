// The SRM neuron's arithmetic for one vector of neurons and one step, shared by the dense and the compact kernels so
// that their results are equal bit for bit; and how tensors are addressed. Formulas: operators.md, section 1.
#pragma once

#include <algorithm>
#include <type_traits>

#include "_caches.h"
#include "_parallel.h"
#include "_vectors.h"

#define SPIKEMARK_EXPORT extern "C" __attribute__((visibility("default")))

// Loops are written once, with their body as a lambda: it must become part of the loop.
#define SPIKEMARK_INLINE inline __attribute__((always_inline))
#define SPIKEMARK_INLINE_LAMBDA __attribute__((always_inline))

namespace srm {

using spikemark::Mask;
using spikemark::Vector;

constexpr int kTile = 4096;                // most neurons of a tile: 8 KiB of float32 a step, two pages in a row
constexpr int kStepsAtOnce = 2;            // steps that a walk over a tile takes in one go (see srm.cpp)
constexpr int64_t kSerialSteps = 1 << 16;  // fewer neuron-steps than this (50 us) are not worth waking threads for

// SrmParams in the precision of the state; filled by Python in this order.
struct Params { double e_m, e_s, e_g, gain, v_th; };

enum Dtype : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kFloat64 = 3 };

// A [B, T, *S] tensor. The features *S are merged into as few axes as their strides allow; strides count elements.
// `layout` is {stride of B, stride of T, axes, size of each axis..., stride of each axis...}.
struct View {
    const void* data;
    const int64_t* layout;
    int64_t batch_stride() const { return layout[0]; }
    int64_t time_stride() const { return layout[1]; }
    bool dense_features() const { return layout[2] == 0 || (layout[2] == 1 && layout[4] == 1); }
    // Elements from the start of a step to neuron `index` of its features (in row-major order). 64 bits throughout.
    int64_t offset(int64_t index) const {
        const int64_t axes = layout[2];
        const int64_t *sizes = layout + 3, *strides = sizes + axes;
        int64_t at = 0;
        for (int64_t axis = axes; axis-- > 0;) {
            at += index % sizes[axis] * strides[axis];
            index /= sizes[axis];
        }
        return at;
    }
};

// The rows of one tile of a View: `neurons` neurons from `first` on, of one sample. Rows that are not contiguous are
// gathered into a buffer, by offsets found once a tile. As many rows as there are `Slots` can be had at a time.
template <typename S, int Tile = kTile, int Slots = 1> class Rows {
public:
    Rows(const View& view, int64_t sample, int64_t first, int neurons)
        : view_(view), neurons_(neurons), dense_(view.dense_features()) {
        base_ = static_cast<const S*>(view.data) + sample * view.batch_stride();
        if (dense_) base_ += first;
        else for (int i = 0; i < neurons; ++i) offsets_[i] = view.offset(first + i);
    }
    // The row of step t; valid until the next call for the same slot.
    const S* row(int64_t t, int slot = 0) {
        const S* at = base_ + t * view_.time_stride();
        if (dense_) return at;
        for (int i = 0; i < neurons_; ++i) gathered_[slot][i] = at[offsets_[i]];
        return gathered_[slot];
    }
    // Asks for element i of the row `steps` steps after `at`, which is a row of a tensor that is read in place, ahead of
    // its use: into the first cache, or the Second. Near the ends that may be memory of others: nothing is read.
    template <bool Second> void fetch_ahead(const S* at, int64_t i, int64_t steps) const {
        const auto bytes = (i + steps * (dense_ ? view_.time_stride() : 0)) * static_cast<int64_t>(sizeof(S));
        const auto where = reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(bytes);
        __builtin_prefetch(reinterpret_cast<const void*>(where), 0, Second ? 2 : 3);
    }
private:
    const View& view_;
    const S* base_;
    int neurons_;
    bool dense_;
    int64_t offsets_[Tile];
    S gathered_[Slots][Tile];
};

template <typename A> struct Constants {
    Vector<A> e_m, e_s, e_g, gain, v_th;
    explicit Constants(const Params& p)
        : e_m(spikemark::splat<A>(static_cast<A>(p.e_m))), e_s(spikemark::splat<A>(static_cast<A>(p.e_s))),
          e_g(spikemark::splat<A>(static_cast<A>(p.e_g))), gain(spikemark::splat<A>(static_cast<A>(p.gain))),
          v_th(spikemark::splat<A>(static_cast<A>(p.v_th))) {}
};

// State between steps. The last potential is not kept: it is gain * (m - s), and 0 after a spike, like m and s.
template <typename A> struct Membrane { Vector<A> m, s, g; };

// `fired` as lanes and as bits.
template <typename A> struct Rise { Vector<A> delta_u, delta_ut; Mask<A> fired; uint32_t bits; };

template <typename A> inline Rise<A> step(Membrane<A>& state, Vector<A> x, const Constants<A>& k) {
    const Vector<A> u_last = k.gain * (state.m - state.s), zero = {};
    const Vector<A> m = (state.m + x) * k.e_m, s = (state.s + x) * k.e_s, g = (state.g + x) * k.e_g;
    const Vector<A> u = k.gain * (m - s);
    const Mask<A> fired = u > k.v_th;  // strict, and false for NaN
    state.m = fired ? zero : m;
    state.s = fired ? zero : s;
    state.g = fired ? zero : g;
    return {u - u_last, g, fired, spikemark::greater_bits<A>(u, k.v_th)};
}

// What the next spike (walking back in time) hands to earlier steps: its two scales, and the three exponentials as
// running products. They are kept apart so that an infinite gradient gives what the formula gives.
template <typename A> struct Next { Vector<A> scale_w, scale_t, m, s, g; };

template <typename A> inline Vector<A> weight_scale(Vector<A> delta_u) {
    return spikemark::clamp<A>(A(-1) / delta_u, A(-4), A(0));
}
template <typename A> inline Vector<A> time_scale(Vector<A> delta_ut) {
    return spikemark::clamp<A>(A(-1) / delta_ut, A(-123456789), A(0));
}

// One step back; scales are those of this step's spike, used where `fired`.
template <typename A>
inline void step_back(Next<A>& next, Mask<A> fired, Vector<A> scale_w, Vector<A> scale_t, Vector<A> grad,
                      const Constants<A>& k, Vector<A>& grad_w, Vector<A>& grad_t) {
    next.scale_w = fired ? scale_w * grad : next.scale_w;
    next.scale_t = fired ? scale_t * grad : next.scale_t;
    next.m = fired ? k.e_m : next.m * k.e_m;
    next.s = fired ? k.e_s : next.s * k.e_s;
    next.g = fired ? k.e_g : next.g * k.e_g;
    grad_w = next.scale_w * (k.gain * (next.m - next.s));
    grad_t = next.scale_t * -next.g;
}

// Calls body(neuron, vector, lanes, whole) for each vector of a row of `neurons`; `whole` is a constant, false for the
// last vector if neurons are left that do not fill one.
template <typename A, typename Body> SPIKEMARK_INLINE void for_vectors(int neurons, const Body& body) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    const int64_t whole = neurons / lanes;
    for (int64_t v = 0; v < whole; ++v) body(v * lanes, v, lanes, std::true_type{});
    if (neurons % lanes) body(whole * lanes, whole, neurons % lanes, std::false_type{});
}

// load and store of a whole vector or of the first n lanes.
template <typename A, bool Whole, typename S> inline Vector<A> get(const S* p, int n) {
    if constexpr (Whole) return spikemark::load(p);
    else return spikemark::load_part<A>(p, n);
}
template <bool Stream, bool Whole, typename S, typename V> inline void put(S* p, V v, int n) {
    if constexpr (Whole) spikemark::store<Stream>(p, v);
    else spikemark::store_part(p, v, n);
}

// Rows of spikes as bits: [B, T, ceil(D/8)] bytes, bit i%8 of byte i/8 being the spike of neuron i. A tile's row is
// worked on in a copy, padded so that a vector's bits can be read past its end.
constexpr int padded_row(int tile) { return tile / 8 + 8; }

// The bits of the vector at neuron i of a padded row, and their being put there (into a row of zeros).
template <typename A> inline uint32_t bits_at(const uint8_t* row, int64_t i) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    uint16_t two;
    std::memcpy(&two, row + i / 8, 2);
    return (two >> (i % 8)) & ((1u << lanes) - 1u);
}
template <typename A> inline void put_bits(uint8_t* row, int64_t i, uint32_t bits) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    if constexpr (lanes == 16) std::memcpy(row + i / 8, &bits, 2);  // little-endian, as these machines are
    else if constexpr (lanes == 8) row[i / 8] = static_cast<uint8_t>(bits);
    else row[i / 8] = static_cast<uint8_t>(row[i / 8] | bits << (i % 8));
}

// The bits of the lanes that fired: of a whole vector, or of the first `part` lanes.
template <bool Whole> inline uint32_t fired_bits(uint32_t bits, int part) {
    return Whole ? bits : bits & ((1u << part) - 1u);
}

// Whether rows that start at multiples of `neurons` elements of a new tensor may be stored past the caches. Outputs that
// fit are left there even where streaming them is faster: whoever reads them next would lose more (measured: 10 to 60 %).
template <typename S, typename A> inline bool streams(int64_t neurons, int64_t output_bytes, int threads) {
    constexpr int64_t bytes = spikemark::Lanes<A>::count * static_cast<int64_t>(sizeof(S));
    return output_bytes > spikemark::cache_bytes(threads) && neurons * static_cast<int64_t>(sizeof(S)) % bytes == 0;
}

// Neurons of a tile: at most `most`, fewer when there would be too few tiles for the threads. No effect on results.
inline int tile_size(int most, int64_t batch, int64_t neurons, int threads) {
    int tile = most;
    while (tile > 64 && batch * ((neurons + tile - 1) / tile) < 4 * static_cast<int64_t>(threads)) tile /= 2;
    return tile;
}

// Calls work(piece, worker, sample, first neuron, neurons) for tiles of `tile` neurons, in parallel.
template <typename Work>
inline void for_tiles(int64_t batch, int64_t steps, int64_t neurons, int tile, int threads, const Work& work) {
    if (batch * steps * neurons < kSerialSteps) threads = 1;
    const int64_t tiles = (neurons + tile - 1) / tile;
    spikemark::parallel_for(batch * tiles, threads, [&](int64_t piece, int worker) {
        const int64_t sample = piece / tiles, first = piece % tiles * tile;
        work(piece, worker, sample, first, static_cast<int>(std::min<int64_t>(tile, neurons - first)));
        spikemark::finish_streaming();
    });
}

// Calls f with a null pointer of the storage type and a zero of the state type. Returns false for an unknown dtype.
template <typename F> inline bool dispatch(int dtype, const F& f) {
    switch (dtype) {
        case kFloat32: f(static_cast<float*>(nullptr), 0.0f); return true;
        case kFloat16: f(static_cast<spikemark::Half*>(nullptr), 0.0f); return true;
        case kBfloat16: f(static_cast<spikemark::Bfloat*>(nullptr), 0.0f); return true;
        case kFloat64: f(static_cast<double*>(nullptr), 0.0); return true;
        default: return false;
    }
}

}  // namespace srm

// The SRM neuron, compact: spikes as bits, and both slopes only where a spike is, for backward needs them nowhere else.
//
// Saved by forward (or packed from a dense state):
//   bits   [B, T, ceil(D/8)] bytes (srm.h)
//   tiles  [B * tiles, 2] int64: a tile's first pair in `slopes`, and how many it has
//   slopes [2, capacity]: delta_u and delta_ut of the spikes; within a tile by kStepsAtOnce steps, then by vector of
//          neurons, then by step, then by neuron: in the order in which the walk below meets them
// Tiles (always kTile neurons of one sample) place their pairs in the order they finish: where they lie differs from
// run to run, which pairs a tile has and every result do not.
//
// Rows are asked for steps ahead by instruction: with so few tensors in motion the hardware's own fetching ahead does
// not keep up (measured: 4 to 6 % forward, 0 to 8 % backward; the dense kernels gain nothing from it).
#include <numeric>

#include "srm.h"

namespace srm {
namespace {

constexpr int kSample = 512;  // neurons of a piece that is looked at to guess how many spikes there will be
constexpr int kRowBytes = padded_row(kTile);

// For every pattern of spikes among 8 (4) lanes, as bytes: which lane goes to place j, and which place lane j is from.
struct Orders {
    uint64_t squeeze[256], spread[256];
    constexpr Orders() : squeeze(), spread() {
        for (int bits = 0; bits < 256; ++bits) {
            uint64_t place = 0;
            for (uint64_t lane = 0; lane < 8; ++lane) {
                spread[bits] |= place << (8 * lane);
                if (bits >> lane & 1) squeeze[bits] |= lane << (8 * place++);
            }
        }
    }
};
[[maybe_unused]] constexpr Orders kOrders;

#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m256i order8(uint64_t order) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(order))); }
// Pairs of 32-bit lanes for the four lanes of doubles: lane l is 2l and 2l + 1.
inline __m256i order4(uint64_t order) {
    const __m256i lane = _mm256_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<long long>(order)));
    const __m256i twice = _mm256_slli_epi64(lane, 1);
    return _mm256_or_si256(twice, _mm256_slli_epi64(_mm256_add_epi64(twice, _mm256_set1_epi64x(1)), 32));
}
#endif

// Writes the lanes of v whose bit is set side by side at `out`, and after them anything: a whole vector must fit.
// The upper half of a wide vector is stored only if it is needed, which it seldom is: stores that overlap, and cross the
// borders of lines, are what this costs (measured: a forward pass takes a tenth less at every rate).
template <typename A> inline void squeeze(A* out, Vector<A> v, uint32_t bits) {
#if defined(__AVX512F__)
    if constexpr (sizeof(A) == 4) {
        const __m512 all = _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), reinterpret_cast<__m512>(v));
        _mm256_storeu_ps(out, _mm512_castps512_ps256(all));
        if (__builtin_expect(__builtin_popcount(bits) > 8, 0)) {
            const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(all), 1);
            _mm256_storeu_pd(reinterpret_cast<double*>(out + 8), upper);
        }
    } else {
        const __m512d all = _mm512_maskz_compress_pd(static_cast<__mmask8>(bits), reinterpret_cast<__m512d>(v));
        _mm256_storeu_pd(out, _mm512_castpd512_pd256(all));
        if (__builtin_expect(__builtin_popcount(bits) > 4, 0)) _mm256_storeu_pd(out + 4, _mm512_extractf64x4_pd(all, 1));
    }
#elif defined(__AVX2__)
    const __m256i order = sizeof(A) == 4 ? order8(kOrders.squeeze[bits]) : order4(kOrders.squeeze[bits] & 0xffffffffu);
    _mm256_storeu_ps(reinterpret_cast<float*>(out), _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(v), order));
#else
    for (int lane = 0, place = 0; lane < spikemark::Lanes<A>::count; ++lane) {
        out[place] = v[lane];
        place += bits >> lane & 1u;
    }
#endif
}

// The inverse: lanes whose bit is set get the values at `in` in order, the others anything. Reads a whole vector.
template <typename A> inline Vector<A> spread(const A* in, uint32_t bits) {
#if defined(__AVX512F__)
    const Vector<A> v = spikemark::load(in);
    if constexpr (sizeof(A) == 4) {
        return reinterpret_cast<Vector<A>>(
            _mm512_maskz_expand_ps(static_cast<__mmask16>(bits), reinterpret_cast<__m512>(v)));
    } else {
        return reinterpret_cast<Vector<A>>(
            _mm512_maskz_expand_pd(static_cast<__mmask8>(bits), reinterpret_cast<__m512d>(v)));
    }
#elif defined(__AVX2__)
    const __m256i order = sizeof(A) == 4 ? order8(kOrders.spread[bits]) : order4(kOrders.spread[bits] & 0xffffffffu);
    const __m256 v = reinterpret_cast<__m256>(spikemark::load(in));
    return reinterpret_cast<Vector<A>>(_mm256_permutevar8x32_ps(v, order));
#else
    Vector<A> v = {};
    for (int lane = 0, place = 0; lane < spikemark::Lanes<A>::count; ++lane) {
        v[lane] = in[place];
        place += bits >> lane & 1u;
    }
    return v;
#endif
}

struct Saved {
    uint8_t* bits;
    int64_t* tiles;
    void* slopes;
    int64_t capacity;
};

// A thread's scratch: slopes (or scales) of one tile as state, `room` of each. Handed in by the caller, as one block.
template <typename A> struct Scratch {
    A *w, *t;
    Scratch(void* block, int64_t room, int worker) : w(static_cast<A*>(block) + 2 * room * worker), t(w + room) {}
};
inline int64_t scratch_room(int64_t steps) { return steps * kTile + 16; }  // one vector more than can be filled

// Copies a finished tile's pairs to the next free place. Returns false, having written nothing, when they do not fit.
template <typename S, typename A>
bool place(const Saved saved, int64_t piece, const Scratch<A> scratch, int64_t count, std::atomic<int64_t>& used) {
    int64_t at = used.load(std::memory_order_relaxed);
    do {
        if (at + count > saved.capacity) {
            saved.tiles[2 * piece] = -1;
            saved.tiles[2 * piece + 1] = count;
            return false;
        }
    } while (!used.compare_exchange_weak(at, at + count, std::memory_order_relaxed));
    saved.tiles[2 * piece] = at;
    saved.tiles[2 * piece + 1] = count;
    S* out_w = static_cast<S*>(saved.slopes) + at;
    S* out_t = out_w + saved.capacity;
    for (int64_t from = 0; from < count; from += kTile) {
        const int some = static_cast<int>(std::min<int64_t>(kTile, count - from));
        for_vectors<A>(some, [&](int64_t i, int64_t, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            put<false, Whole>(out_w + from + i, spikemark::load(scratch.w + from + i), part);
            put<false, Whole>(out_t + from + i, spikemark::load(scratch.t + from + i), part);
        });
    }
    return true;
}

// Walks a tile through its steps; rise(own, t, slot, i, part, whole) gives the step t of the vector at neuron i, `own`
// being that vector's entry of `state`. Writes the bits, gathers the pairs in scratch, and returns how many there are.
// Inlined, and with `rise` by value: what is reached through a pointer must be read again after every store.
template <typename A, typename State, typename Step>
SPIKEMARK_INLINE int64_t encode_tile(const Saved saved, int64_t sample, int64_t first, int n, int64_t steps,
                                     int64_t neurons, const Scratch<A> scratch, State* state, Step rise) {
    const int64_t row_bytes = (neurons + 7) / 8;
    int64_t count = 0;
    const auto walk = [&](auto number, int64_t t) SPIKEMARK_INLINE_LAMBDA {
        constexpr int Steps = decltype(number)::value;
        uint8_t row[Steps][kRowBytes] = {};
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) SPIKEMARK_INLINE_LAMBDA {
            State own = state[v];
            for (int j = 0; j < Steps; ++j) {
                const Rise<A> now = rise(own, t + j, j, i, part, whole);
                const uint32_t bits = fired_bits<decltype(whole)::value>(now.bits, part);
                put_bits<A>(row[j], i, bits);
                squeeze<A>(scratch.w + count, now.delta_u, bits);
                squeeze<A>(scratch.t + count, now.delta_ut, bits);
                count += __builtin_popcount(bits);
            }
            state[v] = own;
        });
        for (int j = 0; j < Steps; ++j)
            std::memcpy(saved.bits + (sample * steps + t + j) * row_bytes + first / 8, row[j], (n + 7) / 8);
    };
    int64_t t = 0;
    for (; t + kStepsAtOnce <= steps; t += kStepsAtOnce) walk(std::integral_constant<int, kStepsAtOnce>{}, t);
    for (; t < steps; ++t) walk(std::integral_constant<int, 1>{}, t);
    return count;
}

template <typename S, typename A>
int64_t count_spikes(const View& current, int64_t sample, int64_t first, int n, int64_t steps, const Constants<A> k) {
    Rows<S> rows(current, sample, first, n);
    Membrane<A> state[kSample / spikemark::Lanes<A>::count] = {};
    int64_t count = 0;
    for (int64_t t = 0; t < steps; ++t) {
        const S* x = rows.row(t);
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) SPIKEMARK_INLINE_LAMBDA {
            rows.template fetch_ahead<false>(x, i, 4);
            const Rise<A> rise = step(state[v], get<A, decltype(whole)::value>(x + i, part), k);
            count += __builtin_popcount(rise.bits);
        });
    }
    return count;
}

template <bool Stream, typename S, typename A>
int64_t forward_tile(const View& current, int64_t sample, int64_t first, int n, int64_t steps, int64_t neurons,
                     const Constants<A> k, S* spikes, const Saved saved, const Scratch<A> scratch) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    Rows<S, kTile, kStepsAtOnce> rows(current, sample, first, n);
    Membrane<A> state[kTile / lanes] = {};
    const Vector<A> one = spikemark::splat<A>(1), zero = {};
    const S* x[kStepsAtOnce] = {};
    const auto rise_of = [&](Membrane<A>& own, int64_t t, int slot, int64_t i, int part,
                             auto whole) SPIKEMARK_INLINE_LAMBDA {
        constexpr bool Whole = decltype(whole)::value;
        if (i == 0) x[slot] = rows.row(t, slot);
        rows.template fetch_ahead<false>(x[slot], i, kStepsAtOnce);
        const Rise<A> rise = step(own, get<A, Whole>(x[slot] + i, part), k);
        put<Stream, Whole>(spikes + (sample * steps + t) * neurons + first + i, rise.fired ? one : zero, part);
        return rise;
    };
    return encode_tile<A>(saved, sample, first, n, steps, neurons, scratch, state, rise_of);
}

template <bool Stream, typename S, typename A>
void backward_tile(const View& grad_out, int64_t piece, int64_t sample, int64_t first, int n, int64_t steps,
                   int64_t neurons, const Constants<A> k, const Saved saved, const Scratch<A> scratch, S* grad_w,
                   S* grad_t) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    const int64_t row_bytes = (neurons + 7) / 8;
    int64_t left = saved.tiles[2 * piece + 1];
    const S* slopes_w = static_cast<const S*>(saved.slopes) + saved.tiles[2 * piece];
    const S* slopes_t = slopes_w + saved.capacity;
    for (int64_t from = 0; from < left; from += kTile) {
        const int some = static_cast<int>(std::min<int64_t>(kTile, left - from));
        for_vectors<A>(some, [&](int64_t i, int64_t, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            const Vector<A> w = weight_scale<A>(get<A, Whole>(slopes_w + from + i, part));
            const Vector<A> s = time_scale<A>(get<A, Whole>(slopes_t + from + i, part));
            spikemark::store<false>(scratch.w + from + i, w);
            spikemark::store<false>(scratch.t + from + i, s);
        });
    }
    Rows<S, kTile, kStepsAtOnce> rows(grad_out, sample, first, n);
    Next<A> next[kTile / lanes] = {};
    const auto walk = [&](auto number, int64_t t) SPIKEMARK_INLINE_LAMBDA {  // t + Steps - 1, ..., t
        constexpr int Steps = decltype(number)::value;
        uint8_t row[Steps][kRowBytes] = {};
        const S* grad[Steps];
        for (int j = 0; j < Steps; ++j) {
            std::memcpy(row[j], saved.bits + (sample * steps + t + j) * row_bytes + first / 8, (n + 7) / 8);
            for (int i = 0; i < kTile / 8; i += 8) {
                uint64_t eight;
                std::memcpy(&eight, row[j] + i, 8);
                left -= __builtin_popcountll(eight);
            }
            grad[j] = rows.row(t + j, j);
        }
        const int64_t at = (sample * steps + t) * neurons + first;
        int64_t from = left;
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) SPIKEMARK_INLINE_LAMBDA {
            constexpr bool Whole = decltype(whole)::value;
            uint32_t bits[Steps];
            int64_t begin[Steps];
            for (int j = 0; j < Steps; ++j) {
                bits[j] = bits_at<A>(row[j], i);
                begin[j] = from;
                from += __builtin_popcount(bits[j]);
            }
            Next<A> own = next[v];
            for (int j = Steps; j-- > 0;) {
                const Vector<A> scale_w = spread<A>(scratch.w + begin[j], bits[j]);
                const Vector<A> scale_t = spread<A>(scratch.t + begin[j], bits[j]);
                Vector<A> w, s;
                rows.template fetch_ahead<true>(grad[j], i, -kStepsAtOnce);
                step_back(own, spikemark::lane_mask<A>(bits[j]), scale_w, scale_t, get<A, Whole>(grad[j] + i, part), k, w, s);
                put<Stream, Whole>(grad_w + at + j * neurons + i, w, part);
                put<Stream, Whole>(grad_t + at + j * neurons + i, s, part);
            }
            next[v] = own;
        });
    };
    int64_t t = steps;
    for (; t % kStepsAtOnce; --t) walk(std::integral_constant<int, 1>{}, t - 1);
    for (; t > 0; t -= kStepsAtOnce) walk(std::integral_constant<int, kStepsAtOnce>{}, t - kStepsAtOnce);
}

template <typename Run> void maybe_streaming(bool stream, const Run& run) {
    if (stream) run(std::true_type{});
    else run(std::false_type{});
}

}  // namespace
}  // namespace srm

// Bytes of scratch that the calls below need for `threads` threads.
SPIKEMARK_EXPORT int64_t srm_compact_scratch(int dtype, int64_t steps, int threads) {
    return 2 * srm::scratch_room(steps) * threads * (dtype == srm::kFloat64 ? 8 : 4);
}

// Neurons of a vector, on which the order of the pairs within a tile depends.
SPIKEMARK_EXPORT int srm_compact_lanes(int dtype) {
    return dtype == srm::kFloat64 ? spikemark::Lanes<double>::count : spikemark::Lanes<float>::count;
}

SPIKEMARK_EXPORT int64_t srm_compact_tiles(int64_t batch, int64_t neurons) {
    return batch * ((neurons + srm::kTile - 1) / srm::kTile);
}

// Counts spikes in a sample of the neurons, one piece of kSample in `every`, or more often so that there are `fewest`
// pieces: seen[0] spikes in seen[1] neuron-steps. Writes nothing else.
SPIKEMARK_EXPORT int srm_compact_count(int dtype, const srm::Params* params, const void* current,
                                       const int64_t* layout, int64_t batch, int64_t steps, int64_t neurons,
                                       int threads, int64_t every, int64_t fewest, int64_t* seen) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{current, layout};
        const srm::Constants<A> k(*params);
        const int64_t tiles = (neurons + srm::kSample - 1) / srm::kSample, all = batch * tiles;
        // A distance without a divisor in common with a sample's pieces: or the same places would be looked at in each.
        int64_t apart = std::max<int64_t>(1, std::min(every, all / fewest));
        while (std::gcd(apart, tiles) != 1) --apart;
        const int64_t pieces = (all + apart - 1) / apart;
        std::atomic<int64_t> spikes{0}, looked{0};
        spikemark::parallel_for(pieces, threads, [&](int64_t nth) {
            const int64_t piece = nth * apart, first = piece % tiles * srm::kSample;
            const int n = static_cast<int>(std::min<int64_t>(srm::kSample, neurons - first));
            const int64_t count = srm::count_spikes<S, A>(view, piece / tiles, first, n, steps, k);
            spikes.fetch_add(count);
            looked.fetch_add(steps * n);
        });
        seen[0] = spikes.load();
        seen[1] = looked.load();
    });
}

// Forward into new `spikes` and a compact state. used[0]: pairs placed so far (in and out); used[1]: pairs that did
// not fit (out). Tiles without room have tiles[2*i] = -1; with `missing` set only those are done (again).
SPIKEMARK_EXPORT int srm_compact_forward(int dtype, const srm::Params* params, const void* current,
                                         const int64_t* layout, int64_t batch, int64_t steps, int64_t neurons,
                                         int threads, void* spikes, uint8_t* bits, int64_t* tiles, void* slopes,
                                         int64_t capacity, void* scratch, int64_t* used, int missing) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{current, layout};
        const srm::Constants<A> k(*params);
        const srm::Saved saved{bits, tiles, slopes, capacity};
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        if (!missing) spikemark::advise_huge_pages(spikes, bytes);
        std::atomic<int64_t> placed{used[0]}, without{0};
        srm::maybe_streaming(srm::streams<S, A>(neurons, bytes, threads), [&](auto stream) {
            srm::for_tiles(batch, steps, neurons, srm::kTile, threads, [&](int64_t piece, int worker, int64_t sample,
                                                                           int64_t first, int n) {
                if (missing && tiles[2 * piece] >= 0) return;
                const srm::Scratch<A> own(scratch, srm::scratch_room(steps), worker);
                const int64_t count = srm::forward_tile<decltype(stream)::value>(
                    view, sample, first, n, steps, neurons, k, static_cast<S*>(spikes), saved, own);
                if (!srm::place<S>(saved, piece, own, count, placed)) without.fetch_add(count);
            });
        });
        used[0] = placed.load();
        used[1] = without.load();
    });
}

// The compact state of a dense one; `slopes` must have room for every spike. Returns 2 if it has not.
SPIKEMARK_EXPORT int srm_compact_pack(int dtype, int64_t batch, int64_t steps, int64_t neurons, int threads,
                                      const void* spikes, const void* delta_u, const void* delta_ut, uint8_t* bits,
                                      int64_t* tiles, void* slopes, int64_t capacity, void* scratch) {
    std::atomic<int64_t> placed{0};
    std::atomic<bool> full{false};
    const bool known = srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::Saved saved{bits, tiles, slopes, capacity};
        srm::for_tiles(batch, steps, neurons, srm::kTile, threads, [&](int64_t piece, int worker, int64_t sample,
                                                                       int64_t first, int n) {
            const srm::Scratch<A> own(scratch, srm::scratch_room(steps), worker);
            struct Nothing {} nothing[srm::kTile / spikemark::Lanes<A>::count];
            const auto read = [=](Nothing&, int64_t t, int, int64_t i, int part, auto whole) SPIKEMARK_INLINE_LAMBDA {
                constexpr bool Whole = decltype(whole)::value;
                const int64_t at = (sample * steps + t) * neurons + first + i;
                const spikemark::Vector<A> zero = {};
                const auto fired = srm::get<A, Whole>(static_cast<const S*>(spikes) + at, part) != zero;
                return srm::Rise<A>{srm::get<A, Whole>(static_cast<const S*>(delta_u) + at, part),
                                    srm::get<A, Whole>(static_cast<const S*>(delta_ut) + at, part), fired,
                                    spikemark::lane_bits<A>(fired)};
            };
            const int64_t count = srm::encode_tile<A>(saved, sample, first, n, steps, neurons, own, nothing, read);
            if (!srm::place<S>(saved, piece, own, count, placed)) full.store(true);
        });
    });
    return !known ? 1 : full.load() ? 2 : 0;
}

SPIKEMARK_EXPORT int srm_compact_backward(int dtype, const srm::Params* params, const void* grad_out,
                                          const int64_t* layout, int64_t batch, int64_t steps, int64_t neurons,
                                          int threads, uint8_t* bits, int64_t* tiles, void* slopes, int64_t capacity,
                                          void* scratch, void* grad_w, void* grad_t) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{grad_out, layout};
        const srm::Constants<A> k(*params);
        const srm::Saved saved{bits, tiles, slopes, capacity};
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        for (void* out : {grad_w, grad_t}) spikemark::advise_huge_pages(out, bytes);
        srm::maybe_streaming(srm::streams<S, A>(neurons, 2 * bytes, threads), [&](auto stream) {
            srm::for_tiles(batch, steps, neurons, srm::kTile, threads, [&](int64_t piece, int worker, int64_t sample,
                                                                           int64_t first, int n) {
                const srm::Scratch<A> own(scratch, srm::scratch_room(steps), worker);
                srm::backward_tile<decltype(stream)::value>(view, piece, sample, first, n, steps, neurons, k, saved,
                                                            own, static_cast<S*>(grad_w), static_cast<S*>(grad_t));
            });
        });
    });
}

// The SRM neuron, dense: forward writes spikes and both slopes of every step, backward reads them again.
//
// A tile is up to kTile neighbouring neurons of one sample, walked through all its steps: its state stays in the first
// caches, and each step is one contiguous run of memory, long enough for the hardware to fetch ahead (steps lie
// D elements apart; shorter runs, and fetching ahead by instruction, were measured and are slower). Tiles are
// independent, so threads change no bit.
#include "srm.h"

namespace srm {
namespace {

template <bool Stream, typename S, typename A>
void forward_tile(const View& current, int64_t sample, int64_t first, int n, int64_t steps, int64_t neurons,
                  const Constants<A> k, S* spikes, S* delta_u, S* delta_ut) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    Rows<S> rows(current, sample, first, n);
    Membrane<A> state[kTile / lanes] = {};
    const Vector<A> one = spikemark::splat<A>(1), zero = {};
    for (int64_t t = 0; t < steps; ++t) {
        const S* x = rows.row(t);
        const int64_t at = (sample * steps + t) * neurons + first;
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            const Rise<A> rise = step(state[v], get<A, Whole>(x + i, part), k);
            put<Stream, Whole>(spikes + at + i, rise.fired ? one : zero, part);
            put<Stream, Whole>(delta_u + at + i, rise.delta_u, part);
            put<Stream, Whole>(delta_ut + at + i, rise.delta_ut, part);
        });
    }
}

template <bool Stream, typename S, typename A>
void backward_tile(const View& grad_out, int64_t sample, int64_t first, int n, int64_t steps, int64_t neurons,
                   const Constants<A> k, const S* spikes, const S* delta_u, const S* delta_ut, S* grad_w, S* grad_t) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    Rows<S> rows(grad_out, sample, first, n);
    Next<A> next[kTile / lanes] = {};
    const Vector<A> zero = {};
    for (int64_t t = steps; t-- > 0;) {
        const S* grad = rows.row(t);
        const int64_t at = (sample * steps + t) * neurons + first;
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            const Mask<A> fired = get<A, Whole>(spikes + at + i, part) != zero;
            const Vector<A> scale_w = weight_scale<A>(get<A, Whole>(delta_u + at + i, part));
            const Vector<A> scale_t = time_scale<A>(get<A, Whole>(delta_ut + at + i, part));
            Vector<A> w, s;
            step_back(next[v], fired, scale_w, scale_t, get<A, Whole>(grad + i, part), k, w, s);
            put<Stream, Whole>(grad_w + at + i, w, part);
            put<Stream, Whole>(grad_t + at + i, s, part);
        });
    }
}

}  // namespace
}  // namespace srm

// Both: tensors [batch, steps, neurons] of `dtype` (srm::Dtype); the first by data and layout (srm::View), the others
// contiguous. Outputs are new and overwritten whole. Returns 0, or 1 for an unknown dtype.
SPIKEMARK_EXPORT int srm_forward(int dtype, const srm::Params* params, const void* current, const int64_t* layout,
                                 int64_t batch, int64_t steps, int64_t neurons, int threads, void* spikes,
                                 void* delta_u, void* delta_ut) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{current, layout};
        const srm::Constants<A> k(*params);
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        for (void* out : {spikes, delta_u, delta_ut}) spikemark::advise_huge_pages(out, bytes);
        auto run = [&](auto stream) {
            const int tile = srm::tile_size(batch, neurons, threads);
            const auto each = [&](int64_t, int, int64_t sample, int64_t first, int n) {
                srm::forward_tile<decltype(stream)::value>(view, sample, first, n, steps, neurons, k,
                                                           static_cast<S*>(spikes), static_cast<S*>(delta_u),
                                                           static_cast<S*>(delta_ut));
            };
            srm::for_tiles(batch, steps, neurons, tile, threads, each);
        };
        if (srm::streams<S, A>(neurons, 3 * bytes)) run(std::true_type{});
        else run(std::false_type{});
    });
}

SPIKEMARK_EXPORT int srm_backward(int dtype, const srm::Params* params, const void* grad_out, const int64_t* layout,
                                  int64_t batch, int64_t steps, int64_t neurons, int threads, const void* spikes,
                                  const void* delta_u, const void* delta_ut, void* grad_w, void* grad_t) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{grad_out, layout};
        const srm::Constants<A> k(*params);
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        for (void* out : {grad_w, grad_t}) spikemark::advise_huge_pages(out, bytes);
        auto run = [&](auto stream) {
            const int tile = srm::tile_size(batch, neurons, threads);
            const auto each = [&](int64_t, int, int64_t sample, int64_t first, int n) {
                srm::backward_tile<decltype(stream)::value>(
                    view, sample, first, n, steps, neurons, k, static_cast<const S*>(spikes),
                    static_cast<const S*>(delta_u), static_cast<const S*>(delta_ut), static_cast<S*>(grad_w),
                    static_cast<S*>(grad_t));
            };
            srm::for_tiles(batch, steps, neurons, tile, threads, each);
        };
        if (srm::streams<S, A>(neurons, 2 * bytes)) run(std::true_type{});
        else run(std::false_type{});
    });
}

// The index arithmetic alone, for tests: elements from the start of `layout`'s tensor to [sample, t, index].
SPIKEMARK_EXPORT int64_t srm_offset(const int64_t* layout, int64_t sample, int64_t t, int64_t index) {
    const srm::View view{nullptr, layout};
    return sample * view.batch_stride() + t * view.time_stride() + view.offset(index);
}

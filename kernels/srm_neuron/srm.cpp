// The SRM neuron, dense: forward writes spikes and both slopes of every step, and the spikes once more as bits; backward
// reads the slopes again, and the bits in place of the spikes: five tensors through memory instead of six.
//
// A tile is up to kDenseTile neighbouring neurons of one sample, walked through all its steps: its state stays in the
// first two caches, and each step is one contiguous run of memory, long enough for the hardware to fetch ahead (steps
// lie D elements apart). Two steps are taken at once: state is then loaded and stored half as often. Large outputs are
// stored past the caches: otherwise every line is read before it is overwritten, and both halves take a third longer.
// Forward then takes as long as a bare loop that reads one tensor and writes three. Measured without gain: smaller and
// larger tiles, three and four steps, fetching ahead by instruction, leaving out the slopes of vectors without a spike
// (the hardware fetches them anyway). Tiles are independent, so threads change no bit.
#include "srm.h"

namespace srm {
namespace {

constexpr int kDenseTile = 4096;

template <bool Stream, typename S, typename A>
void forward_tile(const View& current, int64_t sample, int64_t first, int n, int64_t steps, int64_t neurons,
                  const Constants<A> k, S* spikes, S* delta_u, S* delta_ut, uint8_t* bits) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    Rows<S, kDenseTile, kStepsAtOnce> rows(current, sample, first, n);
    Membrane<A> state[kDenseTile / lanes] = {};
    const Vector<A> one = spikemark::splat<A>(1), zero = {};
    const int64_t row_bytes = (neurons + 7) / 8;
    const auto walk = [&](auto count, int64_t t) {
        constexpr int Steps = decltype(count)::value;
        uint8_t row[Steps][padded_row(kDenseTile)] = {};
        const S* x[Steps];
        for (int j = 0; j < Steps; ++j) x[j] = rows.row(t + j, j);
        const int64_t at = (sample * steps + t) * neurons + first;
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            Membrane<A> own = state[v];
            for (int j = 0; j < Steps; ++j) {
                const Rise<A> rise = step(own, get<A, Whole>(x[j] + i, part), k);
                const int64_t here = at + j * neurons + i;
                put_bits<A>(row[j], i, fired_bits<Whole>(rise.bits, part));
                put<Stream, Whole>(spikes + here, rise.fired ? one : zero, part);
                put<Stream, Whole>(delta_u + here, rise.delta_u, part);
                put<Stream, Whole>(delta_ut + here, rise.delta_ut, part);
            }
            state[v] = own;
        });
        for (int j = 0; j < Steps; ++j)
            std::memcpy(bits + (sample * steps + t + j) * row_bytes + first / 8, row[j], (n + 7) / 8);
    };
    int64_t t = 0;
    for (; t + kStepsAtOnce <= steps; t += kStepsAtOnce) walk(std::integral_constant<int, kStepsAtOnce>{}, t);
    for (; t < steps; ++t) walk(std::integral_constant<int, 1>{}, t);
}

template <bool Stream, typename S, typename A>
void backward_tile(const View& grad_out, int64_t sample, int64_t first, int n, int64_t steps, int64_t neurons,
                   const Constants<A> k, const uint8_t* bits, const S* delta_u, const S* delta_ut, S* grad_w,
                   S* grad_t) {
    constexpr int lanes = spikemark::Lanes<A>::count;
    Rows<S, kDenseTile, kStepsAtOnce> rows(grad_out, sample, first, n);
    Next<A> next[kDenseTile / lanes] = {};
    const int64_t row_bytes = (neurons + 7) / 8;
    const auto walk = [&](auto count, int64_t t) {  // t, t - 1, ...
        constexpr int Steps = decltype(count)::value;
        uint8_t row[Steps][padded_row(kDenseTile)] = {};
        const S* grad[Steps];
        for (int j = 0; j < Steps; ++j) {
            std::memcpy(row[j], bits + (sample * steps + t - j) * row_bytes + first / 8, (n + 7) / 8);
            grad[j] = rows.row(t - j, j);
        }
        const int64_t at = (sample * steps + t) * neurons + first;
        for_vectors<A>(n, [&](int64_t i, int64_t v, int part, auto whole) {
            constexpr bool Whole = decltype(whole)::value;
            Next<A> own = next[v];
            for (int j = 0; j < Steps; ++j) {
                const int64_t here = at - j * neurons + i;
                const Mask<A> fired = spikemark::lane_mask<A>(bits_at<A>(row[j], i));
                const Vector<A> scale_w = weight_scale<A>(get<A, Whole>(delta_u + here, part));
                const Vector<A> scale_t = time_scale<A>(get<A, Whole>(delta_ut + here, part));
                Vector<A> w, s;
                step_back(own, fired, scale_w, scale_t, get<A, Whole>(grad[j] + i, part), k, w, s);
                put<Stream, Whole>(grad_w + here, w, part);
                put<Stream, Whole>(grad_t + here, s, part);
            }
            next[v] = own;
        });
    };
    int64_t t = steps - 1;
    for (; t >= kStepsAtOnce - 1; t -= kStepsAtOnce) walk(std::integral_constant<int, kStepsAtOnce>{}, t);
    for (; t >= 0; --t) walk(std::integral_constant<int, 1>{}, t);
}

}  // namespace
}  // namespace srm

// Both: tensors [batch, steps, neurons] of `dtype` (srm::Dtype); the first by data and layout (srm::View), the others
// contiguous; and rows of spikes as bits (srm.h). Outputs are new and overwritten whole. Returns 0, or 1 for an unknown
// dtype.
SPIKEMARK_EXPORT int srm_forward(int dtype, const srm::Params* params, const void* current, const int64_t* layout,
                                 int64_t batch, int64_t steps, int64_t neurons, int threads, void* spikes,
                                 void* delta_u, void* delta_ut, uint8_t* bits) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{current, layout};
        const srm::Constants<A> k(*params);
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        for (void* out : {spikes, delta_u, delta_ut}) spikemark::advise_huge_pages(out, bytes);
        auto run = [&](auto stream) {
            const int tile = srm::tile_size(srm::kDenseTile, batch, neurons, threads);
            const auto each = [&](int64_t, int, int64_t sample, int64_t first, int n) {
                srm::forward_tile<decltype(stream)::value>(view, sample, first, n, steps, neurons, k,
                                                           static_cast<S*>(spikes), static_cast<S*>(delta_u),
                                                           static_cast<S*>(delta_ut), bits);
            };
            srm::for_tiles(batch, steps, neurons, tile, threads, each);
        };
        if (srm::streams<S, A>(neurons, 3 * bytes, threads)) run(std::true_type{});
        else run(std::false_type{});
    });
}

SPIKEMARK_EXPORT int srm_backward(int dtype, const srm::Params* params, const void* grad_out, const int64_t* layout,
                                  int64_t batch, int64_t steps, int64_t neurons, int threads, const uint8_t* bits,
                                  const void* delta_u, const void* delta_ut, void* grad_w, void* grad_t) {
    return !srm::dispatch(dtype, [&](auto* storage, auto state) {
        using S = std::remove_pointer_t<decltype(storage)>;
        using A = decltype(state);
        const srm::View view{grad_out, layout};
        const srm::Constants<A> k(*params);
        const int64_t bytes = batch * steps * neurons * static_cast<int64_t>(sizeof(S));
        for (void* out : {grad_w, grad_t}) spikemark::advise_huge_pages(out, bytes);
        auto run = [&](auto stream) {
            const int tile = srm::tile_size(srm::kDenseTile, batch, neurons, threads);
            const auto each = [&](int64_t, int, int64_t sample, int64_t first, int n) {
                srm::backward_tile<decltype(stream)::value>(
                    view, sample, first, n, steps, neurons, k, bits, static_cast<const S*>(delta_u),
                    static_cast<const S*>(delta_ut), static_cast<S*>(grad_w), static_cast<S*>(grad_t));
            };
            srm::for_tiles(batch, steps, neurons, tile, threads, each);
        };
        if (srm::streams<S, A>(neurons, 2 * bytes, threads)) run(std::true_type{});
        else run(std::false_type{});
    });
}

// The index arithmetic alone, for tests: elements from the start of `layout`'s tensor to [sample, t, index].
SPIKEMARK_EXPORT int64_t srm_offset(const int64_t* layout, int64_t sample, int64_t t, int64_t index) {
    const srm::View view{nullptr, layout};
    return sample * view.batch_stride() + t * view.time_stride() + view.offset(index);
}

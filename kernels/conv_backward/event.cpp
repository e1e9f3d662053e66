// Event-driven convolution backward: work only where the input is not 0. Plain C interface, for ctypes.
//
// A call has two steps. `scan` reads the input once and leaves one bit an element, a count a plane, and whether a plane
// holds only 0 and 1. Then one of the halves lays out a stage of the gradient (event_plan.h), makes lists of spikes
// from the bits, and works through them. Pieces of work and the order of every sum depend on the shapes alone, so
// results are the same bit for bit on any number of threads. All memory that grows with the problem is the caller's.
#include <atomic>
#include <memory>
#include <type_traits>

#include "_parallel.h"
#include "event_kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace spikemark {
namespace {

struct Spikes {  // what scan leaves, [N * C] planes
    uint64_t* bits;
    int32_t* counts;
    uint8_t* binary;
};

template <typename T>
struct Strided {  // [N, C, H, W] with any strides, in elements
    const T* data;
    const int64_t* stride;
    int64_t offset(int64_t n, int64_t c, int64_t i, int64_t columns) const {
        return n * stride[0] + c * stride[1] + i / columns * stride[2] + i % columns * stride[3];
    }
    T at(int64_t n, int64_t c, int64_t i, int64_t columns) const { return data[offset(n, c, i, columns)]; }
    const T* plane(int64_t n, int64_t c) const { return data + n * stride[0] + c * stride[1]; }
    // Elements of a plane are `stride[3]` apart, rows included.
    bool flat(int64_t columns) const { return stride[2] == columns * stride[3]; }
};

template <typename T>
void scan(const int64_t* p, Strided<T> in, Spikes out, int threads) {
    const int64_t size = p[H] * p[W], words = (size + 63) / 64;
    const bool dense = in.flat(p[W]) && in.stride[3] == 1;
    const int64_t step = std::max<int64_t>(1, 16384 / size);  // planes of a piece: some microseconds of work
    const int64_t planes = p[N] * p[C];
    parallel_for((planes + step - 1) / step, threads, [&](int64_t piece) {
        for (int64_t at = piece * step; at < std::min(planes, (piece + 1) * step); ++at) {
            const int64_t n = at / p[C], c = at % p[C];
            const T* plane = in.plane(n, c);
            bool binary = true;
            int64_t count = 0;
            for (int64_t word = 0; word < words; ++word) {
                const int64_t first = word * 64, here = std::min<int64_t>(64, size - first);
                T values[64];
                if (!dense)
                    for (int64_t i = 0; i < here; ++i) values[i] = in.at(n, c, first + i, p[W]);
                const uint64_t mask = mask_of(dense ? plane + first : values, here, binary);
                out.bits[at * words + word] = mask;
                count += __builtin_popcountll(mask);
            }
            out.counts[at] = static_cast<int32_t>(count);
            out.binary[at] = binary;
        }
    });
}

// --- memory -----------------------------------------------------------------------------------------------------

// Hands out pieces of the caller's workspace, each on its own cache lines; with no base it only adds up their sizes.
class Arena {
public:
    explicit Arena(char* base) : base_(base ? base + (64 - reinterpret_cast<uintptr_t>(base) % 64) % 64 : nullptr) {}
    template <typename T>
    T* take(int64_t count) {
        char* at = base_ + used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return base_ ? reinterpret_cast<T*>(at) : nullptr;
    }
    int64_t bytes() const { return used_ + 64; }

private:
    char* base_;
    int64_t used_ = 0;
};

template <typename T>
struct List {  // spikes: cell within the slice, element of the input from the slice's first on, value, sum of products
    int32_t* cell;
    int64_t* element;
    T* value;
    T* sum;
};

int64_t channels_of_piece(const Plan& plan) { return std::min(plan.in_group, kChannels); }

// Most spikes that any (slice of frames, `step` channels of a group) holds.
int64_t most_spikes(const Plan& plan, const int32_t* counts, int64_t step) {
    int64_t most = 0;
    for (int64_t first = 0; first < plan.p[N]; first += plan.slice)
        for (int64_t group = 0; group < plan.p[GROUPS]; ++group)
            for (int64_t low = 0; low < plan.in_group; low += step) {
                int64_t sum = 0;
                for (int64_t n = first; n < std::min(plan.p[N], first + plan.slice); ++n)
                    for (int64_t c = low; c < std::min(plan.in_group, low + step); ++c)
                        sum += counts[n * plan.p[C] + group * plan.in_group + c];
                most = std::max(most, sum);
            }
    return most;
}

// Most spikes of a stage of frames.
int64_t most_of_stage(const Plan& plan, const int32_t* counts) {
    int64_t most = 0;
    for (int64_t first = 0; first < plan.p[N]; first += plan.stage) {
        int64_t sum = 0;
        for (int64_t at = first * plan.p[C]; at < std::min(plan.p[N], first + plan.stage) * plan.p[C]; ++at)
            sum += counts[at];
        most = std::max(most, sum);
    }
    return most;
}

template <typename T>
struct InputMemory {
    T *grad, *weight;
    std::vector<List<T>> lists;  // one a thread
    InputMemory(const Plan& plan, const int32_t* counts, int threads, Arena& arena) {
        grad = arena.take<T>(plan.stage * plan.blocks * plan.cells * plan.width);
        weight = arena.take<T>(plan.blocks * plan.in_group * plan.taps * plan.width);
        const int64_t most = most_spikes(plan, counts, channels_of_piece(plan));
        for (int i = 0; i < threads; ++i)
            lists.push_back(
                {arena.take<int32_t>(most), arena.take<int64_t>(most), arena.take<T>(most), arena.take<T>(most)});
    }
};

template <typename T>
struct WeightMemory {
    T *grad, *weight;
    List<T> list;    // of a whole stage: cells and values
    int64_t* start;  // [slices of a stage, C, classes] + 1: where a list begins
    WeightMemory(const Plan& plan, const int32_t* counts, Arena& arena) {
        grad = arena.take<T>(plan.stage * plan.blocks * plan.cells * plan.width);
        weight = arena.take<T>(plan.blocks * plan.in_group * plan.taps * plan.width);
        const int64_t most = most_of_stage(plan, counts);
        list = {arena.take<int32_t>(most), nullptr, arena.take<T>(most), nullptr};
        start = arena.take<int64_t>((plan.stage + plan.slice - 1) / plan.slice * plan.p[C] * plan.classes() + 1);
    }
};

// --- layout and lists ---------------------------------------------------------------------------------------------

// Tables of a call, and what every piece of work of it reads.
template <typename T>
struct Call {
    const Plan& plan;
    Strided<T> grad, in;
    Spikes spikes;
    int threads;
    std::vector<int32_t> in_cell, in_class, out_cell, margin;
    std::vector<std::vector<Tap>> taps;

    Call(const Plan& plan, Strided<T> grad, Strided<T> in, Spikes spikes, int threads)
        : plan(plan), grad(grad), in(in), spikes(spikes), threads(threads), taps(plan.tap_lists()) {
        plan.locate_inputs(in_cell, in_class);
        plan.locate_outputs(out_cell, margin);
    }

    // [block, frame of the stage, cell, lane] of frames [first, first + count): one block of one frame.
    void lay_out(int64_t first, int64_t frame, int64_t block, T* stage) const {
        const int64_t group = block / plan.blocks_group, within = block % plan.blocks_group * plan.width;
        const int64_t lanes = std::min(plan.width, plan.out_group - within);
        const T* src = grad.plane(first + frame, group * plan.out_group + within);
        T* dst = stage + (block * plan.stage + frame) * plan.cells * plan.width;
        for (int32_t cell : margin) std::memset(dst + cell * plan.width, 0, plan.width * sizeof(T));
        const int64_t columns = plan.p[WO], rows = plan.p[HO];
        if (grad.flat(columns)) {
            interleave(src, grad.stride[1], grad.stride[3], rows * columns, lanes, plan.width, dst,
                       [&](int64_t i) -> int64_t { return out_cell[i]; });
            return;
        }
        for (int64_t row = 0; row < rows; ++row)
            interleave(src + row * grad.stride[2], grad.stride[1], grad.stride[3], columns, lanes, plan.width, dst,
                       [&](int64_t i) -> int64_t { return out_cell[row * columns + i]; });
    }

    // Appends the spikes of channel `c` in frames [first, last) to `list` from `at` on, class by class, frame by frame.
    // ends[k] becomes the end of class k. With one class the spikes are in order already.
    void collect(int64_t c, int64_t first, int64_t last, int64_t at, List<T> list, int64_t* ends) const {
        const int64_t classes = plan.classes(), columns = plan.p[W];
        std::fill(ends, ends + classes, 0);
        if (classes > 1) {
            for (int64_t n = first; n < last; ++n)
                for_each_spike(spikes.bits + (n * plan.p[C] + c) * plan.words, plan.words,
                               [&](int64_t i) { ++ends[in_class[i]]; });
            int64_t sum = at;
            for (int64_t k = 0; k < classes; ++k) sum += ends[k], ends[k] = sum - ends[k];
        } else {
            ends[0] = at;
        }
        for (int64_t n = first; n < last; ++n) {
            const int64_t plane = n * plan.p[C] + c, shift = (n - first) * plan.cells;
            const int64_t before = ((n - first) * plan.p[C] + c) * plan.plane();
            const bool binary = spikes.binary[plane];
            for_each_spike(spikes.bits + plane * plan.words, plan.words, [&](int64_t i) {
                const int64_t to = ends[classes > 1 ? in_class[i] : 0]++;
                list.cell[to] = static_cast<int32_t>(in_cell[i] + shift);
                list.value[to] = binary ? T(1) : in.at(n, c, i, columns);
                if (list.element) list.element[to] = before + i;
            });
        }
    }
};

// Calls f(std::integral_constant<int, vectors>) for the plan's block width.
template <typename F>
void for_width(const Plan& plan, const F& f) {
    if (plan.vectors == 4) f(std::integral_constant<int, 4>());
    else if (plan.vectors == 2) f(std::integral_constant<int, 2>());
    else f(std::integral_constant<int, 1>());
}

// --- the halves ---------------------------------------------------------------------------------------------------

template <typename T, int VECTORS>
void input_piece(const Call<T>& call, const InputMemory<T>& memory, List<T> list, int64_t first, int64_t slice,
                 int64_t group, int64_t low, double scale, T* out) {
    const Plan& plan = call.plan;
    const int64_t begin = first + slice * plan.slice;
    const int64_t end = std::min({begin + plan.slice, first + plan.stage, plan.p[N]});
    const int64_t high = std::min(low + channels_of_piece(plan), plan.in_group), classes = plan.classes();
    std::vector<int64_t> ends((high - low) * classes);
    int64_t count = 0;
    for (int64_t c = low; c < high; ++c) {
        call.collect(group * plan.in_group + c, begin, end, count, list, &ends[(c - low) * classes]);
        for (int64_t n = begin; n < end; ++n) count += call.spikes.counts[n * plan.p[C] + group * plan.in_group + c];
    }
    std::fill(list.sum, list.sum + count, T(0));
    for (int64_t b = 0; b < plan.blocks_group; ++b) {
        const int64_t block = group * plan.blocks_group + b;
        const T* grad = memory.grad + (block * plan.stage + slice * plan.slice) * plan.cells * plan.width;
        int64_t from = 0;
        for (int64_t c = low; c < high; ++c) {
            const T* weight = memory.weight + (block * plan.in_group + c) * plan.taps * plan.width;
            for (int64_t k = 0; k < classes; ++k) {
                const int64_t to = ends[(c - low) * classes + k];
                dots<T, VECTORS>(weight, grad, call.taps[k], list.cell + from, to - from, list.sum + from);
                from = to;
            }
        }
    }
    T* base = out + begin * plan.p[C] * plan.plane();
    for (int64_t n = 0; n < end - begin; ++n)
        std::memset(base + (n * plan.p[C] + group * plan.in_group + low) * plan.plane(), 0,
                    (high - low) * plan.plane() * sizeof(T));
    for (int64_t e = 0; e < count; ++e) base[list.element[e]] = list.sum[e] * list.value[e] * static_cast<T>(scale);
}

template <typename T>
void input_half(const Call<T>& call, const T* weight, double scale, T* out, Arena& arena) {
    const Plan& plan = call.plan;
    const InputMemory<T> memory(plan, call.spikes.counts, call.threads, arena);
    const int64_t row = plan.in_group * plan.taps;
    parallel_for(plan.blocks, call.threads, [&](int64_t block) {
        const int64_t within = block % plan.blocks_group * plan.width;
        const T* src = weight + (block / plan.blocks_group * plan.out_group + within) * row;
        interleave(src, row, 1, row, std::min(plan.width, plan.out_group - within), plan.width,
                   memory.weight + block * row * plan.width, [](int64_t i) { return i; });
    });
    const std::unique_ptr<std::atomic<bool>[]> busy(new std::atomic<bool>[call.threads]());
    const int64_t step = channels_of_piece(plan), steps = (plan.in_group + step - 1) / step;
    for (int64_t first = 0; first < plan.p[N]; first += plan.stage) {
        const int64_t frames = std::min(plan.stage, plan.p[N] - first);
        parallel_for(frames * plan.blocks, call.threads,
                     [&](int64_t i) { call.lay_out(first, i / plan.blocks, i % plan.blocks, memory.grad); });
        const int64_t slices = (frames + plan.slice - 1) / plan.slice, pieces = plan.p[GROUPS] * steps;
        parallel_for(slices * pieces, call.threads, [&](int64_t i) {
            int mine = 0;
            while (busy[mine].exchange(true, std::memory_order_acquire)) mine = (mine + 1) % call.threads;
            for_width(plan, [&](auto vectors) {
                input_piece<T, vectors()>(call, memory, memory.lists[mine], first, i / pieces, i % pieces / steps,
                                          i % steps * step, scale, out);
            });
            busy[mine].store(false, std::memory_order_release);
        });
    }
}

template <typename T>
void weight_half(const Call<T>& call, T* out, Arena& arena) {
    const Plan& plan = call.plan;
    const WeightMemory<T> memory(plan, call.spikes.counts, arena);
    const int64_t classes = plan.classes(), row = plan.in_group * plan.taps, channels = plan.p[C];
    const int64_t tile = std::min(plan.in_group, kTileChannels), tiles = (plan.in_group + tile - 1) / tile;
    // Few tiles leave threads idle: then each takes only every parts-th group of taps.
    const int64_t tap_groups = (plan.taps + taps_at_once(plan.vectors) - 1) / taps_at_once(plan.vectors);
    const int64_t parts = plan.blocks * tiles >= 16 ? 1 : tap_groups;
    std::fill(memory.weight, memory.weight + plan.blocks * row * plan.width, T(0));
    for (int64_t first = 0; first < plan.p[N]; first += plan.stage) {
        const int64_t frames = std::min(plan.stage, plan.p[N] - first);
        const int64_t slices = (frames + plan.slice - 1) / plan.slice;
        int64_t total = 0;
        for (int64_t i = 0; i < slices * channels; ++i) {
            memory.start[i * classes] = total;
            const int64_t begin = first + i / channels * plan.slice;
            for (int64_t n = begin; n < std::min(begin + plan.slice, first + frames); ++n)
                total += call.spikes.counts[n * channels + i % channels];
        }
        memory.start[slices * channels * classes] = total;
        // The layout and the lists do not need each other, so they share one parallel section.
        parallel_for(frames * plan.blocks + slices * channels, call.threads, [&](int64_t i) {
            if (i < frames * plan.blocks) return call.lay_out(first, i / plan.blocks, i % plan.blocks, memory.grad);
            i -= frames * plan.blocks;
            const int64_t begin = first + i / channels * plan.slice, at = memory.start[i * classes];
            std::vector<int64_t> ends(classes);
            call.collect(i % channels, begin, std::min(begin + plan.slice, first + frames), at, memory.list, ends.data());
            // The end of a class is the start of the next; the next channel's start is known already.
            std::copy(ends.begin(), ends.end() - 1, memory.start + i * classes + 1);
        });
        parallel_for(plan.blocks * tiles * parts, call.threads, [&](int64_t i) {
            const int64_t block = i / parts / tiles, low = i / parts % tiles * tile;
            const int64_t group = block / plan.blocks_group;
            for (int64_t slice = 0; slice < slices; ++slice)
                for (int64_t c = low; c < std::min(low + tile, plan.in_group); ++c) {
                    const T* grad = memory.grad + (block * plan.stage + slice * plan.slice) * plan.cells * plan.width;
                    T* sums = memory.weight + (block * plan.in_group + c) * plan.taps * plan.width;
                    for (int64_t k = 0; k < classes; ++k) {
                        const int64_t* start = memory.start + (slice * channels + group * plan.in_group + c) * classes + k;
                        if (start[0] == start[1]) continue;
                        const auto& taps = call.taps[k];
                        const int64_t count = static_cast<int64_t>(taps.size());
                        for_width(plan, [&](auto vectors) {
                            constexpr int STEP = taps_at_once(vectors());
                            for (int64_t t = i % parts * STEP; t < count; t += parts * STEP)
                                gather_taps<T, vectors()>(sums, grad, taps.data() + t, count - t,
                                                          memory.list.cell + start[0], memory.list.value + start[0],
                                                          start[1] - start[0]);
                        });
                    }
                }
        });
    }
    parallel_for(plan.p[O], call.threads, [&](int64_t o) {
        const int64_t group = o / plan.out_group, within = o % plan.out_group;
        const int64_t block = group * plan.blocks_group + within / plan.width;
        const T* src = memory.weight + block * row * plan.width + within % plan.width;
        for (int64_t i = 0; i < row; ++i) out[o * row + i] = src[i * plan.width];
    });
}

template <typename T>
int64_t workspace(const int64_t* problem, const int32_t* counts, bool input, int threads) {
    const Plan plan(problem, sizeof(T));
    if (!plan.fits()) return -1;
    Arena arena(nullptr);
    if (input) InputMemory<T>(plan, counts, threads, arena);
    else WeightMemory<T>(plan, counts, arena);
    return arena.bytes();
}

}  // namespace
}  // namespace spikemark

using namespace spikemark;

// Element (n, c, i) of a tensor with these strides, i counting a plane row by row: what every access computes, for a test.
EXPORT int64_t spikemark_event_offset(const int64_t* strides, int64_t n, int64_t c, int64_t i, int64_t columns) {
    return Strided<char>{nullptr, strides}.offset(n, c, i, columns);
}

// Bytes that a half needs for spikes counted by scan, or -1 when one frame is too large for the lists' indices.
EXPORT int64_t spikemark_event_workspace(const int64_t* problem, const int32_t* counts, int itemsize, int input,
                                         int threads) {
    return itemsize == 4 ? workspace<float>(problem, counts, input, threads)
                         : workspace<double>(problem, counts, input, threads);
}

#define DEFINE(T, SUFFIX)                                                                                              \
    EXPORT void spikemark_event_scan_##SUFFIX(const int64_t* problem, const T* in, const int64_t* in_strides,          \
                                              uint64_t* bits, int32_t* counts, uint8_t* binary, int threads) {         \
        scan<T>(problem, {in, in_strides}, {bits, counts, binary}, threads);                                           \
    }                                                                                                                  \
    EXPORT void spikemark_event_input_##SUFFIX(                                                                        \
        const int64_t* problem, const T* grad, const int64_t* grad_strides, const T* in, const int64_t* in_strides,    \
        uint64_t* bits, int32_t* counts, uint8_t* binary, const T* weight, double scale, T* out, char* memory,         \
        int threads) {                                                                                                 \
        const Plan plan(problem, sizeof(T));                                                                           \
        Arena arena(memory);                                                                                           \
        input_half<T>({plan, {grad, grad_strides}, {in, in_strides}, {bits, counts, binary}, threads}, weight, scale,  \
                      out, arena);                                                                                     \
    }                                                                                                                  \
    EXPORT void spikemark_event_weight_##SUFFIX(                                                                       \
        const int64_t* problem, const T* grad, const int64_t* grad_strides, const T* in, const int64_t* in_strides,    \
        uint64_t* bits, int32_t* counts, uint8_t* binary, T* out, char* memory, int threads) {                         \
        const Plan plan(problem, sizeof(T));                                                                           \
        Arena arena(memory);                                                                                           \
        weight_half<T>({plan, {grad, grad_strides}, {in, in_strides}, {bits, counts, binary}, threads}, out, arena);   \
    }

DEFINE(float, f32)
DEFINE(double, f64)

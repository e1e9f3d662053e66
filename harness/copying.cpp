// The fastest copy a CPU makes of a large buffer: all threads, stores past the caches. The memory roofline's yardstick
// beside torch's own copy, which reads every line it is about to overwrite.
#include <cstring>

#include "_parallel.h"
#include "_vectors.h"

// `bytes`, a multiple of 64, from `source` to `target`, both aligned to 64.
extern "C" __attribute__((visibility("default"))) void streaming_copy(void* target, const void* source, int64_t bytes,
                                                                      int threads) {
    using Vector = spikemark::Vector<float>;
    constexpr int64_t kPiece = int64_t{1} << 20;
    spikemark::parallel_for((bytes + kPiece - 1) / kPiece, threads, [&](int64_t piece) {
        const int64_t begin = piece * kPiece, end = begin + kPiece < bytes ? begin + kPiece : bytes;
        for (int64_t at = begin; at < end; at += static_cast<int64_t>(sizeof(Vector))) {
            const auto* from = reinterpret_cast<const float*>(static_cast<const char*>(source) + at);
            spikemark::stream_bytes(static_cast<char*>(target) + at, spikemark::load(from));
        }
        spikemark::finish_streaming();
    });
}

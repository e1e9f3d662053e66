// Runs independent pieces of work on a given number of threads: the one way native code here goes parallel.
//
// With OpenMP the threads are those of the process's OpenMP runtime. In a process that has imported torch, g++'s
// calls bind to the runtime torch already loaded into the global scope, so torch's threads are reused and nothing is
// oversubscribed. Without OpenMP, threads are made for the call. Which thread runs which piece never changes a result:
// pieces must not depend on the thread count.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace spikemark {

constexpr int kMostThreads = 256;

template <typename Work> inline void call(const Work& work, int64_t piece, int worker) {
    if constexpr (std::is_invocable_v<Work, int64_t, int>) work(piece, worker);
    else work(piece);
}

// Calls work(piece) or work(piece, worker) once for every piece in [0, pieces); at most `threads` threads, the caller
// among them. `worker` is below `threads` and held by one thread at a time: the index of a scratch buffer, say.
template <typename Work>
void parallel_for(int64_t pieces, int threads, const Work& work) {
    if (threads > pieces) threads = static_cast<int>(pieces);
    if (threads > kMostThreads) threads = kMostThreads;
    if (threads <= 1) {
        for (int64_t piece = 0; piece < pieces; ++piece) call(work, piece, 0);
        return;
    }
    // Each thread has its own run of pieces, then helps with the others': neighbours in memory stay with one thread
    // (two that touch the same new huge page first would both clear it), and nobody waits for a thread that was slow.
    struct alignas(64) Run { std::atomic<int64_t> next; int64_t end; };
    Run runs[kMostThreads];
    for (int i = 0; i < threads; ++i) {
        runs[i].next.store(pieces * i / threads, std::memory_order_relaxed);
        runs[i].end = pieces * (i + 1) / threads;
    }
    std::atomic<int> joined{0};
    auto run = [&]() {
        const int own = joined.fetch_add(1);
        for (int i = 0; i < threads; ++i) {
            Run& from = runs[(own + i) % threads];
            for (int64_t piece; (piece = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) {
                call(work, piece, own);
            }
        }
    };
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    run();
#else
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back(run);
    run();
    for (auto& helper : helpers) helper.join();
#endif
}

}  // namespace spikemark

// How many threads a parallel section really gets when `threads` are asked for: tests check that it is honoured.
extern "C" __attribute__((visibility("default"), weak)) int spikemark_threads_used(int threads) {
    std::atomic<int> ran{0};
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    ran.fetch_add(1);
#else
    spikemark::parallel_for(threads, threads, [&](int64_t) { ran.fetch_add(1); });
#endif
    return ran.load();
}

// 1 when parallel_for runs on OpenMP, 0 when it makes its own threads.
extern "C" __attribute__((visibility("default"), weak)) int spikemark_uses_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

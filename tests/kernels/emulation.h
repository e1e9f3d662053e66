// Runs CUDA kernel source on the CPU, for tests: threads of a block are fibers, so barriers, shared memory,
// ballots, shuffles and atomics mean what they mean on a GPU. One block runs after another. A deadlock, or a
// warp operation whose mask names a lane that has left, ends the process with a message.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define SPIKEMARK_EMULATION 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(16) uint4 { unsigned x, y, z, w; };  // as on a GPU: a misaligned access must trap
struct dim3_ { unsigned x, y, z; };
static dim3_ threadIdx, blockIdx, blockDim, gridDim;
static int64_t first_block;  // tests of large offsets start a grid late

namespace emulation {

[[noreturn]] inline void die(const char* why) {
    std::fprintf(stderr, "emulation: %s (block %u, thread %u)\n", why, blockIdx.x, threadIdx.x);
    std::abort();
}

struct Warp {
    unsigned arrived = 0, generation = 0, exited = 0;
    uint64_t value[32], snapshot[32];
};

// A fiber is started by ucontext and switched by setjmp: swapcontext would ask the kernel for signal masks each time.
struct Fiber {
    ucontext_t start;
    jmp_buf here;
    std::vector<char> stack;
    bool started = false, done = false, at_barrier = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    jmp_buf scheduler;
    unsigned current = 0;
    std::function<void()> body;
};
static Block block;

inline void yield() {
    Fiber& self = block.fibers[block.current];
    if (!_setjmp(self.here)) _longjmp(block.scheduler, 1);
}

inline void resume(Fiber& fiber) {
    if (_setjmp(block.scheduler)) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

inline void entry() {
    block.body();
    Fiber& self = block.fibers[block.current];
    self.done = true;
    block.warps[block.current / 32].exited |= 1u << (block.current % 32);
    _longjmp(block.scheduler, 1);
}

// All lanes of `mask` deposit a value; every one then sees all of them.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
    Warp& warp = block.warps[threadIdx.x / 32];
    const unsigned lane = threadIdx.x % 32;
    if (!(mask >> lane & 1)) die("a lane takes part in a warp operation whose mask does not name it");
    warp.value[lane] = value;
    warp.arrived |= 1u << lane;
    const unsigned mine = warp.generation;
    while (warp.generation == mine) {
        if (warp.exited & mask) die("a warp operation waits for a lane that has left");
        if ((warp.arrived & mask) == mask) {
            std::memcpy(warp.snapshot, warp.value, sizeof warp.value);
            warp.arrived &= ~mask;
            ++warp.generation;
        } else {
            yield();
        }
    }
    return warp.snapshot;
}

inline void barrier() {
    Fiber& self = block.fibers[block.current];
    self.at_barrier = true;
    while (self.at_barrier) yield();
}

// `order`: 0 forwards, 1 backwards, 2 odd threads first; a result that depends on it has a race.
inline void run_block(unsigned threads, int order) {
    block.warps.assign((threads + 31) / 32, Warp());
    if (threads % 32) block.warps.back().exited = ~0u << (threads % 32);
    if (block.fibers.size() < threads) block.fibers.resize(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = block.fibers[t];
        fiber.stack.resize(64 << 10);
        fiber.started = fiber.done = fiber.at_barrier = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, entry, 0);
    }
    for (unsigned idle = 0;;) {
        unsigned left = 0, waiting = 0;
        uint64_t before = 0, after = 0;
        for (Warp& w : block.warps) before += w.generation + w.arrived * 1ull;
        for (unsigned i = 0; i < threads; ++i) {
            const unsigned t = order == 0 ? i : order == 1 ? threads - 1 - i : (2 * i + 1) % (threads | 1) % threads;
            Fiber& fiber = block.fibers[t];
            if (fiber.done || fiber.at_barrier) continue;
            block.current = t;
            threadIdx = {t, 0, 0};
            resume(fiber);
        }
        for (unsigned t = 0; t < threads; ++t) {
            left += !block.fibers[t].done;
            waiting += block.fibers[t].at_barrier && !block.fibers[t].done;
        }
        if (left == 0) return;
        if (waiting == left) {
            for (unsigned t = 0; t < threads; ++t) block.fibers[t].at_barrier = false;
            continue;
        }
        for (Warp& w : block.warps) after += w.generation + w.arrived * 1ull;
        idle = before == after ? idle + 1 : 0;
        if (idle > 2 * threads + 2) die("deadlock: threads wait for each other");
    }
}

// What a launch on a GPU would read from the wrong bytes: too few or too many arguments, or one of another size.
template <typename... A> void check_arguments(void (*)(A...), const int64_t* sizes, int64_t count) {
    const int64_t wanted[] = {(int64_t)sizeof(A)...};
    if (count != (int64_t)sizeof...(A)) die("the kernel takes another number of arguments");
    for (int64_t i = 0; i < count; ++i)
        if (sizes[i] != wanted[i]) {
            std::fprintf(stderr, "argument %d has %d bytes, not %d\n", (int)i, (int)sizes[i], (int)wanted[i]);
            die("an argument has another size than the kernel's");
        }
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <typename... A>
void run(void (*kernel)(A...), void** arguments, int64_t from, int64_t blocks, unsigned threads, int order) {
    block.body = [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
    blockDim = {threads, 1, 1};
    gridDim = {(unsigned)(from + blocks), 1, 1};
    for (int64_t b = from; b < from + blocks; ++b) {
        blockIdx = {(unsigned)b, 0, 0};
        run_block(threads, order);
    }
}

}  // namespace emulation

inline void __syncthreads() { emulation::barrier(); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t* all = emulation::exchange(mask, predicate != 0);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= ((mask >> lane & 1) && all[lane] ? 1u : 0u) << lane;
    return ballot;
}
template <typename T> T shuffle_from(unsigned mask, T value, unsigned source) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    const uint64_t* all = emulation::exchange(mask, bits);
    if (!(mask >> source & 1)) emulation::die("a shuffle reads a lane that its mask does not name");
    T out;
    std::memcpy(&out, &all[source], sizeof out);
    return out;
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const unsigned self = threadIdx.x % 32;
    return shuffle_from(mask, value, self / width * width + lane % width);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const unsigned self = threadIdx.x % 32, other = self ^ flip;
    return shuffle_from(mask, value, other / width == self / width ? other : self);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned self = threadIdx.x % 32, other = self + by;
    return shuffle_from(mask, value, other / width == self / width ? other : self);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned self = threadIdx.x % 32;
    return shuffle_from(mask, value, self % width >= by ? self - by : self);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::exchange(mask, 0); }
template <typename T> T atomicAdd(T* at, T value) {
    const T old = *at;
    *at += value;
    return old;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
template <typename T> T __ldcs(const T* from) { return *from; }
template <typename T> T __ldg(const T* from) { return *from; }
template <typename T> void __stcs(T* to, T value) { *to = value; }
inline float f16_to_f32(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
inline unsigned short f32_to_f16(float wide) {
    const _Float16 x = (_Float16)wide;
    unsigned short bits;
    std::memcpy(&bits, &x, 2);
    return bits;
}

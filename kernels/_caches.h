// How large the last caches are: outputs beyond that are stored past them.
//
// Linux says it in sysfs, for each cache which CPUs share it. glibc's sysconf is not asked: on virtual machines with AMD
// processors it was seen to give 320 MiB where there are 32, and nothing was ever stored past the caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

namespace spikemark {

struct LastCaches {
    int64_t all = 0;      // bytes of the last-level caches that this process may use, together
    int64_t largest = 0;  // bytes of the largest of them
};

#if defined(__linux__)
// One line of a file of sysfs, without its end; false if there is none.
inline bool read_line(const char* format, int cpu, int index, char (&line)[256]) {
    char path[96];
    std::snprintf(path, sizeof path, format, cpu, index);
    std::FILE* file = std::fopen(path, "r");
    if (!file) return false;
    const bool read = std::fgets(line, sizeof line, file) != nullptr;
    std::fclose(file);
    line[std::strcspn(line, "\n")] = 0;
    return read && line[0];
}

// The CPUs that this process may use; empty if the system does not say.
inline std::vector<int> usable_cpus() {
    for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {  // too small a set is refused
        cpu_set_t* set = CPU_ALLOC(most);
        if (!set) break;
        const size_t bytes = CPU_ALLOC_SIZE(most);
        CPU_ZERO_S(bytes, set);
        std::vector<int> cpus;
        if (sched_getaffinity(0, bytes, set) == 0)
            for (int cpu = 0; cpu < most; ++cpu)
                if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
        CPU_FREE(set);
        if (!cpus.empty()) return cpus;
    }
    return {};
}

// By sysfs; zeros if it does not say.
inline LastCaches find_last_caches() {
    LastCaches found;
    int last = 0;
    std::vector<uint64_t> counted;  // caches of that level, by a hash of the CPUs that share them
    for (const int cpu : usable_cpus()) {
        for (int index = 0; index < 16; ++index) {
            char line[256];
            int level = 0;
            long long size = 0;
            char unit = ' ';
            if (!read_line("/sys/devices/system/cpu/cpu%d/cache/index%d/level", cpu, index, line)) break;
            if (std::sscanf(line, "%d", &level) != 1 || level < last) continue;
            if (!read_line("/sys/devices/system/cpu/cpu%d/cache/index%d/size", cpu, index, line)) continue;
            if (std::sscanf(line, "%lld%c", &size, &unit) < 1) continue;
            size *= unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : unit == 'G' ? 1 << 30 : 1;
            if (!read_line("/sys/devices/system/cpu/cpu%d/cache/index%d/shared_cpu_list", cpu, index, line)) continue;
            if (level > last) {
                last = level;
                found = {};
                counted.clear();
            }
            uint64_t sharers = 14695981039346656037u;  // FNV-1a
            for (const char* c = line; *c; ++c) sharers = (sharers ^ static_cast<unsigned char>(*c)) * 1099511628211u;
            if (std::find(counted.begin(), counted.end(), sharers) != counted.end()) continue;
            counted.push_back(sharers);
            found.all += size;
            found.largest = std::max<int64_t>(found.largest, size);
        }
    }
    return found;
}
#else
inline LastCaches find_last_caches() { return {}; }
#endif

// What a test put in the place of the machine's caches; 0: nothing.
inline std::atomic<int64_t>& pretended_cache_bytes() {
    static std::atomic<int64_t> bytes{0};
    return bytes;
}

// Bytes beyond which outputs of a call on `threads` threads cannot stay in the last caches; of an unknown machine, little.
inline int64_t cache_bytes(int threads) {
    static const LastCaches found = [] {
        const LastCaches caches = find_last_caches();
        return caches.all > 0 ? caches : LastCaches{int64_t{8} << 20, int64_t{8} << 20};
    }();
    const int64_t pretended = pretended_cache_bytes().load(std::memory_order_relaxed);
    return pretended > 0 ? pretended : std::min(found.all, found.largest * std::max(1, threads));
}

}  // namespace spikemark

// For tests: pretend that the caches hold `pretend` bytes (0: those of the machine), and say what they hold now for so
// many threads. Each library has its own.
extern "C" __attribute__((visibility("default"), weak)) int64_t spikemark_cache_bytes(int64_t pretend, int threads) {
    spikemark::pretended_cache_bytes().store(pretend, std::memory_order_relaxed);
    return spikemark::cache_bytes(threads);
}

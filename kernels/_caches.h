// How large the last caches are: outputs beyond that are stored past them.
//
// Linux says it in sysfs, for each cache which CPUs share it. glibc's sysconf comes second: on virtual machines with AMD
// processors it was seen to give 320 MiB where there are 32, and nothing was ever stored past the caches.
#pragma once

#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <fstream>
#include <sched.h>
#include <set>
#include <string>
#endif
#if defined(__unix__)
#include <unistd.h>
#endif

namespace spikemark {

// The last-level caches of the CPUs that this process may use, together, in bytes; 0 if sysfs does not say.
inline int64_t usable_cache_bytes() {
    int64_t total = 0;
#if defined(__linux__)
    cpu_set_t usable;
    CPU_ZERO(&usable);
    if (sched_getaffinity(0, sizeof usable, &usable) != 0) return 0;
    int last = 0;
    std::set<std::string> counted;  // by the CPUs that share it
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &usable)) continue;
        for (int index = 0;; ++index) {
            const std::string folder =
                "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
            std::ifstream level_file(folder + "level"), size_file(folder + "size"), shared_file(folder + "shared_cpu_list");
            int level = 0;
            int64_t size = 0;
            char unit = ' ';
            std::string shared;
            if (!(level_file >> level) || !(size_file >> size) || !(shared_file >> shared)) break;
            size_file >> unit;
            size *= unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : unit == 'G' ? 1 << 30 : 1;
            if (level > last) {
                last = level;
                total = 0;
                counted.clear();
            }
            if (level == last && counted.insert(shared).second) total += size;
        }
    }
#endif
    return total;
}

inline int64_t find_cache_bytes() {
    int64_t found = usable_cache_bytes();
#if defined(_SC_LEVEL3_CACHE_SIZE)
    if (found <= 0) found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (found <= 0) found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return found > 0 ? found : int64_t{8} << 20;
}

// What a test put in the place of the machine's caches; 0: nothing.
inline std::atomic<int64_t>& pretended_cache_bytes() {
    static std::atomic<int64_t> bytes{0};
    return bytes;
}

// Bytes beyond which a call's outputs cannot stay in the last caches.
inline int64_t cache_bytes() {
    static const int64_t found = find_cache_bytes();
    const int64_t pretended = pretended_cache_bytes().load(std::memory_order_relaxed);
    return pretended > 0 ? pretended : found;
}

}  // namespace spikemark

// For tests: pretend that the caches hold `pretend` bytes (0: those of the machine), and say what they hold now. Each
// library has its own.
extern "C" __attribute__((visibility("default"), weak)) int64_t spikemark_cache_bytes(int64_t pretend) {
    spikemark::pretended_cache_bytes().store(pretend, std::memory_order_relaxed);
    return spikemark::cache_bytes();
}

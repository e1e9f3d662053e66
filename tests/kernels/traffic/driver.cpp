// Calls one native neuron kernel N times on one small case: `driver KERNEL N`. Run under cachegrind by test_traffic.py,
// which subtracts a run from one with a call more, so that what lies around the calls does not count.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "srm.h"

extern "C" {
int srm_forward(int, const srm::Params*, const void*, const int64_t*, int64_t, int64_t, int64_t, int, void*, void*, void*,
                uint8_t*);
int srm_backward(int, const srm::Params*, const void*, const int64_t*, int64_t, int64_t, int64_t, int, const uint8_t*,
                 const void*, const void*, void*, void*);
int64_t srm_compact_scratch(int, int64_t, int);
int64_t srm_compact_tiles(int64_t, int64_t);
int srm_compact_forward(int, const srm::Params*, const void*, const int64_t*, int64_t, int64_t, int64_t, int, void*,
                        uint8_t*, int64_t*, void*, int64_t, void*, int64_t*, int);
int srm_compact_backward(int, const srm::Params*, const void*, const int64_t*, int64_t, int64_t, int64_t, int, uint8_t*,
                         int64_t*, void*, int64_t, void*, void*, void*);
}

int main(int argc, char** argv) {
    if (argc != 6) return 2;
    const std::string kernel = argv[1];
    const int calls = std::atoi(argv[2]);
    const int64_t batch = std::atoll(argv[3]), steps = std::atoll(argv[4]), neurons = std::atoll(argv[5]);
    const int64_t size = batch * steps * neurons, layout[] = {steps * neurons, neurons, 1, neurons, 1};
    const srm::Params params{0.8668779, 0.7788008, 0.7514773, 2.0, 1.0};
    using Floats = std::vector<float>;
    Floats current(size), spikes(size), delta_u(size), delta_ut(size), grad(size, 0.5f), grad_w(size), grad_t(size);
    uint32_t random = 1;  // every tenth neuron-step gets a current that makes it fire
    for (float& x : current) {
        random = random * 1664525u + 1013904223u;
        x = (random >> 16) % 10 == 0 ? 20.0f : 0.0f;
    }
    const int64_t capacity = size, tiles = srm_compact_tiles(batch, neurons);
    std::vector<uint8_t> bits(batch * steps * ((neurons + 7) / 8));
    std::vector<int64_t> placed(2 * tiles);
    Floats slopes(2 * capacity);
    std::vector<char> scratch(srm_compact_scratch(srm::kFloat32, steps, 1));
    const auto compact_forward = [&] {
        int64_t used[2] = {0, 0};
        const int failed = srm_compact_forward(srm::kFloat32, &params, current.data(), layout, batch, steps, neurons, 1,
                                               spikes.data(), bits.data(), placed.data(), slopes.data(), capacity,
                                               scratch.data(), used, 0);
        return failed ? -1 : used[0];
    };
    const int64_t count = compact_forward();
    int failed = srm_forward(srm::kFloat32, &params, current.data(), layout, batch, steps, neurons, 1, spikes.data(),
                             delta_u.data(), delta_ut.data(), bits.data());
    for (int i = 0; i < calls && !failed; ++i) {
        if (kernel == "native forward")
            failed = srm_forward(srm::kFloat32, &params, current.data(), layout, batch, steps, neurons, 1, spikes.data(),
                                 delta_u.data(), delta_ut.data(), bits.data());
        else if (kernel == "native backward")
            failed = srm_backward(srm::kFloat32, &params, grad.data(), layout, batch, steps, neurons, 1, bits.data(),
                                  delta_u.data(), delta_ut.data(), grad_w.data(), grad_t.data());
        else if (kernel == "native_compact forward") failed = compact_forward() != count;
        else if (kernel == "native_compact backward")
            failed = srm_compact_backward(srm::kFloat32, &params, grad.data(), layout, batch, steps, neurons, 1,
                                          bits.data(), placed.data(), slopes.data(), capacity, scratch.data(),
                                          grad_w.data(), grad_t.data());
        else failed = 2;
    }
    std::printf("%.6f\n", static_cast<double>(count) / static_cast<double>(size));
    return failed || count <= 0;
}

// A tensor of up to five axes as rows along its last one, for native code that reads any layout in place.
#pragma once

#include <cstdint>

namespace spikemark {

// Sizes and strides (in elements) of a tensor of exactly five axes; shorter ones have leading axes of size 1.
struct Strided {
    int64_t size[5];
    int64_t stride[5];

    Strided(const int64_t* sizes, const int64_t* strides) {
        for (int i = 0; i < 5; ++i) size[i] = sizes[i], stride[i] = strides[i];
    }

    // Offset of the `index`-th slice over the first `axes` axes, counted in row-major order. 64-bit throughout.
    int64_t offset(int64_t index, int axes) const {
        int64_t at = 0;
        for (int i = axes - 1; i >= 0; --i) {
            at += (index % size[i]) * stride[i];
            index /= size[i];
        }
        return at;
    }
};

}  // namespace spikemark

// Geometry of an event-driven convolution backward: where an input spike meets the gradient.
//
// conv2d links input row y with output row yo through kernel tap k when y + pad = yo * stride + k * dilation. Write
// y + pad = stride * q + r and k * dilation = stride * m + s: they meet exactly when r = s, at yo = q - m. So the
// spikes of one residue r (in both axes: one "class") all have the same taps, at the same distances m from their own
// cell q. Gradients are laid out as frames of cells with a margin of zeros wide enough that every tap of every spike
// falls inside, so that the inner loops know no borders, strides or dilations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace spikemark {

// The order of the int64 array that describes a problem; native_event.py fills it.
enum Field { N, C, H, W, O, HO, WO, KH, KW, SY, SX, PY, PX, DY, DX, GROUPS, FIELDS };

struct Axis {
    int64_t size, out, kernel, stride, pad, dilation;
    int64_t low() const { return pad / stride - (kernel - 1) * dilation / stride; }  // output index of cell 0
    int64_t cells() const { return (size - 1 + pad) / stride - low() + 1; }
    int64_t cell(int64_t at) const { return (at + pad) / stride - low(); }
    int64_t residue(int64_t at) const { return (at + pad) % stride; }
};

struct Tap {
    int64_t index;  // ky * kw + kx
    int64_t back;   // how many cells before the spike's own
};

constexpr int64_t kSliceBytes = 256 << 10;  // gradients that one inner loop walks over: half of a usual L2
constexpr int64_t kStageBytes = 8 << 20;    // gradients laid out at a time: stays in a usual L3
constexpr int64_t kChannels = 64;           // most input channels of one piece of work of the input half
constexpr int64_t kTileChannels = 8;        // input channels of one piece of work of the weight half

// Everything that follows from the shapes. Nothing here depends on the number of threads: results must not either.
struct Plan {
    int64_t p[FIELDS];
    Axis y, x;
    int64_t in_group, out_group;      // channels of one group
    int64_t vectors;                  // 32-byte vectors of a block of output channels: 1, 2 or 4
    int64_t width;                    // output channels of a block
    int64_t blocks_group, blocks;     // blocks of one group, of all
    int64_t cells, taps, words;       // cells of a frame, kernel taps, 64-bit words of a plane's spike mask
    int64_t slice, stage;             // frames of one inner loop, frames laid out at a time

    Plan(const int64_t* problem, int64_t itemsize) {
        std::copy(problem, problem + FIELDS, p);
        y = {p[H], p[HO], p[KH], p[SY], p[PY], p[DY]};
        x = {p[W], p[WO], p[KW], p[SX], p[PX], p[DX]};
        in_group = p[C] / p[GROUPS];
        out_group = p[O] / p[GROUPS];
        choose_width(itemsize);
        blocks_group = (out_group + width - 1) / width;
        blocks = blocks_group * p[GROUPS];
        cells = y.cells() * x.cells();
        taps = p[KH] * p[KW];
        words = (p[H] * p[W] + 63) / 64;
        const int64_t slice_frame = cells * width * itemsize, stage_frame = slice_frame * blocks;
        slice = std::clamp<int64_t>(kSliceBytes / slice_frame, 1, p[N]);
        stage = std::clamp<int64_t>(kStageBytes / stage_frame / slice, 1, (p[N] + slice - 1) / slice) * slice;
        stage = std::min(stage, p[N]);
    }

    bool fits() const { return slice * cells < INT32_MAX && p[H] * p[W] < INT32_MAX && p[HO] * p[WO] < INT32_MAX; }
    int64_t classes() const { return p[SY] * p[SX]; }
    int64_t plane() const { return p[H] * p[W]; }

    // Taps of each class, class by class.
    std::vector<std::vector<Tap>> tap_lists() const {
        std::vector<std::vector<Tap>> lists(classes());
        for (int64_t ky = 0; ky < p[KH]; ++ky)
            for (int64_t kx = 0; kx < p[KW]; ++kx) {
                const int64_t at_y = ky * p[DY], at_x = kx * p[DX];
                const int64_t back = at_y / p[SY] * x.cells() + at_x / p[SX];
                lists[at_y % p[SY] * p[SX] + at_x % p[SX]].push_back({ky * p[KW] + kx, back});
            }
        return lists;
    }

    // Cell and class of every position of an input plane.
    void locate_inputs(std::vector<int32_t>& cell, std::vector<int32_t>& kind) const {
        cell.reserve(plane()), kind.reserve(plane());
        for (int64_t i = 0; i < p[H]; ++i)
            for (int64_t j = 0; j < p[W]; ++j) {
                cell.push_back(static_cast<int32_t>(y.cell(i) * x.cells() + x.cell(j)));
                kind.push_back(static_cast<int32_t>(y.residue(i) * p[SX] + x.residue(j)));
            }
    }

    // Cell of every position of an output plane, -1 for those that no input reaches; and the cells of the margin.
    void locate_outputs(std::vector<int32_t>& cell, std::vector<int32_t>& margin) const {
        std::vector<char> covered(cells, 0);
        cell.reserve(p[HO] * p[WO]);
        for (int64_t i = 0; i < p[HO]; ++i)
            for (int64_t j = 0; j < p[WO]; ++j) {
                const int64_t row = i - y.low(), column = j - x.low();
                const bool inside = row >= 0 && row < y.cells() && column >= 0 && column < x.cells();
                const int64_t at = inside ? row * x.cells() + column : -1;
                cell.push_back(static_cast<int32_t>(at));
                if (inside) covered[at] = 1;
            }
        for (int64_t i = 0; i < cells; ++i)
            if (!covered[i]) margin.push_back(static_cast<int32_t>(i));
    }

private:
    // The block width that wastes least on padding the channels of a group; narrow blocks reuse registers less.
    void choose_width(int64_t itemsize) {
        double least = 0;
        vectors = 0;
        for (int64_t count : {4, 2, 1}) {
            const int64_t lanes = count * 32 / itemsize;
            const double cost = (out_group + lanes - 1) / lanes * lanes * (count == 4 ? 1.0 : count == 2 ? 1.15 : 1.5);
            if (!vectors || cost < least) vectors = count, width = lanes, least = cost;
        }
    }
};

}  // namespace spikemark

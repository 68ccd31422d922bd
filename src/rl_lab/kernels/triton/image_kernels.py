"""What happens to images between convolutions, as Triton kernels: each reads and writes a large map once.

A norm works on sites: the pixels (row, y, x) of its output, all channels of one. Five strides say where the numbers of
its input lie, channels last: those of the row, of y // 2, of x // 2, of y % 2 and of x % 2. So pixels may lie in the
order of the image, or 2×2 of them side by side ("phases").

`images` launches them; the plain forms are `DreamerCNN` and `DreamerCNNDecoder`.
"""

# Arguments in capitals are constants of the compiled kernel; Triton's own types stand for the others.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

PHASES = tl.constexpr(4)
TAPS = tl.constexpr(5)  # of the convolution as it is trained
PHASE_TAPS = tl.constexpr(3)  # of the same one by phases


@triton.jit
def site_offsets(site, height, width, row, y, x, odd_y, odd_x):
    """The offset of a site's first channel; in 64 bits, for a large map has more than 2³¹ numbers."""
    at_x, at_y = site % width, site // width % height
    offset = (at_y // 2) * y + (at_x // 2) * x + (at_y % 2) * odd_y + (at_x % 2) * odd_x
    return (site // width // height).to(tl.int64) * row + offset


@triton.jit
def normed(value, scale, eps, channels):
    """(value / rms, the norm's output, 1 / rms)."""
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / channels + eps)[:, None]
    unit = value * inverse
    return unit, unit * scale, inverse


@triton.jit(do_not_specialize=["sites", "height", "width"])
def norm_silu_kernel(
    phases, bias, scale, out, kept, choice, sites, height, width, channels, eps,
    row, y, x, odd_y, odd_x, second, third,
    POOL: tl.constexpr, SITES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """silu(norm(phases + bias)), site by site; with POOL, of the largest of four numbers `second` and `third` apart.
    That one and which it was are left in `kept` and `choice` for the backward pass."""
    site, channel = tl.program_id(0) * SITES + tl.arange(0, SITES), tl.arange(0, CHANNELS)
    inside = (site < sites)[:, None] & (channel < channels)[None, :]
    at = phases + site_offsets(site, height, width, row, y, x, odd_y, odd_x)[:, None] + channel[None, :]
    dense = site.to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if POOL:
        best = tl.zeros([SITES, CHANNELS], tl.int32)
        for phase in tl.static_range(1, PHASES):
            offset = (phase // 2) * second + (phase % 2) * third
            other = tl.load(at + offset, mask=inside, other=0.0).to(tl.float32)
            larger = (other > value) | (other != other)  # of equal ones the first; what is not a number passes
            best, value = tl.where(larger, phase, best), tl.where(larger, other, value)
        tl.store(kept + dense, value.to(kept.dtype.element_ty), mask=inside)
        tl.store(choice + dense, best.to(tl.uint8), mask=inside)
    known = channel < channels
    value += tl.load(bias + channel, mask=known, other=0.0)[None, :]
    _, z, _ = normed(value, tl.load(scale + channel, mask=known, other=0.0)[None, :], eps, channels)
    tl.store(out + dense, (z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sites", "height", "width"])
def norm_silu_gradient_kernel(
    grad, phases, choice, bias, scale, out, sums, sites, height, width, channels, eps,
    row, y, x, odd_y, odd_x, second, third,
    POOL: tl.constexpr, SITES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of `phases` in `out`, which lies as they did; with POOL, `phases` are the numbers that were kept.
    Each program leaves its share of the gradients of scale and bias in `sums`."""
    channel = tl.arange(0, CHANNELS)
    known = channel < channels
    weight = tl.load(scale + channel, mask=known, other=0.0)[None, :]
    added = tl.load(bias + channel, mask=known, other=0.0)[None, :]
    scale_sum = tl.zeros([SITES, CHANNELS], tl.float32)
    bias_sum = tl.zeros([SITES, CHANNELS], tl.float32)
    for start in range(tl.program_id(0) * SITES, sites, tl.num_programs(0) * SITES):
        site = start + tl.arange(0, SITES)
        inside = (site < sites)[:, None] & known[None, :]
        place = site_offsets(site, height, width, row, y, x, odd_y, odd_x)[:, None] + channel[None, :]
        dense = site.to(tl.int64)[:, None] * channels + channel[None, :]
        value = tl.load(phases + (dense if POOL else place), mask=inside, other=0.0).to(tl.float32) + added
        slope = tl.load(grad + dense, mask=inside, other=0.0).to(tl.float32)
        unit, z, inverse = normed(value, weight, eps, channels)
        gate = tl.sigmoid(z)
        slope *= gate * (1.0 + z * (1.0 - gate))
        scale_sum += slope * unit
        slope *= weight
        slope = inverse * (slope - unit * (tl.sum(slope * unit, 1) / channels)[:, None])
        bias_sum += tl.where(inside, slope, 0.0)
        if POOL:
            best = tl.load(choice + dense, mask=inside, other=0).to(tl.int32)
            for phase in tl.static_range(PHASES):
                offset = (phase // 2) * second + (phase % 2) * third
                part = tl.where(best == phase, slope, 0.0).to(out.dtype.element_ty)
                tl.store(out + place + offset, part, mask=inside)
        else:
            tl.store(out + place, slope.to(out.dtype.element_ty), mask=inside)
    to = sums + tl.program_id(0) * 2 * CHANNELS + channel
    tl.store(to, tl.sum(scale_sum, 0))
    tl.store(to + CHANNELS, tl.sum(bias_sum, 0))


@triton.jit(do_not_specialize=["size", "height", "width", "channels", "slots"])
def scaled_phases_kernel(image, out, size, height, width, channels, slots, BLOCK: tl.constexpr):
    """An image 0..255 as numbers -0.5..0.5, with every 2×2 pixels as one of `slots` ≥ 4·channels channels."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, cell = at % slots, at // slots
    phase, channel = slot // channels, slot % channels
    at_x, above = cell % (width // 2), cell // (width // 2)  # `above`: rows and y, which double together
    source = ((2 * above + phase // 2) * width + 2 * at_x + phase % 2) * channels + channel
    inside = at < size
    value = tl.load(image + source, mask=inside & (phase < PHASES), other=0).to(tl.float32) / 255.0 - 0.5
    tl.store(out + at, tl.where(phase < PHASES, value, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_pixels(image, row, cell, phase, channel, cells, width, channels, inside):
    """[cells, slots], in 0..1."""
    at_y = 2 * (cell // width)[:, None] + (phase // 2)[None, :]
    at_x = 2 * (cell % width)[:, None] + (phase % 2)[None, :]
    pixel = row * cells * PHASES + at_y * (2 * width) + at_x
    return tl.load(image + pixel * channels + channel[None, :], mask=inside, other=0).to(tl.float32) / 255.0


@triton.jit(do_not_specialize=["cells", "width", "channels"])
def image_error_kernel(
    phases, bias, image, out, cells, width, channels, slots, SLOTS: tl.constexpr, CELLS: tl.constexpr
):
    """Σ (sigmoid(phases + bias) - image / 255)² of each row; a program has one. `cells` are 2×2 pixels."""
    slot, row = tl.arange(0, SLOTS), tl.program_id(0).to(tl.int64)
    phase, channel = slot // channels, slot % channels
    added = tl.load(bias + channel, mask=phase < PHASES, other=0.0)[None, :]
    total = tl.zeros([CELLS, SLOTS], tl.float32)
    for start in range(0, cells, CELLS):
        cell = start + tl.arange(0, CELLS)
        inside = (cell < cells)[:, None] & (phase < PHASES)[None, :]
        place = (row * cells + cell[:, None]) * slots + slot[None, :]
        value = tl.load(phases + place, mask=(cell < cells)[:, None] & (slot < slots)[None, :], other=0.0)
        seen = load_pixels(image, row, cell, phase, channel, cells, width, channels, inside)
        error = tl.sigmoid(value.to(tl.float32) + added) - seen
        total += tl.where(inside, error * error, 0.0)
    tl.store(out + row, tl.sum(tl.sum(total, 1), 0))


@triton.jit(do_not_specialize=["cells", "width", "channels"])
def image_error_gradient_kernel(
    grad, phases, bias, image, out, sums, cells, width, channels, slots, SLOTS: tl.constexpr, CELLS: tl.constexpr
):
    """The gradient of `phases`, and each row's share of that of the bias, by slot."""
    slot, row = tl.arange(0, SLOTS), tl.program_id(0).to(tl.int64)
    phase, channel = slot // channels, slot % channels
    added = tl.load(bias + channel, mask=phase < PHASES, other=0.0)[None, :]
    above = 2.0 * tl.load(grad + row)
    total = tl.zeros([CELLS, SLOTS], tl.float32)
    for start in range(0, cells, CELLS):
        cell = start + tl.arange(0, CELLS)
        inside = (cell < cells)[:, None] & (phase < PHASES)[None, :]
        place = (row * cells + cell[:, None]) * slots + slot[None, :]
        there = (cell < cells)[:, None] & (slot < slots)[None, :]
        value = tl.load(phases + place, mask=there, other=0.0)
        seen = load_pixels(image, row, cell, phase, channel, cells, width, channels, inside)
        drawn = tl.sigmoid(value.to(tl.float32) + added)
        slope = tl.where(inside, above * (drawn - seen) * drawn * (1.0 - drawn), 0.0)
        total += slope
        tl.store(out + place, slope.to(out.dtype.element_ty), mask=there)
    tl.store(sums + row * SLOTS + slot, tl.sum(total, 0))


@triton.jit(do_not_specialize=["size", "outputs", "inputs", "slots"])
def phase_weight_kernel(weight, out, size, outputs, inputs, slots, POOL: tl.constexpr, BLOCK: tl.constexpr):
    """The weights [4·outputs + spare, 3, 3, slots] by phases, of [outputs, inputs, 5, 5].

    Phase u of an output meets phase s of pixel pair a with tap 2a + s - u. With POOL the phases of the input are
    channels of one pixel; else both are the same pixel, and their taps add up.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, pair, wide = at % slots, at // slots % (PHASE_TAPS * PHASE_TAPS), at // slots // (PHASE_TAPS * PHASE_TAPS)
    phase, output = wide // outputs, wide % outputs
    first_y, first_x = 2 * (pair // PHASE_TAPS) - phase // 2, 2 * (pair % PHASE_TAPS) - phase % 2
    own, part = slot % inputs, slot // inputs
    inside = (at < size) & (phase < PHASES) & (part < (PHASES if POOL else 1))
    total = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(1 if POOL else PHASES):
        tap_y, tap_x = first_y + (part if POOL else step) // 2, first_x + (part if POOL else step) % 2
        met = inside & (tap_y >= 0) & (tap_y < TAPS) & (tap_x >= 0) & (tap_x < TAPS)
        total += tl.load(weight + ((output * inputs + own) * TAPS + tap_y) * TAPS + tap_x, mask=met, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size", "outputs", "inputs", "slots"])
def phase_weight_gradient_kernel(grad, out, size, outputs, inputs, slots, POOL: tl.constexpr, BLOCK: tl.constexpr):
    """Each tap meets each phase of the output once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap_x, tap_y, own = at % TAPS, at // TAPS % TAPS, at // (TAPS * TAPS) % inputs
    output, inside = at // (TAPS * TAPS) // inputs, at < size
    total = tl.zeros([BLOCK], tl.float32)
    for phase in tl.static_range(PHASES):
        place_y, place_x = tap_y + phase // 2, tap_x + phase % 2
        slot = own + ((place_y % 2) * 2 + place_x % 2) * inputs if POOL else own
        pair = (place_y // 2) * PHASE_TAPS + place_x // 2
        source = ((phase * outputs + output) * PHASE_TAPS * PHASE_TAPS + pair) * slots + slot
        total += tl.load(grad + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=inside)

"""The examples of MLX's page on custom Metal kernels: elementwise exp, strided exp, grid_sample and its gradient."""

from collections.abc import Callable
import math

from forge_mlx.metal import emulator
import mlx.core as mx
import numpy as np
import pytest

EXP = """
    uint i = thread_position_in_grid.x;
    T value = inp[i];
    out[i] = metal::exp(value);
"""

# elem_to_loc is MLX's own, from the header that every custom kernel gets.
EXP_STRIDED = """
    uint i = thread_position_in_grid.x;
    T value = inp[elem_to_loc(i, inp_shape, inp_strides, inp_ndim)];
    out[i] = metal::exp(value);
"""

# One thread an output element: the mean of the four pixels around (px, py), weighted by how near they are.
GRID_SAMPLE = """
    uint i = thread_position_in_grid.x;
    int height = x_shape[1], width = x_shape[2], channels = x_shape[3];
    int per_image = grid_shape[1] * grid_shape[2] * channels;
    uint point = i / channels * 2;
    float px = ((grid[point] + 1) * width - 1) / 2;
    float py = ((grid[point + 1] + 1) * height - 1) / 2;
    int left = floor(px), top = floor(py);
    int image = i / per_image * height * width * channels + i % channels;
    float sum = 0.0f;
    for (int dy = 0; dy < 2; dy++) {
        for (int dx = 0; dx < 2; dx++) {
            int column = left + dx, row = top + dy;
            if (row >= 0 && row < height && column >= 0 && column < width) {
                float weight = (1 - metal::abs(px - column)) * (1 - metal::abs(py - row));
                sum += weight * x[image + (row * width + column) * channels];
            }
        }
    }
    out[i] = static_cast<T>(sum);
"""

# One simdgroup (or several) a point, its channels padded to whole simdgroups. Points share pixels, so x_grad needs
# atomics; the channels of a point are summed by the simdgroup before one atomic addition.
GRID_SAMPLE_VJP = """
    uint i = thread_position_in_grid.x;
    int height = x_shape[1], width = x_shape[2], channels = x_shape[3];
    int padded = ceildiv(channels, threads_per_simdgroup) * threads_per_simdgroup;
    uint point = i / padded;
    int channel = i % padded;
    float px = ((grid[2 * point] + 1) * width - 1) / 2;
    float py = ((grid[2 * point + 1] + 1) * height - 1) / 2;
    int left = floor(px), top = floor(py);
    int image = point / (grid_shape[1] * grid_shape[2]) * height * width * channels + channel;
    float gx = 0.0f, gy = 0.0f;
    if (channel < channels) {
        float cot = cotangent[point * channels + channel];
        for (int dy = 0; dy < 2; dy++) {
            for (int dx = 0; dx < 2; dx++) {
                int column = left + dx, row = top + dy;
                if (row >= 0 && row < height && column >= 0 && column < width) {
                    int at = image + (row * width + column) * channels;
                    float wx = 1 - metal::abs(px - column), wy = 1 - metal::abs(py - row);
                    atomic_fetch_add_explicit(&x_grad[at], wx * wy * cot, memory_order_relaxed);
                    gx += (dx == 0 ? -wy : wy) * x[at] * cot;
                    gy += (dy == 0 ? -wx : wx) * x[at] * cot;
                }
            }
        }
    }
    gx = simd_sum(gx);
    gy = simd_sum(gy);
    if (thread_index_in_simdgroup == 0) {
        atomic_fetch_add_explicit(&grid_grad[2 * point], gx * width / 2, memory_order_relaxed);
        atomic_fetch_add_explicit(&grid_grad[2 * point + 1], gy * height / 2, memory_order_relaxed);
    }
"""


def elementwise(source: str, *, contiguous: bool) -> Callable[[mx.array], mx.array]:
    kernel = emulator.metal_kernel(
        name="myexp", input_names=["inp"], output_names=["out"], source=source, ensure_row_contiguous=contiguous
    )

    def call(a: mx.array) -> mx.array:
        return kernel(
            inputs=[a],
            template=[("T", mx.float32)],
            grid=(a.size, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[a.shape],
            output_dtypes=[a.dtype],
        )[0]

    return call


def make_grid_sample() -> Callable[[mx.array, mx.array], mx.array]:
    forward = emulator.metal_kernel(
        name="grid_sample", input_names=["x", "grid"], output_names=["out"], source=GRID_SAMPLE
    )
    backward = emulator.metal_kernel(
        name="grid_sample_grad",
        input_names=["x", "grid", "cotangent"],
        output_names=["x_grad", "grid_grad"],
        source=GRID_SAMPLE_VJP,
        atomic_outputs=True,
    )

    @mx.custom_function
    def grid_sample(x, grid):
        shape = (*grid.shape[:3], x.shape[3])
        return forward(
            inputs=[x, grid],
            template=[("T", x.dtype)],
            output_shapes=[shape],
            output_dtypes=[x.dtype],
            grid=(math.prod(shape), 1, 1),
            threadgroup=(256, 1, 1),
        )[0]

    @grid_sample.vjp
    def grid_sample_vjp(primals, cotangent, _):
        x, grid = primals
        threads = math.prod(grid.shape[:3]) * ((x.shape[3] + 31) // 32 * 32)
        return tuple(
            backward(
                inputs=[x, grid, cotangent],
                template=[("T", x.dtype)],
                output_shapes=[x.shape, grid.shape],
                output_dtypes=[x.dtype, x.dtype],
                grid=(threads, 1, 1),
                threadgroup=(256, 1, 1),
                init_value=0,
            )
        )

    return grid_sample


def grid_sample_in_plain_ops(x: mx.array, grid: mx.array) -> mx.array:
    """Bilinear samples of `x [N, H, W, C]` at `grid [N, h, w, 2]` in [-1, 1]; pixels outside count as 0."""
    height, width = x.shape[1:3]
    images = mx.arange(x.shape[0])[:, None, None]
    px = ((grid[..., 0] + 1) * width - 1) / 2
    py = ((grid[..., 1] + 1) * height - 1) / 2
    left, top = mx.stop_gradient(mx.floor(px)), mx.stop_gradient(mx.floor(py))
    total = mx.array(0.0)
    for dy in (0, 1):
        for dx in (0, 1):
            column, row = left + dx, top + dy
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            pixels = x[
                images,
                mx.clip(row, 0, height - 1).astype(mx.int32),
                mx.clip(column, 0, width - 1).astype(mx.int32),
            ]
            weight = (1 - mx.abs(px - column)) * (1 - mx.abs(py - row)) * inside
            total = total + weight[..., None] * pixels
    return total


@pytest.fixture
def images() -> tuple[mx.array, mx.array, mx.array]:
    """Images of 5 channels, points of which some lie outside, and a cotangent."""
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((2, 6, 7, 5)).astype(np.float32))
    grid = mx.array(rng.uniform(-1.2, 1.2, (2, 4, 3, 2)).astype(np.float32))
    return x, grid, mx.array(rng.standard_normal((2, 4, 3, 5)).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [(mx.float32, 2**-22), (mx.float16, 2**-10)],
    ids=["float32", "float16"],
)
def test_exp(dtype, unit):
    a = mx.random.normal((4, 16), key=mx.random.key(0)).astype(dtype)
    with emulator.settings(schedules=3):
        got = elementwise(EXP, contiguous=True)(a)
    assert got.dtype == dtype
    want = np.exp(np.array(a.astype(mx.float32)))
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), want, rtol=unit)


@pytest.mark.parametrize(
    "view",
    [lambda a: a[::2], lambda a: a.T, lambda a: a[1:, 3:], lambda a: mx.broadcast_to(a[:1], (5, 16)), lambda a: a],
    ids=["every second row", "transposed", "from the middle", "broadcast", "contiguous"],
)
def test_strided_exp(view):
    a = view(mx.random.normal((4, 16), key=mx.random.key(0)).astype(mx.float16))
    with emulator.settings(schedules=3):
        got = elementwise(EXP_STRIDED, contiguous=False)(a)
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.exp(np.array(a.astype(mx.float32))), rtol=2**-10)


def test_grid_sample(images):
    x, grid, _ = images
    with emulator.settings(schedules=3):
        got = make_grid_sample()(x, grid)
    np.testing.assert_allclose(np.array(got), np.array(grid_sample_in_plain_ops(x, grid)), rtol=1e-5, atol=1e-6)


def test_atomic_gradient_of_grid_sample(images):
    x, grid, cotangent = images
    _, got = mx.vjp(make_grid_sample(), [x, grid], [cotangent])
    _, want = mx.vjp(grid_sample_in_plain_ops, [x, grid], [cotangent])
    for ours, plain in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-4, atol=1e-5)


def test_gradient_without_an_initial_value_is_refused(images):
    x, grid, cotangent = images
    kernel = emulator.metal_kernel(
        name="grid_sample_grad",
        input_names=["x", "grid", "cotangent"],
        output_names=["x_grad", "grid_grad"],
        source=GRID_SAMPLE_VJP,
        atomic_outputs=True,
    )
    with pytest.raises(emulator.UninitialisedError, match="x_grad"):
        kernel(
            inputs=[x, grid, cotangent],
            template=[("T", x.dtype)],
            output_shapes=[x.shape, grid.shape],
            output_dtypes=[x.dtype, x.dtype],
            grid=(24 * 32, 1, 1),
            threadgroup=(256, 1, 1),
        )

"""That the emulator computes what a GPU would, and notices what a GPU would punish."""

import re
from pathlib import Path

import pytest
import torch

import ncgru
from tests.emulator import EmulationError, Kernels, compile_file

PRELUDE = '#include "device.cuh"\n'


def kernels(tmp_path: Path, text: str) -> Kernels:
    source = tmp_path / "kernel.cu"
    source.write_text(PRELUDE + text)
    return compile_file(source)


def test_device_functions_are_the_kernels_own() -> None:
    """Name and parameters of every function in device.cuh."""

    def functions(text: str) -> set[str]:
        text = text.replace("__device__ __forceinline__", "inline")
        return {" ".join(found.split()) for found in re.findall(r"inline ([\w ]+\** ?\w+\([^{]*\)) \{", text)}

    emulated = functions((Path(__file__).parent / "device.cuh").read_text())
    for path in Path(ncgru.__file__).parent.glob("*/cuda/device.cuh"):
        real = functions(path.read_text())
        assert real
        assert real - emulated == set()


REVERSE = """
extern "C" __global__ void reverse(const float* from, float* to, int n) {
    __shared__ __align__(16) float room[2][64];
    int i = threadIdx.x + blockDim.x * threadIdx.y;
    room[1][i] = from[blockIdx.x * n + i];
    BARRIER
    to[blockIdx.x * n + i] = room[1][n - 1 - i];
}
"""


@pytest.mark.parametrize("at_once", [False, True])
def test_blocks_share_memory_within_and_not_between(tmp_path: Path, at_once: bool) -> None:
    run = kernels(tmp_path, REVERSE.replace("BARRIER", "__syncthreads();"))
    x, y = torch.randn(5, 64), torch.full((5, 64), torch.nan)
    run.launch("reverse", 5, (16, 4), [x, y, 64], at_once=at_once)
    assert torch.equal(y, x.flip(1))


def test_missing_barrier_shows(tmp_path: Path) -> None:
    run = kernels(tmp_path, REVERSE.replace("BARRIER", ""))
    x, y = torch.randn(5, 64), torch.full((5, 64), torch.nan)
    run.launch("reverse", 5, 64, [x, y, 64])
    assert y.isnan().any()


def test_arguments_are_checked(tmp_path: Path) -> None:
    run = kernels(tmp_path, REVERSE.replace("BARRIER", "__syncthreads();"))
    x = torch.zeros(64)
    with pytest.raises(TypeError, match="3 parameters, got 2"):
        run.launch("reverse", 1, 64, [x, x])
    with pytest.raises(TypeError, match=r"argument 1 of reverse must be .* elements of 4 bytes, got torch.float64"):
        run.launch("reverse", 1, 64, [x, x.double(), 64])
    with pytest.raises(TypeError, match="contiguous"):
        run.launch("reverse", 1, 64, [x, torch.zeros(64, 2)[:, 0], 64])
    with pytest.raises(ValueError, match="whole warps"):
        run.launch("reverse", 1, 63, [x, x, 64])


def test_writes_beyond_are_noticed_and_reads_beyond_are_nan(tmp_path: Path) -> None:
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void global(const float* from, float* to, int at) {
            if (threadIdx.x == 0) to[at] = from[at];
        }
        extern "C" __global__ void shared(int at) {
            __shared__ float room[4];
            if (threadIdx.x == 0) room[at] = 1.0f;
        }
        extern "C" __global__ void dynamic(int at) { reinterpret_cast<float*>(dynamic_shared())[at] = 1.0f; }
        """,
    )
    to = torch.zeros(8)
    run.launch("global", 1, 32, [torch.zeros(4), to, 5])
    assert to[5].isnan()
    for at in (8, -1):
        with pytest.raises(EmulationError, match="beyond the tensor in argument 1"):
            run.launch("global", 1, 32, [torch.zeros(16)[2:], to, at])
    run.launch("shared", 1, 32, [3])
    with pytest.raises(EmulationError, match="beyond shared array 1"):
        run.launch("shared", 1, 32, [4])
    run.launch("dynamic", 1, 32, [3], shared=16)
    with pytest.raises(EmulationError, match="beyond the dynamic shared memory"):
        run.launch("dynamic", 1, 32, [4], shared=16)


def test_named_barriers(tmp_path: Path) -> None:
    """One warp hands values to another, who alone waits."""
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void hand_over(float* to) {
            float* room = reinterpret_cast<float*>(dynamic_shared());
            for (int i = 0; i < 5; ++i) {
                if (threadIdx.x < 32) {
                    room[threadIdx.x] = i;
                    barrier_arrive(1, 64);
                    barrier_sync(2, 64);
                } else {
                    barrier_sync(1, 64);
                    to[i * 32 + threadIdx.x - 32] = room[63 - threadIdx.x];
                    barrier_arrive(2, 64);
                }
            }
        }
        """,
    )
    for seed in range(5):
        to = torch.full((5, 32), torch.nan)
        run.launch("hand_over", 1, 64, [to], shared=128, seed=seed)
        assert torch.equal(to, torch.arange(5.0)[:, None].expand(5, 32))


def test_deadlocks_are_reported(tmp_path: Path) -> None:
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void block() { if (threadIdx.x != 3) __syncthreads(); }
        extern "C" __global__ void warp() { if (threadIdx.x != 3) __syncwarp(); }
        extern "C" __global__ void lanes() { threadIdx.x == 3 ? shuffle_xor(0.0f, 1) : (float)__any_sync(~0u, 1); }
        extern "C" __global__ void grid(const uint4* from) { while (load_relaxed(from).x == 0) {} }
        """,
    )
    with pytest.raises(EmulationError, match="barrier 0 has 63 of 64 threads"):
        run.launch("block", 1, 64, [])
    with pytest.raises(EmulationError, match=r"deadlock\n.* warp 0 waits in vote, lanes 0xfffffff7 of 0xffffffff"):
        run.launch("warp", 1, 32, [])
    with pytest.raises(EmulationError, match="lanes of one warp disagree"):
        run.launch("lanes", 1, 32, [])
    with pytest.raises(EmulationError, match="threads poll"):
        run.launch("grid", 1, 32, [torch.zeros(4, dtype=torch.int32)])


def test_blocks_wait_for_each_other(tmp_path: Path) -> None:
    """A counter in global memory as a barrier of the grid."""
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void all_gather(float* values, float* sums, unsigned* counter) {
            values[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
            __syncthreads();
            if (threadIdx.x == 0) {
                fence();
                atomicAdd(counter, 1);
                while (atomicAdd(counter, 0) < gridDim.x) {}
                fence();
            }
            __syncthreads();
            float sum = 0.0f;
            for (int i = 0; i < gridDim.x * blockDim.x; ++i) sum += values[i];
            sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
        }
        """,
    )
    values, sums = torch.full((9 * 64,), torch.nan), torch.full((9 * 64,), torch.nan)
    run.launch("all_gather", 9, 64, [values, sums, torch.zeros(1, dtype=torch.int32)], at_once=True)
    assert torch.equal(sums, torch.full_like(sums, 64 * 36))


MESSAGE = """
extern "C" __global__ void message(unsigned* words, float* seen) {  // words: [0] the message, [4] that it is there
    if (threadIdx.x != 0) return;
    const uint4* from = reinterpret_cast<const uint4*>(words);
    if (blockIdx.x == 0) {
        store_relaxed(words, 7);
        FENCE
        store_relaxed(words + 4, 1);
        if (load_relaxed(from).x != 7) seen[0] = -1.0f;
    } else {
        while (load_relaxed(from + 1).x == 0) {}
        fence();
        seen[blockIdx.x] = load_relaxed(from).x;
    }
}
"""


@pytest.mark.parametrize("fenced", [True, False])
def test_other_blocks_see_stores_late_and_in_any_order(tmp_path: Path, fenced: bool) -> None:
    run = kernels(tmp_path, MESSAGE.replace("FENCE", "fence();" if fenced else ""))
    found = set()
    for seed in range(20):
        seen = torch.zeros(4)
        run.launch("message", 4, 32, [torch.zeros(8, dtype=torch.int32), seen], at_once=True, seed=seed)
        assert seen[0] == 0
        found |= set(seen[1:].tolist())
    assert found == ({7.0} if fenced else {0.0, 7.0})


def test_polling_in_vain_is_noticed_though_the_warp_votes(tmp_path: Path) -> None:
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void wait_for(const uint4* from) { while (any_lane(load_relaxed(from).x == 0)) {} }
        """,
    )
    with pytest.raises(EmulationError, match="threads poll"):
        run.launch("wait_for", 1, 32, [torch.zeros(4, dtype=torch.int32)])


SHUFFLES = """
extern "C" __global__ void shuffles(int* to) {
    int x = threadIdx.x * 10, *mine = to + threadIdx.x * 6;
    mine[0] = __shfl_sync(0xffffffffu, x, 5);
    mine[1] = __shfl_xor_sync(0xffffffffu, x, 3);
    mine[2] = __shfl_down_sync(0xffffffffu, x, 2);
    mine[3] = __shfl_up_sync(0xffffffffu, x, 2);
    mine[4] = __shfl_sync(0xffffffffu, x, 9, 8);
    mine[5] = threadIdx.x < 16 ? __ballot_sync(0xffffu, threadIdx.x & 1) : __any_sync(0xffff0000u, threadIdx.x == 16);
}
"""


def test_shuffles_and_votes(tmp_path: Path) -> None:
    to = torch.zeros(32, 6, dtype=torch.int32)
    kernels(tmp_path, SHUFFLES).launch("shuffles", 1, 32, [to])
    for i in range(32):
        sources = [5, i ^ 3, i + 2 if i < 30 else i, i - 2 if i >= 2 else i, i // 8 * 8 + 1]
        assert to[i].tolist() == [*(10 * source for source in sources), 0xAAAA if i < 16 else 1]


MMA = """
extern "C" __global__ void multiply(const unsigned* a, const unsigned* b, float* c) {  // a [16, 8], b [8 of n, 8 of k]
    int g = threadIdx.x / 4, q = threadIdx.x % 4;
    unsigned left[4] = {a[g * 8 + q], a[(g + 8) * 8 + q], a[g * 8 + q + 4], a[(g + 8) * 8 + q + 4]};
    unsigned right[2] = {b[g * 8 + q], b[g * 8 + q + 4]};
    float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    mma_KIND(sums, left, right);
    for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * q + i % 2] = sums[i];
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_a_warp(tmp_path: Path, dtype: torch.dtype) -> None:
    kind = {torch.float32: "tf32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    depth = 8 if dtype == torch.float32 else 16
    a, b, c = torch.randn(16, depth).to(dtype), torch.randn(8, depth).to(dtype), torch.full((16, 8), torch.nan)
    words = [x.view(torch.int32) for x in (a, b)]
    kernels(tmp_path, MMA.replace("KIND", kind)).launch("multiply", 1, 32, [*words, c])
    if dtype == torch.float32:
        a, b = ((x & ~0x1FFF).view(torch.float32) for x in words)
    torch.testing.assert_close(c.double(), 1 + a.double() @ b.double().T, rtol=1e-6, atol=1e-6)


def test_numbers_of_16_bits(tmp_path: Path) -> None:
    """Against torch, for all 16-bit patterns and for float32 numbers around every one of them."""
    run = kernels(
        tmp_path,
        """
        extern "C" __global__ void narrow(
            const float* x, unsigned short* brain, unsigned short* half, float* tf, int n) {
            for (int i = threadIdx.x; i < n; i += 32) {
                brain[i] = to_bfloat16(x[i]);
                half[i] = to_float16(x[i]);
                tf[i] = __uint_as_float(round_tf32(x[i]));
            }
        }
        extern "C" __global__ void widen(const unsigned short* x, float* y, int n) {
            for (int i = threadIdx.x; i < n; i += 32) y[i] = from_float16(x[i]);
        }
        """,
    )
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    wide = torch.full((2**16,), torch.nan)
    run.launch("widen", 1, 32, [patterns, wide, 2**16])
    assert torch.equal(wide.nan_to_num(7e4), patterns.view(torch.float16).float().nan_to_num(7e4))
    near = torch.cat(
        [
            (patterns.view(kind).float().view(torch.int32) + d).view(torch.float32)
            for kind in (torch.float16, torch.bfloat16)
            for d in (0, 1, -1, 0x800, 0xFFF, 0x1000, 0x8000)
        ]
    )
    near = near[near.isfinite()]
    brain, half = (torch.zeros(len(near), dtype=torch.int16) for _ in range(2))
    tf = torch.zeros_like(near)
    run.launch("narrow", 1, 32, [near, brain, half, tf, len(near)])
    assert torch.equal(brain.view(torch.bfloat16), near.bfloat16())
    assert torch.equal(half.view(torch.float16), near.half())
    assert ((tf - near).abs() <= near.abs() * 2.0**-11).logical_or(near.abs() < 2**-125).logical_or(tf.isinf()).all()


COPIES = """
extern "C" __global__ void copies(const float* from, float* to) {
    float* room = reinterpret_cast<float*>(dynamic_shared()) + 8 * threadIdx.x;
    copy_async<4>(room, from + 4 * threadIdx.x, true);
    commit_copies();
    copy_async<4>(room + 4, from + 4 * threadIdx.x, false);
    commit_copies();
    await_copies<1>();
    for (int i = 0; i < 8; ++i) to[16 * threadIdx.x + i] = room[i];
    await_copies<0>();
    for (int i = 0; i < 8; ++i) to[16 * threadIdx.x + 8 + i] = room[i];
}
"""


def test_copies_are_there_once_they_are_awaited(tmp_path: Path) -> None:
    given, found = torch.randn(32, 4), torch.empty(32, 4, 4)
    kernels(tmp_path, COPIES).launch("copies", 1, 32, [given, found], shared=32 * 32)
    assert torch.equal(found[:, 0], given)
    assert found[:, 1].isnan().all()
    assert torch.equal(found[:, 2], given)
    assert (found[:, 3] == 0).all()


MATRICES = """
extern "C" __global__ void matrices(const unsigned* from, unsigned* to) {
    unsigned* room = reinterpret_cast<unsigned*>(dynamic_shared());
    for (int i = threadIdx.x; i < 128; i += 32) room[i] = from[i];
    __syncwarp();
    unsigned x[4];
    load_matrices(x, reinterpret_cast<const char*>(room + 4 * threadIdx.x));
    for (int i = 0; i < 4; ++i) to[i * 32 + threadIdx.x] = x[i];
    load_transposed(x, reinterpret_cast<const char*>(room + 4 * threadIdx.x));
    for (int i = 0; i < 4; ++i) to[128 + i * 32 + threadIdx.x] = x[i];
}
"""


def test_matrices_of_16_bits(tmp_path: Path) -> None:
    given = torch.arange(4 * 8 * 8, dtype=torch.int16).view(4, 8, 8)
    found = torch.zeros(2, 4, 8, 8, dtype=torch.int16)
    kernels(tmp_path, MATRICES).launch(
        "matrices", 1, 32, [given.view(torch.int32), found.view(torch.int32)], shared=512
    )
    assert torch.equal(found[0], given)
    assert torch.equal(found[1], given.mT)

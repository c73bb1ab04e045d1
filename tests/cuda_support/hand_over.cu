// Some warps hand numbers over to others, round after round, as NVIDIA's manual of PTX does it: who has written only
// arrives at one barrier, who has read only arrives at another.
#define WRITERS 8
#define THREADS (32 * WRITERS + 128)
#define ROUNDS 6
#define FULL 1
#define FREE 2

__device__ void arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(THREADS) : "memory"); }

__device__ void await(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(THREADS) : "memory"); }

// y[128] gets the sums of what all writers wrote in the last round.
extern "C" __global__ void hand_over(int* y) {
    __shared__ int room[WRITERS][128];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, reader = static_cast<int>(threadIdx.x) - 32 * WRITERS;
    if (reader >= 0) arrive(FREE);
    for (int round = 0; round < ROUNDS; ++round) {
        if (reader < 0) {
            await(FREE);
            for (int k = 0; k < 4; ++k) room[warp][32 * k + lane] = round + k;
            arrive(FULL);
        } else {
            await(FULL);
            int sum = 0;
            for (int writer = 0; writer < WRITERS; ++writer) sum += room[writer][reader];
            arrive(FREE);
            y[reader] = sum;
        }
    }
}

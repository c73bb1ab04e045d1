// Runs a kernel's threads as fibers of one thread of the operating system; see __init__.py.
//
// A fiber runs until it waits (at a barrier, or for the other lanes of its warp) or polls. Which warp and which of its
// lanes run next is drawn at random: a warp mostly runs on while it can, so that it gets far ahead of others.
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

constexpr size_t STACK = 128 << 10, GUARD = 64, STATIC_SHARED = 48 << 10, MOST_DELAYED = 256;
constexpr uint32_t MOST_RELUCTANT = 1 << 10;
constexpr uint16_t POISON = 0xffff, FENCE = 0xfff7;  // NaN in 16 bits of either kind, and twice in a row in 32

// ---- switching between stacks

#ifdef __x86_64__
typedef void* Context;
extern "C" void emulator_switch(Context* from, Context to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
inline void switch_to(Context& from, Context& to) { emulator_switch(&from, to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK) - 2;
    *top = reinterpret_cast<void*>(entry);
    context = top - 6;  // below it the six registers, which may hold anything
}
#else
typedef ucontext_t Context;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, entry, 0);
}
#endif

// ---- threads, warps, blocks

struct Block;

struct Copy {
    char* to;
    const char* from;
    int bytes, size;
};

struct Fiber {
    Context context;
    uint3 thread;
    uint32_t* stack_end;
    uint64_t awaited = 0;  // how often its cluster's barrier will have opened when it may pass
    std::vector<Copy> copies;     // asked for and not made yet, in their order
    std::vector<size_t> batches;  // how many of them each batch has; the last one is not ended
};

struct Warp {
    Block* block;
    Fiber lanes[32];
    uint32_t ready = 0;
    bool listed = false;  // among the warps that have ready lanes
    // The operation of the warp that a lane waits for:
    emulator::Words* words[32] = {};
    uint32_t mask[32] = {};
    const char* name[32] = {};
};

struct Barrier {
    int arrived = 0, threads = 0;
    std::vector<std::pair<Warp*, int>> waiting;
};

struct ClusterBarrier {
    int arrived = 0;
    uint64_t opened = 0;
    std::vector<std::pair<Warp*, int>> waiting;
};

struct Array {
    const void* site;
    size_t at, bytes;
};

// A relaxed store that other blocks do not see yet. Half of them are delivered when their turn comes, a quarter half as
// readily, and so on: now and then one is later than all that many steps of the kernel wrote after it.
struct Delayed {
    unsigned* to;
    unsigned x;
    uint32_t reluctance;
};

struct Block {
    uint3 index;
    std::vector<Warp> warps;
    Barrier barriers[16];
    std::vector<char> memory;  // dynamic, then static shared memory, each array with a guard behind it
    std::vector<Array> arrays;
    std::vector<Delayed> delayed;  // in the order of the program
};

struct Launch {
    void (*call)(void**);
    void** arguments;
    size_t dynamic;
    uint64_t random;
    std::vector<Warp*> ready;
    std::vector<Block>* blocks;
    std::map<std::pair<unsigned, unsigned>, ClusterBarrier> clusters;  // by blockIdx.y and z
    size_t alive = 0;    // fibers that have not returned
    uint64_t polls = 0;  // since something happened
    bool polled = false;
    std::string failure;
    Context scheduler;
    Warp* warp = nullptr;  // of the fiber that runs
    int lane = 0;
} * launch;

void add_ready(Warp* warp, uint32_t lanes) {
    warp->ready |= lanes;
    if (!warp->listed) launch->ready.push_back(warp);
    warp->listed = true;
}

void fill(char* from, size_t bytes, uint16_t word) {
    for (size_t i = 0; i + 1 < bytes; i += 2) memcpy(from + i, &word, 2);
}

bool fence_holds(const char* from) {
    for (size_t i = 0; i < GUARD; i += 2)
        if (memcmp(from + i, &FENCE, 2)) return false;
    return true;
}

size_t place_array(Block& block, const void* site, size_t bytes) {
    size_t at = 0;
    for (const Array& array : block.arrays) at = (array.at + array.bytes + GUARD + 15) / 16 * 16;
    fill(block.memory.data() + at, bytes, POISON);
    fill(block.memory.data() + at + bytes, GUARD, FENCE);
    block.arrays.push_back({site, at, bytes});
    return at;
}

// Lets others see one of a block's stores: any of them, but those to one word in their order.
void deliver_one(Block& block) {
    if (block.delayed.empty()) return;
    unsigned* to = block.delayed[emulator::random_number() % block.delayed.size()].to;
    auto first = std::find_if(block.delayed.begin(), block.delayed.end(), [to](const Delayed& x) { return x.to == to; });
    if (emulator::random_number() % first->reluctance) return;
    *to = first->x;
    block.delayed.erase(first);
    emulator::progress();
}

void deliver_all(Block& block) {
    for (const Delayed& store : block.delayed) *store.to = store.x;
    block.delayed.clear();
}

void leave() { switch_to(launch->warp->lanes[launch->lane].context, launch->scheduler); }

void enter() {
    launch->call(launch->arguments);
    --launch->alive;
    emulator::progress();
    leave();
}

// ---- the schedule

void run_lane(Warp* warp) {
    int turn = emulator::random_number() % 32;
    int lane = (__builtin_ctz(warp->ready >> turn | static_cast<uint64_t>(warp->ready) << (32 - turn)) + turn) % 32;
    warp->ready &= ~(1u << lane);
    launch->warp = warp;
    launch->lane = lane;
    threadIdx = warp->lanes[lane].thread;
    blockIdx = warp->block->index;
    switch_to(launch->scheduler, warp->lanes[lane].context);
    if (*warp->lanes[lane].stack_end != 0) launch->failure = "a thread needs more stack than the emulator gives it";
}

void run_all() {
    const uint64_t patience = 1000000 + 2000 * launch->alive;
    while (!launch->ready.empty() && launch->failure.empty()) {
        size_t at = emulator::random_number() % launch->ready.size();
        Warp* warp = launch->ready[at];
        do {
            launch->polled = false;
            run_lane(warp);
        } while (warp->ready && !launch->polled && launch->failure.empty() && emulator::random_number() % 64);
        if (!warp->ready) {
            warp->listed = false;
            launch->ready[at] = launch->ready.back();
            launch->ready.pop_back();
        }
        if (launch->polls > patience) launch->failure = "threads poll for what no other thread writes";
    }
}

void describe_waiting(std::vector<Block>& blocks) {
    char line[256];
    int told = 0;
    for (Block& block : blocks) {
        for (int i = 0; i < 16 && told < 8; ++i) {
            Barrier& barrier = block.barriers[i];
            if (barrier.arrived == 0) continue;
            snprintf(line, sizeof line, "\n  block (%u, %u, %u): barrier %d has %d of %d threads, lane %d of warp %d among them",
                     block.index.x, block.index.y, block.index.z, i, barrier.arrived, barrier.threads,
                     barrier.waiting.empty() ? -1 : barrier.waiting[0].second,
                     barrier.waiting.empty() ? -1 : static_cast<int>(barrier.waiting[0].first - block.warps.data()));
            launch->failure += line;
            ++told;
        }
        for (size_t warp = 0; warp < block.warps.size() && told < 8; ++warp) {
            uint32_t waiting = 0, lane = 0;
            for (int i = 0; i < 32; ++i)
                if (block.warps[warp].words[i]) waiting |= 1u << (lane = i);
            if (!waiting) continue;
            snprintf(line, sizeof line, "\n  block (%u, %u, %u): warp %zu waits in %s, lanes 0x%08x of 0x%08x", block.index.x,
                     block.index.y, block.index.z, warp, block.warps[warp].name[lane], waiting, block.warps[warp].mask[lane]);
            launch->failure += line;
            ++told;
        }
    }
}

void check_fences(Block& block) {
    for (size_t i = 0; i < block.arrays.size(); ++i)
        if (!fence_holds(block.memory.data() + block.arrays[i].at + block.arrays[i].bytes))
            launch->failure = i == 0 ? "a write beyond the dynamic shared memory"
                                     : "a write beyond shared array " + std::to_string(i) + " (in the order of use)";
}

void set_up(Block& block, uint3 index, char* stacks) {
    size_t threads = static_cast<size_t>(blockDim.x) * blockDim.y * blockDim.z;
    block.index = index;
    block.warps = std::vector<Warp>(threads / 32);
    block.memory.resize(launch->dynamic + STATIC_SHARED + 64 * GUARD);
    place_array(block, nullptr, launch->dynamic);
    for (size_t i = 0; i < threads; ++i) {
        Warp& warp = block.warps[i / 32];
        Fiber& fiber = warp.lanes[i % 32];
        unsigned x = i % blockDim.x, y = i / blockDim.x % blockDim.y, z = i / blockDim.x / blockDim.y;
        fiber.thread = {x, y, z};
        fiber.stack_end = reinterpret_cast<uint32_t*>(stacks + i * STACK);
        *fiber.stack_end = 0;
        prepare(fiber.context, stacks + i * STACK, enter);
        warp.block = &block;
    }
    for (Warp& warp : block.warps) add_ready(&warp, 0xffffffffu);
    launch->alive += threads;
}

void run_blocks(const std::vector<uint3>& indices, char* stacks) {
    size_t threads = static_cast<size_t>(blockDim.x) * blockDim.y * blockDim.z;
    std::vector<Block> blocks(indices.size());
    launch->blocks = &blocks;
    for (size_t i = 0; i < blocks.size(); ++i) set_up(blocks[i], indices[i], stacks + i * threads * STACK);
    run_all();
    if (launch->failure.empty() && launch->alive) launch->failure = "deadlock";
    if (!launch->failure.empty()) describe_waiting(blocks);
    for (Block& block : blocks) {
        deliver_all(block);
        check_fences(block);
    }
}

}  // namespace

namespace emulator {

void fail(const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    launch->failure = text;
    leave();
    abort();
}

uint32_t random_number() {
    uint64_t& x = launch->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return static_cast<uint32_t>(x >> 32);
}

void progress() { launch->polls = 0; }

void poll() {
    ++launch->polls;
    launch->polled = true;
    deliver_one((*launch->blocks)[random_number() % launch->blocks->size()]);
    add_ready(launch->warp, 1u << launch->lane);
    leave();
}

unsigned load_relaxed(const unsigned* from) {
    const std::vector<Delayed>& own = launch->warp->block->delayed;
    auto last = std::find_if(own.rbegin(), own.rend(), [from](const Delayed& x) { return x.to == from; });
    return last == own.rend() ? *static_cast<const volatile unsigned*>(from) : last->x;
}

void store_relaxed(unsigned* to, unsigned x) {
    Block& block = *launch->warp->block;
    block.delayed.push_back({to, x, 1u << __builtin_ctz(random_number() | MOST_RELUCTANT)});
    while (block.delayed.size() > MOST_DELAYED) deliver_one(block);
    progress();
}

void fence() { deliver_all(*launch->warp->block); }

void collective(const char* name, uint32_t mask, Words& mine, void (*work)(Words* (&lanes)[32], uint32_t mask)) {
    Warp& warp = *launch->warp;
    int lane = launch->lane;
    if (!(mask >> lane & 1)) fail("%s: lane %d is not in its own mask 0x%08x", name, lane, mask);
    warp.words[lane] = &mine;
    warp.mask[lane] = mask;
    warp.name[lane] = name;
    Words* lanes[32] = {};
    for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        if (!warp.words[i]) return leave();
        if (warp.name[i] != name || warp.mask[i] != mask)
            fail("lanes of one warp disagree: lane %d in %s of 0x%08x, lane %d in %s of 0x%08x", lane, name, mask, i,
                 warp.name[i], warp.mask[i]);
        lanes[i] = warp.words[i];
    }
    work(lanes, mask);
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) warp.words[i] = nullptr;
    add_ready(&warp, mask);
    leave();
}

void barrier(int number, int threads, bool wait) {
    if (number < 0 || number > 15 || threads < 1 || threads % 32)
        fail("barrier %d for %d threads: there are barriers 0 to 15, for whole warps", number, threads);
    Barrier& barrier = launch->warp->block->barriers[number];
    if (barrier.arrived && barrier.threads != threads)
        fail("barrier %d: one thread waits for %d, another for %d", number, barrier.threads, threads);
    barrier.threads = threads;
    ++barrier.arrived;
    if (wait) barrier.waiting.push_back({launch->warp, launch->lane});
    if (barrier.arrived == threads) {
        for (auto [warp, lane] : barrier.waiting) add_ready(warp, 1u << lane);
        barrier.waiting.clear();
        barrier.arrived = 0;
        progress();
    }
    if (wait) leave();
}

ClusterBarrier& own_cluster() {
    if (launch->blocks->size() % gridDim.x) fail("a cluster whose blocks are not under way together");
    return launch->clusters[{blockIdx.y, blockIdx.z}];
}

void cluster_arrive() {
    fence();
    ClusterBarrier& barrier = own_cluster();
    launch->warp->lanes[launch->lane].awaited = barrier.opened + 1;
    if (++barrier.arrived < static_cast<int>(gridDim.x * blockDim.x * blockDim.y * blockDim.z)) return;
    barrier.arrived = 0;
    ++barrier.opened;
    for (auto [warp, lane] : barrier.waiting) add_ready(warp, 1u << lane);
    barrier.waiting.clear();
    progress();
}

void cluster_wait() {
    ClusterBarrier& barrier = own_cluster();
    if (barrier.opened >= launch->warp->lanes[launch->lane].awaited) return;
    barrier.waiting.push_back({launch->warp, launch->lane});
    leave();
}

void* shared_of_block(const void* mine, unsigned number) {
    Block& own = *launch->warp->block;
    size_t at = static_cast<const char*>(mine) - own.memory.data();
    if (at >= own.memory.size()) fail("what another block is asked for is not in shared memory");
    for (Block& block : *launch->blocks)
        if (block.index.x == number && block.index.y == blockIdx.y && block.index.z == blockIdx.z) return block.memory.data() + at;
    fail("block %u is not in the cluster", number);
}

void* shared_array(const void* site, size_t bytes) {
    Block& block = *launch->warp->block;
    size_t used = bytes;
    for (size_t i = 1; i < block.arrays.size(); ++i) {
        if (block.arrays[i].site == site) return block.memory.data() + block.arrays[i].at;
        used += block.arrays[i].bytes;
    }
    if (used > STATIC_SHARED) fail("static shared arrays of %zu bytes; a block has %zu", used, STATIC_SHARED);
    return block.memory.data() + place_array(block, site, bytes);
}

char* dynamic_shared() { return launch->warp->block->memory.data(); }

// A copy is made when the thread waits for it, and until then its place holds NaN.
void copy_async(void* to, const void* from, int bytes, int size) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size)
        fail("a copy of %d bytes between addresses that are no multiples of it", size);
    Fiber& fiber = launch->warp->lanes[launch->lane];
    if (fiber.batches.empty()) fiber.batches.push_back(0);
    fiber.copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, size});
    ++fiber.batches.back();
    fill(static_cast<char*>(to), size, POISON);
}

void commit_copies() {
    Fiber& fiber = launch->warp->lanes[launch->lane];
    if (fiber.batches.empty()) fiber.batches.push_back(0);
    fiber.batches.push_back(0);
}

void await_copies(size_t batches) {
    Fiber& fiber = launch->warp->lanes[launch->lane];
    while (fiber.batches.size() > batches + 1) {
        for (size_t i = 0; i < fiber.batches.front(); ++i) {
            const Copy& copy = fiber.copies[i];
            memset(copy.to, 0, copy.size);
            memcpy(copy.to, copy.from, copy.bytes);
        }
        fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + fiber.batches.front());
        fiber.batches.erase(fiber.batches.begin());
    }
}

}  // namespace emulator

// Runs a kernel over the grid, all blocks at once or one after the other; 0, or 1 and a message.
extern "C" __attribute__((visibility("default"))) int emulate(
    void (*call)(void**), void** arguments, const unsigned* grid, const unsigned* block, size_t dynamic, int at_once,
    uint64_t seed, char* message, size_t room) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    auto state = std::make_unique<Launch>();
    launch = state.get();
    launch->call = call;
    launch->arguments = arguments;
    launch->dynamic = (dynamic + 15) / 16 * 16;
    launch->random = (seed + 1) * 0x9e3779b97f4a7c15u;
    std::vector<uint3> indices;
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x) indices.push_back({x, y, z});
    for (size_t i = indices.size(); i > 1; --i) std::swap(indices[i - 1], indices[emulator::random_number() % i]);
    size_t bytes = STACK * block[0] * block[1] * block[2] * (at_once ? indices.size() : 1);
    void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) launch->failure = "no memory for the threads' stacks";
    else if (at_once) run_blocks(indices, static_cast<char*>(stacks));
    else
        for (size_t i = 0; i < indices.size() && launch->failure.empty(); ++i)
            run_blocks({indices[i]}, static_cast<char*>(stacks));
    if (stacks != MAP_FAILED) munmap(stacks, bytes);
    snprintf(message, room, "%s", launch->failure.c_str());
    return !launch->failure.empty();
}

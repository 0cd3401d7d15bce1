// What runs the kernels of emulate.h, compiled once for many of them.
#include "emulate.h"
#include "half.h"

#include <link.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

namespace emulated {

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

// A product by a group of four warps that has been issued.
struct Product {
    float (*sums)[4];
    int n;
    bool in_registers, down_a, down_b;
    unsigned rows[4];
    uint64_t a, b;
    bool bf16;
};

// Sums of products under way, which are no numbers where they lie, and what they have been till now.
struct Sums {
    float* at;
    std::vector<float> values;
};

struct Fiber : Thread {
    void* stack;
    bool done;
    // Asynchronous copies, and how many of them each group ends with.
    std::vector<Copy> copies;
    std::vector<size_t> groups;
    unsigned exchanges;
    // Products of its group of warps: those under way, how many of them each time ends with, and their sums.
    std::vector<Product> products;
    std::vector<size_t> times;
    std::vector<Sums> sums;
    bool begun;
    // What it has written to shared memory is shown to groups at the next barrier.
    bool showing;
};

struct Warp {
    // What lanes show each other, for two exchanges in turn: who is ahead begins the next one.
    uint64_t shown[2][32];
    unsigned arrived, round;
};

// Four warps.
struct Group {
    Fiber* first;
    unsigned arrived, round;
};

struct Block : Place {
    void* outside;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Group> groups;
    unsigned alive, arrived, round;
    size_t shared_bytes;
    // Shared memory as groups see it.
    std::vector<char> shown;
    bool reversed;
    const char* name;
    void (*body)(const void*);
    const void* argument;
};

__thread Place* block = nullptr;

static Block* mine() { return static_cast<Block*>(block); }
static Fiber* me() { return static_cast<Fiber*>(block->running); }

// Saves what a call preserves, and continues on another stack.
extern "C" void emulated_switch(void** save, void* to);
asm(R"(
.weak emulated_switch
.type emulated_switch,@function
emulated_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

void fail(const char* what) {
    fprintf(stderr, "emulated kernel %s: %s\n", block ? mine()->name : "", what);
    _exit(3);
}

// Continues with the next of `count` threads from `first` on that has not returned.
static void yield(unsigned first, unsigned count) {
    Block* b = mine();
    Fiber* me = emulated::me();
    for (unsigned step = 1; step <= count; step++) {
        unsigned turn = me->number - first + (b->reversed ? count - step : step);
        if (turn >= count) turn -= count;
        Fiber* next = &b->fibers[first + turn];
        if (next->done) continue;
        if (next == me) return;
        b->running = next;
        emulated_switch(&me->stack, next->stack);
        return;
    }
    emulated_switch(&me->stack, b->outside);
}

static void yield() { yield(0, mine()->fibers.size()); }

// The lanes of this thread's warp.
static unsigned first_lane() { return block->running->number / 32 * 32; }
static unsigned lanes() {
    return std::min<unsigned>(32, mine()->fibers.size() - first_lane());
}

void barrier() {
    Block* b = mine();
    if (++b->arrived == b->fibers.size()) {
        b->arrived = 0;
        b->round++;
        const bool all = std::all_of(b->fibers.begin(), b->fibers.end(),
                                     [](const Fiber& f) { return f.showing; });
        if (all) b->shown.assign(b->shared, b->shared + b->shared_bytes);
        for (Fiber& f : b->fibers) f.showing = false;
    } else {
        const unsigned round = b->round;
        for (unsigned long spins = 0; b->round == round; spins++) {
            if (spins > 20000000) fail("a thread does not reach the barrier");
            yield();
        }
    }
}

bool barrier_or(bool mine) {
    static thread_local bool any;
    barrier();
    any = false;
    barrier();
    any |= mine;
    barrier();
    return any;
}

// Only lanes wait for each other here: a warp is as far ahead of the others as barriers let it be.
const uint64_t* exchange(uint64_t value) {
    Block* b = mine();
    Fiber* me = emulated::me();
    Warp& w = b->warps[me->number / 32];
    uint64_t* shown = w.shown[me->exchanges++ % 2];
    shown[me->number % 32] = value;
    if (++w.arrived == lanes()) {
        w.arrived = 0;
        w.round++;
    } else {
        const unsigned round = w.round;
        for (unsigned long spins = 0; w.round == round; spins++) {
            if (spins > 1000000) fail("lanes of a warp diverge");
            yield(first_lane(), lanes());
        }
    }
    return shown;
}

unsigned ballot(bool here) {
    const uint64_t* shown = exchange(here);
    unsigned all = 0;
    for (unsigned i = 0; i < lanes(); i++) all |= (unsigned)(shown[i] != 0) << i;
    return all;
}

static void fiber_main() {
    mine()->body(mine()->argument);
    Fiber* me = emulated::me();
    if (!me->copies.empty()) fail("a thread returns before its copies have arrived");
    if (!me->products.empty()) fail("a thread returns before products of its group have ended");
    me->done = true;
    mine()->alive--;
    yield();
    __builtin_unreachable();
}

// Makes NaN of all `__shared__` variables, as of the rest of shared memory: a device leaves in them what
// was there. They are the thread-local variables of a program or library, of which this is one; `block` may be, too.
static void poison_variables(void* variable) {
    Place* kept = block;
    auto one = [](dl_phdr_info* of, size_t, void* own) {
        char* const data = (char*)of->dlpi_tls_data;
        for (int i = 0; data && i < of->dlpi_phnum; i++) {
            const auto& part = of->dlpi_phdr[i];
            if (part.p_type != PT_TLS || (size_t)((char*)own - data) >= part.p_memsz) continue;
            memset(data, 0xff, part.p_memsz);
            return 1;
        }
        return 0;
    };
    const int found = dl_iterate_phdr(one, variable);
    block = kept;
    if (!found) fail("the variables of shared memory are not found");
}

const size_t STACK = 96 << 10;

// Stacks of the threads of blocks by the number of threads, kept for later launches: to map them anew takes longer
// than most launches.
class Stacks {
    std::mutex mutex;
    std::multimap<unsigned, char*> unused;

public:
    char* take(unsigned n) {
        const std::lock_guard<std::mutex> own(mutex);
        const auto kept = unused.find(n);
        if (kept == unused.end()) return allocate(4096, STACK * n);
        char* const stacks = kept->second;
        unused.erase(kept);
        return stacks;
    }
    void give(unsigned n, char* stacks) {
        const std::lock_guard<std::mutex> own(mutex);
        unused.emplace(n, stacks);
    }
    ~Stacks() {
        for (const auto& [n, stacks] : unused) free(stacks);
    }
};
static Stacks all_stacks;

void run(const Launch& l, const char* name, void* variable, void (*body)(const void*),
         const void* parameters) {
    const auto [grid, size, shared_bytes, reversed] =
        std::tuple(l.grid, l.size, l.shared, l.reversed);
    const unsigned n = size.x * size.y * size.z;
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    Block b{};
    b.fibers.resize(n);
    b.warps.resize((n + 31) / 32);
    b.groups.resize(n / 128);
    b.size = size;
    b.grid = grid;
    b.reversed = reversed;
    b.name = name;
    b.body = body;
    b.argument = parameters;
    block = &b;
    char* stacks = all_stacks.take(n);
    for (uint64_t i = 0; i < blocks; i++) {
        const uint64_t k = reversed ? blocks - 1 - i : i;
        b.number = {(unsigned)(k % grid.x), (unsigned)(k / grid.x % grid.y),
                    (unsigned)(k / grid.x / grid.y)};
        b.alive = n;
        b.arrived = 0;
        // All ones are NaN.
        b.shared = allocate(1024, shared_bytes);
        b.shared_bytes = shared_bytes;
        b.shown.clear();
        memset(b.shared, 0xff, shared_bytes);
        poison_variables(variable);
        for (Warp& w : b.warps) w = Warp{};
        for (Group& g : b.groups) g = Group{};
        // Threads of the block before have left their frames without returning.
        ASAN_UNPOISON_MEMORY_REGION(stacks, STACK * n);
        for (unsigned t = 0; t < n; t++) {
            Fiber& f = b.fibers[t];
            f = Fiber{};
            f.number = t;
            f.thread = {t % size.x, t / size.x % size.y, t / size.x / size.y};
            // As after a call of fiber_main. Stacks of threads begin in different cache lines.
            void** top = (void**)(stacks + STACK * (t + 1) - 64 - t % 16 * 256);
            *--top = nullptr;
            *--top = (void*)fiber_main;
            for (int r = 0; r < 6; r++) *--top = nullptr;
            f.stack = top;
        }
        b.running = &b.fibers[reversed ? n - 1 : 0];
        emulated_switch(&b.outside, me()->stack);
        if (b.arrived) fail("a thread returned, and others wait for it at a barrier");
        free(b.shared);
    }
    all_stacks.give(n, stacks);
    block = nullptr;
}

}  // namespace emulated

using namespace emulated;

unsigned emulated::pack(float low, float high, bool bf16) {
    auto half = [=](float x) -> unsigned { return bf16 ? to_bf16(x) : to_f16(x); };
    return half(low) | half(high) << 16;
}
float emulated::widened(uint16_t bits) { return of_f16(bits); }

namespace emulated {

static void matrices(unsigned (&r)[4], const void* mine, bool transposed) {
    if ((uintptr_t)mine % 16) fail("a row of a matrix load is not aligned");
    const uint64_t* shown = exchange((uint64_t)mine);
    auto element = [&](int matrix, int row, int col) -> unsigned {
        return ((const uint16_t*)shown[matrix * 8 + row])[col];
    };
    const int g = lane() / 4, t = lane() % 4 * 2;
    for (int m = 0; m < 4; m++) {
        r[m] = transposed ? element(m, t, g) | element(m, t + 1, g) << 16
                          : element(m, g, t) | element(m, g, t + 1) << 16;
    }
    // Nobody writes these rows before all have read them.
    exchange(0);
}

// What a lane holds of the operands of a product.
struct Fragments {
    float a[4][2], b[2][2];
};

static float half_of(unsigned x, int i, bool bf16) {
    const uint16_t half = (uint16_t)(i ? x >> 16 : x);
    return bf16 ? of_bf16(half) : of_f16(half);
}
static void wide(float (&to)[2], unsigned x, bool bf16) {
    for (int i = 0; i < 2; i++) to[i] = half_of(x, i, bf16);
}

}  // namespace emulated

void load_matrices(unsigned (&r)[4], const void* row) { matrices(r, row, false); }
void load_matrices_transposed(unsigned (&r)[4], const void* row) { matrices(r, row, true); }

void emulated::multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                            bool bf16) {
    Fragments mine;
    for (int i = 0; i < 4; i++) wide(mine.a[i], a[i], bf16);
    wide(mine.b[0], b0, bf16);
    wide(mine.b[1], b1, bf16);
    const uint64_t* shown = exchange((uint64_t)&mine);
    const int g = lane() / 4, t = lane() % 4;
    for (int k = 0; k < 16; k++) {
        // Lane 4r + k/2%4 holds element k of row r of `a` and of column r of `b`.
        const int holder = k / 2 % 4, upper = k / 8;
        const Fragments& row = *(const Fragments*)shown[g * 4 + holder];
        for (int e = 0; e < 4; e++) {
            const Fragments& col = *(const Fragments*)shown[(2 * t + (e & 1)) * 4 + holder];
            c[e] += row.a[upper * 2 + e / 2][k & 1] * col.b[upper][k & 1];
        }
    }
    exchange(0);
}

namespace emulated {
static void copy(void* to, const void* from, size_t bytes, bool there) {
    static const uint64_t zeros[2] = {};
    if (((uintptr_t)to | (uintptr_t)from) % bytes) fail("an asynchronous copy is not aligned");
    if (!there) from = zeros;
    if (mine()->reversed) {
        memcpy(to, from, bytes);
        me()->showing = false;
    } else {
        me()->copies.push_back({to, from, bytes});
    }
}
}  // namespace emulated

void copy16_async(void* to, const void* from, bool there) { emulated::copy(to, from, 16, there); }
void copy4_async(void* to, const void* from, bool there) { emulated::copy(to, from, 4, there); }
void copies_begun() {
    Fiber* f = me();
    f->groups.push_back(f->copies.size());
}
void emulated::copies_end(size_t left) {
    Fiber* f = me();
    if (f->groups.size() <= left) return;
    const size_t groups = f->groups.size() - left, n = f->groups[groups - 1];
    for (size_t i = 0; i < n; i++) memcpy(f->copies[i].to, f->copies[i].from, f->copies[i].bytes);
    if (n > 0) f->showing = false;
    f->copies.erase(f->copies.begin(), f->copies.begin() + n);
    f->groups.erase(f->groups.begin(), f->groups.begin() + groups);
    for (size_t& g : f->groups) g -= n;
}

// ---- Products by groups. They read shared memory by the descriptors of their operands alone, as it was shown
// to them, as soon or as late as they may: sums are NaN until they are waited for.

namespace emulated {

static unsigned address(const void* at) {
    const size_t byte = (const char*)at - block->shared;
    if (byte >= mine()->shared_bytes) fail("an operand of a group is not in shared memory");
    return byte;
}

// The sums of products under way that lie here.
static Sums* sums_at(const float* at) {
    Fiber* me = emulated::me();
    const auto found = std::find_if(me->sums.begin(), me->sums.end(),
                                    [=](const Sums& s) { return s.at == at; });
    return found == me->sums.end() ? nullptr : &*found;
}

static void issue(float (*sums)[4], int n, bool add, Product p) {
    Fiber* me = emulated::me();
    if (!me->begun) fail("a product of a group without a fence before it");
    p.sums = sums;
    p.n = n;
    me->products.push_back(p);
    float* at = &sums[0][0];
    const Sums* before = sums_at(at);
    if (before && !add) fail("sums begin anew while products are added to them");
    for (const Sums& s : me->sums) {
        const bool apart = at + n * 4 <= s.at || s.at + s.values.size() <= at;
        if (!apart && (s.at != at || s.values.size() != (size_t)n * 4)) fail("sums share a part");
    }
    if (!before) {
        std::vector<float> values(n * 4, 0.0f);
        if (add) std::copy(at, at + n * 4, values.begin());
        me->sums.push_back({at, std::move(values)});
    }
    std::fill(at, at + n * 4, NAN);
}

static bool same(const Product& x, const Product& y) {
    return x.n == y.n && x.in_registers == y.in_registers && x.down_a == y.down_a &&
           x.down_b == y.down_b && x.a == y.a && x.b == y.b && x.bf16 == y.bf16;
}

// All four warps meet here, with the same products.
static void meet() {
    Fiber* me = emulated::me();
    const unsigned number = me->number / 128;
    if (number >= mine()->groups.size()) fail("a group of fewer than four warps");
    Group& g = mine()->groups[number];
    if (g.arrived == 0) g.first = me;
    if (!std::equal(me->products.begin(), me->products.end(), g.first->products.begin(),
                    g.first->products.end(), same)) {
        fail("warps of a group make different products");
    }
    if (++g.arrived == 128) {
        g.arrived = 0;
        g.round++;
        return;
    }
    const unsigned round = g.round;
    for (unsigned long spins = 0; g.round == round; spins++) {
        if (spins > 1000000) fail("a warp does not take part in a product of its group");
        yield(number * 128, 128);
    }
}

// Element k of line i of an operand: of row i of `a`, or of column i of `b`.
static float element(uint64_t operand, bool down, unsigned i, unsigned k, bool bf16) {
    auto bytes = [&](int bit) { return (operand >> bit & 0x3fff) << 4; };
    const uint64_t begin = bytes(0), leading = bytes(16), stride = bytes(32);
    if (operand >> 62 != 1) fail("an operand is not exchanged in 128 bytes");
    if (operand >> 46 & 0xffff || operand & 0xc000c000) fail("an operand with an offset of its base");
    if (stride % 1024 || begin % 1024 & (down ? ~0 : ~0x60)) fail("an operand is not aligned");
    uint64_t at = begin;
    at += down ? i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * 128
               : i / 8 * stride + i % 8 * 128 + k * 2;
    at ^= at >> 3 & 0x70;
    if (at + 2 > mine()->shown.size()) fail("a group reads what it was not shown");
    uint16_t half;
    memcpy(&half, &mine()->shown[at], 2);
    // All that a group reads is there until it is waited for.
    if (memcmp(&half, block->shared + at, 2)) fail("a tile changes while a group reads it");
    return half_of(half, 0, bf16);
}

// What a lane shows of a product: of the lines whose sums it holds, elements that others of its warp need
// too, read once for all of them.
struct Parts {
    const unsigned* rows;
    float a[2][4], b[2 * 32][2];
};

static void multiply(const Product& p) {
    Fiber* me = emulated::me();
    const int g = lane() / 4, t = lane() % 4, row = me->number % 128 / 32 * 16 + g;
    Parts mine;
    mine.rows = p.rows;
    for (int h = 0; h < 2 && !p.in_registers; h++) {
        for (int k = 0; k < 4; k++) {
            mine.a[h][k] = element(p.a, p.down_a, row + h * 8, t * 4 + k, p.bf16);
        }
    }
    for (int i = 0; i < p.n * 2; i++) {
        const int column = i / 2 * 8 + t * 2 + i % 2;
        for (int k = 0; k < 2; k++) {
            mine.b[i][k] = element(p.b, p.down_b, column, g * 2 + k, p.bf16);
        }
    }
    const uint64_t* shown = exchange((uint64_t)&mine);
    auto of = [=](int row, int column) { return (const Parts*)shown[row * 4 + column]; };
    float a[2][16];
    for (int k = 0; k < 16; k++) {
        for (int h = 0; h < 2; h++) {
            // As for multiply_add.
            a[h][k] = p.in_registers ? half_of(of(g, k / 2 % 4)->rows[k / 8 * 2 + h], k & 1, p.bf16)
                                     : of(g, k / 4)->a[h][k % 4];
        }
    }
    float* const sums = sums_at(&p.sums[0][0])->values.data();
    for (int i = 0; i < p.n * 2; i++) {
        float &upper = sums[i / 2 * 4 + i % 2], &lower = sums[i / 2 * 4 + i % 2 + 2];
        for (int k = 0; k < 16; k++) {
            const float b = of(k / 2, t)->b[i][k % 2];
            upper += a[0][k] * b;
            lower += a[1][k] * b;
        }
    }
    exchange(0);
}

}  // namespace emulated

unsigned shared_address(const void* at) { return emulated::address(at); }
void show_groups() { me()->showing = true; }
void group_begin() { me()->begun = true; }
void group_begun() {
    Fiber* me = emulated::me();
    const size_t before = me->times.empty() ? 0 : me->times.back(), now = me->products.size();
    me->times.push_back(now);
    me->begun = false;
    // Either at once, or when they are waited for: where copies come late, products read early.
    if (emulated::mine()->reversed) return;
    emulated::meet();
    for (size_t i = before; i < now; i++) emulated::multiply(me->products[i]);
}
// Sums that products under way still add to are no numbers until all of these have ended.
void emulated::group_wait(size_t left) {
    Fiber* me = emulated::me();
    meet();
    if (me->times.empty() ? !me->products.empty() : me->times.back() != me->products.size()) {
        fail("products of a group that were not said to have begun");
    }
    if (me->times.size() <= left) return;
    const size_t times = me->times.size() - left, n = me->times[times - 1];
    for (size_t i = 0; i < n && mine()->reversed; i++) multiply(me->products[i]);
    me->products.erase(me->products.begin(), me->products.begin() + n);
    me->times.erase(me->times.begin(), me->times.begin() + times);
    for (size_t& t : me->times) t -= n;
    if (!me->products.empty()) return;
    for (const Sums& s : me->sums) std::copy(s.values.begin(), s.values.end(), s.at);
    me->sums.clear();
}
void emulated::multiply_shared(float (*c)[4], int n, bool down_a, bool down_b, bool add, uint64_t a,
                               uint64_t b, bool bf16) {
    issue(c, n, add, {nullptr, 0, false, down_a, down_b, {}, a, b, bf16});
}
void emulated::multiply_held(float (*c)[4], const unsigned (&a)[4], uint64_t b, bool bf16) {
    issue(c, 8, true, {nullptr, 0, true, false, true, {a[0], a[1], a[2], a[3]}, 0, b, bf16});
}

namespace emulated {

void take(const Launch& l, void* parameters, size_t bytes) {
    if (l.count * 8 != bytes) {
        fprintf(stderr, "%zu words for a kernel that takes %zu\n", l.count, bytes / 8);
        fail("wrong parameters");
    }
    memcpy(parameters, l.words, bytes);
}

}  // namespace emulated

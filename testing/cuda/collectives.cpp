// Stands in for libnccl where there is no GPU: ranks are processes of one machine, messages are files in
// a folder of the job (STANDIN_DIR, or /tmp), and work is done by the streams of driver.cpp. A send is
// done when it was received, and a sum is folded in group order. With STANDIN_LOG every rank writes
// its calls to that folder; with STANDIN_HANG=N no collective after its first N is ever done. For tests.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "half.h"
#include "streams.h"

enum { OK = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { BYTE = 1, I32 = 2, F16 = 6, F32 = 7, BF16 = 9 };
enum { SUM = 0, MAX = 2, MIN = 3 };

struct Id {
    char text[128];
};

static bool is_float(int kind) { return kind == F32 || kind == BF16 || kind == F16; }
static size_t size_of(int kind) { return kind == BYTE ? 1 : kind == BF16 || kind == F16 ? 2 : 4; }

static bool inside(const void* at, size_t bytes) {
    static auto f = (bool (*)(uint64_t, size_t))driver("standin_inside");
    return bytes == 0 || f((uint64_t)at, bytes);
}

static void give(const std::string& file, const void* bytes, size_t n) {
    static std::atomic<int> count{0};
    const std::string made = file + "~" + std::to_string(getpid()) + "-" + std::to_string(count++);
    FILE* f = fopen(made.c_str(), "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) {
        fprintf(stderr, "stand-in of NCCL: %s cannot be written\n", made.c_str());
        _exit(3);
    }
    rename(made.c_str(), file.c_str());
}
static bool there(const std::string& file) {
    struct stat s;
    return stat(file.c_str(), &s) == 0;
}
static std::string look(const std::string& file) {
    while (!there(file)) usleep(30);
    FILE* f = fopen(file.c_str(), "rb");
    std::string all;
    char part[1 << 16];
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) all.append(part, n);
    fclose(f);
    return all;
}
static std::string take(const std::string& file, size_t expected) {
    std::string all = look(file);
    unlink(file.c_str());
    if (all.size() != expected) {
        fprintf(stderr, "stand-in of NCCL: %s has %zu B, %zu are expected\n", file.c_str(),
                all.size(), expected);
        _exit(3);
    }
    return all;
}

struct Comm {
    std::string path;
    int rank;
    std::vector<int> world;  // its members, as ranks of the job
    std::vector<uint64_t> sent, received;
    uint64_t calls = 0, splits = 0;
    int size() const { return world.size(); }
    std::string file(char kind, int from, int to, uint64_t n) const {
        return path + kind + std::to_string(n) + "." + std::to_string(from) + "." +
               std::to_string(to);
    }
};

// A part of a group of calls: what leaves first, what then comes, and what at last was to leave.
struct Call {
    void* stream;
    std::function<void()> leave, come, left;
};
static thread_local int depth = 0;
static thread_local std::vector<Call> open_calls;

static int add(Call c) {
    open_calls.push_back(std::move(c));
    if (depth) return OK;
    std::map<void*, std::vector<Call>> by;
    for (auto& c : open_calls) by[c.stream].push_back(c);
    open_calls.clear();
    for (auto& x : by) {
        auto calls = x.second;
        put(x.first, [calls] {
            for (auto& c : calls)
                if (c.leave) c.leave();
            for (auto& c : calls)
                if (c.come) c.come();
            for (auto& c : calls)
                if (c.left) c.left();
        });
    }
    return OK;
}

static void log(const Comm* c, const char* call, size_t count, int kind, int other) {
    const char* dir = getenv("STANDIN_LOG");
    if (!dir) return;
    std::string file = std::string(dir) + "/rank-" + std::to_string(c->world[c->rank]);
    FILE* f = fopen(file.c_str(), "a");
    fprintf(f, "%s", call);
    for (size_t i = 0; i < c->world.size(); i++) fprintf(f, "%c%d", i ? ',' : ' ', c->world[i]);
    fprintf(f, " %zu", count * size_of(kind));
    if (other >= 0) fprintf(f, " %d", c->world[other]);
    fprintf(f, "\n");
    fclose(f);
}

static float number(const char* at, int kind, size_t i) {
    float x;
    if (kind == BF16) return of_bf16(((const uint16_t*)at)[i]);
    if (kind == F16) return of_f16(((const uint16_t*)at)[i]);
    memcpy(&x, at + 4 * i, 4);
    return x;
}
static void fold(std::string& all, const std::string& next, int kind, int how) {
    for (size_t i = 0; i < all.size() / size_of(kind); i++) {
        const float a = number(all.data(), kind, i), b = number(next.data(), kind, i);
        const float x = how == SUM ? a + b : how == MAX ? std::max(a, b) : std::min(a, b);
        const uint16_t half = kind == BF16 ? to_bf16(x) : to_f16(x);
        if (size_of(kind) == 2) memcpy(&all[2 * i], &half, 2);
        else memcpy(&all[4 * i], &x, 4);
    }
}

// Every member's operand to those that `wants` says; `use` gets what came, in group order.
static int exchange(Comm* c, const void* from, std::function<std::pair<size_t, size_t>(int)> part,
                    std::function<bool(int)> wants, void* stream,
                    std::function<void(std::vector<std::string>)> use, size_t expected) {
    const uint64_t n = c->calls++;
    static std::atomic<int> done{0};
    const char* hang = getenv("STANDIN_HANG");
    const bool ends = !hang || done++ < atoi(hang);
    Call call;
    call.stream = stream;
    auto own = std::make_shared<std::string>();
    call.leave = [=] {
        while (!ends) usleep(10000);
        for (int p = 0; p < c->size(); p++) {
            auto [at, bytes] = part(p);
            if (p == c->rank) own->assign((const char*)from + at, bytes);
            else if (wants(p)) give(c->file('c', c->rank, p, n), (const char*)from + at, bytes);
        }
    };
    if (wants(c->rank)) {
        call.come = [=] {
            std::vector<std::string> all;
            for (int p = 0; p < c->size(); p++)
                all.push_back(p == c->rank ? *own : take(c->file('c', p, c->rank, n), expected));
            use(std::move(all));
        };
    }
    return add(call);
}

static std::string folded(const std::vector<std::string>& all, int kind, int how) {
    std::string sum = all[0];
    for (size_t p = 1; p < all.size(); p++) fold(sum, all[p], kind, how);
    return sum;
}

extern "C" {

int ncclGetVersion(int* v) {
    *v = 22900;
    return OK;
}
const char* ncclGetErrorString(int code) {
    return code == INVALID_ARGUMENT ? "invalid argument" : "an error of the stand-in";
}
int ncclGetUniqueId(Id* id) {
    const char* dir = getenv("STANDIN_DIR");
    snprintf(id->text, sizeof id->text, "%s/standin-nccl-XXXXXX", dir ? dir : "/tmp");
    return mkdtemp(id->text) ? OK : SYSTEM;
}
int ncclCommInitRank(Comm** made, int ranks, Id id, int rank) {
    if (rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    Comm* c = new Comm;
    c->path = std::string(id.text) + "/all-";
    c->rank = rank;
    for (int r = 0; r < ranks; r++) c->world.push_back(r);
    c->sent.resize(ranks);
    c->received.resize(ranks);
    give(c->path + "h" + std::to_string(rank), "", 0);
    for (int r = 0; r < ranks; r++) look(c->path + "h" + std::to_string(r));
    *made = c;
    return OK;
}
int ncclCommSplit(Comm* c, int color, int key, Comm** made, void*) {
    const std::string name = c->path + "s" + std::to_string(c->splits++) + ".";
    const int own[2] = {color, key};
    give(name + std::to_string(c->rank), own, sizeof own);
    std::vector<std::pair<int, int>> members;
    for (int r = 0; r < c->size(); r++) {
        int theirs[2];
        memcpy(theirs, look(name + std::to_string(r)).data(), sizeof theirs);
        if (color >= 0 && theirs[0] == color) members.push_back({theirs[1], r});
    }
    *made = nullptr;
    if (color < 0) return OK;
    std::sort(members.begin(), members.end());
    Comm* part = new Comm;
    part->path = name + std::to_string(color) + "-";
    for (auto& m : members) {
        if (m.second == c->rank) part->rank = part->world.size();
        part->world.push_back(c->world[m.second]);
    }
    part->sent.resize(part->size());
    part->received.resize(part->size());
    *made = part;
    return OK;
}
int ncclCommDestroy(Comm* c) {
    delete c;
    return OK;
}
int ncclCommGetAsyncError(Comm*, int* state) {
    *state = OK;
    return OK;
}
int ncclGroupStart() {
    depth++;
    return OK;
}
int ncclGroupEnd() {
    if (depth == 0) return INVALID_USAGE;
    if (--depth || open_calls.empty()) return OK;
    Call last = open_calls.back();
    open_calls.pop_back();
    return add(last);
}

int ncclSend(const void* from, size_t count, int kind, int to, Comm* c, void* stream) {
    const size_t bytes = count * size_of(kind);
    if (to < 0 || to >= c->size() || !inside(from, bytes)) return INVALID_ARGUMENT;
    log(c, "send", count, kind, to);
    const std::string file = c->file('m', c->rank, to, c->sent[to]++);
    Call call;
    call.stream = stream;
    call.leave = [=] { give(file, from, bytes); };
    call.left = [=] {
        while (there(file)) usleep(30);
    };
    return add(call);
}
int ncclRecv(void* to, size_t count, int kind, int from, Comm* c, void* stream) {
    const size_t bytes = count * size_of(kind);
    if (from < 0 || from >= c->size() || !inside(to, bytes)) return INVALID_ARGUMENT;
    log(c, "recv", count, kind, from);
    const std::string file = c->file('m', from, c->rank, c->received[from]++);
    Call call;
    call.stream = stream;
    call.come = [=] { memcpy(to, take(file, bytes).data(), bytes); };
    return add(call);
}
int ncclBroadcast(const void* from, void* to, size_t count, int kind, int root, Comm* c,
                  void* stream) {
    const size_t bytes = count * size_of(kind);
    if (root < 0 || root >= c->size() || !inside(from, bytes) || !inside(to, bytes))
        return INVALID_ARGUMENT;
    log(c, "broadcast", count, kind, root);
    // Everybody's goes to everybody; what the others gave is of no meaning.
    auto part = [=](int) { return std::pair<size_t, size_t>(0, bytes); };
    auto use = [=](std::vector<std::string> all) { memcpy(to, all[root].data(), bytes); };
    return exchange(c, from, part, [](int) { return true; }, stream, use, bytes);
}
int ncclAllGather(const void* from, void* to, size_t count, int kind, Comm* c, void* stream) {
    const size_t bytes = count * size_of(kind);
    if (!inside(from, bytes) || !inside(to, bytes * c->size())) return INVALID_ARGUMENT;
    log(c, "all_gather", count, kind, -1);
    auto part = [=](int) { return std::pair<size_t, size_t>(0, bytes); };
    auto use = [=](std::vector<std::string> all) {
        for (size_t p = 0; p < all.size(); p++)
            memcpy((char*)to + p * bytes, all[p].data(), bytes);
    };
    return exchange(c, from, part, [](int) { return true; }, stream, use, bytes);
}
int ncclAllReduce(const void* from, void* to, size_t count, int kind, int how, Comm* c,
                  void* stream) {
    const size_t bytes = count * size_of(kind);
    if (!is_float(kind) || !inside(from, bytes) || !inside(to, bytes))
        return INVALID_ARGUMENT;
    log(c, "all_reduce", count, kind, -1);
    auto part = [=](int) { return std::pair<size_t, size_t>(0, bytes); };
    auto use = [=](std::vector<std::string> all) {
        memcpy(to, folded(all, kind, how).data(), bytes);
    };
    return exchange(c, from, part, [](int) { return true; }, stream, use, bytes);
}
int ncclReduce(const void* from, void* to, size_t count, int kind, int how, int root, Comm* c,
               void* stream) {
    const size_t bytes = count * size_of(kind);
    if (!is_float(kind) || root < 0 || root >= c->size() || !inside(from, bytes) ||
        (root == c->rank && !inside(to, bytes)))
        return INVALID_ARGUMENT;
    log(c, "reduce", count, kind, root);
    auto part = [=](int) { return std::pair<size_t, size_t>(0, bytes); };
    auto use = [=](std::vector<std::string> all) {
        memcpy(to, folded(all, kind, how).data(), bytes);
    };
    return exchange(c, from, part, [=](int p) { return p == root; }, stream, use, bytes);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int kind, int how, Comm* c,
                      void* stream) {
    const size_t bytes = count * size_of(kind);
    if (!is_float(kind) || !inside(from, bytes * c->size()) || !inside(to, bytes))
        return INVALID_ARGUMENT;
    log(c, "reduce_scatter", count, kind, -1);
    auto part = [=](int p) { return std::pair<size_t, size_t>(p * bytes, bytes); };
    auto use = [=](std::vector<std::string> all) {
        memcpy(to, folded(all, kind, how).data(), bytes);
    };
    return exchange(c, from, part, [](int) { return true; }, stream, use, bytes);
}
}

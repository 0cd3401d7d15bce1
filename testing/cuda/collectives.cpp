// Stands in for libnccl where there is no GPU: ranks are processes of one machine, or threads of this
// one, whose messages are in memory or in a folder (board.h), and work is done by the streams of
// driver.cpp. A send is done when it was received, and a sum is folded in group order. What a
// communicator does first connects its members, of which each waits for the others, and takes memory for
// each direction and for collectives: STANDIN_LAZY bytes. What a call returns, and when: comm.h. With STANDIN_LOG every rank writes
// its calls to that folder; with STANDIN_HANG=N no collective after its first N is ever done; with
// STANDIN_ASYNC=CODE that is what a communicator says when it was asked some times; with STANDIN_DESTROY
// its end waits for all members. For tests.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm.h"
#include "half.h"

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

// A part of a group of calls: what leaves first, what then comes, and what at last was to leave.
struct Call {
    Comm* comm;
    void* stream;
    // What it needs connected, and the members that have to come for that.
    std::string link;
    std::vector<int> members;
    std::function<void()> leave, come, left;
};
static thread_local int depth = 0;
static thread_local std::vector<Call> open_calls;

// Connects what these calls use for the first time: the host waits for all members, and memory of the
// device is taken.
static int connect(const std::vector<Call>& calls) {
    static auto alloc = (int (*)(uint64_t*, size_t))driver("cuMemAlloc_v2");
    std::vector<const Call*> fresh;
    for (auto& c : calls)
        if (c.comm->connected.insert(c.link).second) fresh.push_back(&c);
    auto name = [](const Call* c, int r) {
        return c->comm->path + "l" + c->link + "." + std::to_string(r);
    };
    for (auto c : fresh) give(name(c, c->comm->rank), "", 0);
    for (auto c : fresh)
        for (int r : c->members) look(name(c, r), c->comm->aborted);
    const size_t bytes = setting("STANDIN_LAZY", 0);
    for (auto c : fresh) {
        uint64_t buffer;
        if (!bytes) continue;
        if (alloc(&buffer, bytes)) {
            last_error = "Failed to CUDA calloc " + std::to_string(bytes) + " bytes";
            return CUDA;
        }
        c->comm->buffers.push_back(buffer);
    }
    return OK;
}

// With STANDIN_LOG every rank writes what begins and ends on its device, in that order: `+` and `-` of collectives,
// with the members, `>` and `<` of sends, and `k` of kernels of its own.
static int self = -1;
static void note(char what, const Comm* c) {
    const char* dir = getenv("STANDIN_LOG");
    if (!dir || self < 0) return;
    static std::mutex& own = *new std::mutex;
    std::lock_guard<std::mutex> held(own);
    static FILE* f = fopen((std::string(dir) + "/order-" + std::to_string(self)).c_str(), "a");
    fprintf(f, "%c", what);
    for (size_t i = 0; c && i < c->world.size(); i++) fprintf(f, " %d", c->world[i]);
    fprintf(f, "\n");
    fflush(f);
}
static void note(const std::vector<Call>& calls, bool begins) {
    if (calls[0].link == "c") note(begins ? '+' : '-', calls[0].comm);
    else if (calls[0].leave) note(begins ? '>' : '<', calls[0].comm);
}
// Of hosts with STANDIN_HOST ranks: what leaves one takes 10 ms longer, or STANDIN_FAR microseconds.
static void far(const Comm* c) {
    const int host = setting("STANDIN_HOST", 0);
    for (int member : c->world)
        if (host && member / host != c->world[0] / host) {
            usleep(setting("STANDIN_FAR", 10000));
            return;
        }
}

// The calls of a group are of one communicator, and of one stream.
static int add(Call c) {
    if (int e = busy(c.comm)) return e;
    open_calls.push_back(std::move(c));
    if (depth) return OK;
    std::vector<Call> all;
    all.swap(open_calls);
    Comm* comm = all[0].comm;
    void* stream = all[0].stream;
    for (auto& c : all)
        if (c.comm != comm || c.stream != stream) return INVALID_USAGE;
    return begin(comm, [=] {
        if (int e = connect(all)) return e;
        queue(comm, stream, [=] {
            note(all, true);
            far(comm);
            for (auto& c : all)
                if (c.leave) c.leave();
            for (auto& c : all)
                if (c.come) c.come();
            for (auto& c : all)
                if (c.left) c.left();
            note(all, false);
        });
        return (int)OK;
    });
}

static void log(const Comm* c, const char* call, size_t count, int kind, int other) {
    arrive(call);
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
    Call call = {c, stream, "c"};
    for (int r = 0; r < c->size(); r++) call.members.push_back(r);
    auto own = std::make_shared<std::string>();
    call.leave = [=] {
        while (!ends) {
            if (c->aborted) throw Aborted();
            usleep(10000);
        }
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
                all.push_back(p == c->rank ? *own : take(c->file('c', p, c->rank, n), expected, c->aborted));
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

static std::string direction(int from, int to) {
    return std::to_string(from) + "-" + std::to_string(to);
}

extern "C" {

int ncclGetVersion(int* v) {
    *v = setting("STANDIN_NCCL", 22900);
    return OK;
}
const char* ncclGetErrorString(int code) {
    switch (code) {
        case CUDA: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        case SYSTEM: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case INTERNAL: return "internal error - please report this issue to the NCCL developers";
        case INVALID_ARGUMENT: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case REMOTE: return "remote process exited or there was a network error";
        default: return "unknown result code";
    }
}
const char* ncclGetLastError(Comm*) { return last_error.c_str(); }
int ncclGetUniqueId(Id* id) {
    static std::atomic<int> jobs{0};
    const char* dir = getenv("STANDIN_DIR");
    if (!dir) {
        snprintf(id->text, sizeof id->text, "job %d", jobs++);
        return OK;
    }
    snprintf(id->text, sizeof id->text, "%s/standin-nccl-XXXXXX", dir);
    return mkdtemp(id->text) ? OK : SYSTEM;
}
int ncclCommInitRankConfig(Comm** made, int ranks, Id id, int rank, const Config* given) {
    arrive("ncclCommInitRank");
    Config config;
    if (int e = read(given, &config)) return e;
    if (rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    self = rank;
    ((void (*)(void (*)()))driver("standin_on_kernel"))([] { note('k', nullptr); });
    Comm* c = new Comm;
    c->path = std::string(id.text) + "/all-";
    c->rank = rank;
    c->blocking = blocks(config);
    for (int r = 0; r < ranks; r++) c->world.push_back(r);
    c->sent.resize(ranks);
    c->received.resize(ranks);
    *made = c;
    return begin(c, [=] {
        give(c->path + "h" + std::to_string(rank), "", 0);
        for (int r = 0; r < ranks; r++) look(c->path + "h" + std::to_string(r), c->aborted);
        return (int)OK;
    });
}
static void log_split(const std::string& line) {
    const char* dir = getenv("STANDIN_LOG");
    if (!dir) return;
    FILE* f = fopen((std::string(dir) + "/split").c_str(), "a");
    fprintf(f, "%s\n", line.c_str());
    fclose(f);
}
// The new communicator is there when that which is split is no longer busy, and is busy itself a moment longer.
int ncclCommSplit(Comm* c, int color, int key, Comm** made, const Config* given) {
    arrive("ncclCommSplit");
    Config config;
    if (int e = read(given, &config)) return e;
    if (int e = busy(c)) return e;
    const std::string name = c->path + "s" + std::to_string(c->splits++) + ".";
    const std::string label = config.name ? config.name : "";
    *made = nullptr;
    return begin(c, [=] {
        const int own[2] = {color, key};
        give(name + std::to_string(c->rank), own, sizeof own);
        std::vector<std::pair<int, int>> members;
        for (int r = 0; r < c->size(); r++) {
            int theirs[2];
            memcpy(theirs, look(name + std::to_string(r), c->aborted).data(), sizeof theirs);
            if (color >= 0 && theirs[0] == color) members.push_back({theirs[1], r});
        }
        if (color < 0) {
            log_split("none");
            return (int)OK;
        }
        std::sort(members.begin(), members.end());
        Comm* part = new Comm;
        part->path = name + std::to_string(color) + "-";
        part->blocking = blocks(config);
        part->turns = turns(part, label);
        for (auto& m : members) {
            if (m.second == c->rank) part->rank = part->world.size();
            part->world.push_back(c->world[m.second]);
        }
        part->sent.resize(part->size());
        part->received.resize(part->size());
        log_split(std::to_string(part->rank) + " of " + std::to_string(part->size()) + ": " + label + ", blocks " +
                  std::to_string(config.most));
        if (!part->blocking) begin(part, [] { return usleep(100) * 0; });
        *made = part;
        return (int)OK;
    });
}
int ncclCommFinalize(Comm* c) {
    arrive("ncclCommFinalize");
    if (int e = busy(c)) return e;
    return begin(c, [=] {
        if (getenv("STANDIN_DESTROY")) {
            give(c->path + "d" + std::to_string(c->rank), "", 0);
            for (int r = 0; r < c->size(); r++) look(c->path + "d" + std::to_string(r), c->aborted);
        }
        return (int)OK;
    });
}
// Waits for what goes on.
int ncclCommDestroy(Comm* c) {
    static auto release = (int (*)(uint64_t))driver("cuMemFree_v2");
    arrive("ncclCommDestroy");
    while (c->state == IN_PROGRESS) usleep(100);
    for (auto buffer : c->buffers) release(buffer);
    delete c;
    return OK;
}
// What is queued may still use the communicator, which stays.
int ncclCommAbort(Comm* c) {
    c->aborted = true;
    return OK;
}
int ncclCommGetAsyncError(Comm* c, int* state) {
    lives(c);
    const int code = setting("STANDIN_ASYNC", OK);
    *state = c->state;
    if (*state) return OK;
    if (code && c->calls > 4 && c->asked++ > 50) *state = code;
    if (*state) last_error = "NET/IB : Got completion with error 12";
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
    Call call = {c, stream, direction(c->rank, to), {c->rank, to}};
    call.leave = [=] { give(file, from, bytes); };
    call.left = [=] { await(file, false, c->aborted); };
    return add(call);
}
int ncclRecv(void* to, size_t count, int kind, int from, Comm* c, void* stream) {
    const size_t bytes = count * size_of(kind);
    if (from < 0 || from >= c->size() || !inside(to, bytes)) return INVALID_ARGUMENT;
    log(c, "recv", count, kind, from);
    const std::string file = c->file('m', from, c->rank, c->received[from]++);
    Call call = {c, stream, direction(from, c->rank), {c->rank, from}};
    call.come = [=] { memcpy(to, take(file, bytes, c->aborted).data(), bytes); };
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

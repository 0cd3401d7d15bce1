// Communicators of collectives.cpp: what one is, how its calls go on beside their caller, and in which
// order they begin and end.
//
// Of a communicator whose configuration says `blocking = 0` (and NCCL_COMM_BLOCKING nothing else) every call
// that may take long returns ncclInProgress, goes on in a thread, a moment late now and then, and is queued on
// its stream only there; until ncclCommGetAsyncError says something else nothing may be done with it. Calls
// of one communicator follow each other on the device, whatever their streams. With
// NCCL_LAUNCH_ORDER_IMPLICIT=1 those of all communicators of a device begin in the order of their calls; if
// the driver (STANDIN_DRIVER, as 12020) or the CUDA that the library was built with is older than 12.3, each
// ends before the next one begins.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "board.h"
#include "faults.h"
#include "streams.h"

enum { OK = 0, CUDA = 1, SYSTEM = 2, INTERNAL = 3, INVALID_ARGUMENT = 4,
       INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };

// What is said of the last error.
static std::string& last_error = *new std::string;

// Calls that wait for those before them: until they have begun, or are done.
struct Line {
    std::mutex lock;
    std::condition_variable moved;
    uint64_t issued = 0, begun = 0, done = 0;

    uint64_t ticket() {
        std::lock_guard<std::mutex> held(lock);
        return issued++;
    }
    bool awaits(uint64_t n) {
        std::lock_guard<std::mutex> held(lock);
        return done < n;
    }
    void await(uint64_t Line::*what, uint64_t n, const Stop& stop) {
        std::unique_lock<std::mutex> held(lock);
        while (this->*what < n) {
            if (stop) throw Aborted();
            moved.wait_for(held, SOME);
        }
    }
    // Those that are aborted come out of turn.
    void pass(uint64_t Line::*what, uint64_t n) {
        std::lock_guard<std::mutex> held(lock);
        this->*what = std::max(this->*what, n + 1);
        moved.notify_all();
    }
};

struct Comm {
    std::string path;
    int rank;
    std::vector<int> world;  // its members, as ranks of the job
    std::vector<uint64_t> sent, received;
    uint64_t calls = 0, splits = 0;
    Stop aborted{false};
    std::atomic<int> asked{0};
    bool blocking = true;
    // Of what goes on beside its caller: IN_PROGRESS, or how it has ended.
    std::atomic<int> state{OK};
    Line line;
    Line* turns = &line;
    // What is connected: collectives, and directions between two members.
    std::set<std::string> connected;
    std::vector<uint64_t> buffers;
    int size() const { return world.size(); }
    std::string file(char kind, int from, int to, uint64_t n) const {
        return path + kind + std::to_string(n) + "." + std::to_string(from) + "." +
               std::to_string(to);
    }
};

// ncclConfig_t of 2.27, as nccl.h has it, of which those that are older have less.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, least, most;
    const char* network;
    int share, traffic;
    const char* name;
};
static const int UNSET = INT32_MIN;

// What is asked for; an error if that cannot be.
static int read(const Config* given, Config* read) {
    if (!given || given->size < offsetof(Config, traffic) || given->magic != 0xcafebeef) return INVALID_ARGUMENT;
    *read = {};
    read->traffic = UNSET;
    memcpy(read, given, std::min(given->size, sizeof *read));
    if (read->version < 21800 || (read->version < 22700 && read->name)) return INVALID_ARGUMENT;
    const bool shares = read->share != 0 && read->share != UNSET;
    return shares || read->most == 0 ? INVALID_ARGUMENT : OK;
}
static bool blocks(const Config& c) {
    const int asked = setting("NCCL_COMM_BLOCKING", 2);
    return asked < 2 ? asked : c.blocking != 0;
}

// Nothing may be done with a communicator that was aborted: NCCL has freed it.
static void lives(const Comm* c) {
    if (!c->aborted) return;
    fprintf(stderr, "stand-in of NCCL: a communicator is used that was aborted\n");
    _exit(3);
}
// Nothing may be done with one that is busy.
static int busy(const Comm* c) {
    lives(c);
    if (c->state != IN_PROGRESS) return OK;
    last_error = "Attempt to use communicator before the previous operation returned ncclSuccess";
    return INVALID_ARGUMENT;
}

// Does what may take long: at once, or beside its caller.
static int begin(Comm* c, std::function<int()> work) {
    auto all = [=] {
        try {
            return work();
        } catch (Aborted) {
            return (int)REMOTE;
        }
    };
    if (c->blocking) return all();
    static auto as = (void* (*)())driver("standin_thread");
    static auto become = (void (*)(void*))driver("standin_become");
    static std::atomic<unsigned> turn{(unsigned)setting("STANDIN_SEED", 1)};
    c->state = IN_PROGRESS;
    void* caller = as();
    const unsigned late = (turn++ * 2654435761u) >> 24;
    std::thread([=] {
        become(caller);
        arrive("launch");
        if (late < 16) usleep(20 * late);
        c->state = all();
    }).detach();
    return IN_PROGRESS;
}

// The CUDA that the library was built with is in its text, as NCCL's is.
static const char BUILT[] = "NCCL version 2.29.0+cuda13.0";
static const char* volatile built_text = BUILT;
enum Order { NONE, LAUNCH, SERIAL };
static Order implicit_order() {
    static const Order found = [] {
        if (setting("NCCL_LAUNCH_ORDER_IMPLICIT", 0) != 1) return NONE;
        const char* cuda = built_text + sizeof BUILT - 5;
        const int built = ((cuda[0] - '0') * 10 + cuda[1] - '0') * 1000 + (cuda[3] - '0') * 10;
        return std::min<int>(built, setting("STANDIN_DRIVER", 13000)) >= 12030 ? LAUNCH : SERIAL;
    }();
    return found;
}
// Calls of all communicators of this thread's device.
static Line& of_device() {
    static auto device = (void* (*)())driver("standin_device");
    static std::mutex& lock = *new std::mutex;
    static auto& all = *new std::map<void*, Line>;
    std::lock_guard<std::mutex> held(lock);
    return all[device()];
}

// With STANDIN_COLUMN the directions up and down the stages have a communicator each, as it were: those whose label
// says so have their turns in common.
static Line* turns(Comm* c, const std::string& label) {
    int from, to;
    if (!getenv("STANDIN_COLUMN") || sscanf(label.c_str(), "pp %d to %d", &from, &to) != 2) return &c->line;
    static Line* columns = new Line[2];
    return columns + (from < to);
}

// What could begin, and is not its communicator's next, is a line of the file `held`, with STANDIN_LOG.
static void held_up(const Comm* c) {
    const char* dir = getenv("STANDIN_LOG");
    if (!dir) return;
    FILE* f = fopen((std::string(dir) + "/held").c_str(), "a");
    for (int member : c->world) fprintf(f, "%d ", member);
    fprintf(f, "\n");
    fclose(f);
}

// Queues what a communicator does on a stream, in its turn.
static void queue(Comm* c, void* stream, std::function<void()> work) {
    Line* device = &of_device();
    const uint64_t own = c->turns->ticket(), among = device->ticket();
    put(stream, [=] {
        const Order order = implicit_order();
        try {
            if (c->turns->awaits(own)) held_up(c);
            c->turns->await(&Line::done, own, c->aborted);
            if (order != NONE) device->await(order == LAUNCH ? &Line::begun : &Line::done, among, c->aborted);
            device->pass(&Line::begun, among);
            work();
        } catch (Aborted) {
            device->pass(&Line::begun, among);
        }
        c->turns->pass(&Line::done, own);
        device->pass(&Line::done, among);
    });
}

// Streams of driver.cpp, and what they share on a device. A stream is a thread that does its work in
// order; it takes the work from a hardware queue, of which a device has k: streams take turns on them
// as they are made, and what is at the head of one is taken when it begins. So a stream that is busy
// holds up those behind it, as on a device. Some work begins late, by STANDIN_SEED: a quarter of a
// millisecond, seldom 2, and once in a long while 20; devices are 1 to 4 times slower than that.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "faults.h"

typedef std::function<void()> Work;
typedef std::vector<Work> Graph;

// What follows outlives the threads of streams, which end with the process.
static std::mutex& order = *new std::mutex;
static std::atomic<unsigned> seed{(unsigned)setting("STANDIN_SEED", 1)};

struct Queue;
// What the streams of a device share.
struct Shared {
    std::vector<std::deque<Queue*>> hardware;
    size_t streams = 0, used = 0;
    std::set<Queue*> queues;
    // Told when a stream has nothing more to do, and when the device is lost.
    std::condition_variable idle;
    std::atomic<bool> lost{false};
};
static Shared* on_device(int number) {
    static Shared* all = new Shared[16];
    return all + number;
}

// Work up to some moment.
struct Mark {
    std::atomic<bool> done{false};
    std::condition_variable told;
};

// A thread that works.
struct Queue {
    Shared* device;
    size_t number;
    std::deque<Work> work;
    std::condition_variable ready;
    std::atomic<size_t> open{0};  // of the work, what is not done
    bool gone = false, first = false;
    unsigned turn;
    // What is kept while it captures, for which thread, and whether something illegal was done.
    std::shared_ptr<Graph> graph;
    std::thread::id captor;
    bool spoiled = false;

    std::deque<Queue*>& line() { return device->hardware[number % device->hardware.size()]; }
    // A number below a bound.
    unsigned draw(unsigned bound) {
        turn = turn * 1664525 + 1013904223;
        return (turn >> 8) % bound;
    }
    void dawdle() {
        const unsigned slower = 1 + (device - on_device(0) + seed) % 4;
        if (draw(4096) == 0) usleep(20000);
        else if (draw(256) == 0) usleep(draw(2000) * slower);
        else if (draw(16) == 0) usleep(draw(256));
    }
};

static void serve(Queue* q) {
    std::unique_lock<std::mutex> held(order);
    for (;;) {
        q->ready.wait(held, [&] { return q->work.empty() ? q->gone : q->line().front() == q; });
        if (q->work.empty()) break;
        // A device that is lost does nothing more.
        if (q->device->lost) return;
        Work next = std::move(q->work.front());
        q->work.pop_front();
        auto& line = q->line();
        line.pop_front();
        if (!line.empty()) line.front()->ready.notify_one();
        held.unlock();
        q->dawdle();
        next();
        next = nullptr;
        held.lock();
        if (--q->open == 0) q->device->idle.notify_all();
    }
    q->device->queues.erase(q);
    delete q;
}

// A stream of the device, which begins to serve.
static Queue* make_queue(Shared* device) {
    std::lock_guard<std::mutex> held(order);
    if (device->hardware.empty()) {
        const auto k = setting("CUDA_DEVICE_MAX_CONNECTIONS", 8);
        device->hardware.resize(k < 1 ? 1 : k > 32 ? 32 : k);
    }
    Queue* q = new Queue;
    q->device = device;
    q->number = device->streams++;
    q->turn = seed * 2654435761u + q->number * 40503u + (unsigned)(device - on_device(0));
    device->queues.insert(q);
    std::thread(serve, q).detach();
    return q;
}

static void put(Queue* q, Work work) {
    std::lock_guard<std::mutex> held(order);
    if (q->graph) {
        q->graph->push_back(std::move(work));
        return;
    }
    q->open++;
    q->work.push_back(std::move(work));
    q->line().push_back(q);
    if (q->line().front() == q) q->ready.notify_one();
}

// Waits until the streams of a device have nothing to do, or the device is lost.
static void until_idle(Shared* device) {
    std::unique_lock<std::mutex> held(order);
    device->idle.wait(held, [&] {
        if (device->lost) return true;
        for (Queue* q : device->queues)
            if (q->open) return false;
        return true;
    });
}

// Handlers at the end of a process wait for its devices, as the driver's may (STANDIN_EXIT).
static struct AtExit {
    ~AtExit() {
        for (int d = 0; getenv("STANDIN_EXIT") && d < 16; d++) until_idle(on_device(d));
    }
} at_exit;

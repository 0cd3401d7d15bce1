// What ranks of collectives.cpp leave for each other, by name: in memory, if all are threads of this
// process, or as files of a folder, if they are processes (STANDIN_DIR). Whoever waits stops when its
// communicator is aborted.
#pragma once
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

struct Aborted {};
typedef std::atomic<bool> Stop;

// A part of what lies in memory, with those that wait for it.
struct Shelf {
    std::mutex lock;
    std::condition_variable changed;
    std::unordered_map<std::string, std::string> all;
};
static Shelf& shelf(const std::string& name) {
    static Shelf* shelves = new Shelf[64];
    return shelves[std::hash<std::string>()(name) % 64];
}
static bool is_file(const std::string& name) { return name[0] == '/'; }

// Whoever may wait for ever looks at this from time to time.
static const auto SOME = std::chrono::milliseconds(20);

static void give(const std::string& name, const void* bytes, size_t n) {
    if (!is_file(name)) {
        Shelf& s = shelf(name);
        std::lock_guard<std::mutex> held(s.lock);
        s.all[name].assign((const char*)bytes, n);
        s.changed.notify_all();
        return;
    }
    static std::atomic<int> count{0};
    const std::string made = name + "~" + std::to_string(getpid()) + "-" + std::to_string(count++);
    FILE* f = fopen(made.c_str(), "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) {
        fprintf(stderr, "stand-in of NCCL: %s cannot be written\n", made.c_str());
        _exit(3);
    }
    rename(made.c_str(), name.c_str());
}
// Waits until something is there, or until it no more is.
static void await(const std::string& name, bool there, const Stop& stop) {
    if (is_file(name)) {
        struct stat s;
        for (int nap = 30; (stat(name.c_str(), &s) == 0) != there; nap = std::min(2 * nap, 1000)) {
            if (stop) throw Aborted();
            usleep(nap);
        }
        return;
    }
    Shelf& s = shelf(name);
    std::unique_lock<std::mutex> held(s.lock);
    while ((s.all.count(name) > 0) != there) {
        if (stop) throw Aborted();
        s.changed.wait_for(held, SOME);
    }
}
static std::string look(const std::string& name, const Stop& stop, bool keep = true) {
    await(name, true, stop);
    std::string all;
    if (is_file(name)) {
        FILE* f = fopen(name.c_str(), "rb");
        char part[1 << 16];
        for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) all.append(part, n);
        fclose(f);
        if (!keep) unlink(name.c_str());
        return all;
    }
    Shelf& s = shelf(name);
    std::lock_guard<std::mutex> held(s.lock);
    auto found = s.all.find(name);
    if (keep) return found->second;
    all = std::move(found->second);
    s.all.erase(found);
    s.changed.notify_all();
    return all;
}
static std::string take(const std::string& name, size_t expected, const Stop& stop) {
    std::string all = look(name, stop, false);
    if (all.size() != expected) {
        fprintf(stderr, "stand-in of NCCL: %s has %zu B, %zu are expected\n", name.c_str(),
                all.size(), expected);
        _exit(3);
    }
    return all;
}

// What tests make of the stand-ins' calls: numbers in variables, and faults at a call.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

// A number of a variable, or another one.
static unsigned long long setting(const char* name, unsigned long long other) {
    const char* set = getenv(name);
    return set ? strtoull(set, nullptr, 10) : other;
}

// Whether a variable has a word.
static bool lists(const char* name, const char* word) {
    const char* set = getenv(name);
    return set && strstr(set, word);
}

// Held by calls for which the driver holds its lock.
static std::mutex& driver_lock = *new std::mutex;

// STANDIN_AT=CALL:N:HOW: the N-th call of CALL in this process kills it, stops it, never returns
// ("deaf": its other threads go on), takes 2 s ("late"), or holds the driver's lock for 3 s ("lock").
static void arrive(const char* call) {
    static const char* at = getenv("STANDIN_AT");
    const size_t n = strlen(call);
    if (!at || strncmp(at, call, n) || at[n] != ':') return;
    static std::atomic<int> calls{0};
    if (++calls != atoi(at + n + 1)) return;
    const char* how = strrchr(at, ':') + 1;
    if (!strcmp(how, "kill")) raise(SIGKILL);
    if (!strcmp(how, "stop")) raise(SIGSTOP);
    while (!strcmp(how, "deaf")) pause();
    if (!strcmp(how, "late")) sleep(2);
    if (!strcmp(how, "lock")) {
        std::lock_guard<std::mutex> held(driver_lock);
        sleep(3);
    }
}

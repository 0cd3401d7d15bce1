// The streams of driver.cpp, for the other stand-ins.
#pragma once
#include <dlfcn.h>

#include <functional>

static void* driver(const char* name) {
    // The name by which it was found, or that which it carries.
    static void* found = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    static void* library = found ? found : dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? dlsym(library, name) : nullptr;
}

// Work behind what a stream has so far.
static void put(void* stream, std::function<void()> work) {
    typedef std::function<void()> Work;
    typedef void Use(void*);
    static auto f = (void (*)(void*, Use*, Use*, void*))driver("standin_put");
    auto run = [](void* work) { (*(Work*)work)(); };
    auto drop = [](void* work) { delete (Work*)work; };
    f(stream, run, drop, new Work(std::move(work)));
}

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
    static auto f = (void (*)(void*, void (*)(void*), void*))driver("standin_put");
    auto run = [](void* work) {
        (*(std::function<void()>*)work)();
        delete (std::function<void()>*)work;
    };
    f(stream, run, new std::function<void()>(std::move(work)));
}

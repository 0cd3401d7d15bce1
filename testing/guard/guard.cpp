// Preloaded into a command: memory that the command itself maps, as the arenas of its ranks, ends at a page
// that nobody may touch, begins behind another, and is full of NaN. Who reads or writes outside dies of it,
// and who reads what was never written gets other results. Libraries map as always.
// With GUARD_PAGES set, memory begins at a page, and may end before the guard by less than a page: memmap2 insists on
// pages where its assertions are on. With GUARD_REPORT set, how many maps there were is said on standard error at the end.

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {
const size_t PAGE = 4096, GUARD = 1 << 20, LINE = 64;
// A NaN as f32, two as bf16: as `POISON` of runtime/src/arena.rs.
const uint32_t POISON = 0x7fc17fc1;
int guarded = 0;

// Whether code at this place is the command's, and not a library's.
bool of_command(void *place) {
    Dl_info own, other;
    void *header = reinterpret_cast<void *>(getauxval(AT_PHDR));
    return dladdr(header, &own) && dladdr(place, &other) && own.dli_fbase == other.dli_fbase;
}

void *raw(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    return reinterpret_cast<void *>(syscall(SYS_mmap, at, n, prot, flags, fd, offset));
}

void *map(void *caller, void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    bool plain = at == nullptr && fd == -1 && prot == (PROT_READ | PROT_WRITE);
    plain = plain && (flags & MAP_ANONYMOUS) && !(flags & (MAP_FIXED | MAP_STACK));
    if (!plain || n == 0 || n > SIZE_MAX / 2 || !of_command(caller))
        return raw(at, n, prot, flags, fd, offset);
    size_t inside = (n + PAGE - 1) / PAGE * PAGE;
    void *all = raw(nullptr, inside + 2 * GUARD, PROT_NONE, flags, -1, 0);
    if (all == MAP_FAILED)
        return all;
    char *begin = static_cast<char *>(all) + GUARD;
    if (mprotect(begin, inside, prot) != 0)
        return MAP_FAILED;
    for (size_t i = 0; i < inside / sizeof POISON; i++)
        reinterpret_cast<uint32_t *>(begin)[i] = POISON;
    __atomic_add_fetch(&guarded, 1, __ATOMIC_RELAXED);
    if (getenv("GUARD_PAGES"))
        return begin;
    // The last byte but those that alignment needs is that before the guard.
    return begin + (inside - (n + LINE - 1) / LINE * LINE);
}
}

extern "C" void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    return map(__builtin_return_address(0), at, n, prot, flags, fd, offset);
}

extern "C" void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    return map(__builtin_return_address(0), at, n, prot, flags, fd, offset);
}

// Compilers that the command starts are none of ours.
__attribute__((constructor)) static void begin() { unsetenv("LD_PRELOAD"); }

__attribute__((destructor)) static void end() {
    if (getenv("GUARD_REPORT"))
        dprintf(2, "guarded %d maps\n", guarded);
}

// Shows that the guard is at work: maps memory, and touches it at a place relative to its begin.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int, char **args) {
    char *p = static_cast<char *>(
        mmap(nullptr, 6400, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    printf("%d\n", reinterpret_cast<volatile unsigned char *>(p)[atol(args[1])]);
}

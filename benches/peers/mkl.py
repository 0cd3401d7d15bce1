"""MKL's AVX-512 kernels on processors of other makers, and the proof that they run.

MKL, which multiplies matrices in PyTorch, asks `mkl_serv_intel_cpu_true` before it takes them. A library
that is loaded first answers yes.
"""

import os
import subprocess
import sys

TEXT = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def preload(dir):
    """Environment of a process in which they are used; empty where the processor has them anyway, or not at all."""
    cpu = open("/proc/cpuinfo").read()
    if "GenuineIntel" in cpu or "avx512f" not in cpu:
        return {}
    library = dir.resolve() / "intel.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=TEXT, text=True, check=True)
    return {"LD_PRELOAD": str(library)}


def proof(dir):
    """A sentence with the time of a product without and with them."""
    if not (env := preload(dir)):
        return ""
    time = lambda env: float(subprocess.check_output([sys.executable, __file__], env=os.environ | env, text=True))
    without, forced = zip(*((time({}), time(env)) for _ in range(3)))
    return (f"f32 product of 2048 x 2048 matrices in PyTorch: {min(without):.1f} ms, "
            f"with MKL's AVX-512 kernels {min(forced):.1f} ms.")


def main():
    """Milliseconds of such a product on 2 threads, best of 20."""
    from time import perf_counter

    import torch

    torch.set_num_threads(2)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)

    def once():
        began = perf_counter()
        a @ b
        return 1e3 * (perf_counter() - began)

    print(min(once() for _ in range(20)))


if __name__ == "__main__":
    main()

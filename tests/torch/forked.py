"""Ranks as processes of this one, over gloo: torch is imported once."""

import os
import signal
import socket
import sys
import traceback


def run(ranks, body):
    """Calls `body(rank)` in a process for each rank; 0 if all of them end well, else 1, and the others are ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for number in range(ranks):
        pid = os.fork()
        if pid == 0:
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number), "WORLD_SIZE": str(ranks)}
            os.environ.update(env, LOCAL_WORLD_SIZE=str(ranks))
            try:
                body(number)
            except BaseException:
                print(f"rank {number}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        children.append(pid)
    failed = 0
    for _ in range(ranks):
        _, status = os.wait()
        if status and not failed:
            failed = 1
            # The others wait for it.
            for pid in children:
                try:
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    pass
    return failed

"""Started as a script in front of a measuring process: ties its life to the runner's, then becomes it.

``python launch.py RUNNER_PID CPUS COMMAND...``. CPUS (``0,1,8``; empty: all it has) are those the process is kept on,
so that its memory is near its GPU. The kernel kills the process when the runner dies, however it dies (Linux
``PR_SET_PDEATHSIG``, which survives exec), so kill -9 of a runner leaves no orphan that keeps a device busy. A Python
``preexec_fn`` could do the same, but is not safe in a process with threads. If memory runs out, the system is told to
take this process and not the runner. No core files: a kernel under development would fill the disk with them.
"""

import os
import resource
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main() -> None:
    """Prepare this process and replace it by the command."""
    runner, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - pathlib doubles this start-up
                file.write("900")
        except OSError:
            sys.stderr.write("spikemark: cannot set oom_score_adj; continuing\n")
    if os.getppid() != runner:  # it died before the line above took effect
        os._exit(1)
    if cpus:
        try:
            os.sched_setaffinity(0, [int(number) for number in cpus.split(",")])
        except OSError:
            sys.stderr.write("spikemark: cannot keep to the CPUs near the GPU; continuing\n")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

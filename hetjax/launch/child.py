"""Sets up one process of the launcher (parent-death signal, control group, core affinity), then runs its program.

Run by path, without the package, as: child.py LAUNCHER_PID CGROUP_PROCS CORES PROGRAM ARGUMENTS...; '-' for none.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set up this process and replace it with the program."""
    launcher, group, cores, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before prctl took effect
        sys.exit(1)
    if group != "-":
        with open(group, "w") as procs:
            procs.write(str(os.getpid()))
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

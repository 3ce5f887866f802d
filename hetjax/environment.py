"""The environment variables by which a launcher tells a process who it is."""

COORDINATOR = "HETJAX_COORDINATOR"  # HOST:PORT where process 0 is met
BIND = "HETJAX_BIND"  # HOST:PORT that process 0 listens on
PROCESSES = "HETJAX_PROCESSES"  # how many there are
PROCESS = "HETJAX_PROCESS"  # which one this is, from 0
LOST = "HETJAX_LOST"  # first numbers of the processes an elastic run goes on without, such as 0,2; not set with all
HEARTBEAT = "HETJAX_HEARTBEAT"  # the folder of the heartbeats
PROGRAMS = "HETJAX_COMPILATION_CACHE_DIR"  # the directory of compiled programs, see devices/program_store.py
RESTART = "HETJAX_RESTART"  # how often the run was started again; not set the first time
STARTED = "HETJAX_STARTED"  # where the launcher added --resume: when it began, in seconds since 1970

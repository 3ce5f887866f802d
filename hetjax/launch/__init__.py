"""A launcher of several processes on one machine, for development: start, watch, throttle, restart, clean up."""

"""A worker that takes for ever to load, as torch does on a cold disk; it says so in its log."""

import threading

print("loading", flush=True)
threading.Event().wait()

"""What every test starts from."""

from __future__ import annotations

import signal

# A shell that puts its jobs into the background lets them ignore Ctrl-C, and children inherit
# that; the tests that send it need it heeded.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""For all tests."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has jobs in the background ignore it, and the programs that tests end with Ctrl-C would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""Network links: model of communication time from bytes and rounds, probe of real links, interface byte counters."""

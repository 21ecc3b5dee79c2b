"""Network lab: emulate several hosts on one Linux machine by network namespaces with rate-limited links."""

"""What is built on the library for people: the command line, the demo, and the support matrix."""

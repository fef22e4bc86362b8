"""What other libraries keep, beside what kvpolicy keeps: `make peers`."""

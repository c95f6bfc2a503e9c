"""The largest numbers that options take: above them nothing has a meaning, and sizes would overflow somewhere."""

#: Tokens, requests, lines and the like.
MOST = 2**31 - 1
#: Ranks of a launch, or of a part of one: as `ParallelLayout` has it, which takes torch to import.
MOST_RANKS = 2**16
#: GB, TB/s, TFLOP/s and other figures of hardware; and the least that is above 0.
MOST_OF_HARDWARE, LEAST_OF_HARDWARE = 1e6, 1e-6
#: Megabytes of a buffer.
MOST_MB = 2**20
#: At this temperature every token is as likely as any other.
MOST_TEMPERATURE = 1e6

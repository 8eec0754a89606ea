"""What Metal allows a kernel on every Apple GPU from M1 on."""

from typing import Final

# Threads of a threadgroup.
MAX_THREADS: Final = 1024
# Buffers of a launch.
MAX_BUFFERS: Final = 31
# Threadgroup memory of a kernel.
THREADGROUP_BYTES: Final = 32 * 1024
# Threads of a simdgroup.
SIMDGROUP: Final = 32

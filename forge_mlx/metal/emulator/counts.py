"""What a launch did, counted: accesses and bytes for each buffer, barriers, simdgroup functions, matrix products."""

from dataclasses import dataclass

MATRIX_FLOPS = 2 * 8 * 8 * 8


@dataclass(frozen=True)
class BufferCounts:
    """Traffic of one buffer or threadgroup array, after the optimiser: what it keeps in registers is not counted.

    Attributes:
        name: of the buffer or array.
        space: `device`, `constant` or `threadgroup`.
        size: its bytes.
        reads: accesses that read, each vector and each atomic operation counted once.
        writes: accesses that write.
        atomics: atomic operations among them.
        bytes_read: bytes of all reads.
        bytes_written: bytes of all writes.
        distinct_bytes_read: bytes that were read at least once, which a perfect cache would fetch. Threadgroup arrays
            are new in every threadgroup: theirs is the sum over the threadgroups.
        distinct_bytes_written: bytes that were written at least once.
    """

    name: str
    space: str
    size: int
    reads: int = 0
    writes: int = 0
    atomics: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    distinct_bytes_read: int = 0
    distinct_bytes_written: int = 0


@dataclass(frozen=True)
class Counts:
    """Counts of one launch; of its first schedule where several were run.

    Attributes:
        buffers: the kernel's buffers in order.
        arrays: its threadgroup arrays, as far as a thread came to their declaration.
        instrumented: whether memory accesses were seen. False leaves all counts of `buffers` and `arrays` at zero.
        threads: threads run.
        threadgroups: threadgroups run.
        threadgroup_barriers: each counted once a threadgroup.
        simdgroup_barriers: each counted once a simdgroup.
        simdgroup_functions: reductions, shuffles and the like, each counted once a simdgroup.
        matrix_multiply_accumulates: 8x8x8 products, each counted once a simdgroup.
        steps: branches taken by all threads together.
    """

    buffers: tuple[BufferCounts, ...]
    arrays: tuple[BufferCounts, ...]
    instrumented: bool
    threads: int = 0
    threadgroups: int = 0
    threadgroup_barriers: int = 0
    simdgroup_barriers: int = 0
    simdgroup_functions: int = 0
    matrix_multiply_accumulates: int = 0
    steps: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes that all accesses to device and constant memory moved."""
        return sum(each.bytes_read + each.bytes_written for each in self.buffers)

    @property
    def distinct_device_bytes(self) -> int:
        """Bytes of device and constant memory that the launch has to move at least once."""
        return sum(each.distinct_bytes_read + each.distinct_bytes_written for each in self.buffers)

    @property
    def matrix_flops(self) -> int:
        """Multiplications and additions of all matrix products."""
        return self.matrix_multiply_accumulates * MATRIX_FLOPS

# Operations on several bytes at a time: big-endian loads and stores, comparisons, and the ends of properties.
#
# All take addresses, and none checks whether a place is inside its buffer; callers must.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define COMMITMQ_BIG(bits, value) __builtin_bswap##bits(value)
    #define COMMITMQ_LITTLE(value) (value)
    #else
    #define COMMITMQ_BIG(bits, value) (value)
    #define COMMITMQ_LITTLE(value) __builtin_bswap64(value)
    #endif

    #define COMMITMQ_NUMBER(name, bits) \
        static inline int64_t load##name(const uint8_t *at) { \
            uint##bits##_t value; \
            memcpy(&value, at, sizeof value); \
            return (int##bits##_t) COMMITMQ_BIG(bits, value); \
        } \
        static inline void store##name(uint8_t *at, int64_t number) { \
            uint##bits##_t value = COMMITMQ_BIG(bits, (uint##bits##_t) number); \
            memcpy(at, &value, sizeof value); \
        }
    COMMITMQ_NUMBER(2, 16)
    COMMITMQ_NUMBER(4, 32)
    COMMITMQ_NUMBER(8, 64)

    static inline uint64_t word8(const uint8_t *at) {
        uint64_t value;
        memcpy(&value, at, 8);
        return COMMITMQ_LITTLE(value);
    }
    #define ONES UINT64_C(0x0101010101010101)
    #define TWOS UINT64_C(0x0202020202020202)
    #define THREES UINT64_C(0x0303030303030303)
    #define HIGH_BITS UINT64_C(0x8080808080808080)
    static inline void store_last(int32_t *word, int32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
    static inline int64_t swap(int32_t word) { return (int32_t) COMMITMQ_BIG(32, (uint32_t) word); }
    """
    # Signed big-endian integers of 2, 4 and 8 bytes.
    int64_t load2(const uint8_t *at) noexcept nogil
    int64_t load4(const uint8_t *at) noexcept nogil
    int64_t load8(const uint8_t *at) noexcept nogil
    # The low bytes of a number, big-endian.
    void store2(uint8_t *at, int64_t number) noexcept nogil
    void store4(uint8_t *at, int64_t number) noexcept nogil
    void store8(uint8_t *at, int64_t number) noexcept nogil
    # Eight bytes as a number, the first byte lowest.
    uint64_t word8(const uint8_t *at) noexcept nogil
    # A 32-bit word between a file's order and the host's.
    int64_t swap(int32_t word) noexcept nogil
    # Store one word, behind all stores before it.
    void store_last(int32_t *word, int32_t value) noexcept nogil
    # The same byte eight times.
    const uint64_t ONES
    const uint64_t TWOS
    const uint64_t THREES
    const uint64_t HIGH_BITS
    # Index of the lowest bit that is set, of a number that is not 0.
    int __builtin_ctzll(uint64_t hits) noexcept nogil


# The three functions below test eight bytes at once, as long as the buffer of ``size`` bytes has eight. In
# (x - 0x0101..) & ~x & 0x8080.. the lowest bit set belongs to the first byte of x that is 0; bits above it may be false,
# by a borrow.
cdef inline int64_t until_low(const uint8_t *buf, int64_t size, int64_t at, int64_t end) noexcept nogil:
    """Position of the first byte of ``buf[at:end]`` that is 0, 1 or 2; ``end`` without one."""
    cdef uint64_t word, hits
    while at < end:
        if at + 8 <= size:
            word = word8(buf + at)
            hits = (word - THREES) & ~word & HIGH_BITS
            if hits:
                at += __builtin_ctzll(hits) >> 3
                break
            at += 8
        elif buf[at] <= 2:
            break
        else:
            at += 1
    return min(at, end)


cdef inline int64_t until_mark(const uint8_t *buf, int64_t size, int64_t at, int64_t end) noexcept nogil:
    """Position of the first byte of ``buf[at:end]`` that is 1 or 2: where a property's name ends; ``end`` without one."""
    cdef uint64_t word, one, two, hits
    while at < end:
        if at + 8 <= size:
            word = word8(buf + at)
            one = word ^ ONES
            two = word ^ TWOS
            hits = (
                ((one - ONES) & ~one) | ((two - ONES) & ~two)
            ) & HIGH_BITS
            if hits:
                at += __builtin_ctzll(hits) >> 3
                break
            at += 8
        elif buf[at] == 1 or buf[at] == 2:
            break
        else:
            at += 1
    return min(at, end)


cdef inline int64_t until_two(const uint8_t *buf, int64_t size, int64_t at, int64_t end) noexcept nogil:
    """Position of the first byte of ``buf[at:end]`` that is 2: where a property's value ends; ``end`` without one."""
    cdef uint64_t two, hits
    while at < end:
        if at + 8 <= size:
            two = word8(buf + at) ^ TWOS
            hits = (two - ONES) & ~two & HIGH_BITS
            if hits:
                at += __builtin_ctzll(hits) >> 3
                break
            at += 8
        elif buf[at] == 2:
            break
        else:
            at += 1
    return min(at, end)


cdef inline bint same_bytes(const uint8_t *left, const uint8_t *right, int64_t size) noexcept nogil:
    """Whether the ``size`` bytes at both places are equal."""
    cdef int64_t at = 0
    if size >= 8:
        while at < size - 8:
            if word8(left + at) != word8(right + at):
                return False
            at += 8
        # The rest, and some bytes once more.
        return word8(left + size - 8) == word8(right + size - 8)
    if size >= 4:
        return load4(left) == load4(right) and load4(left + size - 4) == load4(right + size - 4)
    while at < size:
        if left[at] != right[at]:
            return False
        at += 1
    return True


cdef inline bint is_ascii(const uint8_t *buf, int64_t start, int64_t end) noexcept nogil:
    """Whether all of ``buf[start:end]`` is below 0x80."""
    cdef uint64_t found = 0
    if end - start >= 8:
        while start < end - 8:
            found |= word8(buf + start)
            start += 8
        found |= word8(buf + end - 8)
    else:
        while start < end:
            found |= buf[start]
            start += 1
    return not found & HIGH_BITS


cdef inline int64_t floor_division(int64_t number, int64_t by) noexcept nogil:
    """As Python divides: rounded down."""
    return number // by - (number % by != 0 and (number < 0) != (by < 0))


cdef inline int64_t slot_of(int64_t hashed, int64_t slots) noexcept nogil:
    """The remainder as Python has it: never negative."""
    cdef int64_t slot = hashed % slots
    return slot + slots if slot < 0 else slot


def word_searches(buf, int64_t at, int64_t end):
    """For tests: (``until_low``, ``until_mark``, ``until_two``, ``is_ascii``) of ``buf[at:end]``."""
    cdef const uint8_t *start = bytes_in(buf)
    cdef int64_t size = length(buf)
    return (
        until_low(start, size, at, end), until_mark(start, size, at, end), until_two(start, size, at, end),
        bool(is_ascii(start, at, end)),
    )


def word_comparison(left, int64_t left_at, right, int64_t right_at, int64_t size):
    """For tests: ``same_bytes``."""
    cdef const uint8_t *left_data = bytes_in(left)
    cdef const uint8_t *right_data = bytes_in(right)
    return bool(same_bytes(left_data + left_at, right_data + right_at, size))


def word_loads(buf, int64_t at):
    """For tests: (``load2``, ``load4``, ``load8``)."""
    cdef const uint8_t *buf_data = bytes_in(buf)
    return load2(buf_data + at), load4(buf_data + at), load8(buf_data + at)


def word_stores(buf, int64_t at, int64_t number, int size):
    """For tests: ``store2``, ``store4`` or ``store8``."""
    cdef uint8_t *buf_data = bytes_out(buf)
    if size == 2:
        store2(buf_data + at, number)
    elif size == 4:
        store4(buf_data + at, number)
    else:
        store8(buf_data + at, number)

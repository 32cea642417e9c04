# What numpy's arrays hold, without numpy's headers: the memory of an array, for a kernel that trusts its type.
#
# A typed memoryview costs 0.7 us for each argument, more than what many kernels do for one record. So the fields of an
# array are read in place. Their layout is part of numpy's binary interface, which every compiled extension relies on.

cdef extern from *:
    """
    typedef struct {
        PyObject_HEAD
        char *data;
        int dimensions;
        Py_ssize_t *shape;
        Py_ssize_t *strides;
        PyObject *base;
        PyObject *dtype;
        int flags;
    } Array;

    enum { ARRAY_CONTIGUOUS = 1, ARRAY_ALIGNED = 0x100, ARRAY_WRITEABLE = 0x400 };

    /* An array of this very type (a subclass would say another), of ``dimensions`` and with ``flags``. */
    static inline int fits(PyObject *value, PyTypeObject *type, PyObject *dtype, int dimensions, int flags) {
        Array *array = (Array *) value;
        return Py_TYPE(value) == type && array->dtype == dtype && array->dimensions == dimensions
            && (array->flags & flags) == flags;
    }
    """
    ctypedef struct Array:
        char *data
        Py_ssize_t *shape
    int ARRAY_CONTIGUOUS
    int ARRAY_ALIGNED
    int ARRAY_WRITEABLE
    int fits(PyObject *value, PyTypeObject *type, PyObject *dtype, int dimensions, int flags) noexcept


# commitmq.kernels.codes.ROW, whose comments say what the fields are.
cdef struct Row:
    int64_t physical_offset
    int64_t queue_offset
    int64_t tags_code
    int64_t store_timestamp
    int64_t born_timestamp
    int64_t prepared_offset
    int64_t inner_base
    int32_t size
    int32_t queue_id
    int32_t topic
    int32_t sys_flag
    int32_t delay_level
    int32_t reconsume_times
    int32_t body_start
    int32_t body_size
    int32_t properties_start
    int32_t properties_size
    int32_t keys_start
    int32_t keys_size
    int32_t uniq_start
    int32_t uniq_size
    int32_t tags_start
    int32_t tags_size
    int32_t topic_start
    int32_t topic_size
    int32_t multi_start
    int32_t multi_offsets_start
    int16_t multi_size
    int16_t multi_offsets_size
    int16_t inner_num


cdef object BYTE = numpy.dtype(numpy.uint8)
cdef object BOOL = numpy.dtype(numpy.bool_)
cdef object INT4 = numpy.dtype(numpy.int32)
cdef object INT8 = numpy.dtype(numpy.int64)
cdef object FLOAT8 = numpy.dtype(numpy.float64)
cdef object ROW = codes.ROW
cdef object NDARRAY = numpy.ndarray
cdef int READ = ARRAY_CONTIGUOUS | ARRAY_ALIGNED
cdef int WRITE = ARRAY_CONTIGUOUS | ARRAY_ALIGNED | ARRAY_WRITEABLE


cdef inline void *data_of(array, dtype, int dimensions, int flags) except NULL:
    """The memory of ``array``; the caller holds the array while it uses that. Raises TypeError for another array."""
    if fits(<PyObject *>array, <PyTypeObject *>NDARRAY, <PyObject *>dtype, dimensions, flags):
        return (<Array *>array).data
    return data_of_other(array, dtype, dimensions, flags)


cdef void *data_of_other(array, dtype, int dimensions, int flags) except NULL:
    """:func:`data_of` for an array of a subclass, or whose dtype is an equal object."""
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f"a kernel takes arrays, not {type(array).__name__}")
    kind = type(array)
    own = array.dtype
    if own != dtype or not fits(<PyObject *>array, <PyTypeObject *>kind, <PyObject *>own, dimensions, flags):
        raise TypeError(
            f"a kernel needs a contiguous array of {dtype} with {dimensions} dimensions, and got one of {own}"
            f" with {array.ndim}: {array.flags}"
        )
    return (<Array *>array).data


cdef inline Py_ssize_t length(array) noexcept:
    """The first dimension of an array that :func:`data_of` has accepted."""
    return (<Array *>array).shape[0]


cdef inline Py_ssize_t width(array) noexcept:
    """The second one."""
    return (<Array *>array).shape[1]


cdef inline const uint8_t *bytes_in(array) except NULL:
    return <const uint8_t *>data_of(array, BYTE, 1, READ)


cdef inline uint8_t *bytes_out(array) except NULL:
    return <uint8_t *>data_of(array, BYTE, 1, WRITE)


cdef inline uint8_t *bools_out(array) except NULL:
    return <uint8_t *>data_of(array, BOOL, 1, WRITE)


cdef inline const int32_t *words_in(array) except NULL:
    return <const int32_t *>data_of(array, INT4, 1, READ)


cdef inline int32_t *words_out(array) except NULL:
    return <int32_t *>data_of(array, INT4, 1, WRITE)


cdef inline const int64_t *numbers_in(array) except NULL:
    return <const int64_t *>data_of(array, INT8, 1, READ)


cdef inline int64_t *numbers_out(array) except NULL:
    return <int64_t *>data_of(array, INT8, 1, WRITE)


cdef inline const int64_t *table_in(array) except NULL:
    return <const int64_t *>data_of(array, INT8, 2, READ)


cdef inline int64_t *table_out(array) except NULL:
    return <int64_t *>data_of(array, INT8, 2, WRITE)


cdef inline double *floats_out(array) except NULL:
    return <double *>data_of(array, FLOAT8, 1, WRITE)


cdef inline const Row *rows_in(array) except NULL:
    return <const Row *>data_of(array, ROW, 1, READ)


cdef inline Row *rows_out(array) except NULL:
    return <Row *>data_of(array, ROW, 1, WRITE)

# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# cython: allow_none_for_extension_args=False
"""Loops over raw bytes, compiled ahead: no files, no sockets, no policy, and the GIL released meanwhile.

Arrays are numpy's, or anything else that gives a contiguous buffer of the wanted type. Like all compiled code these
functions trust their positions: nothing outside of a buffer may be asked for. They are made for untrusted *content*.
One module has them all, because they call each other; each file of it is a part to read by itself. Numbers in capital
letters are those of commitmq.format.constants and commitmq.kernels.codes, which hatch_build.py hands over.
"""

import ctypes

import numpy
from isal import isal_zlib

from commitmq.kernels import codes

from cpython.ref cimport PyObject, PyTypeObject
from libc.stdint cimport INT64_MIN, int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

include "constants.pxi"
include "words.pxi"
include "arrays.pxi"
include "records.pxi"
include "walk.pxi"
include "run.pxi"
include "readdress.pxi"
include "properties.pxi"
include "arrow.pxi"
include "index.pxi"

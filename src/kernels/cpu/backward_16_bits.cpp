// backward.cpp for the types of 16 bits.

// What is included is this file's own, its unnamed namespaces too.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#endif

#define INPLACE_ABN_16_BITS
#include "backward.cpp"

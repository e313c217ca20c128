// backward.cpp for the types of 16 bits.

// The included file is compiled as part of this one, so its unnamed namespaces are meant to be here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wsubobject-linkage"
#endif

#define INPLACE_ABN_16_BITS
#include "backward.cpp"

// backward.cpp for the types of 16 bits.
#define INPLACE_ABN_16_BITS
#include "backward.cpp"

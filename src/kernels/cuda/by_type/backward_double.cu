// backward.cu for one type of elements: together they take longest to compile.
#define INPLACE_ABN_TYPE double
#include "../backward.cu"

// backward.cu for one type of elements. All types together take longest of all sources to compile.
#define INPLACE_ABN_TYPE c10::Half
#include "../backward.cu"

// The node of the wheel in one file, so that torch's headers are read once. Reading them takes most of its compilation.

#include "node.cpp"
#include "norm.cpp"
#include "ops.cpp"
#include "rows.cpp"

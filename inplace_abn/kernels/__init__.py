"""The only door to compiled code: the ops, their fakes for traced calls, and the loader of the graph node in C++."""

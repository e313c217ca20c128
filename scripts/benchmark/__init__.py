"""The parts of `bench.py`: contenders, nets, measurements and reports."""

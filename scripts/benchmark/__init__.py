"""What `bench.py` compares (contenders, nets), how it measures (timing, steps) and what it makes of it (report)."""

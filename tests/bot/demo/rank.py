"""A rank that only speaks: rank 1 fails at once, the others sleep until they are ended."""

import os
import sys
import time

print(f"rank {os.environ['RANK']}", flush=True)
if os.environ["RANK"] == "1":
    print("\n".join(f"line {number}" for number in range(9)))
    print("ModuleNotFoundError: torch")
    sys.exit(3)
time.sleep(600)

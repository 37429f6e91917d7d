import sys
from pathlib import Path

# helpers of all tests stand one folder above
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

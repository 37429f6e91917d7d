import sys
from pathlib import Path

# shared test helpers are one directory above
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sys
from pathlib import Path

# shared test helpers live one folder up
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

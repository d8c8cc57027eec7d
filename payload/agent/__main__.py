"""``python3 -I -B <release>/payload/agent VERB``: finds its own release and runs the verb."""

import sys
from pathlib import Path

# Read and never written: a full disk would leave bytecode that is cut off. See payload/agent/bytecode.py.
sys.dont_write_bytecode = True
# Python put this folder first, where venv.py and logs.py would hide modules of the same name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from payload.agent.main import main  # noqa: E402

sys.exit(main(sys.argv))

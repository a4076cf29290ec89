"""stub_server.py in a process of its own, so that its loop and the client's are two."""
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from worklogs import stub_server

PROGRAM = Path(stub_server.__file__)


@contextlib.contextmanager
def stub(folder, recording=None, port=0):
    """(URL, path of its log, process) of a stub."""
    log = folder / "stub.log"
    words = [sys.executable, str(PROGRAM), "--port", str(port), "--log", str(log)]
    if recording is not None:
        (folder / "recording.json").write_text(json.dumps(recording))
        words += ["--recording", str(folder / "recording.json")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Ready: "), line
            yield line.split()[1], log, process
        finally:
            process.terminate()

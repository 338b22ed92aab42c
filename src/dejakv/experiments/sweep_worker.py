"""A process that runs experiments of a sweep: a line of JSON in, a line of JSON out. It ends with the process that started it."""

import json
import os
import queue
import sys
import threading
from typing import TextIO

from dejakv.experiments.finished_run import settings_of
from dejakv.experiments.sweep_jobs import Experiment, carry_out


def main() -> None:
    """Reads tasks until the input ends. Prints of libraries go to standard error, so that answers stay apart."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, tasks), daemon=True).start()
    while True:
        task = json.loads(tasks.get())
        done = carry_out(Experiment(task["name"], settings_of(task["settings"]), ""))
        answers.write(json.dumps({"summary": done.summary, "error": done.error}) + "\n")
        answers.flush()


def _listen(stream: TextIO, tasks: "queue.SimpleQueue[str]") -> None:
    """Ends the process when its input ends: whoever wanted the answer is gone."""
    for line in stream:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()

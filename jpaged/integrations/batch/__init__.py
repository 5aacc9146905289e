"""Batch files: requests from lines, lines from outputs, and a run over a file that loses nothing.

lines.py makes a request of a line, answers.py a line of an output. source.py and tables.py read
lines. journal.py and rows.py handle the output file, what it holds already, and the manifest beside
it. manifest.py and judged.py say what made an output, and which settings those are. stats.py and
progress.py count and show. run.py has the loop. check.py does the same without running a model.
merge.py joins shards to one file.
"""

from jpaged.integrations.batch.answers import answer_line, encode_line, error_line
from jpaged.integrations.batch.lines import BatchRequest, Settings
from jpaged.integrations.batch.source import LineError

__all__ = ["BatchRequest", "LineError", "Settings", "answer_line", "encode_line", "error_line"]

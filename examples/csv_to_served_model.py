"""From a CSV file of clicks to a model that answers over HTTP.

python examples/csv_to_served_model.py [FOLDER]
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pandas as pd

from search import open_bundle, run_study

# The tests run this file with SMALL=1: fewer rows and candidates, seconds in place of minutes.
SMALL = os.environ.get("SMALL") == "1"
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
folder.mkdir(parents=True, exist_ok=True)
dhen_search = str(Path(sys.executable).with_name("dhen-search"))

# 1. A log. Yours is a CSV, TSV or Parquet file with a column that says whether a click happened; this command
#    writes a generated one, with ids, lists of ids, numbers with gaps and a time stamp.
clicks = folder / "clicks.csv"
if not clicks.exists():
    subprocess.run(
        [dhen_search, "demo", "--out", str(clicks), f"rows={3_000 if SMALL else 50_000}"], check=True
    )

# 2. The search. Columns are looked at and given roles, the log is split by time, a baseline is tuned, and
#    candidates are trained. Settings are those of `dhen-search run`. The same call goes on where an earlier one
#    was interrupted, and returns at once when there is nothing left to do.
small = {"space": "tiny", "baseline_trials": 1, "training": {"epochs": 1}, "parallel": 1, "threads": 1}
study = run_study(clicks, folder / "study", trials=2 if SMALL else 20, **(small if SMALL else {}))

# 3. What was found, which the search has said in sentences already (`study.summary`): as data frames, and as
#    Plotly figures. In a notebook `study` alone shows itself.
print(study.front[["model", "ne", "ne_vs_baseline_percent", "flops"]])
study.figures["front"].write_html(folder / "front.html")

# 4. The best model is a bundle: a folder with weights, settings and the encoding that was fitted on training
#    rows. New rows are raw, as they stood in the log; the bundle encodes them as in training.
bundle = open_bundle(folder / "study" / "best")
new_rows = pd.read_csv(clicks, nrows=5)[list(bundle.columns)]
print(bundle.score(new_rows))

# 5. The same on the command line, where Python need not hold the rows:
scores = folder / "scores.csv"
words = ["predict", str(bundle.directory), "--data", str(clicks), "--out", str(scores)]
subprocess.run([dhen_search, *words], check=True)
print(f"{len(pd.read_csv(scores)):,} rows scored: {scores}")

# 6. Served over HTTP, in the protocol of MLflow's scoring server. `--port 0` takes a free port; the line that says
#    where the server answers comes once it does.
server = subprocess.Popen(
    [dhen_search, "serve", str(bundle.directory), "--port", "0"], stdout=subprocess.PIPE, text=True
)
try:
    address = next(line for line in server.stdout if "answers at" in line).split(" answers at ")[1].split()[0]
    body = json.dumps({"dataframe_records": json.loads(new_rows.to_json(orient="records"))}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer))  # the same probabilities as above
finally:
    server.terminate()
    server.wait()

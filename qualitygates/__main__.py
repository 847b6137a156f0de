"""python -m qualitygates run | judge | speed | sweep | report | diff."""

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

_CLUSTER: Final = (
    "run as Ray tasks: local (a Ray on this machine), auto, HOST:PORT or ray://HOST:10001"
)

_JUDGED: Final = "a gate folder, run files, or OFFLINE.toml: predictions of another training"
_TIMINGS: Final = "judge these timings of another machine instead: its speed.json, or JSON lines"


class _Parser(argparse.ArgumentParser):
    # argparse exits with 2, which here means INCONCLUSIVE.
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BROKEN, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 ACCEPT, 1 REJECT, 2 INCONCLUSIVE, 3 broken input or environment."""
    arguments = _parser().parse_args(argv)
    commands = {
        "run": _run,
        "judge": _judge,
        "report": _report,
        "speed": _speed,
        "diff": _diff,
        "sweep": _sweep,
    }
    command = commands[arguments.command]
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
    run.add_argument("--cluster", default="", metavar="RAY", help=_CLUSTER)
    judge = commands.add_parser("judge", help="the verdict from records alone, without torch")
    judge.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help=_JUDGED)
    judge.add_argument("--out", type=Path, metavar="DIR", help="of an offline gate; as for run")
    speed = commands.add_parser("speed", help="time both arms on this machine, and judge it")
    speed.add_argument("gate", type=Path, metavar="GATE.toml", help="the experiment")
    speed.add_argument("--out", type=Path, metavar="DIR", help="default: gates/<name of the file>")
    speed.add_argument("--timings", type=Path, metavar="FILE", help=_TIMINGS)
    report = commands.add_parser("report", help="write verdict.json, report.md, report.html anew")
    report.add_argument("folder", type=Path, metavar="DIR", help="a gate folder")
    sweep = commands.add_parser("sweep", help="which layers harm training; writes a recipe")
    sweep.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="the sweep")
    sweep.add_argument("--out", type=Path, metavar="DIR", help="default: gates/<name of the file>")
    sweep.add_argument("--workers", type=_count, default=_cores(), metavar="N", help=_WORKERS)
    sweep.add_argument("--cluster", default="", metavar="RAY", help=_CLUSTER)
    sweep.add_argument(
        "--bisect", metavar="RECIPE", help="find what to give back of a rejected recipe instead"
    )
    two = commands.add_parser("diff", help="in what two records differ: 0 nothing, 1 something")
    two.add_argument("first", type=Path, metavar="A", help="gate folder, or a record in one")
    two.add_argument("second", type=Path, metavar="B", help="another of the same kind")
    two.add_argument("--json", action="store_true", help="as JSON instead of words")
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
    verdict = run(
        experiment,
        out=out,
        workers=arguments.workers,
        progress=True,
        cluster=arguments.cluster,
    )
    return _tell(verdict, out / "report.html")


def _judge(arguments: argparse.Namespace) -> int:
    from . import judge

    if arguments.runs[0].suffix == ".toml":
        return _judge_offline(arguments)
    if arguments.out is not None:
        raise RecordError("--out is for OFFLINE.toml; these records have their folder already")
    return _tell(judge(arguments.runs))


def _judge_offline(arguments: argparse.Namespace) -> int:
    from .offline.flow import judge_offline
    from .offline.spec import OfflineSpec

    if len(arguments.runs) > 1:
        raise RecordError("judge takes one OFFLINE.toml at a time")
    path = arguments.runs[0]
    out = arguments.out or Path("gates") / path.stem
    return _tell(judge_offline(OfflineSpec.from_toml(path), out=out), out / "report.html")


def _report(arguments: argparse.Namespace) -> int:
    from .judging import judge_records
    from .locking import folder_lock
    from .records import load_evidence, read_speed
    from .report import write_report

    if not arguments.folder.is_dir():
        raise RecordError(f"{arguments.folder} is not a folder; `report` takes a gate's folder")
    # A gate that runs in the folder writes these files itself.
    with folder_lock(arguments.folder):
        gate, runs = load_evidence([arguments.folder])
        verdict = judge_records(gate, runs, speed=read_speed(arguments.folder))
        write_report(arguments.folder, gate, runs, verdict=verdict)
    print(f"report: {arguments.folder / 'report.html'}")
    return 0


def _speed(arguments: argparse.Namespace) -> int:
    from .experiment import Experiment
    from .speed.command import speed
    from .speed.sections import speed_summary

    experiment = Experiment.from_toml(arguments.gate)
    out = arguments.out or Path("gates") / arguments.gate.stem
    found = speed(experiment, out=out, timings=arguments.timings, tell=_say)
    print(speed_summary(found))
    print(f"timings: {out / 'speed.json'}")
    # What was not promised, or cannot be measured here, is not accepted.
    return EXIT_CODES.get(found["status"], EXIT_CODES["INCONCLUSIVE"])


def _sweep(arguments: argparse.Namespace) -> int:
    from .sensitivity.command import run_command

    return run_command(
        arguments.sweep,
        out=arguments.out,
        recipe=arguments.bisect,
        workers=arguments.workers,
        cluster=arguments.cluster,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _diff(arguments: argparse.Namespace) -> int:
    import json

    from .diff import diff, in_words

    result = diff(arguments.first, arguments.second)
    print(json.dumps(result, indent=1) if arguments.json else in_words(result))
    return 0 if result["same"] else 1


def _tell(verdict: Mapping[str, Any], report: Path | None = None) -> int:
    from .report import summary

    print(summary(verdict))
    if report is not None:
        print(f"report: {report}")
    return EXIT_CODES[verdict["verdict"]]


if __name__ == "__main__":
    sys.exit(main())

"""The inspection process: `python -m draft_worker.coreml.stateful PACKAGE` prints one PackageReport in JSON."""

import sys
from pathlib import Path

import msgspec

from draft_worker.coreml.stateful.package import StatefulPackage
from draft_worker.coreml.stateful.runtimes import open_stateful
from protocol.contracts.coreml.package_report import PackageReport
from protocol.errors import InputError


def main() -> int:
    # Libraries may print to standard output, which is for the report alone.
    output, sys.stdout = sys.stdout, sys.stderr
    output.write(msgspec.json.encode(inspect(Path(sys.argv[1]))).decode() + "\n")
    return 0


def inspect(path: Path) -> PackageReport:
    """Loads the model only where that takes no minutes: with the executor, which may lack one of its operations."""
    try:
        package = StatefulPackage.open(path)
        if sys.platform != "darwin":
            open_stateful(package)
    except InputError as error:
        return PackageReport(fits=False, text=str(error))
    layout = package.layout
    lengths = ", ".join(map(str, layout.lengths)) or f"{layout.least} to {layout.most}"
    return PackageReport(
        fits=True,
        text=f"drafts one path at a time: {layout.vocabulary:,} tokens, cache of {layout.context:,}, "
        f"{lengths} tokens a call, tokenizer in {package.tokenizer}",
    )


if __name__ == "__main__":
    sys.exit(main())

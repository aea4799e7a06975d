"""The orchestrator process."""

import logging
import signal
import sys
from pathlib import Path

import zmq

from orchestrator.runtime.loop import Orchestrator
from orchestrator.runtime.session import Session
from orchestrator.runtime.setup import OrchestratorSetup
from protocol.errors import PipelineError
from protocol.processes import QualityOfService, raise_descriptor_limit, set_quality_of_service


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_descriptor_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    set_quality_of_service(QualityOfService.USER_INTERACTIVE)
    setup = OrchestratorSetup.from_arguments()
    try:
        Orchestrator(setup, zmq.Context()).run()
    except PipelineError as error:
        Session(Path(setup.session)).record_failure(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

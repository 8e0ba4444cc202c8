"""The catalogue of planted faults: what each one does, and the check and tensor that must name it.

``docs/checks.md`` lists them; ``python -m tools.check_reference`` writes that page.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.parity.fault import Fault
from tests.parity.faults_batch import BATCH
from tests.parity.faults_block import BLOCK
from tests.parity.faults_draft import DRAFT
from tests.parity.faults_inputs import INPUTS
from tests.parity.faults_kv import KV
from tests.parity.faults_options import OPTIONS
from tests.parity.faults_sampling import SAMPLING
from tests.parity.faults_serve import SERVE
from tests.parity.faults_target import TARGET
from tests.parity.faults_weights import WEIGHTS

FAULTS: Mapping[str, Fault] = {
    **INPUTS,
    **WEIGHTS,
    **KV,
    **TARGET,
    **DRAFT,
    **BLOCK,
    **BATCH,
    **SAMPLING,
    **OPTIONS,
    **SERVE,
}

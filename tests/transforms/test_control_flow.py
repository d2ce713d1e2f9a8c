from pathlib import Path
import pytest
@pytest.mark.distributed
def test_processes_equal_simulated_ranks(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_control_flow.py"), 2)
    for check in ("derivatives", "loops", "refusals"):
        assert f"check_{check}: ok" in done.stdout

"""What macOS's tools print is read as it is, and what they don't is left open."""

import pytest

from orchestrator.machine.conditions import Conditions, conditions, is_virtual

BATTERY = " -InternalBattery-0 (id=3735651)\t{}; discharging; (no estimate) present: true\n"
PRINTED = {
    "pmset -g batt": f"Now drawing from 'Battery Power'\n{BATTERY.format('97%')}",
    "pmset -g": "System-wide power settings:\nCurrently in use:\n standby              1\n lowpowermode         1\n",
    "notifyutil -g com.apple.system.thermalpressurelevel": "com.apple.system.thermalpressurelevel 2\n",
    "sysctl -n vm.swapusage": "total = 2048.00M  used = 710.81M  free = 1337.19M  (encrypted)\n",
    "memory_pressure -Q": "The system has 17179869184 (1048576 pages with a page size of 16384).\n"
    "System-wide memory free percentage: 64%\n",
    "sysctl -n kern.hv_vmm_present": "1\n",
    "cat /proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 2000 kB\nSwapTotal: 4096 kB\nSwapFree: 1024 kB\n",
    "cat /proc/cpuinfo": "flags\t\t: fpu hypervisor lahf_lm\n",
}


def asked(system: str = "darwin", **changes: str) -> Conditions:
    printed = PRINTED | {name.replace("_g", " -g"): text for name, text in changes.items()}

    def tell(program: str, *arguments: str) -> str:
        return printed.get(" ".join((program.rpartition("/")[2], *arguments)), "")

    return conditions(tell, system)


@pytest.mark.parametrize(
    ("found", "power", "mode", "thermal"),
    [
        (asked(), "Battery Power", "low power", "heavy"),
        (asked(pmset_g=" powermode            2\n"), "Battery Power", "high power", "heavy"),
        (asked(pmset_g=" powermode            0\n"), "Battery Power", "normal", "heavy"),
        (asked(pmset_g=""), "Battery Power", "", "heavy"),
        (asked(**{"pmset_g batt": "Now drawing from 'AC Power'\n"}), "AC Power", "low power", "heavy"),
        (asked("linux"), "", "", ""),
    ],
)
def test_power_and_heat(found: Conditions, power: str, mode: str, thermal: str):
    assert (found.power, found.mode, found.thermal) == (power, mode, thermal)


def test_battery_and_memory():
    assert (asked().charge, asked().swap, asked().free_memory) == (97, 710.81, 64)
    assert (asked("linux").swap, asked("linux").free_memory) == (3.0, 25)
    assert "Battery Power, low power mode, heat heavy, battery 97, MiB of swap 711, memory free 64" in str(asked())


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_a_machine_whose_tools_are_missing_tells_nothing_and_fails_nowhere(system: str):
    found = conditions(lambda *_: "", system)

    assert (found.power, found.charge, found.free_memory) == ("", None, None)
    assert found.speed == "power, mode and heat not known"
    assert not is_virtual(lambda *_: "", system)


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_a_virtual_machine_is_known(system: str):
    assert is_virtual(lambda *command: PRINTED[" ".join((command[0].rpartition("/")[2], *command[1:]))], system)


def test_this_machine_is_read():
    now = conditions()

    assert now.load >= 0.0
    assert 0 <= (now.free_memory or 0) <= 100

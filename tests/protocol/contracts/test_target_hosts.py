"""Hosts files: their contents, and a sentence for each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import InputError, Pipeline
from protocol.contracts.target_hosts import read_hosts, require_divisible
from tests.support.paths import DEMO_TARGET

_DEMO = DEMO_TARGET


def _file(folder: Path, content: Any) -> Path:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_for_the_ring_names_each_ranks_addresses(tmp_path: Path):
    listed = [["10.0.0.1:5711", "10.0.1.1:5711"], ["mac-2.local:5711", "10.0.1.2:5711"]]
    hosts = read_hosts(_file(tmp_path, {"hosts": listed, "key": "k" * 32}))

    assert hosts.addresses == (("10.0.0.1:5711", "10.0.1.1:5711"), ("mac-2.local:5711", "10.0.1.2:5711"))
    assert (hosts.ranks, hosts.local, hosts.devices, hosts.silence) == (2, False, (), 10.0)


def test_a_file_of_mlx_distributed_config_gets_the_ports_of_mlx_launch(tmp_path: Path):
    listed = [
        {"ssh": "mac-1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
        {"ssh": "mac-2", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None]},
    ]
    hosts = read_hosts(
        _file(tmp_path, {"backend": "jaccl", "envs": [], "hosts": listed, "silence": 4, "key": "k" * 32})
    )

    assert hosts.addresses == (("10.0.0.1:32323",), ("10.0.0.2:32324",))
    assert hosts.devices == ((None, "rdma_en2"), ("rdma_en2", None))
    assert hosts.silence == 4.0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[[", "is no JSON"),
        ("7", "must list 2 to 64 hosts"),
        ({"machines": []}, "must list 2 to 64 hosts"),
        ([["127.0.0.1:5711"]], "must list 2 to 64 hosts"),
        ([["127.0.0.1:5711"], []], "must have a list of addresses for each host"),
        ([["127.0.0.1:5711"], 5], "must have a list of addresses for each host"),
        ([["127.0.0.1:5711"], ["127.0.0.1"]], "has '127.0.0.1', which is no HOST:PORT"),
        ([["127.0.0.1:5711"], ["127.0.0.1:70000"]], "has '127.0.0.1:70000', which is no HOST:PORT"),
        ([["127.0.0.1:5711"], [5712]], "has '5712', which is no HOST:PORT"),
        ([["127.0.0.1:5711"], ["127.0.0.1:5711"]], "lists 127.0.0.1:5711 twice"),
        ([["127.0.0.1:5711"], ["10.0.0.2:5711"]], "mixes this machine's own addresses"),
        ([["10.0.0.1:1", "10.0.0.1:2"], ["10.0.0.2:1"]], "as many addresses for one host as for another"),
        ({"hosts": [["127.0.0.1:1"], ["127.0.0.1:2"]], "silence": 0}, "from 2 to 600 seconds"),
        ({"hosts": [{"ips": ["a"], "rdma": [None]}, {"ips": ["b"], "rdma": [None]}]}, "must name an RDMA device"),
        ({"hosts": [{"ips": ["a"], "rdma": [1, 2]}, {"ips": ["b"], "rdma": [1, 2]}]}, "in another form"),
    ],
)
def test_a_wrong_file_gets_a_sentence(content: Any, sentence: str, tmp_path: Path):
    with pytest.raises(InputError, match=rf"^The hosts file .*hosts\.json .*{sentence}.* rank 0 first\.$"):
        read_hosts(_file(tmp_path, content))


def test_a_missing_file_gets_a_sentence(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"none\.json can't be read \(No such file or directory\): write {\"hosts\": \[\["
    ):
        read_hosts(tmp_path / "none.json")


def test_ranks_on_several_machines_need_a_key(tmp_path: Path):
    file = _file(tmp_path, [["10.0.0.1:5711"], ["10.0.0.2:5711"]])

    with pytest.raises(InputError, match=r'has no key, .* "key": "[-\w]{43}", and give every host the same file'):
        read_hosts(file)


def test_a_local_file_needs_no_key_and_names_itself_if_it_has_one(tmp_path: Path):
    listed = [["127.0.0.1:5711"], ["127.0.0.1:5712"]]

    assert read_hosts(_file(tmp_path, listed)).key_file == ""
    file = _file(tmp_path, {"hosts": listed, "key": "k" * 32})
    assert read_hosts(file).key_file == str(file)


def test_an_indivisible_model_is_refused_with_possible_numbers_of_ranks():
    require_divisible(_DEMO, 2)
    with pytest.raises(InputError, match=r"has 4 attention heads, which 3 hosts can't share: use 2\.$"):
        require_divisible(_DEMO, 3)
    with pytest.raises(InputError, match=r"has 2 key-value heads, which 4 hosts can't share: use 2\.$"):
        require_divisible(_DEMO, 4)


def test_a_model_that_can_not_be_divided_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 7, "num_key_value_heads": 1}')

    with pytest.raises(InputError, match="has 7 attention heads, which 2 hosts can't share: it has to stay on one"):
        require_divisible(tmp_path, 2)


def test_a_pipeline_refuses_before_any_process_starts(tmp_path: Path):
    three = _file(tmp_path, [[f"127.0.0.1:{port}"] for port in (5711, 5712, 5713)])
    with pytest.raises(InputError, match="3 hosts can't share"):
        Pipeline(target_hosts=str(three), draft_engine="none")
    two = _file(tmp_path, [["127.0.0.1:5711"], ["127.0.0.1:5712"]])
    with pytest.raises(InputError, match="prefill engine can't hand keys and values to a target that is divided"):
        Pipeline(target_hosts=str(two), prefill_engine="mlx")
    with pytest.raises(InputError, match="the target engine none starts none: leave one of them out"):
        Pipeline(target_hosts=str(two), target_engine="none", listen="127.0.0.1:0")

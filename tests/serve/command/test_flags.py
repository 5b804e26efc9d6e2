"""The command line: vLLM's names, LightLLM's aliases, the YAML file, help by group, what is wrong."""

import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.errors import ConfigError
from qrt.quant.kv import KV_FORMATS
from qrt.serve.command import cli
from qrt.serve.command.cli import engine_config, main, server_config
from qrt.serve.command.flags import parse, parser
from qrt.serve.settings import MAX_PROMPTS, ServerConfig

QUEUE = {"max_num_queued_reqs": 2048, "max_num_queued_tokens": 2**22}  # the server's own defaults


def configs(*words: str) -> tuple[EngineConfig, ServerConfig]:
    arguments = parse(["tiny", *words])
    return engine_config(arguments), server_config(arguments)


def test_as_many_prompts_as_a_body_may_have_fit_the_queue():
    """The route's own bound is 2,048, as OpenAI has it, and a body is queued as a whole."""
    queued = configs()[0].max_num_queued_reqs
    assert queued is not None and queued >= MAX_PROMPTS


def test_defaults_are_the_configs_own():
    engine, server = configs()
    assert engine == EngineConfig("tiny", **QUEUE)
    assert server == ServerConfig(model_names=("tiny",))
    assert (server.host, server.port) == ("127.0.0.1", 8000), "nobody outside reaches a server by default"


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("--max_req_total_len 1024", "--max-model-len 1K"),
        ("--running_max_req_size 64", "--max-num-seqs 64"),
        ("--batch_max_tokens 4096", "--max-num-batched-tokens 4096"),
        ("--mem_fraction 0.5", "--gpu-memory-utilization 0.5"),
        ("--llm_kv_type int8kv", "--kv int8"),
        ("--kv int8 --llm_kv_type None --port 1", "--kv-cache-dtype auto --port 1"),
        ("--disable_dynamic_prompt_cache", "--no-enable-prefix-caching"),
        ("--disable_cudagraph", "--enforce-eager"),
        ("--disable_aggressive_schedule", "--admission conservative"),
        ("--no-overlap", "--no-async-scheduling"),
        ("--kv-cache-dtype-skip-layers 0 1", "--kv-skip-layers 0 1"),
        ("--httpserver_workers 3", "--api-server-count 3"),
        ("-dp 2", "--data-parallel-size 2"),
        ("--dp-size 2", "--data-parallel-size 2"),
        ("--dp 2", "--data-parallel-size 2"),
        ("--model_name a b", "--served-model-name a b"),
        ("--data_type bfloat16", "--dtype bfloat16"),
        ("--detail_log", "--enable-log-requests"),
        ("--kv_cache_memory_bytes 2G", "--kv-cache-memory-bytes 2147483648"),
    ],
)
def test_aliases(theirs, ours):
    assert configs(*theirs.split()) == configs(*ours.split()) != configs()


# vLLM's, LightLLM's and qrt's names, row by row
NAMES = """
--model --model_dir --tokenizer --tokenizer-mode --served-model-name --model_name --host --port
--uds --api-key --api-key-file --dtype --data_type --quantization --quant_type --quant_cfg --kv
--kv-cache-dtype --llm_kv_type --kv-group-size --kv-scales --kv-skip-layers
--kv-cache-dtype-skip-layers --llm_kv_quant_group_size --kv_quant_calibration_config_path
--max-model-len --max_req_total_len --max-num-seqs --running_max_req_size --max-num-batched-tokens
--batch_max_tokens --enable-chunked-prefill --no-enable-chunked-prefill
--long-prefill-token-threshold --chunked_prefill_size --disable_chunked_prefill
--gpu-memory-utilization --mem_fraction --kv-cache-memory-bytes --num-gpu-blocks-override
--max_total_token_num --block-size --enable-prefix-caching --no-enable-prefix-caching
--disable_dynamic_prompt_cache --scheduling-policy --disable_aggressive_schedule
--router_max_wait_tokens --router_token_ratio --max-num-queued-reqs --enforce-eager
--cudagraph-capture-sizes --disable_cudagraph --graph_max_batch_size --graph_split_batch_size
--graph_grow_step_size --no-async-scheduling --no-overlap --tensor-parallel-size --tp --nnodes
--node-rank --node_rank --master-addr --master-port --nccl_host --nccl_port --api-server-count
--httpserver_workers --chat-template --tool-call-parser --enable-auto-tool-choice --reasoning-parser
--structured-outputs-backend --structured-outputs-config --output_constraint_mode
--speculative-config --spec-method --spec-model --spec-tokens --mtp_mode --mtp_draft_model_dir
--mtp_step --max-logprobs --seed --generation-config --load-format --load_way --trust-remote-code
--shutdown-timeout --stream-interval --allowed-origins --root-path --ssl-keyfile --ssl-certfile
--enable-request-id-headers --use-tgi-api --use_tgi_api --health-monitor --metric-gateway
--diverse-mode --token-healing-mode --config --log-level --disable-log-stats --enable-log-requests
--detail_log --log-config-file
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_every_peer_flag_is_known_or_answered(name, capsys):
    if name.replace("_", "-") in parser()._option_string_actions:
        return
    with pytest.raises(SystemExit):
        parse(["tiny", name, "2"])
    error = capsys.readouterr().err
    assert name.replace("_", "-") in error and "unknown flag" not in error


def test_every_setting_has_a_flag():
    """What a config has and no flag sets would be out of a user's reach."""
    reachable = {action.dest for action in parser()._actions}
    for config in (EngineConfig, ServerConfig):
        for field in fields(config):
            assert field.name in reachable, field.name
            assert f"\n{field.name} " in config.__doc__, "its meaning is in the docstring"


def test_a_docstring_names_fields_where_a_flag_names_flags():
    assert "what `gpu_memory_utilization` leaves" in EngineConfig.__doc__
    flag = parser()._option_string_actions["--kv-cache-memory-bytes"]
    assert "what --gpu-memory-utilization leaves" in flag.help


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", cli.__name__, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: qrt-serve")


def test_the_file_and_the_command_line(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "kv: int4\nport: 9000\nmax_model_len: 2k\nenforce-eager: true\nserved_model_name: [a, b]\n"
    )
    engine, server = configs("--config", str(file), "--port", "9001")
    assert (engine.kv, engine.max_model_len, engine.enforce_eager) == ("int4", 2000, True)
    assert (server.port, server.model_names) == (9001, ("a", "b")), "the command line wins"
    file.write_text("enable_prefix_caching: false\nuse_tgi_api: false\nmodel: tiny\n")
    arguments = parse(["--config", str(file)])
    assert engine_config(arguments) == EngineConfig("tiny", **QUEUE, enable_prefix_caching=False)
    for words in (["other"], ["--model", "other"], ["--model-dir", "other"]):
        arguments = parse([*words, "--config", str(file)])
        assert engine_config(arguments).model == "other" and server_config(arguments).model_names == (
            "other",
        )


@pytest.mark.parametrize(
    "text, message",
    [
        ("kv_cache_dtyp: int8", "unknown key 'kv_cache_dtyp'; did you mean 'kv-cache-dtype'?"),
        ("- kv", "expected `flag: value` lines"),
        ("port: true", "expected a value that is not true or false"),
        ("log_level: loud", "invalid choice: 'loud'"),
        ("a: [", "expected"),
        ("pipeline_parallel_size: 2", "pipeline_parallel_size: qrt runs on the GPUs of one host"),
        ("Ünï: 1", "expected UTF-8, got"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_wrong_config_files_are_one_line(text, message, tmp_path, capsys):
    file = tmp_path / "server.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit) as stopped:
        parse(["tiny", "--config", str(file)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ("--max-modellen 3", "unknown flag --max-modellen; did you mean '--max-model-len'?"),
        ("--trust_remote_code", "--trust-remote-code: qrt never runs a model's own code"),
        ("--pipeline-parallel-size 2", "GPUs of one host"),
        ("--tp two", "expected a number such as 4096, 32k or 32K, got 'two'"),
        ("--tokenizer-mode", "fast tokenizers only"),
        ("--max-model-len 4x", "expected a number such as 4096, 32k or 32K"),
        ('--allowed-origins ["*"', """--allowed-origins: expected a JSON list such as ["*"], got '["*"'"""),
        ("--llm_kv_type fp8kv_sph", "expected one of None, int8kv, int4kv"),
        ("--help=kvs", "no group 'kvs'; did you mean 'kv'?"),
    ],
)
def test_wrong_flags_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["tiny", *words.split()])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1


def test_peers_flags_that_change_nothing_are_accepted(tmp_path):
    words = "--tensor-parallel-size 1 -tp=1 --pipeline_parallel_size 1 --tokenizer-mode auto --swap-space=0 "
    words += "--disable-log-requests --distributed-executor-backend mp --no-enable-log-requests"
    assert configs("--port", "9000", *words.split()) == configs("--port", "9000")
    file = tmp_path / "server.yaml"
    file.write_text(
        "port: 9000\ntensor_parallel_size: 1\ntrust-remote-code: false\nspeculative_config:\n"
        "disable-log-requests: true\n"
    )
    assert configs("--config", str(file)) == configs("--port", "9000")


def test_attend_cache():
    assert configs("--attend-cache")[0].attend_cache and not configs()[0].attend_cache


def test_help_by_group(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--help=kv"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "--kv-cache-dtype" in text and "--port" not in text
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(
        f"\n{group}:" in text for group in ("server", "api", "limits", "model", "kv", "engine", "logs")
    )


def test_public_server_without_key_warns(monkeypatch, capsys):
    monkeypatch.setattr("qrt.serve.processes.supervisor.supervise", lambda *_: 0)
    for words, warned in (("", 0), ("--host 0.0.0.0", 1), ("--host 0.0.0.0 --api-key k", 0), ("--uds x", 0)):
        assert main(["tiny", *words.split()]) == 0
        assert capsys.readouterr().err.count("reachable from outside without a key") == warned


def test_origins(tmp_path):
    """vLLM takes a JSON list, which would be an origin that no page has."""

    def origins(*words):
        return configs("--allowed-origins", *words)[1].allowed_origins

    assert origins('["*"]') == ("*",) == origins("*")
    both = ("https://a.example", "http://localhost:3000")
    assert origins(*both) == both == origins('["https://a.example", "http://localhost:3000"]')
    file = tmp_path / "server.yaml"
    for text in ('["*"]', """'["*"]'""", "'*'"):
        file.write_text(f"allowed-origins: {text}")
        assert configs("--config", str(file))[1].allowed_origins == ("*",)


def test_keys(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert configs("--api-key", "zero", "--api-key-file", str(file))[1].api_keys == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="--api-key-file .*: expected one key per line, got none"):
        configs("--api-key-file", str(file))
    with pytest.raises(ConfigError, match="api_key: expected a key that is not empty"):
        configs("--api-key", "")


@pytest.mark.parametrize(
    "words, message",
    [
        (["no/such/folder"], "no/such/folder: no such folder; give a checkpoint folder, ORG/NAME"),
        ([], "model: give one, as the first argument or with --model"),
        (["tiny", "--model", "tiny"], "model: give one, as the first argument or with --model"),
        (["tiny", "--api-server-count", "0"], "api_server_count: expected at least 1, got 0"),
        (["tiny", "--data-parallel-size", "0"], "data_parallel_size: expected 1 to 64, got 0"),
        (["tiny", "--metrics-prefix", "a:b"], "metrics_prefix: expected letters, digits and _, such as vllm"),
        (["tiny", "--chat-template", "no/such/file"], "--chat-template no/such/file"),
        (["tiny", "--ssl-keyfile", "x"], "ssl_keyfile, ssl_certfile"),
        (["tiny", "--ssl-keyfile", "x", "--ssl-certfile", "no/such"], "--ssl-certfile no/such: [Errno 2]"),
        (["tiny", "--max-logprobs", "21"], "max_logprobs: expected 0 to 20, got 21"),
        (["tiny", "--max-logprobs", "-1"], "max_logprobs: expected 0 to 20, got -1"),
        (["tiny", "--shutdown-timeout", "-1"], "shutdown_timeout: expected 0 to 1000000 seconds, got -1.0"),
        (["tiny", "--shutdown-timeout", "nan"], "shutdown_timeout: expected 0 to 1000000 seconds, got nan"),
        (["tiny", "--watchdog-timeout", "inf"], "watchdog_timeout: expected above 0"),
        (["tiny", "--request-timeout", "nan"], "request_timeout: expected above 0"),
        (["tiny", "--max-num-seqs", "1000g"], "max_num_seqs: expected at most 65536, got 1000000000000"),
        (
            ["tiny", "--max-num-queued-tokens", "9" * 20],
            f"max_num_queued_tokens: expected at most {2**63 - 1}, got {'9' * 20}",
        ),
        (
            ["tiny", "--allowed-origins", "a.example"],
            "allowed_origins: expected * or scheme://host, such as https://a.example, got 'a.example'",
        ),
        (["tiny", "--allowed-origins", "https://a.example/"], "allowed_origins: expected * or scheme://host"),
        (["tiny", "--allowed-origins", '["*", 5]'], "allowed_origins: expected * or scheme://host"),
        (["tiny", "--seed", "9" * 20], f"seed: expected an integer of 64 bits, got {'9' * 20}"),
        (
            ["tiny", "--kv", "int5"],
            f"unknown KV format 'int5' (known: {', '.join(KV_FORMATS)}); did you mean 'int",
        ),
        (
            ["tiny", "--kv-skip-layers", "0", "6"],
            "kv_skip_layers: expected 0 to 0, the model's layers, got 6",
        ),
        (["tiny", "--max-model-len", "2049"], "max_model_len: expected at most the model's 2048, got 2049"),
        (["tiny", "--device", "cuda:x"], "device: expected cuda, cuda:N or cpu, got 'cuda:x'"),
        (["tiny", "--tokenizer", "no/such"], "no/such: no such folder"),
        ([__file__], f"{__file__}: not a folder"),
        ([str(Path(__file__).parent)], f"{Path(__file__).parent}: no config.json"),
    ],
)
def test_bad_settings_fail_before_loading(words, message, capsys):
    assert main(words) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_a_template_is_read_when_the_server_starts(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert configs("--chat-template", str(file))[1].chat_template == file.read_text()
    file.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=f"--chat-template {file}: chat template: not valid Jinja"):
        configs("--chat-template", str(file))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_certificates_are_read_when_the_server_starts(tmp_path):
    certificate, key, locked, other = (str(tmp_path / name) for name in ("cert", "key", "locked", "other"))
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -days 9"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    subprocess.run([*make.split(), "-keyout", other, "-out", "/dev/null"], check=True, capture_output=True)
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    damaged = tmp_path / "damaged"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")

    def flags(certificate, key):
        return configs("--ssl-certfile", certificate, "--ssl-keyfile", key)[1]

    assert flags(certificate, key).ssl_keyfile == key
    for wrong in (str(damaged), key):
        with pytest.raises(ConfigError, match=f"--ssl-certfile {wrong}: .*expected a certificate"):
            flags(wrong, key)
    for wrong in (str(damaged), certificate, locked, other):
        with pytest.raises(ConfigError, match=f"--ssl-keyfile {wrong}: .*expected a certificate and its key"):
            flags(certificate, wrong)


@pytest.mark.parametrize("device", ["cuda:99", "foo", "mps", "cuda:x"])
def test_missing_device_is_refused(device):
    with pytest.raises(ConfigError, match=f"device: expected .*, got '{device}'"):
        Engine(configs("--device", device)[0])


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert main(["tiny"]) == 1
    assert "uvicorn is not installed; pip install 'qrt[serve]'" in capsys.readouterr().err

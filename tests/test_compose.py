"""The compose files: valid, safe as they are, and settable without being edited."""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import redis
import yaml
from jsonschema.validators import validator_for

import ragkv.config
from ragkv.api.app import DRAIN_SECONDS, address_of, why_exposed
from ragkv.api.middleware.hosts import read_hosts
from ragkv.api.middleware.keys import make_key
from ragkv.config import SECRETS, Settings, load_settings
from tests.redis_server import redis_server

ROOT = Path(__file__).resolve().parent.parent
IMAGE = re.compile(r"[\w./-]+:[\w.-]*\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}")
"""A version for people, and the digest that decides."""
BASE, GPU = "docker-compose.yml", "docker-compose.gpu.yml"
SETTINGS = {f"RAGKV_{name.upper()}" for name in Settings.model_fields}
OF_THE_CONTAINER = {"RAGKV_DATA", "RAGKV_HOST", "RAGKV_MODEL_CACHE", "RAGKV_PORT"}
"""The image sets these; RAGKV_PORT outside is the published port."""
OF_OTHERS = {"REDIS_MAXMEMORY", "REDIS_MEMORY", "API_MEMORY", "PROMETHEUS_KEY", "PROMETHEUS_PORT", "GRAFANA_PORT"}
"""Variables of the other services."""
WATCHERS = ("prometheus", "grafana")
OF_CLIENTS = {"RAGKV_KEY"}
"""A key of somebody who asks is none of the service's business."""
OF_TRACES = {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME"}
"""Read by OpenTelemetry itself."""

Tree = dict[str, Any]


def loaded(file: str) -> Tree:
    """A file as it stands."""
    tree: Tree = yaml.safe_load((ROOT / file).read_text())
    return tree


def merged(*files: str, **environment: str) -> Tree:
    """What compose makes of the files: variables filled in, later files over earlier ones."""
    tree: Tree = {}
    for file in files:
        tree = over(tree, filled(loaded(file), environment))
    return tree


def filled(node: Any, environment: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: filled(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [filled(value, environment) for value in node]
    if isinstance(node, str):
        inner = re.compile(r"\$\{(\w+):([-+])([^${}]*)\}")
        while found := inner.search(node):
            value = environment.get(found[1], "")
            given = (value or found[3]) if found[2] == "-" else (value and found[3])
            node = node[: found.start()] + given + node[found.end() :]
    return node


def over(below: Tree, above: Tree) -> Tree:
    both = {key: over(below[key], above[key]) for key in below.keys() & above if isinstance(above[key], dict)}
    return {**below, **above, **both}


def schema() -> Tree:
    """The Compose specification's."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    tree: Tree = json.loads((folder / "compose-spec.json").read_text())
    return tree


def check(tree: Tree) -> None:
    validator_for(schema())(schema()).validate(tree)


@functools.cache
def compose() -> tuple[str, ...]:
    """A compose program of this machine, () where there is none."""
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    found = shutil.which("docker") and subprocess.run(
        ["docker", "compose", "version"], capture_output=True, check=False
    )
    return ("docker", "compose") if found and found.returncode == 0 else ()


@pytest.mark.parametrize("files", [(BASE,), (GPU,), (BASE, GPU)])
def test_the_files_are_what_the_compose_specification_says(files: tuple[str, ...]) -> None:
    for file in files:
        check(loaded(file))
    check(merged(*files))


def test_the_specification_is_really_asked() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check({"services": {"api": {"imagge": "ragkv"}}})


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)])
def test_a_compose_program_reads_the_files_and_passes_the_environment_on(files: tuple[str, ...]) -> None:
    if not compose():
        pytest.skip("there is no docker-compose here")
    command = [*compose(), *(word for file in files for word in ("-f", file)), "config"]
    given = {**os.environ, "RAGKV_API_KEYS": "acme=12", "RAGKV_PORT": "8123"}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    api = yaml.safe_load(done.stdout)["services"]["api"]
    assert api["environment"]["RAGKV_API_KEYS"] == "acme=12"
    assert api["environment"].get("RAGKV_STORE") is None
    assert api["environment"].get("RAGKV_METHOD") is None
    assert "8123" in str(api["ports"])


def test_every_setting_of_a_service_can_be_given_from_outside() -> None:
    environment = loaded(BASE)["services"]["api"]["environment"]
    assert set(environment) == (SETTINGS - OF_THE_CONTAINER - OF_CLIENTS) | OF_TRACES
    own = {name: value for name, value in environment.items() if value is not None}
    assert own.pop("RAGKV_URL") == "http://127.0.0.1:8000"
    assert set(own) == {"RAGKV_HOSTS", "RAGKV_PUBLIC_URL"}
    assert all(value.startswith(f"${{{name}:-") for name, value in own.items())


def settings_in(**environment: str) -> Settings:
    """The settings of the service in its container."""
    given = merged(BASE, **environment)["services"]["api"]["environment"]
    return load_settings(
        **{name.removeprefix("RAGKV_").lower(): given[name] for name in ("RAGKV_HOSTS", "RAGKV_PUBLIC_URL")},
        api_keys=environment.get("RAGKV_API_KEYS", ""),
        host="0.0.0.0",
    )


@pytest.mark.parametrize(
    ("environment", "accepted", "refused"),
    [
        ({}, ["api:8000", "127.0.0.1:8000", "localhost:8000"], ["evil.example", "192.168.1.5:8000"]),
        ({"RAGKV_HOSTS": "ragkv.example,api"}, ["api:8000", "ragkv.example"], ["evil.example"]),
        ({"RAGKV_API_KEYS": make_key("acme")[1]}, ["api:8000", "ragkv.example"], []),
    ],
)
def test_the_service_answers_to_the_names_that_compose_and_its_users_call_it_by(
    environment: dict[str, str], accepted: list[str], refused: list[str]
) -> None:
    hosts = read_hosts(settings_in(**environment), "RAGKV_API_KEYS" in environment)
    for name in (*accepted, *refused):
        scope = {"type": "http", "server": ("172.18.0.2", 8000), "headers": [(b"host", name.encode())]}
        assert (hosts.fault_of(scope) is None) == (name in accepted), name


def test_a_port_that_is_published_on_this_machine_only_warns_of_no_others() -> None:
    settings = settings_in(RAGKV_PORT="8123")
    assert address_of(settings, 8000) == "http://127.0.0.1:8123"
    assert why_exposed(settings, address_of(settings, 8000)) == ""
    away = settings_in(RAGKV_PUBLIC_URL="http://192.168.1.5:8000/")
    assert "no API keys" in why_exposed(away, address_of(away, 8000))


def test_files_and_image_name_only_settings_that_exist() -> None:
    texts = [(ROOT / file).read_text() for file in (BASE, GPU, "Dockerfile")]
    named = set(re.findall(r"\bRAGKV_\w+", "\n".join(texts)))
    assert OF_THE_CONTAINER <= named <= SETTINGS
    for file in (BASE, GPU):
        variables = set(re.findall(r"\$\{?(\w+)", (ROOT / file).read_text()))
        assert variables <= SETTINGS | OF_OTHERS


def test_the_image_listens_where_compose_publishes() -> None:
    given = dict(re.findall(r"\b(RAGKV_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
    folders = {"RAGKV_DATA": "/data", "RAGKV_MODEL_CACHE": "/data/models"}
    assert given == {**folders, "RAGKV_HOST": "0.0.0.0", "RAGKV_PORT": "8000"}
    assert loaded(BASE)["services"]["api"]["volumes"] == ["data:/data", "secrets:/run/secrets:ro"]
    assert str(SECRETS) == "/run/secrets"


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)])
def test_services_are_checked_unprivileged_and_pinned(files: tuple[str, ...]) -> None:
    services = merged(*files)["services"]
    assert set(services) == {"api", "redis", "redis-password", *WATCHERS}
    for name, service in services.items():
        if service["restart"] != "no":
            assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert service["read_only"] is True, name
        assert service.pop("network_mode", "none") == "none", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "network_mode", "pid", "devices", "cap_add"}, name
        assert not [volume for volume in service.get("volumes", []) if "docker.sock" in volume], name
        assert "build" in service or IMAGE.fullmatch(service["image"]), name


def test_redis_is_reached_by_the_service_only_and_reaches_nobody() -> None:
    tree = loaded(BASE)
    assert tree["networks"]["store"] == {"internal": True}
    there = {name for name, service in tree["services"].items() if "store" in service.get("networks", ())}
    assert there == {"api", "redis"}
    assert tree["services"]["redis"]["networks"] == ["store"]
    readers = {name for name, service in tree["services"].items() if "secrets:" in str(service.get("volumes"))}
    assert readers == {"api", "redis", "redis-password"}


def test_what_is_written_is_written_to_volumes_and_memory() -> None:
    writable = {
        name: {
            *service.get("tmpfs", ()),
            *(line.split(":")[1] for line in service.get("volumes", ()) if ":ro" not in line),
        }
        for name, service in loaded(BASE)["services"].items()
    }
    assert writable == {
        "api": {"/data", "/tmp"},
        "redis": {"/data"},
        "redis-password": {"/run/secrets"},
        "prometheus": {"/prometheus", "/tmp"},
        "grafana": {"/var/lib/grafana", "/tmp"},
    }


def test_redis_wants_a_password_that_is_made_once_and_the_service_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = loaded(BASE)["services"]
    made = services["redis-password"]
    script, folder = str(ROOT / "deploy" / "redis" / "password.sh"), tmp_path / "secrets"
    assert made["volumes"] == ["./deploy/redis/password.sh:/password.sh:ro", "secrets:/run/secrets"]
    assert [*made["entrypoint"], *made["command"]] == ["/bin/sh", "/password.sh", "/run/secrets"]
    folder.mkdir()
    for _ in range(2):
        subprocess.run(["sh", script, str(folder)], check=True)
        texts = {path.name: path.read_text() for path in folder.iterdir()}
        assert set(texts) == {"redis.conf", "ragkv_store"}
    subprocess.run(["sh", script, str(folder)], check=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == texts
    program, config, *settings = [
        str(word) for word in merged(BASE, REDIS_MAXMEMORY="64mb")["services"]["redis"]["command"]
    ]
    assert (program, config) == ("redis-server", "/run/secrets/redis.conf")
    monkeypatch.setattr(ragkv.config, "SECRETS", folder)
    address = load_settings().store
    password = urlsplit(address).password or ""
    assert len(password) == 64
    assert address == f"redis://:{password}@redis:6379/0"
    health = services["redis"]["healthcheck"]["test"][1].replace("$$", "$").replace("/run/secrets", str(folder))
    with redis_server(*settings, config=folder / "redis.conf") as server:
        with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis.from_url(address.replace("@redis:6379", f"@127.0.0.1:{server.port}")) as client:
            assert client.ping()
        asked = health.replace("redis-cli", f"redis-cli -p {server.port}")
        assert subprocess.run(["sh", "-c", asked], check=False).returncode == 0
        (folder / "redis.conf").write_text("requirepass another\n")
        assert subprocess.run(["sh", "-c", asked], check=False).returncode != 0
    assert shutil.which("shellcheck") is None or not subprocess.run(["shellcheck", script], check=False).returncode


def test_what_is_set_outside_wins_over_the_password_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ragkv_store").write_text("redis://:one@redis:6379/0")
    (tmp_path / "ragkv_store_secret").write_text("s" * 32)
    monkeypatch.setattr(ragkv.config, "SECRETS", tmp_path)
    assert load_settings().store_secret.get_secret_value() == "s" * 32
    monkeypatch.setenv("RAGKV_STORE", "disk")
    assert load_settings().store == "disk"
    monkeypatch.setattr(ragkv.config, "SECRETS", tmp_path / "none")
    assert load_settings().store_secret.get_secret_value() == ""


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)])
def test_memory_processes_and_logs_are_bounded(files: tuple[str, ...]) -> None:
    services = merged(*files)["services"]
    for name, service in services.items():
        assert re.fullmatch(r"\d+g", service["mem_limit"]), name
        assert 0 < service["pids_limit"] <= 1024, name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name
    assert merged(*files, API_MEMORY="5g")["services"]["api"]["mem_limit"] == "5g"
    held, *_ = [word for word in services["redis"]["command"] if word.endswith("gb")]
    assert int(services["redis"]["mem_limit"][:-1]) > int(held.removesuffix("gb"))


def test_the_image_can_send_traces() -> None:
    assert "tools.locked run otel" in (ROOT / "Dockerfile").read_text()


def test_the_image_stands_on_one_release_of_python() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"python:${PYTHON}"}
    assert re.search(r"^ARG PYTHON=3\.12\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.M)
    assert re.match(r"# syntax=docker/dockerfile:1\.\d+\.\d+@sha256:[0-9a-f]{64}\n", text)


def test_no_secret_stands_in_the_files() -> None:
    for file in (BASE, GPU):
        for service in loaded(file)["services"].values():
            environment = service.get("environment", {})
            told = {name: value for name, value in environment.items() if re.search("SECRET|KEY|PASSWORD", name)}
            assert {value for value in told.values() if value is not None} <= {"${PROMETHEUS_KEY:-none}"}


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)])
def test_the_api_is_published_on_this_machine_only(files: tuple[str, ...]) -> None:
    assert merged(*files)["services"]["api"]["ports"] == ["127.0.0.1:8000:8000"]
    assert merged(*files, RAGKV_PORT="81")["services"]["api"]["ports"] == ["127.0.0.1:81:8000"]
    assert "ports" not in merged(*files)["services"]["redis"]


def test_the_api_waits_for_redis_and_may_end_its_answers() -> None:
    api = loaded(BASE)["services"]["api"]
    assert api["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert int(api["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


def test_a_gpu_is_wanted_only_with_the_override() -> None:
    assert "deploy" not in loaded(BASE)["services"]["api"]
    api = merged(BASE, GPU)["services"]["api"]
    (device,) = api["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert api["environment"]["RAGKV_DEVICE"] == "cuda"
    assert api["image"] != loaded(BASE)["services"]["api"]["image"]
    (argument,) = api["build"]["args"]
    assert re.search(rf"^ARG {argument}=", (ROOT / "Dockerfile").read_text(), re.M)


def test_redis_accepts_its_settings_and_is_a_bounded_cache() -> None:
    command = merged(BASE, REDIS_MAXMEMORY="64mb")["services"]["redis"]["command"]
    program, _, *settings = [str(word) for word in command]
    assert program == "redis-server"
    assert {"--save": "", "--appendonly": "no"}.items() <= dict(zip(settings[::2], settings[1::2], strict=True)).items()
    with redis_server(*settings) as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert client.config_get("maxmemory") == {"maxmemory": str(64 * 2**20)}
    assert "2gb" in merged(BASE)["services"]["redis"]["command"]


def test_the_healthcheck_asks_for_healthz_inside_the_container() -> None:
    program, code = loaded(BASE)["services"]["api"]["healthcheck"]["test"][1::2]
    assert program == "python"
    compile(code, "healthcheck", "exec")
    assert "http://127.0.0.1:8000/healthz" in code


# The profile `observability`


def test_prometheus_and_grafana_come_only_when_they_are_asked_for() -> None:
    services = loaded(BASE)["services"]
    assert {name for name in services if "profiles" in services[name]} == set(WATCHERS)
    assert all(services[name]["profiles"] == ["observability"] for name in WATCHERS)


def test_they_are_published_on_this_machine_only() -> None:
    services = merged(BASE)["services"]
    assert services["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    moved = merged(BASE, GRAFANA_PORT="3300", PROMETHEUS_PORT="9900")["services"]
    assert [moved[name]["ports"] for name in WATCHERS] == [["127.0.0.1:9900:9090"], ["127.0.0.1:3300:3000"]]


def test_they_run_as_ordinary_users_and_keep_their_data_in_volumes() -> None:
    tree = loaded(BASE)
    for name in WATCHERS:
        service = tree["services"][name]
        assert service["user"].split(":")[0] not in {"0", "root"}
        volumes = [volume.split(":") for volume in service["volumes"]]
        assert [source for source, *_ in volumes if source in tree["volumes"]] == [name]
        for source, _, *how in volumes:
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
                assert how == ["ro"], source


def test_nobody_can_log_in_to_grafana_and_it_asks_nobody_outside() -> None:
    environment = loaded(BASE)["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert {environment[f"GF_AUTH_{way}"] for way in ("DISABLE_LOGIN_FORM", "ANONYMOUS_ENABLED")} == {"true"}
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    outside = [name for name in environment if name.startswith("GF_ANALYTICS_")]
    assert len(outside) == 3
    assert {environment[name] for name in outside} == {"false"}
    assert not [name for name in environment if "PASSWORD" in name]


def test_prometheus_asks_the_service_with_the_key_it_was_given(tmp_path: Path) -> None:
    service = merged(BASE, PROMETHEUS_KEY="ragkv_one")["services"]["prometheus"]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    there, here = job["authorization"]["credentials_file"], tmp_path / "key"
    start = [
        word.replace("$$", "$").replace(there, str(here)) for word in (*service["entrypoint"], *service["command"])
    ]
    start = [word.replace("/bin/prometheus", "printf '%s\n'") for word in start]
    done = subprocess.run(
        [word.replace("exec printf", "printf") for word in start],
        env={**os.environ, **service["environment"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == service["command"], "its own program has all that stands behind"
    assert (here.read_text(), here.stat().st_mode & 0o077) == ("ragkv_one", 0)
    assert str(Path(there).parent) in service["tmpfs"]
    assert service["read_only"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["api:8000"]}]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    folder = ROOT / "deploy" / "grafana"
    (source,) = yaml.safe_load((folder / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((folder / "provisioning" / "dashboards" / "ragkv.yml").read_text())["providers"]
    grafana = loaded(BASE)["services"]["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in grafana["volumes"])}
    assert (ROOT / mounts[provider["options"]["path"]]) == folder / "dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/ragkv.json"
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]

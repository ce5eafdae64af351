"""Several replicas: docker-compose.scale.yml and the manifests for Kubernetes are valid, safe and fit together."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from ragkv.api.app import DRAIN_SECONDS
from ragkv.config import Settings
from ragkv.store.redis_cluster import ClusterStore
from tests.program import LIGHT
from tests.redis_server import free_port, redis_server
from tests.start_records import with_records
from tests.test_compose import IMAGE, Tree, check, loaded

ROOT = Path(__file__).resolve().parent.parent
SCALE = "docker-compose.scale.yml"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
SETTINGS = {f"RAGKV_{name.upper()}" for name in Settings.model_fields} | {"RAGKV_CATALOG"}
OPERATORS = {"Cluster", "RayService"}
"""Kinds that operators define. Their own schemas are not at hand; the pods in them are checked as pods."""


def filled(text: str, **environment: str) -> str:
    """The text with compose's variables; one that must be given and is not is a failure."""
    inner = re.compile(r"(?<!\$)\$\{(\w+):([-+?])([^${}]*)\}")
    while found := inner.search(text):
        value = environment.get(found[1], "")
        assert value or found[2] != "?", f"{found[1]}: {found[3]}"
        given = (value and found[3]) if found[2] == "+" else (value or found[3])
        text = text[: found.start()] + given + text[found.end() :]
    return text


def scaled(**environment: str) -> Tree:
    given = {"POSTGRES_PASSWORD": "one", "RAY_AUTH_TOKEN": "two", "REDIS_PASSWORD": "three", **environment}
    tree: Tree = yaml.safe_load(filled((ROOT / SCALE).read_text(), **given))
    return tree


# Compose


def test_the_file_is_what_the_compose_specification_says() -> None:
    check(loaded(SCALE))
    check(scaled())


@pytest.mark.parametrize("secret", ["POSTGRES_PASSWORD", "RAY_AUTH_TOKEN", "REDIS_PASSWORD"])
def test_nothing_starts_without_its_secrets(secret: str) -> None:
    with pytest.raises(AssertionError, match=secret):
        scaled(**{secret: ""})


def test_services_are_unprivileged_bounded_and_pinned() -> None:
    services = scaled()["services"]
    assert set(services) == {"api", "worker", "postgres", "redis-1", "redis-2", "redis-3", "redis-cluster"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.keys() & {"privileged", "network_mode", "pid", "devices", "cap_add"}, name
        assert re.fullmatch(r"\d+g", service["mem_limit"]), name
        assert 0 < service["pids_limit"] <= 4096, name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name
        assert "build" in service or IMAGE.fullmatch(service["image"]), name
        assert service["read_only"] is True, name
        assert "healthcheck" in service or service["restart"] == "on-failure", name
        assert ("ports" in service) == (name == "api"), name
    assert services["api"]["ports"] == ["127.0.0.1:8000:8000"]
    assert scaled(RAGKV_PORT="81")["services"]["api"]["ports"] == ["127.0.0.1:81:8000"]
    assert int(services["api"]["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


def test_what_is_stored_is_reached_from_inside_only() -> None:
    tree = scaled()
    assert tree["networks"]["inner"] == {"internal": True}
    ways_out = {name for name, service in tree["services"].items() if set(service["networks"]) - {"inner"}}
    assert ways_out == {"api", "worker"}


def test_every_process_of_ray_has_the_same_addresses_and_token() -> None:
    services = scaled()["services"]
    head, worker = services["api"]["environment"], services["worker"]["environment"]
    assert worker.items() <= head.items()
    assert worker["RAY_AUTH_MODE"] == "token"
    assert worker["RAY_AUTH_TOKEN"] == "two"
    catalog = (
        f"postgresql+psycopg://ragkv:{services['postgres']['environment']['POSTGRES_PASSWORD']}@postgres:5432/ragkv"
    )
    assert worker["RAGKV_CATALOG"] == catalog
    assert services["redis-1"]["environment"]["REDISCLI_AUTH"] == "three"
    nodes = worker["RAGKV_STORE"].removeprefix("redis+cluster://:three@").split(",")
    assert nodes == services["redis-cluster"]["environment"]["NODES"].split()
    assert {node.removesuffix(":6379") for node in nodes} <= set(services)
    port = re.search(r"--head --port=(\d+)", services["api"]["entrypoint"][-1])
    assert port
    assert f"--address=api:{port[1]}" in services["worker"]["entrypoint"][-1]


def test_the_image_of_several_replicas_has_the_extras() -> None:
    extras = scaled()["services"]["api"]["build"]["args"]["EXTRAS"].split(",")
    assert set(extras) == {"postgres", "ray"}
    assert "tools.locked $(echo \"$EXTRAS\" | tr , ' ')" in (ROOT / "Dockerfile").read_text()


def test_the_files_name_only_settings_that_exist() -> None:
    texts = [(ROOT / SCALE).read_text(), *(path.read_text() for path in MANIFESTS)]
    assert set(re.findall(r"\bRAGKV_\w+", "\n".join(texts))) <= SETTINGS


def port_with_bus() -> int:
    """A free port whose bus is where redis-cli looks for it: 10,000 higher."""
    while True:
        port = free_port()
        with socket.socket() as bus, suppress(OSError, OverflowError):
            bus.bind(("127.0.0.1", port + 10_000))
            return port


@pytest.mark.scale
def test_the_nodes_of_redis_are_joined_once_and_told_their_addresses_again() -> None:
    script = [str(word) for word in ("sh", ROOT / "deploy" / "redis" / "join.sh")]
    node = scaled()["services"]["redis-1"]
    words = [str(word) for word in node["command"]]
    start = node["entrypoint"][2]
    # What the shell of the container adds.
    assert start == 'exec redis-server "$$@" --requirepass "$$REDISCLI_AUTH" --masterauth "$$REDISCLI_AUTH"'
    words += ["--requirepass", "three", "--masterauth", "three"]
    bounded = [word if word != "2gb" else "64mb" for word in words]
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server(*bounded, port=port_with_bus())) for _ in range(3)]
        given = {
            **os.environ,
            "REDISCLI_AUTH": "three",
            "NODES": " ".join(f"127.0.0.1:{server.port}" for server in servers),
        }
        first = subprocess.run(script, env=given, capture_output=True, text=True, timeout=60, check=False)
        assert first.returncode == 0, first.stdout + first.stderr
        again = subprocess.run(script, env=given, capture_output=True, text=True, timeout=60, check=False)
        assert again.stdout == "the nodes are joined\n"
        with redis.Redis(port=servers[0].port, password="three", decode_responses=True) as client:
            until = time.monotonic() + 20
            # A node that is met again is known twice for a moment.
            while (info := client.execute_command("CLUSTER INFO"))["cluster_known_nodes"] != "3":
                assert time.monotonic() < until, info
                time.sleep(0.1)
            assert info["cluster_slots_assigned"] == "16384"
        with closing(ClusterStore(f"redis+cluster://:three@127.0.0.1:{servers[0].port}", timeout=1.0)) as store:
            store.ping()
        nowhere = {**os.environ, "NODES": "no.such.host.invalid:1"}
        done = subprocess.run(script, env=nowhere, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "no host no.such.host.invalid" in done.stderr
    assert shutil.which("shellcheck") is None or not subprocess.run(["shellcheck", script[1]], check=False).returncode


# Kubernetes


def manifests() -> list[Tree]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def pod_templates() -> Iterator[tuple[str, Tree]]:
    """(what it belongs to, the template of a pod), those that operators make included."""
    for document in manifests():
        name, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        if document["kind"] == "CronJob":
            yield name, spec["jobTemplate"]["spec"]["template"]
        elif document["kind"] == "RayService":
            yield name, spec["rayClusterConfig"]["headGroupSpec"]["template"]
            yield from ((name, group["template"]) for group in spec["rayClusterConfig"]["workerGroupSpecs"])
        elif "template" in spec:
            yield name, spec["template"]


def of_kind(kind: str) -> list[Tree]:
    return [document for document in manifests() if document["kind"] == kind]


def serve_configuration() -> Tree:
    """What the operator sends to Ray; tests/scale/test_ray_service.py deploys it."""
    (service,) = of_kind("RayService")
    configuration: Tree = yaml.safe_load(service["spec"]["serveConfigV2"])
    return configuration


@pytest.mark.scale
def test_the_manifests_are_what_the_schemas_of_kubernetes_say() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    for document in manifests():
        if document["kind"] not in OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)
    for name, template in pod_templates():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": template["spec"]}
        print(name)  # seen when the next line fails
        kubernetes_validate.validate(pod, version, strict=True)
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"container": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_what_operators_make_has_the_shape_that_they_want() -> None:
    (service,) = of_kind("RayService")
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) == {
        "serveService",
        "serveConfigV2",
        "rayClusterConfig",
    }
    spec = service["spec"]["rayClusterConfig"]
    assert set(spec) == {
        "rayVersion",
        "enableInTreeAutoscaling",
        "authOptions",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"].keys() == {"rayStartParams", "template"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned
    assert spec["rayVersion"] == pinned[1], "KubeRay wants the version of the image"
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]
    (postgres,) = of_kind("Cluster")
    assert postgres["apiVersion"] == "postgresql.cnpg.io/v1"
    assert postgres["spec"]["instances"] >= 2
    assert postgres["spec"]["bootstrap"]["initdb"]["owner"] == "ragkv"


def test_pods_are_unprivileged_bounded_and_probed() -> None:
    found = list(pod_templates())
    assert len(found) == 5
    for name, template in found:
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert spec["enableServiceLinks"] is False, name
        # Ray's autoscaler, in the pod of the head, asks Kubernetes for pods.
        head = template["metadata"]["labels"].get("ragkv/ray") == "head"
        assert spec["automountServiceAccountToken"] is head, name
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert "memory" in container["resources"]["limits"], name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert container["image"] == "ragkv:scale" or IMAGE.fullmatch(container["image"]), name
            if not name.startswith("CronJob"):
                assert container.keys() >= {"readinessProbe", "livenessProbe"}, name


def test_operators_start_pods_as_careful_as_the_others() -> None:
    (postgres,) = of_kind("Cluster")
    assert IMAGE.fullmatch(postgres["spec"]["imageName"])
    (service,) = of_kind("RayService")
    beside = service["spec"]["rayClusterConfig"]["autoscalerOptions"]
    locked = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert beside["securityContext"] == locked
    assert {mount["mountPath"] for mount in beside["volumeMounts"]} == {"/tmp"}


def test_selectors_find_pods_and_services_their_ports() -> None:
    labels = [template["metadata"]["labels"] for _, template in pod_templates()]
    labels += [{"cnpg.io/cluster": c["metadata"]["name"]} for c in of_kind("Cluster")]

    def finds(selector: dict[str, str]) -> bool:
        return any(selector.items() <= each.items() for each in labels)

    for service in of_kind("Service"):
        assert finds(service["spec"]["selector"]), service["metadata"]
        ports = {
            port["name"]
            for _, template in pod_templates()
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
            for container in template["spec"]["containers"]
            for port in container["ports"]
        }
        assert {each.get("targetPort", each["name"]) for each in service["spec"]["ports"]} <= ports
    (service,) = (each["spec"]["serveService"] for each in of_kind("RayService"))
    ray = [template for name, template in pod_templates() if name.startswith("RayService")]
    assert len(ray) == 2
    for template in ray:  # the operator asks the port of this name whether Ray's proxy answers
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == {"serve"}
        assert ports["serve"] == serve_configuration()["http_options"]["port"]
    for document in (*of_kind("PodDisruptionBudget"), *of_kind("Deployment"), *of_kind("StatefulSet")):
        assert finds(document["spec"]["selector"]["matchLabels"]), document["metadata"]
    for policy in of_kind("NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert not selector or finds(selector["matchLabels"]), policy["metadata"]


def test_nobody_is_let_in_who_is_not_named() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    everyone = policies.pop("nothing-else")
    assert everyone == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert {name for name, policy in policies.items() if "ingress" in policy} == {"api", "ray", "postgres", "redis"}
    for name, policy in policies.items():
        assert all(rule["from"] for rule in policy.get("ingress", ())), name


def test_nobody_reaches_what_is_not_named() -> None:
    """Each pair of labels: who connects to whom, and to which ports; None is any port."""
    reached: dict[tuple[str, str], set[int] | None] = {}
    for policy in of_kind("NetworkPolicy"):
        spec = policy["spec"]
        (who,) = spec["podSelector"].get("matchLabels", {"": "everybody"}).values()
        assert ("egress" in spec) <= ("Egress" in spec["policyTypes"])
        for rule in spec.get("egress", ()):
            for peer in rule["to"]:
                (whom,) = peer["ipBlock"].values() if "ipBlock" in peer else peer["podSelector"]["matchLabels"].values()
                reached[who, whom] = {port["port"] for port in rule["ports"]} if "ports" in rule else None
    assert reached == {
        ("everybody", "kube-dns"): {53},
        ("ragkv", "postgres"): {5432},
        ("ragkv", "redis"): {6379},
        ("ray", "ray"): None,
        ("postgres", "postgres"): {5432, 8000},
        ("postgres", "0.0.0.0/0"): {443, 6443},
        ("head", "0.0.0.0/0"): {443, 6443},
        ("redis", "redis"): {6379, 16379},
        ("redis-join", "redis"): {6379},
    }


def test_no_secret_stands_in_the_manifests_and_the_page_says_how_to_make_each() -> None:
    assert not of_kind("Secret")
    page = (ROOT / "docs" / "operations.md").read_text()
    for name, template in pod_templates():
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                if re.search("KEY|TOKEN|PASSWORD", variable["name"]):
                    reference = variable["valueFrom"]["secretKeyRef"]
                    made = reference["name"] == "postgres-app" or f"--from-literal={reference['key']}=" in page
                    assert made, f"{name}: {reference}"


def test_both_ways_of_running_replicas_use_the_same_store_catalogue_and_image() -> None:
    def environment(template: Tree) -> dict[str, Any]:
        found: dict[str, Any] = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        return found

    ragkv = [template for name, template in pod_templates() if name.split()[1] == "ragkv"]
    assert len(ragkv) == 3
    assert len({environment(template)["RAGKV_CATALOG"] for template in ragkv}) == 1
    assert len({template["spec"]["containers"][0]["image"] for template in ragkv}) == 1
    assert all({"configMapRef": {"name": "ragkv"}} in t["spec"]["containers"][0]["envFrom"] for t in ragkv)
    (store,) = {environment(template)["RAGKV_STORE"] for template in ragkv}
    (nodes,) = of_kind("StatefulSet")
    (join,) = of_kind("CronJob")
    names = store.removeprefix("redis+cluster://:$(REDIS_PASSWORD)@").split(",")
    assert len(names) == nodes["spec"]["replicas"]
    container = join["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    assert names == next(each["value"] for each in container["env"] if each["name"] == "NODES").split()


# Read-only root file systems


READ_ONLY = """
for folder in "$2" "$3" /; do mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder"; done
mount --bind "$1" "$1" && mount -o remount,bind,rw "$1"
! touch "$2/written" /written 2>/dev/null || { echo "files can be written" >&2; exit 1; }
shift 3
exec "$@"
"""


def may_mount() -> bool:
    """Whether this user may make a namespace of mounts."""
    unshare = shutil.which("unshare")
    given = [unshare or "", "--user", "--map-root-user", "--mount", "true"]
    return unshare is not None and subprocess.run(given, capture_output=True, check=False).returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.skipif(not may_mount(), reason="this user may not make a namespace of mounts")
def test_the_service_works_where_nothing_but_its_data_folder_can_be_written(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "temporary").mkdir(parents=True)
    with_records(data)
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-eu", "-c", READ_ONLY, "sh"]
    words += [str(data), str(ROOT), sys.prefix, sys.executable, "-m", "ragkv.cli", "serve", "--port", "0"]
    homes = {"HOME": str(data), "TMPDIR": str(data / "temporary"), "RAGKV_DATA": str(data), "PYTHONPATH": str(ROOT)}
    given = {**os.environ, **homes, "RAGKV_THREADS": "1"}
    given.pop("XDG_CACHE_HOME", None)
    with subprocess.Popen(
        words, cwd=data, env=given, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr
        try:
            said = []
            while "serving at" not in (line := process.stderr.readline()):
                said.append(line)
                assert line, "".join(said)
            with httpx.Client(base_url=line.split()[-1], timeout=100) as client:
                files = {"files": (LIGHT[0].name, LIGHT[0].read_bytes())}
                assert client.post("/v1/documents?wait=true", files=files).json()["status"] == "completed"
                assert client.post("/v1/answers", json={"question": "Who?", "max_tokens": 2}).status_code == 200
                assert client.get("/dashboard/").status_code == 200
                assert client.get("/readyz").json()["status"] == "ready"
        finally:
            process.kill()

"""Settings: the only reader of the environment. They are frozen, and grouped in parts.

Order of precedence: arguments of a command, environment `RAGKV_*`, `ragkv.toml` in the working folder, defaults below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragkv.errors import ConfigError

SECRETS = Path("/run/secrets")
"""Where containers find secrets: a file for each, with the name of the environment variable in lower case."""
OCR_PAGES = 50
"""Pages of one PDF that OCR may read where `ocr` is true."""
_TENANTS = "write RAGKV_OIDC_TENANTS='CLAIM: TENANT, VALUE=TENANT'"
_ROLES = "write RAGKV_OIDC_ROLES='CLAIM: VALUE=reader, VALUE=writer'"
_ISSUER = "write RAGKV_OIDC_ISSUER='ISSUER AUDIENCE', with the address of the keys behind them where one is needed"
RETIRED = {
    "ENCODE_WAIT": "it is always 4: unset it",
    "MAX_REPLICAS": "write RAGKV_REPLICAS=2-8",
    "OCR_PAGES": "write RAGKV_OCR=50",
    "OCR_SECONDS": "a page has 12 s: write RAGKV_OCR=50 for 50 pages",
    "OIDC_AUDIENCE": _ISSUER,
    "OIDC_JWKS_URL": _ISSUER,
    "OIDC_LEEWAY": "it is always 60: unset it",
    "OIDC_READERS": _ROLES,
    "OIDC_ROLE_CLAIM": _ROLES,
    "OIDC_TENANT_CLAIM": _TENANTS,
    "OIDC_WRITERS": _ROLES,
    "PAGED": "write RAGKV_GRAPHS=paged",
    "PREFIX_CACHE_BYTES": "write RAGKV_CONVERSATION_BYTES, which bounds it as well",
    "RAY_ADDRESS": "write RAY_ADDRESS, which Ray reads itself",
    "REPLICA_REQUESTS": "it follows from RAGKV_BATCH",
}
"""Settings that there were, with what to do instead."""


def bundled_models() -> Path:
    """Return the folder of the models that ship with ragkv: inside the wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    packaged = here / "models"
    return packaged if packaged.is_dir() else here.parent / "models"


class _Part(BaseModel):
    """A part of the settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Part = TypeVar("Part", bound=_Part)


class ModelSettings(_Part):
    """The model, and where it runs."""

    model: str = Field(
        "", description="Model folder, GGUF file or hub id; empty: SmolLM2-135M-Instruct with ragkv's adapter."
    )
    adapter: str = Field(
        "",
        description="LoRA folder in PEFT's format; empty: none, or ragkv's own where `model` is empty. After commas, "
        "`COLLECTION=FOLDER`: wrapper tokens of a collection's chunks.",
    )
    model_cache: str = Field("", description="Folder of converted GGUF files; empty: ragkv/models in the user's cache.")
    device: str = Field(
        "auto",
        description="`cpu`, `cuda`, `cuda:1`, `spread` (layers over all GPUs), or `auto` (CUDA where there is one).",
    )
    dtype: str = Field(
        "auto", description="`float32`, `bfloat16`, `float64`; auto: bfloat16 with CUDA and on CPUs that compute in it."
    )
    weights: Literal["auto", "exact", "fp8"] = Field(
        "auto",
        description="`exact`: as they are. `auto`: likewise, but a CPU that computes in bfloat16 decodes by a "
        "copy of 4 or 8 bits. `fp8`: rounded, half the memory, and answers decode faster; a GPU of compute capability "
        "8.9 or newer.",
    )
    threads: int = Field(0, ge=0, description="CPU threads for the model; 0: as many as the process may use.")
    graphs: bool | Literal["paged"] = Field(
        True,
        description="On a GPU, decode densely and read few rows by recorded CUDA graphs, a launch for each. `paged`: "
        "also decode over stored blocks where they lie in GPU memory, shared by all answers that read the same chunk; "
        "needs RAGKV_GPU_BYTES.",
    )


class StoreSettings(_Part):
    """Where KV is kept, and in which form."""

    store: str = Field(
        "disk", description="KV store: `disk`, `redis://host:port/db`, or `redis+cluster://host:port,…`."
    )
    store_body: str = Field(
        "exact",
        pattern="^(exact|int8|fp8)$",
        description="How K and V are stored: every bit, or a byte a number.",
    )
    store_secret: SecretStr = Field(
        SecretStr(""), description="Authenticates what the store holds; empty: checksums against accidents."
    )
    store_ttl: float = Field(
        0.0, ge=0, le=1e9, description="Seconds a stored chunk lives after it was written; 0: for ever."
    )
    store_bytes: int = Field(0, ge=0, description="Bytes the disk store may hold; the least used go; 0: any number.")
    store_timeout: float = Field(0.25, gt=0, description="Seconds a store may take to connect.")
    host_bytes: int = Field(512 * 2**20, ge=0, description="Host memory for KV kept between questions, in bytes.")
    gpu_bytes: int = Field(2**30, ge=0, description="GPU memory for the same, where the model is on one.")

    @field_validator("store_secret")
    @classmethod
    def _hard_to_guess(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < 16:
            raise ValueError("at least 16 characters, for example those of `openssl rand -hex 32`")
        return secret


class AnswerSettings(_Part):
    """How a question is answered where it does not say itself."""

    method: str = Field("", description="Default method; empty: scout where the model is calibrated, else cacheblend.")
    gate: bool = Field(
        True, description="Prefill in full where that is predicted to be quicker than stored KV and no method is named."
    )
    prefill: str = Field(
        "auto",
        description="What the rows of a prefill read: auto (everything, as dense), dense, critiprefill or "
        "loopserve, with fields.",
    )
    decode: str = Field(
        "auto",
        description="What each token of an answer reads: auto (a policy where it is quicker), dense, psa, lfps, "
        "loopserve or topk, with fields.",
    )
    pool_bytes: int = Field(
        0,
        ge=0,
        description="Pool of KV blocks where the model computes, in bytes; contexts decoded under psa then lie in host "
        "memory; 0: no pool.",
    )
    speculation: bool | Literal["auto"] = Field(
        "auto",
        description="Draft tokens that an answer quotes from its prompt, and verify several in one pass, where "
        "decoding is dense and uses no pool; auto: on.",
    )
    top_k: int = Field(6, ge=1, le=64, description="Chunks retrieved for a question.")
    max_tokens: int = Field(64, ge=1, le=4096, description="Longest answer, in tokens.")
    max_question_tokens: int = Field(2048, ge=1, description="Longest question, in tokens.")
    conversation_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="Memory for conversations kept between their turns, in bytes, and as much for KV that "
        "full:prefix=true uses again; 0 keeps none.",
    )


class IngestSettings(_Part):
    """How documents are read, and their limits."""

    embedder: str = Field("", description="Sentence-transformers folder or hub id; empty: the packaged MiniLM.")
    reranker: str = Field(
        "",
        description="Sentence-transformers cross-encoder, a folder or hub id, that orders what was found; empty: none.",
    )
    ingest_prefill: str = Field(
        "dense", description="The same for chunks at ingest; KV made so has its own fingerprint."
    )
    chunk_tokens: int = Field(
        0, ge=0, description="Longest chunk, in tokens, prompt piece included; 0: the model profile's."
    )
    group_tokens: int = Field(
        0,
        ge=0,
        description="Tokens of chunks encoded together, while questions wait; 0: 1024 on a CPU, 4096 on a GPU.",
    )
    prefix: str = Field(
        "shared", pattern="^(shared|isolated)$", description="What a chunk is encoded after (SamKV A13)."
    )
    max_document_bytes: int = Field(16 * 2**20, ge=1, description="Largest document, in bytes.")
    parse_seconds: float = Field(
        30.0, gt=0, le=3600, description="Seconds that parsing one file may take, and splitting each MiB of a text."
    )
    parse_bytes: int = Field(2**30, ge=2**27, description="Memory that it may take, in bytes of address space.")
    ocr: bool | Annotated[int, Field(ge=2, le=10_000)] = Field(
        False,
        description="Read scanned pages of PDFs by OCR: `true`, up to 50 of a PDF, or how many; parsing may take 12 "
        "seconds for each. Needs `ragkv[ocr]`.",
    )
    collection_bytes: int = Field(
        0, ge=0, description="Bytes of KV and kept files a collection may hold; 0: any number."
    )

    @property
    def ocr_pages(self) -> int:
        """Pages of one PDF that OCR may read; 0: no OCR."""
        return OCR_PAGES if self.ocr is True else int(self.ocr)


class ViewSettings(_Part):
    """What a process searches in, where several share a catalogue on a server."""

    staleness: float = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds for which a search may miss what other replicas changed; 0: every search asks a catalogue "
        "on a server. SQLite is always asked.",
    )
    vectors: Literal["faiss", "pgvector"] = Field(
        "faiss",
        description="Where vectors are searched: in the memory of each process, or in PostgreSQL by pgvector.",
    )


class ServingSettings(_Part):
    """What `ragkv serve` does with requests, and who may send them."""

    host: str = Field("127.0.0.1", description="Address `ragkv serve` listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port `ragkv serve` listens on; 0: any free one.")
    hosts: str = Field(
        "",
        description="Names under which `ragkv serve` answers, comma separated, besides those of this machine; `*`: "
        "any; empty: no other, or any where there are API keys.",
    )
    public_url: str = Field(
        "", description="Address under which users reach `ragkv serve`, where it is not that of host and port."
    )
    root_path: str = Field(
        "",
        description="Path below which a proxy serves `ragkv serve`, such as /ragkv; empty: that of `public_url`. A "
        "proxy may name another one in X-Forwarded-Prefix.",
    )
    origins: str = Field(
        "",
        description="Origins whose pages may use the API from a browser, comma separated; `*`: every one; empty: none.",
    )
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="Who may use `ragkv serve`: `tenant=hash` pairs, comma separated, or a file with one a line; "
        "empty: anybody. `ragkv key TENANT` makes them.",
    )
    tenant_requests: int = Field(0, ge=0, description="Requests a minute that a tenant may send; 0: any number.")
    tenant_tokens: int = Field(
        0, ge=0, description="Tokens a minute, of prompts and answers, that a tenant may use; 0: any number."
    )
    tenant_bytes: int = Field(0, ge=0, description="Bytes of documents a minute that a tenant may send; 0: any number.")
    tenant_stored: int = Field(
        0, ge=0, description="Bytes of KV and kept files that all documents of a tenant may need; 0: any number."
    )
    operators: str = Field(
        "", description="Tenants, comma separated, whose keys see the metrics of every tenant; others see their own."
    )
    connections: int = Field(
        256, ge=0, description="Connections that one address may have to `ragkv serve` at a time; 0: any number."
    )
    replicas: str = Field(
        "0",
        pattern=r"^[0-9]{1,3}(-[0-9]{1,3})?$",
        coerce_numbers_to_str=True,
        description="Processes of `ragkv serve` that answer, each with its own model: a number, or `2-8`, as many of "
        "them as the load needs; 0: one, without Ray. Needs `ragkv[ray]`.",
    )
    dashboard: bool = Field(True, description="Whether `ragkv serve` shows its dashboard, at /dashboard.")
    batch: int = Field(16, ge=1, le=256, description="Answers that `ragkv serve` decodes together.")
    batch_bytes: int = Field(2 * 2**30, ge=0, description="Bytes of KV that those may hold; a larger one runs alone.")
    queue: int = Field(32, ge=1, le=100_000, description="Requests that may wait for the model; more are refused.")
    deadline: float = Field(60.0, gt=0, le=86_400, description="Seconds an answer may take, waiting included.")
    history: int = Field(200, ge=0, le=10_000, description="Latest answers `ragkv serve` keeps in memory to show.")
    log: Literal["text", "json"] = Field(
        "text", description="Lines of `ragkv serve`: `text`, or `json`, an object each."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="From which level on.")
    traces: bool = Field(
        False, description="Send OpenTelemetry traces, to where the OTEL_* variables say; needs `ragkv[otel]`."
    )

    @field_validator("replicas")
    @classmethod
    def _in_order(cls, replicas: str) -> str:
        least, _, most = replicas.partition("-")
        if most and int(most) < int(least):
            raise ValueError(f"{replicas} has more replicas before the hyphen than behind it")
        return replicas

    @property
    def replica_counts(self) -> tuple[int, int]:
        """The fewest and the most replicas; (0, 0) where there are none."""
        least, _, most = self.replicas.partition("-")
        return max(int(least), min(1, int(most or 0))), int(most or least)


class SignInSettings(_Part):
    """Tokens of an OpenID Connect issuer that `ragkv serve` accepts beside API keys, and the audit log."""

    oidc_issuer: str = Field(
        "",
        description="Issuer of OpenID Connect whose tokens `ragkv serve` accepts, what their claim `aud` must name, "
        "and the address of the issuer's keys where that is on another origin, with a space between them; empty: none. "
        "Needs `ragkv[sso]`.",
    )
    oidc_tenants: str = Field(
        "",
        description="Claim that names the tenant, a colon, and the tenants that tokens may name, comma separated: "
        "`tenant`, or `value=tenant` where the claim has another value. Without a colon the claim is `tenant`; dots "
        "lead into nested claims.",
    )
    oidc_roles: str = Field(
        "roles: reader, writer",
        description="Claim with the roles, a colon, and the roles, comma separated: `reader` and `writer`, or "
        "`value=reader` where the claim has another value. The claim is a list, or words; dots as above.",
    )
    audit_log: str = Field(
        "", description="File to which a JSON line is appended for each ingest and deletion; empty: only the log."
    )

    @field_validator("oidc_issuer")
    @classmethod
    def _three_words(cls, issuer: str) -> str:
        if len(issuer.split()) > 3:
            raise ValueError("more than the issuer, its audience and the address of its keys")
        return issuer

    @property
    def issuer(self) -> tuple[str, str, str]:
        """Address of the issuer, audience, and address of the issuer's keys; "" for what is not given."""
        address, audience, keys, *_ = (*self.oidc_issuer.split(), "", "", "")
        return address, audience, keys


class ClientSettings(_Part):
    """The service that commands talk to."""

    url: str = Field(
        "",
        description="Service that `ask`, `ingest`, `ls`, `rm`, `doctor` and `top` talk to; empty: the first five work "
        "themselves.",
    )
    key: SecretStr = Field(SecretStr(""), description="API key for that service.")


class Settings(
    ModelSettings,
    StoreSettings,
    AnswerSettings,
    IngestSettings,
    ViewSettings,
    ServingSettings,
    SignInSettings,
    ClientSettings,
    BaseSettings,
):
    """Everything a user can set. Field `x_y` is environment variable `RAGKV_X_Y` and key `x_y` of ragkv.toml. In a
    container it may be a file of /run/secrets, `ragkv_x_y`.

    The fields belong to parts. A room that needs one part receives that part: `settings.part(StoreSettings)`.
    """

    model_config = SettingsConfigDict(env_prefix="RAGKV_", toml_file="ragkv.toml", frozen=True, extra="forbid")

    data: Path = Field(Path("data"), description="Folder of the catalogue, the index and the disk store.")
    catalog: SecretStr = Field(
        SecretStr(""),
        description="Where the catalogue is: empty: in a file of `data`, or "
        "postgresql+psycopg://user:password@host/name, for several machines; needs `ragkv[postgres]`.",
    )

    @property
    def paged(self) -> bool:
        """Whether answers read stored blocks in place."""
        return self.graphs == "paged"

    @property
    def catalog_address(self) -> Path | str:
        """What `Catalog.open` takes: the path of the file, or the address of the database."""
        return self.catalog.get_secret_value() or self.data / "catalog.sqlite"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        secrets = (SecretsSettingsSource(settings_cls, SECRETS),) if os.access(SECRETS, os.R_OK | os.X_OK) else ()
        return init_settings, env_settings, *secrets, TomlConfigSettingsSource(settings_cls)

    def part(self, kind: type[Part]) -> Part:
        """Return the values of one part."""
        return kind.model_construct(**{name: getattr(self, name) for name in kind.model_fields})

    @property
    def model_cache_folder(self) -> Path:
        """The folder of converted GGUF files."""
        if self.model_cache:
            return Path(self.model_cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ragkv" / "models"


def load_settings(**given: Any) -> Settings:
    """Read the settings.

    Args:
        given: Values that win over the environment and the file; None means not given.

    Raises:
        ConfigError: Names every setting that is wrong.
    """
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(f"settings: {'; '.join(map(_fault, error.errors()))}") from None
    except ValueError as error:
        raise ConfigError(f"ragkv.toml: {error}") from None


def _fault(error: ErrorDetails) -> str:
    """Name a wrong setting and what is wrong with it."""
    name = ".".join(map(str, error["loc"]))
    retired = RETIRED.get(name.upper()) if error["type"] == "extra_forbidden" else None
    return f"{name}: {retired or error['msg']}"


def unknown_variables() -> list[tuple[str, str]]:
    """Return (name, what to do instead) of each variable or secret that looks like a setting and is none.

    An unknown key of ragkv.toml is refused.
    """
    known = [name.upper() for name in Settings.model_fields]
    files = SECRETS.glob("ragkv_*") if os.access(SECRETS, os.R_OK | os.X_OK) else ()
    given = {name for name in (*os.environ, *(file.name for file in files)) if name.upper().startswith("RAGKV_")}
    strange = {name: name.upper().removeprefix("RAGKV_") for name in sorted(given)}
    return [(name, _instead(bare, known)) for name, bare in strange.items() if bare not in known]


def _instead(bare: str, known: list[str]) -> str:
    """Return what to do instead of a setting that there is not."""
    if bare in RETIRED:
        return RETIRED[bare]
    near = get_close_matches(bare, known, 1)
    return f"did you mean RAGKV_{near[0]}?" if near else "see docs/settings.md"


def ray_address() -> str:
    """Return the Ray cluster to join, by the variable that Ray reads itself; "" starts Ray on this machine."""
    return os.environ.get("RAY_ADDRESS", "")


def offer_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables that a library and its processes read at their start. What the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)

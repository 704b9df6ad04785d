# `docker build -t specdec:cpu .`: the server on a CPU. docs/guides/deploying.md has the command that runs it.
FROM python:3.11-slim

# The compiler builds kernels for the processor that the container runs on: they cannot be part of the image.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/specdec
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY specdec specdec
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[serve]'

# Kernels and models from the hub: keep this folder over restarts.
RUN useradd --create-home specdec && mkdir /cache && chown specdec /cache
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
USER specdec
WORKDIR /home/specdec

EXPOSE 8000
ENTRYPOINT ["specdec"]
CMD ["serve", "--demo", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/specdec-keys"]

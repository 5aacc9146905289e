#!/bin/sh
# Prints the path of a Python that jpaged can be installed with: 3.12 or newer, able to make virtual environments.
# Looks at $PYTHON alone if that is set, else at PATH, pyenv's versions and uv's. Each one is run, not only found: a pyenv
# shim is on PATH whether or not its version is active, and Debian's python3 may come without venv.

fits() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

found() {
    fits "$1" && "$1" -c 'import sys; print(sys.executable)' && exit 0
}

if [ -n "${PYTHON:-}" ]; then
    found "$PYTHON"
    echo "jpaged needs Python 3.12 or newer with venv, and PYTHON=$PYTHON is not one: name another or unset PYTHON." >&2
    exit 1
fi

for name in python3.13 python3.12 python3.14 python3.15 python3 python; do
    found "$name"
done

for version in 3.13 3.12 3.14 3.15; do
    for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python; do
        found "$path"
    done
done

if command -v uv >/dev/null 2>&1; then
    for version in 3.13 3.12 3.14 3.15; do
        path=$(uv python find --no-project --no-python-downloads "$version" 2>/dev/null) && found "$path"
    done
fi

echo "jpaged needs Python 3.12 or newer with venv, and none was found on PATH, in pyenv or in uv: install one, for example with 'uv python install 3.13' or 'pyenv install 3.13'." >&2
exit 1

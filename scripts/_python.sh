# Sourced by the scripts beside it: sets $python to a Python that can build this project's environment.
#
# Explicit versions come first, newest first, because those are the ones the project is tested with; then whatever is
# called python3. Each candidate is started, not only looked up: version managers leave commands on PATH that exist but
# do not run, and some systems ship a Python without the modules that make an environment.

find_python() {
    for candidate in ${COMMITMQ_PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -I -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

if ! python=$(find_python); then
    echo "commitmq needs Python 3.11 or newer with its venv and ensurepip modules, and found none on PATH." >&2
    echo "(Debian and Ubuntu keep them in the package python3-venv. COMMITMQ_PYTHON names a Python to use instead.)" >&2
    exit 69
fi

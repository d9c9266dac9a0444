#!/bin/sh
# The start-up of a container: `start member`, `start manifest` or `start monitor`, followed by further options of
# `byzpg peer`, `byzpg federation new` or `byzpg monitor`. Any other arguments are a command of byzpg.
#
#   NAME, ADDRESS   of the member; for the monitor, the member to connect as
#   MEMBERS         names of all members, for the manifest
#   PORT            of the metrics or of the status page
#   STATE           directory of this member: its key, state and results
#   CARDS           directory where members publish their cards
#   FEDERATION      directory of the manifest
set -eu
manifest="${FEDERATION:-}/federation.toml"
role="${1:-}"

wait_for() {
    [ -f "$1" ] || echo "waiting for $1" >&2
    until [ -f "$1" ]; do sleep 1; done
}

case "$role" in
member)
    shift
    # The key and the card appear together: a key without its card could not be used, and keys are never overwritten.
    if [ ! -d "$STATE/identity" ]; then
        rm -rf "$STATE/identity.new"
        byzpg keygen --name "$NAME" --address "$ADDRESS" --directory "$STATE/identity.new"
        mv "$STATE/identity.new" "$STATE/identity"
    fi
    cp "$STATE/identity/$NAME.card" "$CARDS/.$NAME.card"
    mv "$CARDS/.$NAME.card" "$CARDS/$NAME.card"
    wait_for "$manifest"
    exec byzpg peer "$manifest" --name "$NAME" --key "$STATE/identity/$NAME.key" --directory "$STATE/member" \
        --log json --metrics-port "$PORT" "$@"
    ;;
manifest)
    shift
    [ ! -f "$manifest" ] || exit 0
    for name in $MEMBERS; do
        wait_for "$CARDS/$name.card"
        set -- "$@" "$CARDS/$name.card"
    done
    exec byzpg federation new --manifest "$manifest" "$@"
    ;;
monitor)
    shift
    wait_for "$manifest"
    exec byzpg monitor "$manifest" --name "$NAME" --key "$STATE/identity/$NAME.key" --port "$PORT" "$@"
    ;;
*)
    exec byzpg "$@"
    ;;
esac

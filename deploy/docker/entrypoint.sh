#!/bin/sh
# Starts a service: entrypoint.sh prefill|decode|router [flags]; anything else goes to dsv4-pd.
# A worker's own address is known only here: peers write to it by Mooncake, routers call it.
set -eu
service=${1:-}
case "$service" in
prefill | decode)
    address=$(hostname -i | cut -d' ' -f1)
    if [ "$service" = prefill ]; then
        export DSV4PD_PREFILL_TRANSFER_HOSTNAME="${DSV4PD_PREFILL_TRANSFER_HOSTNAME:-$address}"
        export DSV4PD_PREFILL_ADVERTISE_ADDRESS="${DSV4PD_PREFILL_ADVERTISE_ADDRESS:-$address:$DSV4PD_PREFILL_PORT}"
    else
        export DSV4PD_DECODE_TRANSFER_HOSTNAME="${DSV4PD_DECODE_TRANSFER_HOSTNAME:-$address}"
        export DSV4PD_DECODE_ADVERTISE_ADDRESS="${DSV4PD_DECODE_ADVERTISE_ADDRESS:-$address:$DSV4PD_DECODE_PORT}"
    fi
    ;;
router) ;;
*) exec dsv4-pd "$@" ;;
esac
shift
exec python -m "${service}_service" "$@"

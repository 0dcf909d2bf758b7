# shellcheck shell=sh disable=SC2154,SC1091
# A machine's side of `thinwire up`, sent to its sh. The lines before it set to, owner, machine, mark, verb,
# job and offset. Its answer begins behind the mark: a login shell may print before it.
# A process of a job, whatever session it is in, has THINWIRE_UP in its environment.
cd && cd "$to/.thinwire" 2>/dev/null || { echo "$mark" && exit; }
[ "$verb" = follow ] || echo "$mark"
# shellcheck disable=SC2088 # words
if [ -f owner ] && [ "$(cat owner)" != "$owner" ]; then
    echo "~/$to belongs to $(cat owner): give another name, or to, in the file" >&2
    exit 1
fi
marked() {
    grep -lsFxz "THINWIRE_UP=$PWD/$job" /proc/[0-9]*/environ | tr -dc '0-9\n'
}
case $verb in
status) # one line a job: its name, its state, when it began, its last line
    for job in host member rank; do
        [ -f "$job.log" ] || continue
        state="status $(cat "$job.status" 2>/dev/null || echo 137)"
        [ -z "$(marked)" ] || state=running
        last=$(tail -c 2000 "$job.log" | tr '\t\r' ' \n' | grep . | tail -n 1)
        printf '%s\t%s\t%s\t%s\n' "$job" "$state" "$(cat "$job.since")" "$last"
    done
    ;;
files) # kind, size, time, mode, name and target of each, between zeros; nothing without GNU find
    cd .. && find . -path ./.thinwire -prune -o -name .venv -prune -o \
        \( -type f -o -type l \) -printf '%y %s %T@ %m %P\0%l\0' 2>/dev/null || :
    ;;
setup)
    exec 2>&1 </dev/null
    cd .. && . .thinwire/env && sh -e .thinwire/setup.sh
    ;;
version)
    cd .. && . .thinwire/env && python -m thinwire --version
    ;;
start)
    if [ "$(cat machine)" != "$machine" ]; then
        echo "is one machine with $(cat machine), or shares its home: list a machine once" >&2
        exit 1
    fi
    rm -f "$job.status"
    date '+%Y-%m-%d %H:%M' >"$job.since"
    export THINWIRE_UP="$PWD/$job"
    setsid sh "$job.sh" >"$job.log" 2>&1 </dev/null &
    echo $! >"$job.pid"
    until [ -n "$(marked)" ] || [ -f "$job.status" ]; do sleep 0.1; done
    ;;
listening)
    until grep -q '^listening' "$job.log"; do
        [ -n "$(marked)" ] || exit 1
        sleep 0.2
    done
    ;;
follow) # the offset where it begins, then the log until the job ends; its exit status
    size=$(wc -c <"$job.log")
    [ "$offset" -ge 0 ] || offset=$((size > 2000 ? size - 2000 : 0))
    echo "$mark$offset"
    if [ -n "$(marked)" ]; then
        tail -c "+$((offset + 1))" -s 0.2 -f --pid="$(cat "$job.pid")" "$job.log"
    else
        tail -c "+$((offset + 1))" "$job.log"
    fi
    exit "$(cat "$job.status" 2>/dev/null || echo 137)"
    ;;
stop)
    [ -n "$(marked)" ] || exit 0
    # shellcheck disable=SC2046 # one word a process
    kill -TERM -- "-$(cat "$job.pid")" 2>/dev/null || kill -TERM $(marked)
    left=50
    while [ -n "$(marked)" ] && [ "$left" -gt 0 ]; do
        sleep 0.2
        left=$((left - 1))
    done
    [ -z "$(marked)" ] && echo ended && exit
    # shellcheck disable=SC2046
    kill -KILL $(marked)
    echo killed
    ;;
esac

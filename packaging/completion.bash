# bash completion for Commonweight's commands. Options are read out of --help, so it is never behind.
_commonweight() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local command=("${COMP_WORDS[0]}") choices help
    case ${COMP_WORDS[0]##*/} in
    cw-trainer | cw-bench)
        if [ "$COMP_CWORD" -eq 1 ]; then
            choices="train serve sft dpo eval merge"
            [ "${COMP_WORDS[0]##*/}" = cw-bench ] && choices="decode prefill train sync step serve speculative tandem ops"
            mapfile -t COMPREPLY < <(compgen -W "$choices --help --version" -- "$word")
            return
        fi
        command+=("${COMP_WORDS[1]}")
        ;;
    esac
    help=$("${command[@]}" --help-all 2>/dev/null) || return
    if [[ $before == --* ]]; then
        # "--name a|b|c" has its choices in the help; other values are files
        choices=$(sed -n "s/^  $before \([a-z0-9_.:]*\(|[A-Za-z0-9_.:]*\)\{1,\}\).*/\1/p" <<<"$help" | tr '|' ' ')
        if [ -n "$choices" ]; then
            mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
            return
        fi
    fi
    if [[ $word == -* ]]; then
        choices=$(sed -n 's/^  --\(\[no-\]\)\{0,1\}\([a-z0-9-]*\).*/--\2/p' <<<"$help")
        mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    fi
}
complete -o default -F _commonweight cw-infer-server cw-trainer cw-ipc-check cw-bench cw-report \
    cw-tokenize cw-word-problems

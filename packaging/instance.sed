# Makes cw-infer-server@.service of cw-infer-server.service: one server a GPU, which the instance
# names (cw-infer-server@0). Socket and bridge file are where `cw-trainer train --gpus` looks for them.
1,/^$/ {
    /^#/d
    /^$/ {
        i\
# cw-infer-server.service with one server a GPU: `systemctl enable --now cw-infer-server@0\
# cw-infer-server@1`, then `cw-trainer train --gpus 0,1` as the same user. All of them read\
# /etc/commonweight/server.json; what one has of its own (--listen, say) goes into a drop-in of that\
# instance (`systemctl edit cw-infer-server@0`).
    }
}
s/^Description=.*/& on GPU %i/
# the other unit takes all of /run/commonweight away when it stops
s/^After=/Conflicts=cw-infer-server.service\n&/
s/^RuntimeDirectory=commonweight$/&\/%i/
s/%t\/commonweight\//&%i\//g
s/^ExecStart=.*/& --device cuda:%i/

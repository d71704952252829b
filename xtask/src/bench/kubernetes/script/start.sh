#!/bin/busybox sh
# The programs of Kubernetes as a person would start them by hand: each as soon as what it
# needs is there, all as root, with nothing that watches them. The machine has an address of
# QEMU's NAT, and a disk with an empty XFS.
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/bin
# Up to the first program, a step that fails ends the measurement.
set -e -o pipefail
trap 'echo "POLIS script ended=setup" >/dev/ttyS0' EXIT
files=/etc/script

# Tells the measurement of a step.
say() {
    read -r up _ </proc/uptime
    echo "POLIS script step=$1 t=$up" >/dev/ttyS0
}

# Waits until etcd has a key. It answers in clear; wget has no encryption that the API server
# takes.
stored() {
    key=$(printf %s "$1" | base64)
    until wget -q -O - --post-data "{\"key\":\"$key\",\"count_only\":true}" $etcd/v3/kv/range |
        grep -q count; do usleep 250000; done
}

# Waits until a program answers.
answers() {
    until wget -q -O /dev/null "$2" 2>/dev/null; do usleep 100000; done
    say "$1"
}

# Starts a program; its messages are on the disk, and its last ones go to the measurement.
start() {
    name=$1
    shift
    {
        "$@" >"/data/log/$name" 2>&1
        tail -n 3 "/data/log/$name" >/dev/ttyS0
        echo "POLIS script ended=$name" >/dev/ttyS0
    } &
}

# The places that programs expect. Modules are loaded by the image's own program.
ln -s /usr/lib/x86_64-linux-gnu /lib/x86_64-linux-gnu
ln -s /usr/lib64/ld-linux-x86-64.so.2 /lib64/ld-linux-x86-64.so.2
ln -s /usr/lib/modules /lib/modules
ln -s /proc/self/fd /dev/fd
cp /system/init /init
mkdir -p /dev/pts /dev/shm
mount -t sysfs sys /sys
# The kernel boots on one processor, which has no such file.
for online in /sys/devices/system/cpu/cpu*/online; do
    if [ -e "$online" ]; then echo 1 >"$online"; fi
done
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t tmpfs run /run
mount -t devpts -o ptmxmode=0666 pts /dev/pts
mount -t tmpfs shm /dev/shm
mount --make-rshared /
# The kernel asks for those that kube-proxy needs.
echo /usr/sbin/modprobe >/proc/sys/kernel/modprobe
for module in xfs virtio_net overlay veth nf_tables nft_chain_nat nft_masq; do
    modprobe "$module"
done
mount -t xfs -o noatime /dev/vda /data
mkdir -p /data/etcd /data/containerd /data/kubelet /data/log
mount --bind /data/containerd /var/lib/containerd
mount --bind /data/kubelet /var/lib/kubelet
mount --bind /data/log /var/log

echo "root:x:0:0::/:/bin/sh" >/etc/passwd
echo "127.0.0.1 localhost" >/etc/hosts
echo "nameserver 10.0.2.3" >/etc/resolv.conf
cp "$files/pods.conflist" /etc/cni/net.d/
hostname script
# kubelet does not start without the first six.
while read -r name value; do echo "$value" >"/proc/sys/$name"; done <<EOF
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
net/ipv4/ip_forward 1
net/ipv4/conf/all/rp_filter 0
net/ipv4/conf/default/rp_filter 0
EOF
ip link set lo up
# The name server of pods: the address that a node gives it.
ip addr add 169.254.77.53/32 dev lo
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2

set +e
trap - EXIT

etcd=http://127.0.0.1:2379
start etcd etcd --name script --data-dir /data/etcd \
    --listen-client-urls $etcd --advertise-client-urls $etcd \
    --listen-peer-urls http://127.0.0.1:2380 \
    --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster script=http://127.0.0.1:2380
answers etcd $etcd/health

start apiserver kube-apiserver --etcd-servers=$etcd \
    `# etcd 3.5 has no streams of ranges.` --feature-gates=EtcdRangeStream=false \
    --advertise-address=10.0.2.15 --secure-port=6443 --cert-dir=/data/apiserver \
    --token-auth-file=$files/tokens.csv --authorization-mode=Node,RBAC \
    --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --kubelet-preferred-address-types=InternalIP \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-signing-key-file=$files/service-account.key \
    --service-account-key-file=$files/service-account.pub \
    --service-cluster-ip-range=10.224.0.0/16 --profiling=false
start containerd containerd --config $files/containerd.toml
(
    until ctr version >/dev/null 2>&1; do usleep 200000; done
    tar -C /usr/share/polis/images -cf - . | ctr -n k8s.io images import --local - >/dev/null &&
        say containerd || echo "POLIS script ended=import" >/dev/ttyS0
    start kubelet kubelet --config=$files/kubelet.json \
        --kubeconfig=$files/kubelet.kubeconfig --hostname-override=script --node-ip=10.0.2.15
) &

# The API server takes this lease once it is ready.
stored /registry/masterleases/10.0.2.15
say apiserver

# As long as on a node: an API server that is translated does not answer within the default ten
# seconds at times, and both then end.
leads="--leader-elect-lease-duration=60s --leader-elect-renew-deadline=40s
    --leader-elect-retry-period=5s"
start controller-manager kube-controller-manager $leads \
    --kubeconfig=$files/controller-manager.kubeconfig \
    --authentication-kubeconfig=$files/controller-manager.kubeconfig \
    --authorization-kubeconfig=$files/controller-manager.kubeconfig \
    --bind-address=127.0.0.1 --cert-dir=/data/controller-manager \
    --service-account-private-key-file=$files/service-account.key \
    --use-service-account-credentials=true --allocate-node-cidrs=false \
    --controllers='*,-certificatesigningrequest-signing-controller' --profiling=false
start scheduler kube-scheduler $leads \
    --kubeconfig=$files/scheduler.kubeconfig \
    --authentication-kubeconfig=$files/scheduler.kubeconfig \
    --authorization-kubeconfig=$files/scheduler.kubeconfig \
    --bind-address=127.0.0.1 --cert-dir=/data/scheduler --profiling=false
start dns coredns -conf $files/Corefile
answers kubelet http://127.0.0.1:10248/healthz
# kube-proxy reads the addresses of the Node at its start.
stored /registry/minions/script
start kube-proxy kube-proxy --config=$files/kube-proxy.json
answers kube-proxy http://127.0.0.1:10256/healthz
answers dns http://127.0.0.1:7842/ready
say all
# The first process must not end.
while :; do sleep 3600; done

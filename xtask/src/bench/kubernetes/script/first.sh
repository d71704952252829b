#!/bin/busybox sh
# The first process of the script's machine: makes a root in memory that has the programs of the
# full image. A container runtime cannot use the initramfs as its root: `pivot_root` refuses it.
set -e
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
for module in /modules/*; do insmod "$module"; done
until [ -b /dev/vdb ]; do usleep 5000; done

mount -t tmpfs root /new
cd /new
mkdir -p system bin proc sys dev usr lib lib64 run tmp data sbin \
    etc/cni/net.d var/lib/containerd var/lib/kubelet var/log
mount -t erofs -o ro /dev/vdb system
mount --bind system/usr usr
mount --move /dev dev
mount --move /proc proc
cp /bin/busybox /start /ctr bin/
cp -r /script etc/
exec switch_root /new /bin/start

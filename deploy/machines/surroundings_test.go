package machines

import (
	"fmt"
	"slices"
	"testing"
)

// What a machine reaches is what leads somewhere and is not Keelson's own, and who asks is whom it sees, not whom sudo tells of.
func TestFactsOfSurroundings(t *testing.T) {
	f := machineOf(t, map[string]string{
		"etc/resolv.conf": "# nameserver 192.0.2.9\nsearch example.com\nnameserver " +
			"127.0.0.53\noptions edns0\n",
		"run/systemd/resolve/resolv.conf": "nameserver 192.0.2.53\nnameserver\tfe80::1%eth0\nnameserver " +
			"2001:db8::53\nnameserver 192.0.2.53\n",
		"var/lib/keelson/controlplane/cluster.json": `{"name":"prod","id":"c1","clusterCIDR":"10.1.0.0/16,` +
			`fd00:1::/48","serviceCIDR":"10.2.0.0/16,fd00:2::/112"}`,
	}, map[string]string{"ip": `case "$*" in
"-o route show") printf '%s\n' 'default via 192.0.2.1 dev eth0 proto dhcp metric 100' '10.1.3.0/24 via 192.0.2.52 dev eth0 proto 75 ' 'unreachable 10.1.0.0/16 proto 75 metric 4278198272 ' \
  'blackhole 10.0.0.0/8 ' '10.1.7.0/24 dev keelson0 proto kernel scope link src 10.1.7.1 ' '10.244.0.0/24 dev cni0 proto kernel scope link src 10.244.0.1 ' '192.0.2.9 via 192.0.2.1 dev eth0 ' ;;
"-6 -o route show") printf '%s\n' '2001:db8::/64 dev eth0 proto ra metric 100 expires 86000sec pref medium' 'fe80::/64 dev eth0 proto kernel metric 256 pref medium' \
  'fd00:5::/48 proto static metric 20  nexthop via 2001:db8::1 dev eth0 weight 1  nexthop via 2001:db8::2 dev eth1 weight 1 ' 'default via fe80::1 dev eth0 proto ra' ;;
esac`})
	if want := "[{cni0 10.244.0.0/24} {eth0 192.0.2.9/32} {eth0 2001:db8::/64} {eth1 " +
		"fd00:5::/48}]"; fmt.Sprint(f.Routes) != want {
		t.Errorf("routes\n%v, want\n%s", f.Routes, want)
	}
	if want := []string{"192.0.2.53", "2001:db8::53", "fe80::1"}; !slices.Equal(f.Nameservers, want) {
		t.Errorf("nameservers %v, want %v", f.Nameservers, want)
	}
	if f.From != "127.0.0.1" {
		t.Errorf("it is asked from %q", f.From)
	}
	if f.PodRanges != "10.1.0.0/16,fd00:1::/48" || f.ServiceRanges != "10.2.0.0/16,fd00:2::/112" {
		t.Errorf("the cluster's ranges are %q and %q", f.PodRanges, f.ServiceRanges)
	}
}

// A disk that is to be mounted where data lie, above or below, is missed where it is not; others are not Keelson's.
func TestFactsOfMounts(t *testing.T) {
	const fstab = "# /dev/sdz1 /var/lib/keelson ext4 defaults 0 0\nUUID=1 / ext4 defaults 0 1\nUUID=2 none swap sw 0 " +
		"0\nUUID=5 /var/lib/keelsonette ext4 nofail 0 2\nUUID=6 /srv ext4 nofail 0 2\n"
	const mounted = "/dev/sda1 / ext4 rw 0 0\nproc /proc proc rw 0 0\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"no such disk", map[string]string{"etc/fstab": fstab, "proc/mounts": mounted}, "[]"},
		{"no table", nil, "[]"},
		{"a disk of the data", map[string]string{"etc/fstab": fstab +
			"LABEL=k\t/var/lib/keelson\text4 defaults,nofail 0 2\n", "proc/mounts": mounted}, "[/var/lib/keelson]"},
		{"one that is mounted", map[string]string{"etc/fstab": fstab + "LABEL=k /var/lib/keelson/ ext4 nofail 0 2\n",
			"proc/mounts": mounted + "/dev/sdb1 /var/lib/keelson ext4 rw 0 0\n"}, "[]"},
		{"disks below and above",
			map[string]string{"etc/fstab": fstab +
				"LABEL=k /var/lib/keelson/controlplane ext4 nofail 0 2\nLABEL=v /var ext4 nofail 0 2\n",
				"proc/mounts": mounted},
			"[/var /var/lib/keelson/controlplane]"},
		{"a unit",
			map[string]string{
				"etc/systemd/system/var-lib-keelson-images.mount": "[Mount]\nWhat=/dev/sdb1\nWhere=/var/lib/keelson/images\n", "proc/mounts": mounted}, "[/var/lib/keelson/images]"},
		{"an automount with nothing mounted",
			map[string]string{"etc/fstab": fstab + "LABEL=k /var/lib/keelson ext4 noauto,x-systemd.automount 0 2\n",
				"proc/mounts": mounted + "systemd-1 /var/lib/keelson autofs rw 0 0\n"}, "[/var/lib/keelson]"},
		{"one that was automounted",
			map[string]string{"etc/fstab": fstab + "LABEL=k /var/lib/keelson ext4 noauto,x-systemd.automount 0 2\n",
				"proc/mounts": mounted + "systemd-1 /var/lib/keelson autofs rw 0 0\n/dev/sdb1 /var/lib/keelson ext4 " +
					"rw 0 0\n"}, "[]"},
		{"data behind a link", map[string]string{"etc/fstab": fstab + "LABEL=k /data ext4 nofail 0 2\n",
			"proc/mounts": mounted, "data/x": "", "var/lib/keelson": "-> ../../data/keelson"}, "[/data]"},
		{"a disk that is mounted behind a link",
			map[string]string{"etc/fstab": fstab + "LABEL=k /var/lib/keelson/controlplane ext4 nofail 0 2\n",
				"data/controlplane/x": "",
				"proc/mounts":         mounted + "/dev/sdb1 /data/controlplane ext4 rw 0 0\n",
				"var/lib/keelson":     "-> ../../data"},
			"[]"},
	} {
		if f := machineOf(t, c.files, nil); fmt.Sprint(f.Unmounted) != c.want {
			t.Errorf("%s: %v is to be mounted and is not, want %s", c.name, f.Unmounted, c.want)
		}
	}
}

// A firewall counts that is in force and has not been told of pods.
func TestFactsOfFirewalls(t *testing.T) {
	const firewalld, trusts = `[ "$*" = "-q --state" ]`, `[ "$*" = "-q --zone=trusted --query-interface=keelson0" ]`
	const drops = "printf 'table ip filter {\\n\\tchain FORWARD {\\n\\t\\ttype filter hook forward priority filter; " +
		"policy drop;\\n\\t}\\n}\\n'"
	const accepts = "printf 'table inet keelson {\\n\\tchain forward {\\n\\t\\ttype filter hook forward priority " +
		"filter; policy accept;\\n\\t}\\n\\tchain input {\\n\\t\\ttype filter hook input priority filter; policy " +
		"drop;\\n\\t}\\n}\\n'"
	const legacy = `[ "$*" = "-S FORWARD" ] && printf '%s\n' '-P FORWARD DROP' '-A FORWARD -j DOCKER-USER'`
	for _, c := range []struct {
		name            string
		files, programs map[string]string
		want            string
	}{
		{"none", map[string]string{"etc/ufw/ufw.conf": "ENABLED=no\n"},
			map[string]string{"firewall-cmd": "exit 252", "nft": accepts}, "[]"},
		{"firewalld", nil, map[string]string{"firewall-cmd": firewalld}, "[firewalld]"},
		{"firewalld that trusts pods", nil, map[string]string{"firewall-cmd": firewalld + " || " + trusts}, "[]"},
		{"ufw, whose rules drop", map[string]string{"etc/ufw/ufw.conf": "# it\nENABLED=yes\n"},
			map[string]string{"nft": drops}, "[ufw]"},
		{"firewalld beside Docker", nil, map[string]string{"firewall-cmd": firewalld, "nft": drops},
			"[firewalld forward]"},
		{"Docker with the iptables of before", map[string]string{"proc/net/ip_tables_names": "nat\nfilter\n"},
			map[string]string{"iptables-legacy": legacy}, "[forward]"},
		{"such tables without a filter", map[string]string{"proc/net/ip_tables_names": "nat\n"},
			map[string]string{"iptables-legacy": legacy}, "[]"},
	} {
		if f := machineOf(t, c.files, c.programs); fmt.Sprint(f.Firewalls) != c.want {
			t.Errorf("%s: %v, want %s", c.name, f.Firewalls, c.want)
		}
	}
}

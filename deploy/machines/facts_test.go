package machines

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The facts of a machine are read by its shell, and nothing on the machine changes.
func TestReadFacts(t *testing.T) {
	root := t.TempDir()
	for path, content := range map[string]string{
		"etc/machine-id": "0123456789abcdef0123456789abcdef\n", "run/systemd/system/x": "",
		"sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
		"proc/net/tcp": "  sl  local_address rem_address   st\n   0: 0100007F:192B 00000000:0000 0A 0\n   " +
			"1: 0100007F:0016 0100007F:9999 01 0\n",
		"proc/meminfo":                              "MemTotal:        2048 kB\n",
		"usr/bin/kctl":                              "", // SHA-256 of nothing
		"etc/keelson/agent.yaml":                    "max-pods: 60\n",
		"var/lib/keelson/controlplane/pki/ca.crt":   "a certificate",
		"var/lib/keelson/controlplane/cluster.json": `{"name":"prod","id":"c1","later":true}`,
		"var/lib/keelson/session/node.pem":          "secret",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	files := func() (all []string) {
		filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
			all = append(all, path)
			return err
		})
		return all
	}
	before := files()
	_, h := newSSHD(t, "cp1", "PATH="+os.Getenv("PATH"), "DESTDIR="+root)
	f, err := connected(t, h).ReadFacts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if f.MachineID != "0123456789abcdef0123456789abcdef" || !f.Systemd ||
		!slices.Equal(f.Cgroup, []string{"cpu", "memory", "pids"}) || f.Memory != 2<<20 {
		t.Errorf("of the machine: %+v", f)
	}
	if len(f.Ports) != 1 || !f.Ports[6443] {
		t.Errorf("ports %v: want 6443, where somebody listens, alone", f.Ports)
	}
	if !f.Replica || !f.ReplicaWhole || f.ClusterID != "c1" || f.ClusterName != "prod" ||
		f.ReplicaCA != "a certificate" || !f.Node || f.Admin {
		t.Errorf("of the cluster: %+v", f)
	}
	if f.Agent != "max-pods: 60\n" || f.ControlPlane != "" ||
		f.Sums["/usr/bin/kctl"] != "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" {
		t.Errorf("of files: %+v", f)
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(root, &disk); err != nil {
		t.Fatal(err)
	}
	if free := int64(disk.Bavail) * disk.Bsize; f.FreeBytes < free/10*9 || f.FreeBytes > free/10*11 {
		// others write meanwhile
		t.Errorf("room for %d bytes: want about %d", f.FreeBytes, free)
	}
	if f.Hostname == "" || f.Skew.Abs() > f.SkewError+time.Second {
		t.Errorf("room %d, name %q, clock %v ahead (%v unsure)", f.FreeBytes, f.Hostname, f.Skew, f.SkewError)
	}
	if after := files(); !slices.Equal(before, after) {
		t.Errorf("asking left\n%s\nof\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// machineOf makes files and programs of a machine, asks it, and says what it is. It has no other programs than the script needs.
func machineOf(t *testing.T, files, programs map[string]string) Facts {
	t.Helper()
	root, bin := t.TempDir(), t.TempDir()
	write := func(path, content string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	for path, content := range files {
		if to, link := strings.CutPrefix(content, "-> "); link {
			write(filepath.Join(root, path, "../x"), "", 0o644)
			if err := os.Symlink(to, filepath.Join(root, path)); err != nil {
				t.Fatal(err)
			}
			continue
		}
		write(filepath.Join(root, path), content, 0o644)
	}
	for _, name := range strings.Fields("sh id cut tr sed head base64 cat date df mktemp dirname sha256sum sort ls " +
		"grep gzip rm readlink") {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(bin, "zcat"), "#!/bin/sh\nexec gzip -dc \"$@\"\n", 0o755)
	write(filepath.Join(bin, "uname"), "#!/bin/sh\necho 6.1.0\n", 0o755)
	for name, body := range programs {
		write(filepath.Join(bin, name), "#!/bin/sh\n"+body+"\n", 0o755)
	}
	_, h := newSSHD(t, "cp1", "PATH="+bin, "DESTDIR="+root)
	f, err := connected(t, h).ReadFacts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Of UDP count sockets that a process has and that wait for anybody; addresses come with their links and networks.
func TestFactsOfTheNetwork(t *testing.T) {
	const head = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode " +
		"ref pointer drops\n"
	line := func(at, state, inode string) string {
		return " 1745: " + at + " 00000000:0000 " + state + " 00000000:00000000 00:00000000 00000000     0        0 " +
			inode + " 2 0000000029f57f4f 0\n"
	}
	files := map[string]string{
		"proc/net/udp": head + line("00000000:0035", "07", "11") + line("3500007F:0035", "07", "12") +
			line("00000000:12B5", "07", "21") + line("0100007F:CA9B", "01", "13"),
		"proc/net/udp6": head + line("00000000000000000000000000000000:CA9B", "07", "14") +
			line("B80D0120000000000000000001000000:0035", "07", "15") +
			line("0000000000000000FFFF00000700000A:1234", "07", "16"),
		"proc/7/fd/1": "-> socket:[12]", "proc/7/fd/2": "-> /dev/null", "proc/4711/fd/3": "-> socket:[11]",
		"proc/4711/fd/4": "-> socket:[13]",
		"proc/4711/fd/5": "-> socket:[14]", "proc/4711/fd/6": "-> socket:[15]", "proc/4711/fd/7": "-> socket:[16]",
		"proc/4711/fd/8": "-> pipe:[21]",
		"proc/net/ip_vs": "", "etc/cni/net.d/10-other.conflist": "{}",
	}
	const addresses = `cat <<'E'
1: lo    inet 127.0.0.1/8 scope host lo\       valid_lft forever preferred_lft forever
2: eth0    inet 192.0.2.7/24 brd 192.0.2.255 scope global dynamic eth0\       valid_lft 5sec preferred_lft 5sec
2: eth0    inet6 2001:db8::7/64 scope global \       valid_lft forever preferred_lft forever
3: ppp0    inet 10.0.0.1 peer 10.0.0.2/32 scope global ppp0\       valid_lft forever preferred_lft forever
E`
	f := machineOf(t, files, map[string]string{"ip": addresses, "iptables-save": ""})
	slices.SortFunc(f.UDP, netip.AddrPort.Compare)
	if got, want := fmt.Sprint(f.UDP), "[0.0.0.0:53 10.0.0.7:4660 127.0.0.53:53 [::]:51867 [2001:db8::1]:53]"; got !=
		want {
		t.Errorf("of UDP %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(f.Networks),
		"[{lo 127.0.0.1/8} {eth0 192.0.2.7/24} {eth0 2001:db8::7/64} {ppp0 10.0.0.1/32}]"; got != want {
		t.Errorf("networks %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(f.Addresses), "[127.0.0.1 192.0.2.7 2001:db8::7 10.0.0.1]"; got != want {
		t.Errorf("addresses %s, want %s", got, want)
	}
	if !f.IPVS || !f.OtherNetwork || !f.Programs["iptables-save"] || f.Programs["iptables"] {
		t.Errorf("IPVS %v, a network of others %v, programs %v", f.IPVS, f.OtherNetwork, f.Programs)
	}
	if f := machineOf(t, map[string]string{"proc/net/udp": head + line("00000000:12B5", "07", "21"),
		"etc/cni/net.d/.kept": ""}, nil); len(f.UDP) > 0 || f.IPVS || f.OtherNetwork {
		t.Errorf("a port of the kernel's own is taken for a program's, or what is not there for there: %+v", f)
	}
}

// What a kernel has is known from what is loaded, from modprobe and from the kernel's configuration, whichever there is; of what
// none of them tells, nothing is said.
func TestFactsOfTheKernel(t *testing.T) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write([]byte("CONFIG_NF_TABLES=y\n# CONFIG_VXLAN is not " +
		"set\nCONFIG_OVERLAY_FS=m\nCONFIG_IP_VS_RR=y\n")); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	const knowsVXLAN = `for m; do :; done; [ $m = vxlan ]`
	for _, c := range []struct {
		name            string
		files, programs map[string]string
		has, lacks      string
	}{
		{"nothing tells", nil, nil, "", ""},
		{"what is loaded", map[string]string{"sys/module/vxlan/x": ""}, nil, "vxlan", ""},
		{"modprobe, as on Debian", map[string]string{"lib/modules/6.1.0/modules.builtin": "kernel/x.ko\n"},
			map[string]string{"modprobe": knowsVXLAN},
			"vxlan", "br_netfilter dummy ip_vs ip_vs_rr nf_conntrack nf_tables overlay wireguard"},
		{"modprobe without the kernel's own folder", nil, map[string]string{"modprobe": "exit 1"}, "", ""},
		{"that folder without modprobe", map[string]string{"lib/modules/6.1.0/modules.builtin": "kernel/x.ko\n"}, nil,
			"", ""},
		{"all built in", map[string]string{"proc/config.gz": packed.String(), "sys/module/nf_conntrack/x": ""}, nil,
			// overlay is a module, and nobody knows where
			"ip_vs_rr nf_conntrack nf_tables", "br_netfilter dummy ip_vs vxlan wireguard"},
		{"a configuration beside the kernel",
			map[string]string{"boot/config-6.1.0": "CONFIG_VXLAN=m\nCONFIG_DUMMY=m\nCONFIG_IP_VS=y\n",
				"lib/modules/6.1.0/modules.builtin": ""},
			map[string]string{"modprobe": knowsVXLAN}, "ip_vs vxlan",
			"br_netfilter dummy ip_vs_rr nf_conntrack nf_tables overlay wireguard"},
		{"the configuration of another kernel", map[string]string{"boot/config-5.10.0": "CONFIG_VXLAN=y\n"}, nil, "",
			""},
	} {
		var has, lacks []string
		for m, is := range machineOf(t, c.files, c.programs).Modules {
			if is {
				has = append(has, m)
			} else {
				lacks = append(lacks, m)
			}
		}
		slices.Sort(has)
		slices.Sort(lacks)
		if h, l := strings.Join(has, " "), strings.Join(lacks, " "); h != c.has || l != c.lacks {
			t.Errorf("%s: it has %q and lacks %q, want %q and %q", c.name, h, l, c.has, c.lacks)
		}
	}
}

// An incomplete answer is an error.
func TestFactsAreWhole(t *testing.T) {
	for _, out := range []string{"", "hostname cp1\nroot yes\n", "agent !\nend yes\n"} {
		if f, _, err := parseFacts(out); err == nil {
			t.Errorf("%q was taken for %+v", out, f)
		}
	}
}

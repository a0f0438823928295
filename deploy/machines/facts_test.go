package machines

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What a machine has is read by its shell as it is, and nothing on it changes by that.
func TestReadFacts(t *testing.T) {
	root := t.TempDir()
	for path, content := range map[string]string{
		"etc/machine-id": "0123456789abcdef0123456789abcdef\n", "run/systemd/system/x": "", "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
		"proc/net/tcp":           "  sl  local_address rem_address   st\n   0: 0100007F:192B 00000000:0000 0A 0\n   1: 0100007F:0016 0100007F:9999 01 0\n",
		"proc/meminfo":           "MemTotal:        2048 kB\n",
		"usr/bin/kctl":           "", // SHA-256 of nothing
		"etc/keelson/agent.yaml": "max-pods: 60\n",
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
	if f.MachineID != "0123456789abcdef0123456789abcdef" || !f.Systemd || !slices.Equal(f.Cgroup, []string{"cpu", "memory", "pids"}) || f.Memory != 2<<20 {
		t.Errorf("of the machine: %+v", f)
	}
	if len(f.Ports) != 1 || !f.Ports[6443] {
		t.Errorf("ports %v: want 6443, where somebody listens, alone", f.Ports)
	}
	if !f.Replica || !f.ReplicaWhole || f.ClusterID != "c1" || f.ClusterName != "prod" || f.ReplicaCA != "a certificate" || !f.Node || f.Admin {
		t.Errorf("of the cluster: %+v", f)
	}
	if f.Agent != "max-pods: 60\n" || f.ControlPlane != "" || f.Sums["/usr/bin/kctl"] != "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" {
		t.Errorf("of files: %+v", f)
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(root, &disk); err != nil {
		t.Fatal(err)
	}
	if free := int64(disk.Bavail) * disk.Bsize; f.Room < free/10*9 || f.Room > free/10*11 { // others write meanwhile
		t.Errorf("room for %d bytes: want about %d", f.Room, free)
	}
	if f.Hostname == "" || f.Skew.Abs() > f.SkewUnsure+time.Second {
		t.Errorf("room %d, name %q, clock %v ahead (%v unsure)", f.Room, f.Hostname, f.Skew, f.SkewUnsure)
	}
	if after := files(); !slices.Equal(before, after) {
		t.Errorf("asking left\n%s\nof\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// An answer that ends too early is none.
func TestFactsAreWhole(t *testing.T) {
	for _, out := range []string{"", "hostname cp1\nroot yes\n", "agent !\nend yes\n"} {
		if f, _, err := parseFacts(out); err == nil {
			t.Errorf("%q was taken for %+v", out, f)
		}
	}
}

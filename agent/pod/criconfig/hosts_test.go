package criconfig

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/safepath"
)

// The first line of the hosts file is kubelet's, because programs check it.
func TestHostsFile(t *testing.T) {
	c := fake.NewCluster()
	p := simplePod("u1")
	p.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.9", Hostnames: []string{"a", "b"}}}
	p.Status.PodIPs = []v1.PodIP{{IP: "10.88.0.2"}}
	b := New(Config{Paths: agent.Paths{State: t.TempDir()}, Objects: c}, nil)
	for network, first := range map[bool]string{false: "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n",
		true: "# Kubernetes-managed hosts file (host network).\n"} {
		p.Spec.HostNetwork = network
		file, err := b.WriteHostsFile(p)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(text), first) ||
			!strings.HasSuffix(string(text), "\n# Entries added by HostAliases.\n192.0.2.9\ta\tb\n") {
			t.Errorf("host network %v: %v\n%s", network, err, text)
		}
		if own := strings.Contains(string(text), "10.88.0.2\t"+p.Name+"\n"); own == network {
			t.Errorf("host network %v: the pod's own name:\n%s", network, text)
		}
	}
}

// If a container changes its hosts file, the agent reads no more than the length of its own text.
// F111
func TestHostsFileOfAHostileContainer(t *testing.T) {
	c := fake.NewCluster()
	p := simplePod("u1")
	b := New(Config{Paths: agent.Paths{State: t.TempDir()}, Objects: c}, nil)
	file, err := b.WriteHostsFile(p)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := os.Truncate(file, 256<<20); err != nil { // sparse
		t.Fatal(err)
	}
	if _, err := b.WriteHostsFile(p); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 1<<20 {
		t.Errorf("a sparse hosts file of 256 MiB made the agent allocate %d bytes", grown)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != string(want) {
		t.Errorf("the hosts file afterwards: %v\n%.200s", err, b)
	}
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, replace := range map[string]func() error{
		"link": func() error { return os.Symlink(outside, file) },
		"FIFO": func() error { return unix.Mkfifo(file, 0o600) },
	} {
		if err := errors.Join(os.Remove(file), replace()); err != nil {
			t.Fatal(err)
		}
		if _, err := b.WriteHostsFile(p); !errors.Is(err, safepath.ErrNotRegular) {
			t.Errorf("%s in place of the hosts file: %v", name, err)
		}
	}
	if b, err := os.ReadFile(outside); err != nil || string(b) != "kept" {
		t.Errorf("the file that a link led to: %q, %v", b, err)
	}
}

// The host name of a pod is the same in its kernel and in its hosts file, whichever field sets it.
func TestOwnName(t *testing.T) {
	for name, c := range map[string]struct {
		change      func(*v1.Pod)
		host, hosts string
	}{
		"the pod's": {func(*v1.Pod) {}, "web-u1", "\tweb-u1\n"},
		"long": {func(p *v1.Pod) {
			p.Name = strings.Repeat("a", 62) + "-b"
		}, strings.Repeat("a", 62), "\t" + strings.Repeat("a", 62) + "\n"},
		"hostname": {func(p *v1.Pod) { p.Spec.Hostname = "db" }, "db", "\tdb\n"},
		"subdomain": {func(p *v1.Pod) {
			p.Spec.Hostname, p.Spec.Subdomain = "db", "s"
		}, "db", "\tdb.s.default.svc.c.l\tdb\n"},
		"as FQDN": {func(p *v1.Pod) {
			p.Spec.Hostname, p.Spec.Subdomain, p.Spec.SetHostnameAsFQDN = "db", "s", new(true)
		}, "db.s.default.svc.c.l", "\tdb.s.default.svc.c.l\tdb\n"},
		"override": {func(p *v1.Pod) {
			p.Spec.Hostname, p.Spec.Subdomain, p.Spec.HostnameOverride = "db", "s", new("my.host")
		}, "my.host", "\tmy.host\n"},
		"all 64 bytes": {func(p *v1.Pod) {
			p.Spec.HostnameOverride = new(strings.Repeat("b", 64))
		}, strings.Repeat("b", 64), "\t" + strings.Repeat("b", 64) + "\n"},
	} {
		p := simplePod("u1")
		p.Status.PodIPs = []v1.PodIP{{IP: "10.88.0.2"}}
		c.change(p)
		host, err := containerHostname(p, "c.l")
		if text := hostsFileContent(p, "c.l"); err != nil || host != c.host ||
			!strings.HasSuffix(text, "\n10.88.0.2"+c.hosts) {
			t.Errorf("%s: host %q, %v, want %q; hosts file\n%s", name, host, err, c.host, text)
		}
	}
}

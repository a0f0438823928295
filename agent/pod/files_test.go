package pod

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
)

// Programs look for the first line to learn who writes the file.
func TestHostsFile(t *testing.T) {
	c := fake.NewCluster()
	p := simplePod("u1")
	p.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.9", Hostnames: []string{"a", "b"}}}
	p.Status.PodIPs = []v1.PodIP{{IP: "10.88.0.2"}}
	s := New(Config{Paths: agent.Paths{State: t.TempDir()}, Objects: c, Reporter: c})
	w := newWorker(&s.cfg, Desired{Pod: p})
	for network, first := range map[bool]string{false: "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n",
		true: "# Kubernetes-managed hosts file (host network).\n"} {
		p.Spec.HostNetwork = network
		file, err := w.hostsFile(p)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(file)
		if err != nil || !strings.HasPrefix(string(b), first) || !strings.HasSuffix(string(b), "\n# Entries added by HostAliases.\n192.0.2.9\ta\tb\n") {
			t.Errorf("host network %v: %v\n%s", network, err, b)
		}
		if own := strings.Contains(string(b), "10.88.0.2\t"+p.Name+"\n"); own == network {
			t.Errorf("host network %v: the pod's own name:\n%s", network, b)
		}
	}
}

// The message from a log is what the container wrote, to the byte.
func TestTerminationMessageFromLog(t *testing.T) {
	stamp := "2026-11-20T13:04:05.123456789Z "
	for log, want := range map[string]string{
		stamp + "stdout F one\n" + stamp + "stderr P two\n":                      "one\ntwo",
		stamp + "stdout F one\n":                                                 "one\n",
		stamp + "stdout P a\n" + stamp + "stdout P b\n" + stamp + "stdout F c\n": "abc\n",
		"": "said by the runtime",
		strings.Repeat(stamp+"stdout F x\n", 100):                             strings.Repeat("x\n", maxMessageLines),
		stamp + "stdout P " + strings.Repeat("y", 3*maxMessageLog) + "\n":     strings.Repeat("y", maxMessageLog),
		strings.Repeat(stamp+"stdout P "+strings.Repeat("z", 16<<10)+"\n", 3): strings.Repeat("z", maxMessageLog),
	} {
		file := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(file, []byte(log), 0o600); err != nil {
			t.Fatal(err)
		}
		w := &worker{cfg: &Config{}}
		got := w.terminationMessage(&cri.ContainerStatus{ExitCode: 1, LogPath: file, Message: "said by the runtime",
			Annotations: map[string]string{annTermPolicy: string(v1.TerminationMessageFallbackToLogsOnError)}})
		if got != want {
			t.Errorf("log %.60q…: %q, want %q", log, got, want)
		}
	}
}

package pod

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

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

// A termination message from the log equals the container's output, byte for byte.
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

// If a container changes its hosts file, the agent reads no more than the length of its own text.
// F111
func TestHostsFileOfAHostileContainer(t *testing.T) {
	c := fake.NewCluster()
	p := simplePod("u1")
	s := New(Config{Paths: agent.Paths{State: t.TempDir()}, Objects: c, Reporter: c})
	w := newWorker(&s.cfg, Desired{Pod: p})
	file, err := w.hostsFile(p)
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
	if _, err := w.hostsFile(p); err != nil {
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
		if _, err := w.hostsFile(p); !errors.Is(err, safepath.ErrNotRegular) {
			t.Errorf("%s in place of the hosts file: %v", name, err)
		}
	}
	if b, err := os.ReadFile(outside); err != nil || string(b) != "kept" {
		t.Errorf("the file that a link led to: %q, %v", b, err)
	}
}

// A container that failed before its start has both times in its terminated state.
func TestTerminatedStateHasBothTimes(t *testing.T) {
	created := time.Date(2026, 11, 29, 1, 0, 0, 0, time.UTC)
	for name, c := range map[string]Container{
		"never started":      {State: Exited, Created: created, Finished: created.Add(time.Second), ExitCode: 128},
		"only an end":        {State: Exited, Finished: created.Add(time.Second), ExitCode: 1},
		"clock was set back": {State: Exited, Created: created.Add(time.Hour), Finished: created, ExitCode: 1},
		"ran":                {State: Exited, Created: created, Started: created.Add(time.Second), Finished: created.Add(time.Second)},
	} {
		got := (&gen{pod: simplePod("u1")}).terminated(c)
		if got.StartedAt.IsZero() || got.FinishedAt.Before(&got.StartedAt) || !got.FinishedAt.Time.Equal(c.Finished) {
			t.Errorf("%s: started %v, finished %v", name, got.StartedAt, got.FinishedAt)
		}
	}
}

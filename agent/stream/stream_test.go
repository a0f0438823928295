package stream

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

// logger writes a log like the shim.
type logger struct {
	t    *testing.T
	path string
	f    *os.File
	at   time.Time
}

func newLogger(t *testing.T, path string) *logger {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	l := &logger{t: t, path: path, at: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	l.reopenLog()
	t.Cleanup(func() { l.f.Close() })
	return l
}

func (l *logger) reopenLog() {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		l.t.Fatal(err)
	}
	l.f = f
}

func (l *logger) writeLine(stream, tag, text string) {
	l.at = l.at.Add(time.Second)
	fmt.Fprintf(l.f, "%s %s %s %s\n", l.at.Format("2006-01-02T15:04:05.000000000Z"), stream, tag, text)
}

func (l *logger) rotateLog() {
	l.f.Close()
	for i := 3; i > 0; i-- {
		_ = os.Rename(fmt.Sprintf("%s.%d", l.path, i), fmt.Sprintf("%s.%d", l.path, i+1))
	}
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		l.t.Fatal(err)
	}
	l.reopenLog()
}

// newTestServer returns a server with one running container.
func newTestServer(t *testing.T) (*Server, *fake.Runtime, *logger, string) {
	rt, dir := &fake.Runtime{}, t.TempDir()
	labels := map[string]string{agent.LabelPodUID: "u1"}
	sb, err := rt.RunPodSandbox(t.Context(),
		&cri.RunPodSandboxRequest{Config: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "web",
			Namespace: "default", Uid: "u1"}, Labels: labels}})
	if err != nil {
		t.Fatal(err)
	}
	startContainer(t, rt, sb.PodSandboxId, 0)
	return New(rt, fake.NewCluster(), dir), rt, newLogger(t, filepath.Join(dir, "default_web_u1", "app", "0.log")),
		sb.PodSandboxId
}

func startContainer(t *testing.T, rt *fake.Runtime, sb string, attempt uint32) string {
	c, err := rt.CreateContainer(t.Context(),
		&cri.CreateContainerRequest{PodSandboxId: sb,
			Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "app", Attempt: attempt},
				Image: &cri.ImageSpec{Image: "x"}, Labels: map[string]string{agent.LabelPodUID: "u1"},
				LogPath: fmt.Sprintf("app/%d.log", attempt)}})
	if err == nil {
		_, err = rt.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: c.ContainerId})
	}
	if err != nil {
		t.Fatal(err)
	}
	return c.ContainerId
}

func newRequest() agent.LogRequest {
	return agent.LogRequest{PodUID: "u1", Namespace: "default", Pod: "web", Container: "app", TailLines: -1}
}

func TestLogSelection(t *testing.T) {
	s, rt, l, sb := newTestServer(t)
	l.writeLine("stdout", "F", "one")
	l.writeLine("stderr", "F", "two")
	l.rotateLog()
	l.writeLine("stdout", "P", "thr")
	l.writeLine("stdout", "F", "ee")
	fmt.Fprint(l.f, "garbage that a crash left\n")
	l.rotateLog()
	l.writeLine("stdout", "F", "")
	l.writeLine("stdout", "F", "five")
	get := func(change func(*agent.LogRequest)) string {
		t.Helper()
		q := newRequest()
		change(&q)
		var b bytes.Buffer
		if err := s.Logs(t.Context(), q, &b); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for name, c := range map[string]struct {
		change func(*agent.LogRequest)
		want   string
	}{
		"all":     {func(*agent.LogRequest) {}, "one\ntwo\nthree\n\nfive\n"},
		"tail 0":  {func(q *agent.LogRequest) { q.TailLines = 0 }, ""},
		"tail 1":  {func(q *agent.LogRequest) { q.TailLines = 1 }, "five\n"},
		"tail 2":  {func(q *agent.LogRequest) { q.TailLines = 2 }, "\nfive\n"},
		"tail 5":  {func(q *agent.LogRequest) { q.TailLines = 5 }, "three\n\nfive\n"},
		"tail 7":  {func(q *agent.LogRequest) { q.TailLines = 7 }, "one\ntwo\nthree\n\nfive\n"},
		"tail 99": {func(q *agent.LogRequest) { q.TailLines = 99 }, "one\ntwo\nthree\n\nfive\n"},
		"limit":   {func(q *agent.LogRequest) { q.LimitBytes = 6 }, "one\ntw"},
		"since":   {func(q *agent.LogRequest) { q.Since = time.Date(2026, 1, 1, 0, 0, 5, 0, time.UTC) }, "\nfive\n"},
		"timestamps": {func(q *agent.LogRequest) {
			q.Timestamps, q.LimitBytes = true, 35
		}, "2026-01-01T00:00:01.000000000Z one\n"},
	} {
		if got := get(c.change); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	q := newRequest()
	q.Previous = true
	if err := s.Logs(t.Context(), q, io.Discard); err == nil ||
		!strings.Contains(err.Error(), `previous terminated container "app" in pod "web" not found`) {
		t.Errorf("previous of a first instance: %v", err)
	}
	if err := rt.Exit("u1", "app", 1, ""); err != nil {
		t.Fatal(err)
	}
	startContainer(t, rt, sb, 1)
	newLogger(t, filepath.Join(s.logs, "default_web_u1", "app", "1.log")).writeLine("stdout", "F", "again")
	if got := get(func(q *agent.LogRequest) { q.Previous = true }); got != "one\ntwo\nthree\n\nfive\n" {
		t.Errorf("previous: %q", got)
	}
	if got := get(func(q *agent.LogRequest) { q.Follow = false }); got != "again\n" {
		t.Errorf("current: %q", got)
	}
	q = newRequest()
	q.Container = "other"
	if err := s.Logs(t.Context(), q, io.Discard); err == nil ||
		err.Error() != `container "other" in pod "web" is waiting to start: ContainerCreating` {
		t.Errorf("container that is not there: %v", err)
	}
}

// buffer is a bytes.Buffer that can be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A follower reads every line once across any number of rotations, and stops with the container.
func TestFollowThroughRotation(t *testing.T) {
	s, rt, l, _ := newTestServer(t)
	l.writeLine("stdout", "F", "line 0")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got buffer
	done := make(chan error, 1)
	q := newRequest()
	q.Follow = true
	go func() { done <- s.Logs(ctx, q, &got) }()
	want := "line 0\n"
	for i := 1; i <= 200; i++ {
		line := fmt.Sprintf("line %d", i)
		l.writeLine("stdout", "F", line)
		want += line + "\n"
		if i%10 == 0 {
			// Wait for the follower before each rotation, because the shim deletes the oldest
			// files.
			await.Until(ctx, t, await.Patience, time.Millisecond, "the follower", func() error {
				if !strings.HasSuffix(got.String(), line+"\n") {
					return fmt.Errorf("the follower has not seen %q", line)
				}
				return nil
			})
		}
		if i%7 == 0 {
			l.rotateLog()
		}
	}
	if err := rt.Exit("u1", "app", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got.String() != want {
		t.Errorf("followed %d bytes, want %d: %q", len(got.String()), len(want), got.String())
	}
}

func TestFollowEndsWithItsReader(t *testing.T) {
	s, _, l, _ := newTestServer(t)
	l.writeLine("stdout", "F", "x")
	ctx, cancel := context.WithCancel(t.Context())
	q := newRequest()
	q.Follow = true
	var got buffer
	done := make(chan error, 1)
	go func() { done <- s.Logs(ctx, q, &got) }()
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the first line", func() error {
		if got.String() != "x\n" {
			return fmt.Errorf("got %q", got.String())
		}
		return nil
	})
	cancel()
	if err := <-done; err != context.Canceled {
		t.Errorf("Logs returned %v", err)
	}
}

func TestExecAndPortForward(t *testing.T) {
	s, rt, _, _ := newTestServer(t)
	rt.OnExec = func(_ *cri.ContainerConfig, cmd []string) (string, int32, error) {
		return strings.Join(cmd, "+"), int32(len(cmd) - 1), nil
	}
	var out bytes.Buffer
	err := s.Exec(t.Context(), "u1", "app", []string{"a", "b"}, false, false, agent.Streams{Stdout: &out})
	if e, ok := err.(*agent.ExitError); !ok || e.Code != 1 || out.String() != "a+b" {
		t.Errorf("exec: %v, output %q", err, out.String())
	}
	if err := s.Exec(t.Context(), "u1", "none", []string{"a"}, false, false, agent.Streams{}); err == nil ||
		err.Error() != `container not found ("none")` {
		t.Errorf("exec in a container that is not there: %v", err)
	}
	near, far := net.Pipe()
	go func() { _ = s.PortForward(t.Context(), "u1", 80, far) }()
	if _, err := near.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(near, b); err != nil || string(b) != "ping" {
		t.Errorf("port-forward: %q, %v", b, err)
	}
	near.Close()
	if err := s.PortForward(t.Context(), "u2", 80, far); err == nil || !strings.Contains(err.Error(), "u2") {
		t.Errorf("port-forward to a pod that is not there: %v", err)
	}
}

func FuzzParseLine(f *testing.F) {
	for _, s := range []string{"2026-01-01T00:00:01.000000000Z stdout F hello\n", "2026-01-01T00:00:01Z stderr P x",
		"2026-01-01T00:00:01Z stdout F:tag ", "", " ", "x stdout F", "2026-01-01T00:00:01Z stdin F x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		l, ok := parseLine(b)
		if !ok {
			return
		}
		// A parsed line formats to the same text.
		stream, tag := "stdout", "F"
		if l.stderr {
			stream = "stderr"
		}
		if l.partial {
			tag = "P"
		}
		rest, found := strings.CutPrefix(string(bytes.TrimSuffix(b, []byte{'\n'})), string(l.stamp)+" "+stream+" "+tag)
		if !found || !strings.HasSuffix(rest, " "+string(l.text)) {
			t.Errorf("%q was read as %q %s %s %q", b, l.stamp, stream, tag, l.text)
		}
		_ = l.writtenAt()
	})
}

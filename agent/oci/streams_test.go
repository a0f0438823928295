package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

// syncBuffer is a buffer that is safe for concurrent use.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// waitText waits until the buffer holds a text.
func (r *rig) waitText(b *syncBuffer, text string) {
	r.t.Helper()
	await.Until(r.t.Context(), r.t, await.Patience, 2*time.Millisecond, "the output", func() error {
		if s := b.String(); !strings.Contains(s, text) {
			return fmt.Errorf("%q lacks %q", s, text)
		}
		return nil
	})
}

func TestExec(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	out, err := r.ExecSync(r.ctx(),
		&cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}})
	if err != nil || string(out.Stdout) != "out\n" || string(out.Stderr) != "err\n" || out.ExitCode != 7 {
		t.Errorf("%v, %v", out, err)
	}
	begin := time.Now()
	_, err = r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sleep", "100"}, Timeout: 1})
	if status.Code(err) != codes.DeadlineExceeded || time.Since(begin) > 50*time.Second {
		t.Errorf("timeout: %v after %v", err, time.Since(begin))
	}
	// The process has ended as well.
	err = wait.For(testCtx(t, time.Minute), 10*time.Millisecond, func() error {
		out, err := r.ExecSync(r.ctx(),
			&cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "ps -o args | grep -c '^sleep 100$'"}})
		if err != nil || strings.TrimSpace(string(out.Stdout)) != "0" {
			return fmt.Errorf("%s %v", out.GetStdout(), err)
		}
		return nil
	})
	if err != nil {
		t.Errorf("the timed out command lives on: %v", err)
	}
	// Streams: a megabyte through cat.
	big := strings.Repeat("0123456789abcdef\n", 1<<16)
	var got bytes.Buffer
	if err := r.Exec(r.ctx(), id, []string{"cat"}, false,
		agent.Streams{Stdin: strings.NewReader(big), Stdout: &got}); err != nil || got.String() != big {
		t.Errorf("cat returned %d of %d bytes, %v", got.Len(), len(big), err)
	}
	var exit *agent.ExitError
	if err := r.Exec(r.ctx(), id, []string{"sh", "-c", "exit 9"}, false, agent.Streams{}); !errors.As(err, &exit) ||
		exit.Code != 9 {
		t.Errorf("exit 9: %v", err)
	}
	if err := r.Exec(r.ctx(), id, []string{"/no/such"}, false, agent.Streams{}); err == nil || errors.As(err, &exit) ||
		!strings.Contains(err.Error(), "/no/such") {
		t.Errorf("missing program: %v", err)
	}
	// A command with a child in the background ends without waiting for the child.
	begin = time.Now()
	if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id,
		Cmd: []string{"sh", "-c", "sleep 50 & echo done"}}); err != nil || time.Since(begin) > 45*time.Second {
		t.Errorf("with a child left behind: %v after %v", err, time.Since(begin))
	}
}

func TestExecTerminal(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	in, typing := io.Pipe()
	out, sizes := &syncBuffer{}, make(chan agent.TermSize, 1)
	done := make(chan error, 1)
	go func() {
		done <- r.Exec(r.ctx(), id, []string{"sh"}, true, agent.Streams{Stdin: in, Stdout: out, Resize: sizes})
	}()
	sizes <- agent.TermSize{Width: 101, Height: 37}
	for !strings.Contains(out.String(), "37 101") {
		if _, err := io.WriteString(typing, "tty; stty size\n"); err != nil {
			t.Fatal(err)
		}
		if err := wait.Delay(r.ctx(), 50*time.Millisecond); err != nil {
			t.Fatal(out.String())
		}
	}
	r.waitText(out, "/dev/pts/")
	if _, err := io.WriteString(typing, "exit 5\n"); err != nil {
		t.Fatal(err)
	}
	var exit *agent.ExitError
	if err := <-done; !errors.As(err, &exit) || exit.Code != 5 {
		t.Errorf("exit of the shell: %v", err)
	}
}

func TestAttach(t *testing.T) {
	for _, tty := range []bool{false, true} {
		t.Run(fmt.Sprint("tty=", tty), func(t *testing.T) {
			r := newRig(t)
			sb, sc := r.runSandbox()
			id := r.runContainer(sb, sc, r.containerConfig("a",
				"while read x; do echo got $x; [ $x = end ] && exit 4; done; echo eof", func(c *cri.ContainerConfig) {
					c.Tty, c.Stdin, c.StdinOnce = tty, true, true
				}))
			in, typing := io.Pipe()
			out, second := &syncBuffer{}, &syncBuffer{}
			done := make(chan error, 2)
			go func() { done <- r.Attach(r.ctx(), id, tty, agent.Streams{Stdin: in, Stdout: out}) }()
			if _, err := io.WriteString(typing, "one\n"); err != nil {
				t.Fatal(err)
			}
			r.waitText(out, "got one")
			go func() { done <- r.Attach(r.ctx(), id, tty, agent.Streams{Stdout: second, Stderr: second}) }()
			for !strings.Contains(second.String(), "got two") {
				if _, err := io.WriteString(typing, "two\n"); err != nil {
					t.Fatal(err)
				}
				if err := wait.Delay(r.ctx(), 10*time.Millisecond); err != nil {
					t.Fatal(second.String())
				}
			}
			if _, err := io.WriteString(typing, "end\n"); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
			if st := r.waitExit(id); st.ExitCode != 4 {
				t.Errorf("exit code %d", st.ExitCode)
			}
			if log := r.readLog("a"); !strings.Contains(log, "got one") || !strings.Contains(log, "got end") {
				t.Errorf("the log lacks what was attached: %s", log)
			}
		})
	}
}

// F100. An attach with a container stdin that stays open ends with the client's input; the input
// arrives, and another client can attach. With stdinOnce, the attach lasts until the container ends.
func TestAttachEndsWithItsInput(t *testing.T) {
	for _, tty := range []bool{false, true} {
		t.Run(fmt.Sprint("tty=", tty), func(t *testing.T) {
			r := newRig(t)
			sb, sc := r.runSandbox()
			id := r.runContainer(sb, sc, r.containerConfig("a",
				"while read x; do echo got $x; [ $x = end ] && exit 4; done; echo eof", func(c *cri.ContainerConfig) {
					c.Tty, c.Stdin, c.StdinOnce = tty, true, false
				}))
			for _, word := range []string{"one", "two", "end"} {
				out := &syncBuffer{}
				if err := r.Attach(r.ctx(), id, tty, agent.Streams{Stdin: strings.NewReader(word + "\n"),
					Stdout: out}); err != nil {
					t.Fatal(err)
				}
				if !strings.Contains(out.String(), "got "+word) {
					t.Errorf("output of the client that typed %q: %q", word, out.String())
				}
			}
			if st := r.waitExit(id); st.ExitCode != 4 {
				t.Errorf("exit code %d", st.ExitCode)
			}
		})
	}
}

// An attached client that reads slowly delays the container and loses nothing.
func TestSlowAttachLosesNothing(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	const lines = 60000
	id := r.runContainer(sb, sc, r.containerConfig("a", fmt.Sprintf("read go; seq 1 %d", lines),
		func(c *cri.ContainerConfig) { c.Stdin = true }))
	pr, pw := io.Pipe()
	in, typing := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := r.Attach(r.ctx(), id, false, agent.Streams{Stdin: in, Stdout: pw})
		pw.Close()
		done <- err
	}()
	if _, err := io.WriteString(typing, "go\n"); err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 10)
	if _, err := io.ReadFull(pr, first); err != nil {
		t.Fatal(err)
	}
	if err := wait.Delay(r.ctx(), 200*time.Millisecond); err != nil { // the pipes fill up in the meantime
		t.Fatal(err)
	}
	rest, err := io.ReadAll(pr)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(first)+string(rest), "\n"); n != lines {
		t.Errorf("%d of %d lines arrived", n, lines)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestPortForward(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	r.runContainer(sb, sc, r.containerConfig("a",
		"echo forwarded > /tmp/index.html; exec httpd -f -p 127.0.0.1:8081 -h /tmp"))
	var got string
	err := wait.For(testCtx(t, time.Minute), 20*time.Millisecond, func() error {
		ours, theirs := net.Pipe()
		done := make(chan error, 1)
		go func() { done <- r.PortForward(r.ctx(), sb, 8081, theirs) }()
		go func() { _, _ = io.WriteString(ours, "GET / HTTP/1.0\r\n\r\n") }()
		b, _ := io.ReadAll(ours)
		got = string(b)
		return <-done
	})
	if err != nil || !strings.Contains(got, "forwarded") {
		t.Errorf("%q, %v", got, err)
	}
	ours, theirs := net.Pipe()
	defer ours.Close()
	if err := r.PortForward(r.ctx(), sb, 1, theirs); err == nil || !strings.Contains(err.Error(), "port 1 ") {
		t.Errorf("a port on which nobody listens: %v", err)
	}
	if _, err := net.DialTimeout("tcp", "127.0.0.1:8081", time.Second); err == nil {
		t.Error("the container's port is open on the host")
	}
}

func TestLogRotation(t *testing.T) {
	r := newRig(t)
	r.stop()
	r.cfg.LogMaxSize, r.cfg.LogMaxFiles = 20_000, 3
	r.startRuntime()
	sb, sc := r.runSandbox()
	r.runToEnd(sb, sc, "a", "seq 1 50000")
	files, err := filepath.Glob(filepath.Join(r.logs, "a.log*"))
	if err != nil || len(files) != 3 {
		t.Errorf("files %v, %v", files, err)
	}
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil || st.Size() == 0 || st.Size() > 2_000_000 {
			t.Errorf("%s: %v, %v", f, st, err)
		}
	}
	r.expectLines("a", "stdout F 50000")
}

func TestReopenLog(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "echo before; read x; echo after",
		func(c *cri.ContainerConfig) { c.Stdin = true }))
	path := filepath.Join(r.logs, "a.log")
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the log", func() error {
		if b, _ := os.ReadFile(path); !bytes.Contains(b, []byte("before")) {
			return errors.New("nothing logged")
		}
		return nil
	})
	if err := os.Rename(path, path+".moved"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ReopenContainerLog(r.ctx(), &cri.ReopenContainerLogRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(r.ctx())
	defer cancel()
	if err := r.Attach(ctx, id, false, agent.Streams{Stdin: strings.NewReader("x\n"), Stdout: io.Discard}); err != nil {
		t.Fatal(err)
	}
	r.waitExit(id)
	if log := r.readLog("a"); log != "stdout F after\n" {
		t.Errorf("the new log is %q", log)
	}
}

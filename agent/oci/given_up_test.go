package oci

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/wait"
)

// An exec cancelled by its caller before it has started is killed when it starts.
func TestGivenUpExecIsKilled(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	id := r.run(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	c, err := r.Runtime.container(id)
	if err != nil {
		t.Fatal(err)
	}
	path, err := r.writeExec(c, []string{"/bin/sleep", "2000"}, false)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newPipes(agent.Streams{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.close()
	s, err := r.Runtime.sandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.rec.ShimPID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = e.run(ctx, r.Runtime, s.shim, &wire.Exec{Container: id, OCI: r.cfg.OCIPath, Bundle: path})
	if e := unix.Kill(s.rec.ShimPID, unix.SIGCONT); e != nil {
		t.Fatal(e)
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("giving up: %v", err)
	}
	// Requests are served in order: after a later command, the earlier one has been started.
	if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 20}); err != nil {
		t.Fatal(err)
	}
	err = wait.For(testCtx(t, time.Minute), 5*time.Millisecond, func() error {
		s.shim.mu.Lock()
		calls := len(s.shim.calls)
		s.shim.mu.Unlock()
		if n := len(r.cgroups.procs(c.rec.Cgroup)); n != 1 || calls != 0 {
			return fmt.Errorf("the container has %d processes, the shim %d open requests", n, calls)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestExecOutputIsBounded(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	id := r.run(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Timeout: 30,
		Cmd: []string{"/bin/sh", "-c", "yes out | head -c 1000000; yes err | head -c 1000000 >&2; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Stdout) != 16<<10 || len(out.Stderr) != 16<<10 || out.ExitCode != 3 || !strings.HasPrefix(string(out.Stdout), "out\n") {
		t.Errorf("kept %d and %d bytes, code %d", len(out.Stdout), len(out.Stderr), out.ExitCode)
	}
}

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
	"keelson.dev/keelson/internal/await"
)

// An exec cancelled by its caller before it has started is killed when it starts.
func TestGivenUpExecIsKilled(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	c, err := r.Runtime.findContainer(id)
	if err != nil {
		t.Fatal(err)
	}
	path, err := c.writeExecRequest([]string{"/bin/sleep", "2000"}, false)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newPipes(agent.Streams{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.closeStreams()
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.rec.ShimPID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = e.runCommand(ctx, r.Runtime, s.shim, &wire.Exec{Container: id, OCI: r.cfg.OCIPath, Bundle: path})
	if e := unix.Kill(s.rec.ShimPID, unix.SIGCONT); e != nil {
		t.Fatal(e)
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("giving up: %v", err)
	}
	// Requests are served in order: after a later command, the earlier one has been started.
	if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 20}); err !=
		nil {
		t.Fatal(err)
	}
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, "the end of the command", func() error {
		calls := s.shim.OpenRequests()
		if n := len(r.cgroups.ProcessIDs(c.rec.Cgroup)); n != 1 || calls != 0 {
			return fmt.Errorf("the container has %d processes, the shim %d open requests", n, calls)
		}
		return nil
	})
}

func TestExecOutputIsBounded(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	out, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Timeout: 30,
		Cmd: []string{"/bin/sh", "-c", "yes out | head -c 1000000; yes err | head -c 1000000 >&2; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Stdout) != 16<<10 || len(out.Stderr) != 16<<10 || out.ExitCode != 3 ||
		!strings.HasPrefix(string(out.Stdout), "out\n") {
		t.Errorf("kept %d and %d bytes, code %d", len(out.Stdout), len(out.Stderr), out.ExitCode)
	}
}

package oci

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/wait"
)

// At shutdown of the machine, containers that react to the signal end regularly, others are killed.
// The next agent has the exit statuses of both, also after a reboot.
func TestEndPods(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	polite := r.runContainer(sb, sc, r.containerConfig("polite",
		"trap 'exit 7' TERM; touch /ready; while true; do sleep 0.1; done"))
	deaf := r.runContainer(sb, sc, r.containerConfig("deaf",
		"trap '' TERM; touch /ready; while true; do sleep 0.1; done"))
	for _, id := range []string{polite, deaf} {
		if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id,
			Cmd: []string{"sh", "-c", "until [ -e /ready ]; do sleep 0.05; done"}, Timeout: 20}); err != nil {
			t.Fatal(err)
		}
	}
	tree := r.cgroups
	r.stop()
	// A frozen container does not react to signals.
	c, err := r.Runtime.findContainer(deaf)
	if err != nil {
		t.Fatal(err)
	}
	if tree.Unified {
		if err := os.WriteFile(filepath.Join(tree.CgroupPaths(c.rec.Cgroup)[0], "cgroup.freeze"), []byte("1"),
			0); err != nil {
			t.Fatal(err)
		}
	}
	// The shim reaps its children only after all have ended, as on a busy machine.
	shim, first := r.Runtime.sandboxes[sb].rec.ShimPID, tree.ProcessIDs(c.rec.Cgroup)
	if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() {
		_ = wait.For(ctx, 2*time.Millisecond, func() error {
			for _, pid := range first {
				if name, _ := readProcess(pid); name != "" {
					return errors.New("it runs")
				}
			}
			return nil
		})
		_ = unix.Kill(shim, unix.SIGCONT)
	})
	if err := EndPods(ctx, r.cfg, 6*time.Second); err != nil {
		// enough time for a shell to handle its signal on a busy machine
		t.Fatal(err)
	}
	if left := tree.ProcessIDs(""); len(left) > 0 {
		t.Errorf("%d processes remain", len(left))
	}
	for _, id := range []string{polite, deaf} {
		if _, err := os.Stat(r.paths.endFile(id)); err != nil {
			t.Errorf("of a container's end nothing is kept: %v", err)
		}
	}
	if err := os.RemoveAll(r.Runtime.paths.containerDir("")); err != nil { // as the reboot does
		t.Fatal(err)
	}
	r.startRuntime()
	for id, want := range map[string]int32{polite: 7, deaf: 137} {
		s, err := r.ContainerStatus(r.ctx(), &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil || s.Status.State != cri.ContainerState_CONTAINER_EXITED || s.Status.ExitCode != want {
			t.Errorf("%s: %v (%v), want exit code %d", s.GetStatus().GetMetadata().GetName(), s.GetStatus(), err, want)
		}
	}
}

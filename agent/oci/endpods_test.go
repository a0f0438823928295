package oci

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A machine goes down: who ends when asked has ended so, who does not or cannot is killed, and the next agent knows of both.
func TestEndPods(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	polite := r.run(sb, sc, r.containerConfig("polite", "trap 'exit 7' TERM; touch /ready; while true; do sleep 0.1; done"))
	deaf := r.run(sb, sc, r.containerConfig("deaf", "trap '' TERM; touch /ready; while true; do sleep 0.1; done"))
	for _, id := range []string{polite, deaf} {
		if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "until [ -e /ready ]; do sleep 0.05; done"}, Timeout: 20}); err != nil {
			t.Fatal(err)
		}
	}
	tree := r.cgroups
	r.stop()
	// One that is frozen hears nothing.
	if tree.unified {
		c, err := r.Runtime.container(deaf)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tree.paths(c.rec.Cgroup)[0], "cgroup.freeze"), []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := EndPods(ctx, r.cfg.CgroupRoot, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if left := tree.procs(""); len(left) > 0 {
		t.Errorf("%d processes are left", len(left))
	}
	r.start()
	for id, want := range map[string]int32{polite: 7, deaf: 137} {
		s, err := r.ContainerStatus(r.ctx(), &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil || s.Status.State != cri.ContainerState_CONTAINER_EXITED || id == polite && s.Status.ExitCode != want {
			t.Errorf("%s: %v (%v), want exit code %d", s.GetStatus().GetMetadata().GetName(), s.GetStatus(), err, want)
		}
	}
}

package oci

import (
	"fmt"
	"os"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// An idle shim keeps little of its program in memory and still serves.
func TestIdleShimLetsGo(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.eventually(func() error {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.rec.ShimPID))
			if err != nil {
				return err
			}
			_, rest, _ := strings.Cut(string(b), "RssFile:")
			kib := 0
			if _, err := fmt.Sscan(rest, &kib); err != nil || kib > 800 {
				return fmt.Errorf("%d KiB of the shim's program are in memory, %v", kib, err)
			}
			return nil
		})
		res, err := r.ExecSync(r.ctx(),
			&cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"echo", "served"}, Timeout: 20})
		if err != nil || string(res.Stdout) != "served\n" {
			t.Errorf("after it was idle: %v, %v", res, err)
		}
	}
}

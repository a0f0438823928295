package pod

import (
	"os"
	"path/filepath"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

// linkNames returns the names of the links in a directory.
func linkNames(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// A running container has a link to its log for log shippers, with pod and container ID. The link
// is removed with the pod. F16
func TestLogsAreLinked(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Paths.LogLinks = filepath.Join(t.TempDir(), "containers")
		p := simplePod("a")
		n.cluster.Put(p)
		n.startAgent()
		defer func() { n.stop() }()
		virtual.Wait()
		list, err := n.rt.ListContainers(t.Context(), &cri.ListContainersRequest{})
		if err != nil || len(list.Containers) != 1 {
			t.Fatalf("%d containers, %v", len(list.Containers), err)
		}
		want := p.Name + "_" + p.Namespace + "_" + p.Spec.Containers[0].Name + "-" + list.Containers[0].Id + ".log"
		if got := linkNames(t, n.cfg.Paths.LogLinks); len(got) != 1 || got[0] != want {
			t.Fatalf("links %q, want %s", got, want)
		}
		target, err := os.Readlink(filepath.Join(n.cfg.Paths.LogLinks, want))
		if log := filepath.Join(podfiles.LogDirectory(n.cfg.Paths.Logs, p),
			podfiles.ContainerLogPath(p.Spec.Containers[0].Name, 0)); err != nil || target != log {
			t.Errorf("the link leads to %s, want %s (%v)", target, log, err)
		}
		n.cluster.Delete(p)
		virtual.Wait()
		if got := linkNames(t, n.cfg.Paths.LogLinks); len(got) != 0 {
			t.Errorf("links of a pod that is gone: %q", got)
		}
	})
}

package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// A pod of a RuntimeClass runs on the nodes of the class, and its cgroup has the overhead in
// addition to its containers' limits. A pod with a handler that no node has reports it.
func TestRuntimeClass(t *testing.T) {
	w := newNamespace(t)
	node, err := w.cs.CoreV1().Nodes().Get(t.Context(), "w2", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var handlers []string
	for _, h := range node.Status.RuntimeHandlers {
		handlers = append(handlers, h.Name)
	}
	if !slices.Equal(handlers, []string{"", "keelson", "runc"}) || node.Status.Features == nil ||
		!*node.Status.Features.SupplementalGroupsPolicy {
		t.Errorf("the node has handlers %q and features %+v", handlers, node.Status.Features)
	}
	class := func(name, handler string) {
		t.Helper()
		c := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: handler,
			Overhead: &nodev1.Overhead{PodFixed: resourceList("50m", "32Mi")},
			Scheduling: &nodev1.Scheduling{NodeSelector: map[string]string{v1.LabelHostname: "w2"},
				Tolerations: []v1.Toleration{{Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoSchedule}}}}
		if _, err := w.cs.NodeV1().RuntimeClasses().Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := w.cs.NodeV1().RuntimeClasses().Delete(context.Background(), name, metav1.DeleteOptions{}); err !=
				nil {
				t.Error(err)
			}
		})
	}
	boxed, foreign := "boxed-"+w.ns, "foreign-"+w.ns
	class(boxed, "runc")
	class(foreign, "gvisor")

	p := sleeperPod("boxed")
	p.Spec.RuntimeClassName = &boxed
	p.Spec.Containers[0].Resources.Limits = resourceList("500m", "64Mi")
	w.createPod(p)
	p = w.awaitPod("boxed", requireReady)
	if p.Spec.NodeName != "w2" || p.Spec.Overhead.Memory().String() != "32Mi" ||
		p.Status.QOSClass != v1.PodQOSGuaranteed {
		t.Errorf("on %s with overhead %v, %s", p.Spec.NodeName, p.Spec.Overhead, p.Status.QOSClass)
	}
	if !slices.ContainsFunc(p.Spec.Tolerations, func(x v1.Toleration) bool {
		return x.Key == "" && x.Effect == v1.TaintEffectNoSchedule
	}) {
		t.Errorf("tolerations %v", p.Spec.Tolerations)
	}
	limits := podLimits(t, string(p.UID))
	if limits["memory"] != "100663296" || limits["cpu"] != "55000" {
		t.Errorf("the pod's cgroup is limited to %v, want 96Mi and 550m", limits)
	}
	out := testenv.Kctl(t, "-n", w.ns, "exec", "boxed", "--", "cat", "/proc/self/cgroup")
	if strings.TrimSpace(out) == "" {
		t.Error("nothing runs in the pod")
	}

	f := sleeperPod("foreign")
	f.Spec.RuntimeClassName = &foreign
	w.createPod(f)
	w.awaitEvent("foreign", "FailedCreatePodSandBox", `handler "gvisor"`, w.ns+"/foreign", "the node has keelson, runc")
	if now := w.getPod("foreign"); now.Status.Phase != v1.PodPending {
		t.Errorf("a pod without a runtime is %s", now.Status.Phase)
	}
}

func resourceList(cpu, memory string) v1.ResourceList {
	return v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory)}
}

// podLimits returns the limits of a pod's cgroup: bytes of memory, and microseconds of CPU in 100
// ms.
func podLimits(t *testing.T, uid string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() || d.Name() != "pod"+uid {
			return nil // cgroups come and go
		}
		for name, files := range map[string][]string{"memory": {"memory.limit_in_bytes", "memory.max"},
			"cpu": {"cpu.cfs_quota_us", "cpu.max"}} {
			for _, f := range files {
				if b, err := os.ReadFile(filepath.Join(path, f)); err == nil && len(strings.Fields(string(b))) > 0 {
					out[name] = strings.Fields(string(b))[0]
				}
			}
		}
		return fs.SkipDir
	})
	if err != nil || len(out) == 0 {
		t.Fatal(fmt.Errorf("no cgroup of pod %s: %v", uid, err))
	}
	return out
}

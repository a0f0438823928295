package attack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// countPodProcesses returns the kernel's number of processes and threads of a BestEffort pod on a
// host of the lab.
func countPodProcesses(t *testing.T, host string, pod *v1.Pod) (int, error) {
	tail := filepath.Join(testenv.Host(t, host).CgroupPath(), "kubepods", "besteffort", "pod"+string(pod.UID),
		"pids.current")
	for _, root := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		if raw, err := os.ReadFile(filepath.Join(root, tail)); err == nil {
			return strconv.Atoi(strings.TrimSpace(string(raw)))
		}
	}
	return 0, errors.New("no cgroup counts the pod's processes")
}

// A container that starts processes without end (one line of shell) ends at its pod's limit of 4096: the pod beside it
// starts and execs as ever, the node stays ready, and the pod can be deleted.
func TestForkBomb(t *testing.T) {
	cs, ns := guardCluster(t), testenv.Namespace(t)
	const node, most = "w1", 4096
	run := func(name, script string) {
		t.Helper()
		zero := int64(0)
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &zero,
				Containers: []v1.Container{{Name: "main", Image: "keelson.dev/tools:v1",
					Command: []string{"sh", "-c", script}}}}}
		if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) *v1.Pod {
		t.Helper()
		p, err := cs.CoreV1().Pods(ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	run("bomb", "(while true; do sleep 1000 & done); exec sleep 1000")
	testenv.Eventually(t, soon, func() error {
		n, err := countPodProcesses(t, node, get("bomb"))
		if n > most {
			t.Fatalf("the bomb has %d processes", n)
		}
		if err == nil && n < most-2 { // the process that was to fork last may have exited
			err = fmt.Errorf("the bomb has %d processes, of which it may have %d", n, most)
		}
		return err
	})
	run("neighbour", "sleep 1000")
	testenv.Eventually(t, soon, func() error {
		if p := get("neighbour"); p.Status.Phase != v1.PodRunning {
			return fmt.Errorf("the neighbor is %s", p.Status.Phase)
		}
		return nil
	})
	if out := testenv.Kctl(t, "-n", ns, "exec", "neighbour", "--", "sh", "-c", "echo well"); strings.TrimSpace(out) !=
		"well" {
		t.Errorf("the neighbor's output is %q", out)
	}
	n, err := cs.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue ||
			c.Type == v1.NodePIDPressure && c.Status != v1.ConditionFalse {
			t.Errorf("the node: %+v", c)
		}
	}
	if err := cs.CoreV1().Pods(ns).Delete(context.Background(), "bomb", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if _, err := cs.CoreV1().Pods(ns).Get(context.Background(), "bomb", metav1.GetOptions{}); err == nil {
			return errors.New("the bomb is still there")
		}
		return nil
	})
}

package attack

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// A container that makes its files huge before it restarts costs the agent no memory: the agent reads neither a sparse hosts file
// nor a sparse termination message whole. The next instance gets the hosts file that the agent writes. F100
func TestHugeFilesOfContainers(t *testing.T) {
	const node, size, most = "w1", "4G", 256 << 20
	cs, ns := guardCluster(t), testenv.Namespace(t)
	zero := int64(0)
	grow := "truncate -s " + size + " /etc/hosts /etc/resolv.conf /dev/termination-log; exit 1"
	script := "[ $(stat -c %s /etc/hosts) -lt 65536 ] || exit 7; [ -e /shared/grown ] && exec sleep 1000000; touch " +
		"/shared/grown; " + grow
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "huge"},
		Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &zero,
			Volumes: []v1.Volume{{Name: "shared", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}},
			Containers: []v1.Container{{Name: "main", Image: toolsImage, Command: []string{"sh", "-c", script},
				VolumeMounts: []v1.VolumeMount{{Name: "shared", MountPath: "/shared"}}}}}}
	pid, before := daemonPIDs(t)[node], residentMemory(t, node)
	clearPeak(t, node)
	if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*soon, func() error {
		p, err := cs.CoreV1().Pods(ns).Get(context.Background(), p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(p.Status.ContainerStatuses) == 0 {
			return fmt.Errorf("no status yet")
		}
		st := p.Status.ContainerStatuses[0]
		if end := st.LastTerminationState.Terminated; st.State.Running == nil || end == nil || end.ExitCode != 1 {
			return fmt.Errorf("the container did not restart: %+v", st)
		}
		return nil
	})
	if grown := peakMemory(t, node) - before; grown > most {
		t.Errorf("the agent took %d MiB for files of %s, at most %d are allowed", grown>>20, size, most>>20)
	}
	if now := daemonPIDs(t)[node]; now != pid {
		t.Errorf("the agent %d was replaced by %d", pid, now)
	}
	if out := testenv.Kctl(t, "-n", ns, "exec", p.Name, "--", "head", "-n", "1", "/etc/hosts"); !strings.HasPrefix(out,
		"# Kubernetes-managed hosts file.") {
		t.Errorf("the hosts file of the second instance begins with %q", out)
	}
}

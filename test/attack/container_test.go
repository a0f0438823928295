package attack

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

const toolsImage = "keelson.dev/tools:v1"

// scriptPod returns a pod that runs a script and then sleeps.
func scriptPod(name, script string) *v1.Pod {
	zero := int64(0)
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{
		TerminationGracePeriodSeconds: &zero,
		Containers: []v1.Container{{Name: "main", Image: toolsImage,
			Command: []string{"sh", "-c", script + "; sleep 1000000"}}},
	}}
}

// Containers that exceed their disk limits, wherever they can write, are evicted with Kubernetes'
// messages, and pods beside them stay. An image cannot block the node, and a pod's own writes
// affect only that pod.
func TestContainersThatFillTheDisk(t *testing.T) {
	cs := guardCluster(t)
	ns := testenv.Namespace(t)
	limit := v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse("4Mi")}}
	empty := func(p *v1.Pod, size string) {
		q := resource.MustParse(size)
		p.Spec.Volumes = []v1.Volume{{Name: "data",
			VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{SizeLimit: &q}}}}
		p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	}
	fill := func(path string) string { return "dd if=/dev/zero of=" + path + " bs=1048576 count=16" }
	volume, layer, etc, log, calm := scriptPod("volume", fill("/data/f")), scriptPod("layer", fill("/f")),
		scriptPod("etc", fill("/etc/resolv.conf")),
		scriptPod("log", "dd if=/dev/zero bs=1048576 count=6 | tr '\\0' 'x'"),
		scriptPod("calm", "dd if=/dev/zero of=/data/f bs=1024 count=512")
	empty(volume, "4Mi")
	empty(calm, "4Mi")
	for _, p := range []*v1.Pod{layer, etc, log} {
		p.Spec.Containers[0].Resources = limit
	}
	whole := "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. "
	want := map[string]string{"volume": `Usage of EmptyDir volume "data" exceeds the limit "4Mi". `, "layer": whole,
		"etc": whole, "log": whole, "calm": ""}
	for _, p := range []*v1.Pod{volume, layer, etc, log, calm} {
		if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, message := range want {
		if message == "" {
			continue
		}
		testenv.Eventually(t, 2*soon, func() error {
			p, err := cs.CoreV1().Pods(ns).Get(context.Background(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if p.Status.Phase != v1.PodFailed || p.Status.Reason != "Evicted" || p.Status.Message != message {
				return fmt.Errorf("pod %s is %s: %s %q", name, p.Status.Phase, p.Status.Reason, p.Status.Message)
			}
			return nil
		})
	}
	p, err := cs.CoreV1().Pods(ns).Get(context.Background(), "calm", metav1.GetOptions{})
	if err != nil || p.Status.Phase != v1.PodRunning {
		t.Errorf("the pod within its limits is %s: %q, %v", p.Status.Phase, p.Status.Message, err)
	}
	if out := testenv.Kctl(t, "-n", ns, "exec", "calm", "--", "head", "-n", "1", "/etc/hosts"); !strings.HasPrefix(out,
		"# Kubernetes-managed hosts file.") {
		t.Errorf("its hosts file begins with %q", out)
	}
}

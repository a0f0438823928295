// Package family gives a cluster that was made with IPv4 a second family while its pods run.
package family

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

const soon = 2 * time.Minute

func TestMain(m *testing.M) {
	os.Exit(testenv.MainOn(func(c *lab.Config) { c.ControlPlanes, c.Workers = 1, 2 }, m))
}

// createPod creates a pod with a server and a shell on a worker.
func createPod(t *testing.T, ns, name, worker string) *v1.Pod {
	t.Helper()
	cs, zero := testenv.Client(t), int64(0)
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": "web"}},
		Spec: v1.PodSpec{NodeName: worker, TerminationGracePeriodSeconds: &zero,
			Containers: []v1.Container{{Name: "web", Image: "keelson.dev/hello:v1",
				ReadinessProbe: &v1.Probe{PeriodSeconds: 1,
					ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
						Port: intstr.FromInt32(8080)}}}},
				{Name: "ask", Image: "keelson.dev/tools:v1", Command: []string{"sleep", "1000000"}}}}}
	if _, err := cs.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var got *v1.Pod
	testenv.Eventually(t, soon, func() (err error) {
		got, err = cs.CoreV1().Pods(ns).Get(t.Context(), name, metav1.GetOptions{})
		if err == nil && !slices.ContainsFunc(got.Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
		}) {
			err = fmt.Errorf("pod %s: %+v", name, got.Status)
		}
		return err
	})
	return got
}

func awaitReachable(t *testing.T, from *v1.Pod, address string, port int, want string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "-n", from.Namespace, "exec", from.Name, "-c",
			"ask", "--", "sh", "-c",
			fmt.Sprintf(`printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 3 %s %d`, address, port))
		if err == nil && !strings.Contains(out, want) {
			err = errors.New("another answer")
		}
		if err != nil {
			return fmt.Errorf("%s to %s: %w: %s", from.Name, address, err, out)
		}
		return nil
	})
}

// F108 F117: after the verb add-family on the replica, nodes have ranges of both families and new
// pods have addresses of both, also between nodes with an IPv4-only link. Existing pods keep
// running unchanged, and a Service has the requested families.
func TestSecondFamilyIsAdded(t *testing.T) {
	if !testenv.Owned() {
		t.Skip("a family stays: not on a lab that was up before")
	}
	cs, ns := testenv.Client(t), testenv.Namespace(t)
	old := createPod(t, ns, "old", "w1")
	replica := testenv.Host(t, "cp1")
	if err := testenv.Lab().Stop(t.Context(), "cp1"); err != nil {
		t.Fatal(err)
	}
	out, err := replica.Command(t.Context(), testenv.Lab().Config.BinDir+"/keelson-controlplane", "add-family",
		"--cluster-cidr="+lab.ClusterCIDR6, "--service-cidr="+lab.ServiceCIDR6).CombinedOutput()
	if err != nil {
		t.Fatalf("add-family: %v: %s", err, out)
	}
	if err := testenv.Lab().Restart(t.Context(), "cp1"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		nodes, err := cs.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range nodes.Items {
			if len(n.Spec.PodCIDRs) != 2 || n.Spec.PodCIDR != n.Spec.PodCIDRs[0] ||
				!strings.HasPrefix(n.Spec.PodCIDRs[1], "fd44:") {
				return fmt.Errorf("node %s has %v", n.Name, n.Spec.PodCIDRs)
			}
		}
		return nil
	})
	var young []*v1.Pod
	for _, w := range []string{"w1", "w2"} {
		// Its agent may receive the ranges slightly later than the Node shows them.
		testenv.Eventually(t, soon, func() error {
			p := createPod(t, ns, fmt.Sprintf("young-%s-%d", w, time.Now().UnixNano()), w)
			if len(p.Status.PodIPs) != 2 {
				return fmt.Errorf("pod %s has %v", p.Name, p.Status.PodIPs)
			}
			young = append(young, p)
			return nil
		})
	}
	for _, ip := range young[1].Status.PodIPs {
		awaitReachable(t, young[0], ip.IP, 8080, young[1].Name)
	}
	awaitReachable(t, young[0], old.Status.PodIP, 8080, "old")
	awaitReachable(t, old, young[1].Status.PodIP, 8080, young[1].Name)
	now, err := cs.CoreV1().Pods(ns).Get(t.Context(), "old", metav1.GetOptions{})
	if err != nil || len(now.Status.PodIPs) != 1 ||
		now.Status.ContainerStatuses[0].ContainerID != old.Status.ContainerStatuses[0].ContainerID ||
		now.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the previous pod is %+v, %v", now.Status, err)
	}
	both := v1.IPFamilyPolicyRequireDualStack
	var svc *v1.Service
	testenv.Eventually(t, soon, func() (err error) {
		svc, err = cs.CoreV1().Services(ns).Create(t.Context(),
			&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{
				IPFamilyPolicy: &both, Selector: map[string]string{"app": "web"},
				Ports: []v1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}}}, metav1.CreateOptions{})
		return err
	})
	for _, ip := range svc.Spec.ClusterIPs {
		awaitReachable(t, young[0], ip, 80, "hello from")
	}
}

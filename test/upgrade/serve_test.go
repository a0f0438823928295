package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv"
)

const (
	hello = "keelson.dev/hello:v1"
	tools = "keelson.dev/tools:v1"
)

// podContainers is the ID and the restart count of a pod's containers by name.
type podContainers map[string]string

func containersOf(p *v1.Pod) podContainers {
	out := podContainers{}
	for _, c := range p.Status.ContainerStatuses {
		out[c.Name] = fmt.Sprintf("%s started again %d times, ready %v", c.ContainerID, c.RestartCount, c.Ready)
	}
	return out
}

// createPods creates the pods that must survive the upgrade. Each node has a pod of a DaemonSet,
// behind a Service, and a pod with a server and a shell. One more pod may be moved.
func (l *upgradeTest) createPods() {
	labels := map[string]string{"app": "web"}
	web := v1.PodSpec{Containers: []v1.Container{serverContainer("main", 8080)}}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: web}}}
	if _, err := l.cs.AppsV1().DaemonSets(l.ns).Create(l.Context(), set, metav1.CreateOptions{}); err != nil {
		l.Fatal(err)
	}
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{Selector: labels,
		Ports: []v1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)}}}}
	svc, err := l.cs.CoreV1().Services(l.ns).Create(l.Context(), svc, metav1.CreateOptions{})
	if err != nil {
		l.Fatal(err)
	}
	l.requests = &serviceRequests{url: "http://" + svc.Spec.ClusterIP + "/"}
	l.createPod("old-w1", "w1")
	var names []string
	testenv.Eventually(l, soon, func() error {
		pods, err := l.cs.CoreV1().Pods(l.ns).List(l.Context(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil {
			return err
		}
		names = nil
		for i := range pods.Items {
			if isReady(&pods.Items[i]) {
				names = append(names, pods.Items[i].Name)
			}
		}
		if len(names) != 2 {
			return fmt.Errorf("Ready are %v", names)
		}
		return nil
	})
	l.old = map[string]podContainers{}
	for _, name := range names {
		l.old[name] = containersOf(l.getPod(name))
	}
	for _, node := range []string{"w1", "w2"} {
		testenv.Eventually(l, soon, func() error {
			return l.requests.sendRequest(l.Context(), testenv.HTTP(testenv.Host(l, node)))
		})
	}
}

func serverContainer(name string, port int32) v1.Container {
	return v1.Container{Name: name, Image: hello, Args: []string{fmt.Sprintf("-listen=:%d", port)},
		ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
			Port: intstr.FromInt32(port)}}, PeriodSeconds: 1, TimeoutSeconds: 10}}
}

// createPod creates a pod on a node with a server, and a shell that prints its name once.
func (l *upgradeTest) createPod(name, node string) {
	l.Helper()
	grace := int64(0)
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"made": "here"}},
		Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &grace,
			Containers: []v1.Container{serverContainer("web", 8080),
				{Name: "shell", Image: tools, Command: []string{"sh", "-c",
					"echo this is " + name + "; sleep 1000000"}}}}}
	if _, err := l.cs.CoreV1().Pods(l.ns).Create(l.Context(), p, metav1.CreateOptions{}); err != nil {
		l.Fatal(err)
	}
	l.awaitReady(name)
}

func (l *upgradeTest) awaitReady(name string) {
	l.Helper()
	testenv.Eventually(l, soon, func() error {
		if p := l.getPod(name); !isReady(p) {
			return fmt.Errorf("pod %s is not Ready: %+v", name, p.Status.ContainerStatuses)
		}
		return nil
	})
}

func (l *upgradeTest) getPod(name string) *v1.Pod {
	l.Helper()
	p, err := l.cs.CoreV1().Pods(l.ns).Get(l.Context(), name, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	return p
}

func isReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}

// checkNode checks that a node works: a new pod is started, responds, and reaches the Service by
// its name.
func (l *upgradeTest) checkNode(node string) (made string) {
	l.Helper()
	l.made++
	made = fmt.Sprintf("made-%d", l.made)
	l.createPod(made, node)
	l.checkPod(made)
	return made
}

// checkPod runs a command in a pod, reads its log, and requests the Service from it by name.
func (l *upgradeTest) checkPod(name string) {
	l.Helper()
	if out := testenv.Kctl(l, "-n", l.ns, "exec", name, "-c", "shell", "--", "sh", "-c",
		"echo $((6*7))"); strings.TrimSpace(out) != "42" {
		l.Errorf("exec in %s: %q", name, out)
	}
	testenv.Eventually(l, soon, func() error { // the container may have started without output yet
		if out := testenv.Kctl(l, "-n", l.ns, "logs", name, "-c", "shell"); !strings.Contains(out, "this is "+name) {
			return fmt.Errorf("logs of %s: %q", name, out)
		}
		return nil
	})
	testenv.Eventually(l, soon, func() error {
		out, err := testenv.Try(l, l.kctlPath(), "-n", l.ns, "exec", name, "-c", "shell", "--", "wget", "-T", "5",
			"-qO-", "http://web/")
		if err != nil || !strings.Contains(out, "hello from ") {
			return fmt.Errorf("the Service, requested by %s: %w: %s", name, errors.Join(err), out)
		}
		return nil
	})
}

// checkOldPod checks a pod that another release has started. It responds under the node's current
// release. When its server exits with a code, the container is restarted and the code is reported.
func (l *upgradeTest) checkOldPod(name, node string) {
	l.Helper()
	l.checkPod(name)
	before := l.getPod(name)
	times := restartCount(before, "web")
	client := testenv.HTTP(testenv.Host(l, node))
	resp, err := client.Get("http://" + before.Status.PodIP + ":8080/exit?code=7")
	if err == nil {
		resp.Body.Close()
	}
	testenv.Eventually(l, soon, func() error {
		p := l.getPod(name)
		for _, c := range p.Status.ContainerStatuses {
			end := c.LastTerminationState.Terminated
			if c.Name == "web" && (c.RestartCount != times+1 || !c.Ready || end == nil || end.ExitCode != 7) {
				return fmt.Errorf("%s of %s, which ended with code 7: %+v", c.Name, name, c)
			}
			if c.Name == "shell" && c.ContainerID != containerID(before, "shell") {
				return fmt.Errorf("the other container of %s was exchanged: %+v", name, c)
			}
		}
		return nil
	})
}

func restartCount(p *v1.Pod, container string) int32 {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c.RestartCount
		}
	}
	return -1
}

func containerID(p *v1.Pod, container string) string {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c.ContainerID
		}
	}
	return ""
}

// checkUntouched compares the current containers with the containers before the upgrade.
func (l *upgradeTest) checkUntouched() {
	l.Helper()
	for name, was := range l.old {
		testenv.Eventually(l, soon, func() error {
			// restarted containers stay restarted, and a container that is not ready may become
			// ready
			p := l.getPod(name)
			now := containersOf(p)
			for c, before := range was {
				if now[c] != before {
					return fmt.Errorf("container %s of %s on %s was %s, and is %s", c, name, p.Spec.NodeName,
						before, now[c])
				}
			}
			return nil
		})
	}
}

// serviceRequests sends requests to a Service continuously.
type serviceRequests struct {
	url string

	mu     sync.Mutex
	n      int
	failed []error
}

func (r *serviceRequests) sendRequest(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err == nil && !strings.HasPrefix(string(body), "hello from ") {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return err
}

func (r *serviceRequests) sendUntil(ctx context.Context, client *http.Client) {
	for wait.Delay(ctx, 10*time.Millisecond) == nil {
		err := r.sendRequest(context.WithoutCancel(ctx), client)
		r.mu.Lock()
		if r.n++; err != nil {
			r.failed = append(r.failed, err)
		}
		r.mu.Unlock()
	}
}

func (r *serviceRequests) checkResult(t *testing.T) {
	t.Helper()
	if len(r.failed) > 0 || r.n < 100 {
		t.Errorf("%d of %d requests to the Service failed: %v", len(r.failed), r.n,
			errors.Join(r.failed[:min(5, len(r.failed))]...))
	}
}

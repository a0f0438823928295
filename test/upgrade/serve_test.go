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

// containers are those of a pod, by their name: id and how often it was started again.
type containers map[string]string

func containersOf(p *v1.Pod) containers {
	out := containers{}
	for _, c := range p.Status.ContainerStatuses {
		out[c.Name] = fmt.Sprintf("%s started again %d times, ready %v", c.ContainerID, c.RestartCount, c.Ready)
	}
	return out
}

// prepare makes the pods that are to live through it all: of each node one of a DaemonSet, behind a Service, and a pod that
// answers and sleeps; and one that may be moved.
func (l *life) prepare() {
	labels := map[string]string{"app": "web"}
	web := v1.PodSpec{Containers: []v1.Container{server("main", 8080)}}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: web}}}
	if _, err := l.cs.AppsV1().DaemonSets(l.ns).Create(l.Context(), set, metav1.CreateOptions{}); err != nil {
		l.Fatal(err)
	}
	svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{Selector: labels,
		Ports: []v1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)}}}}
	svc, err := l.cs.CoreV1().Services(l.ns).Create(l.Context(), svc, metav1.CreateOptions{})
	if err != nil {
		l.Fatal(err)
	}
	l.asked = &requests{url: "http://" + svc.Spec.ClusterIP + "/"}
	l.create("old-w1", "w1")
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
	l.old = map[string]containers{}
	for _, name := range names {
		l.old[name] = containersOf(l.pod(name))
	}
	for _, node := range []string{"w1", "w2"} {
		testenv.Eventually(l, soon, func() error { return l.asked.ask(l.Context(), testenv.HTTP(testenv.Host(l, node))) })
	}
}

func server(name string, port int32) v1.Container {
	return v1.Container{Name: name, Image: hello, Args: []string{fmt.Sprintf("-listen=:%d", port)},
		ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(port)}}, PeriodSeconds: 1, TimeoutSeconds: 10}}
}

// create makes a pod on a node: a server, and beside it a shell that says its name once.
func (l *life) create(name, node string) {
	l.Helper()
	grace := int64(0)
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"made": "here"}}, Spec: v1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &grace,
		Containers: []v1.Container{server("web", 8080),
			{Name: "shell", Image: tools, Command: []string{"sh", "-c", "echo this is " + name + "; sleep 1000000"}}}}}
	if _, err := l.cs.CoreV1().Pods(l.ns).Create(l.Context(), p, metav1.CreateOptions{}); err != nil {
		l.Fatal(err)
	}
	l.ready(name)
}

func (l *life) ready(name string) {
	l.Helper()
	testenv.Eventually(l, soon, func() error {
		if p := l.pod(name); !isReady(p) {
			return fmt.Errorf("pod %s is not Ready: %+v", name, p.Status.ContainerStatuses)
		}
		return nil
	})
}

func (l *life) pod(name string) *v1.Pod {
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

// serves has a node do what nodes do: a pod is made there, answers for itself and reaches the Service by its name.
func (l *life) serves(node string) (made string) {
	l.Helper()
	l.made++
	made = fmt.Sprintf("made-%d", l.made)
	l.create(made, node)
	l.answers(made)
	return made
}

// answers has a command run in a pod, its log read, and the Service asked from within by its name.
func (l *life) answers(name string) {
	l.Helper()
	if out := testenv.Kctl(l, "-n", l.ns, "exec", name, "-c", "shell", "--", "sh", "-c", "echo $((6*7))"); strings.TrimSpace(out) != "42" {
		l.Errorf("exec in %s: %q", name, out)
	}
	testenv.Eventually(l, soon, func() error { // it may have begun, and said nothing yet
		if out := testenv.Kctl(l, "-n", l.ns, "logs", name, "-c", "shell"); !strings.Contains(out, "this is "+name) {
			return fmt.Errorf("logs of %s: %q", name, out)
		}
		return nil
	})
	testenv.Eventually(l, soon, func() error {
		out, err := testenv.Try(l, l.kctl(), "-n", l.ns, "exec", name, "-c", "shell", "--", "wget", "-T", "5", "-qO-", "http://web/")
		if err != nil || !strings.Contains(out, "hello from ") {
			return fmt.Errorf("the Service, asked by %s: %w: %s", name, errors.Join(err), out)
		}
		return nil
	})
}

// goesOn has a pod that another release's programs made answer under those that its node runs now, and its server end with a
// code: it is started again, and the code is known.
func (l *life) goesOn(name, node string) {
	l.Helper()
	l.answers(name)
	before := l.pod(name)
	times := restarts(before, "web")
	client := testenv.HTTP(testenv.Host(l, node))
	resp, err := client.Get("http://" + before.Status.PodIP + ":8080/exit?code=7")
	if err == nil {
		resp.Body.Close()
	}
	testenv.Eventually(l, soon, func() error {
		p := l.pod(name)
		for _, c := range p.Status.ContainerStatuses {
			end := c.LastTerminationState.Terminated
			if c.Name == "web" && (c.RestartCount != times+1 || !c.Ready || end == nil || end.ExitCode != 7) {
				return fmt.Errorf("%s of %s, which ended with code 7: %+v", c.Name, name, c)
			}
			if c.Name == "shell" && c.ContainerID != idOf(before, "shell") {
				return fmt.Errorf("the other container of %s was exchanged: %+v", name, c)
			}
		}
		return nil
	})
}

func restarts(p *v1.Pod, container string) int32 {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c.RestartCount
		}
	}
	return -1
}

func idOf(p *v1.Pod, container string) string {
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == container {
			return c.ContainerID
		}
	}
	return ""
}

// untouched compares the containers that were there before with those that are there now.
func (l *life) untouched() {
	l.Helper()
	for name, was := range l.old {
		testenv.Eventually(l, soon, func() error { // what was started again stays so, and what is not ready may be again
			p := l.pod(name)
			now := containersOf(p)
			for c, before := range was {
				if now[c] != before {
					return fmt.Errorf("container %s of %s on %s was %s, and is %s", c, name, p.Spec.NodeName, before, now[c])
				}
			}
			return nil
		})
	}
}

// requests asks a Service again and again.
type requests struct {
	url string

	mu     sync.Mutex
	n      int
	failed []error
}

func (r *requests) ask(ctx context.Context, client *http.Client) error {
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

func (r *requests) run(ctx context.Context, client *http.Client) {
	for wait.Delay(ctx, 10*time.Millisecond) == nil {
		err := r.ask(context.WithoutCancel(ctx), client)
		r.mu.Lock()
		if r.n++; err != nil {
			r.failed = append(r.failed, err)
		}
		r.mu.Unlock()
	}
}

func (r *requests) verdict(t *testing.T) {
	t.Helper()
	if len(r.failed) > 0 || r.n < 100 {
		t.Errorf("%d of %d requests to the Service failed: %v", len(r.failed), r.n, errors.Join(r.failed[:min(5, len(r.failed))]...))
	}
}

// Package e2e drives a real cluster in the lab, as users do: with kctl, with
// stock kubectl and with client-go.
package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/test/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

const (
	hello = "keelson.dev/hello:v1"
	tools = "keelson.dev/tools:v1"

	soon = 2 * time.Minute // for a machine that is three times slower and does other work; nothing here measures time
)

// newPod returns a pod with one container.
func newPod(name, image string, command ...string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(0)),
			Containers:                    []v1.Container{{Name: "main", Image: image, Command: command}},
		},
	}
}

// sleeperPod returns a pod with tools that sleeps.
func sleeperPod(name string) *v1.Pod { return newPod(name, tools, "sleep", "1000000") }

// webDeployment returns a Deployment of the hello image with a readiness probe.
func webDeployment(name string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: v1.PodSpec{Containers: []v1.Container{{
					Name: "main", Image: hello,
					Ports: []v1.ContainerPort{{Name: "http", ContainerPort: 8080}},
					ReadinessProbe: &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
						Port: intstr.FromString("http")}}, PeriodSeconds: 1, TimeoutSeconds: 10},
				}}},
			},
		},
	}
}

// webService returns a Service for the pods of a webDeployment.
func webService(name string, t v1.ServiceType) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.ServiceSpec{
			Type: t, Selector: map[string]string{"app": name},
			Ports: []v1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)}},
		},
	}
}

type testNamespace struct {
	*testing.T
	cs kubernetes.Interface
	ns string
}

// newNamespace creates the namespace of a test.
func newNamespace(t *testing.T) testNamespace {
	t.Helper()
	return testNamespace{t, testenv.Client(t), testenv.Namespace(t)}
}

func (w testNamespace) createPod(p *v1.Pod) *v1.Pod {
	w.Helper()
	out, err := w.cs.CoreV1().Pods(w.ns).Create(context.Background(), p, metav1.CreateOptions{})
	if err != nil {
		w.Fatalf("creating pod %s: %v", p.Name, err)
	}
	return out
}

func (w testNamespace) createWeb(d *appsv1.Deployment) {
	w.Helper()
	if _, err := w.cs.AppsV1().Deployments(w.ns).Create(context.Background(), d, metav1.CreateOptions{}); err != nil {
		w.Fatalf("creating deployment %s: %v", d.Name, err)
	}
}

func (w testNamespace) createService(s *v1.Service) *v1.Service {
	w.Helper()
	out, err := w.cs.CoreV1().Services(w.ns).Create(context.Background(), s, metav1.CreateOptions{})
	if err != nil {
		w.Fatalf("creating service %s: %v", s.Name, err)
	}
	return out
}

func (w testNamespace) getPod(name string) *v1.Pod {
	w.Helper()
	p, err := w.cs.CoreV1().Pods(w.ns).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		w.Fatalf("reading pod %s: %v", name, err)
	}
	return p
}

// livingPods lists the living pods of an app.
func (w testNamespace) livingPods(app string) []v1.Pod {
	w.Helper()
	l, err := w.cs.CoreV1().Pods(w.ns).List(context.Background(), metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		w.Fatalf("listing pods of %s: %v", app, err)
	}
	var out []v1.Pod
	for _, p := range l.Items {
		if p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

func podIsReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}

// awaitPod waits until cond returns nil for the pod.
func (w testNamespace) awaitPod(name string, cond func(*v1.Pod) error) *v1.Pod {
	w.Helper()
	var last *v1.Pod
	testenv.Eventually(w, soon, func() error {
		p, err := w.cs.CoreV1().Pods(w.ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		last = p
		return cond(p)
	})
	return last
}

func requireReady(p *v1.Pod) error {
	if !podIsReady(p) {
		return fmt.Errorf("pod %s is not Ready: phase %s, %+v", p.Name, p.Status.Phase, p.Status.ContainerStatuses)
	}
	return nil
}

// awaitReplicas waits until an app has exactly n living pods, all Ready.
func (w testNamespace) awaitReplicas(app string, n int) []v1.Pod {
	w.Helper()
	var out []v1.Pod
	testenv.Eventually(w, soon, func() error {
		out = w.livingPods(app)
		up := 0
		for i := range out {
			if podIsReady(&out[i]) {
				up++
			}
		}
		if len(out) != n || up != n {
			return fmt.Errorf("%s has %d pods, %d Ready; want %d", app, len(out), up, n)
		}
		return nil
	})
	return out
}

// awaitExec runs a script in a pod repeatedly until it succeeds and prints the fields of want. A
// program may not have written its output yet when its pod becomes Ready, and a command fails while
// the node's agent restarts.
func (w testNamespace) awaitExec(pod, want, script string) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		out, err := testenv.Try(w, kubectlPrograms()["kctl"], "-n", w.ns, "exec", pod, "--", "sh", "-c", script)
		if err == nil && strings.Join(strings.Fields(out), " ") != want {
			err = fmt.Errorf("want %q", want)
		}
		if err != nil {
			return fmt.Errorf("%s in pod %s: %w: %s", script, pod, err, out)
		}
		return nil
	})
}

// awaitKctl waits until the output of a kctl command contains all the words.
func (w testNamespace) awaitKctl(args []string, words ...string) (out string) {
	w.Helper()
	testenv.Eventually(w, soon, func() (err error) {
		if out, err = testenv.Try(w, kubectlPrograms()["kctl"], args...); err != nil {
			return fmt.Errorf("kctl %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return requireWords(out, words)
	})
	return out
}

// requireWords returns an error with the first word that a text does not contain.
func requireWords(text string, words []string) error {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return fmt.Errorf("%q is missing in:\n%s", word, text)
		}
	}
	return nil
}

// awaitEvent waits for events about an object with a reason and messages that contain all the
// words. It returns the messages, one per line. Events are written after the change that they
// report.
func (w testNamespace) awaitEvent(object, reason string, words ...string) string {
	w.Helper()
	var message string
	testenv.Eventually(w, soon, func() error {
		l, err := w.cs.CoreV1().Events(w.ns).List(context.Background(),
			metav1.ListOptions{FieldSelector: "involvedObject.name=" + object + ",reason=" + reason})
		if err != nil {
			return err
		}
		if len(l.Items) == 0 {
			return fmt.Errorf("no event %s about %s", reason, object)
		}
		var all []string
		for _, e := range l.Items {
			all = append(all, e.Message)
		}
		message = strings.Join(all, "\n")
		return requireWords(message, words)
	})
	return message
}

func newClient(cfg *rest.Config) (kubernetes.Interface, error) { return kubernetes.NewForConfig(cfg) }
